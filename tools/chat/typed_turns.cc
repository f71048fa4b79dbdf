// Turns that a person types, with libedit.
#include <fcntl.h>
#include <fmt/format.h>
#include <histedit.h>
#include <termios.h>
#include <unistd.h>

#include <array>
#include <clocale>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string_view>

#include "base/log.h"
#include "chat/turns.h"
#include "interrupt.h"

namespace omnikv::tools {
namespace {

constexpr std::string_view kQuotes = "\"\"\"";
constexpr int kHistoryLines = 1000;

// The file of earlier lines: $OMNIKV_HISTORY, where that is set, else in the folder for the state
// of programs. Empty: none is kept.
std::string HistoryFile() {
  const auto variable = [](const char* name) -> std::optional<std::string> {
    const char* value = std::getenv(name);
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  };
  if (const auto file = variable("OMNIKV_HISTORY")) return *file;
  namespace fs = std::filesystem;
  fs::path folder = variable("XDG_STATE_HOME").value_or("");
  if (!folder.is_absolute()) {  // as the standard asks
    const std::string home = variable("HOME").value_or("");
    if (home.empty()) return "";
    folder = fs::path(home) / ".local" / "state";
  }
  return folder / "omnikv" / "history";
}

class History {
 public:
  History() : history_(history_init()), file_(HistoryFile()) {
    HistEvent event;
    history(history_, &event, H_SETSIZE, kHistoryLines);
    history(history_, &event, H_SETUNIQUE, 1);
    if (!file_.empty()) history(history_, &event, H_LOAD, file_.c_str());
  }
  ~History() { history_end(history_); }
  History(const History&) = delete;
  History& operator=(const History&) = delete;

  ::History* get() { return history_; }
  void Add(const std::string& text) {
    HistEvent event;
    history(history_, &event, H_ENTER, text.c_str());
    if (!file_.empty() && !Save()) LogVerbose("the history cannot be kept in {}", file_);
  }

 private:
  // Whole, each time: what was typed outlives a program that is ended by a signal.
  bool Save() {
    std::error_code error;
    const auto folder = std::filesystem::path(file_).parent_path();
    if (!folder.empty() && std::filesystem::create_directories(folder, error)) {
      std::filesystem::permissions(folder, std::filesystem::perms::owner_all, error);
    }
    const int fd = open(file_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);  // private at once
    if (fd < 0) return false;
    close(fd);
    HistEvent event;
    return history(history_, &event, H_SAVE, file_.c_str()) >= 0;
  }

  ::History* history_;
  std::string file_;
};

// How the terminal was, and where it is told to mark pastes no more (-1: it was never asked to).
// (libedit can give it back itself, but then a signal that the program outlives may end the line.)
struct termios g_modes;
int g_brackets = -1;
constexpr std::string_view kBracketsOn = "\033[?2004h";
constexpr std::string_view kBracketsOff = "\033[?2004l";

extern "C" void GiveTerminalBack(int signal) {
  tcsetattr(STDIN_FILENO, TCSANOW, &g_modes);
  if (g_brackets >= 0 && write(g_brackets, kBracketsOff.data(), kBracketsOff.size()) < 0) {
    // There is nobody left to tell.
  }
  raise(signal);
}

// While alive, the terminal is given back when a signal ends the program.
class TerminalModes {
 public:
  TerminalModes() {
    if (tcgetattr(STDIN_FILENO, &g_modes) != 0) return;
    struct sigaction action {};
    action.sa_handler = GiveTerminalBack;
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    for (size_t i = 0; i < kEnds.size(); ++i) {
      sigaction(kEnds[i], nullptr, &before_[i]);
      if (before_[i].sa_handler == SIG_DFL) sigaction(kEnds[i], &action, nullptr);
    }
    set_ = true;
  }
  ~TerminalModes() {
    for (size_t i = 0; set_ && i < kEnds.size(); ++i) sigaction(kEnds[i], &before_[i], nullptr);
  }
  TerminalModes(const TerminalModes&) = delete;
  TerminalModes& operator=(const TerminalModes&) = delete;

 private:
  static constexpr std::array<int, 3> kEnds = {SIGTERM, SIGHUP, SIGQUIT};
  std::array<struct sigaction, kEnds.size()> before_{};
  bool set_ = false;
};

class TypedTurns : public TurnReader {
 public:
  // Takes both.
  TypedTurns(FILE* terminal, EditLine* edit) : terminal_(terminal), edit_(edit) {
    el_set(edit_, EL_CLIENTDATA, this);
    el_set(edit_, EL_PROMPT, Prompt);
    el_set(edit_, EL_EDITOR, "emacs");
    el_set(edit_, EL_HIST, history, history_.get());
    el_source(edit_, nullptr);  // what people set in ~/.editrc
    el_set(edit_, EL_BIND, "^R", "em-inc-search-prev", nullptr);
    // Ctrl-C and Ctrl-Z are keys like others while a line is edited.
    el_set(edit_, EL_SETTY, "-d", "-isig", nullptr);
    // Names as wide characters: libedit keeps them as they are, and leaks a copy of others.
    el_wset(edit_, EL_ADDFN, L"omnikv-abandon", L"Gives a fresh prompt", Abandon);
    el_set(edit_, EL_BIND, "^C", "omnikv-abandon", nullptr);
    el_wset(edit_, EL_ADDFN, L"omnikv-suspend", L"Back to the shell, until fg", Suspend);
    el_set(edit_, EL_BIND, "^Z", "omnikv-suspend", nullptr);
    const char* term = std::getenv("TERM");
    brackets_ = term != nullptr && *term != '\0' && std::string_view(term) != "dumb";
    g_brackets = brackets_ ? fileno(terminal_) : -1;
    el_wset(edit_, EL_ADDFN, L"omnikv-paste", L"Inserts what is pasted", Paste);
    el_set(edit_, EL_BIND, "\033[200~", "omnikv-paste", nullptr);
  }
  ~TypedTurns() override {
    g_brackets = -1;
    el_end(edit_);
    std::fclose(terminal_);
  }

  Result<Turn> Next() override;
  bool interactive() const override { return true; }

 private:
  static TypedTurns& Of(EditLine* edit) {
    void* self = nullptr;
    el_get(edit, EL_CLIENTDATA, &self);
    return *static_cast<TypedTurns*>(self);
  }
  static const char* Prompt(EditLine* edit) { return Of(edit).prompt_; }
  static unsigned char Abandon(EditLine* edit, wint_t key);
  static unsigned char Suspend(EditLine* edit, wint_t key);
  static unsigned char Paste(EditLine* edit, wint_t key);

  // A line without its end; nothing at the end of input, or when Ctrl-C abandoned it.
  std::optional<std::string> ReadLine(const char* prompt);

  const OutliveInterrupts outlive_;
  const TerminalModes modes_;
  History history_;
  FILE* terminal_;
  EditLine* edit_;
  const char* prompt_ = "";
  bool brackets_ = false;   // the terminal marks what is pasted
  bool abandoned_ = false;  // the last line
};

unsigned char TypedTurns::Abandon(EditLine* edit, wint_t) {
  Of(edit).abandoned_ = true;
  const LineInfo* line = el_line(edit);
  el_cursor(edit, static_cast<int>(line->lastchar - line->cursor));
  el_insertstr(edit, "^C");
  el_push(edit, "\n");  // ends the line as the Enter key does
  return CC_REFRESH;
}

unsigned char TypedTurns::Suspend(EditLine* edit, wint_t) {
  el_set(edit, EL_PREP_TERM, 0);
  kill(0, SIGTSTP);  // all of a pipeline, as the terminal does
  el_set(edit, EL_PREP_TERM, 1);
  return CC_REDISPLAY;
}

unsigned char TypedTurns::Paste(EditLine* edit, wint_t) {
  constexpr std::wstring_view kEnd = L"\033[201~";
  std::wstring text;
  for (wchar_t c = 0; !text.ends_with(kEnd);) {
    if (el_wgetc(edit, &c) != 1) return CC_EOF;
    text += c == L'\r' ? L'\n' : c;
  }
  text.resize(text.size() - kEnd.size());
  std::erase(text, L'\0');
  el_winsertstr(edit, text.c_str());
  return CC_REFRESH;
}

std::optional<std::string> TypedTurns::ReadLine(const char* prompt) {
  prompt_ = prompt;
  abandoned_ = false;
  el_resize(edit_);
  el_set(edit_, EL_PREP_TERM, 1);  // keys come one by one before the prompt asks for them
  if (brackets_) std::fputs(kBracketsOn.data(), terminal_);
  int length = 0;
  const char* read = el_gets(edit_, &length);
  if (brackets_) std::fputs(kBracketsOff.data(), terminal_);
  if (read == nullptr || length <= 0) std::fputc('\n', terminal_);  // a fresh line after Ctrl-D
  std::fflush(terminal_);
  if (read == nullptr || length <= 0 || abandoned_) return std::nullopt;
  std::string line(read, static_cast<size_t>(length));
  if (line.ends_with('\n')) line.pop_back();
  return line;
}

Result<Turn> TypedTurns::Next() {
  while (true) {
    std::optional<std::string> line = ReadLine("> ");
    std::string typed = line.value_or("");
    const bool block = typed.starts_with(kQuotes);
    while (line && block && (typed.size() < 2 * kQuotes.size() || !typed.ends_with(kQuotes))) {
      line = ReadLine(". ");
      if (line) typed += "\n" + *line;
    }
    if (!line && abandoned_) continue;
    if (!line) return Turn{};
    if (typed.find_first_not_of(" \t\n") == std::string::npos) continue;
    history_.Add(typed);
    if (block) {
      typed = typed.substr(kQuotes.size(), typed.size() - 2 * kQuotes.size());
      if (typed.starts_with('\n')) typed.erase(0, 1);
      if (typed.ends_with('\n')) typed.pop_back();
      if (typed.empty()) continue;
      return Turn{.kind = Turn::Kind::kText, .text = std::move(typed)};
    }
    if (!typed.starts_with('/')) return Turn{.kind = Turn::Kind::kText, .text = std::move(typed)};
    typed.erase(0, 1);
    const bool text = typed.starts_with('/');
    return Turn{.kind = text ? Turn::Kind::kText : Turn::Kind::kCommand, .text = std::move(typed)};
  }
}

}  // namespace

std::unique_ptr<TurnReader> MakeTypedTurns() {
  // The terminal itself, wherever stdout and stderr go.
  FILE* terminal = std::fopen("/dev/tty", "we");
  if (terminal == nullptr) terminal = fdopen(dup(STDERR_FILENO), "w");
  if (terminal == nullptr) return MakePipedTurns();
  // Models read UTF-8 and nothing else, whatever the locale.
  std::setlocale(LC_CTYPE, "C.UTF-8");
  EditLine* edit = el_init("omnikv", stdin, terminal, terminal);
  if (edit != nullptr) return std::make_unique<TypedTurns>(terminal, edit);
  std::fclose(terminal);
  return MakePipedTurns();
}

}  // namespace omnikv::tools
