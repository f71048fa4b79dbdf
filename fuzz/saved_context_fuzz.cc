// Any bytes as a saved context: as the file, and as the text in one whose checksum is right.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "engine/context_file.h"
#include "engine/context_segments.h"

using namespace omnikv;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  const auto file = CheckedFile::Open(InputFile::FromMemory("fuzz", bytes, size), kContextFile);
  OKV_CHECK(file.ok() || !file.status().message().empty());
  if (file.ok()) OKV_CHECK((*file).size() + (*file).text().size() < size);

  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto segments = ParseSegments(text);
  OKV_CHECK(segments.ok() || !segments.status().message().empty());
  if (segments.ok()) OKV_CHECK(*ParseSegments(WithSegments("{}", *segments)) == *segments);

  const auto saved = ParseSavedContext(text);
  OKV_CHECK(saved.ok() || !saved.status().message().empty());
  if (!saved.ok()) return 0;
  // What was read says the same when it is written and read again.
  const auto again = ParseSavedContext(TextOf(*saved));
  OKV_CHECK(again.ok() && (*again).image == saved->image && (*again).streams == saved->streams &&
            (*again).policy.settings == saved->policy.settings && (*again).random == saved->random);
  const BankConfig config{
      .layers = {{.n_kv_heads = 1, .dk = 8, .dv = 8}, {1, 8, 8, {{.table = 1}}}},
      .tables = {TableSpec{}, {.window = 8}},
      .max_tokens = 1000};
  const Status image = CheckImage(config, saved->image);
  OKV_CHECK(image.ok() || !image.message().empty());
  if (!image.ok()) return 0;
  for (const auto& table : saved->image.tables) {
    OKV_CHECK(table.held.empty() || table.held.back().second <= config.BlocksFor(1000));
  }
  return 0;
}
