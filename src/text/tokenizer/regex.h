// Regular expressions of tokenizer files, run by PCRE2.
//
// Files are written for Oniguruma in its Ruby syntax (what the tokenizers library runs), so a
// pattern is translated first; what PCRE2 reads otherwise than Oniguruma and has no equal for is
// refused by name. Unicode properties are PCRE2's version of Unicode (14 in 10.42).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "omnikv/status.h"

struct pcre2_real_code_8;
struct pcre2_real_match_data_8;
struct pcre2_real_match_context_8;
struct pcre2_real_jit_stack_8;

namespace omnikv::tok {

// The pattern in PCRE2's syntax; kUnsupported names the construct.
Result<std::string> TranslateOniguruma(std::string_view pattern);

// Memory that matching needs, and what it may spend: one for all searches of a text, or of a load.
class RegexScratch {
 public:
  RegexScratch() = default;
  ~RegexScratch();
  RegexScratch(const RegexScratch&) = delete;
  RegexScratch& operator=(const RegexScratch&) = delete;

  // Allows for the searches that `bytes` more bytes of text need.
  void Grant(size_t bytes);

 private:
  friend class Regex;
  void Prepare();
  bool Pay(size_t steps);  // false: there is not as much left
  bool InTime();           // looks at the clock now and then

  pcre2_real_match_data_8* data_ = nullptr;
  pcre2_real_match_context_8* context_ = nullptr;
  pcre2_real_jit_stack_8* stack_ = nullptr;  // made when a pattern needs more than the default
  size_t steps_ = size_t{100} << 20;         // of backtracking, as PCRE2 counts them; 4 ns each
  int64_t ns_ = int64_t{10'000'000'000};     // of this thread's time
  int64_t since_ns_ = 0;
  size_t searches_ = 0;
};

// A compiled pattern. Immutable: any number of threads may match at once, each with its scratch.
class Regex {
 public:
  // From Oniguruma's syntax.
  static Result<Regex> Compile(std::string_view pattern);
  // Matches exactly `text`.
  static Result<Regex> Literal(std::string_view text);

  // The leftmost match in subject[from, end), with what is before `from` visible to look-behind.
  // REQUIRES subject well-formed UTF-8 and `from` a character boundary. Throws WorkError, which
  // shows the pattern, where this search or all searches of the scratch together exceed the limits
  // on backtracking: a pattern made to hang ends in an error.
  bool Find(std::string_view subject, size_t from, RegexScratch* scratch, size_t* begin,
            size_t* end) const;

  // Calls fn(begin, end) for each match in order. An empty match right after a match is skipped.
  template <typename Fn>
  void ForEach(std::string_view subject, RegexScratch* scratch, const Fn& fn) const;

 private:
  struct Free {
    void operator()(pcre2_real_code_8* code) const;
  };
  static Result<Regex> CompilePcre2(const std::string& pattern, std::string_view shown);
  // Searches for a match that starts in [from, last], within `limit` steps for each start.
  enum class Outcome { kFound, kNone, kExhausted };
  Outcome Search(std::string_view subject, size_t from, size_t last, uint32_t limit,
                 RegexScratch* scratch, size_t* begin, size_t* end) const;
  // The same for one start, with as many steps as it takes.
  bool Match(std::string_view subject, size_t at, RegexScratch* scratch, size_t* begin,
             size_t* end) const;
  [[noreturn]] void Exhausted() const;

  std::string shown_;  // the pattern, for messages
  std::unique_ptr<pcre2_real_code_8, Free> code_;
  std::string literal_;  // not empty: the pattern is this text
};

template <typename Fn>
void Regex::ForEach(std::string_view subject, RegexScratch* scratch, const Fn& fn) const {
  size_t from = 0;
  size_t last_end = subject.size() + 1;  // of the last match; none yet
  size_t begin;
  size_t end;
  while (from <= subject.size() && Find(subject, from, scratch, &begin, &end)) {
    if (begin == end && end == last_end) {
      ++from;
      while (from < subject.size() &&
             (static_cast<unsigned char>(subject[from]) & 0xC0u) == 0x80u) {
        ++from;
      }
      continue;
    }
    fn(begin, end);
    from = last_end = end;
  }
}

}  // namespace omnikv::tok
