#include "backend/disk_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <random>

#include "backend/ref/ref_backend.h"

namespace omnikv {
namespace {

std::string Folder() {
  const std::string folder = ::testing::TempDir() + "/disk_memory";
  std::filesystem::create_directories(folder);
  return folder;
}

std::vector<std::byte> Bytes(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(n);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random() & 255);
  return bytes;
}

constexpr size_t kSize = size_t{5} << 20;

// Rows in any order, neighbours among them, more than one call takes.
TEST(DiskMemory, ReadsEachPieceToItsPlace) {
  const auto memory = *DiskMemory::Create(Folder());
  const Buffer buffer = *memory->Allocate(kSize, "test");
  EXPECT_EQ(*std::max_element(buffer.as<std::byte>(), buffer.as<std::byte>() + kSize),
            std::byte{0});
  const std::vector<std::byte> data = Bytes(kSize, 1);
  memory->Write(buffer.as<std::byte>(), data.data(), kSize);
  EXPECT_EQ(std::memcmp(buffer.as<>(), data.data(), kSize), 0);  // the mapping has it too
  constexpr size_t kRow = 1536;
  std::mt19937 random(2);
  std::vector<size_t> rows;
  for (int i = 0; i < 900; ++i) {
    const size_t first = random() % (kSize / kRow - 100);
    for (size_t j = 0; j < (i % 100 == 0 ? 90u : 1u); ++j) rows.push_back(first + j);
  }
  std::vector<std::byte> got(rows.size() * kRow);
  std::vector<DiskMemory::Piece> pieces;
  for (size_t i = 0; i < rows.size(); ++i) {  // to places in another order
    std::byte* const to = got.data() + (i * 11 % rows.size()) * kRow;
    pieces.push_back({.from = buffer.as<std::byte>() + rows[i] * kRow, .to = to, .bytes = kRow});
  }
  ASSERT_NE(rows.size() % 11, 0u);
  memory->Expect(pieces);  // says nothing about places
  memory->Read(pieces);
  for (size_t i = 0; i < rows.size(); ++i) {
    ASSERT_EQ(std::memcmp(pieces[i].to, data.data() + rows[i] * kRow, kRow), 0) << "piece " << i;
  }
  EXPECT_EQ(memory->bytes_read(), rows.size() * kRow);
  EXPECT_TRUE(memory->TakeFailure().ok());
}

// Copies that were begun one after another end so: the later ones win.
TEST(DiskMemory, CopiesComeInTheirOrder) {
  const auto memory = *DiskMemory::Create(Folder());
  const Buffer buffer = *memory->Allocate(kSize, "test");
  const std::vector<std::byte> data = Bytes(kSize, 3);
  memory->Write(buffer.as<std::byte>(), data.data(), kSize);
  constexpr size_t kCopy = size_t{3} << 20;
  std::vector<std::byte> to(kCopy);
  for (int round = 0; round < 20; ++round) {
    uint64_t half = 0;
    size_t from = 0;
    for (size_t i = 0; i < 6; ++i) {
      from = (i * 131 + static_cast<size_t>(round) * 4099) % (kSize - kCopy);
      // Shorter ones between, which are read sooner.
      const size_t bytes = i % 2 == 0 ? kCopy : 100;
      memory->Begin({.from = buffer.as<std::byte>() + from, .to = to.data(), .bytes = bytes});
      if (i == 2) half = memory->begun();
    }
    memory->Await(half);
    memory->Await(memory->begun());
    ASSERT_EQ(std::memcmp(to.data(), data.data() + from, 100), 0) << round;
  }
}

TEST(DiskMemory, KnowsWhatIsItsOwn) {
  const auto memory = *DiskMemory::Create(Folder());
  std::byte own{};
  const std::byte* gone = nullptr;
  {
    const Buffer one = *memory->Allocate(1, "test");
    const Buffer two = *memory->Allocate(100, "test");
    EXPECT_TRUE(memory->Holds(one.as<>()));
    EXPECT_TRUE(memory->Holds(two.as<std::byte>() + 99));
    EXPECT_FALSE(memory->Holds(two.as<std::byte>() + 100));
    EXPECT_FALSE(memory->Holds(&own));
    gone = two.as<std::byte>();
    // What is still expected of memory that is given back does no harm.
    memory->Expect({{.from = gone, .bytes = 100}});
  }
  EXPECT_FALSE(memory->Holds(gone));
  EXPECT_TRUE(std::filesystem::is_empty(Folder())) << "its files have no names";
}

// A lane's signal is reached when what was copied there before it has come.
TEST(HostBackendOnDisk, LanesAreWaitedFor) {
  const auto backend = MakeRefBackend();
  ASSERT_TRUE(static_cast<HostBackend&>(*backend).KeepOnDisk(Folder()).ok());
  const Buffer disk = *backend->AllocateSharedLater(kSize, "test");
  const std::vector<std::byte> data = Bytes(kSize, 5);
  backend->Upload(disk.as<>(), data.data(), kSize);
  for (int round = 0; round < 10; ++round) {
    std::vector<std::byte> a(kSize), b(kSize), c(kSize);
    backend->Copy(a.data(), disk.as<>(), kSize, Lane::kIn);
    backend->Signal(1, Lane::kIn);
    backend->Copy(b.data(), disk.as<>(), kSize, Lane::kIn);
    backend->WaitFor(1, Lane::kMain);
    ASSERT_EQ(a, data);
    backend->Join(Lane::kMain, Lane::kIn);
    ASSERT_EQ(b, data);
    backend->Copy(c.data(), disk.as<>(), kSize, Lane::kIn);
    backend->Synchronize();
    ASSERT_EQ(c, data);
  }
  std::vector<std::byte> copy(kSize);
  backend->Upload(disk.as<std::byte>() + 100, disk.as<>(), 1000);  // a block to another
  backend->Download(copy.data(), disk.as<>(), 1100);
  EXPECT_EQ(std::memcmp(copy.data() + 100, data.data(), 1000), 0);
  EXPECT_TRUE(backend->TakeFailure().ok());
}

}  // namespace
}  // namespace omnikv
