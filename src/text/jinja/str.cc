#include "text/jinja/str.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "text/jinja/error.h"

namespace omnikv::jinja {

void Budget::OutOfSteps() {
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
  if (budget_) budget_->Bytes(text.size());
  if (literal != (data_.flips.size() % 2 == 1)) {
    if (budget_) budget_->Bytes(sizeof(size_t));
    data_.flips.push_back(data_.text.size());
  }
  data_.text += text;
}

void StrBuilder::Append(const Str& s, size_t begin, size_t end) {
  if (!s.data_) return;
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
  if (s.empty()) return;
  if (budget_) budget_->Afford(count > SIZE_MAX / s.size() ? SIZE_MAX : count * s.size());
  for (size_t i = 0; i < count; ++i) Append(s);
}

Str StrBuilder::Build(bool markup) && {
  Str s;
  if (data_.text.empty() && !markup) return s;
  if (budget_) budget_->Bytes(sizeof(Str::Data));
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

size_t FindText(std::string_view text, std::string_view needle, size_t from) {
  if (from > text.size() || text.size() - from < needle.size()) return std::string_view::npos;
  if (needle.empty()) return from;
  const void* at = memmem(text.data() + from, text.size() - from, needle.data(), needle.size());
  if (at == nullptr) return std::string_view::npos;
  return static_cast<size_t>(static_cast<const char*>(at) - text.data());
}

}  // namespace omnikv::jinja
