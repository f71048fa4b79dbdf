// omnikv logits: what the model makes of given tokens, for comparison with other engines and of
// policies.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/log.h"
#include "engine/given_text.h"
#include "engine/placement.h"
#include "flags.h"
#include "omnikv/engine.h"
#include "output_file.h"
#include "policy/policy.h"
#include "policy_file.h"
#include "report.h"

namespace omnikv::tools {
namespace {

struct LogitsFlags {
  EngineFlags engine;
  PolicyFlags policy;
  std::vector<std::string> tokens, files;
  std::string out;
  bool decode = false;
  int64_t prompt_tokens = 1;  // of each text, with `decode`
  bool json = false;
};

// Ids separated by commas or white space; brackets are passed over.
Result<std::vector<int32_t>> ParseIds(const std::string& flag, const std::string& text) {
  std::vector<int32_t> ids;
  bool id_before = false;  // of a comma
  for (const char* at = text.data(); at != text.data() + text.size();) {
    const bool comma = *at == ',' && id_before;
    if (comma || std::string_view(" \n\r\t[]").find(*at) != std::string_view::npos) {
      id_before = id_before && !comma;
      ++at;
      continue;
    }
    int32_t id = 0;
    const auto [end, error] = std::from_chars(at, text.data() + text.size(), id);
    if (error != std::errc()) {
      return InvalidArgument(
          fmt::format("{}: '{}' at byte {} is no token id, expected ids as 1,2,3", flag, *at,
                      at - text.data()));
    }
    ids.push_back(id);
    id_before = true;
    at = end;
  }
  return ids;
}

// The header of a NumPy file of f32 [rows, columns], format 1.0.
std::string NpyHeader(size_t rows, int32_t columns) {
  std::string dict =
      fmt::format("{{'descr': '<f4', 'fortran_order': False, 'shape': ({}, {}), }}", rows, columns);
  const size_t unpadded = 10 + dict.size() + 1;
  dict.append((64 - unpadded % 64) % 64, ' ');
  dict += '\n';
  std::string header("\x93NUMPY\x01\x00", 8);
  header += static_cast<char>(dict.size() & 0xff);
  header += static_cast<char>(dict.size() >> 8);
  return header + dict;
}

// One of the texts: where its logits go, and how likely its tokens were.
class Text {
 public:
  Text(GivenText given, const std::string& out)
      : given_(std::move(given)), out_(out), file_("--out", out) {}

  const GivenText& given() const { return given_; }
  // May come before Begin, to find out early that there can be no file.
  Status Open() {
    if (!open_) OKV_RETURN_IF_ERROR(file_.Open());
    open_ = true;
    return {};
  }
  // What follows are the rows of positions from `first` on.
  Status Begin(int64_t first, int32_t vocab) {
    OKV_RETURN_IF_ERROR(Open());
    vocab_ = vocab;
    const std::string header = NpyHeader(given_.tokens.size() - static_cast<size_t>(first), vocab_);
    file_.Write(header.data(), header.size());
    return {};
  }
  void Row(int64_t position, const float* logits) {
    file_.Write(logits, static_cast<size_t>(vocab_) * sizeof(float));
    const auto next = static_cast<size_t>(position) + 1;
    if (next == given_.tokens.size()) return;
    const float top = *std::max_element(logits, logits + vocab_);
    double sum = 0;
    for (int32_t i = 0; i < vocab_; ++i) sum += std::exp(static_cast<double>(logits[i]) - top);
    nll_ += std::log(sum) + top - logits[given_.tokens[next]];
    ++predicted_;
  }
  Status Commit() { return file_.Commit(); }

  // Means over the tokens that a row predicts; there are none in a text of one row.
  nlohmann::ordered_json Json() const {
    nlohmann::ordered_json json = {
        {"out", out_}, {"tokens", given_.tokens.size()}, {"predicted", predicted_}};
    if (predicted_ > 0) {
      json["mean_nll"] = MeanNll();
      json["perplexity"] = std::exp(MeanNll());
    }
    return json;
  }
  std::string Line() const {
    std::string line = fmt::format("{}: {} tokens", out_, given_.tokens.size());
    if (predicted_ == 0) return line;
    return line + fmt::format(
                      ", {} of them predicted: mean negative log-likelihood {:.4f}, "
                      "perplexity {:.4g}",
                      predicted_, MeanNll(), std::exp(MeanNll()));
  }

 private:
  double MeanNll() const { return nll_ / static_cast<double>(predicted_); }

  GivenText given_;
  std::string out_;
  OutputFile file_;
  bool open_ = false;
  int32_t vocab_ = 0;
  double nll_ = 0;  // of all tokens that were predicted, in nats
  int64_t predicted_ = 0;
};
using Texts = std::vector<std::unique_ptr<Text>>;

Result<std::vector<GivenText>> ReadTexts(const LogitsFlags& f) {
  if (f.tokens.empty() == f.files.empty()) {
    return InvalidArgument("give the ids either with --tokens 1,2,3 or with -f FILE");
  }
  const std::string flag = f.tokens.empty() ? "-f" : "--tokens";
  std::vector<GivenText> texts;
  for (const std::string& given : f.tokens.empty() ? f.files : f.tokens) {
    std::string ids = given;
    if (!f.files.empty()) {
      OKV_ASSIGN_OR_RETURN(ids, ReadText(flag, given));
    }
    GivenText text{.tokens = {}, .prompt_tokens = f.prompt_tokens};
    OKV_ASSIGN_OR_RETURN(text.tokens, ParseIds(flag, ids));
    const auto n_tokens = static_cast<int64_t>(text.tokens.size());
    if (f.decode && n_tokens > 0 && f.prompt_tokens > n_tokens) {
      return InvalidArgument(fmt::format("--prompt-tokens is {}, but {} '{}' has {} tokens",
                                         f.prompt_tokens, flag, given, n_tokens));
    }
    texts.push_back(std::move(text));
  }
  return texts;
}

// The file of each text: --out itself for one, 1.npy, 2.npy and so on in that folder for several.
Result<std::vector<std::string>> OutputPaths(const std::string& out, size_t n_texts) {
  if (n_texts == 1) return std::vector<std::string>{out};
  std::error_code error;
  std::filesystem::create_directories(out, error);
  if (!std::filesystem::is_directory(out, error)) {
    return InvalidArgument(
        fmt::format("--out is '{}', expected a folder for the logits of {} texts", out, n_texts));
  }
  std::vector<std::string> paths;
  for (size_t i = 1; i <= n_texts; ++i) {
    paths.push_back((std::filesystem::path(out) / fmt::format("{}.npy", i)).string());
  }
  return paths;
}

// Rows of every position, each text in one go.
Status Prefill(Session& session, int32_t vocab, Texts& texts) {
  for (const auto& text : texts) {
    OKV_RETURN_IF_ERROR(text->Begin(0, vocab));
    OKV_RETURN_IF_ERROR(session.PrefillLogits(
        text->given().tokens,
        [&](int64_t position, const float* logits) { text->Row(position, logits); }));
    OKV_RETURN_IF_ERROR(text->Commit());
  }
  return {};
}

// Rows from the prompts' last tokens on, by decode steps; their number.
Result<int64_t> Decode(EngineCore& core, const PolicyOptions& policy, Texts& texts) {
  std::vector<GivenText> given;
  int64_t total = 0;
  for (const auto& text : texts) {
    given.push_back(text->given());
    total += static_cast<int64_t>(given.back().tokens.size());
  }
  ProgressBar bar("decoding");
  int64_t done = 0;
  const auto take = [&](size_t i, int64_t position, const float* logits) -> Status {
    Text& text = *texts[i];
    const int64_t first = given[i].prompt_tokens - 1;
    if (position == first) OKV_RETURN_IF_ERROR(text.Begin(first, core.config.vocab));
    text.Row(position, logits);
    done += position == first ? position + 1 : 1;
    bar.Update(static_cast<double>(done), static_cast<double>(total),
               fmt::format("{} of {} tokens", done, total));
    const bool last = position + 1 == static_cast<int64_t>(given[i].tokens.size());
    return last ? text.Commit() : Status();
  };
  return DecodeGivenTexts(core, policy, given, take);
}

Status Logits(const LogitsFlags& f) {
  OKV_ASSIGN_OR_RETURN(EngineOptions options, ToEngineOptions(f.engine));
  OKV_ASSIGN_OR_RETURN(const PolicyOptions policy, ToPolicyOptions(f.policy));
  options.policy = policy;
  if (!f.decode && f.prompt_tokens != 1) {
    return InvalidArgument("--prompt-tokens is given without --decode");
  }
  OKV_ASSIGN_OR_RETURN(std::vector<GivenText> given, ReadTexts(f));
  const size_t n_texts = given.size();
  if (f.decode && n_texts > 1) {
    options.max_sessions = static_cast<int>(std::min<size_t>(n_texts, kMaxBatch));
    // So many contexts have room only when they are no longer than the texts.
    for (const GivenText& text : given) {
      if (f.engine.ctx != 0) break;
      options.context = std::max(options.context, static_cast<int64_t>(text.tokens.size()));
    }
  }
  OKV_ASSIGN_OR_RETURN(const std::vector<std::string> paths, OutputPaths(f.out, n_texts));
  Texts texts;
  for (size_t i = 0; i < n_texts; ++i) {
    texts.push_back(std::make_unique<Text>(std::move(given[i]), paths[i]));
  }
  OKV_RETURN_IF_ERROR(texts.front()->Open());
  options.check = [&](const Engine& engine) -> Status {
    for (const auto& text : texts) OKV_RETURN_IF_ERROR(engine.CheckPrompt(text->given().tokens));
    return {};
  };
  OKV_ASSIGN_OR_RETURN(const auto engine, LoadWithProgress(std::move(options), f.json));
  EngineCore& core = CoreOf(*engine);
  OKV_ASSIGN_OR_RETURN(auto session, engine->NewSession(policy));
  const SessionStats stats = session->stats();
  OKV_ASSIGN_OR_RETURN(const PolicyInfo* info, FindPolicy(stats.policy));
  const bool dense = !f.decode && stats.dense_prompts;
  if (dense && info->name != "full" && !f.json) {
    LogInfo(
        "rows of a prompt read everything under policy {}: these are full attention's logits, "
        "{}'s own come with --decode",
        info->name, info->name);
  }
  int64_t steps = 0;
  if (f.decode) {
    session.reset();  // its place is that of a text
    OKV_ASSIGN_OR_RETURN(steps, Decode(core, policy, texts));
  } else {
    OKV_RETURN_IF_ERROR(Prefill(*session, engine->vocab(), texts));
  }
  if (!f.json) {
    for (const auto& text : texts) LogInfo("{}", text->Line());
    return {};
  }
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const auto& text : texts) rows.push_back(text->Json());
  fmt::print("{}\n", Dump({{"device", engine->device()},
                           {"policy", stats.policy},
                           {"settings", stats.settings},
                           {"attention", dense ? "dense" : "policy"},
                           {"decode_steps", steps},
                           {"texts", rows}}));
  return {};
}

}  // namespace

void AddLogits(CLI::App& app, Command& command) {
  auto f = std::make_shared<LogitsFlags>();
  CLI::App* sub = app.add_subcommand(
      "logits",
      "logits of given tokens, as NumPy files. Without --decode they are those of a prompt, whose "
      "rows read everything under every policy but streaming; with --decode they are the policy's "
      "own");
  AddRepeatable(*sub, "--tokens", f->tokens, "token ids, 1,2,3; may be repeated, a text each");
  AddRepeatable(*sub, "-f,--file", f->files,
                "a file with the ids, - is stdin; may be repeated, a text each");
  sub->add_option("--out", f->out,
                  "the .npy file to write, float32 [n_tokens, vocab]; of several texts, a folder "
                  "for 1.npy, 2.npy and so on")
      ->required();
  sub->add_flag("--decode", f->decode,
                "a decode step for each token after the prompt; several texts share the steps");
  sub->add_option("--prompt-tokens", f->prompt_tokens,
                  "with --decode: the first N tokens of each text are a prompt, and the rows are "
                  "those from its last token on: float32 [n_tokens - N + 1, vocab]")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
      ->capture_default_str();
  sub->add_flag("--json", f->json,
                "print one JSON object: mean negative log-likelihood and perplexity of each text");
  AddPolicyFlags(*sub, f->policy);
  AddEngineFlags(*sub, f->engine);
  sub->callback([&command, f] {
    command = [f]() -> Status {
      OKV_RETURN_IF_ERROR(ApplyPolicyFile(f->engine, f->policy));
      return Logits(*f);
    };
  });
}

}  // namespace omnikv::tools
