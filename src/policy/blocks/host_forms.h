// What the forms of the ops of policy blocks on the host share.
#pragma once

#include "backend/kv_format.h"
#include "base/thread_pool.h"
#include "policy/blocks/block_ops.h"

namespace omnikv {

// Calls body(i) for i < n, on threads where there are some.
struct InOrder {
  template <typename Body>
  void operator()(int64_t n, const Body& body) const {
    for (int64_t i = 0; i < n; ++i) body(i);
  }
};
struct OnThreads {
  ThreadPool& pool;
  template <typename Body>
  void operator()(int64_t n, const Body& body) const {
    pool.ParallelFor(n, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) body(i);
    });
  }
};

// Key t of a KV head, as f32 [dk].
inline void LoadKey(const KeyRows& k, int32_t table_off, int32_t t, int32_t head, int32_t dk,
                    float* to) {
  const KvPlane plane = k.Plane();
  const std::byte* values = k.Head(k.Row(table_off, t), head);
  for (int32_t i = 0; i < dk; ++i) {
    to[i] = LoadKvValue(plane, head, values, static_cast<size_t>(i));
  }
}

#ifdef OMNIKV_HAVE_CUDA
#define OMNIKV_CUDA_FORM(form) form
#else
#define OMNIKV_CUDA_FORM(form) nullptr
#endif

// The forms of an op whose host form is `run(args, for_each)`.
#define OMNIKV_BLOCK_OP(constant, text, Args, run, cuda_form, cost_of)                     \
  constexpr CustomKernels constant = {                                                     \
      .name = text,                                                                        \
      .ref = [](const void* a) { run(*static_cast<const Args*>(a), InOrder{}); },          \
      .cpu = [](const void* a,                                                             \
                ThreadPool& pool) { run(*static_cast<const Args*>(a), OnThreads{pool}); }, \
      .cuda = OMNIKV_CUDA_FORM(cuda_form),                                                 \
      .cost = cost_of}

}  // namespace omnikv
