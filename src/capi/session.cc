// Sessions of the C API.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "capi/handles.h"
#include "capi/options.h"
#include "engine/core.h"

namespace omnikv::capi {
namespace {

// `make` gives a Result of a session, on an engine that has no batch.
template <typename Make>
Status Open(const std::shared_ptr<EngineState>& engine, omnikv_session** out, const Make& make) {
  const Driving driving(*engine);
  OKV_RETURN_IF_ERROR(driving.status());
  if (engine->batch) {
    return InvalidArgument("a batch has the engine, expected none: free it before a session opens");
  }
  OKV_ASSIGN_OR_RETURN(std::unique_ptr<Session> session, make());
  auto handle = std::make_unique<omnikv_session>();
  handle->state = std::make_shared<SessionState>(engine, std::move(session));
  *out = handle.release();
  return {};
}

// `body` with the session's state, while nobody else drives its engine.
template <typename Body>
omnikv_status On(omnikv_session* session, const Body& body) noexcept {
  return Guarded([&]() -> Status {
    OKV_RETURN_IF_ERROR(Need(session, "the session"));
    // A callback may free the handle.
    const std::shared_ptr<SessionState> state = session->state;
    const Driving driving(*state->engine);
    OKV_RETURN_IF_ERROR(driving.status());
    return body(*state);
  });
}

// The options of the next token alone: what ends the answer is Answer's to find, and penalties of
// counts become bias.
GenerateOptions OneToken(const Pull& pull) {
  GenerateOptions one = pull.options;
  one.max_tokens = 1;
  one.stop.clear();
  one.ignore_eos = true;
  SamplingOptions& s = one.sampling;
  if (s.presence_penalty == 0 && s.frequency_penalty == 0) return one;
  std::vector<std::pair<int32_t, float>> bias;
  for (const auto& [token, times] : pull.drawn) {
    float off = static_cast<float>(s.presence_penalty) +
                static_cast<float>(s.frequency_penalty) * static_cast<float>(times);
    while (off != 0) {
      const float part = std::clamp(off, -100.0f, 100.0f);  // a bias is no greater
      bias.emplace_back(token, -part);
      off -= part;
    }
  }
  bias.insert(bias.end(), s.logit_bias.begin(), s.logit_bias.end());
  s.logit_bias = std::move(bias);
  s.presence_penalty = s.frequency_penalty = 0;
  return one;
}

// The next token and the text it brings; nothing where the session ends it.
Result<std::optional<std::pair<int32_t, std::string>>> Draw(SessionState& state) {
  Pull& pull = *state.pull;
  if (state.cancelled.exchange(false)) {
    pull.cut = FinishReason::kCancelled;
    return std::optional<std::pair<int32_t, std::string>>();
  }
  const auto start = std::chrono::steady_clock::now();
  OKV_ASSIGN_OR_RETURN(const GenerateResult result, state.session->Generate(OneToken(pull)));
  pull.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  pull.steps += state.session->stats().decode_tokens;
  if (result.tokens.empty()) {
    if (result.finish_reason == FinishReason::kCancelled) state.cancelled = false;
    pull.cut = result.finish_reason;
    return std::optional<std::pair<int32_t, std::string>>();
  }
  const int32_t token = result.tokens.front();
  ++pull.drawn[token];
  OKV_ASSIGN_OR_RETURN(std::string text, pull.answer.Take(token));
  return std::optional(std::pair(token, std::move(text)));
}

// OMNIKV_END in `end` after the last piece.
Status Next(SessionState& state, int32_t* token, omnikv_status* end) {
  Pull& pull = *state.pull;
  state.piece.clear();
  if (pull.done) {
    *end = OMNIKV_END;
    return {};
  }
  if (!pull.answer.ended()) {
    auto drawn = Draw(state);
    if (!drawn.ok()) {
      pull.done = true;
      return drawn.status();
    }
    if (*drawn) {
      *token = (*drawn)->first;
      state.piece = std::move((*drawn)->second);
      return {};
    }
  }
  pull.done = true;
  pull.finish = FinishOf(pull.cut.value_or(pull.answer.reason()));
  OKV_ASSIGN_OR_RETURN(state.piece, pull.answer.Flush());
  if (state.piece.empty()) *end = OMNIKV_END;
  return {};
}

nlohmann::ordered_json StatsOf(const SessionState& state) {
  const SessionStats s = state.session->stats();
  nlohmann::ordered_json json = {
      {"device", s.device},
      {"policy", s.policy},
      {"settings", s.settings},
      {"dense_prompts", s.dense_prompts},
      {"context_tokens", s.context_tokens},
      {"prefill_tokens", s.prefill_tokens},
      {"recomputed_tokens", s.recomputed_tokens},
      {"prefill_seconds", s.prefill_seconds},
      {"decode_tokens", state.pull ? state.pull->steps : s.decode_tokens},
      {"decode_seconds", state.pull ? state.pull->seconds : s.decode_seconds},
      {"attended_tokens", s.attended_tokens},
      {"budget_tokens", s.budget_tokens},
      {"read_fraction", s.read_fraction},
      {"held_fraction", s.held_fraction},
      {"held_bytes",
       {{"device", s.held_bytes.device}, {"host", s.held_bytes.host}, {"disk", s.held_bytes.disk}}},
      {"transfer_bytes_per_step", s.transfer_bytes_per_step},
      {"hit_rate", nullptr}};
  if (s.hit_rate) json["hit_rate"] = *s.hit_rate;
  return json;
}

}  // namespace
}  // namespace omnikv::capi

using omnikv::InvalidArgument;
using omnikv::Status;
using omnikv::capi::Give;
using omnikv::capi::Guarded;
using omnikv::capi::Need;
using omnikv::capi::On;
using omnikv::capi::SessionState;

// NOLINTBEGIN(readability-identifier-naming): names of C.
omnikv_status omnikv_session_new(omnikv_engine* engine, const omnikv_options* options,
                                 omnikv_session** session) {
  return Guarded([&]() -> Status {
    OKV_RETURN_IF_ERROR(Need(session, "the place for a session"));
    *session = nullptr;
    OKV_RETURN_IF_ERROR(Need(engine, "the engine"));
    OKV_ASSIGN_OR_RETURN(const omnikv::PolicyOptions policy,
                         omnikv::capi::PolicyOptionsOf(options));
    return omnikv::capi::Open(engine->state, session,
                              [&] { return engine->state->engine->NewSession(policy); });
  });
}

omnikv_status omnikv_session_restore(omnikv_engine* engine, const char* path,
                                     omnikv_session** session) {
  return Guarded([&]() -> Status {
    OKV_RETURN_IF_ERROR(Need(session, "the place for a session"));
    *session = nullptr;
    OKV_RETURN_IF_ERROR(Need(engine, "the engine"));
    OKV_RETURN_IF_ERROR(Need(path, "the path"));
    OKV_RETURN_IF_ERROR(omnikv::capi::Open(engine->state, session,
                                           [&] { return engine->state->engine->Restore(path); }));
    SessionState& state = *(*session)->state;
    state.has_logits = !state.session->tokens().empty();
    return {};
  });
}

void omnikv_session_free(omnikv_session* session) {
  delete session;
}

omnikv_status omnikv_session_prompt(omnikv_session* session, const int32_t* tokens, size_t n,
                                    omnikv_progress progress, void* user) {
  return On(session, [&](SessionState& state) -> Status {
    OKV_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, omnikv::capi::TokensOf(tokens, n));
    omnikv::Session::Progress on_progress;
    if (progress != nullptr) {
      on_progress = [&](int64_t done, int64_t total) {
        if (progress(user, done, total) != 0) state.session->Cancel();
      };
    }
    state.pull.reset();
    state.cancelled = false;
    const Status read = state.session->Prompt(ids, on_progress);
    // One that is refused leaves the session as it is.
    if (read.code() != omnikv::StatusCode::kInvalidArgument) state.has_logits = read.ok();
    if (!read.ok()) state.cancelled = false;  // this prompt is what it stopped
    return read;
  });
}

omnikv_status omnikv_session_generate(omnikv_session* session, const omnikv_options* options,
                                      omnikv_on_text on_text, void* user, char** text,
                                      size_t* bytes, omnikv_finish* finish) {
  if (text != nullptr) *text = nullptr;
  if (bytes != nullptr) *bytes = 0;
  if (finish != nullptr) *finish = OMNIKV_FINISH_NONE;
  return On(session, [&](SessionState& state) -> Status {
    OKV_ASSIGN_OR_RETURN(const omnikv::GenerateOptions o, omnikv::capi::GenerateOptionsOf(options));
    omnikv::Session::OnText shows;
    if (on_text != nullptr) {
      shows = [&](std::string_view piece) {
        const std::string with_zero(piece);
        return on_text(user, with_zero.c_str(), with_zero.size()) == 0;
      };
    }
    state.pull.reset();
    auto result = state.session->Generate(o, shows);
    state.cancelled = false;
    OKV_RETURN_IF_ERROR(result.status());
    if (text != nullptr) OKV_RETURN_IF_ERROR(Give(result->text, text, bytes));
    if (text == nullptr && bytes != nullptr) *bytes = result->text.size();
    if (finish != nullptr) *finish = omnikv::capi::FinishOf(result->finish_reason);
    return {};
  });
}

omnikv_status omnikv_session_begin(omnikv_session* session, const omnikv_options* options) {
  return On(session, [&](SessionState& state) -> Status {
    state.pull.reset();
    OKV_ASSIGN_OR_RETURN(omnikv::GenerateOptions o, omnikv::capi::GenerateOptionsOf(options));
    if (!state.has_logits) return InvalidArgument("there is no prompt to go on from");
    OKV_ASSIGN_OR_RETURN(
        omnikv::Answer answer,
        omnikv::Answer::Begin(omnikv::CoreOf(*state.engine->engine), o, /*context=*/{}));
    state.pull.emplace(omnikv::capi::Pull{.options = std::move(o), .answer = std::move(answer)});
    return {};
  });
}

omnikv_status omnikv_session_next(omnikv_session* session, int32_t* token, const char** text,
                                  size_t* bytes) {
  int32_t drawn = -1;
  omnikv_status end = OMNIKV_OK;
  if (text != nullptr) *text = "";
  if (bytes != nullptr) *bytes = 0;
  const omnikv_status status = On(session, [&](SessionState& state) -> Status {
    OKV_RETURN_IF_ERROR(Need(text, "the place for text"));
    OKV_RETURN_IF_ERROR(Need(bytes, "the place for the number of bytes"));
    if (!state.pull) {
      return InvalidArgument("no answer has begun since the last prompt, step or answer");
    }
    OKV_RETURN_IF_ERROR(omnikv::capi::Next(state, &drawn, &end));
    *text = state.piece.c_str();
    *bytes = state.piece.size();
    return {};
  });
  if (token != nullptr) *token = drawn;
  return status == OMNIKV_OK ? end : status;
}

omnikv_status omnikv_session_finish(omnikv_session* session, omnikv_finish* finish) {
  return On(session, [&](SessionState& state) -> Status {
    OKV_RETURN_IF_ERROR(Need(finish, "the place for how it has ended"));
    *finish = state.pull ? state.pull->finish : OMNIKV_FINISH_NONE;
    return {};
  });
}

omnikv_status omnikv_session_step(omnikv_session* session, int32_t token) {
  return On(session, [&](SessionState& state) -> Status {
    OKV_RETURN_IF_ERROR(state.session->Step(token));
    state.pull.reset();
    state.has_logits = true;
    return {};
  });
}

omnikv_status omnikv_session_logits(omnikv_session* session, const float** logits, size_t* n) {
  return On(session, [&](SessionState& state) -> Status {
    OKV_RETURN_IF_ERROR(Need(logits, "the place for logits"));
    *logits = nullptr;
    if (n != nullptr) *n = 0;
    if (!state.has_logits) return InvalidArgument("there are no logits before a prompt is read");
    *logits = state.session->logits();
    if (n != nullptr) *n = static_cast<size_t>(state.engine->engine->vocab());
    return {};
  });
}

omnikv_status omnikv_session_tokens(omnikv_session* session, int32_t** tokens, size_t* n) {
  return On(session, [&](SessionState& state) -> Status {
    OKV_RETURN_IF_ERROR(Need(tokens, "the place for tokens"));
    OKV_RETURN_IF_ERROR(Need(n, "the place for the number of tokens"));
    return Give(state.session->tokens(), tokens, n);
  });
}

omnikv_status omnikv_session_fork(omnikv_session* session, const omnikv_options* options,
                                  omnikv_session** fork) {
  return Guarded([&]() -> Status {
    OKV_RETURN_IF_ERROR(Need(fork, "the place for a session"));
    *fork = nullptr;
    OKV_RETURN_IF_ERROR(Need(session, "the session"));
    const std::shared_ptr<SessionState> from = session->state;
    OKV_ASSIGN_OR_RETURN(const omnikv::PolicyOptions policy,
                         omnikv::capi::PolicyOptionsOf(options));
    bool has_logits = false;
    OKV_RETURN_IF_ERROR(omnikv::capi::Open(from->engine, fork, [&] {
      has_logits = options == nullptr ? from->has_logits : !from->session->tokens().empty();
      return options == nullptr ? from->session->Fork() : from->session->Fork(policy);
    }));
    (*fork)->state->has_logits = has_logits;
    return {};
  });
}

omnikv_status omnikv_session_save(omnikv_session* session, const char* path) {
  return On(session, [&](SessionState& state) -> Status {
    OKV_RETURN_IF_ERROR(Need(path, "the path"));
    return state.session->Save(path);
  });
}

void omnikv_session_cancel(omnikv_session* session) {
  if (session == nullptr) return;
  session->state->cancelled = true;
  session->state->session->Cancel();
}

omnikv_status omnikv_session_stats(omnikv_session* session, char** json) {
  if (json != nullptr) *json = nullptr;
  return On(session, [&](SessionState& state) -> Status {
    OKV_RETURN_IF_ERROR(Need(json, "the place for text"));
    return Give(
        omnikv::capi::StatsOf(state).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
        json, nullptr);
  });
}
// NOLINTEND(readability-identifier-naming)
