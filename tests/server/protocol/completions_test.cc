#include <cmath>
#include <limits>

#include "server/protocol/openai_completions.h"
#include "sse.h"

namespace omnikv::server::completions_test {
namespace {

Question Parse(std::string_view body) {
  auto question = ParseCompletions(J(body));
  EXPECT_TRUE(question.ok()) << question.status().message();
  return question.ok() ? std::move(*question) : Question();
}

std::string Mistake(std::string_view body) {
  return Refusal(ParseCompletions, body);
}

// With "prompt": "p" before the given fields.
std::string MistakeOf(const std::string& fields) {
  return Mistake(R"({"prompt": "p", )" + fields + "}");
}

TEST(Completions, ReadsEveryField) {
  const Question q = Parse(R"({
      "model": "m@omnikv:budget=1,tail=2", "prompt": "Once", "n": 3, "best_of": 3,
      "max_tokens": 20, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
      "repetition_penalty": 1.1, "presence_penalty": -1, "frequency_penalty": 2,
      "logit_bias": {"5": -100, "7": 1.5}, "seed": 11, "stop": ["a", "", "b"], "logprobs": 4,
      "echo": true, "stream": true, "stream_options": {"include_usage": true}, "suffix": null,
      "ignore_eos": true, "min_tokens": 0, "priority": -3, "user": "u", "return_progress": true,
      "omnikv": {"budget": 64, "share": 0.5, "fast": true, "kind": "x", "none": null},
      "what clients send besides": [1]})");
  EXPECT_EQ(q.model, "m");
  EXPECT_TRUE(q.messages.is_null());
  ASSERT_EQ(q.prompts.size(), 1U);
  EXPECT_EQ(std::get<std::string>(q.prompts[0]), "Once");
  EXPECT_EQ(q.n, 3);
  EXPECT_TRUE(q.limited);
  EXPECT_EQ(q.generate.max_tokens, 20);
  const SamplingOptions& s = q.generate.sampling;
  EXPECT_EQ(s.temperature, 0.5);
  EXPECT_EQ(s.top_p, 0.9);
  EXPECT_EQ(s.top_k, 40);
  EXPECT_EQ(s.min_p, 0.05);
  EXPECT_EQ(s.repeat_penalty, 1.1);
  EXPECT_EQ(s.presence_penalty, -1);
  EXPECT_EQ(s.frequency_penalty, 2);
  const std::vector<std::pair<int32_t, float>> bias = {{5, -100.0F}, {7, 1.5F}};
  EXPECT_EQ(s.logit_bias, bias);
  EXPECT_TRUE(q.seeded);
  EXPECT_EQ(s.seed, 11U);
  EXPECT_EQ(q.generate.stop, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(q.top_logprobs, 4);
  EXPECT_TRUE(q.echo && q.stream && q.stream_usage && q.stream_progress && q.generate.ignore_eos);
  EXPECT_EQ(q.priority, -3);
  EXPECT_EQ(q.policy, "omnikv");
  const std::vector<std::pair<std::string, std::string>> settings = {
      {"budget", "64"}, {"tail", "2"}, {"share", "0.5"}, {"fast", "true"}, {"kind", "x"}};
  EXPECT_EQ(q.settings, settings);
}

TEST(Completions, AbsentFieldsHaveOpenAisDefaults) {
  const Question q = Parse(R"({"prompt": ""})");
  EXPECT_EQ(q.generate.sampling.temperature, 1);
  EXPECT_EQ(q.generate.sampling.top_p, 1);
  EXPECT_EQ(q.n, 1);
  EXPECT_FALSE(q.limited || q.seeded || q.echo || q.stream || q.stream_usage || q.stream_progress);
  EXPECT_EQ(q.top_logprobs, -1);
  EXPECT_EQ(q.policy, "");
  EXPECT_TRUE(q.settings.empty());
}

TEST(Completions, PromptsHaveFourForms) {
  EXPECT_EQ(Parse(R"({"prompt": ["a", "b"]})").prompts, (std::vector<PlainPrompt>{"a", "b"}));
  EXPECT_EQ(Parse(R"({"prompt": [1, 2]})").prompts,
            (std::vector<PlainPrompt>{std::vector<int32_t>{1, 2}}));
  EXPECT_EQ(Parse(R"({"prompt": [[1, 2], [3]]})").prompts,
            (std::vector<PlainPrompt>{std::vector<int32_t>{1, 2}, std::vector<int32_t>{3}}));
  EXPECT_EQ(Parse(R"({"prompt": ["a", [3]]})").prompts,
            (std::vector<PlainPrompt>{"a", std::vector<int32_t>{3}}));
}

TEST(Completions, FieldsOfOtherServers) {
  EXPECT_FALSE(Parse(R"({"prompt": "p", "max_tokens": -1})").limited);
  EXPECT_EQ(Parse(R"({"prompt": "p", "max_tokens": 0})").generate.max_tokens, 0);
  EXPECT_EQ(Parse(R"({"prompt": "p", "top_k": -1})").generate.sampling.top_k, 0);
  EXPECT_EQ(Parse(R"({"prompt": "p", "repeat_penalty": 1.2})").generate.sampling.repeat_penalty,
            1.2);
  EXPECT_FALSE(Parse(R"({"prompt": "p", "seed": -1})").seeded);
  EXPECT_EQ(Parse(R"({"prompt": "p", "seed": -2})").generate.sampling.seed, UINT64_MAX - 1);
  EXPECT_EQ(Parse(R"({"prompt": "p", "stop": "x"})").generate.stop, std::vector<std::string>{"x"});
}

TEST(Completions, SchemasHaveTheNamesOfOtherServers) {
  for (const char* field : {R"("json_schema": {"z": 1, "a": 2})",
                            R"("structured_outputs": {"json": {"z": 1, "a": 2}})"}) {
    const Question q = Parse(std::string(R"({"prompt": "p", )") + field + "}");
    EXPECT_EQ(q.format.kind, AnswerFormat::Kind::kJsonSchema);
    EXPECT_EQ(Dump(q.format.schema), R"({"z":1,"a":2})");
  }
  EXPECT_EQ(MistakeOf(R"("json_schema": "x")"), "`json_schema` is 'x', expected an object");
  EXPECT_EQ(MistakeOf(R"("structured_outputs": {"regex": "a*"})"),
            "`structured_outputs.regex` is not supported here: answers follow a JSON schema or "
            "nothing");
  EXPECT_EQ(MistakeOf(R"("grammar": "root ::= x")"),
            "`grammar` is not supported here: answers follow a JSON schema or nothing");
}

TEST(Completions, ThePolicyOfTheBodyReplacesThatOfTheName) {
  const Question q =
      Parse(R"({"prompt": "p", "model": "m@omnikv:budget=1", "omnikv": {"policy": "full"}})");
  EXPECT_EQ(q.policy, "full");
  EXPECT_TRUE(q.settings.empty());
}

TEST(Completions, RefusesWithOneSentence) {
  constexpr char kForms[] = ", expected a text, tokens, or a list of at most 1024 of either";
  EXPECT_EQ(Mistake("{}"), std::string("`prompt` is missing") + kForms);
  EXPECT_EQ(Mistake(R"({"prompt": null})"), std::string("`prompt` is null") + kForms);
  EXPECT_EQ(Mistake(R"({"prompt": []})"), std::string("`prompt` is an array of 0") + kForms);
  EXPECT_EQ(Mistake(R"({"prompt": 3})"), std::string("`prompt` is 3") + kForms);
  EXPECT_EQ(Mistake(R"({"prompt": [1, "a"]})"),
            "`prompt[1]` is 'a', expected the number of a token");
  EXPECT_EQ(Mistake(R"({"prompt": [[1, -1]]})"),
            "`prompt[0][1]` is -1, expected the number of a token");
  EXPECT_EQ(Mistake(R"({"prompt": [2147483648]})"),
            "`prompt[0]` is 2147483648, expected the number of a token");
  EXPECT_EQ(Mistake(R"({"prompt": ["a", []]})"),
            "`prompt[1]` is an array of 0, expected a text or tokens");
  EXPECT_EQ(MistakeOf(R"("n": 0)"), "`n` is 0, expected a whole number from 1 to 128");
  EXPECT_EQ(MistakeOf(R"("n": 2, "best_of": 3)"), "`best_of` is 3, expected n, which is 2");
  EXPECT_EQ(MistakeOf(R"("max_tokens": "5")"),
            "`max_tokens` is '5', expected a whole number from 0, or -1 for no limit");
  EXPECT_EQ(MistakeOf(R"("temperature": -1)"),
            "`temperature` is -1, expected a number from 0 to 100");
  EXPECT_EQ(MistakeOf(R"("top_p": 1.5)"), "`top_p` is 1.5, expected a number from 0 to 1");
  EXPECT_EQ(MistakeOf(R"("logit_bias": {"x": 1})"),
            "`logit_bias.x` is 1, expected the number of a token as the key");
  EXPECT_EQ(MistakeOf(R"("logit_bias": {"1": 101})"),
            "`logit_bias.1` is 101, expected a number from -100 to 100");
  EXPECT_EQ(MistakeOf(R"("seed": 1.5)"), "`seed` is 1.5, expected a whole number");
  EXPECT_EQ(MistakeOf(R"("stop": [1])"), "`stop[0]` is 1, expected a text");
  EXPECT_EQ(MistakeOf(R"("stop": 1)"), "`stop` is 1, expected a text or a list of at most 16");
  EXPECT_EQ(MistakeOf(R"("stop": ["","","","","","","","","","","","","","","","",""])"),
            "`stop` is an array of 17, expected a text or a list of at most 16");
  EXPECT_EQ(MistakeOf(R"("logprobs": true)"),
            "`logprobs` is true, expected a whole number from 0 to 20");
  EXPECT_EQ(MistakeOf(R"("logprobs": 21)"),
            "`logprobs` is 21, expected a whole number from 0 to 20");
  EXPECT_EQ(MistakeOf(R"("echo": 1)"), "`echo` is 1, expected true or false");
  EXPECT_EQ(MistakeOf(R"("stream_options": {"include_usage": "y"})"),
            "`stream_options.include_usage` is 'y', expected true or false");
  EXPECT_EQ(MistakeOf(R"("suffix": "s")"),
            "`suffix` is not supported here: text is only written after a prompt");
  EXPECT_EQ(MistakeOf(R"("min_tokens": 3)"),
            "`min_tokens` is not supported here: an answer may end at any token");
  EXPECT_EQ(MistakeOf(R"("stop_token_ids": [3])"),
            "`stop_token_ids` is not supported here: stop takes texts, those of special tokens "
            "included");
  EXPECT_EQ(MistakeOf(R"("model": "m@")"),
            "`model` is 'm@', expected NAME@POLICY:KEY=VALUE,KEY=VALUE");
  EXPECT_EQ(MistakeOf(R"("omnikv": {"policy": 3})"), "`omnikv.policy` is 3, expected a text");
  EXPECT_EQ(MistakeOf(R"("omnikv": {"budget": [1]})"),
            "`omnikv.budget` is an array of 1, expected a number, a text, true or false");
  EXPECT_EQ(MistakeOf(R"("omnikv": "full")"), "`omnikv` is 'full', expected an object");
}

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

TEST(Completions, WholeBody) {
  Question q;
  q.prompts = {"p"};
  q.n = 2;
  const auto answer = AnswerCompletions(q, TestReply());
  EXPECT_EQ(answer->Begin(), "");
  EXPECT_EQ(answer->Progress(1, 2, 0), "");
  EXPECT_EQ(answer->Add(1, {"x", {}}), "");
  EXPECT_EQ(answer->Add(0, {"a", {}}), "");
  EXPECT_EQ(answer->Add(0, {"b", {}}), "");
  EXPECT_EQ(answer->End(0, FinishReason::kStop), "");
  EXPECT_EQ(answer->End(1, FinishReason::kLength), "");
  EXPECT_EQ(Pretty(J(answer->Close({3, 2, 4}, J(R"({"timings": {"x": 1}})")))), Pretty(J(R"({
      "id": "cmpl-77", "object": "text_completion", "created": 5, "model": "m",
      "choices": [
        {"index": 0, "text": "ab", "logprobs": null, "finish_reason": "stop"},
        {"index": 1, "text": "x", "logprobs": null, "finish_reason": "length"}],
      "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 2}},
      "timings": {"x": 1}})")));
}

TEST(Completions, LogprobsOfAnEchoedPrompt) {
  Question q;
  q.prompts = {"p"};
  q.echo = true;
  q.top_logprobs = 2;
  const auto answer = AnswerCompletions(q, TestReply());
  answer->Add(0,
              {"é", {Token("\xC3", kNone), Token("\xA9", -0.5, {{"x", -0.25}, {"\xA9", -0.5}})}});
  answer->Add(0, {"no", {Token("no", -1, {{"yes", -0.5}, {"yes", -0.75}})}});
  answer->Add(0, {"w", {Token("w", -std::numeric_limits<double>::infinity())}});
  answer->End(0, FinishReason::kStop);
  EXPECT_EQ(Pretty(J(answer->Close({}, Json()))["choices"]), Pretty(J(R"([
      {"index": 0, "text": "énow", "logprobs": {
         "text_offset": [0, 1, 1, 3], "token_logprobs": [null, -0.5, -1.0, -9999.0],
         "tokens": ["bytes:\\xc3", "bytes:\\xa9", "no", "w"],
         "top_logprobs": [null, {"x": -0.25, "bytes:\\xa9": -0.5}, {"yes": -0.5, "no": -1.0},
                          {"w": -9999.0}]},
       "finish_reason": "stop"}])")));
}

TEST(Completions, Stream) {
  Question q;
  q.prompts = {"p", "q"};
  q.stream = q.stream_usage = q.stream_progress = true;
  q.top_logprobs = 0;
  const auto answer = AnswerCompletions(q, TestReply());
  std::string out = answer->Begin();
  out += answer->Progress(6, 8, 2);
  out += answer->Add(1, {"", {}});
  out += answer->Add(1, {"", {Token("a", -1)}});
  out += answer->Add(1, {"ab", {Token("b", -2)}});
  out += answer->End(1, FinishReason::kCancelled);
  out += answer->End(0, FinishReason::kStop);
  out += answer->Close({8, 2, 2}, Json());
  const std::string head = R"({"id": "cmpl-77", "object": "text_completion", "created": 5,
                               "model": "m", "choices": )";
  const auto chunk = [&](const std::string& rest) { return J(head + rest + "}"); };
  Json expected = Json::array();
  expected.push_back(chunk(R"([{"index": 0, "text": "", "logprobs": null, "finish_reason": null}],
      "usage": null,
      "prompt_progress": {"total": 8, "cache": 2, "processed": 6, "time_ms": 0})"));
  expected.push_back(chunk(R"([{"index": 1, "text": "", "logprobs": {"text_offset": [0],
      "token_logprobs": [-1.0], "tokens": ["a"], "top_logprobs": [{"a": -1.0}]},
      "finish_reason": null}], "usage": null)"));
  expected.push_back(chunk(R"([{"index": 1, "text": "ab", "logprobs": {"text_offset": [1],
      "token_logprobs": [-2.0], "tokens": ["b"], "top_logprobs": [{"b": -2.0}]},
      "finish_reason": null}], "usage": null)"));
  expected.push_back(chunk(
      R"([{"index": 1, "text": "", "logprobs": null, "finish_reason": "length"}], "usage": null)"));
  expected.push_back(chunk(
      R"([{"index": 0, "text": "", "logprobs": null, "finish_reason": "stop"}], "usage": null)"));
  expected.push_back(chunk(R"([], "usage": {"prompt_tokens": 8, "completion_tokens": 2,
      "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 2}})"));
  expected.push_back("[DONE]");
  EXPECT_EQ(Pretty(Events(out)), Pretty(expected));
}

TEST(Completions, StreamWithoutUsage) {
  Question q;
  q.prompts = {"p"};
  q.stream = true;
  const auto answer = AnswerCompletions(q, TestReply());
  EXPECT_EQ(answer->Begin(), "");
  EXPECT_EQ(answer->Progress(1, 2, 0), "");
  EXPECT_FALSE(Events(answer->Add(0, {"a", {}}))[0].contains("usage"));
  EXPECT_EQ(answer->Close({}, Json::object()), "data: [DONE]\n\n");
  EXPECT_EQ(Pretty(Events(AnswerCompletions(q, TestReply())->Close({}, J(R"({"timings": 1})")))),
            Pretty(J(R"([{"id": "cmpl-77", "object": "text_completion", "created": 5, "model": "m",
                          "choices": [], "timings": 1}, "[DONE]"])")));
}

TEST(Completions, ErrorsInTheMiddle) {
  Question q;
  q.prompts = {"p"};
  const Json error = J(R"({"error": {"message": "the card is gone", "type": "server_error",
                           "param": null, "code": null}})");
  EXPECT_EQ(Pretty(J(AnswerCompletions(q, TestReply())->Error(Failed("the card is gone")))),
            Pretty(error));
  q.stream = true;
  EXPECT_EQ(Pretty(Events(AnswerCompletions(q, TestReply())->Error(Failed("the card is gone")))),
            Pretty(Json::array({error, "[DONE]"})));
}

}  // namespace
}  // namespace omnikv::server::completions_test
