// omnikv chat: turns of a conversation; the K/V of earlier turns is kept.
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <iostream>

#include "base/log.h"
#include "engine/sampler.h"
#include "flags.h"
#include "omnikv/engine.h"
#include "report.h"

namespace omnikv::tools {
namespace {

struct ChatFlags {
  EngineFlags engine;
  PolicyFlags policy;
  GenerateOptions generate;
  std::string system;
  bool json = false;
};

// What a turn took, and what to do when nothing more fits.
void PrintTurn(const Engine& engine, const SessionStats& s) {
  LogInfo("({} tokens read anew at {:.0f} tok/s, {} written at {:.1f} tok/s, {} in context)",
          s.prefill_tokens, PerSecond(s.prefill_tokens, s.prefill_seconds), s.decode_tokens,
          PerSecond(s.decode_tokens, s.decode_seconds), s.context_tokens);
  if (s.context_tokens >= engine.context()) {
    LogInfo("the context of {} tokens is full: start a new chat or raise --ctx", engine.context());
  }
}

Status ReadTurn(const Engine& engine, Session& session, const std::vector<int32_t>& prompt) {
  if (static_cast<int64_t>(prompt.size()) > engine.context()) {
    return InvalidArgument(
        fmt::format("the conversation has {} tokens, but the context holds {}: start a new chat or "
                    "raise --ctx",
                    prompt.size(), engine.context()));
  }
  return PromptWithProgress(session, prompt);
}

Status Chat(const ChatFlags& f) {
  OKV_ASSIGN_OR_RETURN(EngineOptions options, ToEngineOptions(f.engine));
  OKV_ASSIGN_OR_RETURN(const PolicyOptions policy, ToPolicyOptions(f.policy));
  options.policy = policy;
  OKV_RETURN_IF_ERROR(CheckGenerate(f.generate));
  // Before the weights are read: whether the model can chat at all.
  options.check = [](const Engine& engine) { return engine.ChatPrompt({{"user", "x"}}).status(); };
  OKV_ASSIGN_OR_RETURN(const auto engine, LoadWithProgress(std::move(options), f.json));
  OKV_ASSIGN_OR_RETURN(const auto session, engine->NewSession(policy));
  std::vector<ChatMessage> messages;
  if (!f.system.empty()) messages.push_back({"system", f.system});
  const bool terminal = isatty(STDIN_FILENO) != 0;
  std::string line;
  while (true) {
    if (terminal) WriteStderr("> ");
    if (!std::getline(std::cin, line)) break;
    if (line.empty()) continue;
    const auto start = std::chrono::steady_clock::now();
    messages.push_back({"user", line});
    OKV_ASSIGN_OR_RETURN(const std::vector<int32_t> prompt, engine->ChatPrompt(messages));
    const CancelOnInterrupt interrupt(*session);
    const Status read = ReadTurn(*engine, *session, prompt);
    const auto reply =
        read.ok() ? GenerateToStdout(*session, f.generate, f.json, start) : Result<Reply>(read);
    if (!reply.ok()) {
      // The turn did not fit, or was cancelled: people go on without it.
      if (!terminal) return reply.status();
      WriteStderr(fmt::format("omnikv: {}\n", reply.status().message()));
      messages.pop_back();
      continue;
    }
    messages.push_back({"assistant", reply->result.text});
    if (f.json) {
      fmt::print("{}\n", Dump(ReplyJson(*engine, session->stats(), prompt.size(), *reply)));
    } else {
      PrintTurn(*engine, session->stats());
    }
    if (std::fflush(stdout) != 0) break;  // the program says so
  }
  return {};
}

}  // namespace

void AddChat(CLI::App& app, Command& command) {
  auto f = std::make_shared<ChatFlags>();
  CLI::App* sub = app.add_subcommand("chat", "a conversation, a line a turn");
  sub->add_option("--system", f->system, "a system message");
  sub->add_flag("--json", f->json, "print one JSON object a turn");
  AddGenerateFlags(*sub, f->generate);
  AddPolicyFlags(*sub, f->policy);
  AddEngineFlags(*sub, f->engine);
  sub->callback([&command, f] { command = [f] { return Chat(*f); }; });
}

}  // namespace omnikv::tools
