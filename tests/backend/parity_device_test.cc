// Parity of what only a device with memory of its own does: working sets of K/V rows that lie on
// the host.
#include <fmt/format.h>

#include <algorithm>

#include "parity_data.h"

namespace omnikv::parity {
namespace {

using ParityDeviceTest = ParityTest;

// What one step of a sequence chose.
struct Chosen {
  std::vector<int32_t> index, bounds;
  std::vector<SeqMeta> seq;
};

// Steps of a growing sequence: `listed` tokens of all but the last `recent`, and those. Then one
// that makes the last row anew and chooses nothing, and one that chooses as before.
std::vector<Chosen> Choices(int32_t steps, int32_t first_len, int32_t listed, int32_t recent,
                            Random& random) {
  std::vector<Chosen> all;
  for (int32_t s = 0; s < steps; ++s) {
    const int32_t len = first_len + s;
    const int32_t split = len - std::min(recent, len);
    const int32_t n = std::min(listed - s % 2, split);
    // Mostly what the step before chose: every third step chooses anew.
    std::vector<int32_t> index = s % 3 == 0 ? random.Ascending(n, split) : all.back().index;
    all.push_back(
        {.index = index,
         .bounds = {split, len},
         .seq = {
             {.q_begin = 0, .q_len = 1, .kv_len = len, .table_off = 2, .prompt_len = first_len}}});
  }
  Chosen nothing = all.back();
  nothing.index.clear();
  nothing.bounds = {0, 0};
  Chosen again = all.back();
  ++again.seq[0].kv_len;
  all.push_back(nothing);
  all.push_back(again);
  return all;
}

TEST_F(ParityDeviceTest, WorkingSet) {
  Random random(201);
  struct Size {
    int32_t first_len, listed, recent, n_slots;
    float simulated = -1;
  };
  for (const Size size :
       {Size{1, 4, 2, 8}, Size{90, 24, 8, 32}, Size{90, 24, 8, 50}, Size{90, 24, 0, 24},
        Size{700, 300, 64, 364}, Size{5000, 2040, 8, 2048}, Size{5000, 2000, 48, 4000},
        Size{40, 100, 4, 104}, Size{90, 24, 8, 32, 0.0f}, Size{90, 24, 0, 24, 0.5f},
        Size{700, 300, 64, 400, 0.3f}, Size{5000, 2040, 8, 2048, 0.6f},
        Size{5000, 2000, 48, 4000, 0.9f}, Size{40, 100, 4, 104, 1.0f}}) {
    const auto choices = Choices(7, size.first_len, size.listed, size.recent, random);
    const int32_t capacity = size.listed + size.recent;
    const int32_t n_blocks = (size.first_len + 7) / 16 + 1;
    std::vector<int32_t> table(2, 1 << 20);  // of another sequence
    for (int32_t b : random.Ascending(n_blocks, n_blocks + 5)) table.push_back(b);
    std::reverse(table.begin() + 2, table.end());
    Check(fmt::format("WorkingSet {} and {} of {}, {} slots{}", size.listed, size.recent,
                      size.first_len, size.n_slots,
                      size.simulated < 0 ? "" : fmt::format(", {} hits by lot", size.simulated)),
          [&](const Execute& run) {
            const auto fresh = [](int32_t n, int32_t value) {
              return std::vector<int32_t>(static_cast<size_t>(n), value);
            };
            auto slot_of = fresh((n_blocks + 5) * 16, -1);
            auto owner = fresh(size.n_slots, -1);
            std::vector<uint32_t> used(static_cast<size_t>(size.n_slots), 0);
            std::vector<uint32_t> clock = {0};
            std::vector<uint64_t> counters = {0, 0};
            auto cursor = fresh(1, 0);
            Outputs outputs;
            for (const Chosen& c : choices) {
              const std::vector<int32_t> count = {static_cast<int32_t>(c.index.size())};
              auto slots = fresh(capacity, -7);
              auto miss_row = fresh(capacity, -7);
              auto miss_slot = fresh(capacity, -7);
              auto n_miss = fresh(1, -7);
              auto own = fresh(1, -7);
              auto own_row = fresh(1, -7);
              auto n_own = fresh(1, -7);
              auto span = fresh(2, -7);
              std::vector<SeqMeta> slot_seq(1);
              run(WorkingSetArgs{.seq = c.seq.data(),
                                 .index = c.index.data(),
                                 .count = count.data(),
                                 .bounds = c.bounds.data(),
                                 .block_table = table.data(),
                                 .block_tokens = 16,
                                 .capacity = capacity,
                                 .n_slots = size.n_slots,
                                 .simulated_hits = size.simulated,
                                 .slot_of = slot_of.data(),
                                 .owner = owner.data(),
                                 .used = used.data(),
                                 .clock = clock.data(),
                                 .cursor = cursor.data(),
                                 .slots = slots.data(),
                                 .miss_row = miss_row.data(),
                                 .miss_slot = miss_slot.data(),
                                 .n_miss = n_miss.data(),
                                 .own = own.data(),
                                 .own_row = own_row.data(),
                                 .n_own = n_own.data(),
                                 .span = span.data(),
                                 .slot_seq = slot_seq.data(),
                                 .counters = counters.data()});
              const SeqMeta& s = slot_seq[0];
              std::vector<int32_t> rest = {n_miss[0],
                                           own[0],
                                           own_row[0],
                                           n_own[0],
                                           span[0],
                                           span[1],
                                           cursor[0],
                                           s.q_begin,
                                           s.q_len,
                                           s.kv_len,
                                           s.table_off,
                                           s.prompt_len,
                                           static_cast<int32_t>(clock[0]),
                                           static_cast<int32_t>(counters[0]),
                                           static_cast<int32_t>(counters[1])};
              outputs.insert(outputs.end(), {{"slots", AsFloats(slots), 0},
                                             {"miss_row", AsFloats(miss_row), 0},
                                             {"miss_slot", AsFloats(miss_slot), 0},
                                             {"slot_of", AsFloats(slot_of), 0},
                                             {"owner", AsFloats(owner), 0},
                                             {"rest", AsFloats(rest), 0}});
            }
            return outputs;
          });
  }
}

TEST_F(ParityDeviceTest, FetchRows) {
  Random random(202);
  constexpr int32_t kFrom = 900;
  constexpr int32_t kTo = 400;
  for (int32_t row_bytes : {16, 36, 38, 512, 2048, 4096}) {
    std::vector<std::byte> from(static_cast<size_t>(kFrom * row_bytes));
    for (std::byte& b : from) b = static_cast<std::byte>(random.Int(0, 255));
    for (int32_t n : {0, 1, 9, 300}) {
      std::vector<int32_t> from_row = random.Ascending(std::max(n, 1), kFrom);
      std::vector<int32_t> to_row = random.Ascending(std::max(n, 1), kTo);
      std::reverse(to_row.begin(), to_row.end());
      const std::vector<int32_t> count = {n};
      Check(fmt::format("FetchRows {} of {} bytes", n, row_bytes), [&](const Execute& run) {
        std::vector<std::byte> to(static_cast<size_t>(kTo * row_bytes), std::byte{0x77});
        run(FetchRowsArgs{.from = from.data(),
                          .to = to.data(),
                          .row_bytes = row_bytes,
                          .from_row = from_row.data(),
                          .to_row = to_row.data(),
                          .n = count.data(),
                          .capacity = 300});
        Array bytes{"to", {}, 0};
        for (std::byte b : to) bytes.values.push_back(static_cast<float>(std::to_integer<int>(b)));
        return Outputs{bytes};
      });
    }
  }
}

// Steps that fill a card of up to 144 multiprocessors: what is then FlashInfer's kernel on a Hopper
// card. Lengths at and beside the edges of its tiles of 64 or 128 tokens and of 128 or 192 queries.
TEST_F(ParityDeviceTest, AttendManyRowsOfManyHeads) {
  Random random(204);
  struct Size {
    std::vector<int32_t> q_len, kv_len;
    int32_t block_tokens;
  };
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    for (int32_t d : {64, 96, 128, 256}) {
      for (const Size& size :
           {Size{{96}, {96}, 64}, Size{{97}, {97}, 16}, Size{{128}, {128}, 128},
            Size{{192}, {193}, 64}, Size{{129}, {511}, 64}, Size{{100}, {512}, 32},
            Size{{101}, {640}, 256}, Size{{100, 0, 200}, {130, 40, 300}, 64}}) {
        const int32_t n_kv_heads = size.block_tokens == 16 ? 24 : 4;
        Attention({72, n_kv_heads, d, d, dtype}, size.q_len, size.kv_len, random, size.block_tokens)
            .Run(fmt::format("dense, blocks of {}", size.block_tokens), AttnPlan::Dense());
      }
    }
  }
}

// The row of a decode step goes to its slot instead of its home, if it has one.
TEST_F(ParityDeviceTest, AppendToASlot) {
  Random random(203);
  constexpr int32_t kDim = 64;
  constexpr int32_t kHeads = 4;
  constexpr int32_t kRows = 12;
  for (DType kv_type : kKvTypes) {
    for (const auto& [dk, norm] : {std::pair<int32_t, QkNorm>{64, QkNorm::kNone},
                                   {128, QkNorm::kNone},
                                   {80, QkNorm::kPerHead},
                                   {24, QkNorm::kFull}}) {
      for (DType format : {DType::kBF16, DType::kQ8_0}) {
        for (int32_t row : {-1, 0, 7}) {
          const Weights wq(format, kHeads * dk, kDim, random);
          const Weights wk(format, 2 * dk, kDim, random);
          const Weights wv(format, 2 * dk, kDim, random);
          const Bank bank(kv_type, 2, dk, dk, 16, {0}, 48, random);
          const Step step({1}, {30}, [&](int32_t s) { return bank.TableOff(s); });
          const ResidualData in(kResiduals[0], 1, kDim, random);
          const auto norms = random.Floats(static_cast<size_t>(kHeads * dk));
          const auto cos_sin = random.Floats(static_cast<size_t>(dk));
          const std::vector<int32_t> slot = {row};
          Check(
              fmt::format("NormQkvRopeAppend {} heads of {} kv {} in slot {}", DTypeName(format),
                          dk, DTypeName(kv_type), row),
              [&, dk = dk, norm = norm](const Execute& run) {
                Bank home = bank;
                Bank slots(kv_type, 2, dk, dk, kRows, {0}, kRows, random);
                std::vector<float> x;
                std::vector<float> q(static_cast<size_t>(kHeads * dk), kPoison);
                std::vector<float> k(static_cast<size_t>(2 * dk), kPoison);
                run(NormQkvRopeAppendArgs{.in = in.On(x),
                                          .wq = wq.Ref(),
                                          .wk = wk.Ref(),
                                          .wv = wv.Ref(),
                                          .qk_norm = norm,
                                          .q_norm = norms.data(),
                                          .k_norm = norms.data(),
                                          .qk_norm_eps = 1e-6f,
                                          .cos_sin = cos_sin.data(),
                                          .n_freq = dk / 2,
                                          .q = q.data(),
                                          .k_out = row == 7 ? k.data() : nullptr,
                                          .n_heads = kHeads,
                                          .kv = home.View(),
                                          .slot = {.base = slots.View().base, .row = slot.data()},
                                          .rows = step.rows.data(),
                                          .seqs = step.seqs.data(),
                                          .n_rows = 1});
                const Array rows = slots.Values();
                return Outputs{
                    {"x", x, 2e-6}, {"q", q, 2e-5}, {"k", k, rows.tolerance}, home.Values(), rows};
              });
        }
      }
    }
  }
}

}  // namespace
}  // namespace omnikv::parity
