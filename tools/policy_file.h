// Files of --policy-file: the section `long_context` of KTransformers' config.yaml, in its own
// spelling of keys and in that of its document.
#pragma once

#include <string>

#include "flags.h"
#include "omnikv/status.h"
#include "policy/settings.h"

namespace omnikv::tools {

// What such a file asks for. Fields that it does not name are empty or 0.
struct PolicyFile {
  SettingList settings;  // of policy blocks
  std::string kv_dtype;
  int64_t context = 0;  // tokens
  int32_t chunk = 0;    // rows
  int threads = 0;
};

// Of the text of a file, which `name` names in sentences. Keys that are missing have the values of
// the framework's own file. kInvalidArgument names the file, the key, the value and what was
// expected: for keys that are unknown, given twice or in both spellings, values of a wrong type,
// and values that there is nothing for here.
Result<PolicyFile> ParsePolicyFile(const std::string& name, const std::string& text);

// Reads what --policy-file names, if anything, into the flags that were not given: the policy is
// blocks. kInvalidArgument where another one was asked for.
Status ApplyPolicyFile(EngineFlags& engine, PolicyFlags& policy);

}  // namespace omnikv::tools
