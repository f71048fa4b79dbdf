// What happens to text before it is cut into words.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "text/tokenizer/charsmap.h"
#include "text/tokenizer/regex.h"
#include "text/tokenizer/unicode.h"
#include "text/tokenizer/work.h"

namespace omnikv::tok {

// Text on its way through the normalizers.
struct NormText {
  std::string text;
  // Whether the first character comes from the first byte of the whole input: what the "first"
  // scheme of Metaspace asks.
  bool at_origin = false;
  std::string spare;  // scratch
};

// One step. Immutable.
class Normalizer {
 public:
  virtual ~Normalizer() = default;
  // Draws on `work` for what it makes beyond a few bytes for each of the text.
  virtual void Apply(NormText* t, Work* work) const = 0;
};

using NormalizerPtr = std::unique_ptr<const Normalizer>;

NormalizerPtr MakeNormalForm(NormalForm form);
NormalizerPtr MakeLowercase();
NormalizerPtr MakePrepend(std::string text);  // nothing before an empty text
NormalizerPtr MakeReplace(Regex pattern, std::string content);
NormalizerPtr MakeStrip(bool left, bool right);
NormalizerPtr MakeStripAccents();
NormalizerPtr MakeNmt();
NormalizerPtr MakePrecompiled(Charsmap map);
NormalizerPtr MakeByteChars();  // ByteLevel

struct BertOptions {
  bool clean_text = true;
  bool handle_chinese_chars = true;
  bool strip_accents = true;
  bool lowercase = true;
};
NormalizerPtr MakeBert(BertOptions options);

}  // namespace omnikv::tok
