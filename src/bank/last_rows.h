// The K/V rows of the last tokens of some host layers, in the device's memory. Their blocks take
// turns by position, so their block table stays as it is while a sequence grows, and ops see an
// ordinary view.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "bank/bank.h"
#include "bank/declared_reads.h"
#include "bank/own_rows.h"

namespace omnikv {

struct LastRowsConfig {
  std::vector<bool> layers;  // of the bank: whose rows. REQUIRES LastRows::CanKeep
  int64_t tokens = 0;        // that a step reads at most, back from its last row
  int32_t n_seqs = 1;        // of a group
  int64_t rows_before = 0;   // of others, in the memory of each layer
  // Decode steps alone write here (BeginStep, EndStep): their rows of layers on a disk go home
  // after all layers.
  bool of_steps = false;
};

// Enqueues at record time, like a policy. Thread-compatible.
class LastRows {
 public:
  // Whether all of a layer's K/V are on the host, in one row per token.
  static bool CanKeep(const LayerSpec& layer) { return layer.OneStream() && layer.OnHost(); }
  static bool Any(const LastRowsConfig& config);
  // Those of the host layers if steps read them so (kLastRows), and none where some host layer is
  // read otherwise: then all pass through stages.
  static LastRowsConfig ConfigOf(const BankConfig& bank, const DeclaredReads& reads,
                                 int32_t n_seqs);
  // Those of the host layers that read a selection.
  static LastRowsConfig OfSelections(const BankConfig& bank, const DeclaredReads& reads,
                                     int32_t n_seqs);
  static Result<std::unique_ptr<LastRows>> Create(Backend& backend, Bank& bank,
                                                  LastRowsConfig config);
  // Bytes of the backend's memory that Create takes.
  static size_t Bytes(const BankConfig& bank, const LastRowsConfig& config);
  // Tokens of each sequence whose rows a layer has.
  static int64_t KeptTokens(const BankConfig& bank, const LastRowsConfig& config);

  bool Has(int32_t layer) const { return rows_[static_cast<size_t>(layer)].size() != 0; }
  // By position as in Bank::View.
  KvView View(int32_t layer) const;
  // Its memory: rows_before rows, and then the blocks of table().
  std::byte* Memory(int32_t layer) const {
    return rows_[static_cast<size_t>(layer)].as<std::byte>();
  }
  const int32_t* table() const { return entries_.as<int32_t>(); }

  // Sequence q of SeqMeta is `seq` of the bank from now on.
  void Begin(int32_t q, int32_t seq);
  // Brings the rows of q, which is `seq` of the bank, from home, unless all that were written since
  // the last time were written here too.
  void Fill(int32_t q, int32_t seq);
  // Rows of q were written at home alone.
  void Forget(int32_t q) { filled_[static_cast<size_t>(q)] = false; }
  // With LastRowsConfig::of_steps: before the first layer of a step, and after the last one.
  void BeginStep(const SeqMeta* seqs);
  void EndStep();
  // Enqueues the way home of a step's own rows, which are in View.
  void StoreHome(int32_t layer, const RowMeta* rows, const SeqMeta* seqs, int32_t n_rows);

 private:
  LastRows(Backend& backend, Bank& bank, const LastRowsConfig& config);
  Status Allocate(const LastRowsConfig& config);
  // Whose own rows go home by OwnRows.
  static std::vector<bool> SentHome(const BankConfig& bank, const LastRowsConfig& config);
  // The first row of the layer's blocks.
  std::byte* Blocks(int32_t layer) const {
    const size_t row_bytes = bank_.config().RowBytes(static_cast<size_t>(layer));
    return Memory(layer) + static_cast<size_t>(rows_before_) * row_bytes;
  }

  Backend& backend_;
  Bank& bank_;
  int64_t blocks_;  // of a sequence
  int64_t rows_before_;
  Buffer entries_;                // int32: a block table as the bank's, of those blocks
  std::vector<Buffer> rows_;      // [layers]: blocks of all sequences; empty: not of this layer
  std::vector<bool> filled_;      // [n_seqs]
  std::unique_ptr<OwnRows> own_;  // null: all rows go home in their layer
};

}  // namespace omnikv
