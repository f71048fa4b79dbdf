// How text is cut into the pieces (words) that the model encodes one by one.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer/regex.h"
#include "text/tokenizer/work.h"

namespace omnikv::tok {

struct Range {
  size_t begin;
  size_t end;
};

// Text on its way through the pre-tokenizers.
struct PreText {
  std::string_view text;      // what the pieces are ranges of: the input, or `buffer`
  std::string buffer;         // the text, once a step has rewritten it
  std::vector<Range> pieces;  // in order, none empty
  bool at_origin = false;     // pieces[0] starts with the first byte of the whole input

  std::string spare_text;  // scratch
  std::vector<Range> spare_pieces;

  std::string_view Piece(Range r) const { return text.substr(r.begin, r.end - r.begin); }
};

// One step. Immutable.
class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;
  virtual void Apply(PreText* t, Work* work) const = 0;
};

using PreTokenizerPtr = std::unique_ptr<const PreTokenizer>;

// What becomes of the matches that text is split at.
enum class SplitBehavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

// `invert` swaps matches and what is between them.
PreTokenizerPtr MakeSplit(Regex pattern, SplitBehavior behavior, bool invert);

// Splits at single characters of a kind.
using CharPredicate = bool (*)(char32_t);
PreTokenizerPtr MakeCharSplit(CharPredicate is_delimiter, SplitBehavior behavior);
PreTokenizerPtr MakeDelimiterSplit(char32_t delimiter);

// Runs of word characters and runs of anything else but white space ("Whitespace").
PreTokenizerPtr MakeWordSplit();

// GPT-2's: a space before each piece if asked for and not there, a cut into words by `words`
// (GPT-2's pattern, or none), and each byte as the character that stands for it, unless the
// model takes bytes.
Result<Regex> Gpt2Pattern();
PreTokenizerPtr MakeByteLevel(bool add_prefix_space, std::optional<Regex> words, bool map_bytes);

// Spaces as `replacement`, one more in front if the scheme says so, and a cut before each.
enum class PrependScheme { kNever, kFirst, kAlways };
PreTokenizerPtr MakeMetaspace(std::string replacement, PrependScheme scheme, bool split);

}  // namespace omnikv::tok
