// A decorator over any backend that writes down what runs and what it must cost, and checks
// that recorded steps are pure: the same ops with the same arguments, whatever token they are for.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "backend/backend.h"

namespace omnikv {

struct TraceEntry {
  Op op;
  Cost cost;
  double seconds = 0;  // alone, by the inner backend's clock
};

// Forwards everything to `inner` (not owned, must outlive this) and logs the ops. Each is waited
// for, and so timed, while logging is on.
class TraceBackend : public Backend {
 public:
  explicit TraceBackend(Backend& inner) : inner_(inner) {}

  std::string_view Name() const override { return inner_.Name(); }
  std::string Describe() const override { return inner_.Describe() + ", traced"; }
  Support Supports(const Op& op) const override { return inner_.Supports(op); }
  size_t AvailableMemory() const override { return inner_.AvailableMemory(); }
  bool OnDevice() const override { return inner_.OnDevice(); }
  size_t SelectionBytes() const override { return inner_.SelectionBytes(); }
  size_t WorkBytes(const StepLimits& limits) const override { return inner_.WorkBytes(limits); }
  int32_t PrefillRows() const override { return inner_.PrefillRows(); }
  Result<Buffer> Allocate(size_t bytes, std::string_view what) override {
    return inner_.Allocate(bytes, what);
  }
  void Upload(void* dst, const void* src, size_t bytes) override { inner_.Upload(dst, src, bytes); }
  void Download(void* dst, const void* src, size_t bytes) override {
    inner_.Download(dst, src, bytes);
  }
  Result<Buffer> AllocateShared(size_t bytes, std::string_view what) override {
    return inner_.AllocateShared(bytes, what);
  }
  Result<Buffer> AllocateSharedLater(size_t bytes, std::string_view what) override {
    return inner_.AllocateSharedLater(bytes, what);
  }
  Status AwaitShared() override { return inner_.AwaitShared(); }
  Mark SetMark() override { return inner_.SetMark(); }
  void Await(Mark mark) override { inner_.Await(mark); }
  void Enqueue(const Op& op, Lane lane = Lane::kMain) override;
  void Copy(void* dst, const void* src, size_t bytes, Lane lane) override {
    inner_.Copy(dst, src, bytes, lane);
  }
  void Join(Lane waits, Lane for_) override { inner_.Join(waits, for_); }
  void Signal(size_t number, Lane lane) override { inner_.Signal(number, lane); }
  void WaitFor(size_t number, Lane lane) override { inner_.WaitFor(number, lane); }
  std::unique_ptr<Recording> Record(const std::function<void()>& body) override;
  void Replay(const Recording& recording) override;
  Status TakeFailure() override { return inner_.TakeFailure(); }
  void Synchronize() override { inner_.Synchronize(); }
  double TimeAlone(const Op& op) override { return inner_.TimeAlone(op); }
  std::vector<std::string> KernelsOf(const Op& op) override { return inner_.KernelsOf(op); }

  // Ops that ran since the last Clear, in order, and the sum of their costs.
  const std::vector<TraceEntry>& entries() const { return entries_; }
  Cost Total() const;
  // Sum over the ops of one name (ops.h OpName).
  Cost TotalOf(std::string_view name) const;
  void Clear() { entries_.clear(); }
  // Off: ops pass through unlogged, so that steps can be timed. On at first.
  void set_logging(bool on) { logging_ = on; }

  // Every step recorded so far, as its ops.
  const std::vector<std::vector<Op>>& recordings() const { return recordings_; }

  // The first difference between two recorded steps, as a sentence; nothing if they are the same.
  static std::optional<std::string> Difference(const std::vector<Op>& a, const std::vector<Op>& b);

 private:
  void Run(const Op& op);

  Backend& inner_;
  std::vector<TraceEntry> entries_;
  std::vector<std::vector<Op>> recordings_;
  bool recording_now_ = false;
  bool logging_ = true;
};

}  // namespace omnikv
