// Flags that several subcommands share.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "omnikv/options.h"
#include "omnikv/status.h"

namespace omnikv::tools {

// -m alone, for subcommands that run nothing.
void AddModelFlag(CLI::App& app, std::string& model);
// The path it means: without one, the shipped model.
Result<std::string> ModelPath(const std::string& model);

// -m, --device, --threads, --host-memory, --gpu-memory, --place, --kv-folder, --disk-space,
// --host-reads, --working-set, --ctx, --kv-dtype, --precision, --chunk, -v, -q.
struct EngineFlags {
  std::string model;
  std::string device = "auto";
  std::string host_memory;
  std::string gpu_memory;
  std::string place = "auto";
  std::string kv_folder;
  std::string disk_space;
  std::string host_reads = "auto";
  int64_t working_set = 0;
  std::string kv_dtype = "auto";
  std::string precision = "fast";
  int threads = 0;
  int64_t ctx = 0;
  int32_t chunk = 0;
  bool verbose = false;
  bool quiet = false;
  std::set<std::string> given;  // of those that a file may say, too: --ctx and the like
};
void AddEngineFlags(CLI::App& app, EngineFlags& flags);
// The options they mean. Without -m, the shipped model when `shipped` is set, else none. Sets how
// much is said on stderr.
Result<EngineOptions> ToEngineOptions(const EngineFlags& flags, bool shipped = true);

// An option that takes one value each time it is given, as it is written: "[x]" stays "[x]".
void AddRepeatable(CLI::App& app, const std::string& name, std::vector<std::string>& values,
                   const std::string& help);

// --policy, --set key=value, --policy-file.
struct PolicyFlags {
  std::string policy = "auto";
  std::vector<std::string> set;
  std::string file;
  // Settings of policy blocks that stood there (policy_file.h); those of `set` come before them.
  std::vector<std::pair<std::string, std::string>> of_file;
};
void AddPolicyFileFlag(CLI::App& app, std::string& file);
void AddPolicyFlags(CLI::App& app, PolicyFlags& flags);
// The options they mean. What can be wrong whatever the model is found here, before one is loaded.
Result<PolicyOptions> ToPolicyOptions(const PolicyFlags& flags);

// --temp, --top-k, --top-p, --min-p, --repeat-penalty, --presence-penalty, --frequency-penalty,
// --logit-bias, --seed, -n, --stop.
struct GenerateFlags {
  GenerateOptions options;
  std::vector<std::string> logit_bias;  // "TOKEN=BIAS"
  std::optional<uint64_t> seed;
};
void AddGenerateFlags(CLI::App& app, GenerateFlags& flags);
// The options they mean, checked. Where tokens are drawn and no seed is given, a random one.
Result<GenerateOptions> ToGenerateOptions(const GenerateFlags& flags);

// "24GiB", "512m", "1073741824": bytes. `flag` names the flag in the sentence when it is not.
Result<size_t> ParseSize(const std::string& flag, const std::string& text);

// The whole of a file, or of standard input for "-"; kInvalidArgument above
// Tokenizer::kMaxTextBytes.
Result<std::string> ReadText(const std::string& flag, const std::string& path);

// A bar on stderr, when that is a terminal that knows how to clear a line and nobody asked for
// quiet; nothing otherwise.
class ProgressBar {
 public:
  explicit ProgressBar(std::string label);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  void Update(double done, double total, const std::string& note = "");

 private:
  std::string label_;
  bool shown_ = false;
  bool enabled_;
  int last_percent_ = -1;
};

// A subcommand: registers itself on `app`, and leaves what to run in the result.
using Command = std::function<Status()>;
void AddRun(CLI::App& app, Command& command);
void AddChat(CLI::App& app, Command& command);
void AddServe(CLI::App& app, Command& command);
void AddTokenize(CLI::App& app, Command& command);
void AddLogits(CLI::App& app, Command& command);
void AddInfo(CLI::App& app, Command& command);
void AddPolicies(CLI::App& app, Command& command);
void AddBench(CLI::App& app, Command& command);
void AddEval(CLI::App& app, Command& command);
void AddAnalyze(CLI::App& app, Command& command);

}  // namespace omnikv::tools
