#include "text/tokenizer/token_texts.h"

#include <cstdio>
#include <optional>

#include "text/tokenizer/byte_level.h"

namespace omnikv {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
constexpr std::string_view kByteLevelSpace = "\xC4\xA0";  // U+0120

std::optional<std::string> TextOf(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  Result<std::string> text = tokenizer.Decode(ids, /*skip_special=*/false);
  if (!text.ok()) return std::nullopt;
  return std::move(*text);
}

// A token that does not depend on what stands before it: decoders that take off the space at the
// beginning of a text have it before the one in question.
std::optional<int32_t> Anchor(const Tokenizer& tokenizer) {
  const auto fits = [&](int32_t id) {
    if (tokenizer.IsSpecial(id)) return false;
    const auto once = TextOf(tokenizer, {id});
    if (!once || once->empty() || static_cast<unsigned char>((*once)[0]) >= 0x80) return false;
    return TextOf(tokenizer, {id, id}) == *once + *once;
  };
  const std::optional<int32_t> a = tokenizer.TokenToId("a");
  if (a && fits(*a)) return a;
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    if (fits(id)) return id;
  }
  return std::nullopt;
}

std::string SpelledBytes(std::string_view spelling, bool byte_level) {
  std::string bytes;
  if (byte_level) {
    tok::AppendCharBytes(spelling, &bytes);
    return bytes;
  }
  unsigned value = 0;
  if (spelling.size() == 6 &&
      std::sscanf(std::string(spelling).c_str(), "<0x%2X>", &value) == 1) {  // NOLINT
    bytes += static_cast<char>(value);
  }
  return bytes;
}

}  // namespace

Result<TokenTexts> TokenTexts::Of(const Tokenizer& tokenizer) {
  const std::optional<int32_t> anchor = Anchor(tokenizer);
  if (!anchor) {
    return Unsupported("the model's tokenizer has no token that stands for itself alone");
  }
  TokenTexts texts(tokenizer, *anchor);
  texts.before_ = *TextOf(tokenizer, {*anchor});
  const std::optional<int32_t> space = tokenizer.TokenToId(kByteLevelSpace);
  texts.byte_level_ = space && texts.AfterAnchor(*space) == " ";
  return texts;
}

std::optional<std::string> TokenTexts::AfterAnchor(int32_t id) const {
  auto text = TextOf(*tokenizer_, {anchor_, id});
  if (!text || !text->starts_with(before_)) return std::nullopt;
  return text->substr(before_.size());
}

std::string TokenTexts::operator[](int32_t id) const {
  const std::string_view spelling = tokenizer_->IdToToken(id);
  if (spelling.empty() || tokenizer_->IsSpecial(id)) return {};
  const auto text = AfterAnchor(id);
  if (text && text->find(kReplacement) == std::string::npos) return *text;
  return SpelledBytes(spelling, byte_level_);
}

std::vector<std::string> TokenTexts::All() const {
  std::vector<std::string> all;
  for (int32_t id = 0; id < tokenizer_->vocab_size(); ++id) all.push_back((*this)[id]);
  return all;
}

}  // namespace omnikv
