// A backend that computes nothing: for what can be known before anything runs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "backend/in_place.h"

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
  Result<Buffer> AllocateOnDisk(size_t bytes, std::string_view what) override {
    auto buffer = Allocate(bytes, what);
    if (buffer.ok() && bytes > 0) on_disk_.emplace_back(buffer->as<std::byte>(), bytes);
    return buffer;
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
    const auto on_disk = [this](const void* p) {
      return std::any_of(on_disk_.begin(), on_disk_.end(), [p](const std::span<std::byte>& memory) {
        return p >= memory.data() && p < memory.data() + memory.size();
      });
    };
    answer_ = asked_.Supports(op);
    if (answer_.ok && OnDevice() && UsesInPlace(op, on_disk)) {
      answer_ = {false, "some of the K/V that it uses in place lie on a disk (`kv_folder`)"};
    }
    if (!answer_.ok) refused_ = OpName(op);
  }

 private:
  const Backend& asked_;
  uintptr_t next_ = uintptr_t{1} << 20;
  std::vector<std::span<std::byte>> on_disk_;
  Support answer_;
  std::string_view refused_;
};

}  // namespace omnikv
