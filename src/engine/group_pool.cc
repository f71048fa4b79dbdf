#include "engine/group_pool.h"

#include <fmt/format.h>

#include <algorithm>

#include "io/sha256.h"
#include "policy/number_table.h"
#include "policy/policy_info.h"

namespace omnikv {

Result<std::string> GroupPool::KeyOf(const EngineCore& core, const PolicyOptions& policy) {
  OKV_ASSIGN_OR_RETURN(const PolicyInfo* info,
                       ResolvePolicy(policy.name, core.config.name, GlobalLayers(core.config)));
  OKV_ASSIGN_OR_RETURN(const PolicySettings settings,
                       PolicySettings::Parse(info->name, info->settings, policy.settings));
  std::string key = fmt::format("{} {}{}", info->name, settings.ToString(),
                                policy.force_indices ? " force_indices" : "");
  // What a file says counts, and not its name: it may change.
  for (const SettingSpec& spec : info->settings) {
    if (spec.type != SettingType::kFile) continue;
    if (settings.IsAuto(spec.key) && core.config.path.empty()) continue;
    const auto text =
        ReadNumberTable(settings.IsAuto(spec.key) ? PathBesideModel(core.config.path, spec.beside)
                                                  : settings.Text(spec.key));
    if (!text.ok()) continue;  // there is none, or who opens it says so
    Sha256 hash;
    hash.Add(text->data(), text->size());
    key += fmt::format(" {} {}", spec.key, HexOf(hash.Value()));
  }
  return key;
}

bool GroupPool::CloseIdle() {
  auto idle = groups_.end();
  for (auto g = groups_.begin(); g != groups_.end(); ++g) {
    if (g->used == 0 && (idle == groups_.end() || g->last_step < idle->last_step)) idle = g;
  }
  if (idle == groups_.end()) return false;
  groups_.erase(idle);
  return true;
}

Result<GroupPool::Group*> GroupPool::Get(const std::string& key, const PolicyOptions& policy) {
  const auto open = std::find_if(groups_.begin(), groups_.end(), [&](const Group& g) {
    return g.key == key && g.used < g.rows->max_seqs();
  });
  if (open != groups_.end()) return &*open;
  const int32_t most = std::min({seats_, kMaxBatch, core_.work.max_rows, core_.work.max_out / 2});
  for (int32_t seats = std::max(1, most);;) {
    auto rows = RowGroup::Open(core_, policy, seats);
    if (rows.ok()) {
      groups_.push_back({.key = key, .rows = std::move(*rows)});
      return &groups_.back();
    }
    const StatusCode code = rows.status().code();
    if (code == StatusCode::kResourceExhausted && CloseIdle()) continue;
    if (seats == 1 ||
        (code != StatusCode::kResourceExhausted && code != StatusCode::kUnsupported)) {
      return rows.status();
    }
    // A policy of one sequence at a time refuses any larger number.
    seats = code == StatusCode::kUnsupported ? 1 : seats / 2;
  }
}

}  // namespace omnikv
