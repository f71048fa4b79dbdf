#include "text/tokenizer/model.h"

#include <algorithm>

namespace omnikv::tok {

void WordCache::Insert(std::string_view word, uint64_t hash, size_t ids_begin, size_t ids_size) {
  constexpr size_t kMaxOffset = UINT32_MAX;
  if (word.empty() || ids_begin + ids_size > kMaxOffset) return;
  if (2 * used_ >= entries_.size() && entries_.size() < kMaxEntries) {
    std::vector<Entry> old;
    old.swap(entries_);
    entries_.resize(std::max<size_t>(256, 4 * old.size()));
    used_ = 0;
    for (const Entry& e : old) {
      if (e.text_size > 0) Place(e);
    }
  }
  if (text_.size() + word.size() > kMaxOffset) return;
  const auto text_begin = static_cast<uint32_t>(text_.size());
  text_ += word;
  Place({hash, text_begin, static_cast<uint32_t>(word.size()), static_cast<uint32_t>(ids_begin),
         static_cast<uint32_t>(ids_size)});
}

void WordCache::Place(const Entry& entry) {
  for (size_t k = 0; k < kProbes; ++k) {
    Entry& e = entries_[(entry.hash + k) & (entries_.size() - 1)];
    if (e.text_size == 0) {
      ++used_;
      e = entry;
      return;
    }
  }
  entries_[entry.hash & (entries_.size() - 1)] = entry;
}

}  // namespace omnikv::tok
