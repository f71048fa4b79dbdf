// Messages for people, on stderr: stdout carries results only. Thread-safe, one write per line.
// Never called inside a recorded step.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace omnikv {

enum class LogLevel { kQuiet = 0, kInfo = 1, kVerbose = 2 };

// Writes `text` to stderr as it is. Whatever stderr refuses (a full disk, a closed descriptor) is
// lost and changes nothing else; a reader that has gone away raises SIGPIPE unless it is ignored.
void WriteStderr(std::string_view text);

// How LogLine changes a line before it is written: a program has its own names of options. Null: not
// at all. Set it before threads are started.
void SetLogRewrite(std::string (*rewrite)(std::string_view line));

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
