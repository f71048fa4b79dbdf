// The texts that `omnikv analyze` measures on: given ones, or documents made up.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flags.h"
#include "omnikv/engine.h"

namespace omnikv::tools {

using Texts = std::vector<std::vector<int32_t>>;

struct TextFlags {
  std::vector<std::string> files;
  int64_t tokens = 4096;  // of a document made up
  int docs = 2;
  uint64_t seed = 1000;  // other documents than those that `eval` makes by default
};

// -f, --docs, --tokens and --seed.
void AddTextFlags(CLI::App& sub, TextFlags& flags);
// What the files hold; none: documents are made up.
Result<std::vector<std::string>> ReadTexts(const TextFlags& flags);
// Tokens of these, or of documents with questions and answers.
Result<Texts> TextsOf(const TextFlags& flags, const std::vector<std::string>& given,
                      const Engine& engine);

}  // namespace omnikv::tools
