// Selection on the card: TopK and IndexScore against the host, their times, and the speed of
// ScoreReduce, Rescore and WorkingSet.
// Usage: cuda_select [lists | index | sets]. With `lists`, TopK of few of many tokens of many lists
// alone; with `index`, the ops of an index of K alone; with `sets`, WorkingSet alone. Fails where a
// choice or a logit is wrong.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda_bench.cuh"

namespace omnikv::cuda {

namespace {

constexpr int kLaunches = 20;  // in a graph

// S[t] of ops.h, as the reference sums it.
std::vector<float> Sums(const std::vector<float>& scores, const std::vector<float>& weights, int n,
                        int64_t stride) {
  const auto window = static_cast<int>(weights.size());
  std::vector<float> sums(static_cast<size_t>(n));
  for (int t = 0; t < n; ++t) {
    double sum = 0;
    for (int age = 0; age < window && t < n - age; ++age) {
      sum += static_cast<double>(weights[static_cast<size_t>(age)]) *
             scores[static_cast<size_t>((n - 1 - age) % window * stride + t)];
    }
    sums[static_cast<size_t>(t)] = static_cast<float>(sum);
  }
  return sums;
}

std::vector<int32_t> Chosen(const std::vector<float>& sums, int k) {
  const auto key = [&](int32_t t) {
    const float v = sums[static_cast<size_t>(t)];
    return std::isnan(v) ? -std::numeric_limits<float>::infinity() : v;
  };
  std::vector<int32_t> order(sums.size());
  std::iota(order.begin(), order.end(), 0);
  if (k < static_cast<int>(order.size())) {
    std::nth_element(order.begin(), order.begin() + k, order.end(), [&](int32_t x, int32_t y) {
      return key(x) != key(y) ? key(x) > key(y) : x < y;
    });
    order.resize(static_cast<size_t>(k));
  }
  std::sort(order.begin(), order.end());
  return order;
}

struct Data {
  const char* name;
  std::function<float(std::mt19937&, size_t)> value;
};

std::vector<Data> AllData() {
  return {{"random", [](auto& r, size_t) { return std::normal_distribution<float>()(r); }},
          {"softmax",  // what attention gives: most of it small
           [](auto& r, size_t) { return std::exp(4 * std::normal_distribution<float>()(r) - 12); }},
          {"equal", [](auto&, size_t) { return 0.25f; }},
          {"ties", [](auto& r, size_t) { return static_cast<float>(r() % 3); }},
          {"broken",
           [](auto& r, size_t i) {
             return i % 5 == 0   ? std::numeric_limits<float>::quiet_NaN()
                    : i % 7 == 0 ? -std::numeric_limits<float>::infinity()
                                 : std::normal_distribution<float>()(r);
           }},
          {"ascending", [](auto&, size_t i) { return static_cast<float>(i); }}};
}

// Whether the choice is right; prints its time.
bool RunTopK(const Device& device, cudaStream_t stream, const Data& data, int n, int k, int window,
             int64_t stride, int lists = 1) {
  std::mt19937 random(static_cast<uint32_t>(n + k));
  const auto of_list = static_cast<size_t>(window * stride);
  std::vector<float> scores(of_list * static_cast<size_t>(lists));
  for (size_t i = 0; i < scores.size(); ++i) scores[i] = data.value(random, i % of_list);
  std::vector<float> weights(static_cast<size_t>(window), 1.0f);
  for (size_t age = 1; age < weights.size(); ++age) weights[age] = 0.9f * weights[age - 1];
  const Memory device_scores = Upload(scores);
  const Memory device_weights = Upload(weights);
  const Memory seqs = Upload(std::vector<SeqMeta>{{0, 1, n, 0, 0}});
  const Memory counts = Upload(std::vector<int32_t>{n, k});
  const Memory count = Allocate(sizeof(int32_t) * static_cast<size_t>(lists));
  const Memory index =
      Allocate(sizeof(int32_t) * static_cast<size_t>(k) * static_cast<size_t>(lists));
  const TopKArgs args{.scores = As<float>(device_scores),
                      .weights = As<float>(device_weights),
                      .seqs = As<SeqMeta>(seqs),
                      .n_candidates = As<int32_t>(counts),
                      .n_pick = As<int32_t>(counts) + 1,
                      .index = As<int32_t>(index),
                      .count = As<int32_t>(count),
                      .stride = stride,
                      .window = window,
                      .lists = lists,
                      .capacity = k,
                      .n_seqs = 1};
  const Memory scratch = Allocate(TopKScratch(args, device));
  const Launch launch{.device = &device, .stream = stream, .scratch = scratch.get()};
  const double us = Microseconds(stream, kLaunches, [&](int) { TopK(args, launch); });

  bool right = true;
  for (const int list : {0, lists - 1}) {
    const std::vector<float> own(scores.begin() + static_cast<ptrdiff_t>(of_list) * list,
                                 scores.begin() + static_cast<ptrdiff_t>(of_list) * (list + 1));
    const std::vector<int32_t> want = Chosen(Sums(own, weights, n, stride), k);
    std::vector<int32_t> got(want.size());
    int32_t chosen = 0;
    CheckLaunch(cudaMemcpy(got.data(), args.index + int64_t{list} * k, got.size() * 4,
                           cudaMemcpyDeviceToHost),
                "index");
    CheckLaunch(cudaMemcpy(&chosen, args.count + list, 4, cudaMemcpyDeviceToHost), "count");
    right &= got == want && chosen == static_cast<int32_t>(want.size());
  }
  std::printf("TopK %-9s %3d lists n %8d of %8lld k %5d window %2d  %7.2f us  %s\n", data.name,
              lists, n, static_cast<long long>(stride), k, window, us, right ? "right" : "WRONG");
  return right;
}

void RunScoreReduce(const Device& device, cudaStream_t stream, int n, int n_heads, bool softmax) {
  constexpr int kCopies = 8;  // in turn, more than the cache holds
  const size_t values = static_cast<size_t>(n) * static_cast<size_t>(n_heads);
  const Memory logits = Allocate(4 * values * kCopies);
  CheckLaunch(cudaMemset(logits.get(), 0x3e, 4 * values * kCopies), "fill");
  const Memory lse = Upload(std::vector<float>(static_cast<size_t>(n_heads), 1.5f));
  const Memory out = Allocate(4 * static_cast<size_t>(n));
  const Memory rows = Upload(std::vector<RowMeta>{{0, n - 1}});
  ScoreReduceArgs args{.lse = softmax ? As<float>(lse) : nullptr,
                       .out = As<float>(out),
                       .rows = As<RowMeta>(rows),
                       .stride = n,
                       .n_heads = n_heads,
                       .n_rows = 1};
  const double us = Microseconds(stream, kLaunches, [&](int i) {
    args.logits = As<float>(logits) + static_cast<size_t>(i % kCopies) * values;
    ScoreReduce(args, {.device = &device, .stream = stream});
  });
  std::printf("ScoreReduce %s n %8d heads %2d  %7.2f us  %6.0f GB/s\n",
              softmax ? "softmax" : "raw    ", n, n_heads, us,
              4e-3 * (static_cast<double>(values) + n) / us);
}

// IndexScore of `args` in units, and of the tokens of some of them; `logits` are those of all
// tokens. Whether they are the same; prints its times.
bool RunIndexUnits(const IndexScoreArgs& args, const std::vector<float>& logits,
                   const Device& device, cudaStream_t stream) {
  const auto n = static_cast<size_t>(args.stride);
  const size_t n_units = n / kIndexUnit;
  const auto n_heads = static_cast<size_t>(args.n_heads);
  IndexScoreArgs units = args;
  units.unit = kIndexUnit;
  units.stride = static_cast<int64_t>(n_units);
  const Memory scratch = Allocate(IndexScoreScratch(units, device));
  const Launch launch{.device = &device, .stream = stream, .scratch = scratch.get()};
  const double units_us = Microseconds(stream, kLaunches, [&](int) { IndexScore(units, launch); });
  std::vector<float> got(n_heads * n_units);
  CheckLaunch(cudaMemcpy(got.data(), units.logits, 4 * got.size(), cudaMemcpyDefault), "units");
  bool right = true;
  for (size_t i = 0; i < got.size(); ++i) {
    const float* of = logits.data() + i / n_units * n + i % n_units * kIndexUnit;
    right &= got[i] == *std::max_element(of, of + kIndexUnit);
  }

  std::vector<int32_t> chosen(n_units);
  std::iota(chosen.begin(), chosen.end(), 0);
  std::shuffle(chosen.begin(), chosen.end(), std::mt19937(11));
  chosen.resize(std::min<size_t>(n_units, 8192));
  std::sort(chosen.begin(), chosen.end());
  std::vector<int32_t> list;
  for (const int32_t u : chosen) {
    for (int32_t j = 0; j < kIndexUnit; ++j) list.push_back(u * kIndexUnit + j);
  }
  const auto n_listed = static_cast<int32_t>(list.size());
  const Memory index = Upload(list);
  const Memory count = Upload(std::vector<int32_t>{n_listed});
  IndexScoreArgs some = args;
  some.only = {.index = As<int32_t>(index), .count = As<int32_t>(count), .capacity = n_listed};
  CheckLaunch(cudaMemset(args.logits, 0, 4 * logits.size()), "clear");
  const double some_us = Microseconds(stream, kLaunches, [&](int) { IndexScore(some, launch); });
  got.resize(logits.size());
  CheckLaunch(cudaMemcpy(got.data(), args.logits, 4 * got.size(), cudaMemcpyDefault), "listed");
  for (size_t h = 0; h < n_heads; ++h) {
    for (const int32_t t : list) {
      const size_t at = h * n + static_cast<size_t>(t);
      right &= got[at] == logits[at];
    }
  }
  const auto gbps = [&](size_t rows, double us) {
    return 1e-3 * static_cast<double>(rows) * static_cast<double>(args.index.row_bytes) / us;
  };
  std::printf(
      "  in units %7.2f us  %6.0f GB/s of the index; %6d listed  %6.2f us  %6.0f GB/s  %s\n",
      units_us, gbps(n, units_us), n_listed, some_us, gbps(list.size(), some_us),
      right ? "right" : "WRONG");
  return right;
}

// IndexScore of one row of 32 query heads by 8 KV heads of 128 values, in blocks of 64 tokens whose
// rows repeat. Whether logits and their sums are right; prints its time.
bool RunIndexScore(const Device& device, cudaStream_t stream, int n) {
  constexpr int kKvHeads = 8;
  constexpr int kHeads = 4 * kKvHeads;
  constexpr int kDk = 128;
  constexpr int kBlock = 64;
  constexpr int kRows = 4096;  // that differ
  constexpr float kScale = 0.09f;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const auto row_bytes = static_cast<size_t>(IndexRowBytes(kKvHeads, kDk));
  const auto ranges_at = static_cast<size_t>(IndexRangesAt(kKvHeads, kDk));
  std::vector<uint8_t> pattern(kRows * row_bytes);
  std::vector<float> q(size_t{kHeads} * kDk);
  for (float& v : q) v = normal(random);
  std::vector<float> logits_of(size_t{kRows} * kHeads);
  for (size_t row = 0; row < kRows; ++row) {
    uint8_t* const codes = pattern.data() + row * row_bytes;
    for (size_t i = 0; i < ranges_at; ++i) codes[i] = static_cast<uint8_t>(random());
    for (size_t g = 0; g < kKvHeads; ++g) {
      const float low = normal(random) - 1.5f;
      const IndexRange range = RangeOf(low, low + 3.0f + 0.75f * std::fabs(normal(random)));
      std::memcpy(codes + ranges_at + g * sizeof(range), &range, sizeof(range));
      for (size_t h = 4 * g; h < 4 * g + 4; ++h) {
        double dot = 0;
        for (size_t i = 0; i < kDk; ++i) {
          const uint8_t both = codes[g * kDk / 2 + i % (kDk / 2)];
          dot += static_cast<double>(q[h * kDk + i]) *
                 (range.zero() +
                  range.scale() * static_cast<float>(i < kDk / 2 ? both & 15 : both >> 4));
        }
        logits_of[row * kHeads + h] = static_cast<float>(kScale * dot);
      }
    }
  }
  std::vector<int32_t> table(static_cast<size_t>(n) / kBlock);
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), random);
  const Memory index = Allocate(static_cast<size_t>(n) * row_bytes);
  for (size_t at = 0; at < static_cast<size_t>(n); at += kRows) {
    CheckLaunch(
        cudaMemcpy(index.get() + at * row_bytes, pattern.data(), pattern.size(), cudaMemcpyDefault),
        "upload");
  }
  const Memory blocks = Upload(table);
  const Memory queries = Upload(q);
  const Memory rows = Upload(std::vector<RowMeta>{{0, n - 1}});
  const Memory seqs = Upload(std::vector<SeqMeta>{{0, 1, n, 0, 0}});
  const Memory logits = Allocate(sizeof(float) * kHeads * static_cast<size_t>(n));
  const Memory lse = Allocate(sizeof(float) * kHeads);
  const IndexScoreArgs args{.q = As<float>(queries),
                            .index = {.base = index.get(),
                                      .block_table = As<int32_t>(blocks),
                                      .block_units = kBlock,
                                      .row_bytes = static_cast<int64_t>(row_bytes)},
                            .rows = As<RowMeta>(rows),
                            .seqs = As<SeqMeta>(seqs),
                            .logits = As<float>(logits),
                            .lse = As<float>(lse),
                            .stride = n,
                            .n_rows = 1,
                            .n_heads = kHeads,
                            .n_kv_heads = kKvHeads,
                            .dk = kDk,
                            .scale = kScale};
  const Memory scratch = Allocate(IndexScoreScratch(args, device));
  const Launch launch{.device = &device, .stream = stream, .scratch = scratch.get()};
  const double us = Microseconds(stream, kLaunches, [&](int) { IndexScore(args, launch); });

  std::vector<float> got(kHeads * static_cast<size_t>(n));
  std::vector<float> got_lse(kHeads);
  CheckLaunch(cudaMemcpy(got.data(), args.logits, 4 * got.size(), cudaMemcpyDefault), "logits");
  CheckLaunch(cudaMemcpy(got_lse.data(), args.lse, 4 * got_lse.size(), cudaMemcpyDefault), "lse");
  double furthest = 0;
  for (size_t h = 0; h < kHeads; ++h) {
    double sum = 0;
    for (size_t t = 0; t < static_cast<size_t>(n); ++t) {
      const size_t row = static_cast<size_t>(table[t / kBlock]) * kBlock + t % kBlock;
      const float want = logits_of[row % kRows * kHeads + h];
      furthest = std::fmax(furthest, std::fabs(got[h * static_cast<size_t>(n) + t] - want));
      sum += std::exp(static_cast<double>(want));
    }
    furthest = std::fmax(furthest, std::fabs(got_lse[h] - std::log(sum)));
  }
  const bool right = furthest < 1e-4;
  std::printf(
      "IndexScore n %8d  %7.2f us  %6.0f GB/s of the index, %6.0f with the logits  %s %.1e\n", n,
      us, 1e-3 * n * static_cast<double>(row_bytes) / us,
      1e-3 * n * static_cast<double>(row_bytes + sizeof(float) * kHeads) / us,
      right ? "right" : "WRONG", furthest);
  return right & RunIndexUnits(args, got, device, stream);
}

// Rescore of some of 32K tokens, whose K of 8 KV heads of 128 values is q8_0 (all zeros) in rows of
// blocks of one token.
void RunRescore(const Device& device, cudaStream_t stream, int n_listed) {
  constexpr int kKvHeads = 8;
  constexpr int kHeads = 4 * kKvHeads;
  constexpr int kDk = 128;
  constexpr int kTokens = 1 << 15;
  constexpr int kLogits = 1 << 20;  // tokens that the logits have room for
  constexpr int64_t kRowBytes = kKvHeads * (kDk + 2 * kDk / kBlockValues);
  std::mt19937 random(13);
  std::vector<int32_t> table(kTokens);
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), random);
  std::vector<int32_t> list = table;
  list.resize(static_cast<size_t>(n_listed));
  std::sort(list.begin(), list.end());
  const Memory k = Allocate(kTokens * static_cast<size_t>(kRowBytes));
  const Memory blocks = Upload(table);
  const Memory queries = Upload(std::vector<float>(kHeads * kDk, 0.5f));
  const Memory rows = Upload(std::vector<RowMeta>{{0, kTokens - 1}});
  const Memory seqs = Upload(std::vector<SeqMeta>{{0, 1, kTokens, 0, 0}});
  const Memory logits = Allocate(sizeof(float) * kHeads * size_t{kLogits});
  const Memory lse = Upload(std::vector<float>(kHeads, 10.0f));
  const Memory index = Upload(list);
  const Memory count = Upload(std::vector<int32_t>{n_listed});
  RescoreArgs args{
      .q = As<float>(queries),
      .rows = As<RowMeta>(rows),
      .seqs = As<SeqMeta>(seqs),
      .tokens = {.index = As<int32_t>(index), .count = As<int32_t>(count), .capacity = n_listed},
      .logits = As<float>(logits),
      .lse = As<float>(lse),
      .stride = kLogits,
      .n_rows = 1,
      .n_seqs = 1,
      .n_heads = kHeads,
      .scale = 0.09f};
  args.kv.k = {.base = k.get(),
               .row_bytes = kRowBytes,
               .head_bytes = kDk,
               .dtype = DType::kQ8_0,
               .scales = k.get() + kKvHeads * kDk,
               .scale_head_bytes = 2 * kDk / kBlockValues};
  args.kv.block_table = As<int32_t>(blocks);
  args.kv.block_tokens = 1;
  args.kv.n_kv_heads = kKvHeads;
  args.kv.dk = kDk;
  const Memory scratch = Allocate(RescoreScratch(args, device));
  const Launch launch{.device = &device, .stream = stream, .scratch = scratch.get()};
  const double us = Microseconds(stream, kLaunches, [&](int) { Rescore(args, launch); });
  std::printf("Rescore of %5d tokens  %7.2f us  %6.0f GB/s of K\n", n_listed, us,
              1e-3 * n_listed * static_cast<double>(kRowBytes) / us);
}

// Selections of n of 2.7 n tokens anew each step, of which slots for 2 n have three quarters.
void RunWorkingSet(const Device& device, cudaStream_t stream, int n) {
  const int n_slots = 2 * n;
  const int max_tokens = 8 * n / 3;
  const auto zeros = [](int words) {
    return Upload(std::vector<int32_t>(static_cast<size_t>(words)));
  };
  const auto none = [](int words) {
    return Upload(std::vector<int32_t>(static_cast<size_t>(words), -1));
  };
  std::mt19937 random(7);
  std::vector<int32_t> tokens(static_cast<size_t>(max_tokens));
  std::iota(tokens.begin(), tokens.end(), 0);
  std::vector<int32_t> index;
  for (int i = 0; i < kLaunches; ++i) {
    std::vector<int32_t> some;
    std::sample(tokens.begin(), tokens.end(), std::back_inserter(some), n, random);
    index.insert(index.end(), some.begin(), some.end());
  }
  const Memory lists = Upload(index);
  const Memory count = Upload(std::vector<int32_t>{n});
  const Memory bounds = Upload(std::vector<int32_t>{max_tokens - 1, max_tokens});
  const Memory table = Upload(tokens);
  const Memory seqs = Upload(std::vector<SeqMeta>{{.q_len = 1, .kv_len = max_tokens}});
  const Memory slot_of = none(max_tokens);
  const Memory owner = none(n_slots);
  const Memory used = zeros(n_slots);
  const Memory clock = zeros(1);
  const Memory slots = zeros(n + 1);
  const Memory miss_row = zeros(n + 1);
  const Memory miss_slot = zeros(n + 1);
  const Memory n_miss = zeros(1);
  const Memory own = zeros(3);
  const Memory span = zeros(2);
  const Memory slot_seqs = Upload(std::vector<SeqMeta>(1));
  const Memory counters = zeros(6);
  WorkingSetArgs args{.seqs = As<SeqMeta>(seqs),
                      .count = As<int32_t>(count),
                      .bounds = As<int32_t>(bounds),
                      .block_table = As<int32_t>(table),
                      .block_tokens = 1,
                      .index_stride = n,
                      .capacity = n + 1,
                      .n_slots = n_slots,
                      .max_tokens = max_tokens,
                      .slot_of = As<int32_t>(slot_of),
                      .owner = As<int32_t>(owner),
                      .used = As<uint32_t>(used),
                      .clock = As<uint32_t>(clock),
                      .slots = As<int32_t>(slots),
                      .miss_row = As<int32_t>(miss_row),
                      .miss_slot = As<int32_t>(miss_slot),
                      .n_miss = As<int32_t>(n_miss),
                      .own = As<int32_t>(own),
                      .own_row = As<int32_t>(own) + 1,
                      .n_own = As<int32_t>(own) + 2,
                      .span = As<int32_t>(span),
                      .slot_seqs = As<SeqMeta>(slot_seqs),
                      .counters = As<uint64_t>(counters)};
  const Memory scratch = Allocate(WorkingSetScratch(args));
  const Launch launch{.device = &device, .stream = stream, .scratch = scratch.get()};
  const double us = Microseconds(stream, kLaunches, [&](int i) {
    args.index = As<int32_t>(lists) + int64_t{i} * n;
    WorkingSet(args, launch);
  });
  uint64_t of[2];
  CheckLaunch(cudaMemcpy(of, counters.get(), sizeof(of), cudaMemcpyDefault), "counters");
  std::printf("WorkingSet of %6d tokens, %6d slots, %4.1f %% hits  %7.2f us\n", n, n_slots,
              100 - 100 * static_cast<double>(of[1]) / static_cast<double>(of[0]), us);
}

void RunWorkingSets(const Device& device, cudaStream_t stream) {
  for (const int n : {300, 1000, 2048, 4096, 10000, 20000}) RunWorkingSet(device, stream, n);
}

bool RunChoices(const Device& device, cudaStream_t stream) {
  bool right = true;
  for (const Data& data : AllData()) {
    for (int n : {4096, 1 << 17, (1 << 17) + 48, 1 << 20, (1 << 20) + 48, 1 << 22}) {
      for (int k : {1024, 2048, 8192}) right &= RunTopK(device, stream, data, n, k, 1, n);
    }
    right &= RunTopK(device, stream, data, 1 << 17, 2048, 1, 1 << 20);  // room for more
    right &= RunTopK(device, stream, data, 99991, 30011, 1, 100003);    // nothing aligned
    right &= RunTopK(device, stream, data, 300, 2048, 1, 1 << 17);      // all of them
    right &= RunTopK(device, stream, data, 1 << 17, 2048, 8, 1 << 17);
  }
  for (int n : {1 << 12, 1 << 17, 1 << 20}) {
    for (bool softmax : {true, false}) RunScoreReduce(device, stream, n, 32, softmax);
  }
  return right;
}

// Few of many: query heads that choose by themselves, alone and in a batch.
bool RunLists(const Device& device, cudaStream_t stream) {
  bool right = true;
  const std::pair<int, int> shapes[] = {{15360, 32},  {15360, 384}, {32768, 32}, {32768, 384},
                                        {131072, 32}, {131120, 32}, {131072, 8}, {131072, 1}};
  for (const Data& data : AllData()) {
    for (const auto& [n, lists] : shapes) {
      for (int k : {32, 128, 256}) right &= RunTopK(device, stream, data, n, k, 1, n, lists);
    }
  }
  return right;
}

bool RunIndex(const Device& device, cudaStream_t stream) {
  bool right = true;
  for (int n : {1 << 15, 1 << 17, 1 << 20}) right &= RunIndexScore(device, stream, n);
  for (int n : {256, 2048, 8192}) RunRescore(device, stream, n);
  return right;
}

bool RunAll(const std::string& part) {
  const Device device = BenchDevice();
  cudaStream_t stream = nullptr;
  CheckLaunch(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  bool right = true;
  if (part.empty()) right &= RunChoices(device, stream);
  if (part.empty() || part == "sets") RunWorkingSets(device, stream);
  if (part.empty() || part == "lists") right &= RunLists(device, stream);
  if (part.empty() || part == "index") right &= RunIndex(device, stream);
  cudaStreamDestroy(stream);
  return right;
}

}  // namespace
}  // namespace omnikv::cuda

int main(int argc, char** argv) {
  return omnikv::cuda::RunAll(argc > 1 ? argv[1] : "") ? 0 : 1;
}
