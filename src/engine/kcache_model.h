// How long a decode step takes at least, by the bytes that it moves: with all K/V on the card, and
// under `kcache`, whose V cross the bus (docs/decisions/066).
#pragma once

#include <cstdint>

namespace omnikv {

// A card and its bus.
struct CardRates {
  double memory_bytes = 0;       // 0: not known
  double read_bytes_s = 0;       // of its memory
  double from_host_bytes_s = 0;  // 0: there is no bus, V are read as K are
  double flops = 0;              // floating-point operations a second; 0: not counted
};

// A model, its sequences and what `kcache` reads of them.
struct KcacheLoad {
  double weight_bytes = 0;
  double parameters = 0;  // that a token is multiplied with; 0: not counted
  int32_t layers = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  double value_bytes = 2;  // of one number of K or V
  int32_t batch = 1;
  int64_t context = 0;       // tokens of each sequence
  int64_t top = 0;           // whose V a KV head reads
  int32_t first_layers = 1;  // that read V of everything, on the card
};

// Bytes of one step, and the seconds that they take.
struct KcacheStep {
  double weights = 0, k = 0, v_card = 0, v_bus = 0;
  double seconds = 0;       // the card's bytes and the bus's one after another
  double flop_seconds = 0;  // of the products, which lie below the bytes in a small batch
  double tokens_s = 0;
};
KcacheStep FullStep(const CardRates& card, const KcacheLoad& load);
KcacheStep KcacheStepOf(const CardRates& card, const KcacheLoad& load);

// Tokens of context per token chosen above which N rows of V over the bus take less time than all
// of them from the card: s / N > read / from_host. 0 without a bus.
double BreakEven(const CardRates& card);

// Sequences whose K/V a card holds beside the weights; of `kcache` K, and V of the first layers.
int64_t MostSequences(const CardRates& card, const KcacheLoad& load, bool kcache);

// What the paper measures on: 64 GB, 1 TB/s and 180 TFLOP/s, with Llama-2-7B in f16. It does not
// name the bus: 32 GB/s, of PCIe 4.0, are assumed.
CardRates PaperCard();
KcacheLoad PaperLoad(int32_t batch, int64_t context, int64_t top);

}  // namespace omnikv
