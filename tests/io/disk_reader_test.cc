// Files of any size, by io_uring and by pread, and files of our own in one pass.
#include "io/disk_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "io/checked_reader.h"

namespace omnikv::disk_reader_test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr FileKind kKind = {.magic = "omnikvte", .version = 3, .name = "a file of tests"};
constexpr DiskReaderOptions kSmall = {.piece = 4096, .pieces = 5, .on_their_way = 3};

std::string Bytes(size_t n) {
  std::string bytes(n, '\0');
  uint32_t state = 1;
  for (char& c : bytes) c = static_cast<char>((state = state * 1664525 + 1013904223) >> 24);
  return bytes;
}

std::string_view View(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Runs both ways; the parameter is DiskReaderOptions::direct.
class DiskReaderTest : public testing::TestWithParam<bool> {
 protected:
  DiskReaderTest() {
    // Beside the program, which is on a disk more often than /tmp is.
    const fs::path here = fs::read_symlink("/proc/self/exe").parent_path();
    std::string name = (here / "disk_reader_XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  ~DiskReaderTest() override { fs::remove_all(folder_); }

  void SetUp() override {
    if (!GetParam()) return;
    std::ofstream(Path()) << "x";
    const auto probe = Reader(kSmall);
    if (!probe->direct()) GTEST_SKIP() << "this system reads by " << probe->how();
  }
  std::string Path() const { return (folder_ / "file").string(); }
  void Write(const std::string& bytes) const {
    std::ofstream(Path(), std::ios::binary | std::ios::trunc) << bytes;
  }
  std::unique_ptr<DiskReader> Reader(DiskReaderOptions options) const {
    options.direct = GetParam();
    auto reader = DiskReader::Open({Path()}, options);
    EXPECT_TRUE(reader.ok()) << reader.status().message();
    return std::move(*reader);
  }

  fs::path folder_;
};

INSTANTIATE_TEST_SUITE_P(, DiskReaderTest, testing::Values(true, false),
                         [](const auto& of) { return of.param ? "uring" : "pread"; });

TEST_P(DiskReaderTest, FilesOfAnySize) {
  constexpr size_t kMiB = size_t{1} << 20;
  for (const size_t size : {size_t{0}, size_t{1}, size_t{4095}, size_t{4096}, size_t{4097},
                            size_t{5 * 4096}, size_t{20 * 4096 + 1}, 3 * kMiB + 3}) {
    const std::string bytes = Bytes(size);
    Write(bytes);
    for (const DiskReaderOptions& options :
         {kSmall, DiskReaderOptions{.piece = 8192, .pieces = 1}, DiskReaderOptions()}) {
      const auto reader = Reader(options);
      EXPECT_EQ(reader->size(), size);
      std::string got;
      std::deque<int32_t> held;  // some are given back late, and not in order
      while (true) {
        while (!reader->HasBuffer() || std::ssize(held) > 2) {
          reader->GiveBack(held.back());
          held.pop_back();
        }
        const auto piece = reader->Next();
        ASSERT_TRUE(piece.ok()) << piece.status().message();
        if (!*piece) break;
        EXPECT_EQ(reinterpret_cast<uintptr_t>((*piece)->bytes.data()) % DiskReader::kAlignment, 0u);
        got += View((*piece)->bytes);
        held.push_back((*piece)->buffer);
      }
      EXPECT_TRUE(got == bytes) << size << " by pieces of " << options.piece;
      EXPECT_EQ(reader->direct(), GetParam()) << reader->how();
    }
  }
}

TEST_P(DiskReaderTest, WhatIsHeldDoesNotChange) {
  const std::string bytes = Bytes(40 * 4096);
  Write(bytes);
  const auto reader = Reader(kSmall);
  const auto first = reader->Next();
  ASSERT_TRUE(first.ok() && *first);
  for (size_t i = 1; i < 40; ++i) {
    const auto piece = reader->Next();
    ASSERT_TRUE(piece.ok() && *piece);
    EXPECT_TRUE(View((*piece)->bytes) == bytes.substr(i * 4096, 4096));
    reader->GiveBack((*piece)->buffer);
  }
  EXPECT_TRUE(View((*first)->bytes) == bytes.substr(0, 4096));
}

TEST_P(DiskReaderTest, FilesThatBecomeShorter) {
  Write(Bytes(40 * 4096));
  const auto reader = Reader({.piece = 4096, .pieces = 2});
  fs::resize_file(Path(), 20 * 4096 + 7);
  Status status;
  size_t got = 0;
  for (; status.ok() && got < 40; ++got) {
    const auto piece = reader->Next();
    status = piece.status();
    if (piece.ok()) reader->GiveBack((*piece)->buffer);
  }
  EXPECT_EQ(got, 21u);
  EXPECT_EQ(status.code(), StatusCode::kCorrupt);
  EXPECT_THAT(status.message(), HasSubstr("ends at byte 81927, but had 163840 bytes when it was"));
}

TEST_P(DiskReaderTest, MayGoWhileReadsAreOnTheirWay) {
  Write(Bytes(100 * 4096));
  for (int i = 0; i < 20; ++i) {
    const auto reader = Reader({.piece = 4096, .pieces = 16});
    const auto piece = reader->Next();
    ASSERT_TRUE(piece.ok());
  }
}

TEST_P(DiskReaderTest, WhatIsNoFile) {
  const auto open = [](const std::string& path) { return DiskReader::Open({path}, {}).status(); };
  EXPECT_EQ(open(folder_ / "none").code(), StatusCode::kNotFound);
  EXPECT_EQ(open(folder_).code(), StatusCode::kInvalidArgument);
  ASSERT_EQ(mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(open(folder_ / "pipe").message(), HasSubstr("is a device or a pipe"));
}

// Of all files that are there: the bytes of each, or the error that it ends with.
struct ManyFiles {
  std::vector<std::string> files;
  Status status;
};

ManyFiles ReadMany(DiskReader& reader) {
  ManyFiles read{.files = {""}};
  while (true) {
    const auto piece = reader.Next();
    if (!piece.ok()) read.status = piece.status();
    if (!piece.ok()) return read;
    if (*piece) {
      read.files.back() += View((*piece)->bytes);
      reader.GiveBack((*piece)->buffer);
      continue;
    }
    const auto more = reader.NextFile();
    if (!more.ok()) read.status = more.status();
    if (!more.ok() || !*more) return read;
    read.files.emplace_back();
  }
}

TEST_P(DiskReaderTest, ManyFilesOneAfterAnother) {
  std::vector<std::string> paths, bytes;
  for (const size_t size : {size_t{10'000}, size_t{0}, size_t{4096}, size_t{1}, size_t{70'001}}) {
    paths.push_back((folder_ / std::to_string(paths.size())).string());
    bytes.push_back(Bytes(size));
    std::ofstream(paths.back(), std::ios::binary) << bytes.back();
  }
  for (DiskReaderOptions options :
       {kSmall, DiskReaderOptions{.piece = 8192, .pieces = 1}, DiskReaderOptions()}) {
    options.direct = GetParam();
    const auto reader = DiskReader::Open(paths, options);
    ASSERT_TRUE(reader.ok());
    const ManyFiles read = ReadMany(**reader);
    EXPECT_TRUE(read.status.ok()) << read.status.message();
    EXPECT_TRUE(read.files == bytes);
    EXPECT_EQ((*reader)->direct(), GetParam()) << (*reader)->how();
    EXPECT_EQ((*reader)->path(), paths.back());
  }
}

TEST_P(DiskReaderTest, OneOfManyFilesIsMissing) {
  std::vector<std::string> paths;
  for (int i = 0; i < 4; ++i) {
    paths.push_back((folder_ / std::to_string(i)).string());
    if (i != 2) std::ofstream(paths.back(), std::ios::binary) << Bytes(5000);
  }
  DiskReaderOptions options = kSmall;
  options.direct = GetParam();
  const auto reader = DiskReader::Open(paths, options);
  ASSERT_TRUE(reader.ok());
  const ManyFiles read = ReadMany(**reader);
  EXPECT_EQ(read.status.code(), StatusCode::kNotFound);
  EXPECT_THAT(read.status.message(), HasSubstr(paths[2]));
  EXPECT_EQ(read.files, (std::vector<std::string>{Bytes(5000), Bytes(5000)}));
  // It is there by the time that it is wanted.
  const auto again = DiskReader::Open(paths, options);
  ASSERT_TRUE(again.ok());
  const auto first = (*again)->Next();
  ASSERT_TRUE(first.ok() && *first);
  (*again)->GiveBack((*first)->buffer);
  std::ofstream(paths[2], std::ios::binary) << Bytes(7);
  const ManyFiles all = ReadMany(**again);
  EXPECT_TRUE(all.status.ok()) << all.status.message();
  EXPECT_EQ(all.files.size(), 4u);
}

// What a file of our own holds, read in one pass: the text, then the bytes, or the error.
struct Whole {
  std::string text, bytes;
  Status status;
};

class CheckedReaderTest : public DiskReaderTest {
 protected:
  void WriteChecked(const std::string& text, const std::string& bytes) const {
    auto writer = CheckedFileWriter::Create(Path(), kKind, text);
    ASSERT_TRUE(writer.ok());
    (*writer)->Write(bytes.data(), bytes.size());
    ASSERT_TRUE((*writer)->Commit().ok());
  }
  Whole ReadAll(DiskReaderOptions options) const {
    options.direct = GetParam();
    auto file = CheckedReader::Open({{Path(), kKind}}, options);
    if (!file.ok()) return {.status = file.status()};
    Whole whole{.text = (*file)->text()};
    while (true) {
      auto piece = (*file)->Next();
      if (!piece.ok()) whole.status = piece.status();
      if (!piece.ok() || !*piece) break;
      whole.bytes += View((*piece)->bytes);
      (*file)->GiveBack((*piece)->buffer);
    }
    EXPECT_TRUE(!whole.status.ok() || whole.bytes.size() == (*file)->size());
    return whole;
  }
};

INSTANTIATE_TEST_SUITE_P(, CheckedReaderTest, testing::Values(true, false),
                         [](const auto& of) { return of.param ? "uring" : "pread"; });

TEST_P(CheckedReaderTest, TextsAndBytesOfAnySize) {
  for (const size_t text : {size_t{0}, size_t{7}, size_t{4064}, size_t{4065}, size_t{20'000}}) {
    for (const size_t size : {size_t{0}, size_t{1}, size_t{4096}, size_t{50'001}}) {
      WriteChecked(Bytes(text), Bytes(size));
      for (const int32_t pieces : {1, 4}) {
        const Whole whole = ReadAll({.piece = 4096, .pieces = pieces});
        EXPECT_TRUE(whole.status.ok()) << whole.status.message();
        EXPECT_TRUE(whole.text == Bytes(text) && whole.bytes == Bytes(size)) << text << " " << size;
      }
    }
  }
}

TEST_P(CheckedReaderTest, DamageIsFoundAtTheEndAtTheLatest) {
  const std::string bytes = Bytes(30'000);
  WriteChecked("what it is", bytes);
  std::ifstream in(Path(), std::ios::binary);
  const std::string good((std::istreambuf_iterator<char>(in)), {});
  for (const size_t at : {size_t{3}, size_t{9}, size_t{14}, size_t{18}, size_t{30}, size_t{40},
                          size_t{42}, size_t{9000}, good.size() - 1}) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 16);
    Write(bad);
    const Whole whole = ReadAll(kSmall);
    EXPECT_FALSE(whole.status.ok()) << at;
    if (at >= 24) {
      EXPECT_EQ(whole.status.message(),
                Path() + ": is damaged: its checksum is not that of what it holds");
    }
  }
  for (const size_t size : {size_t{0}, size_t{5}, size_t{31}, size_t{35}, size_t{9000}}) {
    Write(good.substr(0, size));
    EXPECT_EQ(ReadAll(kSmall).status.code(), StatusCode::kCorrupt) << size;
  }
  Write(good);
  EXPECT_TRUE(ReadAll(kSmall).bytes == bytes);
}

TEST_P(CheckedReaderTest, ManyFilesOneAfterAnother) {
  constexpr FileKind kOther = {.magic = "omnikvto", .version = 1, .name = "another file of tests"};
  std::vector<CheckedReader::Source> sources;
  for (const size_t size : {size_t{0}, size_t{20'000}, size_t{3}}) {
    const FileKind kind = sources.size() == 1 ? kOther : kKind;
    sources.push_back({(folder_ / std::to_string(size)).string(), kind});
    auto writer = CheckedFileWriter::Create(sources.back().path, kind, std::to_string(size));
    ASSERT_TRUE(writer.ok());
    (*writer)->Write(Bytes(size).data(), size);
    ASSERT_TRUE((*writer)->Commit().ok());
  }
  const auto read = [&]() -> Status {
    DiskReaderOptions options = kSmall;
    options.direct = GetParam();
    OKV_ASSIGN_OR_RETURN(const auto file, CheckedReader::Open(sources, options));
    while (true) {
      std::string bytes;
      while (true) {
        OKV_ASSIGN_OR_RETURN(const auto piece, file->Next());
        if (!piece) break;
        bytes += View(piece->bytes);
        file->GiveBack(piece->buffer);
      }
      EXPECT_EQ(file->text(), std::to_string(bytes.size()));
      EXPECT_TRUE(bytes == Bytes(bytes.size()));
      OKV_ASSIGN_OR_RETURN(const bool more, file->NextFile());
      if (!more) return {};
    }
  };
  EXPECT_TRUE(read().ok());
  {  // the last byte of the one in the middle
    std::fstream bytes(sources[1].path, std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekp(-1, std::ios::end);
    bytes.put('?');
  }
  EXPECT_EQ(read().message(),
            sources[1].path + ": is damaged: its checksum is not that of what it holds");
}

}  // namespace
}  // namespace omnikv::disk_reader_test
