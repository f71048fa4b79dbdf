// Work that nests as deep as a file says, on a stack whose size we know.
#pragma once

#include <functional>

#include "omnikv/status.h"

namespace omnikv {

// Runs fn() to its end in another thread, whose stack of 8 MiB does not depend on that of the
// caller, which may be small (ulimit -s, threads of a host program). An exception of fn leaves here
// as if it had run in the caller. kResourceExhausted when no thread can be had; fn did not run
// then.
Status RunOnOwnStack(const std::function<void()>& fn);

}  // namespace omnikv
