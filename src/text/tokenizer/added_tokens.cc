#include "text/tokenizer/added_tokens.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "text/tokenizer/unicode.h"

namespace omnikv::tok {

Result<AddedTokens> AddedTokens::Make(std::vector<AddedToken> tokens) {
  AddedTokens added;
  if (tokens.size() > kMaxTokens) {
    return Unsupported(fmt::format("there are {} special and added tokens, expected at most {}",
                                   tokens.size(), kMaxTokens));
  }
  size_t all_bytes = 0;
  for (AddedToken& token : tokens) {
    if (token.content.empty()) continue;
    all_bytes += token.content.size() + token.normalized_content.size();
    if (all_bytes > kMaxAllBytes) {
      return Unsupported(fmt::format(
          "the special and added tokens have more than {} bytes of content", kMaxAllBytes));
    }
    if (token.content.size() > kMaxContentBytes) {
      return Unsupported(fmt::format("added token {} has {} bytes of content, expected at most {}",
                                     token.id, token.content.size(), kMaxContentBytes));
    }
    const auto [it, is_new] = added.by_content_.try_emplace(token.content, added.tokens_.size());
    if (is_new) {
      added.tokens_.push_back(std::move(token));
    } else {
      added.tokens_[it->second] = std::move(token);
    }
  }
  for (size_t i = 0; i < added.tokens_.size(); ++i) added.by_id_[added.tokens_[i].id] = i;
  added.MakeTries();
  return added;
}

void AddedTokens::MakeTries() {
  std::vector<std::pair<std::string_view, int32_t>> raw;
  std::vector<std::pair<std::string_view, int32_t>> normalized;
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const AddedToken& token = tokens_[i];
    const auto index = static_cast<int32_t>(i);
    if (!IsValidUtf8(token.content)) continue;  // is in no text; must not match inside a character
    if (!token.normalized || token.special || token.held_back) {
      raw.emplace_back(token.content, index);
    }
    if (token.normalized && !token.normalized_content.empty()) {
      normalized.emplace_back(token.normalized_content, index);
    }
  }
  has_normalized_ = !normalized.empty();
  raw_ = ByteTrie(std::move(raw));
  normalized_ = ByteTrie(std::move(normalized));
}

void AddedTokens::HoldBack(std::string_view text, Work* work) {
  const auto is_control = [](std::string_view content) {
    for (size_t i = 0; i < content.size();) {
      const Char c = DecodeUtf8(content.data() + i);
      if (!IsWordChar(c.code) && !IsWhitespace(c.code) && c.code != 0x2581) return true;
      i += c.size;
    }
    return false;
  };
  std::vector<std::pair<std::string_view, int32_t>> candidates;
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const AddedToken& token = tokens_[i];
    if (token.special || !IsValidUtf8(token.content) || !is_control(token.content)) continue;
    candidates.emplace_back(token.content, static_cast<int32_t>(i));
  }
  if (candidates.empty()) return;
  const ByteTrie trie(std::move(candidates));
  for (size_t begin = 0; begin < text.size(); ++begin) {
    uint32_t node = ByteTrie::kRoot;
    size_t end = begin;
    while (end < text.size()) {
      node = trie.Step(node, static_cast<uint8_t>(text[end++]));
      if (node == ByteTrie::kNone) break;
      const int32_t index = trie.Value(node);
      if (index >= 0) tokens_[static_cast<size_t>(index)].held_back = true;
    }
    work->Walked(end - begin);
  }
  MakeTries();
}

const AddedToken* AddedTokens::FindId(int32_t id) const {
  const auto it = by_id_.find(id);
  return it == by_id_.end() ? nullptr : &tokens_[it->second];
}

const AddedToken* AddedTokens::FindContent(std::string_view content) const {
  const auto it = by_content_.find(std::string(content));
  return it == by_content_.end() ? nullptr : &tokens_[it->second];
}

bool AddedTokens::Allowed(const AddedToken& token, std::string_view text, size_t begin, size_t end,
                          const Rules& rules, Work* work) const {
  if (token.special && !rules.specials) return false;
  if (token.held_back && !rules.held_back) return false;
  if (rules.literal == nullptr) return true;
  const std::vector<Range>& literal = *rules.literal;
  // The first literal range that ends behind `begin`.
  auto it = std::upper_bound(literal.begin(), literal.end(), begin,
                             [](size_t at, const Range& r) { return at < r.end; });
  if (token.special || token.held_back) return it == literal.end() || it->begin >= end;
  // An ordinary token may lie across the edge of a literal range, but where it reaches from one
  // into the text behind it, it must not take a bite of a special token there.
  for (; it != literal.end() && it->end < end; ++it) {
    const size_t stop = std::next(it) == literal.end() ? text.size() : std::next(it)->begin;
    if (FirstSpecial(text, it->end, std::min(end, stop), rules, work) < end) return false;
  }
  return true;
}

// Where in [from, to) the first special token starts that may be found there; text.size() if none.
size_t AddedTokens::FirstSpecial(std::string_view text, size_t from, size_t to, const Rules& rules,
                                 Work* work) const {
  work->Walked(to - from);
  for (size_t begin = from; begin < to; ++begin) {
    uint32_t node = ByteTrie::kRoot;
    for (size_t end = begin; end < text.size();) {
      if ((end - begin) % 64 == 63) work->Draw(8);
      node = raw_.Step(node, static_cast<uint8_t>(text[end++]));
      if (node == ByteTrie::kNone) break;
      const int32_t value = raw_.Value(node);
      if (value < 0) continue;
      const AddedToken& token = tokens_[static_cast<size_t>(value)];
      const bool kept = token.special || token.held_back;
      if (kept && Allowed(token, text, begin, end, rules, work)) return begin;
    }
  }
  return text.size();
}

void AddedTokens::Split(const ByteTrie& trie, std::string_view text, const Rules& rules, Work* work,
                        std::vector<Part>* parts) const {
  size_t done = 0;
  for (size_t pos = 0; pos < text.size();) {
    uint32_t node = trie.Step(ByteTrie::kRoot, static_cast<uint8_t>(text[pos]));
    if (node == ByteTrie::kNone) {
      ++pos;
      continue;
    }
    const AddedToken* found = nullptr;
    size_t found_end = 0;
    size_t end = pos + 1;
    for (;;) {
      if (const int32_t value = trie.Value(node); value >= 0) {
        const AddedToken& token = tokens_[static_cast<size_t>(value)];
        const bool here = !token.normalized || &trie == &normalized_ || rules.normalized_specials;
        if (here && Allowed(token, text, pos, end, rules, work)) {
          found = &token;
          found_end = end;
        }
      }
      if (end == text.size()) break;
      node = trie.Step(node, static_cast<uint8_t>(text[end++]));
      if (node == ByteTrie::kNone) break;
    }
    work->Walked(end - pos);
    if (found == nullptr) {
      ++pos;
      continue;
    }
    size_t begin = pos;
    end = found_end;
    pos = found_end;  // white space that a token takes along may still be another token
    if (found->single_word) {
      const bool word_before =
          begin > 0 && IsWordChar(DecodeUtf8Before(text.substr(0, begin), begin).code);
      const bool word_after = end < text.size() && IsWordChar(DecodeUtf8(text.data() + end).code);
      if (word_before || word_after) continue;
    }
    while (found->lstrip && begin > done) {
      const Char c = DecodeUtf8Before(text, begin);
      if (!IsWhitespace(c.code)) break;
      begin -= c.size;
    }
    while (found->rstrip && end < text.size()) {
      const Char c = DecodeUtf8(text.data() + end);
      if (!IsWhitespace(c.code)) break;
      end += c.size;
    }
    work->Walked(end - begin);
    if (begin > done) parts->push_back({done, begin, -1});
    parts->push_back({begin, end, found->id});
    done = end;
  }
  if (done < text.size()) parts->push_back({done, text.size(), -1});
}

}  // namespace omnikv::tok
