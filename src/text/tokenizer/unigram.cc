#include "text/tokenizer/unigram.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "text/tokenizer/unicode.h"

namespace omnikv::tok {
namespace {

constexpr double kUnknownPenalty = 10.0;  // sentencepiece's
constexpr int32_t kUnknown = -1;          // id of a node that no token reaches

}  // namespace

Unigram::Unigram(const Vocab* vocab, UnigramOptions options, std::vector<double> scores,
                 std::vector<bool> usable, double min_score)
    : vocab_(vocab),
      o_(options),
      scores_(std::move(scores)),
      usable_(std::move(usable)),
      unk_score_(min_score - kUnknownPenalty) {
  const auto n = static_cast<size_t>(vocab_->size());
  scores_.resize(n);
  usable_.resize(n);
  for (unsigned b = 0; b < 256; ++b) byte_ids_[b] = vocab_->Find(fmt::format("<0x{:02X}>", b));
  std::vector<std::pair<std::string_view, int32_t>> keys;
  keys.reserve(n);
  for (int32_t id = 0; id < vocab_->size(); ++id) {
    const std::string_view text = vocab_->Text(id);
    if (usable_[static_cast<size_t>(id)] && !text.empty()) keys.emplace_back(text, id);
  }
  trie_ = ByteTrie(std::move(keys));
}

void Unigram::Encode(std::string_view piece, ModelScratch* scratch,
                     std::vector<int32_t>* out) const {
  EncodeCached(piece, scratch, out, [&] { EncodeWord(piece, scratch, out); });
}

void Unigram::EncodeWord(std::string_view word, ModelScratch* scratch,
                         std::vector<int32_t>* out) const {
  // nodes[i] ends the best spelling of the first i bytes.
  std::vector<ModelScratch::Node>& nodes = scratch->nodes;
  nodes.assign(word.size() + 1, {0.0, 0, kUnknown});
  const auto reach = [&](size_t end, double score, size_t size, int32_t id) {
    ModelScratch::Node& node = nodes[end];
    if (node.size == 0 || score > node.score) node = {score, static_cast<uint32_t>(size), id};
  };
  for (size_t begin = 0; begin < word.size();) {
    const size_t char_size = Utf8Size(word[begin]);
    const double score = nodes[begin].score;
    bool has_char = false;  // some token is this one character
    uint32_t node = ByteTrie::kRoot;
    size_t end = begin;
    while (end < word.size()) {
      node = trie_.Step(node, static_cast<uint8_t>(word[end++]));
      if (node == ByteTrie::kNone) break;
      const int32_t id = trie_.Value(node);
      if (id < 0) continue;
      reach(end, score + scores_[static_cast<size_t>(id)], end - begin, id);
      has_char = has_char || end - begin == char_size;
    }
    scratch->work->Walked(end - begin);
    if (!has_char) reach(begin + char_size, score + unk_score_, char_size, kUnknown);
    begin += char_size;
  }
  // Back from the end, so tokens come last first.
  const size_t first = out->size();
  for (size_t end = word.size(); end > 0;) {
    size_t begin = end - nodes[end].size;
    const int32_t id = nodes[end].id;
    if (id != kUnknown && id != o_.unk) {
      out->push_back(id);
    } else {
      while (begin > 0 && (nodes[begin].id == kUnknown || nodes[begin].id == o_.unk)) {
        begin -= nodes[begin].size;
      }
      const size_t unknown = out->size();
      EncodeUnknown(word.substr(begin, end - begin), out);
      std::reverse(out->begin() + static_cast<ptrdiff_t>(unknown), out->end());
    }
    end = begin;
  }
  std::reverse(out->begin() + static_cast<ptrdiff_t>(first), out->end());
}

void Unigram::EncodeUnknown(std::string_view text, std::vector<int32_t>* out) const {
  if (o_.look_up_unknown) {
    const int32_t id = vocab_->Find(text);
    if (id >= 0 && (usable_[static_cast<size_t>(id)] || id == o_.unk)) {
      out->push_back(id);
      return;
    }
  }
  if (o_.byte_fallback && std::all_of(text.begin(), text.end(), [this](char c) {
        return byte_ids_[static_cast<uint8_t>(c)] >= 0;
      })) {
    for (const char c : text) out->push_back(byte_ids_[static_cast<uint8_t>(c)]);
    return;
  }
  if (o_.unk >= 0) out->push_back(o_.unk);
}

}  // namespace omnikv::tok
