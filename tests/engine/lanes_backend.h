// A device made of the host, for tests of what runs side by side: it runs the ops of its lanes in
// any order that Joins and signals allow, by chance, and as late as it can. Whatever relies on more
// than it says comes out wrong for some seed.
#pragma once

#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "backend/in_place.h"
#include "base/check.h"

namespace omnikv {

class LanesBackend : public Backend {
 public:
  // `inner` runs the ops, each at once. `memory`: bytes that the device has.
  LanesBackend(std::unique_ptr<Backend> inner, size_t memory, uint32_t seed)
      : inner_(std::move(inner)), memory_(memory), random_(seed) {}

  std::string_view Name() const override { return "lanes"; }
  std::string Describe() const override { return "lanes of the host, in random order"; }
  bool OnDevice() const override { return true; }
  size_t AvailableMemory() const override { return memory_; }
  int32_t PrefillRows() const override { return 48; }
  Support Supports(const Op& op) const override { return inner_->Supports(op); }

  Result<Buffer> Allocate(size_t bytes, std::string_view what) override {
    return Own(inner_->Allocate(bytes, what), Kind::kOwn);
  }
  Result<Buffer> AllocateShared(size_t bytes, std::string_view what) override {
    return Own(inner_->AllocateShared(bytes, what), Kind::kPinned);
  }
  // Memory too, but of a kind that ops must not use in place.
  Status KeepOnDisk(const std::string&) override { return {}; }
  Result<Buffer> AllocateOnDisk(size_t bytes, std::string_view what) override {
    return Own(inner_->AllocateShared(bytes, what), Kind::kOnDisk);
  }
  // As a card does: other memory of the host is read at once, its own when the lane gets there, and
  // pinned memory then too, but before this returns.
  void Upload(void* dst, const void* src, size_t bytes) override {
    if (bytes == 0) return;
    if (const Owned* own = OwnerOf(src); own != nullptr) {
      Push(kMainLane, [=] { std::memcpy(dst, src, bytes); });
      if (own->kind != Kind::kOwn) Drain(kMainLane);
      return;
    }
    const auto* from = static_cast<const std::byte*>(src);
    auto copy = std::make_shared<std::vector<std::byte>>(from, from + bytes);
    Push(kMainLane, [=] { std::memcpy(dst, copy->data(), copy->size()); });
  }
  void Download(void* dst, const void* src, size_t bytes) override {
    Drain(kMainLane);
    std::memcpy(dst, src, bytes);
  }
  Mark SetMark() override {
    marks_.push_back(Point(kMainLane));
    return marks_.size() - 1;
  }
  void Await(Mark mark) override {
    while (!*marks_[mark]) RunOne();
  }

  void Enqueue(const Op& op, Lane lane = Lane::kMain) override {
    OKV_CHECK(!UsesInPlace(op, [&](const void* p) { return OnDisk(p); }), "{} uses K/V on a disk",
              OpName(op));
    Do([this, op](const Lanes& lanes,
                  Lane to) { Push(lanes[Index(to)], [this, op] { inner_->Enqueue(op); }); },
       lane);
  }
  void Copy(void* dst, const void* src, size_t bytes, Lane lane) override {
    OKV_CHECK(recording_ == nullptr);
    OKV_CHECK(!OnDisk(src) || lane == Lane::kIn);
    OKV_CHECK(!OnDisk(dst) || lane == Lane::kOut);
    Push(Index(lane), [=] { std::memcpy(dst, src, bytes); });
  }
  void Join(Lane waits, Lane for_) override {
    Do([this, for_](const Lanes& lanes,
                    Lane to) { Wait(lanes[Index(to)], Point(lanes[Index(for_)])); },
       waits);
  }
  void Signal(size_t number, Lane lane) override {
    OKV_CHECK(recording_ == nullptr);
    signals_[number] = Point(Index(lane));
  }
  void WaitFor(size_t number, Lane lane) override {
    OKV_CHECK(recording_ == nullptr);
    if (const auto signal = signals_.find(number); signal != signals_.end()) {
      Wait(Index(lane), signal->second);
    }
  }

  std::unique_ptr<Recording> Record(const std::function<void()>& body) override {
    auto recorded = std::make_unique<Recorded>();
    recording_ = &recorded->calls;
    body();
    recording_ = nullptr;
    return recorded;
  }
  // Side lanes of a recording are not those beside it: they begin and end with it.
  void Replay(const Recording& recording) override {
    const Lanes lanes = {kMainLane, kLanes, kLanes + 1, kLanes + 2};
    for (const auto& call : static_cast<const Recorded&>(recording).calls) call(lanes);
    for (size_t side = kLanes; side < kLanes + 3; ++side) Wait(kMainLane, Point(side));
  }
  void Synchronize() override {
    for (size_t lane = 0; lane < lanes_.size(); ++lane) Drain(lane);
  }

 private:
  static constexpr size_t kMainLane = 0;
  using Lanes = std::array<size_t, kLanes>;
  using Reached = std::shared_ptr<bool>;
  struct Task {
    std::function<void()> run;
    Reached after;  // null: nothing but what is before it in its lane
  };
  struct Recorded : Recording {
    std::vector<std::function<void(const Lanes&)>> calls;
  };
  enum class Kind { kOwn, kPinned, kOnDisk };
  struct Owned {
    size_t bytes;
    Kind kind;
  };

  static size_t Index(Lane lane) { return static_cast<size_t>(lane); }
  static bool Holds(const std::pair<const void* const, Owned>& own, const void* p) {
    return static_cast<const std::byte*>(p) <
           static_cast<const std::byte*>(own.first) + own.second.bytes;
  }
  // Null: memory that this did not give out.
  const Owned* OwnerOf(const void* p) const {
    const auto after = owned_.upper_bound(p);
    if (after == owned_.begin() || !Holds(*std::prev(after), p)) return nullptr;
    return &std::prev(after)->second;
  }
  bool OnDisk(const void* p) const {
    const Owned* const own = OwnerOf(p);
    return own != nullptr && own->kind == Kind::kOnDisk;
  }
  Result<Buffer> Own(Result<Buffer> inner, Kind kind) {
    if (!inner.ok()) return inner.status();
    auto buffer = std::make_shared<Buffer>(std::move(*inner));
    owned_[buffer->as()] = {buffer->size(), kind};
    return Buffer(buffer->as(), buffer->size(), [this, buffer](void* p) mutable {
      if (buffer == nullptr) return;
      Synchronize();  // as a card does before it gives memory back
      owned_.erase(p);
      buffer.reset();
    });
  }

  template <typename Call>
  void Do(const Call& call, Lane lane) {
    if (recording_ != nullptr) {
      recording_->push_back([call, lane](const Lanes& lanes) { call(lanes, lane); });
    } else {
      call({0, 1, 2, 3}, lane);
    }
  }
  void Push(size_t lane, std::function<void()> run) {
    lanes_[lane].push_back({std::move(run), nullptr});
    while (random_() % 8 == 0) RunOne();
  }
  Reached Point(size_t lane) {
    auto reached = std::make_shared<bool>(false);
    lanes_[lane].push_back({[reached] { *reached = true; }, nullptr});
    return reached;
  }
  void Wait(size_t lane, Reached reached) {
    lanes_[lane].push_back({[] {}, std::move(reached)});
  }
  // Runs the next task of a lane that can go on.
  void RunOne() {
    std::vector<size_t> ready;
    bool empty = true;
    for (size_t lane = 0; lane < lanes_.size(); ++lane) {
      if (lanes_[lane].empty()) continue;
      empty = false;
      const Reached& after = lanes_[lane].front().after;
      if (after == nullptr || *after) ready.push_back(lane);
    }
    if (empty) return;
    OKV_CHECK(!ready.empty(), "lanes wait for each other");
    // Mostly the lane of the last time, so that lanes get far ahead of each other.
    const bool stay =
        random_() % 16 != 0 && std::find(ready.begin(), ready.end(), last_) != ready.end();
    if (!stay) last_ = ready[random_() % ready.size()];
    const Task task = std::move(lanes_[last_].front());
    lanes_[last_].pop_front();
    task.run();
  }
  void Drain(size_t lane) {
    const Reached end = Point(lane);
    while (!*end) RunOne();
  }

  std::unique_ptr<Backend> inner_;
  size_t memory_;
  std::mt19937 random_;
  std::map<const void*, Owned> owned_;
  std::array<std::deque<Task>, 2 * kLanes - 1> lanes_;
  size_t last_ = 0;
  std::vector<Reached> marks_;
  std::map<size_t, Reached> signals_;
  std::vector<std::function<void(const Lanes&)>>* recording_ = nullptr;
};

}  // namespace omnikv
