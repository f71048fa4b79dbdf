// What the engine's tests share that run on several devices by name: "ref", "cpu", "cuda".
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "../test_names.h"
#include "engine/devices.h"

namespace omnikv {

// Why tests cannot run on `device`; empty where they can. A device that is here and does not work
// fails the test.
inline std::string WhyNotOn(const std::string& device) {
  if (device != "cuda") return {};
  const auto backend = MakeBackend({.device = device});
  if (backend.ok()) return {};
  EXPECT_EQ(backend.status().code(), StatusCode::kUnsupported) << backend.status().message();
  return backend.status().message();
}

// Skips what has no device, with the reason.
class OnDevice : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (const std::string reason = WhyNotOn(GetParam()); !reason.empty()) GTEST_SKIP() << reason;
  }
};

// The largest difference of logits from a reference computed in f32, of the largest logit: what
// sums of f32 in another order may give. A card's kernels split what they multiply in 16-bit parts.
inline double F32Tolerance(const std::string& device) {
  return device == "ref" ? 1e-5 : device == "cpu" ? 1e-5 : 1e-4;
}

// The same from one in f64, with `precision` full.
inline double FullTolerance(const std::string& device) {
  return device == "ref" ? 1e-6 : F32Tolerance(device);
}

}  // namespace omnikv
