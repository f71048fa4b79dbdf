#include "backend/ref/ref_backend.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "backend/kv_format.h"
#include "backend/locate_rows.h"
#include "backend/slots_on_host.h"

namespace omnikv {
namespace {

double Dot(const WeightRef& w, int64_t row, const float* x) {
  double sum = 0;
  for (int64_t i = 0; i < w.n_in; ++i) {
    sum += static_cast<double>(LoadAsF32(w.format, w.Row(row), static_cast<size_t>(i))) * x[i];
  }
  return sum;
}

// y[0..n_out) = W x + b.
void MatVec(const WeightRef& w, const float* x, const float* bias, float* y) {
  for (int64_t o = 0; o < w.n_out; ++o) {
    y[o] = static_cast<float>(Dot(w, o, x) + (bias != nullptr ? bias[o] : 0.0f));
  }
}

// out = w * v / rms(v).
void RmsNorm(const float* v, const float* w, int32_t n, float eps, float* out) {
  double sum = 0;
  for (int32_t i = 0; i < n; ++i) sum += static_cast<double>(v[i]) * v[i];
  const double inv = 1.0 / std::sqrt(sum / n + eps);
  for (int32_t i = 0; i < n; ++i) out[i] = static_cast<float>(v[i] * inv * w[i]);
}

// Runs the prologue for row r and gives h.
std::vector<float> Prologue(const Residual& in, int32_t r) {
  const auto d = static_cast<size_t>(in.d);
  float* x = in.x + static_cast<size_t>(r) * d;
  if (in.y != nullptr) {
    const float* y = in.y + static_cast<size_t>(r) * d;
    std::vector<float> delta(y, y + d);
    if (in.post_norm != nullptr) RmsNorm(y, in.post_norm, in.d, in.eps, delta.data());
    for (size_t i = 0; i < d; ++i) x[i] += in.scale * delta[i];
  }
  std::vector<float> h(x, x + d);
  if (in.norm != nullptr) RmsNorm(x, in.norm, in.d, in.eps, h.data());
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
  for (int32_t r = 0; r < a.n_rows; ++r) {
    const std::vector<float> h = Prologue(a.in, r);
    float* q = a.q + static_cast<int64_t>(r) * a.wq.n_out;
    std::vector<float> k(static_cast<size_t>(a.wk.n_out));
    std::vector<float> v(static_cast<size_t>(a.wv.n_out));
    MatVec(a.wq, h.data(), a.bq, q);
    MatVec(a.wk, h.data(), a.bk, k.data());
    MatVec(a.wv, h.data(), a.bv, v.data());
    NormAndRotate(a, r, a.q_norm, a.n_heads, q, nullptr);
    float* raw = a.k_raw_out != nullptr ? a.k_raw_out + r * a.wk.n_out : nullptr;
    NormAndRotate(a, r, a.k_norm, a.kv.n_kv_heads, k.data(), raw);
    const KvTarget to = TargetOf(a, a.rows[r]);
    for (int32_t head = 0; head < a.kv.n_kv_heads; ++head) {
      StoreKvHead(a.kv.k, head, a.kv.dk, k.data() + head * a.kv.dk, to.k);
      StoreKvHead(a.kv.v, head, a.kv.dv, v.data() + head * a.kv.dv, to.v);
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
  for (int32_t r = 0; r < a.n_rows; ++r) {
    const std::vector<float> h = Prologue(a.in, r);
    for (int64_t i = 0; i < a.gate.n_out; ++i) {
      const double g = Dot(a.gate, i, h.data()) + (a.gate_bias != nullptr ? a.gate_bias[i] : 0.0f);
      const double u = Dot(a.up, i, h.data()) + (a.up_bias != nullptr ? a.up_bias[i] : 0.0f);
      a.out[r * a.gate.n_out + i] = static_cast<float>(Activate(a.act, g) * u);
    }
  }
}

void NormLogits(const NormLogitsArgs& a) {
  for (int32_t r = 0; r < a.n_rows; ++r) {
    const std::vector<float> h = Prologue(a.in, r);
    for (int32_t o = 0; o < a.n_out; ++o) {
      if ((a.out_rows != nullptr ? a.out_rows[o] : o) != r) continue;
      for (int64_t i = 0; i < a.head.n_out; ++i) {
        double v = Dot(a.head, i, h.data()) + (a.bias != nullptr ? a.bias[i] : 0.0f);
        v *= a.scale;
        if (a.softcap > 0) v = a.softcap * std::tanh(v / a.softcap);
        a.logits[o * a.head.n_out + i] = static_cast<float>(v);
      }
    }
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
  static void Execute(const LinearArgs& a) {
    for (int32_t r = 0; r < a.n_rows; ++r) {
      MatVec(a.w, a.x + r * a.w.n_in, a.bias, a.y + r * a.w.n_out);
    }
  }
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
