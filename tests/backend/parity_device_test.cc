// Parity of what only a device with memory of its own does: working sets of K/V rows that lie on
// the host.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <numeric>

#include "parity_data.h"

namespace omnikv::parity::parity_device_test {
namespace {

using ParityDeviceTest = ParityTest;

// A step of one sequence: what it selects, ascending tokens and then the range of its last ones.
struct Selected {
  std::vector<int32_t> index, bounds;
  SeqMeta seq;
};

// Steps of a growing sequence: `listed` tokens of all but the last `recent`, and those. Then one
// that makes the last row anew and selects nothing, one without the sequence, and one that selects
// as before.
std::vector<Selected> Selections(int32_t steps, int32_t first_len, int32_t listed, int32_t recent,
                                 int32_t table_off, Random& random) {
  std::vector<Selected> all;
  for (int32_t s = 0; s < steps; ++s) {
    const int32_t len = first_len + s;
    const int32_t split = len - std::min(recent, len);
    const int32_t n = std::min(listed - s % 2, split);
    // Mostly what the step before selected: every third step selects anew.
    std::vector<int32_t> index = s % 3 == 0 ? random.Ascending(n, split) : all.back().index;
    all.push_back({.index = index,
                   .bounds = {split, len},
                   .seq = {.q_begin = s % 2,
                           .q_len = 1,
                           .kv_len = len,
                           .table_off = table_off,
                           .prompt_len = first_len}});
  }
  Selected nothing = all.back();
  nothing.index.clear();
  nothing.bounds = {0, 0};
  Selected absent = all.back();
  absent.seq.q_len = 0;
  Selected again = all.back();
  ++again.seq.kv_len;
  all.insert(all.end(), {nothing, absent, again});
  return all;
}

// `clock` steps of a sequence have been: its slots have most of the first tokens, read at any time.
struct Before {
  std::vector<int32_t> slot_of, owner;
  std::vector<uint32_t> used;

  Before(int32_t clock, int32_t n_tokens, int32_t n_slots, int32_t max_tokens, Random& random)
      : slot_of(static_cast<size_t>(max_tokens), -1),
        owner(static_cast<size_t>(n_slots), -1),
        used(static_cast<size_t>(n_slots)) {
    if (clock == 0) return;
    const int32_t n = std::min(n_slots - n_slots / 8, n_tokens);
    const std::vector<int32_t> tokens = random.Ascending(n, n_tokens);
    const std::vector<int32_t> slots = random.Ascending(n, n_slots);
    for (size_t i = 0; i < tokens.size(); ++i) {
      const auto slot = static_cast<size_t>(slots[slots.size() - 1 - i]);
      slot_of[static_cast<size_t>(tokens[i])] = static_cast<int32_t>(slot);
      owner[slot] = tokens[i];
      used[slot] = SlotCame(static_cast<uint32_t>(random.Int(1, 2 * clock))) |
                   static_cast<uint32_t>(random.Int(0, kMostFound));
    }
  }
};

TEST_F(ParityDeviceTest, WorkingSet) {
  Random random(201);
  struct Size {
    int32_t n_seqs, first_len, listed, recent, n_slots;
    float simulated = -1;
    int32_t clock = 0;  // steps that were before
    int32_t ahead = 0;  // with average scores, and so many rows ahead at most
  };
  for (const Size size :
       {Size{1, 1, 4, 2, 8}, Size{1, 90, 24, 8, 32}, Size{1, 90, 24, 8, 50}, Size{1, 90, 24, 0, 24},
        Size{3, 90, 24, 8, 50}, Size{1, 700, 300, 64, 364}, Size{1, 5000, 2040, 8, 2048},
        Size{1, 5000, 2000, 48, 4000}, Size{4, 5000, 2000, 48, 4000}, Size{16, 700, 300, 64, 400},
        Size{1, 40, 100, 4, 104}, Size{1, 90, 24, 8, 32, 0.0f}, Size{1, 90, 24, 0, 24, 0.5f},
        Size{3, 700, 300, 64, 400, 0.3f}, Size{1, 5000, 2040, 8, 2048, 0.6f},
        Size{8, 5000, 2000, 48, 4000, 0.9f}, Size{1, 40, 100, 4, 104, 1.0f},
        // Ages of a few steps, of all that are told apart, and mostly beyond.
        Size{1, 90, 24, 8, 50, -1, 3}, Size{1, 90, 24, 8, 50, -1, 3, 1},
        Size{3, 700, 300, 64, 400, -1, 10, 12}, Size{3, 700, 300, 64, 400, -1, 0, 36},
        Size{1, 5000, 2000, 48, 4000, -1, 500}, Size{3, 5000, 2000, 48, 3000, -1, 500, 64},
        Size{1, 5000, 2000, 48, 4000, -1, 4000, 63}, Size{1, 30000, 1200, 48, 20000, -1, 6},
        Size{2, 30000, 1200, 48, 20001, -1, 700, 40}, Size{1, 90, 24, 8, 33, 0.0f, 3, 1},
        Size{3, 700, 300, 64, 800, -1, 10, 300}, Size{2, 5000, 2000, 48, 4100, 0.6f, 3, 64},
        // More tokens than a block of threads takes at once, in several parts.
        Size{1, 5000, 2000, 0, 2100, -1, 30, 30}, Size{2, 30000, 9800, 256, 20000, -1, 700, 1},
        Size{1, 30000, 9800, 0, 10300, -1, 30, 300}, Size{2, 30000, 9800, 256, 24000, -1, 30, 1100},
        Size{2, 30000, 9800, 256, 20000, 0.6f, 3, 300},
        Size{1, 160000, 36000, 64, 70000, -1, 30, 1125}}) {
    const int32_t capacity = size.listed + size.recent;
    const int32_t max_tokens = size.first_len + 10;
    const int32_t n_blocks = max_tokens / 16 + 1;
    std::vector<int32_t> table(2, 1 << 20);  // of another sequence
    std::vector<std::vector<Selected>> steps;
    std::vector<Before> before;
    constexpr int32_t kWindow = 2;
    std::vector<std::vector<float>> scores;  // [steps]: [n_seqs, kWindow, max_tokens], 0 to 1
    for (int32_t q = 0; q < size.n_seqs; ++q) {
      // Of lengths that differ, and each absent from another step.
      steps.push_back(Selections(7, size.first_len - std::min(q, size.first_len / 2), size.listed,
                                 size.recent, static_cast<int32_t>(table.size()), random));
      std::rotate(steps.back().end() - 3, steps.back().end() - 3 + q % 3, steps.back().end());
      for (int32_t b : random.Ascending(n_blocks, n_blocks + 5)) table.push_back(b);
      std::reverse(table.end() - n_blocks, table.end());
      before.emplace_back(size.clock, size.first_len / 2, size.n_slots, max_tokens, random);
    }
    for (size_t step = 0; size.ahead > 0 && step < steps[0].size(); ++step) {
      scores.push_back(random.Floats(static_cast<size_t>(size.n_seqs * kWindow * max_tokens), 8));
      for (float& score : scores.back()) score = score > 15 ? 0 : std::exp(-std::abs(score));
    }
    Check(
        fmt::format("WorkingSet {} and {} of {}, {} slots, {} sequences, {} steps before{}{}",
                    size.listed, size.recent, size.first_len, size.n_slots, size.n_seqs, size.clock,
                    size.ahead > 0 ? fmt::format(", {} rows ahead", size.ahead) : "",
                    size.simulated < 0 ? "" : fmt::format(", {} hits by lot", size.simulated)),
        [&](const Execute& run) {
          const auto filled = [&](int32_t each, auto value) {
            return std::vector(static_cast<size_t>(size.n_seqs * each), value);
          };
          std::vector<int32_t> slot_of, owner;
          std::vector<uint32_t> used;
          for (const Before& b : before) {
            slot_of.insert(slot_of.end(), b.slot_of.begin(), b.slot_of.end());
            owner.insert(owner.end(), b.owner.begin(), b.owner.end());
            used.insert(used.end(), b.used.begin(), b.used.end());
          }
          auto clock = filled(1, static_cast<uint32_t>(size.clock));
          auto counters = filled(3, uint64_t{0});
          auto average = filled(max_tokens, uint32_t{0});
          Outputs outputs;
          for (size_t step = 0; step < steps[0].size(); ++step) {
            auto index = filled(capacity, 0);
            auto count = filled(1, 0);
            std::vector<int32_t> bounds;
            std::vector<SeqMeta> seqs;
            for (size_t q = 0; q < steps.size(); ++q) {
              const Selected& s = steps[q][step];
              std::copy(s.index.begin(), s.index.end(),
                        index.begin() + static_cast<ptrdiff_t>(q) * capacity);
              count[q] = static_cast<int32_t>(s.index.size());
              bounds.insert(bounds.end(), s.bounds.begin(), s.bounds.end());
              seqs.push_back(s.seq);
            }
            auto ahead = filled(size.ahead, -7);
            if (size.ahead > 0) {
              std::vector<int32_t> n_candidates;
              for (size_t q = 0; q < steps.size(); ++q) n_candidates.push_back(bounds[2 * q]);
              run(AverageScoresArgs{.seqs = seqs.data(),
                                    .scores = scores[step].data(),
                                    .n_candidates = n_candidates.data(),
                                    .index = index.data(),
                                    .count = count.data(),
                                    .stride = max_tokens,
                                    .window = kWindow,
                                    .index_stride = capacity,
                                    .max_ahead = size.ahead,
                                    .n_slots = size.n_slots,
                                    .max_tokens = max_tokens,
                                    .n_seqs = size.n_seqs,
                                    .slot_of = slot_of.data(),
                                    .clock = clock.data(),
                                    .average = average.data(),
                                    .used = used.data(),
                                    .ahead = ahead.data()});
              std::vector<int32_t> halves;
              for (const uint32_t bits : average) {
                halves.push_back(static_cast<int32_t>(bits >> 16));
                halves.push_back(static_cast<int32_t>(bits & 0xffff));
              }
              outputs.insert(outputs.end(),
                             {{"average", AsFloats(halves), 0}, {"ahead", AsFloats(ahead), 0}});
            }
            auto slots = filled(capacity, -7);
            auto miss_row = filled(capacity, -7);
            auto miss_slot = filled(capacity, -7);
            auto n_miss = filled(1, -7);
            auto own = filled(1, -7);
            auto own_row = filled(1, -7);
            auto n_own = filled(1, -7);
            auto span = filled(2, -7);
            auto slot_seqs = filled(1, SeqMeta{});
            auto ahead_row = filled(size.ahead, -7);
            auto ahead_slot = filled(size.ahead, -7);
            auto n_ahead = filled(1, -7);
            run(WorkingSetArgs{.seqs = seqs.data(),
                               .index = index.data(),
                               .count = count.data(),
                               .bounds = bounds.data(),
                               .block_table = table.data(),
                               .block_tokens = 16,
                               .index_stride = capacity,
                               .capacity = capacity,
                               .n_slots = size.n_slots,
                               .max_tokens = max_tokens,
                               .n_seqs = size.n_seqs,
                               .simulated_hits = size.simulated,
                               .ahead = size.ahead > 0 ? ahead.data() : nullptr,
                               .max_ahead = size.ahead,
                               .slot_of = slot_of.data(),
                               .owner = owner.data(),
                               .used = used.data(),
                               .clock = clock.data(),
                               .slots = slots.data(),
                               .miss_row = miss_row.data(),
                               .miss_slot = miss_slot.data(),
                               .n_miss = n_miss.data(),
                               .own = own.data(),
                               .own_row = own_row.data(),
                               .n_own = n_own.data(),
                               .span = span.data(),
                               .slot_seqs = slot_seqs.data(),
                               .ahead_row = ahead_row.data(),
                               .ahead_slot = ahead_slot.data(),
                               .n_ahead = n_ahead.data(),
                               .counters = counters.data()});
            std::vector<int32_t> rest = span;
            for (const auto& more : {n_miss, own, own_row, n_own, n_ahead}) {
              rest.insert(rest.end(), more.begin(), more.end());
            }
            for (size_t q = 0; q < steps.size(); ++q) {
              const SeqMeta& s = slot_seqs[q];
              for (const int64_t value :
                   {int64_t{s.q_begin}, int64_t{s.q_len}, int64_t{s.kv_len}, int64_t{s.table_off},
                    int64_t{s.prompt_len}, int64_t{clock[q]}, static_cast<int64_t>(counters[3 * q]),
                    static_cast<int64_t>(counters[3 * q + 1]),
                    static_cast<int64_t>(counters[3 * q + 2])}) {
                rest.push_back(static_cast<int32_t>(value));
              }
            }
            outputs.insert(outputs.end(), {{"slots", AsFloats(slots), 0},
                                           {"miss_row", AsFloats(miss_row), 0},
                                           {"miss_slot", AsFloats(miss_slot), 0},
                                           {"slot_of", AsFloats(slot_of), 0},
                                           {"owner", AsFloats(owner), 0},
                                           {"used", AsFloats({used.begin(), used.end()}), 0},
                                           {"ahead_row", AsFloats(ahead_row), 0},
                                           {"ahead_slot", AsFloats(ahead_slot), 0},
                                           {"rest", AsFloats(rest), 0}});
          }
          return outputs;
        });
  }
}

// Sequences of other lengths, one of them without a row in the step.
TEST_F(ParityDeviceTest, PiecesOfUnits) {
  Random random(203);
  struct Size {
    int32_t unit, piece, units, n_seqs;
  };
  for (const Size& size :
       {Size{128, 64, 97, 3}, {16, 16, 300, 2}, {256, 64, 1, 1}, {1, 1, 40, 4}}) {
    constexpr int32_t kBlock = 64;
    const int32_t per_unit = size.unit / size.piece;
    const int32_t per_block = kBlock / size.piece;
    const int32_t capacity = size.units * per_unit;
    const int32_t most_units = 3 * size.units;
    const int32_t stride = most_units * per_unit;
    const int32_t seq_blocks = (stride * size.piece + kBlock - 1) / kBlock;
    std::vector<SeqMeta> seqs;
    std::vector<int32_t> count, bounds, index, slots, last;
    for (int32_t s = 0; s < size.n_seqs; ++s) {
      const int32_t n_units = random.Int(2, most_units);
      const int32_t recent = random.Int(1, n_units - 1);
      const int32_t kv_len = n_units * size.unit - random.Int(0, size.unit - 1);
      const int32_t listed = random.Int(0, std::min(size.units, n_units - recent));
      seqs.push_back({.q_begin = s,
                      .q_len = s == 1 ? 0 : 1,
                      .kv_len = kv_len,
                      .table_off = (size.n_seqs - 1 - s) * seq_blocks,
                      .prompt_len = kv_len / 2});
      count.push_back(listed);
      bounds.insert(bounds.end(), {(n_units - recent) * size.unit, kv_len});
      std::vector<int32_t> units = random.Ascending(listed, n_units - recent);
      units.resize(static_cast<size_t>(size.units), -7);
      index.insert(index.end(), units.begin(), units.end());
    }
    for (int32_t i = 0; i < size.n_seqs * capacity; ++i) slots.push_back(random.Int(0, 9999));
    for (int32_t i = 0; i < size.n_seqs * seq_blocks; ++i) last.push_back(random.Int(0, 99));
    Check(
        fmt::format("pieces of {} in units of {}", size.piece, size.unit), [&](const Execute& run) {
          std::vector<int32_t> pieces(slots.size(), -7), n_pieces(seqs.size(), -7);
          std::vector<int32_t> table(static_cast<size_t>(size.n_seqs * stride), -7);
          std::vector<SeqMeta> by_piece(seqs.size()), by_table(seqs.size());
          run(ListPiecesArgs{.seqs = seqs.data(),
                             .index = index.data(),
                             .count = count.data(),
                             .to_index = pieces.data(),
                             .to_count = n_pieces.data(),
                             .by_piece = by_piece.data(),
                             .by_table = by_table.data(),
                             .capacity = size.units,
                             .to_capacity = capacity,
                             .per_unit = per_unit,
                             .piece_tokens = size.piece,
                             .table_stride = stride,
                             .n_seqs = size.n_seqs});
          run(PieceTableArgs{.seqs = seqs.data(),
                             .index = pieces.data(),
                             .count = n_pieces.data(),
                             .slots = slots.data(),
                             .bounds = bounds.data(),
                             .last = last.data(),
                             .table = table.data(),
                             .capacity = capacity,
                             .table_stride = stride,
                             .first_last = 5000,
                             .piece_tokens = size.piece,
                             .per_block = per_block,
                             .n_seqs = size.n_seqs});
          std::vector<int32_t> metas;
          for (const auto& all : {by_piece, by_table}) {
            for (const SeqMeta& s : all) {
              metas.insert(metas.end(), {s.q_begin, s.q_len, s.kv_len, s.table_off, s.prompt_len});
            }
          }
          return Outputs{{"pieces", AsFloats(pieces), 0},
                         {"n_pieces", AsFloats(n_pieces), 0},
                         {"table", AsFloats(table), 0},
                         {"metas", AsFloats(metas), 0}};
        });
  }
}

TEST_F(ParityDeviceTest, FetchRows) {
  Random random(202);
  constexpr int32_t kFrom = 900;
  constexpr int32_t kTo = 400;
  constexpr int32_t kCapacity = 300;
  const std::vector<std::vector<int32_t>> all_lists = {
      {0}, {1}, {9}, {300}, {0, 3, 0, 0, 280, 1, 0}, {300, 50, 1}};
  struct Row {
    int32_t bytes, gap = 0, gap_bytes = 0;
  };
  const std::vector<Row> kinds = {{16},
                                  {36},
                                  {38},
                                  {512},
                                  {2048},
                                  {4096},
                                  {2176, 1024, 1024},
                                  {2176, 1024, 1152},
                                  {4096, 0, 16},
                                  {36, 4, 8},
                                  {38, 2, 34},
                                  {512, 500, 12}};
  for (const Row& kind : kinds) {
    const int32_t row_bytes = kind.bytes;
    std::vector<std::byte> from(static_cast<size_t>(kFrom * row_bytes));
    for (std::byte& b : from) b = static_cast<std::byte>(random.Int(0, 255));
    for (const std::vector<int32_t>& count : all_lists) {
      // Rows that are not fetched lie outside.
      std::vector<int32_t> from_row(count.size() * kCapacity, 1 << 30);
      std::vector<int32_t> to_row = from_row;
      const int32_t total = std::accumulate(count.begin(), count.end(), 0);
      std::vector<int32_t> to = random.Ascending(total, kTo);
      std::reverse(to.begin(), to.end());
      for (size_t l = 0, row = 0; l < count.size(); ++l) {
        const std::vector<int32_t> rows = random.Ascending(count[l], kFrom);
        for (size_t i = 0; i < rows.size(); ++i) {
          from_row[l * kCapacity + i] = rows[i];
          to_row[l * kCapacity + i] = to[row++];
        }
      }
      Check(fmt::format("FetchRows {} of {} bytes without {} from {} on", fmt::join(count, "+"),
                        row_bytes, kind.gap_bytes, kind.gap),
            [&](const Execute& run) {
              std::vector<std::byte> rows(static_cast<size_t>(kTo * row_bytes), std::byte{0x77});
              run(FetchRowsArgs{.from = from.data(),
                                .to = rows.data(),
                                .row_bytes = row_bytes,
                                .from_row = from_row.data(),
                                .to_row = to_row.data(),
                                .n = count.data(),
                                .capacity = kCapacity,
                                .lists = static_cast<int32_t>(count.size()),
                                .gap = kind.gap,
                                .gap_bytes = kind.gap_bytes});
              Array bytes{"to", {}, 0};
              for (std::byte b : rows) {
                bytes.values.push_back(static_cast<float>(std::to_integer<int>(b)));
              }
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
        const bool by_head = size.block_tokens == 32 || size.q_len.size() > 1;
        Attention({72, n_kv_heads, d, d, dtype}, size.q_len, size.kv_len, random, size.block_tokens,
                  by_head ? Planes::kByHead : Planes::kTogether)
            .Run(fmt::format("dense, blocks of {}", size.block_tokens), AttnPlan::Dense());
      }
    }
  }
}

// A chunk after a long past, among sequences without rows: its past is dealt to several blocks. The
// last part begins or ends at and beside the edges of tiles; another sequence is too short for
// parts.
TEST_F(ParityDeviceTest, AttendAChunkOfALongPast) {
  Random random(205);
  for (const int32_t d : {64, 96, 128, 256}) {
    for (const int32_t past : {1023, 2048, 2271, 3457}) {
      const DType dtype = past % 2 == 0 ? DType::kF16 : DType::kBF16;
      const Planes planes = past > 2100 ? Planes::kByHead : Planes::kTogether;
      Attention chunk({4, 2, d, d, dtype}, {0, 0, 101, 0}, {40, 0, past + 101, 7}, random, 64,
                      planes);
      chunk.busy_seqs = 1;
      chunk.Run(fmt::format("a chunk after {}", past), AttnPlan::Dense());
    }
    Attention two({4, 1, d, d, DType::kBF16}, {110, 0, 130}, {2500, 30, 700}, random, 32);
    two.busy_seqs = 2;
    two.Run("two chunks", AttnPlan::Dense());
  }
}

// Some KV heads, all that the bank has of a layer's: enough rows for FlashInfer's kernel, and a
// past that is dealt to several blocks.
TEST_F(ParityDeviceTest, AttendManyRowsOfSomeHeads) {
  Random random(206);
  for (const int32_t d : {64, 96, 128, 256}) {
    for (const DType dtype : {DType::kF16, DType::kBF16}) {
      RunAlone("dense", Attention({8, 2, d, d, dtype}, {600}, {733}, random, 64), AttnPlan::Dense(),
               random);
      Attention chunk({2, 2, d, d, dtype}, {0, 200, 0}, {40, 2470, 7}, random, 64);
      chunk.busy_seqs = 1;
      RunAlone("a chunk of a long past", chunk, AttnPlan::Dense(), random);
    }
  }
}

// The row of a decode step goes to its slot instead of its home, if it has one.
TEST_F(ParityDeviceTest, AppendToASlot) {
  Random random(203);
  constexpr int32_t kDim = 64;
  constexpr int32_t kHeads = 4;
  constexpr int32_t kRows = 12;
  for (DType kv_type : kKvFormats) {
    for (const auto& [dk, norm] : {std::pair<int32_t, QkNorm>{64, QkNorm::kNone},
                                   {128, QkNorm::kNone},
                                   {80, QkNorm::kPerHead},
                                   {96, QkNorm::kFull},
                                   {24, QkNorm::kFull}}) {
      if (!KvFits(kv_type, dk)) continue;
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
          Check(fmt::format("NormQkvRopeAppend {} heads of {} kv {} in slot {}", DTypeName(format),
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
                                            .slot = {.k = slots.View().k.base,
                                                     .v = slots.View().v.base,
                                                     .row = slot.data()},
                                            .rows = step.rows.data(),
                                            .seqs = step.seqs.data(),
                                            .n_rows = 1});
                  const Array rows = slots.Values();
                  return Outputs{{"x", x, 2e-6},
                                 {"q", q, 2e-5},
                                 {"k", k, rows.tolerance, rows.rounding},
                                 home.Values(),
                                 rows};
                });
        }
      }
    }
  }
}

}  // namespace
}  // namespace omnikv::parity::parity_device_test
