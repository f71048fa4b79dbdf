// omnikv chat: turns of a conversation; the K/V of earlier turns is kept.
#include <fmt/format.h>

#include <chrono>
#include <cstdio>

#include "base/log.h"
#include "base/printable.h"
#include "chat/turns.h"
#include "flags.h"
#include "interrupt.h"
#include "omnikv/engine.h"
#include "policy_file.h"
#include "report.h"

namespace omnikv::tools {
namespace {

constexpr const char* kCommands = R"(/clear  forget the conversation
/bye    end it (or /exit, or Ctrl-D)
/help   this
A text that begins with a slash: one slash more. A text of several lines: """ before and after it.
Ctrl-C stops an answer, or gives a fresh prompt.)";

struct ChatFlags {
  EngineFlags engine;
  PolicyFlags policy;
  GenerateFlags generate;
  std::string system;
  bool json = false;
};

class Chat {
 public:
  Chat(const ChatFlags& flags, Engine& engine, Session& session, GenerateOptions generate)
      : f_(flags), engine_(engine), session_(session), generate_(std::move(generate)) {
    Clear();
  }

  // Until the turns end.
  Status Run();

 private:
  void Clear() {
    messages_.clear();
    if (!f_.system.empty()) messages_.push_back({"system", f_.system});
  }
  // Whether it is one that ends the conversation.
  bool RunCommand(const std::string& name);
  // Reads a text and answers it. kCancelled when Ctrl-C stopped it.
  Status Answer(const std::string& text);

  const ChatFlags& f_;
  Engine& engine_;
  Session& session_;
  GenerateOptions generate_;
  std::vector<ChatMessage> messages_;
};

bool Chat::RunCommand(const std::string& name) {
  if (name == "help") {
    WriteStderr(std::string(kCommands) + '\n');
  } else if (name == "clear") {
    Clear();
  } else if (name == "bye" || name == "exit") {
    return true;
  } else {
    LogLine(
        LogLevel::kQuiet,
        fmt::format("omnikv: there is no command /{0}; /help lists them, //{0} is a text", name));
  }
  return false;
}

Status Chat::Answer(const std::string& text) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<ChatMessage> messages = messages_;
  messages.push_back({"user", text});
  OKV_ASSIGN_OR_RETURN(const std::vector<int32_t> prompt, engine_.ChatPrompt(messages));
  if (static_cast<int64_t>(prompt.size()) > engine_.context()) {
    return InvalidArgument(
        fmt::format("the conversation has {} tokens, but the context holds {}: start a new chat or "
                    "raise --ctx",
                    prompt.size(), engine_.context()));
  }
  const CancelOnInterrupt interrupt(session_);
  OKV_RETURN_IF_ERROR(PromptWithProgress(session_, prompt));
  OKV_ASSIGN_OR_RETURN(const Reply reply, GenerateToStdout(session_, generate_, f_.json, start));
  messages.push_back({"assistant", reply.result.text});
  messages_ = std::move(messages);
  if (f_.json) {
    fmt::print("{}\n", Dump(ReplyJson(engine_, session_.stats(), prompt.size(), generate_, reply)));
  } else {
    PrintSummary(engine_, session_.stats(), generate_, reply);
  }
  return interrupt.CutStatus(reply.result);
}

Status Chat::Run() {
  const auto turns = OpenTurns();
  if (turns->interactive()) LogInfo("/help lists the commands, Ctrl-D ends the conversation");
  while (true) {
    OKV_ASSIGN_OR_RETURN(const Turn turn, turns->Next());
    if (turn.kind == Turn::Kind::kEnd) return {};
    if (turn.kind == Turn::Kind::kCommand) {
      if (RunCommand(turn.text)) return {};
      continue;
    }
    const Status answered = Answer(turn.text);
    if (!answered.ok()) {
      // The turn did not fit, or was stopped: people go on.
      if (!turns->interactive()) return answered;
      LogLine(LogLevel::kQuiet, "omnikv: " + Escaped(answered.message(), 4000));
    }
    if (std::fflush(stdout) != 0) return {};  // the program says so
  }
}

Status RunChat(const ChatFlags& f) {
  OKV_ASSIGN_OR_RETURN(EngineOptions options, ToEngineOptions(f.engine));
  OKV_ASSIGN_OR_RETURN(const PolicyOptions policy, ToPolicyOptions(f.policy));
  options.policy = policy;
  OKV_ASSIGN_OR_RETURN(GenerateOptions generate, ToGenerateOptions(f.generate));
  options.check = [](const Engine& engine) {  // a missing template is told before weights load
    return engine.ChatPrompt({{"user", "Hello"}}).status();
  };
  OKV_ASSIGN_OR_RETURN(const auto engine, LoadWithProgress(std::move(options), f.json));
  OKV_ASSIGN_OR_RETURN(const auto session, engine->NewSession(policy));
  return Chat(f, *engine, *session, std::move(generate)).Run();
}

}  // namespace

void AddChat(CLI::App& app, Command& command) {
  auto f = std::make_shared<ChatFlags>();
  CLI::App* sub = app.add_subcommand(
      "chat",
      "a conversation: typed at a terminal (/help lists its commands), else a line per turn");
  sub->add_option("--system", f->system, "a system message");
  sub->add_flag("--json", f->json, "print one JSON object per turn");
  AddGenerateFlags(*sub, f->generate);
  AddPolicyFlags(*sub, f->policy);
  AddEngineFlags(*sub, f->engine);
  sub->callback([&command, f] {
    command = [f]() -> Status {
      OKV_RETURN_IF_ERROR(ApplyPolicyFile(f->engine, f->policy));
      return RunChat(*f);
    };
  });
}

}  // namespace omnikv::tools
