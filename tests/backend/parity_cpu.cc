// What parity_test compares with the reference: the CPU backend with every instruction set of this
// CPU, the best one with 1, 2 and 3 threads. The others have 3: how work is split among threads
// does not depend on the instructions.
#include <fmt/format.h>

#include "backend/cpu/cpu_backend.h"
#include "parity.h"

namespace omnikv::parity {

Result<std::vector<Candidate>> MakeCandidates() {
  std::vector<Candidate> all;
  for (const std::string& isa : CpuIsas()) {
    for (int threads = all.empty() ? 1 : 3; threads <= 3; ++threads) {
      all.push_back(
          {.name = fmt::format("{}, {} threads", isa, threads),
           .backend = MakeCpuBackend(
               {.threads = threads, .pin = false, .isa = isa, .precision = GemmPrecision::kFull})});
    }
    fmt::print("parity: testing {}\n", isa);
  }
  return all;
}

int64_t SweepStride() {
  return 11;  // a sample: the sweep is meant for the CUDA backend, and each case runs often here
}

int64_t CandidateStride() {
  return 2;
}

}  // namespace omnikv::parity
