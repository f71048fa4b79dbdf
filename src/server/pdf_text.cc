#include "server/pdf_text.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <utility>

#include "base/printable.h"

namespace omnikv::server {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMostSaid = 4096;  // bytes of what it says on its standard error

class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  ~Fd() { Close(); }
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }
  bool ok() const { return fd_ >= 0; }
  void Close() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }

 private:
  int fd_;
};

struct Pipe {
  Fd out, in;  // what goes into `in` comes out of `out`

  static std::optional<Pipe> Make() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return {};
    return Pipe{.out = Fd(ends[0]), .in = Fd(ends[1])};
  }
};

// Where the program is; empty: nowhere.
std::string PathOf(const std::string& program) {
  if (program.find('/') != std::string::npos) {
    return access(program.c_str(), X_OK) == 0 ? program : "";
  }
  const char* path = std::getenv("PATH");
  std::string_view left = path != nullptr ? path : "/usr/local/bin:/usr/bin:/bin";
  while (!left.empty()) {
    const size_t end = std::min(left.find(':'), left.size());
    const std::string found = fmt::format("{}/{}", left.substr(0, end), program);
    if (end > 0 && access(found.c_str(), X_OK) == 0) return found;
    left.remove_prefix(std::min(end + 1, left.size()));
  }
  return {};
}

// A file in memory that holds `bytes`, from its beginning on.
Fd MemoryFile(std::string_view bytes) {
  Fd file(memfd_create("pdf", MFD_CLOEXEC));
  while (file.ok() && !bytes.empty()) {
    const ssize_t n = write(file.get(), bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Fd();
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  if (file.ok()) lseek(file.get(), 0, SEEK_SET);
  return file;
}

void Limit(int resource, rlim_t most) {
  const rlimit limit{.rlim_cur = most, .rlim_max = most};
  setrlimit(static_cast<__rlimit_resource>(resource), &limit);
}

// In the child of a process of many threads: calls that signal handlers may make, and no others.
[[noreturn]] void Become(const char* path, char* const* arguments, const PdfOptions& options,
                         pid_t parent, int in, int out, int said) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);  // it has gone already
  dup2(in, 0);
  dup2(out, 1);
  dup2(said, 2);
  // Sockets of clients and files of the server are none of its business.
  if (syscall(SYS_close_range, 3U, ~0U, 0U) != 0) {
    for (int fd = 3; fd < 65536; ++fd) close(fd);
  }
  Limit(RLIMIT_CORE, 0);
  Limit(RLIMIT_FSIZE, 0);
  Limit(RLIMIT_AS, options.most_memory);
  Limit(RLIMIT_CPU, static_cast<rlim_t>(options.seconds) + 1);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
  char* const environment[] = {const_cast<char*>("LC_ALL=C.UTF-8"),
                               const_cast<char*>("PATH=/usr/bin:/bin"), nullptr};
  execve(path, arguments, environment);
  _exit(127);
}

// A process in a group of its own, which does not outlive this.
class Child {
 public:
  explicit Child(pid_t pid) : pid_(pid) { setpgid(pid, pid); }
  ~Child() {
    if (pid_ <= 0) return;
    kill(-pid_, SIGKILL);
    while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  // Its status once it has ended; nothing before that.
  std::optional<int> Ended() {
    int status = 0;
    if (waitpid(pid_, &status, WNOHANG) != pid_) return {};
    kill(-std::exchange(pid_, 0), SIGKILL);  // what it left behind
    return status;
  }

 private:
  pid_t pid_;
};

// Takes what `from` has; false once it has no more.
bool Take(Fd& from, std::string& to, size_t most) {
  std::array<char, 1 << 16> bytes;
  const ssize_t n = read(from.get(), bytes.data(), bytes.size());
  if (n < 0 && (errno == EINTR || errno == EAGAIN)) return true;
  if (n <= 0) return false;
  to.append(bytes.data(), std::min(static_cast<size_t>(n), most - std::min(most, to.size())));
  return true;
}

// What the program said first, as the end of a sentence.
std::string FirstLine(const std::string& said) {
  const std::string line = said.substr(0, said.find('\n'));
  return line.empty() ? "" : fmt::format(": {}", Printable(line));
}

Status TookTooLong(const PdfOptions& options) {
  return InvalidArgument(fmt::format(
      "the PDF took longer than {} s to read, expected one that takes less", options.seconds));
}

}  // namespace

bool HasPdfText(const PdfOptions& options) {
  return !PathOf(options.program).empty();
}

Result<std::string> PdfText(std::string_view pdf, const PdfOptions& options) {
  const std::string path = PathOf(options.program);
  if (path.empty()) {
    return Unsupported(fmt::format(
        "{} is not installed where the server runs, which reads PDFs by it (poppler-utils has it)",
        options.program));
  }
  constexpr size_t kHead = 1024;  // where readers look for the mark
  if (pdf.substr(0, kHead).find("%PDF-") == std::string_view::npos) {
    return InvalidArgument("the body is no PDF, expected one, which begins with %PDF-");
  }
  const Fd in = MemoryFile(pdf);
  std::optional<Pipe> out = Pipe::Make();
  std::optional<Pipe> said = Pipe::Make();
  if (!in.ok() || !out || !said) return Failed("a PDF cannot be handed on: no files are left");
  std::array<std::string, 8> words = {path, "-enc", "UTF-8", "-eol", "unix", "-nopgbrk", "-", "-"};
  std::array<char*, 9> arguments{};
  for (size_t i = 0; i < words.size(); ++i) arguments[i] = words[i].data();

  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) return Failed(fmt::format("{} cannot be started", path));
  if (pid == 0) {
    Become(path.c_str(), arguments.data(), options, parent, in.get(), out->in.get(),
           said->in.get());
  }
  Child child(pid);
  out->in.Close();
  said->in.Close();
  fcntl(out->out.get(), F_SETFL, O_NONBLOCK);
  fcntl(said->out.get(), F_SETFL, O_NONBLOCK);

  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(options.seconds));
  std::string text;
  std::string complaint;
  std::optional<int> status;
  // Reads until both ends are closed, or the program has ended and nothing is left.
  while (out->out.ok() || said->out.ok() || !status) {
    if (Clock::now() >= deadline) return TookTooLong(options);
    std::array<pollfd, 2> ends = {pollfd{.fd = out->out.get(), .events = POLLIN, .revents = 0},
                                  pollfd{.fd = said->out.get(), .events = POLLIN, .revents = 0}};
    constexpr int kMs = 20;
    poll(ends.data(), ends.size(), kMs);
    if (ends[0].revents != 0 && !Take(out->out, text, options.most_text + 1)) out->out.Close();
    if (ends[1].revents != 0 && !Take(said->out, complaint, kMostSaid)) said->out.Close();
    if (text.size() > options.most_text) {
      return InvalidArgument(
          fmt::format("the PDF has more than {} bytes of text, expected at most "
                      "so many",
                      options.most_text));
    }
    if (!status) status = child.Ended();
  }
  if (!WIFEXITED(*status) || WEXITSTATUS(*status) != 0) {
    if (WIFSIGNALED(*status) && WTERMSIG(*status) == SIGXCPU) return TookTooLong(options);
    return InvalidArgument(fmt::format("the PDF cannot be read{}", FirstLine(complaint)));
  }
  if (text.find_first_not_of(" \t\r\n\f") == std::string::npos) {
    return InvalidArgument("the PDF has no text, expected one that is more than pictures of pages");
  }
  return text;
}

}  // namespace omnikv::server
