#include "backend/cpu/prefill/amx_kernels.h"

#include "backend/cpu/prefill/amx_attend.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace omnikv::prefill {

#if defined(__x86_64__) && defined(__linux__)
namespace {

// The operand of ldtilecfg (palette 1): 8 tiles of `rows` rows of `line` bytes.
struct TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t line[16] = {};  // bytes
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// The instructions as assembly with their operands declared: compilers drop the stores of a
// configuration that only the intrinsic reads (GCC 12 does).
struct MachineTiles {
  template <int T>
  void Load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  void Store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  void Zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int C, int A, int B>
  void Dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

void Begin() {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.line[i] = kAmxSide * sizeof(uint32_t);
    config.rows[i] = kAmxSide;
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
}

void End() {
  asm volatile("tilerelease");
}

void Attend(const AttendTile* panels, int64_t n, FunctionRef<void(int64_t)> before) {
  MachineTiles tiles;
  AmxAttention<MachineTiles>::Run(tiles, panels, n, before);
}

bool Usable() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  if ((d & kBf16) == 0 || (d & kTile) == 0 || Bf16AttendKernels() == nullptr) return false;
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

bool AmxBf16Usable() {
  static const bool usable = Usable();
  return usable;
}

void AmxSpin(int64_t n) {
  MachineTiles tiles;
  Begin();
  tiles.Zero<4>();
  tiles.Zero<5>();
  tiles.Zero<6>();
  tiles.Zero<7>();
  for (int64_t i = 0; i < n; ++i) {
    tiles.Dot<0, 4, 6>();
    tiles.Dot<1, 4, 7>();
    tiles.Dot<2, 5, 6>();
    tiles.Dot<3, 5, 7>();
  }
  End();
}

const AttendKernels* AmxAttendKernels() {
  static constexpr AttendKernels kKernels = {.name = "AMX bf16",
                                             .lanes = kAmxLanes,
                                             .pack = 2,
                                             .tile_tokens = kAmxTokens,
                                             .max_queries = 2048,  // CPUs with AMX have 2 MB
                                             .min_queries = 512,
                                             .query_words = 256 << 10,
                                             .unit = kAmxSide,
                                             .norm = true,
                                             .scratch = kAmxScratch,
                                             .begin = Begin,
                                             .end = End,
                                             .pack_rows = AmxPack,
                                             .attend = Attend};
  return AmxBf16Usable() ? &kKernels : nullptr;
}

#else

bool AmxBf16Usable() {
  return false;
}
void AmxSpin(int64_t) {}
const AttendKernels* AmxAttendKernels() {
  return nullptr;
}

#endif

}  // namespace omnikv::prefill
