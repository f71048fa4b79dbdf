// Names of tests that run once per value.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <tuple>

namespace omnikv {

inline std::string NameOf(const testing::TestParamInfo<std::string>& info) {
  return info.param;
}

inline std::string NameOfBoth(
    const testing::TestParamInfo<std::tuple<std::string, std::string>>& info) {
  return std::get<0>(info.param) + "_" + std::get<1>(info.param);
}

}  // namespace omnikv
