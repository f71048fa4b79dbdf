#include "backend/cpu/isa.h"

#include <hwy/highway.h>
#include <unistd.h>

#include "base/check.h"

namespace omnikv {
namespace {

std::string_view IsaName(int64_t target) {
  // Lower bits are better targets. Newer versions of Highway know more of them than the one we
  // name: kinds of AVX-512, SSE2.
#if HWY_ARCH_X86
  if (target <= HWY_AVX3) return "avx512";
  if (target <= HWY_AVX2) return "avx2";
  if (target <= HWY_SSE4) return "sse4";
#elif HWY_ARCH_ARM
  if (target == HWY_NEON) return "neon";
#endif
  return "scalar";
}

}  // namespace

bool PrefetchesToSecondLevel() {
#ifdef _SC_LEVEL1_DCACHE_SIZE
  static const int64_t bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE);
  return bytes > 0 && bytes < 48 << 10;
#else
  return false;
#endif
}

std::vector<Isa> AvailableIsas() {
  std::vector<Isa> isas;
  // Lower bits are better targets; the static target is always among them.
  for (int64_t left = hwy::SupportedTargets() & HWY_TARGETS; left != 0; left &= left - 1) {
    const int64_t target = left & -left;
    hwy::ChosenTarget chosen;
    chosen.Update(target);
    isas.push_back({IsaName(target), chosen.GetIndex()});
  }
  return isas;
}

Isa FindIsa(std::string_view name) {
  const std::vector<Isa> isas = AvailableIsas();
  OKV_CHECK(!isas.empty());
  if (name.empty()) return isas.front();
  for (const Isa& isa : isas) {
    if (isa.name == name) return isa;
  }
  OKV_CHECK(false, "no instruction set '{}' on this CPU", name);
  return {};
}

}  // namespace omnikv
