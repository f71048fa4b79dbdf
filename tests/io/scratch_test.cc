#include "io/scratch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <numeric>
#include <utility>

namespace omnikv {
namespace {

std::vector<int> Numbers(size_t n) {
  std::vector<int> numbers(n);
  std::iota(numbers.begin(), numbers.end(), 7);
  return numbers;
}

TEST(Scratch, GivesBackWhatItGot) {
  const std::string folder = ::testing::TempDir() + "/scratch";
  std::filesystem::create_directories(folder);
  for (const std::string& where : {std::string(), folder}) {
    auto made = Scratch::Create(where);
    ASSERT_TRUE(made.ok()) << made.status().message();
    Scratch scratch = std::move(*made);
    const std::vector<int> numbers = Numbers(100'000);
    scratch.Append(numbers.data(), 4);
    scratch.Append(numbers.data() + 1, 4 * (numbers.size() - 1));
    EXPECT_TRUE(scratch.status().ok());
    EXPECT_EQ(scratch.size(), 4 * numbers.size());
    Scratch moved = std::move(scratch);
    std::vector<int> back(numbers.size() - 5);
    ASSERT_TRUE(moved.Read(20, 4 * back.size(), back.data()).ok());
    EXPECT_TRUE(std::equal(back.begin(), back.end(), numbers.begin() + 5));
    EXPECT_TRUE(moved.Read(moved.size(), 0, nullptr).ok());
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder)) << "its files have no names";
}

TEST(Scratch, SaysWhatTheDiskRefuses) {
  const auto made = Scratch::Create("/no/such/folder");
  ASSERT_FALSE(made.ok());
  EXPECT_THAT(made.status().message(), ::testing::HasSubstr("/no/such/folder"));
  auto scratch = Scratch::Create(::testing::TempDir());
  ASSERT_TRUE(scratch.ok());
  // As if the disk were full after 100 bytes.
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{100, before.rlim_max};
  const auto ignored = std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);
  const std::vector<int> numbers = Numbers(100);
  scratch->Append(numbers.data(), 4 * numbers.size());
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, ignored);
  ASSERT_FALSE(scratch->status().ok());
  EXPECT_THAT(scratch->status().message(), ::testing::HasSubstr("cannot be put away"));
}

}  // namespace
}  // namespace omnikv
