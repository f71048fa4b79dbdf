// How this library reports what went wrong. No exception leaves it: functions that can fail for a
// reason outside the program (files, flags, requests, memory, devices) return Status or Result<T>;
// mistakes of our own end in OKV_CHECK (src/base/check.h).
#pragma once

#include <optional>
#include <string>
#include <utility>

namespace omnikv {

enum class StatusCode {
  kOk = 0,
  kInvalidArgument,    // a flag, an option or a request is wrong: the caller can mend it
  kNotFound,           // a path, a name or a tensor that was asked for does not exist
  kUnsupported,        // well-formed, but this build or this machine cannot run it
  kCorrupt,            // a file contradicts itself or its format
  kResourceExhausted,  // memory (a cap or the machine's) does not hold what was asked for
  kCancelled,          // the caller stopped it
  kFailed,             // anything else: I/O errors, devices
};

// The outcome of an operation: a code and, unless ok, one sentence that names the file or the field
// of an option (`context`), the value found and what was expected. Cheap to move; thread-compatible.
class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

  // The exit code of a program that ends with it: 0 for success, 2 for what the user can mend in the
  // command or in what it names, 130 for what the user stopped (as a shell reports SIGINT), else 1.
  int ExitCode() const {
    switch (code_) {
      case StatusCode::kOk:
        return 0;
      case StatusCode::kInvalidArgument:
      case StatusCode::kNotFound:
      case StatusCode::kUnsupported:
        return 2;
      case StatusCode::kCancelled:
        return 130;
      default:
        return 1;
    }
  }

  // The same status with `where: ` before its sentence; ok stays ok.
  Status Prefixed(const std::string& where) const {
    return ok() ? *this : Status(code_, where + ": " + message_);
  }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status InvalidArgument(std::string m) {
  return Status(StatusCode::kInvalidArgument, std::move(m));
}
inline Status NotFound(std::string m) {
  return Status(StatusCode::kNotFound, std::move(m));
}
inline Status Unsupported(std::string m) {
  return Status(StatusCode::kUnsupported, std::move(m));
}
inline Status Corrupt(std::string m) {
  return Status(StatusCode::kCorrupt, std::move(m));
}
inline Status ResourceExhausted(std::string m) {
  return Status(StatusCode::kResourceExhausted, std::move(m));
}
inline Status Cancelled(std::string m) {
  return Status(StatusCode::kCancelled, std::move(m));
}
inline Status Failed(std::string m) {
  return Status(StatusCode::kFailed, std::move(m));
}

// A value, or the Status that says why there is none. REQUIRES ok() before value access.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT: implicit by design
  Result(Status status) : status_(std::move(status)) {}  // NOLINT: implicit by design

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }

  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return std::move(*value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace omnikv

#define OKV_STATUS_CONCAT_(a, b) a##b
#define OKV_STATUS_CONCAT(a, b) OKV_STATUS_CONCAT_(a, b)

// Returns from the enclosing function when `expr` (a Status) is not ok.
#define OKV_RETURN_IF_ERROR(expr)              \
  do {                                         \
    ::omnikv::Status okv_status_ = (expr);     \
    if (!okv_status_.ok()) return okv_status_; \
  } while (0)

// `OKV_ASSIGN_OR_RETURN(auto x, F());` declares x from a Result, or returns its Status.
#define OKV_ASSIGN_OR_RETURN(lhs, expr) \
  OKV_ASSIGN_OR_RETURN_IMPL_(OKV_STATUS_CONCAT(okv_result_, __LINE__), lhs, expr)
#define OKV_ASSIGN_OR_RETURN_IMPL_(tmp, lhs, expr) \
  auto tmp = (expr);                               \
  if (!tmp.ok()) return tmp.status();              \
  lhs = std::move(*tmp)
