// One sequence on a model with made-up weights, driven step by step without an engine, on any
// backend: what tests of policies need to see plans, costs and recordings.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "../made_up_model.h"
#include "../policy_settings.h"
#include "backend/trace/trace_backend.h"
#include "bank/bank.h"
#include "model/forward.h"
#include "model/generated.h"
#include "policy/policy.h"

namespace omnikv {

class StepFixture {
 public:
  // REQUIRES that the policy accepts `given` on a model of 6 layers and 4/2 heads of 16.
  // `more_slots` >= 0: the last three layers live on the host, and are read through working sets
  // with so many slots more than a selection can have, where the policy's layers read selections;
  // or all those that the policy streams do. `split`: heads of each class have a table of their
  // own, and so have layers, and KV heads, that keep different numbers of rows.
  StepFixture(Backend& backend, const std::string& name, const SettingList& given,
              bool force_indices = true, int32_t more_slots = -1, bool split = false,
              bool sums_values = false)
      : trace(backend) {
    // Less sharp than other tests' models, which enlarge the roundings of a step tenfold: logits of
    // full attention are then the same but for 2e-6 of the largest one, whatever the order of sums.
    config = SmallLlama({.max_context = kContext, .attn_scale = 0.5f});
    weights = Take(GenerateWeights(trace, config, DType::kF32));
    ropes = Take(RopeState::Create(trace, config));
    work = Take(Workspace::Create(trace, config, kChunk, 1));
    const PolicyInfo* info = Take(FindPolicy(name));
    settings =
        Take(PolicySettings::Parse(info->name, info->settings, WithFiles(*info, given, 6, 2)));
    policy = info->make();
    PolicyContext context{.backend = &trace,
                          .model_name = "test",
                          .n_layers = 6,
                          .n_heads = 4,
                          .n_kv_heads = 2,
                          .dk = 16,
                          .max_rows = kChunk,
                          .max_context = kContext,
                          .n_freq = 8,
                          .row_layout = {.token_bytes = 2 * (16 + 16) * 4,
                                         .block_tokens = 8,
                                         .seq_blocks = kContext / 8,
                                         .table_entries = 2 * kContext / 8},
                          .force_indices = force_indices,
                          .fetches = more_slots >= 0};
    context.inv_freq.assign(6, ropes.sets()[0].inv_freq.as<float>());
    Status prepared = policy->Prepare(context, settings);
    const bool kv_heads_apart = split && prepared.ok() && policy->Kept().HeadsDiffer();
    if (kv_heads_apart) {
      context.row_layout.heads_apart = true;
      policy = info->make();
      prepared = policy->Prepare(context, settings);
    }
    EXPECT_TRUE(prepared.ok()) << prepared.message();
    const DeclaredReads reads = policy->Reads();
    BankConfig bank_config;
    bank_config.layers.assign(6, LayerSpec{.n_kv_heads = 2, .dk = 16, .dv = 16});
    const int32_t n_host = reads.streamed.layers > 0 ? reads.streamed.layers : 3;
    for (int32_t layer = 6 - n_host; more_slots >= 0 && layer < 6; ++layer) {
      std::vector<StreamSpec>& streams = bank_config.layers[static_cast<size_t>(layer)].streams;
      streams[0].tier = TierKind::kHost;
      if (!reads.few_values.empty() && reads.few_values[static_cast<size_t>(layer)]) {
        streams = {{.planes = Planes::kK}, {.planes = Planes::kV, .tier = TierKind::kHost}};
      }
    }
    const bool heads_apart = split && policy->HeadClasses() > 1;
    for (int32_t c = 0; heads_apart && c < policy->HeadClasses(); ++c) {
      if (c > 0) bank_config.tables.push_back({.head_class = c});
      for (int32_t layer = 0; layer < 6; ++layer) {
        std::vector<StreamSpec>& streams = bank_config.layers[static_cast<size_t>(layer)].streams;
        if (c == 0) streams.clear();
        StreamSpec stream{.heads = policy->HeadsOf(layer, c), .table = c};
        if (!stream.heads.empty()) streams.push_back(std::move(stream));
      }
    }
    for (int32_t layer = 0; split && policy->Kept().LayersDiffer() && layer < 6; ++layer) {
      StreamSpec& stream = bank_config.layers[static_cast<size_t>(layer)].streams[0];
      if (layer > 0) {
        stream.table = static_cast<int32_t>(bank_config.tables.size());
        bank_config.tables.push_back({.shares = kv_heads_apart});
      }
      stream.heads_apart = kv_heads_apart;
      if (kv_heads_apart) bank_config.tables.push_back({.shares = true});
    }
    bank_config.dtype = DType::kF32;
    bank_config.block_tokens = 8;
    bank_config.max_tokens = kContext;
    bank_config.max_seqs = 2;
    bank_config.n_stages = reads.streamed.max_ahead + 1;
    bank = Take(Bank::Create(trace, bank_config));
    EXPECT_EQ(bank->config().Rows(), context.row_layout);
    EXPECT_TRUE(trace.AwaitShared().ok());
    states = Take(bank->OpenStates(policy->States()));
    policy->SetStates(ViewsOf(states));
    seq = Take(bank->NewSequence());
    residency = Take(Residency::Create(
        trace, *bank,
        {.reads = reads, .n_slots = static_cast<int32_t>(reads.LeastSlots()) + more_slots},
        {.reads = reads,
         .attends = !reads.by_token,
         .sums_values = sums_values,
         .n_heads = config.n_heads},
        policy->Kept(), kChunk));
    residency->Begin(0, seq);
  }

  // Rows of a prompt that pass in one step.
  int32_t StepRows() const {
    const int32_t wanted = policy->PromptStepRows();
    return wanted > 0 ? std::min(kChunk, wanted) : kChunk;
  }

  // Feeds a prompt of n tokens; returns the last row's logits.
  std::vector<float> Prompt(int32_t n) {
    prompt_len = n;
    const bool passes = policy->Kept().passes;
    for (int32_t pos = 0; pos < n;) {
      const int32_t rows = std::min(StepRows(), n - pos);
      const bool chooses = pos + rows == n && residency->ChoosesAfterPrompt(0) && !passes;
      EXPECT_TRUE(residency->Append(0, seq, rows, /*prefill=*/true, chooses).ok());
      Upload(pos, rows);
      StepGroup group = Group();
      group.chooses = chooses;
      group.n_rows = rows;
      group.n_out = pos + rows == n ? 1 : 0;
      group.prefill = true;
      group.first_pos = pos;
      group.prompt_end = n;
      EnqueueStep(Context(), {&group, 1});
      pos += rows;
      if (pos == n && !passes) residency->EndPrompt(0, seq, chooses);
    }
    if (passes) RunPasses(n);
    EXPECT_TRUE(policy->AfterPrefill(n).ok());
    return Logits();
  }

  // One decode step, recorded unless it is streamed; the trace logs it, and keeps what is recorded
  // in recordings().
  std::vector<float> Decode() {
    const auto pos = static_cast<int32_t>(bank->Length(seq));
    EXPECT_TRUE(residency->Append(0, seq, 1, /*prefill=*/false).ok());
    Upload(pos, 1);
    StepGroup group = Group();
    group.variant = policy->Variant(Lengths());
    trace.Clear();
    if (!residency->CanRecord()) {
      group.first_pos = pos;
      EnqueueStep(Context(), {&group, 1});
      return Logits();
    }
    const auto step = trace.Record([&] { EnqueueStep(Context(), {&group, 1}); });
    trace.Replay(*step);
    return Logits();
  }

  SeqLength Lengths() const {
    return {.tokens = bank->Length(seq),
            .prompt = prompt_len,
            .gone = residency->Gone(0),
            .layer_gone = residency->LayerGone(0)};
  }

  // Writes NaN over a token's K/V in one layer, of the heads of a class. REQUIRES a bank whose
  // heads are not split.
  void Overwrite(int32_t layer, int64_t t, int32_t head_class = 0) {
    const KvView view = bank->View(layer);
    int32_t block = 0;
    trace.Download(&block, view.block_table + bank->TableOffset(seq) + t / view.block_tokens,
                   sizeof(block));
    const int64_t row = int64_t{block} * view.block_tokens + t % view.block_tokens;
    const std::vector<std::byte> nan(static_cast<size_t>(view.k.row_bytes), std::byte{0xff});
    if (policy->HeadClasses() == 1) trace.Upload(view.k.Head(row, 0), nan.data(), nan.size());
    for (const int32_t h : policy->HeadsOf(layer, head_class)) {
      for (const KvPlane* plane : {&view.k, &view.v}) {
        trace.Upload(plane->Head(row, h), nan.data(), static_cast<size_t>(plane->head_bytes));
      }
    }
  }

  // Tokens times KV heads that each layer's attention really read in the last decode step, by its
  // cost.
  std::vector<int64_t> HeadTokensAttended() const {
    std::vector<int64_t> tokens;
    std::vector<uint64_t> bytes;  // read, but for the queries of each attention
    for (const TraceEntry& entry : trace.entries()) {
      if (std::holds_alternative<NormQkvRopeAppendArgs>(entry.op)) {
        tokens.push_back(0);
        bytes.push_back(0);
      }
      const auto* attend = std::get_if<AttendArgs>(&entry.op);
      if (attend == nullptr || attend->o == nullptr) continue;  // passes for scores alone
      const auto flops_a_token = static_cast<uint64_t>(2 * attend->Group() * 2 * config.head_dim);
      tokens.back() += static_cast<int64_t>(entry.cost.flops / flops_a_token);
      bytes.back() += entry.cost.bytes_read - static_cast<uint64_t>(attend->Heads()) * 4u * 16u;
    }
    // K and V of every token read, once each.
    for (size_t i = 0; i < tokens.size(); ++i) {
      EXPECT_EQ(bytes[i], static_cast<uint64_t>(tokens[i]) * (16u + 16u) * 4u);
    }
    return tokens;
  }

  // The mean over KV heads.
  std::vector<int64_t> TokensAttended() const {
    std::vector<int64_t> tokens = HeadTokensAttended();
    for (int64_t& n : tokens) n /= config.n_kv_heads;
    return tokens;
  }

  // Bytes of K/V that each layer read in the last decode step, by the cost of all its ops.
  std::vector<uint64_t> KvBytesByLayer() const {
    std::vector<uint64_t> bytes;
    for (const TraceEntry& entry : trace.entries()) {
      if (std::holds_alternative<NormQkvRopeAppendArgs>(entry.op)) bytes.push_back(0);
      if (!bytes.empty()) bytes.back() += entry.cost.kv_bytes;
    }
    return bytes;
  }

  static constexpr int32_t kContext = 256;
  static constexpr int32_t kChunk = 48;

  TraceBackend trace;
  ModelConfig config;
  Weights weights;
  std::unique_ptr<Bank> bank;
  StateStreams states;
  RopeState ropes;
  Workspace work;
  PolicySettings settings;
  std::unique_ptr<Policy> policy;
  std::unique_ptr<Residency> residency;
  int32_t seq = -1;
  int32_t prompt_len = 0;
  int32_t token_shift = 0;  // other tokens at the same places

 private:
  template <typename T>
  static T Take(Result<T> result) {
    EXPECT_TRUE(result.ok()) << result.status().message();
    return std::move(*result);
  }
  StepContext Context() { return {trace, config, weights, work}; }
  StepGroup Group() const {
    return {.policy = *policy, .residency = *residency, .ropes = ropes, .seq = seq};
  }
  int32_t TokenAt(int32_t pos) const { return (pos * 37 + 11 + token_shift) % config.vocab; }
  void Upload(int32_t pos, int32_t rows) {
    std::vector<int32_t> tokens;
    for (int32_t r = 0; r < rows; ++r) tokens.push_back(TokenAt(pos + r));
    Upload(pos, tokens);
  }
  void Upload(int32_t pos, std::span<const int32_t> tokens) {
    const auto rows = static_cast<int32_t>(tokens.size());
    std::vector<RowMeta> row_meta;
    for (int32_t r = 0; r < rows; ++r) row_meta.push_back({.seq = 0, .pos = pos + r});
    const SeqMeta seq_meta = {.q_begin = 0,
                              .q_len = rows,
                              .kv_len = pos + rows,
                              .table_off = bank->TableOffset(seq),
                              .prompt_len = prompt_len};
    const int32_t out_row = rows - 1;
    trace.Upload(work.rows.as(), row_meta.data(), row_meta.size() * sizeof(RowMeta));
    trace.Upload(work.tokens.as(), tokens.data(), tokens.size_bytes());
    trace.Upload(work.seqs.as(), &seq_meta, sizeof(seq_meta));
    trace.Upload(work.out_rows.as(), &out_row, sizeof(out_row));
  }
  // What PromptSteps does behind a first prompt of n tokens.
  void RunPasses(int32_t n) {
    std::vector<int32_t> prompt;
    for (int32_t pos = 0; pos < n; ++pos) prompt.push_back(TokenAt(pos));
    const auto passes = Take(policy->Passes(0, prompt));
    for (size_t pass = 0; pass < passes.size(); ++pass) {
      const std::span<const int32_t> tokens = passes[pass];
      for (size_t at = 0; at < tokens.size();) {
        const auto rows = tokens.subspan(at, std::min<size_t>(kChunk, tokens.size() - at));
        const auto n_rows = static_cast<int32_t>(rows.size());
        const int32_t pos = n + static_cast<int32_t>(at);
        EXPECT_TRUE(residency->Append(0, seq, n_rows, /*prefill=*/true, /*chooses=*/true).ok());
        Upload(pos, rows);
        StepGroup group = Group();
        group.n_rows = n_rows;
        group.n_out = 0;
        group.prefill = true;
        group.first_pos = pos;
        group.prompt_end = n;
        group.pass = static_cast<int32_t>(pass);
        EnqueueStep(Context(), {&group, 1});
        at += rows.size();
      }
      residency->Truncate(0, seq, n);
    }
    const std::vector<int64_t> kept = policy->ChooseAfterPasses(0, n);
    Upload(n - 1, 1);
    residency->MakeStates(work.rows.as<RowMeta>(), 1, work.seqs.as<SeqMeta>());
    for (int32_t layer = 0; layer < 6; ++layer) {
      const auto retained =
          policy->Retains({.layer = layer, .prefill = true, .prompt_end = n, .chooses = true});
      residency->RetainAfterPasses(layer, *retained, work.seqs.as<SeqMeta>());
    }
    residency->EndPrompt(0, seq, /*chose=*/true, kept);
  }
  std::vector<float> Logits() {
    std::vector<float> logits(static_cast<size_t>(config.vocab));
    trace.Download(logits.data(), work.logits.as(), logits.size() * sizeof(float));
    return logits;
  }
};

}  // namespace omnikv
