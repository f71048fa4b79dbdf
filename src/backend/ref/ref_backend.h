// The oracle: every op as its definition reads, scalar, accumulated in double. It is not optimised,
// but for sums side by side and values loaded once (RefDots, LoadedHead), which leave every bit as
// it was (decision 090).
#pragma once

#include <memory>

#include "backend/backend.h"

namespace omnikv {

std::unique_ptr<Backend> MakeRefBackend();  // a HostBackend

// The attention and selection ops (ref_attend.cc), for MakeRefBackend.
void RefAttend(const AttendArgs& a);
void RefMergeStates(const MergeStatesArgs& args);
void RefPickHeads(const PickHeadsArgs& args);
void RefScoreReduce(const ScoreReduceArgs& a);
void RefPlanRange(const PlanRangeArgs& a);
void RefTopK(const TopKArgs& a);
void RefStoreRows(const StoreRowsArgs& a);
void RefPickLogits(const PickLogitsArgs& a);
void RefSumValues(const SumValuesArgs& a);
void RefCompact(const CompactArgs& a);
void RefEvict(const EvictArgs& a);
void RefUndoEvict(const UndoEvictArgs& a);
void RefNextToken(const NextTokenArgs& a);
// The score ops (ref_score.cc).
void RefScore(const ScoreArgs& a);
void RefBlockSummary(const BlockSummaryArgs& a);
void RefBlockScore(const BlockScoreArgs& a);
void RefKeyScore(const KeyScoreArgs& a);
void RefQueryMoments(const QueryMomentsArgs& a);
void RefExpectedScore(const ExpectedScoreArgs& a);
void RefAgedScores(const AgedScoresArgs& a);
void RefPool(const PoolArgs& a);
// The ops of an index of K (ref_index.cc).
void RefIndexKeys(const IndexKeysArgs& a);
void RefIndexScore(const IndexScoreArgs& a);
void RefRescore(const RescoreArgs& a);

}  // namespace omnikv
