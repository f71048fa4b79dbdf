#include "io/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace omnikv {
namespace {

constexpr std::array<uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t BigEndian(const uint8_t* at) {
  return uint32_t{at[0]} << 24 | uint32_t{at[1]} << 16 | uint32_t{at[2]} << 8 | uint32_t{at[3]};
}

}  // namespace

void Sha256::Compress(const uint8_t* block) {
  std::array<uint32_t, 64> w;
  for (size_t i = 0; i < 16; ++i) w[i] = BigEndian(block + 4 * i);
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t a = w[i - 15];
    const uint32_t b = w[i - 2];
    w[i] = w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3)) + w[i - 7] +
           (std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10));
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t one = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                         ((e & f) ^ (~e & g)) + kRound[i] + w[i];
    const uint32_t two =
        (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + one;
    d = c;
    c = b;
    b = a;
    a = one + two;
  }
  const std::array<uint32_t, 8> more = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < more.size(); ++i) state_[i] += more[i];
}

void Sha256::Add(const void* data, size_t bytes) {
  const auto* at = static_cast<const uint8_t*>(data);
  bytes_ += bytes;
  while (bytes > 0) {
    if (filled_ == 0 && bytes >= block_.size()) {
      Compress(at);
      at += block_.size();
      bytes -= block_.size();
      continue;
    }
    const size_t n = std::min(bytes, block_.size() - filled_);
    std::memcpy(block_.data() + filled_, at, n);
    at += n;
    bytes -= n;
    filled_ += n;
    if (filled_ < block_.size()) return;
    Compress(block_.data());
    filled_ = 0;
  }
}

Sha256::Digest Sha256::Value() {
  const uint64_t bits = bytes_ * 8;
  // A bit, zeros, and the number of bits in the last eight bytes of a block.
  constexpr uint8_t kEnd = 0x80;
  Add(&kEnd, 1);
  constexpr std::array<uint8_t, 64> kZeros = {};
  const size_t room = block_.size() - filled_;
  Add(kZeros.data(), room >= 8 ? room - 8 : room + block_.size() - 8);
  std::array<uint8_t, 8> length;
  for (size_t i = 0; i < length.size(); ++i) {
    length[i] = static_cast<uint8_t>(bits >> (8 * (length.size() - 1 - i)));
  }
  Add(length.data(), length.size());
  Digest digest;
  for (size_t i = 0; i < digest.size(); ++i) {
    digest[i] = static_cast<uint8_t>(state_[i / 4] >> (8 * (3 - i % 4)));
  }
  return digest;
}

std::string HexOf(const Sha256::Digest& digest) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  for (const uint8_t byte : digest) {
    hex += kDigits[byte >> 4];
    hex += kDigits[byte & 15];
  }
  return hex;
}

}  // namespace omnikv
