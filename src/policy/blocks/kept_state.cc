// What a fork of policy blocks, and a file, take of a sequence.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "policy/blocks/key_blocks.h"

namespace omnikv {
namespace {

// Reads numbers from the front of bytes.
class Numbers {
 public:
  explicit Numbers(std::string_view bytes) : left_(bytes) {}
  // False where there are not so many.
  bool Take(int32_t* to, size_t n) {
    if (left_.size() < n * sizeof(int32_t)) return false;
    std::memcpy(to, left_.data(), n * sizeof(int32_t));
    left_.remove_prefix(n * sizeof(int32_t));
    return true;
  }
  bool empty() const { return left_.empty(); }

 private:
  std::string_view left_;
};

void Append(std::string& state, const int32_t* numbers, size_t n) {
  state.append(reinterpret_cast<const char*>(numbers), n * sizeof(int32_t));
}

}  // namespace

template <typename Visit>
void KeyBlocks::ForKept(int32_t seq, int64_t length, const Visit& visit) const {
  const int64_t blocks = UnitsOf(static_cast<int32_t>(length), rule().blocks.block);
  for (int32_t c = 0; c < n_choosers(); ++c) {
    if (rule().own_keys) visit(Keys(c, seq), blocks * KeyWords());
    for (int32_t l = 0; preselects_ && l < lists(); ++l) visit(Bias(c, seq) + l * stride(), blocks);
  }
}

void KeyBlocks::CopyState(const Policy& from) {
  const auto& other = static_cast<const KeyBlocks&>(from);
  const auto copy = [&](const Buffer& to, const Buffer& of) {
    if (to.size() > 0) context().backend->Upload(to.as(), of.as<void>(), to.size());
  };
  copy(keys_, other.keys_);
  copy(bias_, other.bias_);
  copy(made_, other.made_);
  if (!holds_) return;
  const int64_t n = int64_t{2} * n_choosers() * lists();
  const auto bytes = static_cast<size_t>(n) * sizeof(int32_t);
  context().backend->Upload(choice().count(), other.choice().count(), bytes);
  context().backend->Upload(choice().index(), other.choice().index(),
                            bytes * static_cast<size_t>(choice().capacity()));
}

// Keys and biases of all blocks; then, of the newest choice that is of no later step, after how
// many tokens it was made, and the blocks of each list behind their number.
std::string KeyBlocks::SaveState(int32_t seq, int64_t length) const {
  Backend& backend = *context().backend;
  std::string state;
  ForKept(seq, length, [&](const float* values, int64_t words) {
    std::string of(static_cast<size_t>(words) * sizeof(float), '\0');
    backend.Download(of.data(), values, of.size());
    state += of;
  });
  if (!holds_) return state;
  std::array<int32_t, 2> made{};
  for (size_t place = 0; place < made.size(); ++place) {
    backend.Download(&made[place], MadeAfter(place, seq), sizeof(made[place]));
  }
  const int32_t place = made[0] > length ? 1 : 0;
  Append(state, &made[static_cast<size_t>(place)], 1);
  const auto n_lists = static_cast<size_t>(lists());
  const auto capacity = static_cast<size_t>(choice().capacity());
  std::vector<int32_t> count(n_lists), index(n_lists * capacity);
  for (int32_t c = 0; c < n_choosers(); ++c) {
    const int32_t from = place * n_choosers() + c;
    backend.Download(count.data(), choice().count(from) + seq * lists(),
                     count.size() * sizeof(int32_t));
    backend.Download(index.data(), choice().index(from) + seq * ListWords(),
                     index.size() * sizeof(int32_t));
    for (size_t l = 0; l < n_lists; ++l) {
      Append(state, &count[l], 1);
      Append(state, &index[l * capacity], static_cast<size_t>(count[l]));
    }
  }
  return state;
}

bool KeyBlocks::LoadState(int32_t seq, int64_t length, std::string_view state) {
  Backend& backend = *context().backend;
  // Blocks that are yet to come are not excluded, whatever the place knew of another sequence.
  const std::vector<float> none(preselects_ ? static_cast<size_t>(lists() * stride()) : 0);
  for (int32_t c = 0; c < n_choosers() && preselects_; ++c) {
    backend.Upload(Bias(c, seq), none.data(), none.size() * sizeof(float));
  }
  bool whole = true;
  ForKept(seq, length, [&](float* values, int64_t words) {
    const size_t bytes = static_cast<size_t>(words) * sizeof(float);
    whole = whole && state.size() >= bytes;
    if (!whole) return;
    backend.Upload(values, state.data(), bytes);
    state.remove_prefix(bytes);
  });
  if (!whole || !holds_) return whole && state.empty();
  Numbers bytes(state);
  int32_t made = 0;
  if (!bytes.Take(&made, 1) || made < 0 || made > length) return false;
  const int32_t before = UnitsOf(made, rule().blocks.block) - rule().blocks.recent;
  const auto n_lists = static_cast<size_t>(lists());
  const auto capacity = static_cast<size_t>(choice().capacity());
  std::vector<int32_t> count(n_lists), index(n_lists * capacity);
  for (int32_t c = 0; c < n_choosers(); ++c) {
    for (size_t l = 0; l < n_lists; ++l) {
      int32_t* const list = &index[l * capacity];
      if (!bytes.Take(&count[l], 1) || count[l] < 0 || count[l] > choice().capacity()) return false;
      const auto n = static_cast<size_t>(count[l]);
      if (!bytes.Take(list, n)) return false;
      const bool ascends = std::adjacent_find(list, list + n, std::greater_equal<>()) == list + n;
      if (!ascends || (n > 0 && (list[0] < 0 || list[n - 1] >= before))) return false;
    }
    backend.Upload(choice().count(c) + seq * lists(), count.data(), count.size() * sizeof(int32_t));
    backend.Upload(choice().index(c) + seq * ListWords(), index.data(),
                   index.size() * sizeof(int32_t));
  }
  const std::array<int32_t, 2> both = {made, 0};
  for (size_t place = 0; place < both.size(); ++place) {
    backend.Upload(MadeAfter(place, seq), &both[place], sizeof(both[place]));
  }
  return bytes.empty();
}

}  // namespace omnikv
