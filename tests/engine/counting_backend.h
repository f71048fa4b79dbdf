// What an engine holds of its backend's memory, counted, and no more than a cap of it.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "backend/forwarding_backend.h"

namespace omnikv {

// Another backend, which it owns, with `cap` bytes for Allocate, and `own_work` bytes that the
// backend takes for itself. `card`: takes itself for a device.
class CountingBackend : public ForwardingBackend {
 public:
  CountingBackend(std::unique_ptr<Backend> inner, size_t cap, size_t own_work = 0,
                  bool card = false)
      : ForwardingBackend(*inner),
        owned_(std::move(inner)),
        cap_(cap),
        own_work_(own_work),
        card_(card) {}

  bool OnDevice() const override { return card_ || inner().OnDevice(); }
  size_t AvailableMemory() const override { return Free() + own_work_; }
  Result<Buffer> Allocate(size_t bytes, std::string_view what) override {
    if (bytes > Free()) {
      return ResourceExhausted("memory for " + std::string(what) + " cannot be had: a test");
    }
    OKV_ASSIGN_OR_RETURN(Buffer buffer, inner().Allocate(bytes, what));
    size_t& of_name = (*by_name_)[std::string(what)];
    const size_t padding = bytes < kPage ? 0 : (kPage - bytes % kPage) % kPage;
    *held_ += bytes;
    *padding_ += padding;
    of_name += bytes;
    most_ = std::max(most_, *held_);
    void* const data = buffer.as();
    auto inside = std::make_shared<Buffer>(std::move(buffer));
    return Buffer(data, bytes,
                  [inside, held = held_, padding_of = padding_, by_name = by_name_, &of_name, bytes,
                   padding](void*) {
                    *held -= bytes;
                    *padding_of -= padding;
                    of_name -= bytes;
                  });
  }
  size_t held() const { return *held_; }
  // What a driver takes besides, which gives pages of 2 MiB, but parts of one to what is smaller.
  size_t padding() const { return *padding_; }
  // By what Allocate was told that it is for.
  const std::map<std::string, size_t>& held_by_name() const { return *by_name_; }
  size_t most() const { return most_; }  // that was held at once

 private:
  static constexpr size_t kPage = size_t{2} << 20;

  size_t Free() const { return cap_ - std::min(cap_, *held_); }

  std::unique_ptr<Backend> owned_;
  size_t cap_;
  size_t own_work_;
  bool card_;
  std::shared_ptr<size_t> held_ = std::make_shared<size_t>(0);
  std::shared_ptr<size_t> padding_ = std::make_shared<size_t>(0);
  std::shared_ptr<std::map<std::string, size_t>> by_name_ =
      std::make_shared<std::map<std::string, size_t>>();
  size_t most_ = 0;
};

}  // namespace omnikv
