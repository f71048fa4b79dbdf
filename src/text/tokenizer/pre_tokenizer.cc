#include "text/tokenizer/pre_tokenizer.h"

#include <utility>

#include "text/tokenizer/byte_level.h"
#include "text/tokenizer/unicode.h"

namespace omnikv::tok {
namespace {

// Collects the parts of a piece, matches and what lies between them, as a behaviour wants them.
class Splitter {
 public:
  Splitter(SplitBehavior behavior, std::vector<Range>* out) : behavior_(behavior), out_(out) {}

  void Begin() {
    first_ = out_->size();
    previous_match_ = false;
    open_ = false;
  }

  // The next part, which may be empty. Parts cover the piece in order.
  void Part(Range r, bool is_match) {
    switch (behavior_) {
      case SplitBehavior::kRemoved:
        if (!is_match) Push(r);
        break;
      case SplitBehavior::kIsolated:
        Push(r);
        break;
      case SplitBehavior::kContiguous:
        Extend(r, is_match == previous_match_);
        break;
      case SplitBehavior::kMergedWithPrevious:
        Extend(r, is_match && !previous_match_);
        break;
      case SplitBehavior::kMergedWithNext:
        // From the end, a match joins what follows unless that is a match too: so a match stays
        // open for one part that is none.
        Extend(r, previous_match_ && !is_match);
        break;
    }
    previous_match_ = is_match;
  }

  // Drops the empty pieces.
  void End() {
    size_t kept = first_;
    for (size_t i = first_; i < out_->size(); ++i) {
      if ((*out_)[i].begin < (*out_)[i].end) (*out_)[kept++] = (*out_)[i];
    }
    out_->resize(kept);
  }

 private:
  void Push(Range r) {
    out_->push_back(r);
    open_ = true;
  }
  void Extend(Range r, bool joins) {
    if (joins && open_) {
      out_->back().end = r.end;
    } else {
      Push(r);
    }
  }

  SplitBehavior behavior_;
  std::vector<Range>* out_;
  size_t first_ = 0;
  bool previous_match_ = false;
  bool open_ = false;  // this piece has a part already
};

// Cuts every piece: find(piece, part) calls part(begin, end, is_match) for the parts of the piece.
template <typename Find>
void SplitPieces(PreText* t, SplitBehavior behavior, const Find& find) {
  std::vector<Range>& out = t->spare_pieces;
  out.clear();
  Splitter splitter(behavior, &out);
  const size_t origin = t->pieces.empty() ? 0 : t->pieces.front().begin;
  for (const Range piece : t->pieces) {
    splitter.Begin();
    find(t->Piece(piece), [&](size_t begin, size_t end, bool is_match) {
      splitter.Part({piece.begin + begin, piece.begin + end}, is_match);
    });
    splitter.End();
  }
  t->at_origin = t->at_origin && !out.empty() && out.front().begin == origin;
  t->pieces.swap(out);
}

void SplitByRegex(const Regex& regex, SplitBehavior behavior, bool invert, PreText* t,
                  RegexScratch* scratch) {
  SplitPieces(t, behavior, [&](std::string_view piece, const auto& part) {
    size_t done = 0;
    regex.ForEach(piece, scratch, [&](size_t begin, size_t end) {
      if (begin > done) part(done, begin, invert);
      part(begin, end, !invert);
      done = end;
    });
    if (done < piece.size()) part(done, piece.size(), invert);
  });
}

template <typename Predicate>
void SplitByChar(const Predicate& is_delimiter, SplitBehavior behavior, PreText* t) {
  SplitPieces(t, behavior, [&](std::string_view piece, const auto& part) {
    size_t done = 0;
    for (size_t i = 0; i < piece.size();) {
      const Char c = DecodeUtf8(piece.data() + i);
      if (is_delimiter(c.code)) {
        if (i > done) part(done, i, false);
        done = i + c.size;
        part(i, done, true);
      }
      i += c.size;
    }
    if (done < piece.size()) part(done, piece.size(), false);
  });
}

// Rewrites every piece: fn(piece, &out) appends what replaces it.
template <typename Fn>
void RewritePieces(PreText* t, const Fn& fn) {
  std::string& out = t->spare_text;
  out.clear();
  out.reserve(t->text.size() + t->text.size() / 4 + 16);
  for (Range& piece : t->pieces) {
    const size_t begin = out.size();
    fn(t->Piece(piece), &piece == t->pieces.data(), &out);
    piece = {begin, out.size()};
  }
  t->buffer.swap(out);
  t->text = t->buffer;
}

class Split final : public PreTokenizer {
 public:
  Split(Regex pattern, SplitBehavior behavior, bool invert)
      : pattern_(std::move(pattern)), behavior_(behavior), invert_(invert) {}
  void Apply(PreText* t, Work* work) const override {
    SplitByRegex(pattern_, behavior_, invert_, t, work->regex());
  }

 private:
  Regex pattern_;
  SplitBehavior behavior_;
  bool invert_;
};

class CharSplit final : public PreTokenizer {
 public:
  CharSplit(CharPredicate is_delimiter, SplitBehavior behavior)
      : is_delimiter_(is_delimiter), behavior_(behavior) {}
  void Apply(PreText* t, Work*) const override { SplitByChar(is_delimiter_, behavior_, t); }

 private:
  CharPredicate is_delimiter_;
  SplitBehavior behavior_;
};

class DelimiterSplit final : public PreTokenizer {
 public:
  explicit DelimiterSplit(char32_t delimiter) : delimiter_(delimiter) {}
  void Apply(PreText* t, Work*) const override {
    SplitByChar([this](char32_t c) { return c == delimiter_; }, SplitBehavior::kRemoved, t);
  }

 private:
  char32_t delimiter_;
};

class WordSplit final : public PreTokenizer {
 public:
  void Apply(PreText* t, Work*) const override {
    enum Kind { kSpace, kWord, kOther };
    const auto kind = [](char32_t c) {
      return IsWordChar(c) ? kWord : IsWhitespace(c) ? kSpace : kOther;
    };
    SplitPieces(t, SplitBehavior::kRemoved, [&](std::string_view piece, const auto& part) {
      size_t begin = 0;
      Kind open = kSpace;
      for (size_t i = 0; i < piece.size();) {
        const Char c = DecodeUtf8(piece.data() + i);
        const Kind k = kind(c.code);
        if (k != open) {
          part(begin, i, open == kSpace);
          begin = i;
          open = k;
        }
        i += c.size;
      }
      part(begin, piece.size(), open == kSpace);
    });
  }
};

class ByteLevel final : public PreTokenizer {
 public:
  ByteLevel(bool add_prefix_space, std::optional<Regex> words, bool map_bytes)
      : add_prefix_space_(add_prefix_space), words_(std::move(words)), map_bytes_(map_bytes) {}

  void Apply(PreText* t, Work* work) const override {
    if (add_prefix_space_) {
      RewritePieces(t, [](std::string_view piece, bool, std::string* out) {
        if (piece[0] != ' ') *out += ' ';
        *out += piece;
      });
    }
    if (words_) SplitByRegex(*words_, SplitBehavior::kIsolated, false, t, work->regex());
    if (map_bytes_) {
      RewritePieces(
          t, [](std::string_view piece, bool, std::string* out) { AppendByteChars(piece, out); });
    }
  }

 private:
  bool add_prefix_space_;
  std::optional<Regex> words_;
  bool map_bytes_;
};

class Metaspace final : public PreTokenizer {
 public:
  Metaspace(std::string replacement, PrependScheme scheme, bool split)
      : replacement_(std::move(replacement)), scheme_(scheme), split_(split) {}

  void Apply(PreText* t, Work*) const override {
    RewritePieces(t, [&](std::string_view piece, bool first, std::string* out) {
      const bool has = piece[0] == ' ' || piece.substr(0, replacement_.size()) == replacement_;
      const bool wants = scheme_ == PrependScheme::kAlways ||
                         (scheme_ == PrependScheme::kFirst && first && t->at_origin);
      if (wants && !has) *out += replacement_;
      for (const char c : piece) {
        if (c == ' ') {
          *out += replacement_;
        } else {
          *out += c;
        }
      }
    });
    if (!split_) return;
    SplitPieces(t, SplitBehavior::kMergedWithNext, [&](std::string_view piece, const auto& part) {
      size_t done = 0;
      for (size_t at; (at = piece.find(replacement_, done)) != piece.npos;) {
        if (at > done) part(done, at, false);
        done = at + replacement_.size();
        part(at, done, true);
      }
      if (done < piece.size()) part(done, piece.size(), false);
    });
  }

 private:
  std::string replacement_;
  PrependScheme scheme_;
  bool split_;
};

}  // namespace

PreTokenizerPtr MakeSplit(Regex pattern, SplitBehavior behavior, bool invert) {
  return std::make_unique<Split>(std::move(pattern), behavior, invert);
}
PreTokenizerPtr MakeCharSplit(CharPredicate is_delimiter, SplitBehavior behavior) {
  return std::make_unique<CharSplit>(is_delimiter, behavior);
}
PreTokenizerPtr MakeDelimiterSplit(char32_t delimiter) {
  return std::make_unique<DelimiterSplit>(delimiter);
}
PreTokenizerPtr MakeWordSplit() {
  return std::make_unique<WordSplit>();
}
Result<Regex> Gpt2Pattern() {
  return Regex::Compile(
      R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)");
}
PreTokenizerPtr MakeByteLevel(bool add_prefix_space, std::optional<Regex> words, bool map_bytes) {
  return std::make_unique<ByteLevel>(add_prefix_space, std::move(words), map_bytes);
}
PreTokenizerPtr MakeMetaspace(std::string replacement, PrependScheme scheme, bool split) {
  return std::make_unique<Metaspace>(std::move(replacement), scheme, split);
}

}  // namespace omnikv::tok
