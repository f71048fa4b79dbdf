// omnikv logits: what the model makes of given tokens, for comparison with other engines.
#include <fmt/format.h>

#include <charconv>
#include <cstdio>

#include "flags.h"
#include "omnikv/engine.h"
#include "output_file.h"
#include "report.h"

namespace omnikv::tools {
namespace {

struct LogitsFlags {
  EngineFlags engine;
  PolicyFlags policy;
  std::string tokens, file, out;
};

// Ids separated by commas or white space; brackets are passed over.
Result<std::vector<int32_t>> ParseIds(const std::string& flag, const std::string& text) {
  std::vector<int32_t> ids;
  for (const char* at = text.data(); at != text.data() + text.size();) {
    if (std::string_view(" ,\n\r\t[]").find(*at) != std::string_view::npos) {
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

Status Logits(const LogitsFlags& f) {
  OKV_ASSIGN_OR_RETURN(EngineOptions options, ToEngineOptions(f.engine));
  OKV_ASSIGN_OR_RETURN(const PolicyOptions policy, ToPolicyOptions(f.policy));
  options.policy = policy;
  if (f.tokens.empty() == f.file.empty()) {
    return InvalidArgument("give the ids either with --tokens 1,2,3 or with -f FILE");
  }
  std::string text = f.tokens;
  if (!f.file.empty()) {
    OKV_ASSIGN_OR_RETURN(text, ReadText("-f", f.file));
  }
  OKV_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                       ParseIds(f.tokens.empty() ? "-f" : "--tokens", text));
  OutputFile file("--out", f.out);
  OKV_RETURN_IF_ERROR(file.Open());
  options.check = [&](const Engine& engine) { return engine.CheckPrompt(ids); };
  OKV_ASSIGN_OR_RETURN(const auto engine, LoadWithProgress(std::move(options)));
  OKV_ASSIGN_OR_RETURN(const auto session, engine->NewSession(policy));
  const std::string header = NpyHeader(ids.size(), engine->vocab());
  file.Write(header.data(), header.size());
  const size_t row_bytes = static_cast<size_t>(engine->vocab()) * sizeof(float);
  OKV_RETURN_IF_ERROR(session->PromptLogits(
      ids, [&](int64_t, const float* logits) { file.Write(logits, row_bytes); }));
  return file.Commit();
}

}  // namespace

void AddLogits(CLI::App& app, Command& command) {
  auto f = std::make_shared<LogitsFlags>();
  CLI::App* sub = app.add_subcommand("logits", "logits of every position, as a NumPy file");
  sub->add_option("--tokens", f->tokens, "token ids, 1,2,3");
  sub->add_option("-f,--file", f->file, "a file with the ids; - is stdin");
  sub->add_option("--out", f->out, "the .npy file to write: float32 [n_tokens, vocab]")->required();
  AddPolicyFlags(*sub, f->policy);
  AddEngineFlags(*sub, f->engine);
  sub->callback([&command, f] { command = [f] { return Logits(*f); }; });
}

}  // namespace omnikv::tools
