// Attention to K/V where they are: in layers on the host, the host's processor attends to what a
// policy selected, while the device attends to the last tokens, of which it keeps a copy
// (docs/decisions/067). The framework of KTransformers computes all of it on the host.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "bank/bank.h"
#include "bank/declared_reads.h"

namespace omnikv {

struct AwayConfig {
  DeclaredReads reads;  // by layer of the bank
  int32_t n_heads = 0;  // query heads of a layer; 0: nothing is attended to away
  int32_t n_seqs = 1;   // rows of a decode step, at most
};

// Enqueues at record time, like a policy. Thread-compatible.
class AwayAttention {
 public:
  // Whether the host attends to K/V of some layer.
  static bool Any(const BankConfig& bank, const AwayConfig& config);
  // REQUIRES Any.
  static Result<std::unique_ptr<AwayAttention>> Create(Backend& backend, Bank& bank,
                                                       const AwayConfig& config);
  // Bytes of the backend's memory that Create takes.
  static size_t Bytes(const BankConfig& bank, const AwayConfig& config);
  // Tokens of each sequence whose rows the device keeps in each of those layers.
  static int64_t KeptTokens(const BankConfig& bank, const AwayConfig& config);

  bool Has(int32_t layer) const { return rows_[static_cast<size_t>(layer)].size() != 0; }
  // The rows of the last tokens, by position as in Bank::View.
  KvView View(int32_t layer) const;
  // Brings those of `seq` to the device, before decode steps that follow other steps.
  void Fill(int32_t seq);
  // Enqueues the way home of a step's own rows, which are in View.
  void StoreHome(int32_t layer, const RowMeta* rows, const SeqMeta* seqs, int32_t n_rows);
  // Sends the host's part of `attend` out, and leaves the device its own. What is returned makes
  // one of both once the host is through (Await).
  MergeStatesArgs Split(int32_t layer, AttendArgs& attend);
  void Await() { backend_.Join(Lane::kMain, Lane::kHost); }

 private:
  AwayAttention(Backend& backend, Bank& bank, int64_t blocks)
      : backend_(backend), bank_(bank), blocks_(blocks) {}
  Status Allocate(const AwayConfig& config);

  Backend& backend_;
  Bank& bank_;
  int64_t blocks_;            // of a sequence, in which its tokens take turns
  Buffer entries_;            // int32: a block table as the bank's, of those blocks
  std::vector<Buffer> rows_;  // [layers]: blocks of all sequences; empty: the layer is read at home
  Buffer lse_;                // f32 [n_seqs, n_heads]: of the device's part
  Buffer away_o_, away_lse_;  // shared, f32 [n_seqs, n_heads, dv] and [n_seqs, n_heads]
};

}  // namespace omnikv
