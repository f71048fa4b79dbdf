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
  most_.resize(static_cast<size_t>(n_seqs_));
  tokens_.resize(static_cast<size_t>(n_seqs_));
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
  for (int32_t seq = 0; seq < n_seqs_; ++seq) Set(seq, {}, 0);
  return {};
}

void HeadRows::Set(int32_t seq, const std::vector<int32_t>& counts, int64_t tokens) {
  of_[static_cast<size_t>(seq)] = counts;
  tokens_[static_cast<size_t>(seq)] = tokens;
  std::vector<int32_t>& most = most_[static_cast<size_t>(seq)];
  most.clear();
  for (auto at = counts.begin(); at != counts.end(); at += n_kv_heads_) {
    most.push_back(*std::max_element(at, at + n_kv_heads_));
  }
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
  return Chosen(seq) ? most_[static_cast<size_t>(seq)][static_cast<size_t>(layer)] : 0;
}

std::vector<int32_t> HeadRows::Counts(int32_t seq) const {
  return Chosen(seq) ? Of(seq) : std::vector<int32_t>(Lists());
}

std::span<const int32_t> HeadRows::First(int32_t seq, int32_t layer) const {
  if (!Chosen(seq)) return {};
  const std::span<const int32_t> all = apart_ ? Of(seq) : most_[static_cast<size_t>(seq)];
  const auto n = static_cast<size_t>(apart_ ? n_kv_heads_ : 1);
  return all.subspan(static_cast<size_t>(layer) * n, n);
}

int32_t HeadRows::First(int32_t seq, int32_t layer, int32_t head) const {
  const std::span<const int32_t> first = First(seq, layer);
  if (first.empty()) return 0;
  return apart_ ? first[static_cast<size_t>(head)] : first.front();
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

// The counts, then the tokens.
std::string HeadRows::Save(int32_t seq) const {
  if (!Chosen(seq)) return {};
  std::vector<int32_t> numbers = Of(seq);
  numbers.push_back(static_cast<int32_t>(Tokens(seq)));
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int32_t)};
}

bool HeadRows::Load(int32_t seq, int64_t length, std::string_view state) {
  if (!state.empty() && state.size() != (Lists() + 1) * sizeof(int32_t)) return false;
  std::vector<int32_t> numbers(state.size() / sizeof(int32_t));
  if (!state.empty()) std::memcpy(numbers.data(), state.data(), state.size());
  const auto fits = [&](int32_t number) { return 0 <= number && number <= length; };
  if (!std::ranges::all_of(numbers, fits)) return false;
  const int32_t tokens = numbers.empty() ? 0 : numbers.back();
  if (!numbers.empty()) numbers.pop_back();
  if (std::ranges::any_of(numbers, [&](int32_t count) { return count > tokens; })) return false;
  Set(seq, numbers, tokens);
  return true;
}

}  // namespace omnikv
