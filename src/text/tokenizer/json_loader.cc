// tokenizer.json to TokenizerParts. Ids of added tokens are taken as they are written; the
// tokenizers library renumbers those that do not follow on the model's.
#include <algorithm>
#include <limits>
#include <utility>

#include "text/tokenizer/bpe.h"
#include "text/tokenizer/json_node.h"
#include "text/tokenizer/json_reader.h"
#include "text/tokenizer/json_steps.h"
#include "text/tokenizer/parts.h"
#include "text/tokenizer/unigram.h"

namespace omnikv::tok {
namespace {

constexpr size_t kMaxAround = 1024;  // tokens that one step of a post-processor puts around a text
constexpr size_t kMaxAffix = 64;     // bytes that BPE adds to each character or word

// Ids may have holes, but tables are as long as the largest id: so no more holes than tokens, give
// or take.
int64_t IdLimit(size_t n_tokens) {
  return 2 * static_cast<int64_t>(n_tokens) + 65536;
}

Status ReadAddedTokens(const JsonNode& node, int64_t id_limit, TokenizerParts* parts, Work* work,
                       std::vector<AddedToken>* tokens) {
  if (node.IsNull()) return {};
  OKV_ASSIGN_OR_RETURN(const size_t n, node.ArraySize());
  for (size_t i = 0; i < n; ++i) {
    const JsonNode item = node.Element(i);
    AddedToken token;
    OKV_ASSIGN_OR_RETURN(const int64_t id, item.Field("id").Integer(id_limit));
    token.id = static_cast<int32_t>(id);
    OKV_ASSIGN_OR_RETURN(token.content, item.Field("content").String());
    OKV_ASSIGN_OR_RETURN(token.special, item.Field("special").BoolOr(false));
    OKV_ASSIGN_OR_RETURN(token.single_word, item.Field("single_word").BoolOr(false));
    OKV_ASSIGN_OR_RETURN(token.lstrip, item.Field("lstrip").BoolOr(false));
    OKV_ASSIGN_OR_RETURN(token.rstrip, item.Field("rstrip").BoolOr(false));
    OKV_ASSIGN_OR_RETURN(token.normalized, item.Field("normalized").BoolOr(!token.special));
    if (token.normalized) {
      NormText text;
      text.text = token.content;
      try {
        parts->Normalize(&text, work);
      } catch (const WorkError& error) {
        return ToStatus(error, work->step());
      }
      token.normalized_content = std::move(text.text);
    }
    tokens->push_back(std::move(token));
  }
  return {};
}

// The token ids that a post-processor puts around a text.
Status ReadPostProcessor(const JsonNode& node, int depth, size_t* count, TokenizerParts* parts) {
  if (node.IsNull()) return {};
  if (++*count > kMaxSteps || depth > kMaxStepDepth) {
    return Unsupported(fmt::format("{} has more than {} steps or {} levels", node.path(), kMaxSteps,
                                   kMaxStepDepth));
  }
  OKV_ASSIGN_OR_RETURN(const std::string type, node.Field("type").String());
  if (type == "Sequence") {
    const JsonNode steps = node.Field("processors");
    OKV_ASSIGN_OR_RETURN(const size_t n, steps.ArraySize());
    for (size_t i = 0; i < n; ++i) {
      OKV_RETURN_IF_ERROR(ReadPostProcessor(steps.Element(i), depth + 1, count, parts));
    }
    return {};
  }
  if (type == "ByteLevel") return {};  // trims offsets, which nobody asks for here
  std::vector<int32_t> prefix;
  std::vector<int32_t> suffix;
  if (type == "BertProcessing" || type == "RobertaProcessing") {
    for (const auto& [field, ids] : {std::pair{"cls", &prefix}, std::pair{"sep", &suffix}}) {
      const JsonNode pair = node.Field(field);
      if (!pair.value().is_array() || pair.value().size() != 2) return pair.Wrong("[token, id]");
      OKV_ASSIGN_OR_RETURN(const int64_t id, pair.Element(1).Integer(parts->size));
      ids->push_back(static_cast<int32_t>(id));
    }
  } else if (type == "TemplateProcessing") {
    const JsonNode single = node.Field("single");
    OKV_ASSIGN_OR_RETURN(const size_t n, single.ArraySize());
    bool seen = false;
    for (size_t i = 0; i < n; ++i) {
      const JsonNode sequence = single.Element(i).Field("Sequence").Field("id");
      const JsonNode special = single.Element(i).Field("SpecialToken").Field("id");
      if (special.IsNull()) {
        if (seen || sequence.value() != "A") return single.Wrong("the sequence A exactly once");
        seen = true;
        continue;
      }
      OKV_ASSIGN_OR_RETURN(const std::string name, special.String());
      const JsonNode ids = node.Field("special_tokens").Field(name).Field("ids");
      OKV_ASSIGN_OR_RETURN(const size_t n_ids, ids.ArraySize());
      for (size_t k = 0; k < n_ids; ++k) {
        OKV_ASSIGN_OR_RETURN(const int64_t id, ids.Element(k).Integer(parts->size));
        (seen ? suffix : prefix).push_back(static_cast<int32_t>(id));
        if (prefix.size() + suffix.size() > kMaxAround) {
          return Unsupported(
              fmt::format("{} puts more than {} tokens around a text", node.path(), kMaxAround));
        }
      }
    }
    if (!seen) return single.Wrong("the sequence A exactly once");
  } else {
    return Unsupported(
        fmt::format("{} has the type {}, supported are Sequence, ByteLevel, TemplateProcessing, "
                    "BertProcessing and RobertaProcessing",
                    node.path(), Printable(type)));
  }
  parts->prefix.insert(parts->prefix.begin(), prefix.begin(), prefix.end());
  parts->suffix.insert(parts->suffix.end(), suffix.begin(), suffix.end());
  return {};
}

Result<std::string> StringOrNull(const JsonNode& node) {
  if (node.IsNull()) return std::string();
  return node.String();
}

Result<std::unique_ptr<const Model>> MakeBpe(const JsonNode& node, const TokenizerJson& json,
                                             bool byte_level, const TokenizerParts& parts) {
  const Vocab& vocab = parts.vocab;
  BpeOptions o;
  o.byte_level = byte_level;
  const JsonNode dropout = node.Field("dropout");
  if (!dropout.IsNull() && dropout.value() != 0) {
    return Unsupported(fmt::format("{} is {}, only encoding without dropout is supported",
                                   dropout.path(), dropout.Shown()));
  }
  OKV_ASSIGN_OR_RETURN(o.byte_fallback, node.Field("byte_fallback").BoolOr(false));
  OKV_ASSIGN_OR_RETURN(o.fuse_unk, node.Field("fuse_unk").BoolOr(false));
  OKV_ASSIGN_OR_RETURN(o.ignore_merges, node.Field("ignore_merges").BoolOr(false));
  OKV_ASSIGN_OR_RETURN(o.continuing_subword_prefix,
                       StringOrNull(node.Field("continuing_subword_prefix")));
  OKV_ASSIGN_OR_RETURN(o.end_of_word_suffix, StringOrNull(node.Field("end_of_word_suffix")));
  for (const auto& [field, affix] :
       {std::pair{"continuing_subword_prefix", &o.continuing_subword_prefix},
        std::pair{"end_of_word_suffix", &o.end_of_word_suffix}}) {
    if (affix->size() <= kMaxAffix) continue;
    return Unsupported(fmt::format("{} has {} bytes, expected at most {}", node.Field(field).path(),
                                   affix->size(), kMaxAffix));
  }
  OKV_ASSIGN_OR_RETURN(const std::string unk, StringOrNull(node.Field("unk_token")));
  o.unk = unk.empty() ? -1 : vocab.Find(unk);
  std::vector<Bpe::Merge> merges;
  merges.reserve(json.merges.size());
  std::string text;
  for (size_t i = 0; i < json.merges.size(); ++i) {
    const std::string_view left = json.Get(json.merges[i].left);
    const std::string_view right = json.Get(json.merges[i].right);
    text = left;
    if (right.starts_with(o.continuing_subword_prefix)) {
      text += right.substr(o.continuing_subword_prefix.size());
    }
    const Bpe::Merge merge = {vocab.Find(left), vocab.Find(right), vocab.Find(text)};
    if (merge.left < 0 || merge.right < 0 || merge.merged < 0) {
      return Corrupt(fmt::format(
          "{}.merges[{}] is {} and {}, expected two tokens of the vocabulary that join to a third",
          node.path(), i, Printable(left), Printable(right)));
    }
    merges.push_back(merge);
  }
  return std::unique_ptr<const Model>(
      std::make_unique<Bpe>(&vocab, std::move(o), std::move(merges), parts.special));
}

Result<std::unique_ptr<const Model>> MakeUnigram(const JsonNode& node, const TokenizerJson& json,
                                                 const TokenizerParts& parts) {
  UnigramOptions o;
  OKV_ASSIGN_OR_RETURN(o.byte_fallback, node.Field("byte_fallback").BoolOr(false));
  const JsonNode unk = node.Field("unk_id");
  if (!unk.IsNull()) {
    OKV_ASSIGN_OR_RETURN(const int64_t id, unk.Integer(static_cast<int64_t>(json.vocab.size())));
    o.unk = static_cast<int32_t>(id);
  }
  std::vector<double> scores;
  std::vector<bool> usable;
  double min_score = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < json.vocab.size(); ++i) {
    const double score = json.vocab[i].score;
    scores.push_back(score);
    min_score = std::min(min_score, score);
    // Of tokens with the same text the last one counts.
    const auto id = static_cast<int32_t>(i);
    usable.push_back(!parts.special[i] && parts.vocab.Find(parts.vocab.Text(id)) == id);
  }
  return std::unique_ptr<const Model>(
      std::make_unique<Unigram>(&parts.vocab, o, std::move(scores), std::move(usable), min_score));
}

}  // namespace

Result<std::unique_ptr<TokenizerParts>> LoadTokenizerJson(std::string_view text) {
  OKV_ASSIGN_OR_RETURN(TokenizerJson json, TokenizerJson::Parse(text));
  const JsonNode root(&json.document, "");
  const JsonNode model = root.Field("model");
  if (!model.value().is_object()) return model.Wrong("an object");
  std::string type = json.vocab_is_list ? "Unigram" : "BPE";  // what files without a type mean
  if (!model.Field("type").IsNull()) {
    OKV_ASSIGN_OR_RETURN(type, model.Field("type").String());
  }
  const bool bpe = type == "BPE";
  if (!bpe && type != "Unigram") {
    return Unsupported(
        fmt::format("model has the type {}, supported are BPE and Unigram", Printable(type)));
  }
  if (!json.has_vocab || json.vocab_is_list == bpe || (bpe && !json.has_merges)) {
    return Corrupt(bpe ? "model lacks vocab (a map of token to id) or merges (a list)"
                       : "model lacks vocab (a list of token and score)");
  }

  auto parts = std::make_unique<TokenizerParts>();
  const JsonNode added = root.Field("added_tokens");
  const int64_t id_limit =
      IdLimit(json.vocab.size() + (added.value().is_array() ? added.value().size() : 0));
  std::vector<Vocab::Token> tokens;
  tokens.reserve(json.vocab.size());
  for (const TokenizerJson::Token& token : json.vocab) {
    if (token.id >= id_limit) {
      return Corrupt(fmt::format("model.vocab has the id {} and {} tokens, expected ids below {}",
                                 token.id, json.vocab.size(), id_limit));
    }
    tokens.push_back({static_cast<int32_t>(token.id), token.text.offset, token.text.size});
  }
  OKV_RETURN_IF_ERROR(ReadNormalizer(root.Field("normalizer"), &parts->normalizers));
  OKV_ASSIGN_OR_RETURN(PreTokenizerChain chain,
                       ReadPreTokenizer(root.Field("pre_tokenizer"), /*model_takes_bytes=*/bpe));
  parts->pre_tokenizers = std::move(chain.steps);
  Work work(text.size());  // for all of the load
  std::vector<AddedToken> added_tokens;
  OKV_RETURN_IF_ERROR(ReadAddedTokens(added, id_limit, parts.get(), &work, &added_tokens));
  OKV_ASSIGN_OR_RETURN(parts->added, AddedTokens::Make(std::move(added_tokens)));

  parts->vocab = Vocab(json.pool, tokens);
  parts->size = parts->vocab.size();
  for (const AddedToken& token : parts->added.tokens()) {
    parts->size = std::max(parts->size, token.id + 1);
  }
  parts->special.resize(static_cast<size_t>(parts->size));
  for (const AddedToken& token : parts->added.tokens()) {
    if (token.special) parts->special[static_cast<size_t>(token.id)] = true;
  }
  if (bpe) {
    OKV_ASSIGN_OR_RETURN(parts->model, MakeBpe(model, json, chain.gives_bytes, *parts));
  } else {
    OKV_ASSIGN_OR_RETURN(parts->model, MakeUnigram(model, json, *parts));
  }

  size_t n_steps = 0;
  OKV_RETURN_IF_ERROR(ReadPostProcessor(root.Field("post_processor"), 0, &n_steps, parts.get()));
  std::vector<DecoderStep> decoder;
  OKV_RETURN_IF_ERROR(ReadDecoder(root.Field("decoder"), &decoder));
  if (root.Field("decoder").IsNull()) decoder.push_back({DecoderStep::Kind::kJoin, ""});
  parts->decoder = Decoder(std::move(decoder));
  return parts;
}

}  // namespace omnikv::tok
