#include "backend/cuda/host_lane.h"

#include <array>
#include <chrono>
#include <utility>

#include "backend/attend_inputs.h"
#include "base/check.h"

namespace omnikv::cuda {
namespace {

constexpr size_t kLine = 64;
// How long the thread looks for a post before it naps: longer than a step's own work between two.
constexpr auto kLook = std::chrono::milliseconds(5);
constexpr auto kNap = std::chrono::microseconds(50);

size_t InLines(size_t bytes) {
  return (bytes + kLine - 1) / kLine * kLine;
}

}  // namespace

Result<std::unique_ptr<HostLane>> HostLane::Create(MakeHost make_host, DeviceMemory& memory,
                                                   PinnedMemory& pinned) {
  std::unique_ptr<HostLane> lane(new HostLane(std::move(make_host), pinned));
  OKV_ASSIGN_OR_RETURN(lane->counts_, pinned.Allocate(sizeof(Counts), "counts of the host's lane"));
  new (lane->counts_.as<void>()) Counts();
  // Here rather than before the first post: a recording would zero it at each replay.
  OKV_ASSIGN_OR_RETURN(lane->posted_, memory.Allocate(sizeof(uint64_t), "the host's lane"));
  return lane;
}

void HostLane::Start() {
  auto host = make_host_();
  if (!host.ok()) throw OutOfMemory(std::string(host.status().message()));
  host_ = std::move(*host);
  thread_ = std::thread([this] { Work(); });
}

HostLane::~HostLane() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<Buffer> HostLane::Room(size_t bytes) {
  if (next_room_ == rooms_.size()) rooms_.emplace_back();
  std::shared_ptr<Buffer>& room = rooms_[next_room_++];
  if (room != nullptr && room->size() >= bytes) return room;
  auto taken = pinned_.Allocate(bytes, "inputs of the host's lane");
  if (!taken.ok()) throw OutOfMemory(std::string(taken.status().message()));
  room = std::make_shared<Buffer>(std::move(*taken));
  return room;
}

HostLane::Job HostLane::Post(const AttendArgs& attend, const Launch& launch) {
  if (host_ == nullptr) Start();
  Job job{.attend = attend, .room = nullptr};
  size_t bytes = 0;
  const auto bytes_of = [](const auto* array, int64_t n) {
    return sizeof(*array) * static_cast<size_t>(n);
  };
  ForInputs(job.attend,
            [&](const auto* array, int64_t n) { bytes += InLines(bytes_of(array, n)); });
  job.room = Room(bytes);
  HostPost post;
  post.count = posted_.as<uint64_t>();
  post.flag = reinterpret_cast<uint64_t*>(&counts_.as<Counts>()->posted);
  std::byte* to = job.room->as<std::byte>();
  ForInputs(job.attend, [&](auto*& from, int64_t values) {
    const size_t n = bytes_of(from, values);
    OKV_CHECK(post.n_pieces < HostPost::kMaxPieces && n % sizeof(uint32_t) == 0);
    post.pieces[post.n_pieces++] = {from, to, n};
    from = reinterpret_cast<std::remove_reference_t<decltype(from)>>(to);
    to += InLines(n);
  });
  PostToHost(post, launch);
  return job;
}

void HostLane::Await(const Launch& launch) {
  next_room_ = 0;
  AwaitHost(posted_.as<uint64_t>(), reinterpret_cast<const uint64_t*>(&counts_.as<Counts>()->done),
            launch);
}

void HostLane::Run(const Jobs& jobs) {
  if (jobs.empty()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    jobs_.insert(jobs_.end(), jobs.begin(), jobs.end());
    idle_ = false;
  }
  changed_.notify_all();
}

void HostLane::Drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return idle_; });
}

Status HostLane::TakeFailure() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(failure_, {});
}

bool HostLane::AwaitPost(uint64_t number) const {
  const std::atomic<uint64_t>& posted = counts_.as<Counts>()->posted;
  const auto start = std::chrono::steady_clock::now();
  while (posted.load(std::memory_order_acquire) < number) {
    if (stop_) return false;
    if (std::chrono::steady_clock::now() - start > kLook) std::this_thread::sleep_for(kNap);
  }
  return true;
}

void HostLane::Work() {
  std::atomic<uint64_t>& done = counts_.as<Counts>()->done;
  for (uint64_t number = 1;; ++number) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (jobs_.empty()) {
      idle_ = true;
      changed_.notify_all();
      changed_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
    }
    if (stop_) return;
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    if (!AwaitPost(number)) return;
    host_->Enqueue(job.attend);
    const Status failure = host_->TakeFailure();
    done.store(number, std::memory_order_release);  // whatever happened: the card waits for it
    if (failure.ok()) continue;
    lock.lock();
    failure_ = failure;
  }
}

}  // namespace omnikv::cuda
