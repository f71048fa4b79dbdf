#include "text/tokenizer/work.h"

#include <fmt/format.h>

namespace omnikv::tok {

void Work::Overrun() const {
  throw WorkError{StatusCode::kResourceExhausted,
                  fmt::format("makes more than {} bytes out of {}", kAtLeast + kPerByte * given_,
                              given_)};
}

}  // namespace omnikv::tok
