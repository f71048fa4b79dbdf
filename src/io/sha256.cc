#include "io/sha256.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <openssl/evp.h>

#include "base/check.h"

namespace omnikv {

void Sha256::Free::operator()(evp_md_ctx_st* context) const {
  EVP_MD_CTX_free(context);
}

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  OKV_CHECK(context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1,
            "SHA-256 cannot be had");
}

Sha256::~Sha256() = default;

void Sha256::Add(const void* data, size_t bytes) {
  OKV_CHECK(EVP_DigestUpdate(context_.get(), data, bytes) == 1, "SHA-256 failed");
}

Sha256::Digest Sha256::Value() {
  Digest digest;
  OKV_CHECK(EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr) == 1, "SHA-256 failed");
  return digest;
}

std::string HexOf(const Sha256::Digest& digest) {
  return fmt::format("{:02x}", fmt::join(digest, ""));
}

}  // namespace omnikv
