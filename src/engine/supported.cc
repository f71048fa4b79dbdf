#include "engine/supported.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "base/check.h"
#include "engine/asking_backend.h"
#include "engine/row_group.h"

namespace omnikv {
namespace {

// The weights as steps see them, of which none is read.
Weights WeightsSeen(const EngineCore& core) {
  Weights seen;
  seen.embed = core.weights.embed;
  seen.final_norm = core.weights.final_norm;
  seen.head = core.weights.head;
  seen.head_bias = core.weights.head_bias;
  seen.layers = core.weights.layers;
  seen.layers.resize(static_cast<size_t>(core.config.n_layers));
  return seen;
}

constexpr int64_t kMostUnit = 512;  // tokens of which policies keep something together

// Enqueues a prompt, and a decode step of each kind that follows it.
Status EnqueueSteps(EngineCore& core, RowGroup& group) {
  const StepContext context{
      .backend = *core.backend, .config = core.config, .weights = core.weights, .work = core.work};
  const int64_t most = core.bank->config().max_tokens;
  const auto n = static_cast<int32_t>(std::clamp<int64_t>(most - 1, 1, core.work.max_rows));
  OKV_ASSIGN_OR_RETURN(const int32_t member, group.Join());
  OKV_RETURN_IF_ERROR(group.AppendPrompt(member, n, n));
  StepGroup step{.policy = group.policy(),
                 .residency = group.residency(),
                 .ropes = group.ropes(),
                 .n_rows = n,
                 .n_out = 1,
                 .n_seqs = group.max_seqs(),
                 .seq = group.seq(member),
                 .prefill = true,
                 .prompt_end = n,
                 .member = member,
                 .chooses = group.ChoosesAfter(member, n, n)};
  EnqueueStep(context, {&step, 1});
  group.EndPromptRows(member, n);
  if (group.length(member) == most) return {};
  if (group.AwaitsPasses(member)) {
    OKV_RETURN_IF_ERROR(group.AppendPrompt(member, 1, n));
    step.n_rows = 1;
    step.n_out = 0;
    step.first_pos = n;
    step.pass = 0;
    EnqueueStep(context, {&step, 1});
    group.CutTo(member, n);
    step.n_out = 1;
    step.pass = -1;
  }
  if (!group.residency().CheckRoom(group.seq(member), 1).ok()) return {};  // no step follows it
  OKV_RETURN_IF_ERROR(group.Append(member, 1));
  const SeqLength now = group.lengths(member);
  const SeqLength full{.tokens = most, .prompt = most - 1, .gone = now.gone};
  std::set<int32_t> variants{group.policy().Variant(now), group.policy().Variant(full)};
  const auto add = [&](int64_t tokens) {
    variants.insert(group.policy().Variant({.tokens = tokens, .prompt = tokens - 1}));
  };
  // Some lengths may be read in place that others fetch, which a card cannot do on a disk.
  const int64_t stride = std::max<int64_t>(1, most / 2048);
  for (int64_t tokens = 2; core.plan.on_disk && tokens <= most; tokens += stride) add(tokens);
  // Some steps end a unit of tokens.
  for (int64_t tokens = std::max<int64_t>(2, most - kMostUnit); tokens < most; ++tokens)
    add(tokens);
  for (const int32_t variant : variants) {
    step.n_rows = 1;
    step.prefill = step.chooses = false;
    step.first_pos = now.tokens - 1;
    step.variant = variant;
    EnqueueStep(context, {&step, 1});
  }
  return {};
}

}  // namespace

Status CheckSupported(const EngineCore& core, const PolicyOptions& policy, int32_t max_seqs,
                      const PolicyInfo* own) {
  EngineCore dry;
  auto asking = std::make_unique<AskingBackend>(*core.backend);
  const AskingBackend& answers = *asking;
  dry.backend = std::move(asking);
  dry.options = core.options;
  dry.config = core.config;
  dry.plan = core.plan;
  dry.weights = WeightsSeen(core);
  OKV_ASSIGN_OR_RETURN(dry.bank, Bank::Create(*dry.backend, core.bank->config()));
  OKV_ASSIGN_OR_RETURN(dry.work, Workspace::Create(*dry.backend, dry.config, dry.plan.chunk,
                                                   MaxOutRows(dry.config, dry.plan.chunk,
                                                              dry.options.max_sessions)));
  {
    OKV_ASSIGN_OR_RETURN(const auto group, RowGroup::OpenUnasked(dry, policy, max_seqs, own));
    OKV_RETURN_IF_ERROR(EnqueueSteps(dry, *group));
    if (answers.answer().ok) return {};
    return Unsupported(fmt::format("{} under `policy` {} needs {}, which {} does not run: {}",
                                   core.config.name, group->policy_name(), answers.refused(),
                                   core.backend->Name(), answers.answer().reason));
  }
}

}  // namespace omnikv
