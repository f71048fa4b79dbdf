// Steps that may be recorded, by what makes their recordings differ. They are bounded: the one that
// was not used for longest makes room.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>

#include "backend/backend.h"

namespace omnikv {

// Thread-compatible.
template <typename Key>
class RecordedSteps {
 public:
  struct Step {
    std::unique_ptr<Recording> recording;  // null: there is none yet
    int uses = 0;
    uint64_t last_use = 0;
  };

  explicit RecordedSteps(size_t most) : most_(most) {}  // at least one

  // The step of `key`, which is used now. It stays where it is until it makes room for another.
  Step& Use(const Key& key) {
    Step& step = steps_[key];
    step.last_use = ++clock_;
    ++step.uses;
    if (steps_.size() > most_) {
      steps_.erase(std::min_element(steps_.begin(), steps_.end(), [](const auto& a, const auto& b) {
        return a.second.last_use < b.second.last_use;
      }));
    }
    return step;
  }
  // Of those whose key `is` is true of.
  template <typename Is>
  void Forget(const Is& is) {
    std::erase_if(steps_, [&](const auto& step) { return is(step.first); });
  }
  size_t size() const { return steps_.size(); }

 private:
  size_t most_;
  std::map<Key, Step> steps_;
  uint64_t clock_ = 0;
};

}  // namespace omnikv
