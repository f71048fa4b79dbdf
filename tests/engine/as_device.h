// A stand-in for a card in tests of the steps that a device takes by itself.
#pragma once

#include <memory>
#include <utility>

#include "backend/trace/trace_backend.h"

namespace omnikv {

// A backend that engines take for a device's: steps run ahead, and end in NextToken.
class AsDevice : public TraceBackend {
 public:
  explicit AsDevice(std::unique_ptr<Backend> inner)
      : TraceBackend(*inner), inner_(std::move(inner)) {
    set_logging(false);
  }
  bool OnDevice() const override { return true; }

 private:
  std::unique_ptr<Backend> inner_;
};

}  // namespace omnikv
