#include "backend/cuda/cublaslt.h"

#include <cublasLt.h>  // types only: nothing of it is linked
#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <compare>
#include <map>
#include <string>
#include <type_traits>
#include <utility>

#include "backend/cuda/memory.h"
#include "base/check.h"

namespace omnikv::cuda {
namespace {

constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"};

#define OKV_CUBLASLT_FUNCTIONS(F)         \
  F(cublasLtCreate)                       \
  F(cublasLtDestroy)                      \
  F(cublasLtGetStatusString)              \
  F(cublasLtMatmul)                       \
  F(cublasLtMatmulAlgoGetHeuristic)       \
  F(cublasLtMatmulDescCreate)             \
  F(cublasLtMatmulDescDestroy)            \
  F(cublasLtMatmulDescSetAttribute)       \
  F(cublasLtMatmulPreferenceCreate)       \
  F(cublasLtMatmulPreferenceDestroy)      \
  F(cublasLtMatmulPreferenceSetAttribute) \
  F(cublasLtMatrixLayoutCreate)           \
  F(cublasLtMatrixLayoutDestroy)

cudaDataType_t CudaType(DType type) {
  OKV_CHECK(type != DType::kQ8_0);
  return type == DType::kF32 ? CUDA_R_32F : type == DType::kF16 ? CUDA_R_16F : CUDA_R_16BF;
}

// The largest power of two, up to 256, that a pointer is a multiple of; 256 for null.
uint32_t Alignment(const void* p) {
  return 1u << std::min(std::countr_zero(reinterpret_cast<uintptr_t>(p)), 8);
}

}  // namespace

// What an algorithm is chosen for.
struct CublasLt::Key {
  explicit Key(const Gemm& g)
      : in(g.in),
        out(g.out),
        bias(g.bias != nullptr),
        accumulate(g.accumulate),
        x_align(Alignment(g.x)),
        w_align(Alignment(g.w)),
        y_align(Alignment(g.y)),
        bias_align(Alignment(g.bias)),
        n_rows(g.n_rows),
        n_out(g.n_out),
        n_in(g.n_in),
        x_pitch(g.x_pitch),
        w_pitch(g.w_pitch),
        y_pitch(g.y_pitch) {}
  auto operator<=>(const Key&) const = default;

  DType in, out;
  bool bias, accumulate;
  uint32_t x_align, w_align, y_align, bias_align;
  int64_t n_rows, n_out, n_in, x_pitch, w_pitch, y_pitch;
};

// The library reads matrices by columns: to it W is [n_in, n_out], X [n_in, n_rows] and Y
// [n_out, n_rows], and Y = W^T X.
struct CublasLt::Product {
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algo{};
};

// The library stays loaded: it has state of the driver's.
struct CublasLt::Library {
  ~Library() {
    for (auto& [key, product] : products) Destroy(product);
    if (handle != nullptr) cublasLtDestroy(handle);
  }

  void Destroy(const Product& p) const {
    if (p.desc != nullptr) cublasLtMatmulDescDestroy(p.desc);
    for (cublasLtMatrixLayout_t layout : {p.w, p.x, p.y}) {
      if (layout != nullptr) cublasLtMatrixLayoutDestroy(layout);
    }
  }

  cublasStatus_t Choose(const Gemm& gemm, const Key& key, Product& product) const;

#define OKV_DECLARE(name) decltype(&::name) name = nullptr;
  OKV_CUBLASLT_FUNCTIONS(OKV_DECLARE)
#undef OKV_DECLARE
  cublasLtHandle_t handle = nullptr;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  std::map<Key, Product> products;
};

CublasLt::CublasLt(std::unique_ptr<Library> library) : lib_(std::move(library)) {}
CublasLt::~CublasLt() = default;

Result<std::unique_ptr<CublasLt>> CublasLt::Open(void* workspace, size_t workspace_bytes) {
  auto library = std::make_unique<Library>();
  Library& lib = *library;
  lib.workspace = workspace;
  lib.workspace_bytes = workspace_bytes;
  void* loaded = nullptr;
  std::string errors;
  for (const char* name : kNames) {
    loaded = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (loaded != nullptr) break;
    errors += fmt::format("{}{}", errors.empty() ? "" : "; ", dlerror());
  }
  if (loaded == nullptr) {
    return Unsupported(
        fmt::format("cuBLASLt was not found ({}): it is looked for where the system "
                    "keeps libraries and in LD_LIBRARY_PATH",
                    errors));
  }
#define OKV_LOAD(name)                                                                    \
  lib.name = reinterpret_cast<decltype(&::name)>(dlsym(loaded, #name));                   \
  if (lib.name == nullptr) {                                                              \
    return Unsupported(fmt::format("cuBLASLt has no function {}: {}", #name, dlerror())); \
  }
  OKV_CUBLASLT_FUNCTIONS(OKV_LOAD)
#undef OKV_LOAD
  const cublasStatus_t status = lib.cublasLtCreate(&lib.handle);
  if (status != CUBLAS_STATUS_SUCCESS) {
    return Unsupported(fmt::format("cuBLASLt cannot be used on this device: {}",
                                   lib.cublasLtGetStatusString(status)));
  }
  return std::unique_ptr<CublasLt>(new CublasLt(std::move(library)));
}

#define OKV_RETURN_IF_CUBLAS_ERROR(expr)                          \
  do {                                                            \
    const cublasStatus_t okv_status_ = (expr);                    \
    if (okv_status_ != CUBLAS_STATUS_SUCCESS) return okv_status_; \
  } while (0)

cublasStatus_t CublasLt::Library::Choose(const Gemm& g, const Key& key, Product& p) const {
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    return cublasLtMatmulDescSetAttribute(p.desc, attribute, &value, sizeof(value));
  };
  const auto layout = [&](cublasLtMatrixLayout_t* out, DType type, int64_t rows, int64_t columns,
                          int64_t pitch) {
    return cublasLtMatrixLayoutCreate(out, CudaType(type), static_cast<uint64_t>(rows),
                                      static_cast<uint64_t>(columns), pitch);
  };
  OKV_RETURN_IF_CUBLAS_ERROR(cublasLtMatmulDescCreate(&p.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  OKV_RETURN_IF_CUBLAS_ERROR(set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T));
  if (g.bias != nullptr) {
    OKV_RETURN_IF_CUBLAS_ERROR(set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS));
    OKV_RETURN_IF_CUBLAS_ERROR(set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias));
  }
  OKV_RETURN_IF_CUBLAS_ERROR(layout(&p.w, g.in, g.n_in, g.n_out, g.w_pitch));
  OKV_RETURN_IF_CUBLAS_ERROR(layout(&p.x, g.in, g.n_in, g.n_rows, g.x_pitch));
  OKV_RETURN_IF_CUBLAS_ERROR(layout(&p.y, g.out, g.n_out, g.n_rows, g.y_pitch));

  cublasLtMatmulPreference_t raw = nullptr;
  OKV_RETURN_IF_CUBLAS_ERROR(cublasLtMatmulPreferenceCreate(&raw));
  const std::unique_ptr<std::remove_pointer_t<cublasLtMatmulPreference_t>,
                        decltype(cublasLtMatmulPreferenceDestroy)>
      preference(raw, cublasLtMatmulPreferenceDestroy);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    return cublasLtMatmulPreferenceSetAttribute(raw, attribute, &value, sizeof(value));
  };
  // Parts of a sum are kept in f32, also where Y is bf16.
  constexpr uint32_t kReduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  const std::pair<cublasLtMatmulPreferenceAttributes_t, uint32_t> wishes[] = {
      {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, kReduction},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.w_align},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.x_align},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.y_align},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.y_align},
  };
  OKV_RETURN_IF_CUBLAS_ERROR(prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes));
  for (const auto& [attribute, value] : wishes)
    OKV_RETURN_IF_CUBLAS_ERROR(prefer(attribute, value));

  cublasLtMatmulHeuristicResult_t best{};
  int found = 0;
  OKV_RETURN_IF_CUBLAS_ERROR(
      cublasLtMatmulAlgoGetHeuristic(handle, p.desc, p.w, p.x, p.y, p.y, raw, 1, &best, &found));
  if (found == 0) return CUBLAS_STATUS_NOT_SUPPORTED;
  p.algo = best.algo;
  return best.state;
}

Status CublasLt::Find(const Gemm& gemm, Product** product) {
  const Key key(gemm);
  const auto known = lib_->products.find(key);
  if (known != lib_->products.end()) {
    *product = &known->second;
    return {};
  }
  Product made;
  const cublasStatus_t status = lib_->Choose(gemm, key, made);
  if (status != CUBLAS_STATUS_SUCCESS) {
    lib_->Destroy(made);
    return Unsupported(
        fmt::format("cuBLASLt does not multiply {} rows of {} {} values with {} "
                    "rows of weights into {}: {}",
                    gemm.n_rows, gemm.n_in, DTypeName(gemm.in), gemm.n_out, DTypeName(gemm.out),
                    lib_->cublasLtGetStatusString(status)));
  }
  *product = &lib_->products.emplace(key, made).first->second;
  return {};
}

Status CublasLt::Prepare(const Gemm& gemm) {
  Product* product = nullptr;
  return Find(gemm, &product);
}

void CublasLt::Multiply(const Gemm& gemm, cudaStream_t stream) {
  Product* product = nullptr;
  const Status found = Find(gemm, &product);
  OKV_CHECK(found.ok(), "{}", found.message());
  if (gemm.bias != nullptr) {
    lib_->cublasLtMatmulDescSetAttribute(product->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                         &gemm.bias, sizeof(gemm.bias));
  }
  const float alpha = 1;
  const float beta = gemm.accumulate ? 1 : 0;
  const cublasStatus_t status =
      lib_->cublasLtMatmul(lib_->handle, product->desc, &alpha, gemm.w, product->w, gemm.x,
                           product->x, &beta, gemm.y, product->y, gemm.y, product->y,
                           &product->algo, lib_->workspace, lib_->workspace_bytes, stream);
  if (status == CUBLAS_STATUS_ALLOC_FAILED) {
    throw OutOfMemory("the GPU has no memory left for cuBLASLt");
  }
  OKV_CHECK(status == CUBLAS_STATUS_SUCCESS, "{}", lib_->cublasLtGetStatusString(status));
}

}  // namespace omnikv::cuda
