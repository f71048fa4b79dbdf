#include "bank/bank.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/check.h"

namespace omnikv {
size_t Bank::BytesPerToken(const BankConfig& config) {
  size_t bytes = 0;
  for (size_t layer = 0; layer < config.layers.size(); ++layer) bytes += config.RowBytes(layer);
  return bytes;
}

Result<std::unique_ptr<Bank>> Bank::Create(Backend& backend, BankConfig config) {
  OKV_CHECK(config.block_tokens > 0 && config.max_tokens > 0 && config.max_seqs > 0 &&
            config.n_stages >= 2);
  config.pool_tokens = config.PoolTokens();
  const int64_t bt = config.block_tokens;
  // Positions, slots of the pool and entries of the tables are int32.
  const int64_t most = std::numeric_limits<int32_t>::max() - bt;
  if (std::max(config.max_tokens, config.pool_tokens) > most ||
      config.max_tokens > most / config.max_seqs) {
    return ResourceExhausted(
        fmt::format("{} sequences of {} tokens, {} in all, are too many, expected at most {}",
                    config.max_seqs, config.max_tokens, config.pool_tokens, most));
  }
  const int64_t max_blocks = (config.max_tokens + bt - 1) / bt;
  const int64_t n_blocks = (config.pool_tokens + bt - 1) / bt;
  std::unique_ptr<Bank> bank(new Bank(backend, std::move(config), static_cast<int32_t>(n_blocks),
                                      static_cast<int32_t>(max_blocks)));
  OKV_RETURN_IF_ERROR(bank->Allocate(static_cast<int32_t>(n_blocks)));
  return bank;
}

Bank::Bank(Backend& backend, BankConfig config, int32_t n_blocks, int32_t max_blocks)
    : backend_(backend),
      config_(std::move(config)),
      table_(n_blocks, config_.max_seqs, max_blocks),
      lengths_(static_cast<size_t>(config_.max_seqs), 0) {}

Status Bank::Allocate(int32_t n_blocks) {
  const auto tier = [&](TierKind kind) {
    std::vector<size_t> block_bytes;
    for (size_t layer = 0; layer < config_.layers.size(); ++layer) {
      const size_t bytes = config_.RowBytes(layer) * static_cast<size_t>(config_.block_tokens);
      block_bytes.push_back(config_.layers[layer].tier == kind ? bytes : 0);
    }
    return MakeTier(backend_, kind, n_blocks, std::move(block_bytes));
  };
  OKV_ASSIGN_OR_RETURN(own_, tier(TierKind::kOwn));
  OKV_ASSIGN_OR_RETURN(host_, tier(TierKind::kHost));
  const auto n_stages = static_cast<size_t>(config_.n_stages);
  if (const size_t bytes = StageBytes(config_) / n_stages; bytes > 0) {
    staged_.resize(n_stages);
    for (size_t i = 0; i < n_stages; ++i) {
      OKV_ASSIGN_OR_RETURN(Buffer stage, backend_.Allocate(bytes, "K/V on their way"));
      stages_.push_back(std::move(stage));
    }
  }
  const auto entries = static_cast<size_t>(table_.max_blocks()) * config_.max_seqs;
  OKV_ASSIGN_OR_RETURN(device_table_, backend_.Allocate(entries * sizeof(int32_t), "block tables"));
  return {};
}

Result<int32_t> Bank::NewSequence() {
  const int32_t seq = table_.NewSequence();
  if (seq < 0) {
    return ResourceExhausted(fmt::format("all {} sequences are open", config_.max_seqs));
  }
  lengths_[static_cast<size_t>(seq)] = 0;
  return seq;
}

Result<int32_t> Bank::Fork(int32_t seq) {
  const int32_t fork = table_.Fork(seq);
  if (fork < 0) {
    return ResourceExhausted(fmt::format("all {} sequences are open", config_.max_seqs));
  }
  lengths_[static_cast<size_t>(fork)] = Length(seq);
  Publish(fork, 0, table_.n_blocks(fork));
  return fork;
}

void Bank::Free(int32_t seq) {
  Unstage(seq, 0);
  table_.Free(seq);
  lengths_[static_cast<size_t>(seq)] = 0;
}

Status Bank::Append(int32_t seq, int64_t n) {
  const int64_t length = Length(seq);
  if (n < 0 || n > config_.max_tokens - length) {
    return ResourceExhausted(
        fmt::format("{} tokens in context and {} more exceed the context of {}", length, n,
                    config_.max_tokens));
  }
  const int32_t before = table_.n_blocks(seq);
  if (!table_.Grow(seq, BlocksFor(length + n))) {
    return ResourceExhausted(
        fmt::format("{} more tokens do not fit: {} of {} blocks of {} tokens are free", n,
                    table_.free_blocks(), table_.total_blocks(), config_.block_tokens));
  }
  // Only a partly filled last block can be both shared and written.
  int32_t first = before;
  if (n > 0 && length % config_.block_tokens != 0) {
    const auto last = static_cast<int32_t>(length / config_.block_tokens);
    const auto [from, to] = table_.MakeOwn(seq, last);
    if (from < 0) {
      table_.Shrink(seq, before);
      return ResourceExhausted(fmt::format("{} more tokens do not fit: no block is free", n));
    }
    if (from != to) {
      Unstage(seq, int64_t{last} * config_.block_tokens);  // its place is another
      own_->CopyBlock(from, to);
      host_->CopyBlock(from, to);
      first = last;
    }
  }
  Publish(seq, first, table_.n_blocks(seq));
  lengths_[static_cast<size_t>(seq)] = length + n;
  return {};
}

void Bank::Truncate(int32_t seq, int64_t length) {
  OKV_CHECK(length >= 0 && length <= Length(seq));
  Unstage(seq, length);
  table_.Shrink(seq, BlocksFor(length));
  lengths_[static_cast<size_t>(seq)] = length;
}

size_t Bank::OwnBytes(int32_t seq) const {
  const int32_t* blocks = table_.entries(seq);
  const auto held = std::count_if(blocks, blocks + table_.n_blocks(seq),
                                  [](int32_t block) { return block >= 0; });
  return own_->BytesFor(static_cast<int32_t>(held));
}

void Bank::Drop(int32_t seq, int64_t begin, int64_t end) {
  const auto last = static_cast<int32_t>(std::min(end, Length(seq)) / config_.block_tokens);
  if (const int32_t first = BlocksFor(begin); first < last) table_.Release(seq, first, last);
}

void Bank::FillWithNoise(int32_t seq) {
  Unstage(seq, 0);
  // A pattern of a prime number of rows, repeated, so that no two near rows are alike; values in
  // (-1, 1) from a multiplicative generator.
  constexpr int64_t kPatternRows = 1021;
  uint64_t state = 0x9e3779b97f4a7c15u;
  for (int32_t layer = 0; layer < static_cast<int32_t>(config_.layers.size()); ++layer) {
    const KvView view = View(layer);
    // A block's rows more than the pattern, so that each block is one piece of it.
    const auto row_bytes = static_cast<size_t>(view.row_bytes);
    std::vector<std::byte> pattern(static_cast<size_t>(kPatternRows) * row_bytes);
    const size_t values = pattern.size() / DTypeBytes(config_.dtype, 1);
    for (size_t i = 0; i < values; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const auto value = static_cast<float>(static_cast<int64_t>(state) >> 40) * 0x1p-23f;
      StoreFromF32(config_.dtype, pattern.data(), i, value);
    }
    pattern.reserve(pattern.size() + static_cast<size_t>(config_.block_tokens) * row_bytes);
    for (int64_t r = 0; r < config_.block_tokens; ++r) {
      const auto row = pattern.begin() + static_cast<ptrdiff_t>(r * view.row_bytes);
      pattern.insert(pattern.end(), row, row + static_cast<ptrdiff_t>(row_bytes));
    }
    for (int64_t t = 0; t < Length(seq); t += config_.block_tokens) {
      const int64_t block = table_.entries(seq)[t / config_.block_tokens];
      OKV_CHECK(block >= 0, "token {} was dropped", t);
      const int64_t n = std::min<int64_t>(config_.block_tokens, Length(seq) - t);
      backend_.Upload(view.base + block * config_.block_tokens * view.row_bytes,
                      pattern.data() + t % kPatternRows * view.row_bytes,
                      static_cast<size_t>(n) * row_bytes);
    }
  }
}

void Bank::Publish(int32_t seq, int32_t first, int32_t last) {
  if (last <= first) return;
  backend_.Upload(device_table_.as<int32_t>() + table_.Offset(seq) + first,
                  table_.entries(seq) + first, static_cast<size_t>(last - first) * sizeof(int32_t));
}

KvView Bank::View(int32_t layer) const {
  const LayerSpec& spec = config_.layers[static_cast<size_t>(layer)];
  const Tier& tier = spec.tier == TierKind::kOwn ? *own_ : *host_;
  return MakeKvView(tier.Base(layer), device_table_.as<int32_t>(), config_.block_tokens,
                    config_.dtype, spec.n_kv_heads, spec.dk, spec.dv);
}

size_t Bank::StageOf(int32_t layer) const {
  size_t before = 0;  // layers of the host tier
  for (int32_t i = 0; i < layer; ++i) before += OnHost(i) ? 1 : 0;
  return before % stages_.size();
}

void Bank::Unstage(int32_t seq, int64_t length) {
  bool any = false;
  for (Staged& s : staged_) {
    if (s.seq != seq || s.tokens <= length) continue;
    s.tokens = length;
    any = true;
  }
  if (any) backend_.Join(Lane::kMain, Lane::kIn);
}

KvView Bank::StageView(int32_t layer) const {
  KvView view = View(layer);
  view.base = Stage(layer);
  return view;
}

template <typename Visit>
void Bank::ForRuns(int32_t layer, int32_t seq, int64_t begin, int64_t end,
                   const Visit& visit) const {
  const int64_t row_bytes = View(layer).row_bytes;
  const int64_t bt = config_.block_tokens;
  const int32_t* blocks = table_.entries(seq);
  for (int64_t t = begin; t < end;) {
    const int64_t first = t;
    const int64_t row = blocks[t / bt] * bt + t % bt;
    do {
      t = std::min(end, (t / bt + 1) * bt);
    } while (t < end && blocks[t / bt] == blocks[t / bt - 1] + 1);
    visit(row * row_bytes, static_cast<size_t>((t - first) * row_bytes));
  }
}

void Bank::StageIn(int32_t layer, int32_t seq, int64_t n) {
  Staged& s = staged_[StageOf(layer)];
  if (s.layer != layer || s.seq != seq) s = {.layer = layer, .seq = seq};
  if (s.tokens >= n) return;
  ForRuns(layer, seq, s.tokens, n, [&](int64_t offset, size_t bytes) {
    backend_.Copy(Stage(layer) + offset, host_->Base(layer) + offset, bytes, Lane::kIn);
    bytes_staged_ += bytes;
  });
  s.tokens = n;
  backend_.Signal(StageOf(layer), Lane::kIn);
}

void Bank::StageOut(int32_t layer, int32_t seq, int64_t begin, int64_t end) {
  ForRuns(layer, seq, begin, end, [&](int64_t offset, size_t bytes) {
    backend_.Copy(host_->Base(layer) + offset, Stage(layer) + offset, bytes, Lane::kOut);
  });
  Staged& s = staged_[StageOf(layer)];  // the step wrote there
  if (s.layer == layer && s.seq == seq && s.tokens == begin) s.tokens = end;
}

size_t Bank::StageBytes(const BankConfig& config) {
  size_t largest = 0;  // row
  for (size_t layer = 0; layer < config.layers.size(); ++layer) {
    if (config.layers[layer].tier != TierKind::kHost) continue;
    largest = std::max(largest, config.RowBytes(layer));
  }
  const int64_t blocks = (config.PoolTokens() + config.block_tokens - 1) / config.block_tokens;
  return static_cast<size_t>(config.n_stages) * largest *
         static_cast<size_t>(blocks * config.block_tokens);
}

}  // namespace omnikv
