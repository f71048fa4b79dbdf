#include "text/tokenizer/json_steps.h"

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/printable.h"
#include "text/tokenizer/unicode.h"

namespace omnikv::tok {
namespace {

constexpr int64_t kMaxCount = 1 << 20;
constexpr size_t kMaxPattern = 1024;  // bytes of a text that a decoder replaces

// The steps of `node` and, where it is a Sequence, of the steps in its field `list`, to step().
Status ForEachStep(const JsonNode& node, const std::string& list, int depth, size_t* count,
                   const std::function<Status(const JsonNode&, const std::string&)>& step) {
  if (node.IsNull()) return {};
  if (!node.value().is_object()) return node.Wrong("an object");
  OKV_ASSIGN_OR_RETURN(const std::string type, node.Field("type").String());
  if (++*count > kMaxSteps || depth > kMaxStepDepth) {
    return Unsupported(fmt::format("{} has more than {} steps or {} levels", node.path(), kMaxSteps,
                                   kMaxStepDepth));
  }
  if (type != "Sequence") return step(node, type);
  const JsonNode steps = node.Field(list);
  OKV_ASSIGN_OR_RETURN(const size_t n, steps.ArraySize());
  for (size_t i = 0; i < n; ++i) {
    if (steps.Element(i).IsNull()) return steps.Element(i).Wrong("an object");
    OKV_RETURN_IF_ERROR(ForEachStep(steps.Element(i), list, depth + 1, count, step));
  }
  return {};
}

Status UnknownType(const JsonNode& node, const std::string& type, std::string_view known) {
  return Unsupported(fmt::format("{} has the type {}, supported are Sequence, {}", node.path(),
                                 Printable(type), known));
}

// {"String": text} or {"Regex": pattern}.
Result<Regex> ReadPattern(const JsonNode& node) {
  const JsonNode text = node.Field("String");
  Result<Regex> regex = Failed("");
  if (!text.IsNull()) {
    OKV_ASSIGN_OR_RETURN(const std::string literal, text.String());
    regex = Regex::Literal(literal);
  } else {
    if (node.Field("Regex").IsNull()) return node.Wrong("{\"String\": ...} or {\"Regex\": ...}");
    OKV_ASSIGN_OR_RETURN(const std::string pattern, node.Field("Regex").String());
    regex = Regex::Compile(pattern);
  }
  if (!regex.ok()) return regex.status().Prefixed(node.path());
  return regex;
}

// A string of one character.
Result<std::string> ReadChar(const JsonNode& node) {
  OKV_ASSIGN_OR_RETURN(std::string text, node.String());
  if (text.empty() || Utf8Size(text[0]) != text.size()) return node.Wrong("one character");
  return text;
}

Result<SplitBehavior> ReadBehavior(const JsonNode& node) {
  static constexpr std::array<std::pair<std::string_view, SplitBehavior>, 5> kNames = {{
      {"Removed", SplitBehavior::kRemoved},
      {"Isolated", SplitBehavior::kIsolated},
      {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
      {"MergedWithNext", SplitBehavior::kMergedWithNext},
      {"Contiguous", SplitBehavior::kContiguous},
  }};
  for (const auto& [name, behavior] : kNames) {
    if (node.value() == name) return behavior;
  }
  return node.Wrong("Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous");
}

// Of a Metaspace: older files have add_prefix_space, newer ones prepend_scheme.
Result<PrependScheme> ReadPrependScheme(const JsonNode& node) {
  OKV_ASSIGN_OR_RETURN(const bool add, node.Field("add_prefix_space").BoolOr(true));
  const JsonNode scheme = node.Field("prepend_scheme");
  if (scheme.IsNull()) return add ? PrependScheme::kAlways : PrependScheme::kNever;
  if (scheme.value() == "never") return PrependScheme::kNever;
  if (!add) return scheme.Wrong("\"never\" beside add_prefix_space false");
  if (scheme.value() == "first") return PrependScheme::kFirst;
  if (scheme.value() == "always") return PrependScheme::kAlways;
  return scheme.Wrong("first, always or never");
}

Status ReadNormalizerStep(const JsonNode& node, const std::string& type,
                          std::vector<NormalizerPtr>* steps) {
  if (type == "NFC") {
    steps->push_back(MakeNormalForm(NormalForm::kNfc));
  } else if (type == "NFD") {
    steps->push_back(MakeNormalForm(NormalForm::kNfd));
  } else if (type == "NFKC") {
    steps->push_back(MakeNormalForm(NormalForm::kNfkc));
  } else if (type == "NFKD") {
    steps->push_back(MakeNormalForm(NormalForm::kNfkd));
  } else if (type == "Lowercase") {
    steps->push_back(MakeLowercase());
  } else if (type == "StripAccents") {
    steps->push_back(MakeStripAccents());
  } else if (type == "Nmt") {
    steps->push_back(MakeNmt());
  } else if (type == "ByteLevel") {
    steps->push_back(MakeByteChars());
  } else if (type == "Prepend") {
    OKV_ASSIGN_OR_RETURN(std::string text, node.Field("prepend").String());
    steps->push_back(MakePrepend(std::move(text)));
  } else if (type == "Replace") {
    OKV_ASSIGN_OR_RETURN(Regex pattern, ReadPattern(node.Field("pattern")));
    OKV_ASSIGN_OR_RETURN(std::string content, node.Field("content").String());
    steps->push_back(MakeReplace(std::move(pattern), std::move(content)));
  } else if (type == "Strip") {
    OKV_ASSIGN_OR_RETURN(const bool left, node.Field("strip_left").BoolOr(true));
    OKV_ASSIGN_OR_RETURN(const bool right, node.Field("strip_right").BoolOr(true));
    steps->push_back(MakeStrip(left, right));
  } else if (type == "Precompiled") {
    const JsonNode field = node.Field("precompiled_charsmap");
    if (field.IsNull() || field.value() == "") return {};
    OKV_ASSIGN_OR_RETURN(const std::string base64, field.String());
    const auto blob = DecodeBase64(base64);
    if (!blob) return field.Wrong("base64");
    Result<Charsmap> map = Charsmap::Parse(*blob);
    if (!map.ok()) return map.status().Prefixed(field.path());
    steps->push_back(MakePrecompiled(std::move(*map)));
  } else if (type == "BertNormalizer") {
    BertOptions o;
    OKV_ASSIGN_OR_RETURN(o.clean_text, node.Field("clean_text").BoolOr(true));
    OKV_ASSIGN_OR_RETURN(o.handle_chinese_chars, node.Field("handle_chinese_chars").BoolOr(true));
    OKV_ASSIGN_OR_RETURN(o.lowercase, node.Field("lowercase").BoolOr(true));
    OKV_ASSIGN_OR_RETURN(o.strip_accents, node.Field("strip_accents").BoolOr(o.lowercase));
    steps->push_back(MakeBert(o));
  } else {
    return UnknownType(node, type,
                       "NFC, NFD, NFKC, NFKD, Lowercase, StripAccents, Nmt, ByteLevel, Prepend, "
                       "Replace, Strip, Precompiled and BertNormalizer");
  }
  return {};
}

// What the last step was, when that was a ByteLevel.
struct ByteLevelStep {
  bool add_prefix_space = false;
  bool use_regex = true;
};

Result<PreTokenizerPtr> MakeByteLevelStep(const ByteLevelStep& step, bool map_bytes) {
  std::optional<Regex> words;
  if (step.use_regex) {
    OKV_ASSIGN_OR_RETURN(words, Gpt2Pattern());
  }
  return MakeByteLevel(step.add_prefix_space, std::move(words), map_bytes);
}

Status ReadPreTokenizerStep(const JsonNode& node, const std::string& type,
                            std::vector<PreTokenizerPtr>* steps,
                            std::optional<ByteLevelStep>* last) {
  last->reset();
  if (type == "ByteLevel") {
    ByteLevelStep step;
    OKV_ASSIGN_OR_RETURN(step.add_prefix_space, node.Field("add_prefix_space").BoolOr(true));
    OKV_ASSIGN_OR_RETURN(step.use_regex, node.Field("use_regex").BoolOr(true));
    OKV_ASSIGN_OR_RETURN(PreTokenizerPtr made, MakeByteLevelStep(step, /*map_bytes=*/true));
    steps->push_back(std::move(made));
    *last = step;
  } else if (type == "Split") {
    OKV_ASSIGN_OR_RETURN(Regex pattern, ReadPattern(node.Field("pattern")));
    OKV_ASSIGN_OR_RETURN(const SplitBehavior behavior, ReadBehavior(node.Field("behavior")));
    OKV_ASSIGN_OR_RETURN(const bool invert, node.Field("invert").BoolOr(false));
    steps->push_back(MakeSplit(std::move(pattern), behavior, invert));
  } else if (type == "Metaspace") {
    OKV_ASSIGN_OR_RETURN(std::string replacement, ReadChar(node.Field("replacement")));
    OKV_ASSIGN_OR_RETURN(const PrependScheme scheme, ReadPrependScheme(node));
    OKV_ASSIGN_OR_RETURN(const bool split, node.Field("split").BoolOr(true));
    steps->push_back(MakeMetaspace(std::move(replacement), scheme, split));
  } else if (type == "Digits") {
    OKV_ASSIGN_OR_RETURN(const bool individual, node.Field("individual_digits").BoolOr(false));
    steps->push_back(MakeCharSplit(
        IsNumber, individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous));
  } else if (type == "Punctuation") {
    SplitBehavior behavior = SplitBehavior::kIsolated;
    if (!node.Field("behavior").IsNull()) {
      OKV_ASSIGN_OR_RETURN(behavior, ReadBehavior(node.Field("behavior")));
    }
    steps->push_back(MakeCharSplit(IsPunctuation, behavior));
  } else if (type == "Whitespace") {
    steps->push_back(MakeWordSplit());
  } else if (type == "WhitespaceSplit") {
    steps->push_back(MakeCharSplit(IsWhitespace, SplitBehavior::kRemoved));
  } else if (type == "BertPreTokenizer") {
    steps->push_back(MakeCharSplit(IsWhitespace, SplitBehavior::kRemoved));
    steps->push_back(MakeCharSplit(IsPunctuation, SplitBehavior::kIsolated));
  } else if (type == "CharDelimiterSplit") {
    OKV_ASSIGN_OR_RETURN(const std::string delimiter, ReadChar(node.Field("delimiter")));
    steps->push_back(MakeDelimiterSplit(DecodeUtf8(delimiter.data()).code));
  } else {
    return UnknownType(node, type,
                       "ByteLevel, Split, Metaspace, Digits, Punctuation, Whitespace, "
                       "WhitespaceSplit, BertPreTokenizer and CharDelimiterSplit");
  }
  return {};
}

Status ReadDecoderStep(const JsonNode& node, const std::string& type,
                       std::vector<DecoderStep>* steps) {
  using Kind = DecoderStep::Kind;
  DecoderStep step{};
  if (type == "ByteLevel") {
    step.kind = Kind::kByteLevel;
  } else if (type == "ByteFallback") {
    step.kind = Kind::kByteFallback;
  } else if (type == "Fuse") {
    step.kind = Kind::kFuse;
  } else if (type == "Replace") {
    step.kind = Kind::kReplace;
    const JsonNode pattern = node.Field("pattern");
    if (pattern.Field("String").value().is_string()) {
      OKV_ASSIGN_OR_RETURN(step.pattern_text, pattern.Field("String").String());
    }
    if (step.pattern_text.empty()) {
      OKV_ASSIGN_OR_RETURN(Regex regex, ReadPattern(pattern));
      step.pattern = std::make_shared<const Regex>(std::move(regex));
    }
    if (step.pattern_text.size() > kMaxPattern) {
      return Unsupported(fmt::format("{} has a pattern of {} bytes, expected at most {}",
                                     node.path(), step.pattern_text.size(), kMaxPattern));
    }
    OKV_ASSIGN_OR_RETURN(step.content, node.Field("content").String());
  } else if (type == "Strip") {
    step.kind = Kind::kStrip;
    OKV_ASSIGN_OR_RETURN(step.content, ReadChar(node.Field("content")));
    OKV_ASSIGN_OR_RETURN(const int64_t start, node.Field("start").Integer(kMaxCount));
    OKV_ASSIGN_OR_RETURN(const int64_t stop, node.Field("stop").Integer(kMaxCount));
    step.start = static_cast<size_t>(start);
    step.stop = static_cast<size_t>(stop);
  } else if (type == "Metaspace") {
    step.kind = Kind::kMetaspace;
    OKV_ASSIGN_OR_RETURN(step.content, ReadChar(node.Field("replacement")));
    OKV_ASSIGN_OR_RETURN(const PrependScheme scheme, ReadPrependScheme(node));
    step.flag = scheme != PrependScheme::kNever;
  } else if (type == "WordPiece") {
    step.kind = Kind::kWordPiece;
    OKV_ASSIGN_OR_RETURN(step.content, node.Field("prefix").String());
    OKV_ASSIGN_OR_RETURN(step.flag, node.Field("cleanup").BoolOr(true));
  } else if (type == "BPEDecoder") {
    step.kind = Kind::kBpe;
    OKV_ASSIGN_OR_RETURN(step.content, node.Field("suffix").String());
    if (step.content.empty()) return node.Field("suffix").Wrong("some text");
  } else {
    return UnknownType(node, type,
                       "ByteLevel, ByteFallback, Fuse, Replace, Strip, Metaspace, WordPiece and "
                       "BPEDecoder");
  }
  steps->push_back(std::move(step));
  return {};
}

}  // namespace

Status ReadNormalizer(const JsonNode& node, std::vector<NamedStep<Normalizer>>* steps) {
  size_t count = 0;
  return ForEachStep(node, "normalizers", 0, &count,
                     [&](const JsonNode& step, const std::string& type) -> Status {
                       std::vector<NormalizerPtr> made;
                       OKV_RETURN_IF_ERROR(ReadNormalizerStep(step, type, &made));
                       for (auto& one : made) steps->push_back({std::move(one), step.path()});
                       return {};
                     });
}

Status ReadDecoder(const JsonNode& node, std::vector<DecoderStep>* steps) {
  size_t count = 0;
  return ForEachStep(node, "decoders", 0, &count,
                     [&](const JsonNode& step, const std::string& type) -> Status {
                       OKV_RETURN_IF_ERROR(ReadDecoderStep(step, type, steps));
                       steps->back().name = step.path();
                       return {};
                     });
}

Result<PreTokenizerChain> ReadPreTokenizer(const JsonNode& node, bool model_takes_bytes) {
  PreTokenizerChain chain;
  std::optional<ByteLevelStep> last;
  size_t count = 0;
  const auto add = [&](const JsonNode& step, const std::string& type) -> Status {
    std::vector<PreTokenizerPtr> made;
    OKV_RETURN_IF_ERROR(ReadPreTokenizerStep(step, type, &made, &last));
    for (auto& one : made) chain.steps.push_back({std::move(one), step.path()});
    return {};
  };
  OKV_RETURN_IF_ERROR(ForEachStep(node, "pretokenizers", 0, &count, add));
  if (last && model_takes_bytes) {
    OKV_ASSIGN_OR_RETURN(chain.steps.back().run, MakeByteLevelStep(*last, /*map_bytes=*/false));
    chain.gives_bytes = true;
  }
  return chain;
}

}  // namespace omnikv::tok
