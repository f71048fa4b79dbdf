// A client for tests of HTTP that can do everything wrong: raw bytes over a socket, plain or TLS.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "server/http/http_server.h"

namespace omnikv::server {

// Far beyond what anything here takes: a wait that ends by it is a failure.
inline constexpr int kPatience = 60'000;  // ms

inline std::string LowerCase(std::string text) {
  for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  return text;
}

struct Answer {
  int status = 0;                              // 0: the connection ended before a head was whole
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;
  bool whole = false;  // as long as its head said

  std::string header(const std::string& name) const {
    const auto found = headers.find(name);
    return found == headers.end() ? "" : found->second;
  }
};

class Client {
 public:
  // `address` as HttpServer::addresses gives it.
  explicit Client(const std::string& address, bool tls = false, int receive_buffer = 0) {
    if (address.substr(0, 5) == "unix:") {
      sockaddr_un name = {};
      name.sun_family = AF_UNIX;
      std::strncpy(name.sun_path, address.c_str() + 5, sizeof(name.sun_path) - 1);
      fd_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      connected_ = connect(fd_, reinterpret_cast<sockaddr*>(&name), sizeof(name)) == 0;
    } else {
      sockaddr_in name = {};
      name.sin_family = AF_INET;
      name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      name.sin_port =
          htons(static_cast<uint16_t>(std::atoi(address.c_str() + address.rfind(':') + 1)));
      fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (receive_buffer > 0) {
        setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(receive_buffer));
      }
      connected_ = connect(fd_, reinterpret_cast<sockaddr*>(&name), sizeof(name)) == 0;
    }
    if (!tls || !connected_) return;
    context_ = SSL_CTX_new(TLS_client_method());
    ssl_ = SSL_new(context_);
    SSL_set_fd(ssl_, fd_);
    connected_ = SSL_connect(ssl_) == 1;
  }
  ~Client() {
    if (ssl_ != nullptr) SSL_free(ssl_);
    if (context_ != nullptr) SSL_CTX_free(context_);
    Close();
  }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  bool connected() const { return connected_; }

  // False once the server takes no more.
  bool Put(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ssl_ != nullptr
                            ? SSL_write(ssl_, bytes.data(), static_cast<int>(bytes.size()))
                            : send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(n));
    }
    return true;
  }

  // Reads more; false at the end of the connection, or when nothing came for `ms`.
  bool Get(int ms = kPatience) {
    if (ssl_ == nullptr || SSL_pending(ssl_) == 0) {
      pollfd entry = {.fd = fd_, .events = POLLIN, .revents = 0};
      if (poll(&entry, 1, ms) <= 0) {
        timed_out_ = true;
        return false;
      }
    }
    char bytes[65536];
    const ssize_t n =
        ssl_ != nullptr ? SSL_read(ssl_, bytes, sizeof(bytes)) : recv(fd_, bytes, sizeof(bytes), 0);
    if (n < 0 && ssl_ == nullptr) reset_ = errno == ECONNRESET;
    if (n <= 0) return false;
    in_.append(bytes, static_cast<size_t>(n));
    return true;
  }

  // The next reply, interim ones counted and passed over. `head_only`: to HEAD.
  Answer Next(bool head_only = false) {
    for (;;) {
      Answer answer = NextOfAny(head_only);
      if (answer.status < 100 || answer.status > 199) return answer;
      ++interim_;
    }
  }

  // Whether the server ends the connection, without another byte.
  bool Ended() {
    if (!in_.empty()) return false;
    const bool more = Get();
    return !more && !timed_out_;
  }

  // Everything that comes until `text` is in it or the connection ends.
  bool Sees(const std::string& text) {
    for (size_t from = 0; in_.find(text, from) == std::string::npos;) {
      from = in_.size() - std::min(in_.size(), text.size());
      if (!Get()) return false;
    }
    return true;
  }

  void EndSending() { shutdown(fd_, SHUT_WR); }
  void Close() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }
  void Reset() {
    const linger hard = {.l_onoff = 1, .l_linger = 0};
    setsockopt(fd_, SOL_SOCKET, SO_LINGER, &hard, sizeof(hard));
    Close();
  }

  const std::string& in() const { return in_; }
  int interim() const { return interim_; }
  bool was_reset() const { return reset_; }

 private:
  bool More() { return Get(); }

  Answer NextOfAny(bool head_only) {
    Answer answer;
    size_t end;
    while ((end = in_.find("\r\n\r\n")) == std::string::npos) {
      if (!More()) return answer;
    }
    const std::string head = in_.substr(0, end + 2);
    in_.erase(0, end + 4);
    EXPECT_EQ(head.substr(0, 9), "HTTP/1.1 ");
    answer.status = std::atoi(head.c_str() + 9);
    for (size_t at = head.find("\r\n") + 2; at < head.size();) {
      const size_t line_end = head.find("\r\n", at);
      const std::string line = head.substr(at, line_end - at);
      const size_t colon = line.find(": ");
      std::string& value = answer.headers[LowerCase(line.substr(0, colon))];
      EXPECT_TRUE(value.empty() || LowerCase(line.substr(0, colon)) == "vary") << line;
      value = line.substr(colon + 2);
      at = line_end + 2;
    }
    if (head_only || answer.status < 200 || answer.status == 204) {
      answer.whole = true;
    } else if (answer.headers.count("content-length") != 0) {
      const auto size = static_cast<size_t>(std::atoll(answer.header("content-length").c_str()));
      while (in_.size() < size && More()) {
      }
      answer.whole = in_.size() >= size;
      answer.body = in_.substr(0, size);
      in_.erase(0, answer.body.size());
    } else if (answer.header("transfer-encoding") == "chunked") {
      answer.whole = Chunks(&answer.body);
    } else {
      while (More()) {
      }
      answer.whole = !timed_out_;
      answer.body = std::exchange(in_, std::string());
    }
    return answer;
  }

  bool Chunks(std::string* body) {
    for (;;) {
      size_t end;
      while ((end = in_.find("\r\n")) == std::string::npos) {
        if (!More()) return false;
      }
      const size_t size = std::strtoul(in_.c_str(), nullptr, 16);
      while (in_.size() < end + 2 + size + 2) {
        if (!More()) return false;
      }
      body->append(in_, end + 2, size);
      EXPECT_EQ(in_.substr(end + 2 + size, 2), "\r\n");
      in_.erase(0, end + 2 + size + 2);
      if (size == 0) return true;
    }
  }

  int fd_ = -1;
  SSL_CTX* context_ = nullptr;
  SSL* ssl_ = nullptr;
  bool connected_ = false;
  bool timed_out_ = false;
  bool reset_ = false;
  int interim_ = 0;
  std::string in_;
};

// Something that happens on a thread of the server.
class Event {
 public:
  void Set() {
    const std::lock_guard lock(mutex_);
    set_ = true;
    changed_.notify_all();
  }
  bool IsSet() {
    const std::lock_guard lock(mutex_);
    return set_;
  }
  bool Wait(int ms = kPatience) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::milliseconds(ms), [this] { return set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

// Hands replies from the handler to the test.
class Replies {
 public:
  void Put(std::shared_ptr<HttpReply> reply) {
    const std::lock_guard lock(mutex_);
    replies_.push_back(std::move(reply));
    changed_.notify_all();
  }
  std::shared_ptr<HttpReply> Take() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::milliseconds(kPatience),
                      [this] { return !replies_.empty(); });
    if (replies_.empty()) return nullptr;
    auto reply = std::move(replies_.front());
    replies_.erase(replies_.begin());
    return reply;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<HttpReply>> replies_;
};

// "METHOD PATH\nHEADERS SORTED\n\nBODY" of what the handler got, but for host and x-request-id.
inline std::string Shown(const HttpRequest& request) {
  std::string text = request.method + " " + request.path + "\n";
  for (const auto& [name, value] : request.query) text += "?" + name + "=" + value + "\n";
  for (const auto& [name, value] : request.headers) {
    if (name != "host" && name != "x-request-id") text += name + ": " + value + "\n";
  }
  return text + "\n" + request.body;
}

inline void Echo(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply) {
  reply->Send({.content_type = "text/plain"}, Shown(request));
}

// A server on a free port of the loopback.
inline std::unique_ptr<HttpServer> Serving(HttpOptions options, HttpHandler handler = Echo) {
  if (options.listen.empty()) options.listen = {"127.0.0.1:0"};
  auto server = HttpServer::Open(std::move(options), std::move(handler));
  EXPECT_TRUE(server.ok()) << server.status().message();
  if (!server.ok()) return nullptr;
  const Status started = (*server)->Start();
  EXPECT_TRUE(started.ok()) << started.message();
  return std::move(*server);
}

// Waits until `condition` holds.
template <typename Condition>
bool Eventually(Condition condition) {
  for (int i = 0; i < kPatience / 5; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

inline std::string GetText(const std::string& path, const std::string& headers = "") {
  return "GET " + path + " HTTP/1.1\r\nHost: x\r\n" + headers + "\r\n";
}
inline std::string PostText(const std::string& path, const std::string& body,
                            const std::string& headers = "") {
  return "POST " + path + " HTTP/1.1\r\nHost: x\r\nContent-Length: " + std::to_string(body.size()) +
         "\r\n" + headers + "\r\n" + body;
}

}  // namespace omnikv::server
