// SHA-256, by OpenSSL, for names that are made of what they name: whoever chooses the bytes cannot
// find others of the same name.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

struct evp_md_ctx_st;

namespace omnikv {

class Sha256 {
 public:
  using Digest = std::array<uint8_t, 32>;

  Sha256();
  ~Sha256();

  void Add(const void* data, size_t bytes);
  // Of all that was added; nothing may be added behind it.
  Digest Value();

 private:
  struct Free {
    void operator()(evp_md_ctx_st* context) const;
  };
  std::unique_ptr<evp_md_ctx_st, Free> context_;
};

// 64 digits, 0 to 9 and a to f.
std::string HexOf(const Sha256::Digest& digest);

}  // namespace omnikv
