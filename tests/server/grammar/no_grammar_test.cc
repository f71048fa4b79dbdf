// A build without xgrammar refuses every constraint.
#include <gtest/gtest.h>

#include "model/loader.h"
#include "server/grammar/grammar.h"

namespace omnikv::server::no_grammar_test {
namespace {

TEST(NoGrammar, IsRefused) {
  const auto text = LoadTextAlone(OMNIKV_SOURCE_DIR "/models/omnikv-tiny-q8_0.gguf");
  ASSERT_TRUE(text.ok());
  auto engine = GrammarEngine::Create(*text->tokenizer, text->tokenizer->vocab_size(), {0});
  ASSERT_TRUE(engine.ok());
  const Status refused = (*engine)->Compile(JsonObject{}).status();
  EXPECT_EQ(refused.code(), StatusCode::kUnsupported);
  EXPECT_EQ(refused.message(), "this build has no grammars (OMNIKV_XGRAMMAR)");
}

}  // namespace
}  // namespace omnikv::server::no_grammar_test
