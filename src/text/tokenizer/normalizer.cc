#include "text/tokenizer/normalizer.h"

#include <utility>

#include "text/tokenizer/byte_level.h"

namespace omnikv::tok {
namespace {

// Rewrites the text character by character: fn(code, &out) appends what replaces it.
template <typename Fn>
void MapChars(NormText* t, const Fn& fn) {
  t->spare.clear();
  t->spare.reserve(t->text.size() + 16);
  bool first = true;
  for (size_t i = 0; i < t->text.size();) {
    const Char c = DecodeUtf8(t->text.data() + i);
    fn(c.code, &t->spare);
    if (first && t->spare.empty()) t->at_origin = false;  // the first character went away
    first = false;
    i += c.size;
  }
  t->text.swap(t->spare);
}

class NormalFormStep final : public Normalizer {
 public:
  explicit NormalFormStep(NormalForm form) : form_(form) {}
  void Apply(NormText* t, Work*) const override {
    if (Normalize(form_, t->text, &t->spare)) t->text.swap(t->spare);
  }

 private:
  NormalForm form_;
};

class Lowercase final : public Normalizer {
 public:
  void Apply(NormText* t, Work*) const override {
    MapChars(t, [](char32_t c, std::string* out) { AppendLower(out, c); });
  }
};

class Prepend final : public Normalizer {
 public:
  explicit Prepend(std::string text) : text_(std::move(text)) {}
  void Apply(NormText* t, Work* work) const override {
    if (t->text.empty()) return;
    work->Draw(text_.size());
    t->text.insert(0, text_);
  }

 private:
  std::string text_;
};

class Replace final : public Normalizer {
 public:
  Replace(Regex pattern, std::string content)
      : pattern_(std::move(pattern)), content_(std::move(content)) {}

  void Apply(NormText* t, Work* work) const override {
    t->spare.clear();
    size_t done = 0;
    bool any = false;
    pattern_.ForEach(t->text, work->regex(), [&](size_t begin, size_t end) {
      work->Draw(content_.size() + 8);
      if (!any) t->spare.reserve(t->text.size() + t->text.size() / 2);
      any = true;
      t->spare.append(t->text, done, begin - done);
      t->spare += content_;
      done = end;
      // A replacement is aligned with the last character that it replaces.
      if (begin == 0 && end > 0 && (content_.empty() || end > Utf8Size(t->text[0]))) {
        t->at_origin = false;
      }
    });
    if (!any) return;
    t->spare.append(t->text, done, std::string::npos);
    t->text.swap(t->spare);
  }

 private:
  Regex pattern_;
  std::string content_;
};

class Strip final : public Normalizer {
 public:
  Strip(bool left, bool right) : left_(left), right_(right) {}
  void Apply(NormText* t, Work*) const override {
    size_t begin = 0;
    size_t end = t->text.size();
    while (left_ && begin < end) {
      const Char c = DecodeUtf8(t->text.data() + begin);
      if (!IsWhitespace(c.code)) break;
      begin += c.size;
    }
    while (right_ && end > begin) {
      const Char c = DecodeUtf8Before(t->text, end);
      if (!IsWhitespace(c.code)) break;
      end -= c.size;
    }
    if (begin > 0) t->at_origin = false;
    t->text.resize(end);
    t->text.erase(0, begin);
  }

 private:
  bool left_;
  bool right_;
};

class StripAccents final : public Normalizer {
 public:
  void Apply(NormText* t, Work*) const override {
    if (IsAscii(t->text)) return;
    MapChars(t, [](char32_t c, std::string* out) {
      if (!IsMark(c)) AppendUtf8(out, c);
    });
  }
};

// The character clean-up of the NMT project: some controls go, some become spaces.
class Nmt final : public Normalizer {
 public:
  void Apply(NormText* t, Work*) const override {
    MapChars(t, [](char32_t c, std::string* out) {
      const bool removed = (c >= 0x1 && c <= 0x8) || c == 0xB || (c >= 0xE && c <= 0x1F) ||
                           c == 0x7F || c == 0x8F || c == 0x9F;
      const bool space = c == 0x9 || c == 0xA || c == 0xC || c == 0xD || c == 0x1680 ||
                         (c >= 0x200B && c <= 0x200F) || c == 0x2028 || c == 0x2029 ||
                         c == 0x2581 || c == 0xFEFF || c == 0xFFFD;
      if (!removed) AppendUtf8(out, space ? U' ' : c);
    });
  }
};

// Replaces whole grapheme clusters of up to 5 bytes where the map has one that starts with a key,
// else single characters: what the tokenizers library does, not what sentencepiece does.
class Precompiled final : public Normalizer {
 public:
  explicit Precompiled(Charsmap map) : map_(std::move(map)) {}
  void Apply(NormText* t, Work* work) const override {
    constexpr size_t kMaxClusterBytes = 5;
    t->spare.clear();
    t->spare.reserve(t->text.size() + 16);
    ForEachGrapheme(t->text, [&](std::string_view cluster) {
      if (cluster.size() <= kMaxClusterBytes) {
        if (const auto match = map_.FindShortest(cluster)) {
          work->Draw(match->replacement.size());
          t->spare += match->replacement;
          return;
        }
      }
      for (size_t i = 0; i < cluster.size();) {
        const std::string_view c = cluster.substr(i, Utf8Size(cluster[i]));
        const auto match = map_.FindShortest(c);
        const std::string_view put = match ? match->replacement : c;
        work->Draw(put.size());
        t->spare += put;
        i += c.size();
      }
    });
    t->text.swap(t->spare);
  }

 private:
  Charsmap map_;
};

class ByteChars final : public Normalizer {
 public:
  void Apply(NormText* t, Work*) const override {
    t->spare.clear();
    AppendByteChars(t->text, &t->spare);
    t->text.swap(t->spare);
  }
};

class Bert final : public Normalizer {
 public:
  explicit Bert(BertOptions options) : o_(options) {}
  void Apply(NormText* t, Work*) const override {
    if (o_.clean_text) {
      MapChars(t, [](char32_t c, std::string* out) {
        const bool layout = c == '\t' || c == '\n' || c == '\r';
        if (c == 0 || c == 0xFFFD || (IsOther(c) && !layout)) return;
        AppendUtf8(out, IsWhitespace(c) ? U' ' : c);
      });
    }
    if (o_.handle_chinese_chars) {
      MapChars(t, [](char32_t c, std::string* out) {
        const bool chinese = IsChinese(c);
        if (chinese) *out += ' ';
        AppendUtf8(out, c);
        if (chinese) *out += ' ';
      });
    }
    if (o_.strip_accents) {
      if (Normalize(NormalForm::kNfd, t->text, &t->spare)) t->text.swap(t->spare);
      MapChars(t, [](char32_t c, std::string* out) {
        if (!IsNonspacingMark(c)) AppendUtf8(out, c);
      });
    }
    if (o_.lowercase) MapChars(t, [](char32_t c, std::string* out) { AppendLower(out, c); });
  }

 private:
  // The ideograph blocks of the tokenizers library; extension E starts late there.
  static bool IsChinese(char32_t c) {
    return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) ||
           (c >= 0x20000 && c <= 0x2A6DF) || (c >= 0x2A700 && c <= 0x2B73F) ||
           (c >= 0x2B740 && c <= 0x2B81F) || (c >= 0x2B920 && c <= 0x2CEAF) ||
           (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x2F800 && c <= 0x2FA1F);
  }

  BertOptions o_;
};

}  // namespace

NormalizerPtr MakeNormalForm(NormalForm form) {
  return std::make_unique<NormalFormStep>(form);
}
NormalizerPtr MakeLowercase() {
  return std::make_unique<Lowercase>();
}
NormalizerPtr MakePrepend(std::string text) {
  return std::make_unique<Prepend>(std::move(text));
}
NormalizerPtr MakeReplace(Regex pattern, std::string content) {
  return std::make_unique<Replace>(std::move(pattern), std::move(content));
}
NormalizerPtr MakeStrip(bool left, bool right) {
  return std::make_unique<Strip>(left, right);
}
NormalizerPtr MakeStripAccents() {
  return std::make_unique<StripAccents>();
}
NormalizerPtr MakeNmt() {
  return std::make_unique<Nmt>();
}
NormalizerPtr MakePrecompiled(Charsmap map) {
  return std::make_unique<Precompiled>(std::move(map));
}
NormalizerPtr MakeByteChars() {
  return std::make_unique<ByteChars>();
}
NormalizerPtr MakeBert(BertOptions options) {
  return std::make_unique<Bert>(options);
}

}  // namespace omnikv::tok
