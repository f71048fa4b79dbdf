// Layers whose KV heads keep different numbers of a prompt's rows.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "policy/policy.h"
#include "policy/policy_memory.h"

namespace omnikv {

// Where the heads have tables of their own (RowLayout::heads_apart), each holds its own rows and
// reads all of them. Else a layer holds as many rows of the prompt as its largest head keeps, and
// every head reads its own, which come first. So a head reads a list of the numbers 0, 1, 2 and so
// on, and all heads the rows that came after the prompt. A sequence without a choice has all its
// rows in that range. Thread-compatible.
class HeadRows {
 public:
  Status Prepare(const PolicyContext& context, PolicyMemory& memory);

  bool Chosen(int32_t seq) const { return !Of(seq).empty(); }
  // From now on the KV heads of a sequence keep so many rows [n_layers, n_kv_heads] of its first
  // `tokens`; empty: no choice.
  void Set(int32_t seq, const std::vector<int32_t>& counts, int64_t tokens);
  // The tokens that the last choice was made of, all before included; 0: no choice.
  int64_t Tokens(int32_t seq) const { return tokens_[static_cast<size_t>(seq)]; }
  // As Set had them; zeros: no choice.
  std::vector<int32_t> Counts(int32_t seq) const;
  // Rows of a layer before that of the first token that came later: of each KV head where these are
  // apart, else of all together. Empty: no choice. And those of one KV head.
  std::span<const int32_t> First(int32_t seq, int32_t layer) const;
  int32_t First(int32_t seq, int32_t layer, int32_t head) const;
  // Rows of the prompt that the head of a layer keeps that keeps most, and tokens times KV heads
  // that the layer reads where that head holds `held` rows.
  int64_t Rows(int32_t seq, int32_t layer) const;
  int64_t Read(int32_t seq, int32_t layer, int64_t held) const;

  // What a layer reads, of all sequences, in a table that all heads share.
  AttnPlan Plan(int32_t layer) const;
  // The counts of a layer of a sequence, in the backend's memory.
  const int32_t* Counts(int32_t layer, int32_t seq) const {
    return counts_.as<int32_t>() + (int64_t{layer} * n_seqs_ + seq) * n_kv_heads_;
  }

  // Of a sequence, as Policy's.
  void Copy(const HeadRows& from) { Set(0, from.Of(0), from.Tokens(0)); }
  std::string Save(int32_t seq) const;
  bool Load(int32_t seq, int64_t length, std::string_view state);

 private:
  const std::vector<int32_t>& Of(int32_t seq) const { return of_[static_cast<size_t>(seq)]; }
  size_t Lists() const { return static_cast<size_t>(n_layers_) * static_cast<size_t>(n_kv_heads_); }

  Backend* backend_ = nullptr;
  int32_t n_layers_ = 0;
  int32_t n_kv_heads_ = 0;
  int32_t n_seqs_ = 0;
  bool apart_ = false;
  int32_t capacity_ = 0;  // tokens
  Buffer rows_;    // int32 [n_seqs, n_kv_heads, capacity]: 0, 1, 2 ...; not where heads are apart
  Buffer counts_;  // int32 [n_layers, n_seqs, n_kv_heads]
  Buffer bounds_;  // int32 [n_layers, n_seqs, 2]; likewise
  std::vector<std::vector<int32_t>> of_;    // [n_seqs]: as Set had them
  std::vector<std::vector<int32_t>> most_;  // [n_seqs]: of the KV heads of each layer
  std::vector<int64_t> tokens_;             // [n_seqs]
};

}  // namespace omnikv
