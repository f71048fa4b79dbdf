#include "io/file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <string_view>
#include <vector>

#include "builders.h"

namespace omnikv::file_test {
namespace {

using testing::HasSubstr;

std::string Content(const InputFile& file) {
  const auto text = file.ReadAll(file.size());
  EXPECT_TRUE(text.ok()) << text.status().message();
  return text.ok() ? *text : "";
}

TEST(InputFile, ReadsAFileAndMoves) {
  const TempFolder folder;
  auto opened = InputFile::Open(folder.Write("f", "hello"));
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  InputFile file = std::move(*opened);
  EXPECT_EQ(Content(file), "hello");
  char middle[3];
  EXPECT_TRUE(file.Read(1, 3, middle).ok());
  EXPECT_EQ(std::string_view(middle, 3), "ell");
  EXPECT_THAT(file.ReadAll(4).status().message(), HasSubstr("has 5 bytes, expected at most 4"));
  auto other = InputFile::Open(folder.Write("g", "world!"));
  file = std::move(*other);
  EXPECT_EQ(Content(file), "world!");
}

TEST(InputFile, TellsTheReasonsApart) {
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
    const auto file = InputFile::Open(path + "/" + c.name);
    EXPECT_EQ(file.status().code(), c.code);
    EXPECT_THAT(file.status().message(), HasSubstr(c.message));
    EXPECT_THAT(file.status().message(), testing::StartsWith(path));
  }
}

TEST(InputFile, SaysWhenAFileIsUnreadable) {
  if (::geteuid() == 0) GTEST_SKIP() << "root reads files of mode 0";
  const TempFolder folder;
  const std::string path = folder.Write("secret", "x");
  ASSERT_EQ(::chmod(path.c_str(), 0), 0);
  const auto file = InputFile::Open(path);
  EXPECT_EQ(file.status().code(), StatusCode::kFailed);
  EXPECT_THAT(file.status().message(), HasSubstr("Permission denied"));
}

// A file that is written anew while it is read, or a disk that fails, is a Status.
TEST(InputFile, SaysWhenAFileBecomesShorter) {
  const TempFolder folder;
  const std::string path = folder.Write("shrinks", std::string(size_t{3} << 20, 'x'));
  const auto file = InputFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  auto head = FileHead::Open(*file, file->size());
  ASSERT_TRUE(head.ok()) << head.status().message();
  ASSERT_TRUE(head->Fetch(10));
  ASSERT_EQ(::truncate(path.c_str(), size_t{2} << 20), 0);
  std::vector<char> bytes(file->size());
  const Status read = file->Read(0, bytes.size(), bytes.data());
  EXPECT_EQ(read.code(), StatusCode::kFailed);
  EXPECT_EQ(read.message(),
            path + ": ends at byte 2097152, but had 3145728 bytes when it was opened");
  EXPECT_TRUE(head->Fetch(size_t{2} << 20));
  EXPECT_EQ(head->data()[(2 << 20) - 1], std::byte{'x'});
  EXPECT_FALSE(head->Fetch((2 << 20) + 1));
  EXPECT_EQ(head->status().message(), read.message());
}

TEST(FileHead, HasALimit) {
  const TempFolder folder;
  const auto file = InputFile::Open(folder.Write("f", std::string(100, 'x')));
  auto head = FileHead::Open(*file, 50);
  ASSERT_TRUE(head.ok());
  EXPECT_EQ(head->size(), 100u);
  EXPECT_TRUE(head->Fetch(50));
  EXPECT_FALSE(head->Fetch(51));
  EXPECT_THAT(head->status().message(), HasSubstr("more than 50 bytes"));
}

TEST(InputFile, TellsOfALinkThatLeadsNowhere) {
  const TempFolder folder;
  const std::string path = folder.path() + "/link";
  ASSERT_EQ(::symlink("../blobs/5f3a", path.c_str()), 0);
  EXPECT_TRUE(MayExist(path));
  EXPECT_FALSE(MayExist(folder.path() + "/none"));
  const auto file = InputFile::Open(path);
  EXPECT_EQ(file.status().code(), StatusCode::kNotFound);
  EXPECT_THAT(file.status().message(), HasSubstr("a link to a file that is not there"));
}

}  // namespace
}  // namespace omnikv::file_test
