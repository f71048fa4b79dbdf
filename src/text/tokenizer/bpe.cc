#include "text/tokenizer/bpe.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

#include "text/tokenizer/byte_level.h"
#include "text/tokenizer/unicode.h"

namespace omnikv::tok {
namespace {

constexpr uint32_t kNoRank = UINT32_MAX;
constexpr uint64_t kFree = UINT64_MAX;

// Words up to this many symbols merge by scanning for the best pair, longer ones by a heap.
constexpr size_t kScanLimit = 64;

// Merges neighbours in *symbols until no pair can, the lowest rank first and of equal ranks the
// leftmost; leaves the symbols that remain, in order. rank(left, right, &merged) gives the rank of
// a pair of symbols or kNoRank.
template <typename RankFn>
void MergeAll(std::vector<Symbol>* symbols, std::vector<uint64_t>* heap, const RankFn& rank) {
  std::vector<Symbol>& s = *symbols;
  const size_t n = s.size();
  if (n < 2) return;
  const auto update = [&](Symbol& left, const Symbol& right) {
    left.rank = rank(left, right, &left.merged);
  };
  if (n <= kScanLimit) {
    for (size_t i = 0; i + 1 < n; ++i) update(s[i], s[i + 1]);
    s[n - 1].rank = kNoRank;
    for (;;) {
      size_t best = 0;
      for (size_t i = 1; i + 1 < s.size(); ++i) {
        if (s[i].rank < s[best].rank) best = i;
      }
      if (s[best].rank == kNoRank) return;
      s[best].id = s[best].merged;
      s[best].end = s[best + 1].end;
      s.erase(s.begin() + static_cast<ptrdiff_t>(best) + 1);
      if (best + 1 < s.size()) {
        update(s[best], s[best + 1]);
      } else {
        s[best].rank = kNoRank;
      }
      if (best > 0) update(s[best - 1], s[best]);
    }
  }
  // An entry of the heap is rank and position; it is stale when its symbol has gone or has another
  // rank by now.
  std::vector<uint64_t>& h = *heap;
  h.clear();
  const auto entry = [](uint32_t r, size_t at) { return uint64_t{r} << 32 | at; };
  for (size_t i = 0; i < n; ++i) {
    s[i].prev = static_cast<int32_t>(i) - 1;
    s[i].next = i + 1 < n ? static_cast<int32_t>(i) + 1 : -1;
    s[i].rank = kNoRank;
    if (i + 1 < n) update(s[i], s[i + 1]);
    if (s[i].rank != kNoRank) h.push_back(entry(s[i].rank, i));
  }
  std::make_heap(h.begin(), h.end(), std::greater<>());
  const auto push = [&](size_t at) {
    if (s[at].rank == kNoRank) return;
    h.push_back(entry(s[at].rank, at));
    std::push_heap(h.begin(), h.end(), std::greater<>());
  };
  while (!h.empty()) {
    const uint64_t top = h.front();
    std::pop_heap(h.begin(), h.end(), std::greater<>());
    h.pop_back();
    const size_t at = top & UINT32_MAX;
    Symbol& left = s[at];
    if (left.begin == left.end || left.rank != top >> 32) continue;
    Symbol& right = s[static_cast<size_t>(left.next)];
    left.id = left.merged;
    left.end = right.end;
    left.next = right.next;
    left.rank = kNoRank;
    right.begin = right.end;
    if (left.next >= 0) {
      Symbol& after = s[static_cast<size_t>(left.next)];
      after.prev = static_cast<int32_t>(at);
      update(left, after);
      push(at);
    }
    if (left.prev >= 0) {
      update(s[static_cast<size_t>(left.prev)], left);
      push(static_cast<size_t>(left.prev));
    }
  }
  std::erase_if(s, [](const Symbol& symbol) { return symbol.begin == symbol.end; });
}

char32_t FirstChar(std::string_view text) {
  return DecodeUtf8(text.data()).code;
}
char32_t LastChar(std::string_view text) {
  return DecodeUtf8Before(text, text.size()).code;
}

constexpr std::string_view kMeta = "\u2581";  // what stands for a space in sentencepiece's tokens

// Calls word(part) for the parts of `piece` between cuts, which must not change the result: before
// every U+2581 in any text, and anywhere in a part that is still too long for the word cache.
template <typename WordFn>
void ForEachSegment(std::string_view piece, const JoinFilter& joins, const WordFn& word) {
  const auto fine = [&](std::string_view part) {
    if (part.size() <= WordCache::kMaxWordBytes) return word(part);
    size_t begin = 0;
    char32_t last = 0;
    for (size_t i = 0; i < part.size();) {
      const Char c = DecodeUtf8(part.data() + i);
      if (i > begin && !joins.MayJoin(last, c.code)) {
        word(part.substr(begin, i - begin));
        begin = i;
      }
      last = c.code;
      i += c.size;
    }
    word(part.substr(begin));
  };
  size_t begin = 0;
  for (size_t at = 1; (at = piece.find(kMeta, at)) != std::string_view::npos;) {
    const char32_t last = LastChar(piece.substr(0, at));
    if (last != FirstChar(kMeta) && !joins.MayJoin(last, FirstChar(kMeta))) {
      fine(piece.substr(begin, at - begin));
      begin = at;
    }
    at += kMeta.size();
  }
  fine(piece.substr(begin));
}

}  // namespace

void JoinFilter::Reset(size_t expected_pairs) {
  bits_.assign(std::bit_ceil(std::max<size_t>(1 << 13, 16 * expected_pairs)), false);
}

// ---- by merges --------------------------------------------------------------------------------

Bpe::Bpe(const Vocab* vocab, BpeOptions options, std::vector<Merge> merges,
         const std::vector<bool>& blocked)
    : vocab_(vocab), o_(std::move(options)), merges_(std::move(merges)), blocked_(blocked) {
  blocked_.resize(static_cast<size_t>(vocab_->size()));
  for (unsigned b = 0; b < 256; ++b) {
    byte_ids_[b] = vocab_->Find(fmt::format("<0x{:02X}>", b));
    const char c = static_cast<char>(b);
    std::string text;
    if (o_.byte_level) {
      AppendByteChars(std::string_view(&c, 1), &text);
    } else if (b < 0x80) {
      text = c;
    }
    single_[b] = text.empty() ? -1 : FindUsable(text);
  }
  pairs_.assign(std::bit_ceil(2 * merges_.size() + 2), {kFree, 0});
  for (size_t i = 0; i < merges_.size(); ++i) {
    Merge& m = merges_[i];
    if (m.merged >= 0 && blocked_[static_cast<size_t>(m.merged)]) m.merged = -1;
    if (m.merged < 0) continue;
    const uint64_t key =
        uint64_t{static_cast<uint32_t>(m.left)} << 32 | static_cast<uint32_t>(m.right);
    size_t at = HashPair(static_cast<uint32_t>(m.left), static_cast<uint32_t>(m.right));
    while (pairs_[at &= pairs_.size() - 1].key != kFree && pairs_[at].key != key) ++at;
    pairs_[at] = {key, static_cast<uint32_t>(i)};
  }
  BuildFilter();
}

// A cut is exact when the text of every symbol is what its token says (so no merge has `unk` or a
// byte token in it), no token depends on where in the word it is, and unknown characters neither
// vanish nor become one with those on the other side.
void Bpe::BuildFilter() {
  joins_.Reset(merges_.size());
  const bool all_bytes = std::find(byte_ids_.begin(), byte_ids_.end(), -1) == byte_ids_.end();
  can_cut_ = !o_.byte_level && o_.continuing_subword_prefix.empty() &&
             o_.end_of_word_suffix.empty() &&
             (o_.byte_fallback ? all_bytes : o_.unk >= 0 && !o_.fuse_unk);
  const auto stands_for_itself = [&](int32_t id) {
    return id != o_.unk && std::find(byte_ids_.begin(), byte_ids_.end(), id) == byte_ids_.end() &&
           !vocab_->Text(id).empty();
  };
  std::vector<bool> odd(static_cast<size_t>(vocab_->size()));
  for (int32_t id = 0; can_cut_ && id < vocab_->size(); ++id) {
    const std::string_view text = vocab_->Text(id);
    if (id == o_.unk || text.empty() || text.starts_with("<0x")) {
      odd[static_cast<size_t>(id)] = !stands_for_itself(id);
    }
  }
  for (const Merge& m : merges_) {
    if (!can_cut_) return;
    if (m.merged < 0) continue;
    can_cut_ = !odd[static_cast<size_t>(m.left)] && !odd[static_cast<size_t>(m.right)];
    if (can_cut_) joins_.Add(LastChar(vocab_->Text(m.left)), FirstChar(vocab_->Text(m.right)));
  }
}

int32_t Bpe::FindUsable(std::string_view text) const {
  const int32_t id = vocab_->Find(text);
  return id >= 0 && !blocked_[static_cast<size_t>(id)] ? id : -1;
}

uint32_t Bpe::Rank(int32_t left, int32_t right) const {
  const uint64_t key = uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  size_t at = HashPair(static_cast<uint32_t>(left), static_cast<uint32_t>(right));
  for (;; ++at) {
    const PairSlot& slot = pairs_[at & (pairs_.size() - 1)];
    if (slot.key == key) return slot.rank;
    if (slot.key == kFree) return kNoRank;
  }
}

void Bpe::Encode(std::string_view piece, ModelScratch* scratch, std::vector<int32_t>* out) const {
  if (o_.ignore_merges) {
    std::string_view text = piece;
    if (o_.byte_level) {
      scratch->text.clear();
      AppendByteChars(piece, &scratch->text);
      text = scratch->text;
    }
    if (const int32_t id = FindUsable(text); id >= 0) {
      out->push_back(id);
      return;
    }
  }
  const auto word = [&](std::string_view part) {
    EncodeCached(part, scratch, out, [&] { EncodeWord(part, scratch, out); });
  };
  if (can_cut_) {
    ForEachSegment(piece, joins_, word);
  } else {
    word(piece);
  }
}

bool Bpe::AddByteTokens(std::string_view text, uint32_t begin, uint32_t end,
                        std::vector<Symbol>* symbols) const {
  const bool all = std::all_of(text.begin(), text.end(),
                               [&](char c) { return byte_ids_[static_cast<uint8_t>(c)] >= 0; });
  if (!all) return false;
  for (const char c : text) {
    symbols->push_back({byte_ids_[static_cast<uint8_t>(c)], begin, end, 0, 0, kNoRank, -1});
  }
  return true;
}

void Bpe::AddSymbols(std::string_view word, ModelScratch* scratch) const {
  std::vector<Symbol>& s = scratch->symbols;
  s.clear();
  const bool affixes = !o_.continuing_subword_prefix.empty() || !o_.end_of_word_suffix.empty();
  bool pending_unk = false;  // an unknown character waits, to be one with those after it
  const auto flush = [&] {
    if (pending_unk) s.push_back({o_.unk, 0, 1, 0, 0, kNoRank, -1});
    pending_unk = false;
  };
  std::string text;
  for (size_t i = 0; i < word.size();) {
    const size_t size = o_.byte_level ? 1 : Utf8Size(word[i]);
    const auto begin = static_cast<uint32_t>(i);
    const auto end = static_cast<uint32_t>(i + size);
    i += size;
    int32_t id = -1;
    if (size == 1 && !affixes) id = single_[static_cast<uint8_t>(word[begin])];
    if (id < 0) {
      text.clear();
      if (begin > 0) text = o_.continuing_subword_prefix;
      if (o_.byte_level) {
        AppendByteChars(word.substr(begin, size), &text);
      } else {
        text += word.substr(begin, size);
      }
      if (i == word.size()) text += o_.end_of_word_suffix;
      id = FindUsable(text);
    }
    if (id >= 0) {
      flush();
      s.push_back({id, begin, end, 0, 0, kNoRank, -1});
    } else if (!o_.byte_fallback || !AddByteTokens(text, begin, end, &s)) {
      if (o_.unk < 0) continue;
      if (!o_.fuse_unk) flush();
      pending_unk = true;
    }
  }
  flush();
}

void Bpe::EncodeWord(std::string_view word, ModelScratch* scratch,
                     std::vector<int32_t>* out) const {
  AddSymbols(word, scratch);
  MergeAll(&scratch->symbols, &scratch->heap,
           [this](const Symbol& left, const Symbol& right, int32_t* merged) {
             const uint32_t rank = Rank(left.id, right.id);
             if (rank != kNoRank) *merged = merges_[rank].merged;
             return rank;
           });
  for (const Symbol& symbol : scratch->symbols) out->push_back(symbol.id);
}

// ---- by scores --------------------------------------------------------------------------------

ScoreBpe::ScoreBpe(const Vocab* vocab, Options options, const std::vector<float>& scores,
                   std::vector<bool> usable)
    : vocab_(vocab), o_(options), usable_(std::move(usable)) {
  const auto n = static_cast<size_t>(vocab_->size());
  usable_.resize(n);
  std::vector<int32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  const auto score = [&](int32_t id) {
    const float f =
        static_cast<size_t>(id) < scores.size() ? scores[static_cast<size_t>(id)] : 0.0f;
    return f == f ? f : 0.0f;  // a NaN would not sort
  };
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return score(a) > score(b); });
  rank_.resize(n);
  for (size_t i = 0; i < n; ++i) {
    const bool tie = i > 0 && score(order[i]) == score(order[i - 1]);
    rank_[static_cast<size_t>(order[i])] =
        tie ? rank_[static_cast<size_t>(order[i - 1])] : static_cast<uint32_t>(i);
  }
  size_t pairs = 0;
  for (size_t id = 0; id < n; ++id) {
    if (usable_[id]) pairs += vocab_->Text(static_cast<int32_t>(id)).size() / 2;
  }
  joins_.Reset(pairs);
  for (size_t id = 0; id < n; ++id) {
    const std::string_view text = vocab_->Text(static_cast<int32_t>(id));
    if (!usable_[id] || text.empty()) continue;
    max_bytes_ = std::max(max_bytes_, text.size());
    Char last = DecodeUtf8(text.data());
    for (size_t i = last.size; i < text.size();) {
      const Char c = DecodeUtf8(text.data() + i);
      joins_.Add(last.code, c.code);
      last = c;
      i += c.size;
    }
  }
}

int32_t ScoreBpe::FindUsable(std::string_view text) const {
  if (text.size() > max_bytes_) return -1;
  const int32_t id = vocab_->Find(text);
  return id >= 0 && usable_[static_cast<size_t>(id)] ? id : -1;
}

void ScoreBpe::Encode(std::string_view piece, ModelScratch* scratch,
                      std::vector<int32_t>* out) const {
  ForEachSegment(piece, joins_, [&](std::string_view word) {
    EncodeCached(word, scratch, out, [&] { EncodeWord(word, scratch, out); });
  });
}

void ScoreBpe::EncodeWord(std::string_view word, ModelScratch* scratch,
                          std::vector<int32_t>* out) const {
  std::vector<Symbol>& s = scratch->symbols;
  s.clear();
  for (size_t i = 0; i < word.size();) {
    const size_t size = Utf8Size(word[i]);
    s.push_back({FindUsable(word.substr(i, size)), static_cast<uint32_t>(i),
                 static_cast<uint32_t>(i + size), 0, 0, kNoRank, -1});
    i += size;
  }
  MergeAll(&s, &scratch->heap, [&](const Symbol& left, const Symbol& right, int32_t* merged) {
    *merged = FindUsable(word.substr(left.begin, right.end - left.begin));
    return *merged < 0 ? kNoRank : rank_[static_cast<size_t>(*merged)];
  });
  for (const Symbol& symbol : s) {
    if (symbol.id >= 0) {
      out->push_back(symbol.id);
      continue;
    }
    for (uint32_t i = symbol.begin; i < symbol.end; ++i) {
      const int32_t id = o_.byte_ids[static_cast<uint8_t>(word[i])];
      if (id >= 0) {
        out->push_back(id);
      } else if (o_.unk >= 0) {
        out->push_back(o_.unk);
      }
    }
  }
}

}  // namespace omnikv::tok
