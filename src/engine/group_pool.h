// The groups of a scheduler, by policy and settings.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>

#include "engine/row_group.h"

namespace omnikv {

// Thread-compatible.
class GroupPool {
 public:
  struct Group {
    std::string key;
    std::unique_ptr<RowGroup> rows;
    int32_t used = 0;        // members
    uint64_t last_step = 0;  // a number that only grows
  };

  // Groups have room for `seats` members at most.
  GroupPool(EngineCore& core, int32_t seats) : core_(core), seats_(seats) {}

  // What requests of one group have in common: the policy's name and its settings.
  static Result<std::string> KeyOf(const EngineCore& core, const PolicyOptions& policy);

  // One that has a free number, opened where there is none. Groups without members are closed where
  // a new one needs their memory. kResourceExhausted where that is not enough; what else keeps a
  // group from opening will always do so.
  Result<Group*> Get(const std::string& key, const PolicyOptions& policy);

  std::list<Group>& groups() { return groups_; }

 private:
  bool CloseIdle();

  EngineCore& core_;
  int32_t seats_;
  std::list<Group> groups_;
};

}  // namespace omnikv
