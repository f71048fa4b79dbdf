// Any bytes as the vocabulary of a GGUF file, and a text.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "text/tokenizer/tokenizer.h"
#include "text/tokenizer/unicode.h"

using namespace omnikv;

namespace {

// Takes values off the front of the input; zeros and empty strings when it is used up.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : rest_(reinterpret_cast<const char*>(data), size) {}

  uint8_t Byte() {
    if (rest_.empty()) return 0;
    const auto b = static_cast<uint8_t>(rest_[0]);
    rest_.remove_prefix(1);
    return b;
  }
  std::string_view Text(size_t size) {
    const std::string_view text = rest_.substr(0, size);
    rest_.remove_prefix(text.size());
    return text;
  }
  bool empty() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  static constexpr const char* kModels[] = {"gpt2", "llama", "t5", "none"};
  static constexpr const char* kPres[] = {"",        "llama-bpe", "deepseek-llm",
                                          "kimi-k2", "bloom",     "no"};
  GgufVocab v;
  v.name = "fuzz";
  v.model = kModels[in.Byte() % 4];
  v.pre = kPres[in.Byte() % 6];
  const uint8_t flags = in.Byte();
  const uint8_t ids = in.Byte();
  if (flags & 1) v.add_bos = (flags & 2) != 0;
  if (flags & 4) v.add_space_prefix = (flags & 8) != 0;
  if (flags & 16) v.remove_extra_whitespaces = true;
  if (ids & 1) v.bos = ids >> 4;
  if (ids & 2) v.eos = ids >> 5;
  if (ids & 4) v.unk = ids >> 6;
  const size_t n_tokens = in.Byte();
  for (size_t i = 0; i < n_tokens && !in.empty(); ++i) {
    const uint8_t head = in.Byte();  // type, length
    v.types.push_back(head & 7);
    v.scores.push_back(static_cast<float>(static_cast<int8_t>(in.Byte())) / 4);
    v.tokens.push_back(in.Text(head >> 3));
  }
  if (flags & 32) v.scores.clear();
  if (flags & 64) v.types.clear();
  const size_t n_merges = in.Byte();
  for (size_t i = 0; i < n_merges && !in.empty(); ++i) v.merges.push_back(in.Text(in.Byte() & 31));
  v.precompiled_charsmap = in.Text(4 * in.Byte());
  const std::string text(in.Text(1000));

  const auto loaded = Tokenizer::FromGguf(v);
  if (!loaded.ok()) {
    OKV_CHECK(loaded.status().message().size() > 6);
    return 0;
  }
  const Tokenizer& t = **loaded;
  OKV_CHECK(t.vocab_size() == static_cast<int32_t>(v.tokens.size()));
  const auto encoded = t.Encode(text);
  if (!encoded.ok()) {
    OKV_CHECK(encoded.status().message().size() > 6);
    return 0;
  }
  for (const int32_t id : *encoded) OKV_CHECK(id >= 0 && id < t.vocab_size());
  const auto decoded = t.Decode(*encoded, true);
  OKV_CHECK(!decoded.ok() || tok::IsValidUtf8(*decoded));
  // Text that is not parsed gives no special token but the unknown one.
  const auto literal = t.EncodeSpans({{text, true}}, false);
  OKV_CHECK(literal.ok());
  for (const int32_t id : *literal) {
    OKV_CHECK(!t.IsSpecial(id) || id == v.unk || t.IdToToken(id).starts_with("<0x"));
  }
  std::vector<int32_t> all;
  for (int32_t id = -1; id <= t.vocab_size(); ++id) all.push_back(id);
  const auto all_decoded = t.Decode(all, false);
  OKV_CHECK(!all_decoded.ok() || tok::IsValidUtf8(*all_decoded));
  return 0;
}
