// Clients that send or take too much, too slowly, or too many at once.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "http_client.h"

namespace omnikv::server::http_limits_test {
namespace {

TEST(HttpLimits, OfTheHead) {
  const auto server = Serving({.max_header_bytes = 1000});
  const std::string address = server->addresses()[0];
  {
    Client client(address);
    client.Put(GetText("/", "A: " + std::string(900, 'a') + "\r\n"));
    EXPECT_EQ(client.Next().status, 200);
    client.Put(GetText("/", "A: " + std::string(1000, 'a') + "\r\n"));
    EXPECT_EQ(client.Next().status, 431);
    EXPECT_TRUE(client.Ended());
  }
  {
    Client client(address);
    client.Put(GetText(std::string("/").append(1000, 'a')));
    EXPECT_EQ(client.Next().status, 414);
    EXPECT_TRUE(client.Ended());
  }
  // It is refused before it ends, or else it never would be.
  Client client(address);
  client.Put("GET / HTTP/1.1\r\nA: " + std::string(2000, 'a'));
  EXPECT_EQ(client.Next().status, 431);
  // So is the line of a chunk.
  Client chunks(address);
  chunks.Put("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;a=" +
             std::string(2000, 'a'));
  EXPECT_EQ(chunks.Next().status, 400);
}

TEST(HttpLimits, AHundredThousandHeaders) {
  const auto server = Serving({});
  std::string headers;
  for (int i = 0; i < 100'000; ++i) headers += fmt::format("X-{}: a\r\n", i);
  Client client(server->addresses()[0]);
  std::thread writer([&] { client.Put(GetText("/", headers)); });  // it cannot be taken whole
  const Answer answer = client.Next();
  EXPECT_EQ(answer.status, 431);
  EXPECT_TRUE(answer.whole);
  writer.join();
  // Where they are allowed they are read.
  const auto wide = Serving({.max_header_bytes = 4 << 20});
  Client other(wide->addresses()[0]);
  other.Put(GetText("/", headers));
  const Answer read = other.Next();
  EXPECT_EQ(read.status, 200);
  EXPECT_NE(read.body.find("\nx-99999: a\n"), std::string::npos);
}

TEST(HttpLimits, OfTheBody) {
  const auto server = Serving({.max_body_bytes = 100'000});
  const std::string address = server->addresses()[0];
  Client client(address);
  client.Put(PostText("/", std::string(100'000, 'a')));
  EXPECT_EQ(client.Next().status, 200);
  client.Put("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n");
  EXPECT_EQ(client.Next().status, 413);
  EXPECT_TRUE(client.Ended());
  // A client that sends it all the same reads the answer.
  Client eager(address);
  EXPECT_TRUE(eager.Put(PostText("/", std::string(5'000'000, 'a'))));
  const Answer answer = eager.Next();
  EXPECT_EQ(answer.status, 413);
  EXPECT_TRUE(answer.whole);
  EXPECT_FALSE(eager.was_reset());

  const std::string head = "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
  Client chunk(address);
  chunk.Put(head + "186a1\r\n");  // 100,001
  EXPECT_EQ(chunk.Next().status, 413);
  Client chunks(address);
  const std::string half = "c350\r\n" + std::string(50'000, 'a') + "\r\n";
  chunks.Put(head + half + half + "0\r\n\r\n");
  EXPECT_EQ(chunks.Next().status, 200);
  chunks.Put(head + half + half + "1\r\n");
  EXPECT_EQ(chunks.Next().status, 413);
}

TEST(HttpLimits, OfAllBodies) {
  const auto server = Serving({.max_bodies_bytes = 3000});
  Client first(server->addresses()[0]);
  const std::string head = "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2000\r\n\r\n";
  first.Put(head + std::string(1900, 'a'));
  // Until the first body was counted a second may fit.
  bool refused = false;
  for (int i = 0; i < 1000 && !refused; ++i) {
    Client second(server->addresses()[0]);
    second.Put(head + std::string(2000, 'b'));
    const Answer answer = second.Next();
    refused = answer.status == 503;
    EXPECT_EQ(answer.header("retry-after").empty(), !refused);
  }
  EXPECT_TRUE(refused);
  first.Put(std::string(100, 'a'));
  EXPECT_EQ(first.Next().status, 200);
  Client third(server->addresses()[0]);
  third.Put(head + std::string(2000, 'c'));
  EXPECT_EQ(third.Next().status, 200);  // what the others had was given back
}

TEST(HttpLimits, SlowHeads) {
  const auto server = Serving({.header_seconds = 0.3});
  Client silent(server->addresses()[0]);
  EXPECT_TRUE(silent.Ended());  // without a word: nothing was asked
  Client client(server->addresses()[0]);
  const std::string text = GetText("/", "A: " + std::string(1000, 'a') + "\r\n");
  std::atomic<bool> done = false;
  std::thread writer([&] {
    for (size_t i = 0; i < text.size() && !done; ++i) {
      if (!client.Put(text.substr(i, 1))) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  });
  const Answer answer = client.Next();
  done = true;
  writer.join();
  EXPECT_EQ(answer.status, 408);
  EXPECT_TRUE(answer.whole);
}

TEST(HttpLimits, SlowBodies) {
  const auto server = Serving({.body_seconds = 0.3, .min_body_rate = 1e6});
  Client stops(server->addresses()[0]);
  stops.Put("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc");
  EXPECT_EQ(stops.Next().status, 408);
  // A byte now and then does not help.
  Client drips(server->addresses()[0]);
  drips.Put("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\nabc");
  std::atomic<bool> done = false;
  std::thread writer([&] {
    while (!done && drips.Put("a")) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  });
  const Answer answer = drips.Next();
  done = true;
  writer.join();
  EXPECT_EQ(answer.status, 408);
}

TEST(HttpLimits, IdleConnections) {
  const auto server = Serving({.idle_seconds = 0.2});
  Client client(server->addresses()[0]);
  client.Put(GetText("/"));
  EXPECT_EQ(client.Next().status, 200);
  EXPECT_TRUE(client.Ended());
}

// The whole request may take its time to be answered.
TEST(HttpLimits, SlowHandlersAreNotCutOff) {
  Replies replies;
  const auto server = Serving(
      {.header_seconds = 0.1, .body_seconds = 0.1, .idle_seconds = 0.1, .write_seconds = 0.1},
      [&](const HttpRequest&, auto reply) { replies.Put(reply); });
  Client client(server->addresses()[0]);
  client.Put(PostText("/", "x"));
  const auto reply = replies.Take();
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  reply->Send({}, "slow");
  EXPECT_EQ(client.Next().body, "slow");
}

TEST(HttpLimits, ReadersThatTakeNothing) {
  Replies replies;
  const auto server = Serving({.write_seconds = 0.3, .max_unsent_bytes = size_t{1} << 40},
                              [&](const HttpRequest&, auto reply) { replies.Put(reply); });
  Event gone;
  Client client(server->addresses()[0], false, 4096);
  client.Put(GetText("/"));
  const auto reply = replies.Take();
  reply->OnGone([&] { gone.Set(); });
  reply->Begin({});
  reply->Write(std::string(50'000'000, 'a'));
  EXPECT_TRUE(gone.Wait());
}

TEST(HttpLimits, SlowReadersAreNotCutOff) {
  Replies replies;
  const auto server = Serving({.write_seconds = 1.0, .max_unsent_bytes = size_t{1} << 40},
                              [&](const HttpRequest&, auto reply) { replies.Put(reply); });
  Client client(server->addresses()[0], false, 4096);
  client.Put(GetText("/"));
  replies.Take()->Send({}, std::string(8'000'000, 'a'));
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ASSERT_TRUE(client.Get());
  }
  const Answer answer = client.Next();
  EXPECT_TRUE(answer.whole);
  EXPECT_EQ(answer.body.size(), 8'000'000u);
}

TEST(HttpLimits, UnsentBytes) {
  Replies replies;
  const auto server = Serving({.write_seconds = 600, .max_unsent_bytes = 1 << 20},
                              [&](const HttpRequest&, auto reply) { replies.Put(reply); });
  Event gone;
  Client client(server->addresses()[0], false, 4096);
  client.Put(GetText("/"));
  const auto reply = replies.Take();
  reply->OnGone([&] { gone.Set(); });
  reply->Begin({});
  for (int i = 0; i < 100'000 && !gone.IsSet(); ++i) reply->Write(std::string(10'000, 'a'));
  EXPECT_TRUE(gone.Wait());
  // A reader that keeps up takes any number of bytes on one connection.
  Client reader(server->addresses()[0]);
  for (int i = 0; i < 2; ++i) {
    reader.Put(GetText("/"));
    const auto good = replies.Take();
    good->Begin({});
    for (int piece = 0; piece < 10; ++piece) {
      good->Write(std::string(900'000, 'b') + std::to_string(piece) + "\n");
      ASSERT_TRUE(reader.Sees(std::to_string(piece) + "\n"));
    }
    good->End();
    EXPECT_EQ(reader.Next().body.size(), 9'000'020u);
  }
}

TEST(HttpLimits, Connections) {
  const auto server = Serving({.max_connections = 3});
  const std::string address = server->addresses()[0];
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 3; ++i) {
    clients.push_back(std::make_unique<Client>(address));
    clients.back()->Put(GetText("/"));
    EXPECT_EQ(clients.back()->Next().status, 200);
  }
  {
    Client fourth(address);
    fourth.Put(GetText("/"));
    const Answer answer = fourth.Next();
    EXPECT_EQ(answer.status, 503);
    EXPECT_NE(answer.header("retry-after"), "");
    EXPECT_TRUE(fourth.Ended());
  }
  clients.pop_back();
  EXPECT_TRUE(Eventually([&] {
    Client client(address);
    client.Put(GetText("/"));
    return client.Next().status == 200;
  }));
}

TEST(HttpLimits, FiveHundredConnectionsAtOnce) {
  rlimit files = {};  // both ends are open here
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  std::atomic<int> waiting = 0;
  Event all;
  const auto server = Serving({}, [&](const HttpRequest& request, auto reply) {
    std::thread([&, request, reply] {
      if (++waiting == 500) all.Set();
      all.Wait();
      reply->Begin({.content_type = "text/event-stream"});
      for (int i = 0; i < 10; ++i) reply->Write("data: " + request.path + "\n\n");
      reply->End();
    }).detach();
  });
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 500; ++i) {
    clients.push_back(std::make_unique<Client>(server->addresses()[0]));
    clients.back()->Put(GetText(fmt::format("/{}", i)));
  }
  for (int i = 0; i < 500; ++i) {
    const Answer answer = clients[static_cast<size_t>(i)]->Next();
    EXPECT_TRUE(answer.whole);
    std::string expected;
    for (int k = 0; k < 10; ++k) expected += fmt::format("data: /{}\n\n", i);
    EXPECT_EQ(answer.body, expected);
  }
  EXPECT_EQ(server->connections(), 500u);
  clients.clear();
  EXPECT_TRUE(Eventually([&] { return server->connections() == 0; }));
}

}  // namespace
}  // namespace omnikv::server::http_limits_test
