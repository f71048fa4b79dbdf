#include "backend/trace/trace_backend.h"

#include <fmt/format.h>

#include <chrono>

namespace omnikv {

std::unique_ptr<Recording> TraceBackend::Record(const std::function<void()>& body) {
  recordings_.emplace_back();
  recording_now_ = true;
  auto recording = HostBackend::Record(body);
  recording_now_ = false;
  return recording;
}

void TraceBackend::Reserve(const Op& op) {
  if (!recording_now_) return;
  recordings_.back().push_back(op);
  // The inner backend reserves what a replay will need, as it would if it recorded the op itself.
  static_cast<void>(inner_.Record([&] { inner_.Enqueue(op); }));
}

void TraceBackend::Run(const Op& op) {
  if (!logging_) return inner_.Enqueue(op);
  const auto start = std::chrono::steady_clock::now();
  inner_.Enqueue(op);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  entries_.push_back({op, CostOf(op), seconds.count()});
}

Cost TraceBackend::Total() const {
  Cost total;
  for (const TraceEntry& e : entries_) total += e.cost;
  return total;
}

Cost TraceBackend::TotalOf(std::string_view name) const {
  Cost total;
  for (const TraceEntry& e : entries_) {
    if (OpName(e.op) == name) total += e.cost;
  }
  return total;
}

std::optional<std::string> TraceBackend::Difference(const std::vector<Op>& a,
                                                    const std::vector<Op>& b) {
  if (a.size() != b.size()) return fmt::format("{} ops, then {}", a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    return fmt::format("op {} is {}, then {}{}", i, OpName(a[i]), OpName(b[i]),
                       a[i].index() == b[i].index() ? " with other arguments" : "");
  }
  return std::nullopt;
}

}  // namespace omnikv
