// Answers that fit a JSON schema, a grammar, a regular expression or the form of a tool call: which
// tokens may come next, by xgrammar (cmake/XGrammar.cmake). Without it every Compile is refused.
//
//     OKV_ASSIGN_OR_RETURN(auto engine, GrammarEngine::Create(tokenizer, vocab, ends));
//     OKV_ASSIGN_OR_RETURN(auto grammar, engine->Compile(JsonSchema{text}));
//     Matcher matcher(grammar);
//     for (;;) {
//       matcher.FillMask(allowed);
//       const int32_t token = ...;  // one of the allowed ones
//       matcher.Accept(token);
//       if (token is one of ends || matcher.Done()) break;
//     }
//
// **White space** in JSON is at most one character in each place where it may stand, and none
// before and after the value: a weak model would write white space for ever. Strings without
// maxLength, arrays without maxItems and numbers without bounds have no bound here either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "omnikv/status.h"
#include "server/grammar/schema.h"
#include "text/tokenizer/tokenizer.h"

namespace omnikv::server {

struct JsonObject {};  // any
struct JsonSchema {
  std::string text;  // schema.h says which
};
// A grammar as xgrammar writes them (GBNF's form): `root ::= "yes" | "no"`. Its rule root is the
// answer.
struct Ebnf {
  std::string text;
};
// The whole answer fits it.
struct Regex {
  std::string text;
};
// Calls of tools. Special tokens that a text spells out are these tokens.
struct Calls {
  struct Form {
    std::string prefix;  // up to the arguments, the name of the tool included
    std::string schema;  // of the arguments, as JsonSchema
    std::string suffix;
  };
  std::vector<Form> forms;
  bool several = false;   // more than one call may come
  std::string separator;  // between two of them
  // Empty: the answer is calls and nothing else. Else it is any text, in which what begins with the
  // trigger is a call, and so may be without any. All prefixes begin with the trigger. Any number
  // of calls may come then, whatever `several` and `separator` say.
  std::string trigger;
};
using Constraint = std::variant<JsonObject, JsonSchema, Ebnf, Regex, Calls>;

struct GrammarOptions {
  size_t schema_bytes = size_t{256} << 10;  // of a schema
  size_t grammar_bytes = size_t{64} << 10;  // of an Ebnf
  size_t forms = 128;                       // of Calls
  SchemaLimits schema;
  // What one compiled grammar may take: one that takes more is thrown away. xgrammar cannot be
  // stopped before.
  size_t compiled_bytes = size_t{256} << 20;
  size_t cached = 64;                       // compiled grammars that are kept, the last used
  size_t cached_bytes = size_t{512} << 20;  // and their bytes
  int threads = 4;                          // for one compilation
};

struct GrammarStats {
  int64_t compiled = 0, found = 0, refused = 0;
  size_t cached = 0, cached_bytes = 0;
};

// A compiled constraint. Immutable: any number of threads and matchers may use one.
class Grammar {
 public:
  ~Grammar();
  size_t bytes() const;

 private:
  friend class GrammarEngine;
  friend class Matcher;
  struct Impl;
  explicit Grammar(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

// Thread-safe. Compilations run one after the other, on the threads that call.
class GrammarEngine {
 public:
  // `vocab`: logits of the model, at least the tokenizer's vocabulary. `ends`: the tokens that end
  // an answer, at least one. Takes about as long as decoding each token of the vocabulary. Neither
  // the engine needs the tokenizer afterwards, nor grammars the engine. kUnsupported for tokenizers
  // of which the tokens' texts cannot be told, kInvalidArgument for ends out of range.
  static Result<std::unique_ptr<GrammarEngine>> Create(const Tokenizer& tokenizer, int32_t vocab,
                                                       std::vector<int32_t> ends,
                                                       const GrammarOptions& options = {});
  ~GrammarEngine();

  // One that was compiled before comes from the cache. A schema takes milliseconds, the first one
  // longer; a long grammar may take seconds, so that this is not for a thread that others wait for.
  // kInvalidArgument for what is wrong, kUnsupported for what cannot be kept, kResourceExhausted
  // past a limit.
  Result<std::shared_ptr<const Grammar>> Compile(const Constraint& constraint);

  GrammarStats stats() const;

 private:
  struct Impl;
  explicit GrammarEngine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Follows one answer. Thread-compatible.
class Matcher {
 public:
  explicit Matcher(std::shared_ptr<const Grammar> grammar);
  Matcher(Matcher&&) noexcept;
  Matcher& operator=(Matcher&&) noexcept;
  ~Matcher();

  // Which tokens may come next: token t is bit t % 32 of allowed[t / 32]. REQUIRES
  // allowed.size() == ceil(vocab / 32). Never empty: where the grammar has no way on (a grammar of
  // a client may lead there, or a vocabulary without the bytes that are needed), the ends are
  // allowed.
  void FillMask(std::span<uint32_t> allowed) const;
  // The token came: false where it may not, and then nothing has changed.
  bool Accept(int32_t token);
  // Nothing but an end may follow, or an end came.
  bool Done() const;
  // Takes back the last `tokens` that were accepted. REQUIRES so many.
  void Rollback(int32_t tokens);
  // One that goes its own way from here.
  Matcher Fork() const;

 private:
  struct Impl;
  explicit Matcher(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace omnikv::server
