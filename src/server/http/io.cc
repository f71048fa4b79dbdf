#include "server/http/io.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/basic_socket_acceptor.hpp>
#include <boost/asio/bind_executor.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/error.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <memory>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "base/log.h"

namespace omnikv::server {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;
using Strand = asio::strand<asio::io_context::executor_type>;
using Socket = asio::basic_stream_socket<asio::generic::stream_protocol, Strand>;
using Acceptor = asio::basic_socket_acceptor<asio::generic::stream_protocol, Strand>;
using Timer = asio::basic_waitable_timer<std::chrono::steady_clock,
                                         asio::wait_traits<std::chrono::steady_clock>, Strand>;

constexpr size_t kPiecesAtOnce = 16;

IoEnd EndOf(const error_code& error) {
  if (!error) return IoEnd::kOk;
  // Without a close_notify the bytes may have been cut off by someone else, but every request says
  // where it ends: this is an end like any other.
  if (error == asio::error::eof || error == asio::ssl::error::stream_truncated) return IoEnd::kEof;
  return IoEnd::kFailed;
}

void SetTcpOptions(Socket& socket) {
  const auto set = [fd = socket.native_handle()](int level, int option, int value) {
    setsockopt(fd, level, option, &value, sizeof(value));
  };
  // A token's event goes out when it is written, not when others fill the packet.
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  // A machine that went without a word is noticed within two minutes while nothing is written.
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 60);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 15);
  set(IPPROTO_TCP, TCP_KEEPCNT, 4);
}

template <bool kTls>
class SocketTransport final : public Transport {
 public:
  SocketTransport(std::shared_ptr<void> loop, asio::io_context& io, Socket socket,
                  asio::ssl::context* context)
      : loop_(std::move(loop)),
        strand_(socket.get_executor()),
        timer_(strand_),
        work_(io.get_executor()),
        stream_(MakeStream(std::move(socket), context)) {}

  void Post(std::function<void()> work) override { asio::post(strand_, std::move(work)); }

  bool tls() const override { return kTls; }

  void Handshake(Done done) override {
    if constexpr (kTls) {
      stream_.async_handshake(
          asio::ssl::stream_base::server,
          [done = std::move(done)](const error_code& error) { done(EndOf(error), 0); });
    } else {
      asio::post(strand_, [done = std::move(done)] { done(IoEnd::kFailed, 0); });
    }
  }

  void Read(char* data, size_t size, Done done) override {
    auto finish = [done = std::move(done)](const error_code& error, size_t bytes) {
      done(EndOf(error), bytes);
    };
    if (kTls && !sending_ended_) {
      stream_.async_read_some(asio::buffer(data, size), std::move(finish));
    } else {
      socket().async_read_some(asio::buffer(data, size), std::move(finish));
    }
  }

  void Write(std::vector<std::string_view> pieces, Done done) override {
    std::vector<asio::const_buffer> buffers;
    buffers.reserve(std::min(pieces.size(), kPiecesAtOnce));
    for (const std::string_view piece : pieces) {
      if (buffers.size() == kPiecesAtOnce) break;
      buffers.emplace_back(piece.data(), piece.size());
    }
    stream_.async_write_some(buffers,
                             [done = std::move(done)](const error_code& error, size_t bytes) {
                               // An end that a write meets is a refusal.
                               done(error ? IoEnd::kFailed : IoEnd::kOk, bytes);
                             });
  }

  size_t Untaken() override {
    int bytes = 0;
    return ioctl(socket().native_handle(), SIOCOUTQ, &bytes) == 0 && bytes > 0
               ? static_cast<size_t>(bytes)
               : 0;
  }

  void EndSending(std::shared_ptr<void> owner) override {
    if (sending_ended_) return;
    sending_ended_ = true;
    if constexpr (kTls) {
      // It sends the close_notify at once, and then waits for the other side's in vain or not:
      // either way Close ends it.
      stream_.async_shutdown([owner = std::move(owner)](const error_code&) {});
    } else {
      error_code ignored;
      socket().shutdown(Socket::shutdown_send, ignored);
    }
  }

  bool Refused() override {
    pollfd entry = {.fd = socket().native_handle(), .events = 0, .revents = 0};
    return poll(&entry, 1, 0) > 0 && (entry.revents & (POLLERR | POLLHUP | POLLNVAL)) != 0;
  }

  void WakeAt(Clock::time_point when, std::function<void()> work) override {
    timer_.expires_at(when);
    timer_.async_wait([work = std::move(work)](const error_code& error) {
      if (!error) work();
    });
  }

  void Close() override {
    timer_.cancel();
    error_code ignored;
    socket().close(ignored);
    work_.reset();
  }

 private:
  using Stream = std::conditional_t<kTls, asio::ssl::stream<Socket>, Socket>;

  static Stream MakeStream(Socket socket, asio::ssl::context* context) {
    if constexpr (kTls) {
      return Stream(std::move(socket), *context);
    } else {
      (void)context;
      return socket;
    }
  }

  Socket& socket() {
    if constexpr (kTls) {
      return stream_.next_layer();
    } else {
      return stream_;
    }
  }

  std::shared_ptr<void> loop_;  // outlives what lies on it; hence first
  Strand strand_;
  Timer timer_;
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  Stream stream_;
  bool sending_ended_ = false;
};

}  // namespace

struct IoLoop::State : std::enable_shared_from_this<IoLoop::State> {
  struct Listener {
    explicit Listener(asio::io_context& io) : acceptor(asio::make_strand(io)), pause(io) {}
    Acceptor acceptor;  // its strand also guards the fields below
    asio::steady_timer pause;
    std::optional<asio::ssl::context> tls;
    std::function<void(std::unique_ptr<Transport>)> accepted;
    bool complained = false;
  };

  // Accepts until the listener is closed. Each connection gets a strand of its own.
  void Accept(const std::shared_ptr<Listener>& listener) {
    listener->acceptor.async_accept(
        asio::make_strand(io),
        [self = shared_from_this(), listener](const error_code& error, Socket socket) {
          if (!listener->acceptor.is_open()) return;
          if (error) {
            self->Pause(listener, error);
            return;
          }
          error_code ignored;
          if (socket.local_endpoint(ignored).protocol().family() != AF_UNIX) {
            SetTcpOptions(socket);
          }
          std::unique_ptr<Transport> transport;
          if (listener->tls) {
            transport = std::make_unique<SocketTransport<true>>(self, self->io, std::move(socket),
                                                                &*listener->tls);
          } else {
            transport = std::make_unique<SocketTransport<false>>(self, self->io, std::move(socket),
                                                                 nullptr);
          }
          listener->accepted(std::move(transport));
          self->Accept(listener);
        });
  }

  // No descriptor is left, or the client went before it was accepted: waiting helps both.
  void Pause(const std::shared_ptr<Listener>& listener, const error_code& error) {
    if (!listener->complained) {
      LogInfo("a connection was not accepted: {}", error.message());
      listener->complained = true;
    }
    listener->pause.expires_after(std::chrono::milliseconds(50));
    listener->pause.async_wait(asio::bind_executor(
        listener->acceptor.get_executor(), [self = shared_from_this(), listener](error_code) {
          if (listener->acceptor.is_open()) self->Accept(listener);
        }));
  }

  asio::io_context io;
  std::optional<asio::executor_work_guard<asio::io_context::executor_type>> work;
  std::vector<std::shared_ptr<Listener>> listeners;
  std::vector<std::thread> threads;
};

IoLoop::IoLoop() : state_(std::make_shared<State>()) {}

IoLoop::~IoLoop() {
  // What waits to accept owns the state, which owns it: taken apart here if Start was never called.
  for (const auto& listener : state_->listeners) {
    error_code ignored;
    listener->acceptor.close(ignored);
  }
  if (state_->threads.empty()) state_->io.poll();
}

Status IoLoop::Listen(int fd, int family, std::shared_ptr<TlsContext> tls,
                      std::function<void(std::unique_ptr<Transport>)> accepted) {
  auto listener = std::make_shared<State::Listener>(state_->io);
  error_code error;
  listener->acceptor.assign(
      asio::generic::stream_protocol(family, family == AF_UNIX ? 0 : IPPROTO_TCP), fd, error);
  if (error) {
    close(fd);
    return Failed("a listening socket cannot be watched: " + error.message());
  }
  if (tls) {
    SSL_CTX_up_ref(tls->native());
    listener->tls.emplace(tls->native());
  }
  listener->accepted = std::move(accepted);
  state_->listeners.push_back(listener);
  state_->Accept(listener);
  return Status();
}

Status IoLoop::Start(int threads) {
  state_->work.emplace(state_->io.get_executor());
  try {
    for (int i = 0; i < threads; ++i) {
      state_->threads.emplace_back([state = state_.get()] { state->io.run(); });
    }
  } catch (const std::system_error& error) {
    if (state_->threads.empty()) {
      state_->work.reset();
      return Failed(std::string("no thread can be started: ") + error.what());
    }
    LogInfo("{} of {} threads of HTTP could be started: {}", state_->threads.size(), threads,
            error.what());
  }
  return Status();
}

void IoLoop::CloseListeners() {
  for (const auto& listener : state_->listeners) {
    asio::post(listener->acceptor.get_executor(), [listener] {
      error_code ignored;
      listener->acceptor.close(ignored);
      listener->pause.cancel();
    });
  }
}

void IoLoop::Join() {
  state_->work.reset();
  for (std::thread& thread : state_->threads) thread.join();
  state_->threads.clear();
}

}  // namespace omnikv::server
