#include "bank/set_simulation.h"

#include "base/check.h"

namespace omnikv {

SelectionOnHost ReadSelection(Backend& backend, const Selection& selection, const SeqMeta* seq) {
  const AttnPlan& plan = selection.plan;
  OKV_CHECK(plan.n_segments == 2);
  const auto read = [&](const PlanSegment& list, std::vector<int32_t>& index) {
    int32_t count = 0;
    backend.Download(&count, list.count, sizeof(count));
    index.resize(static_cast<size_t>(count));
    if (count == 0) return;
    backend.Download(index.data(), list.index, index.size() * sizeof(int32_t));
  };
  SelectionOnHost on_host;
  read(plan.segments[0], on_host.index);
  if (selection.wider.count != nullptr) read(selection.wider, on_host.wider);
  backend.Download(on_host.bounds, plan.segments[1].bounds, sizeof(on_host.bounds));
  on_host.ahead = selection.ahead.n_segments > 0;
  if (on_host.ahead) {
    OKV_CHECK(selection.ahead.segments[0] == selection.wider);
    backend.Download(on_host.ahead_bounds, selection.ahead.segments[1].bounds,
                     sizeof(on_host.ahead_bounds));
  }
  SeqMeta meta;
  backend.Download(&meta, seq, sizeof(meta));
  on_host.kv_len = meta.kv_len;
  return on_host;
}

SetSimulation::SetSimulation(Backend& reference, int64_t max_tokens, int32_t capacity,
                             int32_t n_slots)
    : reference_(reference),
      max_tokens_(static_cast<int32_t>(max_tokens)),
      n_slots_(n_slots),
      slot_of_(static_cast<size_t>(max_tokens), -1),
      owner_(static_cast<size_t>(n_slots), -1),
      slots_(static_cast<size_t>(capacity)),
      miss_row_(static_cast<size_t>(capacity)),
      miss_slot_(static_cast<size_t>(capacity)),
      used_(static_cast<size_t>(n_slots), 0) {
  OKV_CHECK(n_slots >= capacity, "{} slots", n_slots);
}

void SetSimulation::Step(const SelectionOnHost& selection) {
  const auto count = static_cast<int32_t>(selection.index.size());
  const auto wider_count = static_cast<int32_t>(selection.wider.size());
  Update({.index = selection.index.data(),
          .count = &count,
          .bounds = selection.bounds,
          .wider = selection.wider.data(),
          .wider_count = &wider_count},
         selection.kv_len, counters_);
  if (!selection.ahead) return;
  Update({.index = selection.wider.data(),
          .count = &wider_count,
          .bounds = selection.ahead_bounds,
          .ahead = true},
         selection.kv_len, ahead_counters_);
}

void SetSimulation::Update(const WorkingSetArgs& selection, int32_t kv_len, uint64_t* counters) {
  OKV_CHECK(static_cast<size_t>(*selection.count + selection.bounds[1] - selection.bounds[0]) <=
                slots_.size() &&
            kv_len <= max_tokens_);
  const SeqMeta seq{.q_len = 1, .kv_len = kv_len};
  const int32_t block_table = 0;  // one block holds the context: a token is its row
  int32_t n_miss = 0;
  int32_t own = 0;
  int32_t own_row = 0;
  int32_t n_own = 0;
  int32_t span[2];
  SeqMeta slot_seq;
  WorkingSetArgs args = selection;
  args.seqs = &seq;
  args.block_table = &block_table;
  args.block_tokens = max_tokens_;
  args.capacity = static_cast<int32_t>(slots_.size());
  args.n_slots = n_slots_;
  args.max_tokens = max_tokens_;
  args.slot_of = slot_of_.data();
  args.owner = owner_.data();
  args.used = used_.data();
  args.clock = &clock_;
  args.slots = slots_.data();
  args.miss_row = miss_row_.data();
  args.miss_slot = miss_slot_.data();
  args.n_miss = &n_miss;
  args.own = &own;
  args.own_row = &own_row;
  args.n_own = &n_own;
  args.span = span;
  args.slot_seqs = &slot_seq;
  args.counters = counters;
  reference_.Enqueue(args);
}

}  // namespace omnikv
