// What is particular to the CUDA backend: that it says why it cannot be had, its memory, and that a
// recorded step gives what an eager one does. Where there is no card, only the first is tested, and
// the rest says why it is skipped.
#include "backend/cuda/cuda_backend.h"

#include <cuda_runtime.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "backend/kv_format.h"
#include "base/log.h"
#include "base/memory.h"

namespace omnikv {
namespace {

using testing::AnyOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

constexpr size_t kMiB = size_t{1} << 20;

int Cards() {
  int n = 0;
  if (cudaGetDeviceCount(&n) != cudaSuccess) n = 0;
  static_cast<void>(cudaGetLastError());
  return n;
}

size_t FreeMemory() {
  size_t free = 0;
  size_t total = 0;
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  return free;
}

std::unique_ptr<Backend> Make(const CudaOptions& options = {}) {
  auto backend = MakeCudaBackend(options);
  EXPECT_TRUE(backend.ok()) << backend.status().message();
  return backend.ok() ? std::move(*backend) : nullptr;
}

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

class CudaBackendTest : public testing::Test {
 protected:
  void SetUp() override {
    if (Cards() == 0) GTEST_SKIP() << MakeCudaBackend({}).status().message();
  }
};

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
  EXPECT_THAT(backend.status().message(), HasSubstr("--gpu-memory is 1.00 MiB"));
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

// A row of `bytes` from one place to another, as an op.
struct CopyOp {
  CopyOp(Backend& backend, size_t bytes) : row_bytes(static_cast<int64_t>(bytes)) {
    auto zeros = backend.AllocateShared(8, "test");
    EXPECT_TRUE(zeros.ok());
    numbers = std::move(*zeros);
    numbers.as<int32_t>()[1] = 1;
  }
  Op operator()(const void* from, void* to) const {
    return FetchRowsArgs{.from = static_cast<const std::byte*>(from),
                         .to = static_cast<std::byte*>(to),
                         .row_bytes = row_bytes,
                         .from_row = numbers.as<int32_t>(),
                         .to_row = numbers.as<int32_t>(),
                         .n = numbers.as<int32_t>() + 1,
                         .capacity = 1};
  }

  int64_t row_bytes;
  Buffer numbers;  // 0, 1
};

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

// The memory of a small model on one backend, and a step of it: every op that omnikv's policy
// needs.
class TinyModel {
 public:
  static constexpr int32_t kDim = 128, kHeads = 4, kKvHeads = 2, kHead = 64, kFfn = 256;
  static constexpr int32_t kVocab = 500, kCapacity = 320, kPick = 24;
  static constexpr int32_t kRing = 64;

  explicit TinyModel(Backend& backend) : backend_(backend) {
    std::mt19937 random(7);  // the same for each
    std::normal_distribution<float> normal(0.0f, 0.05f);
    const auto weights = [&](int64_t n_out, int64_t n_in) {
      std::vector<Bf16> values(static_cast<size_t>(n_out * n_in));
      for (Bf16& v : values) v = Bf16FromF32(normal(random));
      void* data = Room(values.size() * sizeof(Bf16));
      backend_.Upload(data, values.data(), values.size() * sizeof(Bf16));
      return WeightRef{.format = DType::kBF16,
                       .data = data,
                       .n_out = n_out,
                       .n_in = n_in,
                       .row_bytes = n_in * 2};
    };
    embedding_ = weights(kVocab, kDim);
    wq_ = weights(kHeads * kHead, kDim);
    wk_ = weights(kKvHeads * kHead, kDim);
    wv_ = weights(kKvHeads * kHead, kDim);
    wo_ = weights(kDim, kHeads * kHead);
    gate_ = weights(kFfn, kDim);
    up_ = weights(kFfn, kDim);
    down_ = weights(kDim, kFfn);
    norm_ = Send(std::vector<float>(kDim, 1.0f));
    std::vector<float> inv_freq;
    for (int i = 0; i < kHead / 2; ++i) inv_freq.push_back(std::pow(1e4f, -2.0f * i / kHead));
    inv_freq_ = Send(inv_freq);
    std::vector<int32_t> table;
    for (int32_t b = 0; b < kCapacity / 16; ++b) table.push_back((b * 7 + 3) % (kCapacity / 16));
    table_ = Send(table);
    weight_ = Send(std::vector<float>{1.0f});
    kv_ = MakeKvView(static_cast<std::byte*>(Room(
                         static_cast<size_t>(kCapacity) *
                         static_cast<size_t>(KvRowBytes(DType::kF16, kKvHeads, kHead, kHead)))),
                     table_, 16, DType::kF16, kKvHeads, kHead, kHead);
    x_ = Floats(kDim);
    y_ = Floats(kDim);
    z_ = Floats(kDim);
    q_ = Floats(kHeads * kHead);
    o_ = Floats(kHeads * kHead);
    f_ = Floats(kFfn);
    cos_sin_ = Floats(kHead);
    scores_ = Floats(kCapacity);
    reduced_ = Floats(kCapacity);
    logits_ = Floats(kVocab);
    index_ = Ints(kPick);
    ints_ = Ints(8);  // token, count, candidates, pick, bounds
    out_ = Ints(kRing);
    step_ = reinterpret_cast<uint32_t*>(Ints(1));
    row_ = static_cast<RowMeta*>(Room(sizeof(RowMeta)));
    seq_ = static_cast<SeqMeta*>(Room(sizeof(SeqMeta)));
    sample_ = static_cast<SampleMeta*>(Room(sizeof(SampleMeta)));
    seen_ = reinterpret_cast<uint32_t*>(Ints(static_cast<size_t>(SeenWords(kVocab))));
  }

  // One token through a layer that looks at everything, and one that reads what it chose.
  // `chooses`: and on to the next token, as `draws` says by the settings of SetSampling.
  void EnqueueStep(bool chooses = false, bool draws = false) {
    const AttnPlan dense = AttnPlan::Dense();
    AttnPlan sparse;
    sparse.Add(
        {.kind = SegmentKind::kList, .capacity = kPick, .index = index_, .count = ints_ + 1});
    sparse.Add({.bounds = ints_ + 4});
    Run(EmbedArgs{.tokens = ints_, .table = embedding_, .x = x_, .n_rows = 1});
    Run(RopeTableArgs{.rows = row_,
                      .inv_freq = inv_freq_,
                      .cos_sin = cos_sin_,
                      .n_freq = kHead / 2,
                      .n_rows = 1});
    Run(PlanRangeArgs{.seqs = seq_,
                      .n_seqs = 1,
                      .budget = kPick,
                      .tail = 8,
                      .min_recent = 1,
                      .bounds = ints_ + 4,
                      .n_candidates = ints_ + 2,
                      .n_pick = ints_ + 3});
    EnqueueAttention(nullptr, dense, ScoreKind::kHeadMax);
    Run(ScoreReduceArgs{.logits = scores_,
                        .out = reduced_,
                        .rows = row_,
                        .stride = kCapacity,
                        .ring = 1,
                        .n_heads = 1,
                        .n_rows = 1});
    Run(TopKArgs{.scores = reduced_,
                 .weights = weight_,
                 .seqs = seq_,
                 .n_candidates = ints_ + 2,
                 .n_pick = ints_ + 3,
                 .index = index_,
                 .count = ints_ + 1,
                 .stride = kCapacity,
                 .window = 1,
                 .capacity = kPick,
                 .n_seqs = 1});
    EnqueueFfn();
    EnqueueAttention(z_, sparse, ScoreKind::kNone);
    EnqueueFfn();
    Run(NormLogitsArgs{
        .in = In(z_), .head = embedding_, .logits = logits_, .n_rows = 1, .n_out = 1});
    if (!chooses) return;
    Run(NextTokenArgs{.logits = logits_,
                      .tokens = ints_,
                      .rows = row_,
                      .seqs = seq_,
                      .sample = draws ? sample_ : nullptr,
                      .seen = draws ? seen_ : nullptr,
                      .out = out_,
                      .step = step_,
                      .vocab = kVocab,
                      .ring = kRing,
                      .n_rows = 1});
  }

  // What changes from token to token.
  void SetToken(int32_t token, int32_t pos) {
    const RowMeta row{0, pos};
    const SeqMeta seq{
        .q_begin = 0, .q_len = 1, .kv_len = pos + 1, .table_off = 0, .prompt_len = 10};
    backend_.Upload(ints_, &token, sizeof(token));
    backend_.Upload(row_, &row, sizeof(row));
    backend_.Upload(seq_, &seq, sizeof(seq));
  }

  void SetStep(uint32_t step) { backend_.Upload(step_, &step, sizeof(step)); }
  void SetSampling(const SampleMeta& meta) {
    const std::vector<uint32_t> none(static_cast<size_t>(SeenWords(kVocab)), 0);
    backend_.Upload(sample_, &meta, sizeof(meta));
    backend_.Upload(seen_, none.data(), none.size() * 4);
  }

  // Logits and chosen tokens, bit by bit.
  std::vector<uint32_t> Output() const {
    std::vector<uint32_t> out(kVocab + kPick + 8);
    backend_.Download(out.data(), logits_, kVocab * 4);
    backend_.Download(out.data() + kVocab, index_, kPick * 4);
    backend_.Download(out.data() + kVocab + kPick, ints_, 8 * 4);
    return out;
  }

  // Tokens that NextToken chose, from the first step on.
  std::vector<int32_t> Chosen(size_t n) const {
    std::vector<int32_t> out(n);
    backend_.Download(out.data(), out_, n * 4);
    return out;
  }

 private:
  void* Room(size_t bytes) {
    auto buffer = backend_.Allocate(bytes, "test");
    EXPECT_TRUE(buffer.ok()) << buffer.status().message();
    buffers_.push_back(std::move(*buffer));
    return buffers_.back().as<void>();
  }
  float* Floats(size_t n) { return static_cast<float*>(Room(4 * n)); }
  int32_t* Ints(size_t n) { return static_cast<int32_t*>(Room(4 * n)); }
  template <typename T>
  T* Send(const std::vector<T>& values) {
    auto* data = static_cast<T*>(Room(values.size() * sizeof(T)));
    backend_.Upload(data, values.data(), values.size() * sizeof(T));
    return data;
  }
  void Run(const Op& op) { backend_.Enqueue(op); }
  Residual In(const float* y) const {
    return {.x = x_, .y = y, .norm = norm_, .eps = 1e-5f, .d = kDim};
  }

  void EnqueueAttention(const float* pending, const AttnPlan& plan, ScoreKind score) {
    Run(NormQkvRopeAppendArgs{.in = In(pending),
                              .wq = wq_,
                              .wk = wk_,
                              .wv = wv_,
                              .cos_sin = cos_sin_,
                              .n_freq = kHead / 2,
                              .q = q_,
                              .n_heads = kHeads,
                              .kv = kv_,
                              .rows = row_,
                              .seqs = seq_,
                              .n_rows = 1});
    Run(AttendArgs{.q = q_,
                   .o = o_,
                   .kv = kv_,
                   .plan = plan,
                   .rows = row_,
                   .seqs = seq_,
                   .n_rows = 1,
                   .n_seqs = 1,
                   .n_heads = kHeads,
                   .scale = 0.125f,
                   .score = score,
                   .scores = score == ScoreKind::kNone ? nullptr : scores_,
                   .score_stride = kCapacity});
    Run(LinearArgs{.x = o_, .w = wo_, .y = y_, .n_rows = 1});
  }
  void EnqueueFfn() {
    Run(NormGatedFfnArgs{.in = In(y_), .gate = gate_, .up = up_, .out = f_, .n_rows = 1});
    Run(LinearArgs{.x = f_, .w = down_, .y = z_, .n_rows = 1});
  }

  Backend& backend_;
  std::vector<Buffer> buffers_;
  WeightRef embedding_, wq_, wk_, wv_, wo_, gate_, up_, down_;
  KvView kv_;
  float *norm_, *inv_freq_, *weight_, *x_, *y_, *z_, *q_, *o_, *f_, *cos_sin_;
  float *scores_, *reduced_, *logits_;
  int32_t *table_, *index_, *ints_, *out_;
  uint32_t* step_;
  RowMeta* row_;
  SeqMeta* seq_;
  SampleMeta* sample_;
  uint32_t* seen_;
};

// 50 tokens by replay and by eager steps, from an empty bank on.
TEST_F(CudaBackendTest, FiftyReplaysGiveWhatEagerStepsDo) {
  const auto a = Make();
  const auto b = Make();
  TinyModel eager(*a);
  TinyModel replayed(*b);
  const auto untouched = replayed.Output();
  const auto recording = b->Record([&] { replayed.EnqueueStep(); });
  EXPECT_TRUE(replayed.Output() == untouched) << "recording ran something";
  for (int32_t t = 0; t < 50; ++t) {
    const int32_t token = t * 131 % TinyModel::kVocab;
    eager.SetToken(token, t);
    eager.EnqueueStep();
    replayed.SetToken(token, t);
    b->Replay(*recording);
    ASSERT_TRUE(eager.Output() == replayed.Output()) << "token " << t;
  }
  // Recordings and eager steps mix.
  for (int32_t t = 50; t < 60; ++t) {
    eager.SetToken(t, t);
    eager.EnqueueStep();
    replayed.SetToken(t, t);
    if (t % 2 == 0) {
      replayed.EnqueueStep();
    } else {
      b->Replay(*recording);
    }
    ASSERT_TRUE(eager.Output() == replayed.Output()) << "token " << t;
  }
}

// Replays that go on by themselves against steps that the host leads.
TEST_F(CudaBackendTest, StepsThatChooseNeedNoHost) {
  const auto a = Make();
  const auto b = Make();
  TinyModel led(*a);
  TinyModel free(*b);
  const auto recording = b->Record([&] { free.EnqueueStep(/*chooses=*/true); });
  constexpr int32_t kSteps = 60;
  free.SetToken(17, 0);
  for (int32_t t = 0; t < kSteps; ++t) b->Replay(*recording);
  std::vector<int32_t> tokens;
  for (int32_t t = 0; t < kSteps; ++t) {
    led.SetToken(t == 0 ? 17 : tokens.back(), t);
    led.EnqueueStep();
    const auto bits = led.Output();
    std::vector<float> logits(TinyModel::kVocab);
    std::memcpy(logits.data(), bits.data(), logits.size() * 4);
    tokens.push_back(
        static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
  }
  EXPECT_EQ(free.Chosen(kSteps), tokens);
}

// What a prompt's projections read is made as bf16 where they follow at once, and as f32 where
// something comes between: the products are the same to the bit.
TEST_F(CudaBackendTest, PromptsAreTheSameWhereOpsWaitForTheNext) {
  constexpr int32_t kRows = 128, kHeads = 72, kKvHeads = 8, kHead = 128, kDim = 256, kFfn = 512;
  const auto backend = Make();
  std::vector<Buffer> buffers;
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  const auto send = [&](const auto& values) {
    auto buffer = backend->Allocate(values.size() * sizeof(values[0]), "test");
    EXPECT_TRUE(buffer.ok());
    backend->Upload(buffer->template as<void>(), values.data(), values.size() * sizeof(values[0]));
    buffers.push_back(std::move(*buffer));
    return buffers.back().as<void>();
  };
  const auto floats = [&](int32_t n) {
    std::vector<float> values(static_cast<size_t>(n));
    for (float& v : values) v = normal(random);
    return static_cast<float*>(send(values));
  };
  const auto halves = [&](int32_t n) {
    std::vector<Bf16> values(static_cast<size_t>(n));
    for (Bf16& v : values) v = Bf16FromF32(normal(random));
    return send(values);
  };
  const auto weights = [&](int32_t n_out, int32_t n_in) {
    return WeightRef{.format = DType::kBF16,
                     .data = halves(n_out * n_in),
                     .n_out = n_out,
                     .n_in = n_in,
                     .row_bytes = n_in * 2};
  };
  std::vector<RowMeta> rows;
  for (int32_t r = 0; r < kRows; ++r) rows.push_back({0, r});
  const std::vector<SeqMeta> seqs = {{.q_begin = 0, .q_len = kRows, .kv_len = kRows}};
  auto* bank = static_cast<std::byte*>(halves(kRows * 2 * kKvHeads * kHead));
  auto* table = static_cast<int32_t*>(send(std::vector<int32_t>{1, 0}));
  float* const o = floats(kRows * kHeads * kHead);
  float* const f = floats(kRows * kFfn);
  float* const y = floats(kRows * kDim);
  float* const z = floats(kRows * kDim);
  const Op ops[] = {
      AttendArgs{.q = floats(kRows * kHeads * kHead),
                 .o = o,
                 .kv = MakeKvView(bank, table, kRows / 2, DType::kBF16, kKvHeads, kHead, kHead),
                 .plan = AttnPlan::Dense(),
                 .rows = static_cast<RowMeta*>(send(rows)),
                 .seqs = static_cast<SeqMeta*>(send(seqs)),
                 .n_rows = kRows,
                 .n_seqs = 1,
                 .n_heads = kHeads,
                 .scale = 0.1f},
      LinearArgs{.x = o, .w = weights(kDim, kHeads * kHead), .y = y, .n_rows = kRows},
      NormGatedFfnArgs{
          .in = {.x = floats(kRows * kDim), .norm = floats(kDim), .eps = 1e-5f, .d = kDim},
          .gate = weights(kFfn, kDim),
          .up = weights(kFfn, kDim),
          .out = f,
          .n_rows = kRows},
      LinearArgs{.x = f, .w = weights(kDim, kFfn), .y = z, .n_rows = kRows}};
  const auto run = [&](bool apart) {
    for (const Op& op : ops) {
      backend->Enqueue(op);
      if (apart) backend->Synchronize();
    }
    std::vector<uint32_t> bits(2 * kRows * kDim);
    backend->Download(bits.data(), y, bits.size() * 2);
    backend->Download(bits.data() + bits.size() / 2, z, bits.size() * 2);
    return bits;
  };
  const auto together = run(false);
  EXPECT_TRUE(together == run(true));
  EXPECT_GT(std::count_if(together.begin(), together.end(), [](uint32_t b) { return b != 0; }),
            static_cast<ptrdiff_t>(together.size() / 2));
}

TEST_F(CudaBackendTest, StepsThatDrawNeedNoHost) {
  const auto a = Make();
  const auto b = Make();
  TinyModel led(*a);
  TinyModel free(*b);
  const auto recording = b->Record([&] { free.EnqueueStep(/*chooses=*/true, /*draws=*/true); });
  constexpr int32_t kSteps = 60;
  std::vector<SampleCandidate> scratch(TinyModel::kVocab);
  for (SampleMeta meta : {SampleMeta{.temperature = 0.5, .random = 1},
                          SampleMeta{.temperature = 1, .top_p = 0.9, .top_k = 40, .random = 2},
                          SampleMeta{.temperature = 2, .repeat_penalty = 1.5f, .random = 3}}) {
    free.SetSampling(meta);
    free.SetStep(0);
    free.SetToken(17, 0);
    for (int32_t t = 0; t < kSteps; ++t) b->Replay(*recording);
    std::vector<uint32_t> seen(static_cast<size_t>(SeenWords(TinyModel::kVocab)), 0);
    std::vector<int32_t> tokens;
    for (int32_t t = 0; t < kSteps; ++t) {
      led.SetToken(t == 0 ? 17 : tokens.back(), t);
      led.EnqueueStep();
      const auto bits = led.Output();
      std::vector<float> logits(TinyModel::kVocab);
      std::memcpy(logits.data(), bits.data(), logits.size() * 4);
      tokens.push_back(SampleToken(logits.data(), TinyModel::kVocab, meta, seen.data(), scratch));
      TakeSample(tokens.back(), meta, seen.data());
    }
    EXPECT_EQ(free.Chosen(kSteps), tokens) << "temperature " << meta.temperature;
  }
}

// Memory that runs out under ops: said once, and the backend goes on.
TEST_F(CudaBackendTest, StepsThatFindNoMemoryFailCleanly) {
  const auto sound = Make();
  TinyModel expected(*sound);
  expected.SetToken(3, 0);
  expected.EnqueueStep();
  bool refuse = false;
  const auto backend = Make({.refuse = [&] { return refuse; }});
  TinyModel model(*backend);
  const CopyOp copy(*backend, kMiB);
  const auto device = backend->Allocate(2 * kMiB, "test");
  ASSERT_TRUE(device.ok());
  const auto step = [&] {  // with a lane that waits for the main one, and is joined by the end
    backend->Join(Lane::kIn, Lane::kMain);
    backend->Enqueue(copy(device->as<std::byte>(), device->as<std::byte>() + kMiB), Lane::kIn);
    model.EnqueueStep();
    backend->Join(Lane::kMain, Lane::kIn);
  };
  refuse = true;
  model.SetToken(3, 0);
  step();
  const Status eager = backend->TakeFailure();
  EXPECT_EQ(eager.code(), StatusCode::kResourceExhausted) << eager.message();
  EXPECT_TRUE(backend->TakeFailure().ok());
  EXPECT_EQ(backend->Record(step), nullptr);
  EXPECT_EQ(backend->TakeFailure().code(), StatusCode::kResourceExhausted);
  refuse = false;
  const auto recording = backend->Record(step);
  ASSERT_NE(recording, nullptr);
  model.SetToken(3, 0);
  backend->Replay(*recording);
  EXPECT_TRUE(backend->TakeFailure().ok());
  EXPECT_TRUE(model.Output() == expected.Output());
}

TEST_F(CudaBackendTest, ReplaysTakeNoDeviceMemory) {
  const auto backend = Make();
  TinyModel model(*backend);
  const auto recording = backend->Record([&] { model.EnqueueStep(); });
  model.SetToken(1, 0);
  backend->Replay(*recording);
  backend->Synchronize();
  const size_t free = FreeMemory();
  for (int i = 0; i < 200; ++i) backend->Replay(*recording);
  backend->Synchronize();
  EXPECT_GE(FreeMemory() + 8 * kMiB, free);  // other processes come and go
}

TEST_F(CudaBackendTest, FiftyBackendsLeakNothing) {
  const auto use = [] {
    const auto backend = Make();
    TinyModel model(*backend);
    model.SetToken(3, 0);
    const auto recording = backend->Record([&] { model.EnqueueStep(); });
    backend->Replay(*recording);
    model.EnqueueStep();
    backend->Synchronize();
  };
  use();  // what the runtime itself keeps
  use();
  const size_t before = FreeMemory();
  for (int i = 0; i < 50; ++i) use();
  const size_t after = FreeMemory();
  // One allocation of the driver's is 2 MiB; another process may come or go.
  EXPECT_LE(before, after + 8 * kMiB) << (before - after) / kMiB << " MiB were not given back";
}

TEST_F(CudaBackendTest, SaysWhatItCannotRun) {
  const auto backend = Make();
  static const CustomKernels kNoCuda = {
      .name = "Count", .ref = nullptr, .cpu = nullptr, .cuda = nullptr, .cost = nullptr};
  const Support support = backend->Supports(CustomArgs{.kernels = &kNoCuda});
  EXPECT_FALSE(support.ok);
  EXPECT_THAT(support.reason, HasSubstr("Count"));
}

}  // namespace
}  // namespace omnikv
