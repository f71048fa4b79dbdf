// Many requests on one engine: who is admitted, which rows each step has, who waits
// (docs/serving.md).
#pragma once

#include <chrono>
#include <compare>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/answer.h"
#include "engine/block_needs.h"
#include "engine/chunk_pacer.h"
#include "engine/context_store.h"
#include "engine/group_pool.h"
#include "engine/holdings.h"
#include "engine/kept_contexts.h"
#include "engine/read_picture.h"
#include "engine/same_text.h"
#include "engine/stepper.h"
#include "engine/swapped_member.h"

namespace omnikv {

// The natural logarithm of a token's probability: of softmax over the whole vocabulary, before
// penalties, bias and temperature.
struct ScoredToken {
  int32_t token = 0;
  double logprob = 0;
};

// A token that was drawn, and the text that can be shown since the one before.
struct AnswerPiece {
  int32_t token = 0;
  std::string text;              // whole UTF-8 characters
  double logprob = 0;            // where Request::top_logprobs asks for it
  std::vector<ScoredToken> top;  // so many, the likeliest first
};

// What a request took, and what its last step read (SessionStats).
struct RequestStats {
  std::string policy, settings;
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;  // of them, those whose rows were there already
  int64_t stored_tokens = 0;  // and of those, the ones that came from the store
  int64_t answer_tokens = 0;
  double queue_seconds = 0;    // until it was admitted
  double prefill_seconds = 0;  // from then on until its prompt was read
  double decode_seconds = 0;   // from then on
  int64_t preemptions = 0;     // times that it was swapped out for others
  double read_fraction = 1;
  double attended_tokens = 0;
  // Of all steps of the answer, where layers are read through working sets.
  std::optional<double> hit_rate = {};
  uint64_t fetched_bytes = 0;  // that came to them
  // K/V and what the policy keeps beside them, once the last step was taken, shared blocks in full.
  TierBytes held = {};
};

struct RequestEnd {
  FinishReason reason = FinishReason::kStop;
  std::string text;  // what was held back until now
  std::string stop;  // the one of GenerateOptions::stop that ended it; empty: none did
  RequestStats stats;
};

// Which tokens an answer may go on with, such as those of a grammar. The thread of Turn calls it.
class TokenFilter {
 public:
  virtual ~TokenFilter() = default;
  // Sets the bits of those that may come next, bit t % 32 of word t / 32 for token t, and clears
  // the others: [SeenWords(vocab)]. At least one is set.
  virtual void Allowed(std::span<uint32_t> bits) = 0;
  // The token that was drawn from them.
  virtual void Take(int32_t token) = 0;
};

struct Request {
  std::vector<int32_t> prompt;
  // The prompt stands for its text: where a context that is there begins with other tokens of the
  // same text, these are taken (RequestStats::prompt_tokens counts them).
  bool any_spelling = false;
  PolicyOptions policy;
  GenerateOptions generate;
  int32_t top_logprobs = -1;                 // -1: no log-probabilities
  int32_t priority = 0;                      // higher goes first
  std::shared_ptr<TokenFilter> filter = {};  // null: any token may come
  // When it ends, wherever it is (kCancelled).
  std::optional<std::chrono::steady_clock::time_point> deadline;

  // Called on the thread of Turn, which they must not hold up. All but on_end may be empty.
  std::function<void(int64_t done, int64_t total, int64_t cached)> on_progress = {};
  std::function<void(const AnswerPiece& piece)> on_piece = {};
  // What a step of the answer read, before its token comes: of the first step, of the one that is
  // known to be the last, and of those between as often as reads_seconds says. Steps on a card do
  // not run ahead for such a request.
  std::function<void(const ReadPicture& picture)> on_reads = {};
  int32_t read_bins = 128;  // ReadWatch::Add
  double reads_seconds = 0.25;
  // The last call, once for each request. Not ok: kInvalidArgument or kUnsupported where it can
  // never run, kResourceExhausted where too many wait or memory ran out, else what it failed with.
  std::function<void(const Result<RequestEnd>& end)> on_end;
};

struct SchedulerOptions {
  int32_t seats = 8;           // requests at a time, 1 to kMaxBatch
  int32_t max_waiting = 1024;  // requests; one more is refused
  // The longest time between two tokens of a sequence while a prompt is read beside it,
  // milliseconds; at least twice what a step takes without the prompt.
  double token_ms = 50;
  // Bytes outside of the bank for requests that are preempted. Where a request finds room there, it
  // runs as soon as the bank has room for the first tokens of its answer, and one of a higher
  // priority need not wait for it. 0: nothing is preempted, and each has room for all its tokens
  // before it runs.
  uint64_t swap_bytes = 0;
  std::string swap_folder = {};  // on whose disk they are; empty: in memory
};

// Counts since the start, and how things stand.
struct SchedulerStats {
  int64_t running = 0, waiting = 0, kept_contexts = 0;
  int64_t finished = 0, refused = 0, cancelled = 0, failed = 0;
  int64_t prompt_tokens = 0, cached_tokens = 0, answer_tokens = 0;
  int64_t stored_tokens = 0;                  // of the cached ones, those from the store
  int64_t steps = 0, step_rows = 0;           // that decode
  SlotCounters slots = {};                    // of requests that ended or were swapped out
  int64_t preemptions = 0;                    // requests swapped out
  int64_t swapped = 0;                        // those that wait to be resumed
  uint64_t swap_bytes = 0;                    // of them
  int64_t blocks_used = 0, blocks_total = 0;  // of the first table of the bank
  int64_t pinned_contexts = 0;                // of the kept ones
  Holdings holdings = {};
};

// A context that is there: of a request that runs or is preempted, kept, or in a file of the store.
struct ListedContext {
  enum class Where { kRunning, kSwapped, kKept, kStored };
  static constexpr size_t kHead = 160;  // tokens

  std::string id;  // in memory, for as long as the scheduler lives; of a file, for as long as that
  Where where = Where::kKept;
  uint64_t request = 0;  // Scheduler::Id; 0: none has it
  bool pinned = false;
  std::string made_by;  // policy and settings of its group
  int64_t tokens = 0;
  int64_t prompt_tokens = 0;  // of a request
  int64_t answer_tokens = 0;
  uint64_t bytes = 0;         // of a file
  std::vector<int32_t> head;  // its first tokens, up to kHead
};
// That of a file.
ListedContext ListedOf(const ContextStore& store, const StoredContext& context);

// One thread calls Turn or Run, and nothing else touches the engine meanwhile; the other functions
// may be called from any thread.
class Scheduler {
 public:
  using Id = uint64_t;
  using Clock = std::chrono::steady_clock;

  // kInvalidArgument for options out of range, or more seats than the engine has sessions. It must
  // not outlive the engine, nor `store`, where contexts of requests are kept, too (null: nowhere).
  // Requests that have not ended when it goes end as cancelled.
  static Result<std::unique_ptr<Scheduler>> Create(EngineCore& core,
                                                   const SchedulerOptions& options,
                                                   ContextStore* store = nullptr);
  ~Scheduler();

  // Hands a request over; what becomes of it, its calls say.
  Id Submit(Request request);
  // Ends a request (kCancelled), unless it has ended. From its own calls, too.
  void Cancel(Id id);
  SchedulerStats stats() const;
  // Runs `call` on the thread of Turn, between two steps: what it may use the engine for.
  void Call(std::function<void()> call);

  // Only for what Call runs (scheduler_contexts.cc): the contexts that are there, and what is done
  // with the one of an id. kNotFound: there is none; kInvalidArgument: it is one of a request that
  // runs, which cannot be done that with.
  std::vector<ListedContext> Contexts() const;
  // Writes a kept one to the store; `done` as ContextStore::Store has it. kInvalidArgument without
  // a store.
  void SaveContext(const std::string& id, const ContextStore::Done& done);
  // Brings one of the store into memory, where others that are not pinned make room. Calls `done`
  // on the thread of Turn once it is there, with the id that it has there, or with what keeps it
  // from that; where nothing is to be read, in this call.
  void LoadContext(const std::string& id, ContextStore::Done done);
  // A pinned one makes room for no other. kInvalidArgument: as many as EngineOptions::kept_contexts
  // are pinned in memory.
  Status PinContext(const std::string& id, bool pinned);
  Status DropContext(const std::string& id);

  // One step of those that run, and what goes before it. False: there is nothing to do.
  bool Turn();
  // Turns, and waits for requests, until Stop.
  void Run();
  // Run returns: once those that are there have ended, if it drains, and new ones are refused
  // meanwhile; else at once.
  void Stop(bool drain);

 private:
  using Group = GroupPool::Group;

  static double Seconds(Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
  }

  struct Waiting {
    Id id = 0;
    Request request;
    Clock::time_point arrived;
    bool late = false;     // it came after Stop
    bool looked = false;   // in the store
    Id brought = 0;        // id of the kept context that came from there for it
    std::string key = {};  // of its group
  };
  // A request that was admitted.
  struct Sequence {
    Id id;
    Request request;
    Group* group;
    std::string key;  // of the group, which may go while the sequence is swapped out
    int32_t member;
    Answer answer;
    Clock::time_point admitted;
    RequestStats stats;
    bool read = false;                  // the prompt is
    std::optional<PromptSteps> prompt;  // from its first chunk on, until then
    bool by_itself = false;             // ReadsByItself, when it began
    uint64_t turn = 0;                  // when it had its last chunk, or was admitted
    Clock::time_point read_at = {};
    std::vector<int32_t> tokens;      // in the bank
    int64_t dense_rows = 0;           // SharedRows
    Clock::time_point pictured = {};  // ReadPicture: when it had the last one
    int32_t next = -1;                // drawn, and not in the bank
    std::vector<float> logits;        // [vocab]
    int64_t total = 0;                // tokens that it has in the end
    int64_t promised = 0;             // of them, those that `most` has room for
    BlockCounts most;
    SlotCounters slots = {};     // until it was swapped out
    uint64_t swap_most = 0;      // bytes that it takes when it is preempted
    uint64_t swap_reserved = 0;  // of them, those that it has a place for: all or none
    std::optional<SwappedMember> swapped = {};
    bool failed_once = false;  // a step with others and a chunk of its prompt
    bool ended = false;
  };
  using Sequences = std::vector<Sequence*>;

  Scheduler(EngineCore& core, const SchedulerOptions& options, ContextStore* store)
      : core_(core),
        options_(options),
        store_(store),
        stepper_(core),
        groups_(core, options.seats),
        kept_(core, store) {}

  void TakeIncoming();
  Status Check(Waiting& waiting) const;
  void EndCancelled();
  void RunCalls();
  void Admit();
  enum class Admission { kRuns, kWaits, kWaitsForRows, kRefused };
  Admission TryAdmit(Waiting& waiting);

  // Who goes first: of the higher priority, then who came first.
  struct Rank {
    int32_t priority;
    Id id;
    std::strong_ordering operator<=>(const Rank& other) const {
      const auto by_priority = other.priority <=> priority;
      return by_priority != 0 ? by_priority : id <=> other.id;
    }
    bool operator==(const Rank& other) const = default;
  };
  static Rank RankOf(const Sequence& s) { return {s.request.priority, s.id}; }
  static Rank RankOf(const Waiting& w) { return {w.request.priority, w.id}; }
  // Blocks that a sequence is sure to have, for its first tokens.
  struct Promise {
    int64_t tokens = 0;
    BlockCounts blocks;
  };
  Promise PromiseOf(const Policy& policy, int64_t prompt, int64_t tokens) const {
    return {.tokens = tokens, .blocks = MostBlocks(core_, policy, prompt, tokens)};
  }
  // Those under which a sequence of `length` tokens may run, the least first: some more than it
  // has, where it can be preempted, or all that it will have.
  std::vector<Promise> Promises(const Policy& policy, int64_t prompt, int64_t length, int64_t total,
                                bool can_be_preempted) const;
  // Whether the blocks fit beside those that the admitted sequences were promised; `of`: they take
  // the place of its own.
  bool Fits(const BlockCounts& most, int64_t shared, const Sequence* of = nullptr) const;
  // Bytes that a sequence takes in the swap space at most.
  uint64_t SwapMost(const RowGroup& rows, int64_t prompt, int64_t total) const {
    return core_.bank->BytesOf(PromiseOf(rows.policy(), prompt, total).blocks, rows.AllStates());
  }
  bool HasSwapRoom(uint64_t bytes) const { return swap_reserved_ + bytes <= options_.swap_bytes; }
  // Swaps out the last of the sequences that come behind `rank`. Returns whether there was one that
  // decodes and has room in the swap space.
  bool Preempt(const Rank& rank);
  // The same for those of less priority.
  bool PreemptBelow(int32_t priority) {
    return Preempt({.priority = priority, .id = std::numeric_limits<Id>::max()});
  }
  // One that is not promised all its tokens has a place in the swap space.
  void Give(Sequence& s, Promise promise);
  void ReserveSwap(Sequence& s) { swap_reserved_ += s.swap_reserved = s.swap_most; }
  void ReleaseSwap(Sequence& s) { swap_reserved_ -= std::exchange(s.swap_reserved, 0); }
  // Where the disk does not take it, it ends.
  void SwapOut(Sequence& s);
  Admission TryResume(Sequence& s);
  // Promises the sequences that decode what their next tokens need, or swaps some out.
  void KeepPromises();
  // The rows that most of a prompt can be taken from, now and once prompts that run are read.
  struct Best {
    SharedRows rows = {};
    int64_t tokens = 0;
    int64_t to_come = 0;
  };
  // Spells the request's prompt as the context, in memory or in the store, of which it can then
  // have most tokens more than as it is.
  void Respell(const Group& group, Request& request);
  Best BestRows(const Group& group, std::span<const int32_t> prompt) const;
  // --- What comes from the store while the steps of others go on (scheduler_store.cc).
  // One context of it at a time.
  struct Bringing {
    StoredContext stored;
    int64_t tokens = 0;  // of it that are brought
    std::unique_ptr<ContextReading> file;
    BlockCounts own;               // of the context, which the bank has once it is placed
    BlockCounts most;              // that its request is promised besides
    Id request = 0;                // 0: LoadContext
    Group* group = nullptr;        // of the request: it stays open
    ContextStore::Done done = {};  // of LoadContext
  };
  struct Load {
    StoredContext stored;
    ContextStore::Done done;
  };
  // The context of the store that has most of the prompt, if that is more than `best` has.
  std::optional<StoredContext> LookInStore(const Group& to, std::span<const int32_t> prompt,
                                           const Best& best) const;
  // Whether a request waits for what the store has: it is on its way, or another one is. Begins to
  // bring it, where there is room for it and for the request.
  bool WaitsForStore(Waiting& waiting, Group& group, const Best& best);
  // Begins to bring a context, where kept ones but sequence `but` make room.
  Status Bring(Bringing bringing, int32_t but);
  // Moves what has come to the bank; keeps a context that is all there. Copies for the store what
  // it still has to write.
  void ServeStore();
  void StoreIsReady();  // on a thread of the store
  void TakeFromStore();
  void EndBringing(const Status& status);
  void BeginLoads();
  // Until the store has something to take or to copy, or there is something else to do.
  void AwaitStore();
  bool IsBroughtFor(Id request) const { return bringing_ && bringing_->request == request; }
  // Whether there is anything that will free memory.
  bool OthersGoOn() const {
    return !running_.empty() || bringing_ || (store_ != nullptr && store_->Saves());
  }
  bool StoreWrites() const { return store_ != nullptr && store_->Writes(); }
  static std::string MemoryId(Id id);  // of a context in memory
  Status NoContext(const std::string& id) const;
  SharedRows RowsOf(const Sequence& s) const;
  // A member with the rows of `best`, or with fewer where these have to go.
  Result<int32_t> Join(Group& group, std::span<const int32_t> prompt, Best& best);
  int64_t TotalTokens(const Request& request) const;

  // Whether its prompt takes what only one prompt of an engine can have: the memory of one that
  // passes layer by layer, or what a policy weighs in passes.
  static bool ReadsByItself(const Sequence& s);
  Sequence* NextPrompt();
  // Sequences that decode: those that share a step, group after group, and those that take one
  // each.
  void Decoding(const Sequence* prompt, Sequences& together, Sequences& alone);
  bool DeviceDraws(const Sequences& rows) const;
  Status StepAhead(const Sequences& rows);
  void EndAhead();
  // A step without a prompt took so long.
  void CountAlone(double ms);
  void CountStep(const Sequences& rows);
  void Together(const Sequences& rows, Sequence* prompt);
  // The step of these failed: each gets one by itself.
  void Apart(const Sequences& rows, Sequence* prompt, const Status& failure);
  Status StepOf(const Sequences& rows, Sequence* prompt);
  Status BeginPrompt(Sequence& s);
  // Adds to `watch` those who want a picture of the step that is next: their numbers there, or -1.
  std::vector<int32_t> WatchReads(const Sequences& rows, ReadWatch& watch) const;
  static void TellReads(const Sequences& rows, std::span<const int32_t> watched,
                        const ReadWatch& watch);
  // A step of its prompt was taken, which had `before` tokens in the bank.
  void AfterChunk(Sequence& s, int64_t before);
  void Appended(Sequence& s);
  void Draw(Sequence& s);
  void Drawn(Sequence& s, int32_t token);
  void End(Sequence& s, const Status& status, FinishReason reason = FinishReason::kStop);
  void Refuse(const Waiting& waiting, const Status& status);
  void RemoveEnded();
  void TakeReads(Sequence& s);  // for its statistics, before it leaves its group
  // Lets its sequence of the bank go, or keeps it for others.
  void Leave(Sequence& s);

  EngineCore& core_;
  SchedulerOptions options_;
  ContextStore* store_;
  Stepper stepper_;
  GroupPool groups_;
  KeptContexts kept_;
  std::list<Sequence> running_;   // in the order of admission
  std::list<Sequence> swapped_;   // which made room; the first one is next
  uint64_t swap_reserved_ = 0;    // bytes, of all Sequence::swap_reserved
  std::vector<Waiting> waiting_;  // the first one is next
  uint64_t n_steps_ = 0;
  uint64_t turns_ = 0;  // of prompts
  std::optional<ChunkPacer> pacer_;
  double alone_ms_ = 0;  // a step without a prompt, about
  std::optional<StepsAhead> ahead_;
  Sequences ahead_rows_;
  int64_t ahead_read_ = 0;  // steps, since these rows run ahead
  Clock::time_point ahead_read_at_ = {};
  std::optional<Bringing> bringing_;
  std::list<Load> loads_;                  // that are next
  std::optional<TokenTexts> token_texts_;  // once a prompt was to be respelled
  std::vector<uint32_t> allowed_;          // of TokenFilter
  std::vector<float> filtered_;            // logits

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable wake_;
  std::vector<Waiting> incoming_;
  std::vector<Id> cancels_;
  std::vector<std::function<void()>> calls_;
  bool has_come_ = false;  // something for ServeStore to do, since it was there
  Id next_id_ = 1;
  bool stopped_ = false;
  bool drains_ = false;
  SchedulerStats stats_;
};

}  // namespace omnikv
