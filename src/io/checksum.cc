#include "io/checksum.h"

// All of it is compiled here, and nothing is linked.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace omnikv {

struct Checksum::State {
  XXH3_state_t xxh;
};

Checksum::Checksum() : state_(std::make_unique<State>()) {
  XXH3_64bits_reset(&state_->xxh);
}
Checksum::~Checksum() = default;
Checksum::Checksum(Checksum&& other) noexcept = default;
Checksum& Checksum::operator=(Checksum&& other) noexcept = default;

void Checksum::Add(const void* data, size_t bytes) {
  XXH3_64bits_update(&state_->xxh, data, bytes);
}

uint64_t Checksum::Value() const {
  return XXH3_64bits_digest(&state_->xxh);
}

}  // namespace omnikv
