#include "backend/ref/ref_backend.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "backend/kv_format.h"
#include "backend/locate_rows.h"
#include "backend/ref/ref_dots.h"
#include "backend/slots_on_host.h"

namespace omnikv {
namespace {

// W x of every row: [n_rows, n_out].
std::vector<double> Products(const WeightRef& w, const float* x, int64_t n_rows) {
  const auto value = [&](int64_t o, int64_t i) {
    return LoadAsF32(w.format, w.Row(o), static_cast<size_t>(i));
  };
  std::vector<double> products(static_cast<size_t>(n_rows * w.n_out));
  RefDots(w.n_out, w.n_in, value, n_rows, x, products.data());
  return products;
}

// y = W x + b of every row.
void Linear(const WeightRef& w, const float* x, const float* bias, int64_t n_rows, float* y) {
  const std::vector<double> products = Products(w, x, n_rows);
  for (int64_t i = 0; i < n_rows * w.n_out; ++i) {
    const float add = bias != nullptr ? bias[i % w.n_out] : 0.0f;
    y[i] = static_cast<float>(products[static_cast<size_t>(i)] + add);
  }
}

// out = w * v / rms(v).
void RmsNorm(const float* v, const float* w, int32_t n, float eps, float* out) {
  double sum = 0;
  for (int32_t i = 0; i < n; ++i) sum += static_cast<double>(v[i]) * v[i];
  const double inv = 1.0 / std::sqrt(sum / n + eps);
  for (int32_t i = 0; i < n; ++i) out[i] = static_cast<float>(v[i] * inv * w[i]);
}

// Runs the prologue and gives h of every row: [n_rows, d].
std::vector<float> Prologue(const Residual& in, int32_t n_rows) {
  const auto d = static_cast<size_t>(in.d);
  std::vector<float> h(static_cast<size_t>(n_rows) * d);
  for (size_t r = 0; r < static_cast<size_t>(n_rows); ++r) {
    float* x = in.x + r * d;
    if (in.y != nullptr) {
      const float* y = in.y + r * d;
      std::vector<float> delta(y, y + d);
      if (in.post_norm != nullptr) RmsNorm(y, in.post_norm, in.d, in.eps, delta.data());
      for (size_t i = 0; i < d; ++i) x[i] += in.scale * delta[i];
    }
    std::copy_n(x, d, h.data() + r * d);
    if (in.norm != nullptr) RmsNorm(x, in.norm, in.d, in.eps, h.data() + r * d);
  }
  return h;
}

// Norms `n_heads` heads of `dk` values in place, then rotates them. `raw`, if not null: what they
// are before they are rotated.
void NormAndRotate(const NormQkvRopeAppendArgs& a, int32_t r, const float* norm, int32_t n_heads,
                   float* heads, float* raw) {
  const int32_t dk = a.kv.dk;
  if (a.qk_norm == QkNorm::kFull) RmsNorm(heads, norm, n_heads * dk, a.qk_norm_eps, heads);
  for (int32_t h = 0; h < n_heads; ++h) {
    float* v = heads + static_cast<ptrdiff_t>(h) * dk;
    if (a.qk_norm == QkNorm::kPerHead) RmsNorm(v, norm, dk, a.qk_norm_eps, v);
    if (raw != nullptr) std::copy_n(v, dk, raw + static_cast<ptrdiff_t>(h) * dk);
    if (a.cos_sin == nullptr) continue;
    const float* cs = a.cos_sin + static_cast<ptrdiff_t>(r) * a.n_freq * 2;
    for (int32_t i = 0; i < a.n_freq; ++i) {
      const double c = cs[2 * i];
      const double s = cs[2 * i + 1];
      const double lo = v[i];
      const double hi = v[i + a.n_freq];
      v[i] = static_cast<float>(lo * c - hi * s);
      v[i + a.n_freq] = static_cast<float>(hi * c + lo * s);
    }
  }
}

void NormQkvRopeAppend(const NormQkvRopeAppendArgs& a) {
  const std::vector<float> h = Prologue(a.in, a.n_rows);
  std::vector<float> ks(static_cast<size_t>(a.n_rows * a.wk.n_out));
  std::vector<float> vs(static_cast<size_t>(a.n_rows * a.wv.n_out));
  Linear(a.wq, h.data(), a.bq, a.n_rows, a.q);
  Linear(a.wk, h.data(), a.bk, a.n_rows, ks.data());
  Linear(a.wv, h.data(), a.bv, a.n_rows, vs.data());
  for (int32_t r = 0; r < a.n_rows; ++r) {
    float* q = a.q + r * a.wq.n_out;
    float* k = ks.data() + r * a.wk.n_out;
    const float* v = vs.data() + r * a.wv.n_out;
    NormAndRotate(a, r, a.q_norm, a.n_heads, q, nullptr);
    float* raw = a.k_raw_out != nullptr ? a.k_raw_out + r * a.wk.n_out : nullptr;
    NormAndRotate(a, r, a.k_norm, a.kv.n_kv_heads, k, raw);
    const KvTarget to = TargetOf(a, a.rows[r]);
    for (int32_t head = 0; head < a.kv.n_kv_heads; ++head) {
      StoreKvHead(a.kv.k, head, a.kv.dk, k + head * a.kv.dk, to.k);
      StoreKvHead(a.kv.v, head, a.kv.dv, v + head * a.kv.dv, to.v);
    }
    for (int64_t i = 0; a.k_out != nullptr && i < a.wk.n_out; ++i) {
      const auto head = static_cast<int32_t>(i / a.kv.dk);
      a.k_out[r * a.wk.n_out + i] = LoadKvValue(a.kv.k, head, to.k + head * a.kv.k.head_bytes,
                                                static_cast<size_t>(i % a.kv.dk));
    }
  }
}

double Activate(Activation act, double v) {
  switch (act) {
    case Activation::kSilu:
      return v / (1.0 + std::exp(-v));
    case Activation::kGeluTanh:
      return 0.5 * v * (1.0 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)));
  }
  return v;
}

void NormGatedFfn(const NormGatedFfnArgs& a) {
  const std::vector<float> h = Prologue(a.in, a.n_rows);
  const std::vector<double> gates = Products(a.gate, h.data(), a.n_rows);
  const std::vector<double> ups = Products(a.up, h.data(), a.n_rows);
  for (size_t i = 0; i < gates.size(); ++i) {
    const size_t o = i % static_cast<size_t>(a.gate.n_out);
    const double g = gates[i] + (a.gate_bias != nullptr ? a.gate_bias[o] : 0.0f);
    const double u = ups[i] + (a.up_bias != nullptr ? a.up_bias[o] : 0.0f);
    a.out[i] = static_cast<float>(Activate(a.act, g) * u);
  }
}

void NormLogits(const NormLogitsArgs& a) {
  const std::vector<float> h = Prologue(a.in, a.n_rows);
  std::vector<float> chosen;  // [n_out, d]
  for (int32_t o = 0; o < a.n_out; ++o) {
    const auto row = h.begin() + int64_t{a.out_rows != nullptr ? a.out_rows[o] : o} * a.in.d;
    chosen.insert(chosen.end(), row, row + a.in.d);
  }
  const std::vector<double> logits = Products(a.head, chosen.data(), a.n_out);
  for (size_t i = 0; i < logits.size(); ++i) {
    const size_t token = i % static_cast<size_t>(a.head.n_out);
    double v = logits[i] + (a.bias != nullptr ? a.bias[token] : 0.0f);
    v *= a.scale;
    if (a.softcap > 0) v = a.softcap * std::tanh(v / a.softcap);
    a.logits[i] = static_cast<float>(v);
  }
}

class RefBackend : public HostBackend {
 public:
  std::string_view Name() const override { return "ref"; }
  std::string Describe() const override { return "scalar reference, double accumulation"; }
  Support Supports(const Op& op) const override { return SupportsKv(op); }

 protected:
  void Run(const Op& op) override {
    std::visit([](const auto& args) { Execute(args); }, op);
  }

 private:
  static void Execute(const EmbedArgs& a) {
    for (int32_t r = 0; r < a.n_rows; ++r) {
      for (int64_t i = 0; i < a.table.n_in; ++i) {
        a.x[r * a.table.n_in + i] =
            a.scale * LoadAsF32(a.table.format, a.table.Row(a.tokens[r]), static_cast<size_t>(i));
      }
    }
  }
  static void Execute(const RopeTableArgs& a) {
    for (int32_t r = 0; r < a.n_rows; ++r) {
      for (int32_t i = 0; i < a.n_freq; ++i) {
        const float angle = static_cast<float>(a.rows[r].pos) * a.inv_freq[i];
        float* out = a.cos_sin + (static_cast<int64_t>(r) * a.n_freq + i) * 2;
        out[0] = static_cast<float>(std::cos(static_cast<double>(angle))) * a.magnitude;
        out[1] = static_cast<float>(std::sin(static_cast<double>(angle))) * a.magnitude;
      }
    }
  }
  static void Execute(const NormQkvRopeAppendArgs& a) { NormQkvRopeAppend(a); }
  static void Execute(const AttendArgs& a) { RefAttend(a); }
  static void Execute(const LinearArgs& a) { Linear(a.w, a.x, a.bias, a.n_rows, a.y); }
  static void Execute(const NormGatedFfnArgs& a) { NormGatedFfn(a); }
  static void Execute(const NormLogitsArgs& a) { NormLogits(a); }
  static void Execute(const ScoreReduceArgs& a) { RefScoreReduce(a); }
  static void Execute(const ScoreArgs& a) { RefScore(a); }
  static void Execute(const BlockSummaryArgs& a) { RefBlockSummary(a); }
  static void Execute(const BlockScoreArgs& a) { RefBlockScore(a); }
  static void Execute(const KeyScoreArgs& a) { RefKeyScore(a); }
  static void Execute(const IndexKeysArgs& a) { RefIndexKeys(a); }
  static void Execute(const IndexScoreArgs& a) { RefIndexScore(a); }
  static void Execute(const RescoreArgs& a) { RefRescore(a); }
  static void Execute(const QueryMomentsArgs& a) { RefQueryMoments(a); }
  static void Execute(const ExpectedScoreArgs& a) { RefExpectedScore(a); }
  static void Execute(const AgedScoresArgs& a) { RefAgedScores(a); }
  static void Execute(const PoolArgs& a) { RefPool(a); }
  static void Execute(const PlanRangeArgs& a) { RefPlanRange(a); }
  static void Execute(const TopKArgs& a) { RefTopK(a); }
  static void Execute(const WorkingSetArgs& a) { WorkingSetOnHost(a); }
  static void Execute(const AverageScoresArgs& a) { AverageScoresOnHost(a); }
  static void Execute(const FetchRowsArgs& a) { FetchRowsOnHost(a); }
  static void Execute(const ListPiecesArgs& a) { ListPiecesOnHost(a); }
  static void Execute(const PieceTableArgs& a) { PieceTableOnHost(a); }
  static void Execute(const NextTokenArgs& a) { RefNextToken(a); }
  static void Execute(const MergeStatesArgs& a) { RefMergeStates(a); }
  static void Execute(const PickLogitsArgs& a) { RefPickLogits(a); }
  static void Execute(const SumValuesArgs& a) { RefSumValues(a); }
  static void Execute(const PickHeadsArgs& a) { RefPickHeads(a); }
  static void Execute(const StoreRowsArgs& a) { RefStoreRows(a); }
  static void Execute(const LocateRowsArgs& a) { LocateRowsOnHost(a); }
  static void Execute(const CompactArgs& a) { RefCompact(a); }
  static void Execute(const EvictArgs& a) { RefEvict(a); }
  static void Execute(const UndoEvictArgs& a) { RefUndoEvict(a); }
  static void Execute(const CustomArgs& a) { a.kernels->ref(a.args.data()); }
};

}  // namespace

std::unique_ptr<Backend> MakeRefBackend() {
  return std::make_unique<RefBackend>();
}

}  // namespace omnikv
