// SentencePiece's precompiled character map: a Darts double array from byte strings to their
// replacements.
//
// Layout (little-endian): u32 bytes of the array; the array of u32; NUL-terminated replacements.
// A unit of the array holds a label in bits 0-7 and 31, "has a leaf" in bit 8 and an offset in bits
// 10-30, shifted left by 8 where bit 9 is set; a leaf holds an offset into the replacements.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "omnikv/status.h"

namespace omnikv::tok {

class Charsmap {
 public:
  // From the bytes of the map; kCorrupt when they contradict the layout.
  static Result<Charsmap> Parse(std::string_view blob);

  struct Match {
    size_t size;                   // bytes of the key
    std::string_view replacement;  // valid as long as the map
  };
  // The shortest key that `text` starts with, as the tokenizers library takes it, or the longest,
  // as sentencepiece does.
  std::optional<Match> FindShortest(std::string_view text) const { return Find(text, false); }
  std::optional<Match> FindLongest(std::string_view text) const { return Find(text, true); }

 private:
  std::optional<Match> Find(std::string_view text, bool longest) const;

  std::vector<uint32_t> units_;
  std::string replacements_;  // well-formed UTF-8
};

// Standard base64; nullopt when `text` is something else.
std::optional<std::string> DecodeBase64(std::string_view text);

}  // namespace omnikv::tok
