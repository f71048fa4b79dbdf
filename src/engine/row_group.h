// Sequences that one instance of a policy serves. They share what a step of them needs: the
// policy's state, rotary frequencies, what is near of their K/V, and the steps that were recorded.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "engine/core.h"
#include "engine/recorded_steps.h"

namespace omnikv {

// How a decode step ends: with logits, or with the token that follows, the highest or drawn.
enum class StepEnd { kLogits, kArgmax, kSample };

// Whether keys of all contexts are rotated alike, whatever their length, so that sequences can
// share steps and rows.
bool OneRotation(const ModelConfig& config);

// Up to `max_seqs` sequences of any lengths, its members; they come and go between steps. A
// member's number is below max_seqs, and is the index of the sequence in all that the policy keeps.
// One thread drives it and whatever else its engine has; it must not outlive the engine.
class RowGroup {
 public:
  // kInvalidArgument unless 1 <= max_seqs <= kMaxBatch; for more than one sequence kUnsupported for
  // a policy that keeps the state of one sequence or passes layers through stages, and for models
  // whose rotations depend on a prompt's length. kUnsupported where the backend cannot run a step
  // of it (CheckSupported).
  static Result<std::unique_ptr<RowGroup>> Open(EngineCore& core, const PolicyOptions& policy,
                                                int32_t max_seqs, const PolicyInfo* own = nullptr);
  // The same without that question.
  static Result<std::unique_ptr<RowGroup>> OpenUnasked(EngineCore& core,
                                                       const PolicyOptions& policy,
                                                       int32_t max_seqs,
                                                       const PolicyInfo* own = nullptr);
  ~RowGroup();

  // A new, empty sequence: its member's number. kResourceExhausted when all numbers, or all
  // sequences of the bank, are taken.
  Result<int32_t> Join();
  // The same for a copy of the one sequence of `from`, with what its policy knows. REQUIRES that
  // both groups have room for one sequence, and the same policy.
  Result<int32_t> JoinFork(const RowGroup& from);
  // The same for the first `length` tokens of a sequence of the bank, as rows of a prompt whose
  // states of this group's policy are still to be made (Stepper::MakeStates). REQUIRES one that
  // lost no rows by choice.
  Result<int32_t> JoinPrefix(int32_t bank_seq, int64_t length);
  // Frees the sequence and its number. REQUIRES the number of a member, as all below.
  void Leave(int32_t member);
  // Frees the number alone: the caller has the sequence of the bank from now on.
  int32_t Detach(int32_t member);

  int64_t length(int32_t member) const { return core_.bank->Length(At(member).seq); }  // tokens
  // Of them, the tokens that came as prompts.
  int64_t prompt_length(int32_t member) const { return At(member).prompt_length; }
  void set_prompt_length(int32_t member, int64_t tokens) {
    members_[static_cast<size_t>(member)].prompt_length = tokens;
  }
  // `layer_gone` stands until the sequence changes.
  SeqLength lengths(int32_t member) const {
    return {.tokens = length(member),
            .prompt = prompt_length(member),
            .gone = residency().Gone(member),
            .layer_gone = residency().LayerGone(member)};
  }
  int32_t seq(int32_t member) const { return At(member).seq; }  // of the bank
  // Below which the sequence cannot be cut back, but to nothing.
  int64_t least_length(int32_t member) const { return core_.bank->LeastLength(At(member).seq); }

  // Room for a decode step's token, and for the next `n` rows of a prompt that ends at prompt_end.
  // As Bank::Append.
  Status Append(int32_t member, int64_t n);
  Status AppendPrompt(int32_t member, int64_t n, int64_t prompt_end);
  // Whether a prompt of the sequence passes layer by layer (docs/decisions/046), and room for all
  // of its rows then.
  bool PassesByLayer(int32_t member) const;
  // `rows`: how many each layer keeps after a choice that says so.
  Status AppendWhole(int32_t member, int64_t n, std::span<const int64_t> rows = {}) {
    return residency().AppendWhole(seq(member), n, rows);
  }
  // The rows of AppendPrompt or AppendWhole are computed.
  void EndPromptRows(int32_t member, int64_t prompt_end);
  // Whether the next prompt of the sequence ends in passes and a choice after them; and what
  // follows that choice, which said how many rows each layer keeps.
  bool AwaitsPasses(int32_t member) const {
    return residency().ChoosesAfterPrompt(member) && policy().Kept().passes;
  }
  void EndPasses(int32_t member, std::span<const int64_t> rows) {
    residency().EndPrompt(member, seq(member), /*chose=*/true, rows);
  }
  // Whether rows up to `position` of such a prompt end in a choice of the rows that stay.
  bool ChoosesAfter(int32_t member, int64_t position, int64_t prompt_end) const;
  // A prompt of `total` tokens passes whole, or in parts that each end in a choice (Keeps::chunk):
  // the end of the part that `position` is in.
  int64_t PartEnd(int64_t position, int64_t total) const;
  // Rows of the next step of a prompt of which `left` are to come, at most `most`: the last step
  // has the rows that the policy must see in one.
  int32_t ChunkRows(int64_t left, int32_t most) const;
  // Rows at the end of a prompt, of tokens that are in context already, that must be computed anew
  // for the logits and for the policy's state.
  int64_t WarmRows(int32_t member) const;
  // Forgets the tokens from `length` on of steps that nobody read.
  void Forget(int32_t member, int64_t length);
  // Forgets the tokens from `length` on, and what is near of the others, which count as a prompt.
  void CutTo(int32_t member, int64_t length);
  // Gives back the rows of the first `length` tokens that no later row reads.
  void Drop(int32_t member, int64_t length) { DropTokens(core_, policy(), At(member).seq, length); }
  int32_t max_seqs() const { return static_cast<int32_t>(members_.size()); }
  Policy& policy() const { return *policy_.policy; }
  const PolicyInfo& policy_info() const { return *policy_.info; }
  // Whether logits of a prompt are full attention's.
  bool DensePrompts() const { return policy().DensePrompts() && policy().Kept().chunk == 0; }
  const StateStreams& states() const { return policy_.states; }
  // And those of which rows are there.
  StateStreams AllStates() const;
  const std::string& policy_name() const { return policy_.info->name; }
  const PolicySettings& settings() const { return policy_.settings; }
  // Whether decode steps read everything in all layers.
  bool ReadsAll() const { return reads_all_; }
  int64_t id() const { return id_; }  // of no other group of the engine
  RopeState& ropes() { return ropes_; }
  Residency& residency() const { return *residency_; }

 private:
  friend class Stepper;

  struct Member {
    int32_t seq = -1;  // of the bank; -1: free
    int64_t prompt_length = 0;
  };
  // A decode step of this group alone as it is recorded: the policy's variant, rows, the first row
  // of the logits, and how it ends.
  using StepKey = std::tuple<int32_t, int32_t, int32_t, StepEnd>;
  static constexpr size_t kMostSteps = 128;

  explicit RowGroup(EngineCore& core) : core_(core) {}
  const Member& At(int32_t member) const;
  // A free number, for the sequence that `new_sequence` gives.
  template <typename NewSequence>
  Result<int32_t> Take(const NewSequence& new_sequence);

  EngineCore& core_;
  int64_t id_ = 0;
  bool reads_all_ = true;
  RopeState ropes_;
  PreparedPolicy policy_;
  std::unique_ptr<Residency> residency_;
  std::vector<Member> members_;
  RecordedSteps<StepKey> steps_{kMostSteps};
};

}  // namespace omnikv
