#include "text/jinja/interpreter.h"

#include <algorithm>
#include <optional>

#include "text/jinja/print.h"

namespace omnikv::jinja {

// Runs what follows in a new scope.
class Interpreter::InScope {
 public:
  InScope(Interpreter* interpreter, Scope* parent)
      : interpreter_(interpreter),
        outer_(interpreter->scope_),
        scope_(interpreter->NewScope(parent)) {
    interpreter_->scope_ = scope_;
  }
  explicit InScope(Interpreter* interpreter) : InScope(interpreter, interpreter->scope_) {}
  ~InScope() {
    interpreter_->scope_ = outer_;
    interpreter_->EndScope(scope_);
  }
  InScope(const InScope&) = delete;
  InScope& operator=(const InScope&) = delete;

 private:
  Interpreter* interpreter_;
  Scope* outer_;
  Scope* scope_;
};

// Collects the text that follows instead of writing it.
class Interpreter::Capture {
 public:
  explicit Capture(Interpreter* interpreter)
      : interpreter_(interpreter), outer_(interpreter->out_), text_(&interpreter->rt_.budget) {
    interpreter_->out_ = &text_;
  }
  ~Capture() { interpreter_->out_ = outer_; }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  Str Take() { return std::move(text_).Build(); }

 private:
  Interpreter* interpreter_;
  StrBuilder* outer_;
  StrBuilder text_;
};

Str Interpreter::Run(std::vector<std::pair<std::string_view, Value>> variables) {
  Scope* globals = NewScope(nullptr);
  globals->variables = std::move(variables);
  const InScope in_scope(this, globals);
  Capture output(this);
  ExecAll(template_);
  return output.Take();
}

Scope* Interpreter::NewScope(Scope* parent) {
  Scope* scope = nullptr;
  if (free_scopes_.empty()) {
    rt_.budget.Bytes(sizeof(Scope));
    scope = &scopes_.emplace_back();
  } else {
    scope = free_scopes_.back();
    free_scopes_.pop_back();
  }
  scope->parent = parent;
  return scope;
}

void Interpreter::EndScope(Scope* scope) {
  if (scope->captured) return;  // it lives as long as the interpreter
  scope->variables.clear();
  free_scopes_.push_back(scope);
}

// ---- statements ----

Interpreter::Flow Interpreter::ExecAll(const Block& block) {
  for (const StmtPtr& stmt : block) {
    const Flow flow = Exec(*stmt);
    if (flow != Flow::kNext) return flow;
  }
  return Flow::kNext;
}

Interpreter::Flow Interpreter::Exec(const Stmt& stmt) {
  const DepthGuard guard(rt_);
  rt_.budget.Node();
  rt_.line = stmt.line;
  switch (stmt.kind) {
    case StmtKind::kText:
      out_->Append(static_cast<const TextStmt&>(stmt).text);
      break;
    case StmtKind::kPrint: {
      const Value value = Eval(*static_cast<const PrintStmt&>(stmt).value);
      rt_.line = stmt.line;
      out_->Append(ToStr(rt_, value));
      break;
    }
    case StmtKind::kFor:
      return ExecFor(static_cast<const ForStmt&>(stmt));
    case StmtKind::kIf:
      return ExecIf(static_cast<const IfStmt&>(stmt));
    case StmtKind::kSet: {
      const auto& set = static_cast<const SetStmt&>(stmt);
      CheckTarget(set.target);
      Assign(set.target, Eval(*set.value));
      break;
    }
    case StmtKind::kSetBlock:
      return ExecSetBlock(static_cast<const SetBlockStmt&>(stmt));
    case StmtKind::kMacro:
      ExecMacro(static_cast<const MacroStmt&>(stmt));
      break;
    case StmtKind::kCallBlock:
      ExecCallBlock(static_cast<const CallBlockStmt&>(stmt));
      break;
    case StmtKind::kFilterBlock:
      return ExecFilterBlock(static_cast<const FilterBlockStmt&>(stmt));
    case StmtKind::kWith:
      return ExecWith(static_cast<const WithStmt&>(stmt));
    case StmtKind::kScope: {
      const InScope in_scope(this);
      return ExecAll(static_cast<const ScopeStmt&>(stmt).body);
    }
    case StmtKind::kBreak:
      return Flow::kBreak;
    case StmtKind::kContinue:
      return Flow::kContinue;
  }
  return Flow::kNext;
}

Interpreter::Flow Interpreter::ExecFor(const ForStmt& stmt) {
  const SeqPtr items = Iterate(rt_, Eval(*stmt.items));
  Scope* const outer = scope_;
  size_t next = 0;
  const auto pull = [&](Value* item) {
    while (next < items->items.size()) {
      rt_.budget.Node();
      const Value& candidate = items->items[next++];
      if (stmt.test) {
        const InScope in_scope(this, outer);
        Assign(stmt.target, candidate);
        if (!Truthy(Eval(*stmt.test))) continue;
      }
      *item = candidate;
      return true;
    }
    return false;
  };
  const int64_t length = stmt.test ? -1 : static_cast<int64_t>(items->items.size());
  rt_.budget.Bytes(sizeof(Loop));
  const auto loop = std::make_shared<Loop>(pull, length);
  struct Closer {
    Loop* loop;
    ~Closer() { loop->Close(); }
  } const closer{loop.get()};
  bool any_ended = false;  // jinja2 looks at this, not at whether there were items
  while (loop->Advance()) {
    rt_.budget.Node();
    const InScope in_scope(this, outer);
    SetVariable("loop", Value(loop));
    Assign(stmt.target, loop->item());
    const Flow flow = ExecAll(stmt.body);
    if (flow == Flow::kBreak) break;
    any_ended |= flow == Flow::kNext;
  }
  if (any_ended) return Flow::kNext;
  const InScope in_scope(this, outer);
  return ExecAll(stmt.otherwise);
}

Interpreter::Flow Interpreter::ExecIf(const IfStmt& stmt) {
  for (const auto& [test, block] : stmt.branches) {
    if (Truthy(Eval(*test))) return ExecAll(block);
  }
  return ExecAll(stmt.otherwise);
}

Interpreter::Flow Interpreter::ExecWith(const WithStmt& stmt) {
  std::vector<Value> values;
  for (const auto& variable : stmt.variables) values.push_back(Eval(*variable.second));
  const InScope in_scope(this);
  for (size_t i = 0; i < values.size(); ++i) Assign(stmt.variables[i].first, std::move(values[i]));
  return ExecAll(stmt.body);
}

Interpreter::Flow Interpreter::ExecSetBlock(const SetBlockStmt& stmt) {
  Value value;
  {
    const InScope in_scope(this);
    Capture capture(this);
    const Flow flow = ExecAll(stmt.body);
    if (flow != Flow::kNext) return flow;  // the text so far is lost, as in jinja2
    value = Value(capture.Take());
    if (stmt.filter) value = EvalFilter(static_cast<const FilterExpr&>(*stmt.filter), &value);
  }
  rt_.line = stmt.line;
  Assign(stmt.target, std::move(value));
  return Flow::kNext;
}

void Interpreter::ExecMacro(const MacroStmt& stmt) {
  SetVariable(stmt.macro.name, NewMacro(stmt.macro));
}

void Interpreter::ExecCallBlock(const CallBlockStmt& stmt) {
  const auto& call = static_cast<const CallExpr&>(*stmt.call);
  const Value callee = Eval(*call.callee);
  Args args = EvalArgs(call.args);
  args.named.emplace_back(Str("caller"), NewMacro(stmt.caller));
  rt_.line = stmt.line;
  out_->Append(ToStr(rt_, Call(callee, args)));
}

Interpreter::Flow Interpreter::ExecFilterBlock(const FilterBlockStmt& stmt) {
  const InScope in_scope(this);
  Value text;
  {
    Capture capture(this);
    const Flow flow = ExecAll(stmt.body);
    if (flow != Flow::kNext) return flow;
    text = Value(capture.Take());
  }
  out_->Append(ToStr(rt_, EvalFilter(static_cast<const FilterExpr&>(*stmt.filter), &text)));
  return Flow::kNext;
}

Namespace* Interpreter::NamespaceOf(const Target& target) {
  Namespace* ns = LookUp(target.name).ns();
  if (ns == nullptr) Fail("'{}' is no namespace, so its attributes cannot be set", target.name);
  return ns;
}

// jinja2 checks the namespaces of an assignment before it evaluates anything.
void Interpreter::CheckTarget(const Target& target) {
  if (!target.attribute.empty()) NamespaceOf(target);
  for (const Target& item : target.items) CheckTarget(item);
}

void Interpreter::SetVariable(std::string_view name, Value value) {
  PayForNames(scope_->variables.size());
  for (auto& [key, old] : scope_->variables) {
    if (key == name) {
      old = std::move(value);
      return;
    }
  }
  rt_.budget.Bytes(sizeof(std::pair<std::string_view, Value>));
  scope_->variables.emplace_back(name, std::move(value));
}

void Interpreter::Assign(const Target& target, Value value) {
  if (!target.attribute.empty()) {
    rt_.SetAttribute(NamespaceOf(target), Str(target.attribute), std::move(value));
    return;
  }
  if (!target.name.empty()) {
    SetVariable(target.name, std::move(value));
    return;
  }
  const SeqPtr values = Iterate(rt_, value);
  if (values->items.size() != target.items.size()) {
    Fail("{} values cannot be assigned to {} names", values->items.size(), target.items.size());
  }
  for (size_t i = 0; i < target.items.size(); ++i) Assign(target.items[i], values->items[i]);
}

// ---- expressions ----

Value Interpreter::Eval(const Expr& expr) {
  const DepthGuard guard(rt_);
  rt_.budget.Node();
  rt_.line = expr.line;
  switch (expr.kind) {
    case ExprKind::kConst:
      return static_cast<const ConstExpr&>(expr).value;
    case ExprKind::kName:
      return LookUp(static_cast<const NameExpr&>(expr).name);
    case ExprKind::kList:
      return EvalList(static_cast<const ListExpr&>(expr));
    case ExprKind::kDict:
      return EvalDict(static_cast<const DictExpr&>(expr));
    case ExprKind::kUnary:
      return EvalUnary(static_cast<const UnaryExpr&>(expr));
    case ExprKind::kBinary:
      return EvalBinary(static_cast<const BinaryExpr&>(expr));
    case ExprKind::kConcat:
      return EvalConcat(static_cast<const ConcatExpr&>(expr));
    case ExprKind::kCompare:
      return EvalCompare(static_cast<const CompareExpr&>(expr));
    case ExprKind::kLogic:
      return EvalLogic(static_cast<const LogicExpr&>(expr));
    case ExprKind::kCond:
      return EvalCond(static_cast<const CondExpr&>(expr));
    case ExprKind::kGetAttr: {
      const auto& attr = static_cast<const GetAttrExpr&>(expr);
      const Value object = Eval(*attr.object);
      rt_.line = expr.line;
      return GetAttr(rt_, object, attr.name);
    }
    case ExprKind::kGetItem:
      return EvalGetItem(static_cast<const GetItemExpr&>(expr));
    case ExprKind::kSlice:
      return EvalSlice(static_cast<const SliceExpr&>(expr));
    case ExprKind::kCall:
      return EvalCall(static_cast<const CallExpr&>(expr));
    case ExprKind::kFilter:
      return EvalFilter(static_cast<const FilterExpr&>(expr), nullptr);
    case ExprKind::kTest:
      return EvalTest(static_cast<const TestExpr&>(expr));
  }
  return Value();
}

Value Interpreter::LookUp(std::string_view name) {
  for (const Scope* scope = scope_; scope != nullptr; scope = scope->parent) {
    PayForNames(scope->variables.size());
    for (const auto& [key, value] : scope->variables) {
      if (key == name) return value;
    }
  }
  if (const NamedBuiltin* function = FindFunction(name)) {
    rt_.budget.Bytes(sizeof(Callable));
    return Value(std::make_shared<const Callable>(Callable{function->name, function->builtin}));
  }
  return MakeUndefined(rt_, fmt::format("'{:.100}' is undefined", name));
}

Value Interpreter::EvalList(const ListExpr& expr) {
  std::vector<Value> items;
  items.reserve(expr.items.size());
  for (const ExprPtr& item : expr.items) items.push_back(Eval(*item));
  return expr.tuple ? rt_.Tuple(std::move(items)) : rt_.List(std::move(items));
}

Value Interpreter::EvalDict(const DictExpr& expr) {
  DictBuilder dict(rt_);
  for (const auto& [key, value] : expr.items) {
    const Value k = Eval(*key);
    dict.Set(k, Eval(*value));
  }
  return std::move(dict).Build();
}

Value Interpreter::EvalUnary(const UnaryExpr& expr) {
  const Value operand = Eval(*expr.operand);
  rt_.line = expr.line;
  switch (expr.op) {
    case UnaryOp::kNot:
      return Value(!Truthy(operand));
    case UnaryOp::kNegate:
      return Negate(operand);
    case UnaryOp::kPlus:
      return Plus(operand);
  }
  return Value();
}

Value Interpreter::EvalBinary(const BinaryExpr& expr) {
  const Value left = Eval(*expr.left);
  const Value right = Eval(*expr.right);
  rt_.line = expr.line;
  return Arithmetic(rt_, expr.op, left, right);
}

Value Interpreter::EvalConcat(const ConcatExpr& expr) {
  StrBuilder out(&rt_.budget);
  for (const ExprPtr& part : expr.parts) out.Append(ToStr(rt_, Eval(*part)));
  return Value(std::move(out).Build());
}

Value Interpreter::EvalCompare(const CompareExpr& expr) {
  Value left = Eval(*expr.first);
  for (const auto& [op, operand] : expr.rest) {
    Value right = Eval(*operand);
    rt_.line = expr.line;
    if (!Compare(rt_, op, left, right)) return Value(false);
    left = std::move(right);
  }
  return Value(true);
}

Value Interpreter::EvalLogic(const LogicExpr& expr) {
  Value left = Eval(*expr.left);
  return Truthy(left) == expr.is_and ? Eval(*expr.right) : left;
}

Value Interpreter::EvalCond(const CondExpr& expr) {
  if (Truthy(Eval(*expr.test))) return Eval(*expr.then);
  if (expr.otherwise) return Eval(*expr.otherwise);
  return MakeUndefined(rt_, "an 'if' without 'else' was false");
}

Value Interpreter::EvalGetItem(const GetItemExpr& expr) {
  const Value object = Eval(*expr.object);
  const Value key = Eval(*expr.key);
  rt_.line = expr.line;
  return GetItem(rt_, object, key);
}

Value Interpreter::EvalSlice(const SliceExpr& expr) {
  const Value object = Eval(*expr.object);
  const Value begin = EvalOrNone(expr.begin);
  const Value end = EvalOrNone(expr.end);
  const Value step = EvalOrNone(expr.step);
  rt_.line = expr.line;
  return GetSlice(rt_, object, begin, end, step);
}

Value Interpreter::EvalFilter(const FilterExpr& expr, const Value* input) {
  const DepthGuard guard(rt_);
  // A chain within a block: only its innermost filter has no input.
  const Value self = expr.input
                         ? (expr.input->kind == ExprKind::kFilter
                                ? EvalFilter(static_cast<const FilterExpr&>(*expr.input), input)
                                : Eval(*expr.input))
                         : *input;
  rt_.line = expr.line;
  if (expr.filter == nullptr) Fail("there is no filter '{:.100}'", expr.name);
  const Args args = EvalArgs(expr.args);
  rt_.line = expr.line;
  rt_.budget.Node();
  return expr.filter->builtin(rt_, self, args);
}

Value Interpreter::EvalTest(const TestExpr& expr) {
  const Value self = Eval(*expr.input);
  rt_.line = expr.line;
  if (expr.test == nullptr) Fail("there is no test '{:.100}'", expr.name);
  const Args args = EvalArgs(expr.args);
  rt_.line = expr.line;
  return expr.test->builtin(rt_, self, args);
}

// ---- calls ----

Args Interpreter::EvalArgs(const CallArgs& args) {
  Args values;
  for (const ExprPtr& arg : args.positional) values.positional.push_back(Eval(*arg));
  if (args.star) {
    const SeqPtr rest = Iterate(rt_, Eval(*args.star));
    rt_.budget.Bytes(rest->items.size() * sizeof(Value));
    values.positional.insert(values.positional.end(), rest->items.begin(), rest->items.end());
  }
  for (const auto& [name, arg] : args.named) values.named.emplace_back(name, Eval(*arg));
  if (args.double_star) {
    const Value rest = Eval(*args.double_star);
    if (!rest.dict()) Fail("'**' takes a dict, not {}", Described(rest));
    for (const auto& [name, value] : rest.dict()->items) {
      if (!name.str()) Fail("'**' got {} as the name of an argument", Described(name));
      rt_.budget.Bytes(2 * sizeof(Value));
      values.named.emplace_back(*name.str(), value);
    }
  }
  return values;
}

Value Interpreter::EvalCall(const CallExpr& expr) {
  const Value callee = Eval(*expr.callee);
  const Args args = EvalArgs(expr.args);
  rt_.line = expr.line;
  return Call(callee, args);
}

Value Interpreter::Call(const Value& callee, const Args& args) {
  if (callee.undefined()) Fail("{}", WhyUndefined(callee));
  const Callable* callable = callee.callable();
  if (callable == nullptr) Fail("{} cannot be called", Described(callee));
  if (callable->macro) return CallMacro(*callable, args);
  return callable->builtin(rt_, callable->self, args);
}

Value Interpreter::NewMacro(const MacroNode& macro) {
  for (Scope* scope = scope_; scope != nullptr && !scope->captured; scope = scope->parent) {
    scope->captured = true;
  }
  rt_.budget.Bytes(sizeof(Callable));
  Callable callable;
  callable.name = macro.name;
  callable.macro = &macro;
  callable.scope = scope_;
  return Value(std::make_shared<const Callable>(std::move(callable)));
}

Value Interpreter::CallMacro(const Callable& callable, const Args& args) {
  const DepthGuard guard(rt_);
  const InScope in_scope(this, callable.scope);
  BindMacro(*callable.macro, args);
  Capture capture(this);
  ExecAll(callable.macro->body);
  return Value(capture.Take());
}

void Interpreter::BindMacro(const MacroNode& macro, const Args& args) {
  std::vector<std::pair<Str, Value>> named = args.named;
  const auto take = [&](std::string_view name) -> std::optional<Value> {
    PayForNames(named.size());
    const auto it = std::find_if(named.begin(), named.end(),
                                 [&](const auto& arg) { return arg.first.text() == name; });
    if (it == named.end()) return {};
    Value value = std::move(it->second);
    named.erase(it);
    return value;
  };
  const size_t n_positional = std::min(args.positional.size(), macro.parameters.size());
  bool has_caller = false;
  std::vector<const MacroNode::Parameter*> missing;
  for (size_t i = 0; i < macro.parameters.size(); ++i) {
    const MacroNode::Parameter& parameter = macro.parameters[i];
    has_caller |= parameter.name == "caller";
    if (i < n_positional) {
      SetVariable(parameter.name, args.positional[i]);
    } else if (auto value = take(parameter.name)) {
      SetVariable(parameter.name, std::move(*value));
    } else {
      missing.push_back(&parameter);
    }
  }
  for (const MacroNode::Parameter* parameter : missing) {  // defaults see the other parameters
    SetVariable(
        parameter->name,
        parameter->fallback
            ? Eval(*parameter->fallback)
            : MakeUndefined(rt_, fmt::format("the parameter '{:.100}' of '{:.100}' is missing",
                                             parameter->name, macro.name)));
  }
  if (macro.uses_caller && !has_caller) {
    auto caller = take("caller");
    SetVariable("caller",
                caller ? std::move(*caller)
                       : MakeUndefined(
                             rt_, fmt::format("'{:.100}' was called without a block", macro.name)));
  }
  if (macro.uses_kwargs) {
    DictBuilder rest(rt_);
    for (auto& [name, value] : named) rest.Set(Value(name), std::move(value));
    SetVariable("kwargs", std::move(rest).Build());
  } else if (!named.empty()) {
    Fail("the macro '{:.100}' takes no argument '{:.100}'", macro.name, named.front().first.text());
  }
  if (macro.uses_varargs) {
    SetVariable("varargs",
                rt_.Tuple({args.positional.begin() + static_cast<ptrdiff_t>(n_positional),
                           args.positional.end()}));
  } else if (args.positional.size() > n_positional) {
    Fail("the macro '{:.100}' takes at most {} arguments, not {}", macro.name,
         macro.parameters.size(), args.positional.size());
  }
}

}  // namespace omnikv::jinja
