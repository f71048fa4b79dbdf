// A tokenizer with its grammar engine, and random walks over the tokens that masks allow.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "model/loader.h"
#include "server/grammar/grammar.h"
#include "text/tokenizer/token_texts.h"

namespace omnikv::server {

inline const std::string kModel = OMNIKV_SOURCE_DIR "/models/omnikv-tiny-q8_0.gguf";
inline const std::string kTokenizers = OMNIKV_SOURCE_DIR "/tests/text/tokenizer/data/";

using Clock = std::chrono::steady_clock;
inline double Microseconds(Clock::time_point since) {
  return std::chrono::duration<double, std::micro>(Clock::now() - since).count();
}

// A tokenizer, its engine, and walks with it.
class Walker {
 public:
  Walker(std::unique_ptr<Tokenizer> tokenizer, std::vector<int32_t> ends, int32_t extra = 0,
         const GrammarOptions& options = {})
      : tokenizer_(std::move(tokenizer)), ends_(std::move(ends)) {
    vocab_ = tokenizer_->vocab_size() + extra;
    const auto start = Clock::now();
    auto engine = GrammarEngine::Create(*tokenizer_, vocab_, ends_, options);
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    if (engine.ok()) engine_ = std::move(*engine);
    create_us_ = Microseconds(start);
    mask_.resize((static_cast<size_t>(vocab_) + 31) / 32);
  }

  static Walker Shipped(const GrammarOptions& options = {}, int32_t extra = 0) {
    auto text = LoadTextAlone(kModel);
    EXPECT_TRUE(text.ok()) << text.status().message();
    std::vector<int32_t> ends;
    for (const char* end : {"<|end_of_text|>", "<|eot_id|>"}) {
      if (const auto id = text->tokenizer->TokenToId(end)) ends.push_back(*id);
    }
    return Walker(std::move(text->tokenizer), ends, extra, options);
  }
  static Walker File(const std::string& name, const std::string& end) {
    std::ifstream file(kTokenizers + name + ".tokenizer.json");
    const std::string json((std::istreambuf_iterator<char>(file)), {});
    auto tokenizer = Tokenizer::FromJson(json, name);
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().message();
    const auto id = (*tokenizer)->TokenToId(end);
    EXPECT_TRUE(id.has_value());
    return Walker(std::move(*tokenizer), {*id});
  }

  Result<std::shared_ptr<const Grammar>> Compile(const Constraint& constraint) {
    return engine_->Compile(constraint);
  }
  Status Refused(const Constraint& constraint) { return engine_->Compile(constraint).status(); }
  Matcher MatcherOf(const Constraint& constraint) {
    auto grammar = engine_->Compile(constraint);
    EXPECT_TRUE(grammar.ok()) << grammar.status().message();
    return Matcher(*grammar);
  }

  bool IsEnd(int32_t token) const {
    return std::find(ends_.begin(), ends_.end(), token) != ends_.end();
  }
  std::vector<int32_t> Allowed(const Matcher& matcher) {
    const auto start = Clock::now();
    matcher.FillMask(mask_);
    fill_us_ += Microseconds(start);
    ++fills_;
    std::vector<int32_t> tokens;
    for (size_t word = 0; word < mask_.size(); ++word) {
      for (uint32_t bits = mask_[word]; bits != 0; bits &= bits - 1) {
        tokens.push_back(static_cast<int32_t>(word) * 32 + std::countr_zero(bits));
      }
    }
    return tokens;
  }

  // The text of a walk over allowed tokens; nothing where it does not end in so many. Closing
  // tokens are taken more often where `in_haste`.
  std::optional<std::string> Walk(Matcher& matcher, std::mt19937_64& random, int64_t steps = 4000,
                                  bool in_haste = false) {
    std::vector<int32_t> taken;
    for (int64_t step = 0; step < steps; ++step) {
      const bool done = matcher.Done();
      const std::vector<int32_t> allowed = Allowed(matcher);
      EXPECT_FALSE(allowed.empty());
      if (allowed.empty()) return std::nullopt;
      bool only_ends = true;
      for (const int32_t token : allowed) {
        EXPECT_LT(token, vocab_);
        if (IsEnd(token)) continue;
        only_ends = false;
        if (!may_have_specials_) {
          EXPECT_FALSE(tokenizer_->IsSpecial(token)) << tokenizer_->IdToToken(token);
        }
      }
      EXPECT_EQ(done, only_ends);
      int32_t token = allowed[random() % allowed.size()];
      if (in_haste) {
        for (const int32_t other : allowed) {
          const std::string_view text = tokenizer_->IdToToken(other);
          if ((text == "\"" || text == "}" || text == "]" || IsEnd(other)) && random() % 2 == 0) {
            token = other;
          }
        }
      }
      if (step % 7 == 0) CheckMask(matcher, random, allowed);
      EXPECT_TRUE(matcher.Accept(token)) << tokenizer_->IdToToken(token);
      if (IsEnd(token)) {
        EXPECT_TRUE(matcher.Done());
        EXPECT_FALSE(matcher.Accept(token));
        tokens_ += std::ssize(taken);
        last_tokens_ = taken;
        return *tokenizer_->Decode(taken, false);
      }
      taken.push_back(token);
    }
    last_tokens_ = taken;
    return std::nullopt;
  }

  // Whether `text` may come and then an end, by tokens of any lengths.
  bool Accepts(Matcher& matcher, const std::string& text) {
    if (bytes_.empty()) bytes_ = TokenTexts::Of(*tokenizer_)->All();
    for (std::string_view rest = text; !rest.empty();) {
      std::vector<int32_t> fitting;
      for (const int32_t token : Allowed(matcher)) {
        const std::string_view bytes = tokenizer_->IdToToken(token).empty()
                                           ? std::string_view()
                                           : bytes_[static_cast<size_t>(token)];
        if (!bytes.empty() && !IsEnd(token) && rest.starts_with(bytes)) fitting.push_back(token);
      }
      if (fitting.empty()) return false;
      const int32_t token = fitting[rest.size() % fitting.size()];
      EXPECT_TRUE(matcher.Accept(token));
      rest.remove_prefix(bytes_[static_cast<size_t>(token)].size());
    }
    const std::vector<int32_t> allowed = Allowed(matcher);
    return std::any_of(allowed.begin(), allowed.end(), [&](int32_t t) { return IsEnd(t); });
  }
  bool Accepts(const Constraint& constraint, const std::string& text) {
    Matcher matcher = MatcherOf(constraint);
    return Accepts(matcher, text);
  }

  std::string Figures() const {
    return fmt::format("vocabulary {}: engine {:.0f} ms, {:.2f} us a mask over {} masks", vocab_,
                       create_us_ / 1000,
                       fill_us_ / static_cast<double>(std::max<int64_t>(fills_, 1)), fills_);
  }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  GrammarEngine& engine() { return *engine_; }
  int32_t vocab() const { return vocab_; }
  int32_t end() const { return ends_[0]; }
  void MayHaveSpecials() { may_have_specials_ = true; }
  void ResetFigures() { fill_us_ = 0, fills_ = 0; }
  std::string LastText() const { return *tokenizer_->Decode(last_tokens_, false); }

 private:
  // A few of the allowed tokens are accepted, others are not.
  void CheckMask(const Matcher& matcher, std::mt19937_64& random,
                 const std::vector<int32_t>& allowed) {
    for (int i = 0; i < 3; ++i) {
      Matcher fork = matcher.Fork();
      EXPECT_TRUE(fork.Accept(allowed[random() % allowed.size()]));
      fork.Rollback(1);
      const auto token = static_cast<int32_t>(random() % static_cast<uint64_t>(vocab_));
      const bool may = std::binary_search(allowed.begin(), allowed.end(), token);
      EXPECT_EQ(fork.Accept(token), may) << tokenizer_->IdToToken(token);
    }
  }

  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<GrammarEngine> engine_;
  std::vector<int32_t> ends_;
  int32_t vocab_ = 0;
  std::vector<uint32_t> mask_;
  double create_us_ = 0, fill_us_ = 0;
  int64_t fills_ = 0, tokens_ = 0;
  bool may_have_specials_ = false;
  std::vector<int32_t> last_tokens_;
  std::vector<std::string> bytes_;
};

}  // namespace omnikv::server
