// A disk beside a card. The card reaches no file, so threads of the host read and write it, and
// what they read and write passes through pinned memory (host_posts.h): rows that a step fetches,
// rows that it made, and copies of whole layers.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "backend/cuda/host_posts.h"
#include "backend/disk_memory.h"

namespace omnikv::cuda {

// One thread drives it. Must be destroyed when nothing runs on the card any more.
class DiskLane {
 public:
  // Of what was recorded, to be given to Run at each replay.
  struct Jobs {
    std::vector<PostedJobs::Job> reads, writes;
  };

  // kInvalidArgument where no files can be made in the folder.
  static Result<std::unique_ptr<DiskLane>> Create(const std::string& folder, DeviceMemory& memory,
                                                  PinnedMemory& pinned);
  ~DiskLane();

  Result<Buffer> Allocate(size_t bytes, std::string_view what);
  bool Holds(const void* p) const { return p != nullptr && disk_->Holds(p); }
  uint64_t bytes_read() const { return disk_->bytes_read(); }
  // The first failure since the last call. Jobs that are under way then have ended, so none of them
  // fails the next step.
  Status TakeFailure();

  // Each of the following enqueues on the stream of `launch`. They throw OutOfMemory. `recorded`:
  // takes the jobs of what is recorded; null: they run once, now.

  // Rows from the disk to the card. Fetches of one recording that have one list are announced to
  // the system when the first of them runs.
  void Fetch(const FetchRowsArgs& fetch, const Launch& launch, Jobs* recorded);
  // Rows from the card to the disk, which are there when what is enqueued after AwaitWrites runs.
  void Store(const FetchRowsArgs& store, const Launch& launch, Jobs* recorded);
  // Copies between a disk and the card, never recorded. Those of one direction come one after
  // another on the card.
  void CopyIn(void* to, const std::byte* from, size_t bytes, const Launch& launch);
  void CopyOut(std::byte* to, const void* from, size_t bytes, const Launch& launch);
  void AwaitWrites(const Launch& launch);

  // What a new recording fetches is not announced by an earlier one.
  void BeginRecording() { leader_.reset(); }
  void Run(const Jobs& jobs);
  // Copies now, between a disk and any memory. REQUIRES that nothing runs which uses either.
  void CopyNow(void* to, const void* from, size_t bytes);
  // Returns when all jobs are done.
  void Drain();

 private:
  struct FetchJob;
  // Pinned memory that grows. Recorded steps keep what they use of it.
  class Pinned {
   public:
    std::byte* Get(PinnedMemory& pinned, size_t bytes);

   private:
    std::vector<Buffer> pieces_;  // the last is the largest
  };

  DiskLane(std::unique_ptr<DiskMemory> disk, PinnedMemory& pinned)
      : disk_(std::move(disk)), pinned_(pinned) {}
  // 0, 1, ...: n of them at least, in pinned memory.
  const int32_t* RowsInOrder(int64_t n);
  void Give(PostedJobs::Job job, HostPosts& posts, std::vector<PostedJobs::Job>* recorded);

  std::unique_ptr<DiskMemory> disk_;
  PinnedMemory& pinned_;
  // Of rows, which recordings have, and of copies: they may be under way side by side.
  std::unique_ptr<HostPosts> reads_, writes_, copies_in_, copies_out_;
  Pinned stage_, in_order_;
  int64_t n_in_order_ = 0;
  std::shared_ptr<FetchJob> leader_;  // of the fetches that are recorded, the first with their list
  std::array<Pinned, 2> ways_in_, ways_out_;
  size_t next_way_out_ = 0;        // of those, which have a copy that nobody awaits
  bool stores_under_way_ = false;  // and are not awaited
};

}  // namespace omnikv::cuda
