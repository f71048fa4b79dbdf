// Threads: everything of a Connection runs in callbacks of its Transport, one at a time, but for
// what `mutex_` guards: replies put their pieces there from any thread, and wake the rest up. An
// open connection keeps the loop alive (io.h), so what was posted to it runs; a closed one is
// posted nothing.
#include "server/http/connection.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <deque>
#include <exception>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/log.h"
#include "server/http/reply_head.h"
#include "server/http/request_reader.h"

namespace omnikv::server {
namespace {

using Clock = Transport::Clock;
using Time = Clock::time_point;

constexpr size_t kReadBytes = 16 << 10;
// What a client may send ahead while its reply is under way; then it is not read from.
constexpr size_t kPipelinedBytes = 64 << 10;
// After its last reply a connection still takes what the client sends, so that the client reads the
// reply before it learns that nobody listens: a reset would take the reply from it.
constexpr double kLingerSeconds = 2;
// How often a client that sends no more is asked whether it still reads.
constexpr double kRefusalPollSeconds = 0.2;

Clock::duration Seconds(double seconds) {
  constexpr double kForever = 1e8;
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::clamp(seconds, 0.0, kForever)));
}

}  // namespace

class Connection final : public std::enable_shared_from_this<Connection> {
 public:
  Connection(std::shared_ptr<ConnectionSet> set, std::unique_ptr<Transport> transport, bool refused)
      : set_(std::move(set)),
        options_(set_->options),
        refused_(refused),
        transport_(std::move(transport)) {}

  bool refused() const { return refused_; }

  // From any thread; Start once, before all else.
  void Start() {
    PostIfOpen([](Connection& self) { self.Begin(); });
  }
  void BeginStop() {
    PostIfOpen([](Connection& self) {
      self.last_request_ = true;
      if (self.phase_ < Phase::kReplying) self.Close();
    });
  }
  void Cut() {
    PostIfOpen([](Connection& self) { self.Close(); });
  }

 private:
  class Reply;
  enum class Phase { kHandshake, kIdle, kHead, kBody, kReplying, kLinger, kClosed };

  // What a reply wants written.
  struct Piece {
    enum class Kind { kSend, kBegin, kWrite, kEnd, kUnanswered, kCut };
    Kind kind;
    HttpHead head = {};
    std::string bytes = {};
    size_t counted = 0;  // of kWrite: what it took of max_unsent_bytes
  };

  template <typename Work>
  void PostIfOpen(Work work) {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    transport_->Post([self = shared_from_this(), work] {
      if (self->phase_ == Phase::kClosed) return;
      work(*self);
      self->Arm();
    });
  }

  // ---- Coming in -------------------------------------------------------------------------------

  void Begin() {
    if (refused_) {
      phase_ = Phase::kHead;
      request_id_ = RequestId({});
      SendError({}, 503, "The server has as many connections as it may have.", true);
      return;
    }
    deadline_ = Clock::now() + Seconds(options_.header_seconds);
    if (!transport_->tls()) {
      phase_ = Phase::kIdle;
      StartRead();
      return;
    }
    transport_->Handshake([self = shared_from_this()](IoEnd end, size_t) {
      if (self->phase_ == Phase::kClosed) return;
      if (end != IoEnd::kOk) return self->Close();
      self->phase_ = Phase::kIdle;
      self->deadline_ = Clock::now() + Seconds(self->options_.header_seconds);
      self->StartRead();
      self->Arm();
    });
  }

  void StartRead() {
    if (reading_ || eof_ || phase_ == Phase::kClosed) return;
    if (phase_ == Phase::kReplying && pending_.size() >= kPipelinedBytes) return;
    reading_ = true;
    const bool discards = phase_ == Phase::kLinger;
    transport_->Read(in_.data(), in_.size(),
                     [self = shared_from_this(), discards](IoEnd end, size_t bytes) {
                       self->reading_ = false;
                       if (self->phase_ == Phase::kClosed) return;
                       self->OnRead(end, bytes, discards);
                       self->Arm();
                     });
  }

  void OnRead(IoEnd end, size_t bytes, bool discards) {
    if (phase_ == Phase::kLinger) {
      // A read of TLS that was under way when we ended sending says nothing about the socket.
      if (end == IoEnd::kOk || (!discards && transport_->tls())) return StartRead();
      return Close();
    }
    if (end == IoEnd::kFailed) return Close();
    if (end == IoEnd::kEof) {
      eof_ = true;
      // The reply is still owed to a client that ended its side only (http_server.h).
      if (phase_ != Phase::kReplying || transport_->tls()) return Close();
      probe_due_ = true;
      Probe();
      return;
    }
    pending_.append(in_.data(), bytes);
    Advance();
    StartRead();
  }

  // Takes requests out of pending_ until a reply is due.
  void Advance() {
    while (phase_ < Phase::kReplying && !pending_.empty()) {
      if (phase_ == Phase::kIdle) {
        phase_ = Phase::kHead;
        deadline_ = Clock::now() + Seconds(options_.header_seconds);
        reader_.emplace(ReaderLimits{options_.max_header_bytes, options_.max_body_bytes});
      }
      const size_t used = reader_->Put(pending_);
      pending_.erase(0, used);
      switch (reader_->state()) {
        case RequestReader::State::kHead:
          return;
        case RequestReader::State::kHeadDone:
          OnHead();
          break;
        case RequestReader::State::kBody:
          if (!CountBody()) return;
          if (used == 0) return;
          break;
        case RequestReader::State::kDone:
          if (CountBody()) OnRequest();
          break;
        case RequestReader::State::kFailed:
          Refuse(reader_->status(), reader_->message());
          break;
      }
    }
  }

  // The head is there and no byte of the body was taken: whatever is wrong is said now.
  void OnHead() {
    HttpRequest& request = reader_->request();
    http10_ = reader_->http10();
    head_only_ = request.method == "HEAD";
    keep_alive_ = reader_->keep_alive() && !last_request_;
    request_id_ = RequestId(request);
    request.headers["x-request-id"] = request_id_;
    own_headers_ = CorsHeaders(request, options_.cors_origins);
    const bool close = reader_->has_body();  // which we would have to read to get past it

    if (!TakePrefix(&request.path)) {
      return SendError(request, 404, "The path does not begin with " + options_.prefix + ".",
                       close);
    }
    if (!options_.cors_origins.empty() && IsPreflight(request)) {
      for (auto& header : PreflightHeaders(request)) own_headers_.push_back(std::move(header));
      return SendWhole({.status = 204}, {}, close);
    }
    const auto& open = options_.public_paths;
    if (std::find(open.begin(), open.end(), request.path) == open.end() &&
        !set_->keys.Admits(request)) {
      own_headers_.emplace_back("WWW-Authenticate", "Bearer");
      return SendError(request, 401,
                       "The request has no valid key, expected 'Authorization: Bearer KEY' or "
                       "'x-api-key: KEY'.",
                       close);
    }
    if (reader_->content_length().value_or(0) > options_.max_body_bytes) {
      return SendError(
          request, 413,
          "The body is larger than " + std::to_string(options_.max_body_bytes) + " bytes.", true);
    }
    bool expects = false;
    if (const auto expect = request.headers.find("expect"); expect != request.headers.end()) {
      std::string value = expect->second;
      for (char& c : value) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
      if (value != "100-continue") {
        return SendError(request, 417, "Expect is not '100-continue'.", close);
      }
      expects = true;
    }
    if (!reader_->has_body()) return OnRequest();
    phase_ = Phase::kBody;
    body_start_ = body_progress_ = Clock::now();
    if (expects && !http10_ && pending_.empty()) Enqueue("HTTP/1.1 100 Continue\r\n\r\n");
  }

  bool TakePrefix(std::string* path) const {
    const std::string& prefix = options_.prefix;
    if (prefix.empty()) return true;
    if (path->compare(0, prefix.size(), prefix) != 0) return false;
    if (path->size() > prefix.size() && (*path)[prefix.size()] != '/') return false;
    path->erase(0, prefix.size());
    if (path->empty()) *path = "/";
    return true;
  }

  // Counts what came of the body against the limit for all; false: refused.
  bool CountBody() {
    const size_t size = reader_->request().body.size();
    if (size == body_counted_) return true;
    body_progress_ = Clock::now();
    if (!set_->TakeBodyBytes(size - body_counted_)) {
      Refuse(503, "The server reads as many bytes of bodies as it may.");
      return false;
    }
    body_counted_ = size;
    return true;
  }

  void ReleaseBody() {
    set_->GiveBodyBytes(body_counted_);
    body_counted_ = 0;
  }

  // An error after which the rest of what the client sends has no meaning.
  void Refuse(int status, const std::string& message) {
    const HttpRequest& request = reader_->request();
    if (phase_ == Phase::kHead) {
      http10_ = false;
      head_only_ = request.method == "HEAD";
      request_id_ = RequestId(request);
      own_headers_.clear();
    }
    SendError(request, status, message, true);
  }

  void OnRequest();

  // ---- Going out -------------------------------------------------------------------------------

  void SendError(const HttpRequest& request, int status, const std::string& message, bool close) {
    if (status == 503) own_headers_.emplace_back("Retry-After", "1");
    SendWhole({.status = status}, options_.error_body(request, status, message), close);
  }

  void SendWhole(HttpHead head, std::string body, bool close) {
    ReleaseBody();
    phase_ = Phase::kReplying;
    keep_alive_ = keep_alive_ && !close;
    PutHead(std::move(head), body.size());
    if (!head_only_ && has_body_) Enqueue(std::move(body));
    OnReplyEnd();
  }

  void PutHead(HttpHead head, std::optional<size_t> length) {
    if (head.status < 200 || head.status > 599) head.status = 500;
    keep_alive_ = keep_alive_ && !last_request_ && !(eof_ && pending_.empty());
    has_body_ = HasBody(head.status);
    begun_ = true;
    chunked_ = !length && !http10_;
    if (!length && http10_) keep_alive_ = false;  // the connection's end ends the reply
    events_ = !length && has_body_ && !head_only_ && IsEventStream(head.content_type);
    ReplyFacts facts = {http10_, keep_alive_, length, std::move(own_headers_)};
    facts.more.emplace_back("x-request-id", request_id_);
    Enqueue(FormatHead(head, facts));
    own_headers_.clear();
  }

  // `counted` as in Enqueue.
  void PutChunk(std::string bytes, size_t counted) {
    if (bytes.empty() || head_only_ || !has_body_) return Unsent(counted);
    if (!chunked_) return Enqueue(std::move(bytes), counted);
    char line[24];
    const int size = std::snprintf(line, sizeof(line), "%zx\r\n", bytes.size());
    bytes.insert(0, line, static_cast<size_t>(size));
    bytes += "\r\n";
    Enqueue(std::move(bytes), counted);
  }

  void Unsent(size_t less) {
    if (less == 0) return;
    const std::lock_guard lock(mutex_);
    unsent_ -= less;
  }

  // `counted` of max_unsent_bytes are free when `bytes` are written.
  void Enqueue(std::string bytes, size_t counted = 0) {
    if (bytes.empty()) return;
    out_.push_back({std::move(bytes), counted});
    write_last_ = Clock::now();
    Flush();
  }

  void Flush() {
    if (writing_ || out_.empty() || phase_ == Phase::kClosed) return;
    writing_ = true;
    write_progress_ = Clock::now();
    untaken_ = std::numeric_limits<size_t>::max();
    std::vector<std::string_view> pieces;
    for (const auto& out : out_) {
      pieces.push_back(out.bytes);
      if (pieces.size() == 16) break;
    }
    pieces[0].remove_prefix(out_offset_);
    transport_->Write(std::move(pieces), [self = shared_from_this()](IoEnd end, size_t bytes) {
      self->writing_ = false;
      if (self->phase_ == Phase::kClosed) return;
      self->OnWritten(end, bytes);
      self->Arm();
    });
  }

  void OnWritten(IoEnd end, size_t bytes) {
    if (end != IoEnd::kOk) return Close();
    size_t freed = 0;
    out_offset_ += bytes;
    while (!out_.empty() && out_offset_ >= out_.front().bytes.size()) {
      out_offset_ -= out_.front().bytes.size();
      freed += out_.front().counted;
      out_.pop_front();
    }
    Unsent(freed);
    write_last_ = Clock::now();
    if (!out_.empty()) return Flush();
    if (phase_ == Phase::kReplying && reply_ended_) return FinishReply();
    Probe();
  }

  void OnReplyEnd() {
    if (chunked_ && has_body_ && !head_only_) Enqueue("0\r\n\r\n");
    reply_ended_ = true;
    if (out_.empty() && !writing_) FinishReply();
  }

  void FinishReply() {
    reply_ended_ = begun_ = chunked_ = events_ = false;
    reader_.reset();
    if (!keep_alive_ || last_request_) return Linger();
    phase_ = Phase::kIdle;
    deadline_ = Clock::now() + Seconds(options_.idle_seconds);
    Advance();
    if (eof_ && phase_ < Phase::kReplying) return Close();  // no whole request is left
    StartRead();
  }

  void Linger() {
    phase_ = Phase::kLinger;
    pending_ = std::string();
    deadline_ = Clock::now() + Seconds(kLingerSeconds);
    if (eof_) return Close();
    transport_->EndSending(shared_from_this());
    StartRead();
  }

  // After the client's end: sends something that is harmless and that a client that has gone
  // refuses. Called again when what was being written is.
  void Probe() {
    if (!probe_due_ || phase_ != Phase::kReplying || reply_ended_ || !out_.empty()) return;
    if (!begun_) {
      if (http10_) return;  // it knows no interim replies
      Enqueue("HTTP/1.1 100 Continue\r\n\r\n");
    } else if (events_) {
      PutChunk(options_.ping, 0);
    } else {
      return;
    }
    probe_due_ = false;
  }

  // What replies have put: takes it all.
  void Drain() {
    std::vector<Piece> pieces;
    {
      const std::lock_guard lock(mutex_);
      pieces.swap(pieces_);
      drain_posted_ = false;
    }
    for (Piece& piece : pieces) {
      if (phase_ != Phase::kReplying) return;
      switch (piece.kind) {
        case Piece::Kind::kSend:
          SendWhole(std::move(piece.head), std::move(piece.bytes), false);
          break;
        case Piece::Kind::kBegin:
          PutHead(std::move(piece.head), std::nullopt);
          break;
        case Piece::Kind::kWrite:
          PutChunk(std::move(piece.bytes), piece.counted);
          break;
        case Piece::Kind::kEnd:
          OnReplyEnd();
          break;
        case Piece::Kind::kUnanswered:
          SendError(asked_, 500, "The server did not answer the request.", false);
          break;
        case Piece::Kind::kCut:
          return Close();
      }
    }
  }

  // ---- Clocks ----------------------------------------------------------------------------------

  // When something is due next.
  Time NextDue() const {
    Time due = Time::max();
    if (phase_ != Phase::kReplying && phase_ != Phase::kBody) due = deadline_;
    if (phase_ == Phase::kBody) due = BodyDue();
    if (writing_) due = std::min(due, write_progress_ + Seconds(options_.write_seconds));
    if (phase_ == Phase::kReplying && !reply_ended_) {
      if (PingsNow()) due = std::min(due, write_last_ + Seconds(options_.ping_seconds));
      if (eof_) due = std::min(due, Clock::now() + Seconds(kRefusalPollSeconds));
    }
    return due;
  }

  bool PingsNow() const {
    return events_ && !reply_ended_ && out_.empty() && !options_.ping.empty();
  }

  Time BodyDue() const {
    const double earned = static_cast<double>(body_counted_) / options_.min_body_rate;
    return std::min(body_progress_ + Seconds(options_.body_seconds),
                    body_start_ + Seconds(options_.body_seconds + earned));
  }

  void Arm() {
    if (phase_ == Phase::kClosed) return;
    const Time due = NextDue();
    if (due >= armed_) return;  // it comes earlier and looks again
    armed_ = due;
    transport_->WakeAt(due, [self = shared_from_this()] {
      if (self->phase_ == Phase::kClosed) return;
      self->armed_ = Time::max();
      self->OnClock();
      self->Arm();
    });
  }

  void OnClock() {
    const Time now = Clock::now();
    if (writing_ && now >= write_progress_ + Seconds(options_.write_seconds)) {
      // The system takes more from us only when much of its buffer is free: a slow reader is known
      // by what is left in there.
      const size_t untaken = transport_->Untaken();
      if (untaken >= untaken_) return Close();
      untaken_ = untaken;
      write_progress_ = now;
    }
    switch (phase_) {
      case Phase::kHandshake:
      case Phase::kIdle:
      case Phase::kLinger:
        if (now >= deadline_) Close();
        break;
      case Phase::kHead:
        if (now >= deadline_) Refuse(408, "The head of the request did not come in time.");
        break;
      case Phase::kBody:
        if (now >= BodyDue()) Refuse(408, "The body of the request did not come in time.");
        break;
      case Phase::kReplying:
        if (eof_ && !reply_ended_) {
          if (transport_->Refused()) return Close();
          if (now >= write_last_ + Seconds(options_.ping_seconds)) probe_due_ = true;
          Probe();
        }
        if (PingsNow() && now >= write_last_ + Seconds(options_.ping_seconds)) {
          PutChunk(options_.ping, 0);
        }
        break;
      case Phase::kClosed:
        break;
    }
  }

  void Close() {
    if (phase_ == Phase::kClosed) return;
    phase_ = Phase::kClosed;
    ReleaseBody();
    std::function<void()> gone;
    std::vector<Piece> dropped;
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
      gone.swap(gone_);
      dropped.swap(pieces_);
    }
    const auto self = shared_from_this();  // the set's may be the last
    if (!writing_) out_.clear();           // else the write under way still points there
    transport_->Close();
    set_->Remove(this);
    if (gone) gone();
  }

  const std::shared_ptr<ConnectionSet> set_;
  const HttpOptions& options_;  // set_'s
  const bool refused_;
  const std::unique_ptr<Transport> transport_;

  Phase phase_ = Phase::kHandshake;
  bool last_request_ = false;  // the server stops
  Time deadline_;              // of the handshake, idleness, a head and lingering
  Time armed_ = Time::max();   // when the transport wakes us

  std::array<char, kReadBytes> in_;
  bool reading_ = false;
  bool eof_ = false;
  std::string pending_;  // came in and is not taken by reader_ yet
  std::optional<RequestReader> reader_;
  size_t body_counted_ = 0;  // bytes taken of the set's
  Time body_start_, body_progress_;

  // The request whose reply is due.
  HttpRequest asked_;  // its method and path
  bool http10_ = false;
  bool head_only_ = false;
  bool keep_alive_ = false;
  std::string request_id_;
  Headers own_headers_;
  bool begun_ = false;
  bool has_body_ = true;
  bool chunked_ = false;
  bool events_ = false;
  bool reply_ended_ = false;
  bool probe_due_ = false;

  struct Out {
    std::string bytes;
    size_t counted;
  };
  std::deque<Out> out_;
  size_t out_offset_ = 0;  // bytes of the first that are written
  bool writing_ = false;
  size_t untaken_ = 0;   // in the system's buffer when it was last looked at
  Time write_progress_;  // a byte went out, or a write began
  Time write_last_;      // the same, or bytes were added

  std::mutex mutex_;
  bool closed_ = false;
  bool drain_posted_ = false;
  std::vector<Piece> pieces_;
  size_t unsent_ = 0;  // bytes of Writes that have not gone out
  std::function<void()> gone_;
};

// The handler's end. A connection has one at a time that has not ended.
class Connection::Reply final : public HttpReply {
 public:
  explicit Reply(std::shared_ptr<Connection> connection) : connection_(std::move(connection)) {}

  ~Reply() override {
    // What has begun to go out is not the whole reply: the client must not take it for that.
    if (!ended_) Put({begun_ ? Piece::Kind::kCut : Piece::Kind::kUnanswered}, true);
  }

  void Send(HttpHead head, std::string body) override {
    if (begun_ || ended_) return;
    Put({Piece::Kind::kSend, std::move(head), std::move(body)}, true);
  }

  void Begin(HttpHead head) override {
    if (begun_ || ended_) return;
    begun_ = true;
    Put({Piece::Kind::kBegin, std::move(head)}, false);
  }

  void Write(std::string bytes) override {
    if (!begun_ || ended_) return;
    Put({Piece::Kind::kWrite, {}, std::move(bytes)}, false);
  }

  void End() override {
    if (!begun_ || ended_) return;
    Put({Piece::Kind::kEnd}, true);
  }

  void OnGone(std::function<void()> gone) override {
    if (ended_) return;
    {
      const std::lock_guard lock(connection_->mutex_);
      if (!connection_->closed_) {
        connection_->gone_.swap(gone);
        return;
      }
    }
    gone();
  }

 private:
  void Put(Piece piece, bool last) {
    ended_ = last;
    Connection& connection = *connection_;
    std::function<void()> freed;  // outside the lock: it may hold anything
    const std::lock_guard lock(connection.mutex_);
    if (connection.closed_) return;
    if (last) freed.swap(connection.gone_);
    if (piece.kind == Piece::Kind::kWrite) {
      if (connection.unsent_ > connection.options_.max_unsent_bytes) {
        piece = {Piece::Kind::kCut};
      } else {
        piece.counted = piece.bytes.size();
        connection.unsent_ += piece.counted;
      }
    }
    connection.pieces_.push_back(std::move(piece));
    if (connection.drain_posted_) return;
    connection.drain_posted_ = true;
    connection.transport_->Post([self = connection_] {
      if (self->phase_ == Phase::kClosed) return;
      self->Drain();
      self->Arm();
    });
  }

  const std::shared_ptr<Connection> connection_;
  bool begun_ = false;
  bool ended_ = false;
};

void Connection::OnRequest() {
  ReleaseBody();
  phase_ = Phase::kReplying;
  HttpRequest request = std::move(reader_->request());
  asked_ = {.method = request.method, .path = request.path};
  reader_.reset();
  auto reply = std::make_shared<Reply>(shared_from_this());
  try {
    set_->handler(std::move(request), std::move(reply));
  } catch (const std::exception& error) {
    // The reply has been freed by now, which sent status 500.
    LogInfo("a handler of HTTP failed: {}", error.what());
  }
}

void ConnectionSet::Serve(std::unique_ptr<Transport> transport) {
  // Those that are told 503 are few, so that they cannot take all descriptors either.
  constexpr size_t kRefusedAtOnce = 64;
  std::shared_ptr<Connection> connection;
  {
    const std::lock_guard lock(mutex_);
    const bool full = open_.size() - refused_ >= options.max_connections;
    if (stopping_ || (full && (refused_ >= kRefusedAtOnce || transport->tls()))) {
      transport->Close();
      return;
    }
    connection = std::make_shared<Connection>(shared_from_this(), std::move(transport), full);
    open_.emplace(connection.get(), connection);
    refused_ += full ? 1 : 0;
  }
  connection->Start();
}

void ConnectionSet::Remove(Connection* connection) {
  std::shared_ptr<Connection> removed;  // may be the last: freed outside the lock
  const std::lock_guard lock(mutex_);
  const auto found = open_.find(connection);
  if (found == open_.end()) return;
  removed = std::move(found->second);
  open_.erase(found);
  refused_ -= removed->refused() ? 1 : 0;
  removed_.notify_all();
}

size_t ConnectionSet::size() const {
  const std::lock_guard lock(mutex_);
  return open_.size();
}

void ConnectionSet::BeginStop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  for (const auto& connection : All()) connection->BeginStop();
}

bool ConnectionSet::WaitUntilEmpty(double seconds) {
  std::unique_lock lock(mutex_);
  return removed_.wait_for(lock, Seconds(seconds), [this] { return open_.empty(); });
}

void ConnectionSet::CutAll() {
  for (const auto& connection : All()) connection->Cut();
}

bool ConnectionSet::TakeBodyBytes(size_t bytes) {
  if (body_bytes_.fetch_add(bytes) + bytes <= options.max_bodies_bytes) return true;
  body_bytes_ -= bytes;
  return false;
}

std::vector<std::shared_ptr<Connection>> ConnectionSet::All() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Connection>> all;
  all.reserve(open_.size());
  for (const auto& [key, connection] : open_) all.push_back(connection);
  return all;
}

}  // namespace omnikv::server
