// What of far memory goes to forks and into files.
#include <algorithm>
#include <string>

#include "policy/infllm/infllm.h"

namespace omnikv {

void FarMemory::CopyFrom(const FarMemory& from) {
  Forget();
  if (!HasBlocks()) return;
  context_.backend->Upload(sums_.as(), from.sums_.as(), sums_.size());
  context_.backend->Upload(keys_.as(), from.keys_.as(), keys_.size());
}

template <typename Visit>
void FarMemory::ForState(int32_t seq, int64_t length, const Visit& visit) const {
  if (!HasBlocks()) return;
  const auto n = static_cast<int32_t>(length);
  for (int32_t layer = 0; layer < context_.n_layers; ++layer) {
    visit(Keys(layer) + seq * max_blocks_ * KeyFloats(), shape_.Blocks(n) * KeyFloats());
    for (int32_t h = 0; h < context_.n_heads; ++h) {
      float* const sums = LocalSums(Sums(layer), seq, n, h, context_.n_heads, stride_);
      for (int32_t t = FirstWritten(shape_, n); t < n;) {
        const int32_t at = t % stride_;
        const int32_t run = std::min(n - t, stride_ - at);
        visit(sums + at, run);
        t += run;
      }
    }
  }
}

std::string FarMemory::Save(int32_t seq, int64_t length) const {
  std::string state;
  ForState(seq, length, [&](const float* from, int64_t n) {
    std::string part(static_cast<size_t>(n) * sizeof(float), '\0');
    context_.backend->Download(part.data(), from, part.size());
    state += part;
  });
  return state;
}

bool FarMemory::Load(int32_t seq, int64_t length, std::string_view state) {
  size_t bytes = 0;
  ForState(seq, length,
           [&](float*, int64_t n) { bytes += static_cast<size_t>(n) * sizeof(float); });
  if (state.size() != bytes) return false;
  Forget();  // of the others, too: they copy anew
  ForState(seq, length, [&](float* to, int64_t n) {
    const size_t part = static_cast<size_t>(n) * sizeof(float);
    context_.backend->Upload(to, state.data(), part);
    state.remove_prefix(part);
  });
  return true;
}

}  // namespace omnikv
