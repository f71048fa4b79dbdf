#include "policy_file.h"

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <optional>
#include <vector>

#include "base/log.h"
#include "base/printable.h"
#include "base/thread_pool.h"
#include "model/limits.h"

namespace omnikv::tools {
namespace {

constexpr size_t kMaxBytes = size_t{1} << 16;  // of a file; the framework's own has 1,300
constexpr const char* kSection = "long_context";

// A key of the section.
struct Key {
  const char* name;
  const char* other;  // the document's name for it; null: the same
};
constexpr std::array<Key, 16> kKeys = {{{"chunk_size", nullptr},
                                        {"max_seq_len", nullptr},
                                        {"block_size", nullptr},
                                        {"local_windows_len", nullptr},
                                        {"second_select_num", "second_block_count"},
                                        {"threads_num", nullptr},
                                        {"anchor_type", "representative_type"},
                                        {"kv_type", nullptr},
                                        {"dense_layer_num", nullptr},
                                        {"anchor_num", "representative_num"},
                                        {"preselect_block", nullptr},
                                        {"head_select_mode", nullptr},
                                        {"preselect_block_count", nullptr},
                                        {"layer_step", nullptr},
                                        {"token_step", nullptr},
                                        {"kernel_size", nullptr}}};

std::string AllKeys() {
  std::string all;
  for (const Key& key : kKeys) {
    all += fmt::format("{}{}", all.empty() ? "" : ", ", key.name);
    if (key.other != nullptr) all += fmt::format(" ({})", key.other);
  }
  return all;
}

std::string Lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

// The section's keys and their values, as they are written.
class Section {
 public:
  static Result<Section> Read(const std::string& file, const YAML::Node& root);

  // kInvalidArgument: no whole number from `least` to `most`.
  Result<int64_t> Int(const std::string& key, int64_t otherwise, int64_t least, int64_t most) const;
  Result<bool> Bool(const std::string& key, bool otherwise) const;
  // One of the words before the first colon of each choice, whatever their case: what stands behind
  // it.
  Result<std::string> Word(const std::string& key, const std::string& otherwise,
                           const std::vector<std::pair<std::string, std::string>>& words,
                           const std::string& expected) const;
  bool Has(const std::string& key) const { return values_.contains(key); }
  Status Wrong(const std::string& key, const std::string& expected) const {
    return InvalidArgument(fmt::format("{} is {}, expected {}", Name(key),
                                       Printable(values_.at(key).second), expected));
  }

 private:
  // With the file, as it is written there.
  std::string Name(const std::string& key) const {
    return fmt::format("{}: {}", file_, values_.at(key).first);
  }

  std::string file_;
  // By the framework's name: the name that is given, and the value.
  std::map<std::string, std::pair<std::string, std::string>> values_;
};

Result<Section> Section::Read(const std::string& file, const YAML::Node& root) {
  if (!root.IsMap()) {
    return InvalidArgument(
        fmt::format("{} has no keys at its top, expected the section {}", file, kSection));
  }
  // The document shows the keys alone.
  const YAML::Node inner = root[kSection];
  const YAML::Node& keys = inner.IsDefined() ? inner : root;
  if (!keys.IsMap()) {
    return InvalidArgument(
        fmt::format("{}: {} has no keys, expected some of {}", file, kSection, AllKeys()));
  }
  Section section;
  section.file_ = file;
  for (const auto& entry : keys) {
    if (!entry.first.IsScalar()) {
      return InvalidArgument(
          fmt::format("{} has a key that is no word, expected one of {}", file, AllKeys()));
    }
    const std::string name = entry.first.Scalar();
    const auto key = std::find_if(kKeys.begin(), kKeys.end(), [&](const Key& k) {
      return name == k.name || (k.other != nullptr && name == k.other);
    });
    if (key == kKeys.end()) {
      return InvalidArgument(
          fmt::format("{}: there is no key {}, expected one of {}{}", file, Printable(name),
                      AllKeys(), inner.IsDefined() ? "" : fmt::format(", or {}", kSection)));
    }
    if (const auto found = section.values_.find(key->name); found != section.values_.end()) {
      const std::string& before = found->second.first;
      return InvalidArgument(before == name
                                 ? fmt::format("{}: {} is there twice, expected once", file, name)
                                 : fmt::format("{}: {} and {} are both there, expected one of them",
                                               file, before, name));
    }
    if (entry.second.IsNull()) continue;  // as if it were not there: the framework does so
    if (!entry.second.IsScalar()) {
      return InvalidArgument(
          fmt::format("{}: {} is a list or a map, expected one value", file, name));
    }
    section.values_[key->name] = {name, entry.second.Scalar()};
  }
  return section;
}

Result<int64_t> Section::Int(const std::string& key, int64_t otherwise, int64_t least,
                             int64_t most) const {
  if (!Has(key)) return otherwise;
  const std::string& text = values_.at(key).second;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && value >= least && value <= most) {
    return value;
  }
  return Wrong(key, fmt::format("a whole number from {} to {}", least, most));
}

Result<bool> Section::Bool(const std::string& key, bool otherwise) const {
  if (!Has(key)) return otherwise;
  const std::string text = Lower(values_.at(key).second);
  if (text == "true" || text == "yes" || text == "on") return true;
  if (text == "false" || text == "no" || text == "off") return false;
  return Wrong(key, "True or False");
}

Result<std::string> Section::Word(const std::string& key, const std::string& otherwise,
                                  const std::vector<std::pair<std::string, std::string>>& words,
                                  const std::string& expected) const {
  if (!Has(key)) return otherwise;
  const std::string text = Lower(values_.at(key).second);
  for (const auto& [word, meaning] : words) {
    if (word == text) return meaning;
  }
  return Wrong(key, expected);
}

// What stands for a block.
Status ReadRepresentatives(const Section& section, SettingList& settings) {
  OKV_ASSIGN_OR_RETURN(const std::string kind,
                       section.Word("anchor_type", "dynamic",
                                    {{"dynamic", "dynamic"},
                                     {"fixed", "fixed"},
                                     {"fix", "fixed"},
                                     {"quest", "quest"},
                                     {"block_mean", "mean"},
                                     {"mean", "mean"},
                                     {"block_max", "max"},
                                     {"max", "max"}},
                                    "DYNAMIC, FIXED, QUEST, BLOCK_MEAN or BLOCK_MAX"));
  OKV_ASSIGN_OR_RETURN(int64_t number, section.Int("anchor_num", 1, 1, 512));
  if (kind == "quest" && number == 2) number = 1;  // its two bounds
  if (kind != "dynamic" && kind != "fixed" && number != 1) {
    return section.Wrong("anchor_num",
                         kind == "quest"
                             ? "1 or 2 with QUEST"
                             : fmt::format("1 with BLOCK_{}", kind == "mean" ? "MEAN" : "MAX"));
  }
  settings.emplace_back("representative", kind);
  settings.emplace_back("representatives", std::to_string(number));
  return {};
}

// Which blocks of a prompt are ever read.
Status ReadPreselection(const Section& section, SettingList& settings) {
  OKV_ASSIGN_OR_RETURN(const bool preselect, section.Bool("preselect_block", true));
  OKV_ASSIGN_OR_RETURN(const int64_t count, section.Int("preselect_block_count", 32, 0, 1000000));
  settings.emplace_back("preselect", preselect ? std::to_string(count) : "off");
  if (!section.Has("kernel_size")) return {};
  OKV_ASSIGN_OR_RETURN(const int64_t kernel, section.Int("kernel_size", 1, 1, 8191));
  if (kernel % 2 == 0) return section.Wrong("kernel_size", "an odd number");
  settings.emplace_back("widen", std::to_string(kernel / 2));
  return {};
}

// Which blocks a layer reads.
Status ReadBlocks(const Section& section, SettingList& settings) {
  OKV_ASSIGN_OR_RETURN(const int64_t block, section.Int("block_size", 128, 1, 512));
  if ((block & (block - 1)) != 0) return section.Wrong("block_size", "a power of two up to 512");
  OKV_ASSIGN_OR_RETURN(const int64_t recent, section.Int("local_windows_len", 4096, 0, 1000000000));
  OKV_ASSIGN_OR_RETURN(const int64_t chosen, section.Int("second_select_num", 32, 1, 1000000));
  const int64_t sinks = std::max<int64_t>(block, 64);  // as the framework has them
  // The last blocks are those of the window, and the one in the making.
  const int64_t budget = sinks + (chosen + recent / block + 1) * block;
  if (budget > 1000000000) {
    return section.Wrong(recent > chosen * block ? "local_windows_len" : "second_select_num",
                         "fewer tokens: 1,000,000,000 in all");
  }
  const auto set = [&](const char* key, int64_t value) {
    settings.emplace_back(key, std::to_string(value));
  };
  set("budget", budget);
  set("block", block);
  set("sinks", sinks);
  set("recent", recent);
  OKV_ASSIGN_OR_RETURN(
      const std::string lists,
      section.Word("head_select_mode", "one", {{"shared", "one"}, {"separate", "per_kv_head"}},
                   "SHARED or SEPARATE"));
  settings.emplace_back("lists", lists);
  OKV_ASSIGN_OR_RETURN(const int64_t dense, section.Int("dense_layer_num", 2, 0, 1000000));
  OKV_ASSIGN_OR_RETURN(const int64_t layers, section.Int("layer_step", 1, 1, 1000000));
  OKV_ASSIGN_OR_RETURN(const int64_t tokens, section.Int("token_step", 100, 1, 1000000));
  set("dense_layers", dense);
  set("layer_step", layers);
  set("token_step", tokens);
  return {};
}

Result<PolicyFile> FromSection(const Section& section) {
  PolicyFile file;
  OKV_RETURN_IF_ERROR(ReadBlocks(section, file.settings));
  OKV_RETURN_IF_ERROR(ReadRepresentatives(section, file.settings));
  OKV_RETURN_IF_ERROR(ReadPreselection(section, file.settings));
  OKV_ASSIGN_OR_RETURN(
      file.kv_dtype,
      section.Word("kv_type", "",
                   {{"fp16", "f16"}, {"bf16", "bf16"}, {"q8_0", "q8_0"}, {"q4_0", "q4_0"}},
                   "FP16, BF16, Q8_0 or Q4_0, the formats that omnikv keeps K/V in"));
  OKV_ASSIGN_OR_RETURN(file.context, section.Int("max_seq_len", 0, 1, ModelLimits::kContext));
  OKV_ASSIGN_OR_RETURN(const int64_t chunk,
                       section.Int("chunk_size", 0, 1, EngineOptions::kMaxPrefillChunk));
  OKV_ASSIGN_OR_RETURN(const int64_t threads,
                       section.Int("threads_num", 0, 1, ThreadPool::kMaxThreads));
  file.chunk = static_cast<int32_t>(chunk);
  file.threads = static_cast<int>(threads);
  return file;
}

}  // namespace

Result<PolicyFile> ParsePolicyFile(const std::string& name, const std::string& text) {
  const std::string file = fmt::format("--policy-file '{}'", name);
  if (text.size() > kMaxBytes) {
    return InvalidArgument(
        fmt::format("{} holds more than {}, expected a config.yaml", file, HumanBytes(kMaxBytes)));
  }
  // The library throws, and nothing else does.
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(text);
    if (documents.size() != 1) {
      return InvalidArgument(
          fmt::format("{} holds {} documents, expected one", file, documents.size()));
    }
    OKV_ASSIGN_OR_RETURN(const Section section, Section::Read(file, documents.front()));
    return FromSection(section);
  } catch (const YAML::Exception& e) {
    return InvalidArgument(fmt::format("{} is no YAML: line {}, column {}: {}", file,
                                       e.mark.line + 1, e.mark.column + 1, Escaped(e.msg)));
  }
}

Status ApplyPolicyFile(EngineFlags& engine, PolicyFlags& policy) {
  if (policy.file.empty()) return {};
  if (policy.policy != "auto" && policy.policy != "blocks") {
    return InvalidArgument(fmt::format("--policy is {}, but --policy-file '{}' is of policy blocks",
                                       policy.policy, policy.file));
  }
  OKV_ASSIGN_OR_RETURN(const std::string text, ReadText("--policy-file", policy.file));
  OKV_ASSIGN_OR_RETURN(PolicyFile file, ParsePolicyFile(policy.file, text));
  policy.policy = "blocks";
  policy.of_file = std::move(file.settings);
  const auto take = [&](const char* flag, auto& to, const auto& from) {
    if (!engine.given.contains(flag) && from != std::decay_t<decltype(from)>{}) to = from;
  };
  take("--kv-dtype", engine.kv_dtype, file.kv_dtype);
  take("--ctx", engine.ctx, file.context);
  take("--chunk", engine.chunk, file.chunk);
  take("--threads", engine.threads, file.threads);
  return {};
}

}  // namespace omnikv::tools
