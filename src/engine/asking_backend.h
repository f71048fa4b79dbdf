// A backend that computes nothing: for what can be known before anything runs.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "backend/backend.h"

namespace omnikv {

// Asks another backend of each op whether it takes it, and runs none. Its memory is addresses that
// nobody looks at.
class AskingBackend : public HostBackend {
 public:
  explicit AskingBackend(const Backend& asked) : asked_(asked) {}

  std::string_view Name() const override { return asked_.Name(); }
  std::string Describe() const override { return asked_.Describe(); }
  bool OnDevice() const override { return asked_.OnDevice(); }
  size_t AvailableMemory() const override { return asked_.AvailableMemory(); }
  size_t SelectionBytes() const override { return asked_.SelectionBytes(); }
  int32_t PrefillRows() const override { return asked_.PrefillRows(); }
  Support Supports(const Op& op) const override { return asked_.Supports(op); }
  Result<Buffer> Allocate(size_t bytes, std::string_view) override {
    constexpr size_t kAlignment = 4096;
    auto* const data = reinterpret_cast<void*>(next_);
    next_ += (bytes + kAlignment) / kAlignment * kAlignment;
    return Buffer(data, bytes, [](void*) {});
  }
  void Upload(void*, const void*, size_t) override {}
  void Download(void* dst, const void*, size_t bytes) override {
    if (bytes != 0) std::memset(dst, 0, bytes);
  }
  void Copy(void*, const void*, size_t, Lane) override {}

  // The first op that was refused, and why; none: ok.
  const Support& answer() const { return answer_; }
  std::string_view refused() const { return refused_; }

 protected:
  void Run(const Op& op) override {
    if (!answer_.ok) return;
    answer_ = asked_.Supports(op);
    if (!answer_.ok) refused_ = OpName(op);
  }

 private:
  const Backend& asked_;
  uintptr_t next_ = uintptr_t{1} << 20;
  Support answer_;
  std::string_view refused_;
};

}  // namespace omnikv
