// A disk beside a card: what is copied, fetched and stored there passes through the host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "../own_folder.h"
#include "cuda_fixture.h"

namespace omnikv::cuda_disk_test {
namespace {

using ::testing::HasSubstr;

std::vector<std::byte> Bytes(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(n);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random() & 255);
  return bytes;
}

class CudaDiskTest : public CudaBackendTest {
 protected:
  static std::unique_ptr<Backend> MakeWithDisk(const CudaOptions& options = {}) {
    auto backend = Make(options);
    const Status made = backend->KeepOnDisk(OwnFolder());
    EXPECT_TRUE(made.ok()) << made.message();
    return backend;
  }
};

TEST_F(CudaDiskTest, CopiesPassInPartsAndInOrder) {
  constexpr size_t kSize = 37 * kMiB + 4096;  // parts that are whole, and one that is not
  for (const uint32_t delay : {0u, 200u}) {
    const auto backend = MakeWithDisk({.lane_delay_us = delay, .lane_delay_seed = 3});
    const Buffer disk = *backend->AllocateOnDisk(kSize, "test");
    const Buffer near = *backend->Allocate(kSize, "test");
    const std::vector<std::byte> one = Bytes(kSize, 1);
    const std::vector<std::byte> two = Bytes(kSize, 2);
    std::vector<std::byte> got(kSize);
    for (int round = 0; round < 3; ++round) {
      backend->Upload(disk.as<>(), one.data(), kSize);
      backend->Copy(near.as<>(), disk.as<>(), kSize, Lane::kIn);
      backend->Copy(near.as<>(), disk.as<std::byte>() + 4096, 8192, Lane::kIn);  // the later wins
      backend->Signal(0, Lane::kIn);
      backend->WaitFor(0, Lane::kMain);
      backend->Download(got.data(), near.as<>(), kSize);
      ASSERT_EQ(std::memcmp(got.data(), one.data() + 4096, 8192), 0);
      ASSERT_EQ(std::memcmp(got.data() + 8192, one.data() + 8192, kSize - 8192), 0);
      // The other way, and back after it.
      backend->Upload(near.as<>(), two.data(), kSize);
      backend->Join(Lane::kOut, Lane::kMain);
      backend->Copy(disk.as<>(), near.as<>(), kSize, Lane::kOut);
      backend->Join(Lane::kIn, Lane::kOut);
      const size_t last = kSize - kMiB;
      backend->Copy(near.as<>(), disk.as<std::byte>() + last, kMiB, Lane::kIn);
      backend->Join(Lane::kMain, Lane::kIn);
      backend->Download(got.data(), near.as<>(), kMiB);
      ASSERT_EQ(std::memcmp(got.data(), two.data() + last, kMiB), 0);
      backend->Join(Lane::kMain, Lane::kOut);
      backend->Download(got.data(), disk.as<>(), kSize);
      ASSERT_EQ(got, two);
      backend->Upload(disk.as<std::byte>() + 100, disk.as<>(), 5000);  // a block to another
      backend->Download(got.data(), disk.as<std::byte>() + 100, 5000);
      ASSERT_EQ(std::memcmp(got.data(), two.data(), 5000), 0);
    }
    backend->Synchronize();
    EXPECT_TRUE(backend->TakeFailure().ok());
    EXPECT_GT(backend->BytesFromDisk(), 3 * kSize);
  }
}

// Two layers that read one list, which changes from replay to replay, and a row that goes back.
TEST_F(CudaDiskTest, RecordedStepsFetchAndStore) {
  constexpr int64_t kRow = 1536;
  constexpr int32_t kRows = 4000;
  constexpr int32_t kCapacity = 300;
  constexpr int32_t kLists = 2;
  for (const uint32_t delay : {0u, 200u}) {
    const auto backend = MakeWithDisk({.lane_delay_us = delay, .lane_delay_seed = 7});
    std::vector<std::byte> rows[2];
    Buffer disk[2], slots[2];
    for (uint32_t layer = 0; layer < 2; ++layer) {
      rows[layer] = Bytes(size_t{kRows} * kRow, layer);
      disk[layer] = *backend->AllocateOnDisk(rows[layer].size(), "test");
      slots[layer] = *backend->Allocate(size_t{kLists} * kCapacity * kRow, "test");
      backend->Upload(disk[layer].as<>(), rows[layer].data(), rows[layer].size());
    }
    const Buffer lists = *backend->Allocate(4 * kLists * (2 * kCapacity + 4), "test");
    auto* const from_row = lists.as<int32_t>();
    int32_t* const to_row = from_row + kLists * kCapacity;
    int32_t* const n = to_row + kLists * kCapacity;
    int32_t* const home = n + kLists;  // where the first slot of each list goes, and that slot
    int32_t* const slot = home + kLists;
    const auto step = [&] {
      backend->Join(Lane::kIn, Lane::kMain);
      for (const int layer : {0, 1}) {
        backend->Enqueue(FetchRowsArgs{.from = disk[layer].as<std::byte>(),
                                       .to = slots[layer].as<std::byte>(),
                                       .row_bytes = kRow,
                                       .from_row = from_row,
                                       .to_row = to_row,
                                       .n = n,
                                       .capacity = kCapacity,
                                       .lists = kLists},
                         Lane::kIn);
        backend->Join(Lane::kMain, Lane::kIn);
      }
      backend->Join(Lane::kOut, Lane::kMain);
      for (const int layer : {0, 1}) {
        backend->Enqueue(FetchRowsArgs{.from = slots[layer].as<std::byte>(),
                                       .to = disk[1 - layer].as<std::byte>(),
                                       .row_bytes = kRow,
                                       .from_row = slot,
                                       .to_row = home,
                                       .n = n + 1,  // of each list 0 or more than 0
                                       .capacity = 1,
                                       .lists = 1},
                         Lane::kOut);
      }
      backend->Join(Lane::kMain, Lane::kOut);
    };
    const auto recording = backend->Record(step);
    ASSERT_NE(recording, nullptr);
    std::mt19937 random(5);
    for (int replay = 0; replay < 40; ++replay) {
      std::vector<int32_t> said(static_cast<size_t>(kLists * (2 * kCapacity + 4)));
      int32_t* const froms = said.data();
      int32_t* const tos = froms + kLists * kCapacity;
      int32_t* const counts = tos + kLists * kCapacity;
      counts[0] = static_cast<int32_t>(random() % kCapacity);
      counts[1] = replay % 2;
      for (int32_t l = 0; l < kLists; ++l) {
        for (int32_t i = 0; i < counts[l]; ++i) {
          froms[l * kCapacity + i] = static_cast<int32_t>(random() % kRows);
          tos[l * kCapacity + i] = l * kCapacity + i;
        }
      }
      counts[kLists] = static_cast<int32_t>(random() % kRows);  // home
      counts[2 * kLists] = kCapacity;                           // slot: the first of list 1
      backend->Upload(lists.as<>(), said.data(), 4 * said.size());
      replay % 5 == 4 ? step() : backend->Replay(*recording);
      std::vector<std::byte> got(slots[0].size());
      for (const int layer : {0, 1}) {
        backend->Download(got.data(), slots[layer].as<>(), got.size());
        for (int32_t l = 0; l < kLists; ++l) {
          for (int32_t i = 0; i < counts[l]; ++i) {
            const auto at = static_cast<size_t>(l * kCapacity + i);
            ASSERT_EQ(
                std::memcmp(got.data() + at * kRow, rows[layer].data() + froms[at] * kRow, kRow), 0)
                << "replay " << replay << ", layer " << layer << ", row " << at;
          }
        }
      }
      for (const int layer : {0, 1}) {
        if (counts[1] == 0) continue;
        backend->Download(got.data(), slots[layer].as<std::byte>() + kCapacity * kRow, kRow);
        std::memcpy(rows[1 - layer].data() + counts[kLists] * kRow, got.data(), kRow);
      }
      for (const int layer : {0, 1}) {
        backend->Download(got.data(), disk[layer].as<std::byte>() + counts[kLists] * kRow, kRow);
        ASSERT_EQ(std::memcmp(got.data(), rows[layer].data() + counts[kLists] * kRow, kRow), 0)
            << "replay " << replay << ", layer " << layer;
      }
    }
    // Replays that follow one another without a word from this thread.
    for (int replay = 0; replay < 20; ++replay) backend->Replay(*recording);
    backend->Synchronize();
    EXPECT_TRUE(backend->TakeFailure().ok());
  }
}

TEST_F(CudaDiskTest, WhatFailsEndsInASentence) {
  const auto backend = MakeWithDisk();
  const Buffer disk = *backend->AllocateOnDisk(kMiB, "test");
  const Buffer near = *backend->Allocate(kMiB, "test");
  // An op that would read there in place.
  const KvView kv{.k = {.base = disk.as<std::byte>()}, .v = {.base = disk.as<std::byte>()}};
  backend->Enqueue(StoreRowsArgs{.from = kv, .kv = kv});
  const Status in_place = backend->TakeFailure();
  EXPECT_EQ(in_place.code(), StatusCode::kUnsupported);
  EXPECT_THAT(in_place.message(), HasSubstr("uses K/V in place that lie on a disk"));
  // A disk that lost the end of a file; the card is not left waiting.
  std::string file;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const std::string target = std::filesystem::read_symlink(entry.path(), error);
    if (target.find("/omnikv_test_") != std::string::npos) file = entry.path();
  }
  ASSERT_EQ(truncate(file.c_str(), 0), 0);
  const CopyOp fetch(*backend, 4096);
  const auto recording =
      backend->Record([&] { backend->Enqueue(fetch(disk.as<>(), near.as<>())); });
  ASSERT_NE(recording, nullptr);
  backend->Replay(*recording);
  backend->Copy(near.as<>(), disk.as<>(), kMiB, Lane::kIn);
  backend->Synchronize();
  const Status failed = backend->TakeFailure();
  EXPECT_THAT(failed.message(), HasSubstr("K/V cannot be read there"));
  EXPECT_THAT(failed.message(), HasSubstr(OwnFolder()));
  ASSERT_EQ(truncate(file.c_str(), static_cast<off_t>(kMiB)), 0);
  backend->Replay(*recording);
  backend->Synchronize();
  EXPECT_TRUE(backend->TakeFailure().ok());
  const auto none = Make();
  EXPECT_EQ(none->KeepOnDisk("/no/such/folder").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(none->AllocateOnDisk(1, "test").status().code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace omnikv::cuda_disk_test
