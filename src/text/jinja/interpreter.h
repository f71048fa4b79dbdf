// Runs a parsed template.
#pragma once

#include <deque>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/ast.h"
#include "text/jinja/loop.h"
#include "text/jinja/value.h"

namespace omnikv::jinja {

// The variables of a block. Names are views of the tree's or of the caller's strings.
struct Scope {
  Scope* parent = nullptr;
  bool captured = false;  // a macro may still look into it after its block has ended
  std::vector<std::pair<std::string_view, Value>> variables;
};

class Interpreter {
 public:
  // Both must outlive the interpreter.
  Interpreter(Runtime& rt, const Block& block) : rt_(rt), template_(block), out_(nullptr) {}
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

  // What the template writes with these variables. Throws Error; the line is rt.line. Once only.
  Str Run(std::vector<std::pair<std::string_view, Value>> variables);

 private:
  enum class Flow { kNext, kBreak, kContinue };
  class InScope;
  class Capture;

  Flow ExecAll(const Block& block);
  Flow Exec(const Stmt& stmt);
  Flow ExecFor(const ForStmt& stmt);
  Flow ExecIf(const IfStmt& stmt);
  Flow ExecWith(const WithStmt& stmt);
  Flow ExecSetBlock(const SetBlockStmt& stmt);
  void ExecMacro(const MacroStmt& stmt);
  void ExecCallBlock(const CallBlockStmt& stmt);
  Flow ExecFilterBlock(const FilterBlockStmt& stmt);
  void SetVariable(std::string_view name, Value value);
  void Assign(const Target& target, Value value);
  void CheckTarget(const Target& target);
  Namespace* NamespaceOf(const Target& target);

  Value Eval(const Expr& expr);
  Value EvalOrNone(const ExprPtr& expr) { return expr ? Eval(*expr) : Value(None{}); }
  Value EvalList(const ListExpr& expr);
  Value EvalDict(const DictExpr& expr);
  Value EvalUnary(const UnaryExpr& expr);
  Value EvalBinary(const BinaryExpr& expr);
  Value EvalConcat(const ConcatExpr& expr);
  Value EvalCompare(const CompareExpr& expr);
  Value EvalLogic(const LogicExpr& expr);
  Value EvalCond(const CondExpr& expr);
  Value EvalGetItem(const GetItemExpr& expr);
  Value EvalSlice(const SliceExpr& expr);
  Value EvalCall(const CallExpr& expr);
  Value EvalTest(const TestExpr& expr);
  // `input` is what a filter without an input of its own gets.
  Value EvalFilter(const FilterExpr& expr, const Value* input);
  Value LookUp(std::string_view name);
  void PayForNames(size_t n) { rt_.budget.Work(8 * n); }  // that may be compared with one

  Args EvalArgs(const CallArgs& args);
  Value Call(const Value& callee, const Args& args);
  Value CallMacro(const Callable& macro, const Args& args);
  void BindMacro(const MacroNode& macro, const Args& args);
  Value NewMacro(const MacroNode& macro);

  Scope* NewScope(Scope* parent);
  void EndScope(Scope* scope);

  Runtime& rt_;
  const Block& template_;
  std::deque<Scope> scopes_;
  std::vector<Scope*> free_scopes_;
  Scope* scope_ = nullptr;  // the innermost
  StrBuilder* out_;         // where text goes
};

}  // namespace omnikv::jinja
