// The strings of a template: text, and which of it came from the user.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/span.h"

namespace omnikv::jinja {

// What one rendering may still spend. Templates come with untrusted models, so every loop and every
// byte is paid for; Step and Bytes throw Error when nothing is left.
class Budget {
 public:
  Budget(int64_t steps, int64_t bytes) : steps_(steps), bytes_(bytes) {}
  void Step(size_t n = 1) {
    steps_ -= static_cast<int64_t>(n);
    if (steps_ < 0) [[unlikely]]
      OutOfSteps();
  }
  void Bytes(size_t n) {
    bytes_ -= static_cast<int64_t>(n);
    if (bytes_ < 0) [[unlikely]]
      OutOfBytes();
  }
  // Fails now if Bytes(n) would: before something big is made.
  void Afford(size_t n) const {
    if (n > static_cast<size_t>(bytes_ < 0 ? 0 : bytes_)) OutOfBytes();
  }

 private:
  [[noreturn]] static void OutOfSteps();
  [[noreturn]] static void OutOfBytes();

  int64_t steps_;
  int64_t bytes_;
};

// An immutable string. Cheap to copy. A string is `markup` after the filters safe and escape: then
// `+` escapes what is added to it, as markupsafe does.
class Str {
 public:
  Str() = default;
  explicit Str(std::string_view text, bool literal = false);

  std::string_view text() const;
  size_t size() const { return text().size(); }
  bool empty() const { return text().empty(); }
  bool LiteralAt(size_t byte) const;
  bool AnyLiteral() const { return data_ != nullptr && !data_->flips.empty(); }
  bool markup() const { return data_ != nullptr && data_->markup; }
  // Equal neighbours merged, none empty.
  std::vector<TextSpan> Spans() const;

 private:
  friend class StrBuilder;
  struct Data {
    std::string text;
    // Bytes at which the text turns literal, not literal, literal, ... Ascending; it starts as not
    // literal.
    std::vector<size_t> flips;
    bool markup = false;
  };
  std::shared_ptr<const Data> data_;  // null: empty
};

// Makes a Str out of pieces, each of which keeps its origin, and pays for it.
class StrBuilder {
 public:
  explicit StrBuilder(Budget* budget) : budget_(budget) {}

  void Append(std::string_view text, bool literal);
  void Append(const Str& s) { Append(s, 0, s.size()); }
  void Append(const Str& s, size_t begin, size_t end);  // bytes [begin, end) of s
  void Repeat(const Str& s, size_t count);

  size_t size() const { return data_.text.size(); }
  Str Build(bool markup = false) &&;

 private:
  Budget* budget_;
  Str::Data data_;
};

// Bytes [begin, end) of s; markup stays markup.
Str Slice(Budget& budget, const Str& s, size_t begin, size_t end);
// The first `needle` in `text` at or after byte `from`, in linear time; npos if there is none.
size_t FindText(std::string_view text, std::string_view needle, size_t from);

}  // namespace omnikv::jinja
