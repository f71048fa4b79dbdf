#include "flags.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <string_view>

#include "base/log.h"
#include "base/numbers.h"
#include "engine/sampler.h"
#include "policy/policy.h"
#include "report.h"
#include "shipped.h"
#include "text/tokenizer/tokenizer.h"

namespace omnikv::tools {
namespace {

struct Closer {
  int fd;
  ~Closer() { ::close(fd); }
};

// Whether the terminal knows escape sequences.
bool ClearsLines() {
  const char* term = std::getenv("TERM");
  return term != nullptr && *term != '\0' && std::string_view(term) != "dumb";
}

}  // namespace

void AddModelFlag(CLI::App& app, std::string& model) {
  app.add_option("-m,--model", model,
                 "a Hugging Face folder or a .gguf file; without it, the shipped model");
}

Result<std::string> ModelPath(const std::string& model) {
  if (!model.empty()) return model;
  return ShippedFile("models/omnikv-tiny-q8_0.gguf", "-m");
}

void AddEngineFlags(CLI::App& app, EngineFlags& f) {
  AddModelFlag(app, f.model);
  app.add_option("--device", f.device, "auto, cpu, cuda or cuda:N")->capture_default_str();
  const auto may_stand_in_a_file = [&f](CLI::Option* option) {
    const std::string name = option->get_name();
    return option->each([&f, name](const std::string&) { f.given.insert(name); });
  };
  may_stand_in_a_file(
      app.add_option("--threads", f.threads, "0: the physical cores of the control group"));
  app.add_option("--host-memory", f.host_memory,
                 "cap on host memory, as 8GiB; default: what is free");
  app.add_option("--gpu-memory", f.gpu_memory,
                 "cap on GPU memory, as 24GiB; default: what is free");
  app.add_option(
         "--place", f.place,
         "where K/V live: auto, device, or host (layers read sparsely or streamed) beside a GPU; "
         "auto or disk (those layers) with --kv-folder")
      ->capture_default_str();
  app.add_option("--kv-folder", f.kv_folder,
                 "a folder on whose disk K/V lie that host memory has no room for");
  app.add_option("--disk-space", f.disk_space,
                 "cap on the K/V there, as 100GiB; default: what is free");
  app.add_option("--host-reads", f.host_reads,
                 "how steps read layers on the host: fetch what is missing, attend (the host does, "
                 "where they are; under kcache it sums V), or auto (fetch selections of single "
                 "tokens for all heads, attend to others)")
      ->capture_default_str();
  app.add_option(
      "--working-set", f.working_set,
      "tokens that a GPU keeps of each layer on the host or the disk, or the memory of one "
      "on the disk, all that a layer reads in a step at least; default: as many as there is "
      "room for");
  may_stand_in_a_file(
      app.add_option("--ctx", f.ctx, "tokens a context can hold, as 32k; default: the model's"));
  may_stand_in_a_file(
      app.add_option("--kv-dtype", f.kv_dtype,
                     "auto (f16; f32 for f32 models), f16, bf16, f32, q8_0 or q4_0"))
      ->capture_default_str();
  app.add_option("--precision", f.precision, "of prefill: fast (bf16 where faster) or full (f32)")
      ->capture_default_str();
  may_stand_in_a_file(
      app.add_option("--chunk", f.chunk, "rows of a prefill step; default: the device's"));
  CLI::Option* verbose = app.add_flag("-v,--verbose", f.verbose, "say more on stderr");
  app.add_flag("-q,--quiet", f.quiet, "say nothing on stderr but errors")->excludes(verbose);
}

Result<EngineOptions> ToEngineOptions(const EngineFlags& f, bool shipped) {
  EngineOptions o;
  o.model = f.model;
  if (shipped) {
    OKV_ASSIGN_OR_RETURN(o.model, ModelPath(f.model));
  }
  o.device = f.device;
  o.threads = f.threads;
  o.context = f.ctx;
  o.kv_dtype = f.kv_dtype;
  o.precision = f.precision;
  o.prefill_chunk = f.chunk;
  o.place = f.place;
  o.kv_folder = f.kv_folder;
  if (!f.disk_space.empty()) {
    OKV_ASSIGN_OR_RETURN(o.disk_space, ParseSize("--disk-space", f.disk_space));
    if (o.disk_space == 0) return InvalidArgument("--disk-space is 0, expected more");
  }
  o.host_reads = f.host_reads;
  o.working_set = f.working_set;
  if (!f.host_memory.empty()) {
    OKV_ASSIGN_OR_RETURN(o.host_memory, ParseSize("--host-memory", f.host_memory));
    if (o.host_memory == 0) return InvalidArgument("--host-memory is 0, expected more");
  }
  if (!f.gpu_memory.empty()) {
    OKV_ASSIGN_OR_RETURN(o.gpu_memory, ParseSize("--gpu-memory", f.gpu_memory));
    if (o.gpu_memory == 0) return InvalidArgument("--gpu-memory is 0, expected more");
  }
  if (f.verbose) SetLogLevel(LogLevel::kVerbose);
  if (f.quiet) SetLogLevel(LogLevel::kQuiet);
  return o;
}

void AddRepeatable(CLI::App& app, const std::string& name, std::vector<std::string>& values,
                   const std::string& help) {
  // CLI11 would take "[a,b]" apart, and the words that follow as more values.
  app.add_option(name, values, help)->allow_extra_args(false);
}

void AddPolicyFlags(CLI::App& app, PolicyFlags& f) {
  app.add_option("--policy", f.policy,
                 "which tokens layers read; auto: omnikv where the model's filter layers are "
                 "known, else full (omnikv policies lists them)")
      ->capture_default_str();
  AddRepeatable(app, "--set", f.set,
                "a setting of the policy, key=value; may be repeated (omnikv policies "
                "explains them)");
  AddPolicyFileFlag(app, f.file);
}

void AddPolicyFileFlag(CLI::App& app, std::string& file) {
  app.add_option("--policy-file", file,
                 "a config.yaml of KTransformers: its section long_context becomes policy blocks "
                 "and its settings; flags that are given go before it");
}

Result<PolicyOptions> ToPolicyOptions(const PolicyFlags& f) {
  PolicyOptions o;
  o.name = f.policy;
  for (const std::string& pair : f.set) {
    const size_t equals = pair.find('=');
    if (equals == std::string::npos || equals == 0) {
      return InvalidArgument(fmt::format("--set is '{}', expected key=value", pair));
    }
    o.settings.emplace_back(pair.substr(0, equals), pair.substr(equals + 1));
  }
  for (const auto& of_file : f.of_file) {
    const auto same = [&](const auto& setting) { return setting.first == of_file.first; };
    const bool given = std::any_of(o.settings.begin(), o.settings.end(), same);
    if (o.name == "blocks" && !given) o.settings.push_back(of_file);
  }
  // "auto" means omnikv or full, which has no settings.
  OKV_ASSIGN_OR_RETURN(const PolicyInfo* info, FindPolicy(o.name == "auto" ? "omnikv" : o.name));
  OKV_RETURN_IF_ERROR(PolicySettings::Parse(info->name, info->settings, o.settings).status());
  return o;
}

void AddGenerateFlags(CLI::App& app, GenerateFlags& f) {
  GenerateOptions& o = f.options;
  app.add_option("-n,--max-tokens", o.max_tokens, "tokens to generate at most")
      ->capture_default_str();
  app.add_option("--temp", o.sampling.temperature, "temperature; 0: greedy")->capture_default_str();
  app.add_option("--top-k", o.sampling.top_k, "the k likeliest tokens; 0: off");
  app.add_option("--top-p", o.sampling.top_p, "the likeliest tokens that reach p; 1: off");
  app.add_option("--min-p", o.sampling.min_p,
                 "tokens at least p times as likely as the first; 0: off");
  app.add_option("--repeat-penalty", o.sampling.repeat_penalty, "on tokens in context; 1: off");
  app.add_option("--presence-penalty", o.sampling.presence_penalty,
                 "off the logit of each token that the answer has; 0: off");
  app.add_option("--frequency-penalty", o.sampling.frequency_penalty,
                 "the same for each time that it has it; 0: off");
  AddRepeatable(app, "--logit-bias", f.logit_bias,
                "TOKEN=BIAS: added to the logit of a token, -100 to 100; may be repeated");
  app.add_option("--seed", f.seed,
                 "of sampling, to repeat an answer; default: another each time, which is printed");
  AddRepeatable(app, "--stop", o.stop, "a text that ends the answer; may be repeated");
}

Result<GenerateOptions> ToGenerateOptions(const GenerateFlags& f) {
  GenerateOptions o = f.options;
  for (const std::string& given : f.logit_bias) {
    const size_t equals = std::min(given.find('='), given.size());
    const auto token = ParseWhole<int64_t>(given.substr(0, equals));
    const auto bias = ParseReal(given.substr(std::min(equals + 1, given.size())));
    if (!token || !bias || *token != static_cast<int32_t>(*token)) {
      return InvalidArgument(
          fmt::format("--logit-bias is '{}', expected TOKEN=BIAS such as 42=-5", given));
    }
    o.sampling.logit_bias.emplace_back(static_cast<int32_t>(*token), static_cast<float>(*bias));
  }
  OKV_RETURN_IF_ERROR(CheckGenerate(o));
  // Of 32 bits: short enough to type.
  if (o.sampling.temperature > 0) o.sampling.seed = f.seed ? *f.seed : std::random_device{}();
  return o;
}

Result<size_t> ParseSize(const std::string& flag, const std::string& text) {
  const auto bytes = ParseWhole<uint64_t>(text);
  if (bytes && *bytes < uint64_t{1} << 62) return static_cast<size_t>(*bytes);
  return InvalidArgument(
      fmt::format("{} is '{}', expected a size such as 8GiB, 512m or 1000000", flag, text));
}

Result<std::string> ReadText(const std::string& flag, const std::string& path) {
  const auto refusal = [&](const std::string& why) {
    return NotFound(fmt::format("{} is '{}', which cannot be read ({})", flag, path, why));
  };
  const int fd = path == "-" ? ::dup(STDIN_FILENO) : ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return refusal(std::strerror(errno));
  const Closer closer{fd};
  struct stat info;
  if (::fstat(fd, &info) == 0 && S_ISDIR(info.st_mode)) {
    return InvalidArgument(fmt::format("{} is '{}', a folder, expected a text file", flag, path));
  }
  SetActivity("reading a text");
  if (path == "-" && isatty(fd) != 0) LogInfo("type a text; Ctrl-D on an empty line ends it");
  // Devices and pipes have no size, and may have no end.
  std::string text;
  std::vector<char> buffer(size_t{1} << 20);
  while (true) {
    const ssize_t n = ::read(fd, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return refusal(std::strerror(errno));
    if (n == 0) return text;
    text.append(buffer.data(), static_cast<size_t>(n));
    if (text.size() > Tokenizer::kMaxTextBytes) {
      return InvalidArgument(fmt::format("{} is '{}', which holds more than {}", flag, path,
                                         HumanBytes(Tokenizer::kMaxTextBytes)));
    }
  }
}

ProgressBar::ProgressBar(std::string label)
    : label_(std::move(label)),
      enabled_(GetLogLevel() >= LogLevel::kInfo && isatty(STDERR_FILENO) != 0 && ClearsLines()) {}

ProgressBar::~ProgressBar() {
  if (shown_) WriteStderr("\r\033[K");
}

void ProgressBar::Update(double done, double total, const std::string& note) {
  if (!enabled_ || total <= 0) return;
  const int percent = static_cast<int>(100 * done / total);
  if (percent == last_percent_) return;
  last_percent_ = percent;
  constexpr int kWidth = 30;
  const auto filled = static_cast<size_t>(kWidth * percent / 100);
  WriteStderr(fmt::format("\r\033[K{} [{}{}] {:3d} % {}", label_, std::string(filled, '#'),
                          std::string(kWidth - filled, '.'), percent, note));
  shown_ = true;
}

}  // namespace omnikv::tools
