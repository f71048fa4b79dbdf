// Where the rows of one layer stand while a prompt passes layer by layer (docs/decisions/046): a
// row for each token of the prompt, in order. The layers use it one after another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "bank/bank.h"

namespace omnikv {

class PromptStage {
 public:
  // For a prompt of `tokens`, of the sequence `seq` of the bank. `pass_tokens` > 0: for passes of
  // up to so many rows behind it, too (docs/decisions/068). The choice that follows them is over
  // all layers, so the rows of each layer wait for it in the host's memory. REQUIRES layers of one
  // stream.
  static Result<PromptStage> Create(Backend& backend, Bank& bank, int32_t seq, int64_t tokens,
                                    int64_t pass_tokens = 0);
  // Bytes of the backend's memory that it takes in a bank of this shape.
  static size_t Bytes(const BankConfig& config, int64_t tokens) {
    return static_cast<size_t>(config.BlocksFor(tokens) * config.block_tokens) *
           config.LargestRowBytes();
  }

  // Bank::View of the layer, with its rows here.
  KvView View(int32_t layer) const;
  // Copies the rows of `layer` that stay, the last ones, to the bank.
  void CopyHome(int32_t layer) const;

  // Whether the rows of a layer wait in the host's memory for a choice.
  bool parks() const { return !parked_.empty(); }
  // Takes the rows of `layer` there, and back here once, which leaves none of them there. Waits for
  // the backend.
  void Park(int32_t layer);
  void Unpark(int32_t layer);

 private:
  PromptStage(Backend& backend, Bank& bank, int32_t seq, int64_t tokens)
      : backend_(&backend), bank_(&bank), seq_(seq), tokens_(tokens) {}

  Backend* backend_;
  Bank* bank_;
  int32_t seq_;
  int64_t tokens_;
  size_t rows_of_layer_ = 0;  // that it has room for
  Buffer rows_;               // [rows_of_layer] rows of the largest layer, of heads apart by head
  Buffer entries_;            // int32: a block table, of which those of seq_ are 0, 1, 2, ...
  std::vector<std::vector<std::byte>> parked_;  // by layer; none: nothing waits
};

}  // namespace omnikv
