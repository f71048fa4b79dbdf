// Tokenizers, templates and configurations made to hang, to fill memory, to crash or to write on
// the terminal: each gives one sentence and an exit code.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "program.h"

namespace omnikv::cli::hostile_text_test {
namespace {

using nlohmann::json;

const fs::path kFolder = fs::path(OMNIKV_SOURCE_DIR) / "tests/golden/models/llama";

class HostileText : public ProgramTest {
 protected:
  // A folder with a tokenizer of a few letters and a template.
  fs::path Folder(const std::function<void(json& tokenizer, json& config)>& change) {
    const fs::path folder = dir_ / ("model" + std::to_string(folders_++));
    fs::create_directories(folder);
    for (const char* name : {"model.safetensors", "config.json"}) {
      fs::copy_file(kFolder / name, folder / name);
    }
    json tokenizer = json::parse(R"({"version": "1.0", "added_tokens": [
        {"id": 4, "content": "<|end|>", "special": false, "normalized": false}],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "<": 3}, "merges": ["a b"]}})");
    json config = {{"chat_template", "{{ messages[0].content }}"}};
    change(tokenizer, config);
    Spill(folder / "tokenizer.json", tokenizer.dump());
    Spill(folder / "tokenizer_config.json", config.dump());
    return folder;
  }
  fs::path Template(const std::string& source) {
    return Folder([&](json&, json& config) { config["chat_template"] = source; });
  }

  // One sentence without control characters that has all of `parts`; nothing on stdout.
  void Expect(const std::string& arguments, const fs::path& folder, int exit_code,
              const std::vector<std::string>& parts, const std::string& before = "") {
    const Outcome o = Run(arguments + " -m " + folder.string(), "", before);
    EXPECT_EQ(o.exit_code, exit_code) << arguments << "\n" << o.err;
    EXPECT_EQ(o.out, "") << arguments;
    EXPECT_TRUE(o.err.starts_with("omnikv: ")) << o.err;
    EXPECT_LT(o.err.size(), 4200u);
    EXPECT_EQ(std::count_if(o.err.begin(), o.err.end(), [](char c) { return c >= 0 && c < ' '; }),
              1)
        << o.err;
    for (const std::string& part : parts) {
      EXPECT_NE(o.err.find(part), std::string::npos) << "expected '" << part << "' in: " << o.err;
    }
    // The path is there once.
    const size_t at = o.err.find(folder.string());
    ASSERT_NE(at, std::string::npos) << o.err;
    EXPECT_EQ(o.err.find(folder.string(), at + 1), std::string::npos) << o.err;
  }

  int folders_ = 0;
};

TEST_F(HostileText, TemplatesEnd) {
  Expect("tokenize -p x", Template("{{ 'a' * 500000000 }}"), 1, {"line 1", "limit"});
  Expect("tokenize -p x",
         Template("{% set s = 'a' * 4000000 %}{% for i in range(99999) %}{% for j in range(400) %}"
                  "{% if s | length %}{% endif %}{% endfor %}{% endfor %}"),
         1, {"runs longer than the limit allows"});
}

TEST_F(HostileText, MessagesAreOneLine) {
  Expect("tokenize -p x",
         Template("{{ raise_exception('\x1b[31mred\nomnikv: a forged sentence') }}"), 2,
         {"\\x1b[31mred\\x0aomnikv: a forged"});
  Expect("tokenize -p x", Template("{{ raise_exception('x' * 1000000) }}"), 2, {"xxx..."});
  Expect("tokenize -p x", Template("{{ \x1b }}"), 1, {"'\\x1b' is not expected here"});
  Expect("tokenize -p x", Folder([](json& t, json&) { t["model"]["type"] = "\x1b]0;x\x07"; }), 2,
         {"model has the type '\\x1b]0;x\\x07'"});
  Expect("tokenize -p x",
         Folder([](json& t, json&) { t["model"]["type"] = std::string(100'000, 'X'); }), 2,
         {"XXX...'"});
  Expect("tokenize -p x", Folder([](json& t, json&) { t["model"]["merges"] = {"a \x1b[2J"}; }), 1,
         {"'\\x1b[2J'"});
  Expect("tokenize -p x", Folder([](json& t, json&) {
           t["pre_tokenizer"] = {{"type", "Split"},
                                 {"pattern", {{"Regex", "(\x1b[2J"}}},
                                 {"behavior", "Isolated"},
                                 {"invert", false}};
         }),
         2, {"pre_tokenizer"});
}

TEST_F(HostileText, NamesAreQuotedInInfo) {
  const fs::path folder = Folder([](json&, json&) {});
  json config = json::parse(Slurp(folder / "config.json"));
  config["_name_or_path"] = "\x1b]0;title\x07red\nnote: a forged line";
  Spill(folder / "config.json", config.dump());
  const Outcome o = Run("info -m " + folder.string());
  EXPECT_EQ(o.exit_code, 0) << o.err;
  EXPECT_EQ(o.out.find('\x1b'), std::string::npos);
  EXPECT_EQ(o.out.find("\nnote: a forged"), std::string::npos);
}

TEST_F(HostileText, TokenizersEnd) {
  const auto doubling = [](const char* list) {
    json steps = json::array();
    for (int i = 0; i < 40; ++i) {
      steps.push_back({{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aa"}});
    }
    return json{{"type", "Sequence"}, {list, steps}};
  };
  Expect("tokenize -p a",
         Folder([&](json& t, json&) { t["normalizer"] = doubling("normalizers"); }), 1,
         {"tokenizer.json: normalizer.normalizers[", "bytes out of"});
  Expect("tokenize -p b", Folder([&](json& t, json&) {
           t["normalizer"] = doubling("normalizers");
           t["added_tokens"].push_back(
               {{"id", 5}, {"content", "a"}, {"special", false}, {"normalized", true}});
         }),
         1, {"tokenizer.json: normalizer.normalizers["});
  Expect("tokenize --decode -p '[0]'",
         Folder([&](json& t, json&) { t["decoder"] = doubling("decoders"); }), 1,
         {"tokenizer.json: decoder.decoders["});
  Expect("tokenize -p " + std::string(1500, 'a'), Folder([](json& t, json&) {
           t["pre_tokenizer"] = {{"type", "Split"},
                                 {"pattern", {{"Regex", "(?:(?:a|a){22}\\x01|.)"}}},
                                 {"behavior", "Isolated"},
                                 {"invert", false}};
         }),
         1, {"pre_tokenizer", "'(?:(?:a|a){22}\\x01|.)' takes longer than the limits allow"});
}

TEST_F(HostileText, ConfigurationsAreBounded) {
  const fs::path folder = Folder([](json&, json&) {});
  for (const char* name : {"tokenizer_config.json", "config.json"}) {
    Spill(folder / name, std::string(20'000'000, '['));
    Expect("tokenize -p x", folder, 1, {std::string(name) + ": nests deeper than 64 levels"});
  }
}

TEST_F(HostileText, SmallStacksAreEnough) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need larger stacks";
#endif
  std::string parentheses = "{{ 1";
  for (int i = 0; i < 240; ++i) parentheses += " + 1";
  std::string nested = parentheses + " }}";
  for (int i = 0; i < 150; ++i) nested = "{% if 1 %}" + nested + "{% endif %}";
  std::string groups = "a";
  for (int i = 0; i < 60; ++i) groups = "(?:" + groups + ")*";
  const fs::path deep = Folder([&](json& t, json& config) {
    config["chat_template"] = nested + "{{ messages[0].content }}";
    t["pre_tokenizer"] = {{"type", "Split"},
                          {"pattern", {{"Regex", groups}}},
                          {"behavior", "Isolated"},
                          {"invert", false}};
  });
  const fs::path endless =
      Template("{% macro m(a, b=1) %}{{ m(a, b=[m][0](1)) }}{% endmacro %}{{ m(1) }}");
  for (const int kib : {128, 256}) {
    const std::string limit = "ulimit -s " + std::to_string(kib) + "; ";
    Expect("tokenize -p x", endless, 1, {"recurses deeper than the limit allows"}, limit);
    const Outcome o = Run("tokenize -p a -m " + deep.string(), "", limit);
    EXPECT_EQ(o.exit_code, 0) << kib << " KiB: " << o.err;
  }
}

// A token that the template writes is text when a user types it, except with --raw.
TEST_F(HostileText, ControlTokensCannotBeTyped) {
  const fs::path folder = Template("{{ messages[0].content }}<|end|>");
  EXPECT_EQ(Run("tokenize -p 'a<|end|>' -m " + folder.string()).out, "[0, 3, 4]\n");
  EXPECT_EQ(Run("tokenize --raw -p 'a<|end|>' -m " + folder.string()).out, "[0, 4]\n");
}

}  // namespace
}  // namespace omnikv::cli::hostile_text_test
