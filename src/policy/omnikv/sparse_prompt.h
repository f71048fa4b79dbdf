// prefill=sparse of policy omnikv (the paper's appendix D.10): chunks of a prompt choose as decode
// steps do. In a filter layer the weights that a chunk's queries give choose tokens before the
// chunk; the layers that read a choice gather these and the chunk's own rows in a contiguous stage,
// and attend to the stage with the kernel of dense prompts.
#pragma once

#include <cstdint>

#include "policy/policy.h"
#include "policy/policy_memory.h"

namespace omnikv {

// Enqueues at record time. Thread-compatible.
class SparsePrompt {
 public:
  // From prefill, r, chunk, score, lists and sinks. With a backend, takes `memory`.
  Status Prepare(const PolicyContext& context, PolicySettings& settings, PolicyMemory& memory);

  // Whether prompts may read less than everything.
  bool on() const { return on_; }
  // Rows of a chunk; 0 where it is off.
  int32_t chunk() const { return on_ ? chunk_ : 0; }
  // Whether the rows of this step read a choice. Those of a first chunk read everything, as do
  // those whose choice would be all tokens.
  bool Chooses(const LayerStep& step, int32_t n_rows) const;

  // Around the attention of a filter layer, to all tokens.
  void AskForWeights(AttendArgs& attend) const { attend.lse = lse_.as<float>(); }
  void Choose(const LayerStep& step, const AttendArgs& attend) const;
  // For the attention of a layer that reads the last choice: gathers its rows, and points it there.
  void Gather(const LayerStep& step, AttendArgs& attend) const;

 private:
  Status Allocate(PolicyMemory& memory);
  int32_t Picks(const LayerStep& step, int32_t n_rows) const;
  const int32_t* Number(int32_t i) const { return numbers_.as<int32_t>() + i; }

  PolicyContext context_;
  bool on_ = false;
  bool softmax_ = true;
  bool all_ = false;      // r=all
  int32_t chunk_ = 0;     // tokens
  int64_t ratio_ = 0;     // tokens chosen per token of a chunk
  int32_t lists_ = 1;     // 1, or n_kv_heads
  int32_t sinks_ = 0;     // first tokens, which are chosen whatever their scores
  int32_t capacity_ = 0;  // tokens that a list has room for
  int64_t stride_ = 0;    // tokens

  Buffer lse_;             // f32 [max_rows, n_heads]
  Buffer scores_, aged_;   // f32 [lists, stride]; the latter with sinks
  Buffer index_, count_;   // int32 [lists, capacity], [lists]
  Buffer weight_;          // f32 [1]: 1
  Buffer numbers_;         // int32 [kNumbers]: of the chunk
  Buffer gone_;            // int32 [max_seqs]: tokens before the chunk that are not chosen
  Buffer rows_, seqs_;     // the step's, as the stage numbers them
  Buffer stage_, blocks_;  // rows of a layer, and their block table: int32 [table entries]
};

}  // namespace omnikv
