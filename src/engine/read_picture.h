// What each layer of a decode step read, by position: counted from the plans that its attention
// got, for who wants to see it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "bank/slots.h"
#include "engine/row_group.h"
#include "model/forward.h"

namespace omnikv {

// What the last step of a sequence read. Rows are K and V of one token for one KV head, or for one
// query head where each has a list of its own.
struct ReadPicture {
  int64_t tokens = 0;      // of the sequence, the step's own included
  int64_t bin_tokens = 1;  // of a bin: bin b has positions [b * bin_tokens, (b + 1) * bin_tokens)
  // [n_layers of the model][bins]: of the bin's rows, the share that was read; what is lost is not.
  // Empty: of a layer whose plan does not tell, because the policy attends to a part of it by ops
  // of its own, as infllm does to far blocks.
  std::vector<std::vector<float>> shares;
  // [n_layers]: tokens, the mean over KV heads, or over query heads that have lists of their own.
  std::vector<double> attended;
  // Of K/V and of what the policy keeps beside them, in the layers with global attention: as
  // SessionStats::read_fraction counts.
  uint64_t bytes = 0;
  // Of the rows that the step selected, the share that was in the working sets, of all sequences of
  // the group together; none where no working set was asked.
  std::optional<double> hit_rate;
};

// Watches some sequences of one step. It waits for the backend in every layer, and its step is not
// recorded: for steps now and then. Thread-compatible; the groups outlive it.
class ReadWatch : public AttendWatch {
 public:
  explicit ReadWatch(EngineCore& core) : core_(core) {}

  // Before the step, in which `member` of `group` has a decode row: at most so many bins. Returns
  // the number of the sequence here. REQUIRES max_bins >= 1.
  int32_t Add(const RowGroup& group, int32_t member, int32_t max_bins);
  bool empty() const { return watched_.empty(); }
  // After the step.
  ReadPicture Take(int32_t number) const;

  void Planned(const StepGroup& group, int32_t layer, const AttendArgs& attend,
               int32_t apart) override;

 private:
  struct Watched {
    const RowGroup* group;
    int32_t member;
    int32_t max_bins;
    std::optional<SlotCounters> before;      // of the member
    std::vector<std::vector<int64_t>> rows;  // [n_layers][bins]: read
  };
  static int64_t BinTokens(int64_t tokens, int32_t max_bins);

  EngineCore& core_;
  std::vector<Watched> watched_;
};

}  // namespace omnikv
