#include <fmt/format.h>

#include <chrono>
#include <cstring>
#include <limits>

#include "backend/backend.h"
#include "backend/disk_memory.h"
#include "backend/kv_format.h"
#include "base/check.h"
#include "base/log.h"
#include "base/memory.h"

namespace omnikv {
namespace {

class OpList : public Recording {
 public:
  explicit OpList(std::vector<Op> list) : ops(std::move(list)) {}
  std::vector<Op> ops;
};

}  // namespace

Support SupportsKv(const Op& op) {
  return std::visit(
      [](const auto& args) -> Support {
        if constexpr (requires { args.kv; }) {
          for (const auto& [plane, dim] :
               {std::pair{args.kv.k, args.kv.dk}, {args.kv.v, args.kv.dv}}) {
            if (KvFits(plane.dtype, dim)) continue;
            return {false, fmt::format("K or V in {} have heads of {} values, no multiple of {}",
                                       DTypeName(plane.dtype), dim, kBlockValues)};
          }
        }
        return {};
      },
      op);
}

double Backend::TimeAlone(const Op& op) {
  Synchronize();
  const auto start = std::chrono::steady_clock::now();
  Enqueue(op);
  Synchronize();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return seconds.count();
}

Status Backend::KeepOnDisk(const std::string& folder) {
  return Unsupported(fmt::format("{} keeps no K/V on the disk of {}", Name(), folder));
}

Result<Buffer> Backend::AllocateOnDisk(size_t bytes, std::string_view what) {
  return Unsupported(fmt::format("{} has no disk for {} of {}", Name(), HumanBytes(bytes), what));
}

Result<Buffer> HostBackend::Allocate(size_t bytes, std::string_view what) {
  auto pages = Pages::Reserve(bytes);
  if (!pages.ok()) {
    return ResourceExhausted(fmt::format("{} of host memory for {} cannot be had ({} available)",
                                         HumanBytes(bytes), what, HumanBytes(AvailableMemory())));
  }
  auto owner = std::make_shared<Pages>(std::move(*pages));
  void* data = owner->data();
  return Buffer(data, bytes, [owner](void*) mutable { owner.reset(); });
}

HostBackend::HostBackend() = default;
HostBackend::~HostBackend() = default;

Status HostBackend::KeepOnDisk(const std::string& folder) {
  OKV_ASSIGN_OR_RETURN(disk_, DiskMemory::Create(folder));
  return {};
}

uint64_t HostBackend::BytesFromDisk() const {
  return disk_ != nullptr ? disk_->bytes_read() : 0;
}

Result<Buffer> HostBackend::AllocateOnDisk(size_t bytes, std::string_view what) {
  return disk_ != nullptr ? disk_->Allocate(bytes, what) : Backend::AllocateOnDisk(bytes, what);
}

size_t HostBackend::AvailableMemory() const {
  return omnikv::AvailableMemory();
}

void HostBackend::Upload(void* dst, const void* src, size_t bytes) {
  if (bytes == 0) return;
  if (disk_ != nullptr && disk_->Holds(src)) {
    auto* const to = static_cast<std::byte*>(dst);
    const auto* const from = static_cast<const std::byte*>(src);
    if (!disk_->Holds(dst)) return disk_->Read({{.from = from, .to = to, .bytes = bytes}});
    std::vector<std::byte> copy(bytes);
    disk_->Read({{.from = from, .to = copy.data(), .bytes = bytes}});
    return disk_->Write(to, copy.data(), bytes);
  }
  if (disk_ != nullptr && disk_->Holds(dst)) {
    return disk_->Write(static_cast<std::byte*>(dst), src, bytes);
  }
  std::memcpy(dst, src, bytes);
}

void HostBackend::Download(void* dst, const void* src, size_t bytes) {
  Upload(dst, src, bytes);
}

void HostBackend::Copy(void* dst, const void* src, size_t bytes, Lane lane) {
  if (disk_ == nullptr || lane != Lane::kIn || !disk_->Holds(src)) return Upload(dst, src, bytes);
  disk_->Begin({.from = static_cast<const std::byte*>(src),
                .to = static_cast<std::byte*>(dst),
                .bytes = bytes});
}

// All lanes but kIn are the caller: what was enqueued there has run.
void HostBackend::Join(Lane waits, Lane for_) {
  if (disk_ != nullptr && for_ == Lane::kIn && waits != for_) disk_->Await(disk_->begun());
}

void HostBackend::Signal(size_t number, Lane lane) {
  if (disk_ == nullptr) return;
  if (signals_.size() <= number) signals_.resize(number + 1, 0);
  signals_[number] = lane == Lane::kIn ? disk_->begun() : 0;
}

void HostBackend::WaitFor(size_t number, Lane lane) {
  if (disk_ == nullptr || lane == Lane::kIn || number >= signals_.size()) return;
  disk_->Await(signals_[number]);
}

Status HostBackend::TakeFailure() {
  Status failure = std::exchange(failure_, {});
  if (disk_ == nullptr) return failure;
  Status of_disk = disk_->TakeFailure();
  return failure.ok() ? of_disk : failure;
}

void HostBackend::Synchronize() {
  if (disk_ != nullptr) disk_->Await(disk_->begun());
}

namespace {

using Piece = DiskMemory::Piece;

// The rows that `fetch` copies; without places where they go: those that it will read.
std::vector<Piece> PiecesOf(const FetchRowsArgs& fetch, bool read) {
  OKV_CHECK(fetch.gap_bytes == 0);
  std::vector<Piece> pieces;
  for (int32_t l = 0; l < fetch.lists; ++l) {
    const int64_t first = int64_t{l} * fetch.capacity;
    for (int64_t i = first; i < first + fetch.n[l]; ++i) {
      std::byte* const to = read ? fetch.to + fetch.to_row[i] * fetch.row_bytes : nullptr;
      pieces.push_back({.from = fetch.from + fetch.from_row[i] * fetch.row_bytes,
                        .to = to,
                        .bytes = static_cast<size_t>(fetch.row_bytes)});
    }
  }
  return pieces;
}

// Adds the rows of the tokens [begin, end) of a sequence in both planes, of those on the disk.
class Tokens {
 public:
  Tokens(const DiskMemory& disk, const KvView& kv)
      : kv_(kv), k_(disk.Holds(kv.k.base)), v_(disk.Holds(kv.v.base) && !kv.Interleaved()) {}
  bool OnDisk() const { return k_ || v_; }
  void Add(int32_t table_off, int64_t begin, int64_t end) {
    const int64_t bt = kv_.block_tokens;
    for (int64_t t = begin; t < end;) {
      const int64_t next = std::min(end, (t / bt + 1) * bt);
      const int64_t row = kv_.RowIndex(table_off, t);
      if (k_) Add(of_k, kv_.k, row, next - t);
      if (v_) Add(of_v, kv_.v, row, next - t);
      t = next;
    }
  }

  std::vector<Piece> of_k, of_v;

 private:
  static void Add(std::vector<Piece>& pieces, const KvPlane& plane, int64_t row, int64_t n) {
    pieces.push_back({.from = plane.base + row * plane.row_bytes,
                      .bytes = static_cast<size_t>(n * plane.row_bytes)});
  }

  const KvView& kv_;
  bool k_, v_;
};

// What an attention reads of a disk, in place. Rows of a prompt read more than is worth a list.
Tokens RowsOf(const DiskMemory& disk, const AttendArgs& a) {
  Tokens tokens(disk, a.kv);
  if (!tokens.OnDisk()) return tokens;
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const SeqMeta& seq = a.seqs[s];
    if (seq.q_len == 0) continue;
    for (int32_t i = 0; i < a.plan.n_segments; ++i) {
      const PlanSegment& segment = a.plan.segments[static_cast<size_t>(i)];
      if (segment.kind == SegmentKind::kRange) {
        const int32_t* const bounds = segment.bounds != nullptr ? segment.bounds + 2 * s : nullptr;
        int64_t begin = bounds != nullptr ? bounds[0] : segment.begin;
        const int64_t end = bounds != nullptr ? bounds[1] : segment.end;
        if (segment.window > 0)
          begin = std::max<int64_t>(begin, seq.kv_len - seq.q_len + 1 - segment.window);
        tokens.Add(seq.table_off, begin, std::min<int64_t>(end, seq.kv_len));
        continue;
      }
      for (int32_t list = 0; list < segment.lists; ++list) {
        const int64_t at = int64_t{s} * segment.lists + list;
        for (int32_t u = 0; u < segment.count[at]; ++u) {
          const int64_t begin = int64_t{segment.index[at * segment.capacity + u]} * segment.unit;
          tokens.Add(seq.table_off, begin, std::min<int64_t>(begin + segment.unit, seq.kv_len));
        }
      }
    }
  }
  return tokens;
}

Tokens RowsOf(const DiskMemory& disk, const CompactArgs& a) {
  Tokens tokens(disk, a.Source());
  if (a.InPlace() || !tokens.OnDisk()) return tokens;
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    if (a.seqs[s].q_len == 0) continue;
    for (int32_t list = 0; list < a.lists; ++list) {
      const int64_t at = int64_t{s} * a.lists + list;
      for (int32_t i = 0; i < a.count[at]; ++i) {
        const int64_t t = a.index[at * a.capacity + i];
        tokens.Add(a.seqs[s].table_off, t, t + 1);
      }
    }
  }
  return tokens;
}

}  // namespace

void HostBackend::RunHere(const Op& op) {
  if (disk_ == nullptr) return Run(op);
  if (const auto* fetch = std::get_if<FetchRowsArgs>(&op); fetch != nullptr) {
    if (!disk_->Holds(fetch->from)) return Run(op);
    return disk_->Read(PiecesOf(*fetch, /*read=*/true));
  }
  const auto expect = [&](Tokens tokens) {
    disk_->Expect(std::move(tokens.of_k));
    disk_->Expect(std::move(tokens.of_v));
  };
  if (const auto* attend = std::get_if<AttendArgs>(&op)) expect(RowsOf(*disk_, *attend));
  if (const auto* compact = std::get_if<CompactArgs>(&op)) expect(RowsOf(*disk_, *compact));
  Run(op);
}

void HostBackend::Enqueue(const Op& op, Lane) {
  if (failure_.ok()) failure_ = Reserve(op);
  if (!failure_.ok()) return;
  if (recording_ != nullptr) {
    recording_->push_back(op);
  } else {
    RunHere(op);
  }
}

std::unique_ptr<Recording> HostBackend::Record(const std::function<void()>& body) {
  OKV_CHECK(recording_ == nullptr);
  std::vector<Op> ops;
  recording_ = &ops;
  body();
  recording_ = nullptr;
  if (!failure_.ok()) return nullptr;
  return std::make_unique<OpList>(std::move(ops));
}

void HostBackend::Replay(const Recording& recording) {
  const std::vector<Op>& ops = static_cast<const OpList&>(recording).ops;
  for (size_t i = 0; i < ops.size(); ++i) {
    RunHere(ops[i]);
    if (disk_ != nullptr) ExpectFetches(ops, i);
  }
}

void HostBackend::ExpectFetches(const std::vector<Op>& ops, size_t chosen) {
  const auto* const set = std::get_if<WorkingSetArgs>(&ops[chosen]);
  if (set == nullptr) return;
  for (size_t i = chosen + 1; i < ops.size(); ++i) {
    const auto* const next = std::get_if<WorkingSetArgs>(&ops[i]);
    if (next != nullptr && next->miss_row == set->miss_row) return;
    const auto* const fetch = std::get_if<FetchRowsArgs>(&ops[i]);
    if (fetch == nullptr || fetch->from_row != set->miss_row || !disk_->Holds(fetch->from))
      continue;
    disk_->Expect(PiecesOf(*fetch, /*read=*/false));
  }
}

}  // namespace omnikv
