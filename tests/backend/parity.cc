#include "parity.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <optional>

#include "backend/ref/ref_backend.h"

namespace omnikv::parity {
namespace {

const Result<std::vector<Candidate>>& Candidates() {
  static const auto* candidates = new Result<std::vector<Candidate>>(MakeCandidates());
  return *candidates;
}

std::map<std::string, int64_t> cases_run;
std::string current_case;

Outputs RunOn(Backend& backend, const Case& run, bool replay, std::optional<Op>* ran = nullptr) {
  return run([&](const Op& op) {
    if (ran != nullptr) *ran = op;
    const Support support = backend.Supports(op);
    ASSERT_TRUE(support.ok) << OpName(op) << ": " << support.reason;
    if (replay) {
      const auto recording = backend.Record([&] { backend.Enqueue(op); });
      backend.Replay(*recording);
      backend.Synchronize();
    } else {
      backend.Enqueue(op);
      backend.Synchronize();
    }
  });
}

// Empty when `got` is within `tolerance` of `want`.
std::string Difference(const Array& want, const Array& got, double tolerance) {
  if (want.values.size() != got.values.size()) return "different sizes";
  // An error of a logarithm is a relative one of what it is taken of, however near to 0 it lies.
  double top = want.name == "lse" ? 1 : 0;
  for (float v : want.values) {
    if (std::isfinite(v)) top = std::max(top, std::fabs(static_cast<double>(v)));
  }
  double worst = 0;
  size_t at = 0;
  size_t off = 0;  // values beyond the tolerance
  for (size_t i = 0; i < want.values.size(); ++i) {
    const float w = want.values[i];
    const float g = got.values[i];
    if (!std::isfinite(w) || !std::isfinite(g)) {
      if (w == g || (std::isnan(w) && std::isnan(g))) continue;
      return fmt::format("{}[{}] is {}, expected {}", want.name, i, g, w);
    }
    const double delta = std::fabs(static_cast<double>(w) - g);
    if (delta > tolerance * top) ++off;
    if (delta > worst) {
      worst = delta;
      at = i;
    }
  }
  // Who computes coarser than the array says rounds many values to the other side.
  const bool coarse = tolerance > 2.5 * want.tolerance;
  if (want.rounding > 0 && !coarse && off > 1 + want.values.size() / 100) {
    return fmt::format("{}: {} of {} values are on the other side of a step", want.name, off,
                       want.values.size());
  }
  if (worst <= (tolerance + want.rounding) * top) return "";
  return fmt::format("{}[{}] is {}, expected {}: {} of the maximum, {} allowed", want.name, at,
                     got.values[at], want.values[at], worst / top, tolerance);
}

bool SameBits(const Outputs& a, const Outputs& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Array& x, const Array& y) {
    return std::equal(
        x.values.begin(), x.values.end(), y.values.begin(), y.values.end(),
        [](float u, float v) { return std::bit_cast<uint32_t>(u) == std::bit_cast<uint32_t>(v); });
  });
}

}  // namespace

void ParityTest::SetUp() {
  const Status& status = Candidates().status();
  if (status.code() == StatusCode::kUnsupported) GTEST_SKIP() << status.message();
  ASSERT_TRUE(status.ok()) << status.message();
}

Outputs Check(const std::string& name, const Case& run, int64_t turn) {
  SCOPED_TRACE(name);
  const auto ref = MakeRefBackend();
  std::optional<Op> op;
  const Outputs want = RunOn(*ref, run, false, &op);
  EXPECT_TRUE(op.has_value());
  int64_t place = 0;
  for (const Candidate& candidate : *Candidates()) {
    if (turn >= 0 && (place++ - turn) % CandidateStride() != 0) continue;
    SCOPED_TRACE(candidate.name);
    current_case = fmt::format("{}; {}", name, candidate.name);
    const Outputs got = RunOn(*candidate.backend, run, false);
    EXPECT_EQ(want.size(), got.size());
    for (size_t i = 0; i < want.size(); ++i) {
      const double tolerance =
          candidate.tolerance ? candidate.tolerance(*op, want[i]) : want[i].tolerance;
      const std::string difference = Difference(want[i], got[i], tolerance);
      EXPECT_TRUE(difference.empty()) << difference;
    }
    EXPECT_TRUE(SameBits(got, RunOn(*candidate.backend, run, false))) << "not repeatable";
    EXPECT_TRUE(SameBits(got, RunOn(*candidate.backend, run, true))) << "replay differs";
  }
  ++cases_run[std::string(OpName(*op))];
  return want;
}

const std::map<std::string, int64_t>& CasesRun() {
  return cases_run;
}

const std::string& CurrentCase() {
  return current_case;
}

std::vector<int32_t> Random::Ascending(int32_t n, int32_t below) {
  std::vector<int32_t> all(static_cast<size_t>(below));
  std::iota(all.begin(), all.end(), 0);
  std::shuffle(all.begin(), all.end(), engine_);
  all.resize(static_cast<size_t>(n));
  std::sort(all.begin(), all.end());
  return all;
}

Weights::Weights(DType format, int64_t n_out, int64_t n_in, Random& random)
    : format_(format), n_out_(n_out), n_in_(n_in) {
  const auto values = static_cast<size_t>(n_out * n_in);
  data_.resize(DTypeBytes(format, values));
  if (format == DType::kQ8_0) {
    for (size_t block = 0; block < values / kQ8Block; ++block) {
      std::byte* p = data_.data() + block * kQ8BlockBytes;
      const F16 scale = F16FromF32(random.Floats(1, 0.01f)[0]);
      std::memcpy(p, &scale, 2);
      for (size_t i = 0; i < kQ8Block; ++i) {
        p[2 + i] = static_cast<std::byte>(static_cast<int8_t>(random.Int(-127, 127)));
      }
    }
    return;
  }
  const std::vector<float> f = random.Floats(values);
  for (size_t i = 0; i < values; ++i) StoreFromF32(format, data_.data(), i, f[i]);
}

WeightRef Weights::Ref() const {
  return {.format = format_,
          .data = data_.empty() ? nullptr : data_.data(),
          .n_out = n_out_,
          .n_in = n_in_,
          .row_bytes = static_cast<int64_t>(DTypeBytes(format_, static_cast<size_t>(n_in_)))};
}

Bank::Bank(DType dtype, int32_t n_kv_heads, int32_t dk, int32_t dv, int32_t block_tokens,
           const std::vector<int32_t>& kv_len, int32_t capacity, Random& random, Planes planes)
    : dtype_(dtype),
      n_kv_heads_(n_kv_heads),
      dk_(dk),
      dv_(dv),
      block_tokens_(block_tokens),
      blocks_((capacity + block_tokens - 1) / block_tokens),
      planes_(planes) {
  const auto n_blocks = static_cast<size_t>(blocks_) * kv_len.size();
  // Blocks of the sequences in any order, and one too many before them.
  const std::vector<int32_t> order = [&] {
    std::vector<int32_t> v(n_blocks);
    std::iota(v.begin(), v.end(), 1);
    for (size_t i = v.size(); i > 1; --i) {
      std::swap(v[i - 1], v[static_cast<size_t>(random.Int(0, static_cast<int32_t>(i) - 1))]);
    }
    return v;
  }();
  table_ = order;
  const auto rows = static_cast<int64_t>(n_blocks + 1) * block_tokens;
  const auto assign = [&](std::vector<std::byte>& data, int32_t k, int32_t v) {
    const bool by_head = planes == Planes::kByHead;
    const int64_t row_bytes =
        by_head ? n_kv_heads * KvRowBytes(dtype, 1, k, v) : KvRowBytes(dtype, n_kv_heads, k, v);
    data.assign(static_cast<size_t>(rows * row_bytes), std::byte{0xff});  // NaN in every type
  };
  const bool apart = planes == Planes::kApart;
  assign(data_, dk, apart ? 0 : dv);
  if (apart) assign(values_, 0, dv);
  const KvView view = View();
  for (size_t s = 0; s < kv_len.size(); ++s) {
    for (int32_t t = 0; t < kv_len[s]; ++t) {
      const int64_t row = view.RowIndex(TableOff(static_cast<int32_t>(s)), t);
      for (const auto& [plane, d] : {std::pair{view.k, dk}, {view.v, dv}}) {
        const std::vector<float> f = random.Floats(static_cast<size_t>(n_kv_heads * d));
        for (int32_t head = 0; head < n_kv_heads; ++head) {
          StoreKvHead(plane, head, d, &f[static_cast<size_t>(head * d)], plane.Head(row, 0));
        }
      }
    }
  }
}

KvView Bank::View() const {
  if (planes_ == Planes::kApart) {
    return MakeKvPlanes(const_cast<std::byte*>(data_.data()),
                        const_cast<std::byte*>(values_.data()), table_.data(), block_tokens_,
                        dtype_, n_kv_heads_, dk_, dv_);
  }
  const auto make = planes_ == Planes::kByHead ? MakeKvViewByHead : MakeKvView;
  return make(const_cast<std::byte*>(data_.data()), table_.data(), block_tokens_, dtype_,
              n_kv_heads_, dk_, dv_);
}

StateView Bank::States(int32_t unit, int64_t values, std::vector<float>& memory, float fill) const {
  StateView view{.block_table = table_.data(),
                 .block_units = std::max(1, block_tokens_ / unit),
                 .unit_blocks = std::max(1, unit / block_tokens_),
                 .row_bytes = values * static_cast<int64_t>(sizeof(float))};
  memory.assign((table_.size() + 1) * static_cast<size_t>(view.block_units * values), fill);
  view.base = reinterpret_cast<std::byte*>(memory.data());
  return view;
}

Array Bank::Values() const {
  const double rounding = dtype_ == DType::kF32 ? 1e-5 : dtype_ == DType::kBF16 ? 8e-3 : 1e-3;
  const double step = dtype_ == DType::kQ8_0 ? 1.0 / 127 : dtype_ == DType::kQ4_0 ? 1.0 / 8 : 0.0;
  Array kv{"kv", {}, rounding, step};
  const KvView view = View();
  const auto block_rows = static_cast<size_t>(view.BlockRows());
  for (size_t row = 0; row < n_rows(); ++row) {
    if (row % block_rows >= static_cast<size_t>(block_tokens_)) continue;  // another head's
    for (const auto& [plane, d] : {std::pair{view.k, dk_}, {view.v, dv_}}) {
      for (int32_t head = 0; head < n_kv_heads_; ++head) {
        const std::byte* values = plane.Head(static_cast<int64_t>(row), head);
        for (int32_t i = 0; i < d; ++i) {
          kv.values.push_back(LoadKvValue(plane, head, values, static_cast<size_t>(i)));
        }
      }
    }
  }
  return kv;
}

Step::Step(const std::vector<int32_t>& q_len, const std::vector<int32_t>& kv_len,
           const std::function<int32_t(int32_t)>& table_off) {
  for (size_t s = 0; s < q_len.size(); ++s) {
    const auto seq = static_cast<int32_t>(s);
    seqs.push_back({.q_begin = n_rows(),
                    .q_len = q_len[s],
                    .kv_len = kv_len[s],
                    .table_off = table_off(seq),
                    .prompt_len = 0});
    for (int32_t i = 0; i < q_len[s]; ++i) rows.push_back({seq, kv_len[s] - q_len[s] + i});
  }
}

}  // namespace omnikv::parity
