// The strings of a template: text, and which of it came from the user.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/span.h"

namespace omnikv::jinja {

// What one rendering may still spend. Templates come with untrusted models, so all work and every
// byte made is paid for, before it is done where it can be large; what cannot be paid throws Error.
//
// Work is counted in units of about a nanosecond of one EPYC core; where kinds of work differ, a
// unit is rather too small than too large a part of a second. Whatever touches text or walks values
// pays here: Builtin for what a filter, a test, a method or a function is given, operators, Equal,
// Less, keys of dicts and Iterate for what they read, StrBuilder and Runtime for what they make.
class Budget {
 public:
  Budget(int64_t work, int64_t bytes) : work_(NotNegative(work)), bytes_(NotNegative(bytes)) {}

  void Work(size_t units) {
    if (units > work_) [[unlikely]]
      OutOfWork();
    work_ -= units;
  }
  // A node of the tree evaluated, an item walked, a small value made.
  void Node(size_t n = 1) { Work(64 * n); }
  // Bytes compared, searched or copied as a whole.
  void Scan(size_t bytes) { Work(bytes / 8 + 8); }
  // Bytes read character by character.
  void Read(size_t bytes) { Work(bytes); }
  // Bytes of characters whose properties are looked up besides.
  void LookUp(size_t bytes) { Work(bytes > SIZE_MAX / 8 ? SIZE_MAX : 8 * bytes); }
  // Bytes of text and values made.
  void Bytes(size_t n) {
    Afford(n);
    Work(n / 2);
    bytes_ -= n;
  }
  // Fails now if Bytes(n) would: before something big is made.
  void Afford(size_t n) const {
    if (n > bytes_) [[unlikely]]
      OutOfBytes();
  }

  size_t work() const { return work_; }  // that is left

 private:
  [[noreturn]] static void OutOfWork();
  [[noreturn]] static void OutOfBytes();
  static size_t NotNegative(int64_t n) { return n < 0 ? 0 : static_cast<size_t>(n); }

  size_t work_;
  size_t bytes_;
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
  explicit StrBuilder(Budget* budget) : budget_(*budget) {}

  void Append(std::string_view text, bool literal);
  void Append(const Str& s) { Append(s, 0, s.size()); }
  void Append(const Str& s, size_t begin, size_t end);  // bytes [begin, end) of s
  // `text` with the origin of byte `at` of s.
  void AppendLike(std::string_view text, const Str& s, size_t at);
  void Repeat(const Str& s, size_t count);

  size_t size() const { return data_.text.size(); }
  Str Build(bool markup = false) &&;

 private:
  void PayForOrigin(const Str& s);

  Budget& budget_;
  Str::Data data_;
};

// Bytes [begin, end) of s; markup stays markup.
Str Slice(Budget& budget, const Str& s, size_t begin, size_t end);
// The first `needle` in `text` at or after byte `from`, in linear time, or the last; npos if there
// is none.
size_t FindText(Budget& budget, std::string_view text, std::string_view needle, size_t from);
size_t FindLastText(Budget& budget, std::string_view text, std::string_view needle);

}  // namespace omnikv::jinja
