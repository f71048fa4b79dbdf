#include "text/tokenizer/vocab.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "text/tokenizer/hash.h"

namespace omnikv::tok {

Vocab::Vocab(std::string storage, const std::vector<Token>& tokens)
    : storage_(std::make_unique<const std::string>(std::move(storage))) {
  int32_t size = 0;
  for (const Token& t : tokens) size = std::max(size, t.id + 1);
  texts_.resize(static_cast<size_t>(size));
  slots_.assign(std::bit_ceil(2 * tokens.size() + 2), {0, -1});
  const std::string_view all(*storage_);
  for (const Token& t : tokens) {
    const std::string_view text = all.substr(t.offset, t.size);
    const auto hash = static_cast<uint32_t>(HashBytes(text));
    size_t i = hash & (slots_.size() - 1);
    while (slots_[i].id >= 0 &&
           (slots_[i].hash != hash || texts_[static_cast<size_t>(slots_[i].id)] != text)) {
      i = (i + 1) & (slots_.size() - 1);
    }
    slots_[i] = {hash, t.id};
    texts_[static_cast<size_t>(t.id)] = text;
  }
}

int32_t Vocab::Find(std::string_view text) const {
  const auto hash = static_cast<uint32_t>(HashBytes(text));
  for (size_t i = hash & (slots_.size() - 1); slots_[i].id >= 0;
       i = (i + 1) & (slots_.size() - 1)) {
    if (slots_[i].hash == hash && texts_[static_cast<size_t>(slots_[i].id)] == text) {
      return slots_[i].id;
    }
  }
  return -1;
}

}  // namespace omnikv::tok
