// How the interpreter fails, inside this library only: ChatTemplate turns an Error into a Status.
#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>

#include "omnikv/status.h"

namespace omnikv::jinja {

struct Error {
  StatusCode code = StatusCode::kInvalidArgument;
  std::string message;
};

template <typename... Args>
[[noreturn]] void Fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Error{StatusCode::kInvalidArgument, fmt::format(format, std::forward<Args>(args)...)};
}

}  // namespace omnikv::jinja
