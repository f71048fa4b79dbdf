// One reply in the making: the requests that a question becomes, and what is said of them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/scheduler.h"
#include "server/http/http.h"
#include "server/metrics.h"
#include "server/prompts.h"
#include "server/protocol/protocol.h"

namespace omnikv::server {

// What generations share.
struct Engines {
  const EngineCore& core;
  Scheduler& scheduler;
  std::shared_ptr<Metrics> metrics;
};

// Lives as long as its requests do. Its Answering is used on the engine's thread alone once the
// first request is handed over.
class Generation : public std::enable_shared_from_this<Generation> {
 public:
  // The body and the status of a failure before anything was said.
  using ErrorBody = std::function<std::string(const Status&)>;

  Generation(Engines engines, Question question, std::unique_ptr<Answering> answering,
             std::shared_ptr<HttpReply> reply, ErrorBody error_body);

  // Hands its requests over: each prompt as often as the question wants answers. `request` has what
  // they have in common; `filter` makes one for each (empty: none). REQUIRES std::shared_ptr to
  // this, once.
  using MakeFilter = std::function<std::shared_ptr<TokenFilter>()>;
  void Run(const Prompts& prompts, const Request& request, const MakeFilter& filter);

 private:
  void Begin();  // the stream, once
  void Say(std::string bytes);
  void Progress(int64_t done, int64_t total, int64_t cached);
  void Reads(const ReadPicture& picture);
  void Add(int32_t choice, const AnswerPiece& piece);
  void End(int32_t choice, const Result<RequestEnd>& end);
  void Fail(const Status& status);
  void CancelAll();
  Status Echo(const Prompts& prompts);
  Piece PieceOf(const AnswerPiece& piece) const;
  nlohmann::ordered_json Extra() const;

  Engines engines_;
  Question question_;
  std::unique_ptr<Answering> answering_;
  std::shared_ptr<HttpReply> reply_;
  ErrorBody error_body_;
  bool begun_ = false;
  bool over_ = false;                // nothing more is said
  int32_t left_ = 0;                 // choices that have not ended
  std::vector<RequestStats> stats_;  // of the first choice of each prompt
  Usage usage_;

  std::mutex mutex_;  // of what follows
  std::vector<Scheduler::Id> ids_;
  bool gone_ = false;
};

}  // namespace omnikv::server
