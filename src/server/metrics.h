// What the server counts, in Prometheus' text form.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "engine/scheduler.h"

namespace omnikv::server {

// Thread-safe. Names are vLLM's where vLLM has them, so that its dashboards work.
class Metrics {
 public:
  // A request has ended well, or was cancelled.
  void Ended(FinishReason reason, const RequestStats& stats);
  // The page. `stored`: where there is a store; `model`: a label of every line.
  std::string Text(const SchedulerStats& now, const std::optional<ContextStoreStats>& stored,
                   const std::string& model) const;

 private:
  static constexpr std::array kBounds = {0.001, 0.005, 0.01, 0.02,  0.04,  0.06,  0.08, 0.1,
                                         0.25,  0.5,   0.75, 1.0,   2.5,   5.0,   7.5,  10.0,
                                         20.0,  40.0,  80.0, 160.0, 640.0, 2560.0};
  struct Histogram {
    std::array<int64_t, kBounds.size() + 1> counts{};  // of [bound before, bound]
    double sum = 0;
    int64_t n = 0;
    void Add(double value, int64_t times = 1);
  };

  mutable std::mutex mutex_;
  Histogram first_token_, between_tokens_, whole_, queue_, prefill_, decode_;
  std::map<std::string, int64_t> ended_;  // by reason
};

}  // namespace omnikv::server
