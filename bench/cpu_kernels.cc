// The CPU backend's decode kernels against what the machine reads. Each kernel is timed in turns
// with a plain read of the same memory, so that noise (a neighbour, a throttled host) hits both.
// Two figures a case: "run" from the median whole pass, and "quiet" from the sum over its parts
// (ops, or 16 MB of reading) of each part's shortest time, which a busy machine disturbs less.
//   cpu_kernels_bench [--threads N] [--isa NAME] [--reps N] [FILTER]
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "backend/kv_format.h"
#include "base/memory.h"

namespace omnikv {
namespace {

using Clock = std::chrono::steady_clock;

double Seconds(const std::function<void()>& body) {
  const auto start = Clock::now();
  body();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double Median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

// Sums `bytes` at `p`, read as kStreams streams side by side.
template <int kStreams>
uint64_t ReadStreams(const std::byte* p, size_t bytes) {
  using V = uint64_t __attribute__((vector_size(16), aligned(16)));
  const size_t n = bytes / kStreams / 64 * 64;
  V sum[kStreams * 2] = {};
  for (size_t i = 0; i < n; i += 64) {
    for (int s = 0; s < kStreams; ++s) {
      const auto* v = reinterpret_cast<const V*>(p + static_cast<size_t>(s) * n + i);
      sum[2 * s] += v[0] + v[1];
      sum[2 * s + 1] += v[2] + v[3];
    }
  }
  uint64_t total = 0;
  for (const V& v : sum) total += v[0] + v[1];
  return total;
}

struct Options {
  CpuOptions cpu;
  int reps = 9;
  std::string filter;
};

// Times of passes over the same parts.
class Passes {
 public:
  explicit Passes(double bytes) : bytes_(bytes) {}

  void Run(const std::vector<std::function<void()>>& parts) {
    shortest_.resize(parts.size(), 1e9);
    double sum = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      const double s = Seconds(parts[i]);
      shortest_[i] = std::min(shortest_[i], s);
      sum += s;
    }
    passes_.push_back(sum);
  }

  double RunSeconds() const { return Median(passes_); }
  double QuietSeconds() const { return std::accumulate(shortest_.begin(), shortest_.end(), 0.0); }
  double RunRate() const { return bytes_ / RunSeconds() * 1e-9; }  // GB/s
  double QuietRate() const { return bytes_ / QuietSeconds() * 1e-9; }

 private:
  double bytes_;
  std::vector<double> passes_;
  std::vector<double> shortest_;
};

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options), backend_(options.cpu), memory_(Take(size_t{2560} << 20)) {
    // Small bf16 and f16 values, and Q8_0 blocks with tame scales, whichever way they are read.
    auto* p = reinterpret_cast<uint16_t*>(memory_.data());
    backend_.pool().ParallelFor(static_cast<int64_t>(memory_.size() / 2), 1 << 20,
                                [&](int64_t begin, int64_t end, int) {
                                  for (int64_t i = begin; i < end; ++i)
                                    p[i] = static_cast<uint16_t>(0x3c00 + i * 7 % 64);
                                });
    fmt::print("{}\n", backend_.Describe());
  }

  // The read rate of more than a GB, all threads, and the number of streams a thread that gives it.
  void Ceiling() {
    double best = 0;
    for (int streams : {1, 2, 4, 8}) {
      Passes passes(static_cast<double>(kReadBytes));
      const auto parts = ReadParts(streams);
      for (int i = 0; i < options_.reps; ++i) passes.Run(parts);
      fmt::print("read, {} streams a thread: run {:.1f}, quiet {:.1f} GB/s\n", streams,
                 passes.RunRate(), passes.QuietRate());
      if (passes.QuietRate() > best) {
        best = passes.QuietRate();
        streams_ = streams;
      }
    }
  }

  // Times `parts`, which read `bytes` together.
  void Case(const std::string& name, double bytes,
            const std::vector<std::function<void()>>& parts) {
    if (name.find(options_.filter) == std::string::npos) return;
    Passes kernel(bytes);
    Passes read(static_cast<double>(kReadBytes));
    const auto read_parts = ReadParts(streams_);
    for (int i = 0; i < options_.reps; ++i) {
      read.Run(read_parts);
      kernel.Run(parts);
    }
    fmt::print(
        "{:<44} run {:8.3f} ms {:5.1f} of {:5.1f} GB/s {:4.0f} %   quiet {:8.3f} ms {:5.1f} of "
        "{:5.1f} GB/s {:4.0f} %\n",
        name, 1e3 * kernel.RunSeconds(), kernel.RunRate(), read.RunRate(),
        100 * kernel.RunRate() / read.RunRate(), 1e3 * kernel.QuietSeconds(), kernel.QuietRate(),
        read.QuietRate(), 100 * kernel.QuietRate() / read.QuietRate());
    std::fflush(stdout);
  }

  // Times `body` alone.
  void Timed(const std::string& name, const std::function<void()>& body) {
    if (name.find(options_.filter) == std::string::npos) return;
    body();
    std::vector<double> us;
    for (int i = 0; i < 5 * options_.reps; ++i) us.push_back(Seconds(body) * 1e6);
    fmt::print("{:<44} best {:8.1f} median {:8.1f} us\n", name,
               *std::min_element(us.begin(), us.end()), Median(us));
    std::fflush(stdout);
  }

  void Pool() {
    Timed("pool: 1000 empty jobs, ns each", [&] {
      for (int i = 0; i < 1000; ++i) backend_.pool().Run([](int) {});
    });
  }

  // A decode step of a dense model without its attention: every weight once.
  void Decode(const std::string& name, DType format, int32_t n_rows, int32_t layers, int32_t d,
              int32_t ffn, int32_t heads, int32_t kv_heads, int32_t dk, int32_t vocab) {
    size_t at = 0;
    const auto weight = [&](int64_t n_out, int64_t n_in) {
      const size_t bytes = DTypeBytes(format, static_cast<size_t>(n_out * n_in));
      if (at + bytes > memory_.size()) at = 0;  // f32: the same memory again, far from any cache
      const WeightRef w{
          .format = format,
          .data = memory_.data() + at,
          .n_out = n_out,
          .n_in = n_in,
          .row_bytes = static_cast<int64_t>(DTypeBytes(format, static_cast<size_t>(n_in)))};
      at += bytes;
      return w;
    };
    std::vector<float> x(static_cast<size_t>(n_rows * d), 0.1f), y = x,
                                                                 norm(static_cast<size_t>(d), 1);
    std::vector<float> q(static_cast<size_t>(n_rows * heads * dk)),
        out(static_cast<size_t>(n_rows * ffn));
    std::vector<float> logits(static_cast<size_t>(n_rows * vocab)),
        cs(static_cast<size_t>(n_rows * dk), 0.5f);
    std::vector<uint16_t> kv(static_cast<size_t>(16 * 2 * kv_heads * dk));
    const std::vector<int32_t> table = {0};
    std::vector<RowMeta> rows;
    for (int32_t r = 0; r < n_rows; ++r) rows.push_back({0, r});
    const SeqMeta seq{
        .q_begin = 0, .q_len = n_rows, .kv_len = n_rows, .table_off = 0, .prompt_len = 0};
    const Residual in{.x = x.data(), .y = y.data(), .norm = norm.data(), .eps = 1e-5f, .d = d};
    double bytes = 0;
    std::vector<std::function<void()>> parts;
    const auto add = [&](const Op& op) {
      bytes += static_cast<double>(CostOf(op).bytes_read);
      parts.push_back(Part(op));
    };
    {
      for (int32_t layer = 0; layer < layers; ++layer) {
        add(NormQkvRopeAppendArgs{
            .in = in,
            .wq = weight(heads * dk, d),
            .wk = weight(kv_heads * dk, d),
            .wv = weight(kv_heads * dk, d),
            .cos_sin = cs.data(),
            .n_freq = dk / 2,
            .q = q.data(),
            .n_heads = heads,
            .kv = MakeKvView(reinterpret_cast<std::byte*>(kv.data()), table.data(), 16,
                             DType::kBF16, kv_heads, dk, dk),
            .rows = rows.data(),
            .seqs = &seq,
            .n_rows = n_rows});
        add(LinearArgs{.x = q.data(), .w = weight(d, heads * dk), .y = y.data(), .n_rows = n_rows});
        add(NormGatedFfnArgs{.in = in,
                             .gate = weight(ffn, d),
                             .up = weight(ffn, d),
                             .out = out.data(),
                             .n_rows = n_rows});
        add(LinearArgs{.x = out.data(), .w = weight(d, ffn), .y = y.data(), .n_rows = n_rows});
      }
      add(NormLogitsArgs{.in = in,
                         .head = weight(vocab, d),
                         .logits = logits.data(),
                         .n_rows = n_rows,
                         .n_out = n_rows});
    }
    Case(fmt::format("{} {} rows {}", name, DTypeName(format), n_rows), bytes, parts);
  }

  // One linear layer, over and over through all the memory.
  void Matrix(DType format, int64_t n_out, int64_t n_in, int32_t n_rows) {
    const auto row_bytes = static_cast<int64_t>(DTypeBytes(format, static_cast<size_t>(n_in)));
    const auto copies = static_cast<int64_t>(size_t{1} << 30) / (row_bytes * n_out);
    std::vector<float> x(static_cast<size_t>(n_rows * n_in), 0.1f),
        y(static_cast<size_t>(n_rows * n_out));
    std::vector<std::function<void()>> parts;
    {
      for (int64_t i = 0; i < copies; ++i) {
        parts.push_back(Part(LinearArgs{.x = x.data(),
                                        .w = {.format = format,
                                              .data = memory_.data() + i * row_bytes * n_out,
                                              .n_out = n_out,
                                              .n_in = n_in,
                                              .row_bytes = row_bytes},
                                        .y = y.data(),
                                        .n_rows = n_rows}));
      }
    }
    Case(fmt::format("linear {} [{}, {}] rows {}", DTypeName(format), n_out, n_in, n_rows),
         static_cast<double>(copies * row_bytes * n_out), parts);
  }

  // The attention of every layer of a decode step; picks > 0: over that many random tokens; with
  // units of more tokens over that many of them, others for each KV head. `by_head`: whose rows
  // follow one another.
  void Attend(const std::string& name, DType dtype, int32_t layers, int32_t heads, int32_t kv_heads,
              int32_t dk, int32_t tokens, int32_t picks, ScoreKind score, int32_t unit = 1,
              bool by_head = false) {
    constexpr int32_t kBlock = 64;  // as an engine has
    const int64_t row_bytes = KvRowBytes(dtype, kv_heads, dk, dk);
    const int64_t layer_bytes = row_bytes * ((tokens + kBlock - 1) / kBlock * kBlock);
    layers = static_cast<int32_t>(
        std::min<int64_t>(layers, static_cast<int64_t>(memory_.size()) / layer_bytes));
    std::vector<int32_t> table(static_cast<size_t>((tokens + kBlock - 1) / kBlock));
    std::iota(table.begin(), table.end(), 0);
    std::vector<float> q(static_cast<size_t>(heads * dk), 0.01f), o(q.size()),
        lse(static_cast<size_t>(heads));
    std::vector<float> scores(static_cast<size_t>(heads) * static_cast<size_t>(tokens));
    const RowMeta row{0, tokens - 1};
    const SeqMeta seq{.q_begin = 0, .q_len = 1, .kv_len = tokens, .table_off = 0, .prompt_len = 0};
    const int32_t lists = unit > 1 ? kv_heads : 1;
    std::vector<int32_t> index;
    for (int32_t list = 0; list < lists; ++list) {
      for (int32_t i = 0; i < picks; ++i) {  // uneven steps
        index.push_back(static_cast<int32_t>(int64_t{tokens / unit} * i / picks) +
                        (i * 7 + list * 5) % (lists > 1 ? 8 : 3));
      }
    }
    const std::vector<int32_t> counts(static_cast<size_t>(lists), picks);
    AttnPlan plan = AttnPlan::Dense();
    if (picks > 0) {
      plan = {};
      plan.Add({.kind = SegmentKind::kList,
                .unit = unit,
                .lists = lists,
                .capacity = picks,
                .index = index.data(),
                .count = counts.data()});
    }
    const auto make = by_head ? MakeKvViewByHead : MakeKvView;
    std::vector<std::function<void()>> parts;
    {
      for (int32_t layer = 0; layer < layers; ++layer) {
        parts.push_back(Part(AttendArgs{.q = q.data(),
                                        .o = o.data(),
                                        .lse = lse.data(),
                                        .kv = make(memory_.data() + layer * layer_bytes,
                                                   table.data(), kBlock, dtype, kv_heads, dk, dk),
                                        .plan = plan,
                                        .rows = &row,
                                        .seqs = &seq,
                                        .n_rows = 1,
                                        .n_seqs = 1,
                                        .n_heads = heads,
                                        .scale = 0.125f,
                                        .score = score,
                                        .scores = scores.data(),
                                        .score_stride = tokens}));
      }
    }
    const double bytes = static_cast<double>(layers) * static_cast<double>(row_bytes) *
                         (picks > 0 ? picks * unit : tokens);
    Case(fmt::format("{}{} {} over {}{}{}", name, by_head ? " by head" : "", DTypeName(dtype),
                     tokens,
                     unit > 1    ? fmt::format(", {} of {} picked per KV head", picks, unit)
                     : picks > 0 ? fmt::format(", {} picked", picks)
                                 : "",
                     score == ScoreKind::kNone ? "" : ", scores"),
         bytes, parts);
  }

  // V of `picks` random tokens of each KV head, of `n_seqs` sequences, summed by known logits, in
  // every layer.
  void Sum(const std::string& name, DType dtype, int32_t n_seqs, int32_t kv_heads, int32_t dv,
           int32_t tokens, int32_t picks) {
    constexpr int32_t kBlock = 64;  // as an engine has
    const int64_t layer_bytes = KvRowBytes(dtype, kv_heads, 0, dv) * tokens * n_seqs;
    constexpr int64_t kLayers = 16;  // that share memory, but hardly a row
    const auto apart = static_cast<int64_t>(memory_.size()) / layer_bytes;
    std::vector<int32_t> table(static_cast<size_t>(n_seqs) * static_cast<size_t>(tokens / kBlock));
    std::iota(table.begin(), table.end(), 0);
    std::vector<RowMeta> rows;
    std::vector<SeqMeta> seqs;
    for (int32_t s = 0; s < n_seqs; ++s) {
      rows.push_back({s, tokens - 1});
      seqs.push_back({s, 1, tokens, s * (tokens / kBlock), 0});
    }
    const auto lists = static_cast<size_t>(n_seqs * kv_heads);
    const std::vector<int32_t> counts(lists, picks);
    const std::vector<float> logits(lists * static_cast<size_t>(picks), 0.5f);
    std::vector<float> o(lists * static_cast<size_t>(dv)), lse(lists);
    std::vector<std::vector<int32_t>> index(kLayers);
    std::vector<std::function<void()>> parts;
    uint32_t state = 1;
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      std::vector<int32_t>& listed = index[static_cast<size_t>(layer)];
      for (size_t i = 0; i < logits.size(); ++i) {
        state = state * 1664525u + 1013904223u;
        listed.push_back(static_cast<int32_t>((state >> 8) % static_cast<uint32_t>(tokens)));
      }
      for (size_t l = 0; l < lists; ++l) {
        const auto first = listed.begin() + static_cast<ptrdiff_t>(l) * picks;
        std::sort(first, first + picks);
      }
      std::byte* const v = memory_.data() + layer % apart * layer_bytes;
      parts.push_back(Part(
          SumValuesArgs{.logits = logits.data(),
                        .kv = MakeKvPlanes(v, v, table.data(), kBlock, dtype, kv_heads, dv, dv),
                        .index = listed.data(),
                        .count = counts.data(),
                        .rows = rows.data(),
                        .seqs = seqs.data(),
                        .o = o.data(),
                        .lse = lse.data(),
                        .capacity = picks,
                        .lists = kv_heads,
                        .n_rows = n_seqs,
                        .n_seqs = n_seqs,
                        .n_heads = kv_heads}));
    }
    const double bytes = static_cast<double>(kLayers) * static_cast<double>(logits.size()) *
                         static_cast<double>(DTypeBytes(dtype, static_cast<size_t>(dv)));
    Case(fmt::format("{} {}, {} of {} tokens", name, DTypeName(dtype), picks, tokens), bytes,
         parts);
  }

  void Select(int32_t n, int32_t k) {
    std::vector<float> scores(static_cast<size_t>(n));
    uint32_t state = 1;
    for (float& s : scores) {  // log-normal, as attention scores are
      state = state * 1664525u + 1013904223u;
      const float a = static_cast<float>(state >> 8) * 0x1p-24f;
      state = state * 1664525u + 1013904223u;
      s = std::exp(3 * (a + static_cast<float>(state >> 8) * 0x1p-24f));
    }
    const float weight = 1;
    const SeqMeta seq{.q_begin = 0, .q_len = 1, .kv_len = n, .table_off = 0, .prompt_len = 0};
    std::vector<int32_t> index(static_cast<size_t>(k)), count(1);
    const auto recording = backend_.Record([&] {
      backend_.Enqueue(TopKArgs{.scores = scores.data(),
                                .weights = &weight,
                                .seqs = &seq,
                                .n_candidates = &n,
                                .n_pick = &k,
                                .index = index.data(),
                                .count = count.data(),
                                .stride = n,
                                .window = 1,
                                .capacity = k,
                                .n_seqs = 1});
    });
    Timed(fmt::format("top {} of {}", k, n), [&] { backend_.Replay(*recording); });
    std::vector<float> logits(static_cast<size_t>(n) * 6), lse(6, 1.0f);
    const RowMeta row{0, n - 1};
    const auto reduce = backend_.Record([&] {
      backend_.Enqueue(ScoreReduceArgs{.logits = logits.data(),
                                       .lse = lse.data(),
                                       .out = scores.data(),
                                       .rows = &row,
                                       .stride = n,
                                       .ring = 1,
                                       .n_heads = 6,
                                       .n_rows = 1});
    });
    Timed(fmt::format("score reduce of 6 heads over {}", n), [&] { backend_.Replay(*reduce); });
  }

 private:
  static Pages Take(size_t bytes) {
    auto pages = Pages::Reserve(bytes);
    if (!pages.ok()) {
      fmt::print(stderr, "{}\n", pages.status().message());
      std::exit(1);
    }
    return std::move(*pages);
  }

  // One op as it runs within a recorded step.
  std::function<void()> Part(const Op& op) {
    const std::shared_ptr<Recording> recording = backend_.Record([&] { backend_.Enqueue(op); });
    return [this, recording] { backend_.Replay(*recording); };
  }

  std::vector<std::function<void()>> ReadParts(int streams) {
    constexpr size_t kPart = size_t{16} << 20;
    const auto threads = static_cast<size_t>(backend_.pool().size());
    const size_t share = kPart / threads / 4096 * 4096;
    std::vector<std::function<void()>> parts;
    for (size_t at = 0; at + kPart <= kReadBytes; at += kPart) {
      parts.push_back([this, streams, at, share] {
        backend_.pool().Run([&](int thread) {
          const std::byte* p = memory_.data() + at + static_cast<size_t>(thread) * share;
          sink_[static_cast<size_t>(thread) % 64] += streams == 1   ? ReadStreams<1>(p, share)
                                                     : streams == 2 ? ReadStreams<2>(p, share)
                                                     : streams == 4 ? ReadStreams<4>(p, share)
                                                                    : ReadStreams<8>(p, share);
        });
      });
    }
    return parts;
  }

  static constexpr size_t kReadBytes = size_t{1280} << 20;

  Options options_;
  CpuBackend backend_;
  Pages memory_;
  int streams_ = 4;
  uint64_t sink_[64] = {};
};

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    const bool more = i + 1 < argc;
    if (arg == "--threads" && more) {
      options.cpu.threads = std::atoi(argv[++i]);
    } else if (arg == "--isa" && more) {
      options.cpu.isa = argv[++i];
    } else if (arg == "--reps" && more) {
      options.reps = std::max(1, std::atoi(argv[++i]));
    } else {
      options.filter = arg;
    }
  }
  Bench bench(options);
  bench.Ceiling();
  bench.Pool();
  for (DType format : {DType::kBF16, DType::kF16, DType::kF32, DType::kQ8_0}) {
    for (int32_t rows : {1, 2, 4, 8}) {
      bench.Decode("1B decode", format, rows, 16, 2048, 8192, 32, 8, 64, 32000);
    }
  }
  for (DType format : {DType::kBF16, DType::kQ8_0}) {
    bench.Decode("28M decode", format, 1, 16, 384, 1024, 6, 2, 64, 8192);
    for (int32_t rows : {1, 4, 8, 16, 32}) bench.Matrix(format, 8192, 2048, rows);
  }
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kQ8_0, DType::kQ4_0}) {
    for (int32_t tokens : {16384, 30000}) {
      bench.Attend("28M attention", dtype, 16, 6, 2, 64, tokens, 0, ScoreKind::kNone);
    }
    bench.Attend("1B attention", dtype, 16, 32, 8, 64, 16384, 0, ScoreKind::kNone);
    bench.Attend("8B attention", dtype, 16, 32, 8, 128, 16384, 0, ScoreKind::kNone);
    bench.Attend("GQA 8 attention", dtype, 16, 32, 4, 128, 16384, 0, ScoreKind::kNone);
    for (const bool by_head : {false, true}) {
      bench.Attend("8B blocks", dtype, 16, 32, 8, 128, 131072, 96, ScoreKind::kNone, 128, by_head);
    }
  }
  bench.Attend("28M attention", DType::kBF16, 16, 6, 2, 64, 30000, 0, ScoreKind::kHeadMax);
  bench.Attend("28M attention", DType::kBF16, 16, 6, 2, 64, 30000, 0, ScoreKind::kLogits);
  bench.Attend("28M attention", DType::kBF16, 16, 6, 2, 64, 30000, 2048, ScoreKind::kNone);
  bench.Attend("1B attention", DType::kBF16, 16, 32, 8, 64, 30000, 2048, ScoreKind::kNone);
  bench.Attend("28M attention", DType::kBF16, 16, 6, 2, 64, 300, 0, ScoreKind::kNone);
  for (const int32_t picks : {32, 64, 128}) {
    bench.Sum("11 x 7B values", DType::kF16, 11, 32, 128, 15360, picks);
    bench.Sum("8B values", DType::kF16, 1, 8, 128, 131072, picks);
  }
  for (int32_t n : {8192, 32768, 131072, 1 << 20, 1 << 22}) bench.Select(n, std::min(2048, n / 8));
  return 0;
}

}  // namespace
}  // namespace omnikv

int main(int argc, char** argv) {
  return omnikv::Main(argc, argv);
}
