// What a case of parity_random_test.cc may have.
#pragma once

#include <bitset>
#include <string_view>

namespace omnikv::parity {

// Each one is taken from the arguments that ran.
enum Feature : size_t {
  kBf16,
  kF16,
  kF32,
  kQ8,
  kQ4,
  kPlanesApart,
  kRowsByHead,
  kDkIsNotDv,
  kOneTokenBlocks,
  kSharedBlocks,
  kRing,         // leading blocks were given back
  kInnerHole,    // others were
  kLostRows,     // of a sequence's tokens, so that positions are no numbers of rows
  kLastPlace,    // a row takes the place of the last one
  kHeadPos,      // a KV head's rows have positions of their own
  kSeveralSeqs,  // have rows
  kIdleSeq,
  kUnordered,  // rows of sequences in another order than the sequences
  kDecode,
  kFewRows,
  kChunk,
  kRange,
  kBounds,
  kWindow,
  kList,
  kHeadLists,
  kListsByMap,  // KV heads read those of others
  kUnits,
  kListWindow,
  kSegments,  // two and more
  kFourSegments,
  kOwnQueries,
  kNothingRead,  // by a row
  kSoftcap,
  kLseIn,
  kSomeHeads,   // take part, of those that the view has
  kHeadsAlone,  // the view has some of a layer's
  kLogits,
  kHeadMax,
  kScoresOnly,
  kMerged,
  kChosenList,  // by Score and TopK
  kKeptList,
  kScoreOfHeads,
  kScoreUnits,
  kScoreWindow,
  kScoreSoftmax,
  kScoreSoftcap,
  kAccumulated,
  kMeanHeads,
  kSumHeads,
  kSumQueries,
  kMaxQueries,
  kDecayedQueries,
  kFeatures,
};
inline constexpr std::string_view kFeatureNames[] = {"bf16",
                                                     "f16",
                                                     "f32",
                                                     "q8_0",
                                                     "q4_0",
                                                     "planes apart",
                                                     "rows by head",
                                                     "dk is not dv",
                                                     "blocks of one token",
                                                     "shared blocks",
                                                     "ring",
                                                     "inner hole",
                                                     "lost rows",
                                                     "last place",
                                                     "positions of heads",
                                                     "several sequences",
                                                     "idle sequence",
                                                     "unordered sequences",
                                                     "decode rows",
                                                     "few rows",
                                                     "chunk",
                                                     "range",
                                                     "bounds",
                                                     "window",
                                                     "list",
                                                     "lists of heads",
                                                     "lists of other heads",
                                                     "units",
                                                     "window of a list",
                                                     "several segments",
                                                     "four segments",
                                                     "queries of a segment",
                                                     "nothing read",
                                                     "softcap",
                                                     "lse_in",
                                                     "some heads",
                                                     "heads that lie alone",
                                                     "logits",
                                                     "maximum over heads",
                                                     "scores only",
                                                     "merged",
                                                     "chosen list",
                                                     "kept list",
                                                     "score of heads",
                                                     "score of units",
                                                     "score of a window",
                                                     "score by softmax",
                                                     "score with softcap",
                                                     "accumulated score",
                                                     "mean of heads",
                                                     "sum of heads",
                                                     "sum of queries",
                                                     "maximum of queries",
                                                     "decayed queries"};
static_assert(std::size(kFeatureNames) == kFeatures);
using Features = std::bitset<kFeatures>;

// Whether a case may have both.
inline bool GoTogether(size_t a, size_t b) {
  const auto within = [](size_t f, size_t first, size_t last) { return f >= first && f <= last; };
  const auto both = [&](size_t first, size_t last) {
    return within(a, first, last) && within(b, first, last);
  };
  const auto between = [&](size_t first, size_t last, size_t other_first, size_t other_last) {
    return (within(a, first, last) && within(b, other_first, other_last)) ||
           (within(b, first, last) && within(a, other_first, other_last));
  };
  return a == b || !(both(kBf16, kQ4) || both(kLogits, kHeadMax) || both(kMeanHeads, kSumHeads) ||
                     both(kSumQueries, kDecayedQueries) || both(kFewRows, kChunk) ||
                     both(kPlanesApart, kRowsByHead) ||
                     // Rows by head have no table that loses rows.
                     between(kRowsByHead, kRowsByHead, kLostRows, kLastPlace) ||
                     between(kRowsByHead, kRowsByHead, kHeadPos, kHeadPos) ||
                     between(kDecode, kDecode, kFewRows, kFewRows) ||
                     between(kLastPlace, kLastPlace, kFewRows, kFewRows) ||  // a place has one row
                     // Score reads all tokens, and merges and scores have all heads.
                     between(kRing, kInnerHole, kChosenList, kDecayedQueries) ||
                     between(kHeadsAlone, kHeadsAlone, kMerged, kDecayedQueries) ||
                     // Attend's scores are of one range without window.
                     between(kLogits, kScoresOnly, kWindow, kOwnQueries) ||
                     between(kLogits, kScoresOnly, kMerged, kChosenList) ||
                     between(kScoresOnly, kScoresOnly, kLseIn, kLseIn));
}

}  // namespace omnikv::parity
