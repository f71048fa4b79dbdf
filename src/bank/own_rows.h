// The way to a disk of the K/V rows that a decode step makes. Kernels of a device reach no file, so
// the rows go to a place beside, one of each sequence, and from there home by FetchRows, which
// does.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "bank/bank.h"
#include "bank/slots.h"

namespace omnikv {

// Enqueues at record time, like a policy. Thread-compatible.
class OwnRows {
 public:
  // `layers` of the bank, which have one stream each; of a group of `n_seqs` sequences.
  static Result<std::unique_ptr<OwnRows>> Create(Backend& backend, const Bank& bank,
                                                 std::vector<bool> layers, int32_t n_seqs);
  // Bytes of the backend's memory that Create takes.
  static size_t Bytes(const BankConfig& bank, const std::vector<bool>& layers, int32_t n_seqs);

  bool Has(int32_t layer) const { return rows_[static_cast<size_t>(layer)].size() != 0; }
  // Before the layers of a decode step over these sequences, which have a row each, or none.
  void Begin(const SeqMeta* seqs);
  // Where a layer's rows are to go in such a step.
  KvSlot Slot(int32_t layer) const;
  // After all of them: takes the rows home, on Lane::kOut.
  void SendHome();

 private:
  OwnRows(Backend& backend, const Bank& bank, int32_t n_seqs)
      : backend_(backend), bank_(bank), n_seqs_(n_seqs), slots_(backend) {}
  Status Allocate(const std::vector<bool>& layers);

  Backend& backend_;
  const Bank& bank_;
  int32_t n_seqs_;
  Slots slots_;               // of one group: a slot for each sequence, which its last token takes
  Buffer nothing_;            // int32 [n_seqs]: zeros
  Buffer bounds_;             // int32 [n_seqs, 2]: the last token
  std::vector<Buffer> rows_;  // [layers]: a row of each sequence; empty: not of this layer
};

}  // namespace omnikv
