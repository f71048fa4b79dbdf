#include "base/log.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "base/printable.h"

namespace omnikv {
namespace {
std::atomic<LogLevel> g_level{LogLevel::kInfo};
std::string (*g_rewrite)(std::string_view) = nullptr;
}  // namespace

void WriteStderr(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    text.remove_prefix(static_cast<size_t>(written));
  }
}

void SetLogRewrite(std::string (*rewrite)(std::string_view)) {
  g_rewrite = rewrite;
}

void SetLogLevel(LogLevel level) {
  g_level.store(level, std::memory_order_relaxed);
}
LogLevel GetLogLevel() {
  return g_level.load(std::memory_order_relaxed);
}

void LogLine(LogLevel level, const std::string& line) {
  if (GetLogLevel() < level) return;
  WriteStderr(Escaped(g_rewrite == nullptr ? line : g_rewrite(line)) + '\n');
}

std::string HumanBytes(size_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 4) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, kUnits[unit]);
}

}  // namespace omnikv
