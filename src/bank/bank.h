// The context bank: the K/V of every token of every sequence. Policies name logical tokens; only
// the bank knows blocks, slots, tiers and bytes (DESIGN §4).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "backend/kv_format.h"
#include "bank/block_table.h"
#include "bank/tier.h"
#include "omnikv/status.h"

namespace omnikv {

// What a layer keeps of a token. Hybrid models are not uniform. Layers that attend to a sliding
// window keep every token too.
struct LayerSpec {
  int32_t n_kv_heads = 0;
  int32_t dk = 0;  // values of a K head
  int32_t dv = 0;  // values of a V head

  bool operator==(const LayerSpec&) const = default;
};

struct BankConfig {
  std::vector<LayerSpec> layers;
  DType dtype = DType::kBF16;
  int32_t block_tokens = 64;
  int64_t max_tokens = 0;   // of one sequence
  int64_t pool_tokens = 0;  // of all sequences together; 0: max_tokens
  int32_t max_seqs = 1;
};

// Sequences of tokens and where their K/V lie. Thread-compatible; driven by the thread that drives
// the backend.
class Bank {
 public:
  // kResourceExhausted when the tokens exceed the cap, memory, or what int32 can number.
  static Result<std::unique_ptr<Bank>> Create(Backend& backend, BankConfig config);

  // A new, empty sequence, or a copy of one that shares its blocks. kResourceExhausted when
  // max_seqs are open.
  Result<int32_t> NewSequence();
  Result<int32_t> Fork(int32_t seq);
  void Free(int32_t seq);

  // Makes room for `n` more tokens, and counts them as present: their rows are written by the step
  // that follows. Blocks shared with a fork are copied before they are written. On failure nothing
  // has changed.
  Status Append(int32_t seq, int64_t n);
  // Forgets the tokens from `length` on. REQUIRES length <= Length(seq).
  void Truncate(int32_t seq, int64_t length);

  // Gives back the memory of those blocks that lie whole in the tokens [begin, end), which nothing
  // may read from now on. `end` only grows from call to call, and `begin` stays.
  void Drop(int32_t seq, int64_t begin, int64_t end);

  // Writes made-up K/V, reproducible, to every token of `seq`: for benchmarks and tests, which need
  // a context without the time to compute one.
  void FillWithNoise(int32_t seq);

  int64_t Length(int32_t seq) const { return lengths_[static_cast<size_t>(seq)]; }
  // SeqMeta::table_off of the sequence.
  int32_t TableOffset(int32_t seq) const { return table_.Offset(seq); }
  KvView View(int32_t layer) const;
  // Bytes of the blocks in use in host memory, a shared one once.
  size_t HostBytes() const;
  const BankConfig& config() const { return config_; }
  // Bytes that one token takes in all layers.
  static size_t BytesPerToken(const BankConfig& config);

 private:
  Bank(Backend& backend, BankConfig config, std::unique_ptr<Tier> host, Buffer device_table,
       int32_t n_blocks, int32_t max_blocks);
  // Copies the entries [first, last) of `seq` to the table that kernels read.
  void Publish(int32_t seq, int32_t first, int32_t last);
  int32_t BlocksFor(int64_t tokens) const {
    return static_cast<int32_t>((tokens + config_.block_tokens - 1) / config_.block_tokens);
  }

  Backend& backend_;
  BankConfig config_;
  std::unique_ptr<Tier> host_;
  Buffer device_table_;  // int32 [max_seqs, max_blocks]
  BlockTable table_;
  std::vector<int64_t> lengths_;  // tokens, [max_seqs]
};

}  // namespace omnikv
