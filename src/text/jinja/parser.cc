#include "text/jinja/parser.h"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "text/jinja/expr_parser.h"

namespace omnikv::jinja {
namespace {

constexpr size_t kMaxParameters = 255;

class Parser : private ExprParser {
 public:
  explicit Parser(std::vector<Token> tokens) : ExprParser(std::move(tokens)) {}

  Block Template();

 private:
  Block Statements(std::initializer_list<std::string_view> ends, std::string_view opened_by);
  StmtPtr Statement();
  StmtPtr For();
  StmtPtr If();
  StmtPtr Set();
  StmtPtr Macro();
  StmtPtr CallBlock();
  StmtPtr FilterBlock();
  StmtPtr With();
  StmtPtr Generation();
  StmtPtr Jump(StmtKind kind);
  void Signature(MacroNode* macro);
  void MacroBody(MacroNode* macro, std::string_view end);
  Target AssignTarget(bool may_be_attribute);
  Target SingleTarget(bool may_be_attribute);
  [[noreturn]] void NotSupported(const std::string& what) const {
    throw SyntaxError{Now().line, what + " not supported", StatusCode::kUnsupported};
  }

  int loops_ = 0;  // for statements around, within the same macro
};

Block Parser::Template() {
  return Statements({}, "");
}

// Statements up to one of the tags `ends`, whose name is then the current token; without `ends`, up
// to the end of the template.
Block Parser::Statements(std::initializer_list<std::string_view> ends, std::string_view opened_by) {
  const Nest nest(this);
  Block block;
  while (Now().kind != TokenKind::kEnd) {
    const Token& token = Now();
    if (token.kind == TokenKind::kData) {
      auto text = std::make_unique<TextStmt>(token.line);
      text->text = Str(token.text);
      block.push_back(std::move(text));
      Next();
    } else if (token.kind == TokenKind::kPrintBegin) {
      auto print = std::make_unique<PrintStmt>(token.line);
      Next();
      print->value = Tuple();
      if (Now().kind != TokenKind::kPrintEnd) {
        Wrong(fmt::format("{} found, expected '}}}}'", Shown()));
      }
      Next();
      block.push_back(std::move(print));
    } else {
      Next();  // '{%'
      const bool ends_here = Now().kind == TokenKind::kName &&
                             std::find(ends.begin(), ends.end(), Now().text) != ends.end();
      if (ends_here) return block;
      block.push_back(Statement());
      ExpectBlockEnd();
    }
  }
  if (ends.size() != 0) Wrong(fmt::format("'{}' has no '{}'", opened_by, *(ends.end() - 1)));
  return block;
}

// The current token is the tag's name; at the end it is the '%}' of the last tag.
StmtPtr Parser::Statement() {
  const std::string tag = Now().kind == TokenKind::kName ? Now().text : "";
  if (tag == "for") return For();
  if (tag == "if") return If();
  if (tag == "set") return Set();
  if (tag == "macro") return Macro();
  if (tag == "call") return CallBlock();
  if (tag == "filter") return FilterBlock();
  if (tag == "with") return With();
  if (tag == "generation") return Generation();
  if (tag == "break") return Jump(StmtKind::kBreak);
  if (tag == "continue") return Jump(StmtKind::kContinue);
  if (tag.empty()) Wrong(fmt::format("{} found, expected the name of a tag", Shown()));
  for (const std::string_view known :
       {"autoescape", "block", "extends", "from", "import", "include", "print"}) {
    if (tag == known) NotSupported(fmt::format("the tag '{}' is", tag));
  }
  Wrong(fmt::format("'{:.100}' is no tag that can stand here", tag));
}

StmtPtr Parser::For() {
  auto stmt = std::make_unique<ForStmt>(Now().line);
  Next();
  stmt->target = AssignTarget(false);
  if (!SkipWord("in")) Wrong(fmt::format("{} found, expected 'in'", Shown()));
  stmt->items = Tuple(false);
  if (SkipWord("if")) stmt->test = Expression();
  if (IsWord("recursive")) NotSupported("recursive loops are");
  SkipOp(":");
  ExpectBlockEnd();
  ++loops_;
  stmt->body = Statements({"else", "endfor"}, "for");
  --loops_;
  if (SkipWord("else")) {
    SkipOp(":");
    ExpectBlockEnd();
    stmt->otherwise = Statements({"endfor"}, "for");
  }
  Next();
  return stmt;
}

StmtPtr Parser::If() {
  auto stmt = std::make_unique<IfStmt>(Now().line);
  do {
    Next();  // 'if' or 'elif'
    ExprPtr test = Tuple(false);
    SkipOp(":");
    ExpectBlockEnd();
    stmt->branches.emplace_back(std::move(test), Statements({"elif", "else", "endif"}, "if"));
  } while (IsWord("elif"));
  if (SkipWord("else")) {
    SkipOp(":");
    ExpectBlockEnd();
    stmt->otherwise = Statements({"endif"}, "if");
  }
  Next();
  return stmt;
}

StmtPtr Parser::Set() {
  const int line = Now().line;
  Next();
  Target target = AssignTarget(true);
  if (SkipOp("=")) {
    auto stmt = std::make_unique<SetStmt>(line);
    stmt->target = std::move(target);
    stmt->value = Tuple();
    return stmt;
  }
  auto stmt = std::make_unique<SetBlockStmt>(line);
  stmt->target = std::move(target);
  stmt->filter = FilterChain(nullptr);
  ExpectBlockEnd();
  stmt->body = Statements({"endset"}, "set");
  Next();
  return stmt;
}

StmtPtr Parser::Macro() {
  auto stmt = std::make_unique<MacroStmt>(Now().line);
  Next();
  stmt->macro.name = ExpectName();
  Signature(&stmt->macro);
  MacroBody(&stmt->macro, "endmacro");
  return stmt;
}

StmtPtr Parser::CallBlock() {
  auto stmt = std::make_unique<CallBlockStmt>(Now().line);
  Next();
  stmt->caller.name = "caller";
  if (IsOp("(")) Signature(&stmt->caller);
  stmt->call = Expression();
  if (stmt->call->kind != ExprKind::kCall) Wrong("a call block needs a call");
  MacroBody(&stmt->caller, "endcall");
  return stmt;
}

void Parser::Signature(MacroNode* macro) {
  macros_.push_back(macro);  // a default may look at the special names, too
  ExpectOp("(");
  while (!IsOp(")")) {
    if (!macro->parameters.empty()) ExpectOp(",");
    MacroNode::Parameter parameter{ExpectName(), nullptr};
    const auto same = [&](const auto& other) { return other.name == parameter.name; };
    if (std::any_of(macro->parameters.begin(), macro->parameters.end(), same)) {
      Wrong(fmt::format("the parameter '{:.100}' is there twice", parameter.name));
    }
    if (SkipOp("=")) {
      parameter.fallback = Expression();
    } else if (!macro->parameters.empty() && macro->parameters.back().fallback) {
      Wrong("a parameter without a default follows one with a default");
    }
    if (macro->parameters.size() == kMaxParameters) {
      Wrong(fmt::format("a macro has more than {} parameters", kMaxParameters));
    }
    macro->parameters.push_back(std::move(parameter));
  }
  Next();
  macros_.pop_back();
}

void Parser::MacroBody(MacroNode* macro, std::string_view end) {
  SkipOp(":");
  ExpectBlockEnd();
  const int loops = std::exchange(loops_, 0);  // no break out of a macro
  macros_.push_back(macro);
  macro->body = Statements({end}, end.substr(3));
  macros_.pop_back();
  loops_ = loops;
  Next();
}

StmtPtr Parser::FilterBlock() {
  auto stmt = std::make_unique<FilterBlockStmt>(Now().line);
  Next();
  stmt->filter = FilterChain(Filter(nullptr));
  ExpectBlockEnd();
  stmt->body = Statements({"endfilter"}, "filter");
  Next();
  return stmt;
}

StmtPtr Parser::With() {
  auto stmt = std::make_unique<WithStmt>(Now().line);
  Next();
  while (Now().kind != TokenKind::kBlockEnd) {
    if (!stmt->variables.empty()) ExpectOp(",");
    Target target = AssignTarget(false);
    ExpectOp("=");
    stmt->variables.emplace_back(std::move(target), Expression());
  }
  ExpectBlockEnd();
  stmt->body = Statements({"endwith"}, "with");
  Next();
  return stmt;
}

StmtPtr Parser::Generation() {
  auto stmt = std::make_unique<ScopeStmt>(Now().line);
  Next();
  ExpectBlockEnd();
  const int loops = std::exchange(loops_, 0);  // transformers makes it a function
  stmt->body = Statements({"endgeneration"}, "generation");
  loops_ = loops;
  Next();
  return stmt;
}

StmtPtr Parser::Jump(StmtKind kind) {
  if (loops_ == 0) Wrong(fmt::format("'{}' stands outside of a loop", Now().text));
  auto stmt = std::make_unique<JumpStmt>(kind, Now().line);
  Next();
  return stmt;
}

Target Parser::AssignTarget(bool may_be_attribute) {
  const Nest nest(this);
  Target target = SingleTarget(may_be_attribute);
  if (!IsOp(",")) return target;
  Target tuple;
  tuple.items.push_back(std::move(target));
  while (SkipOp(",")) {
    if (Now().kind != TokenKind::kName && !IsOp("(")) break;  // a trailing comma
    if (IsWord("in")) break;
    tuple.items.push_back(SingleTarget(may_be_attribute));
  }
  return tuple;
}

Target Parser::SingleTarget(bool may_be_attribute) {
  if (SkipOp("(")) {
    Target target = AssignTarget(may_be_attribute);
    ExpectOp(")");
    return target;
  }
  Target target;
  target.name = ExpectName();
  for (const std::string_view word : {"true", "false", "none", "True", "False", "None"}) {
    if (target.name == word) Wrong(fmt::format("'{}' cannot be assigned to", word));
  }
  if (may_be_attribute && SkipOp(".")) target.attribute = ExpectName();
  return target;
}

}  // namespace

Block Parse(std::vector<Token> tokens) {
  return Parser(std::move(tokens)).Template();
}

}  // namespace omnikv::jinja
