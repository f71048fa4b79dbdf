#include "capi/status.h"

#include <fmt/format.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "base/log.h"
#include "base/utf8.h"
#include "omnikv/version.h"

namespace omnikv::capi {
namespace {

thread_local std::string last_error;

bool IsUtf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const size_t size = Utf8CharAt(text, at).size;
    if (size == 0) return false;
    at += size;
  }
  return true;
}

template <typename T>
Status Copy(const T* from, size_t n, T** out) {
  // malloc may give null for no bytes, and text has a zero behind it.
  *out = static_cast<T*>(std::malloc((n + 1) * sizeof(T)));
  if (*out == nullptr) {
    return ResourceExhausted(fmt::format("no memory for a result of {} bytes", n * sizeof(T)));
  }
  if (n > 0) std::memcpy(*out, from, n * sizeof(T));
  (*out)[n] = T{};
  return {};
}

}  // namespace

omnikv_status Report(const Status& status) noexcept {
  if (status.ok()) return OMNIKV_OK;
  try {
    last_error = !status.message().empty() ? status.message()
                 : status.code() == StatusCode::kResourceExhausted
                     ? "there is not enough memory"
                     : "the library failed in a way it does not know";
  } catch (const std::bad_alloc&) {
    last_error.clear();
  }
  return static_cast<omnikv_status>(status.code());
}

static_assert(static_cast<int>(StatusCode::kInvalidArgument) == OMNIKV_INVALID_ARGUMENT);
static_assert(static_cast<int>(StatusCode::kNotFound) == OMNIKV_NOT_FOUND);
static_assert(static_cast<int>(StatusCode::kUnsupported) == OMNIKV_UNSUPPORTED);
static_assert(static_cast<int>(StatusCode::kCorrupt) == OMNIKV_CORRUPT);
static_assert(static_cast<int>(StatusCode::kResourceExhausted) == OMNIKV_RESOURCE_EXHAUSTED);
static_assert(static_cast<int>(StatusCode::kCancelled) == OMNIKV_CANCELLED);
static_assert(static_cast<int>(StatusCode::kFailed) == OMNIKV_FAILED);

Status Need(const void* pointer, const char* what) {
  return pointer != nullptr ? Status() : InvalidArgument(fmt::format("{} is NULL", what));
}

Status NeedUtf8(std::string_view text, const char* what) {
  return IsUtf8(text) ? Status() : InvalidArgument(fmt::format("{} is not UTF-8", what));
}

Result<std::vector<int32_t>> TokensOf(const int32_t* tokens, size_t n) {
  if (n > 0) OKV_RETURN_IF_ERROR(Need(tokens, "the array of tokens"));
  return std::vector<int32_t>(tokens, tokens + n);
}

Status Give(std::string_view text, char** out, size_t* bytes) {
  OKV_RETURN_IF_ERROR(Copy(text.data(), text.size(), out));
  if (bytes != nullptr) *bytes = text.size();
  return {};
}

Status Give(const std::vector<int32_t>& tokens, int32_t** out, size_t* n) {
  OKV_RETURN_IF_ERROR(Copy(tokens.data(), tokens.size(), out));
  if (n != nullptr) *n = tokens.size();
  return {};
}

omnikv_finish FinishOf(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return OMNIKV_FINISH_STOP;
    case FinishReason::kLength:
      return OMNIKV_FINISH_LENGTH;
    case FinishReason::kCancelled:
      return OMNIKV_FINISH_CANCELLED;
  }
  return OMNIKV_FINISH_NONE;
}

}  // namespace omnikv::capi

// NOLINTBEGIN(readability-identifier-naming): names of C.
int32_t omnikv_c_api_version(void) {
  return OMNIKV_C_API_VERSION;
}

const char* omnikv_version(void) {
  return OMNIKV_VERSION;
}

const char* omnikv_last_error(void) {
  return omnikv::capi::last_error.c_str();
}

void omnikv_free(void* memory) {
  std::free(memory);
}

omnikv_status omnikv_set_log_level(int32_t level) {
  return omnikv::capi::Guarded([&]() -> omnikv::Status {
    if (level < 0 || level > 2) {
      return omnikv::InvalidArgument(fmt::format("the log level is {}, expected 0 to 2", level));
    }
    omnikv::SetLogLevel(static_cast<omnikv::LogLevel>(level));
    return {};
  });
}
// NOLINTEND(readability-identifier-naming)
