// What the program prints when all goes well: the result alone on stdout, the fields of DESIGN §6
// and §9 in JSON, and one sentence when stdout takes no more.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

#include "program.h"

namespace omnikv::cli {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

const std::string kPrompt = "'The pass key is 48213. Remember it. What is the pass key?'";
constexpr int32_t kVocab = 8192;

class Output : public ProgramTest {
 protected:
  // Runs it; expects success.
  Outcome Good(const std::string& arguments, const std::string& input = "") {
    Outcome o = Run(arguments, input);
    EXPECT_EQ(o.exit_code, 0) << arguments << "\n" << o.err;
    return o;
  }
  // The one object that it prints on one line, with nothing said beside it.
  json GoodJson(const std::string& arguments, const std::string& input = "") {
    const Outcome o = Good(arguments, input);
    EXPECT_EQ(o.err, "") << arguments;
    EXPECT_EQ(o.out.find('\n'), o.out.size() - 1) << arguments;
    json object = json::parse(o.out, nullptr, /*allow_exceptions=*/false);
    EXPECT_TRUE(object.is_object()) << arguments << "\n" << o.out;
    return object;
  }
};

void ExpectFields(const json& object, const std::vector<std::string>& keys) {
  for (const std::string& key : keys) EXPECT_TRUE(object.contains(key)) << key << " in " << object;
}

// An answer of run and chat, as DESIGN §9 lists its fields.
void ExpectAnswer(const json& answer) {
  ExpectFields(answer, {"text", "tokens", "prompt_tokens", "finish_reason", "stats"});
  const json& stats = answer.at("stats");
  ExpectFields(stats, {"device", "policy", "settings", "load_s", "prefill_s", "prefill_tok_s",
                       "ttft_s", "decode_tok_s", "ms_per_token", "attended_tokens", "budget_tokens",
                       "resident_bytes", "transfer_bytes_per_step", "hit_rate"});
  ExpectFields(stats.at("resident_bytes"), {"device", "host", "disk"});
  EXPECT_EQ(stats.at("transfer_bytes_per_step"), 0);
  EXPECT_TRUE(stats.at("hit_rate").is_null());
  // Both on one clock: the first token comes after the prompt is read.
  EXPECT_GE(stats.at("ttft_s").get<double>(), stats.at("prefill_s").get<double>());
  EXPECT_GT(stats.at("resident_bytes").at("host"), 0);
}

TEST_F(Output, RunPrintsTheAnswerAlone) {
  const Outcome o = Good("run -n 12 -p " + kPrompt);
  EXPECT_THAT(o.out, HasSubstr("48213"));
  EXPECT_EQ(o.out.back(), '\n');
  // First what memory will hold, then what was done.
  EXPECT_THAT(o.err, StartsWith("host memory: weights "));
  EXPECT_THAT(o.err, HasSubstr("policy omnikv"));
  EXPECT_THAT(o.err, HasSubstr("tok/s"));
  EXPECT_THAT(o.out, Not(HasSubstr("tok/s")));

  const Outcome again = Good("run -n 12 -f -", kPrompt.substr(1, kPrompt.size() - 2));
  EXPECT_EQ(again.out, o.out);
}

TEST_F(Output, RunJsonHasTheFieldsOfTheDesign) {
  const json answer = GoodJson("run --json --policy full -n 12 -p " + kPrompt);
  ExpectAnswer(answer);
  EXPECT_THAT(answer.at("text").get<std::string>(), HasSubstr("48213"));
  EXPECT_EQ(answer.at("stats").at("policy"), "full");

  // Raw text that goes on: as many tokens as were asked for.
  const json raw = GoodJson("run --raw --json -n 3 -p 'Once upon a time'");
  EXPECT_EQ(raw.at("tokens").size(), 3u);
  EXPECT_EQ(raw.at("finish_reason"), "length");
  EXPECT_LT(raw.at("prompt_tokens"), answer.at("prompt_tokens"));
  EXPECT_EQ(GoodJson("run --json -n 0 -p x").at("tokens").size(), 0u);
}

TEST_F(Output, StopsAtItsTextsAsTheyAreWritten) {
  const std::string whole = Good("run -n 12 -p " + kPrompt).out;
  const std::string cut = whole.substr(0, whole.find("482"));
  EXPECT_EQ(Good("run -n 12 --stop 482 -p " + kPrompt).out, cut + "\n");
  // Brackets and commas are text, and words that follow are not more of it.
  EXPECT_EQ(Good("run -n 12 --stop '[482]' -p " + kPrompt).out, whole);
  EXPECT_EQ(Good("run -n 12 --stop '[a,482]' -p " + kPrompt).out, whole);
  EXPECT_EQ(Good("run -n 12 --stop '[INST]' --stop 482 -p " + kPrompt).out, cut + "\n");
  EXPECT_EQ(Run("run -n 1 -p x --stop a b").exit_code, 2);
  EXPECT_THAT(Run("run -n 1 -p x --policy omnikv --set '[budget=64]'").err, HasSubstr("[budget"));
}

TEST_F(Output, ChatAnswersALineATurn) {
  const std::string turns =
      "The pass key is 48213. Remember it. What is the pass key?\n\nWhat is the pass key?\n";
  const Outcome o = Good("chat -n 12", turns);
  EXPECT_EQ(std::count(o.out.begin(), o.out.end(), '\n'), 2) << o.out;
  EXPECT_THAT(o.out, HasSubstr("48213"));
  EXPECT_THAT(o.err, HasSubstr("tokens read anew at "));
  EXPECT_THAT(o.err, HasSubstr(" written at "));
  EXPECT_THAT(o.err, Not(HasSubstr("start a new chat")));
}

TEST_F(Output, ChatJsonIsAnObjectATurn) {
  const Outcome o = Good("chat --json -n 8", "Hello.\nThe pass key is 9.\n");
  EXPECT_EQ(o.err, "");
  std::istringstream lines(o.out);
  std::string line;
  std::vector<json> turns;
  while (std::getline(lines, line)) turns.push_back(json::parse(line));
  ASSERT_EQ(turns.size(), 2u);
  for (const json& turn : turns) ExpectAnswer(turn);
  EXPECT_GT(turns[1].at("prompt_tokens"), turns[0].at("prompt_tokens"));
}

TEST_F(Output, ChatSaysWhenItsContextIsFull) {
  std::string turns;
  for (int i = 0; i < 20; ++i) turns += "Tell me about the weather in the harbour, please.\n";
  const Outcome o = Run("chat -n 8 --ctx 128", turns);
  EXPECT_EQ(o.exit_code, 2);
  EXPECT_THAT(o.err, HasSubstr("the context holds 128: start a new chat or raise --ctx"));
}

TEST_F(Output, TokenizeGivesWhatRunReads) {
  const json ids = json::parse(Good("tokenize -p " + kPrompt).out);
  const json raw = json::parse(Good("tokenize --raw -p " + kPrompt).out);
  ASSERT_TRUE(ids.is_array());
  EXPECT_EQ(GoodJson("run --json -n 0 -p " + kPrompt).at("prompt_tokens"), ids.size());
  EXPECT_EQ(GoodJson("run --raw --json -n 0 -p " + kPrompt).at("prompt_tokens"), raw.size());
  EXPECT_EQ(GoodJson("run --json -n 0 --system 'Be brief.' -p " + kPrompt).at("prompt_tokens"),
            json::parse(Good("tokenize --system 'Be brief.' -p " + kPrompt).out).size());
  EXPECT_GT(ids.size(), raw.size());
  // Special tokens are parsed in raw text, and in a template's alone otherwise.
  EXPECT_EQ(json::parse(Good("tokenize --raw -p '<|user|>'").out), json({2}));
  const json user = json::parse(Good("tokenize -p '<|user|>'").out);
  EXPECT_EQ(std::count(user.begin(), user.end(), json(2)), 1);

  const Outcome text = Good("tokenize --decode -f -", raw.dump());
  EXPECT_THAT(text.out, HasSubstr(kPrompt.substr(1, kPrompt.size() - 2)));
  EXPECT_EQ(json::parse(Good("tokenize --raw -f -",
                             text.out.substr(text.out.find("The"),
                                             text.out.size() - text.out.find("The") - 1))
                            .out),
            raw);
}

TEST_F(Output, LogitsAreANumpyFile) {
  const fs::path path = dir_ / "x.npy";
  const std::string out = " --out " + path.string();
  EXPECT_EQ(Good("logits --tokens 0,17,42" + out).out, "");
  const std::string bytes = Slurp(path);
  ASSERT_TRUE(bytes.starts_with(std::string("\x93NUMPY\x01\x00", 8)));
  const size_t header = 10 + static_cast<uint8_t>(bytes[8]) + 256 * static_cast<uint8_t>(bytes[9]);
  EXPECT_EQ(header % 64, 0u);
  EXPECT_THAT(bytes.substr(10, header - 10),
              StartsWith("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 8192), }"));
  ASSERT_EQ(bytes.size(), header + 3 * kVocab * sizeof(float));
  std::vector<float> logits(size_t{3} * kVocab);
  std::memcpy(logits.data(), bytes.data() + header, logits.size() * sizeof(float));
  for (const float value : logits) ASSERT_TRUE(std::isfinite(value));

  // What fails leaves the file as it was, and nothing beside it.
  EXPECT_EQ(Run("logits --tokens 0,9999999" + out).exit_code, 2);
  EXPECT_EQ(Run("logits --tokens 0 --policy omnikv --set budget=-1" + out).exit_code, 2);
  EXPECT_EQ(Slurp(path), bytes);
  EXPECT_FALSE(fs::exists(path.string() + ".part"));
  // A device is written as it is.
  const Outcome full = Run("logits --tokens 0 --out /dev/full");
  EXPECT_EQ(full.exit_code, 1);
  EXPECT_THAT(full.err, HasSubstr("--out is '/dev/full', writing to it failed"));
  EXPECT_TRUE(fs::is_character_file("/dev/full"));
}

TEST_F(Output, InfoTellsWhatAModelTakes) {
  EXPECT_THAT(Good("info").out, HasSubstr("8192"));
  const json info = GoodJson("info --json --ctx 1000");
  ExpectFields(info, {"model", "notes", "device", "weight_bytes", "activation_bytes", "kv_dtype",
                      "kv_bytes_per_token", "kv_bytes", "host_layers", "cache_bytes",
                      "cache_tokens", "available_bytes", "context", "policies"});
  EXPECT_EQ(info.at("context"), 1000);
  EXPECT_EQ(info.at("kv_dtype"), "f16");
  EXPECT_EQ(info.at("kv_bytes").at("host"), 1000 * info.at("kv_bytes_per_token").get<int64_t>());
  ASSERT_GE(info.at("policies").size(), 3u);
  for (const json& policy : info.at("policies")) {
    ExpectFields(policy, {"name", "settings", "kv_bytes", "read_bytes_per_step"});
  }
  const json one = GoodJson("info --json --policy streaming --set budget=77");
  ASSERT_EQ(one.at("policies").size(), 1u);
  EXPECT_THAT(one.at("policies")[0].at("settings").get<std::string>(), HasSubstr("budget=77"));
  // Without a name, settings are those of the policy that would run.
  EXPECT_EQ(info.at("default_policy"), "omnikv");
  const json set_by_default = GoodJson("info --json --set budget=77");
  for (const json& policy : set_by_default.at("policies")) {
    const bool set =
        policy.at("settings").get<std::string>().find("budget=77") != std::string::npos;
    EXPECT_EQ(set, policy.at("name") == "omnikv") << policy;
  }
}

TEST_F(Output, InfoPrintsThePlanOfAStart) {
  const std::string flags = " --device cpu --host-memory 1GiB --ctx 3000 --policy omnikv";
  const std::string start = Good("run -n 1 -p x" + flags).err;
  const std::string plan = start.substr(0, start.find('\n') + 1);
  EXPECT_THAT(plan, StartsWith("host memory: weights "));
  EXPECT_THAT(plan, HasSubstr("3000 tokens; 1.00 GiB available"));
  EXPECT_THAT(Good("info" + flags).out, HasSubstr(plan));
}

TEST_F(Output, BenchJsonHasTheFieldsOfTheDesign) {
  const json bench = GoodJson(
      "bench --json --geometry tiny --format q8_0 --context 64 --steps 2 --prefill 32 --repeats 1");
  ExpectFields(bench.at("machine"), {"cpu", "cores"});
  const json& ceiling = bench.at("ceiling");
  ExpectFields(ceiling, {"read_gb_s", "copy_gb_s", "gemm_tflop_s"});
  ExpectFields(ceiling.at("gemm_tflop_s"), {"bf16", "f32"});
  ASSERT_EQ(bench.at("cases").size(), 2u);
  ExpectFields(bench.at("cases")[0], {"geometry", "policy", "device", "threads", "prefill_tokens",
                                      "prefill_tok_s", "share_of_gemm", "ops"});
  ExpectFields(bench.at("cases")[1],
               {"geometry", "policy", "settings", "device", "context", "batch", "threads",
                "ms_per_token", "tokens_per_s", "floor_bytes", "share_of_read", "ops"});
  for (const json& c : bench.at("cases")) {
    double ms = 0;
    double share = 0;
    for (const json& op : c.at("ops")) {
      ExpectFields(op, {"op", "calls", "ms", "share", "gb_s", "share_of_read", "gflop_s"});
      ms += op.at("ms").get<double>();
      share += op.at("share").get<double>();
    }
    EXPECT_NEAR(share, 1, 1e-6);
    EXPECT_NEAR(ms, c.at("ops_alone_ms").get<double>(), 1e-6 * ms);
  }
}

TEST_F(Output, BenchHitsSimulatesEveryCache) {
  const json hits = GoodJson(
      "bench --hits --json --context 700 --steps 20 --set budget=64 --set cache=100 --caches "
      "1,2,8");
  ExpectFields(hits, {"model", "device", "kv_row_bytes"});
  ASSERT_EQ(hits.at("hits").size(), 2u);  // answers, then the text's own end
  for (const json& c : hits.at("hits")) {
    EXPECT_EQ(c.at("steps"), 20) << c;
    EXPECT_GE(c.at("context"), 670);
    double last = -1;
    std::vector<int64_t> caches;
    for (const json& at : c.at("caches")) {
      caches.push_back(at.at("cache"));
      const double rate = at.at("hit_rate");
      // Of the same choices a larger set misses hardly more; text has habits, so that it misses not
      // all.
      EXPECT_GE(rate, last - 0.02) << c;
      EXPECT_GT(rate, 0);
      EXPECT_LT(rate, 1);
      EXPECT_GT(at.at("hit_rate_from_step_2"), rate);  // the first step finds nothing
      EXPECT_DOUBLE_EQ(
          at.at("bytes_per_step").get<double>(),
          at.at("rows_per_step").get<double>() * hits.at("kv_row_bytes").get<double>());
      // 12 sparse layers of 63 rows and the step's own.
      EXPECT_NEAR(at.at("rows_per_step").get<double>(), (1 - rate) * 12 * 64, 12);
      ASSERT_EQ(at.at("groups").size(), 2u);  // after filters 2 and 13
      EXPECT_EQ(at.at("groups")[1].at("layers"), json({14, 15}));
      last = rate;
    }
    EXPECT_EQ(caches, (std::vector<int64_t>{64, 100, 128, 512}));
  }
  EXPECT_EQ(hits.at("hits")[0].at("source"), "answers");
  EXPECT_GE(hits.at("hits")[0].at("turns"), 1);
  EXPECT_EQ(hits.at("hits")[1].at("source"), "text");
}

TEST_F(Output, BenchHitsReadsAFile) {
  std::string text;
  for (int i = 0; i < 60; ++i) text += "The harbour was quiet and the boats lay still. ";
  Spill(dir_ / "text.txt", text);
  const std::string command =
      "bench --hits --steps 8 --set budget=32 -f " + (dir_ / "text.txt").string();
  const json hits = GoodJson(command + " --json");
  ASSERT_EQ(hits.at("hits").size(), 1u);
  EXPECT_EQ(hits.at("hits")[0].at("steps"), 8);
  EXPECT_THAT(Good(command).out, HasSubstr("layers 3-12"));
}

TEST_F(Output, NeedlesJsonIsOneObject) {
  const json eval =
      GoodJson("eval needles --json --docs 1 --lengths 600 --policies full,streaming");
  ASSERT_EQ(eval.at("cases").size(), 2u);
  ExpectFields(eval.at("cases")[0], {"tokens", "policy", "asked", "right", "lost_against_full"});
}

TEST_F(Output, QuickstartJsonReadsADocumentOfOnesOwn) {
  const std::string folder = dir_ / "document";
  EXPECT_EQ(Good("eval document --tokens 600 --out " + folder).out, "");
  const json eval = GoodJson("eval quickstart --json --policies full --document " + folder);
  EXPECT_EQ(eval.at("document"), folder);
  ASSERT_EQ(eval.at("policies").size(), 1u);
  const json& full = eval.at("policies")[0];
  EXPECT_EQ(full.at("asked"), 4);
  EXPECT_EQ(full.at("right"), 4);
  ExpectFields(full.at("answers")[0], {"depth", "question", "expected", "text", "right"});
}

TEST_F(Output, RunningOutOfMemoryIsAFailure) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need the address space";
#endif
  Spill(dir_ / "big.txt", "");
  fs::resize_file(dir_ / "big.txt", 100u << 20);
  const Outcome o = Run("tokenize -f " + (dir_ / "big.txt").string(), "", "ulimit -v 150000; ");
  EXPECT_EQ(o.exit_code, 1);
  EXPECT_EQ(o.out, "");
  EXPECT_THAT(o.err, StartsWith("omnikv: host memory ran out while reading a text ("));
}

TEST_F(Output, AFullDiskIsAFailure) {
  for (const char* command : {"run -n 4 -p x", "run --json -n 4 -p x", "tokenize -p x",
                              "tokenize --decode -p '[5]'", "info --json", "info", "--help"}) {
    const Outcome o = Run(std::string(command) + " >/dev/full");
    EXPECT_EQ(o.exit_code, 1) << command << "\n" << o.err;
    EXPECT_THAT(o.err, HasSubstr("omnikv: standard output cannot be written: ")) << command;
  }
}

}  // namespace
}  // namespace omnikv::cli
