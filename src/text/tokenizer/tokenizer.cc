#include "text/tokenizer/tokenizer.h"

#include <utility>

#include "base/check.h"
#include "text/tokenizer/byte_level.h"
#include "text/tokenizer/parts.h"
#include "text/tokenizer/unicode.h"

namespace omnikv {
namespace {

using tok::AddedTokens;
using tok::Range;
using tok::TokenizerParts;
using tok::Work;

// One Encode call.
class Encoder {
 public:
  Encoder(const TokenizerParts& parts, Work* work, std::vector<int32_t>* out)
      : p_(parts), work_(*work), out_(out), model_(work) {}

  // `literal`: ranges of `text` that users wrote, or nullptr.
  void Run(std::string_view text, bool specials, const std::vector<Range>* literal) {
    AddedTokens::Rules rules;
    rules.specials = specials;
    rules.literal = literal;
    rules.normalized_specials = literal != nullptr;
    std::vector<AddedTokens::Part> parts;
    p_.added.SplitRaw(text, rules, &work_, &parts);
    rules.specials = specials && literal == nullptr;
    rules.held_back = literal == nullptr;
    rules.literal = nullptr;
    rules.normalized_specials = false;
    std::vector<AddedTokens::Part> normalized_parts;
    for (const AddedTokens::Part& part : parts) {
      if (part.id >= 0) {
        out_->push_back(part.id);
        continue;
      }
      norm_.text = text.substr(part.begin, part.end - part.begin);
      norm_.at_origin = part.begin == 0;
      p_.Normalize(&norm_, &work_);
      if (!p_.added.has_normalized()) {
        EncodePiece(norm_.text, norm_.at_origin);
        continue;
      }
      normalized_parts.clear();
      p_.added.SplitNormalized(norm_.text, rules, &work_, &normalized_parts);
      for (const AddedTokens::Part& inner : normalized_parts) {
        if (inner.id >= 0) {
          out_->push_back(inner.id);
        } else {
          EncodePiece(std::string_view(norm_.text).substr(inner.begin, inner.end - inner.begin),
                      norm_.at_origin && inner.begin == 0);
        }
      }
    }
  }

 private:
  void EncodePiece(std::string_view text, bool at_origin) {
    if (text.empty()) return;
    pre_.text = text;
    pre_.at_origin = at_origin;
    pre_.pieces.assign(1, {0, text.size()});
    for (const auto& step : p_.pre_tokenizers) {
      work_.At(step.name);
      step.run->Apply(&pre_, &work_);
      work_.Draw(pre_.text.size() + 16);
    }
    work_.At("model");
    for (const Range piece : pre_.pieces) p_.model->Encode(pre_.Piece(piece), &model_, out_);
  }

  const TokenizerParts& p_;
  Work& work_;
  std::vector<int32_t>* out_;
  tok::NormText norm_;
  tok::PreText pre_;
  tok::ModelScratch model_;
};

Result<std::vector<int32_t>> EncodeValid(const TokenizerParts& parts, std::string_view text,
                                         const EncodeOptions& options,
                                         const std::vector<Range>* literal) {
  OKV_CHECK(text.size() <= 3 * Tokenizer::kMaxTextBytes, "{} bytes", text.size());
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 3 + 8);
  if (options.add_special) ids = parts.prefix;
  Work work(text.size());
  try {
    if (!text.empty()) Encoder(parts, &work, &ids).Run(text, options.parse_special, literal);
  } catch (const tok::WorkError& error) {
    return ToStatus(error, work.step()).Prefixed(parts.what);
  }
  if (options.add_special) ids.insert(ids.end(), parts.suffix.begin(), parts.suffix.end());
  return ids;
}

std::string_view TokenText(const TokenizerParts& parts, int32_t id) {
  if (const tok::AddedToken* added = parts.added.FindId(id)) return added->content;
  return parts.vocab.Text(id);
}

// Appends what the decoder gets for a token.
void AppendTokenBytes(const TokenizerParts& parts, int32_t id, std::string* out) {
  const tok::AddedToken* added = parts.added.FindId(id);
  const std::string_view text = TokenText(parts, id);
  switch (parts.token_bytes) {
    case tok::TokenBytes::kText:
      // As the model's tokens are: the decoder undoes what the normalizer did.
      *out += added != nullptr && added->normalized ? added->normalized_content : text;
      return;
    case tok::TokenBytes::kByteLevel:
      if (added != nullptr || !tok::IsValidUtf8(text) || !tok::AppendCharBytes(text, out)) {
        *out += text;
      }
      return;
    case tok::TokenBytes::kSentencePiece:
      if (parts.special[static_cast<size_t>(id)]) {
        *out += text;
      } else if (const int byte = tok::ByteOfToken(text); byte >= 0 && added == nullptr) {
        *out += static_cast<char>(byte);
      } else {
        *out += tok::ReplaceAll(text, "\u2581", " ");
      }
      return;
  }
}

}  // namespace

Tokenizer::Tokenizer(std::unique_ptr<TokenizerParts> parts) : parts_(std::move(parts)) {}
Tokenizer::~Tokenizer() = default;

Result<std::unique_ptr<Tokenizer>> Tokenizer::FromJson(std::string_view tokenizer_json,
                                                       const std::string& what) {
  auto parts = tok::LoadTokenizerJson(tokenizer_json);
  if (!parts.ok()) return parts.status().Prefixed(what);
  (*parts)->what = what;
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::move(*parts)));
}

Result<std::unique_ptr<Tokenizer>> Tokenizer::FromGguf(const GgufVocab& vocab) {
  auto parts = tok::LoadGgufVocab(vocab);
  if (!parts.ok()) return parts.status().Prefixed(vocab.name);
  (*parts)->what = vocab.name;
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::move(*parts)));
}

Status Tokenizer::HoldBack(std::string_view text) {
  Work work(text.size());
  try {
    parts_->added.HoldBack(text, &work);
    return {};
  } catch (const tok::WorkError& error) {
    return ToStatus(error, "added_tokens").Prefixed(parts_->what);
  }
}

Result<std::vector<int32_t>> Tokenizer::Encode(std::string_view text, EncodeOptions options) const {
  if (tok::IsValidUtf8(text)) return EncodeValid(*parts_, text, options, nullptr);
  return EncodeValid(*parts_, tok::ReplaceInvalidUtf8(text), options, nullptr);
}

Result<std::vector<int32_t>> Tokenizer::EncodeSpans(const std::vector<TextSpan>& spans,
                                                    bool add_special) const {
  std::string text;
  std::vector<Range> literal;
  for (const TextSpan& span : spans) {
    const size_t begin = text.size();
    text += tok::IsValidUtf8(span.text) ? span.text : tok::ReplaceInvalidUtf8(span.text);
    if (!span.literal || text.size() == begin) continue;
    if (!literal.empty() && literal.back().end == begin) {
      literal.back().end = text.size();
    } else {
      literal.push_back({begin, text.size()});
    }
  }
  return EncodeValid(*parts_, text, {add_special, true}, literal.empty() ? nullptr : &literal);
}

Result<std::string> Tokenizer::Decode(const std::vector<int32_t>& ids, bool skip_special) const {
  StreamDecoder stream(this, skip_special);
  std::string text;
  for (const int32_t id : ids) {
    OKV_ASSIGN_OR_RETURN(const std::string piece, stream.Push(id));
    text += piece;
  }
  OKV_ASSIGN_OR_RETURN(const std::string rest, stream.Flush());
  return text + rest;
}

std::optional<int32_t> Tokenizer::TokenToId(std::string_view token) const {
  if (const tok::AddedToken* added = parts_->added.FindContent(token)) return added->id;
  const int32_t id = parts_->vocab.Find(token);
  return id < 0 ? std::nullopt : std::optional<int32_t>(id);
}

std::string_view Tokenizer::IdToToken(int32_t id) const {
  return TokenText(*parts_, id);
}

bool Tokenizer::IsSpecial(int32_t id) const {
  return id >= 0 && id < parts_->size && parts_->special[static_cast<size_t>(id)];
}

int32_t Tokenizer::vocab_size() const {
  return parts_->size;
}
std::optional<int32_t> Tokenizer::bos() const {
  return parts_->bos;
}
std::optional<int32_t> Tokenizer::eos() const {
  return parts_->eos;
}

struct StreamDecoder::Impl {
  const TokenizerParts& parts;
  bool skip_special;
  tok::DecoderStream stream;
  std::string bytes;  // scratch
};

StreamDecoder::StreamDecoder(const Tokenizer* tokenizer, bool skip_special)
    : impl_(new Impl{*tokenizer->parts_, skip_special,
                     tok::DecoderStream(&tokenizer->parts_->decoder), ""}) {}
StreamDecoder::~StreamDecoder() = default;

Result<std::string> StreamDecoder::Push(int32_t id) {
  std::string text;
  const TokenizerParts& parts = impl_->parts;
  if (id < 0 || id >= parts.size) return text;
  if (impl_->skip_special && parts.special[static_cast<size_t>(id)]) return text;
  if (parts.added.FindId(id) == nullptr && !parts.vocab.Has(id)) return text;
  impl_->bytes.clear();
  AppendTokenBytes(parts, id, &impl_->bytes);
  try {
    impl_->stream.Push(impl_->bytes, &text);
  } catch (const tok::WorkError& error) {
    return ToStatus(error, impl_->stream.step()).Prefixed(parts.what);
  }
  return text;
}

Result<std::string> StreamDecoder::Flush() {
  std::string text;
  try {
    impl_->stream.Flush(&text);
  } catch (const tok::WorkError& error) {
    return ToStatus(error, impl_->stream.step()).Prefixed(impl_->parts.what);
  }
  return text;
}

}  // namespace omnikv
