// What is asked over HTTP, from the body to the reply, without sockets: on the shipped model.
#include "server/service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "../test_data.h"
#include "engine/core.h"
#include "text/tokenizer/token_texts.h"

namespace omnikv::server::service_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;
using Json = nlohmann::json;

const char* const kQuestion = "The pass key is 48213. What is the pass key?";

class FakeReply : public HttpReply {
 public:
  void Send(HttpHead head, std::string body) override {
    const std::lock_guard lock(mutex_);
    head_ = std::move(head);
    bytes_ = std::move(body);
    ended_ = true;
    changed_.notify_all();
  }
  void Begin(HttpHead head) override {
    const std::lock_guard lock(mutex_);
    head_ = std::move(head);
    changed_.notify_all();
  }
  void Write(std::string bytes) override {
    const std::lock_guard lock(mutex_);
    bytes_ += bytes;
    ++writes_;
    changed_.notify_all();
  }
  void End() override {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }
  void OnGone(std::function<void()> gone) override {
    const std::lock_guard lock(mutex_);
    gone_ = std::move(gone);
  }

  // The client goes once so many pieces have come.
  void GoAfter(int writes) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::minutes(1), [&] { return writes_ >= writes; });
    const auto gone = gone_;
    lock.unlock();
    gone();
  }
  void Await() {
    std::unique_lock lock(mutex_);
    ASSERT_TRUE(changed_.wait_for(lock, std::chrono::minutes(5), [&] { return ended_; }));
  }
  int status() const { return head_.status; }
  const HttpHead& head() const { return head_; }
  const std::string& bytes() const { return bytes_; }
  Json json() const { return Json::parse(bytes_, nullptr, false); }
  // The data of server-sent events.
  std::vector<std::string> events() const {
    std::vector<std::string> all;
    for (size_t at = 0; (at = bytes_.find("data: ", at)) != std::string::npos;) {
      const size_t end = bytes_.find("\n\n", at);
      all.push_back(bytes_.substr(at + 6, end - at - 6));
      at = end;
    }
    return all;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  HttpHead head_;
  std::string bytes_;
  int writes_ = 0;
  bool ended_ = false;
  std::function<void()> gone_;
};

class ServiceTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    EngineOptions options{.model = TestData("models/omnikv-tiny-q8_0.gguf"), .device = "cpu"};
    options.context = 4096;
    options.max_sessions = 4;
    options.kept_contexts = 4;
    options.kv_tokens = EngineOptions::kAsManyAsFit;
    auto engine = Engine::Load(options);
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    engine_ = std::move(*engine);
  }
  static void TearDownTestSuite() { engine_.reset(); }

  void SetUp() override {
    scheduler_ = std::move(*Scheduler::Create(CoreOf(*engine_), {.seats = 4}));
    service_ = std::make_unique<Service>(
        CoreOf(*engine_), *scheduler_,
        ServiceOptions{.name = "tiny", .aliases = {"also"}, .max_tokens = 40});
    steps_ = std::thread([this] { scheduler_->Run(); });
  }
  void TearDown() override {
    scheduler_->Stop(/*drain=*/false);
    steps_.join();
    service_.reset();
    scheduler_.reset();
  }

  std::shared_ptr<FakeReply> Begin(const std::string& method, const std::string& path,
                                   const std::string& body = "") {
    auto reply = std::make_shared<FakeReply>();
    service_->Handle({.method = method, .path = path, .body = body}, reply);
    return reply;
  }
  std::shared_ptr<FakeReply> Ask(const std::string& path, const Json& body) {
    auto reply = Begin("POST", path, body.dump());
    reply->Await();
    return reply;
  }
  std::string Sentence(const std::string& path, const Json& body, int status = 400) {
    const auto reply = Ask(path, body);
    EXPECT_EQ(reply->status(), status) << reply->bytes();
    return reply->json()["error"]["message"];
  }
  // Why this build cannot keep an answer to a form; empty: it can.
  std::string WhyNoGrammars() {
    const auto reply =
        Ask("/v1/chat/completions", {{"messages", Messages()},
                                     {"max_tokens", 1},
                                     {"response_format", {{"type", "json_object"}}}});
    return reply->bytes().find("OMNIKV_XGRAMMAR") != std::string::npos ? reply->bytes() : "";
  }
  static Json Messages() { return {{{"role", "user"}, {"content", kQuestion}}}; }

  static std::unique_ptr<Engine> engine_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<Service> service_;
  std::thread steps_;
};
std::unique_ptr<Engine> ServiceTest::engine_;

TEST_F(ServiceTest, AnswersAsASessionDoes) {
  const Json chat =
      Ask("/v1/chat/completions", {{"messages", Messages()}, {"temperature", 0}})->json();
  EXPECT_EQ(chat["choices"][0]["message"]["content"], "The pass key is 48213.");
  EXPECT_EQ(chat["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(chat["usage"]["prompt_tokens"], 21);
  EXPECT_EQ(chat["usage"]["completion_tokens"], 12);
  EXPECT_EQ(chat["model"], "tiny");
  EXPECT_EQ(chat["omnikv"]["policy"], "omnikv");
  EXPECT_EQ(chat["timings"]["predicted_n"], 12);
  const Json message =
      Ask("/v1/messages", {{"messages", Messages()}, {"max_tokens", 40}, {"temperature", 0}})
          ->json();
  EXPECT_EQ(message["content"][0]["text"], "The pass key is 48213.");
  EXPECT_EQ(message["stop_reason"], "end_turn");
  const Json response = Ask("/v1/responses", {{"input", kQuestion}, {"temperature", 0}})->json();
  EXPECT_EQ(response["output"][0]["content"][0]["text"], "The pass key is 48213.");
  const Json count = Ask("/v1/messages/count_tokens", {{"messages", Messages()}})->json();
  EXPECT_EQ(count["input_tokens"], 21);
}

TEST_F(ServiceTest, StreamsWhatItSays) {
  const auto reply = Ask("/v1/chat/completions", {{"messages", Messages()},
                                                  {"temperature", 0},
                                                  {"stream", true},
                                                  {"stream_options", {{"include_usage", true}}}});
  EXPECT_EQ(reply->head().content_type, "text/event-stream");
  const std::vector<std::string> events = reply->events();
  ASSERT_GT(events.size(), 6u);
  EXPECT_EQ(events.back(), "[DONE]");
  std::string text;
  for (size_t i = 0; i + 2 < events.size(); ++i) {
    const Json delta = Json::parse(events[i])["choices"][0]["delta"];
    text += delta.value("content", "");
  }
  EXPECT_EQ(text, "The pass key is 48213.");
  const Json usage = Json::parse(events[events.size() - 2]);
  EXPECT_THAT(usage["choices"], IsEmpty());
  EXPECT_EQ(usage["usage"]["completion_tokens"], 12);
}

TEST_F(ServiceTest, ReportsHowFarAPromptIs) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += "The grass is green. ";
  const auto reply = Ask("/v1/chat/completions",
                         {{"messages", {{{"role", "user"}, {"content", text + kQuestion}}}},
                          {"stream", true},
                          {"return_progress", true},
                          {"max_tokens", 2}});
  std::vector<int64_t> done;
  for (const std::string& event : reply->events()) {
    const Json chunk = Json::parse(event, nullptr, false);
    if (chunk.is_object() && chunk.contains("prompt_progress")) {
      done.push_back(chunk["prompt_progress"]["processed"]);
      EXPECT_GT(chunk["prompt_progress"]["total"], 1000);
    }
  }
  ASSERT_GT(done.size(), 1u);
  EXPECT_TRUE(std::is_sorted(done.begin(), done.end()));
}

TEST_F(ServiceTest, SaysWhatEachLayerReads) {
  Json body = {{"messages", Messages()},
               {"temperature", 0},
               {"stream", true},
               {"return_reads", 64},
               {"omnikv", {{"policy", "streaming"}, {"budget", 16}, {"sinks", 4}}}};
  const auto reads = [&] {
    std::vector<Json> all;
    for (const std::string& event : Ask("/v1/chat/completions", body)->events()) {
      const Json chunk = Json::parse(event, nullptr, false);
      if (!chunk.is_object() || !chunk.contains("omnikv_reads")) continue;
      EXPECT_EQ(chunk["choices"][0]["delta"], Json::object());
      all.push_back(chunk["omnikv_reads"]);
    }
    return all;
  };
  const std::vector<Json> all = reads();
  ASSERT_FALSE(all.empty());
  for (const Json& one : all) {
    const auto tokens = one["tokens"].get<size_t>();
    EXPECT_GE(tokens, 22u);
    EXPECT_EQ(one["bin_tokens"], 1);
    EXPECT_EQ(one["read"].size(), one["layers"]);
    for (const Json& layer : one["read"]) {
      ASSERT_EQ(layer.size(), tokens);
      for (size_t t = 0; t < tokens; ++t) {
        EXPECT_EQ(layer[t], t < 4 || t + 12 >= tokens ? 1 : 0) << t << " of " << tokens;
      }
    }
    for (const Json& attended : one["attended"]) EXPECT_EQ(attended, 16);
    EXPECT_GT(one["bytes"], 0);
    EXPECT_TRUE(one["hit_rate"].is_null());
  }
  body.erase("return_reads");
  EXPECT_THAT(reads(), IsEmpty());
  body["return_reads"] = "all";
  EXPECT_EQ(Sentence("/v1/chat/completions", body),
            "`return_reads` is 'all', expected true, false or a whole number from 1 to 1024");
}

TEST_F(ServiceTest, ReadsDocuments) {
  const auto reply = Begin("POST", "/v1/documents/text", "a text");
  reply->Await();
  const std::string message = reply->json()["error"]["message"];
  if (reply->status() == 501) {
    EXPECT_THAT(message, HasSubstr("pdftotext is not installed"));
  } else {
    EXPECT_EQ(reply->status(), 400);
    EXPECT_THAT(message, HasSubstr("the body is no PDF"));
  }
}

TEST_F(ServiceTest, SaysHowMuchTextEachTokenIs) {
  const std::string text = "The p\u00e4ss key is 48213.";
  const Json plain = Ask("/tokenize", {{"content", "The key"}})->json();
  EXPECT_FALSE(plain.contains("lengths"));
  const Json answer = Ask("/tokenize", {{"content", text}, {"with_lengths", true}})->json();
  ASSERT_EQ(answer["lengths"].size(), answer["tokens"].size());
  size_t bytes = 0;
  for (const Json& length : answer["lengths"]) bytes += length.get<size_t>();
  EXPECT_EQ(bytes, text.size());
}

TEST_F(ServiceTest, AnswersManyTimesAndStopsWhereItIsTold) {
  const Json many = Ask("/v1/completions", {{"prompt", {"Once", "Twice"}},
                                            {"n", 2},
                                            {"max_tokens", 3},
                                            {"temperature", 1},
                                            {"seed", 7},
                                            {"echo", true}})
                        ->json();
  ASSERT_EQ(many["choices"].size(), 4u);
  EXPECT_THAT(std::string(many["choices"][0]["text"]), StartsWith("Once"));
  EXPECT_THAT(std::string(many["choices"][3]["text"]), StartsWith("Twice"));
  EXPECT_EQ(many["usage"]["completion_tokens"], 12);
  const Json stopped = Ask("/v1/messages", {{"messages", Messages()},
                                            {"max_tokens", 40},
                                            {"temperature", 0},
                                            {"stop_sequences", {"8213"}}})
                           ->json();
  EXPECT_EQ(stopped["content"][0]["text"], "The pass key is 4");
  EXPECT_EQ(stopped["stop_reason"], "stop_sequence");
  EXPECT_EQ(stopped["stop_sequence"], "8213");
  const Json prefilled =
      Ask("/v1/chat/completions", {{"messages",
                                    {{{"role", "user"}, {"content", kQuestion}},
                                     {{"role", "assistant"}, {"content", "The pass key is 4"}}}},
                                   {"continue_final_message", true},
                                   {"temperature", 0}})
          ->json();
  EXPECT_EQ(prefilled["choices"][0]["message"]["content"], "8213.");
}

TEST_F(ServiceTest, APolicyPerRequest) {
  const auto with = [&](Json body) {
    body["messages"] = Messages();
    body["temperature"] = 0;
    const auto reply = Ask("/v1/chat/completions", body);
    EXPECT_EQ(reply->status(), 200) << reply->bytes();
    return reply->json()["omnikv"];
  };
  EXPECT_EQ(with({{"omnikv", {{"policy", "full"}}}})["policy"], "full");
  const Json own = with({{"omnikv", {{"budget", 8}, {"tail", "2"}}}});
  EXPECT_EQ(own["policy"], "omnikv");
  EXPECT_THAT(std::string(own["settings"]), HasSubstr("budget=8 "));
  EXPECT_LT(own["read_fraction"], 1);
  EXPECT_GT(own["held_bytes"]["host"], 0);
  EXPECT_TRUE(own["hit_rate"].is_null()) << "nothing is beside a card";
  const Json named = with({{"model", "tiny@streaming:budget=12"}});
  EXPECT_EQ(named["policy"], "streaming");
  EXPECT_THAT(std::string(named["settings"]), HasSubstr("budget=12"));
}

TEST_F(ServiceTest, TheSamePromptIsThereAlready) {
  const Json body = {{"messages", Messages()}, {"max_tokens", 1}};
  std::string text;
  for (int i = 0; i < 40; ++i) text += "The grass is green. ";
  Json longer = body;
  longer["messages"][0]["content"] = text + kQuestion;
  EXPECT_EQ(Ask("/v1/chat/completions", longer)
                ->json()["usage"]["prompt_tokens_details"]["cached_tokens"],
            0);
  const Json again = Ask("/v1/chat/completions", longer)->json()["usage"];
  EXPECT_EQ(again["prompt_tokens_details"]["cached_tokens"], again["prompt_tokens"].get<int>() - 1);
}

// A conversation that comes back spells the answer as the tokenizer does, and not as the model did.
TEST_F(ServiceTest, OtherTokensOfTheSameTextAreThereAlready) {
  const auto tokens_of = [&](const std::string& text) {
    return Ask("/tokenize", {{"content", text}, {"add_special", true}})
        ->json()["tokens"]
        .get<std::vector<int32_t>>();
  };
  const auto answer = [&](const Json& prompt) {
    return Ask("/v1/completions", {{"prompt", prompt}, {"max_tokens", 8}, {"temperature", 0}})
        ->json();
  };
  const std::string text = "Once the grass was green, and the sky was blue over all of the grass";
  std::string rest;
  for (int i = 0; i < 12; ++i) rest += " and the sky was blue";
  const std::string question = ", said the fox";
  const std::vector<int32_t> begin = tokens_of(text);
  const std::vector<int32_t> whole = tokens_of(text + rest);
  const std::vector<int32_t> asked = tokens_of(text + rest + question);
  ASSERT_TRUE(std::equal(begin.begin(), begin.end(), whole.begin()));
  ASSERT_TRUE(std::equal(whole.begin(), whole.end(), asked.begin()));
  // The rest by letters.
  const TokenTexts texts = *TokenTexts::Of(*CoreOf(*engine_).text.tokenizer);
  const std::vector<std::string> all = texts.All();
  std::vector<int32_t> spelled = begin;
  for (const char letter : rest) {
    const auto id = std::find(all.begin(), all.end(), std::string(1, letter));
    ASSERT_NE(id, all.end());
    spelled.push_back(static_cast<int32_t>(id - all.begin()));
  }
  ASSERT_GT(spelled.size(), whole.size());
  answer(spelled);
  std::vector<int32_t> respelled = spelled;
  respelled.insert(respelled.end(), asked.begin() + std::ssize(whole), asked.end());
  const Json got = answer(text + rest + question);
  EXPECT_EQ(got["timings"]["cache_n"], spelled.size());
  EXPECT_EQ(got["usage"]["prompt_tokens"], asked.size());
  EXPECT_LE(got["usage"]["prompt_tokens_details"]["cached_tokens"], asked.size());
  const Json same = answer(respelled);
  EXPECT_EQ(got["choices"][0]["text"], same["choices"][0]["text"]);
  // Tokens that a client gives are those that it means.
  EXPECT_LE(answer(asked)["timings"]["cache_n"], begin.size() + 1);
}

TEST_F(ServiceTest, AClientThatGoesTakesItsRequestAlong) {
  const auto reply =
      Begin("POST", "/v1/completions",
            R"({"prompt":"Once","max_tokens":4000,"stream":true,"ignore_eos":true})");
  reply->GoAfter(3);
  reply->Await();
  EXPECT_LT(reply->events().size(), 3000u);
  while (scheduler_->stats().cancelled == 0) std::this_thread::yield();
}

TEST_F(ServiceTest, AnswersThatFitASchema) {
  if (const std::string why = WhyNoGrammars(); !why.empty()) GTEST_SKIP() << why;
  const Json schema = {{"type", "object"},
                       {"properties",
                        {{"city", {{"enum", {"Rome", "Paris"}}}},
                         {"millions", {{"type", "integer"}, {"minimum", 1}, {"maximum", 9}}}}},
                       {"required", {"city", "millions"}},
                       {"additionalProperties", false}};
  for (int seed = 0; seed < 4; ++seed) {
    const Json chat =
        Ask("/v1/chat/completions",
            {{"messages", Messages()},
             {"seed", seed},
             {"n", 2},
             {"response_format",
              {{"type", "json_schema"}, {"json_schema", {{"name", "x"}, {"schema", schema}}}}}})
            ->json();
    for (const Json& choice : chat["choices"]) {
      EXPECT_EQ(choice["finish_reason"], "stop");
      const Json answer = Json::parse(std::string(choice["message"]["content"]), nullptr, false);
      ASSERT_TRUE(answer.is_object()) << choice;
      EXPECT_TRUE(answer["city"] == "Rome" || answer["city"] == "Paris");
      EXPECT_GE(answer["millions"], 1);
      EXPECT_LE(answer["millions"], 9);
    }
  }
}

TEST_F(ServiceTest, ToolsThatMustBeCalled) {
  if (const std::string why = WhyNoGrammars(); !why.empty()) GTEST_SKIP() << why;
  const Json parameters = {{"type", "object"},
                           {"properties", {{"city", {{"enum", {"Rome", "Paris"}}}}}},
                           {"required", {"city"}},
                           {"additionalProperties", false}};
  const Json chat = Ask("/v1/chat/completions",
                        {{"messages", Messages()},
                         {"tool_choice", "required"},
                         {"max_tokens", 300},
                         {"parallel_tool_calls", false},
                         {"tools",
                          {{{"type", "function"},
                            {"function", {{"name", "weather"}, {"parameters", parameters}}}}}}})
                        ->json();
  const Json& choice = chat["choices"][0];
  EXPECT_EQ(choice["finish_reason"], "tool_calls") << chat;
  ASSERT_EQ(choice["message"]["tool_calls"].size(), 1u);
  const Json& call = choice["message"]["tool_calls"][0]["function"];
  EXPECT_EQ(call["name"], "weather");
  const Json arguments = Json::parse(std::string(call["arguments"]), nullptr, false);
  EXPECT_TRUE(arguments["city"] == "Rome" || arguments["city"] == "Paris");
  const Json message =
      Ask("/v1/messages",
          {{"messages", Messages()},
           {"max_tokens", 200},
           {"tool_choice",
            {{"type", "tool"}, {"name", "weather"}, {"disable_parallel_tool_use", true}}},
           {"tools", {{{"name", "weather"}, {"input_schema", parameters}}}}})
          ->json();
  EXPECT_EQ(message["stop_reason"], "tool_use") << message;
  EXPECT_EQ(message["content"][0]["name"], "weather");
}

TEST_F(ServiceTest, RefusesWithASentence) {
  const std::string chat = "/v1/chat/completions";
  EXPECT_THAT(Sentence(chat, {{"messages", Messages()}, {"model", "other"}}, 404),
              HasSubstr("there is no model 'other' here, but tiny"));
  EXPECT_THAT(Sentence(chat, {{"messages", Messages()}, {"temperature", 200}}),
              HasSubstr("temperature"));
  EXPECT_THAT(Sentence(chat, {{"messages", Messages()}, {"omnikv", {{"policy", "ful"}}}}),
              HasSubstr("there is no policy 'ful'"));
  // Files are the server's, whatever they say.
  for (const Json& named :
       {Json{{"model", "tiny"}, {"omnikv", {{"policy", "duo"}, {"gates", "/etc/passwd"}}}},
        Json{{"model", "tiny@duo:gates=/etc/passwd"}},
        Json{{"omnikv", {{"policy", "kascade"}, {"head_map", "/etc/passwd"}}}}}) {
    Json body = named;
    body["messages"] = Messages();
    const std::string sentence = Sentence(chat, body);
    EXPECT_THAT(sentence, HasSubstr("a request cannot name files of the server"));
    EXPECT_THAT(sentence, Not(HasSubstr("root")));
  }
  EXPECT_THAT(Sentence(chat, {{"messages", Messages()}, {"omnikv", {{"budget", "x"}}}}),
              HasSubstr("budget"));
  EXPECT_THAT(Sentence(chat, {{"messages", Json::array()}}), HasSubstr("messages"));
  EXPECT_THAT(
      Sentence(chat, {{"messages", Messages()},
                      {"response_format",
                       {{"type", "json_schema"},
                        {"json_schema", {{"name", "x"}, {"schema", {{"type", "strin"}}}}}}}}),
      HasSubstr("strin"));
  EXPECT_THAT(Sentence("/v1/completions", {{"prompt", {0, 5000, 100000000}}}),
              HasSubstr("token 100000000 is not in the vocabulary"));
  std::string text;
  for (int i = 0; i < 3000; ++i) text += "The grass is green. ";
  EXPECT_THAT(Sentence("/v1/completions", {{"prompt", text}}),
              HasSubstr("but the context holds 4096"));
  EXPECT_THAT(Sentence("/v1/embeddings", {{"input", "x"}}), HasSubstr("no embeddings"));
  // In the middle of a stream, and before it.
  const auto streamed = Ask("/v1/completions", {{"prompt", text}, {"stream", true}});
  EXPECT_EQ(streamed->status(), 400);
  const auto broken = Begin("POST", chat, "{\"messages\":");
  broken->Await();
  EXPECT_EQ(broken->status(), 400);
  EXPECT_THAT(broken->bytes(), HasSubstr("is not JSON"));
  const Json anthropic = Ask("/v1/messages", {{"messages", Messages()}})->json();
  EXPECT_EQ(anthropic["type"], "error");
  EXPECT_THAT(std::string(anthropic["error"]["message"]), HasSubstr("max_tokens"));
}

TEST_F(ServiceTest, ListsWhatRunsAndWhatIsKept) {
  const auto get = [&](const std::string& path) {
    const auto reply = Begin("GET", path);
    reply->Await();
    return reply->json();
  };
  EXPECT_THAT(get("/slots"), IsEmpty());
  const auto running = Begin("POST", "/v1/completions",
                             R"({"prompt":"Once upon","max_tokens":4000,"ignore_eos":true})");
  Json slots;
  while (slots.empty()) slots = get("/slots");
  EXPECT_THAT(std::string(slots[0]["made_by"]), StartsWith("omnikv"));
  EXPECT_EQ(slots[0]["prompt_tokens"], 2);
  EXPECT_EQ(get("/v1/contexts")["data"][0]["where"], "running");
  while (slots[0]["n_ctx"] < 100) slots = get("/slots");
  running->GoAfter(0);
  running->Await();
  const Json kept = get("/v1/contexts")["data"];
  ASSERT_EQ(kept.size(), 1u);
  EXPECT_EQ(kept[0]["where"], "kept");
  EXPECT_GE(kept[0]["tokens"], 100);
}

TEST_F(ServiceTest, SmallRoutes) {
  const auto get = [&](const std::string& path) {
    const auto reply = Begin("GET", path);
    reply->Await();
    return reply;
  };
  EXPECT_EQ(get("/health")->json()["status"], "ok");
  const auto page_reply = get("/");
  EXPECT_EQ(page_reply->head().content_type, "text/html; charset=utf-8");
  EXPECT_THAT(page_reply->bytes(), StartsWith("<!DOCTYPE html>"));
  EXPECT_EQ(get("/v1/models")->json()["data"][0]["id"], "tiny");
  EXPECT_EQ(get("/v1/models/tiny")->json()["id"], "tiny");
  EXPECT_EQ(get("/v1/models/other")->status(), 404);
  EXPECT_EQ(get("/props")->json()["context"], 4096);
  EXPECT_EQ(get("/nothing")->status(), 404);
  EXPECT_EQ(get("/v1/chat/completions")->status(), 405);
  Ask("/v1/completions", {{"prompt", "Once"}, {"max_tokens", 4}});
  const std::string page = get("/metrics")->bytes();
  EXPECT_THAT(page, HasSubstr("vllm:generation_tokens_total{model_name=\"tiny\"} 4\n"));
  EXPECT_THAT(page, HasSubstr("vllm:time_to_first_token_seconds_count{model_name=\"tiny\"} 1\n"));
  const Json tokens = Ask("/tokenize", {{"content", "Hello, world"}})->json()["tokens"];
  EXPECT_EQ(Ask("/detokenize", {{"tokens", tokens}})->json()["content"], "Hello, world");
  EXPECT_THAT(std::string(Ask("/apply-template", {{"messages", Messages()}})->json()["prompt"]),
              HasSubstr(kQuestion));
  EXPECT_THAT(Sentence("/detokenize", {{"tokens", {-1}}}), HasSubstr("tokens"));
  EXPECT_THAT(Sentence("/tokenize", Json::object()), HasSubstr("content"));
}

// With a store, of a folder of its own.
class StoredContextsTest : public ServiceTest {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "omnikv_routes_XXXXXX").string();
    folder_ = mkdtemp(name.data());
    Start();
  }
  void TearDown() override {
    Stop();
    std::filesystem::remove_all(folder_);
  }
  void Start() {
    store_ = std::move(
        *ContextStore::Open(CoreOf(*engine_), {.folder = folder_.string(), .bytes = 1 << 30}));
    scheduler_ = std::move(*Scheduler::Create(CoreOf(*engine_), {.seats = 4}, store_.get()));
    service_ = std::make_unique<Service>(
        CoreOf(*engine_), *scheduler_,
        ServiceOptions{.name = "tiny", .max_tokens = 40, .store = store_.get()});
    steps_ = std::thread([this] { scheduler_->Run(); });
  }
  void Stop() {
    ServiceTest::TearDown();
    store_.reset();
  }
  std::shared_ptr<FakeReply> Do(const std::string& method, const std::string& path) {
    auto reply = Begin(method, "/v1/contexts" + path);
    reply->Await();
    return reply;
  }
  // The only one that is there.
  Json One(const std::string& where) {
    std::vector<Json> found;
    const Json all = Do("GET", "")->json();
    for (const Json& c : all["data"]) {
      if (c["where"] == where) found.push_back(c);
    }
    EXPECT_EQ(found.size(), 1u) << where << " in " << all;
    return found.empty() ? Json() : found[0];
  }

  std::filesystem::path folder_;
  std::unique_ptr<ContextStore> store_;
};

TEST_F(StoredContextsTest, AreSavedLoadedPinnedAndDeleted) {
  std::string text = "My garden is at the end of the road. ";
  for (int i = 0; i < 20; ++i) text += "The grass is green. ";
  const Json body = {{"prompt", text}, {"max_tokens", 2}, {"temperature", 0}};
  Ask("/v1/completions", body);
  const Json kept = One("kept");
  EXPECT_EQ(kept["object"], "context");
  EXPECT_EQ(kept["pinned"], false);
  EXPECT_GT(kept["tokens"], 60);
  EXPECT_THAT(std::string(kept["made_by"]), StartsWith("omnikv"));
  EXPECT_EQ(std::string(kept["text"]), text.substr(0, 80));
  const std::string id = kept["id"];
  EXPECT_EQ(One("kept")["id"], id);

  const auto saved = Do("POST", "/" + id + "/save");
  ASSERT_EQ(saved->status(), 200) << saved->bytes();
  EXPECT_EQ(saved->json()["where"], "store");
  EXPECT_EQ(saved->json()["tokens"], kept["tokens"]);
  EXPECT_EQ(saved->json()["text"], kept["text"]);
  EXPECT_GT(saved->json()["bytes"], 1000);
  const std::string file = saved->json()["id"];
  EXPECT_EQ(One("store")["id"], file);

  EXPECT_EQ(Do("POST", "/" + id + "/pin")->json()["pinned"], true);
  EXPECT_EQ(One("kept")["pinned"], true);
  EXPECT_EQ(One("store")["pinned"], false);
  EXPECT_EQ(Do("POST", "/" + id + "/unpin")->json()["pinned"], false);
  EXPECT_EQ(Do("POST", "/" + file + "/pin")->json()["pinned"], true);
  const auto gone = Do("DELETE", "/" + id);
  EXPECT_EQ(gone->json(), (Json{{"id", id}, {"object", "context"}, {"deleted", true}}));
  EXPECT_EQ(Do("DELETE", "/" + id)->status(), 404);

  // The id of a file, and that it is pinned, outlive the server.
  Stop();
  Start();
  EXPECT_EQ(One("store")["id"], file);
  EXPECT_EQ(One("store")["pinned"], true);
  const auto loaded = Do("POST", "/" + file + "/load");
  ASSERT_EQ(loaded->status(), 200) << loaded->bytes();
  EXPECT_EQ(loaded->json()["where"], "kept");
  const Json usage = Ask("/v1/completions", body)->json();
  EXPECT_GT(usage["usage"]["prompt_tokens_details"]["cached_tokens"], 60);
  EXPECT_EQ(Do("DELETE", "/" + file)->status(), 200);
  EXPECT_EQ(Do("POST", "/" + file + "/load")->status(), 404);
}

TEST_F(StoredContextsTest, AreCountedByMetrics) {
  std::string text;
  for (int i = 0; i < 80; ++i) text += "The grass is green. ";
  const auto ask = [&] {
    const Json reply =
        Ask("/v1/completions", {{"prompt", text}, {"max_tokens", 2}, {"temperature", 0}})->json();
    store_->AwaitWritten();
    return reply["usage"]["prompt_tokens"].get<int>();
  };
  const auto page = [&] {
    const auto reply = Begin("GET", "/metrics");
    reply->Await();
    return reply->bytes();
  };
  const auto line = [](const std::string& name, auto value, const std::string& more = "") {
    return HasSubstr("\n" + name + "{model_name=\"tiny\"" + more + "} " + std::to_string(value) +
                     "\n");
  };
  const int prompt = ask();
  ask();
  const std::string by_source = "vllm:prompt_tokens_by_source_total";
  std::string said = page();
  EXPECT_THAT(said, line(by_source, prompt + 1, ",source=\"local_compute\""));
  EXPECT_THAT(said, line(by_source, prompt - 1, ",source=\"local_cache_hit\""));
  EXPECT_THAT(said, line(by_source, 0, ",source=\"external_kv_transfer\""));
  EXPECT_THAT(said, line("vllm:prompt_tokens_cached_total", prompt - 1));
  EXPECT_THAT(said, line("omnikv:store_contexts", 1));
  EXPECT_THAT(said, line("omnikv:store_written_total", 1));
  EXPECT_THAT(said, line("omnikv:store_segments", 0));
  EXPECT_THAT(said, line("omnikv:store_bytes", store_->stats().bytes));
  EXPECT_THAT(said, line("omnikv:store_written_bytes_total", store_->stats().bytes));
  EXPECT_THAT(said, line("omnikv:store_given_up_total", 0));
  EXPECT_THAT(said, Not(line("omnikv:store_bytes", 0)));
  EXPECT_THAT(said, line("omnikv:held_bytes", 0, ",tier=\"device\""));
  EXPECT_THAT(said, Not(line("omnikv:held_bytes", 0, ",tier=\"host\"")));
  EXPECT_THAT(said, HasSubstr("omnikv:kv_blocks{model_name=\"tiny\",table=\"0\",state=\"used\"}"));
  Stop();
  Start();
  ask();
  said = page();
  EXPECT_THAT(said, line(by_source, 1, ",source=\"local_compute\""));
  EXPECT_THAT(said, line(by_source, prompt - 1, ",source=\"external_kv_transfer\""));
  EXPECT_THAT(said, line("omnikv:store_read_total", 1));
  const ContextStoreStats stats = store_->stats();
  EXPECT_THAT(said, line("omnikv:store_read_direct_total", stats.read_direct));
  EXPECT_THAT(said, line("omnikv:store_read_bytes_total", stats.read_bytes));
  EXPECT_EQ(stats.read_bytes, stats.bytes);
  EXPECT_THAT(said, line("omnikv:store_dropped_total", 0));
  EXPECT_THAT(said, line("omnikv:store_failed_total", 0));
}

TEST_F(ServiceTest, ContextsThatAreNotThereAndWithoutAStore) {
  const auto sentence = [&](const std::string& method, const std::string& path, int status) {
    const auto reply = Begin(method, "/v1/contexts" + path);
    reply->Await();
    EXPECT_EQ(reply->status(), status) << reply->bytes();
    return reply->json()["error"]["message"].get<std::string>();
  };
  for (const char* action : {"save", "load", "pin", "unpin"}) {
    EXPECT_EQ(sentence("POST", std::string("/ctx-77/") + action, 404),
              "there is no context 'ctx-77'");
  }
  EXPECT_THAT(sentence("DELETE", "/0123456789abcdef", 404), HasSubstr("there is no context"));
  EXPECT_THAT(sentence("POST", "/ctx-1/paint", 404), HasSubstr("expected POST /v1/contexts/ID/"));
  EXPECT_THAT(sentence("DELETE", "/ctx-1/save", 404), HasSubstr("there is no DELETE"));
  const auto running = Begin("POST", "/v1/completions",
                             R"({"prompt":"Once upon","max_tokens":4000,"ignore_eos":true})");
  const auto first = [&] {
    const auto reply = Begin("GET", "/v1/contexts");
    reply->Await();
    const Json data = reply->json()["data"];
    return data.empty() ? Json() : data[0];
  };
  Json context;
  while (context.is_null() || context["tokens"] < 100) context = first();
  const std::string id = context["id"];
  EXPECT_THAT(sentence("DELETE", "/" + id, 400), HasSubstr("is of a request that runs"));
  running->GoAfter(0);
  running->Await();
  EXPECT_EQ(first()["id"], id);  // it keeps its name
  EXPECT_EQ(first()["where"], "kept");
  EXPECT_THAT(sentence("POST", "/" + id + "/save", 400), HasSubstr("without a `store`"));
  EXPECT_THAT(std::string(first()["text"]), StartsWith("Once upon"));
}

}  // namespace
}  // namespace omnikv::server::service_test
