#include "backend/cuda/kernel_names.h"

#include <cxxabi.h>

#include <cstdlib>
#include <memory>

#include "backend/cuda/launch.h"

namespace omnikv::cuda {
namespace {

std::string Demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(name, nullptr, nullptr, &status), &std::free);
  return status == 0 ? text.get() : name;
}

void RemoveAll(std::string& text, std::string_view part) {
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at)) {
    text.erase(at, part.size());
  }
}

}  // namespace

std::string ShortName(std::string_view demangled) {
  std::string name(demangled);
  for (const char* part : {"(anonymous namespace)::", "omnikv::cuda::", "omnikv::"}) {
    RemoveAll(name, part);
  }
  int depth = 0;  // of template arguments, which may hold casts
  size_t end = 0;
  for (; end < name.size() && (depth > 0 || name[end] != '('); ++end) {
    depth += name[end] == '<' ? 1 : name[end] == '>' ? -1 : 0;
  }
  name.resize(end);
  if (name.rfind("void ", 0) == 0) name.erase(0, 5);
  return name;
}

std::vector<std::string> KernelNames(cudaGraph_t graph) {
  size_t n = 0;
  CheckLaunch(cudaGraphGetNodes(graph, nullptr, &n), "nodes of a graph");
  std::vector<cudaGraphNode_t> nodes(n);
  CheckLaunch(cudaGraphGetNodes(graph, nodes.data(), &n), "nodes of a graph");
  std::vector<std::string> names;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
    CheckLaunch(cudaGraphNodeGetType(node, &type), "a node of a graph");
    if (type != cudaGraphNodeTypeKernel) continue;
    cudaKernelNodeParams params{};
    const char* name = nullptr;
    if (cudaGraphKernelNodeGetParams(node, &params) != cudaSuccess ||
        cudaFuncGetName(&name, params.func) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());  // an answer, not a failure
      names.push_back("library");
      continue;
    }
    const std::string demangled = Demangled(name);
    const bool ours = demangled.find("omnikv::") != std::string::npos;
    names.push_back((ours ? "" : "library ") + ShortName(demangled));
  }
  return names;
}

}  // namespace omnikv::cuda
