#include "engine/context_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/json.h"
#include "base/printable.h"
#include "io/checksum.h"

namespace omnikv {
namespace {

using nlohmann::json;

constexpr size_t kHashedBytes = 4096;  // of each matrix
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

std::string RopeText(const RopeConfig& r) {
  std::string text = fmt::format("{} {} {} {} {} {} {} {} {} {} {} {} {}", r.theta, r.dim,
                                 static_cast<int>(r.scaling), r.factor, r.original_context,
                                 r.low_freq_factor, r.high_freq_factor, r.beta_fast, r.beta_slow,
                                 r.truncate, r.magnitude, r.mscale, r.mscale_all_dim);
  for (const auto* factors : {&r.short_factor, &r.long_factor, &r.freq_factor}) {
    text += fmt::format(" [{}]", fmt::join(*factors, " "));
  }
  return text;
}

std::string WeightsHash(const EngineCore& core) {
  Checksum sum;
  std::vector<std::byte> piece;
  const auto add = [&](const WeightRef& w) {
    if (w.data == nullptr) return;
    const int64_t shape[] = {static_cast<int64_t>(w.format), w.n_out, w.n_in};
    sum.Add(shape, sizeof(shape));
    piece.resize(std::min(kHashedBytes, static_cast<size_t>(w.n_out * w.row_bytes)));
    core.backend->Download(piece.data(), w.data, piece.size());
    sum.Add(piece.data(), piece.size());
  };
  add(core.weights.embed);
  add(core.weights.head);
  for (const LayerWeights& l : core.weights.layers) {
    for (const WeightRef* w : {&l.wq, &l.wk, &l.wv, &l.wo, &l.gate, &l.up, &l.down}) add(*w);
  }
  return fmt::format("{:016x}", sum.Value());
}

// Reads the fields of an object. The first that is not as asked for is kept.
class Fields {
 public:
  explicit Fields(const json& object) : object_(object) {}

  int64_t Int(const char* key, int64_t min, int64_t max) {
    const json* v = Find(key, [](const json& j) { return j.is_number_integer(); });
    if (v == nullptr) return min;
    const bool large = v->is_number_unsigned() && v->get<uint64_t>() > uint64_t{kMost};
    const int64_t value = large ? kMost : v->get<int64_t>();
    if (large || value < min || value > max) {
      Fail(fmt::format("'{}' is {}, expected {} to {}", key, v->dump(), min, max));
      return min;
    }
    return value;
  }
  uint64_t Unsigned(const char* key) {
    const json* v = Find(key, [](const json& j) { return j.is_number_unsigned(); });
    return v != nullptr ? v->get<uint64_t>() : 0;
  }
  bool Bool(const char* key) {
    const json* v = Find(key, [](const json& j) { return j.is_boolean(); });
    return v != nullptr && v->get<bool>();
  }
  std::string Text(const char* key) {
    const json* v = Find(key, [](const json& j) { return j.is_string(); });
    return v != nullptr ? v->get<std::string>() : std::string();
  }
  json Object(const char* key) {
    const json* v = Find(key, [](const json& j) { return j.is_object(); });
    return v != nullptr ? *v : json::object();
  }
  // Calls each(element) while nothing has failed.
  template <typename Each>
  void ForArray(const char* key, const Each& each) {
    const json* v = Find(key, [](const json& j) { return j.is_array(); });
    if (v == nullptr) return;
    for (const json& element : *v) {
      if (!status_.ok()) return;
      each(element);
    }
  }
  void Fail(std::string why) {
    if (status_.ok()) status_ = Corrupt(std::move(why));
  }
  const Status& status() const { return status_; }

 private:
  template <typename Is>
  const json* Find(const char* key, const Is& is) {
    const bool there = object_.is_object() && object_.contains(key) && is(object_[key]);
    if (!there) Fail(fmt::format("'{}' is missing or of another type", key));
    return there && status_.ok() ? &object_[key] : nullptr;
  }

  const json& object_;
  Status status_;
};

SequenceImage::Table TableOf(const json& from, Fields& fields) {
  Fields table(from);
  SequenceImage::Table to;
  to.gone = table.Int("gone", 0, kMost);
  to.least = table.Int("least", 0, kMost);
  to.most = table.Int("most", 0, kMost);
  constexpr int64_t kBlocks = std::numeric_limits<int32_t>::max();
  table.ForArray("held", [&](const json& run) {
    Fields blocks(run);
    to.held.push_back({static_cast<int32_t>(blocks.Int("first", 0, kBlocks)),
                       static_cast<int32_t>(blocks.Int("last", 0, kBlocks))});
    if (!blocks.status().ok()) table.Fail(blocks.status().message());
  });
  if (!table.status().ok()) fields.Fail(table.status().message());
  return to;
}

StateSpec StreamOf(const json& from, Fields& fields) {
  Fields stream(from);
  constexpr int64_t kInt = std::numeric_limits<int32_t>::max();
  StateSpec to{.layer = static_cast<int32_t>(stream.Int("layer", 0, kInt)),
               .unit = static_cast<int32_t>(stream.Int("unit", 1, kInt)),
               .bytes_per_unit = stream.Int("bytes", 0, kMost),
               .name = stream.Text("name")};
  if (!stream.status().ok()) fields.Fail(stream.status().message());
  return to;
}

}  // namespace

json ModelMarks(const EngineCore& core) {
  const ModelConfig& c = core.config;
  json layers = json::array();
  for (const LayerConfig& layer : c.layers) layers.push_back({layer.window, layer.rope});
  json ropes = json::array();
  for (const RopeConfig& rope : c.ropes) ropes.push_back(RopeText(rope));
  return {{"family", c.family},
          {"layers", c.n_layers},
          {"d_model", c.d_model},
          {"heads", c.n_heads},
          {"kv_heads", c.n_kv_heads},
          {"head_dim", c.head_dim},
          {"ffn", c.ffn},
          {"vocab", c.vocab},
          {"attention_scale", c.attn_scale},
          {"windows_and_rotations", layers},
          {"rotations", ropes},
          {"kv_dtype", DTypeName(core.bank->config().dtype)},
          {"block_tokens", core.bank->config().block_tokens},
          {"weights", WeightsHash(core)}};
}

Status CheckModelMarks(const json& here, const json& there) {
  for (const auto& [key, value] : here.items()) {
    if (there.contains(key) && there[key] == value) continue;
    const std::string found = there.contains(key)
                                  ? there[key].dump(-1, ' ', false, json::error_handler_t::replace)
                                  : "not said";
    return InvalidArgument(fmt::format("is the context of another model: its {} is {}, here {}",
                                       key, Printable(found), value.dump()));
  }
  return {};
}

std::string TextOf(const SavedContext& saved) {
  json settings = json::array();
  for (const auto& [key, value] : saved.policy.settings) {
    settings.push_back({{"key", key}, {"value", value}});
  }
  json tables = json::array();
  for (const SequenceImage::Table& table : saved.image.tables) {
    json held = json::array();
    for (const auto& [first, last] : table.held) held.push_back({{"first", first}, {"last", last}});
    tables.push_back(
        {{"gone", table.gone}, {"least", table.least}, {"most", table.most}, {"held", held}});
  }
  json streams = json::array();
  for (const StateSpec& s : saved.streams) {
    streams.push_back(
        {{"layer", s.layer}, {"unit", s.unit}, {"bytes", s.bytes_per_unit}, {"name", s.name}});
  }
  json text = {{"model", saved.model},
               {"policy", saved.policy.name},
               {"settings", settings},
               {"force_indices", saved.policy.force_indices},
               {"resolved", saved.resolved},
               {"streams", streams},
               {"policy_bytes", saved.policy_bytes},
               {"length", saved.image.length},
               {"tables", tables},
               {"prompt_length", saved.prompt_length},
               {"rope_length", saved.rope_length},
               {"dense_rows", saved.dense_rows},
               {"pending", saved.pending},
               {"settled", saved.settled},
               {"prompted", saved.prompted},
               {"has_logits", saved.has_logits},
               {"draws", saved.random.has_value()}};
  if (!saved.image.layout.empty()) text["layout"] = saved.image.layout;
  for (const auto& [begin, end] : saved.chunks) {
    text["chunks"].push_back({{"begin", begin}, {"end", end}});
  }
  if (!saved.image.fewer.empty()) text["fewer_rows"] = saved.image.fewer;
  if (saved.random) {
    text["seed"] = saved.random->seed;
    text["random"] = saved.random->state;
  }
  return text.dump(-1, ' ', false, json::error_handler_t::replace);
}

Result<SavedContext> ParseSavedContext(std::string_view text) {
  OKV_ASSIGN_OR_RETURN(const json root, ParseJson(text));
  Fields fields(root);
  SavedContext saved;
  saved.model = fields.Object("model");
  saved.policy.name = fields.Text("policy");
  fields.ForArray("settings", [&](const json& setting) {
    Fields pair(setting);
    saved.policy.settings.emplace_back(pair.Text("key"), pair.Text("value"));
    if (!pair.status().ok()) fields.Fail(pair.status().message());
  });
  saved.policy.force_indices = fields.Bool("force_indices");
  saved.resolved = fields.Text("resolved");
  fields.ForArray("streams", [&](const json& s) { saved.streams.push_back(StreamOf(s, fields)); });
  saved.policy_bytes = static_cast<uint64_t>(fields.Int("policy_bytes", 0, kMost));
  saved.image.length = fields.Int("length", 0, std::numeric_limits<int32_t>::max());
  fields.ForArray("tables",
                  [&](const json& t) { saved.image.tables.push_back(TableOf(t, fields)); });
  if (root.is_object() && root.contains("layout")) saved.image.layout = fields.Text("layout");
  const int64_t length = saved.image.length;
  saved.prompt_length = fields.Int("prompt_length", 0, length);
  // Of a prompt that was cancelled or cut, all of whose tokens may be gone.
  saved.rope_length = fields.Int("rope_length", 0, std::numeric_limits<int32_t>::max());
  saved.dense_rows = fields.Int("dense_rows", 0, length);
  if (root.is_object() && root.contains("chunks")) {
    int64_t last = 0;
    fields.ForArray("chunks", [&](const json& run) {
      Fields rows(run);
      const int64_t begin = rows.Int("begin", last, length);
      last = rows.Int("end", begin, length);
      saved.chunks.emplace_back(begin, last);
      if (!rows.status().ok()) fields.Fail(rows.status().message());
    });
  }
  saved.pending =
      static_cast<int32_t>(fields.Int("pending", -1, std::numeric_limits<int32_t>::max()));
  saved.settled = fields.Bool("settled");
  saved.prompted = fields.Bool("prompted");
  if (root.is_object() && root.contains("fewer_rows")) {
    fields.ForArray("fewer_rows", [&](const json& n) {
      if (!n.is_number_integer()) return fields.Fail("'fewer_rows' has what is no number");
      saved.image.fewer.push_back(n.get<int64_t>());
    });
  }
  saved.has_logits = fields.Bool("has_logits");
  if (fields.Bool("draws")) {
    saved.random = {.seed = fields.Unsigned("seed"), .state = fields.Unsigned("random")};
  }
  OKV_RETURN_IF_ERROR(fields.status());
  return saved;
}

Result<std::vector<int32_t>> TokensOf(const CheckedFile& file, const SavedContext& saved) {
  const size_t bytes = static_cast<size_t>(saved.image.length) * sizeof(int32_t);
  if (bytes > file.size()) return Corrupt(fmt::format("{}: ends inside its tokens", file.path()));
  std::vector<int32_t> tokens(static_cast<size_t>(saved.image.length));
  OKV_RETURN_IF_ERROR(file.Read(0, bytes, tokens.data()));
  return tokens;
}

Result<ContextHead> ReadContextHead(const std::string& path) {
  OKV_ASSIGN_OR_RETURN(InputFile input, InputFile::Open(path));
  OKV_ASSIGN_OR_RETURN(const CheckedFile file, CheckedFile::Peek(std::move(input), kContextFile));
  Result<SavedContext> saved = ParseSavedContext(file.text());
  if (!saved.ok()) return saved.status().Prefixed(path);
  OKV_ASSIGN_OR_RETURN(std::vector<int32_t> tokens, TokensOf(file, *saved));
  return ContextHead{.saved = std::move(*saved), .tokens = std::move(tokens)};
}

}  // namespace omnikv
