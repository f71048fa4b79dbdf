// Checks of our own invariants. A failed check is a bug in omnikv, never a user's mistake: it
// prints the condition and the values and aborts. Anything a file or a user can cause is a Status.
#pragma once

#include <fmt/format.h>

#include <cstdlib>
#include <string>

#include "base/log.h"

namespace omnikv::internal {
[[noreturn]] inline void CheckFailed(const char* file, int line, const char* cond,
                                     const std::string& detail) {
  WriteStderr(fmt::format("{}:{}: internal check failed: {}{}{}\n", file, line, cond,
                          detail.empty() ? "" : ": ", detail));
  std::abort();
}
}  // namespace omnikv::internal

// OKV_CHECK(cond) or OKV_CHECK(cond, "fmt {}", values...).
#define OKV_CHECK(cond, ...)                                                                     \
  do {                                                                                           \
    if (!(cond)) [[unlikely]] {                                                                  \
      ::omnikv::internal::CheckFailed(__FILE__, __LINE__, #cond, ::fmt::format("" __VA_ARGS__)); \
    }                                                                                            \
  } while (0)
