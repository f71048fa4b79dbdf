// Layers whose steps read V of few tokens (DeclaredReads::few_values), where V is on the host: the
// host's processor sums the rows of V that a step lists, by the logits that the device has of them.
// What comes back are outputs, and no row crosses the bus (docs/decisions/089). FetchedValues
// brings the rows, as KCache's paper does.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "backend/backend.h"
#include "bank/away_attention.h"
#include "bank/bank.h"

namespace omnikv {

// Enqueues at record time, like a policy. Thread-compatible.
class SummedValues {
 public:
  // Whether `config` wants this and there are such layers.
  static bool Any(const BankConfig& bank, const AwayConfig& config);
  // REQUIRES Any. Takes shared memory alone.
  static Result<std::unique_ptr<SummedValues>> Create(Backend& backend, Bank& bank,
                                                      const AwayConfig& config);

  // Sends out what is to be summed for `attend`, if the layer is one of these and `attend` knows
  // its logits: nothing of it is left to the device then. What is returned brings the outputs to
  // attend.o, after a join with Lane::kHost.
  std::optional<PickHeadsArgs> Send(int32_t layer, const AttendArgs& attend);

 private:
  SummedValues(Backend& backend, Bank& bank, const AwayConfig& config)
      : backend_(backend), bank_(bank), reads_(config.reads) {}
  Status Allocate(const AwayConfig& config);

  Backend& backend_;
  Bank& bank_;
  DeclaredReads reads_;
  // In shared memory, so that the device's own is left to K/V.
  Buffer logits_;  // f32 [n_seqs, n_heads, max_tokens]: of the listed tokens
  Buffer away_o_;  // f32 [n_seqs, n_heads, dv]
};

}  // namespace omnikv
