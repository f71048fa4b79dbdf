#include "backend/cuda/cuda_backend.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <initializer_list>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "backend/cuda/capabilities.h"
#include "backend/cuda/cublaslt.h"
#include "backend/cuda/delay.h"
#include "backend/cuda/disk_lane.h"
#include "backend/cuda/graph.h"
#include "backend/cuda/host_lane.h"
#include "backend/cuda/kernel_names.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/many_logits.h"
#include "backend/cuda/memory.h"
#include "backend/cuda/pinned_memory.h"
#include "backend/fusion.h"
#include "backend/in_place.h"
#include "base/check.h"
#include "base/log.h"

namespace omnikv {
namespace cuda {
namespace {

size_t U(int64_t n) {
  return static_cast<size_t>(n);
}

class CudaBackend : public Backend {
 public:
  CudaBackend(const CudaOptions& options, const Device& device, std::string description)
      : options_(options),
        device_(device),
        name_(fmt::format("cuda:{}", device.ordinal)),
        description_(std::move(description)),
        memory_(options.memory) {
    memory_.RefuseIf(options.refuse);
  }
  ~CudaBackend() override;
  Status Open();

  std::string_view Name() const override { return name_; }
  std::string Describe() const override;
  Result<Buffer> Allocate(size_t bytes, std::string_view what) override {
    return memory_.Allocate(bytes, what);
  }
  Result<Buffer> AllocateShared(size_t bytes, std::string_view what) override {
    if (options_.refuse && options_.refuse()) return ResourceExhausted("refused by a test");
    return pinned_.Allocate(bytes, what);
  }
  Result<Buffer> AllocateSharedLater(size_t bytes, std::string_view what) override {
    if (options_.refuse && options_.refuse()) return ResourceExhausted("refused by a test");
    return pinned_.AllocateLater(bytes, what);
  }
  Status AwaitShared() override { return pinned_.Await(); }
  Status KeepOnDisk(const std::string& folder) override;
  Result<Buffer> AllocateOnDisk(size_t bytes, std::string_view what) override;
  uint64_t BytesFromDisk() const override { return disk_ != nullptr ? disk_->bytes_read() : 0; }
  Mark SetMark() override;
  void Await(Mark mark) override;
  void Upload(void* dst, const void* src, size_t bytes) override;
  void Download(void* dst, const void* src, size_t bytes) override;
  Support Supports(const Op& op) const override { return SupportsOp(op, device_); }
  void Enqueue(const Op& op, Lane lane = Lane::kMain) override;
  void Copy(void* dst, const void* src, size_t bytes, Lane lane) override;
  void Join(Lane waits, Lane for_) override;
  void Signal(size_t number, Lane lane) override;
  void WaitFor(size_t number, Lane lane) override;
  std::unique_ptr<Recording> Record(const std::function<void()>& body) override;
  void Replay(const Recording& recording) override;
  Status TakeFailure() override;
  void Synchronize() override;
  double TimeAlone(const Op& op) override;
  std::vector<std::string> KernelsOf(const Op& op) override;
  size_t AvailableMemory() const override { return memory_.Available(); }
  bool OnDevice() const override { return true; }
  size_t WorkBytes(const StepLimits& limits) const override {
    return BytesToWork(limits, device_, options_.full_precision);
  }
  int32_t PrefillRows() const override { return 4096; }
  size_t SelectionBytes() const override { return BytesOfSelection(device_); }

 private:
  // fusion.h decides which ops are launched together: a product adds itself to the residual of the
  // next op, and what a prompt's projection reads is made as bf16, in rows_. An op whose launch
  // depends on the next one is held until that comes, or until something asks for Main().
  void EnqueueMain(const Op& op);
  void RunFused(FusedOp fused);
  void Flush();
  // The main lane, with all that was enqueued on it.
  cudaStream_t Main() {
    Flush();
    return stream_;
  }
  FusionRules Rules() const;
  // What `body` enqueues, as a graph; null where its recording failed. The caller destroys it.
  cudaGraph_t Capture(const std::function<void()>& body);
  // Does `work`, unless something failed before; what finds no memory is left out.
  template <typename Work>
  void Attempt(const Work& work);
  // Of Lane::kHost.
  void EnqueueHost(const Op& op);
  // A fetch from a disk or to it; false where it is another.
  bool FetchByDisk(const FetchRowsArgs& fetch, const Launch& launch);
  bool OnDisk(const void* p) const { return disk_ != nullptr && disk_->Holds(p); }
  Launch On(Lane lane) { return {.device = &device_, .stream = Stream(lane)}; }
  // The test's delay of a side lane, before what comes next on it.
  void HoldUp(Lane lane);

  void Execute(const EmbedArgs& a) { Embed(a, Here()); }
  void Execute(const RopeTableArgs& a) { RopeTable(a, Here()); }
  void Execute(const NormQkvRopeAppendArgs& a);
  void Execute(const AttendArgs& a, bool rounded = false);
  void Execute(const LinearArgs& a) { RunLinear(a, nullptr, 1); }
  void Execute(const NormGatedFfnArgs& a, bool rounded = false);
  void Execute(const NormLogitsArgs& a);
  void Execute(const ScoreReduceArgs& a) { ScoreReduce(a, Here()); }
  void Execute(const ScoreArgs& a);
  void Execute(const BlockSummaryArgs& a) { BlockSummary(a, Here()); }
  void Execute(const BlockScoreArgs& a) { BlockScore(a, Here()); }
  void Execute(const KeyScoreArgs& a) { KeyScore(a, Here(KeyScoreScratch(a))); }
  void Execute(const IndexKeysArgs& a) { IndexKeys(a, Here()); }
  void Execute(const IndexScoreArgs& a) { IndexScore(a, Here(IndexScoreScratch(a, device_))); }
  void Execute(const RescoreArgs& a) { Rescore(a, Here(RescoreScratch(a, device_))); }
  void Execute(const QueryMomentsArgs& a) { QueryMomentsOf(a, Here(QueryMomentsScratch(a))); }
  void Execute(const ExpectedScoreArgs& a) { ExpectedScore(a, Here(ExpectedScoreScratch(a))); }
  void Execute(const AgedScoresArgs& a) { AgedScores(a, Here()); }
  void Execute(const PoolArgs& a) { Pool(a, Here()); }
  void Execute(const PlanRangeArgs& a) { PlanRange(a, Here()); }
  void Execute(const TopKArgs& a) { TopK(a, Here(TopKScratch(a, device_))); }
  void Execute(const AverageScoresArgs& a) { AverageScores(a, Here()); }
  void Execute(const WorkingSetArgs& a) { WorkingSet(a, Here(WorkingSetScratch(a))); }
  void Execute(const FetchRowsArgs& a) {
    if (!FetchByDisk(a, Here())) FetchRows(a, Here());
  }
  void Execute(const ListPiecesArgs& a) { ListPieces(a, Here()); }
  void Execute(const PieceTableArgs& a) { PieceTable(a, Here()); }
  void Execute(const NextTokenArgs& a) { NextToken(a, Here(NextTokenScratch(a, device_))); }
  void Execute(const MergeStatesArgs& a) { MergeStates(a, Here()); }
  void Execute(const PickLogitsArgs& a) { PickLogits(a, Here()); }
  void Execute(const SumValuesArgs& a) { SumValues(a, Here()); }
  void Execute(const PickHeadsArgs& a) { PickHeads(a, Here()); }
  void Execute(const StoreRowsArgs& a) { StoreRows(a, Here()); }
  void Execute(const LocateRowsArgs& a) { LocateRows(a, Here()); }
  void Execute(const CompactArgs& a) { Compact(a, Here()); }
  void Execute(const EvictArgs& a) { Evict(a, Here()); }
  void Execute(const UndoEvictArgs& a) { UndoEvict(a, Here()); }
  void Execute(const CustomArgs& a) { a.kernels->cuda(a.args.data(), Here()); }
  // y = W x + b or, with `residual`, residual += scale * (W x + b).
  void RunLinear(const LinearArgs& a, float* residual, float scale);

  // Y[n_rows, n_out] = X W^T + b for a prompt's rows, X [n_rows, n_in] in GemmType(w), Y as `out`.
  void MultiplyMany(const void* x, const WeightRef& w, const float* bias, int32_t n_rows, void* y,
                    bool add, DType out = DType::kF32);
  // The type in which weights of that format multiply many rows.
  DType GemmType(DType format) const {
    return options_.full_precision || format == DType::kF32 ? DType::kF32 : DType::kBF16;
  }
  // Rows of prompts, whose attention shares what it reads. Decode rows are each of a sequence of
  // its own.
  bool ManyOfASequence(const AttendArgs& a) const {
    return a.n_rows > kMaxDecodeRows && a.n_rows > a.BusySeqs() && !options_.full_precision;
  }
  bool Many(int32_t n_rows) const { return n_rows > kMaxDecodeRows && gemm_ != nullptr; }
  // y = W norm(x) + b of each part, for any number of rows; of many, y as `out`.
  void MultiplyNormed(const Residual& in, int32_t n_rows, std::initializer_list<ProductPart> parts,
                      DType out = DType::kF32);
  // h = norm(x) as products of many rows read it, in the arena.
  const void* NormMany(const Residual& in, DType type, int32_t n_rows);

  cudaStream_t Stream(Lane lane) {
    return lane == Lane::kMain ? Main() : side_streams_[static_cast<size_t>(lane) - 1];
  }
  // Where to launch on the main lane, with `scratch` bytes.
  Launch Here(size_t scratch = 0) {
    return {.device = &device_, .stream = stream_, .scratch = scratch_.Get(scratch)};
  }

  CudaOptions options_;
  Device device_;
  std::string name_, description_;
  DeviceMemory memory_;
  PinnedMemory pinned_{device_.ordinal};
  GrowingBuffer scratch_{memory_, "scratch of kernels"};
  GrowingBuffer rows_{memory_, "rows of a prompt"};      // what products of many rows read
  GrowingBuffer products_{memory_, "rows of a prompt"};  // what they write, where an op has no room
  GrowingBuffer panel_{memory_, "a dequantised matrix"};
  Buffer gemm_workspace_;
  cudaStream_t stream_ = nullptr;
  std::array<cudaStream_t, 2> side_streams_{};  // of kIn and kOut
  std::array<cudaEvent_t, 64> joins_{};  // in turn; one that is waited for may be recorded anew
  size_t next_join_ = 0;
  std::vector<cudaEvent_t> signals_;
  bool recording_ = false;
  std::array<bool, kLanes> branched_{};  // has work that the main lane has not joined
  std::array<bool, kLanes> fetched_{};   // a side lane's last work is a fetch
  std::array<cudaEvent_t, kMarks> marks_{};
  Mark last_mark_ = 0;
  std::unique_ptr<CublasLt> gemm_;
  std::string gemm_reason_;  // why there is none
  const FusionRules rules_ = Rules();
  std::optional<Op> held_;
  const void* rounded_ = nullptr;  // x of the linear product that comes next, already as bf16
  Status failure_;
  Buffer delays_;  // uint64 [kLanes], the state of each lane's delays; empty: none
  std::unique_ptr<HostLane> host_lane_;  // null: there is none
  std::unique_ptr<DiskLane> disk_;       // null: there is none
  HostJobs recorded_jobs_;               // of the recording under way
};

CudaBackend::~CudaBackend() {
  if (stream_ == nullptr) return;
  cudaStreamSynchronize(stream_);
  host_lane_.reset();
  disk_.reset();
  for (cudaEvent_t event : marks_) cudaEventDestroy(event);
  for (cudaEvent_t event : joins_) cudaEventDestroy(event);
  for (cudaEvent_t event : signals_) cudaEventDestroy(event);
  for (cudaStream_t side : side_streams_) {
    cudaStreamSynchronize(side);
    cudaStreamDestroy(side);
  }
  cudaStreamDestroy(stream_);
}

Status CudaBackend::Open() {
  if (cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) != cudaSuccess) {
    return Unsupported(fmt::format("no stream on {}: {}", name_, LastError()));
  }
  memory_.UseStream(stream_);
  // Copies come first: whoever waits for them has other work to do once they are there.
  int least = 0;
  int greatest = 0;
  CheckLaunch(cudaDeviceGetStreamPriorityRange(&least, &greatest), "lanes");
  for (cudaStream_t& side : side_streams_) {
    CheckLaunch(cudaStreamCreateWithPriority(&side, cudaStreamNonBlocking, greatest), "lanes");
  }
  for (cudaEvent_t& event : marks_) {
    CheckLaunch(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "marks");
  }
  for (cudaEvent_t& event : joins_) {
    CheckLaunch(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "joins");
  }
  if (options_.memory != 0 && memory_.Available() < kGemmWorkspaceBytes) {
    return ResourceExhausted(fmt::format(
        "`gpu_memory` is {}, of which the driver takes {} and products {}: expected more",
        HumanBytes(options_.memory), HumanBytes(memory_.context_bytes()),
        HumanBytes(kGemmWorkspaceBytes)));
  }
  OKV_ASSIGN_OR_RETURN(gemm_workspace_, memory_.Allocate(kGemmWorkspaceBytes, "cuBLASLt"));
  if (options_.make_host) {
    OKV_ASSIGN_OR_RETURN(host_lane_, HostLane::Create(options_.make_host, memory_, pinned_));
  }
  auto gemm = CublasLt::Open(gemm_workspace_.as<void>(), kGemmWorkspaceBytes);
  gemm_reason_ = gemm.status().message();
  if (gemm.ok()) gemm_ = std::move(*gemm);
  if (options_.lane_delay_us != 0) {
    OKV_ASSIGN_OR_RETURN(delays_, memory_.Allocate(kLanes * sizeof(uint64_t), "delays"));
    const std::array<uint64_t, kLanes> seeds = {0, 2 * options_.lane_delay_seed,
                                                2 * options_.lane_delay_seed + 1, 0};
    Upload(delays_.as<void>(), seeds.data(), sizeof(seeds));
  }
  return {};
}

std::string CudaBackend::Describe() const {
  return gemm_ != nullptr ? description_
                          : fmt::format("{}, slow prefill ({})", description_, gemm_reason_);
}

void CudaBackend::Upload(void* dst, const void* src, size_t bytes) {
  if (bytes == 0) return;
  if (OnDisk(dst) || OnDisk(src)) {
    CheckLaunch(cudaStreamSynchronize(Main()), "device");
    return disk_->CopyNow(dst, src, bytes);
  }
  CheckLaunch(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, Main()), "copy to the device");
  // Ordinary memory has been staged by now; pinned memory is still being read.
  cudaPointerAttributes attributes{};
  CheckLaunch(cudaPointerGetAttributes(&attributes, src), "copy to the device");
  if (attributes.type == cudaMemoryTypeHost) {
    CheckLaunch(cudaStreamSynchronize(stream_), "copy to the device");
  }
}

void CudaBackend::Download(void* dst, const void* src, size_t bytes) {
  if (OnDisk(src)) return Upload(dst, src, bytes);
  if (bytes != 0) {
    CheckLaunch(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, Main()),
                "copy from the device");
  }
  CheckLaunch(cudaStreamSynchronize(Main()), "device");
}

Backend::Mark CudaBackend::SetMark() {
  CheckLaunch(cudaEventRecord(marks_[++last_mark_ % kMarks], Main()), "mark");
  return last_mark_;
}

void CudaBackend::Await(Mark mark) {
  const Mark oldest = last_mark_ >= kMarks ? last_mark_ - kMarks + 1 : 1;
  CheckLaunch(cudaEventSynchronize(marks_[std::max(mark, oldest) % kMarks]), "device");
}

void CudaBackend::Synchronize() {
  const cudaStream_t main = Main();
  for (const cudaStream_t side : side_streams_) CheckLaunch(cudaStreamSynchronize(side), "device");
  CheckLaunch(cudaStreamSynchronize(main), "device");
  if (host_lane_ != nullptr) host_lane_->posts().Drain();
  if (disk_ != nullptr) disk_->Drain();
}

Status CudaBackend::KeepOnDisk(const std::string& folder) {
  OKV_ASSIGN_OR_RETURN(disk_, DiskLane::Create(folder, memory_, pinned_));
  return {};
}

Result<Buffer> CudaBackend::AllocateOnDisk(size_t bytes, std::string_view what) {
  if (options_.refuse && options_.refuse()) return ResourceExhausted("refused by a test");
  return disk_ != nullptr ? disk_->Allocate(bytes, what) : Backend::AllocateOnDisk(bytes, what);
}

bool CudaBackend::FetchByDisk(const FetchRowsArgs& fetch, const Launch& launch) {
  DiskLane::Jobs* const recorded = recording_ ? &recorded_jobs_.disk : nullptr;
  const bool from = OnDisk(fetch.from);
  if (from) disk_->Fetch(fetch, launch, recorded);
  const bool to = !from && OnDisk(fetch.to);
  if (to) disk_->Store(fetch, launch, recorded);
  return from || to;
}

double CudaBackend::TimeAlone(const Op& op) {
  Synchronize();
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  CheckLaunch(cudaEventCreate(&begin), "timing");
  CheckLaunch(cudaEventCreate(&end), "timing");
  // The card waits a little, so that the op is queued whole when the first event comes: else the
  // host's launches would be timed.
  const auto wait = [](void*) { std::this_thread::sleep_for(std::chrono::microseconds(50)); };
  CheckLaunch(cudaLaunchHostFunc(Main(), wait, nullptr), "timing");
  CheckLaunch(cudaEventRecord(begin, Main()), "timing");
  Enqueue(op);
  CheckLaunch(cudaEventRecord(end, Main()), "timing");
  CheckLaunch(cudaEventSynchronize(end), "device");
  float ms = 0;
  CheckLaunch(cudaEventElapsedTime(&ms, begin, end), "timing");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return 1e-3 * static_cast<double>(ms);
}

template <typename Work>
void CudaBackend::Attempt(const Work& work) {
  if (!failure_.ok()) return;
  try {
    work();
  } catch (const OutOfMemory& error) {
    failure_ = ResourceExhausted(error.what());
    rounded_ = nullptr;
  }
}

Status CudaBackend::TakeFailure() {
  Flush();
  if (host_lane_ != nullptr && failure_.ok()) failure_ = host_lane_->TakeFailure();
  if (disk_ != nullptr && failure_.ok()) failure_ = disk_->TakeFailure();
  return std::exchange(failure_, {});
}

void CudaBackend::HoldUp(Lane lane) {
  if (delays_.size() == 0 || lane == Lane::kMain) return;
  fetched_[static_cast<size_t>(lane)] = false;
  Delay(delays_.as<uint64_t>() + static_cast<size_t>(lane), options_.lane_delay_us,
        {.device = &device_, .stream = Stream(lane)});
}

void CudaBackend::Copy(void* dst, const void* src, size_t bytes, Lane lane) {
  HoldUp(lane);
  fetched_[static_cast<size_t>(lane)] = false;
  if (OnDisk(src)) {
    OKV_CHECK(lane == Lane::kIn && !recording_);
    return Attempt(
        [&] { disk_->CopyIn(dst, static_cast<const std::byte*>(src), bytes, On(lane)); });
  }
  if (OnDisk(dst)) {
    OKV_CHECK(lane == Lane::kOut && !recording_);
    return Attempt([&] { disk_->CopyOut(static_cast<std::byte*>(dst), src, bytes, On(lane)); });
  }
  CheckLaunch(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, Stream(lane)), "copy");
}

void CudaBackend::Join(Lane waits, Lane for_) {
  Flush();  // nothing is launched together across a join, not even where none is needed
  if (waits == Lane::kHost) return;  // what it is given is posted on the main lane
  if (for_ == Lane::kHost) {
    return Attempt([&] {
      // Of nothing too: it is cheap.
      if (host_lane_ != nullptr) host_lane_->posts().Await(Here());
    });
  }
  // A recording waits for nothing outside it.
  if (recording_ && for_ != Lane::kMain && !branched_[static_cast<size_t>(for_)]) return;
  if (for_ == Lane::kOut && disk_ != nullptr) Attempt([&] { disk_->AwaitWrites(On(for_)); });
  const cudaEvent_t reached = joins_[next_join_++ % joins_.size()];
  const cudaError_t recorded = cudaEventRecord(reached, Stream(for_));
  const cudaError_t waiting = cudaStreamWaitEvent(Stream(waits), reached, 0);
  // What failed may have ended a recording; its lanes are to come together all the same.
  if (failure_.ok()) {
    CheckLaunch(recorded, "join");
    CheckLaunch(waiting, "join");
  }
  fetched_[static_cast<size_t>(waits)] = false;
  if (waits != Lane::kMain) branched_[static_cast<size_t>(waits)] = true;
  if (waits == Lane::kMain) branched_[static_cast<size_t>(for_)] = false;
}

void CudaBackend::Signal(size_t number, Lane lane) {
  while (signals_.size() <= number) {
    CheckLaunch(cudaEventCreateWithFlags(&signals_.emplace_back(), cudaEventDisableTiming),
                "signals");
  }
  if (lane == Lane::kOut && disk_ != nullptr) Attempt([&] { disk_->AwaitWrites(On(lane)); });
  CheckLaunch(cudaEventRecord(signals_[number], Stream(lane)), "signal");
}

void CudaBackend::WaitFor(size_t number, Lane lane) {
  const cudaStream_t stream = Stream(lane);
  if (number >= signals_.size()) return;  // none yet
  fetched_[static_cast<size_t>(lane)] = false;
  CheckLaunch(cudaStreamWaitEvent(stream, signals_[number], 0), "signal");
}

void CudaBackend::Enqueue(const Op& op, Lane lane) {
  Attempt([&] {
    if (disk_ != nullptr && UsesInPlace(op, [&](const void* p) { return OnDisk(p); })) {
      failure_ = Unsupported(fmt::format(
          "{} uses K/V in place that lie on a disk, which {} cannot reach", OpName(op), name_));
      return;
    }
    if (lane == Lane::kMain) return EnqueueMain(op);
    if (lane == Lane::kHost) return EnqueueHost(op);
    HoldUp(lane);
    const auto& fetch = std::get<FetchRowsArgs>(op);  // nothing else runs beside others
    bool& fetched = fetched_[static_cast<size_t>(lane)];
    if (FetchByDisk(fetch, On(lane))) {
      fetched = false;  // its last launch is no fetch, or one that a post follows
    } else {
      FetchRows(fetch, On(lane), fetched);
      fetched = true;
    }
    branched_[static_cast<size_t>(lane)] = true;
  });
}

void CudaBackend::EnqueueHost(const Op& op) {
  Flush();
  OKV_CHECK(host_lane_ != nullptr, "an op of the host without a host");
  const PostedJobs::Job job = host_lane_->Post(op, Here());
  if (recording_) {
    recorded_jobs_.attention.push_back(job);
  } else {
    host_lane_->posts().Run({&job, 1});
  }
}

FusionRules CudaBackend::Rules() const {
  const auto leaves_bf16 = [this](const Op& op) {
    if (options_.full_precision) return false;
    if (const auto* a = std::get_if<AttendArgs>(&op)) {
      return Many(a->n_rows) && ManyOfASequence(*a) && CanAttendHopper(*a, device_);
    }
    const auto* a = std::get_if<NormGatedFfnArgs>(&op);
    return a != nullptr && Many(a->n_rows);
  };
  const auto reads_bf16 = [this](const LinearArgs& linear) {
    return GemmType(linear.w.format) == DType::kBF16;
  };
  return {.leaves_bf16 = leaves_bf16, .reads_bf16 = reads_bf16};
}

void CudaBackend::EnqueueMain(const Op& op) {
  Op next = op;
  if (held_) RunFused(Fuse(*std::exchange(held_, std::nullopt), &next, rules_));
  if (AwaitsNext(next, rules_)) {
    held_ = next;
  } else {
    RunFused(Fuse(next, nullptr, rules_));
  }
}

void CudaBackend::RunFused(FusedOp fused) {
  if (Residual* in = ResidualOf(fused.op); in != nullptr && in->y != nullptr) {
    AddResidual(*in, ResidualRows(fused.op), Here());
    in->y = nullptr;
  }
  if (const auto* linear = std::get_if<LinearArgs>(&fused.op)) {
    RunLinear(*linear, fused.residual, fused.scale);
  } else if (const auto* attend = std::get_if<AttendArgs>(&fused.op)) {
    Execute(*attend, fused.to_bf16);
  } else if (const auto* ffn = std::get_if<NormGatedFfnArgs>(&fused.op)) {
    Execute(*ffn, fused.to_bf16);
  } else {
    std::visit([this](const auto& args) { Execute(args); }, fused.op);
  }
}

void CudaBackend::Flush() {
  if (!held_) return;
  const Op held = *std::exchange(held_, std::nullopt);
  Attempt([&] { RunFused(Fuse(held, nullptr, rules_)); });
}

cudaGraph_t CudaBackend::Capture(const std::function<void()>& body) {
  const cudaStream_t main = Main();
  branched_.fill(false);
  fetched_.fill(false);
  recorded_jobs_ = {};
  if (disk_ != nullptr) disk_->BeginRecording();
  // Relaxed: the body may have to make room for scratch, which is not part of the graph.
  CheckLaunch(cudaStreamBeginCapture(main, cudaStreamCaptureModeRelaxed), "recording");
  recording_ = true;
  body();
  Flush();
  for (const Lane lane : {Lane::kIn, Lane::kOut}) {  // a graph ends in one point
    if (branched_[static_cast<size_t>(lane)]) Join(Lane::kMain, lane);
  }
  recording_ = false;
  fetched_.fill(false);
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(main, &graph);
  Attempt([&] { CheckLaunch(ended, "recording"); });  // what failed in `body` may have ended it too
  return graph;
}

std::unique_ptr<Recording> CudaBackend::Record(const std::function<void()>& body) {
  const cudaGraph_t graph = Capture(body);
  cudaGraphExec_t exec = nullptr;
  Attempt([&] { CheckLaunch(cudaGraphInstantiate(&exec, graph, 0), "recording"); });
  if (graph != nullptr) cudaGraphDestroy(graph);
  static_cast<void>(cudaGetLastError());
  if (exec == nullptr) return nullptr;
  return std::make_unique<Graph>(exec, std::exchange(recorded_jobs_, {}));
}

std::vector<std::string> CudaBackend::KernelsOf(const Op& op) {
  const cudaGraph_t graph = Capture([&] { Enqueue(op); });
  if (graph == nullptr) return {};
  std::vector<std::string> names = KernelNames(graph);
  cudaGraphDestroy(graph);
  return names;
}

void CudaBackend::Replay(const Recording& recording) {
  const cudaStream_t main = Main();
  const auto& graph = static_cast<const Graph&>(recording);
  Attempt([&] {
    CheckLaunch(cudaGraphLaunch(graph.exec(), main), "replay");
    if (host_lane_ != nullptr) host_lane_->posts().Run(graph.jobs().attention);
    if (disk_ != nullptr) disk_->Run(graph.jobs().disk);
  });
}

// --- Ops.

const void* CudaBackend::NormMany(const Residual& in, DType type, int32_t n_rows) {
  std::byte* h = rows_.Get(DTypeBytes(type, U(n_rows) * U(in.d)));
  NormRows(in, n_rows, type, h, Here());
  return h;
}

void CudaBackend::MultiplyMany(const void* x, const WeightRef& w, const float* bias, int32_t n_rows,
                               void* y, bool add, DType out) {
  const DType type = GemmType(w.format);
  const void* weights = w.data;
  int64_t pitch = w.row_bytes / static_cast<int64_t>(DTypeBytes(type, 1));
  if (w.format != type || U(w.row_bytes) % DTypeBytes(type, 1) != 0) {
    std::byte* panel = panel_.Get(DTypeBytes(type, U(w.n_out) * U(w.n_in)));
    DequantiseRows(w, 0, w.n_out, type, panel, Here());
    weights = panel;
    pitch = w.n_in;
  }
  gemm_->Multiply({.in = type,
                   .out = out,
                   .x = x,
                   .w = weights,
                   .y = y,
                   .bias = bias,
                   .accumulate = add,
                   .n_rows = n_rows,
                   .n_out = w.n_out,
                   .n_in = w.n_in,
                   .x_pitch = w.n_in,
                   .w_pitch = pitch,
                   .y_pitch = w.n_out},
                  stream_);
}

void CudaBackend::RunLinear(const LinearArgs& a, float* residual, float scale) {
  if (Many(a.n_rows)) {
    const DType type = GemmType(a.w.format);
    const void* x = std::exchange(rounded_, nullptr);
    if (x == nullptr && type == DType::kF32) x = a.x;
    if (x == nullptr) {
      const int64_t n = int64_t{a.n_rows} * a.w.n_in;
      std::byte* rounded = rows_.Get(DTypeBytes(type, U(n)));
      cuda::ConvertRows(a.x, n, type, rounded, Here());
      x = rounded;
    }
    const bool add = residual != nullptr && scale == 1;
    MultiplyMany(x, a.w, a.bias, a.n_rows, add ? residual : a.y, add);
    if (residual != nullptr && !add) {
      AddResidual({.x = residual, .y = a.y, .scale = scale, .d = static_cast<int32_t>(a.w.n_out)},
                  a.n_rows, Here());
    }
    return;
  }
  for (int32_t first = 0; first < a.n_rows; first += kMaxDecodeRows) {
    Product product{.x = a.x + first * a.w.n_in,
                    .n_rows = std::min(kMaxDecodeRows, a.n_rows - first),
                    .finish = residual != nullptr ? Finish::kAdd : Finish::kStore,
                    .scale = scale};
    float* y = residual != nullptr ? residual : a.y;
    product.parts[0] = {.w = a.w, .bias = a.bias, .y = y + first * a.w.n_out};
    Multiply(product, Here());
  }
}

void CudaBackend::MultiplyNormed(const Residual& in, int32_t n_rows,
                                 std::initializer_list<ProductPart> parts, DType out) {
  if (Many(n_rows)) {
    std::optional<DType> type;  // of h
    const void* h = nullptr;
    for (const ProductPart& part : parts) {
      const DType wanted = GemmType(part.w.format);
      if (type != wanted) h = NormMany(in, wanted, n_rows);
      type = wanted;
      MultiplyMany(h, part.w, part.bias, n_rows, part.y, false, out);
    }
    return;
  }
  for (int32_t first = 0; first < n_rows; first += kMaxDecodeRows) {
    Product product{.x = in.x + int64_t{first} * in.d,
                    .norm = in.norm,
                    .eps = in.eps,
                    .n_rows = std::min(kMaxDecodeRows, n_rows - first),
                    .n_parts = 0};
    for (const ProductPart& part : parts) {
      if (product.n_parts > 0 && product.parts[0].w.format != part.w.format) {
        Multiply(product, Here());
        product.n_parts = 0;
      }
      product.parts[product.n_parts++] = {
          .w = part.w, .bias = part.bias, .y = part.y + first * part.w.n_out};
    }
    Multiply(product, Here());
  }
}

void CudaBackend::Execute(const NormQkvRopeAppendArgs& a) {
  if (a.n_rows <= kMaxDecodeRows && CanMultiplyRope(a)) {
    Product product{.x = a.in.x,
                    .norm = a.in.norm,
                    .eps = a.in.eps,
                    .n_rows = a.n_rows,
                    .n_parts = 3,
                    .finish = Finish::kRope,
                    .qkv = &a};
    product.parts[0] = {.w = a.wq, .bias = a.bq, .y = a.q};
    product.parts[1] = {.w = a.wk, .bias = a.bk};
    product.parts[2] = {.w = a.wv, .bias = a.bv};
    Multiply(product, Here());
    if (a.k_out != nullptr) KeepKeys(a, Here());
    return;
  }
  auto* k = reinterpret_cast<float*>(products_.Get(4 * U(a.n_rows) * U(a.wk.n_out + a.wv.n_out)));
  float* v = k + int64_t{a.n_rows} * a.wk.n_out;
  MultiplyNormed(a.in, a.n_rows, {{a.wq, a.bq, a.q}, {a.wk, a.bk, k}, {a.wv, a.bv, v}});
  if (a.k_raw_out != nullptr) KeepRawKeys(a, k, Here());
  RopeAppend(a, k, v, Here());
  if (a.k_out != nullptr) KeepKeys(a, Here());
}

void CudaBackend::Execute(const AttendArgs& a, bool rounded) {
  const bool many = ManyOfASequence(a);
  if (many && CanAttendHopper(a, device_)) {
    void* o = rounded ? rows_.Get(2 * U(a.n_rows) * U(a.n_heads) * U(a.kv.dv)) : nullptr;
    AttendHopper(a, o, Here(AttendHopperScratch(a, device_)));
    rounded_ = o;
  } else if (many && CanAttendPrefill(a, device_)) {
    AttendPrefill(a, Here(AttendPrefillScratch(a, device_)));
  } else {
    Attend(a, Here(AttendScratch(a, device_)));
  }
}

void CudaBackend::Execute(const ScoreArgs& a) {
  if (!options_.full_precision && CanScoreHopper(a, device_)) {
    ScoreHopper(a, Here(ScoreHopperScratch(a)));
  } else {
    Score(a, Here());
  }
}

void CudaBackend::Execute(const NormGatedFfnArgs& a, bool rounded) {
  if (a.n_rows > kMaxDecodeRows || a.gate.format != a.up.format) {
    const int64_t n = int64_t{a.n_rows} * a.gate.n_out;
    // The library adds biases in f32 only, and is sure to write bf16 only in aligned rows.
    const auto in_bf16 = [&](const WeightRef& w, const float* bias) {
      return Many(a.n_rows) && GemmType(w.format) == DType::kBF16 && bias == nullptr &&
             w.n_out % 8 == 0;
    };
    const bool small = in_bf16(a.gate, a.gate_bias) && in_bf16(a.up, a.up_bias);
    const DType products = small ? DType::kBF16 : DType::kF32;
    std::byte* const room = products_.Get(4 * U(n));
    auto* up = reinterpret_cast<float*>(room);
    float* gate = small ? reinterpret_cast<float*>(room + 2 * U(n)) : a.out;
    MultiplyNormed(a.in, a.n_rows, {{a.gate, a.gate_bias, gate}, {a.up, a.up_bias, up}}, products);
    void* out = a.out;
    if (rounded) rounded_ = out = rows_.Get(2 * U(n));
    GatedRows(a.act, products, gate, up, rounded ? DType::kBF16 : DType::kF32, out, n, Here());
    return;
  }
  Product product{.x = a.in.x,
                  .norm = a.in.norm,
                  .eps = a.in.eps,
                  .n_rows = a.n_rows,
                  .n_parts = 2,
                  .finish = Finish::kGated,
                  .act = a.act};
  product.parts[0] = {.w = a.gate, .bias = a.gate_bias, .y = a.out};
  product.parts[1] = {.w = a.up, .bias = a.up_bias};
  Multiply(product, Here());
}

void CudaBackend::Execute(const NormLogitsArgs& a) {
  if (Many(a.n_out) && !options_.full_precision && CanMultiplyLogits(a)) {
    return MultiplyLogits(a, *gemm_, rows_, products_, Here());
  }
  for (int32_t first = 0; first < a.n_out; first += kMaxDecodeRows) {
    const int32_t* rows = a.out_rows != nullptr ? a.out_rows + first : nullptr;
    Product product{.x = rows != nullptr ? a.in.x : a.in.x + int64_t{first} * a.in.d,
                    .x_rows = rows,
                    .norm = a.in.norm,
                    .eps = a.in.eps,
                    .n_rows = std::min(kMaxDecodeRows, a.n_out - first),
                    .finish = Finish::kLogits,
                    .scale = a.scale,
                    .softcap = a.softcap};
    product.parts[0] = {.w = a.head, .bias = a.bias, .y = a.logits + first * a.head.n_out};
    Multiply(product, Here());
  }
}

}  // namespace

// Memory too may lack: code is loaded when it is first used, graphs when they are launched.
void CheckLaunch(cudaError_t error, const char* what) {
  if (error == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    throw OutOfMemory(fmt::format("{}: the GPU has no memory left for it", what));
  }
  OKV_CHECK(error == cudaSuccess, "{}: {}", what, cudaGetErrorString(error));
}

}  // namespace cuda

Result<std::unique_ptr<Backend>> MakeCudaBackend(const CudaOptions& options) {
  OKV_ASSIGN_OR_RETURN(const cuda::NamedDevice card, cuda::FindDevice(options.device));
  auto backend = std::make_unique<cuda::CudaBackend>(
      options, card.device, fmt::format("{}, {} multiprocessors", card.name, card.device.sm_count));
  try {
    OKV_RETURN_IF_ERROR(backend->Open());
  } catch (const cuda::OutOfMemory& error) {
    return ResourceExhausted(error.what());
  }
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace omnikv
