// The goldens of scripts/make_tokenizer_goldens.py, and the random strings they are about.
#pragma once

#include <cstdint>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace omnikv::golden {

inline std::string DataPath(const std::string& name) {
  return std::string(OMNIKV_SOURCE_DIR) + "/tests/text/tokenizer/data/" + name;
}

inline std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string((std::istreambuf_iterator<char>(file)), {});
}

inline nlohmann::json ReadJson(const std::string& name) {
  return nlohmann::json::parse(ReadFile(DataPath(name)));
}

// 64-bit FNV-1a, as 16 hex digits.
inline std::string Fnv(const void* data, size_t size) {
  uint64_t h = 0xcbf29ce484222325u;
  for (size_t i = 0; i < size; ++i) {
    h = (h ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3u;
  }
  std::string hex;
  for (int shift = 60; shift >= 0; shift -= 4) hex += "0123456789abcdef"[(h >> shift) & 15];
  return hex;
}
inline std::string HashIds(const std::vector<int32_t>& ids) {
  return Fnv(ids.data(), ids.size() * sizeof(int32_t));
}
inline std::string HashText(std::string_view text) {
  return Fnv(text.data(), text.size());
}

class Lcg {
 public:
  explicit Lcg(uint64_t seed) : state_(seed) {}
  uint32_t Below(uint32_t n) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>((state_ >> 33) % n);
  }

 private:
  uint64_t state_;
};

// The material of strings.json.
class Strings {
 public:
  Strings() : json_(ReadJson("strings.json")) {
    for (const auto& range : json_["excluded"]) {
      excluded_.emplace_back(range[0].get<uint32_t>(), range[1].get<uint32_t>());
    }
  }

  std::vector<std::string> Hard() const { return json_["hard"].get<std::vector<std::string>>(); }

  // The next string of the generator: random_string() of the script, call by call.
  std::string Random(Lcg* rng) const {
    std::string out;
    const uint32_t n = rng->Below(24);
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t kind = rng->Below(16);
      if (kind < 4) {
        const uint32_t size = 1 + rng->Below(8);
        for (uint32_t k = 0; k < size; ++k) {
          const uint32_t c = rng->Below(26);
          out += static_cast<char>((k == 0 && c % 4 == 0 ? 'A' : 'a') + c);
        }
      } else if (kind == 4) {
        out += ' ';
      } else if (kind == 5) {
        Pick("spaces", rng, &out);
      } else if (kind == 6) {
        const uint32_t size = 1 + rng->Below(7);
        for (uint32_t k = 0; k < size; ++k) out += static_cast<char>('0' + rng->Below(10));
      } else if (kind == 7) {
        Pick("punct", rng, &out);
      } else if (kind == 8) {
        Pick("snippets", rng, &out);
      } else if (kind == 9) {
        Append(0xC0 + rng->Below(0x100), &out);
        Append(0x300 + rng->Below(0x70), &out);
      } else if (kind == 10) {
        const uint32_t size = 1 + rng->Below(4);
        for (uint32_t k = 0; k < size; ++k) Append(0x4E00 + rng->Below(0x5000), &out);
      } else if (kind == 11) {
        Append(0xAC00 + rng->Below(11172), &out);
        Append(0x1100 + rng->Below(256), &out);
        Append(0x3040 + rng->Below(0xC0), &out);
      } else if (kind == 12) {
        Pick("emoji", rng, &out);
      } else if (kind == 13) {
        Append(0x370 + rng->Below(0x900), &out);
      } else if (kind == 14) {
        Append(rng->Below(0x3400), &out);
      } else {
        Append(rng->Below(0x110000), &out);
      }
    }
    return out;
  }

 private:
  void Pick(const char* list, Lcg* rng, std::string* out) const {
    const auto& items = json_[list];
    *out += items[rng->Below(static_cast<uint32_t>(items.size()))].get_ref<const std::string&>();
  }
  void Append(uint32_t c, std::string* out) const {
    bool replace = c >= 0xD800 && c < 0xE000;
    for (const auto& [low, high] : excluded_) replace = replace || (c >= low && c <= high);
    if (replace) c = '?';
    if (c < 0x80) {
      *out += static_cast<char>(c);
    } else if (c < 0x800) {
      *out += {static_cast<char>(0xC0 | (c >> 6)), static_cast<char>(0x80 | (c & 63))};
    } else if (c < 0x10000) {
      *out += {static_cast<char>(0xE0 | (c >> 12)), static_cast<char>(0x80 | ((c >> 6) & 63)),
               static_cast<char>(0x80 | (c & 63))};
    } else {
      *out += {static_cast<char>(0xF0 | (c >> 18)), static_cast<char>(0x80 | ((c >> 12) & 63)),
               static_cast<char>(0x80 | ((c >> 6) & 63)), static_cast<char>(0x80 | (c & 63))};
    }
  }

  nlohmann::json json_;
  std::vector<std::pair<uint32_t, uint32_t>> excluded_;
};

}  // namespace omnikv::golden
