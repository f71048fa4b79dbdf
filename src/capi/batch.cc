// Batches of the C API: a scheduler and its thread, and requests whose pieces are asked for.
#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <nlohmann/json.hpp>
#include <shared_mutex>

#include "capi/handles.h"
#include "capi/options.h"
#include "engine/core.h"

namespace omnikv::capi {
namespace {

std::string Dump(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

class BatchState {
 public:
  static Result<std::shared_ptr<BatchState>> Open(const std::shared_ptr<EngineState>& engine,
                                                  const omnikv_options* options);
  ~BatchState() { static_cast<void>(Stop(/*drain=*/false)); }
  BatchState(const BatchState&) = delete;
  BatchState& operator=(const BatchState&) = delete;

  Result<uint64_t> Submit(Request request) {
    const std::shared_lock lock(mutex_);
    if (scheduler_ == nullptr) return InvalidArgument("the batch has stopped");
    return scheduler_->Submit(std::move(request));
  }
  void Cancel(uint64_t id) {
    const std::shared_lock lock(mutex_);
    if (scheduler_ != nullptr) scheduler_->Cancel(id);
  }
  SchedulerStats stats() const {
    const std::shared_lock lock(mutex_);
    return scheduler_ != nullptr ? scheduler_->stats() : last_stats_;
  }
  Status Stop(bool drain);

 private:
  explicit BatchState(std::shared_ptr<EngineState> engine) : engine_(std::move(engine)) {}

  std::shared_ptr<EngineState> engine_;
  std::unique_ptr<ContextStore> store_;

  mutable std::shared_mutex mutex_;  // of the next two
  std::unique_ptr<Scheduler> scheduler_;
  SchedulerStats last_stats_;

  std::thread thread_;
  std::thread::id runs_on_;
  std::mutex stop_mutex_;  // one stops it, the others wait
  std::atomic<std::thread::id> stops_on_{};
};

Result<std::shared_ptr<BatchState>> BatchState::Open(const std::shared_ptr<EngineState>& engine,
                                                     const omnikv_options* options) {
  const Driving driving(*engine);
  OKV_RETURN_IF_ERROR(driving.status());
  EngineCore& core = CoreOf(*engine->engine);
  const int32_t most = std::min(kMaxBatch, core.options.max_sessions);
  OKV_ASSIGN_OR_RETURN(const BatchOptions o, BatchOptionsOf(options, most));
  if (engine->batch) return InvalidArgument("a batch has the engine already, expected none");
  if (engine->sessions > 0) {
    return InvalidArgument(
        fmt::format("the engine has {} open sessions, expected none: free them before a batch",
                    engine->sessions));
  }
  std::shared_ptr<BatchState> batch(new BatchState(engine));
  if (!o.store.folder.empty()) {
    OKV_ASSIGN_OR_RETURN(batch->store_, ContextStore::Open(core, o.store));
  }
  OKV_ASSIGN_OR_RETURN(batch->scheduler_,
                       Scheduler::Create(core, o.scheduler, batch->store_.get()));
  batch->thread_ = std::thread([scheduler = batch->scheduler_.get()] { scheduler->Run(); });
  batch->runs_on_ = batch->thread_.get_id();
  engine->batch = true;
  return batch;
}

Status BatchState::Stop(bool drain) {
  const std::thread::id here = std::this_thread::get_id();
  if (here == runs_on_ || here == stops_on_) {
    return InvalidArgument("a batch cannot be stopped by its own callbacks");
  }
  {
    // Before others are waited for: a second stop ends the draining of the first.
    const std::shared_lock lock(mutex_);
    if (scheduler_ != nullptr) scheduler_->Stop(drain);
  }
  const std::lock_guard stopping(stop_mutex_);
  if (!thread_.joinable()) return {};
  thread_.join();
  std::unique_ptr<Scheduler> gone;
  {
    const std::unique_lock lock(mutex_);
    gone = std::move(scheduler_);
  }
  // Requests that are left end now, and their callbacks may ask the batch.
  stops_on_ = here;
  SchedulerStats stats = gone->stats();
  stats.cancelled += stats.running + stats.waiting;
  stats.running = stats.waiting = 0;
  {
    const std::unique_lock lock(mutex_);
    last_stats_ = stats;
  }
  gone.reset();
  store_.reset();
  stops_on_ = std::thread::id();
  const Driving driving(*engine_);
  engine_->batch = false;
  return {};
}

std::string StatsText(const RequestEnd& end) {
  const RequestStats& s = end.stats;
  return Dump(
      {{"policy", s.policy},
       {"settings", s.settings},
       {"prompt_tokens", s.prompt_tokens},
       {"cached_tokens", s.cached_tokens},
       {"stored_tokens", s.stored_tokens},
       {"answer_tokens", s.answer_tokens},
       {"queue_seconds", s.queue_seconds},
       {"prefill_seconds", s.prefill_seconds},
       {"decode_seconds", s.decode_seconds},
       {"read_fraction", s.read_fraction},
       {"attended_tokens", s.attended_tokens},
       {"held_bytes", {{"device", s.held.device}, {"host", s.held.host}, {"disk", s.held.disk}}},
       {"hit_rate", s.hit_rate ? nlohmann::ordered_json(*s.hit_rate) : nullptr},
       {"fetched_bytes", s.fetched_bytes},
       {"stop", end.stop}});
}

// A request whose callbacks are the caller's.
struct Calls {
  omnikv_on_piece on_piece;
  omnikv_on_end on_end;
  void* user;
  std::weak_ptr<BatchState> batch;
  // Callbacks can come before Submit has given the id.
  std::atomic<uint64_t> id{0};
  std::atomic<bool> ends{false};

  void Piece(int32_t token, const std::string& text) {
    if (on_piece == nullptr || on_piece(user, token, text.c_str(), text.size()) == 0) return;
    ends = true;
    EndIfKnown();
  }
  void EndIfKnown() {
    if (!ends || id == 0) return;
    if (const auto state = batch.lock()) state->Cancel(id);
  }
  void End(const Result<RequestEnd>& end) {
    if (!end.ok()) {
      return on_end(user, static_cast<omnikv_status>(end.status().code()),
                    end.status().message().c_str(), OMNIKV_FINISH_NONE, "{}");
    }
    if (!end->text.empty()) Piece(-1, end->text);
    on_end(user, OMNIKV_OK, "", FinishOf(end->reason), StatsText(*end).c_str());
  }
};

// A request whose pieces wait.
struct StreamState {
  std::weak_ptr<BatchState> batch;
  uint64_t id = 0;

  std::mutex mutex;  // of what follows
  std::condition_variable changed;
  std::deque<std::pair<int32_t, std::string>> pieces;
  bool ended = false;
  Status failure;
  omnikv_finish finish = OMNIKV_FINISH_NONE;
  std::string stats = "{}";

  void Put(int32_t token, std::string text) {
    const std::lock_guard lock(mutex);
    pieces.emplace_back(token, std::move(text));
    changed.notify_one();
  }
  void End(const Result<RequestEnd>& end) {
    if (end.ok() && !end->text.empty()) Put(-1, end->text);
    const std::lock_guard lock(mutex);
    ended = true;
    failure = end.status();
    if (end.ok()) {
      finish = FinishOf(end->reason);
      stats = StatsText(*end);
    }
    changed.notify_all();
  }
  void Cancel() {
    if (const auto state = batch.lock()) state->Cancel(id);
  }
};

}  // namespace
}  // namespace omnikv::capi

// NOLINTBEGIN(readability-identifier-naming): names of C.
struct omnikv_batch {
  std::shared_ptr<omnikv::capi::BatchState> state;
};

struct omnikv_stream {
  std::shared_ptr<omnikv::capi::StreamState> state;
  std::string piece;  // that next gave
};

using omnikv::Status;
using omnikv::capi::Give;
using omnikv::capi::Guarded;
using omnikv::capi::Need;

omnikv_status omnikv_batch_new(omnikv_engine* engine, const omnikv_options* options,
                               omnikv_batch** batch) {
  return Guarded([&]() -> Status {
    OKV_RETURN_IF_ERROR(Need(batch, "the place for a batch"));
    *batch = nullptr;
    OKV_RETURN_IF_ERROR(Need(engine, "the engine"));
    OKV_ASSIGN_OR_RETURN(auto state, omnikv::capi::BatchState::Open(engine->state, options));
    *batch = new omnikv_batch{std::move(state)};
    return {};
  });
}

void omnikv_batch_free(omnikv_batch* batch) {
  if (batch != nullptr) static_cast<void>(omnikv_batch_stop(batch, /*drain=*/0));
  delete batch;
}

omnikv_status omnikv_batch_submit(omnikv_batch* batch, const int32_t* tokens, size_t n,
                                  const omnikv_options* options, omnikv_on_piece on_piece,
                                  omnikv_on_end on_end, void* user, uint64_t* id) {
  return Guarded([&]() -> Status {
    if (id != nullptr) *id = 0;
    OKV_RETURN_IF_ERROR(Need(batch, "the batch"));
    if (on_end == nullptr) return omnikv::InvalidArgument("the callback of the end is NULL");
    OKV_ASSIGN_OR_RETURN(omnikv::Request request, omnikv::capi::RequestOf(options));
    OKV_ASSIGN_OR_RETURN(request.prompt, omnikv::capi::TokensOf(tokens, n));
    auto calls = std::make_shared<omnikv::capi::Calls>();
    calls->on_piece = on_piece;
    calls->on_end = on_end;
    calls->user = user;
    calls->batch = batch->state;
    request.on_piece = [calls](const omnikv::AnswerPiece& piece) {
      calls->Piece(piece.token, piece.text);
    };
    request.on_end = [calls](const omnikv::Result<omnikv::RequestEnd>& end) { calls->End(end); };
    OKV_ASSIGN_OR_RETURN(const uint64_t given, batch->state->Submit(std::move(request)));
    calls->id = given;
    calls->EndIfKnown();
    if (id != nullptr) *id = given;
    return {};
  });
}

omnikv_status omnikv_batch_cancel(omnikv_batch* batch, uint64_t id) {
  return Guarded([&]() -> Status {
    OKV_RETURN_IF_ERROR(Need(batch, "the batch"));
    batch->state->Cancel(id);
    return {};
  });
}

omnikv_status omnikv_batch_stats(omnikv_batch* batch, char** json) {
  return Guarded([&]() -> Status {
    OKV_RETURN_IF_ERROR(Need(json, "the place for text"));
    *json = nullptr;
    OKV_RETURN_IF_ERROR(Need(batch, "the batch"));
    const omnikv::SchedulerStats s = batch->state->stats();
    return Give(omnikv::capi::Dump({{"running", s.running},
                                    {"waiting", s.waiting},
                                    {"kept_contexts", s.kept_contexts},
                                    {"finished", s.finished},
                                    {"refused", s.refused},
                                    {"cancelled", s.cancelled},
                                    {"failed", s.failed},
                                    {"prompt_tokens", s.prompt_tokens},
                                    {"cached_tokens", s.cached_tokens},
                                    {"answer_tokens", s.answer_tokens},
                                    {"steps", s.steps},
                                    {"step_rows", s.step_rows},
                                    {"blocks_used", s.blocks_used},
                                    {"blocks_total", s.blocks_total}}),
                json, nullptr);
  });
}

omnikv_status omnikv_batch_stop(omnikv_batch* batch, int drain) {
  return Guarded([&]() -> Status {
    OKV_RETURN_IF_ERROR(Need(batch, "the batch"));
    return batch->state->Stop(drain != 0);
  });
}

omnikv_status omnikv_batch_stream(omnikv_batch* batch, const int32_t* tokens, size_t n,
                                  const omnikv_options* options, omnikv_stream** stream) {
  return Guarded([&]() -> Status {
    OKV_RETURN_IF_ERROR(Need(stream, "the place for a stream"));
    *stream = nullptr;
    OKV_RETURN_IF_ERROR(Need(batch, "the batch"));
    OKV_ASSIGN_OR_RETURN(omnikv::Request request, omnikv::capi::RequestOf(options));
    OKV_ASSIGN_OR_RETURN(request.prompt, omnikv::capi::TokensOf(tokens, n));
    auto state = std::make_shared<omnikv::capi::StreamState>();
    state->batch = batch->state;
    request.on_piece = [state](const omnikv::AnswerPiece& piece) {
      state->Put(piece.token, piece.text);
    };
    request.on_end = [state](const omnikv::Result<omnikv::RequestEnd>& end) { state->End(end); };
    auto handle = std::make_unique<omnikv_stream>();
    OKV_ASSIGN_OR_RETURN(state->id, batch->state->Submit(std::move(request)));
    handle->state = std::move(state);
    *stream = handle.release();
    return {};
  });
}

omnikv_status omnikv_stream_next(omnikv_stream* stream, int64_t timeout_ms, int32_t* token,
                                 const char** text, size_t* bytes) {
  if (token != nullptr) *token = -1;
  if (text != nullptr) *text = "";
  if (bytes != nullptr) *bytes = 0;
  omnikv_status end = OMNIKV_OK;
  const omnikv_status status = Guarded([&]() -> Status {
    OKV_RETURN_IF_ERROR(Need(stream, "the stream"));
    OKV_RETURN_IF_ERROR(Need(text, "the place for text"));
    OKV_RETURN_IF_ERROR(Need(bytes, "the place for the number of bytes"));
    omnikv::capi::StreamState& state = *stream->state;
    std::unique_lock lock(state.mutex);
    const auto news = [&] { return !state.pieces.empty() || state.ended; };
    if (timeout_ms < 0) {
      state.changed.wait(lock, news);
    } else {
      // A day: what adds up to no time that a clock has.
      const auto wait = std::chrono::milliseconds(std::min<int64_t>(timeout_ms, 86'400'000));
      if (!state.changed.wait_for(lock, wait, news)) {
        end = OMNIKV_NOT_YET;
        return {};
      }
    }
    if (state.pieces.empty()) {
      if (state.failure.ok()) end = OMNIKV_END;
      return state.failure;
    }
    if (token != nullptr) *token = state.pieces.front().first;
    stream->piece = std::move(state.pieces.front().second);
    state.pieces.pop_front();
    *text = stream->piece.c_str();
    *bytes = stream->piece.size();
    return {};
  });
  return status == OMNIKV_OK ? end : status;
}

void omnikv_stream_cancel(omnikv_stream* stream) {
  if (stream == nullptr) return;
  static_cast<void>(Guarded([&]() -> Status {
    stream->state->Cancel();
    return {};
  }));
}

omnikv_status omnikv_stream_finish(omnikv_stream* stream, omnikv_finish* finish) {
  return Guarded([&]() -> Status {
    OKV_RETURN_IF_ERROR(Need(stream, "the stream"));
    OKV_RETURN_IF_ERROR(Need(finish, "the place for how it has ended"));
    const std::lock_guard lock(stream->state->mutex);
    *finish = stream->state->finish;
    return {};
  });
}

omnikv_status omnikv_stream_stats(omnikv_stream* stream, char** json) {
  return Guarded([&]() -> Status {
    OKV_RETURN_IF_ERROR(Need(json, "the place for text"));
    *json = nullptr;
    OKV_RETURN_IF_ERROR(Need(stream, "the stream"));
    const std::lock_guard lock(stream->state->mutex);
    return Give(stream->state->stats, json, nullptr);
  });
}

void omnikv_stream_free(omnikv_stream* stream) {
  if (stream == nullptr) return;
  omnikv_stream_cancel(stream);
  delete stream;
}
// NOLINTEND(readability-identifier-naming)
