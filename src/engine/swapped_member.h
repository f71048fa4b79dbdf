// A member of a group that is preempted, and resumed as it was (docs/serving.md, "Preemption").
#pragma once

#include <cstdint>
#include <string>

#include "engine/row_group.h"
#include "io/scratch.h"

namespace omnikv {

// Thread-compatible.
class SwappedMember {
 public:
  // Copies what the bank and the policy have of a member to `folder` (empty: to memory); the member
  // stays. kFailed where the disk does not take it. REQUIRES one whose last prompt is computed, and
  // no steps ahead of the host.
  static Result<SwappedMember> Of(EngineCore& core, const RowGroup& rows, int32_t member,
                                  const std::string& folder);
  // A new member of `rows`, which has the same policy and settings as the group it was in.
  // kResourceExhausted where there is no room for it; kFailed where it cannot be read.
  Result<int32_t> Resume(EngineCore& core, RowGroup& rows) const;

  int64_t length() const { return image_.length; }  // tokens
  size_t bytes() const { return rows_.size() + state_.size(); }

 private:
  explicit SwappedMember(Scratch rows) : rows_(std::move(rows)) {}

  SequenceImage image_;
  int64_t prompt_length_ = 0;
  bool prompted_ = false;  // Residency::AwaitsChoice, negated
  std::string state_;      // of the policy
  Scratch rows_;           // Bank::Export
};

}  // namespace omnikv
