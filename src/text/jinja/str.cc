#include "text/jinja/str.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "text/jinja/error.h"

namespace omnikv::jinja {
namespace {

constexpr size_t kPiece = 16;      // units of work for an append
constexpr size_t kSearched = 256;  // bytes searched at a time

}  // namespace

void Budget::OutOfWork() {
  throw Error{StatusCode::kResourceExhausted, "the template runs longer than the limit allows"};
}

void Budget::OutOfBytes() {
  throw Error{StatusCode::kResourceExhausted, "the template makes more text than the limit allows"};
}

Str::Str(std::string_view text, bool literal) {
  if (text.empty()) return;
  Data data;
  data.text = text;
  if (literal) data.flips.push_back(0);
  data_ = std::make_shared<const Data>(std::move(data));
}

std::string_view Str::text() const {
  return data_ ? data_->text : std::string_view();
}

bool Str::LiteralAt(size_t byte) const {
  if (!data_) return false;
  const std::vector<size_t>& flips = data_->flips;
  return (std::upper_bound(flips.begin(), flips.end(), byte) - flips.begin()) % 2 == 1;
}

std::vector<TextSpan> Str::Spans() const {
  std::vector<TextSpan> spans;
  if (!data_) return spans;
  bool literal = false;
  size_t begin = 0;
  const auto close = [&](size_t end) {
    if (end > begin) spans.push_back({data_->text.substr(begin, end - begin), literal});
    begin = end;
    literal = !literal;
  };
  for (const size_t flip : data_->flips) close(flip);
  close(data_->text.size());
  return spans;
}

void StrBuilder::Append(std::string_view text, bool literal) {
  if (text.empty()) return;
  budget_.Work(kPiece);
  budget_.Bytes(text.size());
  if (literal != (data_.flips.size() % 2 == 1)) {
    budget_.Bytes(sizeof(size_t));
    data_.flips.push_back(data_.text.size());
  }
  data_.text += text;
}

// Origins are found by a binary search.
void StrBuilder::PayForOrigin(const Str& s) {
  if (s.data_ && s.data_->flips.size() > 1) budget_.Work(8 * std::bit_width(s.data_->flips.size()));
}

void StrBuilder::AppendLike(std::string_view text, const Str& s, size_t at) {
  PayForOrigin(s);
  Append(text, s.LiteralAt(at));
}

void StrBuilder::Append(const Str& s, size_t begin, size_t end) {
  if (!s.data_) return;
  PayForOrigin(s);
  const std::vector<size_t>& flips = s.data_->flips;
  auto flip = std::upper_bound(flips.begin(), flips.end(), begin);
  const std::string_view text = s.text();
  while (begin < end) {
    const bool literal = (flip - flips.begin()) % 2 == 1;
    const size_t stop = flip == flips.end() ? end : std::min(end, *flip++);
    Append(text.substr(begin, stop - begin), literal);
    begin = stop;
  }
}

void StrBuilder::Repeat(const Str& s, size_t count) {
  if (s.empty() || count == 0) return;
  if (count > SIZE_MAX / s.size()) budget_.Afford(SIZE_MAX);
  const size_t size = count * s.size();
  budget_.Afford(size);
  data_.text.reserve(data_.text.size() + size);
  const std::vector<size_t>& flips = s.data_->flips;
  if (flips.size() > 1 || (flips.size() == 1 && flips[0] != 0)) {
    for (size_t i = 0; i < count; ++i) Append(s);
    return;
  }
  const size_t begin = data_.text.size();
  Append(s);
  budget_.Bytes(size - s.size());
  for (size_t done = s.size(); done < size; done = data_.text.size() - begin) {
    data_.text.append(data_.text, begin, std::min(done, size - done));
  }
}

Str StrBuilder::Build(bool markup) && {
  Str s;
  if (data_.text.empty() && !markup) return s;
  budget_.Node();
  budget_.Bytes(sizeof(Str::Data));
  data_.markup = markup;
  s.data_ = std::make_shared<const Str::Data>(std::move(data_));
  return s;
}

Str Slice(Budget& budget, const Str& s, size_t begin, size_t end) {
  if (begin == 0 && end == s.size()) return s;
  StrBuilder out(&budget);
  out.Append(s, begin, end);
  return std::move(out).Build(s.markup());
}

size_t FindText(Budget& budget, std::string_view text, std::string_view needle, size_t from) {
  if (from > text.size() || text.size() - from < needle.size()) return std::string_view::npos;
  if (needle.empty()) return from;
  budget.Scan(needle.size());
  // Piece by piece, so that what is paid for is what is searched.
  for (const size_t piece = std::max(kSearched, needle.size());;) {
    const size_t size = std::min(text.size() - from, piece + needle.size() - 1);
    budget.Work(size);
    if (const void* at = memmem(text.data() + from, size, needle.data(), needle.size())) {
      return static_cast<size_t>(static_cast<const char*>(at) - text.data());
    }
    if (size < piece + needle.size() - 1) return std::string_view::npos;
    from += piece;
  }
}

size_t FindLastText(Budget& budget, std::string_view text, std::string_view needle) {
  if (text.size() < needle.size()) return std::string_view::npos;
  if (needle.empty()) return text.size();
  for (size_t end = text.size() - needle.size() + 1; end > 0;) {
    const void* found = memrchr(text.data(), needle[0], end);
    const size_t at =
        found == nullptr ? 0 : static_cast<size_t>(static_cast<const char*>(found) - text.data());
    budget.Scan(end - at);
    if (found == nullptr) break;
    budget.Scan(needle.size());
    if (text.substr(at, needle.size()) == needle) return at;
    end = at;
  }
  return std::string_view::npos;
}

}  // namespace omnikv::jinja
