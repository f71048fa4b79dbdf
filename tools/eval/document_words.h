// What the prose of document.h is made of: word lists, and sentence templates grouped in scenes.
// A template names a list in braces, "{thing}"; document_prose.cc says how it is filled in.
// No word here holds a digit, and none is a city or a person of the needles (document.cc).
#pragma once

#include <span>
#include <string_view>

namespace omnikv::prose {

using Words = std::span<const std::string_view>;

// How long a word, once drawn, stays what its slot means.
enum class Scope { kSentence, kParagraph, kChapter };

struct WordList {
  std::string_view name;
  Scope scope;
  Words words;
};

// One paragraph's matter. It opens with one sentence, goes on with some of `middle` in any order,
// and ends with one of `close`.
struct Scene {
  Words open;
  Words middle;
  Words close;
};

std::span<const WordList> WordLists();
std::span<const Scene> Scenes();
Words Headings();    // of chapters
Words Asides();      // sentences that fit anywhere in a paragraph, many of them short
Words MenNames();    // people of the stories
Words WomenNames();  // people of the stories

}  // namespace omnikv::prose
