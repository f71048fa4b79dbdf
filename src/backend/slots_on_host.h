// The ops of working sets where memory is the host's: what they write is whole numbers and copies,
// so one loop serves all.
#pragma once

#include "backend/ops.h"

namespace omnikv {

void WorkingSetOnHost(const WorkingSetArgs& a);
void AverageScoresOnHost(const AverageScoresArgs& a);
void FetchRowsOnHost(const FetchRowsArgs& a);
void ListPiecesOnHost(const ListPiecesArgs& a);
void PieceTableOnHost(const PieceTableArgs& a);

}  // namespace omnikv
