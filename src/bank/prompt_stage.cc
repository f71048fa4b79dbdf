#include "bank/prompt_stage.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"

namespace omnikv {

Result<PromptStage> PromptStage::Create(Backend& backend, Bank& bank, int32_t seq, int64_t tokens,
                                        int64_t pass_tokens) {
  const BankConfig& config = bank.config();
  PromptStage stage(backend, bank, seq, tokens);
  int32_t heads = 1;  // that are apart
  for (const LayerSpec& layer : config.layers) {
    OKV_CHECK(layer.OneStream() || layer.HeadsApart());
    if (layer.HeadsApart()) heads = std::max(heads, layer.n_kv_heads);
  }
  const int64_t room = tokens + pass_tokens;
  const auto blocks = static_cast<size_t>(config.BlocksFor(room));
  stage.rows_of_layer_ = blocks * static_cast<size_t>(config.block_tokens);
  if (pass_tokens > 0) stage.parked_.resize(config.layers.size());
  OKV_ASSIGN_OR_RETURN(stage.rows_,
                       backend.Allocate(Bytes(config, room), "the K/V of a layer of the prompt"));
  // SeqMeta::table_off is the sequence's in the bank, and a head's own table that many entries
  // later.
  const auto stride = static_cast<size_t>(bank.HeadTableStride());
  const auto last = static_cast<size_t>(heads - 1) * stride;
  const auto offset = static_cast<size_t>(bank.TableOffset(seq));
  OKV_ASSIGN_OR_RETURN(
      stage.entries_, backend.Allocate((last + offset + blocks) * sizeof(int32_t), "block tables"));
  std::vector<int32_t> entries(blocks);
  std::iota(entries.begin(), entries.end(), 0);
  for (size_t at = offset; at <= last + offset; at += stride) {
    backend.Upload(stage.entries_.as<int32_t>() + at, entries.data(), blocks * sizeof(int32_t));
    for (int32_t& block : entries) block += static_cast<int32_t>(blocks);
  }
  return stage;
}

KvView PromptStage::View(int32_t layer) const {
  KvView view = bank_->View(layer).MovedTo(rows_.as<std::byte>());
  view.block_table = entries_.as<int32_t>();
  return view;
}

void PromptStage::CopyHome(int32_t layer) const {
  const int32_t table = bank_->config().layers[static_cast<size_t>(layer)].table();
  bank_->CopyHome(layer, seq_, bank_->FirstKept(table, tokens_), tokens_, rows_.as<std::byte>());
}

void PromptStage::Park(int32_t layer) {
  std::vector<std::byte>& to = parked_[static_cast<size_t>(layer)];
  to.resize(rows_of_layer_ * bank_->config().RowBytes(static_cast<size_t>(layer)));
  backend_->Download(to.data(), rows_.as<std::byte>(), to.size());
}

void PromptStage::Unpark(int32_t layer) {
  std::vector<std::byte> from = std::exchange(parked_[static_cast<size_t>(layer)], {});
  backend_->Upload(rows_.as<std::byte>(), from.data(), from.size());
}

}  // namespace omnikv
