#include "backend/cpu/prefill/onednn.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <map>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/memory.h"

#if defined(OMNIKV_ONEDNN_SONAME)
#include <oneapi/dnnl/dnnl.h>
#endif

namespace omnikv::prefill {

#if defined(OMNIKV_ONEDNN_SONAME)

#define OKV_DNNL_FUNCTIONS(F)                \
  F(dnnl_engine_create)                      \
  F(dnnl_engine_destroy)                     \
  F(dnnl_stream_create)                      \
  F(dnnl_stream_destroy)                     \
  F(dnnl_stream_wait)                        \
  F(dnnl_memory_desc_init_by_strides)        \
  F(dnnl_memory_desc_init_by_tag)            \
  F(dnnl_memory_desc_get_size)               \
  F(dnnl_memory_create)                      \
  F(dnnl_memory_set_data_handle)             \
  F(dnnl_memory_destroy)                     \
  F(dnnl_matmul_desc_init)                   \
  F(dnnl_primitive_attr_create)              \
  F(dnnl_primitive_attr_destroy)             \
  F(dnnl_primitive_attr_set_scratchpad_mode) \
  F(dnnl_primitive_desc_create)              \
  F(dnnl_primitive_desc_query_md)            \
  F(dnnl_primitive_desc_destroy)             \
  F(dnnl_primitive_create)                   \
  F(dnnl_primitive_execute)                  \
  F(dnnl_primitive_destroy)

// The library stays loaded: its OpenMP runtime does not survive being closed.
struct OneDnn::Library {
  ~Library();

  void* handle = nullptr;
  void (*omp_set_num_threads)(int) = nullptr;  // null: a build of oneDNN without OpenMP
#define OKV_DECLARE(name) decltype(&::name) name = nullptr;
  OKV_DNNL_FUNCTIONS(OKV_DECLARE)
#undef OKV_DECLARE
  dnnl_engine_t engine = nullptr;
  std::vector<dnnl_stream_t> streams;  // [n_threads]
  std::map<OneDnnShape, std::unique_ptr<Product>> products;
};

class OneDnn::Product {
 public:
  explicit Product(const Library& lib) : lib_(lib) {}
  ~Product() {
    for (const Buffers& b : threads) {
      for (dnnl_memory_t memory : {b.x, b.w, b.y, b.scratchpad}) {
        if (memory != nullptr) lib_.dnnl_memory_destroy(memory);
      }
    }
    if (primitive != nullptr) lib_.dnnl_primitive_destroy(primitive);
  }
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;

  struct Buffers {
    dnnl_memory_t x = nullptr, w = nullptr, y = nullptr, scratchpad = nullptr;
    Pages pages;  // what `scratchpad` lies in
  };
  dnnl_primitive_t primitive = nullptr;
  size_t weight_bytes = 0;
  std::vector<Buffers> threads;

 private:
  const Library& lib_;
};

OneDnn::Library::~Library() {
  products.clear();
  for (dnnl_stream_t stream : streams) dnnl_stream_destroy(stream);
  if (engine != nullptr) dnnl_engine_destroy(engine);
}

OneDnn::OneDnn(std::unique_ptr<Library> library) : lib_(std::move(library)) {}
OneDnn::~OneDnn() = default;

Result<std::unique_ptr<OneDnn>> OneDnn::Open(int n_threads) {
  auto library = std::make_unique<Library>();
  Library& lib = *library;
  lib.handle = dlopen(OMNIKV_ONEDNN_SONAME, RTLD_NOW | RTLD_LOCAL);
  if (lib.handle == nullptr) {
    return Unsupported(fmt::format("oneDNN cannot be used: {}", dlerror()));
  }
#define OKV_LOAD(name)                                                                     \
  lib.name = reinterpret_cast<decltype(&::name)>(dlsym(lib.handle, #name));                \
  if (lib.name == nullptr) {                                                               \
    return Unsupported(fmt::format("{} has no function {}", OMNIKV_ONEDNN_SONAME, #name)); \
  }
  OKV_DNNL_FUNCTIONS(OKV_LOAD)
#undef OKV_LOAD
  lib.omp_set_num_threads =
      reinterpret_cast<void (*)(int)>(dlsym(lib.handle, "omp_set_num_threads"));
  if (lib.dnnl_engine_create(&lib.engine, dnnl_cpu, 0) != dnnl_success) {
    return Unsupported(fmt::format("{} offers no CPU engine", OMNIKV_ONEDNN_SONAME));
  }
  for (int i = 0; i < n_threads; ++i) {
    dnnl_stream_t stream = nullptr;
    if (lib.dnnl_stream_create(&stream, lib.engine, dnnl_stream_default_flags) != dnnl_success) {
      return Unsupported(fmt::format("{} makes no stream", OMNIKV_ONEDNN_SONAME));
    }
    lib.streams.push_back(stream);
  }
  return std::unique_ptr<OneDnn>(new OneDnn(std::move(library)));
}

const OneDnn::Product* OneDnn::Find(const OneDnnShape& shape) const {
  const auto found = lib_->products.find(shape);
  return found != lib_->products.end() ? found->second.get() : nullptr;
}

const OneDnn::Product* OneDnn::Prepare(const OneDnnShape& s) {
  Library& lib = *lib_;
  const auto found = lib.products.find(s);
  if (found != lib.products.end()) return found->second.get();
  std::unique_ptr<Product>& slot = lib.products[s];  // stays null when anything below fails

  const dnnl_data_type_t type = s.type == DType::kBF16 ? dnnl_bf16 : dnnl_f32;
  const auto matrix = [&](dnnl_memory_desc_t* out, dnnl_data_type_t of, int64_t rows, int64_t cols,
                          int64_t row_stride, int64_t col_stride) {
    const dnnl_dims_t dims = {rows, cols};
    const dnnl_dims_t strides = {row_stride, col_stride};
    return lib.dnnl_memory_desc_init_by_strides(out, 2, dims, of, strides) == dnnl_success;
  };
  dnnl_memory_desc_t x, w, y;
  const dnnl_dims_t w_dims = {s.k, s.n};
  const bool described =
      matrix(&x, type, s.m, s.k, s.ldx, 1) && matrix(&y, dnnl_f32, s.m, s.n, s.ldy, 1) &&
      (s.packed_w ? lib.dnnl_memory_desc_init_by_tag(&w, 2, w_dims, type, dnnl_format_tag_any) ==
                        dnnl_success
                  : matrix(&w, type, s.k, s.n, 1, s.ldw));
  dnnl_matmul_desc_t matmul;
  dnnl_primitive_attr_t attributes = nullptr;
  if (!described || lib.dnnl_matmul_desc_init(&matmul, &x, &w, nullptr, &y) != dnnl_success ||
      lib.dnnl_primitive_attr_create(&attributes) != dnnl_success) {
    return nullptr;
  }
  // With its own scratchpad a primitive may only run on the thread that made it.
  lib.dnnl_primitive_attr_set_scratchpad_mode(attributes, dnnl_scratchpad_mode_user);
  dnnl_primitive_desc_t desc = nullptr;
  const dnnl_status_t made =
      lib.dnnl_primitive_desc_create(&desc, &matmul, attributes, lib.engine, nullptr);
  lib.dnnl_primitive_attr_destroy(attributes);
  if (made != dnnl_success) return nullptr;

  auto product = std::make_unique<Product>(lib);
  bool ok = lib.dnnl_primitive_create(&product->primitive, desc) == dnnl_success;
  w = *lib.dnnl_primitive_desc_query_md(desc, dnnl_query_weights_md, 0);
  const dnnl_memory_desc_t scratchpad =
      *lib.dnnl_primitive_desc_query_md(desc, dnnl_query_scratchpad_md, 0);
  lib.dnnl_primitive_desc_destroy(desc);
  product->weight_bytes = lib.dnnl_memory_desc_get_size(&w);
  for (int i = 0; ok && i < static_cast<int>(lib.streams.size()); ++i) {
    Product::Buffers& b = product->threads.emplace_back();
    const auto make = [&](dnnl_memory_t* out, const dnnl_memory_desc_t& of, void* at) {
      return lib.dnnl_memory_create(out, &of, lib.engine, at) == dnnl_success;
    };
    const size_t bytes = lib.dnnl_memory_desc_get_size(&scratchpad);
    if (bytes > 0) {
      Result<Pages> pages = Pages::Reserve(bytes);
      if (!pages.ok()) return nullptr;
      b.pages = std::move(*pages);
    }
    ok = make(&b.x, x, DNNL_MEMORY_NONE) && make(&b.w, w, DNNL_MEMORY_NONE) &&
         make(&b.y, y, DNNL_MEMORY_NONE) && make(&b.scratchpad, scratchpad, b.pages.data());
  }
  if (ok) slot = std::move(product);
  return slot.get();
}

void OneDnn::Run(const Product& product, int thread, const void* x, const void* w, float* y) const {
  Library& lib = *lib_;
  const Product::Buffers& b = product.threads[static_cast<size_t>(thread)];
  if (lib.omp_set_num_threads != nullptr) lib.omp_set_num_threads(1);  // this thread's setting
  lib.dnnl_memory_set_data_handle(b.x, const_cast<void*>(x));
  lib.dnnl_memory_set_data_handle(b.w, const_cast<void*>(w));
  lib.dnnl_memory_set_data_handle(b.y, y);
  const dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, b.x},
                                  {DNNL_ARG_WEIGHTS, b.w},
                                  {DNNL_ARG_DST, b.y},
                                  {DNNL_ARG_SCRATCHPAD, b.scratchpad}};
  dnnl_stream_t stream = lib.streams[static_cast<size_t>(thread)];
  const dnnl_status_t status = lib.dnnl_primitive_execute(product.primitive, stream, 4, args);
  OKV_CHECK(status == dnnl_success, "oneDNN status {}", static_cast<int>(status));
  lib.dnnl_stream_wait(stream);
}

size_t OneDnn::WeightBytes(const Product& product) {
  return product.weight_bytes;
}

#else

struct OneDnn::Library {};
class OneDnn::Product {};

OneDnn::OneDnn(std::unique_ptr<Library> library) : lib_(std::move(library)) {}
OneDnn::~OneDnn() = default;
Result<std::unique_ptr<OneDnn>> OneDnn::Open(int) {
  return Unsupported("this build of omnikv is without oneDNN");
}
const OneDnn::Product* OneDnn::Prepare(const OneDnnShape&) {
  return nullptr;
}
const OneDnn::Product* OneDnn::Find(const OneDnnShape&) const {
  return nullptr;
}
void OneDnn::Run(const Product&, int, const void*, const void*, float*) const {}
size_t OneDnn::WeightBytes(const Product&) {
  return 0;
}

#endif

}  // namespace omnikv::prefill
