// Engines of the C API.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "capi/handles.h"
#include "capi/options.h"

using omnikv::Status;
using omnikv::capi::Give;
using omnikv::capi::Guarded;
using omnikv::capi::Need;
using omnikv::capi::NeedUtf8;
using omnikv::capi::TokensOf;

// NOLINTBEGIN(readability-identifier-naming): names of C.
omnikv_status omnikv_engine_load(const omnikv_options* options, omnikv_load_progress progress,
                                 void* user, omnikv_engine** engine) {
  return Guarded([&]() -> Status {
    OKV_RETURN_IF_ERROR(Need(engine, "the place for an engine"));
    *engine = nullptr;
    OKV_ASSIGN_OR_RETURN(omnikv::EngineOptions o, omnikv::capi::EngineOptionsOf(options));
    if (o.model.empty()) {
      return omnikv::InvalidArgument(
          fmt::format("`{}` is missing, expected a folder or a .gguf file", "model"));
    }
    if (progress != nullptr) {
      o.on_load = [&](size_t done, size_t total) { progress(user, done, total); };
    }
    auto state = std::make_shared<omnikv::capi::EngineState>();
    OKV_ASSIGN_OR_RETURN(state->engine, omnikv::Engine::Load(o));
    state->device = state->engine->device();
    *engine = new omnikv_engine{std::move(state)};
    return {};
  });
}

void omnikv_engine_free(omnikv_engine* engine) {
  delete engine;
}

int64_t omnikv_engine_context(const omnikv_engine* engine) {
  return engine == nullptr ? 0 : engine->state->engine->context();
}

int32_t omnikv_engine_vocab(const omnikv_engine* engine) {
  return engine == nullptr ? 0 : engine->state->engine->vocab();
}

const char* omnikv_engine_device(const omnikv_engine* engine) {
  return engine == nullptr ? "" : engine->state->device.c_str();
}

omnikv_status omnikv_engine_info(const omnikv_engine* engine, char** json) {
  return Guarded([&]() -> Status {
    OKV_RETURN_IF_ERROR(Need(json, "the place for text"));
    *json = nullptr;
    OKV_RETURN_IF_ERROR(Need(engine, "the engine"));
    const omnikv::Engine& e = *engine->state->engine;
    const nlohmann::ordered_json info = {
        {"context", e.context()},           {"vocab", e.vocab()},
        {"device", engine->state->device},  {"weight_bytes", e.weight_bytes()},
        {"load_seconds", e.load_seconds()}, {"has_chat_template", e.has_chat_template()}};
    return Give(info.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), json, nullptr);
  });
}

omnikv_status omnikv_engine_tokenize(const omnikv_engine* engine, const char* text, size_t bytes,
                                     int add_special, int parse_special, int32_t** tokens,
                                     size_t* n) {
  return Guarded([&]() -> Status {
    OKV_RETURN_IF_ERROR(Need(tokens, "the place for tokens"));
    OKV_RETURN_IF_ERROR(Need(n, "the place for the number of tokens"));
    *tokens = nullptr;
    *n = 0;
    OKV_RETURN_IF_ERROR(Need(engine, "the engine"));
    if (bytes > 0) OKV_RETURN_IF_ERROR(Need(text, "the text"));
    const std::string_view given(bytes > 0 ? text : "", bytes);
    OKV_RETURN_IF_ERROR(NeedUtf8(given, "the text"));
    OKV_ASSIGN_OR_RETURN(
        const std::vector<int32_t> ids,
        engine->state->engine->Tokenize(given, add_special != 0, parse_special != 0));
    return Give(ids, tokens, n);
  });
}

omnikv_status omnikv_engine_detokenize(const omnikv_engine* engine, const int32_t* tokens, size_t n,
                                       char** text, size_t* bytes) {
  return Guarded([&]() -> Status {
    OKV_RETURN_IF_ERROR(Need(text, "the place for text"));
    *text = nullptr;
    if (bytes != nullptr) *bytes = 0;
    OKV_RETURN_IF_ERROR(Need(engine, "the engine"));
    OKV_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, TokensOf(tokens, n));
    OKV_ASSIGN_OR_RETURN(const std::string decoded, engine->state->engine->Detokenize(ids));
    return Give(decoded, text, bytes);
  });
}

omnikv_status omnikv_engine_chat_prompt(const omnikv_engine* engine, const char* const* roles,
                                        const char* const* contents, size_t n, int32_t** tokens,
                                        size_t* n_tokens) {
  return Guarded([&]() -> Status {
    OKV_RETURN_IF_ERROR(Need(tokens, "the place for tokens"));
    OKV_RETURN_IF_ERROR(Need(n_tokens, "the place for the number of tokens"));
    *tokens = nullptr;
    *n_tokens = 0;
    OKV_RETURN_IF_ERROR(Need(engine, "the engine"));
    if (n == 0) return omnikv::InvalidArgument("there are no messages, expected one or more");
    OKV_RETURN_IF_ERROR(Need(roles, "the array of roles"));
    OKV_RETURN_IF_ERROR(Need(contents, "the array of contents"));
    std::vector<omnikv::ChatMessage> messages;
    for (size_t i = 0; i < n; ++i) {
      OKV_RETURN_IF_ERROR(Need(roles[i], "a role"));
      OKV_RETURN_IF_ERROR(Need(contents[i], "a content"));
      OKV_RETURN_IF_ERROR(NeedUtf8(roles[i], "a role"));
      OKV_RETURN_IF_ERROR(NeedUtf8(contents[i], "a content"));
      messages.push_back({roles[i], contents[i]});
    }
    OKV_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                         engine->state->engine->ChatPrompt(messages));
    return Give(ids, tokens, n_tokens);
  });
}
// NOLINTEND(readability-identifier-naming)
