// Recorded steps of several groups. There are many mixes of groups, and most do not come again, so
// a step is recorded at its fourth use, and the one that was not used for longest makes room.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "backend/backend.h"

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
    const auto [known, added] = steps_.try_emplace(key);
    Step& step = known->second;
    step.last_use = ++clock_;
    if (added && steps_.size() > kMost) {
      steps_.erase(std::min_element(steps_.begin(), steps_.end(), [](const auto& a, const auto& b) {
        return a.second.last_use < b.second.last_use;
      }));
    }
    return ++step.uses < kFirstRecorded ? nullptr : &step.recording;
  }
  // A group is closing.
  void Forget(int64_t group) {
    std::erase_if(steps_, [&](const auto& step) {
      return std::any_of(step.first.parts.begin(), step.first.parts.end(),
                         [&](const Part& part) { return part.group == group; });
    });
  }
  size_t size() const { return steps_.size(); }

 private:
  struct Step {
    std::unique_ptr<Recording> recording;
    int uses = 0;
    uint64_t last_use = 0;
  };

  std::map<Key, Step> steps_;
  uint64_t clock_ = 0;
};

}  // namespace omnikv
