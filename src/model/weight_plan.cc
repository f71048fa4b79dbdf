#include "model/weight_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string_view>

#include "base/printable.h"
#include "base/round.h"
#include "model/arch/arch.h"

namespace omnikv {
namespace {

constexpr size_t kAlign = 256;  // of a tensor: whole cache lines, and what CUDA's loads like best
constexpr int64_t kRowAlign = 64;  // of a row, where its format allows

// Tensors in layers that say nothing about the model: caches of rotary tables, causal masks.
bool IsBallast(std::string_view name) {
  for (const std::string_view end :
       {".rotary_emb.inv_freq", ".masked_bias", ".attn.bias", ".attn_rot_embd.weight"}) {
    if (name.ends_with(end)) return true;
  }
  return false;
}

class Planner {
 public:
  Planner(const ModelFiles& files, std::byte* base)
      : config_(files.config),
        arch_(ArchOf(files.config.family)),
        tensors_(*files.tensors),
        gguf_(files.gguf),
        names_(gguf_ ? kGgufNames : arch_.hf_names),
        prefix_(gguf_ ? TensorPrefix{"", ""} : FindPrefix(arch_, tensors_)),
        base_(base),
        used_(tensors_.tensors().size()) {}

  Result<WeightPlan> Run() {
    const ModelConfig& c = config_;
    Weights& w = plan_.weights;
    const std::string embed = fmt::format("{}{}", prefix_.body, names_.embed);
    const std::string head = fmt::format("{}{}", prefix_.head, names_.head);
    const std::string final_norm = fmt::format("{}{}", prefix_.body, names_.final_norm);
    w.embed = Matrix(embed, c.vocab, c.d_model);
    w.layers.resize(static_cast<size_t>(c.n_layers));
    for (int32_t i = 0; i < c.n_layers; ++i) Layer(i, w.layers[static_cast<size_t>(i)]);
    w.final_norm = Norm(final_norm, c.d_model);
    w.head = c.tied_embeddings ? w.embed : Matrix(head, c.vocab, c.d_model);
    if (gguf_ && Find(head + ".bias") != nullptr) w.head_bias = Vector(head + ".bias", c.vocab);
    if (c.tied_embeddings) Use(Find(head + ".weight"));  // a copy that some files keep
    RefuseUnknown({embed + ".", head + ".", final_norm + "."});
    OKV_RETURN_IF_ERROR(status_);

    std::stable_sort(plan_.copies.begin(), plan_.copies.end(),
                     [](const TensorCopy& a, const TensorCopy& b) { return a.source < b.source; });
    plan_.bytes = static_cast<size_t>(size_);
    w.bytes = plan_.bytes;
    w.format = FormatOfAll();
    for (const auto& [type, n] : converted_) {
      w.notes.push_back(fmt::format("{} ({} tensor{}) is dequantised to bf16",
                                    StorageTypeName(type), n, n == 1 ? "" : "s"));
    }
    return std::move(plan_);
  }

 private:
  std::optional<DType> FormatOfAll() const {
    std::optional<DType> format;
    for (const TensorCopy& copy : plan_.copies) {
      if (copy.vector) continue;
      if (format && *format != copy.format) return std::nullopt;
      format = copy.format;
    }
    return format;
  }

  void Layer(int32_t i, LayerWeights& w) {
    const ModelConfig& c = config_;
    const auto name = [&](std::string_view part) {
      return fmt::format("{}{}.{}.{}", prefix_.body, names_.layers, i, part);
    };
    if (c.pre_norm) {
      w.attn_norm = Norm(name(names_.attn_norm), c.d_model);
      w.ffn_norm = Norm(name(names_.ffn_norm), c.d_model);
    }
    if (c.post_norm) {
      w.attn_post_norm = Norm(name(names_.attn_post_norm), c.d_model);
      w.ffn_post_norm = Norm(name(names_.ffn_post_norm), c.d_model);
    }
    Qkv(name, w);
    w.wo = Matrix(name(names_.o), c.d_model, c.n_heads * c.head_dim);
    if (c.o_bias) w.bo = Vector(name(names_.o) + ".bias", c.d_model);
    if (c.qk_norm != QkNorm::kNone) {
      const bool full = c.qk_norm == QkNorm::kFull;
      w.q_norm = Norm(name(names_.q_norm), full ? c.n_heads * c.head_dim : c.head_dim);
      w.k_norm = Norm(name(names_.k_norm), full ? c.n_kv_heads * c.head_dim : c.head_dim);
    }

    const TensorView* both =
        names_.gate_up.empty() ? nullptr : Find(name(names_.gate_up) + ".weight");
    const bool fused =
        names_.gate.empty() || (both != nullptr && Find(name(names_.gate) + ".weight") == nullptr &&
                                !both->shape.empty() && both->shape[0] == 2 * int64_t{c.ffn});
    const std::string gate = name(fused ? names_.gate_up : names_.gate);
    const std::string up = name(fused ? names_.gate_up : names_.up);
    const int64_t rows = fused ? 2 * c.ffn : c.ffn;  // of the tensor, or of each of the two
    const RowMap up_rows{.first = fused ? c.ffn : 0};
    w.gate = Matrix(gate, c.ffn, c.d_model, {}, rows);
    w.up = Matrix(up, c.ffn, c.d_model, up_rows, rows);
    w.down = Matrix(name(names_.down), c.d_model, c.ffn);
    if (c.mlp_bias) {
      w.gate_bias = Vector(gate + ".bias", c.ffn, {}, rows);
      w.up_bias = Vector(up + ".bias", c.ffn, up_rows, rows);
      w.down_bias = Vector(name(names_.down) + ".bias", c.d_model);
    }
  }

  // q, k and v, in one tensor or in three; weights and biases may differ in that.
  template <typename Name>
  void Qkv(const Name& name, LayerWeights& w) {
    const ModelConfig& c = config_;
    const int64_t n_q = int64_t{c.n_heads} * c.head_dim;
    const int64_t n_kv = int64_t{c.n_kv_heads} * c.head_dim;
    const auto fused = [&](std::string_view suffix) {
      if (names_.qkv.empty()) return false;
      return names_.q.empty() || Find(name(names_.qkv).append(suffix)) != nullptr;
    };
    const std::string one = names_.qkv.empty() ? "" : name(names_.qkv);
    const int64_t rows = n_q + 2 * n_kv;
    if (fused(".weight")) {
      w.wq = Matrix(one, n_q, c.d_model, QkvRows(0, true), rows);
      w.wk = Matrix(one, n_kv, c.d_model, QkvRows(1, true), rows);
      w.wv = Matrix(one, n_kv, c.d_model, QkvRows(2, true), rows);
    } else {
      w.wq = Matrix(name(names_.q), n_q, c.d_model, QkvRows(0, false));
      w.wk = Matrix(name(names_.k), n_kv, c.d_model, QkvRows(1, false));
      w.wv = Matrix(name(names_.v), n_kv, c.d_model, QkvRows(2, false));
    }
    if (!c.qkv_bias) return;
    if (fused(".bias")) {
      w.bq = Vector(one + ".bias", n_q, QkvRows(0, true), rows);
      w.bk = Vector(one + ".bias", n_kv, QkvRows(1, true), rows);
      w.bv = Vector(one + ".bias", n_kv, QkvRows(2, true), rows);
    } else {
      w.bq = Vector(name(names_.q) + ".bias", n_q, QkvRows(0, false));
      w.bk = Vector(name(names_.k) + ".bias", n_kv, QkvRows(1, false));
      w.bv = Vector(name(names_.v) + ".bias", n_kv, QkvRows(2, false));
    }
  }

  // The rows of q (part 0), k (1) and v (2).
  RowMap QkvRows(int part, bool fused) const {
    const ModelConfig& c = config_;
    RowMap map{.head_dim = c.head_dim, .pairs = gguf_ && arch_.gguf_pairs && part < 2};
    if (!fused) return map;
    if (!gguf_ && arch_.qkv_order == QkvOrder::kGroups) {
      const int64_t q_heads = c.n_heads / c.n_kv_heads;
      map.group_heads = part == 0 ? q_heads : 1;
      map.group_stride = q_heads + 2;
      map.first = part == 0 ? 0 : (q_heads + part - 1) * c.head_dim;
    } else if (part > 0) {
      map.first = (int64_t{c.n_heads} + (part - 1) * int64_t{c.n_kv_heads}) * c.head_dim;
    }
    return map;
  }

  WeightRef Matrix(const std::string& name, int64_t n_out, int64_t n_in, const RowMap& rows = {},
                   int64_t source_rows = 0) {
    const TensorView* source =
        Require(name + ".weight", {source_rows != 0 ? source_rows : n_out, n_in});
    if (source == nullptr) return {};
    const std::optional<DType> native = NativeDType(source->type);
    if (!native) {
      if (static_cast<size_t>(n_in) % BlockValues(source->type) != 0) {
        Fail(Corrupt(fmt::format("{}: tensor {} has rows of {} values, expected whole blocks of {}",
                                 tensors_.path(), Printable(source->name), n_in,
                                 BlockValues(source->type))));
        return {};
      }
      if (rows.first == 0) ++converted_[source->type];  // parts of one tensor count once
    }
    WeightRef w;
    w.format = native.value_or(DType::kBF16);
    w.n_out = n_out;
    w.n_in = n_in;
    w.row_bytes = static_cast<int64_t>(DTypeBytes(w.format, static_cast<size_t>(n_in)));
    if (w.format != DType::kQ8_0) w.row_bytes = RoundUp(w.row_bytes, kRowAlign);
    w.data = Place({.source = source,
                    .rows = rows,
                    .format = w.format,
                    .n_rows = n_out,
                    .n_values = n_in,
                    .row_bytes = w.row_bytes});
    return w;
  }

  const float* Vector(const std::string& name, int64_t n, const RowMap& rows = {},
                      int64_t source_rows = 0, float add = 0) {
    const TensorView* source = Require(name, {source_rows != 0 ? source_rows : n});
    if (source == nullptr) return nullptr;
    return reinterpret_cast<const float*>(Place({.source = source,
                                                 .rows = rows,
                                                 .format = DType::kF32,
                                                 .n_rows = n,
                                                 .n_values = 1,
                                                 .row_bytes = sizeof(float),
                                                 .vector = true,
                                                 .add = add}));
  }

  const float* Norm(const std::string& name, int64_t n) {
    return Vector(name + ".weight", n, {}, 0, arch_.one_plus_norm && !gguf_ ? 1.0f : 0.0f);
  }

  // Room for a copy; null while there is no memory.
  const std::byte* Place(TensorCopy copy) {
    copy.offset = static_cast<size_t>(size_);
    size_ = RoundUp(size_ + static_cast<int64_t>(copy.bytes()), kAlign);
    plan_.copies.push_back(copy);
    return base_ == nullptr ? nullptr : base_ + copy.offset;
  }

  const TensorView* Find(const std::string& name) const { return tensors_.Find(name); }

  void Use(const TensorView* tensor) {
    if (tensor != nullptr) used_[static_cast<size_t>(tensor - tensors_.tensors().data())] = true;
  }

  // The tensor of that name, if it has that shape and a type that can be read.
  const TensorView* Require(const std::string& name, const std::vector<int64_t>& shape) {
    const TensorView* tensor = Find(name);
    const std::string expected = fmt::format("expected one of shape [{}]", fmt::join(shape, ", "));
    if (tensor == nullptr) {
      Fail(Corrupt(
          fmt::format("{}: has no tensor {}, {}", tensors_.path(), Printable(name), expected)));
      return nullptr;
    }
    Use(tensor);
    if (tensor->shape != shape) {
      Fail(Corrupt(fmt::format("{}: tensor {} has shape [{}], {}", tensors_.path(), Printable(name),
                               fmt::join(tensor->shape, ", "), expected)));
      return nullptr;
    }
    if (!IsConvertible(tensor->type)) {
      Fail(Unsupported(
          fmt::format("{}: tensor {} is stored as {}, expected F32, F16, BF16, Q8_0 "
                      "or another of GGUF's block formats",
                      tensors_.path(), Printable(name), StorageTypeName(tensor->type))));
      return nullptr;
    }
    return tensor;
  }

  // A tensor beside those of the model (the scale of a quantised one, a bias or a norm that the
  // configuration does not tell of) means that the model is not what we would compute.
  void RefuseUnknown(const std::vector<std::string>& prefixes) {
    const std::string layers = fmt::format("{}{}.", prefix_.body, names_.layers);
    for (size_t i = 0; i < used_.size(); ++i) {
      const std::string_view name = tensors_.tensors()[i].name;
      if (used_[i] || IsBallast(name)) continue;
      bool known = true;
      if (name.starts_with(layers)) {
        int64_t layer = 0;
        for (size_t at = layers.size(); at < name.size() && name[at] >= '0' && name[at] <= '9';
             ++at) {
          layer = std::min<int64_t>(layer * 10 + (name[at] - '0'), INT32_MAX);
        }
        known = layer >= config_.n_layers;
        if (layer >= int64_t{config_.n_layers} + config_.extra_layers) {
          Fail(Corrupt(fmt::format(
              "{}: has tensor {}, but its configuration tells of {} layers{}, expected all of them",
              tensors_.path(), Printable(name), config_.n_layers,
              config_.extra_layers == 0 ? ""
                                        : fmt::format(" and {} past them", config_.extra_layers))));
        }
      }
      for (const std::string& prefix : prefixes) known = known && !name.starts_with(prefix);
      if (known) continue;
      Fail(Unsupported(
          fmt::format("{}: has tensor {}, expected only those of an unquantised {} model",
                      tensors_.path(), Printable(name), config_.family)));
    }
  }

  void Fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }

  const ModelConfig& config_;
  const Arch& arch_;
  const TensorSource& tensors_;
  const bool gguf_;
  const TensorNames& names_;
  const TensorPrefix prefix_;
  std::byte* const base_;
  std::vector<bool> used_;  // [tensors]
  std::map<StorageType, int> converted_;
  int64_t size_ = 0;  // bytes placed so far
  WeightPlan plan_;
  Status status_;
};

}  // namespace

int64_t RowMap::operator()(int64_t row) const {
  int64_t head = row / head_dim;
  int64_t in_head = row % head_dim;
  if (pairs) {
    const int64_t half = head_dim / 2;
    in_head = in_head < half ? 2 * in_head : 2 * (in_head - half) + 1;
  }
  if (group_heads != 0) head = head / group_heads * group_stride + head % group_heads;
  return first + head * head_dim + in_head;
}

bool TensorCopy::verbatim() const {
  const size_t file_row = DTypeBytes(format, static_cast<size_t>(n_values));
  return NativeDType(source->type) == format && rows.contiguous() && add == 0 &&
         row_bytes == static_cast<int64_t>(file_row);
}

Result<WeightPlan> PlanWeights(const ModelFiles& files, std::byte* base) {
  return Planner(files, base).Run();
}

std::optional<DType> FormatOfAll(const ModelFiles& files) {
  const Result<WeightPlan> plan = PlanWeights(files, nullptr);
  return plan.ok() ? plan->weights.format : std::nullopt;
}

std::vector<std::string> WeightNotes(const ModelFiles& files) {
  const Result<WeightPlan> plan = PlanWeights(files, nullptr);
  return plan.ok() ? plan->weights.notes : std::vector<std::string>();
}

Result<size_t> WeightBytes(const ModelFiles& files) {
  OKV_ASSIGN_OR_RETURN(const WeightPlan plan, PlanWeights(files, nullptr));
  return plan.bytes;
}

}  // namespace omnikv
