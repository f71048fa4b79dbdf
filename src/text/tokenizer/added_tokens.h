// Tokens that are found in the text before the model sees it: special tokens and others that a
// tokenizer adds to its model.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "omnikv/status.h"
#include "text/tokenizer/byte_trie.h"
#include "text/tokenizer/pre_tokenizer.h"

namespace omnikv::tok {

struct AddedToken {
  int32_t id = -1;
  std::string content;
  std::string normalized_content;  // what is looked for when `normalized`
  bool special = false;
  bool held_back = false;    // not found in text of users, although it is not special
  bool single_word = false;  // not beside a word character
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // and after it
  bool normalized = false;   // looked for in the normalized text, not in the text as given
};

class AddedTokens {
 public:
  // The longest content that is accepted: matching takes up to this many steps a byte.
  static constexpr size_t kMaxContentBytes = 1024;

  // Tables of them take some 400 bytes each, and 10 for each byte of their contents.
  static constexpr size_t kMaxTokens = size_t{1} << 18;
  static constexpr size_t kMaxAllBytes = size_t{16} << 20;

  // Of tokens with the same content or the same id the last one counts.
  static Result<AddedTokens> Make(std::vector<AddedToken> tokens);

  // Holds back the tokens that are written out in `text` and look like control tokens: whose
  // content has more to it than letters, digits, spaces and what stands for a space.
  void HoldBack(std::string_view text, Work* work);

  const AddedToken* FindId(int32_t id) const;
  const AddedToken* FindContent(std::string_view content) const;
  const std::vector<AddedToken>& tokens() const { return tokens_; }

  // A part of a text: a token (id) or the text between tokens (-1).
  struct Part {
    size_t begin;
    size_t end;
    int32_t id;
  };

  // What may be found. Where a longer token may not be found, a shorter one is.
  struct Rules {
    bool specials = true;   // special tokens at all
    bool held_back = true;  // those that are held back
    // Ranges of the text, in order, in which no special token and none that is held back may begin,
    // end or be.
    const std::vector<Range>* literal = nullptr;
    // Such tokens that are to be looked for in the normalized text: in the text as given.
    bool normalized_specials = false;
  };

  // The parts of a text as given, in order. Tokens are found leftmost and longest first.
  void SplitRaw(std::string_view text, const Rules& rules, Work* work,
                std::vector<Part>* parts) const {
    Split(raw_, text, rules, work, parts);
  }
  // The same for a piece of normalized text.
  void SplitNormalized(std::string_view text, const Rules& rules, Work* work,
                       std::vector<Part>* parts) const {
    Split(normalized_, text, rules, work, parts);
  }
  bool has_normalized() const { return has_normalized_; }

 private:
  void MakeTries();
  bool Allowed(const AddedToken& token, std::string_view text, size_t begin, size_t end,
               const Rules& rules, Work* work) const;
  void Split(const ByteTrie& trie, std::string_view text, const Rules& rules, Work* work,
             std::vector<Part>* parts) const;
  size_t FirstSpecial(std::string_view text, size_t from, size_t to, const Rules& rules,
                      Work* work) const;

  std::vector<AddedToken> tokens_;
  std::unordered_map<int32_t, size_t> by_id_;           // index into tokens_
  std::unordered_map<std::string, size_t> by_content_;  // index into tokens_
  ByteTrie raw_;                                        // values are indices into tokens_
  ByteTrie normalized_;                                 // values are indices into tokens_
  bool has_normalized_ = false;
};

}  // namespace omnikv::tok
