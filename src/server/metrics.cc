#include "server/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace omnikv::server {

void Metrics::Histogram::Add(double value, int64_t times) {
  const auto bound = std::lower_bound(kBounds.begin(), kBounds.end(), value);
  counts[static_cast<size_t>(bound - kBounds.begin())] += times;
  sum += value * static_cast<double>(times);
  n += times;
}

void Metrics::Ended(FinishReason reason, const RequestStats& stats) {
  const std::lock_guard lock(mutex_);
  ++ended_[FinishReasonName(reason)];
  if (reason == FinishReason::kCancelled) return;
  queue_.Add(stats.queue_seconds);
  prefill_.Add(stats.prefill_seconds);
  decode_.Add(stats.decode_seconds);
  first_token_.Add(stats.queue_seconds + stats.prefill_seconds);
  whole_.Add(stats.queue_seconds + stats.prefill_seconds + stats.decode_seconds);
  const int64_t between = stats.answer_tokens - 1;
  if (between > 0) {
    between_tokens_.Add(stats.decode_seconds / static_cast<double>(between), between);
  }
}

std::string Metrics::Text(const SchedulerStats& now, const std::optional<ContextStoreStats>& stored,
                          const std::string& model) const {
  std::string label = "model_name=\"";
  for (const char c : model) {
    if (c == '"' || c == '\\') label += '\\';
    label += c == '\n' ? ' ' : c;
  }
  label += '"';
  std::string out;
  const auto head = [&](const char* name, const char* kind, const char* help) {
    fmt::format_to(std::back_inserter(out), "# HELP {} {}\n# TYPE {} {}\n", name, help, name, kind);
  };
  const auto one = [&](const char* name, const char* kind, const char* help, double value) {
    head(name, kind, help);
    fmt::format_to(std::back_inserter(out), "{}{{{}}} {}\n", name, label, value);
  };
  const auto counts = [](int64_t n) { return static_cast<double>(n); };
  one("vllm:num_requests_running", "gauge", "Requests that are admitted.", counts(now.running));
  one("vllm:num_requests_waiting", "gauge", "Requests that wait.", counts(now.waiting));
  one("omnikv:requests_preempted", "gauge", "Preempted requests that wait to be resumed.",
      counts(now.swapped));
  one("vllm:num_preemptions_total", "counter", "Requests that were preempted.",
      counts(now.preemptions));
  one("omnikv:swap_bytes", "gauge", "Bytes of preempted requests.", counts(now.swap_bytes));
  one("vllm:kv_cache_usage_perc", "gauge", "Blocks of K/V in use, 1 is all of them.",
      now.blocks_total > 0 ? counts(now.blocks_used) / counts(now.blocks_total) : 0);
  one("vllm:prefix_cache_queries_total", "counter", "Tokens of prompts that were looked for.",
      counts(now.prompt_tokens));
  one("vllm:prefix_cache_hits_total", "counter", "Tokens of prompts that were there already.",
      counts(now.cached_tokens));
  one("vllm:prompt_tokens_total", "counter", "Tokens of prompts.", counts(now.prompt_tokens));
  one("vllm:prompt_tokens_cached_total", "counter",
      "Tokens of prompts that were there already, in memory or in the store.",
      counts(now.cached_tokens));
  // A further label of some lines of a metric.
  const auto part = [&](const char* name, const std::string& of, double value) {
    fmt::format_to(std::back_inserter(out), "{}{{{},{}}} {}\n", name, label, of, value);
  };
  const char* const by_source = "vllm:prompt_tokens_by_source_total";
  head(by_source, "counter", "Tokens of prompts that were computed, in memory, or in the store.");
  part(by_source, "source=\"local_compute\"", counts(now.prompt_tokens - now.cached_tokens));
  part(by_source, "source=\"local_cache_hit\"", counts(now.cached_tokens - now.stored_tokens));
  part(by_source, "source=\"external_kv_transfer\"", counts(now.stored_tokens));
  one("vllm:generation_tokens_total", "counter", "Tokens of answers.", counts(now.answer_tokens));
  one("omnikv:kept_contexts", "gauge", "Contexts that no request has, kept for others.",
      counts(now.kept_contexts));
  one("omnikv:pinned_contexts", "gauge", "Of those, the ones that are pinned.",
      counts(now.pinned_contexts));
  head("omnikv:kv_blocks", "gauge", "Blocks of K/V of a table of the bank.");
  for (const Holdings::Blocks& blocks : now.holdings.blocks) {
    const std::string table = fmt::format("table=\"{}\",state=", blocks.table);
    part("omnikv:kv_blocks", table + "\"used\"", counts(blocks.used));
    part("omnikv:kv_blocks", table + "\"free\"", counts(blocks.total - blocks.used));
  }
  head("omnikv:held_bytes", "gauge", "Bytes of K/V and of what policies know, by where they are.");
  part("omnikv:held_bytes", "tier=\"device\"", static_cast<double>(now.holdings.bytes.device));
  part("omnikv:held_bytes", "tier=\"host\"", static_cast<double>(now.holdings.bytes.host));
  part("omnikv:held_bytes", "tier=\"disk\"", static_cast<double>(now.holdings.bytes.disk));
  if (stored) {
    one("omnikv:store_contexts", "gauge", "Contexts in files.", counts(stored->contexts));
    one("omnikv:store_segments", "gauge", "Files of what contexts have in common.",
        counts(stored->segments));
    one("omnikv:store_bytes", "gauge", "Bytes of both.", static_cast<double>(stored->bytes));
    one("omnikv:store_written_total", "counter", "Contexts that were written to files.",
        counts(stored->written));
    one("omnikv:store_written_bytes_total", "counter", "Bytes of the files that were written.",
        static_cast<double>(stored->written_bytes));
    one("omnikv:store_given_up_total", "counter",
        "Contexts that were not written, because their memory was needed or a longer one came.",
        counts(stored->given_up));
    one("omnikv:store_read_total", "counter", "Contexts that were read from files.",
        counts(stored->read));
    one("omnikv:store_read_direct_total", "counter",
        "Contexts of those that were read past the page cache, by io_uring with O_DIRECT.",
        counts(stored->read_direct));
    one("omnikv:store_read_bytes_total", "counter", "Bytes of the files that were read.",
        static_cast<double>(stored->read_bytes));
    one("omnikv:store_dropped_total", "counter", "Contexts whose files made room for others.",
        counts(stored->dropped));
    one("omnikv:store_failed_total", "counter",
        "Files that were damaged, and contexts that could not be written.", counts(stored->failed));
  }
  one("omnikv:decode_steps_total", "counter", "Steps with rows that decode.", counts(now.steps));
  one("omnikv:decode_rows_total", "counter", "Rows of those.", counts(now.step_rows));
  one("omnikv:selected_rows_total", "counter",
      "Rows that steps selected in layers with working sets, of requests that ended.",
      static_cast<double>(now.slots.selected));
  one("omnikv:selected_row_hits_total", "counter", "Of those, the ones that were there.",
      static_cast<double>(now.slots.selected - now.slots.missed));
  one("omnikv:fetched_bytes_total", "counter", "Bytes of the others.",
      static_cast<double>(now.slots.missed_bytes));
  one("omnikv:requests_refused_total", "counter", "Requests that were never admitted.",
      counts(now.refused));
  one("omnikv:requests_failed_total", "counter", "Requests that failed.", counts(now.failed));
  const std::lock_guard lock(mutex_);
  head("vllm:request_success_total", "counter", "Requests that ended, by reason.");
  for (const auto& [reason, n] : ended_) {
    fmt::format_to(std::back_inserter(out),
                   "vllm:request_success_total{{{},finished_reason=\"{}\"}} {}\n", label, reason,
                   n);
  }
  const auto histogram = [&](const char* name, const char* help, const Histogram& h) {
    head(name, "histogram", help);
    int64_t upto = 0;
    for (size_t i = 0; i < h.counts.size(); ++i) {
      upto += h.counts[i];
      const std::string bound = i < kBounds.size() ? fmt::format("{}", kBounds[i]) : "+Inf";
      fmt::format_to(std::back_inserter(out), "{}_bucket{{{},le=\"{}\"}} {}\n", name, label, bound,
                     upto);
    }
    fmt::format_to(std::back_inserter(out), "{}_sum{{{}}} {}\n{}_count{{{}}} {}\n", name, label,
                   h.sum, name, label, h.n);
  };
  histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", first_token_);
  histogram("vllm:inter_token_latency_seconds", "Between tokens, a mean of each request.",
            between_tokens_);
  histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", whole_);
  histogram("vllm:request_queue_time_seconds", "From arrival to admission.", queue_);
  histogram("vllm:request_prefill_time_seconds", "From admission to the first token.", prefill_);
  histogram("vllm:request_decode_time_seconds", "From the first token to the last.", decode_);
  return out;
}

}  // namespace omnikv::server
