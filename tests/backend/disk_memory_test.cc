#include "backend/disk_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <random>

#include "../own_folder.h"
#include "backend/ref/ref_backend.h"

namespace omnikv::disk_memory_test {
namespace {

std::vector<std::byte> Bytes(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(n);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random() & 255);
  return bytes;
}

constexpr size_t kSize = size_t{5} << 20;

// Rows in any order, neighbours among them, more than one call takes.
TEST(DiskMemory, ReadsEachPieceToItsPlace) {
  const auto memory = *DiskMemory::Create(OwnFolder());
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
  // All are there when the call returns, whoever reads them.
  constexpr size_t kPart = size_t{16} << 10;
  for (int round = 0; round < 40; ++round) {
    std::vector<std::byte> all(kSize);
    pieces.clear();
    for (size_t at = kSize; at > 0;
         at -= kPart) {  // no neighbours; what is compared first comes last
      pieces.push_back({.from = buffer.as<std::byte>() + at - kPart,
                        .to = all.data() + at - kPart,
                        .bytes = kPart});
    }
    memory->Read(pieces);
    ASSERT_EQ(std::memcmp(all.data(), data.data(), kSize), 0);
  }
  EXPECT_TRUE(memory->TakeFailure().ok());
}

// Copies that were begun one after another end so: the later ones win.
TEST(DiskMemory, CopiesComeInTheirOrder) {
  const auto memory = *DiskMemory::Create(OwnFolder());
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
  const auto memory = *DiskMemory::Create(OwnFolder());
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
  EXPECT_TRUE(std::filesystem::is_empty(OwnFolder())) << "its files have no names";
}

// As if the disk had lost the end of a file.
TEST(DiskMemory, ADiskThatFailsEndsInASentence) {
  const auto memory = *DiskMemory::Create(OwnFolder());
  const Buffer buffer = *memory->Allocate(kSize, "test");
  int cut = 0;
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const std::string target = std::filesystem::read_symlink(file.path(), error);
    if (target.find("/omnikv_test_") == std::string::npos) continue;
    ASSERT_EQ(truncate(file.path().c_str(), 4096), 0);
    ++cut;
  }
  ASSERT_EQ(cut, 1);
  std::vector<std::byte> to(100);
  memory->Read({{.from = buffer.as<std::byte>(), .to = to.data(), .bytes = to.size()}});
  EXPECT_TRUE(memory->TakeFailure().ok());
  memory->Read({{.from = buffer.as<std::byte>() + 8192, .to = to.data(), .bytes = to.size()}});
  EXPECT_THAT(memory->TakeFailure().message(),
              ::testing::AllOf(::testing::HasSubstr(OwnFolder()),
                               ::testing::HasSubstr("K/V cannot be read there")));
  EXPECT_TRUE(memory->TakeFailure().ok()) << "it is said once";
  memory->Begin({.from = buffer.as<std::byte>() + 8192, .to = to.data(), .bytes = to.size()});
  memory->Await(memory->begun());
  EXPECT_FALSE(memory->TakeFailure().ok());
}

// A lane's signal is reached when what was copied there before it has come.
TEST(HostBackendOnDisk, LanesAreWaitedFor) {
  const auto backend = MakeRefBackend();
  ASSERT_TRUE(backend->KeepOnDisk(OwnFolder()).ok());
  const Buffer disk = *backend->AllocateOnDisk(kSize, "test");
  const std::vector<std::byte> data = Bytes(kSize, 5);
  backend->Upload(disk.as<>(), data.data(), kSize);
  for (int round = 0; round < 2; ++round) {
    std::vector<std::byte> before(kSize), a(kSize), b(kSize), c(kSize);
    const auto copy = [&](std::vector<std::byte>& to) {  // behind others that take longer
      for (int i = 0; i < 20; ++i) {
        backend->Copy(before.data(), disk.as<>(), kSize, Lane::kIn);
      }
      backend->Copy(to.data(), disk.as<>(), kSize, Lane::kIn);
    };
    copy(a);
    backend->Signal(1, Lane::kIn);
    copy(b);
    backend->WaitFor(1, Lane::kMain);
    ASSERT_EQ(a, data);
    backend->Join(Lane::kMain, Lane::kIn);
    ASSERT_EQ(b, data);
    copy(c);
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
}  // namespace omnikv::disk_memory_test
