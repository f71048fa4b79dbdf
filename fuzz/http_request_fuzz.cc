// Any bytes as requests of one connection, whole and torn: what is read does not depend on how the
// bytes are torn, and limits hold. The first byte says how they are.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "server/http/request_reader.h"

using namespace omnikv;
using namespace omnikv::server;

namespace {

constexpr ReaderLimits kLimits = {.max_header_bytes = 512, .max_body_bytes = 256};

// All requests of `bytes`, which come in pieces of `step`, and how they end, as a text.
std::string Read(std::string_view bytes, size_t step) {
  std::string text;
  std::string held;
  for (;;) {
    RequestReader reader(kLimits);
    for (;;) {
      const size_t used = reader.Put(held);
      OKV_CHECK(used <= held.size());
      held.erase(0, used);
      if (reader.state() == RequestReader::State::kDone) break;
      if (reader.state() == RequestReader::State::kFailed) {
        OKV_CHECK(reader.status() >= 400 && !reader.message().empty());
        return text + "failed";  // of two faults the one that is seen first gives the status
      }
      // A connection refuses lengths beyond the limit when it sees the head.
      if (reader.state() == RequestReader::State::kHeadDone &&
          reader.content_length().value_or(0) > kLimits.max_body_bytes) {
        return text + "too long";
      }
      if (used > 0 || reader.state() == RequestReader::State::kHeadDone) continue;
      OKV_CHECK(held.size() <= kLimits.max_header_bytes);
      if (bytes.empty()) return text + "unfinished";
      const size_t more = std::min(step, bytes.size());
      held += bytes.substr(0, more);
      bytes.remove_prefix(more);
    }
    const HttpRequest& request = reader.request();
    OKV_CHECK(request.body.size() <= kLimits.max_body_bytes);
    OKV_CHECK(!request.path.empty() && !request.method.empty());
    text += request.method + " " + request.path + "\n";
    for (const auto& [name, value] : request.query) text += name + "=" + value + "\n";
    for (const auto& [name, value] : request.headers) {
      OKV_CHECK(value.find_first_of(std::string_view("\r\n\0", 3)) == std::string::npos);
      text += name + ": " + value + "\n";
    }
    text += request.body + "\n" + (reader.keep_alive() ? "more\n" : "last\n");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const std::string whole = Read(bytes, kLimits.max_header_bytes);
  OKV_CHECK(Read(bytes, 1 + data[0] % 64) == whole);
  return 0;
}
