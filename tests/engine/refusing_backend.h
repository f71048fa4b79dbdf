// Memory that is refused where a test wants it: at each place in turn where a run asks for some.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"

namespace omnikv {

// The places of a run, counted as it comes to them; one of them fails.
struct Fault {
  int64_t at = -1;  // the number of the place that fails; none: -1
  int64_t seen = 0;
  bool Next() { return seen++ == at; }
};

// Another backend, which it owns, as one that runs out of memory: each allocation and each op is a
// place. `card`: it passes for a device with memory of its own, so that layers can live on the host
// beside it. `fault` outlives it.
class RefusingBackend : public Backend {
 public:
  RefusingBackend(std::unique_ptr<Backend> inner, Fault& fault, bool card)
      : inner_(std::move(inner)), fault_(fault), card_(card) {}

  std::string_view Name() const override { return inner_->Name(); }
  std::string Describe() const override { return inner_->Describe(); }
  Support Supports(const Op& op) const override { return inner_->Supports(op); }
  size_t AvailableMemory() const override { return inner_->AvailableMemory(); }
  bool OnDevice() const override { return card_ || inner_->OnDevice(); }
  size_t WorkBytes(const StepLimits& limits) const override { return inner_->WorkBytes(limits); }
  int32_t PrefillRows() const override { return inner_->PrefillRows(); }
  Result<Buffer> Allocate(size_t bytes, std::string_view what) override {
    if (fault_.Next()) return Refusal(what);
    return inner_->Allocate(bytes, what);
  }
  Result<Buffer> AllocateShared(size_t bytes, std::string_view what) override {
    if (fault_.Next()) return Refusal(what);
    return inner_->AllocateShared(bytes, what);
  }
  void Upload(void* dst, const void* src, size_t bytes) override {
    inner_->Upload(dst, src, bytes);
  }
  void Download(void* dst, const void* src, size_t bytes) override {
    inner_->Download(dst, src, bytes);
  }
  Mark SetMark() override { return inner_->SetMark(); }
  void Await(Mark mark) override { inner_->Await(mark); }
  void Enqueue(const Op& op, Lane lane = Lane::kMain) override {
    if (failure_.ok() && fault_.Next()) failure_ = Refusal(OpName(op));
    if (failure_.ok()) inner_->Enqueue(op, lane);
  }
  void Copy(void* dst, const void* src, size_t bytes, Lane lane) override {
    inner_->Copy(dst, src, bytes, lane);
  }
  void Join(Lane waits, Lane for_) override { inner_->Join(waits, for_); }
  void Signal(size_t number, Lane lane) override { inner_->Signal(number, lane); }
  void WaitFor(size_t number, Lane lane) override { inner_->WaitFor(number, lane); }
  std::unique_ptr<Recording> Record(const std::function<void()>& body) override {
    auto recording = inner_->Record(body);
    if (failure_.ok() && fault_.Next()) failure_ = Refusal("a recording");
    return failure_.ok() ? std::move(recording) : nullptr;
  }
  void Replay(const Recording& recording) override {
    if (failure_.ok() && fault_.Next()) failure_ = Refusal("a replay");
    if (failure_.ok()) inner_->Replay(recording);
  }
  Status TakeFailure() override {
    return failure_.ok() ? inner_->TakeFailure() : std::exchange(failure_, {});
  }
  void Synchronize() override { inner_->Synchronize(); }

 private:
  static Status Refusal(std::string_view what) {
    return ResourceExhausted("memory for " + std::string(what) + " cannot be had: a test");
  }

  std::unique_ptr<Backend> inner_;
  Fault& fault_;
  bool card_;
  Status failure_;
};

}  // namespace omnikv
