#include "text/tokenizer/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include <algorithm>
#include <ctime>

#include "base/check.h"
#include "base/printable.h"
#include "text/tokenizer/work.h"

namespace omnikv::tok {
namespace {

// Of one place in a text, as Oniguruma's own default; legitimate patterns stay far below.
constexpr uint32_t kMatchLimit = 10'000'000;
// PCRE2 does not say how many steps a search took. So places are searched in windows with few steps
// for each, which are free (there are no more places than bytes); where those do not do, place
// after place with more and more, which are paid for in full.
constexpr uint32_t kFreeSteps = 256;
constexpr size_t kWindow = 256;  // bytes
constexpr size_t kStepsPerByte = 1024;
constexpr int64_t kNsPerByte = 4000;
constexpr uint32_t kDepthLimit = 1'000'000;
constexpr uint32_t kHeapLimitKib = 256 * 1024;
constexpr size_t kJitStackBytes = size_t{64} << 20;  // reserved; pages are taken as they are used

// CPU time of this thread: what else the machine does must not make an error.
int64_t ThreadNs() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

size_t NextChar(std::string_view text, size_t at) {
  for (++at; at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0u) == 0x80u; ++at) {
  }
  return at;
}

}  // namespace

void RegexScratch::Prepare() {
  if (data_ != nullptr) return;
  data_ = pcre2_match_data_create_8(1, nullptr);
  context_ = pcre2_match_context_create_8(nullptr);
  OKV_CHECK(data_ != nullptr && context_ != nullptr, "out of memory");
  pcre2_set_depth_limit_8(context_, kDepthLimit);
  pcre2_set_heap_limit_8(context_, kHeapLimitKib);
  since_ns_ = ThreadNs();
}

void RegexScratch::Grant(size_t bytes) {
  steps_ += kStepsPerByte * bytes;
  ns_ += kNsPerByte * static_cast<int64_t>(bytes);
}

bool RegexScratch::Pay(size_t steps) {
  if (steps > steps_) return false;
  steps_ -= steps;
  return true;
}

// Runs of one kind of character are no steps to PCRE2, however long they are: patterns that scan
// the rest of the text at each place are only found by the time they take.
bool RegexScratch::InTime() {
  return ++searches_ % 256 != 0 || ThreadNs() - since_ns_ < ns_;
}

RegexScratch::~RegexScratch() {
  pcre2_match_data_free_8(data_);
  pcre2_match_context_free_8(context_);
  if (stack_ != nullptr) pcre2_jit_stack_free_8(stack_);
}

void Regex::Free::operator()(pcre2_real_code_8* code) const {
  pcre2_code_free_8(code);
}

Result<Regex> Regex::Compile(std::string_view pattern) {
  OKV_ASSIGN_OR_RETURN(const std::string translated, TranslateOniguruma(pattern));
  return CompilePcre2(translated, pattern);
}

Result<Regex> Regex::Literal(std::string_view text) {
  if (text.empty()) return CompilePcre2("", "");
  Regex regex;
  regex.literal_ = std::string(text);
  return regex;
}

Result<Regex> Regex::CompilePcre2(const std::string& pattern, std::string_view shown) {
  pcre2_compile_context_8* context = pcre2_compile_context_create_8(nullptr);
  OKV_CHECK(context != nullptr, "out of memory");
  pcre2_set_newline_8(context, PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  Regex regex;
  regex.shown_ = std::string(shown.substr(0, 2 * kPrintableBytes));
  regex.code_.reset(pcre2_compile_8(
      reinterpret_cast<PCRE2_SPTR8>(pattern.data()), pattern.size(),
      PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C | PCRE2_USE_OFFSET_LIMIT,
      &error, &offset, context));
  pcre2_compile_context_free_8(context);
  if (regex.code_ == nullptr) {
    PCRE2_UCHAR8 text[256] = {};
    pcre2_get_error_message_8(error, text, sizeof(text));
    return Unsupported(fmt::format("the regular expression {} is not valid: {}", Printable(shown),
                                   reinterpret_cast<const char*>(text)));
  }
  // Without JIT (no executable memory) the interpreter runs the pattern, four times slower.
  (void)pcre2_jit_compile_8(regex.code_.get(), PCRE2_JIT_COMPLETE);
  return regex;
}

bool Regex::Find(std::string_view subject, size_t from, RegexScratch* scratch, size_t* begin,
                 size_t* end) const {
  if (!literal_.empty()) {
    *begin = subject.find(literal_, from);
    *end = *begin + literal_.size();
    return *begin != std::string_view::npos;
  }
  scratch->Prepare();
  for (size_t at = from; at <= subject.size();) {
    const size_t window = at;
    size_t last = std::min(at + kWindow, subject.size());
    while (last < subject.size() && (static_cast<unsigned char>(subject[last]) & 0xC0u) == 0x80u) {
      --last;
    }
    switch (Search(subject, at, last, kFreeSteps, scratch, begin, end)) {
      case Outcome::kFound:
        return true;
      case Outcome::kNone:
        at = NextChar(subject, last);
        break;
      case Outcome::kExhausted:
        if (!scratch->Pay((last - window + 1) * kFreeSteps)) Exhausted();
        for (; at <= last; at = NextChar(subject, at)) {
          if (Match(subject, at, scratch, begin, end)) return true;
        }
        break;
    }
  }
  return false;
}

bool Regex::Match(std::string_view subject, size_t at, RegexScratch* scratch, size_t* begin,
                  size_t* end) const {
  for (uint32_t limit = kFreeSteps;; limit = std::min(8 * limit, kMatchLimit)) {
    if (!scratch->Pay(limit)) Exhausted();
    const Outcome outcome = Search(subject, at, at, limit, scratch, begin, end);
    if (outcome != Outcome::kExhausted) return outcome == Outcome::kFound;
    if (limit == kMatchLimit) Exhausted();
  }
}

Regex::Outcome Regex::Search(std::string_view subject, size_t from, size_t last, uint32_t limit,
                             RegexScratch* scratch, size_t* begin, size_t* end) const {
  if (!scratch->InTime()) Exhausted();
  pcre2_set_match_limit_8(scratch->context_, limit);
  pcre2_set_offset_limit_8(scratch->context_, last);
  const auto match = [&] {
    return pcre2_match_8(code_.get(), reinterpret_cast<PCRE2_SPTR8>(subject.data()), subject.size(),
                         from, PCRE2_NO_UTF_CHECK, scratch->data_, scratch->context_);
  };
  int rc = match();
  if (rc == PCRE2_ERROR_JIT_STACKLIMIT && scratch->stack_ == nullptr) {
    scratch->stack_ = pcre2_jit_stack_create_8(64 << 10, kJitStackBytes, nullptr);
    pcre2_jit_stack_assign_8(scratch->context_, nullptr, scratch->stack_);
    rc = match();
  }
  if (rc == PCRE2_ERROR_NOMATCH) return Outcome::kNone;
  if (rc == PCRE2_ERROR_MATCHLIMIT) return Outcome::kExhausted;
  if (rc < 0) Exhausted();  // of stack or heap
  const PCRE2_SIZE* ovector = pcre2_get_ovector_pointer_8(scratch->data_);
  *begin = ovector[0];
  *end = ovector[1];
  return *begin >= from && *begin <= *end ? Outcome::kFound : Outcome::kNone;
}

void Regex::Exhausted() const {
  throw WorkError{StatusCode::kFailed,
                  fmt::format("the regular expression {} takes longer than the limits allow",
                              Printable(shown_))};
}

}  // namespace omnikv::tok
