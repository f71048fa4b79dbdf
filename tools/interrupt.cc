#include "interrupt.h"

#include <fmt/format.h>

#include <atomic>

namespace omnikv::tools {
namespace {

// Handlers reach only globals.
std::atomic<Session*> g_session{nullptr};
std::atomic<bool> g_interrupted{false};

extern "C" void OnInterrupt(int) {
  g_interrupted.store(true);
  if (Session* session = g_session.load()) session->Cancel();
}

}  // namespace

CancelOnInterrupt::CancelOnInterrupt(Session& session) {
  g_interrupted.store(false);
  g_session.store(&session);
  sigaction(SIGINT, nullptr, &before_);
  if (before_.sa_handler == SIG_IGN) return;
  struct sigaction action {};
  action.sa_handler = OnInterrupt;
  action.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
}

CancelOnInterrupt::~CancelOnInterrupt() {
  sigaction(SIGINT, &before_, nullptr);
  g_session.store(nullptr);
}

Status CancelOnInterrupt::CutStatus(const GenerateResult& answer) const {
  // An answer is cancelled, too, when stdout takes no more of it.
  if (!g_interrupted.load() || answer.finish_reason != FinishReason::kCancelled) return {};
  return Cancelled(
      fmt::format("the answer was cut by Ctrl-C after {} tokens", answer.tokens.size()));
}

}  // namespace omnikv::tools
