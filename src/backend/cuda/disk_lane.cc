#include "backend/cuda/disk_lane.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"

namespace omnikv::cuda {
namespace {

constexpr size_t kPieceNow = size_t{16} << 20;
// Bytes of a long copy that one word to the system announces.
constexpr size_t kExpected = size_t{1} << 20;

size_t U(int64_t n) {
  return static_cast<size_t>(n);
}

}  // namespace

std::byte* DiskLane::Pinned::Get(PinnedMemory& pinned, size_t bytes) {
  if (pieces_.empty() || pieces_.back().size() < bytes) {
    auto piece = pinned.Allocate(bytes, "K/V on their way from a disk");
    if (!piece.ok()) throw OutOfMemory(std::string(piece.status().message()));
    pieces_.push_back(std::move(*piece));
  }
  return pieces_.back().as<std::byte>();
}

Result<std::unique_ptr<DiskLane>> DiskLane::Create(const std::string& folder, DeviceMemory& memory,
                                                   PinnedMemory& pinned) {
  OKV_ASSIGN_OR_RETURN(auto disk, DiskMemory::Create(folder));
  std::unique_ptr<DiskLane> lane(new DiskLane(std::move(disk), pinned));
  for (auto* posts : {&lane->reads_, &lane->writes_, &lane->copies_in_, &lane->copies_out_}) {
    OKV_ASSIGN_OR_RETURN(*posts, HostPosts::Create(memory, pinned));
  }
  return lane;
}

DiskLane::~DiskLane() {
  for (auto* posts : {&reads_, &writes_, &copies_in_, &copies_out_}) {
    if (*posts != nullptr) (*posts)->Stop();
  }
}

Result<Buffer> DiskLane::Allocate(size_t bytes, std::string_view what) {
  OKV_ASSIGN_OR_RETURN(Buffer file, disk_->Allocate(bytes, what));
  void* const data = file.as<void>();
  auto owner = std::make_shared<Buffer>(std::move(file));
  return Buffer(data, bytes, [owner](void* p) mutable {
    if (p == nullptr || owner == nullptr) return;
    cudaDeviceSynchronize();  // the card may still wait for rows of it
    owner.reset();
  });
}

const int32_t* DiskLane::RowsInOrder(int64_t n) {
  std::byte* const rows = in_order_.Get(pinned_, 4 * U(n));
  auto* const first = reinterpret_cast<int32_t*>(rows);
  if (n > n_in_order_) std::iota(first, first + n, 0);
  n_in_order_ = std::max(n_in_order_, n);
  return first;
}

void DiskLane::Give(PostedJobs::Job job, HostPosts& posts, std::vector<PostedJobs::Job>* recorded) {
  if (recorded != nullptr) return recorded->push_back(std::move(job));
  posts.Run({&job, 1});
}

struct DiskLane::FetchJob {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  int64_t row_bytes = 0;
  const int32_t* from_row = nullptr;  // [lists, capacity], in pinned memory
  const int32_t* n = nullptr;         // [lists]
  int32_t capacity = 0;
  int32_t lists = 1;
  const int32_t* list = nullptr;  // from_row, the card's
  std::shared_ptr<Buffer> room;   // of the lists
  // Memory of other layers, from which the same rows will be fetched.
  struct Follower {
    const std::byte* from;
    int64_t row_bytes;
  };
  std::vector<Follower> followers;

  std::vector<DiskMemory::Piece> Pieces(const std::byte* memory, int64_t bytes, bool read) const {
    std::vector<DiskMemory::Piece> pieces;
    for (int32_t l = 0; l < lists; ++l) {
      const int64_t first = int64_t{l} * capacity;
      for (int64_t i = first; i < first + n[l]; ++i) {
        pieces.push_back({.from = memory + from_row[i] * bytes,
                          .to = read ? to + i * bytes : nullptr,
                          .bytes = static_cast<size_t>(bytes)});
      }
    }
    return pieces;
  }
};

void DiskLane::Fetch(const FetchRowsArgs& fetch, const Launch& launch, Jobs* recorded) {
  reads_->Start();
  const int64_t rows = int64_t{fetch.lists} * fetch.capacity;
  auto job = std::make_shared<FetchJob>();
  job->from = fetch.from;
  job->to = stage_.Get(pinned_, U(rows * fetch.row_bytes));
  job->row_bytes = fetch.row_bytes;
  job->capacity = fetch.capacity;
  job->lists = fetch.lists;
  job->list = fetch.from_row;
  job->room =
      reads_->Room(PostPieces::InLines(4 * U(rows)) + PostPieces::InLines(4 * U(fetch.lists)));
  PostPieces pieces(job->room->as<std::byte>());
  job->from_row = pieces.Add(fetch.from_row, rows);
  job->n = pieces.Add(fetch.n, fetch.lists);
  FetchRowsArgs here = fetch;
  here.from = job->to;
  here.from_row = RowsInOrder(rows);
  if (recorded != nullptr && leader_ != nullptr && leader_->list == fetch.from_row) {
    leader_->followers.push_back({fetch.from, fetch.row_bytes});
  } else if (recorded != nullptr) {
    leader_ = job;
  }
  reads_->Post(pieces.post(), launch);
  Give(
      [disk = disk_.get(), job] {
        for (const FetchJob::Follower& next : job->followers) {
          disk->Expect(job->Pieces(next.from, next.row_bytes, /*read=*/false));
        }
        disk->Read(job->Pieces(job->from, job->row_bytes, /*read=*/true));
      },
      *reads_, recorded != nullptr ? &recorded->reads : nullptr);
  reads_->Await(launch);
  FetchRows(here, launch);
}

void DiskLane::Store(const FetchRowsArgs& store, const Launch& launch, Jobs* recorded) {
  writes_->Start();
  const int64_t rows = int64_t{store.lists} * store.capacity;
  const size_t in_rows = PostPieces::InLines(U(rows * store.row_bytes));
  const auto room = writes_->Room(in_rows + PostPieces::InLines(4 * U(rows)) +
                                  PostPieces::InLines(4 * U(store.lists)));
  FetchRowsArgs here = store;
  here.to = room->as<std::byte>();
  here.to_row = RowsInOrder(rows);
  FetchRows(here, launch);
  PostPieces pieces(room->as<std::byte>() + in_rows);
  const int32_t* const to_row = pieces.Add(store.to_row, rows);
  const int32_t* const n = pieces.Add(store.n, store.lists);
  writes_->Post(pieces.post(), launch);
  stores_under_way_ = true;
  Give(
      [disk = disk_.get(), room, store, to_row, n] {
        for (int32_t l = 0; l < store.lists; ++l) {
          const int64_t first = int64_t{l} * store.capacity;
          for (int64_t i = first; i < first + n[l]; ++i) {
            disk->Write(store.to + to_row[i] * store.row_bytes,
                        room->as<std::byte>() + i * store.row_bytes, U(store.row_bytes));
          }
        }
      },
      *writes_, recorded != nullptr ? &recorded->writes : nullptr);
}

void DiskLane::CopyIn(void* to, const std::byte* from, size_t bytes, const Launch& launch) {
  copies_in_->Start();
  auto* const here = static_cast<std::byte*>(to);
  const size_t part = DiskMemory::kPartIn;
  const size_t parts = (bytes + part - 1) / part;
  const auto way = [&](size_t i) { return ways_in_[i % 2].Get(pinned_, part); };
  const auto size = [&](size_t i) { return std::min(part, bytes - i * part); };
  // While the card takes one part, the next one is read; and while that one ends, the disk is told
  // of the one that follows.
  const auto read = [&](size_t i) {
    copies_in_->Post({}, launch);
    const DiskMemory::Piece copy{.from = from + i * part, .to = way(i), .bytes = size(i)};
    std::vector<DiskMemory::Piece> next;
    for (size_t at = (i + 1) * part; at < std::min((i + 2) * part, bytes); at += kExpected) {
      next.push_back({.from = from + at, .bytes = std::min(kExpected, bytes - at)});
    }
    Give(
        [disk = disk_.get(), copy, next] {
          for (const DiskMemory::Piece& piece : next) disk->Expect({piece});
          disk->ReadLong(copy);
        },
        *copies_in_, nullptr);
  };
  if (parts > 0) read(0);
  for (size_t i = 0; i < parts; ++i) {
    copies_in_->Await(launch);
    if (i + 1 < parts) read(i + 1);
    CheckLaunch(cudaMemcpyAsync(here + i * part, way(i), size(i), cudaMemcpyDefault, launch.stream),
                "copy from a disk");
  }
}

void DiskLane::CopyOut(std::byte* to, const void* from, size_t bytes, const Launch& launch) {
  copies_out_->Start();
  const auto* const here = static_cast<const std::byte*>(from);
  for (size_t at = 0; at < bytes; at += DiskMemory::kPartOut) {
    if (next_way_out_ == ways_out_.size()) {
      copies_out_->Await(launch);
      next_way_out_ = 0;
    }
    std::byte* const way = ways_out_[next_way_out_++].Get(pinned_, DiskMemory::kPartOut);
    const size_t n = std::min(DiskMemory::kPartOut, bytes - at);
    CheckLaunch(cudaMemcpyAsync(way, here + at, n, cudaMemcpyDefault, launch.stream),
                "copy to a disk");
    copies_out_->Post({}, launch);
    Give([disk = disk_.get(), to = to + at, way, n] { disk->Write(to, way, n); }, *copies_out_,
         nullptr);
  }
}

void DiskLane::AwaitWrites(const Launch& launch) {
  if (std::exchange(stores_under_way_, false)) writes_->Await(launch);
  if (std::exchange(next_way_out_, 0) > 0) copies_out_->Await(launch);
}

void DiskLane::Run(const Jobs& jobs) {
  reads_->Run(jobs.reads);
  writes_->Run(jobs.writes);
}

void DiskLane::CopyNow(void* to, const void* from, size_t bytes) {
  std::vector<std::byte> piece(std::min(bytes, kPieceNow));
  auto* const dst = static_cast<std::byte*>(to);
  const auto* const src = static_cast<const std::byte*>(from);
  for (size_t at = 0; at < bytes; at += piece.size()) {
    const size_t n = std::min(piece.size(), bytes - at);
    if (Holds(src)) {
      disk_->ReadLong({.from = src + at, .to = piece.data(), .bytes = n});
    } else {
      CheckLaunch(cudaMemcpy(piece.data(), src + at, n, cudaMemcpyDefault), "copy to a disk");
    }
    if (Holds(dst)) {
      disk_->Write(dst + at, piece.data(), n);
    } else {
      CheckLaunch(cudaMemcpy(dst + at, piece.data(), n, cudaMemcpyDefault), "copy from a disk");
    }
  }
}

Status DiskLane::TakeFailure() {
  Status failure = disk_->TakeFailure();
  if (failure.ok()) return failure;
  Drain();
  static_cast<void>(disk_->TakeFailure());
  return failure;
}

void DiskLane::Drain() {
  for (auto* posts : {&reads_, &writes_, &copies_in_, &copies_out_}) (*posts)->Drain();
}

}  // namespace omnikv::cuda
