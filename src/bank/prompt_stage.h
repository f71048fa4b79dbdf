// Where the rows of one layer stand while a prompt passes layer by layer (docs/decisions/046): a
// row for each token of the prompt, in order. The layers use it one after another.
#pragma once

#include <cstdint>

#include "backend/backend.h"
#include "bank/bank.h"

namespace omnikv {

class PromptStage {
 public:
  // For a prompt of `tokens`, of the sequence `seq` of the bank. REQUIRES layers of one stream.
  static Result<PromptStage> Create(Backend& backend, Bank& bank, int32_t seq, int64_t tokens);

  // Bank::View of the layer, with its rows here.
  KvView View(int32_t layer) const;
  // Copies the rows of `layer` that stay, the last ones, to the bank.
  void CopyHome(int32_t layer) const;

 private:
  PromptStage(Bank& bank, int32_t seq, int64_t tokens) : bank_(&bank), seq_(seq), tokens_(tokens) {}

  Bank* bank_;
  int32_t seq_;
  int64_t tokens_;
  Buffer rows_;     // [tokens] rows of the largest layer
  Buffer entries_;  // int32: a block table, of which those of seq_ are 0, 1, 2, ...
};

}  // namespace omnikv
