// The tokens of a model: text by id and id by text.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace omnikv::tok {

class Vocab {
 public:
  struct Token {
    int32_t id;       // not negative; ids need not be dense
    uint32_t offset;  // of the text in the storage
    uint32_t size;
  };

  // `storage` holds the texts. Of tokens with the same text or the same id the last one counts.
  Vocab(std::string storage, const std::vector<Token>& tokens);
  Vocab() : Vocab("", {}) {}

  int32_t Find(std::string_view text) const;  // -1: none
  bool Has(int32_t id) const {
    return id >= 0 && id < size() && texts_[static_cast<size_t>(id)].data() != nullptr;
  }
  // Empty where there is no such token.
  std::string_view Text(int32_t id) const { return Has(id) ? texts_[static_cast<size_t>(id)] : ""; }
  int32_t size() const { return static_cast<int32_t>(texts_.size()); }  // largest id + 1

 private:
  struct Slot {
    uint32_t hash;
    int32_t id;  // -1: free
  };

  std::unique_ptr<const std::string> storage_;
  std::vector<std::string_view> texts_;  // [size], of storage_; data() is null where none is
  std::vector<Slot> slots_;              // power of two, at most half full, linear probing
};

}  // namespace omnikv::tok
