// Recorded steps of several groups. There are many mixes of groups, and most do not come again, so
// a step is recorded at its fourth use, and the one that was not used for longest makes room.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/recorded_steps.h"

namespace omnikv {

class MixedSteps {
 public:
  static constexpr size_t kMost = 32;  // mixes that are known
  static constexpr int kFirstRecorded = 4;

  // What makes a mix: per group its id and whatever else its recording depends on.
  struct Part {
    int64_t group;
    int32_t variant, n_rows;
    auto operator<=>(const Part&) const = default;
  };
  struct Key {
    std::vector<Part> parts;
    int32_t logits_row;
    int32_t end;
    auto operator<=>(const Key&) const = default;
  };

  // The place of the recording of `key`, which is used now; null until it is worth one.
  std::unique_ptr<Recording>* Use(const Key& key) {
    auto& step = steps_.Use(key);
    return step.uses < kFirstRecorded ? nullptr : &step.recording;
  }
  // A group is closing.
  void Forget(int64_t group) {
    steps_.Forget([&](const Key& key) {
      return std::any_of(key.parts.begin(), key.parts.end(),
                         [&](const Part& part) { return part.group == group; });
    });
  }
  size_t size() const { return steps_.size(); }

 private:
  RecordedSteps<Key> steps_{kMost};
};

}  // namespace omnikv
