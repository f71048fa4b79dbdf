#include "text/tokenizer/decoder.h"

#include <algorithm>
#include <array>
#include <utility>

#include "text/tokenizer/byte_level.h"
#include "text/tokenizer/unicode.h"

namespace omnikv::tok {

std::string ReplaceAll(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  size_t done = 0;
  for (size_t at; (at = text.find(from, done)) != std::string_view::npos;) {
    out += text.substr(done, at - done);
    out += to;
    done = at + from.size();
  }
  out += text.substr(done);
  return out;
}

int ByteOfToken(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  int value = 0;
  for (const char c : token.substr(3, 2)) {
    const bool digit = c >= '0' && c <= '9';
    const char letter = static_cast<char>(c | 32);
    if (!digit && (letter < 'a' || letter > 'f')) return -1;
    value = value * 16 + (digit ? c - '0' : letter - 'a' + 10);
  }
  return value;
}

namespace {

using Kind = DecoderStep::Kind;

// The clean-up of BERT's decoder.
std::string MendPunctuation(std::string text) {
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 11> kRules = {{
      {" .", "."},
      {" ?", "?"},
      {" !", "!"},
      {" ,", ","},
      {" ' ", "'"},
      {" n't", "n't"},
      {" 'm", "'m"},
      {" do not", " don't"},
      {" 's", "'s"},
      {" 've", "'ve"},
      {" 're", "'re"},
  }};
  for (const auto& [from, to] : kRules) text = ReplaceAll(text, from, to);
  return text;
}

std::string Stripped(const DecoderStep& step, std::string_view text) {
  const auto has = [&](size_t at) { return text.substr(at, step.content.size()) == step.content; };
  for (size_t i = 0; i < step.start && has(0) && !text.empty(); ++i) {
    text.remove_prefix(step.content.size());
  }
  for (size_t i = 0; i < step.stop && text.ends_with(step.content) && !text.empty(); ++i) {
    text.remove_suffix(step.content.size());
  }
  return std::string(text);
}

// How much of the end of `text` is the beginning of `pattern`.
size_t PartialMatch(std::string_view text, std::string_view pattern) {
  for (size_t n = std::min(text.size(), pattern.size() - 1); n > 0; --n) {
    if (text.ends_with(pattern.substr(0, n))) return n;
  }
  return 0;
}

}  // namespace

Decoder::Decoder(std::vector<DecoderStep> steps) : steps_(std::move(steps)) {
  bool fused = false;  // what comes out of a step is one token that grows
  for (const DecoderStep& step : steps_) {
    const bool can_grow = step.kind == Kind::kFuse || step.kind == Kind::kStrip ||
                          step.kind == Kind::kBytes ||
                          (step.kind == Kind::kReplace && !step.pattern_text.empty());
    inputs_.push_back(!fused ? Input::kTokens : can_grow ? Input::kGrowing : Input::kComplete);
    fused = fused || step.kind == Kind::kByteLevel || step.kind == Kind::kBytes ||
            step.kind == Kind::kFuse;
  }
}

DecoderStream::DecoderStream(const Decoder* decoder)
    : decoder_(decoder), states_(decoder->steps_.size()), work_(std::make_unique<Work>()) {}

void DecoderStream::Push(std::string_view token, std::string* out) {
  constexpr size_t kBeside = 16;  // bytes that a token may have before and behind it
  work_->Grant(token.size() + kBeside);
  Feed(0, token, out);
}

void DecoderStream::Flush(std::string* out) {
  Finish(0, out);
  std::fill(states_.begin(), states_.end(), State());
  work_ = std::make_unique<Work>();
}

std::string DecoderStream::Replaced(const DecoderStep& step, std::string_view text) {
  std::string out;
  size_t done = 0;
  const auto replace = [&](size_t begin, size_t end) {
    work_->Draw(step.content.size() + 8);
    out += text.substr(done, begin - done);
    out += step.content;
    done = end;
  };
  if (step.pattern != nullptr) {
    step.pattern->ForEach(text, work_->regex(), replace);
  } else {
    const std::string_view pattern = step.pattern_text;
    for (size_t at; (at = text.find(pattern, done)) != text.npos;) {
      replace(at, at + pattern.size());
    }
  }
  out += text.substr(done);
  return out;
}

void DecoderStream::Feed(size_t i, std::string_view token, std::string* out) {
  work_->At(i < states_.size() ? std::string_view(decoder_->steps_[i].name) : "");
  work_->Draw(token.size() + 16);
  if (i == states_.size()) {
    *out += token;
    return;
  }
  switch (decoder_->inputs_[i]) {
    case Decoder::Input::kTokens:
      return FeedToken(i, token, out);
    case Decoder::Input::kGrowing:
      return FeedGrowing(i, token, out);
    case Decoder::Input::kComplete:
      states_[i].held += token;
      return;
  }
}

void DecoderStream::FeedToken(size_t i, std::string_view token, std::string* out) {
  const DecoderStep& step = decoder_->steps_[i];
  State& state = states_[i];
  const bool first = !state.started;
  state.started = true;
  switch (step.kind) {
    case Kind::kByteLevel: {
      std::string bytes;
      if (!AppendCharBytes(token, &bytes)) bytes = token;
      return FeedGrowing(i, bytes, out);
    }
    case Kind::kBytes:
    case Kind::kFuse:
      return FeedGrowing(i, token, out);
    case Kind::kReplace:
      return Feed(i + 1, Replaced(step, token), out);
    case Kind::kStrip:
      return Feed(i + 1, Stripped(step, token), out);
    case Kind::kByteFallback:
      if (const int byte = ByteOfToken(token); byte >= 0) {
        state.held += static_cast<char>(byte);
        return;
      }
      FlushByteRun(i, out);
      return Feed(i + 1, token, out);
    case Kind::kMetaspace:
      return Feed(i + 1, ReplaceAll(token, step.content, first && step.flag ? "" : " "), out);
    case Kind::kWordPiece: {
      std::string text(token);
      if (!first) {
        const bool continues = !step.content.empty() && token.starts_with(step.content);
        text = continues ? text.substr(step.content.size()) : " " + text;
      }
      return Feed(i + 1, step.flag ? MendPunctuation(std::move(text)) : text, out);
    }
    case Kind::kBpe:
      if (!first) Feed(i + 1, ReplaceAll(state.held, step.content, " "), out);
      state.held = token;
      return;
    case Kind::kJoin:
      if (!first) Feed(i + 1, " ", out);
      return Feed(i + 1, token, out);
  }
}

void DecoderStream::FeedGrowing(size_t i, std::string_view text, std::string* out) {
  const DecoderStep& step = decoder_->steps_[i];
  State& state = states_[i];
  switch (step.kind) {
    case Kind::kByteLevel:
    case Kind::kBytes: {
      state.held += text;
      const size_t tail = IncompleteUtf8Tail(state.held);
      const std::string_view whole =
          std::string_view(state.held).substr(0, state.held.size() - tail);
      if (whole.empty()) return;
      const std::string ready = IsValidUtf8(whole) ? std::string(whole) : ReplaceInvalidUtf8(whole);
      state.held.erase(0, whole.size());
      return Feed(i + 1, ready, out);
    }
    case Kind::kStrip: {
      if (!state.left_done) {
        while (state.count < step.start && text.starts_with(step.content)) {
          text.remove_prefix(step.content.size());
          ++state.count;
        }
        if (text.empty()) return;
        state.left_done = true;
      }
      if (step.stop == 0) return Feed(i + 1, text, out);
      state.held += text;
      work_->Walked(state.held.size());
      size_t kept = 0;  // characters at the end that may yet be stripped
      std::string_view rest = state.held;
      while (kept < step.stop && rest.ends_with(step.content)) {
        rest.remove_suffix(step.content.size());
        ++kept;
      }
      const std::string ready(rest);
      state.held.erase(0, ready.size());
      if (!ready.empty()) Feed(i + 1, ready, out);
      return;
    }
    case Kind::kReplace: {
      state.held += text;
      const std::string& pattern = step.pattern_text;
      // What a match has not taken and cannot become one.
      size_t done = 0;
      for (size_t at; (at = state.held.find(pattern, done)) != std::string::npos;) {
        done = at + pattern.size();
      }
      const std::string_view rest = std::string_view(state.held).substr(done);
      const size_t size = done + rest.size() - PartialMatch(rest, pattern);
      const std::string ready = Replaced(step, std::string_view(state.held).substr(0, size));
      state.held.erase(0, size);
      if (!ready.empty()) Feed(i + 1, ready, out);
      return;
    }
    default:
      return Feed(i + 1, text, out);
  }
}

void DecoderStream::FlushByteRun(size_t i, std::string* out) {
  State& state = states_[i];
  if (state.held.empty()) return;
  const std::string bytes = std::exchange(state.held, "");
  if (IsValidUtf8(bytes)) return Feed(i + 1, bytes, out);
  for (size_t k = 0; k < bytes.size(); ++k) Feed(i + 1, "\uFFFD", out);
}

void DecoderStream::Finish(size_t i, std::string* out) {
  if (i == states_.size()) return;
  const DecoderStep& step = decoder_->steps_[i];
  State& state = states_[i];
  if (decoder_->inputs_[i] == Decoder::Input::kComplete) {
    const std::string token = std::exchange(state.held, "");
    if (!token.empty()) FeedToken(i, token, out);
  }
  switch (step.kind) {
    case Kind::kByteLevel:
    case Kind::kBytes:
      if (!state.held.empty()) Feed(i + 1, ReplaceInvalidUtf8(state.held), out);
      break;
    case Kind::kReplace:
      if (!state.held.empty()) Feed(i + 1, state.held, out);
      break;
    case Kind::kByteFallback:
      FlushByteRun(i, out);
      break;
    case Kind::kBpe:
      if (state.started) Feed(i + 1, ReplaceAll(state.held, step.content, ""), out);
      break;
    default:
      break;  // kStrip: what is held is what goes
  }
  Finish(i + 1, out);
}

}  // namespace omnikv::tok
