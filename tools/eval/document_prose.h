// Prose of any length for documents that hide facts (document.h): short chapters about people in
// small towns, in plain English. A seed decides every word, the same on every platform.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "eval/document_words.h"

namespace omnikv::prose {

// SplitMix64 (Steele, Lea, Flood 2014), and draws from it that no library's distribution decides.
class Rng {
 public:
  explicit Rng(uint64_t seed) : state_(seed) {}
  uint64_t Next();
  uint32_t Below(uint32_t n);  // 0 .. n-1; REQUIRES n > 0

 private:
  uint64_t state_;
};

// Draws 0 .. n-1 in random order, each once before any comes again.
class Deck {
 public:
  explicit Deck(size_t n) : left_(0), cards_(n) {}
  size_t Draw(Rng& rng);

 private:
  size_t left_;                  // cards not drawn yet: the first of cards_
  std::vector<uint32_t> cards_;  // [n]
};

// A heading or a sentence, and whether a blank line stands before it or a space.
struct Passage {
  std::string text;
  std::string_view pattern;  // the template it was made from
  bool starts_paragraph = false;
};

// Thread-compatible.
class ProseWriter {
 public:
  explicit ProseWriter(uint64_t seed);

  // The story's next sentence; the first is a heading. A sentence comes twice, or a template twice
  // in a paragraph, only when a dozen attempts at something new have failed.
  Passage Next();

  // A sentence that may stand here besides, for filling a gap. It counts as written only after
  // Keep(). REQUIRES an earlier Next().
  Passage Spare();
  void Keep(const Passage& piece);

 private:
  struct Person {
    std::string_view name;
    bool woman = false;
  };
  struct SceneDecks {
    Deck open, middle, close;
  };
  using Bindings = std::map<std::string, std::string_view, std::less<>>;

  void BeginChapter();
  void BeginParagraph();
  Person DrawPerson();
  Passage Compose(Words templates, Deck& deck);
  std::string Fill(std::string_view pattern);
  std::string_view Lookup(std::string_view slot);
  std::string_view PersonWord(std::string_view slot) const;  // empty: not about a person

  Rng rng_;
  std::vector<Deck> lists_;         // [WordLists()]
  std::vector<SceneDecks> scenes_;  // [Scenes()]
  Deck scene_order_, headings_, asides_, men_, women_;
  Bindings bound_[3];  // [Scope]
  Person hero_, friend_, child_;
  size_t scene_ = 0;
  int paragraphs_left_ = 0;  // of the chapter, the current one not counted
  int step_ = 0;             // sentences of the paragraph so far
  int last_step_ = -1;       // the closing sentence's step; below step_: the paragraph is over
  bool at_start_ = true;     // of a paragraph
  std::vector<std::string_view> used_;    // templates of the paragraph
  std::unordered_set<std::string> seen_;  // everything written
};

}  // namespace omnikv::prose
