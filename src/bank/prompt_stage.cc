#include "bank/prompt_stage.h"

#include <numeric>
#include <utility>
#include <vector>

#include "base/check.h"

namespace omnikv {

Result<PromptStage> PromptStage::Create(Backend& backend, Bank& bank, int32_t seq, int64_t tokens) {
  const BankConfig& config = bank.config();
  for (const LayerSpec& layer : config.layers) OKV_CHECK(layer.OneStream());
  PromptStage stage(bank, seq, tokens);
  const auto blocks = static_cast<size_t>(config.BlocksFor(tokens));
  OKV_ASSIGN_OR_RETURN(
      stage.rows_,
      backend.Allocate(blocks * static_cast<size_t>(config.block_tokens) * config.LargestRowBytes(),
                       "the K/V of a layer of the prompt"));
  // SeqMeta::table_off is the sequence's in the bank.
  const auto offset = static_cast<size_t>(bank.TableOffset(seq));
  OKV_ASSIGN_OR_RETURN(stage.entries_,
                       backend.Allocate((offset + blocks) * sizeof(int32_t), "block tables"));
  std::vector<int32_t> entries(blocks);
  std::iota(entries.begin(), entries.end(), 0);
  backend.Upload(stage.entries_.as<int32_t>() + offset, entries.data(), blocks * sizeof(int32_t));
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

}  // namespace omnikv
