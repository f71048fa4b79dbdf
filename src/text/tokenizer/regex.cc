#include "text/tokenizer/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include "base/check.h"

namespace omnikv::tok {
namespace {

// Of one search, as Oniguruma's own default; legitimate patterns stay far below.
constexpr uint32_t kMatchLimit = 10'000'000;
constexpr uint32_t kDepthLimit = 1'000'000;
constexpr uint32_t kHeapLimitKib = 256 * 1024;
constexpr size_t kJitStackBytes = size_t{64} << 20;  // reserved; pages are taken as they are used

}  // namespace

RegexScratch::RegexScratch()
    : data_(pcre2_match_data_create_8(1, nullptr)),
      context_(pcre2_match_context_create_8(nullptr)) {
  OKV_CHECK(data_ != nullptr && context_ != nullptr, "out of memory");
  pcre2_set_match_limit_8(context_, kMatchLimit);
  pcre2_set_depth_limit_8(context_, kDepthLimit);
  pcre2_set_heap_limit_8(context_, kHeapLimitKib);
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
  regex.code_.reset(pcre2_compile_8(
      reinterpret_cast<PCRE2_SPTR8>(pattern.data()), pattern.size(),
      PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error, &offset, context));
  pcre2_compile_context_free_8(context);
  if (regex.code_ == nullptr) {
    PCRE2_UCHAR8 text[256] = {};
    pcre2_get_error_message_8(error, text, sizeof(text));
    return Unsupported(fmt::format("the regular expression \"{}\" is not valid: {}", shown,
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
  if (rc < 0) return false;
  const PCRE2_SIZE* ovector = pcre2_get_ovector_pointer_8(scratch->data_);
  *begin = ovector[0];
  *end = ovector[1];
  return *begin >= from && *begin <= *end;
}

}  // namespace omnikv::tok
