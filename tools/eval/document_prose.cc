#include "eval/document_prose.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace omnikv::prose {
namespace {

constexpr int kTries = 12;           // at a sentence that is not in the text yet
constexpr uint32_t kAsideEvery = 5;  // sentences between a paragraph's first and last

bool IsVowel(char c) {
  return std::string_view("aeiouAEIOU").find(c) != std::string_view::npos;
}
bool IsLower(char c) {
  return c >= 'a' && c <= 'z';
}
bool IsLetter(char c) {
  return IsLower(c) || (c >= 'A' && c <= 'Z');
}
char Upper(char c) {
  return IsLower(c) ? static_cast<char>(c - 'a' + 'A') : c;
}

// "a old" becomes "an old". The word lists hold no word like "hour" or "useful".
std::string WithArticles(std::string_view s) {
  std::string out;
  for (size_t i = 0; i < s.size(); ++i) {
    out += s[i];
    const bool article = (s[i] == 'a' || s[i] == 'A') && (i == 0 || !IsLetter(s[i - 1]));
    if (article && i + 2 < s.size() && s[i + 1] == ' ' && IsVowel(s[i + 2])) out += 'n';
  }
  return out;
}

void CapitaliseFirst(std::string& s) {
  for (char& c : s) {
    if (!IsLetter(c)) continue;
    c = Upper(c);
    return;
  }
}

}  // namespace

uint64_t Rng::Next() {
  uint64_t z = state_ += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

uint32_t Rng::Below(uint32_t n) {
  return static_cast<uint32_t>(((Next() >> 32) * n) >> 32);
}

size_t Deck::Draw(Rng& rng) {
  if (left_ == 0) {
    left_ = cards_.size();
    for (size_t i = 0; i < left_; ++i) cards_[i] = static_cast<uint32_t>(i);
  }
  const uint32_t i = rng.Below(static_cast<uint32_t>(left_));
  --left_;
  std::swap(cards_[i], cards_[left_]);
  return cards_[left_];
}

ProseWriter::ProseWriter(uint64_t seed)
    : rng_(seed),
      scene_order_(Scenes().size()),
      headings_(Headings().size()),
      asides_(Asides().size()),
      men_(MenNames().size()),
      women_(WomenNames().size()) {
  for (const WordList& list : WordLists()) lists_.emplace_back(list.words.size());
  for (const Scene& s : Scenes()) {
    scenes_.push_back({Deck(s.open.size()), Deck(s.middle.size()), Deck(s.close.size())});
  }
}

Passage ProseWriter::Next() {
  Words templates = Headings();
  Deck* deck = &headings_;
  if (step_ > last_step_ && paragraphs_left_ == 0) {
    BeginChapter();
    Passage heading = Compose(templates, *deck);
    seen_.insert(heading.text);
    return heading;
  }
  if (step_ > last_step_) BeginParagraph();
  const Scene& scene = Scenes()[scene_];
  SceneDecks& decks = scenes_[scene_];
  const int step = step_++;
  if (step == 0) {
    templates = scene.open;
    deck = &decks.open;
  } else if (step == last_step_) {
    templates = scene.close;
    deck = &decks.close;
  } else if (rng_.Below(kAsideEvery) == 0) {
    templates = Asides();
    deck = &asides_;
  } else {
    templates = scene.middle;
    deck = &decks.middle;
  }
  Passage piece = Compose(templates, *deck);
  Keep(piece);
  return piece;
}

Passage ProseWriter::Spare() {
  if (rng_.Below(2) == 0) return Compose(Asides(), asides_);
  return Compose(Scenes()[scene_].middle, scenes_[scene_].middle);
}

void ProseWriter::Keep(const Passage& piece) {
  seen_.insert(piece.text);
  used_.push_back(piece.pattern);
  at_start_ = false;
}

void ProseWriter::BeginChapter() {
  bound_[static_cast<size_t>(Scope::kChapter)].clear();
  hero_ = DrawPerson();
  friend_ = DrawPerson();
  child_ = DrawPerson();
  paragraphs_left_ = 7 + static_cast<int>(rng_.Below(5));
  BeginParagraph();
}

void ProseWriter::BeginParagraph() {
  bound_[static_cast<size_t>(Scope::kParagraph)].clear();
  used_.clear();
  scene_ = scene_order_.Draw(rng_);
  --paragraphs_left_;
  step_ = 0;
  last_step_ = 4 + static_cast<int>(rng_.Below(5));
  at_start_ = true;
}

ProseWriter::Person ProseWriter::DrawPerson() {
  const bool woman = rng_.Below(2) == 0;
  return {woman ? WomenNames()[women_.Draw(rng_)] : MenNames()[men_.Draw(rng_)], woman};
}

Passage ProseWriter::Compose(Words templates, Deck& deck) {
  Passage piece{.starts_paragraph = at_start_};
  for (int i = 0; i < kTries; ++i) {
    piece.pattern = templates[deck.Draw(rng_)];
    piece.text = Fill(piece.pattern);
    const bool used = std::find(used_.begin(), used_.end(), piece.pattern) != used_.end();
    if (!used && !seen_.contains(piece.text)) break;
  }
  return piece;
}

// Replaces each "{slot}" of `pattern`. A slot names a list of WordLists(), with a digit after it
// for another word of the same list, or one of the chapter's three people or a pronoun of theirs;
// "^" before it gives every word a capital.
std::string ProseWriter::Fill(std::string_view pattern) {
  bound_[static_cast<size_t>(Scope::kSentence)].clear();
  std::string out;
  for (size_t i = 0; i < pattern.size();) {
    if (pattern[i] != '{') {
      out += pattern[i++];
      continue;
    }
    const size_t end = pattern.find('}', i);
    OKV_CHECK(end != std::string_view::npos, "'{}'", pattern);
    std::string_view slot = pattern.substr(i + 1, end - i - 1);
    const bool title = slot.starts_with('^');
    if (title) slot.remove_prefix(1);
    const std::string_view word = Lookup(slot);
    for (size_t k = 0; k < word.size(); ++k) {
      out += title && (k == 0 || word[k - 1] == ' ') ? Upper(word[k]) : word[k];
    }
    i = end + 1;
  }
  out = WithArticles(out);
  CapitaliseFirst(out);
  return out;
}

std::string_view ProseWriter::Lookup(std::string_view slot) {
  if (const std::string_view word = PersonWord(slot); !word.empty()) return word;
  std::string_view base = slot;
  if (base.ends_with('2')) base.remove_suffix(1);
  for (size_t i = 0; i < WordLists().size(); ++i) {
    const WordList& list = WordLists()[i];
    if (list.name != base) continue;
    Bindings& bound = bound_[static_cast<size_t>(list.scope)];
    if (const auto it = bound.find(slot); it != bound.end()) return it->second;
    const std::string other = slot == base ? std::string(base) + "2" : std::string(base);
    const auto taken = bound.find(other);
    std::string_view word = list.words[lists_[i].Draw(rng_)];
    while (taken != bound.end() && word == taken->second) word = list.words[lists_[i].Draw(rng_)];
    bound.emplace(slot, word);
    return word;
  }
  OKV_CHECK(false, "no word list is called '{}'", slot);
}

std::string_view ProseWriter::PersonWord(std::string_view slot) const {
  struct Names {
    std::string_view name, he, him, his;
  };
  constexpr Names kNames[] = {{"hero", "he", "him", "his"},
                              {"friend", "fhe", "fhim", "fhis"},
                              {"child", "che", "chim", "chis"}};
  const Person* people[] = {&hero_, &friend_, &child_};
  for (size_t i = 0; i < 3; ++i) {
    const Person& p = *people[i];
    if (slot == kNames[i].name) return p.name;
    if (slot == kNames[i].he) return p.woman ? "she" : "he";
    if (slot == kNames[i].him) return p.woman ? "her" : "him";
    if (slot == kNames[i].his) return p.woman ? "her" : "his";
  }
  return {};
}

}  // namespace omnikv::prose
