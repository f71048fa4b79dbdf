// The plain structs that policies, the bank and the kernels share: where each row of a step stands,
// which tokens an attention reads (AttnPlan), where their K/V lie (KvView), and where what a policy
// keeps beside them lies (StateView). Everything that changes from token to token is *pointed at*,
// never held: a recorded step replays with the same structs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "backend/head_mask.h"
#include "base/divisor.h"
#include "base/dtype.h"
#include "base/host_device.h"

namespace omnikv {

// One row (token) of a step. In device memory, [max_rows].
struct RowMeta {
  int32_t seq;  // index into SeqMeta
  int32_t pos;  // position of the token, from 0
};

// One sequence of a step. In device memory, [max_seqs].
struct SeqMeta {
  int32_t q_begin;     // its first row in the step
  int32_t q_len;       // its rows in the step, consecutive positions
  int32_t kv_len;      // tokens in context, this step's rows included
  int32_t table_off;   // its first entry in KvView::block_table
  int32_t prompt_len;  // tokens before the first generated one: generated = kv_len - prompt_len
};

enum class SegmentKind : int32_t { kRange, kList };

inline constexpr int32_t kToEnd = std::numeric_limits<int32_t>::max();

// A part of a plan: a range of positions, or ascending lists of units. A row at position p reads
// only tokens t <= p of it and, with a window, only t > p - window.
struct PlanSegment {
  SegmentKind kind = SegmentKind::kRange;
  int32_t window = 0;  // tokens, the row's own included; 0: none

  // kRange: tokens [begin, end), or what `bounds` holds when it is not null.
  int32_t begin = 0;
  int32_t end = kToEnd;
  const int32_t* bounds = nullptr;  // [n_seqs, 2]
  // Tokens that the range of a long sequence has, where the policy knows them: a hint, as to what
  // may be asked for early. 0: not known.
  int32_t expected = 0;

  // kList: unit u is tokens [u * unit, (u + 1) * unit).
  Divisor unit = 1;                // tokens an index stands for
  int32_t lists = 1;               // lists a sequence: 1, or n_kv_heads
  int32_t capacity = 0;            // indices a list has room for
  const int32_t* index = nullptr;  // [n_seqs, lists, capacity], ascending, in bounds
  const int32_t* count = nullptr;  // [n_seqs, lists]
  // [n_kv_heads]: which of several lists a KV head reads; null: its own. Never changes.
  const int32_t* list_of = nullptr;

  const float* q = nullptr;  // [n_rows, n_heads, dk]: queries for this segment; null: AttendArgs::q

  bool operator==(const PlanSegment&) const = default;
  // The list of a sequence that a KV head reads, in `index` and `count`.
  OMNIKV_HOST_DEVICE int64_t ListOf(int32_t seq, int32_t kv_head) const {
    const int32_t list = lists == 1 ? 0 : list_of != nullptr ? list_of[kv_head] : kv_head;
    return int64_t{seq} * lists + list;
  }
};

inline constexpr int kMaxSegments = 4;

// What an attention reads: the union of its segments, walked in this order. Segments do not
// overlap. Within a segment tokens come in ascending order, so placement never changes a sum.
struct AttnPlan {
  std::array<PlanSegment, kMaxSegments> segments{};
  int32_t n_segments = 0;

  void Add(const PlanSegment& segment) { segments[static_cast<size_t>(n_segments++)] = segment; }
  bool operator==(const AttnPlan&) const = default;

  // Every token up to the row's own (and inside `window`, when it is not 0).
  static AttnPlan Dense(int32_t window = 0) {
    AttnPlan plan;
    PlanSegment all;
    all.window = window;
    plan.Add(all);
    return plan;
  }
};

// Where K, or V, of one layer lies: in rows, of all KV heads or of one each (see kv_format.h).
struct KvPlane {
  std::byte* base = nullptr;  // head 0 of row 0
  int64_t row_bytes = 0;      // from one token to the next
  int64_t head_bytes = 0;     // from one KV head to the next
  DType dtype = DType::kBF16;
  // Formats of blocks: f16, one per kBlockValues values of a head. Of head 0 in row 0, rows
  // row_bytes apart. Other formats have none.
  std::byte* scales = nullptr;
  int64_t scale_head_bytes = 0;  // from one KV head's to the next one's

  bool operator==(const KvPlane&) const = default;
  OMNIKV_HOST_DEVICE std::byte* Head(int64_t row, int32_t head) const {
    return base + row * row_bytes + head * head_bytes;
  }
  // How far behind the values of a head, in any row, its scales lie; 0 where there are none.
  OMNIKV_HOST_DEVICE int64_t ToScales(int32_t head) const {
    return scales == nullptr ? 0 : scales - base + head * (scale_head_bytes - head_bytes);
  }
  // The same rows with head 0 of row 0 at `to`.
  KvPlane MovedTo(std::byte* to) const {
    KvPlane moved = *this;
    moved.base = to;
    if (scales != nullptr) moved.scales = to + (scales - base);
    return moved;
  }
};

// Where one layer's K/V lie. Token t of a sequence is in row
//   block_table[seq.table_off + t / block_tokens] * BlockRows() + t % block_tokens
// of both planes.
struct KvView {
  KvPlane k, v;
  const int32_t* block_table = nullptr;  // [max_seqs * blocks a sequence]
  Divisor block_tokens = 0;
  // Rows that a token has: one, or one for each KV head. Then the rows of a head follow one another
  // within a block (MakeKvViewByHead), and the row that is named is that of head 0.
  int32_t token_rows = 1;
  int32_t n_kv_heads = 0;
  int32_t dk = 0;  // values of one K head
  int32_t dv = 0;  // values of one V head
  // The heads that lie in the rows, side by side in their order: other numbers of heads, such as
  // n_kv_heads, are the layer's. Attend and StoreRows alone take a view of some heads.
  HeadMask heads = {};
  // kOnePlace / n, rounded up, where n KV heads that follow each other lie in one place: a head of
  // the rows may count as several (EachQueryHead). Place multiplies by it, since each warp of an
  // attention would wait for a division. Attend, SumValues and Compact's `from` alone take such a
  // view.
  uint32_t place_factor = kOnePlace;
  static constexpr uint32_t kOnePlace = uint32_t{1} << 31;
  // Positions of the tokens in the rows, where these are not the numbers of the rows: [rows,
  // pos_lists], one for all KV heads or one each. For who asks which tokens are read.
  const int32_t* pos = nullptr;
  int32_t pos_lists = 1;

  bool operator==(const KvView&) const = default;

  OMNIKV_HOST_DEVICE int32_t BlockRows() const { return block_tokens * token_rows; }
  // The row of token t of the sequence whose table starts at table_off. The table must be readable.
  OMNIKV_HOST_DEVICE int64_t RowIndex(int32_t table_off, int64_t t) const {
    const int64_t block = block_table[table_off + t / block_tokens];
    return block * BlockRows() + t % block_tokens;
  }
  // Whether each KV head has rows of its own.
  OMNIKV_HOST_DEVICE bool ByHead() const { return token_rows > 1; }
  // The position of the token in row t of that sequence, for KV head `list` (pos_lists > 1).
  OMNIKV_HOST_DEVICE int32_t PosOf(int32_t table_off, int64_t t, int32_t list) const {
    if (pos == nullptr) return static_cast<int32_t>(t);
    return pos[RowIndex(table_off, t) * pos_lists + (pos_lists > 1 ? list : 0)];
  }
  // Which head of the planes has K and V of KV head `head`.
  OMNIKV_HOST_DEVICE int32_t Place(int32_t head) const {
    return static_cast<int32_t>(static_cast<uint64_t>(heads.Before(head)) * place_factor /
                                kOnePlace);
  }
  // KV heads that lie in one place.
  int32_t HeadRepeats() const {
    return static_cast<int32_t>((kOnePlace + place_factor - 1) / place_factor);
  }
  // The same rows as those of some heads of a layer that has n.
  KvView OfHeads(HeadMask some, int32_t n) const {
    KvView view = *this;
    view.heads = some;
    view.n_kv_heads = n;
    return view;
  }
  // The same rows, with a KV head for each of `n` query heads that share one: each may then have a
  // list of a plan to itself. REQUIRES all heads, once each.
  KvView EachQueryHead(int32_t n) const {
    KvView view = *this;
    view.place_factor = (kOnePlace + static_cast<uint32_t>(n) - 1) / static_cast<uint32_t>(n);
    view.n_kv_heads *= n;
    return view;
  }
  // Whether K and V of a head lie in one row.
  bool Together() const {
    return k.row_bytes == v.row_bytes && v.base >= k.base && v.base < k.base + k.row_bytes;
  }
  // Whether K and V of a token lie in one row, which begins with K of head 0 and may be moved
  // whole: row r is the k.row_bytes from k.Head(r, 0) on.
  bool Interleaved() const { return Together() && !ByHead(); }
  // Bytes of a token's rows.
  int64_t TokenBytes() const {
    return Together() ? token_rows * k.row_bytes : k.row_bytes + v.row_bytes;
  }
  // The same rows elsewhere, from `base` on. REQUIRES Together().
  KvView MovedTo(std::byte* base) const {
    KvView moved = *this;
    moved.k = k.MovedTo(base);
    moved.v = v.MovedTo(base + (v.base - k.base));
    return moved;
  }
};

// Where what a policy keeps per unit of a layer's tokens lies: in rows that the layer's blocks have
// besides, so that they go where the K/V go. A unit of several blocks has its row in the first one.
struct StateView {
  std::byte* base = nullptr;             // row 0
  const int32_t* block_table = nullptr;  // KvView's
  Divisor block_units = 1;               // rows of a block
  int32_t unit_blocks = 1;               // blocks that a unit has, where it has several
  int64_t row_bytes = 0;

  bool operator==(const StateView&) const = default;

  // The row of unit u of the sequence whose table starts at table_off.
  template <typename T>
  OMNIKV_HOST_DEVICE T* Row(int32_t table_off, int32_t u) const {
    const int64_t block = block_table[table_off + u / block_units * unit_blocks];
    return reinterpret_cast<T*>(base + (block * block_units + u % block_units) * row_bytes);
  }
};

}  // namespace omnikv
