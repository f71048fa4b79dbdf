// What each op of a step wrote, so that a step can be compared between two backends op by op.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "backend/forwarding_backend.h"

namespace omnikv {

struct OpOutput {
  std::string op;
  std::string array;  // the field of its arguments
  std::vector<float> values;

  float Largest() const {
    float largest = 0;
    for (const float v : values) largest = std::max(largest, std::abs(v));
    return largest;
  }
};

// Reads the output of each op that runs alone, as all do under a TraceBackend over this. Scores are
// left out: the tokens that are chosen by them, and the K/V that are written, show in what follows.
class OpOutputs : public ForwardingBackend {
 public:
  explicit OpOutputs(Backend& inner) : ForwardingBackend(inner) {}

  double TimeAlone(const Op& op) override {
    const double seconds = ForwardingBackend::TimeAlone(op);
    std::visit([&](const auto& args) { Keep(OpName(op), args); }, op);
    return seconds;
  }
  const std::vector<OpOutput>& outputs() const { return outputs_; }

 private:
  void Keep(std::string_view op, const EmbedArgs& a) {
    Add<float>(op, "x", a.x, int64_t{a.n_rows} * a.table.n_in);
  }
  void Keep(std::string_view op, const RopeTableArgs& a) {
    Add<float>(op, "cos_sin", a.cos_sin, int64_t{a.n_rows} * a.n_freq * 2);
  }
  void Keep(std::string_view op, const NormQkvRopeAppendArgs& a) {
    Add<float>(op, "x", a.in.x, int64_t{a.n_rows} * a.in.d);
    Add<float>(op, "q", a.q, int64_t{a.n_rows} * a.n_heads * a.kv.dk);
  }
  void Keep(std::string_view op, const AttendArgs& a) {
    if (a.o != nullptr) Add<float>(op, "o", a.o, int64_t{a.n_rows} * a.n_heads * a.kv.dv);
    if (a.lse != nullptr) Add<float>(op, "lse", a.lse, int64_t{a.n_rows} * a.n_heads);
  }
  void Keep(std::string_view op, const LinearArgs& a) {
    Add<float>(op, "y", a.y, int64_t{a.n_rows} * a.w.n_out);
  }
  void Keep(std::string_view op, const NormGatedFfnArgs& a) {
    Add<float>(op, "out", a.out, int64_t{a.n_rows} * a.gate.n_out);
  }
  void Keep(std::string_view op, const NormLogitsArgs& a) {
    Add<float>(op, "logits", a.logits, a.n_out * a.head.n_out);
  }
  void Keep(std::string_view op, const PlanRangeArgs& a) {
    Add<int32_t>(op, "bounds", a.bounds, 2 * int64_t{a.n_seqs});
    if (a.n_pick != nullptr) Add<int32_t>(op, "n_pick", a.n_pick, a.n_seqs);
  }
  void Keep(std::string_view op, const TopKArgs& a) {  // of the first sequence
    int32_t count = 0;
    Download(&count, a.count, sizeof(count));
    Add<int32_t>(op, "index", a.index, count);
  }
  template <typename Args>
  void Keep(std::string_view, const Args&) {}

  template <typename T>
  void Add(std::string_view op, std::string array, const T* data, int64_t n) {
    std::vector<T> values(static_cast<size_t>(n));
    Download(values.data(), data, values.size() * sizeof(T));
    outputs_.push_back({std::string(op), std::move(array), {values.begin(), values.end()}});
  }

  std::vector<OpOutput> outputs_;
};

}  // namespace omnikv
