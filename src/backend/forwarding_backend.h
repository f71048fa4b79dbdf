// What decorators of backends stand on: another backend under its own name.
#pragma once

#include "backend/backend.h"

namespace omnikv {

// Forwards everything to `inner`, which is not owned and must outlive this. A decorator overrides
// the calls that it changes.
class ForwardingBackend : public Backend {
 public:
  explicit ForwardingBackend(Backend& inner) : inner_(inner) {}

  std::string_view Name() const override { return inner_.Name(); }
  std::string Describe() const override { return inner_.Describe(); }
  Result<Buffer> Allocate(size_t bytes, std::string_view what) override {
    return inner_.Allocate(bytes, what);
  }
  size_t AvailableMemory() const override { return inner_.AvailableMemory(); }
  bool OnDevice() const override { return inner_.OnDevice(); }
  size_t WorkBytes(const StepLimits& limits) const override { return inner_.WorkBytes(limits); }
  size_t SelectionBytes() const override { return inner_.SelectionBytes(); }
  int32_t PrefillRows() const override { return inner_.PrefillRows(); }
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
  Status KeepOnDisk(const std::string& folder) override { return inner_.KeepOnDisk(folder); }
  Result<Buffer> AllocateOnDisk(size_t bytes, std::string_view what) override {
    return inner_.AllocateOnDisk(bytes, what);
  }
  uint64_t BytesFromDisk() const override { return inner_.BytesFromDisk(); }
  Mark SetMark() override { return inner_.SetMark(); }
  void Await(Mark mark) override { inner_.Await(mark); }
  Support Supports(const Op& op) const override { return inner_.Supports(op); }
  void Enqueue(const Op& op, Lane lane = Lane::kMain) override { inner_.Enqueue(op, lane); }
  void Copy(void* dst, const void* src, size_t bytes, Lane lane) override {
    inner_.Copy(dst, src, bytes, lane);
  }
  void Join(Lane waits, Lane for_) override { inner_.Join(waits, for_); }
  void Signal(size_t number, Lane lane) override { inner_.Signal(number, lane); }
  void WaitFor(size_t number, Lane lane) override { inner_.WaitFor(number, lane); }
  double TimeAlone(const Op& op) override { return inner_.TimeAlone(op); }
  std::vector<std::string> KernelsOf(const Op& op) override { return inner_.KernelsOf(op); }
  std::unique_ptr<Recording> Record(const std::function<void()>& body) override {
    return inner_.Record(body);
  }
  void Replay(const Recording& recording) override { inner_.Replay(recording); }
  Status TakeFailure() override { return inner_.TakeFailure(); }
  void Synchronize() override { inner_.Synchronize(); }

 protected:
  Backend& inner() const { return inner_; }

 private:
  Backend& inner_;
};

}  // namespace omnikv
