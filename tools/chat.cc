// omnikv chat: turns of a conversation; the K/V of earlier turns is kept.
#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>

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
};

Status Chat(const ChatFlags& f) {
  OKV_ASSIGN_OR_RETURN(EngineOptions options, ToEngineOptions(f.engine));
  OKV_ASSIGN_OR_RETURN(const PolicyOptions policy, ToPolicyOptions(f.policy));
  OKV_RETURN_IF_ERROR(CheckGenerate(f.generate));
  OKV_ASSIGN_OR_RETURN(const auto engine, LoadWithProgress(std::move(options)));
  OKV_ASSIGN_OR_RETURN(const auto session, engine->NewSession(policy));
  std::vector<ChatMessage> messages;
  if (!f.system.empty()) messages.push_back({"system", f.system});
  const bool terminal = isatty(STDIN_FILENO) != 0;
  std::string line;
  while (true) {
    if (terminal) fmt::print(stderr, "> ");
    if (!std::getline(std::cin, line)) break;
    if (line.empty()) continue;
    messages.push_back({"user", line});
    OKV_ASSIGN_OR_RETURN(const std::vector<int32_t> prompt, engine->ChatPrompt(messages));
    const CancelOnInterrupt interrupt(*session);
    const Status read = PromptWithProgress(*session, prompt);
    if (!read.ok()) {  // the turn did not fit, or was cancelled: the conversation goes on without
                       // it
      fmt::print(stderr, "omnikv: {}\n", read.message());
      messages.pop_back();
      if (!terminal) return read;
      continue;
    }
    OKV_ASSIGN_OR_RETURN(const GenerateResult answer,
                         session->Generate(f.generate, [](std::string_view piece) {
                           std::fwrite(piece.data(), 1, piece.size(), stdout);
                           std::fflush(stdout);
                           return true;
                         }));
    fmt::print("\n");
    std::fflush(stdout);
    messages.push_back({"assistant", answer.text});
    const SessionStats stats = session->stats();
    fmt::print(stderr, "({} tokens read anew, {} in context)\n", stats.prefill_tokens,
               stats.context_tokens);
  }
  return {};
}

}  // namespace

void AddChat(CLI::App& app, Command& command) {
  auto f = std::make_shared<ChatFlags>();
  CLI::App* sub = app.add_subcommand("chat", "a conversation, a line a turn");
  sub->add_option("--system", f->system, "a system message");
  AddGenerateFlags(*sub, f->generate);
  AddPolicyFlags(*sub, f->policy);
  AddEngineFlags(*sub, f->engine);
  sub->callback([&command, f] { command = [f] { return Chat(*f); }; });
}

}  // namespace omnikv::tools
