// What the kernel benchmarks on a card share: memory, and the time of launches in a graph.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "backend/cuda/launch.h"

namespace omnikv::cuda {

// The card that a benchmark runs on; without one it ends.
inline NamedDevice BenchCard() {
  const std::optional<NamedDevice> card = ReadDevice(0);
  if (!card) {
    std::fprintf(stderr, "no NVIDIA card here\n");
    std::exit(1);
  }
  return *card;
}

// That card, and its name printed.
inline Device BenchDevice() {
  const NamedDevice card = BenchCard();
  std::printf("%s\n", card.name.c_str());
  return card.device;
}

// Whether the only argument is --json: the cases of scripts/gpu_attention_peer.py alone, as one
// JSON object.
inline bool WantsJson(int argc, char** argv) {
  return argc == 2 && std::strcmp(argv[1], "--json") == 0;
}

struct Free {
  void operator()(void* p) const { cudaFree(p); }
};
using Memory = std::unique_ptr<std::byte, Free>;

inline Memory Allocate(size_t bytes) {
  void* p = nullptr;
  CheckLaunch(cudaMalloc(&p, std::max<size_t>(bytes, 1)), "memory");
  return Memory(static_cast<std::byte*>(p));
}

template <typename T>
Memory Upload(const std::vector<T>& values) {
  Memory m = Allocate(values.size() * sizeof(T));
  CheckLaunch(cudaMemcpy(m.get(), values.data(), values.size() * sizeof(T), cudaMemcpyDefault),
              "upload");
  return m;
}

template <typename T>
T* As(const Memory& m) {
  return reinterpret_cast<T*>(m.get());
}

// The median time of one of n_launches calls of launch(i), replayed as a graph.
inline double Microseconds(cudaStream_t stream, int n_launches,
                           const std::function<void(int)>& launch) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  CheckLaunch(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "capture");
  for (int i = 0; i < n_launches; ++i) launch(i);
  CheckLaunch(cudaStreamEndCapture(stream, &graph), "capture");
  CheckLaunch(cudaGraphInstantiate(&exec, graph, 0), "graph");
  CheckLaunch(cudaEventCreate(&begin), "event");
  CheckLaunch(cudaEventCreate(&end), "event");
  std::vector<float> times(15);
  for (float& ms : times) {
    CheckLaunch(cudaEventRecord(begin, stream), "event");
    CheckLaunch(cudaGraphLaunch(exec, stream), "replay");
    CheckLaunch(cudaEventRecord(end, stream), "event");
    CheckLaunch(cudaStreamSynchronize(stream), "replay");
    CheckLaunch(cudaEventElapsedTime(&ms, begin, end), "event");
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  std::nth_element(times.begin(), times.begin() + 7, times.end());
  return 1e3 * times[7] / n_launches;
}

}  // namespace omnikv::cuda
