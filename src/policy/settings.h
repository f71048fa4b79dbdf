// Configuration of policies: one flat list of typed keys with defaults, the same names on the
// command line (--set key=value), in requests and in results.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "omnikv/status.h"

namespace omnikv {

enum class SettingType : uint8_t { kInt, kFloat, kBool, kChoice, kIntList, kFile };

struct SettingSpec {
  std::string key;
  SettingType type = SettingType::kInt;
  std::string default_value;         // as text; "auto" where the policy decides; kFile: a path
  std::string help;                  // one line, with the unit
  double min = 0, max = 0;           // kInt, kFloat, elements of kIntList; inclusive
  std::vector<std::string> choices;  // kChoice; kInt: words that may stand instead of a number
  bool allow_auto = false;
  std::string beside = {};  // kFile: where it is auto, the file of that name beside the model's
};

// Key-value pairs as a user gave them, in order.
using SettingList = std::vector<std::pair<std::string, std::string>>;

// Keeps::room.
inline SettingSpec RoomSetting() {
  return {.key = "room",
          .type = SettingType::kInt,
          .default_value = "4096",
          .help = "tokens of later turns and answers that a layer has room for besides",
          .min = 0,
          .max = 1e9};
}

// Whether a later turn ends in a choice too (Keeps::first_prompt).
inline SettingSpec TurnSetting() {
  return {.key = "turn",
          .type = SettingType::kChoice,
          .default_value = "append",
          .help = "later turns: keep all of their tokens, or choose anew after each",
          .choices = {"append", "recompress"}};
}

// Checked settings of one policy. Every key of the specification has a value.
class PolicySettings {
 public:
  // kInvalidArgument names the policy, the key, the value and what was expected.
  static Result<PolicySettings> Parse(std::string_view policy,
                                      const std::vector<SettingSpec>& specs,
                                      const SettingList& given);

  bool IsAuto(const std::string& key) const { return Text(key) == "auto"; }
  int64_t Int(const std::string& key) const;
  double Float(const std::string& key) const;
  bool Bool(const std::string& key) const { return Int(key) != 0; }
  const std::string& Text(const std::string& key) const;
  std::vector<int32_t> IntList(const std::string& key) const;
  // Replaces an "auto" by what the policy decided, so that results can say it.
  void Resolve(const std::string& key, std::string value) { values_[key] = std::move(value); }

  const std::map<std::string, std::string>& values() const { return values_; }
  std::string ToString() const;  // "budget=1024 filters=2,13 ..."

 private:
  std::map<std::string, std::string> values_;
};

}  // namespace omnikv
