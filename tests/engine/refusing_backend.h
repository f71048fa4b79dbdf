// Memory that is refused where a test wants it: at each place in turn where a run asks for some.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/forwarding_backend.h"

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
class RefusingBackend : public ForwardingBackend {
 public:
  RefusingBackend(std::unique_ptr<Backend> inner, Fault& fault, bool card)
      : ForwardingBackend(*inner), owned_(std::move(inner)), fault_(fault), card_(card) {}

  bool OnDevice() const override { return card_ || inner().OnDevice(); }
  Result<Buffer> Allocate(size_t bytes, std::string_view what) override {
    if (fault_.Next()) return Refusal(what);
    return inner().Allocate(bytes, what);
  }
  Result<Buffer> AllocateShared(size_t bytes, std::string_view what) override {
    if (fault_.Next()) return Refusal(what);
    return inner().AllocateShared(bytes, what);
  }
  Result<Buffer> AllocateSharedLater(size_t bytes, std::string_view what) override {
    return AllocateShared(bytes, what);
  }
  Status AwaitShared() override { return {}; }
  void Enqueue(const Op& op, Lane lane = Lane::kMain) override {
    if (failure_.ok() && fault_.Next()) failure_ = Refusal(OpName(op));
    if (failure_.ok()) inner().Enqueue(op, lane);
  }
  std::unique_ptr<Recording> Record(const std::function<void()>& body) override {
    auto recording = inner().Record(body);
    if (failure_.ok() && fault_.Next()) failure_ = Refusal("a recording");
    return failure_.ok() ? std::move(recording) : nullptr;
  }
  void Replay(const Recording& recording) override {
    if (failure_.ok() && fault_.Next()) failure_ = Refusal("a replay");
    if (failure_.ok()) inner().Replay(recording);
  }
  Status TakeFailure() override {
    return failure_.ok() ? inner().TakeFailure() : std::exchange(failure_, {});
  }

 private:
  static Status Refusal(std::string_view what) {
    return ResourceExhausted("memory for " + std::string(what) + " cannot be had: a test");
  }

  std::unique_ptr<Backend> owned_;
  Fault& fault_;
  bool card_;
  Status failure_;
};

}  // namespace omnikv
