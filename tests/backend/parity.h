// The parity harness: a case runs one op on the reference backend, then on the backends that the
// test program names (MakeCandidates), and compares. Outputs start as NaN, so that what an op
// forgets to write is seen. Each case runs twice eagerly, which must give the same bits, and once
// from a recording, which must too.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/kv_format.h"

namespace omnikv::parity {

inline constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

// One output of a case.
struct Array {
  std::string name;
  std::vector<float> values;
  double tolerance = 1e-5;  // of max |difference| / max |reference|; 0: equal
  // How much further one value in 100 may be off, for it lies between two that its type has: a
  // step.
  double rounding = 0;
};

using Outputs = std::vector<Array>;
using Execute = std::function<void(const Op&)>;
// Makes fresh outputs, runs the op and gives what it wrote. Inputs must be the same every time.
using Case = std::function<Outputs(const Execute&)>;

// A backend under test.
struct Candidate {
  std::string name;
  std::unique_ptr<Backend> backend;
  // How far `array`, which `op` wrote, may be from the reference. Null: as the array says.
  std::function<double(const Op& op, const Array& array)> tolerance;
};

// What this test program compares with the reference; called once, before the first test. Where
// there is nothing (kUnsupported) every test is skipped with the reason. parity_cpu.cc: every
// instruction set of the CPU, the best one with 1, 2 and 3 threads. parity_cuda.cc: a card, fast
// and in full precision.
Result<std::vector<Candidate>> MakeCandidates();
// Of the cases of a sweep (parity_sweep_test.cc), the program runs each so-many-th.
int64_t SweepStride();
// Of the candidates, a random case (parity_random_test.cc) runs on each so-many-th.
int64_t CandidateStride();

class ParityTest : public testing::Test {
 protected:
  void SetUp() override;
};

// Runs `run` everywhere and compares with the reference, whose outputs it gives. With a turn, on
// each CandidateStride()-th candidate, other ones each turn.
inline constexpr int64_t kAllCandidates = -1;
Outputs Check(const std::string& name, const Case& run, int64_t turn = kAllCandidates);

// Cases that were checked on all candidates, by the name of their op; and the one under way.
const std::map<std::string, int64_t>& CasesRun();
const std::string& CurrentCase();

// Deterministic inputs.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  std::vector<float> Floats(size_t n, float scale = 1.0f) {
    std::normal_distribution<float> normal(0.0f, scale);
    std::vector<float> v(n);
    for (float& f : v) f = normal(engine_);
    return v;
  }
  int32_t Int(int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(engine_);
  }
  // n different numbers below `below`, ascending.
  std::vector<int32_t> Ascending(int32_t n, int32_t below);

 private:
  std::mt19937_64 engine_;
};

// A weight matrix in any format. Rows end where their memory ends, so that reading past one is
// seen by the address sanitizer.
class Weights {
 public:
  Weights() = default;
  Weights(DType format, int64_t n_out, int64_t n_in, Random& random);
  WeightRef Ref() const;

 private:
  DType format_ = DType::kF32;
  int64_t n_out_ = 0;
  int64_t n_in_ = 0;
  std::vector<std::byte> data_;
};

// K and V of a token in one row, in one each, or in one for each KV head.
enum class Planes { kTogether, kApart, kByHead };
inline constexpr Planes kOtherPlanes[] = {Planes::kApart, Planes::kByHead};

// A bank of K/V rows in shuffled blocks, and the tables of its sequences.
class Bank {
 public:
  // kv_len[s] tokens of each sequence are filled with random values; the rest is poison.
  Bank(DType dtype, int32_t n_kv_heads, int32_t dk, int32_t dv, int32_t block_tokens,
       const std::vector<int32_t>& kv_len, int32_t capacity, Random& random,
       Planes planes = Planes::kTogether);

  KvView View() const;
  // Rows of `values` floats a unit in the same blocks: makes `memory` of all of them, each `fill`.
  StateView States(int32_t unit, int64_t values, std::vector<float>& memory,
                   float fill = kPoison) const;
  int32_t TableOff(int32_t seq) const { return seq * blocks_; }
  size_t n_rows() const { return data_.size() / static_cast<size_t>(View().k.row_bytes); }
  // All rows, those of no token too. A value between two of the bank's type may round either way.
  Array Values() const;

 private:
  DType dtype_;
  int32_t n_kv_heads_, dk_, dv_, block_tokens_, blocks_;
  Planes planes_;
  std::vector<int32_t> table_;
  std::vector<std::byte> data_;
  std::vector<std::byte> values_;  // V, where it lies apart
};

// A step: q_len[s] rows at the end of kv_len[s] tokens.
struct Step {
  Step(const std::vector<int32_t>& q_len, const std::vector<int32_t>& kv_len,
       const std::function<int32_t(int32_t)>& table_off);
  int32_t n_rows() const { return static_cast<int32_t>(rows.size()); }
  int32_t n_seqs() const { return static_cast<int32_t>(seqs.size()); }

  std::vector<RowMeta> rows;
  std::vector<SeqMeta> seqs;
};

}  // namespace omnikv::parity
