// What the handles of engines and sessions stand for.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "capi/status.h"
#include "engine/answer.h"
#include "omnikv/engine.h"

namespace omnikv::capi {

// Lives until the engine's handle, its sessions and its batches are gone.
struct EngineState {
  std::unique_ptr<Engine> engine;
  std::string device;

  std::mutex mutex;  // held by whoever drives the engine
  std::atomic<std::thread::id> driver{};
  int64_t sessions = 0;  // open; under the mutex, as the next
  bool batch = false;
};

// The calling thread drives the engine until it goes. Callbacks run while their thread does: it
// cannot lock twice.
class Driving {
 public:
  explicit Driving(EngineState& state)
      : state_(state), nested_(state.driver == std::this_thread::get_id()) {
    if (nested_) return;
    state_.mutex.lock();
    state_.driver = std::this_thread::get_id();
  }
  ~Driving() {
    if (nested_) return;
    state_.driver = std::thread::id();
    state_.mutex.unlock();
  }
  Driving(const Driving&) = delete;
  Driving& operator=(const Driving&) = delete;

  Status status() const {
    return nested_ ? InvalidArgument("a callback calls a session of the engine it runs on")
                   : Status();
  }

 private:
  EngineState& state_;
  bool nested_;
};

// An answer that is asked for in pieces.
struct Pull {
  GenerateOptions options;
  Answer answer;
  std::map<int32_t, int32_t> drawn = {};  // how often, where a penalty asks for it
  std::optional<FinishReason> cut = {};   // by the session, before the answer had ended
  bool done = false;                      // its last piece was given
  omnikv_finish finish = OMNIKV_FINISH_NONE;
  int64_t steps = 0;
  double seconds = 0;
};

struct SessionState {
  // REQUIRES that the thread drives the engine.
  SessionState(std::shared_ptr<EngineState> of, std::unique_ptr<Session> opened)
      : engine(std::move(of)), session(std::move(opened)) {
    ++engine->sessions;
  }
  ~SessionState() {
    const Driving driving(*engine);
    pull.reset();
    session.reset();
    --engine->sessions;
  }
  SessionState(const SessionState&) = delete;
  SessionState& operator=(const SessionState&) = delete;

  std::shared_ptr<EngineState> engine;
  std::unique_ptr<Session> session;
  bool has_logits = false;
  std::optional<Pull> pull;  // begun after the last prompt or step
  std::string piece;         // that next gave
  // Session::Generate forgets a cancel that comes while it computes its last token, which every
  // token is where they are asked for one by one.
  std::atomic<bool> cancelled{false};
};

}  // namespace omnikv::capi

// NOLINTBEGIN(readability-identifier-naming): the C API's
struct omnikv_engine {
  std::shared_ptr<omnikv::capi::EngineState> state;
};
struct omnikv_session {
  std::shared_ptr<omnikv::capi::SessionState> state;
};
// NOLINTEND(readability-identifier-naming)
