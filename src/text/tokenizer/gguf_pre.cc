// The pre-tokenizers that GGUF files name in tokenizer.ggml.pre. A name stands for the expressions
// of the model's own tokenizer.json; each cuts what the ones before it left, matches and the text
// between them becoming pieces.
#include <fmt/format.h>

#include <array>
#include <string>

#include "base/printable.h"
#include "text/tokenizer/parts.h"

namespace omnikv::tok {
namespace {

#define OKV_CONTRACTION "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
// What most patterns since GPT-4's end with: punctuation, line ends, white space.
#define OKV_TAIL R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"
#define OKV_SLASH_TAIL R"(| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)"
// Words of GPT-4o's pattern: capitals, then small letters.
#define OKV_CASED_WORDS(contraction)                                                            \
  R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)" contraction \
  R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)" contraction

constexpr std::string_view kGpt2 =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr std::string_view kLlama3 =
    OKV_CONTRACTION R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3})" OKV_TAIL;
constexpr std::string_view kQwen2 = OKV_CONTRACTION R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N})" OKV_TAIL;
constexpr std::string_view kQwen35 =
    OKV_CONTRACTION R"(|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*)"
                    R"(|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kMiniCpm5 =
    OKV_CONTRACTION R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+)" OKV_TAIL;
constexpr std::string_view kO200k =
    OKV_CASED_WORDS(OKV_CONTRACTION "?") R"(|\p{N}{1,3})" OKV_SLASH_TAIL;
constexpr std::string_view kYoutuWords =
    OKV_CASED_WORDS(OKV_CONTRACTION "?") R"(|\p{N})" OKV_SLASH_TAIL;
constexpr std::string_view kTekken = OKV_CASED_WORDS("") R"(|\p{N})" OKV_SLASH_TAIL;
constexpr std::string_view kKimiK2 =
    R"([\p{Han}]+)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*)"
    R"([\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+)" OKV_CONTRACTION
    R"(?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+)"
    R"([\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*)" OKV_CONTRACTION R"(?|\p{N}{1,3})" OKV_TAIL;
constexpr std::string_view kSeedCoder =
    OKV_CONTRACTION R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+)"
                    R"(|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kBailing =
    R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*)"
    R"(|\s*[\r\n]|\s+(?!\S)|\s+)";
constexpr std::string_view kExaoneMoe = OKV_CONTRACTION
    R"(|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?)"
    R"(|\s*[\r\n]|\s+(?!\S)|\s+)";
constexpr std::string_view kBloom =
    R"( ?[^\s(|.,!?)\x{2026}\x{3002}\x{FF0C}\x{3001}\x{0964}\x{06D4}\x{060C}]+)";
constexpr std::string_view kNumber = R"(\p{N})";
constexpr std::string_view kNumbers = R"(\p{N}+)";
constexpr std::string_view kUpTo3Numbers = R"(\p{N}{1,3})";
constexpr std::string_view k3Digits = "[0-9][0-9][0-9]";
constexpr std::string_view kLineEnd = R"([\r\n])";
constexpr std::string_view kPunctuation = R"([\p{P}$+<=>\^~|]+)";
constexpr std::string_view kFalconPunctuation = R"([\p{P}$+<=>\^~|`]+)";
// Ideographs, then U+0800 up to them, then Hangul: DeepSeek's.
constexpr std::string_view kEastAsian = R"([\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+)";
constexpr std::string_view kIdeographsAndKana =
    R"([\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+)";
constexpr std::string_view kDeepSeek3 =
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+)"
    R"(| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kYoutuScripts =
    R"([\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+)"
    R"(|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C})"
    R"(\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+)"
    R"(|[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+)";
// The letters with case that the tokenizer of DeepSeek LLM lists.
constexpr std::string_view kDeepSeekLlmLetters =
    R"(\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293})"
    R"(\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A})"
    R"(\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556})"
    R"(\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF})"
    R"(\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D})"
    R"(\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D})"
    R"(\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4})"
    R"(\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4})"
    R"(\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124})"
    R"(\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F})"
    R"(\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4})"
    R"(\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F})"
    R"(\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17})"
    R"(\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3})"
    R"(\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF})"
    R"(\x{1E900}-\x{1E943}]+)";
constexpr std::string_view kDeepSeekLlmPunctuation =
    R"(\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+)";

struct Entry {
  std::string_view names;  // separated by spaces
  std::array<std::string_view, 6> patterns;
  bool ignore_merges = false;
  bool add_bos = false;
};

const auto& Entries() {
  static constexpr Entry kEntries[] = {
      {"default", {kPunctuation, kGpt2, kNumbers, k3Digits}},
      {"llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
       {kLlama3},
       true,
       true},
      {"dbrx smaug-bpe chatglm-bpe glm4", {kLlama3}},
      {"minicpm5", {kUpTo3Numbers, kMiniCpm5}, true},
      {"qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", {kQwen2}},
      {"qwen35", {kQwen35}},
      {"laguna", {R"([^\n]+|\n+)", kQwen2}},
      {"gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe "
       "gigachat a.x-4.0 mellum modern-bert exaone4 mpt olmo jais trillion granite-docling",
       {kGpt2}},
      {"starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", {kNumber, kGpt2}},
      {"falcon", {kFalconPunctuation, kGpt2, k3Digits}},
      {"gpt-4o o200k llama4 kanana2 talkie minimax-m2", {kO200k}},
      {"tiny_aya cohere2moe", {R"(\d{1,3}(?=(?:\d{3})*\b))", kO200k}},
      {"youtu", {kYoutuScripts, kYoutuWords}, true},
      {"tekken", {kTekken}, true, true},
      {"kimi-k2", {kKimiK2}},
      {"deepseek-llm",
       {kLineEnd, kDeepSeekLlmLetters, kDeepSeekLlmPunctuation, R"(\s+$)", kEastAsian, kNumber}},
      {"deepseek-coder", {kLineEnd, R"(\s?\p{L}+)", R"(\s?\p{P}+)", kEastAsian, kNumber}},
      {"deepseek-v3 hunyuan-dense joyai-llm", {kUpTo3Numbers, kIdeographsAndKana, kDeepSeek3}},
      {"seed-coder", {kSeedCoder}},
      {"bailingmoe bailingmoe2 llada-moe", {kBailing}},
      {"exaone-moe", {kExaoneMoe}},
      {"bloom poro-chat poro gpt3-finnish", {kBloom}},
      {"viking", {kBloom, kNumber}},
      {"chameleon",
       {"<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", R"([\t\n]|    |  )", kNumber,
        R"([\p{P}!-/:-@\[-`{-~])", kGpt2},
       false,
       true},
  };
  return kEntries;
}

bool Lists(std::string_view names, std::string_view name) {
  while (!names.empty()) {
    const size_t space = names.find(' ');
    if (names.substr(0, space) == name) return true;
    names.remove_prefix(space == std::string_view::npos ? names.size() : space + 1);
  }
  return false;
}

}  // namespace

Result<GgufPreTokenizer> FindGgufPreTokenizer(std::string_view name) {
  std::string known;
  for (const Entry& entry : Entries()) {
    if (Lists(entry.names, name)) {
      GgufPreTokenizer found;
      for (const std::string_view pattern : entry.patterns) {
        if (!pattern.empty()) found.patterns.push_back(pattern);
      }
      found.ignore_merges = entry.ignore_merges;
      found.add_bos = entry.add_bos;
      return found;
    }
    known += fmt::format("{}{}", known.empty() ? "" : " ", entry.names);
  }
  return Unsupported(
      fmt::format("tokenizer.ggml.pre is {}, supported are: {}", Printable(name), known));
}

}  // namespace omnikv::tok
