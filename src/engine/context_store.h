// Contexts in a folder, for requests to come: of this process, and of later ones (docs/serving.md).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "engine/context_reading.h"
#include "engine/context_segments.h"
#include "engine/context_writing.h"
#include "engine/kept_contexts.h"
#include "engine/segment_files.h"

namespace omnikv {

struct ContextStoreOptions {
  std::string folder;          // made where it is not there
  uint64_t bytes = 0;          // that its files take at most
  int64_t least_tokens = 256;  // of a context that is worth a file
  int64_t segment_tokens = 0;  // ShapeOf
  DiskReaderOptions reading = {};
  WritingOptions writing = {};
};

// The rows of a context as a store has them.
struct StoredContext {
  std::string path;
  uint64_t bytes = 0;  // of its own file
  std::vector<int32_t> tokens;
  int64_t dense_rows = 0;             // SharedRows
  std::string made_by;                // the same
  std::vector<std::string> segments;  // names, of those at its beginning

  // Names it for as long as its file is there, in every process that has the folder.
  std::string id() const;
  SharedRows Rows() const {
    return {.tokens = tokens, .dense_rows = dense_rows, .made_by = made_by};
  }
};

struct ContextStoreStats {
  int64_t contexts = 0;
  int64_t segments = 0;
  uint64_t bytes = 0;                          // of the files of both
  int64_t written = 0, read = 0, dropped = 0;  // contexts, since the start
  uint64_t written_bytes = 0;
  int64_t given_up = 0;     // not written: their memory was needed before, or a longer one came
  int64_t read_direct = 0;  // of those read, past the page cache
  uint64_t read_bytes = 0;
  int64_t failed = 0;  // files that were damaged, or could not be written
};

// A context is a file, and before that the segments that the file names, which several contexts may
// have in common. The file is written last, so what is listed is there whole. What is damaged is
// deleted when it is found, and what is of another model or format of K/V is left alone. The
// contexts that go first are those of few tokens that were not used for long; one that is pinned
// stays until it is unpinned or deleted, and a segment goes with the last context that names it.
// Several processes may have one folder: what one deletes, the others miss, and what one pins is
// pinned for all, as an empty file beside it says so.
//
// The engine's thread calls Put, Store, Advance, GiveUp, Read, Ended and Flush; threads of the
// store write and read.
class ContextStore {
 public:
  // kInvalidArgument where the folder cannot be made or read.
  static Result<std::unique_ptr<ContextStore>> Open(EngineCore& core, ContextStoreOptions options);
  ~ContextStore();  // what waits is written

  // Has the rows of a sequence of the bank written, which stays as it is, and open, as long as
  // HoldOf says, or until GiveUp. Nothing where a context that begins with its tokens is there
  // already. REQUIRES one that lost no rows by choice.
  void Put(int32_t seq, std::vector<int32_t> tokens, int64_t dense_rows, std::string made_by);
  // The same of any length. Calls `done` once it is written, on the thread that writes or, where
  // nothing is to be written, in this call: with the id of the file that has the context, which may
  // be that of one that begins with its tokens, or with what keeps it from being stored
  // (kResourceExhausted for want of room). It outlives what `done` names.
  using Done = std::function<void(const Result<std::string>& id)>;
  void Store(int32_t seq, std::vector<int32_t> tokens, int64_t dense_rows, std::string made_by,
             Done done);
  // Copies some of the rows that wait, between two steps: at most those that WritingOptions has
  // room for. `ready` is called on a thread of the store each time that there is more to do.
  void Advance();
  void set_ready(std::function<void()> ready);
  // Whether a sequence is to stay: for as long as nobody else needs its memory, or (Store) whoever
  // does.
  enum class Hold { kNone, kGivesWay, kStays };
  Hold HoldOf(int32_t seq) const;
  // Whether some sequence is to stay whoever needs its memory.
  bool Saves() const;
  // The sequence goes: what of it is not copied yet is not written.
  void GiveUp(int32_t seq);
  // Whether something is to be written still.
  bool Writes() const;

  // Calls visit(context) for each that is in the folder.
  template <typename Visit>
  void ForEach(const Visit& visit) const {
    const std::lock_guard lock(mutex_);
    for (const StoredContext& c : contexts_) visit(c);
  }
  // The context of that id, if it is there.
  std::optional<StoredContext> Find(std::string_view id) const;
  // Bytes of its files, those that others have, too, in full.
  uint64_t BytesOf(const StoredContext& context) const;
  bool Pinned(const StoredContext& context) const;
  // kNotFound where there is none of that id; kFailed where the folder cannot be written.
  Status Pin(std::string_view id, bool pinned);
  Status Delete(std::string_view id);
  // How many tokens of a context are read where the first `tokens` of them are wanted: the segments
  // that have these, or all.
  int64_t TokensToRead(const StoredContext& context, int64_t tokens) const;
  // Begins to read so many of its tokens, of which the bank gets a new sequence. Ended comes behind
  // it. REQUIRES a number of TokensToRead.
  std::unique_ptr<ContextReading> Read(const StoredContext& context, int64_t tokens,
                                       std::function<void()> ready);
  // What a reading came to, before its sequence is taken. What keeps a file from being read is not
  // there for later requests: it is gone, or is damaged and is deleted. But where the bank had no
  // room (kResourceExhausted), or nobody wanted it any more (kCancelled), it stays.
  void Ended(const StoredContext& context, const ContextReading& reading, const Status& status);

  // Once all that waits is written: copies it, too.
  void Flush();
  // The same while another thread copies.
  void AwaitWritten();
  ContextStoreStats stats() const;

 private:
  struct Waiting {
    StoredContext context;
    SequenceImage image;
    std::shared_ptr<ContextWriting> writing;
    std::vector<Done> done = {};
    bool begun = false;  // the thread has it
    bool gone = false;   // GiveUp
  };

  ContextStore(EngineCore& core, ContextStoreOptions options);
  Status ReadFolder();
  // The context of a file of this model; of another, what it names alone, and no tokens. kCorrupt
  // where it is damaged.
  Result<StoredContext> Peek(const std::string& path) const;
  void Ready();
  void Write();  // the thread's
  Status WriteOne(Waiting& waiting);
  // Of its segments those that are missing, then its own.
  Status WriteFiles(Waiting& waiting, const std::vector<size_t>& missing, const std::string& text);
  // Adds what was written to the contexts, and removes those that are its beginnings.
  void Add(StoredContext context);
  // Deletes contexts until `bytes` more fit; false: those that are pinned leave no room.
  bool MakeRoom(uint64_t bytes);
  // The one that is worth least, if any may go. The lock is held.
  std::list<StoredContext>::iterator Least();
  // Deletes the segments that no context needs, in this process or in another one.
  void Sweep();
  // Looks for what other processes wrote and deleted. Returns the segments that files of other
  // models name; nothing: the folder cannot be read.
  std::optional<std::unordered_set<std::string>> LookAgain();
  // The lock is held.
  std::list<StoredContext>::iterator Erase(std::list<StoredContext>::iterator context);
  void Forget(const std::string& path);
  uint64_t BytesHere() const { return bytes_ + segments_.bytes(); }

  EngineCore& core_;
  ContextStoreOptions options_;
  nlohmann::json marks_;  // of the model
  SegmentShape shape_;
  std::thread writer_;

  std::mutex ready_mutex_;  // of ready_
  std::function<void()> ready_;
  // Held while segments are claimed or deleted, before the one below.
  std::mutex files_mutex_;
  mutable std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::list<StoredContext> contexts_;
  uint64_t bytes_ = 0;  // of their own files
  SegmentFiles segments_;
  // What files of other models name, by path.
  std::unordered_map<std::string, std::vector<std::string>> of_others_;
  std::list<Waiting> queue_;
  bool more_ = false;  // for Advance to do
  bool stop_ = false;
  ContextStoreStats stats_;
};

}  // namespace omnikv
