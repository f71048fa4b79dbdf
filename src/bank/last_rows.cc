#include "bank/last_rows.h"

#include <algorithm>

namespace omnikv {
namespace {

// The last tokens may begin anywhere in a block, and steps that ran ahead and are forgotten may
// have begun one more.
int64_t BlocksKept(const BankConfig& bank, const LastRowsConfig& config) {
  return std::min(bank.BlocksFor(config.tokens) + 2, bank.BlocksFor(bank.max_tokens));
}

}  // namespace

bool LastRows::Any(const LastRowsConfig& config) {
  return std::count(config.layers.begin(), config.layers.end(), true) > 0;
}

LastRowsConfig LastRows::ConfigOf(const BankConfig& bank, const DeclaredReads& reads,
                                  int32_t n_seqs) {
  LastRowsConfig config{.layers = std::vector<bool>(bank.layers.size()),
                        .tokens = reads.max_recent,
                        .n_seqs = n_seqs};
  for (size_t layer = 0; layer < bank.layers.size(); ++layer) {
    if (!bank.layers[layer].OnHost()) continue;
    config.layers[layer] = CanKeep(bank.layers[layer]) && layer < reads.selection_of.size() &&
                           reads.selection_of[layer] == kLastRows;
    if (!config.layers[layer]) return {.layers = std::vector<bool>(bank.layers.size())};
  }
  return config;
}

LastRowsConfig LastRows::OfSelections(const BankConfig& bank, const DeclaredReads& reads,
                                      int32_t n_seqs) {
  LastRowsConfig config{.layers = std::vector<bool>(bank.layers.size()),
                        .tokens = reads.max_recent,
                        .n_seqs = n_seqs};
  for (size_t layer = 0; layer < bank.layers.size(); ++layer) {
    config.layers[layer] = CanKeep(bank.layers[layer]) && reads.selection_of[layer] >= 0;
  }
  return config;
}

int64_t LastRows::KeptTokens(const BankConfig& bank, const LastRowsConfig& config) {
  return Any(config) ? BlocksKept(bank, config) * bank.block_tokens : 0;
}

size_t LastRows::Bytes(const BankConfig& bank, const LastRowsConfig& config) {
  if (!Any(config)) return 0;
  size_t row_bytes = 0;
  for (size_t layer = 0; layer < bank.layers.size(); ++layer) {
    if (config.layers[layer]) row_bytes += bank.RowBytes(layer);
  }
  const int64_t kept = KeptTokens(bank, config) * config.n_seqs;
  return OwnRows::Bytes(bank, SentHome(bank, config), config.n_seqs) +
         static_cast<size_t>(config.rows_before + kept) * row_bytes +
         static_cast<size_t>(bank.Rows().table_entries) * sizeof(int32_t);
}

std::vector<bool> LastRows::SentHome(const BankConfig& bank, const LastRowsConfig& config) {
  std::vector<bool> layers(bank.layers.size());
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    layers[layer] = config.of_steps && config.layers[layer] && bank.layers[layer].OnDisk();
  }
  return layers;
}

LastRows::LastRows(Backend& backend, Bank& bank, const LastRowsConfig& config)
    : backend_(backend),
      bank_(bank),
      blocks_(BlocksKept(bank.config(), config)),
      rows_before_(config.rows_before),
      rows_(bank.config().layers.size()),
      filled_(static_cast<size_t>(config.n_seqs)) {}

Result<std::unique_ptr<LastRows>> LastRows::Create(Backend& backend, Bank& bank,
                                                   LastRowsConfig config) {
  std::unique_ptr<LastRows> last(new LastRows(backend, bank, config));
  OKV_RETURN_IF_ERROR(last->Allocate(config));
  return last;
}

Status LastRows::Allocate(const LastRowsConfig& config) {
  const BankConfig& bank = bank_.config();
  const auto entries = static_cast<size_t>(bank.Rows().table_entries);
  OKV_ASSIGN_OR_RETURN(entries_, backend_.Allocate(entries * sizeof(int32_t), "last rows"));
  const std::vector<int32_t> any(entries);
  backend_.Upload(entries_.as(), any.data(), entries_.size());
  const auto rows =
      static_cast<size_t>(config.rows_before + KeptTokens(bank, config) * config.n_seqs);
  for (size_t layer = 0; layer < rows_.size(); ++layer) {
    if (!config.layers[layer]) continue;
    OKV_ASSIGN_OR_RETURN(rows_[layer], backend_.Allocate(rows * bank.RowBytes(layer), "last rows"));
  }
  const std::vector<bool> sent = SentHome(bank, config);
  if (std::count(sent.begin(), sent.end(), true) == 0) return {};
  OKV_ASSIGN_OR_RETURN(own_, OwnRows::Create(backend_, bank_, sent, config.n_seqs));
  return {};
}

void LastRows::BeginStep(const SeqMeta* seqs) {
  if (own_ != nullptr) own_->Begin(seqs);
}

void LastRows::EndStep() {
  if (own_ != nullptr) own_->SendHome();
}

KvView LastRows::View(int32_t layer) const {
  KvView view = bank_.View(layer).MovedTo(Blocks(layer));
  view.block_table = table();
  return view;
}

void LastRows::Begin(int32_t q, int32_t seq) {
  Forget(q);
  std::vector<int32_t> entries(static_cast<size_t>(bank_.config().Rows().seq_blocks));
  for (size_t i = 0; i < entries.size(); ++i) {
    entries[i] = static_cast<int32_t>(q * blocks_ + static_cast<int64_t>(i) % blocks_);
  }
  backend_.Upload(entries_.as<int32_t>() + bank_.TableOffset(seq), entries.data(),
                  entries.size() * sizeof(int32_t));
}

void LastRows::Fill(int32_t q, int32_t seq) {
  if (filled_[static_cast<size_t>(q)]) return;
  filled_[static_cast<size_t>(q)] = true;
  const int64_t bt = bank_.config().block_tokens;
  const int64_t length = bank_.Length(seq);
  const int64_t first = std::max<int64_t>(0, (length + bt - 1) / bt - blocks_);
  backend_.Join(Lane::kIn, Lane::kMain);
  backend_.Join(Lane::kIn, Lane::kOut);
  for (int32_t layer = 0; layer < bank_.n_layers(); ++layer) {
    if (!Has(layer)) continue;
    const auto row_bytes =
        static_cast<int64_t>(bank_.config().RowBytes(static_cast<size_t>(layer)));
    auto* const rows = Blocks(layer);
    for (int64_t t = first * bt; t < length; t += bt) {
      bank_.CopyFromHome(layer, seq, t, std::min(t + bt, length),
                         rows + (q * blocks_ + t / bt % blocks_) * bt * row_bytes);
    }
  }
  backend_.Join(Lane::kMain, Lane::kIn);
}

void LastRows::StoreHome(int32_t layer, const RowMeta* rows, const SeqMeta* seqs, int32_t n_rows) {
  const bool sent = own_ != nullptr && own_->Has(layer);
  backend_.Enqueue(StoreRowsArgs{.from = View(layer),
                                 .kv = bank_.View(layer),
                                 .slot = sent ? own_->Slot(layer) : KvSlot{},
                                 .rows = rows,
                                 .seqs = seqs,
                                 .n_rows = n_rows,
                                 .by_table = true});
}

}  // namespace omnikv
