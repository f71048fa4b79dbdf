#include "saved_context.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/printable.h"
#include "engine/core.h"
#include "policy/policy_info.h"

namespace omnikv::tools {

Result<ContextHead> ReadLoadFile(const std::string& path) {
  auto head = ReadContextHead(path);
  if (!head.ok()) return head.status().Prefixed("--load");
  return head;
}

Status CheckSaveFile(const std::string& path) {
  // One that goes without a Commit leaves nothing.
  return CheckedFileWriter::Create(path, kContextFile, "").status().Prefixed("--save");
}

Result<PolicyOptions> LoadedPolicy(const std::string& path, const SavedContext& saved,
                                   PolicyFlags flags) {
  const auto refuse = [&](const std::string& asked, const std::string& there) {
    return InvalidArgument(
        fmt::format("{}, but the context of --load {} has {}, which it keeps: leave it out", asked,
                    Printable(path), there));
  };
  if (flags.policy != "auto" && flags.policy != saved.policy.name) {
    return refuse(fmt::format("{} is '{}'", flags.file.empty() ? "--policy" : "--policy-file",
                              flags.file.empty() ? flags.policy : flags.file),
                  "policy " + Printable(saved.policy.name));
  }
  flags.policy = saved.policy.name;
  const auto info = FindPolicy(saved.policy.name);
  if (!info.ok()) return info.status().Prefixed("--load: " + path);
  const auto settings =
      PolicySettings::Parse((*info)->name, (*info)->settings, saved.policy.settings);
  if (!settings.ok()) return settings.status().Prefixed("--load: " + path);
  OKV_ASSIGN_OR_RETURN(const PolicyOptions given, ToPolicyOptions(flags));
  OKV_ASSIGN_OR_RETURN(const PolicySettings asked,
                       PolicySettings::Parse((*info)->name, (*info)->settings, given.settings));
  for (const auto& [key, text] : given.settings) {
    // What the policy chose where its settings leave that open counts, too.
    const bool chosen =
        fmt::format(" {} ", saved.resolved).find(fmt::format(" {}={} ", key, asked.Text(key))) !=
        std::string::npos;
    if (asked.Text(key) == settings->Text(key) || chosen) continue;
    return refuse(fmt::format("--set is '{}={}'", key, text),
                  fmt::format("{}={}", key, settings->Text(key)));
  }
  return saved.policy;
}

bool EndsAnswer(const Engine& engine, int32_t pending) {
  const std::vector<int32_t>& ends = CoreOf(engine).config.eos_ids;
  return std::find(ends.begin(), ends.end(), pending) != ends.end();
}

std::vector<int32_t> GoOn(const Engine& engine, std::span<const int32_t> tokens, int32_t pending,
                          std::span<const int32_t> more) {
  std::vector<int32_t> all(tokens.begin(), tokens.end());
  if (pending >= 0 && !EndsAnswer(engine, pending)) all.push_back(pending);
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace omnikv::tools
