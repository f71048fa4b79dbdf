// Files that commands write and read: results are whole or absent, and mistakes are told before
// anything large is read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "program.h"

namespace omnikv::cli::files_test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

const fs::path kRoot = OMNIKV_SOURCE_DIR;
const fs::path kModel = kRoot / "models/omnikv-tiny-q8_0.gguf";
constexpr size_t kVocab = 8192;

class Files : public ProgramTest {
 protected:
  void ExpectSentence(const Outcome& o, int exit_code, const std::vector<std::string>& parts) {
    EXPECT_EQ(o.exit_code, exit_code) << o.err;
    EXPECT_EQ(o.out, "");
    const bool started = o.err.starts_with("host memory: weights ");
    const std::string sentence = started ? o.err.substr(o.err.find('\n') + 1) : o.err;
    EXPECT_THAT(sentence, StartsWith("omnikv: "));
    EXPECT_EQ(std::count(sentence.begin(), sentence.end(), '\n'), 1) << o.err;
    for (const std::string& part : parts) EXPECT_THAT(sentence, HasSubstr(part));
  }
  // What a folder holds, but for the files of Run.
  std::vector<std::string> Names(const fs::path& folder) {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder)) {
      names.push_back(entry.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  fs::path Folder(const std::string& name) {
    fs::create_directories(dir_ / name);
    return dir_ / name;
  }
  static std::string Ids(const char* id, int n) {
    std::string ids;
    for (int i = 0; i < n; ++i) ids += std::string(id) + ",";
    return ids;
  }
  // Of a .npy file of logits of n tokens.
  static size_t NpyBytes(size_t n) { return 128 + n * kVocab * 4; }
};

class Results : public Files {};

TEST_F(Results, SignalsLeaveNothingBehind) {
  const fs::path folder = Folder("results");
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    const std::string ids = Ids("5", 8000);
    const std::string out = folder / "x.npy";
    const pid_t child = ::fork();
    if (child == 0) {
      ::signal(signal, SIG_DFL);
      ::execl(OMNIKV_BINARY, OMNIKV_BINARY, "logits", "--tokens", ids.c_str(), "--out", out.c_str(),
              nullptr);
      ::_exit(127);
    }
    ASSERT_GT(child, 0);
    int status = 0;
    while (Names(folder).empty() && ::waitpid(child, &status, WNOHANG) == 0) ::usleep(20000);
    ASSERT_THAT(Names(folder), testing::Not(testing::IsEmpty())) << "it writes beside its place";
    ::usleep(300000);
    ASSERT_EQ(::kill(child, signal), 0);
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal) << status;
    EXPECT_THAT(Names(folder), testing::IsEmpty()) << signal;
  }
}

TEST_F(Results, TwoWritersLeaveAWholeFile) {
  const std::string path = (Folder("results") / "x.npy").string();
  const auto one = [&](const char* id, int n) {
    return std::string(OMNIKV_BINARY) + " logits --tokens " + Ids(id, n) + " --out " + path;
  };
  // Written out, so that both run at once.
  Spill(dir_ / "both.sh", one("5", 900) + " & " + one("7", 400) +
                              "; second=$?; wait $!; "
                              "echo $? $second\n");
  const Outcome o =
      Run("--version >" + (dir_ / "v").string() + "; sh " + (dir_ / "both.sh").string());
  EXPECT_EQ(o.out, "0 0\n") << o.err;
  const std::string npy = Slurp(path);
  const bool first = npy.find("(900, 8192)") < 128;
  EXPECT_TRUE(first || npy.find("(400, 8192)") < 128);
  EXPECT_EQ(npy.size(), NpyBytes(first ? 900 : 400));
  EXPECT_THAT(Names(dir_ / "results"), testing::ElementsAre("x.npy"));
}

TEST_F(Results, ANameOfTheUsersIsNotTaken) {
  const fs::path folder = Folder("results");
  Spill(folder / "x.npy.part", "mine");
  Spill(dir_ / "target", "mine too");
  fs::create_symlink(dir_ / "target", folder / "x.npy.part2");
  EXPECT_EQ(Run("logits --tokens 1 --out " + (folder / "x.npy").string()).exit_code, 0);
  EXPECT_EQ(Slurp(folder / "x.npy.part"), "mine");
  EXPECT_EQ(Slurp(dir_ / "target"), "mine too");
  EXPECT_EQ(fs::file_size(folder / "x.npy"), NpyBytes(1));
}

TEST_F(Results, LinksAreFollowedAndPermissionsKept) {
  const fs::path folder = Folder("results");
  Spill(folder / "real.npy", "old");
  ::chmod((folder / "real.npy").c_str(), 0640);
  fs::create_symlink("real.npy", folder / "link.npy");
  EXPECT_EQ(Run("logits --tokens 1 --out " + (folder / "link.npy").string()).exit_code, 0);
  EXPECT_TRUE(fs::is_symlink(folder / "link.npy"));
  EXPECT_EQ(fs::file_size(folder / "real.npy"), NpyBytes(1));
  struct stat info;
  ASSERT_EQ(::stat((folder / "real.npy").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640u);

  fs::create_symlink("not/there/yet.npy", folder / "lost.npy");
  ExpectSentence(Run("logits --tokens 1 --out " + (folder / "lost.npy").string()), 2,
                 {"--out is '", "lost.npy', which cannot be written ("});
  fs::create_symlink("new.npy", folder / "first.npy");
  EXPECT_EQ(Run("logits --tokens 1 --out " + (folder / "first.npy").string()).exit_code, 0);
  EXPECT_EQ(fs::file_size(folder / "new.npy"), NpyBytes(1));
  ASSERT_EQ(::stat((folder / "new.npy").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777 & 0600, 0600u);

  // Streams are written as they are.
  EXPECT_EQ(Run("logits --tokens 1 --out /dev/stdout | wc -c").out,
            std::to_string(NpyBytes(1)) + "\n");
  EXPECT_EQ(Run("logits --tokens 1 --out /dev/stdout").out.size(), NpyBytes(1));
}

// A limit on the size of files: one sentence, no signal, nothing half written.
TEST_F(Results, AFileThatMayNotGrowIsAFailure) {
  const fs::path folder = Folder("results");
  Spill(folder / "x.npy", "old");
  const std::string limit = "ulimit -f 100; ";  // blocks of 512 or 1024 bytes
  ExpectSentence(
      Run("logits -q --tokens 1,2,3,4,5,6,7,8 --out " + (folder / "x.npy").string(), "", limit), 1,
      {"--out is '", "writing to it failed (File too large)"});
  EXPECT_EQ(Slurp(folder / "x.npy"), "old");
  ExpectSentence(Run("eval document --tokens 60000 --out " + (folder / "doc").string(), "", limit),
                 1, {"--out is '", "(File too large)"});
  EXPECT_THAT(Names(folder), testing::ElementsAre("doc", "x.npy"));
  EXPECT_THAT(Names(folder / "doc"), testing::IsEmpty());
}

TEST_F(Results, PlacesThatCannotBeWrittenAreRefused) {
  ExpectSentence(Run("eval document --out ''"), 2, {"--out is empty"});
  ExpectSentence(Run("logits --tokens 1 --out ''"), 2, {"--out is empty"});
  ExpectSentence(Run("logits --tokens 1 --out " + dir_.string()), 2, {"(Is a directory)"});
  ExpectSentence(Run("logits --tokens 1 --out /nonexistent/x.npy"), 2,
                 {"--out is '/nonexistent/x.npy'", "(no file can be made beside it: No such file"});
  ExpectSentence(Run("eval document --out /dev/null/x"), 2, {"--out is '/dev/null/x'"});
}

// A folder whose weights would take 2 GB, all of them holes in a file, with `extra` files.
class LargeModel : public Files {
 protected:
  fs::path Make(const std::string& name, bool tokenizer) {
    const fs::path folder = Folder(name);
    const int64_t d = 2048, ffn = 8192, layers = 14, vocab = 50304;
    const nlohmann::json config = {{"model_type", "llama"},     {"hidden_size", d},
                                   {"intermediate_size", ffn},  {"num_hidden_layers", layers},
                                   {"num_attention_heads", 32}, {"num_key_value_heads", 8},
                                   {"vocab_size", vocab},       {"hidden_act", "silu"},
                                   {"rms_norm_eps", 1e-5},      {"max_position_embeddings", 512}};
    Spill(folder / "config.json", config.dump());
    nlohmann::json header;
    int64_t offset = 0;
    const auto add = [&](const std::string& tensor, std::vector<int64_t> shape) {
      int64_t bytes = 2;
      for (const int64_t n : shape) bytes *= n;
      header[tensor] = {
          {"dtype", "BF16"}, {"shape", shape}, {"data_offsets", {offset, offset + bytes}}};
      offset += bytes;
    };
    add("model.embed_tokens.weight", {vocab, d});
    add("lm_head.weight", {vocab, d});
    add("model.norm.weight", {d});
    for (int64_t i = 0; i < layers; ++i) {
      const std::string layer = "model.layers." + std::to_string(i) + ".";
      add(layer + "input_layernorm.weight", {d});
      add(layer + "post_attention_layernorm.weight", {d});
      for (const char* part : {"q", "o"}) add(layer + "self_attn." + part + "_proj.weight", {d, d});
      for (const char* part : {"k", "v"}) {
        add(layer + "self_attn." + part + "_proj.weight", {512, d});
      }
      add(layer + "mlp.gate_proj.weight", {ffn, d});
      add(layer + "mlp.up_proj.weight", {ffn, d});
      add(layer + "mlp.down_proj.weight", {d, ffn});
    }
    const std::string text = header.dump();
    const uint64_t size = text.size();
    std::string start(8, '\0');
    std::memcpy(start.data(), &size, 8);
    Spill(folder / "model.safetensors", start + text);
    fs::resize_file(folder / "model.safetensors",
                    start.size() + text.size() + static_cast<uintmax_t>(offset));
    if (tokenizer) {
      fs::copy_file(kRoot / "tests/text/tokenizer/data/gpt2.tokenizer.json",
                    folder / "tokenizer.json");
    }
    return folder;
  }
  // The most memory of any program that this test has run so far.
  static size_t PeakBytes() {
    struct rusage usage;
    ::getrusage(RUSAGE_CHILDREN, &usage);
    return static_cast<size_t>(usage.ru_maxrss) << 10;
  }
};

TEST_F(LargeModel, MistakesAreToldBeforeItIsRead) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers take memory of their own";
#endif
  const std::string bare = Make("bare", false);
  const std::string text = Make("text", true);
  const std::string out = " --out " + (dir_ / "x.npy").string();
  const auto refused = [&](const std::string& command, const std::vector<std::string>& parts) {
    SCOPED_TRACE(command);
    ExpectSentence(Run(command), 2, parts);
    EXPECT_LT(PeakBytes(), size_t{500} << 20) << "weights were read";
  };
  refused("run -p x -m " + bare, {"tokenizer.json"});
  refused("chat -m " + bare, {"tokenizer.json"});
  refused("eval needles -m " + bare, {"tokenizer.json"});
  refused("run -p x -m " + text, {"has no chat template: use --raw"});
  refused("chat -m " + text, {"has no chat template"});
  refused("run --raw -p 'one two three four five six' --ctx 4 -m " + text, {"context holds 4"});
  refused("run --raw -p x --policy omnikv --set filters=2,99 -m " + text, {"layer 99"});
  refused("bench --policies omnikv,full --set filters=2,99 --context 16 -m " + text, {"layer 99"});
  refused("eval quickstart --set omnikv.filters=99 -m " + text, {"layer 99"});
  refused("logits --tokens 1,60000" + out + " -m " + bare, {"60000", "vocabulary of 50304"});
  refused("logits --tokens " + Ids("1", 600) + out + " -m " + bare, {"context holds 512"});
  refused("logits --tokens 1 --out /nonexistent/x -m " + bare, {"--out"});
  refused("logits --tokens 1 --kv-dtype int3" + out + " -m " + bare, {"--kv-dtype"});
  EXPECT_FALSE(fs::exists(dir_ / "x.npy"));

  // And the measure measures: weights that are read are seen.
  EXPECT_EQ(Run("logits --tokens 1" + out + " -m " + bare).exit_code, 0);
  EXPECT_GT(PeakBytes(), size_t{1} << 30);
}

// The tokenizer alone: whatever else the model is.
TEST_F(Files, TokenizeReadsTheTokenizerAlone) {
  const std::string ids = Run("tokenize -p 'The grass is green.'").out;
  ASSERT_THAT(ids, StartsWith("["));
  const std::string gguf = Slurp(kModel);

  std::string family = gguf;
  const size_t at = family.find("general.architecture");
  ASSERT_NE(at, std::string::npos);
  const size_t name = family.find("llama", at);
  family.replace(name, 5, "mamba");
  Spill(dir_ / "family.gguf", family);
  EXPECT_EQ(Run("info -m " + (dir_ / "family.gguf").string()).exit_code, 2);
  const Outcome other =
      Run("tokenize -p 'The grass is green.' -m " + (dir_ / "family.gguf").string());
  EXPECT_EQ(other.out, ids) << other.err;

  // Without most of its weights.
  Spill(dir_ / "cut.gguf", gguf.substr(0, 3000000));
  EXPECT_EQ(Run("info -m " + (dir_ / "cut.gguf").string()).exit_code, 1);
  const Outcome cut = Run("tokenize -p 'The grass is green.' -m " + (dir_ / "cut.gguf").string());
  EXPECT_EQ(cut.out, ids) << cut.err;

  const fs::path folder = Folder("text");
  fs::copy_file(kRoot / "tests/text/tokenizer/data/gpt2.tokenizer.json", folder / "tokenizer.json");
  const std::string gpt2 = Run("tokenize --raw -p 'Hello world' -m " + folder.string()).out;
  EXPECT_THAT(gpt2, StartsWith("["));
  Spill(folder / "config.json", R"({"model_type": "mamba", "hidden_size": "?"})");
  EXPECT_EQ(Run("tokenize --raw -p 'Hello world' -m " + folder.string()).out, gpt2);
  const Outcome document = Run("eval document --tokens 1000 --out " + (dir_ / "doc").string() +
                               " -m " + (dir_ / "cut.gguf").string());
  EXPECT_EQ(document.exit_code, 0) << document.err;

  // What it would ignore is refused.
  for (const char* flag : {"--ctx 7", "--kv-dtype junk", "--device nope", "--threads 3"}) {
    ExpectSentence(Run(std::string("tokenize -p x ") + flag), 2, {std::string(flag).substr(0, 5)});
  }
}

TEST_F(Files, ModelsThatAreNoneSayWhatIsThere) {
  const auto refused = [&](const std::string& model, const std::vector<std::string>& parts) {
    SCOPED_TRACE(model);
    ExpectSentence(Run("info -m " + model), 2, parts);
  };
  refused("Qwen/Qwen2.5-0.5B", {"Qwen/Qwen2.5-0.5B: no such file", "models are not downloaded"});
  refused("https://huggingface.co/Qwen/Qwen2.5-0.5B", {"models are not downloaded"});
  refused("/nonexistent/model.gguf", {"no such file or folder"});
  EXPECT_THAT(Run("info -m /nonexistent/model.gguf").err, testing::Not(HasSubstr("fetched")));

  const fs::path folder = Folder("model");
  Spill(folder / "model-Q4.gguf", "x");
  refused(folder, {"has no config.json", "'model-Q4.gguf'", "give that file's own path"});
  fs::remove(folder / "model-Q4.gguf");
  fs::copy_file(kRoot / "tests/golden/models/llama/config.json", folder / "config.json");
  Spill(folder / "pytorch_model.bin", "x");
  refused(folder, {"has neither model.safetensors nor", "'pytorch_model.bin' is not read"});
  fs::create_symlink("../../blobs/5f3a", folder / "model.safetensors");
  refused(folder, {"model.safetensors: is a link to a file that is not there"});
  fs::remove(folder / "config.json");
  fs::create_symlink("../../blobs/5f3b", folder / "config.json");
  fs::remove(folder / "model.safetensors");
  fs::copy_file(kRoot / "tests/golden/models/llama/model.safetensors",
                folder / "model.safetensors");
  refused(folder, {"config.json: is a link to a file that is not there"});
}

TEST_F(Files, PermissionsAreNamed) {
  if (::geteuid() == 0) {
    // As somebody else, who can reach the program and the folder.
    if (std::system("setpriv --reuid=65534 --clear-groups true 2>/dev/null") != 0) {
      GTEST_SKIP() << "root may read everything, and setpriv is missing";
    }
    if (std::system(("setpriv --reuid=65534 --clear-groups test -x " OMNIKV_BINARY)) != 0) {
      GTEST_SKIP() << "root may read everything, and others may not run the program";
    }
  }
  const std::string as_other =
      ::geteuid() == 0 ? "other() { setpriv --reuid=65534 --clear-groups \"$@\"; }; other " : "";
  fs::permissions(dir_, fs::perms::all);
  Spill(dir_ / "secret.txt", "x");
  fs::permissions(dir_ / "secret.txt", fs::perms::none);
  const fs::path folder = Folder("closed");
  fs::copy_file(kRoot / "tests/golden/models/llama/config.json", folder / "config.json");
  fs::permissions(folder, fs::perms::none);
  const auto run = [&](const std::string& arguments) {
    const std::string command = as_other + OMNIKV_BINARY + " " + arguments + " >" +
                                (dir_ / "out").string() + " 2>" + (dir_ / "err").string();
    const int status = std::system(command.c_str());
    return Outcome{WIFEXITED(status) ? WEXITSTATUS(status) : -1, Slurp(dir_ / "out"),
                   Slurp(dir_ / "err")};
  };
  ExpectSentence(run("run -f " + (dir_ / "secret.txt").string()), 2,
                 {"secret.txt', which cannot be read (Permission denied)"});
  ExpectSentence(run("info -m " + folder.string()), 1,
                 {"cannot be opened for reading (Permission denied)"});
  fs::permissions(folder, fs::perms::all);
}

TEST_F(Files, BenchTakesNumbersThatMeanSomething) {
  for (const char* flag : {"--prefill -1", "--prefill 0", "--attend 99999999999", "--attend 0",
                           "--attend -5", "--context -3", "--thread-counts 0"}) {
    ExpectSentence(Run(std::string("bench ") + flag), 2,
                   {std::string(flag).substr(0, std::string(flag).find(' '))});
  }
  const auto geometry = [&](const char* text) {
    Spill(dir_ / "geometry.json", text);
    return Run("bench --context 16 --steps 1 --geometry " + (dir_ / "geometry.json").string());
  };
  const std::string rest = R"("heads": 1, "kv_heads": 1, "head_dim": 8, "vocab": 64})";
  // 2^64 bytes of weights, modulo which they would be 32 MiB.
  ExpectSentence(
      geometry((R"({"layers": 8388608, "d_model": 1048576, "ffn": 699040, )" + rest).c_str()), 1,
      {"layers is 8388608, expected an integer from 1 to 1024"});
  ExpectSentence(geometry((R"({"layers": 1, "d_model": 1048576, "ffn": 32, )" + rest).c_str()), 1,
                 {"d_model is 1048576, expected an integer from 1 to 262144"});
  ExpectSentence(geometry((R"({"layers": 1, "d_model": 33, "ffn": 32, )" + rest).c_str()), 1,
                 {"d_model is 33, expected a multiple of 32"});
  ExpectSentence(geometry((R"({"layers": 1, "d_model": 32, )" + rest).c_str()), 1,
                 {"has no ffn, expected an integer"});
  ExpectSentence(geometry("{"), 1, {"is not JSON: its 1 bytes end in the middle"});
}

TEST_F(Files, LengthsOfDocumentsAreNamed) {
  ExpectSentence(Run("eval document --tokens 100 --out " + (dir_ / "doc").string()), 2,
                 {"a document of 100 tokens is asked for, expected at least "});
  ExpectSentence(Run("eval needles --lengths 100"), 2, {"a document of 100 tokens is asked for"});
  ExpectSentence(Run("eval needles --lengths 5000 --ctx 2048"), 2, {"--lengths", "2048"});
}

// What a comparison cannot be asked for is said before a weight is read.
TEST_F(Files, ComparisonsAreCheckedFirst) {
  ExpectSentence(Run("eval needles --equal size"), 2, {"--equal", "size"});
  ExpectSentence(Run("eval needles --share 0.1"), 2, {"--share", "--equal"});
  ExpectSentence(Run("eval needles --lengths 600 --equal read --set streaming.budget=64"), 2,
                 {"policy streaming: budget is given"});
  ExpectSentence(Run("eval needles --lengths 600 --policies full,tova+snapkv"), 2,
                 {"a session has one policy, not 'tova+snapkv': tova and snapkv both give tokens"});
  ExpectSentence(Run("eval needles --tasks /nonexistent"), 2, {"/nonexistent"});
  const fs::path tasks = dir_ / "tasks.jsonl";
  Spill(tasks, "{\"prompt\": \"Hello\"}\n");
  ExpectSentence(Run("eval needles --tasks " + tasks.string()), 1,
                 {"tasks.jsonl: line 1 is no task", "`prompt` and `answer`"});
  Spill(tasks, "{\"prompt\": \"Hello\", \"answer\": \"x\"}\n");
  ExpectSentence(Run("eval needles --ctx 4 --tasks " + tasks.string()), 2,
                 {"the context holds 4: raise --ctx"});
}

}  // namespace
}  // namespace omnikv::cli::files_test
