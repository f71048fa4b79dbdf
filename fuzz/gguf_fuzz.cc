// Any bytes as a GGUF file: opening it, every accessor on every key, every tensor.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "io/gguf.h"

using namespace omnikv;

namespace {

template <typename T>
size_t Expect(const Result<T>& result) {
  OKV_CHECK(result.ok() || !result.status().message().empty());
  return result.ok();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto gguf = GgufFile::FromMemory("fuzz", reinterpret_cast<const std::byte*>(data), size);
  if (Expect(gguf) == 0) return 0;
  const GgufFile& file = **gguf;
  for (const GgufEntry& entry : file.metadata()) {
    OKV_CHECK(file.Has(entry.key));
    Expect(file.GetUint(entry.key));
    Expect(file.GetInt(entry.key));
    Expect(file.GetFloat(entry.key));
    Expect(file.GetBool(entry.key));
    Expect(file.GetString(entry.key));
    Expect(file.IntArray(entry.key));
    Expect(file.FloatArray(entry.key));
    const auto strings = file.StringArray(entry.key);
    if (Expect(strings) == 0) continue;
    for (const std::string_view s : *strings) {
      const auto* first = reinterpret_cast<const uint8_t*>(s.data());
      OKV_CHECK(first >= data && s.size() <= static_cast<size_t>(data + size - first));
    }
  }
  for (const TensorView& tensor : file.tensors()) {
    OKV_CHECK(file.Find(tensor.name) == &tensor);
    if (!IsConvertible(tensor.type)) continue;
    // The first and the last 1024 values, or all: 1024 is whole blocks of every type.
    const size_t n = std::min<size_t>(tensor.NumValues(), 1024);
    std::vector<float> values(n);
    OKV_CHECK(file.ReadValues(tensor, 0, n, DType::kF32, values.data()).ok());
    OKV_CHECK(file.ReadValues(tensor, tensor.NumValues() - n, n, DType::kF16, values.data()).ok());
  }
  return 0;
}
