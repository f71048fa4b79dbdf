#include "eval/document.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <iterator>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "eval/document_prose.h"

namespace omnikv {
namespace {

using prose::Deck;
using prose::Passage;
using prose::Rng;
using SV = std::string_view;

constexpr int64_t kMinProse = 256;      // tokens
constexpr int64_t kFitWindow = 64;      // tokens before a mark: more than any sentence of the prose
constexpr int64_t kNearEnough = 3;      // tokens: no sentence is as short
constexpr int64_t kShortSentence = 12;  // tokens: some sentence fits a gap of this size
constexpr int kCandidates = 48;         // sentences tried for one gap

constexpr SV kCities[] = {
    "London",  "Paris",   "Rome",   "Berlin",  "Madrid",  "Vienna", "Prague",  "Lisbon",  "Athens",
    "Dublin",  "Oslo",    "Moscow", "Cairo",   "Delhi",   "Tokyo",  "Beijing", "Seoul",   "Sydney",
    "Toronto", "Chicago", "Boston", "Denver",  "Miami",   "Dallas", "Houston", "Seattle", "Nairobi",
    "Lagos",   "Lima",    "Havana", "Dakar",   "Geneva",  "Milan",  "Venice",  "Naples",  "Munich",
    "Hamburg", "Zurich",  "Oxford", "Bristol", "Glasgow", "Quebec", "Atlanta", "Tunis",
};
constexpr SV kPeople[] = {
    "Alice", "Bob",    "Carol", "David", "Emma",   "Frank",   "Henry", "Irene",  "Karen",
    "Leo",   "Mary",   "Nick",  "Olga",  "Paul",   "Quinn",   "Tina",  "Victor", "Wendy",
    "Anna",  "Clara",  "Ella",  "Gina",  "Hugo",   "Kate",    "Liam",  "Noah",   "Peter",
    "Tom",   "Arthur", "Diana", "Edgar", "Fiona",  "George",  "Helen", "Isaac",  "Julia",
    "Kevin", "Laura",  "Oscar", "Sarah", "Ursula", "Vincent",
};
constexpr SV kThingsToDo[] = {
    "eat a sandwich and sit in the park on a sunny day",
    "walk along the river at sunset",
    "visit the old museum near the station",
    "drink coffee in a small cafe by the harbor",
    "watch the boats from the stone bridge",
    "climb the tower and look at the city",
    "buy fresh bread at the morning market",
    "listen to music in the main square",
    "ride a bicycle around the lake",
    "read a book under the great oak tree",
    "take the slow train into the hills",
    "feed the ducks behind the castle",
    "swim in the cold blue sea",
    "look for shells on the quiet beach",
    "have dinner with friends on the roof",
};
constexpr SV kKeyWords[] = {"pass key", "secret number", "access code", "password"};

constexpr SV kMagicPreface =
    "Some special magic numbers are hidden within the following text. Make sure to memorize "
    "them.\n\n";
constexpr SV kMixedPreface = "Read the text below and answer the question.\n\n";

// Writes needles, never the same subject or value twice.
class NeedleMaker {
 public:
  explicit NeedleMaker(uint64_t seed) : rng_(seed) {}

  Needle Passkey() {
    const SV word = kKeyWords[keys_++];
    const std::string value = Digits(5);
    const std::string answer = fmt::format("The {} is {}.", word, value);
    return {.sentence = fmt::format("{} Remember it. {} is the {}.", answer, value, word),
            .question = fmt::format("What is the {}?", word),
            .answer = answer,
            .value = value};
  }

  Needle Magic() {
    const SV city = kCities[cities_.Draw(rng_)];
    return MagicOf(city, Digits(6));
  }

  Needle Uuid() {
    const SV city = kCities[cities_.Draw(rng_)];
    return MagicOf(city, HexGroups({8, 4, 4, 4, 12}));
  }

  Needle Best() {
    const SV city = kCities[cities_.Draw(rng_)];
    const std::string value(kThingsToDo[things_.Draw(rng_)]);
    const std::string answer = fmt::format("The best thing to do in {} is {}.", city, value);
    return {.sentence = answer,
            .question = fmt::format("What is the best thing to do in {}?", city),
            .answer = answer,
            .value = value};
  }

  Needle Person() {
    const SV name = kPeople[people_.Draw(rng_)];
    const std::string value(kCities[cities_.Draw(rng_)]);
    const std::string answer = fmt::format("{} lives in {}.", name, value);
    return {.sentence = answer,
            .question = fmt::format("Where does {} live?", name),
            .answer = answer,
            .value = value};
  }

 private:
  static Needle MagicOf(SV city, const std::string& value) {
    return {.sentence = fmt::format("One of the special magic numbers for {} is: {}.", city, value),
            .question =
                fmt::format("What is the special magic number for {} mentioned in the text?", city),
            .answer = fmt::format("The special magic number for {} is {}.", city, value),
            .value = value};
  }

  // Hexadecimal digits in groups of these sizes, with hyphens between them.
  std::string HexGroups(std::initializer_list<int> sizes) {
    std::string s;
    for (const int size : sizes) {
      if (!s.empty()) s += '-';
      for (int i = 0; i < size; ++i) s += "0123456789abcdef"[rng_.Below(16)];
    }
    return s;
  }

  // A number of `n` digits that neither holds nor is held by an earlier one.
  std::string Digits(int n) {
    while (true) {
      std::string s(1, static_cast<char>('1' + rng_.Below(9)));
      while (static_cast<int>(s.size()) < n) s += static_cast<char>('0' + rng_.Below(10));
      const auto clashes = [&s](const std::string& old) {
        return old.find(s) != std::string::npos || s.find(old) != std::string::npos;
      };
      if (std::any_of(numbers_.begin(), numbers_.end(), clashes)) continue;
      numbers_.push_back(s);
      return s;
    }
  }

  Rng rng_;
  Deck cities_{std::size(kCities)}, people_{std::size(kPeople)}, things_{std::size(kThingsToDo)};
  size_t keys_ = 0;
  std::vector<std::string> numbers_;
};

struct Kind {
  SV name;
  Needle (NeedleMaker::*make)();
  size_t limit;     // needles of this kind in one document
  bool takes_city;  // of those that all kinds share
  SV preface;       // of a document whose needles are all of this kind
};
constexpr Kind kKinds[] = {
    {"passkey", &NeedleMaker::Passkey, std::size(kKeyWords), false,
     "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
     "I will quiz you about the important information there.\n\n"},
    {"magic", &NeedleMaker::Magic, std::size(kCities), true, kMagicPreface},
    {"uuid", &NeedleMaker::Uuid, std::size(kCities), true, kMagicPreface},
    {"best", &NeedleMaker::Best, std::size(kThingsToDo), true, kMixedPreface},
    {"person", &NeedleMaker::Person, std::size(kPeople), true, kMixedPreface},
};

const Kind* FindKind(SV name) {
  const auto it = std::find_if(std::begin(kKinds), std::end(kKinds),
                               [name](const Kind& k) { return k.name == name; });
  return it == std::end(kKinds) ? nullptr : it;
}

// The kind of each needle.
Result<std::vector<const Kind*>> KindsOf(const DocumentSpec& spec) {
  for (const double depth : spec.depths) {
    if (!(depth >= 0 && depth <= 1)) {
      return InvalidArgument(fmt::format("depth is {}, expected 0 to 1", depth));
    }
  }
  for (const std::string& name : spec.kinds) {
    if (FindKind(name) == nullptr) {
      return InvalidArgument(
          fmt::format("kind is '{}', expected one of {}", name, fmt::join(NeedleKinds(), ", ")));
    }
  }
  if (spec.kinds.empty() && !spec.depths.empty()) {
    return InvalidArgument(fmt::format("no kinds are given for {} depths, expected some of {}",
                                       spec.depths.size(), fmt::join(NeedleKinds(), ", ")));
  }
  std::vector<const Kind*> kinds;
  size_t cities = 0;
  for (size_t i = 0; i < spec.depths.size(); ++i) {
    kinds.push_back(FindKind(spec.kinds[i % spec.kinds.size()]));
    cities += kinds.back()->takes_city ? 1 : 0;
  }
  for (const Kind& kind : kKinds) {
    const auto n = static_cast<size_t>(std::count(kinds.begin(), kinds.end(), &kind));
    if (n > kind.limit) {
      return InvalidArgument(fmt::format(
          "{} needles of kind '{}' are asked for, expected at most {}", n, kind.name, kind.limit));
    }
  }
  if (cities > std::size(kCities)) {
    return InvalidArgument(fmt::format("{} needles about cities are asked for, expected at most {}",
                                       cities, std::size(kCities)));
  }
  return kinds;
}

// Joins prose and needles, and knows how many tokens of prose there are. Within the text a piece
// may count a little more or less than alone, so the whole is counted again near every mark.
class Assembler {
 public:
  Assembler(const std::function<int64_t(SV)>& count, uint64_t seed)
      : count_(count), writer_(seed) {}

  // Writes on until there are `stop` tokens of prose, or as near as a sentence comes.
  void FillTo(int64_t stop) {
    if (prose_ == 0 && stop >= kNearEnough) Write(writer_.Next());
    do {
      while (stop - prose_ > kFitWindow) Write(writer_.Next());
      prose_ = count_(text_) - needles_;
    } while (stop - prose_ > kFitWindow);
    while (stop - prose_ >= kNearEnough) WriteBestFit(stop - prose_);
    if (prose_ > 0) prose_ = count_(text_) - needles_;
  }

  void Plant(const std::string& sentence) {
    const int64_t before = count_(text_);
    Append(sentence, false);
    needles_ += count_(text_) - before;
  }

  int64_t needle_tokens() const { return needles_; }
  std::string TakeText() { return std::move(text_); }

 private:
  void Append(SV text, bool starts_paragraph) {
    if (!text_.empty()) text_ += starts_paragraph ? "\n\n" : " ";
    text_ += text;
  }

  int64_t Size(const Passage& piece) const {
    return count_((piece.starts_paragraph ? "\n\n" : " ") + piece.text);
  }

  void Write(const Passage& piece) {
    prose_ += Size(piece);
    Append(piece.text, piece.starts_paragraph);
  }

  // The sentence that ends nearest to the mark, or one that leaves room for another.
  void WriteBestFit(int64_t gap) {
    Passage best;
    int64_t best_cost = INT64_MAX;
    for (int i = 0; i < kCandidates && best_cost > 0; ++i) {
      Passage piece = writer_.Spare();
      const int64_t left = gap - Size(piece);
      const int64_t cost = left >= kShortSentence ? kNearEnough - 1 : std::abs(left);
      if (cost >= best_cost) continue;
      best_cost = cost;
      best = std::move(piece);
    }
    writer_.Keep(best);
    Write(best);
  }

  const std::function<int64_t(SV)>& count_;
  prose::ProseWriter writer_;
  std::string text_;
  int64_t prose_ = 0;    // tokens
  int64_t needles_ = 0;  // tokens
};

bool IsWordChar(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

}  // namespace

std::vector<std::string> NeedleKinds() {
  std::vector<std::string> names;
  for (const Kind& kind : kKinds) names.emplace_back(kind.name);
  return names;
}

Result<Document> MakeDocument(const DocumentSpec& spec) {
  OKV_CHECK(spec.count_tokens != nullptr);
  OKV_ASSIGN_OR_RETURN(const std::vector<const Kind*> kinds, KindsOf(spec));
  Rng seeds(spec.seed);
  NeedleMaker maker(seeds.Next());
  Document doc;
  int64_t needle_tokens = 0;
  for (size_t i = 0; i < kinds.size(); ++i) {
    Needle needle = (maker.*kinds[i]->make)();
    needle.kind = kinds[i]->name;
    needle.depth = spec.depths[i];
    needle_tokens += spec.count_tokens(" " + needle.sentence);
    doc.needles.push_back(std::move(needle));
  }
  const int64_t prose = spec.target_tokens - needle_tokens;
  if (prose < kMinProse) {
    return InvalidArgument(fmt::format(
        "a document of {} tokens is asked for, expected at least {}: {} of prose and {} "
        "of facts",
        spec.target_tokens, kMinProse + needle_tokens, kMinProse, needle_tokens));
  }
  const bool mixed =
      std::adjacent_find(kinds.begin(), kinds.end(), std::not_equal_to<>()) != kinds.end();
  doc.preface = kinds.empty() || mixed ? kMixedPreface : kinds[0]->preface;

  std::vector<size_t> order(doc.needles.size());  // of the needles, by depth
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&doc](size_t a, size_t b) {
    return doc.needles[a].depth < doc.needles[b].depth;
  });
  Assembler assembler(spec.count_tokens, seeds.Next());
  for (const size_t i : order) {
    assembler.FillTo(std::llround(doc.needles[i].depth * static_cast<double>(prose)));
    assembler.Plant(doc.needles[i].sentence);
  }
  assembler.FillTo(spec.target_tokens - assembler.needle_tokens());
  doc.text = assembler.TakeText();
  return doc;
}

std::string UserMessage(const Document& doc, size_t needle) {
  OKV_CHECK(needle < doc.needles.size(), "{} of {}", needle, doc.needles.size());
  return doc.preface + doc.text + "\n\n" + doc.needles[needle].question;
}

bool IsAnswered(std::string_view value, std::string_view reply) {
  for (size_t at = reply.find(value); at != SV::npos; at = reply.find(value, at + 1)) {
    const size_t end = at + value.size();
    const bool starts = at == 0 || !IsWordChar(reply[at - 1]) || !IsWordChar(value.front());
    const bool ends = end == reply.size() || !IsWordChar(reply[end]) || !IsWordChar(value.back());
    if (starts && ends) return true;
  }
  return false;
}

bool IsAnswered(const Needle& needle, std::string_view reply) {
  return IsAnswered(needle.value, reply);
}

}  // namespace omnikv
