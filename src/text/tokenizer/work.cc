#include "text/tokenizer/work.h"

#include <fmt/format.h>

#include "base/printable.h"

namespace omnikv::tok {

Status ToStatus(const WorkError& error, std::string_view step) {
  const Status status(error.code, error.message);
  return step.empty() ? status : status.Prefixed(Escaped(step, 2 * kPrintableBytes));
}

void Work::Overrun() const {
  throw WorkError{
      StatusCode::kResourceExhausted,
      fmt::format("makes more than {} bytes out of {}", kAtLeast + kPerByte * given_, given_)};
}

}  // namespace omnikv::tok
