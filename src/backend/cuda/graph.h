// A recorded step: a CUDA graph, and what the host does beside it.
#pragma once

#include <cuda_runtime.h>

#include <utility>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/disk_lane.h"
#include "backend/posted_jobs.h"

namespace omnikv::cuda {

// What the host does in a recorded step.
struct HostJobs {
  std::vector<PostedJobs::Job> attention;
  DiskLane::Jobs disk;
};

class Graph : public Recording {
 public:
  Graph(cudaGraphExec_t exec, HostJobs jobs) : exec_(exec), jobs_(std::move(jobs)) {}
  ~Graph() override { cudaGraphExecDestroy(exec_); }
  cudaGraphExec_t exec() const { return exec_; }
  const HostJobs& jobs() const { return jobs_; }

 private:
  cudaGraphExec_t exec_;
  HostJobs jobs_;
};

}  // namespace omnikv::cuda
