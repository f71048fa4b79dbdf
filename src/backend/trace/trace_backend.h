// A decorator over any host backend that writes down what runs and what it must cost, and checks
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
  double seconds = 0;  // the inner backend's, host clock
};

// Forwards every op to `inner` (not owned, must outlive this) and logs it. Host backends only:
// costs are read from the lengths and counts in the backend's memory.
class TraceBackend : public HostBackend {
 public:
  explicit TraceBackend(Backend& inner) : inner_(inner) {}

  std::string_view Name() const override { return inner_.Name(); }
  std::string Describe() const override { return inner_.Describe() + ", traced"; }
  Support Supports(const Op& op) const override { return inner_.Supports(op); }
  std::unique_ptr<Recording> Record(const std::function<void()>& body) override;

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

 protected:
  void Run(const Op& op) override;
  void Reserve(const Op& op) override;

 private:
  Backend& inner_;
  std::vector<TraceEntry> entries_;
  std::vector<std::vector<Op>> recordings_;
  bool recording_now_ = false;
  bool logging_ = true;
};

}  // namespace omnikv
