// Messages for people, on stderr: stdout carries results only (DESIGN §9). Thread-safe, one write
// a line. Never called inside a recorded step.
#pragma once

#include <fmt/format.h>

#include <string>

namespace omnikv {

enum class LogLevel { kQuiet = 0, kInfo = 1, kVerbose = 2 };

void SetLogLevel(LogLevel level);
LogLevel GetLogLevel();
void LogLine(LogLevel level, const std::string& line);

template <typename... Args>
void LogInfo(fmt::format_string<Args...> format, Args&&... args) {
  if (GetLogLevel() >= LogLevel::kInfo) {
    LogLine(LogLevel::kInfo, fmt::format(format, std::forward<Args>(args)...));
  }
}

template <typename... Args>
void LogVerbose(fmt::format_string<Args...> format, Args&&... args) {
  if (GetLogLevel() >= LogLevel::kVerbose) {
    LogLine(LogLevel::kVerbose, fmt::format(format, std::forward<Args>(args)...));
  }
}

// "1.5 GiB", "512 B": bytes for a person.
std::string HumanBytes(size_t bytes);

}  // namespace omnikv
