// What HTTP is used for: requests of every form come to the handler as they are meant, and replies
// of every form go out whole.
#include <gtest/gtest.h>

#include <stdexcept>

#include "http_client.h"

namespace omnikv::server::http_test {
namespace {

TEST(Http, BringsTheRequestAndTheReply) {
  const auto server = Serving({});
  Client client(server->addresses()[0]);
  ASSERT_TRUE(client.Put(PostText("/a%20b/c?x=1+2&y=%26&z", "body", "X-One: 1\r\nx-one:  2 \r\n")));
  const Answer answer = client.Next();
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(answer.header("content-type"), "text/plain");
  EXPECT_EQ(answer.header("connection"), "");
  EXPECT_EQ(answer.body, "POST /a b/c\n?x=1 2\n?y=&\n?z=\ncontent-length: 4\nx-one: 1, 2\n\nbody");
  // The connection serves another.
  client.Put(GetText("/second"));
  EXPECT_EQ(client.Next().body, "GET /second\n\n");
  client.Put(GetText("http://host:8/absolute?q"));
  EXPECT_EQ(client.Next().body, "GET /absolute\n?q=\n\n");
}

TEST(Http, TakesTornRequests) {
  const auto server = Serving({});
  Client client(server->addresses()[0]);
  const std::string chunked =
      "POST /torn HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: Chunked\r\n\r\n"
      "5;a=b\r\nhello\r\n1\r\n \r\n00A\r\n0123456789\r\n0\r\nTrailer: no\r\n\r\n";
  for (const std::string& text : {PostText("/torn", "hello"), chunked}) {
    for (const char c : text) {
      ASSERT_TRUE(client.Put({&c, 1}));
      std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
  }
  EXPECT_EQ(client.Next().body, "POST /torn\ncontent-length: 5\n\nhello");
  EXPECT_EQ(client.Next().body, "POST /torn\ntransfer-encoding: Chunked\n\nhello 0123456789");
}

TEST(Http, AnswersPipelinedRequestsInOrder) {
  Replies replies;
  const auto server = Serving({}, [&](const HttpRequest& request, auto reply) {
    // The first replies come late, from another thread.
    if (request.path == "/late") return replies.Put(reply);
    Echo(request, reply);
  });
  Client client(server->addresses()[0]);
  std::string text = GetText("/late");
  for (int i = 0; i < 100; ++i) text += PostText(fmt::format("/{}", i), std::string(2000, 'x'));
  std::thread writer([&] { client.Put(text); });  // more than is taken ahead
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  replies.Take()->Send({}, "late");
  EXPECT_EQ(client.Next().body, "late");
  for (int i = 0; i < 100; ++i) {
    const Answer answer = client.Next();
    ASSERT_EQ(answer.body.substr(0, answer.body.find('\n')), fmt::format("POST /{}", i));
  }
  writer.join();
}

TEST(Http, WritesChunks) {
  const auto server = Serving({}, [](const HttpRequest&, auto reply) {
    reply->Begin({.status = 201, .content_type = "text/x", .headers = {{"X-More", "1"}}});
    reply->Write("one ");
    reply->Write("");
    reply->Write(std::string(100'000, 'y'));
    reply->End();
    reply->Write("too late");
    reply->Send({}, "too late");
  });
  Client client(server->addresses()[0]);
  for (int i = 0; i < 3; ++i) {
    client.Put(GetText("/"));
    const Answer answer = client.Next();
    EXPECT_EQ(answer.status, 201);
    EXPECT_EQ(answer.header("transfer-encoding"), "chunked");
    EXPECT_EQ(answer.header("x-more"), "1");
    EXPECT_TRUE(answer.whole);
    EXPECT_EQ(answer.body, "one " + std::string(100'000, 'y'));
  }
}

TEST(Http, SpeaksTheOldVersion) {
  const auto server = Serving({}, [](const HttpRequest& request, auto reply) {
    if (request.path == "/sent") return reply->Send({}, "sent");
    reply->Begin({});
    reply->Write("pie");
    reply->Write("ces");
    reply->End();
  });
  {
    Client client(server->addresses()[0]);
    client.Put("GET /sent HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
    const Answer kept = client.Next();
    EXPECT_EQ(kept.body, "sent");
    EXPECT_EQ(LowerCase(kept.header("connection")), "keep-alive");
    client.Put("GET /sent HTTP/1.0\r\n\r\n");
    const Answer last = client.Next();
    EXPECT_EQ(last.body, "sent");
    EXPECT_EQ(last.header("connection"), "close");
    EXPECT_TRUE(client.Ended());
  }
  Client client(server->addresses()[0]);
  client.Put("GET /pieces HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
  const Answer answer = client.Next();
  EXPECT_EQ(answer.header("transfer-encoding"), "");
  EXPECT_EQ(answer.header("connection"), "close");
  EXPECT_EQ(answer.body, "pieces");
}

TEST(Http, EndsTheConnectionThatTheClientEnds) {
  const auto server = Serving({});
  Client client(server->addresses()[0]);
  client.Put(GetText("/", "Connection: close\r\n") + GetText("/not-served"));
  const Answer answer = client.Next();
  EXPECT_EQ(answer.header("connection"), "close");
  EXPECT_TRUE(client.Ended());
}

TEST(Http, GivesHeadNoBody) {
  const auto server = Serving({}, [](const HttpRequest& request, auto reply) {
    EXPECT_EQ(request.method, "HEAD");
    if (request.path == "/sent") return reply->Send({}, "12345");
    reply->Begin({.content_type = "text/event-stream"});
    reply->Write("data: x\n\n");
    reply->End();
  });
  Client client(server->addresses()[0]);
  client.Put("HEAD /sent HTTP/1.1\r\nHost: x\r\n\r\nHEAD /events HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(client.Next(true).header("content-length"), "5");
  EXPECT_EQ(client.Next(true).header("transfer-encoding"), "chunked");
  // A body would stand before the next head.
  client.Put("HEAD /sent HTTP/1.1\r\nHost: x\r\n\r\nHEAD /sent HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(client.Next(true).status, 200);
  EXPECT_EQ(client.Next(true).status, 200);
}

TEST(Http, SaysContinueWhereItIsExpected) {
  const auto server = Serving({.max_body_bytes = 1000});
  Client client(server->addresses()[0]);
  client.Put("POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-Continue\r\nContent-Length: 3\r\n\r\n");
  ASSERT_TRUE(client.Sees("HTTP/1.1 100 Continue\r\n\r\n"));
  client.Put("abc");
  EXPECT_EQ(client.Next().status, 200);
  EXPECT_EQ(client.interim(), 1);
  // Not when the body is there already, nor when it is refused.
  client.Put("POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc");
  EXPECT_EQ(client.Next().status, 200);
  client.Put("POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9999\r\n\r\n");
  EXPECT_EQ(client.Next().status, 413);
  EXPECT_EQ(client.interim(), 1);
  EXPECT_TRUE(client.Ended());
  Client other(server->addresses()[0]);
  other.Put(GetText("/", "Expect: a miracle\r\n"));
  EXPECT_EQ(other.Next().status, 417);
}

TEST(Http, RepliesHaveIds) {
  const auto server = Serving({}, [](const HttpRequest& request, auto reply) {
    reply->Send({}, request.headers.at("x-request-id"));
  });
  Client client(server->addresses()[0]);
  client.Put(GetText("/", "X-Request-Id: mine-1.2:3\r\n"));
  const Answer mine = client.Next();
  EXPECT_EQ(mine.header("x-request-id"), "mine-1.2:3");
  EXPECT_EQ(mine.body, "mine-1.2:3");
  std::string last;
  for (const std::string& id : {std::string(), std::string("X-Request-Id: a b\r\n"),
                                "X-Request-Id: " + std::string(129, 'a') + "\r\n"}) {
    client.Put(GetText("/", id));
    const Answer answer = client.Next();
    EXPECT_EQ(answer.header("x-request-id").size(), 32u);
    EXPECT_EQ(answer.body, answer.header("x-request-id"));
    EXPECT_NE(answer.body, last);
    last = answer.body;
  }
}

TEST(Http, HeadersOfHandlersCannotSplitReplies) {
  const auto server = Serving({}, [](const HttpRequest&, auto reply) {
    reply->Send({.content_type = "a\r\nX-Evil: 1",
                 .headers = {{"X-Good", "1\r\n\r\nX-Evil: 2"},
                             {"Bad\r\nName", "3"},
                             {"Content-Length", "77"},
                             {"transfer-encoding", "chunked"}}},
                "body");
  });
  Client client(server->addresses()[0]);
  client.Put(GetText("/"));
  const Answer answer = client.Next();
  EXPECT_EQ(answer.header("x-evil"), "");
  EXPECT_EQ(answer.header("content-type"), "a  X-Evil: 1");
  EXPECT_EQ(answer.header("x-good"), "1    X-Evil: 2");
  EXPECT_EQ(answer.header("content-length"), "4");
  EXPECT_EQ(answer.body, "body");
}

TEST(Http, PingsEventStreamsAlone) {
  std::atomic<bool> events = true;
  const auto server =
      Serving({.ping_seconds = 0.05, .ping = ": here\n\n"}, [&](const HttpRequest&, auto reply) {
        reply->Begin({.content_type = events ? "text/event-stream; charset=utf-8" : "text/plain"});
        reply->Write("data: 1\n\n");
        std::thread([reply] {
          std::this_thread::sleep_for(std::chrono::milliseconds(400));
          reply->Write("data: 2\n\n");
          reply->End();
        }).detach();
      });
  Client client(server->addresses()[0]);
  client.Put(GetText("/"));
  Answer answer = client.Next();
  EXPECT_EQ(answer.header("cache-control"), "no-cache");
  EXPECT_EQ(answer.header("x-accel-buffering"), "no");
  EXPECT_TRUE(answer.whole);
  EXPECT_EQ(answer.body.find("data: 1\n\n: here\n\n"), 0u) << answer.body;
  EXPECT_EQ(answer.body.substr(answer.body.size() - 9), "data: 2\n\n");
  events = false;
  client.Put(GetText("/"));
  answer = client.Next();
  EXPECT_EQ(answer.header("cache-control"), "");
  EXPECT_EQ(answer.body, "data: 1\n\ndata: 2\n\n");
}

TEST(Http, ChecksKeys) {
  const auto server = Serving({.api_keys = {"secret-1", "secret-22"}});
  Client client(server->addresses()[0]);
  for (const char* right : {"Authorization: Bearer secret-1\r\n",
                            "authorization: bearer  secret-22\r\n", "X-Api-Key: secret-22\r\n"}) {
    client.Put(GetText("/", right));
    EXPECT_EQ(client.Next().status, 200) << right;
  }
  for (const char* wrong :
       {"", "Authorization: Bearer\r\n", "Authorization: Bearer secret-2\r\n",
        "Authorization: Bearer secret-11\r\n", "Authorization: Basic secret-1\r\n",
        "Authorization: secret-1\r\n", "x-api-key: \r\n", "x-api-key: Secret-1\r\n",
        "Authorization: Bearer secret-1, secret-22\r\n"}) {
    client.Put(GetText("/", wrong));
    const Answer answer = client.Next();
    EXPECT_EQ(answer.status, 401) << wrong;
    EXPECT_EQ(answer.header("www-authenticate"), "Bearer");
    EXPECT_NE(answer.body.find("authentication_error"), std::string::npos) << answer.body;
  }
  client.Put(GetText("/health"));
  EXPECT_EQ(client.Next().status, 200);
  client.Put(GetText("/healthy"));
  EXPECT_EQ(client.Next().status, 401);
  // The body of a request without a key is not waited for.
  client.Put("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n");
  EXPECT_EQ(client.Next().status, 401);
  EXPECT_TRUE(client.Ended());
}

TEST(Http, AllowsPagesOfTheirOrigins) {
  const auto server = Serving({.api_keys = {"k"}, .cors_origins = {"https://a.b", "null"}});
  Client client(server->addresses()[0]);
  client.Put(
      "OPTIONS /v1 HTTP/1.1\r\nHost: x\r\nOrigin: https://a.b\r\n"
      "Access-Control-Request-Method: POST\r\n"
      "Access-Control-Request-Headers: authorization, content-type\r\n\r\n");
  Answer answer = client.Next();
  EXPECT_EQ(answer.status, 204);
  EXPECT_EQ(answer.header("access-control-allow-origin"), "https://a.b");
  EXPECT_EQ(answer.header("access-control-allow-headers"), "authorization, content-type");
  EXPECT_NE(answer.header("access-control-allow-methods").find("POST"), std::string::npos);
  EXPECT_EQ(answer.header("content-length"), "");
  client.Put(GetText("/", "Origin: https://a.b\r\n"));
  answer = client.Next();
  EXPECT_EQ(answer.status, 401);  // which the page may read
  EXPECT_EQ(answer.header("access-control-allow-origin"), "https://a.b");
  EXPECT_EQ(answer.header("vary"), "Origin");
  client.Put(GetText("/", "x-api-key: k\r\nOrigin: https://a.b.c\r\n"));
  answer = client.Next();
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(answer.header("access-control-allow-origin"), "");
  EXPECT_EQ(answer.header("vary"), "Origin");

  const auto all = Serving({.cors_origins = {"*"}});
  Client any(all->addresses()[0]);
  any.Put(GetText("/", "Origin: http://x\r\n"));
  EXPECT_EQ(any.Next().header("access-control-allow-origin"), "*");
  const auto none = Serving({});
  Client other(none->addresses()[0]);
  other.Put(
      "OPTIONS / HTTP/1.1\r\nHost: x\r\nOrigin: a\r\nAccess-Control-Request-Method: G\r\n\r\n");
  answer = other.Next();
  EXPECT_EQ(answer.status, 200);  // the handler's
  EXPECT_EQ(answer.header("vary"), "");
}

TEST(Http, TakesThePrefixOff) {
  const auto server = Serving({.prefix = "/api/v"});
  Client client(server->addresses()[0]);
  const std::pair<const char*, const char*> cases[] = {
      {"/api/v/x?q=1", "GET /x\n?q=1\n\n"}, {"/api/v", "GET /\n\n"}, {"/%61pi/v/", "GET /\n\n"}};
  for (const auto& [path, shown] : cases) {
    client.Put(GetText(path));
    EXPECT_EQ(client.Next().body, shown);
  }
  for (const char* path : {"/", "/api", "/api/vx", "/x/api/v"}) {
    client.Put(GetText(path));
    EXPECT_EQ(client.Next().status, 404) << path;
  }
}

TEST(Http, ErrorsHaveTheGivenBody) {
  const auto server = Serving(
      {.error_body =
           [](const HttpRequest& request, int status, std::string_view message) {
             return request.path + "|" + std::to_string(status) + "|" + std::string(message);
           }},
      [](const HttpRequest&, auto) {});
  Client client(server->addresses()[0]);
  client.Put(GetText("/dropped"));
  EXPECT_EQ(client.Next().body, "/dropped|500|The server did not answer the request.");
  client.Put("GET /early HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n");
  EXPECT_EQ(client.Next().body.substr(0, 11), "/early|501|");
  EXPECT_EQ(DefaultErrorBody({}, 404, "No \"x\" \xff."),
            "{\"error\":{\"message\":\"No \\\"x\\\" \xEF\xBF\xBD.\","
            "\"type\":\"invalid_request_error\",\"code\":404}}");
}

TEST(Http, HandlersMayFail) {
  const auto server = Serving({}, [](const HttpRequest& request, auto reply) {
    if (request.path == "/begun") {
      reply->Begin({});
      reply->Write("half");
    }
    throw std::runtime_error("planned");
  });
  Client client(server->addresses()[0]);
  client.Put(GetText("/"));
  EXPECT_EQ(client.Next().status, 500);
  client.Put(GetText("/begun"));
  const Answer answer = client.Next();
  EXPECT_EQ(answer.status, 200);
  EXPECT_FALSE(answer.whole);
}

}  // namespace
}  // namespace omnikv::server::http_test
