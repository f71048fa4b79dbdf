// The grammar of a build without xgrammar: none.
#include "server/grammar/grammar.h"

namespace omnikv::server {

struct Grammar::Impl {};
struct GrammarEngine::Impl {};
struct Matcher::Impl {};

Grammar::Grammar(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Grammar::~Grammar() = default;
size_t Grammar::bytes() const {
  return 0;
}

GrammarEngine::GrammarEngine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GrammarEngine::~GrammarEngine() = default;
Result<std::unique_ptr<GrammarEngine>> GrammarEngine::Create(const Tokenizer&, int32_t,
                                                             std::vector<int32_t>,
                                                             const GrammarOptions&) {
  return std::unique_ptr<GrammarEngine>(new GrammarEngine(nullptr));
}
Result<std::shared_ptr<const Grammar>> GrammarEngine::Compile(const Constraint&) {
  return Unsupported("this build has no grammars (OMNIKV_XGRAMMAR)");
}
GrammarStats GrammarEngine::stats() const {
  return {};
}

// No grammar is ever made, so these are never called.
Matcher::Matcher(std::shared_ptr<const Grammar>) {}
Matcher::Matcher(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Matcher::Matcher(Matcher&&) noexcept = default;
Matcher& Matcher::operator=(Matcher&&) noexcept = default;
Matcher::~Matcher() = default;
void Matcher::FillMask(std::span<uint32_t>) const {}
bool Matcher::Accept(int32_t) {
  return false;
}
bool Matcher::Done() const {
  return true;
}
void Matcher::Rollback(int32_t) {}
Matcher Matcher::Fork() const {
  return Matcher(std::make_unique<Impl>());
}

}  // namespace omnikv::server
