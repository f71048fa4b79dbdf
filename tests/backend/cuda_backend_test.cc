// What is particular to the CUDA backend: that it says why it cannot be had, its memory and its
// lanes. Where there is no card, only the first is tested, and
// the rest says why it is skipped.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "backend/cuda/kernel_names.h"
#include "backend/kv_format.h"
#include "backend/ref/ref_backend.h"
#include "base/log.h"
#include "base/memory.h"
#include "cuda_fixture.h"

namespace omnikv::cuda_backend_test {
namespace {

using testing::AnyOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

// scripts/gpu_check.sh also runs these with CUDA_VISIBLE_DEVICES empty, on a machine with a card.
TEST(NoCudaTest, OneSentenceSaysWhyThereIsNone) {
  const int cards = Cards();
  const auto backend = MakeCudaBackend({.device = cards});  // one past the last
  ASSERT_FALSE(backend.ok());
  EXPECT_EQ(backend.status().code(), StatusCode::kUnsupported);
  const std::string& message = backend.status().message();
  EXPECT_THAT(message, HasSubstr("CUDA"));
  EXPECT_THAT(message, Not(ContainsRegex("\n|\\.$")));  // one clause, for a sentence to a person
  if (cards == 0) {
    // "no CUDA-capable device is detected", "driver version is insufficient", ...
    EXPECT_THAT(message, AnyOf(HasSubstr("device"), HasSubstr("driver")));
  } else {
    EXPECT_THAT(message, HasSubstr(std::to_string(cards)));
  }
  EXPECT_FALSE(MakeCudaBackend({.device = -1}).ok());
}

TEST(KernelNames, AreWithoutNamespacesAndParameters) {
  EXPECT_EQ(cuda::ShortName("void omnikv::cuda::(anonymous namespace)::AttendKernel<__half, 64, 1>"
                            "(omnikv::AttendArgs, omnikv::cuda::Division)"),
            "AttendKernel<__half, 64, 1>");
  EXPECT_EQ(
      cuda::ShortName("void omnikv::cuda::(anonymous namespace)::TileKernel<(omnikv::DType)2, "
                      "1, 4>(omnikv::cuda::Work)"),
      "TileKernel<(DType)2, 1, 4>");
  EXPECT_EQ(cuda::ShortName("gemm"), "gemm");
}

// By a recording of the op that does not run.
TEST_F(CudaBackendTest, NamesTheKernelsOfAnOp) {
  const auto backend = Make();
  constexpr size_t kBytes = 4096;
  const CopyOp copy(*backend, kBytes);
  const auto from = backend->Allocate(kBytes, "test");
  const auto to = backend->Allocate(kBytes, "test");
  ASSERT_TRUE(from.ok() && to.ok());
  const std::vector<uint8_t> ones(kBytes, 1);
  backend->Upload(from->as(), ones.data(), kBytes);
  EXPECT_THAT(backend->KernelsOf(copy(from->as(), to->as())),
              testing::ElementsAre("Fetch<uint4, false>"));
  std::vector<uint8_t> copied(kBytes);
  backend->Download(copied.data(), to->as(), kBytes);
  EXPECT_THAT(copied, testing::Each(0));
}

TEST_F(CudaBackendTest, SomeHeadsTakeTheKernelsOfAll) {
  const auto backend = Make();
  const auto memory = backend->Allocate(16, "test");  // nothing runs
  ASSERT_TRUE(memory.ok());
  for (const int32_t n_rows : {1, 64}) {
    AttendArgs args{.q = memory->as<float>(),
                    .o = memory->as<float>(),
                    .kv = MakeKvView(nullptr, nullptr, 64, DType::kF16, 8, 128, 128),
                    .plan = AttnPlan::Dense(),
                    .n_rows = n_rows,
                    .n_seqs = 1,
                    .n_heads = 32,
                    .softcap = 30};  // which FlashInfer's kernels do not take
    for (const uint64_t heads : {0x00, 0x0c, 0x8a}) {
      args.heads = {heads};
      EXPECT_THAT(backend->KernelsOf(args),
                  testing::Contains(n_rows == 1 ? "AttendKernel<__half, 128, 1, 16>"
                                                : "AttendTile<__half, 128, false>"));
    }
  }
}

TEST_F(CudaBackendTest, NamesTheCard) {
  const auto backend = Make();
  cudaDeviceProp properties{};
  ASSERT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
  EXPECT_EQ(backend->Name(), "cuda:0");
  EXPECT_THAT(backend->Describe(), HasSubstr(properties.name));
  fmt::print("on {}\n", backend->Describe());
}

TEST_F(CudaBackendTest, RefusesMoreMemoryThanThereIsWithFigures) {
  const auto backend = Make();
  const size_t available = backend->AvailableMemory();
  for (const size_t bytes : {available + 64 * kMiB, size_t{1} << 50, ~size_t{0} >> 1}) {
    const auto buffer = backend->Allocate(bytes, "the K/V of a test");
    ASSERT_FALSE(buffer.ok());
    EXPECT_EQ(buffer.status().code(), StatusCode::kResourceExhausted);
    EXPECT_THAT(buffer.status().message(), HasSubstr("the K/V of a test"));
    EXPECT_THAT(buffer.status().message(), ContainsRegex("[0-9].*[0-9]"));  // asked for, and there
  }
  EXPECT_TRUE(backend->Allocate(kMiB, "less").ok());  // and goes on working
  backend->Synchronize();
}

TEST_F(CudaBackendTest, KeepsToTheMemoryItWasAllowed) {
  const auto backend = Make({.memory = size_t{2} << 30});
  EXPECT_LE(backend->AvailableMemory(), size_t{2} << 30);
  EXPECT_FALSE(backend->Allocate(size_t{2} << 30, "all of it").ok());
}

// A cap is the process's own, whatever others take.
TEST_F(CudaBackendTest, AnothersMemoryIsNotCounted) {
  constexpr size_t kCap = 3072 * kMiB;
  constexpr size_t kDriver = 1280 * kMiB;  // a context and what is added to it, at most
  const auto other = Make();
  if (other->AvailableMemory() < 4 * kCap) GTEST_SKIP() << "the card has too little free memory";
  const auto capped = Make({.memory = kCap});
  const size_t before = capped->AvailableMemory();
  EXPECT_GT(before + kDriver, kCap);
  const auto taken = other->Allocate(2 * kCap, "another's");
  ASSERT_TRUE(taken.ok());
  EXPECT_GE(capped->AvailableMemory() + 256 * kMiB, before);
  EXPECT_GT(Make({.memory = kCap})->AvailableMemory() + kDriver, kCap);
  const auto own = capped->Allocate(1024 * kMiB, "its own");
  ASSERT_TRUE(own.ok());
  EXPECT_LE(capped->AvailableMemory() + 1024 * kMiB, before);
}

TEST_F(CudaBackendTest, TooLowACapIsRefusedWithItsFlag) {
  const auto backend = MakeCudaBackend({.memory = kMiB});
  ASSERT_FALSE(backend.ok());
  EXPECT_EQ(backend.status().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(backend.status().message(), HasSubstr("`gpu_memory` is 1.00 MiB"));
}

TEST_F(CudaBackendTest, MemoryIsZeroed) {
  const auto backend = Make();
  const std::vector<uint8_t> dirt(16 * kMiB, 0xa5);
  for (const size_t bytes : {size_t{1}, size_t{4097}, 16 * kMiB, 16 * kMiB}) {
    const auto buffer = backend->Allocate(bytes, "test");
    ASSERT_TRUE(buffer.ok());
    EXPECT_EQ(buffer->size(), bytes);
    std::vector<uint8_t> got(bytes, 1);
    backend->Download(got.data(), buffer->as<void>(), bytes);
    EXPECT_EQ(std::count(got.begin(), got.end(), 0), static_cast<ptrdiff_t>(bytes));
    backend->Upload(buffer->as<void>(), dirt.data(), bytes);  // for the next to find
    backend->Synchronize();
  }
  EXPECT_TRUE(backend->Allocate(0, "nothing").ok());
}

TEST_F(CudaBackendTest, UploadsAndDownloads) {
  const auto backend = Make();
  std::mt19937 random(1);
  const auto buffer = backend->Allocate(65 * kMiB, "test");
  ASSERT_TRUE(buffer.ok());
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{3}, size_t{1000003}, 64 * kMiB}) {
    for (const size_t offset : {size_t{0}, size_t{5}, size_t{4096}}) {
      std::vector<uint8_t> sent(bytes);
      for (size_t i = 0; i < bytes; i += 97) sent[i] = static_cast<uint8_t>(random());
      std::vector<uint8_t> got(bytes, 7);
      backend->Upload(buffer->as<std::byte>() + offset, sent.data(), bytes);
      const std::vector<uint8_t> copy = sent;
      std::fill(sent.begin(), sent.end(), 9);  // the host memory may be reused on return
      backend->Download(got.data(), buffer->as<std::byte>() + offset, bytes);
      EXPECT_TRUE(got == copy) << bytes << " bytes at " << offset;
    }
  }
}

TEST_F(CudaBackendTest, PinnedMemoryMayBeReusedAfterAnUpload) {
  const auto backend = Make();
  constexpr size_t kBytes = 64 * kMiB;
  const auto buffer = backend->Allocate(kBytes, "test");
  ASSERT_TRUE(buffer.ok());
  void* pinned = nullptr;
  ASSERT_EQ(cudaMallocHost(&pinned, kBytes), cudaSuccess);
  std::memset(pinned, 1, kBytes);
  backend->Upload(buffer->as<void>(), pinned, kBytes);
  std::memset(static_cast<uint8_t*>(pinned) + kBytes / 2, 2, kBytes / 2);
  std::vector<uint8_t> got(kBytes);
  backend->Download(got.data(), buffer->as<void>(), kBytes);
  EXPECT_EQ(std::count(got.begin(), got.end(), 1), static_cast<ptrdiff_t>(kBytes));
  cudaFreeHost(pinned);
}

TEST_F(CudaBackendTest, HostAndOpsSeeSharedMemory) {
  const auto backend = Make();
  constexpr size_t kBytes = 32 * kMiB;
  const CopyOp copy(*backend, kBytes);
  const auto device = backend->Allocate(kBytes, "test");
  const auto shared = backend->AllocateShared(2 * kBytes, "test");
  ASSERT_TRUE(device.ok() && shared.ok());
  auto* bytes = shared->as<uint8_t>();
  EXPECT_EQ(std::count(bytes, bytes + 2 * kBytes, 0), static_cast<ptrdiff_t>(2 * kBytes));
  for (int turn = 1; turn <= 3; ++turn) {
    std::memset(bytes, turn, kBytes);
    backend->Enqueue(copy(bytes, device->as<void>()));
    backend->Enqueue(copy(device->as<void>(), bytes + kBytes));
    if (turn == 2) {
      backend->Await(backend->SetMark());
    } else {
      backend->Synchronize();
    }
    EXPECT_EQ(std::count(bytes + kBytes, bytes + 2 * kBytes, turn), static_cast<ptrdiff_t>(kBytes));
  }
}

// Large pieces are made ready by threads of their own, small ones at once.
TEST_F(CudaBackendTest, SharedMemoryThatComesLaterIsLikeAnyOther) {
  const auto backend = Make();
  const auto device = backend->Allocate(96 * kMiB, "test");
  ASSERT_TRUE(device.ok());
  std::vector<Buffer> pieces;
  const std::vector<size_t> sizes = {96 * kMiB, 64 * kMiB + 4096, 5, 33 * kMiB + 17, 0};
  for (const size_t bytes : sizes) {
    auto piece = backend->AllocateSharedLater(bytes, "test");
    ASSERT_TRUE(piece.ok()) << piece.status().message();
    EXPECT_EQ(piece->size(), bytes);
    pieces.push_back(std::move(*piece));
  }
  const Status ready = backend->AwaitShared();
  ASSERT_TRUE(ready.ok()) << ready.message();
  EXPECT_TRUE(backend->AwaitShared().ok());  // of nothing
  for (const Buffer& piece : pieces) {
    auto* bytes = piece.as<uint8_t>();
    const size_t n = piece.size();
    ASSERT_EQ(std::count(bytes, bytes + n, 0), static_cast<ptrdiff_t>(n));
    if (n == 0) continue;
    void* seen = nullptr;
    EXPECT_EQ(cudaHostGetDevicePointer(&seen, bytes, 0), cudaSuccess);
    EXPECT_EQ(seen, bytes);
    // There and back by the copy engine, whole; then its end by a kernel.
    for (size_t i = 0; i < n; ++i) bytes[i] = static_cast<uint8_t>(i * 7 + i / 4096);
    const std::vector<uint8_t> sent(bytes, bytes + n);
    backend->Copy(device->as<void>(), bytes, n, Lane::kIn);
    backend->Join(Lane::kOut, Lane::kIn);
    backend->Synchronize();
    std::memset(bytes, 1, n);
    backend->Copy(bytes, device->as<void>(), n, Lane::kOut);
    backend->Synchronize();
    EXPECT_TRUE(std::equal(sent.begin(), sent.end(), bytes)) << n << " bytes";
    if (n < 8192) continue;
    const CopyOp copy(*backend, 4096);
    const size_t end = n / 4096 * 4096 - 4096;
    backend->Enqueue(copy(bytes + end, device->as<void>()));
    backend->Enqueue(copy(device->as<void>(), bytes));
    backend->Synchronize();
    EXPECT_TRUE(std::equal(bytes, bytes + 4096, sent.begin() + static_cast<ptrdiff_t>(end)));
  }
}

TEST_F(CudaBackendTest, RefusesMorePinnedMemoryThanThereIsWithFigures) {
  const auto backend = Make();
  for (int i = 0; i < 50; ++i) {
    for (const size_t bytes : {AvailableMemory() + (size_t{4} << 30), size_t{1} << 50}) {
      const auto now = backend->AllocateShared(bytes, "the K/V of a test");
      const auto later = backend->AllocateSharedLater(bytes, "the K/V of a test");
      for (const auto* buffer : {&now, &later}) {
        ASSERT_FALSE(buffer->ok());
        EXPECT_EQ(buffer->status().code(), StatusCode::kResourceExhausted);
        EXPECT_THAT(buffer->status().message(), HasSubstr("pinned host memory for the K/V of"));
        EXPECT_THAT(buffer->status().message(), ContainsRegex("[0-9].*[0-9] .iB available"));
      }
    }
  }
  // Together too much, each for itself not.
  const size_t available = AvailableMemory();
  const size_t part = std::min(size_t{1} << 30, available / 8);
  {
    const auto first = backend->AllocateSharedLater(part, "one");
    ASSERT_TRUE(first.ok()) << first.status().message();
    EXPECT_FALSE(backend->AllocateSharedLater(available - part / 4, "another").ok());
  }
  EXPECT_TRUE(backend->AwaitShared().ok());
  EXPECT_TRUE(backend->AllocateShared(16 * kMiB, "less").ok());
}

// Whether or not anybody waited for it.
TEST_F(CudaBackendTest, PinnedMemoryIsGivenBack) {
  const auto backend = Make();
  const auto use = [&](bool await) {
    const auto a = backend->AllocateSharedLater(192 * kMiB, "test");
    const auto b = backend->AllocateSharedLater(64 * kMiB, "test");
    ASSERT_TRUE(a.ok() && b.ok());
    EXPECT_TRUE(!await || backend->AwaitShared().ok());
  };
  use(true);
  use(false);
  const size_t resident = ResidentMemory();
  const size_t on_card = FreeMemory();
  for (int i = 0; i < 20; ++i) use(i % 2 == 0);
  EXPECT_LE(ResidentMemory(), resident + 64 * kMiB);
  EXPECT_GE(FreeMemory() + 8 * kMiB, on_card);
}

// Printed, not judged: how long 4 GiB take by the driver, by us, and by us in eight pieces.
TEST_F(CudaBackendTest, PinnedMemoryInSeconds) {
  const auto backend = Make();
  const size_t bytes = std::min(size_t{4} << 30, AvailableMemory() / 4) / (16 * kMiB) * (16 * kMiB);
  const auto seconds = [](const auto& body) {
    const auto start = std::chrono::steady_clock::now();
    body();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  void* data = nullptr;
  const double driver = seconds([&] {
    ASSERT_EQ(cudaHostAlloc(&data, bytes, cudaHostAllocMapped | cudaHostAllocPortable),
              cudaSuccess);
  });
  cudaFreeHost(data);
  const double whole = seconds([&] {
    const auto buffer = backend->AllocateShared(bytes, "test");
    ASSERT_TRUE(buffer.ok()) << buffer.status().message();
    data = buffer->as<void>();
    EXPECT_EQ(static_cast<uint8_t*>(data)[bytes - 1], 0);
  });
  double called = 0;
  const double pieces = seconds([&] {
    std::vector<Buffer> all;
    called = seconds([&] {
      for (int i = 0; i < 8; ++i) {
        auto piece = backend->AllocateSharedLater(bytes / 8, "test");
        ASSERT_TRUE(piece.ok()) << piece.status().message();
        all.push_back(std::move(*piece));
      }
    });
    const Status ready = backend->AwaitShared();
    ASSERT_TRUE(ready.ok()) << ready.message();
  });
  fmt::print(
      "{} of pinned memory: {:.3f} s by cudaHostAlloc; given back too, {:.3f} s in one piece, "
      "{:.3f} "
      "s in 8, {:.3f} s of them in the foreground\n",
      HumanBytes(bytes), driver, whole, pieces, called);
}

TEST_F(CudaBackendTest, MarksAreReachedInOrder) {
  const auto backend = Make();
  constexpr size_t kBytes = kMiB;
  const CopyOp copy(*backend, kBytes);
  const auto device = backend->Allocate(32 * kBytes, "test");
  const auto shared = backend->AllocateShared(32 * kBytes, "test");
  ASSERT_TRUE(device.ok() && shared.ok());
  std::vector<Backend::Mark> marks;
  const std::vector<uint8_t> ones(32 * kBytes, 1);
  backend->Upload(device->as<void>(), ones.data(), ones.size());
  for (size_t i = 0; i < 32; ++i) {  // more than are kept
    backend->Enqueue(copy(device->as<std::byte>(), shared->as<std::byte>() + i * kBytes));
    marks.push_back(backend->SetMark());
  }
  for (size_t i = 0; i < 32; ++i) {
    backend->Await(marks[i]);
    EXPECT_EQ(shared->as<uint8_t>()[(i + 1) * kBytes - 1], 1) << "mark " << i;
  }
}

TEST_F(CudaBackendTest, LanesWaitWhereTheyJoin) {
  const auto backend = Make();
  constexpr size_t kBytes = 32 * kMiB;
  const auto device = backend->Allocate(kBytes, "test");
  const auto shared = backend->AllocateShared(2 * kBytes, "test");
  ASSERT_TRUE(device.ok() && shared.ok());
  auto* in = shared->as<uint8_t>();
  uint8_t* out = in + kBytes;
  for (int turn = 1; turn <= 4; ++turn) {
    std::memset(in, turn, kBytes);
    std::memset(out, 0, kBytes);
    backend->Join(Lane::kIn, Lane::kMain);
    backend->Copy(device->as<void>(), in, kBytes, Lane::kIn);
    if (turn % 2 == 0) {  // by way of the main lane, or not
      backend->Join(Lane::kMain, Lane::kIn);
      backend->Join(Lane::kOut, Lane::kMain);
    } else {
      backend->Join(Lane::kOut, Lane::kIn);
    }
    backend->Copy(out, device->as<void>(), kBytes, Lane::kOut);
    backend->Synchronize();  // of all lanes
    EXPECT_EQ(std::count(out, out + kBytes, turn), static_cast<ptrdiff_t>(kBytes));
  }
}

// A signal is waited for where it was given: not what comes after it on its lane.
TEST_F(CudaBackendTest, SignalsAreWaitedFor) {
  const auto backend = Make();
  constexpr size_t kBytes = 64 * kMiB;
  const auto device = backend->Allocate(2 * kBytes, "test");
  const auto shared = backend->AllocateShared(3 * kBytes, "test");
  ASSERT_TRUE(device.ok() && shared.ok());
  auto* in = shared->as<uint8_t>();
  auto* at = device->as<uint8_t>();
  uint8_t* out = in + 2 * kBytes;
  backend->WaitFor(7, Lane::kMain);  // was never given
  for (int turn = 1; turn <= 4; ++turn) {
    std::memset(in, turn, kBytes);
    std::memset(in + kBytes, 100 + turn, kBytes);
    std::memset(out, 0, kBytes);
    backend->Join(Lane::kIn, Lane::kMain);
    for (size_t i = 0; i < 2; ++i) {
      backend->Copy(at + i * kBytes, in + i * kBytes, kBytes, Lane::kIn);
      backend->Signal(i, Lane::kIn);
    }
    const size_t waited = turn % 2 == 0 ? 0 : 1;
    backend->WaitFor(waited, Lane::kMain);
    backend->Copy(out, at + waited * kBytes, kBytes, Lane::kMain);
    backend->Synchronize();
    EXPECT_EQ(std::count(out, out + kBytes, static_cast<int>(waited) * 100 + turn),
              static_cast<ptrdiff_t>(kBytes));
  }
}

TEST_F(CudaBackendTest, RecordingsHoldLanes) {
  const auto backend = Make();
  constexpr size_t kBytes = 16 * kMiB;
  const CopyOp copy(*backend, kBytes);
  const auto device = backend->Allocate(3 * kBytes, "test");
  const auto shared = backend->AllocateShared(kBytes, "test");
  ASSERT_TRUE(device.ok() && shared.ok());
  auto* a = device->as<std::byte>();
  // Work of a lane that nothing has waited for stays out of a recording.
  backend->Join(Lane::kOut, Lane::kMain);
  backend->Copy(shared->as<void>(), a, kBytes, Lane::kOut);
  const auto recording = backend->Record([&] {
    backend->Join(Lane::kIn, Lane::kMain);
    backend->Enqueue(copy(shared->as<void>(), a), Lane::kIn);
    backend->Join(Lane::kMain, Lane::kIn);
    backend->Enqueue(copy(a, a + kBytes));
    backend->Join(Lane::kIn, Lane::kMain);
    backend->Enqueue(copy(a + kBytes, a + 2 * kBytes), Lane::kIn);  // joined by the end
  });
  backend->Synchronize();
  for (int turn = 1; turn <= 3; ++turn) {
    std::memset(shared->as<void>(), turn, kBytes);
    backend->Replay(*recording);
    std::vector<uint8_t> got(kBytes);
    backend->Download(got.data(), a + 2 * kBytes, kBytes);
    EXPECT_EQ(std::count(got.begin(), got.end(), turn), static_cast<ptrdiff_t>(kBytes));
  }
}

// Fetches of one lane run into one another; who waits for the last waits for all. The last brings
// nothing, and so could end at once.
TEST_F(CudaBackendTest, AFetchEndsAfterTheFetchBeforeIt) {
  constexpr int32_t kRows = 2048;
  constexpr int64_t kRowBytes = 4096;
  constexpr size_t kBytes = kRows * kRowBytes;
  const auto backend = Make();
  const auto host = backend->AllocateShared(kBytes, "test");
  const auto arrays = backend->AllocateShared((kRows + 2) * sizeof(int32_t), "test");
  const auto device = backend->Allocate(4 * kBytes, "test");
  ASSERT_TRUE(host.ok() && arrays.ok() && device.ok());
  auto* rows = arrays->as<int32_t>();
  auto* counts = rows + kRows;  // of a fetch of all rows, and of one of none
  std::iota(rows, rows + kRows, 0);
  counts[0] = kRows;
  counts[1] = 0;
  const auto fetch = [&](size_t to, const int32_t* n) {
    backend->Enqueue(FetchRowsArgs{.from = host->as<std::byte>(),
                                   .to = device->as<std::byte>() + to * kBytes,
                                   .row_bytes = kRowBytes,
                                   .from_row = rows,
                                   .to_row = rows,
                                   .n = n,
                                   .capacity = kRows},
                     Lane::kIn);
  };
  const CopyOp copy(*backend, kBytes);
  const auto fetches = backend->Record([&] {
    backend->Join(Lane::kIn, Lane::kMain);
    for (size_t to : {0, 1, 2}) fetch(to, &counts[0]);
    fetch(3, &counts[1]);
    backend->Join(Lane::kMain, Lane::kIn);
    backend->Enqueue(
        copy(device->as<std::byte>() + 2 * kBytes, device->as<std::byte>() + 3 * kBytes));
  });
  ASSERT_NE(fetches, nullptr);
  for (int turn = 1; turn <= 20; ++turn) {
    std::memset(host->as<void>(), turn, kBytes);
    backend->Replay(*fetches);
    std::vector<uint8_t> bytes(4 * kBytes);
    backend->Download(bytes.data(), device->as<void>(), bytes.size());
    ASSERT_EQ(std::count(bytes.begin(), bytes.end(), turn), std::ssize(bytes)) << "turn " << turn;
  }
}

// The host attends with the queries and lists that the card had when it came to them, in recorded
// steps that are queued one behind the other, too: here each step's query is what the step before
// gave, and two attentions follow each other.
TEST_F(CudaBackendTest, TheHostAttendsInRecordedSteps) {
  const auto backend = Make({.make_host = [] { return Result(MakeRefBackend()); }});
  const auto reference = MakeRefBackend();
  constexpr int32_t kTokens = 48, kHead = 32, kHeads = 2, kSteps = 60;
  constexpr size_t kRow = kHeads * kHead;
  const auto shared = [&](size_t n) {
    auto buffer = backend->AllocateShared(n * 4, "test");
    EXPECT_TRUE(buffer.ok());
    return std::move(*buffer);
  };
  const Buffer kv = shared(kTokens * 2 * kHead);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (int32_t i = 0; i < kTokens * 2 * kHead; ++i) kv.as<float>()[i] = normal(random);
  const Buffer table = shared(3);
  std::iota(table.as<int32_t>(), table.as<int32_t>() + 3, 0);
  const Buffer o = shared(kRow);
  const Buffer lse = shared(kHeads);
  const std::vector<int32_t> numbers = {0, kTokens - 1, 0, 1, kTokens, 0, kTokens - 1,
                                        4, 1,           7, 9, 40};  // row, sequence, count, list
  std::vector<float> q(kRow);
  for (float& v : q) v = normal(random);
  const auto device = backend->Allocate(numbers.size() * 4 + kRow * 4, "test");
  ASSERT_TRUE(device.ok());
  auto* const ints = device->as<int32_t>();
  auto* const q_there = reinterpret_cast<float*>(ints + numbers.size());
  const auto attend_of = [&](const int32_t* at, const float* query) {
    AttendArgs attend{
        .q = query,
        .o = o.as<float>(),
        .lse = lse.as<float>(),
        .kv = MakeKvView(kv.as<std::byte>(), table.as<int32_t>(), 16, DType::kF32, 1, kHead, kHead),
        .rows = reinterpret_cast<const RowMeta*>(at),
        .seqs = reinterpret_cast<const SeqMeta*>(at + 2),
        .n_rows = 1,
        .n_seqs = 1,
        .n_heads = kHeads,
        .scale = 2};
    attend.plan.Add({.kind = SegmentKind::kList, .capacity = 4, .index = at + 8, .count = at + 7});
    return attend;
  };
  backend->Upload(ints, numbers.data(), numbers.size() * 4);
  backend->Upload(q_there, q.data(), kRow * 4);
  const CopyOp copy(*backend, kRow * 4);
  const auto step = [&] {
    for (int layer = 0; layer < 2; ++layer) {
      backend->Join(Lane::kHost, Lane::kMain);
      backend->Enqueue(attend_of(ints, q_there), Lane::kHost);
      backend->Join(Lane::kMain, Lane::kHost);
      backend->Enqueue(copy(o.as<void>(), q_there));
    }
  };
  step();  // eager
  const auto recorded = backend->Record(step);
  ASSERT_NE(recorded, nullptr);
  for (int i = 1; i < kSteps; ++i) backend->Replay(*recorded);
  std::vector<float> got(kRow);
  backend->Download(got.data(), q_there, kRow * 4);
  for (int i = 0; i < 2 * kSteps; ++i) {
    reference->Enqueue(attend_of(numbers.data(), q.data()));
    std::memcpy(q.data(), o.as<void>(), kRow * 4);
  }
  EXPECT_EQ(got, q);
  EXPECT_TRUE(backend->TakeFailure().ok());
}

// The host sums V by logits that the card picks for it, in recorded steps.
TEST_F(CudaBackendTest, TheHostSumsValuesInRecordedSteps) {
  const auto backend = Make({.make_host = [] { return Result(MakeRefBackend()); }});
  const auto reference = MakeRefBackend();
  constexpr int32_t kTokens = 48, kHead = 32, kHeads = 2, kListed = 4;
  const auto shared = [&](size_t n) {
    auto buffer = backend->AllocateShared(n * 4, "test");
    EXPECT_TRUE(buffer.ok());
    return std::move(*buffer);
  };
  const Buffer v = shared(kTokens * kHead);
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (int32_t i = 0; i < kTokens * kHead; ++i) v.as<float>()[i] = normal(random);
  const Buffer table = shared(3);
  std::iota(table.as<int32_t>(), table.as<int32_t>() + 3, 0);
  const Buffer picked = shared(kHeads * kListed);
  const Buffer o = shared(kHeads * kHead);
  const std::vector<int32_t> numbers = {0, kTokens - 1, 0, 1, kTokens, 0, kTokens - 1,
                                        4, 1,           7, 9, 40};  // row, sequence, count, list
  constexpr size_t kLogits = kHeads * kTokens;
  const auto device = backend->Allocate((numbers.size() + kLogits + kHeads * kHead) * 4, "test");
  ASSERT_TRUE(device.ok());
  auto* const ints = device->as<int32_t>();
  auto* const logits_there = reinterpret_cast<float*>(ints + numbers.size());
  float* const out_there = logits_there + kLogits;
  const auto pick_of = [&](const int32_t* at, const float* logits) {
    return PickLogitsArgs{.logits = logits,
                          .rows = reinterpret_cast<const RowMeta*>(at),
                          .index = at + 8,
                          .count = at + 7,
                          .out = picked.as<float>(),
                          .stride = kTokens,
                          .capacity = kListed,
                          .n_rows = 1,
                          .n_seqs = 1,
                          .n_heads = kHeads};
  };
  const auto sum_of = [&](const int32_t* at) {
    return SumValuesArgs{.logits = picked.as<float>(),
                         .kv = MakeKvPlanes(v.as<std::byte>(), v.as<std::byte>(),
                                            table.as<int32_t>(), 16, DType::kF32, 1, kHead, kHead),
                         .index = at + 8,
                         .count = at + 7,
                         .rows = reinterpret_cast<const RowMeta*>(at),
                         .seqs = reinterpret_cast<const SeqMeta*>(at + 2),
                         .o = o.as<float>(),
                         .capacity = kListed,
                         .n_rows = 1,
                         .n_seqs = 1,
                         .n_heads = kHeads};
  };
  backend->Upload(ints, numbers.data(), numbers.size() * 4);
  const auto recorded = backend->Record([&] {
    backend->Enqueue(pick_of(ints, logits_there));
    backend->Join(Lane::kHost, Lane::kMain);
    backend->Enqueue(sum_of(ints), Lane::kHost);
    backend->Join(Lane::kMain, Lane::kHost);
    backend->Enqueue(PickHeadsArgs{
        .from = o.as<float>(), .to = out_there, .n_heads = kHeads, .width = kHead, .n_rows = 1});
  });
  ASSERT_NE(recorded, nullptr);
  for (int step = 0; step < 20; ++step) {
    std::vector<float> logits(kLogits);
    for (float& logit : logits) logit = normal(random);
    backend->Upload(logits_there, logits.data(), kLogits * 4);
    backend->Replay(*recorded);
    std::vector<float> got(kHeads * kHead);
    backend->Download(got.data(), out_there, got.size() * 4);
    reference->Enqueue(pick_of(numbers.data(), logits.data()));
    reference->Enqueue(sum_of(numbers.data()));
    ASSERT_EQ(got, std::vector<float>(o.as<float>(), o.as<float>() + got.size())) << step;
  }
  EXPECT_TRUE(backend->TakeFailure().ok());
}

// A product waits for the op after it, but not where it is timed.
TEST_F(CudaBackendTest, TimedAloneAnOpDoesWhatItDoes) {
  const auto backend = Make();
  constexpr size_t kN = 64;
  const auto buffer = backend->Allocate((kN * kN + 2 * kN) * sizeof(float), "test");
  ASSERT_TRUE(buffer.ok());
  auto* w = buffer->as<float>();
  float* x = w + kN * kN;
  float* y = x + kN;
  std::vector<float> twice(kN * kN, 0.0f);
  for (size_t i = 0; i < kN; ++i) twice[i * kN + i] = 2;
  backend->Upload(w, twice.data(), twice.size() * sizeof(float));
  for (int turn = 1; turn <= 3; ++turn) {
    std::vector<float> values(kN);
    for (size_t i = 0; i < kN; ++i)
      values[i] = static_cast<float>(turn * 100) + static_cast<float>(i);
    backend->Upload(x, values.data(), kN * sizeof(float));
    const double seconds = backend->TimeAlone(
        LinearArgs{.x = x,
                   .w = {.data = w, .n_out = kN, .n_in = kN, .row_bytes = kN * sizeof(float)},
                   .y = y,
                   .n_rows = 1});
    EXPECT_GT(seconds, 0);
    std::vector<float> got(kN);
    backend->Download(got.data(), y, kN * sizeof(float));
    for (size_t i = 0; i < kN; ++i) EXPECT_EQ(got[i], 2 * values[i]) << i;
  }
}

}  // namespace
}  // namespace omnikv::cuda_backend_test
