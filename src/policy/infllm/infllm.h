// What infllm keeps of its sequences, and how it is enqueued.
#pragma once

#include <array>

#include <deque>
#include <string>
#include <string_view>

#include "policy/infllm/far_ops.h"
#include "policy/policy.h"
#include "policy/policy_memory.h"

namespace omnikv {

// Arguments of ops, where they do not fit an op: equal ones have one address, which stays.
template <typename Args>
class Interned {
 public:
  const Args* At(const Args& args) {
    for (const Args& known : all_) {
      if (known == args) return &known;
    }
    return &all_.emplace_back(args);
  }

 private:
  std::deque<Args> all_;
};

// Far memory of all layers and sequences, sums of local weights, and keys of blocks. Enqueues at
// record time. Thread-compatible.
class FarMemory {
 public:
  // `rows`: of the largest step.
  Status Prepare(const PolicyContext& context, const FarShape& shape, int32_t representatives,
                 int32_t rows);

  // Whether any block can ever be whole.
  bool HasBlocks() const { return max_blocks_ > 0; }
  size_t Bytes() const { return memory_.bytes(); }

  // Once per decode step, or per layer of a prompt: `skip` of its rows have no far tokens.
  void Locate(const AttendArgs& step, int32_t skip, bool prefill) const;
  // What a layer's LRU holds is settled: in every step that may be a sequence's first, since that
  // finds it empty. Attend does it too.
  void Keep(const LayerStep& step, const AttendArgs& attend) const;
  // Chooses, copies, and attends: what the rows give each other from far tokens is in state().
  void Attend(const LayerStep& step, const AttendArgs& attend, int32_t skip);
  AttendState state() const { return {far_o_.as<float>(), far_lse_.as<float>()}; }
  // After the attention, whose log sums are over all that the rows read. That of a decode step has
  // left its logits as scores.
  void Weigh(const LayerStep& step, const AttendArgs& attend);

  void CopyFrom(const FarMemory& from);
  std::string Save(int32_t seq, int64_t length) const;
  bool Load(int32_t seq, int64_t length, std::string_view state);

 private:
  int64_t KeyFloats() const { return int64_t{context_.n_heads} * context_.dk; }
  // Of a layer, for all sequences.
  float* Keys(int32_t layer) const {
    return keys_.as<float>() + layer * (int64_t{context_.max_seqs} * max_blocks_ * KeyFloats());
  }
  float* Sums(int32_t layer) const {
    return sums_.as<float>() +
           layer * (int64_t{context_.max_seqs} * kWeightRing * context_.n_heads * stride_);
  }
  // n integers of each sequence.
  int32_t* Of(const Buffer& buffer, int32_t layer, int64_t n) const {
    return buffer.as<int32_t>() + layer * context_.max_seqs * n;
  }
  const float* InvFreq(int32_t layer) const {
    return context_.inv_freq[static_cast<size_t>(layer)];
  }
  // Of a whole step, of rows that decode and of a prompt's beside them: LocateFarArgs.
  struct Located {
    Buffer to_rows, to_seqs, units, bounds, n_candidates, n_pick;
  };
  const Located& At(bool prefill) const { return located_[prefill ? 1 : 0]; }
  KvView View(int32_t layer, const KvView& kv) const;
  void Choose(const LayerStep& step, const AttendArgs& attend) const;
  // What the LRU had is forgotten, and far tokens are copied anew.
  void Forget() const;
  // Calls visit(address, bytes) for what a sequence of `length` tokens must not lose.
  template <typename Visit>
  void ForState(int32_t seq, int64_t length, const Visit& visit) const;

  PolicyContext context_;
  FarShape shape_;
  int32_t representatives_ = 1;
  int32_t rows_ = 0;
  int32_t stride_ = 0;        // tokens of a list of sums
  int32_t max_blocks_ = 0;    // of a sequence
  int64_t score_stride_ = 0;  // blocks
  PolicyMemory memory_;
  // By layer and sequence:
  Buffer far_, pos_;                       // rows [Slots() * block], and their positions
  Buffer table_;                           // int32 [Entries()]
  Buffer owner_, stamp_, clock_, copied_;  // KeepBlocksArgs
  Buffer sums_;                            // f32 [kWeightRing, n_heads, stride]
  Buffer keys_;                            // f32 [max_blocks, n_heads, dk]
  // Of one layer at a time:
  Buffer q_, far_o_, far_lse_;     // [rows, n_heads, dk], [rows, n_heads]
  Buffer mean_q_;                  // f32 [n_heads, dk]
  Buffer scores_, index_, count_;  // of blocks
  Buffer miss_, n_miss_, range_;   // KeepBlocksArgs
  std::array<Located, 2> located_;
  Buffer one_;      // f32 [1]: 1
  Buffer numbers_;  // int32 [max_seqs]: 0, 1, 2, ...
  Interned<CopyFarArgs> copies_;
  Interned<WeighLocalArgs> weighings_;
  Interned<RepresentArgs> keys_made_;
};

}  // namespace omnikv
