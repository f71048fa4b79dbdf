// Attention to K/V where they are: in layers on the host, the host's processor attends to what a
// policy selected, while the device attends to the last tokens, of which it keeps a copy
// (docs/decisions/067). The framework of KTransformers computes all of it on the host.
#pragma once

#include <cstdint>
#include <memory>

#include "backend/backend.h"
#include "bank/bank.h"
#include "bank/declared_reads.h"
#include "bank/last_rows.h"

namespace omnikv {

struct AwayConfig {
  DeclaredReads reads;       // by layer of the bank
  bool attends = false;      // the host attends to selections
  bool sums_values = false;  // it sums V, where V alone are there (bank/summed_values.h)
  int32_t n_heads = 0;       // query heads of a layer
  int32_t n_seqs = 1;        // rows of a decode step, at most
};

// Enqueues at record time, like a policy. Thread-compatible.
class AwayAttention {
 public:
  // Of which layers the device keeps the last rows: the host attends to the others of these.
  static LastRowsConfig LastRowsOf(const BankConfig& bank, const AwayConfig& config);
  // REQUIRES that there are such layers.
  static Result<std::unique_ptr<AwayAttention>> Create(Backend& backend, Bank& bank,
                                                       const AwayConfig& config);
  // Bytes of the backend's memory that Create takes.
  static size_t Bytes(const BankConfig& bank, const AwayConfig& config);

  // The rows of the last tokens, those of a decode step included. Prompts write others.
  LastRows& last() { return *last_; }
  // Sends the host's part of `attend` out, and leaves the device its own. What is returned makes
  // one of both, after a join with Lane::kHost.
  MergeStatesArgs Split(int32_t layer, AttendArgs& attend);

 private:
  AwayAttention(Backend& backend, Bank& bank) : backend_(backend), bank_(bank) {}
  Status Allocate(const AwayConfig& config);

  Backend& backend_;
  Bank& bank_;
  std::unique_ptr<LastRows> last_;
  Buffer lse_;                // f32 [n_seqs, n_heads]: of the device's part
  Buffer away_o_, away_lse_;  // shared, f32 [n_seqs, n_heads, dv] and [n_seqs, n_heads]
};

}  // namespace omnikv
