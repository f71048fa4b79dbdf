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
#include <vector>

#include "engine/context_reading.h"
#include "engine/kept_contexts.h"
#include "io/checked_file.h"

namespace omnikv {

struct ContextStoreOptions {
  std::string folder;                      // made where it is not there
  uint64_t bytes = 0;                      // that its files take at most
  int64_t least_tokens = 256;              // of a context that is worth a file
  // That wait to be written; more are not stored. A context that finds none waiting may take half of
  // the memory that is free.
  uint64_t queue_bytes = size_t{2} << 30;
  DiskReaderOptions reading = {};          // of one file
};

// The rows of a context as a store has them.
struct StoredContext {
  std::string path;
  uint64_t bytes = 0;
  std::vector<int32_t> tokens;
  int64_t dense_rows = 0;  // SharedRows
  std::string made_by;     // the same

  // Names it for as long as its file is there, in every process that has the folder.
  std::string id() const;
  SharedRows Rows() const {
    return {.tokens = tokens, .dense_rows = dense_rows, .made_by = made_by};
  }
};

struct ContextStoreStats {
  int64_t contexts = 0;
  uint64_t bytes = 0;
  int64_t written = 0, read = 0, dropped = 0;  // since the start
  int64_t read_direct = 0;                     // of those read, past the page cache
  uint64_t read_bytes = 0;
  int64_t failed = 0;  // files that were damaged, or could not be written
};

// A file each, which is there whole or not at all; a damaged or torn one is deleted when it is
// found, and one of another model or format of K/V is left alone. The contexts that go first are
// those of few tokens that were not used for long; one that is pinned stays until it is unpinned or
// deleted. Several processes may have one folder: what one deletes, the others miss, and what one
// pins is pinned for all, as an empty file beside it says so.
//
// The engine's thread calls Put, Store, Read, Ended and Flush; threads of the store write and read.
class ContextStore {
 public:
  // kInvalidArgument where the folder cannot be made or read.
  static Result<std::unique_ptr<ContextStore>> Open(EngineCore& core, ContextStoreOptions options);
  ~ContextStore();  // what waits is written

  // Copies the rows of a sequence of the bank, to be written behind. Nothing where a context that
  // begins with its tokens is there already, or too much waits. REQUIRES one that lost no rows by
  // choice, and whose rows nothing changes meanwhile.
  void Put(int32_t seq, std::vector<int32_t> tokens, int64_t dense_rows, std::string made_by);
  // The same of any length. Calls `done` once it is written, on the thread that writes or, where
  // nothing is to be written, in this call: with the id of the file that has the context, which may
  // be that of one that begins with its tokens, or with what keeps it from being stored
  // (kResourceExhausted for want of room). It outlives what `done` names.
  using Done = std::function<void(const Result<std::string>& id)>;
  void Store(int32_t seq, std::vector<int32_t> tokens, int64_t dense_rows, std::string made_by,
             Done done);

  // Calls visit(context) for each that is in the folder.
  template <typename Visit>
  void ForEach(const Visit& visit) const {
    const std::lock_guard lock(mutex_);
    for (const StoredContext& c : contexts_) visit(c);
  }
  // The context of that id, if it is there.
  std::optional<StoredContext> Find(std::string_view id) const;
  bool Pinned(const StoredContext& context) const;
  // kNotFound where there is none of that id; kFailed where the folder cannot be written.
  Status Pin(std::string_view id, bool pinned);
  Status Delete(std::string_view id);
  // Begins to read a file, of which the bank gets a new sequence. Ended comes behind it.
  std::unique_ptr<ContextReading> Read(const std::string& path, std::function<void()> ready);
  // What a reading came to, before its sequence is taken. What keeps a file from being read is not
  // there for later requests: it is gone, or is damaged and is deleted. But where the bank had no
  // room (kResourceExhausted), or nobody wanted it any more (kCancelled), it stays.
  void Ended(const ContextReading& reading, const Status& status);

  // Once all that waits is written.
  void Flush();
  ContextStoreStats stats() const;

 private:
  struct Waiting {
    StoredContext context;
    std::string text;  // of the file
    std::vector<std::byte> rows;
    std::vector<Done> done = {};
  };

  ContextStore(EngineCore& core, ContextStoreOptions options);
  Status ReadFolder();
  // The context of a file of this model; empty: of another. kCorrupt where it is damaged.
  Result<std::optional<StoredContext>> Peek(const std::string& path) const;
  void Write();  // the thread's
  Status WriteOne(Waiting& waiting);
  // Deletes files until `bytes` more fit; false: those that are pinned leave no room. The lock is
  // held.
  bool MakeRoom(uint64_t bytes);
  void Forget(const std::string& path);

  EngineCore& core_;
  ContextStoreOptions options_;
  nlohmann::json marks_;  // of the model
  std::thread writer_;

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::list<StoredContext> contexts_;
  std::list<Waiting> queue_;
  uint64_t queued_ = 0;  // bytes
  bool stop_ = false;
  ContextStoreStats stats_;
};

}  // namespace omnikv
