// The tokenizer of a GGUF file to TokenizerParts, with the behaviour of llama.cpp.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/printable.h"
#include "text/tokenizer/bpe.h"
#include "text/tokenizer/byte_level.h"
#include "text/tokenizer/parts.h"
#include "text/tokenizer/unigram.h"

namespace omnikv::tok {
namespace {

constexpr std::string_view kMeta = "\u2581";

// Spaces as U+2581, with one more in front of a text (and so after each added token).
class SentencePieceSpaces final : public Normalizer {
 public:
  explicit SentencePieceSpaces(bool prefix) : prefix_(prefix) {}
  void Apply(NormText* t, Work*) const override {
    t->spare.clear();
    t->spare.reserve(t->text.size() + t->text.size() / 2 + 3);
    if (prefix_) t->spare += kMeta;
    for (const char c : t->text) {
      if (c == ' ') {
        t->spare += kMeta;
      } else {
        t->spare += c;
      }
    }
    t->text.swap(t->spare);
  }

 private:
  bool prefix_;
};

// sentencepiece's normalization: the longest key of the character map at each place, spaces as
// U+2581, runs of them as one and none at the end if so wished, one in front.
class SentencePieceNormalizer final : public Normalizer {
 public:
  SentencePieceNormalizer(std::optional<Charsmap> map, bool prefix, bool merge_spaces)
      : map_(std::move(map)), prefix_(prefix), merge_spaces_(merge_spaces) {}

  void Apply(NormText* t, Work* work) const override {
    t->spare.clear();
    t->spare.reserve(t->text.size() + t->text.size() / 2 + 3);
    bool in_word = false;
    bool prefixed = false;
    const auto append = [&](std::string_view text) {
      work->Draw(kMeta.size() * text.size());
      for (const char c : text) {
        if (c == ' ') {
          in_word = false;
          if (!merge_spaces_) t->spare += kMeta;
          continue;
        }
        if (!in_word && ((prefix_ && !prefixed) || merge_spaces_)) t->spare += kMeta;
        prefixed = prefixed || !in_word;
        in_word = true;
        t->spare += c;
      }
    };
    const std::string_view text = t->text;
    for (size_t i = 0; i < text.size();) {
      const auto match = map_ ? map_->FindLongest(text.substr(i)) : std::nullopt;
      // Keys end at characters; one that does not would cut one in half.
      const bool whole = match && (i + match->size == text.size() ||
                                   (static_cast<uint8_t>(text[i + match->size]) & 0xC0u) != 0x80u);
      const size_t size = whole ? match->size : Utf8Size(text[i]);
      append(whole ? match->replacement : text.substr(i, size));
      i += size;
    }
    t->text.swap(t->spare);
  }

 private:
  std::optional<Charsmap> map_;
  bool prefix_;
  bool merge_spaces_;
};

class Loader {
 public:
  explicit Loader(const GgufVocab& v)
      : v_(v),
        parts_(std::make_unique<TokenizerParts>()),
        n_(static_cast<int32_t>(v.tokens.size())) {}

  Result<std::unique_ptr<TokenizerParts>> Run() {
    OKV_RETURN_IF_ERROR(CheckSizes());
    OKV_RETURN_IF_ERROR(LoadTokens());
    bool add_bos = false;
    bool add_eos = false;
    if (v_.model == "gpt2") {
      OKV_RETURN_IF_ERROR(MakeByteLevelBpe(&add_bos));
    } else if (v_.model == "llama") {
      MakeSentencePieceBpe();
      add_bos = true;
    } else {
      OKV_RETURN_IF_ERROR(MakeUnigram());
      add_eos = true;
    }
    parts_->bos = v_.bos;
    parts_->eos = v_.eos;
    if (v_.add_bos.value_or(add_bos) && v_.bos) parts_->prefix.push_back(*v_.bos);
    if (v_.add_eos.value_or(add_eos) && v_.eos) parts_->suffix.push_back(*v_.eos);
    return std::move(parts_);
  }

 private:
  Status CheckSizes() const {
    if (v_.model != "gpt2" && v_.model != "llama" && v_.model != "t5") {
      return Unsupported(fmt::format("tokenizer.ggml.model is {}, supported are gpt2, llama and t5",
                                     Printable(v_.model)));
    }
    if (v_.tokens.empty() || v_.tokens.size() > (size_t{1} << 26)) {
      return Corrupt(fmt::format("tokenizer.ggml.tokens has {} entries, expected 1 to {}",
                                 v_.tokens.size(), 1 << 26));
    }
    const auto check = [&](std::string_view key, size_t size) {
      if (size == 0 || size == v_.tokens.size()) return Status();
      return Corrupt(fmt::format("tokenizer.ggml.{} has {} entries, expected {}, one a token", key,
                                 size, v_.tokens.size()));
    };
    OKV_RETURN_IF_ERROR(check("scores", v_.scores.size()));
    OKV_RETURN_IF_ERROR(check("token_type", v_.types.size()));
    for (const auto& [key, id] :
         {std::pair{"bos", v_.bos}, std::pair{"eos", v_.eos}, std::pair{"unknown", v_.unk}}) {
      if (id && (*id < 0 || *id >= n_)) {
        return Corrupt(
            fmt::format("tokenizer.ggml.{}_token_id is {}, expected 0 to {}", key, *id, n_ - 1));
      }
    }
    return {};
  }

  GgufTokenType Type(int32_t id) const {
    return v_.types.empty() ? GgufTokenType::kNormal
                            : static_cast<GgufTokenType>(v_.types[static_cast<size_t>(id)]);
  }

  Status LoadTokens() {
    std::string storage;
    std::vector<Vocab::Token> tokens;
    std::vector<AddedToken> added;
    tokens.reserve(v_.tokens.size());
    parts_->special.resize(v_.tokens.size());
    for (int32_t id = 0; id < n_; ++id) {
      const std::string_view text = v_.tokens[static_cast<size_t>(id)];
      if (storage.size() + text.size() > UINT32_MAX) {
        return Unsupported("the tokens have more than 4 GiB of text");
      }
      tokens.push_back(
          {id, static_cast<uint32_t>(storage.size()), static_cast<uint32_t>(text.size())});
      storage += text;
      const GgufTokenType type = Type(id);
      const bool special = type == GgufTokenType::kControl || type == GgufTokenType::kUnknown;
      parts_->special[static_cast<size_t>(id)] = special;
      if (special || type == GgufTokenType::kUserDefined) {
        AddedToken token;
        token.id = id;
        token.content = text;
        token.special = special;
        added.push_back(std::move(token));
      }
    }
    parts_->vocab = Vocab(std::move(storage), tokens);
    parts_->size = n_;
    OKV_ASSIGN_OR_RETURN(parts_->added, AddedTokens::Make(std::move(added)));
    return {};
  }

  Status MakeByteLevelBpe(bool* add_bos) {
    OKV_ASSIGN_OR_RETURN(const GgufPreTokenizer pre,
                         FindGgufPreTokenizer(v_.pre.empty() ? "default" : v_.pre));
    *add_bos = pre.add_bos;
    for (const std::string_view pattern : pre.patterns) {
      OKV_ASSIGN_OR_RETURN(Regex regex, Regex::Compile(pattern));
      parts_->pre_tokenizers.push_back(
          {MakeSplit(std::move(regex), SplitBehavior::kIsolated, /*invert=*/false),
           "tokenizer.ggml.pre"});
    }
    BpeOptions o;
    o.byte_level = true;
    o.ignore_merges = pre.ignore_merges;
    std::vector<Bpe::Merge> merges;
    merges.reserve(v_.merges.size());
    std::string text;
    for (size_t i = 0; i < v_.merges.size(); ++i) {
      const std::string_view merge = v_.merges[i];
      const size_t space = merge.find(' ', 1);  // a token may start with a space, none contains one
      if (space == std::string_view::npos) {
        return Corrupt(
            fmt::format("tokenizer.ggml.merges[{}] has no space, expected \"left right\"", i));
      }
      text = merge.substr(0, space);
      const int32_t left = parts_->vocab.Find(text);
      text += merge.substr(space + 1);
      // A merge of tokens that are not there never happens; some files have such merges.
      const int32_t right = parts_->vocab.Find(merge.substr(space + 1));
      merges.push_back({left, right, left < 0 || right < 0 ? -1 : parts_->vocab.Find(text)});
    }
    std::vector<bool> blocked = parts_->special;
    for (int32_t id = 0; id < n_; ++id) {
      if (!IsValidUtf8(parts_->vocab.Text(id))) blocked[static_cast<size_t>(id)] = true;
    }
    parts_->model = std::make_unique<Bpe>(&parts_->vocab, std::move(o), std::move(merges), blocked);
    parts_->token_bytes = TokenBytes::kByteLevel;
    parts_->decoder = Decoder({{DecoderStep::Kind::kBytes, ""}});
    return {};
  }

  // Whether a token can come out of text: not special, not a byte, the last with its text.
  bool Usable(int32_t id) const {
    const GgufTokenType type = Type(id);
    const std::string_view text = parts_->vocab.Text(id);
    return !parts_->special[static_cast<size_t>(id)] && type != GgufTokenType::kByte &&
           !text.empty() && IsValidUtf8(text) && parts_->vocab.Find(text) == id;
  }

  void DecodeSentencePiece(bool strip) {
    parts_->token_bytes = TokenBytes::kSentencePiece;
    std::vector<DecoderStep> steps = {{DecoderStep::Kind::kBytes, ""}};
    if (strip) steps.push_back({DecoderStep::Kind::kStrip, " ", 1});
    parts_->decoder = Decoder(std::move(steps));
  }

  void MakeSentencePieceBpe() {
    const bool prefix = v_.add_space_prefix.value_or(true);
    parts_->normalizers.push_back(
        {std::make_unique<SentencePieceSpaces>(prefix), "the normalizer"});
    ScoreBpe::Options o;
    o.unk = v_.unk.value_or(-1);
    for (unsigned b = 0; b < 256; ++b) {
      o.byte_ids[b] = parts_->vocab.Find(fmt::format("<0x{:02X}>", b));
    }
    std::vector<bool> usable(v_.tokens.size());
    for (int32_t id = 0; id < n_; ++id) usable[static_cast<size_t>(id)] = Usable(id);
    parts_->model = std::make_unique<ScoreBpe>(&parts_->vocab, o, v_.scores, std::move(usable));
    DecodeSentencePiece(prefix);
  }

  Status MakeUnigram() {
    const bool prefix = v_.add_space_prefix.value_or(true);
    std::optional<Charsmap> map;
    if (!v_.precompiled_charsmap.empty()) {
      Result<Charsmap> parsed = Charsmap::Parse(v_.precompiled_charsmap);
      if (!parsed.ok()) return parsed.status().Prefixed("tokenizer.ggml.precompiled_charsmap");
      map = std::move(*parsed);
    }
    parts_->normalizers.push_back(
        {std::make_unique<SentencePieceNormalizer>(std::move(map), prefix,
                                                   v_.remove_extra_whitespaces.value_or(false)),
         "tokenizer.ggml.precompiled_charsmap"});
    UnigramOptions o;
    o.unk = v_.unk.value_or(-1);
    o.look_up_unknown = false;
    std::vector<double> scores(v_.tokens.size());
    std::vector<bool> usable(v_.tokens.size());
    double min_score = 0.0;
    for (int32_t id = 0; id < n_; ++id) {
      const auto i = static_cast<size_t>(id);
      const float score = v_.scores.empty() || v_.scores[i] != v_.scores[i] ? 0.0f : v_.scores[i];
      const GgufTokenType type = Type(id);
      if (type == GgufTokenType::kNormal) min_score = std::min(min_score, double{score});
      scores[i] = type == GgufTokenType::kUserDefined ? 0.0 : score;
      usable[i] = Usable(id);
    }
    parts_->model = std::make_unique<Unigram>(&parts_->vocab, o, std::move(scores),
                                              std::move(usable), min_score);
    DecodeSentencePiece(prefix);
    return {};
  }

  const GgufVocab& v_;
  std::unique_ptr<TokenizerParts> parts_;
  int32_t n_;
};

}  // namespace

Result<std::unique_ptr<TokenizerParts>> LoadGgufVocab(const GgufVocab& vocab) {
  return Loader(vocab).Run();
}

}  // namespace omnikv::tok
