// The tokens that a grammar allows, as a scheduler asks for them.
#pragma once

#include <boost/asio/thread_pool.hpp>
#include <cstdint>
#include <future>
#include <span>
#include <vector>

#include "engine/scheduler.h"
#include "server/grammar/grammar.h"

namespace omnikv::server {

// Of one answer. The mask of the next token is made on a thread of `pool`, while the engine
// computes the step of the last one. Thread-compatible; `pool` must outlive it.
class GrammarFilter : public TokenFilter {
 public:
  GrammarFilter(Matcher matcher, int32_t vocab, boost::asio::thread_pool& pool);
  ~GrammarFilter() override;
  void Allowed(std::span<uint32_t> bits) override;
  void Take(int32_t token) override;

 private:
  void MakeMask();

  Matcher matcher_;
  boost::asio::thread_pool& pool_;
  std::vector<uint32_t> mask_;
  std::future<void> made_;  // of the mask; what it makes is touched by nobody else meanwhile
};

}  // namespace omnikv::server
