#include "command_line.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/numbers.h"

namespace omnikv::tools {
namespace {

constexpr const char* kEpilogue =
    R"(A size or a count may have a unit: 32k is 32768, 8g, 8gb and 8GiB are 8 x 1024^3.
Results go to stdout, all else to stderr. The exit code is 0 for success, 1 for a failure, 2 for a
mistake in the command or in what it names, 130 after Ctrl-C.
omnikv SUBCOMMAND --help lists its flags, with examples.

Examples:
  omnikv run -p "The pass key is 48213. What is the pass key?"
  omnikv help run)";

// What the help of each subcommand ends with. Each line works in the source tree; a test runs them.
const std::map<std::string, std::string>& Examples() {
  static const std::map<std::string, std::string> examples = {{"run", R"(
  omnikv run -p "The pass key is 48213. What is the pass key?"
  echo "Once upon a time" | omnikv run --raw -f - --temp 0.8 -n 40
  omnikv run -q -p "The key is 48213." --save /tmp/a && omnikv run --load /tmp/a -p "What is it?")"},
                                                              {"chat", R"(
  omnikv chat
  omnikv chat --system "Be brief." --temp 0.7 --ctx 8k
  echo "The pass key is 48213. What is the pass key?" | omnikv chat --quiet)"},
                                                              {"serve", R"(
  omnikv serve
  omnikv serve --port 8081 --seats 16 --ctx 16k --policy omnikv --set budget=512)"},
                                                              {"tokenize", R"(
  omnikv tokenize -p "Hello, world"
  omnikv tokenize --raw -p "Hello, world" | omnikv tokenize --decode -f -)"},
                                                              {"logits", R"(
  omnikv logits --tokens 1,2,3 --out /tmp/logits.npy
  omnikv tokenize -p "Hello, world" | omnikv logits -f - --out /tmp/logits.npy)"},
                                                              {"info", R"(
  omnikv info
  omnikv info -m models/omnikv-tiny-q8_0.gguf --ctx 32k --policy omnikv --set budget=512)"},
                                                              {"policies", R"(
  omnikv policies
  omnikv policies --policy omnikv --json)"},
                                                              {"bench", R"(
  omnikv bench --geometry tiny --context 4k --steps 8
  omnikv bench -m models/omnikv-tiny-q8_0.gguf --policies full,omnikv --context 2k --prefill 256)"},
                                                              {"eval", R"(
  omnikv eval needles --docs 1 --lengths 2k --policies full,omnikv
  omnikv eval document --tokens 2k --out /tmp/doc)"},
                                                              {"analyze", R"(
  omnikv analyze heads --docs 1 --tokens 2k
  omnikv analyze heads --docs 1 --tokens 2k -o /tmp/gates.tsv)"},
                                                              {"heads", R"(
  omnikv analyze heads --docs 1 --tokens 2k
  omnikv analyze heads --docs 1 --tokens 2k --sinks 4 --recent 64 -o /tmp/gates.tsv
  omnikv analyze heads -f README.md --json)"},
                                                              {"anchors", R"(
  omnikv analyze anchors --docs 1 --tokens 2k
  omnikv analyze anchors --docs 1 --tokens 2k --anchors 3 -o /tmp/anchors.tsv)"},
                                                              {"index", R"(
  omnikv analyze index --docs 1 --tokens 2k
  omnikv analyze index --docs 1 --tokens 4k --rows 4 --step 1 --json)"},
                                                              {"quickstart", R"(
  omnikv eval quickstart --policies streaming
  omnikv eval document --tokens 2k --out /tmp/doc && omnikv eval quickstart --document /tmp/doc)"},
                                                              {"needles", R"(
  omnikv eval needles --docs 1 --lengths 2k
  omnikv eval needles --docs 2 --lengths 1k --policies full,omnikv --set omnikv.budget=256)"},
                                                              {"document", R"(
  omnikv eval document --tokens 2k --out /tmp/doc
  omnikv eval document --tokens 1k --seed 7 --depths 0.2,0.8 --kinds passkey,magic --out /tmp/doc)"}};
  return examples;
}

// As people name it: "-n", "--temp".
std::string NameOf(const CLI::Option& option) {
  return option.get_snames().empty() ? "--" + option.get_single_name()
                                     : "-" + option.get_snames()[0];
}

// "omnikv run" of the program's subcommand run.
std::string PathOf(const CLI::App& app) {
  return app.get_parent() == nullptr ? app.get_name()
                                     : PathOf(*app.get_parent()) + " " + app.get_name();
}

std::vector<std::string> SubcommandNames(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(sub->get_name());
  }
  return names;
}

// Insertions, removals and replacements of a letter from one to the other; case and "_" for "-"
// cost nothing.
size_t Distance(std::string_view a, std::string_view b) {
  const auto plain = [](char c) { return c == '_' ? '-' : std::tolower(static_cast<uint8_t>(c)); };
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (plain(a[i]) == plain(b[j]) ? 0 : 1);
      diagonal = std::exchange(row[j + 1], std::min({row[j] + 1, row[j + 1] + 1, replaced}));
    }
  }
  return row.back();
}

// ": did you mean run?", where one of `names` is close to `word`.
std::string DidYouMean(const std::string& word, const std::vector<std::string>& names) {
  const auto distance = [&](const std::string& name) { return Distance(word, name); };
  const auto nearest = std::min_element(
      names.begin(), names.end(), [&](auto& a, auto& b) { return distance(a) < distance(b); });
  if (nearest == names.end() || distance(*nearest) > 2 || word.size() < 3) return "";
  return fmt::format(": did you mean {}?", *nearest);
}

// The sentence about `word`, which `app` does not take.
std::string UnknownWord(const CLI::App& app, const std::string& word) {
  const std::string path = PathOf(app);
  const std::vector<std::string> subcommands = SubcommandNames(app);
  if (!word.starts_with('-')) {
    if (!subcommands.empty()) {
      const std::string meant = DidYouMean(word, subcommands);
      return fmt::format("there is no subcommand '{}'{}: {}", word,
                         meant.empty() ? "; there are" : meant + " There are",
                         fmt::join(subcommands, ", "));
    }
    const bool prompt = app.get_option_no_throw("--prompt") != nullptr;
    return fmt::format("'{}' belongs to no flag{} ({} --help lists the flags)", word,
                       prompt ? ": give a text with -p, in quotes where it has spaces" : "", path);
  }
  const std::string flag = word.substr(0, word.find('='));
  std::vector<std::string> flags;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) flags.push_back("--" + name);
  }
  return fmt::format("{} has no flag {}{} ({} --help lists the flags{})", path, flag,
                     DidYouMean(flag, flags), path,
                     subcommands.empty() ? "" : "; others follow the subcommand");
}

// What CLI11 says, in our words where its own are hard to read.
std::string InOurWords(const CLI::ParseError& error) {
  const std::string text = error.what();
  if (dynamic_cast<const CLI::ConversionError*>(&error) != nullptr) {
    // Numbers are whole by now (CheckValue), so that one must be too large for its flag.
    const size_t name = text.find("--");
    return name == std::string::npos ? text : text.substr(name) + " is out of range";
  }
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr && text.starts_with("--")) {
    return text.substr(0, text.find(':')) +
           (text.ends_with("missing") ? " needs a value" : " is given more than once");
  }
  return text;
}

// What is wrong with a command line that CLI11 refuses: the first word that nothing takes, else
// what CLI11 says.
std::string Complaint(const CLI::App& app, const CLI::ParseError& error) {
  for (const CLI::App* at = &app;;) {
    if (const auto words = at->remaining(); !words.empty()) return UnknownWord(*at, words[0]);
    const auto chosen = at->get_subcommands();
    if (chosen.empty()) {
      const std::vector<std::string> subcommands = SubcommandNames(*at);
      if (!subcommands.empty()) {
        return fmt::format("{} needs a subcommand: {} ({} --help says what they do)", PathOf(*at),
                           fmt::join(subcommands, ", "), PathOf(*at));
      }
      return InOurWords(error);
    }
    at = chosen[0];
  }
}

// Refuses what `option` cannot mean, and writes numbers as CLI11 reads them.
void CheckValue(const CLI::Option& option, std::string& value) {
  const auto refuse = [&](const std::string& what) {
    throw CLI::ParseError(fmt::format("{} is {}", NameOf(option), what),
                          CLI::ExitCodes::ValidationError);
  };
  const std::string type = option.get_type_name();
  const bool real = type.starts_with("FLOAT");
  const bool natural = type.starts_with("UINT");
  const bool whole = natural || type.starts_with("INT");
  if (value.empty()) {
    refuse(fmt::format("empty, expected a {}", real || whole ? "number" : "text"));
  }
  if (real && !ParseReal(value)) refuse(fmt::format("'{}', expected a number such as 0.7", value));
  if (natural) {
    const auto number = ParseWhole<uint64_t>(value);
    if (!number) refuse(fmt::format("'{}', expected a whole number from 0 to 2^64 - 1", value));
    value = std::to_string(*number);
  } else if (whole) {
    const auto number = ParseWhole<int64_t>(value);
    if (!number) refuse(fmt::format("'{}', expected a whole number such as 4096 or 32k", value));
    value = std::to_string(*number);
  }
}

// Gives `app` and its subcommands what they have in common.
void Prepare(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    if (option->get_expected_max() == 0) continue;  // a flag without a value
    option->transform(CLI::Validator(
        [option](std::string& value) {
          CheckValue(*option, value);
          return std::string();
        },
        ""));
  }
  if (const auto examples = Examples().find(app.get_name()); examples != Examples().end()) {
    const std::string before = app.get_footer().empty() ? "" : app.get_footer() + "\n\n";
    app.footer(before + "Examples:" + examples->second);
  }
  for (CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) Prepare(*sub);
}

}  // namespace

Result<bool> ParseCommandLine(CLI::App& app, int argc, char** argv) {
  std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
  if (!words.empty() && words[0] == "help") {
    words.erase(words.begin());
    words.emplace_back("--help");
  }
  Prepare(app);
  app.footer(kEpilogue);
  std::reverse(words.begin(), words.end());  // as CLI11 takes them
  try {
    app.parse(words);
  } catch (const CLI::ParseError& e) {
    // Help of a subcommand that does not exist is none.
    if (e.get_exit_code() != 0 || !app.remaining().empty()) {
      return InvalidArgument(Complaint(app, e));
    }
    app.exit(e);  // --help, --version
    return false;
  }
  return true;
}

}  // namespace omnikv::tools
