#include "io/scratch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <filesystem>
#include <numeric>
#include <utility>

#include "io/nameless_file.h"

namespace omnikv::scratch_test {
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

TEST(MappedFile, IsMemoryWithRoomOfItsOwn) {
  const std::string folder = ::testing::TempDir() + "/mapped";
  std::filesystem::create_directories(folder);
  constexpr size_t kBytes = size_t{64} << 20;
  auto made = MappedFile::Create(folder, kBytes);
  ASSERT_TRUE(made.ok()) << made.status().message();
  MappedFile file = std::move(*made);
  EXPECT_EQ(file.size(), kBytes);
  EXPECT_EQ(file.data()[kBytes - 1], std::byte{0});
  file.data()[kBytes - 1] = std::byte{7};
  EXPECT_TRUE(std::filesystem::is_empty(folder)) << "it has no name";
  struct stat at {};
  ASSERT_EQ(fstat(file.descriptor(), &at), 0);
  EXPECT_GE(static_cast<size_t>(at.st_blocks) * 512, kBytes) << "holes may find the disk full";
  EXPECT_GT(*FreeRoom(folder), 0u);
}

TEST(MappedFile, SaysWhatTheDiskRefuses) {
  const auto nowhere = MappedFile::Create("/no/such/folder", 1);
  ASSERT_FALSE(nowhere.ok());
  EXPECT_EQ(nowhere.status().code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(FreeRoom("/no/such/folder").ok());
  // As if the disk were full after 100 bytes.
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{100, before.rlim_max};
  const auto ignored = std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);
  const auto full = MappedFile::Create(::testing::TempDir(), 4096);
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, ignored);
  ASSERT_FALSE(full.ok());
  EXPECT_EQ(full.status().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(full.status().message(), ::testing::HasSubstr("no room for a file of 4.00 KiB"));
}

}  // namespace
}  // namespace omnikv::scratch_test
