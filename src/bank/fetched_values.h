// Layers whose steps read V of few tokens (DeclaredReads::few_values), where V is on the host: the
// rows that a step lists for each KV head come to one place on the device, K and V, and attention
// reads them there. Threads of the card that attend wait for each row in turn; a copy has all rows
// under way at once (docs/decisions/076).
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "bank/bank.h"
#include "bank/declared_reads.h"

namespace omnikv {

// Enqueues at record time, like a policy. Thread-compatible.
class FetchedValues {
 public:
  // `reads` is by layer of the bank. Sequences are numbered as SeqMeta is, below n_seqs.
  static bool Any(const BankConfig& bank, const DeclaredReads& reads);
  // REQUIRES Any.
  static Result<std::unique_ptr<FetchedValues>> Create(Backend& backend, Bank& bank,
                                                       const DeclaredReads& reads, int32_t n_seqs);
  // Bytes of the backend's memory that Create takes; 0 where there are none.
  static size_t Bytes(const BankConfig& bank, const DeclaredReads& reads, int32_t n_seqs);

  // Sequence q of SeqMeta is `seq` of the bank from now on.
  void Begin(int32_t q, int32_t seq);
  // Whether a decode step of `layer` whose plan this is reads V of few tokens there: the plan is
  // one list for each KV head of the view, of reads.max_tokens at most. Other plans read in place.
  static bool Takes(const BankConfig& bank, const DeclaredReads& reads, int32_t layer,
                    const AttendArgs& attend);
  // Enqueues the copy of what `attend` lists, and turns it to the copy, if Takes.
  void Fetch(int32_t layer, AttendArgs& attend) const;

 private:
  static bool Has(const BankConfig& bank, const DeclaredReads& reads, size_t layer);
  // Blocks of a sequence's copies.
  static int64_t Blocks(const BankConfig& bank, const DeclaredReads& reads) {
    return bank.BlocksFor(reads.max_tokens);
  }
  // Lists of a sequence, at most.
  static int64_t Lists(const BankConfig& bank, const DeclaredReads& reads);
  // Bytes of rows_; numbers of entries_ and of index_.
  static size_t RowsBytes(const BankConfig& bank, const DeclaredReads& reads, int32_t n_seqs);
  static size_t Entries(const BankConfig& bank) {
    return static_cast<size_t>(bank.Rows().table_entries);
  }
  static size_t Indices(const BankConfig& bank, const DeclaredReads& reads, int32_t n_seqs) {
    return static_cast<size_t>(n_seqs * Lists(bank, reads) * reads.max_tokens);
  }

  FetchedValues(Backend& backend, Bank& bank, const DeclaredReads& reads)
      : backend_(backend), bank_(bank), reads_(reads) {}
  Status Allocate(int32_t n_seqs);

  Backend& backend_;
  Bank& bank_;
  DeclaredReads reads_;
  // Of one layer at a time: [n_seqs, blocks, block_tokens] rows of value_lists times its KV heads.
  Buffer rows_;
  Buffer entries_;  // int32: a block table as the bank's, of those blocks
  Buffer index_;    // int32 [n_seqs, lists, max_tokens]: 0, 1, 2 and so on in each list
};

}  // namespace omnikv
