// The expressions of a template, and the tokens that they and the statements are made of.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/ast.h"
#include "text/jinja/lexer.h"

namespace omnikv::jinja {

class ExprParser {
 protected:
  explicit ExprParser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  // Counts one level of nesting while it lives.
  class Nest {
   public:
    explicit Nest(ExprParser* parser) : parser_(parser) {
      if (parser->nesting_ >= kMaxNesting) parser->TooDeep();
      ++parser->nesting_;
    }
    ~Nest() { --parser_->nesting_; }
    Nest(const Nest&) = delete;
    Nest& operator=(const Nest&) = delete;

   private:
    ExprParser* parser_;
  };

  // ---- tokens ----
  [[noreturn]] void Wrong(std::string message) const {
    throw SyntaxError{Now().line, std::move(message)};
  }
  const Token& Now() const { return tokens_[at_]; }
  const Token& Ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  void Next() { at_ = std::min(at_ + 1, tokens_.size() - 1); }
  bool IsOp(std::string_view op) const { return Now().Is(TokenKind::kOperator, op); }
  bool IsWord(std::string_view word) const { return Now().Is(TokenKind::kName, word); }
  bool SkipOp(std::string_view op);
  bool SkipWord(std::string_view word);
  void ExpectOp(std::string_view op);
  void ExpectBlockEnd();
  std::string ExpectName();
  std::string Shown() const;

  // ---- expressions ----
  // One expression, or several with commas: a tuple.
  ExprPtr Tuple(bool with_condition = true, bool in_parentheses = false);
  ExprPtr Expression(bool with_condition = true);
  ExprPtr Filter(ExprPtr input);
  ExprPtr FilterChain(ExprPtr input);

  std::vector<MacroNode*> macros_;  // around: they learn which special names they use

 private:
  // Tags or brackets within one another: jinja2 itself ends at about 75 brackets, where Python's
  // stack does. A bracket counts twice.
  static constexpr int kMaxNesting = 200;
  [[noreturn]] void TooDeep() const;

  // Loosest first.
  ExprPtr Or();
  ExprPtr And();
  ExprPtr Not();
  ExprPtr Comparison();
  ExprPtr Sum();
  ExprPtr Concat();
  ExprPtr Product();
  ExprPtr Power();
  ExprPtr Unary(bool with_filter = true);
  ExprPtr Primary();
  ExprPtr Name();
  ExprPtr ListLiteral();
  ExprPtr DictLiteral();
  ExprPtr Postfix(ExprPtr expr);
  ExprPtr FilterOrTest(ExprPtr expr);
  ExprPtr Subscript(ExprPtr object);
  ExprPtr Call(ExprPtr callee);
  ExprPtr Test(ExprPtr input);
  CallArgs Arguments();
  std::string DottedName();
  ExprPtr Binary(BinaryOp op, int line, ExprPtr left, ExprPtr right);
  template <typename... Children>
  void Deepen(Expr* parent, const Children&... children);
  void DeepenByArgs(Expr* parent, const CallArgs& args);

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int nesting_ = 0;
};

}  // namespace omnikv::jinja
