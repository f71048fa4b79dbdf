// Any bytes as a safetensors file, and as the index of a folder of shards.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "io/safetensors.h"

using namespace omnikv;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  const auto model = SafetensorsModel::FromMemory("fuzz", bytes, size);
  OKV_CHECK(model.ok() || !model.status().message().empty());
  if (model.ok()) {
    size_t covered = 0;
    for (const TensorView& tensor : (*model)->tensors()) {
      OKV_CHECK((*model)->Find(tensor.name) == &tensor);
      covered += tensor.bytes;
      if (!IsConvertible(tensor.type)) continue;
      const size_t n = std::min<size_t>(tensor.NumValues(), 1000);
      std::vector<float> values(n);
      const size_t last = tensor.NumValues() - n;
      OKV_CHECK((*model)->ReadValues(tensor, last, n, DType::kF32, values.data()).ok());
      OKV_CHECK((*model)->ReadValues(tensor, 0, n, DType::kBF16, values.data()).ok());
    }
    OKV_CHECK(covered < size);  // the header takes some
  }

  const auto index = ParseSafetensorsIndex("fuzz", {reinterpret_cast<const char*>(data), size});
  OKV_CHECK(index.ok() || !index.status().message().empty());
  if (index.ok()) {
    for (const auto& [tensor, shard] : *index) {
      OKV_CHECK(shard != ".." && shard.find('/') == std::string::npos);
    }
  }
  return 0;
}
