#include "server/grammar_filter.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <utility>

#include "backend/sampling.h"

namespace omnikv::server {

GrammarFilter::GrammarFilter(Matcher matcher, int32_t vocab, boost::asio::thread_pool& pool)
    : matcher_(std::move(matcher)), pool_(pool), mask_(static_cast<size_t>(SeenWords(vocab))) {
  MakeMask();
}

GrammarFilter::~GrammarFilter() {
  made_.wait();
}

void GrammarFilter::MakeMask() {
  std::packaged_task<void()> make([this] { matcher_.FillMask(mask_); });
  made_ = make.get_future();
  boost::asio::post(pool_, [task = std::move(make)]() mutable { task(); });
}

void GrammarFilter::Allowed(std::span<uint32_t> bits) {
  made_.wait();
  std::copy(mask_.begin(), mask_.end(), bits.begin());
}

void GrammarFilter::Take(int32_t token) {
  made_.wait();
  matcher_.Accept(token);  // of a mask that it made
  MakeMask();
}

}  // namespace omnikv::server
