#include "policy/kvzip/head_rows.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace omnikv {

Status HeadRows::Prepare(const PolicyContext& context, PolicyMemory& memory) {
  backend_ = context.backend;
  n_layers_ = context.n_layers;
  n_kv_heads_ = context.n_kv_heads;
  n_seqs_ = context.max_seqs;
  apart_ = context.row_layout.heads_apart;
  capacity_ = static_cast<int32_t>(context.max_context);
  of_.resize(static_cast<size_t>(n_seqs_));
  const int64_t lists = int64_t{n_seqs_} * n_kv_heads_;
  const auto take = [&](Buffer& buffer, int64_t n) -> Status {
    OKV_ASSIGN_OR_RETURN(buffer, memory.Take(*backend_, n, "kept tokens"));
    return {};
  };
  OKV_RETURN_IF_ERROR(take(counts_, lists * n_layers_));
  if (!apart_) {
    OKV_RETURN_IF_ERROR(take(rows_, lists * capacity_));
    OKV_RETURN_IF_ERROR(take(bounds_, int64_t{2} * n_layers_ * n_seqs_));
    std::vector<int32_t> numbers(static_cast<size_t>(capacity_));
    std::iota(numbers.begin(), numbers.end(), 0);
    for (int64_t list = 0; list < lists; ++list) {
      backend_->Upload(rows_.as<int32_t>() + list * capacity_, numbers.data(),
                       numbers.size() * sizeof(int32_t));
    }
  }
  for (int32_t seq = 0; seq < n_seqs_; ++seq) Set(seq, {});
  return {};
}

void HeadRows::Set(int32_t seq, const std::vector<int32_t>& counts) {
  of_[static_cast<size_t>(seq)] = counts;
  const std::vector<int32_t> none(static_cast<size_t>(n_kv_heads_));
  for (int32_t layer = 0; layer < n_layers_; ++layer) {
    const int64_t at = int64_t{layer} * n_seqs_ + seq;
    backend_->Upload(counts_.as<int32_t>() + at * n_kv_heads_,
                     counts.empty() ? none.data() : counts.data() + layer * n_kv_heads_,
                     none.size() * sizeof(int32_t));
    if (apart_) continue;
    const int32_t bounds[] = {static_cast<int32_t>(Rows(seq, layer)), kToEnd};
    backend_->Upload(bounds_.as<int32_t>() + 2 * at, bounds, sizeof(bounds));
  }
}

int64_t HeadRows::Rows(int32_t seq, int32_t layer) const {
  if (!Chosen(seq)) return 0;
  const auto first = Of(seq).begin() + int64_t{layer} * n_kv_heads_;
  return *std::max_element(first, first + n_kv_heads_);
}

int64_t HeadRows::Read(int32_t seq, int32_t layer, int64_t held) const {
  const int64_t later = (held - Rows(seq, layer)) * n_kv_heads_;
  if (!Chosen(seq)) return later;
  const auto first = Of(seq).begin() + int64_t{layer} * n_kv_heads_;
  return std::accumulate(first, first + n_kv_heads_, later);
}

AttnPlan HeadRows::Plan(int32_t layer) const {
  AttnPlan plan;
  plan.Add({.kind = SegmentKind::kList,
            .lists = n_kv_heads_,
            .capacity = capacity_,
            .index = rows_.as<int32_t>(),
            .count = Counts(layer, 0)});
  plan.Add({.bounds = bounds_.as<int32_t>() + int64_t{2} * layer * n_seqs_});
  return plan;
}

std::string HeadRows::Save() const {
  return {reinterpret_cast<const char*>(Of(0).data()), Of(0).size() * sizeof(int32_t)};
}

bool HeadRows::Load(int64_t length, std::string_view state) {
  const auto lists = static_cast<size_t>(n_layers_) * static_cast<size_t>(n_kv_heads_);
  if (!state.empty() && state.size() != lists * sizeof(int32_t)) return false;
  std::vector<int32_t> counts(state.size() / sizeof(int32_t));
  if (!state.empty()) std::memcpy(counts.data(), state.data(), state.size());
  const auto fits = [&](int32_t count) { return 0 <= count && count <= length; };
  if (!std::ranges::all_of(counts, fits)) return false;
  Set(0, counts);
  return true;
}

}  // namespace omnikv
