// How a server begins and ends, what it listens on, and clients that go.
#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sys/stat.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "http_client.h"

namespace omnikv::server::http_server_test {
namespace {

std::string Folder() {
  std::string path = testing::TempDir() + "/http_XXXXXX";
  EXPECT_NE(mkdtemp(path.data()), nullptr);
  return path;
}

// A certificate that signs itself, and its key.
void MakeCertificate(const std::string& certificate_file, const std::string& key_file,
                     const char* pass_phrase = nullptr) {
  EVP_PKEY* key = EVP_EC_gen("P-256");
  X509* certificate = X509_new();
  ASN1_INTEGER_set(X509_get_serialNumber(certificate), 1);
  X509_gmtime_adj(X509_getm_notBefore(certificate), 0);
  X509_gmtime_adj(X509_getm_notAfter(certificate), 3600);
  X509_set_pubkey(certificate, key);
  X509_NAME* name = X509_get_subject_name(certificate);
  X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>("localhost"), -1, -1, 0);
  X509_set_issuer_name(certificate, name);
  ASSERT_NE(X509_sign(certificate, key, EVP_sha256()), 0);
  std::FILE* file = std::fopen(certificate_file.c_str(), "w");
  PEM_write_X509(file, certificate);
  std::fclose(file);
  file = std::fopen(key_file.c_str(), "w");
  PEM_write_PrivateKey(file, key, pass_phrase != nullptr ? EVP_aes_128_cbc() : nullptr, nullptr, 0,
                       nullptr, const_cast<char*>(pass_phrase));
  std::fclose(file);
  X509_free(certificate);
  EVP_PKEY_free(key);
}

std::string Refusal(HttpOptions options) {
  const auto server = HttpServer::Open(std::move(options), Echo);
  EXPECT_FALSE(server.ok());
  if (server.ok()) return "";
  EXPECT_EQ(server.status().code(), StatusCode::kInvalidArgument);
  return server.status().message();
}

TEST(HttpServer, NamesWhatIsWrongWithAddresses) {
  for (const char* wrong : {"x", "localhost", ":80", "a:b", "127.0.0.1:65536", "127.0.0.1:-1",
                            "127.0.0.1:", "::1:80", "[::1:80", "[]:80", "a b:c:80"}) {
    EXPECT_EQ(Refusal({.listen = {wrong}}), "`listen` is '" + std::string(wrong) +
                                                "', expected HOST:PORT, [IPv6]:PORT or unix:PATH");
  }
  EXPECT_NE(Refusal({.listen = {}}).find("`listen` is empty"), std::string::npos);
  EXPECT_NE(Refusal({.listen = {"192.0.2.1:80"}}).find("`listen` is '192.0.2.1:80'"),
            std::string::npos);
  EXPECT_NE(Refusal({.listen = {"unix:"}}).find("expected a path"), std::string::npos);
  EXPECT_NE(Refusal({.listen = {"unix:" + std::string(200, 'a')}}).find("expected a path"),
            std::string::npos);
  const auto first = Serving({});
  const std::string used = first->addresses()[0];
  EXPECT_EQ(Refusal({.listen = {used}}),
            "`listen` is '" + used + "', which cannot be listened on: Address already in use");
}

TEST(HttpServer, NamesWhatIsWrongWithOptions) {
  const std::vector<std::string> any = {"127.0.0.1:0"};
  EXPECT_NE(Refusal({.listen = any, .api_keys = {""}}).find("`api_keys`"), std::string::npos);
  EXPECT_NE(Refusal({.listen = any, .prefix = "a"}).find("`prefix` is 'a'"), std::string::npos);
  EXPECT_NE(Refusal({.listen = any, .prefix = "/a/"}).find("`prefix` is '/a/'"), std::string::npos);
  EXPECT_NE(Refusal({.listen = any, .threads = 0}).find("`threads` is 0"), std::string::npos);
  EXPECT_NE(Refusal({.listen = any, .body_seconds = 0}).find("`body_seconds` is 0"),
            std::string::npos);
}

TEST(HttpServer, ListensOnSeveralAddresses) {
  const std::string path = Folder() + "/socket";
  const auto server = Serving({.listen = {"127.0.0.1:0", "localhost:0", "unix:" + path}});
  ASSERT_GE(server->addresses().size(), 3u);
  for (const std::string& address : server->addresses()) {
    EXPECT_EQ(address.find(":0"), std::string::npos) << address;
    if (address[0] == '[') continue;
    Client client(address);
    client.Put(GetText("/"));
    EXPECT_EQ(client.Next().status, 200) << address;
  }
}

TEST(HttpServer, UnixSockets) {
  const std::string path = Folder() + "/socket";
  const std::string address = "unix:" + path;
  auto server = Serving({.listen = {address}});
  EXPECT_EQ(server->addresses()[0], address);
  struct stat file;
  ASSERT_EQ(lstat(path.c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0600u);
  Client client(address);
  client.Put(GetText("/unix"));
  EXPECT_EQ(client.Next().body, "GET /unix\n\n");
  EXPECT_EQ(Refusal({.listen = {address}}),
            "`listen` is '" + address +
                "', which cannot be listened on: another program listens "
                "on it");
  server.reset();
  EXPECT_NE(lstat(path.c_str(), &file), 0);

  // One that a killed program left behind is replaced.
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  std::strncpy(name.sun_path, path.c_str(), sizeof(name.sun_path) - 1);
  const int left = socket(AF_UNIX, SOCK_STREAM, 0);
  ASSERT_EQ(bind(left, reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
  close(left);
  server = Serving({.listen = {address}});
  Client again(address);
  again.Put(GetText("/"));
  EXPECT_EQ(again.Next().status, 200);
  server.reset();

  // A file is not, and neither is a socket that another server has put there meanwhile removed.
  std::ofstream(path) << "precious";
  EXPECT_NE(Refusal({.listen = {address}}).find("not a socket"), std::string::npos);
  std::filesystem::remove(path);
  server = Serving({.listen = {address}});
  std::filesystem::remove(path);
  auto other = Serving({.listen = {address}});
  server.reset();
  EXPECT_EQ(lstat(path.c_str(), &file), 0);
}

TEST(HttpServer, Tls) {
  const std::string folder = Folder();
  const std::string certificate = folder + "/c.pem", key = folder + "/k.pem";
  MakeCertificate(certificate, key);
  Replies replies;
  const auto server = Serving({.listen = {"127.0.0.1:0"},
                               .certificate_file = certificate,
                               .key_file = key,
                               .max_body_bytes = 1'000'000,
                               .header_seconds = 0.5},
                              [&](HttpRequest request, auto reply) {
                                if (request.path == "/later") return replies.Put(reply);
                                reply->Begin({});
                                reply->Write(request.body);
                                reply->End();
                              });
  const std::string address = server->addresses()[0];
  {
    Client client(address, true);
    ASSERT_TRUE(client.connected());
    const std::string body(1'000'000, 'b');
    for (int i = 0; i < 3; ++i) {
      client.Put(PostText("/", body));
      EXPECT_EQ(client.Next().body, body);
    }
    client.Put(PostText("/", "x", "Connection: close\r\n"));
    EXPECT_EQ(client.Next().body, "x");
    EXPECT_TRUE(client.Ended());
  }
  {
    Client client(address, true);  // refused while it sends
    client.Put("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n" +
               std::string(100'000, 'a'));
    const Answer answer = client.Next();
    EXPECT_EQ(answer.status, 413);
    EXPECT_TRUE(answer.whole);
  }
  {
    Client plain(address);
    plain.Put(GetText("/"));
    while (plain.Get()) {
    }
    EXPECT_EQ(plain.in().find("HTTP/"), std::string::npos);
    Client silent(address);  // no handshake
    EXPECT_TRUE(silent.Ended());
  }
  Event gone;
  {
    Client client(address, true);
    client.Put(GetText("/later"));
    replies.Take()->OnGone([&] { gone.Set(); });
    // The reply was dropped unanswered; another one is not.
    EXPECT_EQ(client.Next().status, 500);
    client.Put(GetText("/later"));
    const auto reply = replies.Take();
    reply->OnGone([&] { gone.Set(); });
    client.Close();
    EXPECT_TRUE(gone.Wait());
  }
}

TEST(HttpServer, NamesWhatIsWrongWithCertificates) {
  const std::string folder = Folder();
  const std::string certificate = folder + "/c.pem", key = folder + "/k.pem";
  MakeCertificate(certificate, key);
  MakeCertificate(folder + "/c2.pem", folder + "/k2.pem");
  MakeCertificate(folder + "/c3.pem", folder + "/k3.pem", "secret");
  const auto refusal = [](const std::string& c, const std::string& k) {
    return Refusal({.listen = {"127.0.0.1:0"}, .certificate_file = c, .key_file = k});
  };
  EXPECT_NE(refusal(certificate, "").find("`key_file` is empty"), std::string::npos);
  EXPECT_NE(refusal("", key).find("`certificate_file` is empty"), std::string::npos);
  EXPECT_NE(refusal(folder + "/no", key).find("No such file"), std::string::npos);
  EXPECT_NE(refusal(certificate, folder + "/no").find("No such file"), std::string::npos);
  EXPECT_NE(refusal(key, key).find("expected a certificate"), std::string::npos);
  EXPECT_NE(refusal(certificate, certificate).find("expected a private key"), std::string::npos);
  EXPECT_NE(refusal(certificate, folder + "/k2.pem").find("is not the key of"), std::string::npos);
  EXPECT_NE(refusal(folder + "/c3.pem", folder + "/k3.pem").find("pass phrase"), std::string::npos);
}

// One request whose reply the test has.
struct Asked {
  explicit Asked(const std::string& text, HttpOptions options = {}) {
    server =
        Serving(std::move(options), [this](const HttpRequest&, auto with) { replies.Put(with); });
    client = std::make_unique<Client>(server->addresses()[0]);
    client->Put(text);
    reply = replies.Take();
    reply->OnGone([this] { gone.Set(); });
  }
  Replies replies;
  Event gone;
  std::unique_ptr<HttpServer> server;
  std::unique_ptr<Client> client;
  std::shared_ptr<HttpReply> reply;
};

TEST(HttpServer, SeesClientsGoThatGetNothing) {
  Asked closed(GetText("/"));
  closed.client->Close();
  EXPECT_TRUE(closed.gone.Wait());
  Event at_once;
  closed.reply->OnGone([&] { at_once.Set(); });
  EXPECT_TRUE(at_once.IsSet());
  closed.reply->Send({}, "dropped");
  EXPECT_TRUE(Eventually([&] { return closed.server->connections() == 0; }));

  Asked reset(GetText("/"));
  reset.client->Reset();
  EXPECT_TRUE(reset.gone.Wait());

  Asked pipelining(GetText("/") + GetText("/half") + "GET");
  pipelining.client->Close();
  EXPECT_TRUE(pipelining.gone.Wait());

  Asked stream(GetText("/"));
  stream.reply->Begin({.content_type = "text/event-stream"});
  ASSERT_TRUE(stream.client->Sees("\r\n\r\n"));
  stream.client->Close();
  EXPECT_TRUE(stream.gone.Wait());

  const std::string path = Folder() + "/socket";
  Asked unix_socket(GetText("/"), {.listen = {"unix:" + path}});
  unix_socket.client->Close();
  EXPECT_TRUE(unix_socket.gone.Wait());
}

TEST(HttpServer, SeesClientsGoWhenItWrites) {
  Asked stream(GetText("/"));
  stream.reply->Begin({.content_type = "text/plain"});
  ASSERT_TRUE(stream.client->Sees("\r\n\r\n"));
  stream.client->Close();
  for (int i = 0; i < 1000 && !stream.gone.IsSet(); ++i) {
    stream.reply->Write("piece");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_TRUE(stream.gone.IsSet());
}

TEST(HttpServer, AnswersClientsThatSendNoMore) {
  Asked sent(GetText("/") + GetText("/too"));
  sent.client->EndSending();
  // Long enough for the server to notice and to ask whether the client still reads.
  EXPECT_FALSE(sent.gone.Wait(700));
  sent.reply->Send({}, "still");
  Answer answer = sent.client->Next();
  EXPECT_EQ(answer.body, "still");
  const auto second = sent.replies.Take();
  ASSERT_NE(second, nullptr);
  second->Send({}, "and the second");
  answer = sent.client->Next();
  EXPECT_EQ(answer.body, "and the second");
  EXPECT_EQ(answer.header("connection"), "close");
  EXPECT_TRUE(sent.client->Ended());
  EXPECT_FALSE(sent.gone.IsSet());

  Asked old("GET / HTTP/1.0\r\n\r\n");
  old.client->EndSending();
  EXPECT_FALSE(old.gone.Wait(300));
  old.reply->Send({}, "still");
  EXPECT_EQ(old.client->Next().body, "still");
  EXPECT_EQ(old.client->interim(), 0);

  Asked stream(GetText("/"));
  stream.reply->Begin({.content_type = "text/event-stream"});
  stream.client->EndSending();
  EXPECT_FALSE(stream.gone.Wait(300));
  stream.reply->Write("data: x\n\n");
  stream.reply->End();
  answer = stream.client->Next();
  EXPECT_TRUE(answer.whole);
  EXPECT_NE(answer.body.find("data: x\n\n"), std::string::npos);

  // Half a request is none.
  Client half(stream.server->addresses()[0]);
  half.Put("GET / HTTP/1.1\r\n");
  half.EndSending();
  EXPECT_TRUE(half.Ended());
}

TEST(HttpServer, GoneIsNotSaidOfEndedReplies) {
  Asked asked(GetText("/"));
  asked.reply->Send({}, "all");
  EXPECT_EQ(asked.client->Next().body, "all");
  asked.client->Close();
  EXPECT_TRUE(Eventually([&] { return asked.server->connections() == 0; }));
  EXPECT_FALSE(asked.gone.IsSet());
}

TEST(HttpServer, StopLetsRepliesEnd) {
  Asked asked(GetText("/"));
  asked.reply->Begin({});
  asked.reply->Write("before ");
  Client idle(asked.server->addresses()[0]);
  idle.Put("GET / HT");
  ASSERT_TRUE(Eventually([&] { return asked.server->connections() == 2; }));
  std::thread stopper([&] { asked.server->Stop(60); });
  EXPECT_TRUE(idle.Ended());
  EXPECT_TRUE(Eventually([&] {
    Client late(asked.server->addresses()[0]);
    return !late.connected();
  }));
  asked.reply->Write("after");
  asked.reply->End();
  const Answer answer = asked.client->Next();
  EXPECT_TRUE(answer.whole);
  EXPECT_EQ(answer.body, "before after");
  EXPECT_TRUE(asked.client->Ended());
  asked.client->Close();
  stopper.join();
  EXPECT_FALSE(asked.gone.IsSet());
}

TEST(HttpServer, StopCutsRepliesOffAfterTheGrace) {
  Asked asked(GetText("/"));
  asked.reply->Begin({});
  asked.server->Stop(0.1);
  EXPECT_TRUE(asked.gone.IsSet());
  EXPECT_FALSE(asked.client->Next().whole);
  // Replies outlive the server.
  asked.reply->Write("nowhere");
  asked.server.reset();
  asked.reply->Write("nowhere");
  asked.reply->End();
  Event at_once;
  asked.reply.reset();
}

TEST(HttpServer, StopFreesTheHandler) {
  auto held = std::make_shared<int>(1);
  auto server =
      Serving({}, [held](const HttpRequest& request, auto reply) { Echo(request, reply); });
  EXPECT_GT(held.use_count(), 1);
  server->Stop(0);
  EXPECT_EQ(held.use_count(), 1);
  server->Stop(0);
  EXPECT_FALSE(server->Start().ok());
}

TEST(HttpServer, NeedNotBeStarted) {
  const std::string path = Folder() + "/socket";
  auto server = HttpServer::Open({.listen = {"unix:" + path, "127.0.0.1:0"}}, Echo);
  ASSERT_TRUE(server.ok());
  server->reset();
  EXPECT_FALSE(std::filesystem::exists(path));
}

// Replies are written, clients go and the server stops, all at once.
TEST(HttpServer, StopsInTheMidst) {
  for (int round = 0; round < 5; ++round) {
    std::vector<std::thread> workers;
    std::mutex mutex;
    std::atomic<int> gone = 0;
    auto server = Serving({.ping_seconds = 0.001, .threads = 4},
                          [&](const HttpRequest& request, std::shared_ptr<HttpReply> reply) {
                            reply->OnGone([&gone, reply] { ++gone; });
                            const std::lock_guard lock(mutex);
                            workers.emplace_back([reply, path = request.path] {
                              reply->Begin({.content_type = "text/event-stream"});
                              for (int i = 0; i < 200; ++i) {
                                reply->Write("data: " + path + "\n\n");
                                if (i % 20 == 0) std::this_thread::yield();
                              }
                              if (path != "/open") reply->End();
                            });
                          });
    std::vector<std::unique_ptr<Client>> clients;
    for (int i = 0; i < 40; ++i) {
      clients.push_back(std::make_unique<Client>(server->addresses()[0]));
      clients.back()->Put(GetText(i % 3 == 0 ? "/open" : "/"));
    }
    for (int i = 0; i < 40; i += 4) clients[static_cast<size_t>(i)]->Reset();
    server->Stop(round * 0.01);
    server.reset();
    for (std::thread& worker : workers) worker.join();
  }
}

}  // namespace
}  // namespace omnikv::server::http_server_test
