// Parity of rows of K/V that move: rows of a step to their places, and what tables that lose rows
// take: the places of rows, chosen rows moved to the front, rows given up and given back.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "backend/kv_slices.h"
#include "parity_data.h"

namespace omnikv::parity::parity_kept_rows_test {
namespace {

struct Layout {
  DType dtype;
  int32_t n_kv_heads, dk, dv, block_tokens;
  Planes planes = Planes::kTogether;
};

// Heads in pieces of 16, 4 and 2 bytes; rows of several parts, and of less than one.
constexpr Layout kLayouts[] = {{DType::kF16, 1, 64, 64, 64},
                               {DType::kBF16, 1, 6, 6, 16},
                               {DType::kBF16, 3, 24, 21, 16, Planes::kApart},
                               {DType::kF32, 2, 10, 9, 32},
                               {DType::kQ8_0, 2, 64, 32, 16},
                               {DType::kQ8_0, 3, 32, 96, 16, Planes::kApart},
                               {DType::kQ4_0, 2, 64, 32, 16},
                               {DType::kQ4_0, 3, 32, 96, 16, Planes::kApart},
                               {DType::kF16, 4, 128, 128, 64, Planes::kApart},
                               {DType::kBF16, 3, 24, 21, 16, Planes::kByHead},
                               {DType::kQ8_0, 2, 64, 32, 16, Planes::kByHead}};

// All heads, and some of them to a view that has no others; home, and to slots.
TEST_F(ParityTest, StoreRows) {
  Random random(42);
  for (const Layout& l : kLayouts) {
    const std::vector<int32_t> lens = {100, 40, 0, 57, 13};
    const Bank placed(l.dtype, 1, l.dk, l.dv, l.block_tokens, lens, 100, random);
    const Step step({1, 30, 0, 1, 13}, lens, [&](int32_t s) { return placed.TableOff(s); });
    // Its rows are numbered without a table.
    const Planes of_made = l.planes == Planes::kByHead ? Planes::kTogether : l.planes;
    const Bank made(l.dtype, l.n_kv_heads, l.dk, l.dv, l.block_tokens, {step.n_rows()}, 64, random,
                    of_made);
    KvView made_rows = made.View();
    made_rows.block_table = nullptr;  // never to be read
    const Bank elsewhere(l.dtype, l.n_kv_heads, l.dk, l.dv, l.block_tokens, lens, 100, random,
                         l.planes);
    const std::vector<int32_t> slots = {3, -1, 0, 7, -1};
    const uint64_t every = (uint64_t{1} << l.n_kv_heads) - 1;
    for (const uint64_t heads : {uint64_t{0}, every, every & 0xau, every & 5u}) {
      const auto n_heads = heads == 0 ? l.n_kv_heads : static_cast<int32_t>(std::popcount(heads));
      if (n_heads == 0) continue;
      const Bank bank(l.dtype, n_heads, l.dk, l.dv, l.block_tokens, lens, 100, random, l.planes);
      const Bank other(l.dtype, n_heads, l.dk, l.dv, l.block_tokens, {8}, 16, random, l.planes);
      const uint64_t others = heads == 0 ? 0 : every & ~heads;
      const Bank second(l.dtype, std::max(1, std::popcount(others)), l.dk, l.dv, l.block_tokens,
                        lens, 100, random, l.planes);
      for (const auto& [to_slots, by_table] :
           {std::pair{false, false}, {true, false}, {false, true}}) {
        if (to_slots && l.planes == Planes::kByHead) continue;  // slots have no blocks
        Check(fmt::format("StoreRows of {} heads of {} {} of {}{}", n_heads, l.n_kv_heads,
                          DTypeName(l.dtype), l.dk,
                          to_slots   ? ", some to slots"
                          : by_table ? ", from another table"
                                     : ""),
              [&](const Execute& run) {
                Bank home = bank;
                Bank near = other;
                Bank away = second;
                KvView rest;
                if (others != 0 && !to_slots && !by_table) {
                  rest = away.View().OfHeads({others}, l.n_kv_heads);
                }
                KvSlot slot;
                if (to_slots) {
                  slot = {.k = near.View().k.base, .v = near.View().v.base, .row = slots.data()};
                }
                run(StoreRowsArgs{.from = by_table ? elsewhere.View() : made_rows,
                                  .kv = home.View().OfHeads({heads}, l.n_kv_heads),
                                  .rest = rest,
                                  .slot = slot,
                                  .rows = step.rows.data(),
                                  .seqs = step.seqs.data(),
                                  .n_rows = step.n_rows(),
                                  .by_table = by_table});
                Array rows = home.Values();
                Array near_rows = near.Values();
                Array second_rows = away.Values();
                rows.tolerance = near_rows.tolerance = second_rows.tolerance = 0;
                near_rows.name = "slots";
                second_rows.name = "second view";
                return Outputs{rows, near_rows, second_rows};
              });
      }
    }
  }
}

// Each head to a row of its own, in the orders in which LocateRows numbers these.
TEST_F(ParityTest, StoreRowsOfHeadsApart) {
  Random random(46);
  for (const Layout& l : kLayouts) {
    if (l.planes == Planes::kByHead) continue;  // a head's own table has rows of one head anyway
    const int32_t heads = l.n_kv_heads;
    // Sequence s and head h: s * heads + h.
    std::vector<int32_t> lens;
    for (int32_t i = 0; i < 3 * heads; ++i) lens.push_back(40 + 7 * i);
    for (const bool by_head : {false, true}) {
      const int32_t n_rows = 13;
      std::vector<RowMeta> rows(static_cast<size_t>(n_rows * heads));
      for (int32_t r = 0; r < n_rows; ++r) {
        for (int32_t h = 0; h < heads; ++h) {
          const int32_t seq = r % 3 * heads + h;
          rows[static_cast<size_t>(by_head ? h * n_rows + r : r * heads + h)] = {
              seq, lens[static_cast<size_t>(seq)] - 1 - r};
        }
      }
      const Bank made(l.dtype, heads, l.dk, l.dv, l.block_tokens, {n_rows}, 64, random, l.planes);
      KvView made_rows = made.View();
      made_rows.block_table = nullptr;  // never to be read
      const Bank bank(l.dtype, 1, l.dk, l.dv, l.block_tokens, lens, 400, random, l.planes);
      std::vector<SeqMeta> seqs;
      for (int32_t s = 0; s < 3 * heads; ++s) seqs.push_back({.table_off = bank.TableOff(s)});
      Check(fmt::format("StoreRows of {} heads apart {} of {}{}", heads, DTypeName(l.dtype), l.dk,
                        by_head ? ", by head" : ""),
            [&](const Execute& run) {
              Bank home = bank;
              run(StoreRowsArgs{.from = made_rows,
                                .kv = home.View(),
                                .rows = rows.data(),
                                .seqs = seqs.data(),
                                .n_rows = n_rows,
                                .row_step = by_head ? 1 : heads,
                                .head_step = by_head ? n_rows : 1});
              Array values = home.Values();
              values.tolerance = 0;
              return Outputs{values};
            });
    }
  }
}

TEST_F(ParityTest, LocateRows) {
  const std::vector<int32_t> lens = {600, 40, 0, 257, 13};
  const std::vector<int32_t> q_len = {1, 30, 0, 1, 13};
  const Step step(q_len, lens, [](int32_t s) { return 40 * s; });
  const std::vector<int32_t> gone = {500, 9, 7, 0, 0};
  constexpr int32_t kBlocks = 40;  // of a sequence
  std::vector<int32_t> table(lens.size() * kBlocks);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i * 7 % table.size());
  constexpr int32_t kLists = 3;
  for (const int32_t most : {kToEnd, 64}) {
    Check(fmt::format("LocateRows up to {}", most), [&](const Execute& run) {
      std::vector<RowMeta> rows(step.rows.size());
      std::vector<SeqMeta> seqs(step.seqs.size());
      std::vector<int32_t> pos[2];
      for (auto& p : pos) p.assign(table.size() * 16 * kLists, -1);
      std::vector<int32_t*> planes = {pos[0].data(), pos[1].data()};
      run(LocateRowsArgs{.rows = step.rows.data(),
                         .seqs = step.seqs.data(),
                         .gone = gone.data(),
                         .most = most,
                         .to_rows = rows.data(),
                         .to_seqs = seqs.data(),
                         .pos = planes.data(),
                         .block_table = table.data(),
                         .block_tokens = 16,
                         .n_pos = 2,
                         .lists = kLists,
                         .n_rows = static_cast<int32_t>(rows.size()),
                         .n_seqs = step.n_seqs()});
      std::vector<int32_t> values;
      for (const RowMeta& row : rows) values.insert(values.end(), {row.seq, row.pos});
      for (const SeqMeta& seq : seqs) {
        values.insert(values.end(),
                      {seq.q_begin, seq.q_len, seq.kv_len, seq.table_off, seq.prompt_len});
      }
      return Outputs{{"values", AsFloats(values), 0},
                     {"positions", AsFloats(pos[0]), 0},
                     {"positions of another layer", AsFloats(pos[1]), 0}};
    });
  }
}

// A sequence of its own for each head, written out here for the reference, too.
TEST_F(ParityTest, LocateRowsOfHeadsApart) {
  constexpr int32_t kHeads = 3, kBlocks = 40, kStride = 5 * kBlocks;
  const std::vector<int32_t> lens = {600, 40, 0, 257, 13};
  std::vector<int32_t> gone;
  for (int32_t i = 0; i < 5 * kHeads; ++i) gone.push_back(i < 3 ? 500 + 7 * i : i * 3 % 11);
  std::vector<int32_t> table(static_cast<size_t>(kHeads * kStride));
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i * 7 % table.size());
  for (const bool by_head : {false, true}) {
    const std::vector<int32_t> q_len =
        by_head ? std::vector<int32_t>{0, 30, 0, 0, 0} : std::vector<int32_t>{1, 1, 0, 1, 1};
    const Step step(q_len, lens, [](int32_t s) { return kBlocks * s; });
    const int32_t n_rows = step.n_rows();
    std::vector<RowMeta> rows(step.rows.size() * kHeads);
    std::vector<SeqMeta> seqs(step.seqs.size() * kHeads);
    std::vector<int32_t> pos(table.size() * 16);
    Check(by_head ? "LocateRows by head" : "LocateRows of heads apart", [&](const Execute& run) {
      std::fill(pos.begin(), pos.end(), -1);
      std::vector<int32_t*> planes = {pos.data()};
      run(LocateRowsArgs{.rows = step.rows.data(),
                         .seqs = step.seqs.data(),
                         .gone = gone.data(),
                         .to_rows = rows.data(),
                         .to_seqs = seqs.data(),
                         .pos = planes.data(),
                         .block_table = table.data(),
                         .block_tokens = 16,
                         .n_pos = 1,
                         .n_rows = n_rows,
                         .n_seqs = step.n_seqs(),
                         .heads = kHeads,
                         .table_stride = kStride,
                         .by_head = by_head});
      std::vector<int32_t> values;
      for (const RowMeta& row : rows) values.insert(values.end(), {row.seq, row.pos});
      for (const SeqMeta& seq : seqs) {
        values.insert(values.end(),
                      {seq.q_begin, seq.q_len, seq.kv_len, seq.table_off, seq.prompt_len});
      }
      return Outputs{{"values", AsFloats(values), 0}, {"positions", AsFloats(pos), 0}};
    });
    const auto lost = [&](int32_t s, int32_t h) {
      return gone[static_cast<size_t>(s * kHeads + h)];
    };
    for (int32_t s = 0; s < 5; ++s) {
      const SeqMeta from = step.seqs[static_cast<size_t>(s)];
      for (int32_t h = 0; h < kHeads; ++h) {
        const SeqMeta seq = seqs[static_cast<size_t>(s * kHeads + h)];
        EXPECT_EQ(seq.kv_len, from.q_len == 0 ? 0 : from.kv_len - lost(s, h));
        EXPECT_EQ(seq.table_off, kBlocks * s + h * kStride);
        EXPECT_EQ(seq.q_len, from.q_len);
        for (int32_t i = 0; i < seq.q_len; ++i) {
          const int32_t r = from.q_begin + i;
          const int32_t at = by_head ? h * n_rows + r : r * kHeads + h;
          const RowMeta row = rows[static_cast<size_t>(at)];
          const int32_t token = step.rows[static_cast<size_t>(r)].pos;
          EXPECT_EQ(seq.q_begin + i, at);
          EXPECT_EQ(row.seq, s * kHeads + h);
          EXPECT_EQ(row.pos, token - lost(s, h));
          const int32_t block = table[static_cast<size_t>(seq.table_off + row.pos / 16)];
          EXPECT_EQ(pos[static_cast<size_t>(block * 16 + row.pos % 16)], token);
        }
      }
    }
  }
}

TEST_F(ParityTest, Compact) {
  Random random(41);
  int64_t turn = 0;  // what moves bytes is the same on many candidates
  for (const Layout& l : kLayouts) {
    const std::vector<int32_t> lens = {600, 1, 257, 0, 300};
    const Bank bank(l.dtype, l.n_kv_heads, l.dk, l.dv, l.block_tokens, lens, 600, random, l.planes);
    // Other rows, in other blocks, and by head.
    const Bank stage(l.dtype, l.n_kv_heads, l.dk, l.dv, l.block_tokens, lens, 600, random,
                     l.planes == Planes::kTogether ? Planes::kByHead : l.planes);
    // The same with half of the heads, each of which two lists read.
    const Bank half(l.dtype, (l.n_kv_heads + 1) / 2, l.dk, l.dv, l.block_tokens, lens, 600, random,
                    Planes::kApart);
    const Step step({1, 1, 7, 0, 0}, lens, [&](int32_t s) { return bank.TableOff(s); });
    for (const int32_t lists : {1, l.n_kv_heads}) {
      for (const int32_t most : {0, 1, 30, 270, 599, 600}) {
        if (l.n_kv_heads == 4 && most != 270) continue;  // many bytes
        const int32_t capacity = std::max(most, 1);
        const bool with_bounds = most == 30 || most == 270;
        std::vector<int32_t> index;
        std::vector<int32_t> count;
        std::vector<int32_t> bounds;
        for (const int32_t len : lens) {
          const int32_t listed = with_bounds ? len - std::min(len, 50) : len;
          bounds.insert(bounds.end(), {listed, len});
          for (int32_t i = 0; i < lists; ++i) {
            const int32_t n = std::min(most, listed);
            std::vector<int32_t> chosen = random.Ascending(n, listed);
            std::iota(chosen.begin(), chosen.begin() + std::min(n, 4), 0);  // stay where they are
            std::sort(chosen.begin(), chosen.end());
            chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
            count.push_back(static_cast<int32_t>(chosen.size()));
            chosen.resize(static_cast<size_t>(capacity), 1 << 30);  // never to be read
            index.insert(index.end(), chosen.begin(), chosen.end());
          }
        }
        const bool with_pos = most != 270;
        for (const Bank* source : {static_cast<const Bank*>(nullptr), &stage, &half}) {
          const bool moves = source != nullptr;
          const bool halved = source == &half;
          if (halved && lists % 2 != 0) continue;
          Check(
              fmt::format("Compact {} rows of {} {}{}, {} lists{}", most, bank.View().TokenBytes(),
                          DTypeName(l.dtype), with_pos ? " and positions" : "", lists,
                          halved  ? ", from heads that two share"
                          : moves ? ", from elsewhere"
                                  : ""),
              [&](const Execute& run) {
                Bank copy = bank;
                const KvView from = !moves   ? KvView{}
                                    : halved ? source->View().EachQueryHead(2)
                                             : source->View();
                std::vector<int32_t> pos(with_pos ? copy.n_rows() * static_cast<size_t>(lists) : 0);
                for (size_t i = 0; i < pos.size(); ++i) pos[i] = static_cast<int32_t>(7 * i);
                // Scores go along with positions: to another ring, or within one.
                constexpr int64_t kStride = 640;
                const auto n_lists = lens.size() * static_cast<size_t>(lists);
                std::vector<float> scores(with_pos ? 3 * n_lists * kStride : 0);
                for (size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(i % 9973);
                std::vector<float> to_scores(moves ? 2 * n_lists * kStride : 0, kPoison);
                const ScoreRing ring{with_pos ? scores.data() : nullptr, kStride, 3};
                std::vector<SeqMeta> steps = step.seqs;
                for (SeqMeta& meta : steps) meta.kv_len += 100;
                run(CompactArgs{.kv = copy.View(),
                                .from = from,
                                .seqs = step.seqs.data(),
                                .steps = steps.data(),
                                .index = index.data(),
                                .count = count.data(),
                                .bounds = with_bounds ? bounds.data() : nullptr,
                                .pos = with_pos ? pos.data() : nullptr,
                                .scores = ring,
                                .to_scores = moves ? ScoreRing{to_scores.data(), kStride, 2} : ring,
                                .capacity = capacity,
                                .lists = lists,
                                .n_seqs = step.n_seqs()});
                Array rows = copy.Values();
                rows.tolerance = 0;
                return Outputs{rows,
                               {"pos", AsFloats(pos), 0},
                               {"scores", scores, 0},
                               {"scores elsewhere", to_scores, 0}};
              },
              turn++);
        }
        if (lists % 2 != 0) ++turn;  // so that each candidate has all
      }
    }
  }
}

// Two steps of evictions, then the last is undone, and both.
TEST_F(ParityTest, EvictAndUndo) {
  Random random(43);
  for (const Layout& l : kLayouts) {
    if (l.planes == Planes::kByHead) continue;                 // no table that loses rows lies so
    const std::vector<int32_t> lens = {101, 40, 0, 101, 101};  // of the table
    const std::vector<int32_t> all = {900, 40, 0, 101, 3001};  // tokens
    const Bank bank(l.dtype, l.n_kv_heads, l.dk, l.dv, l.block_tokens, lens, 128, random, l.planes);
    const Step table({1, 1, 0, 1, 1}, lens, [&](int32_t s) { return bank.TableOff(s); });
    for (const int32_t lists : {1, l.n_kv_heads}) {
      for (const bool ties : {false, true}) {
        // Few rows of the shorter sequences are old, none of the longer ones is recent.
        const int32_t recent = ties ? 0 : 30;
        const int32_t ring = ties ? 1 : kEvictionLog + 1;
        Check(fmt::format("Evict of {} {}, {} lists{}", bank.View().TokenBytes(),
                          DTypeName(l.dtype), lists, ties ? ", ties" : ", not the recent"),
              [&](const Execute& run) {
                Bank copy = bank;
                constexpr int32_t kStride = 104;
                const size_t n_lists = lens.size() * static_cast<size_t>(lists);
                std::vector<int32_t> pos(copy.n_rows() * static_cast<size_t>(lists));
                for (size_t i = 0; i < pos.size(); ++i) pos[i] = static_cast<int32_t>(i * 37 % 800);
                std::vector<std::byte> saved(lens.size() * kEvictionLog *
                                             static_cast<size_t>(PackedRowBytes(copy.View())));
                std::vector<int32_t> length(n_lists * kEvictionLog, -7);
                std::vector<int32_t> victim(n_lists * kEvictionLog, -7);
                std::vector<int32_t> saved_pos(n_lists * kEvictionLog, -7);
                const EvictionLog log{saved.data(), length.data(), victim.data(), saved_pos.data()};
                Outputs outputs;
                const auto keep = [&](const std::string& when) {
                  Array rows = copy.Values();
                  rows.name += when;
                  rows.tolerance = 0;
                  outputs.push_back(rows);
                  outputs.push_back({"pos" + when, AsFloats(pos), 0});
                };
                Random scores_of(7);
                std::vector<SeqMeta> steps = table.seqs;
                for (int32_t step = 0; step < 2; ++step) {
                  for (size_t s = 0; s < steps.size(); ++s) steps[s].kv_len = all[s] + step;
                  std::vector<float> scores =
                      scores_of.Floats(n_lists * static_cast<size_t>(ring) * kStride);
                  if (ties) {
                    for (float& v : scores) v = v < 0.5f ? -0.0f : v < 1 ? 0.0f : 1.0f;
                  }
                  run(EvictArgs{.kv = copy.View(),
                                .seqs = table.seqs.data(),
                                .steps = steps.data(),
                                .scores = {scores.data(), kStride, ring},
                                .pos = pos.data(),
                                .log = log,
                                .most = 100,
                                .recent = recent,
                                .lists = lists,
                                .n_seqs = static_cast<int32_t>(lens.size())});
                  keep(fmt::format(" after {}", step));
                  outputs.push_back({fmt::format("scores {}", step), scores, 0});
                  outputs.push_back({fmt::format("victims {}", step), AsFloats(victim), 0});
                }
                // A step that did not run left what an older one had logged.
                length[0] -= kEvictionLog;
                for (const int32_t undone : {1, 2}) {
                  for (const int32_t s : {0, 4}) {
                    const auto of = static_cast<size_t>(s);
                    run(UndoEvictArgs{.kv = copy.View(),
                                      .pos = pos.data(),
                                      .log = log,
                                      .seq = s,
                                      .table_off = table.seqs[of].table_off,
                                      .lists = lists,
                                      .from = all[of] + 1 - undone,
                                      .to = all[of] + 2 - undone});
                  }
                  keep(fmt::format(" without {}", undone));
                }
                return outputs;
              });
      }
    }
  }
}

}  // namespace
}  // namespace omnikv::parity::parity_kept_rows_test
