// omnikv eval: whether a policy's answers are those of full attention.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/log.h"
#include "base/memory.h"
#include "base/printable.h"
#include "eval/compare.h"
#include "eval/needles.h"
#include "flags.h"
#include "model/loader.h"
#include "policy_file.h"
#include "report.h"
#include "shipped.h"

namespace omnikv::tools {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 24;  // of a document made up

struct EvalFlags {
  EngineFlags engine;
  std::vector<std::string> policies = {"full", "omnikv", "streaming"};
  bool policies_given = false;
  std::vector<std::string> set;  // omnikv.budget=512
  PolicyFlags file;              // what --policy-file says
  std::vector<int64_t> lengths = {8192, 16384, 30000};
  std::vector<std::string> kinds = {"passkey", "magic", "magic", "magic"};
  std::vector<double> depths = {0.1, 0.35, 0.6, 0.9};
  int64_t tokens = 24576;
  uint64_t seed = 1;
  int docs = 20;
  std::vector<std::string> equal;
  std::vector<double> shares = {0.1};
  std::string tasks;
  bool share_prompts = false;
  std::string document;  // a folder; empty: the shipped one
  std::string out;
  bool json = false;
};

// The settings of `policy` among "policy.key=value". REQUIRES such entries.
Result<PolicyOptions> OptionsFor(const std::string& policy, const EvalFlags& f) {
  PolicyFlags flags = f.file;
  flags.policy = policy;
  for (const std::string& entry : f.set) {
    const size_t dot = entry.find('.');
    if (entry.substr(0, dot) == policy) flags.set.push_back(entry.substr(dot + 1));
  }
  return ToPolicyOptions(flags);
}

DocumentSpec Spec(const EvalFlags& f, uint64_t seed, int64_t tokens) {
  return {.seed = seed,
          .target_tokens = tokens,
          .count_tokens = nullptr,
          .depths = f.depths,
          .kinds = f.kinds};
}

nlohmann::ordered_json PolicyJson(const std::string& name, const Document& document,
                                  const DocumentResult& result) {
  nlohmann::ordered_json answers = nlohmann::ordered_json::array();
  int right = 0;
  for (size_t i = 0; i < result.answers.size(); ++i) {
    const Needle& needle = document.needles[i];
    answers.push_back({{"depth", needle.depth},
                       {"question", needle.question},
                       {"expected", needle.value},
                       {"text", result.answers[i].text},
                       {"right", result.answers[i].right}});
    right += result.answers[i].right ? 1 : 0;
  }
  const SessionStats& s = result.stats;
  return {{"policy", name},
          {"asked", answers.size()},
          {"right", right},
          {"prompt_tokens", result.prompt_tokens},
          {"prefill_tok_s", PerSecond(s.prefill_tokens, s.prefill_seconds)},
          {"ms_per_token", result.decode_ms},
          {"attended_tokens", s.attended_tokens},
          {"held_bytes", s.held_bytes.host + s.held_bytes.device + s.held_bytes.disk},
          {"process_bytes", ResidentMemory()},
          {"answers", answers}};
}

Result<std::vector<PolicyOptions>> PoliciesOf(const EvalFlags& f) {
  for (const std::string& entry : f.set) {
    const size_t dot = entry.find('.');
    if (dot == std::string::npos || entry.find('=') == std::string::npos) {
      return InvalidArgument(fmt::format("--set is '{}', expected policy.key=value", entry));
    }
    if (std::find(f.policies.begin(), f.policies.end(), entry.substr(0, dot)) == f.policies.end()) {
      return InvalidArgument(
          fmt::format("--set is {}, expected a policy of --policies, which is {}", Printable(entry),
                      fmt::join(f.policies, ",")));
    }
  }
  std::vector<PolicyOptions> policies;
  for (const std::string& name : f.policies) {
    OKV_ASSIGN_OR_RETURN(policies.emplace_back(), OptionsFor(name, f));
  }
  return policies;
}

// With the policy of --policy-file among the policies.
Status ApplyFile(EvalFlags& f) {
  if (f.file.file.empty()) return {};
  if (!f.policies_given) f.policies = {"full", "blocks"};
  if (std::find(f.policies.begin(), f.policies.end(), "blocks") == f.policies.end()) {
    return InvalidArgument(
        fmt::format("--policies is {}, but --policy-file '{}' is of policy blocks",
                    fmt::join(f.policies, ","), f.file.file));
  }
  return ApplyPolicyFile(f.engine, f.file);
}

Status CheckPolicies(const Engine& engine, const std::vector<PolicyOptions>& policies) {
  for (const PolicyOptions& policy : policies) OKV_RETURN_IF_ERROR(engine.CheckPolicy(policy));
  return {};
}

// The shipped document, every question, three policies side by side.
Status Quickstart(const EvalFlags& f) {
  OKV_ASSIGN_OR_RETURN(EngineOptions options, ToEngineOptions(f.engine));
  std::string folder = f.document;
  if (folder.empty()) {
    OKV_ASSIGN_OR_RETURN(folder, ShippedFile("examples/quickstart", "--document"));
  }
  OKV_ASSIGN_OR_RETURN(const Document document, LoadDocument(folder));
  OKV_ASSIGN_OR_RETURN(const std::vector<PolicyOptions> policies, PoliciesOf(f));
  options.check = [&](const Engine& engine) -> Status {
    OKV_RETURN_IF_ERROR(CheckPolicies(engine, policies));
    if (document.needles.empty()) return {};
    OKV_ASSIGN_OR_RETURN(const auto prompt,
                         engine.ChatPrompt({{"user", UserMessage(document, 0)}}));
    return engine.CheckPrompt(prompt);
  };
  OKV_ASSIGN_OR_RETURN(const auto engine, LoadWithProgress(std::move(options), f.json));
  if (!f.json) {
    fmt::print("model loaded in {:.2f} s: {}\n", engine->load_seconds(), engine->device());
  }
  const std::vector<Question> questions = QuestionsOf(document);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  std::vector<std::string> table;
  for (const PolicyOptions& policy : policies) {
    const std::string& name = policy.name;
    DocumentResult result;
    {
      ProgressBar bar("reading with " + name);
      OKV_ASSIGN_OR_RETURN(result,
                           AskAll(*engine, policy, questions, [&](int64_t done, int64_t total) {
                             bar.Update(static_cast<double>(done), static_cast<double>(total),
                                        fmt::format("{} of {} tokens", done, total));
                           }));
    }
    if (f.json) {
      rows.push_back(PolicyJson(name, document, result));
      continue;
    }
    if (table.empty()) {
      fmt::print("document: {} tokens with {} facts hidden in it ({}/document.txt)\n\n",
                 result.prompt_tokens, document.needles.size(), folder);
      table.push_back(fmt::format("{:<14} {:>5} {:>14} {:>13} {:>12} {:>10} {:>10} {:>10}",
                                  "policy", "right", "prefill tok/s", "decode tok/s", "ms a token",
                                  "read", "K/V", "process"));
    }
    fmt::print("{}\n", name);
    int right = 0;
    for (size_t i = 0; i < result.answers.size(); ++i) {
      const Needle& needle = document.needles[i];
      fmt::print("  [{}] at {:.0f} %: {} -> {}\n", result.answers[i].right ? "right" : "WRONG",
                 100 * needle.depth, needle.question, result.answers[i].text);
      right += result.answers[i].right ? 1 : 0;
    }
    const SessionStats& s = result.stats;
    table.push_back(fmt::format(
        "{:<14} {:>2}/{:<2} {:>14.0f} {:>13.1f} {:>12.2f} {:>10.0f} {:>10} {:>10}", name, right,
        result.answers.size(), static_cast<double>(s.prefill_tokens) / s.prefill_seconds,
        1e3 / result.decode_ms, result.decode_ms, s.attended_tokens,
        HumanBytes(s.held_bytes.host + s.held_bytes.device + s.held_bytes.disk),
        HumanBytes(ResidentMemory())));
  }
  if (f.json) {
    fmt::print("{}\n", Dump({{"document", folder},
                             {"device", engine->device()},
                             {"load_s", engine->load_seconds()},
                             {"policies", rows}}));
    return {};
  }
  fmt::print("\n{}\n(read: tokens a layer attends to in a step, mean over layers)\n",
             fmt::join(table, "\n"));
  return {};
}

// Documents nobody has seen, or tasks of a file: right answers by policy and length.
Status Needles(const EvalFlags& f) {
  CompareOptions options{.share_prompts = f.share_prompts,
                         .document = Spec(f, f.seed, 0),
                         .lengths = f.lengths,
                         .docs = f.docs,
                         .tasks = f.tasks,
                         .json = f.json};
  OKV_ASSIGN_OR_RETURN(options.engine, ToEngineOptions(f.engine));
  OKV_ASSIGN_OR_RETURN(options.policies, PoliciesOf(f));
  for (const std::string& equal : f.equal) {
    options.equal.push_back(equal == "held" ? CostMeasure::kHeld : CostMeasure::kRead);
  }
  options.shares = f.shares;
  return Compare(options);
}

Status MakeDocumentFiles(const EvalFlags& f) {
  OKV_ASSIGN_OR_RETURN(const std::string path, ModelPath(f.engine.model));
  OKV_ASSIGN_OR_RETURN(const ModelText model, LoadTextAlone(path));
  const auto encode = [&](std::string_view text) {
    return model.tokenizer->Encode(text, {.add_special = false, .parse_special = false});
  };
  OKV_ASSIGN_OR_RETURN(const Document document, MakeDocumentFor(encode, Spec(f, f.seed, f.tokens)));
  return SaveDocument(document, f.out);
}

}  // namespace

void AddEval(CLI::App& app, Command& command) {
  auto f = std::make_shared<EvalFlags>();
  CLI::App* sub = app.add_subcommand("eval", "whether a policy answers as full attention does");
  sub->require_subcommand(1);
  const auto common = [&](CLI::App* child) {
    AddEngineFlags(*child, f->engine);
    child->add_option("--policies", f->policies, "the first is what others are held against")
        ->delimiter(',')
        ->each([f](const std::string&) { f->policies_given = true; })
        ->capture_default_str();
    AddRepeatable(*child, "--set", f->set, "policy.key=value; may be repeated");
    AddPolicyFileFlag(*child, f->file.file);
    child->add_flag("--json", f->json, "print one JSON object");
  };
  const auto with_file = [f](Status (*run)(const EvalFlags&)) -> Command {
    return [f, run]() -> Status {
      OKV_RETURN_IF_ERROR(ApplyFile(*f));
      return run(*f);
    };
  };
  const auto spec = [&](CLI::App* child) {
    child->add_option("--seed", f->seed, "of the first document")->capture_default_str();
    child->add_option("--kinds", f->kinds, "of facts")->delimiter(',')->capture_default_str();
    child->add_option("--depths", f->depths, "a fact each, 0 to 1")->delimiter(',');
  };
  CLI::App* quickstart =
      sub->add_subcommand("quickstart", "the shipped document and its questions");
  common(quickstart);
  quickstart->add_option("--document", f->document,
                         "a folder that eval document wrote; default: the shipped one");
  quickstart->callback([&command, with_file] { command = with_file(Quickstart); });

  CLI::App* needles = sub->add_subcommand("needles", "facts in unseen documents");
  common(needles);
  spec(needles);
  needles->add_option("--lengths", f->lengths, "tokens of the documents")
      ->delimiter(',')
      ->check(CLI::Range(kMaxTokens));
  needles->add_option("--docs", f->docs, "documents a length")->check(CLI::Range(1, 100000));
  CLI::Option* equal =
      needles
          ->add_option("--equal", f->equal,
                       "solve a setting of each policy but the first, so that all hold (memory) or "
                       "read (in a decode step) the same share of what full attention does")
          ->delimiter(',')
          ->check(CLI::IsMember({"held", "read"}));
  needles->add_option("--share", f->shares, "that share; no policy exceeds it")
      ->delimiter(',')
      ->capture_default_str()
      ->needs(equal)
      ->check(CLI::Range(1e-6, 1e3));
  needles->add_flag("--share-prompts", f->share_prompts,
                    "read each text once, under full attention, and fork every policy's session "
                    "from there: the same answers sooner");
  CLI::Option* tasks = needles->add_option(
      "--tasks", f->tasks,
      "questions of a file instead of documents: on each line a JSON object with prompt, answer "
      "and if wanted kind, depth, value (the part that counts); - is stdin");
  for (const char* other : {"--lengths", "--docs", "--seed", "--kinds", "--depths"}) {
    tasks->excludes(needles->get_option(other));
  }
  needles->callback([&command, with_file] { command = with_file(Needles); });

  CLI::App* document = sub->add_subcommand("document", "writes a document and its facts");
  AddModelFlag(*document, f->engine.model);
  spec(document);
  document->add_option("--tokens", f->tokens, "its length")
      ->capture_default_str()
      ->check(CLI::Range(kMaxTokens));
  document->add_option("--out", f->out, "a folder: document.txt and facts.json")->required();
  document->callback([&command, f] { command = [f] { return MakeDocumentFiles(*f); }; });
}

}  // namespace omnikv::tools
