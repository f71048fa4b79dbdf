// Runs the program under test at a terminal of its own, and types.
#pragma once

#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

namespace omnikv::cli {

class Terminal {
 public:
  // Starts `command` as a shell reads it, with `environment` ("NAME=value") beside the test's own.
  explicit Terminal(const std::string& command, const std::vector<std::string>& environment = {}) {
    struct winsize size {
      .ws_row = 24, .ws_col = 200, .ws_xpixel = 0, .ws_ypixel = 0
    };
    pid_ = forkpty(&fd_, nullptr, nullptr, &size);
    if (pid_ != 0) return;
    setenv("TERM", "xterm", 1);
    for (const std::string& variable : environment) {
      const size_t equals = variable.find('=');
      setenv(variable.substr(0, equals).c_str(), variable.substr(equals + 1).c_str(), 1);
    }
    execl("/bin/sh", "sh", "-c", ("exec " + command).c_str(), nullptr);
    _exit(127);
  }
  ~Terminal() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    if (fd_ >= 0) close(fd_);
  }
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  void Type(const std::string& keys) {
    EXPECT_EQ(write(fd_, keys.data(), keys.size()), keys.size());
  }

  // Reads on until `text` appears after what an earlier call found. Whether it did, within a minute
  // of silence.
  bool See(const std::string& text) {
    while (true) {
      const size_t at = shown_.find(text, seen_);
      if (at != std::string::npos) {
        seen_ = at + text.size();
        return true;
      }
      if (!Read()) return false;
    }
  }
  // The same for a prompt of chat, which takes keys one by one before it shows.
  bool SeePrompt() { return See("> ") && Raw(); }
  void Signal(int signal) { kill(pid_, signal); }
  // Whether keys come one by one.
  bool Raw() const {
    struct termios modes {};
    EXPECT_EQ(tcgetattr(fd_, &modes), 0);
    return (modes.c_lflag & (ICANON | ISIG)) == 0;
  }
  // Reads to the end. The exit code, 128 and more for a signal.
  int End() {
    while (Read()) {
    }
    int status = 0;
    waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  // All that the terminal got.
  const std::string& shown() const { return shown_; }

 private:
  // False at the end, and when nothing comes for a minute.
  bool Read() {
    struct pollfd ready {
      .fd = fd_, .events = POLLIN, .revents = 0
    };
    if (poll(&ready, 1, 60'000) <= 0) return false;
    char buffer[4096];
    const ssize_t n = read(fd_, buffer, sizeof(buffer));
    if (n <= 0) return false;  // EIO: nobody holds the other side
    shown_.append(buffer, static_cast<size_t>(n));
    return true;
  }

  pid_t pid_ = -1;
  int fd_ = -1;
  std::string shown_;
  size_t seen_ = 0;
};

}  // namespace omnikv::cli
