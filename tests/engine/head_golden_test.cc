// Every family with the heads of a published model against transformers' logits
// (tests/golden/heads, made by scripts/make_head_goldens.py): what the tiny goldens, with heads of
// 8 and 16, leave to the kernels for any shape. On a card the test also says which kernels served,
// and insists on the tuned ones.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#include <utility>

#include "../test_data.h"
#include "engine/core.h"
#include "golden_data.h"
#include "hashed_weights.h"
#include "kernel_log.h"
#include "on_device.h"

namespace omnikv::head_golden_test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

#ifdef OMNIKV_HAVE_FLASHINFER
constexpr bool kHaveFlashInfer = true;
#else
constexpr bool kHaveFlashInfer = false;
#endif

// Another folder of such goldens: $OMNIKV_GOLDENS.
std::string Folder() {
  const char* given = std::getenv("OMNIKV_GOLDENS");
  return given != nullptr ? given : TestData("tests/golden/heads");
}

std::vector<std::string> Families() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(Folder())) {
    if (entry.path().extension() == ".json") names.push_back(entry.path().stem());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// What becomes of a prompt.
enum class Prompt {
  kExact,   // f32 throughout
  kChunks,  // few rows at a time, which take the kernels of decode steps
  kFast,    // the type that the device multiplies fastest
};

struct Way {
  const char* name;
  const char* kv_dtype;
  Prompt prompt;
  int32_t chunk = 0;
};
constexpr Way kWays[] = {
    {"f32 K/V, f32 products", "f32", Prompt::kExact},
    {"f16 K/V, f32 products", "f16", Prompt::kExact},
    {"f16 K/V, 8 rows at a time", "f16", Prompt::kChunks, 8},
    {"f16 K/V, 16 rows at a time", "f16", Prompt::kChunks, 16},
    {"f16 K/V, fast", "f16", Prompt::kFast},
};

using Kernels = std::map<OpShape, std::vector<std::string>>;

class Heads : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  void SetUp() override {
    const auto& [family, device] = GetParam();
    if (const std::string reason = WhyNotOn(device); !reason.empty()) GTEST_SKIP() << reason;
    golden_ = ReadJson(fmt::format("{}/{}.json", Folder(), family));
    auto tensors = SafetensorsModel::Open(fmt::format("{}/{}.safetensors", Folder(), family));
    ASSERT_TRUE(tensors.ok()) << tensors.status().message();
    tensors_ = std::move(*tensors);
    model_ = fs::temp_directory_path() / fmt::format("omnikv_{}_{}_{}", family, device, getpid());
    WriteHashedModel(golden_, model_);
  }
  void TearDown() override {
    std::error_code ignored;
    if (!model_.empty()) fs::remove_all(model_, ignored);
  }
  const std::string& device() const { return std::get<1>(GetParam()); }
  int64_t Number(const char* key) const { return golden_.at("config").at(key).get<int64_t>(); }

  double Bound(const Way& way) const {
    if (way.prompt == Prompt::kFast && device() != "ref") {
      // What rounding the inputs of a prompt's products alone costs, three times: attention and
      // what gated products write are rounded besides.
      return 3 * golden_.at("fast_moves_logits_by").get<double>() /
             golden_.at("largest_logit").get<double>();
    }
    // f16 K/V are rounded from sums in another order: one may become its neighbour.
    return way.kv_dtype == std::string("f32") ? F32Tolerance(device()) : 3e-4;
  }
  void Check(const Way& way);
  void CheckKernels(const Way& way, const Kernels& kernels, const std::string& card) const;

  nlohmann::json golden_;
  std::unique_ptr<SafetensorsModel> tensors_;
  fs::path model_;
};

void Heads::Check(const Way& way) {
  const EngineOptions options{.model = model_.string(),
                              .device = device(),
                              .threads = 2,
                              .context = 512,
                              .kv_dtype = way.kv_dtype,
                              .precision = way.prompt == Prompt::kExact ? "full" : "fast",
                              .prefill_chunk = way.chunk};
  KernelLog* log = nullptr;
  const auto engine = LoadEngine(options, [&]() -> Result<std::unique_ptr<Backend>> {
    OKV_ASSIGN_OR_RETURN(auto backend, MakeBackend(options));
    auto logged = std::make_unique<KernelLog>(std::move(backend));
    log = logged.get();
    return std::unique_ptr<Backend>(std::move(logged));
  });
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  const auto session = (*engine)->NewSession({.name = "full"});
  ASSERT_TRUE(session.ok()) << session.status().message();
  const auto vocab = static_cast<size_t>((*engine)->vocab());
  const bool f16 = way.kv_dtype == std::string("f16");
  const auto logits = Rows(*tensors_, f16 ? "f16_logits" : "logits");
  const auto greedy_logits = Rows(*tensors_, f16 ? "f16_greedy_logits" : "greedy_logits");
  const auto positions = golden_.at("positions").get<std::vector<int64_t>>();
  const auto greedy = golden_.at("greedy").get<std::vector<int32_t>>();
  const double bound = Bound(way);

  double worst = 0;
  size_t next = 0;
  const Status prompted = (*session)->PrefillLogits(
      golden_.at("prompt").get<std::vector<int32_t>>(), [&](int64_t position, const float* row) {
        if (next == positions.size() || position != positions[next]) return;
        const double error = Error(row, logits[next++]);
        worst = std::max(worst, error);
        EXPECT_LE(error, bound) << "position " << position;
      });
  ASSERT_TRUE(prompted.ok()) << prompted.message();
  ASSERT_EQ(next, positions.size());
  const double worst_prompt = std::exchange(worst, 0);
  for (size_t i = 0; i < greedy.size(); ++i) {
    const std::vector<float>& expected = greedy_logits[i];
    const double error = Error((*session)->logits(), expected);
    worst = std::max(worst, error);
    EXPECT_LE(error, bound) << "greedy token " << i;
    // What the error that was measured in the prompt cannot turn.
    if (Margin(expected) > 2 * worst_prompt * Largest(expected)) {
      EXPECT_EQ(ArgMax((*session)->logits(), vocab), ArgMax(expected.data(), vocab));
    }
    ASSERT_TRUE((*session)->Step(greedy[i]).ok());
  }
  fmt::print(
      "heads: {} on {}, {}: prompt {:.1e}, decode {:.1e} of the largest logit, bound {:.1e}\n",
      std::get<0>(GetParam()), device(), way.name, worst_prompt, worst, bound);
  const Kernels kernels = log->Kernels();
  for (const auto& [op, names] : kernels) {
    if (names.empty()) continue;
    fmt::print("kernels:   {}: {:.200}\n", op.ToString(),
               fmt::format("{}", fmt::join(names, " | ")));
  }
  if (device() == "cuda") CheckKernels(way, kernels, (*engine)->device());
}

// The kernels that are made for such heads and rows, and not those that take any shape.
void Heads::CheckKernels(const Way& way, const Kernels& kernels, const std::string& card) const {
  const int64_t dim = Number("head_dim");
  const bool hopper =
      card.find("H100") != std::string::npos || card.find("H200") != std::string::npos;
  const auto attention = [&](const OpShape& op) -> std::string {
    if (way.kv_dtype == std::string("f32")) return "GenericKernel<float>";
    if (way.prompt != Prompt::kFast || op.rows == 1)
      return fmt::format("AttendKernel<__half, {},", dim);
    // The library's where the rows fill half of a block of queries, and there is no window.
    const bool sized = dim == 64 || dim == 96 || dim == 128 || dim == 256;
    const bool filled = 2 * op.rows >= (dim == 64 ? 192 : 128);
    const bool library = kHaveFlashInfer && hopper && sized && filled && !op.window;
    return library ? "CopyTails" : fmt::format("AttendTile<__half, {}, false>", dim);
  };
  const auto product = [&](const OpShape& op) -> std::string {
    if (op.rows == 1) return "StreamKernel<";
    if (op.rows <= 8 && hopper) return "StationaryKernel<";
    if (op.rows <= 16 && hopper) return "HopperKernel<";
    return op.rows <= 16 ? "TileKernel<" : "library";
  };
  std::set<int32_t> attended;  // rows
  for (const auto& [op, names] : kernels) {
    const std::string all = fmt::format("{}", fmt::join(names, " | "));
    SCOPED_TRACE(op.ToString());
    if (op.name == "Attend") {
      attended.insert(op.rows);
      EXPECT_THAT(all, HasSubstr(attention(op)));
    } else if (op.name == "Linear" || op.name == "NormGatedFfn" || op.name == "NormQkvRopeAppend") {
      EXPECT_THAT(all, HasSubstr(product(op)));
    } else if (op.name == "NormLogits") {  // some rows at a time
      EXPECT_THAT(all, Not(HasSubstr("AnyKernel")));
    }
  }
  const auto prompt_rows = static_cast<int32_t>(golden_.at("prompt").size());
  EXPECT_EQ(attended, (std::set<int32_t>{1, way.chunk > 0 ? way.chunk : prompt_rows}));
}

TEST_P(Heads, MatchTransformers) {
  for (const Way& way : kWays) {
    if (&way != kWays && device() == "ref") continue;  // it is slow, and has one way
    SCOPED_TRACE(way.name);
    Check(way);
  }
}

INSTANTIATE_TEST_SUITE_P(Goldens, Heads,
                         ::testing::Combine(::testing::ValuesIn(Families()),
                                            ::testing::Values("ref", "cpu", "cuda")),
                         NameOfBoth);

}  // namespace
}  // namespace omnikv::head_golden_test
