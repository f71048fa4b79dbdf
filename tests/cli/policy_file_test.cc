// --policy-file: what KTransformers' config.yaml says becomes policy blocks, in both spellings of
// its keys. What cannot be had is named with the file, the key and the value.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "program.h"

namespace omnikv::cli::policy_file_test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// As the framework ships it, with sections that say nothing of the policy.
const std::string kShipped = R"(log:
  dir: "logs"
ext:
  cpu_infer: 10
long_context:
  chunk_size: 4096
  max_seq_len: 8000
  block_size: 128
  local_windows_len: 4096
  second_select_num: 32
  anchor_type: DYNAMIC
  kv_type: FP16
  dense_layer_num: 2
  anchor_num: 1
  preselect_block: True
  head_select_mode: SHARED
  preselect_block_count: 32
  layer_step: 1
  token_step: 100
)";
// The keys of its document, which has no section around them.
const std::string kDocument = R"(max_seq_len: 16000 # KVCache length
block_size: 64
local_windows_len: 1000
second_block_count: 96
threads_num: 2
representative_type: Fix
representative_num: 4
kv_type: Q8_0
dense_layer_num: 0
preselect_block: False
head_select_mode: SEPARATE
preselect_block_count: 0
layer_step: 2
token_step: 4
kernel_size: 5
)";

class PolicyFile : public ProgramTest {
 protected:
  std::string File(const std::string& text) {
    Spill(dir_ / "c.yaml", text);
    return (dir_ / "c.yaml").string();
  }
  // What `info` says with this file and these flags.
  json Info(const std::string& text, const std::string& more = "") {
    const Outcome o = Run("info --json --device cpu --policy-file " + File(text) + " " + more);
    EXPECT_EQ(o.exit_code, 0) << o.err;
    return o.exit_code == 0 ? json::parse(o.out) : json();
  }
  static std::string Settings(const json& info) {
    EXPECT_EQ(info.at("policies").size(), 1u);
    EXPECT_EQ(info.at("policies").at(0).at("name"), "blocks");
    return info.at("policies").at(0).at("settings");
  }
  // Expects that it is refused with this sentence behind the file's name, whoever reads it.
  void Refused(const std::string& text, const std::string& sentence,
               const std::string& command = "info --device cpu") {
    const std::string file = File(text);
    const Outcome o = Run(command + " --policy-file " + file);
    EXPECT_EQ(o.exit_code, 2) << text;
    EXPECT_EQ(o.out, "") << text;
    EXPECT_EQ(o.err, "omnikv: --policy-file '" + file + "'" + sentence + "\n") << text;
  }
};

TEST_F(PolicyFile, TheFrameworksOwn) {
  const json info = Info(kShipped);
  EXPECT_EQ(Settings(info),
            "block=128 budget=8448 compat=none dense_layers=2 layer_step=1 lists=one preselect=32 "
            "queries=128 recent=4096 representative=dynamic representatives=1 sinks=128 "
            "token_step=100 widen=0");
  EXPECT_EQ(info.at("context"), 8000);
  EXPECT_EQ(info.at("kv_dtype"), "f16");
}

TEST_F(PolicyFile, TheDocumentsSpelling) {
  const json info = Info(kDocument);
  // 64 + (96 + 15 + 1) * 64
  EXPECT_EQ(Settings(info),
            "block=64 budget=7232 compat=none dense_layers=0 layer_step=2 lists=per_kv_head "
            "preselect=off queries=128 recent=1000 representative=fixed representatives=4 sinks=64 "
            "token_step=4 widen=2");
  EXPECT_EQ(info.at("context"), 16000);
  EXPECT_EQ(info.at("kv_dtype"), "q8_0");
  EXPECT_EQ(Info("kv_type: Q4_0").at("kv_dtype"), "q4_0");
}

// Keys that are missing, or have no value, are as in the framework's own file.
TEST_F(PolicyFile, WhatIsMissing) {
  const std::string all = Settings(Info(kShipped));
  EXPECT_EQ(Settings(Info("long_context:\n  block_size: 128\n  token_step:\n")), all);
  EXPECT_EQ(Settings(Info("block_size: 128")), all);
  EXPECT_THAT(Settings(Info("block_size: 16\nsecond_select_num: 2\nlocal_windows_len: 32")),
              HasSubstr("block=16 budget=144 "));  // 64 of sinks, 2 chosen, 2 last and one more
  EXPECT_THAT(Settings(Info("anchor_type: QUEST\nanchor_num: 2")),
              HasSubstr("representative=quest representatives=1"));
}

TEST_F(PolicyFile, FlagsGoBeforeIt) {
  const json info = Info(kShipped,
                         "--ctx 4k --kv-dtype bf16 --set token_step=7 --set compat=kt "
                         "--policy blocks");
  EXPECT_EQ(Settings(info),
            "block=128 budget=8448 compat=kt dense_layers=2 layer_step=1 lists=one preselect=32 "
            "queries=128 recent=4096 representative=dynamic representatives=1 sinks=128 "
            "token_step=7 widen=32");
  EXPECT_EQ(info.at("context"), 4096);
  EXPECT_EQ(info.at("kv_dtype"), "bf16");
  EXPECT_EQ(Info(kShipped, "--kv-dtype auto").at("kv_dtype"), "f16");
}

TEST_F(PolicyFile, WhatIsWrongIsNamed) {
  const std::string keys =
      "chunk_size, max_seq_len, block_size, local_windows_len, second_select_num "
      "(second_block_count), threads_num, anchor_type (representative_type), kv_type, "
      "dense_layer_num, anchor_num (representative_num), preselect_block, head_select_mode, "
      "preselect_block_count, layer_step, token_step, kernel_size";
  Refused("long_context:\n  blocksize: 128\n",
          ": there is no key 'blocksize', expected one of " + keys);
  Refused("blocksize: 128\n",
          ": there is no key 'blocksize', expected one of " + keys + ", or long_context");
  Refused(
      "kv_type: Q4_K",
      ": kv_type is 'Q4_K', expected FP16, BF16, Q8_0 or Q4_0, the formats that omnikv keeps K/V "
      "in");
  Refused("block_size: big", ": block_size is 'big', expected a whole number from 1 to 512");
  Refused("block_size: 1.5", ": block_size is '1.5', expected a whole number from 1 to 512");
  Refused("block_size: 96", ": block_size is '96', expected a power of two up to 512");
  Refused("head_select_mode: QHEAD", ": head_select_mode is 'QHEAD', expected SHARED or SEPARATE");
  Refused("representative_type: BEST",
          ": representative_type is 'BEST', expected DYNAMIC, FIXED, QUEST, BLOCK_MEAN or "
          "BLOCK_MAX");
  Refused("anchor_type: BLOCK_MAX\nanchor_num: 2",
          ": anchor_num is '2', expected 1 with BLOCK_MAX");
  Refused("preselect_block: 3", ": preselect_block is '3', expected True or False");
  Refused("kernel_size: 4", ": kernel_size is '4', expected an odd number");
  const std::string in_all = "expected fewer tokens: 1,000,000,000 in all";
  Refused("local_windows_len: 1000000000", ": local_windows_len is '1000000000', " + in_all);
  Refused("local_windows_len: 1000000000\nsecond_select_num: 5",
          ": local_windows_len is '1000000000', " + in_all);
  Refused("block_size: 512\nsecond_select_num: 1000000\nlocal_windows_len: 1000000000",
          ": local_windows_len is '1000000000', " + in_all);
  Refused("chunk_size: 65537", ": chunk_size is '65537', expected a whole number from 1 to 65536");
  Refused("threads_num: 1025", ": threads_num is '1025', expected a whole number from 1 to 1024");
  Refused("token_step: 0", ": token_step is '0', expected a whole number from 1 to 1000000");
  Refused("token_step: [1, 2]", ": token_step is a list or a map, expected one value");
  Refused("anchor_num: 1\nrepresentative_num: 1",
          ": anchor_num and representative_num are both there, expected one of them");
  Refused("layer_step: 1\nlayer_step: 1", ": layer_step is there twice, expected once");
  Refused("long_context: 5", ": long_context has no keys, expected some of " + keys);
  Refused("- a\n- b", " has no keys at its top, expected the section long_context");
  Refused("", " holds 0 documents, expected one");
  Refused("block_size: 8\n---\nblock_size: 8", " holds 2 documents, expected one");
  Refused("[a]: 1", " has a key that is no word, expected one of " + keys);
  Refused(std::string(70000, '#'), " holds more than 64.00 KiB, expected a config.yaml");
}

TEST_F(PolicyFile, EveryCommandReadsIt) {
  for (const char* command : {"run -p x", "chat", "logits --tokens 1,2 --out x.npy", "bench",
                              "eval needles", "eval quickstart"}) {
    Refused("kv_type: Q4_K",
            ": kv_type is 'Q4_K', expected FP16, BF16, Q8_0 or Q4_0, the formats that omnikv keeps "
            "K/V in",
            command);
  }
  const std::string file = File(kShipped);
  for (const char* command :
       {"bench --policies full,quest", "eval needles --policies full,quest"}) {
    const Outcome o = Run(std::string(command) + " --policy-file " + file);
    EXPECT_EQ(o.exit_code, 2);
    EXPECT_EQ(o.err, "omnikv: --policies is full,quest, but --policy-file '" + file +
                         "' is of policy blocks\n");
  }
  const Outcome other = Run("run -p x --policy quest --policy-file " + file);
  EXPECT_EQ(other.exit_code, 2);
  EXPECT_EQ(other.err,
            "omnikv: --policy is quest, but --policy-file '" + file + "' is of policy blocks\n");
}

TEST_F(PolicyFile, AnswersByIt) {
  const std::string small =
      "block_size: 16\nlocal_windows_len: 32\nsecond_select_num: 4\npreselect_block_count: 8\n"
      "token_step: 5\n";
  const Outcome o = Run(
      "run --device cpu --json --raw -n 4 -p 'one two three four' --policy-file " + File(small));
  ASSERT_EQ(o.exit_code, 0) << o.err;
  EXPECT_EQ(json::parse(o.out).at("stats").at("policy"), "blocks");
}

// Files that are no such files, or mean harm, are refused in a sentence as well.
TEST_F(PolicyFile, HostileFiles) {
  std::string aliases = "a: &a [x]\n";
  for (char c = 'b'; c < 'k'; ++c) {
    const std::string last = std::string("*") + static_cast<char>(c - 1);
    aliases += c + std::string(": &") + c + " [" + last + ", " + last + ", " + last + "]\n";
  }
  for (const std::string& text :
       {std::string(60000, '['), std::string(60000, '{'), std::string("a: b: c"), aliases,
        std::string("\x00\x01\x02", 3), std::string("\xff\xfe\xff"), std::string("&a [*a]"),
        std::string("block_size: *x"), std::string("? ? ? ?"), std::string("block_size: \x1b[2J"),
        std::string("\x1b[2J: 1"), std::string("!!int block_size: 3"), std::string("'"),
        std::string("block_size: &x *x")}) {
    const std::string file = File(text);
    const Outcome o = Run("info --device cpu --policy-file " + file);
    EXPECT_EQ(o.exit_code, 2) << text.substr(0, 40);
    EXPECT_THAT(o.err, StartsWith("omnikv: --policy-file '" + file + "'")) << text.substr(0, 40);
    EXPECT_EQ(o.err.find('\x1b'), std::string::npos);
    EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << o.err;
  }
  EXPECT_EQ(Run("info --policy-file " + dir_.string()).exit_code, 2);
  EXPECT_EQ(Run("info --policy-file /nowhere/at/all.yaml").exit_code, 2);
}

}  // namespace
}  // namespace omnikv::cli::policy_file_test
