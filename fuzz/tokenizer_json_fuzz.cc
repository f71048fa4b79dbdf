// Any bytes as a tokenizer.json, and what follows a byte 0xFF in them (which no JSON has) as text.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "text/tokenizer/tokenizer.h"
#include "text/tokenizer/unicode.h"

using namespace omnikv;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view json(reinterpret_cast<const char*>(data), size);
  std::string text = "Hello  <s>world\n\xC3\xA9\xE4\xBD\xA0 12345 don't aaaa";
  if (const size_t end = json.find('\xFF'); end != std::string_view::npos) {
    text = json.substr(end + 1, 1000);
    json = json.substr(0, end);
  }
  const auto loaded = Tokenizer::FromJson(json, "fuzz");
  if (!loaded.ok()) {
    OKV_CHECK(loaded.status().message().size() > 6);
    return 0;
  }
  const Tokenizer& t = **loaded;
  const auto ids = t.Encode(text);
  if (!ids.ok()) {
    OKV_CHECK(ids.status().message().size() > 6);
    return 0;
  }
  for (const int32_t id : *ids) OKV_CHECK(id >= 0 && id < t.vocab_size());
  for (const bool skip : {false, true}) {
    const auto decoded = t.Decode(*ids, skip);
    OKV_CHECK(!decoded.ok() || tok::IsValidUtf8(*decoded));
  }
  (void)t.Encode(text, {false, false});
  // Spans of the same kind are the text they make together.
  const std::string valid = tok::IsValidUtf8(text) ? text : tok::ReplaceInvalidUtf8(text);
  size_t half = valid.size() / 2;
  while (half > 0 && (static_cast<uint8_t>(valid[half]) & 0xC0u) == 0x80u) --half;
  const TextSpan first = {valid.substr(0, half), false};
  const TextSpan second = {valid.substr(half), false};
  const auto spans = t.EncodeSpans({first, second}, true);
  OKV_CHECK(spans.ok() && *spans == *ids);
  (void)t.EncodeSpans({first, {second.text, true}, first}, false);
  std::vector<int32_t> all;
  for (int32_t id = -1; id <= t.vocab_size() && id < 500; ++id) {
    all.push_back(id);
    OKV_CHECK(!t.IsSpecial(id) || (id >= 0 && id < t.vocab_size()));
    (void)t.TokenToId(t.IdToToken(id));
  }
  const auto decoded = t.Decode(all, false);
  OKV_CHECK(!decoded.ok() || tok::IsValidUtf8(*decoded));
  return 0;
}
