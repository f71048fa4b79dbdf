#include "text/jinja/expr_parser.h"

#include <fmt/format.h>

#include <optional>

namespace omnikv::jinja {
namespace {

// Levels of an expression's tree: evaluation and destruction recurse. jinja2 itself ends at about
// 200 levels.
constexpr int kMaxTreeDepth = 250;

std::optional<CompareOp> CompareOpOf(std::string_view op) {
  if (op == "==") return CompareOp::kEq;
  if (op == "!=") return CompareOp::kNe;
  if (op == "<") return CompareOp::kLt;
  if (op == "<=") return CompareOp::kLe;
  if (op == ">") return CompareOp::kGt;
  if (op == ">=") return CompareOp::kGe;
  return {};
}

}  // namespace

void ExprParser::TooDeep() const {
  Wrong(fmt::format("tags and brackets nest more than {} levels deep", kMaxNesting));
}

// ---- tokens ----

bool ExprParser::SkipOp(std::string_view op) {
  if (!IsOp(op)) return false;
  Next();
  return true;
}

bool ExprParser::SkipWord(std::string_view word) {
  if (!IsWord(word)) return false;
  Next();
  return true;
}

void ExprParser::ExpectOp(std::string_view op) {
  if (!SkipOp(op)) Wrong(fmt::format("{} found, expected '{}'", Shown(), op));
}

void ExprParser::ExpectBlockEnd() {
  if (Now().kind != TokenKind::kBlockEnd) Wrong(fmt::format("{} found, expected '%}}'", Shown()));
  Next();
}

std::string ExprParser::ExpectName() {
  if (Now().kind != TokenKind::kName) Wrong(fmt::format("{} found, expected a name", Shown()));
  std::string name = Now().text;
  Next();
  return name;
}

std::string ExprParser::Shown() const {
  switch (Now().kind) {
    case TokenKind::kName:
    case TokenKind::kOperator:
      return fmt::format("'{:.100}'", Now().text);
    case TokenKind::kString:
      return "a string";
    case TokenKind::kInteger:
    case TokenKind::kFloat:
      return "a number";
    case TokenKind::kBlockEnd:
      return "'%}'";
    case TokenKind::kPrintEnd:
      return "'}}'";
    default:
      return "the end of the template";
  }
}

// ---- expressions ----

template <typename... Children>
void ExprParser::Deepen(Expr* parent, const Children&... children) {
  for (const ExprPtr* child : {&children...}) {
    if (*child) parent->depth = std::max(parent->depth, (*child)->depth + 1);
  }
  if (parent->depth > kMaxTreeDepth) {
    Wrong(fmt::format("an expression has more than {} levels", kMaxTreeDepth));
  }
}

void ExprParser::DeepenByArgs(Expr* parent, const CallArgs& args) {
  for (const ExprPtr& arg : args.positional) Deepen(parent, arg);
  for (const auto& arg : args.named) Deepen(parent, arg.second);
  Deepen(parent, args.star, args.double_star);
}

ExprPtr ExprParser::Binary(BinaryOp op, int line, ExprPtr left, ExprPtr right) {
  auto expr = std::make_unique<BinaryExpr>(line);
  Deepen(expr.get(), left, right);
  expr->op = op;
  expr->left = std::move(left);
  expr->right = std::move(right);
  return expr;
}

ExprPtr ExprParser::Tuple(bool with_condition, bool in_parentheses) {
  const Nest nest(this);
  const auto at_end = [&] {
    return Now().kind == TokenKind::kPrintEnd || Now().kind == TokenKind::kBlockEnd || IsOp(")");
  };
  auto tuple = std::make_unique<ListExpr>(Now().line);
  tuple->tuple = true;
  if (at_end()) {
    if (!in_parentheses) Wrong(fmt::format("{} found, expected an expression", Shown()));
    return tuple;
  }
  ExprPtr first = Expression(with_condition);
  if (!IsOp(",")) return first;
  tuple->items.push_back(std::move(first));
  while (SkipOp(",") && !at_end()) tuple->items.push_back(Expression(with_condition));
  for (const ExprPtr& item : tuple->items) Deepen(tuple.get(), item);
  return tuple;
}

ExprPtr ExprParser::Expression(bool with_condition) {
  const Nest nest(this);
  ExprPtr expr = Or();
  while (with_condition && IsWord("if")) {
    auto cond = std::make_unique<CondExpr>(Now().line);
    Next();
    cond->then = std::move(expr);
    cond->test = Or();
    if (SkipWord("else")) cond->otherwise = Expression();
    Deepen(cond.get(), cond->then, cond->test, cond->otherwise);
    expr = std::move(cond);
  }
  return expr;
}

ExprPtr ExprParser::Or() {
  ExprPtr left = And();
  while (IsWord("or")) {
    auto expr = std::make_unique<LogicExpr>(Now().line);
    Next();
    expr->left = std::move(left);
    expr->right = And();
    Deepen(expr.get(), expr->left, expr->right);
    left = std::move(expr);
  }
  return left;
}

ExprPtr ExprParser::And() {
  ExprPtr left = Not();
  while (IsWord("and")) {
    auto expr = std::make_unique<LogicExpr>(Now().line);
    Next();
    expr->is_and = true;
    expr->left = std::move(left);
    expr->right = Not();
    Deepen(expr.get(), expr->left, expr->right);
    left = std::move(expr);
  }
  return left;
}

ExprPtr ExprParser::Not() {
  if (!IsWord("not")) return Comparison();
  const Nest nest(this);
  auto expr = std::make_unique<UnaryExpr>(Now().line);
  Next();
  expr->operand = Not();
  Deepen(expr.get(), expr->operand);
  return expr;
}

ExprPtr ExprParser::Comparison() {
  auto expr = std::make_unique<CompareExpr>(Now().line);
  expr->first = Sum();
  while (true) {
    std::optional<CompareOp> op;
    if (Now().kind == TokenKind::kOperator) op = CompareOpOf(Now().text);
    if (IsWord("in")) op = CompareOp::kIn;
    if (IsWord("not") && Ahead().Is(TokenKind::kName, "in")) {
      op = CompareOp::kNotIn;
      Next();
    }
    if (!op) break;
    Next();
    expr->rest.emplace_back(*op, Sum());
  }
  if (expr->rest.empty()) return std::move(expr->first);
  Deepen(expr.get(), expr->first);
  for (const auto& item : expr->rest) Deepen(expr.get(), item.second);
  return expr;
}

ExprPtr ExprParser::Sum() {
  ExprPtr left = Concat();
  while (IsOp("+") || IsOp("-")) {
    const BinaryOp op = IsOp("+") ? BinaryOp::kAdd : BinaryOp::kSub;
    const int line = Now().line;
    Next();
    ExprPtr right = Concat();
    left = Binary(op, line, std::move(left), std::move(right));
  }
  return left;
}

ExprPtr ExprParser::Concat() {
  ExprPtr first = Product();
  if (!IsOp("~")) return first;
  auto expr = std::make_unique<ConcatExpr>(Now().line);
  expr->parts.push_back(std::move(first));
  while (SkipOp("~")) expr->parts.push_back(Product());
  for (const ExprPtr& part : expr->parts) Deepen(expr.get(), part);
  return expr;
}

ExprPtr ExprParser::Product() {
  ExprPtr left = Power();
  while (IsOp("*") || IsOp("/") || IsOp("//") || IsOp("%")) {
    const BinaryOp op = IsOp("*")    ? BinaryOp::kMul
                        : IsOp("/")  ? BinaryOp::kDiv
                        : IsOp("//") ? BinaryOp::kFloorDiv
                                     : BinaryOp::kMod;
    const int line = Now().line;
    Next();
    ExprPtr right = Power();
    left = Binary(op, line, std::move(left), std::move(right));
  }
  return left;
}

ExprPtr ExprParser::Power() {
  ExprPtr left = Unary();
  while (IsOp("**")) {  // from the left, unlike in Python
    const int line = Now().line;
    Next();
    ExprPtr right = Unary();
    left = Binary(BinaryOp::kPow, line, std::move(left), std::move(right));
  }
  return left;
}

ExprPtr ExprParser::Unary(bool with_filter) {
  ExprPtr expr;
  if (IsOp("-") || IsOp("+")) {
    const Nest nest(this);
    auto unary = std::make_unique<UnaryExpr>(Now().line);
    unary->op = IsOp("-") ? UnaryOp::kNegate : UnaryOp::kPlus;
    Next();
    unary->operand = Unary(false);
    Deepen(unary.get(), unary->operand);
    expr = std::move(unary);
  } else {
    expr = Primary();
  }
  expr = Postfix(std::move(expr));
  return with_filter ? FilterOrTest(std::move(expr)) : std::move(expr);
}

ExprPtr ExprParser::Primary() {
  const Token& token = Now();
  auto constant = std::make_unique<ConstExpr>(token.line);
  switch (token.kind) {
    case TokenKind::kName:
      return Name();
    case TokenKind::kString: {
      std::string text;
      for (; Now().kind == TokenKind::kString; Next()) text += Now().text;
      constant->value = Value(Str(text));
      return constant;
    }
    case TokenKind::kInteger:
      constant->value = Value(token.integer);
      Next();
      return constant;
    case TokenKind::kFloat:
      constant->value = Value(token.real);
      Next();
      return constant;
    default:
      break;
  }
  if (IsOp("[")) return ListLiteral();
  if (IsOp("{")) return DictLiteral();
  if (!SkipOp("(")) Wrong(fmt::format("{} found, expected an expression", Shown()));
  ExprPtr inner = Tuple(true, true);
  ExpectOp(")");
  return inner;
}

ExprPtr ExprParser::Name() {
  const int line = Now().line;
  const std::string name = ExpectName();
  auto constant = std::make_unique<ConstExpr>(line);
  if (name == "none" || name == "None") {
    constant->value = Value(None{});
    return constant;
  }
  if (name == "true" || name == "True" || name == "false" || name == "False") {
    constant->value = Value(name == "true" || name == "True");
    return constant;
  }
  for (MacroNode* macro : macros_) {
    macro->uses_caller |= name == "caller";
    macro->uses_varargs |= name == "varargs";
    macro->uses_kwargs |= name == "kwargs";
  }
  auto expr = std::make_unique<NameExpr>(line);
  expr->name = name;
  return expr;
}

ExprPtr ExprParser::ListLiteral() {
  auto list = std::make_unique<ListExpr>(Now().line);
  Next();
  while (!IsOp("]")) {
    if (!list->items.empty()) ExpectOp(",");
    if (IsOp("]")) break;
    list->items.push_back(Expression());
    Deepen(list.get(), list->items.back());
  }
  Next();
  return list;
}

ExprPtr ExprParser::DictLiteral() {
  auto dict = std::make_unique<DictExpr>(Now().line);
  Next();
  while (!IsOp("}")) {
    if (!dict->items.empty()) ExpectOp(",");
    if (IsOp("}")) break;
    ExprPtr key = Expression();
    ExpectOp(":");
    ExprPtr value = Expression();
    Deepen(dict.get(), key, value);
    dict->items.emplace_back(std::move(key), std::move(value));
  }
  Next();
  return dict;
}

ExprPtr ExprParser::Postfix(ExprPtr expr) {
  while (true) {
    if (IsOp(".") || IsOp("[")) {
      expr = Subscript(std::move(expr));
    } else if (IsOp("(")) {
      expr = Call(std::move(expr));
    } else {
      return expr;
    }
  }
}

ExprPtr ExprParser::FilterOrTest(ExprPtr expr) {
  while (true) {
    if (IsOp("|")) {
      expr = FilterChain(std::move(expr));
    } else if (IsWord("is")) {
      expr = Test(std::move(expr));
    } else if (IsOp("(")) {
      expr = Call(std::move(expr));
    } else {
      return expr;
    }
  }
}

ExprPtr ExprParser::Subscript(ExprPtr object) {
  const int line = Now().line;
  if (SkipOp(".")) {
    if (Now().kind == TokenKind::kInteger) {
      auto item = std::make_unique<GetItemExpr>(line);
      auto index = std::make_unique<ConstExpr>(line);
      index->value = Value(Now().integer);
      Next();
      item->object = std::move(object);
      item->key = std::move(index);
      Deepen(item.get(), item->object);
      return item;
    }
    auto attr = std::make_unique<GetAttrExpr>(line);
    attr->name = ExpectName();
    attr->object = std::move(object);
    Deepen(attr.get(), attr->object);
    return attr;
  }
  ExpectOp("[");
  const auto part = [&]() -> ExprPtr { return IsOp(":") || IsOp("]") ? nullptr : Expression(); };
  ExprPtr first = part();
  if (!IsOp(":")) {
    if (!first) Wrong("']' found, expected an index");
    auto item = std::make_unique<GetItemExpr>(line);
    item->object = std::move(object);
    item->key = std::move(first);
    if (IsOp(",")) {
      auto tuple = std::make_unique<ListExpr>(line);
      tuple->tuple = true;
      tuple->items.push_back(std::move(item->key));
      while (SkipOp(",")) tuple->items.push_back(Expression());
      for (const ExprPtr& one : tuple->items) Deepen(tuple.get(), one);
      item->key = std::move(tuple);
    }
    Deepen(item.get(), item->object, item->key);
    ExpectOp("]");
    return item;
  }
  auto slice = std::make_unique<SliceExpr>(line);
  slice->object = std::move(object);
  slice->begin = std::move(first);
  Next();
  slice->end = part();
  if (SkipOp(":")) slice->step = part();
  ExpectOp("]");
  Deepen(slice.get(), slice->object, slice->begin, slice->end, slice->step);
  return slice;
}

ExprPtr ExprParser::Call(ExprPtr callee) {
  auto call = std::make_unique<CallExpr>(Now().line);
  call->callee = std::move(callee);
  call->args = Arguments();
  Deepen(call.get(), call->callee);
  DeepenByArgs(call.get(), call->args);
  return call;
}

CallArgs ExprParser::Arguments() {
  CallArgs args;
  ExpectOp("(");
  bool first = true;
  while (!IsOp(")")) {
    if (!first) ExpectOp(",");
    if (!first && IsOp(")")) break;
    first = false;
    if (args.double_star) Wrong("an argument follows '**'");
    if (SkipOp("**")) {
      args.double_star = Expression();
    } else if (SkipOp("*")) {
      if (args.star) Wrong("a call has two '*'");
      args.star = Expression();
    } else if (Now().kind == TokenKind::kName && Ahead().Is(TokenKind::kOperator, "=")) {
      const Str name(ExpectName());
      Next();
      args.named.emplace_back(name, Expression());
    } else {
      if (args.star || !args.named.empty()) {
        Wrong("a positional argument follows '*' or a named argument");
      }
      args.positional.push_back(Expression());
    }
  }
  Next();
  return args;
}

std::string ExprParser::DottedName() {
  std::string name = ExpectName();
  while (SkipOp(".")) {
    name += '.';
    name += ExpectName();
  }
  return name;
}

ExprPtr ExprParser::Filter(ExprPtr input) {
  auto filter = std::make_unique<FilterExpr>(Now().line);
  filter->name = DottedName();
  filter->filter = FindFilter(filter->name);
  filter->input = std::move(input);
  if (IsOp("(")) filter->args = Arguments();
  Deepen(filter.get(), filter->input);
  DeepenByArgs(filter.get(), filter->args);
  return filter;
}

ExprPtr ExprParser::FilterChain(ExprPtr input) {
  while (SkipOp("|")) input = Filter(std::move(input));
  return input;
}

ExprPtr ExprParser::Test(ExprPtr input) {
  auto test = std::make_unique<TestExpr>(Now().line);
  Next();  // 'is'
  const bool negated = SkipWord("not");
  test->name = DottedName();
  test->test = FindTest(test->name);
  test->input = std::move(input);
  const TokenKind kind = Now().kind;
  const bool stops = IsWord("else") || IsWord("or") || IsWord("and");
  if (IsWord("is")) Wrong("tests cannot be chained with 'is'");
  if (IsOp("(")) {
    test->args = Arguments();
  } else if ((kind == TokenKind::kName && !stops) || kind == TokenKind::kString ||
             kind == TokenKind::kInteger || kind == TokenKind::kFloat || IsOp("[") || IsOp("{")) {
    test->args.positional.push_back(Postfix(Primary()));
  }
  Deepen(test.get(), test->input);
  DeepenByArgs(test.get(), test->args);
  if (!negated) return test;
  auto expr = std::make_unique<UnaryExpr>(test->line);
  expr->operand = std::move(test);
  Deepen(expr.get(), expr->operand);
  return expr;
}

}  // namespace omnikv::jinja
