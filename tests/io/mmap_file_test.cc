#include "io/mmap_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string_view>

#include "base/memory.h"
#include "builders.h"

namespace omnikv {
namespace {

using testing::HasSubstr;

std::string_view View(const MmapFile& file) {
  return {reinterpret_cast<const char*>(file.data()), file.size()};
}

TEST(MmapFile, MapsAFileAndMoves) {
  const TempFolder folder;
  auto opened = MmapFile::Open(folder.Write("f", "hello"));
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  MmapFile file = std::move(*opened);
  EXPECT_EQ(View(file), "hello");
  EXPECT_EQ(opened->data(), nullptr);
  EXPECT_TRUE(file.Contains(file.data() + 4));
  EXPECT_FALSE(file.Contains(file.data() + 5));
  auto other = MmapFile::Open(folder.Write("g", "world!"));
  file = std::move(*other);
  EXPECT_EQ(View(file), "world!");
}

TEST(MmapFile, TellsTheReasonsApart) {
  const TempFolder folder;
  const std::string& path = folder.path();
  ASSERT_EQ(::mkfifo((path + "/fifo").c_str(), 0600), 0);
  ASSERT_EQ(::symlink("loop", (path + "/loop").c_str()), 0);
  folder.Write("empty", "");
  folder.Write("file", "x");
  folder.Write("lfs", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n");
  const struct {
    std::string name;
    StatusCode code;
    std::string message;
  } cases[] = {
      {"none", StatusCode::kNotFound, "none: no such file"},
      {"file/below", StatusCode::kNotFound, "file/below: no such file"},
      {"", StatusCode::kInvalidArgument, "is a directory, expected a file"},
      {"fifo", StatusCode::kInvalidArgument, "fifo: is a device or a pipe, expected a file"},
      {"loop", StatusCode::kFailed, "loop: cannot be opened for reading (Too many levels"},
      {"empty", StatusCode::kCorrupt, "empty: is empty (0 bytes)"},
      {"lfs", StatusCode::kCorrupt, "lfs: is a Git LFS pointer of 64 bytes"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.name);
    const auto file = MmapFile::Open(path + "/" + c.name);
    EXPECT_EQ(file.status().code(), c.code);
    EXPECT_THAT(file.status().message(), HasSubstr(c.message));
    EXPECT_THAT(file.status().message(), testing::StartsWith(path));
  }
}

TEST(MmapFile, SaysWhenAFileIsUnreadable) {
  if (::geteuid() == 0) GTEST_SKIP() << "root reads files of mode 0";
  const TempFolder folder;
  const std::string path = folder.Write("secret", "x");
  ASSERT_EQ(::chmod(path.c_str(), 0), 0);
  const auto file = MmapFile::Open(path);
  EXPECT_EQ(file.status().code(), StatusCode::kFailed);
  EXPECT_THAT(file.status().message(), HasSubstr("Permission denied"));
}

TEST(MmapFile, ReleaseLeavesMemoryAndKeepsTheContent) {
  constexpr size_t kBytes = size_t{32} << 20;
  const TempFolder folder;
  const std::string path = folder.Write("big", std::string(kBytes, 'x') + "end");
  const auto file = MmapFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  const auto sum = [&] {
    size_t n = 0;
    for (const char c : View(*file)) n += c == 'x';
    return n;
  };
  EXPECT_EQ(sum(), kBytes);
  const size_t before = ResidentMemory();
  file->Release(100, kBytes - 200);  // ends inside pages, which stay
  EXPECT_LT(ResidentMemory() + kBytes * 3 / 4, before);
  EXPECT_EQ(sum(), kBytes);
  file->Release(0, file->size());
  file->Release(file->size(), 0);
  file->Release(5, 10);  // no whole page
  EXPECT_EQ(sum(), kBytes);
}

}  // namespace
}  // namespace omnikv
