// omnikv run: answers one prompt.
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <span>

#include "engine/core.h"
#include "flags.h"
#include "interrupt.h"
#include "omnikv/engine.h"
#include "policy_file.h"
#include "report.h"
#include "saved_context.h"

namespace omnikv::tools {
namespace {

struct RunFlags {
  EngineFlags engine;
  PolicyFlags policy;
  GenerateFlags generate;
  std::string prompt, file, system, load, save;
  bool raw = false;
  bool json = false;
};

// Empty: a loaded context goes on by itself.
Result<std::string> PromptText(const RunFlags& f) {
  if (!f.load.empty() && f.prompt.empty() && f.file.empty()) return std::string();
  if (f.prompt.empty() == f.file.empty()) {
    return InvalidArgument("give the prompt either with -p TEXT or with -f FILE (- is stdin)");
  }
  if (!f.prompt.empty()) return f.prompt;
  OKV_ASSIGN_OR_RETURN(std::string text, ReadText("-f", f.file));
  if (text.empty()) return InvalidArgument(fmt::format("-f {} is empty, expected a text", f.file));
  return text;
}

// The prompt; of a loaded context, what follows it.
Result<std::vector<int32_t>> PromptTokens(const RunFlags& f, const std::string& text,
                                          const Engine& engine) {
  if (f.raw) return engine.Tokenize(text, /*add_special=*/f.load.empty(), /*parse_special=*/true);
  const EngineCore& core = CoreOf(engine);
  if (!f.load.empty()) OKV_RETURN_IF_ERROR(NeedTokenizer(core));
  std::vector<ChatMessage> messages;
  if (!f.system.empty()) messages.push_back({"system", f.system});
  messages.push_back({"user", text});
  auto prompt =
      f.load.empty() ? engine.ChatPrompt(messages) : NextTurn(core.text, core.options.model, text);
  const bool other = prompt.status().code() != StatusCode::kUnsupported;
  if (prompt.ok() || other || (f.load.empty() && engine.has_chat_template())) return prompt;
  return Unsupported(prompt.status().message() + ": use --raw");
}

// The whole context that the answer is to follow, of tokens that are there already (--load) and
// those of the text.
Result<std::vector<int32_t>> ContextFor(const RunFlags& f, const std::string& text,
                                        const Engine& engine, std::span<const int32_t> tokens,
                                        int32_t pending) {
  if (text.empty()) {
    if (!EndsAnswer(engine, pending)) return std::vector<int32_t>(tokens.begin(), tokens.end());
    return InvalidArgument(fmt::format(
        "--load is '{}', whose answer has come to its end: give what is said next with -p TEXT or "
        "with -f FILE",
        f.load));
  }
  OKV_ASSIGN_OR_RETURN(const std::vector<int32_t> more, PromptTokens(f, text, engine));
  return GoOn(engine, tokens, pending, more);
}

Status Run(const RunFlags& f) {
  OKV_ASSIGN_OR_RETURN(EngineOptions options, ToEngineOptions(f.engine));
  if (!f.load.empty() && !f.system.empty()) {
    return InvalidArgument(fmt::format(
        "--system is '{}', but --load goes on with a conversation that has begun: leave it out",
        f.system));
  }
  ContextHead head;
  if (!f.load.empty()) {
    OKV_ASSIGN_OR_RETURN(head, ReadLoadFile(f.load));
  }
  OKV_ASSIGN_OR_RETURN(
      const PolicyOptions policy,
      f.load.empty() ? ToPolicyOptions(f.policy) : LoadedPolicy(f.load, head.saved, f.policy));
  options.policy = policy;
  OKV_ASSIGN_OR_RETURN(const GenerateOptions generate, ToGenerateOptions(f.generate));
  OKV_ASSIGN_OR_RETURN(const std::string text, PromptText(f));
  if (!f.save.empty()) OKV_RETURN_IF_ERROR(CheckSaveFile(f.save));
  using Clock = std::chrono::steady_clock;
  std::vector<int32_t> prompt;
  Clock::duration tokenizing{};
  options.check = [&](const Engine& engine) -> Status {
    const auto before = Clock::now();
    OKV_ASSIGN_OR_RETURN(prompt, ContextFor(f, text, engine, head.tokens, head.saved.pending));
    tokenizing = Clock::now() - before;
    if (f.load.empty()) return engine.CheckPrompt(prompt);
    if (std::ssize(prompt) <= engine.context()) return {};
    return InvalidArgument(fmt::format(
        "--load is '{}', with which there are {} tokens, but the context holds {}: raise --ctx",
        f.load, prompt.size(), engine.context()));
  };
  OKV_ASSIGN_OR_RETURN(const auto engine, LoadWithProgress(std::move(options), f.json));
  const auto start = Clock::now() - tokenizing;
  OKV_ASSIGN_OR_RETURN(const auto session,
                       f.load.empty() ? engine->NewSession(policy) : engine->Restore(f.load));
  const CancelOnInterrupt interrupt(*session);
  if (!text.empty()) OKV_RETURN_IF_ERROR(PromptWithProgress(*session, prompt));
  OKV_ASSIGN_OR_RETURN(const Reply reply, GenerateToStdout(*session, generate, f.json, start));
  if (f.json) {
    fmt::print("{}\n", Dump(ReplyJson(*engine, session->stats(), prompt.size(), generate, reply)));
  } else {
    PrintSummary(*engine, session->stats(), generate, reply);
  }
  if (!f.save.empty()) OKV_RETURN_IF_ERROR(session->Save(f.save).Prefixed("--save"));
  return interrupt.CutStatus(reply.result);
}

}  // namespace

void AddRun(CLI::App& app, Command& command) {
  auto f = std::make_shared<RunFlags>();
  CLI::App* sub = app.add_subcommand("run", "answer a prompt");
  sub->add_option("-p,--prompt", f->prompt, "the prompt");
  sub->add_option("-f,--file", f->file, "a file that holds it; - is stdin");
  sub->add_option("--system", f->system, "a system message before it");
  sub->add_option(
      "--load", f->load,
      "go on with the context of a file that --save wrote: the prompt is the next turn; "
      "without one the answer goes on");
  sub->add_option("--save", f->save, "a file to write the context to, after the answer");
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
