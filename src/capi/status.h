// How functions of the C API end: no exception leaves them, and the thread keeps their sentence.
#pragma once

#include <exception>
#include <new>
#include <string_view>
#include <vector>

#include "omnikv/c_api.h"
#include "omnikv/options.h"
#include "omnikv/status.h"

namespace omnikv::capi {

// The code of a status. One that is not ok is the last error of the thread.
omnikv_status Report(const Status& status) noexcept;

// What `body` (a Status) comes to.
template <typename Body>
omnikv_status Guarded(const Body& body) noexcept {
  try {
    return Report(body());
  } catch (const std::bad_alloc&) {
    return Report(ResourceExhausted({}));
  } catch (const std::exception&) {
    return Report(Failed({}));
  }
}

// kInvalidArgument when a pointer that a call needs is null.
Status Need(const void* pointer, const char* what);
Status NeedUtf8(std::string_view text, const char* what);

// The tokens of an array. kInvalidArgument when it is null and has some.
Result<std::vector<int32_t>> TokensOf(const int32_t* tokens, size_t n);

// Copies that the caller frees. `n` and `bytes` may be null.
Status Give(std::string_view text, char** out, size_t* bytes);
Status Give(const std::vector<int32_t>& tokens, int32_t** out, size_t* n);

omnikv_finish FinishOf(FinishReason reason);

}  // namespace omnikv::capi
