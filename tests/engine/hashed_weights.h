// Models whose weights nobody stores: whole numbers, hashed from a seed, a tensor's name and a
// place in it. scripts/make_head_goldens.py computes the same bits.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"

namespace omnikv {

// n values mean + scale * u, u in (-1, 1), as bf16.
inline std::vector<uint16_t> HashedWeights(uint64_t seed, std::string_view name, size_t n,
                                           double mean, double scale) {
  constexpr uint64_t kGoldenRatio = 0x9e3779b97f4a7c15;
  uint64_t state = 0xcbf29ce484222325;  // FNV-1a of the name
  for (const char c : name) state = (state ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  state += seed * kGoldenRatio;
  std::vector<uint16_t> values(n);
  for (uint16_t& value : values) {
    uint64_t z = state += kGoldenRatio;  // SplitMix64
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    z ^= z >> 31;
    const double u = static_cast<double>(2 * (z >> 40) + 1) / (1 << 24) - 1;
    value = Bf16FromF32(static_cast<float>(mean + scale * u));
  }
  return values;
}

// A Hugging Face folder of `golden`'s config and weights.
inline void WriteHashedModel(const nlohmann::json& golden, const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json") << golden.at("config").dump();
  nlohmann::ordered_json header;
  size_t end = 0;
  const auto count = [](const nlohmann::json& tensor) {
    size_t n = 1;
    for (const auto& size : tensor.at(1)) n *= size.get<size_t>();
    return n;
  };
  for (const auto& tensor : golden.at("weights")) {
    const size_t begin = end;
    end += 2 * count(tensor);
    header[tensor.at(0).get<std::string>()] = {
        {"dtype", "BF16"}, {"shape", tensor.at(1)}, {"data_offsets", {begin, end}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::ofstream file(folder / "model.safetensors", std::ios::binary);
  const uint64_t length = text.size();
  file.write(reinterpret_cast<const char*>(&length), sizeof(length));
  file << text;
  for (const auto& tensor : golden.at("weights")) {
    const auto weights =
        HashedWeights(golden.at("seed").get<uint64_t>(), tensor.at(0).get<std::string>(),
                      count(tensor), tensor.at(2).get<double>(), tensor.at(3).get<double>());
    file.write(reinterpret_cast<const char*>(weights.data()),
               static_cast<std::streamsize>(2 * weights.size()));
  }
  EXPECT_TRUE(file.flush().good()) << folder << ": the model cannot be written";
}

}  // namespace omnikv
