// A decorator over any backend that writes down what runs and what it must cost, and checks
// that recorded steps are pure: the same ops with the same arguments, whatever token they are for.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "backend/forwarding_backend.h"

namespace omnikv {

struct TraceEntry {
  Op op;
  Cost cost;
  double seconds = 0;  // alone, by the inner backend's clock
};

// Logs the ops that run. Each is waited for, and so timed, while logging is on.
class TraceBackend : public ForwardingBackend {
 public:
  explicit TraceBackend(Backend& inner) : ForwardingBackend(inner) {}

  std::string Describe() const override { return inner().Describe() + ", traced"; }
  void Enqueue(const Op& op, Lane lane = Lane::kMain) override;
  std::unique_ptr<Recording> Record(const std::function<void()>& body) override;
  void Replay(const Recording& recording) override;

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

  std::vector<TraceEntry> entries_;
  std::vector<std::vector<Op>> recordings_;
  bool recording_now_ = false;
  bool logging_ = true;
};

}  // namespace omnikv
