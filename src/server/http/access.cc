#include "server/http/access.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/rand.h>

#include <algorithm>

#include "base/check.h"

namespace omnikv::server {
namespace {

constexpr size_t kMaxIdBytes = 128;

std::string_view HeaderOf(const HttpRequest& request, const char* name) {
  const auto found = request.headers.find(name);
  return found == request.headers.end() ? std::string_view() : std::string_view(found->second);
}

std::array<uint8_t, 32> Sha256(std::string_view text) {
  std::array<uint8_t, 32> digest = {};
  unsigned int size = 0;
  OKV_CHECK(EVP_Digest(text.data(), text.size(), digest.data(), &size, EVP_sha256(), nullptr) == 1);
  return digest;
}

bool IsToken(std::string_view text, std::string_view more) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [more](char c) {
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
           more.find(c) != std::string_view::npos;
  });
}

}  // namespace

KeyRing::KeyRing(const std::vector<std::string>& keys) {
  for (const std::string& key : keys) digests_.push_back(Sha256(key));
}

bool KeyRing::Admits(const HttpRequest& request) const {
  if (digests_.empty()) return true;
  std::string_view key = HeaderOf(request, "x-api-key");
  if (key.empty()) {
    key = HeaderOf(request, "authorization");
    constexpr std::string_view kScheme = "bearer ";
    for (size_t i = 0; i < kScheme.size(); ++i) {
      if (i >= key.size() || (key[i] | 0x20) != kScheme[i]) return false;
    }
    key.remove_prefix(kScheme.size());
    key.remove_prefix(std::min(key.find_first_not_of(' '), key.size()));
  }
  const Digest digest = Sha256(key);
  // Digests are compared, not keys: their length is no secret. No comparison is left out.
  int admitted = 0;
  for (const Digest& known : digests_) {
    admitted |= CRYPTO_memcmp(digest.data(), known.data(), digest.size()) == 0 ? 1 : 0;
  }
  return admitted != 0;
}

Headers CorsHeaders(const HttpRequest& request, const std::vector<std::string>& origins) {
  Headers headers;
  if (origins.empty()) return headers;
  const bool all = std::find(origins.begin(), origins.end(), "*") != origins.end();
  const std::string_view origin = HeaderOf(request, "origin");
  headers.emplace_back("Vary", "Origin");
  if (origin.empty()) return headers;
  if (!all && std::find(origins.begin(), origins.end(), origin) == origins.end()) return headers;
  headers.emplace_back("Access-Control-Allow-Origin", all ? "*" : std::string(origin));
  headers.emplace_back("Access-Control-Expose-Headers", "x-request-id");
  return headers;
}

bool IsPreflight(const HttpRequest& request) {
  return request.method == "OPTIONS" && request.headers.count("origin") != 0 &&
         request.headers.count("access-control-request-method") != 0;
}

Headers PreflightHeaders(const HttpRequest& request) {
  Headers headers = {{"Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE"},
                     {"Access-Control-Max-Age", "600"}};
  // "*" would not cover Authorization; what the browser asks for does.
  const std::string_view asked = HeaderOf(request, "access-control-request-headers");
  if (IsToken(asked, "-_, ")) {
    headers.emplace_back("Access-Control-Allow-Headers", std::string(asked));
  }
  return headers;
}

std::string RequestId(const HttpRequest& request) {
  const std::string_view given = HeaderOf(request, "x-request-id");
  if (given.size() <= kMaxIdBytes && IsToken(given, "._-:+/=")) return std::string(given);
  std::array<uint8_t, 16> bytes = {};
  RAND_bytes(bytes.data(), static_cast<int>(bytes.size()));
  std::string id;
  for (const uint8_t byte : bytes) {
    id.push_back("0123456789abcdef"[byte >> 4]);
    id.push_back("0123456789abcdef"[byte & 15]);
  }
  return id;
}

}  // namespace omnikv::server
