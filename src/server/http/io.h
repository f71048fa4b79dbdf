// Sockets as the rest of src/server/http sees them: an event loop and connections, with Asio
// hidden in io.cc.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "omnikv/status.h"

typedef struct ssl_ctx_st SSL_CTX;

namespace omnikv::server {

// What TLS needs of its files. Shared by all connections; thread-safe once made.
class TlsContext {
 public:
  // kInvalidArgument: a file cannot be read or is no PEM, or the key is not the certificate's.
  static Result<std::shared_ptr<TlsContext>> Load(const std::string& certificate_file,
                                                  const std::string& key_file);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  SSL_CTX* native() const { return context_; }

 private:
  explicit TlsContext(SSL_CTX* context) : context_(context) {}
  SSL_CTX* context_;
};

enum class IoEnd {
  kOk,
  kEof,     // the other side sends no more (read only)
  kFailed,  // the connection is of no use any more, or Close was called
};

// One accepted connection. Its callbacks run one at a time, on threads of the loop, never inside
// the call that was given them. All but Post are called in such callbacks only. At most one Read
// and one Write are under way at a time. The loop does not end while a Transport is not closed.
class Transport {
 public:
  using Clock = std::chrono::steady_clock;
  using Done = std::function<void(IoEnd end, size_t bytes)>;

  virtual ~Transport() = default;

  // Runs `work` soon; from any thread. REQUIRES that Close was not called.
  virtual void Post(std::function<void()> work) = 0;

  virtual bool tls() const = 0;
  virtual void Handshake(Done done) = 0;  // REQUIRES tls()

  // Some bytes, at least one unless `end` says otherwise. The memory stays valid until `done`.
  virtual void Read(char* data, size_t size, Done done) = 0;
  virtual void Write(std::vector<std::string_view> pieces, Done done) = 0;

  // How many bytes that were written the other side has not taken yet.
  virtual size_t Untaken() = 0;

  // Tells the other side that no more comes. Read then gives bytes of which no sense can be made.
  // `owner` keeps this transport until that is through.
  virtual void EndSending(std::shared_ptr<void> owner) = 0;

  // After kEof: whether the other side refuses what is sent to it, that is, has closed the whole
  // connection. It can be known only some time after something was sent.
  virtual bool Refused() = 0;

  // Runs `work` at `when`. Replaces what was asked for before.
  virtual void WakeAt(Clock::time_point when, std::function<void()> work) = 0;

  // Ends what is under way with kFailed; a wake that is due may still come.
  virtual void Close() = 0;
};

// The threads that serve connections. Thread-compatible.
class IoLoop {
 public:
  IoLoop();
  ~IoLoop();  // REQUIRES that Join has returned if Start was called
  IoLoop(const IoLoop&) = delete;
  IoLoop& operator=(const IoLoop&) = delete;

  // Takes over `fd`, a listening socket of `family` (AF_INET, AF_INET6 or AF_UNIX). `accepted` gets
  // its connections, on a thread of the loop. `tls` may be null: plain text.
  Status Listen(int fd, int family, std::shared_ptr<TlsContext> tls,
                std::function<void(std::unique_ptr<Transport>)> accepted);
  Status Start(int threads);
  void CloseListeners();  // returns before the last `accepted` has
  void Join();            // waits until every Transport is closed, then ends the threads

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace omnikv::server
