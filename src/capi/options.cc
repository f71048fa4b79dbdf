#include "capi/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <set>
#include <string_view>
#include <type_traits>

#include "base/numbers.h"
#include "base/printable.h"

namespace omnikv::capi {
namespace {

constexpr std::string_view kSetting = "policy.";

// Takes the options that a call reads out of those that were given, and keeps the first mistake.
class Reader {
 public:
  explicit Reader(const omnikv_options* options) {
    if (options == nullptr) return;
    for (const auto& [name, value] : options->values) left_.push_back({name, value, false});
  }

  void Text(const char* name, std::string& out) {
    Each(name, [&](const std::string& value) {
      out = value;
      return true;
    });
  }
  template <typename T>
  void Whole(const char* name, T& out) {
    using Wide = std::conditional_t<std::is_unsigned_v<T>, uint64_t, int64_t>;
    const bool read = Each(name, [&](const std::string& value) {
      const auto number = ParseWhole<Wide>(value);
      if (!number || *number < static_cast<Wide>(std::numeric_limits<T>::min()) ||
          *number > static_cast<Wide>(std::numeric_limits<T>::max())) {
        return false;
      }
      out = static_cast<T>(*number);
      return true;
    });
    if (!read) Expected("a whole number such as 4096 or 32k");
  }
  void Real(const char* name, double& out) {
    const bool read = Each(name, [&](const std::string& value) {
      const auto number = ParseReal(value);
      if (number) out = *number;
      return number.has_value();
    });
    if (!read) Expected("a number such as 0.7");
  }
  void Flag(const char* name, bool& out) {
    const bool read = Each(name, [&](const std::string& value) {
      out = value == "1" || value == "true";
      return out || value == "0" || value == "false";
    });
    if (!read) Expected("1 or 0");
  }
  void Policy(PolicyOptions& out) {
    Text("policy", out.name);
    Flag("force_indices", out.force_indices);
    for (Given& given : left_) {
      if (!given.name.starts_with(kSetting)) continue;
      given.read = true;
      const std::string key = given.name.substr(kSetting.size());
      // A policy refuses a key that comes twice.
      std::erase_if(out.settings, [&](const auto& setting) { return setting.first == key; });
      out.settings.emplace_back(key, given.value);
    }
  }
  void Generate(GenerateOptions& out) {
    SamplingOptions& s = out.sampling;
    Whole("max_tokens", out.max_tokens);
    Real("temperature", s.temperature);
    Whole("top_k", s.top_k);
    Real("top_p", s.top_p);
    Real("min_p", s.min_p);
    Real("repeat_penalty", s.repeat_penalty);
    Real("presence_penalty", s.presence_penalty);
    Real("frequency_penalty", s.frequency_penalty);
    Whole("seed", s.seed);
    Flag("ignore_eos", out.ignore_eos);
    Each("stop", [&](const std::string& value) {
      out.stop.push_back(value);
      return true;
    });
    const bool read = Each("logit_bias", [&](const std::string& value) {
      const size_t equals = std::min(value.find('='), value.size());
      const auto token = ParseWhole<int64_t>(value.substr(0, equals));
      const auto bias = ParseReal(value.substr(std::min(equals + 1, value.size())));
      if (!token || !bias || *token != static_cast<int32_t>(*token)) return false;
      s.logit_bias.emplace_back(static_cast<int32_t>(*token), static_cast<float>(*bias));
      return true;
    });
    if (!read) Expected("TOKEN=BIAS such as 42=-5");
  }
  // "fit" is a number of its own.
  void KvTokens(int64_t& out) {
    for (Given& given : left_) {
      if (given.name == "kv_tokens" && given.value == "fit") {
        given.value = fmt::format("{}", EngineOptions::kAsManyAsFit);
      }
    }
    Whole("kv_tokens", out);
  }

  const std::set<std::string>& known() const { return known_; }

  Status Done(const char* of) const {
    if (!mistake_.ok()) return mistake_;
    for (const Given& given : left_) {
      if (given.read) continue;
      return InvalidArgument(fmt::format("{} is no option of {}, expected {}",
                                         Printable(given.name), of, fmt::join(known_, ", ")));
    }
    return {};
  }

 private:
  struct Given {
    std::string name, value;
    bool read;
  };

  // False where `take` refuses a value: the first is kept for Expected.
  template <typename Take>
  bool Each(const char* name, const Take& take) {
    known_.insert(name);
    refused_ = nullptr;
    for (Given& given : left_) {
      if (given.name != name) continue;
      given.read = true;
      if (!take(given.value) && refused_ == nullptr) refused_ = &given;
    }
    return refused_ == nullptr;
  }
  void Expected(const char* what) {
    if (!mistake_.ok()) return;
    mistake_ = InvalidArgument(
        fmt::format("`{}` is {}, expected {}", refused_->name, Printable(refused_->value), what));
  }

  std::vector<Given> left_;
  std::set<std::string> known_;
  const Given* refused_ = nullptr;
  Status mistake_;
};

void ReadEngine(Reader& reader, EngineOptions& o) {
  reader.Text("model", o.model);
  reader.Text("device", o.device);
  reader.Whole("threads", o.threads);
  reader.Whole("host_memory", o.host_memory);
  reader.Whole("gpu_memory", o.gpu_memory);
  reader.Whole("context", o.context);
  reader.Text("place", o.place);
  reader.Text("kv_folder", o.kv_folder);
  reader.Whole("disk_space", o.disk_space);
  reader.Text("host_reads", o.host_reads);
  reader.Whole("working_set", o.working_set);
  reader.Text("kv_dtype", o.kv_dtype);
  reader.Text("precision", o.precision);
  reader.Whole("prefill_chunk", o.prefill_chunk);
  reader.Flag("shared_products", o.shared_products);
  reader.Whole("max_sessions", o.max_sessions);
  reader.KvTokens(o.kv_tokens);
  reader.Whole("kept_contexts", o.kept_contexts);
  reader.Policy(o.policy);
}

void ReadBatch(Reader& reader, BatchOptions& o) {
  reader.Whole("seats", o.scheduler.seats);
  reader.Whole("max_waiting", o.scheduler.max_waiting);
  reader.Real("token_ms", o.scheduler.token_ms);
  reader.Text("store", o.store.folder);
  reader.Whole("store_size", o.store.bytes);
}

void ReadRequest(Reader& reader, Request& o, double& timeout) {
  reader.Policy(o.policy);
  reader.Generate(o.generate);
  reader.Whole("priority", o.priority);
  reader.Real("timeout_seconds", timeout);
}

// All names that some call reads.
const std::set<std::string>& KnownNames() {
  static const std::set<std::string> names = [] {
    Reader reader(nullptr);
    EngineOptions engine;
    BatchOptions batch;
    Request request;
    double timeout = 0;
    ReadEngine(reader, engine);
    ReadBatch(reader, batch);
    ReadRequest(reader, request, timeout);
    return reader.known();
  }();
  return names;
}

}  // namespace

Result<EngineOptions> EngineOptionsOf(const omnikv_options* options) {
  Reader reader(options);
  EngineOptions o;
  ReadEngine(reader, o);
  OKV_RETURN_IF_ERROR(reader.Done("an engine"));
  return o;
}

Result<PolicyOptions> PolicyOptionsOf(const omnikv_options* options) {
  Reader reader(options);
  PolicyOptions o;
  reader.Policy(o);
  OKV_RETURN_IF_ERROR(reader.Done("a policy"));
  return o;
}

Result<GenerateOptions> GenerateOptionsOf(const omnikv_options* options) {
  Reader reader(options);
  GenerateOptions o;
  reader.Generate(o);
  OKV_RETURN_IF_ERROR(reader.Done("an answer"));
  return o;
}

Result<Request> RequestOf(const omnikv_options* options) {
  Reader reader(options);
  Request o;
  double timeout = 0;
  ReadRequest(reader, o, timeout);
  OKV_RETURN_IF_ERROR(reader.Done("a request"));
  constexpr double kYear = 365.0 * 24 * 3600;
  if (!(timeout >= 0 && timeout <= kYear)) {
    return InvalidArgument(
        fmt::format("`{}` is {}, expected 0 (off) to {}", "timeout_seconds", timeout, kYear));
  }
  if (timeout > 0) {
    o.deadline = std::chrono::steady_clock::now() +
                 std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                     std::chrono::duration<double>(timeout));
  }
  return o;
}

Result<BatchOptions> BatchOptionsOf(const omnikv_options* options, int32_t seats) {
  Reader reader(options);
  BatchOptions o;
  o.scheduler.seats = seats;
  o.store.bytes = uint64_t{8} << 30;
  ReadBatch(reader, o);
  OKV_RETURN_IF_ERROR(reader.Done("a batch"));
  return o;
}

}  // namespace omnikv::capi

// NOLINTBEGIN(readability-identifier-naming): names of C.
omnikv_status omnikv_options_new(omnikv_options** options) {
  return omnikv::capi::Guarded([&]() -> omnikv::Status {
    OKV_RETURN_IF_ERROR(omnikv::capi::Need(options, "the place for options"));
    *options = nullptr;
    *options = new omnikv_options;
    return {};
  });
}

void omnikv_options_free(omnikv_options* options) {
  delete options;
}

omnikv_status omnikv_options_set(omnikv_options* options, const char* name, const char* value) {
  return omnikv::capi::Guarded([&]() -> omnikv::Status {
    using omnikv::capi::KnownNames;
    OKV_RETURN_IF_ERROR(omnikv::capi::Need(options, "the handle of options"));
    OKV_RETURN_IF_ERROR(omnikv::capi::Need(name, "the name of an option"));
    OKV_RETURN_IF_ERROR(omnikv::capi::Need(value, "the value of an option"));
    OKV_RETURN_IF_ERROR(omnikv::capi::NeedUtf8(name, "the name of an option"));
    OKV_RETURN_IF_ERROR(omnikv::capi::NeedUtf8(value, "the value of an option"));
    if (!std::string_view(name).starts_with(omnikv::capi::kSetting) &&
        !KnownNames().contains(name)) {
      return omnikv::InvalidArgument(fmt::format("{} is no option, expected policy.SETTING or {}",
                                                 omnikv::Printable(name),
                                                 fmt::join(KnownNames(), ", ")));
    }
    options->values.emplace_back(name, value);
    return {};
  });
}
// NOLINTEND(readability-identifier-naming)
