// omnikv run: answers one prompt.
#include <fmt/format.h>

#include <chrono>
#include <cstdio>

#include "flags.h"
#include "interrupt.h"
#include "omnikv/engine.h"
#include "policy_file.h"
#include "report.h"

namespace omnikv::tools {
namespace {

struct RunFlags {
  EngineFlags engine;
  PolicyFlags policy;
  GenerateFlags generate;
  std::string prompt, file, system;
  bool raw = false;
  bool json = false;
};

Result<std::string> PromptText(const RunFlags& f) {
  if (f.prompt.empty() == f.file.empty()) {
    return InvalidArgument("give the prompt either with -p TEXT or with -f FILE (- is stdin)");
  }
  if (!f.prompt.empty()) return f.prompt;
  OKV_ASSIGN_OR_RETURN(std::string text, ReadText("-f", f.file));
  if (text.empty()) return InvalidArgument(fmt::format("-f {} is empty, expected a text", f.file));
  return text;
}

Result<std::vector<int32_t>> PromptTokens(const RunFlags& f, const std::string& text,
                                          const Engine& engine) {
  if (f.raw) return engine.Tokenize(text, /*add_special=*/true, /*parse_special=*/true);
  std::vector<ChatMessage> messages;
  if (!f.system.empty()) messages.push_back({"system", f.system});
  messages.push_back({"user", text});
  auto prompt = engine.ChatPrompt(messages);
  const bool other = prompt.status().code() != StatusCode::kUnsupported;
  if (prompt.ok() || other || engine.has_chat_template()) return prompt;
  return Unsupported(prompt.status().message() + ": use --raw");
}

Status Run(const RunFlags& f) {
  OKV_ASSIGN_OR_RETURN(EngineOptions options, ToEngineOptions(f.engine));
  OKV_ASSIGN_OR_RETURN(const PolicyOptions policy, ToPolicyOptions(f.policy));
  options.policy = policy;
  OKV_ASSIGN_OR_RETURN(const GenerateOptions generate, ToGenerateOptions(f.generate));
  OKV_ASSIGN_OR_RETURN(const std::string text, PromptText(f));
  using Clock = std::chrono::steady_clock;
  std::vector<int32_t> prompt;
  Clock::duration tokenizing{};
  options.check = [&](const Engine& engine) -> Status {
    const auto before = Clock::now();
    OKV_ASSIGN_OR_RETURN(prompt, PromptTokens(f, text, engine));
    tokenizing = Clock::now() - before;
    return engine.CheckPrompt(prompt);
  };
  OKV_ASSIGN_OR_RETURN(const auto engine, LoadWithProgress(std::move(options), f.json));
  const auto start = Clock::now() - tokenizing;
  OKV_ASSIGN_OR_RETURN(const auto session, engine->NewSession(policy));
  const CancelOnInterrupt interrupt(*session);
  OKV_RETURN_IF_ERROR(PromptWithProgress(*session, prompt));
  OKV_ASSIGN_OR_RETURN(const Reply reply, GenerateToStdout(*session, generate, f.json, start));
  if (f.json) {
    fmt::print("{}\n", Dump(ReplyJson(*engine, session->stats(), prompt.size(), generate, reply)));
  } else {
    PrintSummary(*engine, session->stats(), generate, reply);
  }
  return interrupt.CutStatus(reply.result);
}

}  // namespace

void AddRun(CLI::App& app, Command& command) {
  auto f = std::make_shared<RunFlags>();
  CLI::App* sub = app.add_subcommand("run", "answer a prompt");
  sub->add_option("-p,--prompt", f->prompt, "the prompt");
  sub->add_option("-f,--file", f->file, "a file that holds it; - is stdin");
  sub->add_option("--system", f->system, "a system message before it");
  sub->add_flag("--raw", f->raw, "no chat template; special tokens are parsed");
  sub->add_flag("--json", f->json, "print one JSON object");
  AddGenerateFlags(*sub, f->generate);
  AddPolicyFlags(*sub, f->policy);
  AddEngineFlags(*sub, f->engine);
  sub->callback([&command, f] {
    command = [f]() -> Status {
      OKV_RETURN_IF_ERROR(ApplyPolicyFile(f->engine, f->policy));
      return Run(*f);
    };
  });
}

}  // namespace omnikv::tools
