// What every policy must keep, tested on each folder of src/policy without being told about it, on
// the reference, on the CPU and on a card: covering settings equal `full`, the budget is respected
// and its cost is what it says, steps are pure and deterministic.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <set>

#include "../test_names.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/ref/ref_backend.h"
#include "bank/set_simulation.h"
#include "op_outputs.h"
#include "policy/kv_bytes_read.h"
#include "step_fixture.h"
#ifdef OMNIKV_HAVE_CUDA
#include "backend/cuda/cuda_backend.h"
#endif

namespace omnikv::house_test {
namespace {

constexpr int32_t kPrompt = 100;
constexpr int32_t kSteps = 12;

Result<std::unique_ptr<Backend>> MakeCpu() {
  return std::unique_ptr<Backend>(
      MakeCpuBackend({.threads = 2, .precision = GemmPrecision::kFull}));
}

Result<std::unique_ptr<Backend>> MakeBackend(const std::string& name) {
  if (name == "ref") return MakeRefBackend();
  if (name == "cpu") return MakeCpu();
#ifdef OMNIKV_HAVE_CUDA
  return MakeCudaBackend({.full_precision = true, .make_host = MakeCpu});
#else
  return Unsupported("this build has no CUDA");
#endif
}

// Bits on `ref`; elsewhere f32 sums in another order, of the largest logit.
double Tolerance(const std::string& device) {
  return device == "ref" ? 0 : device == "cpu" ? 5e-6 : 1e-4;
}

// Logits after the prompt and after each step.
std::vector<std::vector<float>> RunSteps(StepFixture& fixture) {
  std::vector<std::vector<float>> logits = {fixture.Prompt(kPrompt)};
  for (int i = 0; i < kSteps; ++i) logits.push_back(fixture.Decode());
  return logits;
}

double MaxRelativeError(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0;
  double size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error = std::max(error, std::abs(static_cast<double>(a[i]) - b[i]));
    size = std::max(size, std::abs(static_cast<double>(b[i])));
  }
  return error / size;
}

// The policy's defaults, with a budget far below the context where it has one, and those it gives
// for tests.
std::vector<SettingList> TestSettings(const PolicyInfo& info) {
  std::vector<SettingList> all = info.test_settings;
  all.push_back(SmallDefaults(info));
  return all;
}

// Rows that RunSteps brings to stages: in each step the whole past of every host layer, but of
// those that have a stage to themselves; of the first ones at the end of the step before.
size_t RowsStreamed(const StepFixture& fixture) {
  std::vector<int32_t> steps(kSteps, 1);
  for (int32_t left = kPrompt; left > 0; left -= fixture.StepRows()) {
    steps.insert(steps.begin(), std::min(left, fixture.StepRows()));
  }
  std::sort(steps.rbegin(), steps.rend());
  int32_t n_host = 0;
  for (int32_t layer = 0; layer < 6; ++layer) n_host += fixture.bank->OnHost(layer) ? 1 : 0;
  const int32_t ahead = fixture.bank->StagesAhead();
  int32_t rows = 0;
  int32_t pos = 0;
  for (const int32_t n : steps) {
    for (int32_t i = 0; i < n_host; ++i) {
      const bool alone = i + ahead + 1 >= n_host && i < ahead + 1;
      if (!alone) rows += i < ahead ? pos + n : pos;
    }
    pos += n;
  }
  return static_cast<size_t>(rows);
}

class EveryPolicy : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  void SetUp() override {
    const auto made = MakeBackend(device());
    if (made.ok()) return;
    ASSERT_EQ(made.status().code(), StatusCode::kUnsupported) << made.status().message();
    GTEST_SKIP() << made.status().message();
  }
  void TearDown() override {
    if (device() != "cuda" || IsSkipped()) return;
    std::printf("house: %s on cuda: %.1e of the largest logit at most\n",
                std::get<0>(GetParam()).c_str(), worst_);
  }
  const PolicyInfo& info() const { return **FindPolicy(std::get<0>(GetParam())); }
  const std::string& device() const { return std::get<1>(GetParam()); }
  std::unique_ptr<Backend> backend() const { return *MakeBackend(device()); }
  bool has_tiers() const { return device() != "cpu"; }

  // Logits of steps that do the same in other pieces; `rounded`: and round between the pieces.
  void ExpectSame(const std::vector<std::vector<float>>& got,
                  const std::vector<std::vector<float>>& expected, bool rounded = false) {
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) {
      const double error = MaxRelativeError(got[i], expected[i]);
      worst_ = std::max(worst_, error);
      ASSERT_LE(error, std::max(Tolerance(device()), rounded ? 1e-6 : 0.0)) << "step " << i;
    }
  }

 private:
  double worst_ = 0;
};

TEST_P(EveryPolicy, CoveringSettingsEqualFull) {
  if (info().covering(kPrompt + kSteps).empty()) {
    GTEST_SKIP() << info().name << " is exempt: " << info().exempt;
  }
  const auto full_backend = backend();
  StepFixture full(*full_backend, "full", {});
  const auto expected = RunSteps(full);
  for (const SettingList& covering : info().covering(kPrompt + kSteps)) {
    const auto own_backend = backend();
    StepFixture fixture(*own_backend, info().name, covering);
    SCOPED_TRACE(fixture.settings.ToString());
    ExpectSame(RunSteps(fixture), expected);
  }
}

// What the logits of a prompt are: full attention's, or the policy's own.
TEST_P(EveryPolicy, PromptsAreAsDenseAsItSays) {
  const auto full_backend = backend();
  const std::vector<float> expected = StepFixture(*full_backend, "full", {}).Prompt(kPrompt);
  for (const SettingList& settings : TestSettings(info())) {
    const auto own_backend = backend();
    StepFixture fixture(*own_backend, info().name, settings);
    const double error = MaxRelativeError(fixture.Prompt(kPrompt), expected);
    if (fixture.policy->DensePrompts()) {
      EXPECT_EQ(error, 0) << fixture.settings.ToString();
    } else {
      EXPECT_GT(error, 0.01) << fixture.settings.ToString();
    }
  }
}

// Where K/V live never changes a bit, whatever the working sets hold; where the host attends to
// some of them, the sum of two attentions is rounded. (A card's kernels cut a choice into other
// pieces than the slots that stand in for it: there slots are the same to the bit.)
TEST_P(EveryPolicy, LayersOnTheHostChangeNothing) {
  if (!has_tiers()) GTEST_SKIP() << "a host backend has no tier beside its own";
  for (const SettingList& settings : TestSettings(info())) {
    const auto own_backend = backend();
    StepFixture own(*own_backend, info().name, settings);
    SCOPED_TRACE(own.settings.ToString());
    const auto expected = RunSteps(own);
    uint64_t last_missed = 0;
    std::vector<std::vector<float>> of_slots;
    for (int32_t more_slots : {0, 7, 200}) {
      const auto tiered_backend = backend();
      StepFixture tiered(*tiered_backend, info().name, settings, true, more_slots);
      SCOPED_TRACE(more_slots);
      const auto logits = RunSteps(tiered);
      ExpectSame(logits, expected, tiered.residency->AttendsAway());
      if (of_slots.empty()) of_slots = logits;
      ASSERT_EQ(logits, of_slots);
      if (!tiered.policy->Reads().few_values.empty()) {
        const auto summing_backend = backend();
        StepFixture summing(*summing_backend, info().name, settings, true, more_slots,
                            /*split=*/false, /*sums_values=*/true);
        ASSERT_TRUE(summing.residency->AttendsAway());
        ExpectSame(RunSteps(summing), expected, /*rounded=*/true);
        for (const std::vector<Op>& step : summing.trace.recordings()) {
          EXPECT_TRUE(std::any_of(step.begin(), step.end(), [](const Op& op) {
            return std::holds_alternative<SumValuesArgs>(op);
          })) << "rows are read in place";
        }
      }
      if (!tiered.residency->CanRecord()) {
        EXPECT_EQ(tiered.bank->BytesStaged(), RowsStreamed(tiered) * 2 * 2 * 16 * sizeof(float));
        EXPECT_TRUE(tiered.trace.recordings().empty());
      }
      const auto rows = tiered.residency->Count();
      if (!rows) continue;
      EXPECT_GT(rows->selected, 0u);
      EXPECT_LE(rows->missed, more_slots == 0 ? rows->selected : last_missed)
          << "more room, more misses";
      // With room for all, a row comes to each of three layers once at most.
      EXPECT_TRUE(more_slots < 200 || rows->missed <= 3u * (kPrompt + kSteps)) << rows->missed;
      last_missed = rows->missed;
    }
  }
}

// What simulated sets miss is what real ones of that size miss, by the same choices.
TEST_P(EveryPolicy, SimulatedSetsMissWhatRealOnesMiss) {
  if (!has_tiers()) GTEST_SKIP() << "a host backend has no tier beside its own";
  bool any = false;
  const auto reference = MakeRefBackend();
  for (const SettingList& settings : TestSettings(info())) {
    for (int32_t more_slots : {0, 7, 200}) {
      const auto tiered_backend = backend();
      StepFixture tiered(*tiered_backend, info().name, settings, true, more_slots);
      if (!tiered.residency->Count()) continue;
      any = true;
      const DeclaredReads reads = tiered.policy->Reads();
      const auto least = static_cast<int32_t>(reads.LeastSlots());
      std::vector<SetSimulation> sets;
      for (int32_t i = 0; i < reads.n_selections; ++i) {
        sets.emplace_back(*reference, reads, StepFixture::kContext, least + more_slots);
      }
      tiered.Prompt(kPrompt);
      tiered.residency->Reset(0);  // not primed, as the simulated ones
      for (int step = 0; step < kSteps; ++step) {
        tiered.Decode();
        for (int32_t layer = 0; layer < GlobalLayers(tiered.config); ++layer) {
          const std::optional<Selection> made = tiered.policy->Selected({.layer = layer});
          if (!made) continue;
          sets[static_cast<size_t>(made->number)].Step(
              ReadSelection(tiered.trace, *made, tiered.work.seqs.as<SeqMeta>(),
                            /*with_scores=*/reads.max_ahead > 0));
        }
      }
      SlotCounters simulated;
      for (size_t layer = 3; layer < 6; ++layer) {  // on the host
        if (reads.selection_of[layer] < 0) continue;
        simulated += sets[static_cast<size_t>(reads.selection_of[layer])].Count();
      }
      const SlotCounters real = *tiered.residency->Count();
      SCOPED_TRACE(fmt::format("{}, {} more slots", tiered.settings.ToString(), more_slots));
      EXPECT_EQ(simulated.selected, real.selected);
      EXPECT_EQ(simulated.missed, real.missed);
      EXPECT_EQ(simulated.ahead, real.ahead);
      EXPECT_GT(simulated.missed, 0u);
      EXPECT_EQ(simulated.ahead > 0, reads.max_ahead > 0);
    }
  }
  if (!any) GTEST_SKIP() << info().name << " has no layers that read a selection";
}

// The prompt's last query selected for the first step: what both want is there.
TEST_P(EveryPolicy, TheFirstStepAfterAPromptFindsItsRows) {
  if (!has_tiers()) GTEST_SKIP() << "a host backend has no tier beside its own";
  for (const SettingList& settings : TestSettings(info())) {
    const auto own_backend = backend();
    StepFixture fixture(*own_backend, info().name, settings, true, /*more_slots=*/0);
    if (!fixture.residency->Count()) continue;
    SCOPED_TRACE(fixture.settings.ToString());
    fixture.Prompt(kPrompt);
    SlotCounters rows = *fixture.residency->Count();
    EXPECT_EQ(rows.selected, 0u);  // by steps
    EXPECT_GT(rows.primed, 0u);
    fixture.Decode();
    rows = *fixture.residency->Count();
    EXPECT_GT(rows.selected, 0u);
    EXPECT_LT(rows.missed, rows.selected);
    EXPECT_EQ(rows.missed_bytes, rows.missed * fixture.bank->config().RowBytes(5));
  }
}

// The tokens and the bytes that each layer really reads, by the cost of its ops, passes for scores
// alone included, against the budget and what the policy says.
TEST_P(EveryPolicy, ReadsWhatItSaysAndKeepsItsBudget) {
  for (const SettingList& settings : TestSettings(info())) {
    const auto own_backend = backend();
    StepFixture fixture(*own_backend, info().name, settings);
    SCOPED_TRACE(fixture.settings.ToString());
    fixture.Prompt(kPrompt);
    bool less = false;
    std::set<int64_t> distinct;  // what was read where it was less than the most
    for (int step = 1; step <= kSteps; ++step) {
      fixture.Decode();
      const std::vector<int64_t> read = fixture.HeadTokensAttended();
      const std::vector<uint64_t> bytes = fixture.KvBytesByLayer();
      ASSERT_EQ(read.size(), 6u);
      const SeqLength at = fixture.Lengths();
      ASSERT_EQ(at.tokens, kPrompt + step);
      const int64_t budget = fixture.policy->Budget(at.tokens);
      for (int32_t layer = 0; layer < 6; ++layer) {
        SCOPED_TRACE(layer);
        const int64_t head_tokens = read[static_cast<size_t>(layer)];
        const int64_t most = fixture.policy->HeadTokensRead(layer, at, 2);
        EXPECT_EQ(head_tokens, fixture.policy->HeadTokensReadLast(layer, 0, at, 2));
        EXPECT_EQ(bytes[static_cast<size_t>(layer)],
                  KvBytesRead(*fixture.policy, layer, at, fixture.bank->View(layer), head_tokens));
        const int64_t lists = int64_t{2} * fixture.policy->Reads().ListsOf(layer);
        const int64_t tokens = head_tokens / lists;
        EXPECT_EQ(most / lists, fixture.policy->TokensRead(layer, at));
        EXPECT_LE(head_tokens, most);
        if (head_tokens < most) {
          less = true;
          distinct.insert(head_tokens - lists * fixture.policy->Besides(at));
        }
        if (!fixture.policy->Budgeted(layer) || budget == 0) continue;
        EXPECT_LE(tokens, fixture.policy->LayerAllows(layer, at));
        EXPECT_LT(tokens, at.tokens);
      }
    }
    // Exactly the most, unless the policy says that it goes by scores: then it does.
    EXPECT_EQ(less, fixture.policy->ReadsByScore());
    EXPECT_TRUE(!less || distinct.size() > 2) << distinct.size();
  }
}

// Memory of tokens that are dropped goes to others at once: what is written there changes nothing.
TEST_P(EveryPolicy, DroppedTokensAreNeverRead) {
  bool any = false;
  for (const SettingList& settings : TestSettings(info())) {
    const auto own_backend = backend();
    const auto other_backend = backend();
    StepFixture kept(*own_backend, info().name, settings);
    StepFixture dropped(*other_backend, info().name, settings);
    SCOPED_TRACE(kept.settings.ToString());
    ASSERT_EQ(kept.Prompt(kPrompt), dropped.Prompt(kPrompt));
    for (int step = 0; step < kSteps; ++step) {
      const int64_t length = kPrompt + step;
      for (int32_t c = 1; c < dropped.policy->HeadClasses(); ++c) {
        const Policy::TokenRange of_class = dropped.policy->Dropped(length, c);
        for (int64_t t = of_class.begin; t < std::min(of_class.end, length); ++t) {
          any = true;
          for (int32_t layer = 0; layer < 6; ++layer) dropped.Overwrite(layer, t, c);
        }
      }
      const Keeps keeps = dropped.policy->Kept();
      for (int32_t layer = 0; layer < 6; ++layer) {
        Policy::TokenRange range = dropped.policy->Dropped(length, 0);
        if (keeps.rows > 0) {  // rows behind those that are held
          const int64_t held = dropped.Lengths().Held(layer);
          range = {keeps.every_step ? std::min(held, keeps.rows) : held, kPrompt};
        }
        for (int64_t t = range.begin; t < std::min(range.end, length); ++t) {
          any = true;
          dropped.Overwrite(layer, t);
        }
      }
      ASSERT_EQ(kept.Decode(), dropped.Decode()) << "step " << step;
    }
  }
  if (!any) GTEST_SKIP() << info().name << " drops nothing";
}

// Nor does it matter which rows lie together: those of classes of heads, or of layers that keep
// different numbers.
TEST_P(EveryPolicy, HeadsAndLayersInTablesOfTheirOwnChangeNothing) {
  bool any = false;
  for (const SettingList& settings : TestSettings(info())) {
    const auto own_backend = backend();
    const auto other_backend = backend();
    StepFixture whole(*own_backend, info().name, settings);
    if (whole.policy->HeadClasses() == 1 && !whole.policy->Kept().LayersDiffer()) continue;
    any = true;
    StepFixture split(*other_backend, info().name, settings, true, -1, /*split=*/true);
    SCOPED_TRACE(whole.settings.ToString());
    ExpectSame(RunSteps(split), RunSteps(whole));
  }
  if (!any) GTEST_SKIP() << info().name << " tells neither KV heads nor layers apart";
}

TEST_P(EveryPolicy, StepsAreDeterministic) {
  for (const SettingList& settings : TestSettings(info())) {
    const auto first_backend = backend();
    const auto second_backend = backend();
    StepFixture first(*first_backend, info().name, settings);
    StepFixture second(*second_backend, info().name, settings);
    EXPECT_EQ(RunSteps(first), RunSteps(second)) << first.settings.ToString();
  }
}

// Recording the same variant at another token gives the same ops with the same arguments.
TEST_P(EveryPolicy, StepsArePure) {
  for (const SettingList& settings : TestSettings(info())) {
    const auto own_backend = backend();
    StepFixture fixture(*own_backend, info().name, settings);
    SCOPED_TRACE(fixture.settings.ToString());
    RunSteps(fixture);
    const auto& recordings = fixture.trace.recordings();
    ASSERT_EQ(recordings.size(), static_cast<size_t>(kSteps));
    for (size_t i = 1; i < recordings.size(); ++i) {
      const auto difference = TraceBackend::Difference(recordings[0], recordings[i]);
      EXPECT_FALSE(difference.has_value()) << "step " << i << ": " << *difference;
    }
  }
}

// A step on the reference and on another backend, op by op: the first op that differs is the one to
// look at. OMNIKV_PRINT_OPS=1 prints them all, on the reference too.
TEST_P(EveryPolicy, OpsGiveWhatTheReferenceGives) {
  const bool print = std::getenv("OMNIKV_PRINT_OPS") != nullptr;
  for (const SettingList& settings : TestSettings(info())) {
    const auto reference = MakeRefBackend();
    const auto own_backend = backend();
    OpOutputs expected(*reference);
    OpOutputs got(*own_backend);
    StepFixture of_reference(expected, info().name, settings);
    StepFixture fixture(got, info().name, settings);
    SCOPED_TRACE(fixture.settings.ToString());
    for (StepFixture* f : {&of_reference, &fixture}) {
      f->Prompt(kPrompt);
      f->Decode();
    }
    ASSERT_EQ(got.outputs().size(), expected.outputs().size());
    if (print) std::printf("%s %s\n", info().name.c_str(), fixture.settings.ToString().c_str());
    for (size_t i = 0; i < got.outputs().size(); ++i) {
      const auto& [op, array, values] = got.outputs()[i];
      const OpOutput& want = expected.outputs()[i];
      ASSERT_EQ(op, want.op) << "op " << i;
      ASSERT_EQ(values.size(), want.values.size()) << "op " << i << ", " << op << ", " << array;
      const double error =
          want.Largest() == 0 ? got.outputs()[i].Largest() : MaxRelativeError(values, want.values);
      if (print) {
        std::printf("%4zu  %-20s %-8s %8zu values, largest %10.4g, error %.1e of it\n", i,
                    op.c_str(), array.c_str(), values.size(), want.Largest(), error);
      }
      // More than the logits may have: sums over many activations differ less than each of them.
      ASSERT_LE(error, 10 * Tolerance(device())) << "op " << i << ", " << op << ", " << array;
    }
  }
}

// A dense shortcut may not change anything but rounding.
TEST_P(EveryPolicy, TheDenseShortcutChangesNothing) {
  const auto forced_backend = backend();
  const auto free_backend = backend();
  StepFixture forced(*forced_backend, info().name, {}, /*force_indices=*/true);
  StepFixture free(*free_backend, info().name, {}, /*force_indices=*/false);
  ExpectSame(RunSteps(forced), RunSteps(free));
}

std::vector<std::string> Names() {
  std::vector<std::string> names;
  for (const PolicyInfo& info : AllPolicies()) names.push_back(info.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(All, EveryPolicy,
                         ::testing::Combine(::testing::ValuesIn(Names()),
                                            ::testing::Values("ref", "cpu", "cuda")),
                         NameOfBoth);

}  // namespace
}  // namespace omnikv::house_test
