// GrammarEngine and Matcher on xgrammar, whose exceptions and messages end here.
#include "server/grammar/grammar.h"

#include <dlpack/dlpack.h>
#include <fmt/format.h>
#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <list>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/printable.h"
#include "server/protocol/fields.h"
#include "text/tokenizer/token_texts.h"

namespace {
// What xgrammar warned of first in the compilation of this thread: it does not keep something.
thread_local std::string* warning_of_this_thread = nullptr;
}  // namespace

// xgrammar calls these with XGRAMMAR_LOG_CUSTOMIZE.
namespace xgrammar {

[[noreturn]] void LogFatalImpl(const std::string& file, int lineno, const std::string& message);
void LogMessageImpl(const std::string& file, int lineno, int level, const std::string& message);

[[noreturn]] void LogFatalImpl(const std::string&, int, const std::string& message) {
  throw std::runtime_error(message);
}

void LogMessageImpl(const std::string&, int, int, const std::string& message) {
  if (warning_of_this_thread != nullptr && warning_of_this_thread->empty()) {
    *warning_of_this_thread = message;
  }
}

}  // namespace xgrammar

namespace omnikv::server {
namespace {

constexpr int kWhiteSpace = 1;     // characters of it, at most, between two parts of JSON
constexpr int kMaxBrackets = 100;  // of an Ebnf, within one another
constexpr size_t kShownBytes = 300;

size_t WordsOf(int32_t vocab) {
  return (static_cast<size_t>(vocab) + 31) / 32;
}

void SetBit(std::vector<uint32_t>* bits, int32_t token) {
  (*bits)[static_cast<size_t>(token) / 32] |= uint32_t{1} << (token % 32);
}

bool GetBit(std::span<const uint32_t> bits, int32_t token) {
  return (bits[static_cast<size_t>(token) / 32] >> (token % 32) & 1) != 0;
}

// Runs what throws and warns. `what` begins the sentence.
template <typename F>
auto Guarded(std::string_view what, F&& run) -> Result<decltype(run())> {
  std::string warning;
  warning_of_this_thread = &warning;
  std::optional<decltype(run())> done;
  Status failed;
  const auto wrong = [&](std::string_view reason) {
    return InvalidArgument(
        fmt::format("{} cannot be used: {}", what, Escaped(reason, kShownBytes)));
  };
  try {
    done = run();
  } catch (const std::bad_alloc&) {
    failed = ResourceExhausted(fmt::format("{} takes more memory than there is", what));
  } catch (const std::exception& e) {
    failed = wrong(e.what());
  } catch (...) {
    failed = wrong("xgrammar does not say why");
  }
  warning_of_this_thread = nullptr;
  OKV_RETURN_IF_ERROR(failed);
  if (!warning.empty()) {
    return Unsupported(fmt::format("{} cannot be kept: {}", what, Escaped(warning, kShownBytes)));
  }
  return std::move(*done);
}

// A recursive descent reads it.
Status CheckBrackets(const std::string& grammar) {
  int depth = 0;
  for (size_t i = 0; i < grammar.size(); ++i) {
    const char c = grammar[i];
    if (c == '#') {
      i = std::min(grammar.find('\n', i), grammar.size());
    } else if (c == '"' || c == '[') {
      const char end = c == '"' ? '"' : ']';
      for (++i; i < grammar.size() && grammar[i] != end; ++i) {
        if (grammar[i] == '\\') ++i;
      }
    } else if (c == '(') {
      if (++depth > kMaxBrackets) {
        return ResourceExhausted(fmt::format(
            "the grammar has brackets deeper than {} within one another", kMaxBrackets));
      }
    } else if (c == ')') {
      --depth;
    }
  }
  return {};
}

// Lengths tell where a text ends: the key of no other constraint is the same.
void AddKey(std::string_view text, std::string* key) {
  *key += fmt::format("{}:", text.size());
  *key += text;
}

struct KeyOf {
  std::string operator()(const JsonObject&) const { return "o"; }
  std::string operator()(const JsonSchema& schema) const { return "s" + schema.text; }
  std::string operator()(const Ebnf& grammar) const { return "e" + grammar.text; }
  std::string operator()(const Regex& regex) const { return "r" + regex.text; }
  std::string operator()(const Calls& calls) const {
    std::string key = calls.several ? "C" : "c";
    AddKey(calls.separator, &key);
    AddKey(calls.trigger, &key);
    for (const Calls::Form& form : calls.forms) {
      AddKey(form.prefix, &key);
      AddKey(form.schema, &key);
      AddKey(form.suffix, &key);
    }
    return key;
  }
};

}  // namespace

// What grammars and matchers need to know of the model.
struct Vocabulary {
  int32_t size = 0;  // of the model
  std::vector<int32_t> ends;
  std::vector<uint32_t> end_bits;                     // [WordsOf(size)]
  std::vector<uint32_t> never;                        // [WordsOf(size)]: neither text nor ends
  std::unordered_map<std::string, int32_t> specials;  // by their spelling, ends included
};

struct Grammar::Impl {
  std::shared_ptr<const Vocabulary> vocabulary;
  xgrammar::CompiledGrammar compiled;
  std::vector<uint32_t> never;  // Vocabulary's without the special tokens that this grammar has
  size_t bytes = 0;
};

Grammar::Grammar(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Grammar::~Grammar() = default;
size_t Grammar::bytes() const {
  return impl_->bytes;
}

struct GrammarEngine::Impl {
  using Cached = std::pair<std::string, std::shared_ptr<const Grammar>>;

  Impl(GrammarOptions o, std::shared_ptr<const Vocabulary> v, xgrammar::GrammarCompiler c,
       xgrammar::GrammarCompiler u)
      : options(std::move(o)),
        vocabulary(std::move(v)),
        compiler(std::move(c)),
        uncached(std::move(u)) {}

  // What a constraint becomes, and the special tokens that it has.
  struct Made {
    xgrammar::CompiledGrammar compiled{xgrammar::NullObj()};
    std::vector<int32_t> specials;
  };
  Result<Made> operator()(const JsonObject&) { return Schema(R"({"type": "object"})"); }
  Result<Made> operator()(const JsonSchema& schema) { return Schema(schema.text); }
  Result<Made> operator()(const Ebnf& grammar);
  Result<Made> operator()(const Regex& regex);
  Result<Made> operator()(const Calls& calls);

  template <typename F>
  Result<xgrammar::CompiledGrammar> Run(std::string_view what, F&& run) {
    auto compiled = Guarded(what, [&] { return run(compiler); });
    if (compiled.ok() || compiled.status().code() != StatusCode::kInvalidArgument) return compiled;
    return Guarded(what, [&] { return run(uncached); });
  }
  Result<Made> Schema(const std::string& text);
  Result<PlainSchema> Plain(const std::string& text) const;
  // That its patterns become automata of JSON strings: else xgrammar would let quotes through.
  Status CheckPatterns(const PlainSchema& schema) const;
  // Appends formats of a structural tag that write `text`.
  void AppendText(const std::string& text, Json* elements, std::vector<int32_t>* used) const;

  std::shared_ptr<const Grammar> Find(const std::string& key);
  void Keep(std::string key, std::shared_ptr<const Grammar> grammar);

  const GrammarOptions options;
  const std::shared_ptr<const Vocabulary> vocabulary;
  std::mutex compiling;
  xgrammar::GrammarCompiler compiler;
  // Without shared rules: their hashes fail for patterns that repeat 128 times and more.
  xgrammar::GrammarCompiler uncached;

  mutable std::mutex mutex;  // of what follows
  std::list<Cached> cache;   // the last used first
  std::unordered_map<std::string, std::list<Cached>::iterator> places;
  GrammarStats stats;
};

GrammarEngine::GrammarEngine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GrammarEngine::~GrammarEngine() = default;

Result<std::unique_ptr<GrammarEngine>> GrammarEngine::Create(const Tokenizer& tokenizer,
                                                             int32_t vocab,
                                                             std::vector<int32_t> ends,
                                                             const GrammarOptions& options) {
  if (vocab < tokenizer.vocab_size()) {
    return InvalidArgument(
        fmt::format("the model has {} logits, expected at least the {} tokens of "
                    "its tokenizer",
                    vocab, tokenizer.vocab_size()));
  }
  if (ends.empty()) return InvalidArgument("the model has no token that ends an answer");
  auto vocabulary = std::make_shared<Vocabulary>();
  vocabulary->size = vocab;
  vocabulary->end_bits.resize(WordsOf(vocab));
  vocabulary->never.resize(WordsOf(vocab));
  for (const int32_t end : ends) {
    if (end < 0 || end >= vocab) {
      return InvalidArgument(
          fmt::format("token {} ends answers, expected a token below {}", end, vocab));
    }
    SetBit(&vocabulary->end_bits, end);
  }
  OKV_ASSIGN_OR_RETURN(const TokenTexts token_texts, TokenTexts::Of(tokenizer));
  std::vector<std::string> texts = token_texts.All();
  texts.resize(static_cast<size_t>(vocab));
  for (int32_t token = 0; token < vocab; ++token) {
    std::string& text = texts[static_cast<size_t>(token)];
    if (!text.empty() && !GetBit(vocabulary->end_bits, token)) continue;
    if (!GetBit(vocabulary->end_bits, token)) SetBit(&vocabulary->never, token);
    const std::string_view spelling = tokenizer.IdToToken(token);
    if (spelling.empty() || !tokenizer.IsSpecial(token)) continue;
    vocabulary->specials.emplace(spelling, token);
    // No text that a grammar has begins with this byte. Without bytes a token could not come even
    // where a grammar names it.
    text.assign(1, '\xFF');
    text += spelling;
  }
  vocabulary->ends = std::move(ends);
  auto compilers = Guarded("the tokenizer", [&] {
    const xgrammar::TokenizerInfo info(texts, xgrammar::VocabType::RAW, vocab, vocabulary->ends);
    const auto cache_bytes = static_cast<int64_t>(options.cached_bytes / 4);  // of shared rules
    const int threads = std::max(options.threads, 1);
    return std::pair(xgrammar::GrammarCompiler(info, threads, true, cache_bytes),
                     xgrammar::GrammarCompiler(info, threads, false));
  });
  if (!compilers.ok()) return compilers.status();
  return std::unique_ptr<GrammarEngine>(new GrammarEngine(std::make_unique<Impl>(
      options, std::move(vocabulary), std::move(compilers->first), std::move(compilers->second))));
}

Result<PlainSchema> GrammarEngine::Impl::Plain(const std::string& text) const {
  if (text.size() > options.schema_bytes) {
    return ResourceExhausted(fmt::format("the schema has {} bytes, expected at most {}",
                                         text.size(), options.schema_bytes));
  }
  Json schema;
  if (!ParseText(text, &schema)) {
    return InvalidArgument("the schema is no JSON, or nests deeper than 64 levels");
  }
  OKV_ASSIGN_OR_RETURN(PlainSchema plain, MakePlain(schema, options.schema));
  OKV_RETURN_IF_ERROR(CheckPatterns(plain));
  return plain;
}

Status GrammarEngine::Impl::CheckPatterns(const PlainSchema& schema) const {
  for (const std::string& pattern : schema.patterns) {
    const std::string what = fmt::format("the pattern {}", Printable(pattern));
    const std::string text = Json{{"type", "string"}, {"pattern", pattern}}.dump();
    OKV_ASSIGN_OR_RETURN(const std::string written, Guarded(what, [&] {
                           return xgrammar::Grammar::FromJSONSchema(text).ToString();
                         }));
    if (written.find("json_string=true") != std::string::npos) continue;
    return Unsupported(
        fmt::format("{} cannot be kept: it has characters beyond ASCII, or such as need an escape "
                    "in JSON, or is "
                    "too large",
                    what));
  }
  return {};
}

Result<GrammarEngine::Impl::Made> GrammarEngine::Impl::Schema(const std::string& text) {
  OKV_ASSIGN_OR_RETURN(const PlainSchema plain, Plain(text));
  OKV_ASSIGN_OR_RETURN(auto compiled, Run("the schema", [&](xgrammar::GrammarCompiler& with) {
                         return with.CompileJSONSchema(plain.json.dump(), /*any_whitespace=*/true,
                                                       std::nullopt, std::nullopt,
                                                       /*strict_mode=*/true, kWhiteSpace);
                       }));
  return Made{std::move(compiled), {}};
}

Result<GrammarEngine::Impl::Made> GrammarEngine::Impl::operator()(const Ebnf& grammar) {
  if (grammar.text.size() > options.grammar_bytes) {
    return ResourceExhausted(fmt::format("the grammar has {} bytes, expected at most {}",
                                         grammar.text.size(), options.grammar_bytes));
  }
  OKV_RETURN_IF_ERROR(CheckBrackets(grammar.text));
  OKV_ASSIGN_OR_RETURN(auto compiled, Run("the grammar", [&](xgrammar::GrammarCompiler& with) {
                         return with.CompileGrammar(grammar.text);
                       }));
  return Made{std::move(compiled), {}};
}

Result<GrammarEngine::Impl::Made> GrammarEngine::Impl::operator()(const Regex& regex) {
  const Status good = CheckPattern(regex.text, options.schema);
  if (!good.ok()) {
    return Status(good.code(), fmt::format("the regular expression {} {}", Printable(regex.text),
                                           good.message()));
  }
  // As one automaton. CompileRegex makes rules of it, in which a mask takes longer where the
  // expression is ambiguous; but it can repeat a group more often. The quoted forms of JSON are
  // those of the grammar.
  auto compiled = Run("the regular expression", [&](xgrammar::GrammarCompiler& with) {
    return with.CompileGrammar(fmt::format("root ::= Regex({})", Json(regex.text).dump()));
  });
  if (!compiled.ok()) {
    compiled = Run("the regular expression",
                   [&](xgrammar::GrammarCompiler& with) { return with.CompileRegex(regex.text); });
  }
  if (!compiled.ok()) return compiled.status();
  return Made{std::move(*compiled), {}};
}

void GrammarEngine::Impl::AppendText(const std::string& text, Json* elements,
                                     std::vector<int32_t>* used) const {
  for (size_t at = 0; at < text.size();) {
    // The special token that begins first, of those the longest.
    size_t begin = text.size(), size = 0;
    int32_t token = -1;
    for (const auto& [spelling, id] : vocabulary->specials) {
      const size_t found = text.find(spelling, at);
      if (found < begin || (found == begin && spelling.size() > size && found < text.size())) {
        begin = found;
        size = spelling.size();
        token = id;
      }
    }
    if (begin > at) {
      elements->push_back({{"type", "const_string"}, {"value", text.substr(at, begin - at)}});
    }
    if (token >= 0) {
      elements->push_back({{"type", "token"}, {"token", token}});
      used->push_back(token);
    }
    at = begin + size;
  }
}

Result<GrammarEngine::Impl::Made> GrammarEngine::Impl::operator()(const Calls& calls) {
  if (calls.forms.empty() || calls.forms.size() > options.forms) {
    return InvalidArgument(fmt::format("there are {} tools to be called, expected 1 to {}",
                                       calls.forms.size(), options.forms));
  }
  Made made;
  Json trigger = Json::array();
  AppendText(calls.trigger, &trigger, &made.specials);
  const bool by_token = !trigger.empty() && trigger[0]["type"] == "token";
  if (trigger.size() > 1) {
    return Unsupported(
        fmt::format("the trigger of calls is {}, expected one special token, or a text "
                    "without any",
                    Printable(calls.trigger)));
  }
  Json one = Json::array();
  for (const Calls::Form& form : calls.forms) {
    auto plain = Plain(form.schema);
    if (!plain.ok()) {
      return plain.status().Prefixed(fmt::format("the tool after {}", Printable(form.prefix)));
    }
    if (!form.prefix.starts_with(calls.trigger)) {
      return InvalidArgument(fmt::format("the prefix {} does not begin with the trigger {}",
                                         Printable(form.prefix), Printable(calls.trigger)));
    }
    // In text, a tag begins with its trigger: what follows that stands in the tag.
    Json elements = Json::array();
    AppendText(form.prefix.substr(calls.trigger.size()), &elements, &made.specials);
    elements.push_back({{"type", "json_schema"},
                        {"json_schema", std::move(plain->json)},
                        {"max_whitespace_cnt", kWhiteSpace}});
    AppendText(form.suffix, &elements, &made.specials);
    one.push_back({{"type", "sequence"}, {"elements", std::move(elements)}});
  }
  Json format;
  if (trigger.empty()) {
    format = one.size() == 1 ? one[0] : Json{{"type", "or"}, {"elements", std::move(one)}};
    if (calls.several) {
      Json more = Json::array();
      AppendText(calls.separator, &more, &made.specials);
      more.push_back(format);
      const Json rest = {{"type", "star"},
                         {"content", {{"type", "sequence"}, {"elements", std::move(more)}}}};
      format = {{"type", "sequence"}, {"elements", Json::array({std::move(format), rest})}};
    }
  } else {
    const Json begin = by_token ? trigger[0] : Json(calls.trigger);
    const Json content =
        one.size() == 1 ? one[0] : Json{{"type", "or"}, {"elements", std::move(one)}};
    format = {{"type", by_token ? "token_triggered_tags" : "triggered_tags"},
              {by_token ? "trigger_tokens" : "triggers",
               Json::array({by_token ? trigger[0]["token"] : begin})},
              {"tags",
               Json::array(
                   {Json{{"type", "tag"}, {"begin", begin}, {"content", content}, {"end", ""}}})}};
  }
  const std::string tag = Json{{"type", "structural_tag"}, {"format", std::move(format)}}.dump();
  OKV_ASSIGN_OR_RETURN(made.compiled,
                       Run("the form of calls", [&](xgrammar::GrammarCompiler& with) {
                         return with.CompileStructuralTag(tag);
                       }));
  return made;
}

std::shared_ptr<const Grammar> GrammarEngine::Impl::Find(const std::string& key) {
  const std::lock_guard lock(mutex);
  const auto found = places.find(key);
  if (found == places.end()) return nullptr;
  cache.splice(cache.begin(), cache, found->second);
  ++stats.found;
  return found->second->second;
}

void GrammarEngine::Impl::Keep(std::string key, std::shared_ptr<const Grammar> grammar) {
  const std::lock_guard lock(mutex);
  ++stats.compiled;
  stats.cached_bytes += grammar->bytes() + key.size();
  cache.emplace_front(key, std::move(grammar));
  places[std::move(key)] = cache.begin();
  while (cache.size() > options.cached || stats.cached_bytes > options.cached_bytes) {
    const Cached& last = cache.back();
    stats.cached_bytes -= last.second->bytes() + last.first.size();
    places.erase(last.first);
    cache.pop_back();
  }
  stats.cached = cache.size();
}

Result<std::shared_ptr<const Grammar>> GrammarEngine::Compile(const Constraint& constraint) {
  std::string key = std::visit(KeyOf(), constraint);
  if (auto found = impl_->Find(key)) return found;
  const std::lock_guard lock(impl_->compiling);
  if (auto found = impl_->Find(key)) return found;  // by another thread, meanwhile
  auto made = std::visit(*impl_, constraint);
  auto grammar = std::make_unique<Grammar::Impl>(
      Grammar::Impl{impl_->vocabulary, xgrammar::CompiledGrammar(xgrammar::NullObj()), {}, 0});
  Status refused = made.status();
  if (refused.ok()) {
    grammar->compiled = std::move(made->compiled);
    grammar->bytes = grammar->compiled.MemorySizeBytes();
    grammar->never = impl_->vocabulary->never;
    for (const int32_t token : made->specials) {
      grammar->never[static_cast<size_t>(token) / 32] &= ~(uint32_t{1} << (token % 32));
    }
    if (grammar->bytes > impl_->options.compiled_bytes) {
      refused = ResourceExhausted(fmt::format("the compiled grammar takes {}, expected at most {}",
                                              HumanBytes(grammar->bytes),
                                              HumanBytes(impl_->options.compiled_bytes)));
    }
  }
  if (!refused.ok()) {
    const std::lock_guard count(impl_->mutex);
    ++impl_->stats.refused;
    return refused;
  }
  std::shared_ptr<const Grammar> shared(new Grammar(std::move(grammar)));
  impl_->Keep(std::move(key), shared);
  return shared;
}

GrammarStats GrammarEngine::stats() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->stats;
}

struct Matcher::Impl {
  std::shared_ptr<const Grammar> grammar;
  xgrammar::GrammarMatcher matcher;
  // Ends that came although the grammar had no way on: xgrammar knows nothing of them.
  int32_t forced_ends = 0;
  std::vector<uint32_t> scratch = {};  // [WordsOf(vocab)]

  const Vocabulary& vocabulary() const { return *grammar->impl_->vocabulary; }
  bool Ended() const { return forced_ends > 0 || matcher.IsTerminated(); }
  // False where the grammar allows nothing, not even the end.
  bool Fill(std::span<uint32_t> allowed);
};

bool Matcher::Impl::Fill(std::span<uint32_t> allowed) {
  if (Ended()) return false;
  auto size = static_cast<int64_t>(allowed.size());
  DLTensor tensor = {.data = allowed.data(),
                     .device = {.device_type = kDLCPU, .device_id = 0},
                     .ndim = 1,
                     .dtype = {.code = kDLInt, .bits = 32, .lanes = 1},
                     .shape = &size,
                     .strides = nullptr,
                     .byte_offset = 0};
  try {
    matcher.FillNextTokenBitmask(&tensor);
  } catch (const std::exception& e) {
    LogInfo("a grammar failed, and its answer ends: {}", Escaped(e.what(), kShownBytes));
    return false;
  }
  uint32_t any = 0;
  const std::vector<uint32_t>& never = grammar->impl_->never;
  for (size_t i = 0; i < allowed.size(); ++i) any |= allowed[i] &= ~never[i];
  const int32_t vocab = vocabulary().size;
  if (vocab % 32 != 0) allowed.back() &= (uint32_t{1} << (vocab % 32)) - 1;
  return any != 0;
}

Matcher::Matcher(std::shared_ptr<const Grammar> grammar) {
  xgrammar::GrammarMatcher matcher(grammar->impl_->compiled);
  impl_ = std::make_unique<Impl>(Impl{std::move(grammar), std::move(matcher)});
  impl_->scratch.resize(WordsOf(impl_->vocabulary().size));
}
Matcher::Matcher(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Matcher::Matcher(Matcher&&) noexcept = default;
Matcher& Matcher::operator=(Matcher&&) noexcept = default;
Matcher::~Matcher() = default;

void Matcher::FillMask(std::span<uint32_t> allowed) const {
  const std::vector<uint32_t>& ends = impl_->vocabulary().end_bits;
  OKV_CHECK(allowed.size() == ends.size());
  if (!impl_->Fill(allowed)) std::copy(ends.begin(), ends.end(), allowed.begin());
}

bool Matcher::Accept(int32_t token) {
  if (token < 0 || token >= impl_->vocabulary().size || impl_->Ended()) return false;
  if (GetBit(impl_->grammar->impl_->never, token)) return false;
  const bool end = GetBit(impl_->vocabulary().end_bits, token);
  try {
    if (impl_->matcher.AcceptToken(token)) return true;
  } catch (const std::exception&) {
    if (!end) return false;
  }
  if (!end || impl_->Fill(impl_->scratch)) return false;
  ++impl_->forced_ends;
  return true;
}

bool Matcher::Done() const {
  if (impl_->Ended()) return true;
  if (!impl_->matcher.IsCompleted()) return false;
  if (!impl_->Fill(impl_->scratch)) return true;
  const std::vector<uint32_t>& ends = impl_->vocabulary().end_bits;
  for (size_t i = 0; i < ends.size(); ++i) {
    if ((impl_->scratch[i] & ~ends[i]) != 0) return false;
  }
  return true;
}

void Matcher::Rollback(int32_t tokens) {
  if (tokens > 0 && impl_->forced_ends > 0) {
    --impl_->forced_ends;
    --tokens;
  }
  if (tokens > 0) impl_->matcher.Rollback(tokens);
}

Matcher Matcher::Fork() const {
  return Matcher(std::make_unique<Impl>(
      Impl{impl_->grammar, impl_->matcher.Fork(), impl_->forced_ends, impl_->scratch}));
}

}  // namespace omnikv::server
