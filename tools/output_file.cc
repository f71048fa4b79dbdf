#include "output_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <utility>

namespace omnikv::tools {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxLinks = 40;  // that lead to one another, as the system follows them

// The files that are written beside their places: what a signal handler can reach.
struct Beside {
  std::atomic<bool> taken{false};
  std::atomic<bool> there{false};  // `path` is complete, and the file may be there
  char path[PATH_MAX] = {};
};
std::array<Beside, kMaxOutputFiles> g_beside;

void RemoveAll() {
  for (Beside& file : g_beside) {
    if (file.there.exchange(false)) ::unlink(file.path);
  }
}

extern "C" void RemoveAllAndEnd(int signal) {
  RemoveAll();
  ::raise(signal);  // SA_RESETHAND: ends the process once the handler has returned
}

// From the first call on, exits and signals that end the process remove what is in g_beside. What
// is ignored stays ignored, and what has a handler keeps it.
void RemoveAtTheEnd() {
  static const bool once = [] {
    std::atexit(RemoveAll);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
      struct sigaction now;
      if (::sigaction(signal, nullptr, &now) != 0 || now.sa_handler != SIG_DFL) continue;
      struct sigaction end = {};
      end.sa_handler = RemoveAllAndEnd;
      end.sa_flags = static_cast<int>(SA_RESETHAND);
      ::sigaction(signal, &end, nullptr);
    }
    return true;
  }();
  static_cast<void>(once);
}

int TakeSlot() {
  for (int slot = 0; slot < kMaxOutputFiles; ++slot) {
    if (!g_beside[static_cast<size_t>(slot)].taken.exchange(true)) return slot;
  }
  return -1;
}

// A name in the folder of `target` that nobody can foresee.
std::string NameBeside(const fs::path& target) {
  std::random_device random;
  const uint64_t number = uint64_t{random()} << 32 | random();
  constexpr size_t kMaxStem = 200;  // of the 255 bytes that a name may have
  return target.parent_path() /
         fmt::format(".{}.{:016x}", target.filename().string().substr(0, kMaxStem), number);
}

// Where links lead from `path`; empty: through /proc, whose links stand for open files.
Result<fs::path> FollowLinks(fs::path path) {
  std::error_code error;
  for (int i = 0; i < kMaxLinks; ++i) {
    if (fs::symlink_status(path, error).type() != fs::file_type::symlink) return path;
    const fs::path folder =
        fs::weakly_canonical(path.has_parent_path() ? path.parent_path() : fs::path("."), error);
    if (error) break;
    if (folder.string().starts_with("/proc/")) return fs::path();
    const fs::path to = fs::read_symlink(path, error);
    if (error) break;
    path = folder / to;  // `to` alone, where it begins at the root
  }
  return NotFound(error ? error.message() : std::string(std::strerror(ELOOP)));
}

}  // namespace

OutputFile::OutputFile(std::string flag, std::string path)
    : flag_(std::move(flag)), path_(std::move(path)) {}

OutputFile::~OutputFile() {
  Discard();
}

void OutputFile::Discard() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  if (slot_ < 0) return;
  Beside& file = g_beside[static_cast<size_t>(std::exchange(slot_, -1))];
  if (file.there.exchange(false)) ::unlink(file.path);
  file.taken = false;
}

Status OutputFile::Refuse(const std::string& why) const {
  return NotFound(fmt::format("{} is '{}', which cannot be written ({})", flag_, path_, why));
}

Status OutputFile::Open() {
  if (path_.empty()) return InvalidArgument(fmt::format("{} is empty, expected a file", flag_));
  const Result<fs::path> target = FollowLinks(path_);
  if (!target.ok()) return Refuse(target.status().message());
  std::error_code error;
  const fs::file_type type = fs::status(target->empty() ? fs::path(path_) : *target, error).type();
  if (type == fs::file_type::directory) return Refuse(std::strerror(EISDIR));
  const bool beside = type == fs::file_type::regular || type == fs::file_type::not_found;
  if (beside && !target->empty()) return OpenBeside(*target);
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC | O_TRUNC);
  return fd_ >= 0 ? Status() : Refuse(std::strerror(errno));
}

Status OutputFile::OpenBeside(const std::string& target) {
  struct stat old;
  const bool replaces = ::stat(target.c_str(), &old) == 0;
  if (replaces && ::access(target.c_str(), W_OK) != 0) return Refuse(std::strerror(errno));
  const std::string name = NameBeside(target);
  slot_ = TakeSlot();
  if (slot_ < 0) return Refuse(fmt::format("{} files are being written", kMaxOutputFiles));
  Beside& file = g_beside[static_cast<size_t>(slot_)];
  if (name.size() >= sizeof(file.path)) return Refuse(std::strerror(ENAMETOOLONG));
  std::memcpy(file.path, name.c_str(), name.size() + 1);
  RemoveAtTheEnd();
  // Before the file is made: a signal in between finds nothing to remove.
  file.there = true;
  fd_ = ::open(file.path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd_ < 0) {
    file.there = false;
    return Refuse(fmt::format("no file can be made beside it: {}", std::strerror(errno)));
  }
  if (replaces) ::fchmod(fd_, old.st_mode & 0777);  // a refusal leaves the new file's own
  target_ = target;
  return {};
}

void OutputFile::Write(const void* data, size_t bytes) {
  for (const auto* at = static_cast<const char*>(data); bytes > 0 && error_ == 0;) {
    const ssize_t n = ::write(fd_, at, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      error_ = errno;
      return;
    }
    at += n;
    bytes -= static_cast<size_t>(n);
  }
}

Status OutputFile::Commit() {
  if (::close(std::exchange(fd_, -1)) != 0 && error_ == 0) error_ = errno;
  if (error_ == 0 && !target_.empty()) {
    Beside& file = g_beside[static_cast<size_t>(slot_)];
    if (::rename(file.path, target_.c_str()) == 0) {
      file.there = false;
    } else {
      error_ = errno;
    }
  }
  Discard();
  if (error_ == 0) return {};
  return Failed(
      fmt::format("{} is '{}', writing to it failed ({})", flag_, path_, std::strerror(error_)));
}

}  // namespace omnikv::tools
