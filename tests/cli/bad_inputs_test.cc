// Bad files, flags and requests: each gives one sentence that names what is wrong, on stderr,
// nothing on stdout, and the exit code that omnikv --help names; never a crash.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "program.h"

namespace omnikv::cli::bad_inputs_test {
namespace {

const fs::path kRoot = OMNIKV_SOURCE_DIR;
const fs::path kModel = kRoot / "models/omnikv-tiny-q8_0.gguf";
const fs::path kFolder = kRoot / "tests/golden/models/llama";

class BadInputs : public ProgramTest {
 protected:
  // Runs it; expects the exit code, one sentence on stderr with all of `parts` (after what memory
  // will hold, where it came that far), nothing on stdout.
  void Expect(const std::string& arguments, int exit_code, const std::vector<std::string>& parts) {
    const Outcome o = Run(arguments);
    EXPECT_EQ(o.exit_code, exit_code) << arguments << "\n" << o.err;
    EXPECT_EQ(o.out, "") << arguments;
    const bool started = o.err.starts_with("host memory: weights ");
    const std::string sentence = started ? o.err.substr(o.err.find('\n') + 1) : o.err;
    EXPECT_TRUE(sentence.starts_with("omnikv: ")) << arguments << "\n" << o.err;
    EXPECT_EQ(std::count(sentence.begin(), sentence.end(), '\n'), 1) << arguments << "\n" << o.err;
    for (const std::string& part : parts) {
      EXPECT_NE(sentence.find(part), std::string::npos)
          << arguments << "\nexpected '" << part << "' in: " << o.err;
    }
    ++cases_;
  }

  // A copy of a small model folder whose config.json was changed.
  std::string Folder(const std::function<void(nlohmann::json&)>& change) {
    const fs::path folder = dir_ / ("model" + std::to_string(folders_++));
    fs::create_directories(folder);
    fs::copy_file(kFolder / "model.safetensors", folder / "model.safetensors");
    nlohmann::json config = nlohmann::json::parse(Slurp(kFolder / "config.json"));
    change(config);
    Spill(folder / "config.json", config.dump());
    return folder;
  }
  std::string File(const std::string& name, const std::string& bytes) {
    Spill(dir_ / name, bytes);
    return dir_ / name;
  }

  int folders_ = 0;
  int cases_ = 0;
};

TEST_F(BadInputs, EachGivesOneSentenceAndItsExitCode) {
  const std::string gguf = Slurp(kModel);
  ASSERT_GT(gguf.size(), 1000000u);

  // Files.
  Expect("run -p x -m /nonexistent/model", 2, {"/nonexistent/model"});
  Expect("run -p x -m " + File("empty.gguf", ""), 1, {"empty.gguf"});
  Expect("run -p x -m " + File("text.gguf", "this is no model, whatever its name says"), 1,
         {"text.gguf"});
  Expect("run -p x -m " + File("torn.gguf", gguf.substr(0, 20000000)), 1, {"torn.gguf"});
  Expect("run -p x -m " + File("head.gguf", gguf.substr(0, 5000)), 1, {"head.gguf"});
  std::string version = gguf.substr(0, 2000000);
  version[4] = 9;
  Expect("run -p x -m " + File("version.gguf", version), 2, {"version.gguf", "version 9"});
  std::string counts = gguf.substr(0, 2000000);
  counts[15] = '\x7f';
  Expect("run -p x -m " + File("counts.gguf", counts), 1, {"counts.gguf"});
  Expect("run -p x -m " + std::string(dir_), 2, {"config.json"});

  // Models.
  Expect("logits --tokens 1 --out x.npy -m " + Folder([](auto& c) {
           c["model_type"] = "mamba";
           c["architectures"] = {"MambaForCausalLM"};
         }),
         2, {"mamba", "llama", "gemma3"});
  Expect("logits --tokens 1 --out x.npy -m " + Folder([](auto& c) { c.erase("hidden_size"); }), 1,
         {"config.json", "hidden_size"});
  Expect("logits --tokens 1 --out x.npy -m " +
             Folder([](auto& c) { c["num_hidden_layers"] = 1000000000; }),
         1, {"num_hidden_layers", "1000000000"});
  Expect("logits --tokens 1 --out x.npy -m " + Folder([](auto& c) { c["hidden_size"] = "32"; }), 1,
         {"hidden_size"});
  Expect("logits --tokens 1 --out x.npy -m " + Folder([](auto& c) { c["num_hidden_layers"] = 7; }),
         1, {"layers.3", "has no tensor"});
  Expect(
      "logits --tokens 1 --out x.npy -m " + Folder([](auto& c) { c["intermediate_size"] = 128; }),
      1, {"mlp"});
  Expect("logits --tokens 1 --out x.npy -m " + Folder([](auto& c) { c["hidden_act"] = "swish9"; }),
         2, {"hidden_act", "swish9"});
  Expect("logits --tokens 1 --out x.npy -m " + Folder([](auto& c) {
           c["quantization_config"] = {{"quant_method", "gptq"}};
         }),
         2, {"quantization_config"});
  const std::string broken_json = Folder([](auto&) {});
  Spill(fs::path(broken_json) / "config.json", "{\"model_type\": ");
  Expect("logits --tokens 1 --out x.npy -m " + broken_json, 1, {"config.json"});
  const std::string torn = Folder([](auto&) {});
  fs::resize_file(fs::path(torn) / "model.safetensors", 3000);
  Expect("logits --tokens 1 --out x.npy -m " + torn, 1, {"model.safetensors"});
  const std::string no_text = Folder([](auto&) {});
  Expect("run -p x -m " + no_text, 2, {"tokenizer.json"});
  Spill(fs::path(no_text) / "tokenizer.model", "");
  Expect("run -p x -m " + no_text, 2, {"tokenizer.model alone is not read"});

  // Requests.
  Expect("run -p hello --ctx 4", 2, {"context holds 4"});
  Expect("logits --tokens 1,2,9999999 --out " + std::string(dir_ / "x.npy"), 2,
         {"9999999", "8192"});
  Expect("logits --tokens 1,two --out " + std::string(dir_ / "x.npy"), 2, {"--tokens", "byte 2"});
  Expect("logits --tokens 1,,2 --out " + std::string(dir_ / "x.npy"), 2,
         {"--tokens", "',' at byte 2"});
  Expect("logits --tokens 1 --out /nonexistent/x.npy", 2, {"--out", "/nonexistent/x.npy"});
  Expect("run -f /nonexistent/prompt.txt", 2, {"-f", "/nonexistent/prompt.txt"});
  Expect("run -f " + std::string(dir_), 2, {"folder"});
  Expect("run", 2, {"-p TEXT", "-f FILE"});
  Expect("tokenize --decode -p '[1, 99999]'", 2, {"99999", "8191"});
  Expect("tokenize --decode -p 'hello'", 2, {"JSON array"});

  Expect("tokenize -m " + no_text + " -p x", 2, {"tokenizer"});
  Expect("info --policy lru", 2, {"'lru'", "omnikv"});
  Expect("info --policy omnikv --set budget=-5", 2, {"budget is '-5'"});
  Expect("eval quickstart --document /nonexistent/folder", 2, {"/nonexistent/folder"});
  const std::string big = File("big.txt", "");
  fs::resize_file(big, (256u << 20) + 1);
  Expect("run -f " + big, 2, {"-f", "big.txt", "256.00 MiB"});
  Expect("tokenize -f - <" + big, 2, {"-f", "'-'", "256.00 MiB"});
  Expect("eval document --out x --tokens 99999999999", 2, {"--tokens"});

  Expect("info --policy streaming --set sinks=2000", 2, {"policy streaming: sinks is 2000"});
  Expect("info --policy duo --set gates=/nonexistent", 2, {"/nonexistent"});
  Expect("info --policy quest --set dense_layers=16", 2, {"dense_layers is 16", "16 layers"});
  Expect("info --policy kcache --set first_layers=99", 2, {"first_layers is 99", "16 layers"});
  const std::string needles = "eval needles --docs 1 --lengths 600 --policies full ";
  Expect(needles + "--set bogus.budget=5", 2, {"--set is 'bogus.budget=5'", "which is full"});
  Expect(needles + "--set streaming.budget=5", 2, {"--set is 'streaming.budget=5'"});

  // Flags.
  for (const std::string flag :
       {"--seats 0", "--seats 65", "--port 99999", "--kv-tokens -1", "--max-tokens -1",
        "--request-timeout 1e300", "--request-timeout -1", "--grace -1", "--sse-ping 0",
        "--max-waiting -1", "--kept-contexts -1"}) {
    Expect("serve --device cpu " + flag, 2, {flag.substr(0, flag.find(' '))});
  }
  Expect("serve --device cpu --max-body 0", 2, {"--max-body is 0"});
  Expect("serve --device cpu --store-size 1", 2, {"--store-size", "--store"});
  Expect("run -p x --temp -1", 2, {"--temp is -1"});
  Expect("run -p x --top-p 1.5", 2, {"--top-p is 1.5"});
  Expect("run -p x -n -3", 2, {"-n is -3"});
  Expect("run -p x --threads -1", 2, {"--threads is -1"});
  Expect("run -p x --device tpu", 2, {"--device is 'tpu'"});
  Expect("run -p x --device cuda:x", 2, {"--device is 'cuda:x'", "cuda:N"});
  Expect("run -p x --device cuda:99", 2, {"--device is 'cuda:99'"});  // no CUDA, or no such card
  Expect("run -p x --device cpu --gpu-memory 24GiB", 2, {"--gpu-memory is given", "runs on cpu"});
  Expect("run -p x --device cpu --place host", 2, {"--place is given", "runs on cpu"});
  Expect("run -p x --place moon", 2, {"--place is 'moon'", "auto, device, host or disk"});
  Expect("run -p x --device cpu --place disk", 2, {"--place disk is given", "no --kv-folder"});
  Expect("run -p x --disk-space 8GiB", 2, {"--disk-space is given", "no --kv-folder"});
  Expect("run -p x --disk-space 0", 2, {"--disk-space is 0"});
  Expect("run -p x --kv-folder /nonexistent --device cpu", 2,
         {"--kv-folder: /nonexistent", "no file can be made there"});
  Expect("run -p x --place host --kv-folder . --device cpu", 2, {"--place is given", "on cpu"});
  Expect("run -p x --place disk --disk-space 1MiB --kv-folder . --device cpu --ctx 32k", 1,
         {"go to the disk", "--disk-space 1.00 MiB"});
  Expect("run -p x --place disk --policy full --kv-folder . --device cpu", 2,
         {"--place is disk", "full reads no layer sparsely"});
  Expect("run -p x --device cpu --host-reads attend", 2, {"--host-reads is given", "runs on cpu"});
  Expect("run -p x --host-reads moon", 2, {"--host-reads is 'moon'", "auto, fetch or attend"});
  Expect("run -p x --gpu-memory 0", 2, {"--gpu-memory is 0"});
  Expect("run -p x --policy lru", 2, {"'lru'", "omnikv"});
  Expect("run -p x --policy omnikv --set budget=-5", 2, {"budget is '-5'"});
  Expect("run -p x --policy omnikv --set nonsense", 2, {"--set is 'nonsense'"});
  Expect("run -p x --policy omnikv --set filters=2,99", 2, {"layer 99"});
  Expect("run -p x --policy omnikv --set mem=0.5 --set budget=64", 2,
         {"mem is 0.5 and budget is 64"});
  Expect("run -p x --set budget=64 --set tail=8 --working-set 71", 2,
         {"--working-set is 71", "at least the 72 tokens that a layer reads"});
  Expect("bench --hits --policy full", 2, {"--policy is full", "no working sets"});
  Expect("bench --hits -f " + File("short.txt", "Once upon a time."), 2,
         {"expected more than the 1280 that a layer reads and the 256 steps"});
  Expect("bench --hits --working-sets 0.5", 2, {"--working-sets"});
  Expect("bench --working-sets 2", 2, {"--hits"});
  Expect("logits --tokens 1 --out x.npy --policy omnikv -m " +
             std::string(kRoot / "tests/golden/models/mistral"),
         2, {"policy omnikv", "sliding window"});
  Expect("run -p x --kv-dtype int3", 2, {"--kv-dtype is 'int3'"});
  Expect("run -p x --host-memory lots", 2, {"--host-memory is 'lots'"});
  Expect("run -p x --ctx -1", 2, {"--ctx is -1"});
  Expect("run -p x --host-memory 100TiB --ctx 3000000000", 2, {"--ctx is 3000000000"});
  Expect("run -p x --ctx 9223372036854775807", 2, {"--ctx is 9223372036854775807"});

  // Flags that are wrong whatever the model is are found before it is looked for.
  for (const std::string command : {"run -p x -m /nonexistent", "chat -m /nonexistent"}) {
    Expect(command + " --temp -1", 2, {"--temp is -1"});
    Expect(command + " -n -3", 2, {"-n is -3"});
    Expect(command + " --policy lru", 2, {"'lru'"});
    Expect(command + " --set budget=-5", 2, {"budget is '-5'"});
    Expect(command + " --policy full --set budget=5", 2, {"no setting 'budget'"});
  }

  // Memory.
  Expect("run -p x --host-memory 10MiB", 1, {"--host-memory 10.00 MiB", "does not fit"});
  Expect("run -p x --ctx 32768 --host-memory 64MiB", 1, {"32768 tokens does not fit"});
  Expect("run -p x --ctx 1000000000 --host-memory 100TiB", 1,
         {"1000000000 tokens does not fit", "of available memory"});
  Expect(
      "run -p x --ctx 4096 --host-memory 256MiB --policy omnikv --set selector=exp"
      " --set budget=4096 --set window=4096 --set select_every_layer=1",
      1, {"policy omnikv keeps", "--host-memory 256.00 MiB leaves", "lower --ctx"});
  EXPECT_GE(cases_, 30);
}

// Whatever the system refuses, and when: the answer, or one sentence.
TEST_F(BadInputs, LittleMemoryEndsInOneSentence) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need the address space";
#endif
  const auto limit = [](int mib) { return "ulimit -v " + std::to_string(1024 * mib) + "; "; };
  // Below this the system cannot map the program and its libraries, whose size depends on what was
  // built in: the loader says so, or the kernel ends the process before it has begun.
  int least = 20;
  while (least < 120 && Run("--help", "", limit(least)).exit_code > 1) least += 5;
  ASSERT_LT(least, 120);
  int answered = 0;
  int refused = 0;
  for (int mib = least; mib <= 240; mib += 5) {
    const Outcome o = Run("run -n 4 -p 'The grass is green.' --device cpu --threads 2 --ctx 4096",
                          "", limit(mib));
    ASSERT_TRUE(o.exit_code == 0 || o.exit_code == 1) << mib << " MiB: " << o.exit_code << o.err;
    (o.exit_code == 0 ? answered : refused) += 1;
    if (o.exit_code == 0) continue;
    const size_t at = o.err.find("omnikv: ");
    ASSERT_NE(at, std::string::npos) << mib << " MiB: " << o.err;
    EXPECT_EQ(std::count(o.err.begin() + static_cast<ptrdiff_t>(at), o.err.end(), '\n'), 1)
        << mib << " MiB: " << o.err;
  }
  EXPECT_GT(answered, 0);
  EXPECT_GT(refused, 2);
}

// Sliding-window layers read their window under every policy; a model may have no other.
TEST_F(BadInputs, InfoCountsWindowsAndSaysWhatCannotRun) {
  const Outcome o =
      Run("info --json --ctx 64 -m " + std::string(kRoot / "tests/golden/models/mistral"));
  ASSERT_EQ(o.exit_code, 0) << o.err;
  const auto json = nlohmann::json::parse(o.out);
  for (const auto& policy : json.at("policies")) {
    if (policy.at("name") == "omnikv" || policy.at("name") == "kascade") {
      EXPECT_NE(policy.at("cannot_run").get<std::string>().find("sliding window"),
                std::string::npos);
    } else if (policy.at("name") == "quest" || policy.at("name") == "blocks" ||
               policy.at("name") == "kcache") {
      EXPECT_NE(policy.at("cannot_run").get<std::string>().find("layers of global attention"),
                std::string::npos);
    } else if (policy.at("name") == "duo" || policy.at("name") == "omnikv_duo") {
      EXPECT_NE(policy.at("cannot_run").get<std::string>().find("gates is not set"),
                std::string::npos);
    } else {
      EXPECT_EQ(policy.at("read_bytes_per_step"), 8 * json.at("kv_bytes_per_token").get<int64_t>());
    }
  }
  EXPECT_EQ(Run("info -m " + std::string(kRoot / "tests/golden/models/mistral")).exit_code, 0);
}

TEST_F(BadInputs, StatsHaveBothMeasures) {
  const Outcome o = Run("run -p hello -n 2 --json --policy omnikv --set mem=0.5");
  ASSERT_EQ(o.exit_code, 0) << o.err;
  const auto stats = nlohmann::json::parse(o.out).at("stats");
  EXPECT_GE(stats.at("read_fraction").get<double>(), 0.5);
  EXPECT_LT(stats.at("read_fraction").get<double>(), 0.7);
  EXPECT_GT(stats.at("held_fraction").get<double>(), 1);  // a block for a few tokens
  EXPECT_GT(stats.at("budget_tokens").get<int64_t>(), 0);
}

}  // namespace
}  // namespace omnikv::cli::bad_inputs_test
