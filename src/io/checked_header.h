// What files of our own begin with, for those who read and write them (checked_file.h).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

#include "io/checked_file.h"

namespace omnikv {

// Little-endian, as the machines are that this is built for.
static_assert(std::endian::native == std::endian::little);
struct CheckedHeader {
  char magic[8];
  uint32_t version;
  uint32_t text_bytes;
  uint64_t data_bytes;
  uint64_t checksum;  // XXH3 of the text, the bytes, and what stands above

  static constexpr size_t kSummed = 24;  // bytes of it that the checksum covers
};
static_assert(sizeof(CheckedHeader) == 32 &&
              offsetof(CheckedHeader, checksum) == CheckedHeader::kSummed);

// Errors: those of CheckedFile::Peek, for a file of `size` bytes, of which as many are in `header`
// as it has room for.
Status CheckHeader(const std::string& path, size_t size, FileKind kind,
                   const CheckedHeader& header);
// That a file has another checksum than its header says.
Status Damaged(const std::string& path);

}  // namespace omnikv
