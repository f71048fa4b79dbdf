#include "bench/hits.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "backend/ref/ref_backend.h"
#include "bank/set_simulation.h"
#include "base/log.h"
#include "bench/cases.h"
#include "engine/row_group.h"
#include "eval/document.h"
#include "flags.h"
#include "report.h"

namespace omnikv::tools {
namespace {

constexpr int kFacts = 18;  // of a document

// Tokens to read, and those to go on with; none: what the model answers, up to its end.
struct Turn {
  std::vector<int32_t> prompt, follow;
};
struct Text {
  std::string source;  // "answers" or "text"
  std::vector<Turn> turns;
};

// Rows of one layer in working sets of one size.
struct Rows {
  uint64_t chosen = 0;
  uint64_t missed = 0;
  uint64_t ahead = 0;
  uint64_t missed_first = 0;  // in the first steps of turns, whose sets are empty
  uint64_t chosen_first = 0;

  double HitRate() const { return 1 - static_cast<double>(missed) / static_cast<double>(chosen); }
  double HitRateAfterFirst() const {
    return chosen == chosen_first ? 0
                                  : 1 - static_cast<double>(missed - missed_first) /
                                            static_cast<double>(chosen - chosen_first);
  }
};

class HitsBench {
 public:
  explicit HitsBench(const HitsOptions& options) : o_(options) {}
  Status Run();

 private:
  struct Case {
    int64_t context = 0;  // tokens of the longest prompt
    int64_t steps = 0;
    std::string settings;
    std::vector<std::vector<Rows>> rows;       // [sizes][selections]
    std::vector<std::vector<Rows>> last_turn;  // its rows alone
    size_t turns = 0;                          // of the text, as far as steps were left
    std::string policy;
    std::optional<double> on_device;  // hit rate of the real working sets in the last turn
  };

  Result<std::vector<Text>> Texts() const;
  Result<Text> ForcedText(const std::string& text) const;
  Result<Case> Measure(const Text& text);
  Status Follow(Session& session, const Turn& turn, Case& c);
  // The layers' sum of a row count.
  template <typename Count>
  uint64_t Sum(const std::vector<Rows>& groups, const Count& count) const {
    uint64_t sum = 0;
    for (size_t g = 0; g < groups.size(); ++g) sum += layers_[g].size() * count(groups[g]);
    return sum;
  }
  Rows AllLayers(const std::vector<Rows>& groups) const;
  // The real working sets', where all layers that read a selection have them; else nothing.
  std::optional<size_t> RealSize() const;
  void Report(const Text& text, const Case& c);

  HitsOptions o_;
  BenchEngine bench_;
  std::unique_ptr<Backend> reference_ = MakeRefBackend();
  DeclaredReads reads_;                       // by layer of the model
  std::vector<std::vector<int32_t>> layers_;  // [selections]: that read it
  std::vector<int64_t> sizes_;                // of working sets, tokens, ascending
  nlohmann::ordered_json json_ = nlohmann::ordered_json::array();
};

Status HitsBench::Run() {
  if (o_.engine.context == 0 && o_.file.empty()) {  // with room for a question around the document
    o_.engine.context =
        *std::max_element(o_.lengths.begin(), o_.lengths.end()) + o_.steps + int64_t{1024};
  }
  o_.engine.policy = o_.policy;
  OKV_ASSIGN_OR_RETURN(bench_, OpenBenchEngine(o_.engine, "", DType::kF32));
  const int64_t context = bench_.engine->context();
  OKV_ASSIGN_OR_RETURN(const auto policy, PolicyFor(o_.policy, bench_.config, context,
                                                    bench_.kv_dtype, /*fetches=*/true));
  reads_ = ReadsByLayer(bench_.config, policy->Reads());
  if (reads_.n_selections == 0) {
    return InvalidArgument(
        fmt::format("--policy is {}, which has no working sets, expected one whose layers read a "
                    "selection, as omnikv",
                    o_.policy.name));
  }
  layers_.resize(static_cast<size_t>(reads_.n_selections));
  for (size_t layer = 0; layer < reads_.selection_of.size(); ++layer) {
    const int32_t selection = reads_.selection_of[layer];
    if (selection < 0) continue;
    layers_[static_cast<size_t>(selection)].push_back(static_cast<int32_t>(layer));
  }
  for (const double times : o_.working_sets) {
    sizes_.push_back(std::max<int64_t>(std::llround(times * static_cast<double>(reads_.max_tokens)),
                                       reads_.LeastSlots()));
  }
  if (o_.engine.working_set > 0) sizes_.push_back(o_.engine.working_set);
  if (bench_.working_set > 0) sizes_.push_back(bench_.working_set);
  for (int64_t& size : sizes_) size = std::min(size, std::max(context, reads_.LeastSlots()));
  std::sort(sizes_.begin(), sizes_.end());
  sizes_.erase(std::unique(sizes_.begin(), sizes_.end()), sizes_.end());

  OKV_ASSIGN_OR_RETURN(const std::vector<Text> texts, Texts());
  for (const Text& text : texts) {
    OKV_ASSIGN_OR_RETURN(const Case c, Measure(text));
    Report(text, c);
  }
  if (o_.json) {
    fmt::print("{}\n", Dump({{"model", o_.engine.model},
                             {"device", bench_.engine->device()},
                             {"kv_row_bytes", bench_.kv_row_bytes},
                             {"hits", json_}}));
  }
  return {};
}

Result<Text> HitsBench::ForcedText(const std::string& text) const {
  OKV_ASSIGN_OR_RETURN(std::vector<int32_t> tokens,
                       bench_.engine->Tokenize(text, /*add_special=*/true,
                                               /*parse_special=*/false));
  const auto n = static_cast<int64_t>(tokens.size());
  if (n - o_.steps <= reads_.max_tokens) {
    return InvalidArgument(fmt::format(
        "the text has {} tokens, expected more than the {} that a layer reads and the {} "
        "steps that read its end",
        n, reads_.max_tokens, o_.steps));
  }
  const auto split = tokens.end() - o_.steps;
  Turn turn;
  turn.prompt.assign(tokens.begin(), split);
  turn.follow.assign(split, tokens.end());
  return Text{"text", {std::move(turn)}};
}

Result<std::vector<Text>> HitsBench::Texts() const {
  std::vector<Text> texts;
  if (!o_.file.empty()) {
    OKV_ASSIGN_OR_RETURN(const std::string file, ReadText("-f", o_.file));
    OKV_ASSIGN_OR_RETURN(texts.emplace_back(), ForcedText(file));
    return texts;
  }
  const auto count = [&](std::string_view text) {
    const auto ids = bench_.engine->Tokenize(text, /*add_special=*/false, /*parse_special=*/false);
    return ids.ok() ? static_cast<int64_t>(ids->size()) : int64_t{0};
  };
  DocumentSpec spec{
      .seed = 1, .count_tokens = count, .depths = {}, .kinds = {"magic", "person", "best"}};
  for (int i = 0; i < kFacts; ++i) spec.depths.push_back((i + 0.5) / kFacts);
  for (const int64_t length : o_.lengths) {
    spec.target_tokens = length;
    OKV_ASSIGN_OR_RETURN(const Document document, MakeDocument(spec));
    Text answers{"answers", {}};
    for (size_t i = 0; i < document.needles.size(); ++i) {
      OKV_ASSIGN_OR_RETURN(auto prompt,
                           bench_.engine->ChatPrompt({{"user", UserMessage(document, i)}}));
      answers.turns.push_back({std::move(prompt), {}});
    }
    texts.push_back(std::move(answers));
    OKV_ASSIGN_OR_RETURN(texts.emplace_back(), ForcedText(document.text));
  }
  return texts;
}

Status HitsBench::Follow(Session& session, const Turn& turn, Case& c) {
  using Sets = std::vector<std::vector<SetSimulation>>;  // [sizes][selections]
  Sets sets(sizes_.size());
  for (size_t i = 0; i < sets.size(); ++i) {
    for (int32_t g = 0; g < reads_.n_selections; ++g) {
      sets[i].emplace_back(*reference_, reads_, bench_.engine->context(),
                           static_cast<int32_t>(sizes_[i]));
    }
  }
  const auto step = [&](SetSimulation& set, Rows& rows, const SelectionOnHost& selection,
                        bool first) {
    const SlotCounters before = set.Count();
    set.Step(selection);
    const SlotCounters after = set.Count();
    rows.chosen += after.selected - before.selected;
    rows.missed += after.missed - before.missed;
    rows.ahead += after.ahead - before.ahead;
    if (!first) return;
    rows.chosen_first += after.selected;
    rows.missed_first += after.missed;
  };
  const auto next = [&](size_t i) {
    if (!turn.follow.empty()) return turn.follow[i];
    const float* logits = session.logits();
    return static_cast<int32_t>(std::max_element(logits, logits + bench_.vocab) - logits);
  };
  const std::vector<int32_t>& ends = bench_.config.eos_ids;
  size_t done = 0;
  for (; c.steps < o_.steps && (turn.follow.empty() || done < turn.follow.size()); ++done) {
    const int32_t token = next(done);
    if (turn.follow.empty() && std::find(ends.begin(), ends.end(), token) != ends.end()) break;
    OKV_RETURN_IF_ERROR(session.Step(token));
    ++c.steps;
    for (int32_t layer = 0; layer < GlobalLayers(bench_.config); ++layer) {
      const std::optional<Selection> made = GroupOf(session).policy().Selected({.layer = layer});
      if (!made) continue;
      const auto number = static_cast<size_t>(made->number);
      const SelectionOnHost selection =
          ReadSelection(*bench_.backend, *made, CoreOf(*bench_.engine).work.seqs.as<SeqMeta>(),
                        /*with_scores=*/reads_.max_ahead > 0);
      for (size_t i = 0; i < sets.size(); ++i) {
        step(sets[i][number], c.rows[i][number], selection, done == 0);
      }
    }
  }
  return {};
}

Result<HitsBench::Case> HitsBench::Measure(const Text& text) {
  Case c;
  c.rows.assign(sizes_.size(), std::vector<Rows>(layers_.size()));
  OKV_ASSIGN_OR_RETURN(const auto session, bench_.engine->NewSession(o_.policy));
  for (const Turn& turn : text.turns) {
    if (c.steps >= o_.steps) break;
    const auto length = static_cast<int64_t>(turn.prompt.size());
    if (length <= reads_.max_tokens) {
      return InvalidArgument(
          fmt::format("the text has {} tokens, expected more than the {} that a layer reads, up to "
                      "which everything is read",
                      length, reads_.max_tokens));
    }
    OKV_RETURN_IF_ERROR(PromptWithProgress(*session, turn.prompt));
    c.context = std::max(c.context, length);
    const auto before = c.rows;
    OKV_RETURN_IF_ERROR(Follow(*session, turn, c));
    ++c.turns;
    c.last_turn = c.rows;
    for (size_t i = 0; i < before.size(); ++i) {
      for (size_t g = 0; g < before[i].size(); ++g) {
        c.last_turn[i][g].chosen -= before[i][g].chosen;
        c.last_turn[i][g].missed -= before[i][g].missed;
      }
    }
  }
  const SessionStats stats = session->stats();
  c.policy = stats.policy;
  c.settings = stats.settings;
  c.on_device = stats.hit_rate;
  return c;
}

Rows HitsBench::AllLayers(const std::vector<Rows>& groups) const {
  return {.chosen = Sum(groups, [](const Rows& r) { return r.chosen; }),
          .missed = Sum(groups, [](const Rows& r) { return r.missed; }),
          .ahead = Sum(groups, [](const Rows& r) { return r.ahead; }),
          .missed_first = Sum(groups, [](const Rows& r) { return r.missed_first; }),
          .chosen_first = Sum(groups, [](const Rows& r) { return r.chosen_first; })};
}

std::optional<size_t> HitsBench::RealSize() const {
  size_t sparse = 0;
  for (const auto& layers : layers_) sparse += layers.size();
  if (bench_.host_layers == 0 || static_cast<size_t>(bench_.host_layers) != sparse) return {};
  return std::find(sizes_.begin(), sizes_.end(), bench_.working_set) - sizes_.begin();
}

void HitsBench::Report(const Text& text, const Case& c) {
  auto sets = nlohmann::ordered_json::array();
  if (!o_.json) {
    fmt::print("{} tokens, {}: {} steps in {} turns, {} {}\n", c.context,
               text.source == "text" ? "then the text's own end" : "answers to questions", c.steps,
               c.turns, c.policy, c.settings);
    fmt::print("{:>9} {:>8} {:>9} {:>12} {:>12} {:>11} {:>11}", "tokens", "x read", "hit rate",
               "from step 2", "rows a step", "ahead", "MB a step");
    for (const auto& layers : layers_) fmt::print(" {:>14}", "layers " + Ranges(layers, ","));
    fmt::print("\n");
  }
  for (size_t i = 0; i < sizes_.size(); ++i) {
    const Rows all = AllLayers(c.rows[i]);
    const double rows = static_cast<double>(all.missed) / static_cast<double>(c.steps);
    const double ahead = static_cast<double>(all.ahead) / static_cast<double>(c.steps);
    const double bytes = (rows + ahead) * static_cast<double>(bench_.kv_row_bytes);
    const double times = static_cast<double>(sizes_[i]) / static_cast<double>(reads_.max_tokens);
    auto groups = nlohmann::ordered_json::array();
    for (size_t g = 0; g < layers_.size(); ++g) {
      groups.push_back({{"layers", layers_[g]}, {"hit_rate", c.rows[i][g].HitRate()}});
    }
    sets.push_back({{"tokens", sizes_[i]},
                    {"times_read", times},
                    {"hit_rate", all.HitRate()},
                    {"hit_rate_from_step_2", all.HitRateAfterFirst()},
                    {"rows_per_step", rows},
                    {"rows_ahead_per_step", ahead},
                    {"bytes_per_step", bytes},
                    {"groups", groups}});
    if (o_.json) continue;
    fmt::print("{:>9} {:>8.2f} {:>7.1f} % {:>10.1f} % {:>12.0f} {:>11.0f} {:>11.3f}", sizes_[i],
               times, 100 * all.HitRate(), 100 * all.HitRateAfterFirst(), rows, ahead, bytes / 1e6);
    for (size_t g = 0; g < layers_.size(); ++g) {
      fmt::print(" {:>12.1f} %", 100 * c.rows[i][g].HitRate());
    }
    fmt::print("\n");
  }
  nlohmann::ordered_json json = {{"source", text.source},
                                 {"context", c.context},
                                 {"turns", c.turns},
                                 {"steps", c.steps},
                                 {"policy", c.policy},
                                 {"settings", c.settings},
                                 {"read_tokens", reads_.max_tokens},
                                 {"working_sets", sets}};
  const std::optional<size_t> real = RealSize();
  if (real && *real < sizes_.size() && c.on_device) {
    const double simulated = AllLayers(c.last_turn[*real]).HitRate();
    json["on_device"] = {
        {"tokens", sizes_[*real]}, {"hit_rate", *c.on_device}, {"simulated", simulated}};
    if (!o_.json) {
      fmt::print("the device's own sets of {}, last turn: {:.3f} % (simulated {:.3f} %)\n",
                 sizes_[*real], 100 * *c.on_device, 100 * simulated);
    }
  }
  json_.push_back(std::move(json));
}

}  // namespace

Status BenchHits(const HitsOptions& options) {
  return HitsBench(options).Run();
}

}  // namespace omnikv::tools
