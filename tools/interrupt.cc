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

extern "C" void OnInterruptBetweenAnswers(int) {}

// What SIGINT did before `handler` took it. Nothing changes where it was ignored.
struct sigaction HandleInterrupts(void (*handler)(int), int flags) {
  struct sigaction before {};
  sigaction(SIGINT, nullptr, &before);
  if (before.sa_handler == SIG_IGN) return before;
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART | flags;
  sigaction(SIGINT, &action, nullptr);
  return before;
}

}  // namespace

CancelOnInterrupt::CancelOnInterrupt(Session& session) {
  g_interrupted.store(false);
  g_session.store(&session);
  before_ = HandleInterrupts(OnInterrupt, static_cast<int>(SA_RESETHAND));
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

OutliveInterrupts::OutliveInterrupts()
    : before_(HandleInterrupts(OnInterruptBetweenAnswers, 0)) {}

OutliveInterrupts::~OutliveInterrupts() { sigaction(SIGINT, &before_, nullptr); }

}  // namespace omnikv::tools
