// What the program prints when all goes well: the result alone on stdout, the fields that people
// and scripts rely on in JSON, and one sentence when stdout takes no more.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

#include "program.h"

namespace omnikv::cli::output_test {
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

// An answer of run and chat, with all its fields.
void ExpectAnswer(const json& answer) {
  ExpectFields(answer, {"text", "tokens", "prompt_tokens", "finish_reason", "seed", "stats"});
  const json& stats = answer.at("stats");
  ExpectFields(stats,
               {"device", "policy", "settings", "load_s", "prefill_s", "prefill_tok_s", "ttft_s",
                "decode_tok_s", "ms_per_token", "attended_tokens", "budget_tokens", "read_fraction",
                "held_bytes", "held_fraction", "transfer_bytes_per_step", "hit_rate"});
  ExpectFields(stats.at("held_bytes"), {"device", "host", "disk"});
  EXPECT_EQ(stats.at("transfer_bytes_per_step"), 0);
  EXPECT_TRUE(stats.at("hit_rate").is_null());
  // Both on one clock: the first token comes after the prompt is read.
  EXPECT_GE(stats.at("ttft_s").get<double>(), stats.at("prefill_s").get<double>());
  EXPECT_GT(stats.at("held_bytes").at("host"), 0);
}

TEST_F(Output, RunPrintsTheAnswerAlone) {
  const Outcome o = Good("run -n 12 -p " + kPrompt);
  EXPECT_THAT(o.out, HasSubstr("48213"));
  EXPECT_EQ(o.out.back(), '\n');
  // First what memory will hold, then what was done: a line each.
  EXPECT_THAT(o.err, StartsWith("host memory: weights "));
  EXPECT_THAT(o.err, HasSubstr(" tok/s, "));
  EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 2) << o.err;
  EXPECT_THAT(o.out, Not(HasSubstr("tok/s")));
  EXPECT_THAT(Good("run -v -n 12 -p " + kPrompt).err, HasSubstr("policy omnikv"));
  const Outcome quiet = Good("run --quiet -n 12 -p " + kPrompt);
  EXPECT_EQ(quiet.err, "");
  EXPECT_EQ(quiet.out, o.out);

  const Outcome again = Good("run -n 12 -f -", kPrompt.substr(1, kPrompt.size() - 2));
  EXPECT_EQ(again.out, o.out);
}

TEST_F(Output, RunJsonHasItsFields) {
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

TEST_F(Output, AnAnswerThatWasCutSaysSo) {
  const std::string by_limit = "(the answer was cut after 3 tokens, as many as -n allows)\n";
  const std::string by_context = "(the answer was cut: the context of 64 tokens is full; ";
  EXPECT_THAT(Good("run --raw -n 3 -p 'Once upon a time'").err, HasSubstr(by_limit));
  EXPECT_THAT(Good("run --raw -n 500 --ctx 64 -p 'Once upon a time'").err, HasSubstr(by_context));
  EXPECT_THAT(Good("chat -n 3", "Tell me a story.\n").err, HasSubstr(by_limit));
  EXPECT_THAT(Good("run -n 100 -p " + kPrompt).err, Not(HasSubstr("cut")));
  EXPECT_THAT(Good("run -n 0 -p " + kPrompt).err, Not(HasSubstr("cut")));
  // The only token comes with the prompt: nothing says how fast others would.
  const std::string one = Good("run --raw -n 1 -p 'Once upon a time'").err;
  EXPECT_THAT(one, HasSubstr(" tok/s, 1 written, "));
  EXPECT_THAT(one, HasSubstr("(the answer was cut after 1 token, as many as -n allows)\n"));
}

TEST_F(Output, EachDrawnAnswerHasASeedThatRepeatsIt) {
  const std::string command = "run --raw --temp 1.5 -n 24 -p 'Once upon a time'";
  const auto seed_of = [](const Outcome& o) {
    const size_t at = o.err.find(", seed ");
    EXPECT_NE(at, std::string::npos) << o.err;
    const size_t end = o.err.find(')', at);
    return at == std::string::npos ? "" : o.err.substr(at + 7, end - at - 7);
  };
  const Outcome first = Good(command);
  const Outcome other = Good(command);
  EXPECT_NE(seed_of(first), seed_of(other));
  EXPECT_NE(first.out, other.out);
  const Outcome again = Good(command + " --seed " + seed_of(first));
  EXPECT_EQ(again.out, first.out);
  EXPECT_EQ(seed_of(again), seed_of(first));
  const json drawn = GoodJson(command + " --json");
  EXPECT_EQ(drawn.at("text").get<std::string>() + "\n",
            Good(command + " --seed " + drawn.at("seed").dump()).out);
  // Greedy ones have none, whatever is given.
  EXPECT_TRUE(GoodJson("run --json --seed 3 -n 1 -p x").at("seed").is_null());
  EXPECT_THAT(Good("run -n 1 -p x").err, Not(HasSubstr("seed")));
  // The largest is taken whole.
  EXPECT_EQ(GoodJson(command + " --json --seed 18446744073709551615").at("seed"),
            std::numeric_limits<uint64_t>::max());
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
  EXPECT_THAT(o.err, HasSubstr("tokens read at "));
  EXPECT_THAT(o.err, HasSubstr(" written at "));
  EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 3) << o.err;  // the plan, a line a turn
  EXPECT_EQ(Good("chat -q -n 12", turns).err, "");
  EXPECT_THAT(o.err, Not(HasSubstr("start a new chat")));
}

// A file of turns is text and nothing else; one from Windows, too.
TEST_F(Output, ChatReadsPipesAsTheyAre) {
  const std::string unix_turns = "The pass key is 48213.\n/bye\n\"\"\"What is the pass key?";
  std::string windows_turns;
  for (const char c : unix_turns)
    windows_turns += c == '\n' ? std::string("\r\n") : std::string(1, c);
  const Outcome o = Good("chat --json -n 4", unix_turns);
  EXPECT_EQ(std::count(o.out.begin(), o.out.end(), '\n'), 3) << o.out;
  EXPECT_EQ(Good("chat -n 4", windows_turns).out, Good("chat -n 4", unix_turns).out);
  EXPECT_EQ(Good("chat -n 4", "\n\n").out, "");
}

TEST_F(Output, AnEndlessLineOfChatEnds) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers are slow on 256 MiB";
#endif
  const Outcome o = Run("chat -q --device cpu </dev/zero");
  EXPECT_EQ(o.exit_code, 2);
  EXPECT_EQ(o.err, "omnikv: a line of standard input holds more than 256.00 MiB\n");
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

// The policy's own logits come from decode steps; several texts share them.
TEST_F(Output, LogitsByDecodeSteps) {
  std::string ids = "0";
  for (int i = 1; i < 90; ++i) ids.append(",").append(std::to_string(100 + i * 37 % 5000));
  const fs::path path = dir_ / "x.npy";
  const std::string policy = " --policy omnikv --set budget=16 --set tail=4 --set dense_below=0";
  const auto logits = [&](const std::string& flags) {
    const json said =
        GoodJson(std::string("logits --json --precision full --kv-dtype f32 --tokens ") + ids +
                 flags + " --out " + path.string());
    EXPECT_EQ(said.at("texts").size(), 1u);
    const std::string bytes = Slurp(path);
    const size_t header = 10 + static_cast<uint8_t>(bytes[8]);
    std::vector<float> values((bytes.size() - header) / sizeof(float));
    std::memcpy(values.data(), bytes.data() + header, values.size() * sizeof(float));
    return std::make_pair(said, values);
  };
  const auto [prompt, of_prompt] = logits(policy);
  const auto [steps, of_steps] = logits(policy + " --decode");
  const auto [full, of_full] = logits(" --policy full --decode --prompt-tokens 60");
  EXPECT_EQ(prompt.at("attention"), "dense");
  EXPECT_EQ(prompt.at("decode_steps"), 0);
  EXPECT_EQ(steps.at("attention"), "policy");
  EXPECT_EQ(steps.at("decode_steps"), 89);
  EXPECT_EQ(full.at("decode_steps"), 30);
  ASSERT_EQ(of_prompt.size(), size_t{90} * kVocab);
  ASSERT_EQ(of_steps.size(), size_t{90} * kVocab);
  ASSERT_EQ(of_full.size(), size_t{31} * kVocab);  // from the prompt's last token on
  const auto row = [](const std::vector<float>& values, size_t r) {
    return values.begin() + static_cast<std::ptrdiff_t>(r * kVocab);
  };
  const auto apart = [](auto a, auto b) {
    double most = 0;
    for (int32_t i = 0; i < kVocab; ++i) most = std::max<double>(most, std::abs(a[i] - b[i]));
    return most;
  };
  const double dense =
      apart(row(of_prompt, 89), row(of_full, 30));  // f16 K/V, short prompts in f32
  const double sparse = apart(row(of_prompt, 89), row(of_steps, 89));
  EXPECT_LT(dense, 1e-3);  // sums of f32 in another order
  EXPECT_GT(sparse, 0.1);

  // The means are those of the rows.
  const json& text = steps.at("texts")[0];
  EXPECT_EQ(text.at("tokens"), 90);
  EXPECT_EQ(text.at("predicted"), 89);
  EXPECT_EQ(full.at("texts")[0].at("predicted"), 30);
  double nll = 0;
  for (size_t r = 0; r < 89; ++r) {
    double sum = 0;
    for (int32_t i = 0; i < kVocab; ++i) sum += std::exp(static_cast<double>(row(of_steps, r)[i]));
    nll += std::log(sum) - row(of_steps, r)[100 + static_cast<int32_t>(r + 1) * 37 % 5000];
  }
  EXPECT_NEAR(text.at("mean_nll").get<double>(), nll / 89, 1e-6);
  EXPECT_NEAR(text.at("perplexity").get<double>(), std::exp(nll / 89), 1e-5 * std::exp(nll / 89));
  EXPECT_THAT(Good(std::string("logits --tokens 1,2") + policy + " --out " + path.string()).err,
              HasSubstr("these are full attention's logits, omnikv's own come with --decode"));
}

TEST_F(Output, LogitsOfSeveralTexts) {
  const std::string one = dir_ / "one.npy";
  const std::string many = dir_ / "many";
  const std::string a = dir_ / "a.txt";
  const std::string b = dir_ / "b.txt";
  std::ofstream(a) << "[0, 17, 42, 9, 11]";
  std::ofstream(b) << "0 18 43";
  const std::string files = std::string(" -f ") + a + " -f " + b + " --out ";
  for (const char* how : {"", " --decode --prompt-tokens 2 --device ref"}) {
    const std::string flags = std::string("logits --policy full") + how;
    const json said = GoodJson(flags + " --json" + files + many);
    EXPECT_EQ(said.at("decode_steps"), *how == 0 ? 0 : 3);  // shared
    ASSERT_EQ(said.at("texts").size(), 2u);
    for (const auto& [ids, name] : {std::pair{"0,17,42,9,11", "/1.npy"}, {"0,18,43", "/2.npy"}}) {
      Good(flags + " --tokens " + ids + " --out " + one);
      EXPECT_TRUE(Slurp(many + name) == Slurp(one)) << name << how;
    }
  }
  const auto refusal = [&](const std::string& arguments) {
    const Outcome o = Run("logits " + arguments);
    EXPECT_EQ(o.exit_code, 2) << arguments;
    return o.err;
  };
  EXPECT_THAT(refusal(files + one), HasSubstr("one.npy', expected a folder for the logits of 2"));
  EXPECT_THAT(refusal("--decode --prompt-tokens 4" + files + many),
              HasSubstr("b.txt' has 3 tokens"));
  EXPECT_THAT(refusal("--prompt-tokens 4 --tokens 1 --out " + one),
              HasSubstr("--prompt-tokens is given without --decode"));
  EXPECT_THAT(refusal("--decode --prompt-tokens 0 --tokens 1 --out " + one),
              HasSubstr("--prompt-tokens"));
}

// A table on stdout and in the file, which policy duo takes; the numbers of JSON are the same.
TEST_F(Output, AnalyzeHeadsMakesGates) {
  const std::string gates = dir_ / "gates.tsv";
  const std::string made_up = "analyze heads --docs 1 --tokens 1k --sinks 4 --recent 64 --window 8";
  const Outcome o = Good(made_up + " -o " + gates);
  EXPECT_EQ(Slurp(gates), o.out);
  EXPECT_EQ(std::count(o.out.begin(), o.out.end(), '\n'), 16);
  EXPECT_THAT(o.err, StartsWith("host memory: weights "));
  EXPECT_EQ(Good(made_up + " --quiet").err, "");
  const json object = GoodJson(made_up + " --json");
  ExpectFields(object, {"device", "texts", "sinks", "recent", "window", "gates"});
  EXPECT_EQ(object.at("texts"), 4);
  EXPECT_EQ(object.at("sinks"), 4);
  EXPECT_EQ(object.at("recent"), 64);
  EXPECT_EQ(object.at("window"), 8);
  ASSERT_EQ(object.at("gates").size(), 16u);
  std::istringstream table(o.out);
  double highest = 0;
  for (const json& layer : object.at("gates")) {
    ASSERT_EQ(layer.size(), 2u);
    for (const json& gate : layer) {
      double number = -1;
      table >> number;
      EXPECT_NEAR(gate.get<double>(), number, 1e-6);
      EXPECT_GE(number, 0);
      EXPECT_LE(number, 1);
      highest = std::max(highest, number);
    }
  }
  EXPECT_GT(highest, 0.99);  // who reads the facts while the answers are written
  const std::string set = " --policy duo --set gates=";
  const json named = GoodJson("info --json" + set + gates);
  EXPECT_FALSE(named.at("policies").at(0).contains("cannot_run")) << named;
  EXPECT_THAT(Good("info --json --policy duo").out, HasSubstr("gates=omnikv-tiny-q8_0.duo.tsv "));
}

// A table on stdout, and a file that policy kascade takes; the numbers of JSON are the same.
TEST_F(Output, AnalyzeAnchorsMakesAnchorsAndMap) {
  const std::string file = dir_ / "anchors.tsv";
  const std::string made_up = "analyze anchors --docs 1 --tokens 1k --window 8 --anchors 3";
  const Outcome o = Good(made_up + " -o " + file);
  const json object = GoodJson(made_up + " --json");
  ExpectFields(object,
               {"device", "texts", "window", "tile", "share", "least", "anchors", "layers"});
  EXPECT_EQ(object.at("texts"), 4);
  EXPECT_EQ(object.at("window"), 8);
  EXPECT_EQ(object.at("tile"), 1);
  const auto anchors = object.at("anchors").get<std::vector<int>>();
  ASSERT_EQ(anchors.size(), 3u);
  EXPECT_EQ(anchors.front(), 0);
  const json& layers = object.at("layers");
  ASSERT_EQ(layers.size(), 16u);
  std::ostringstream expected;
  expected << "anchors";
  for (const int anchor : anchors) expected << '\t' << anchor;
  expected << '\n';
  std::istringstream table(o.out);
  std::string line;
  std::getline(table, line);
  EXPECT_EQ(line, "layer  importance  anchor  similarity  head map");
  for (int j = 0; j < 16; ++j) {
    const json& layer = layers.at(static_cast<size_t>(j));
    const auto heads = layer.at("head_map").get<std::vector<int>>();
    ASSERT_EQ(heads.size(), 2u);
    expected << heads[0] << '\t' << heads[1] << '\n';
    const int anchor = *(std::upper_bound(anchors.begin(), anchors.end(), j) - 1);
    if (anchor == j) {
      EXPECT_EQ(heads, (std::vector<int>{0, 1}));
    }
    const auto similarity = layer.at("similarity").get<std::vector<double>>();
    ASSERT_EQ(similarity.size(), static_cast<size_t>(j + 1));
    EXPECT_NEAR(similarity.back(), 1, 1e-9);
    for (const double s : similarity) EXPECT_TRUE(s > 0 && s < 1 + 1e-6) << s;
    int number = -1;
    int of = -1;
    double importance = -1;
    double shown = -1;
    table >> number >> importance >> of >> shown;
    EXPECT_EQ(number, j);
    EXPECT_EQ(of, anchor);
    EXPECT_NEAR(importance, layer.at("importance").get<double>(), 1e-4);
    EXPECT_NEAR(shown, similarity[static_cast<size_t>(anchor)], 1e-4);
    for (const int head : heads) {
      int mapped = -1;
      table >> mapped;
      EXPECT_EQ(mapped, head);
    }
  }
  EXPECT_EQ(Slurp(file), expected.str());
  const std::string info = "info --json --policy kascade --set head_map=" + file;
  const std::string named = GoodJson(info).dump();
  EXPECT_THAT(named, HasSubstr("head_map=" + file));
  EXPECT_THAT(Good("info --json --policy kascade").out,
              HasSubstr("head_map=omnikv-tiny-q8_0.kascade.tsv "));
}

// Texts of one's own, as they are.
TEST_F(Output, AnalyzeHeadsReadsTexts) {
  const auto repeated = [](const std::string& sentence) {
    std::string text;
    for (int i = 0; i < 60; ++i) text += sentence;
    return text;
  };
  Spill(dir_ / "a.txt", repeated("The tower stands beside the river, and nobody knows why. "));
  const std::string heads =
      "analyze heads --json --sinks 4 --recent 64 -f " + (dir_ / "a.txt").string();
  const auto first_gate = [&](const json& object) {
    return object.at("gates").at(0).at(0).get<double>();
  };
  const json one = GoodJson(heads);
  EXPECT_EQ(one.at("texts"), 1);
  const json two = GoodJson(heads + " -f " + (dir_ / "a.txt").string());
  EXPECT_EQ(two.at("texts"), 2);
  EXPECT_NEAR(first_gate(two), first_gate(one), 1e-3);  // the last rows came in another chunk
  const json other = GoodJson("analyze heads --json --sinks 4 --recent 64 -f -",
                              repeated("Once there was a king who had three daughters. "));
  EXPECT_GT(std::abs(first_gate(other) - first_gate(one)), 1e-3);
}

// The shipped model's index finds nearly all of the best tokens of a document.
TEST_F(Output, AnalyzeIndexTellsWhatAnIndexFinds) {
  const std::string made_up = "analyze index --docs 1 --tokens 2k --rows 2 --step 1";
  const Outcome o = Good(made_up);
  EXPECT_EQ(std::count(o.out.begin(), o.out.end(), '\n'), 1 + 16 + 1);
  EXPECT_THAT(o.out, HasSubstr("best   64 of   256"));
  const json object = GoodJson(made_up + " --json");
  ExpectFields(object, {"device", "texts", "longest", "rows", "step", "recalls"});
  EXPECT_EQ(object.at("texts"), 4);
  EXPECT_GT(object.at("longest"), 1900);
  ASSERT_EQ(object.at("recalls").size(), 2u);
  EXPECT_EQ(object.at("recalls").at(1).at("best"), 256);
  EXPECT_EQ(object.at("recalls").at(1).at("rescored"), 1024);
  for (const json& of : object.at("recalls")) {
    ASSERT_EQ(of.at("recall").size(), 16u);
    for (const json& recall : of.at("recall")) {
      EXPECT_GT(recall, 0.8);
      EXPECT_LE(recall, 1);
    }
  }
  EXPECT_THAT(Run("analyze index --docs 1 --tokens 500").err,
              HasSubstr("expected more than the 1144"));
}

TEST_F(Output, InfoTellsWhatAModelTakes) {
  EXPECT_THAT(Good("info").out, HasSubstr("8192"));
  const json info = GoodJson("info --json --ctx 1000");
  ExpectFields(
      info, {"model", "notes", "device", "weight_bytes", "activation_bytes", "kv_dtype",
             "kv_bytes_per_token", "kv_bytes", "host_layers", "host_value_layers",
             "working_set_bytes", "working_set_tokens", "available_bytes", "context", "policies"});
  EXPECT_EQ(info.at("context"), 1000);
  EXPECT_EQ(info.at("kv_dtype"), "f16");
  EXPECT_EQ(info.at("kv_bytes").at("host"), 1000 * info.at("kv_bytes_per_token").get<int64_t>());
  ASSERT_GE(info.at("policies").size(), 3u);
  for (const json& policy : info.at("policies")) {
    ExpectFields(policy,
                 {"name", "settings", "held_bytes", "reserved_bytes", "read_bytes_per_step"});
    ExpectFields(policy.at("held_bytes"), {"device", "host", "disk"});
    const auto held = policy.at("held_bytes").at("host").get<int64_t>();
    const auto reserved = policy.at("reserved_bytes").at("host").get<int64_t>();
    EXPECT_LE(held, reserved);
    if (policy.at("name") == "full") {
      EXPECT_EQ(held, reserved);
      EXPECT_GE(reserved, info.at("kv_bytes").at("host").get<int64_t>());
    }
  }
  const json one = GoodJson("info --json --policy streaming --set budget=77");
  ASSERT_EQ(one.at("policies").size(), 1u);
  const json& streaming = one.at("policies")[0];
  EXPECT_THAT(streaming.at("settings").get<std::string>(), HasSubstr("budget=77"));
  // The blocks of the sinks and of 73 tokens: three or four of 64 tokens, out of the context's 512.
  const auto held = streaming.at("held_bytes").at("host").get<int64_t>();
  EXPECT_GE(held, 3 * 64 * one.at("kv_bytes_per_token").get<int64_t>());
  EXPECT_LE(held, 4 * 64 * one.at("kv_bytes_per_token").get<int64_t>());
  // Three more for a step under way, and a prompt's chunk.
  const auto reserved = streaming.at("reserved_bytes").at("host").get<int64_t>();
  EXPECT_GE(reserved, held);
  EXPECT_LE(reserved, (7 * 64 + 512) * one.at("kv_bytes_per_token").get<int64_t>());
  // Without a name, settings are those of the policy that would run.
  EXPECT_EQ(info.at("default_policy"), "omnikv");
  const json set_by_default = GoodJson("info --json --set budget=77");
  for (const json& policy : set_by_default.at("policies")) {
    const bool set = policy.value("settings", "").find("budget=77") != std::string::npos;
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

TEST_F(Output, BenchJsonHasItsFields) {
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

// One bank serves all policies: one that drops tokens does not take the others' room.
TEST_F(Output, BenchHasRoomForThePolicyThatHoldsMost) {
  const json bench = GoodJson(
      "bench --json --geometry tiny --policies full,streaming --context 6000 --steps 1 "
      "--prefill 64 --repeats 1");
  EXPECT_EQ(bench.at("cases").size(), 4u);
}

TEST_F(Output, BenchHitsSimulatesEveryWorkingSet) {
  const json hits = GoodJson(
      "bench --hits --json --context 700 --steps 20 --set budget=64 --set tail=1 "
      "--working-set 100 --working-sets 1,2,8");
  ExpectFields(hits, {"model", "device", "kv_row_bytes"});
  ASSERT_EQ(hits.at("hits").size(), 2u);  // answers, then the text's own end
  for (const json& c : hits.at("hits")) {
    EXPECT_EQ(c.at("steps"), 20) << c;
    EXPECT_GE(c.at("context"), 670);
    double last = -1;
    std::vector<int64_t> sizes;
    for (const json& at : c.at("working_sets")) {
      sizes.push_back(at.at("tokens"));
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
      // 12 sparse layers of 64 rows, the step's own beside them.
      EXPECT_NEAR(at.at("rows_per_step").get<double>(), (1 - rate) * 12 * 64, 12);
      ASSERT_EQ(at.at("groups").size(), 2u);  // after filters 2 and 13
      EXPECT_EQ(at.at("groups")[1].at("layers"), json({14, 15}));
      last = rate;
    }
    EXPECT_EQ(sizes, (std::vector<int64_t>{65, 100, 130, 520}));
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

// Answers of 45 tokens by a budget of 0.067 of the context: selecting goes on while they grow.
TEST_F(Output, AnswersAsLongAsAQuarterOfTheBudgetAreRight) {
  for (const std::string tail : {"256", "all"}) {
    const json eval = GoodJson(
        "eval needles --json --kinds uuid --lengths 2500,3000 --docs 1 --seed 104 --policies "
        "full,omnikv "
        "--set omnikv.mem=0.3 --set omnikv.tail=" +
        tail);
    ASSERT_EQ(eval.at("cases").size(), 4u);
    for (const json& by_policy : eval.at("cases")) EXPECT_EQ(by_policy.at("right"), 4) << by_policy;
  }
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
}  // namespace omnikv::cli::output_test
