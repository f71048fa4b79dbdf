#include "engine/context_segments.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/json.h"
#include "base/printable.h"
#include "io/checked_header.h"
#include "io/sha256.h"

namespace omnikv {
namespace {

using nlohmann::json;

// A file of less is opened more often than it is worth, and one of more has less in common.
constexpr size_t kBytes = size_t{64} << 20;
constexpr int64_t kFewest = 256;  // tokens
constexpr int64_t kMost = 1024;

constexpr size_t kDigits = 2 * sizeof(Sha256::Digest);

}  // namespace

bool IsSegmentName(std::string_view name) {
  const auto is_digit = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  return name.size() == kDigits && std::ranges::all_of(name, is_digit);
}

SegmentShape ShapeOf(const BankConfig& config, const json& marks, int64_t tokens) {
  SegmentShape shape;
  std::string tables;
  for (size_t table = 0; table < config.tables.size(); ++table) {
    const bool all = config.KeepsAll(static_cast<int32_t>(table));
    tables += all ? '1' : '0';
    if (!all) shape.others = true;
  }
  const auto bytes = [&](int64_t of) {
    return BytesOf(config, WholeImage(config, of), {.begin = 0, .end = of});
  };
  if (tokens > 0) {
    shape.tokens = config.BlocksFor(tokens) * config.block_tokens;
  } else {
    const int64_t least = std::max<int64_t>(kFewest, config.block_tokens);
    for (shape.tokens = least; shape.tokens < kMost && bytes(2 * shape.tokens) <= kBytes;) {
      shape.tokens *= 2;
    }
  }
  shape.bytes = bytes(shape.tokens);
  const std::string any_name(kDigits, '0');
  shape.file_bytes = sizeof(CheckedHeader) + TextOfSegment(any_name).size() + shape.bytes;
  shape.root = json{{"model", marks},
                    {"layout", config.Layout()},
                    {"tables", tables},
                    {"tokens", shape.tokens}}
                   .dump();
  return shape;
}

std::vector<std::string> SegmentNames(const SegmentShape& shape, const BankConfig& config,
                                      const SequenceImage& image, std::span<const int32_t> tokens,
                                      int64_t dense_rows, std::string_view made_by) {
  std::vector<std::string> names;
  if (shape.bytes == 0 || !IsWhole(config, image)) return names;
  Sha256 root;
  root.Add(shape.root.data(), shape.root.size());
  Sha256::Digest last = root.Value();
  for (int64_t begin = 0; begin + shape.tokens <= std::ssize(tokens); begin += shape.tokens) {
    const auto own = tokens.subspan(static_cast<size_t>(begin), static_cast<size_t>(shape.tokens));
    const int64_t dense = std::clamp<int64_t>(dense_rows - begin, 0, shape.tokens);
    Sha256 sum;
    sum.Add(last.data(), last.size());
    sum.Add(own.data(), own.size_bytes());
    sum.Add(&dense, sizeof(dense));
    if (dense < shape.tokens) sum.Add(made_by.data(), made_by.size());
    last = sum.Value();
    names.push_back(HexOf(last));
  }
  return names;
}

std::string WithSegments(const std::string& text, const SegmentList& segments) {
  json root = json::parse(text);
  root["segment_tokens"] = segments.tokens;
  root["segments"] = segments.names;
  return root.dump();
}

Result<SegmentList> ParseSegments(std::string_view text) {
  OKV_ASSIGN_OR_RETURN(const json root, ParseJson(text));
  const auto corrupt = [](const std::string& why) { return Corrupt(why); };
  if (!root.is_object() || !root.contains("segment_tokens") || !root.contains("segments") ||
      !root["segment_tokens"].is_number_integer() || !root["segments"].is_array()) {
    return corrupt("'segment_tokens' or 'segments' is missing or of another type");
  }
  SegmentList segments;
  constexpr auto kMostTokens = std::numeric_limits<int32_t>::max();
  const json& tokens = root["segment_tokens"];
  const bool large = tokens.is_number_unsigned() && tokens.get<uint64_t>() > kMostTokens;
  segments.tokens = large ? -1 : tokens.get<int64_t>();
  const int64_t least = root["segments"].empty() ? 0 : 1;
  if (segments.tokens < least || segments.tokens > kMostTokens) {
    return corrupt(fmt::format("'segment_tokens' is {}, expected {} to {}", tokens.dump(), least,
                               kMostTokens));
  }
  for (const json& name : root["segments"]) {
    if (!name.is_string() || !IsSegmentName(name.get_ref<const std::string&>())) {
      const std::string said = name.dump(-1, ' ', false, json::error_handler_t::replace);
      return corrupt(fmt::format("'segments' has {}, expected 64 hexadecimal digits",
                                 Printable(said.substr(0, 80))));
    }
    segments.names.push_back(name.get<std::string>());
  }
  return segments;
}

std::string TextOfSegment(const std::string& name) {
  return json{{"segment", name}}.dump();
}

}  // namespace omnikv
