// A parsed template.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "text/jinja/builtins.h"
#include "text/jinja/ops.h"
#include "text/jinja/value.h"

namespace omnikv::jinja {

// ---- expressions ----

enum class ExprKind {
  kConst,
  kName,
  kList,
  kDict,
  kUnary,
  kBinary,
  kConcat,
  kCompare,
  kLogic,
  kCond,
  kGetAttr,
  kGetItem,
  kSlice,
  kCall,
  kFilter,
  kTest,
};

struct Expr {
  Expr(ExprKind k, int l) : kind(k), line(l) {}
  virtual ~Expr() = default;

  const ExprKind kind;
  const int line;
  int depth = 1;  // of the tree below, bounded: evaluation and destruction recurse
};
using ExprPtr = std::unique_ptr<Expr>;

struct ConstExpr : Expr {
  explicit ConstExpr(int l) : Expr(ExprKind::kConst, l) {}
  Value value;
};

struct NameExpr : Expr {
  explicit NameExpr(int l) : Expr(ExprKind::kName, l) {}
  std::string name;
};

struct ListExpr : Expr {
  explicit ListExpr(int l) : Expr(ExprKind::kList, l) {}
  std::vector<ExprPtr> items;
  bool tuple = false;
};

struct DictExpr : Expr {
  explicit DictExpr(int l) : Expr(ExprKind::kDict, l) {}
  std::vector<std::pair<ExprPtr, ExprPtr>> items;
};

enum class UnaryOp { kNot, kNegate, kPlus };
struct UnaryExpr : Expr {
  explicit UnaryExpr(int l) : Expr(ExprKind::kUnary, l) {}
  UnaryOp op = UnaryOp::kNot;
  ExprPtr operand;
};

struct BinaryExpr : Expr {
  explicit BinaryExpr(int l) : Expr(ExprKind::kBinary, l) {}
  BinaryOp op = BinaryOp::kAdd;
  ExprPtr left;
  ExprPtr right;
};

struct ConcatExpr : Expr {  // a ~ b ~ c
  explicit ConcatExpr(int l) : Expr(ExprKind::kConcat, l) {}
  std::vector<ExprPtr> parts;
};

struct CompareExpr : Expr {  // a < b <= c
  explicit CompareExpr(int l) : Expr(ExprKind::kCompare, l) {}
  ExprPtr first;
  std::vector<std::pair<CompareOp, ExprPtr>> rest;
};

struct LogicExpr : Expr {  // and, or: one of the operands, as in Python
  explicit LogicExpr(int l) : Expr(ExprKind::kLogic, l) {}
  bool is_and = false;
  ExprPtr left;
  ExprPtr right;
};

struct CondExpr : Expr {  // then if test else otherwise
  explicit CondExpr(int l) : Expr(ExprKind::kCond, l) {}
  ExprPtr test;
  ExprPtr then;
  ExprPtr otherwise;  // null: undefined
};

struct GetAttrExpr : Expr {
  explicit GetAttrExpr(int l) : Expr(ExprKind::kGetAttr, l) {}
  ExprPtr object;
  std::string name;
};

struct GetItemExpr : Expr {
  explicit GetItemExpr(int l) : Expr(ExprKind::kGetItem, l) {}
  ExprPtr object;
  ExprPtr key;
};

struct SliceExpr : Expr {  // object[begin:end:step], each part may be null
  explicit SliceExpr(int l) : Expr(ExprKind::kSlice, l) {}
  ExprPtr object;
  ExprPtr begin;
  ExprPtr end;
  ExprPtr step;
};

struct CallArgs {
  std::vector<ExprPtr> positional;
  std::vector<std::pair<Str, ExprPtr>> named;
  ExprPtr star;         // *list, or null
  ExprPtr double_star;  // **dict, or null
};

struct CallExpr : Expr {
  explicit CallExpr(int l) : Expr(ExprKind::kCall, l) {}
  ExprPtr callee;
  CallArgs args;
};

struct FilterExpr : Expr {
  explicit FilterExpr(int l) : Expr(ExprKind::kFilter, l) {}
  ExprPtr input;  // null: the text of the block the filter stands for
  std::string name;
  const NamedBuiltin* filter = nullptr;  // null: unknown, an error only when it is reached
  CallArgs args;
};

struct TestExpr : Expr {
  explicit TestExpr(int l) : Expr(ExprKind::kTest, l) {}
  ExprPtr input;
  std::string name;
  const NamedBuiltin* test = nullptr;  // as FilterExpr::filter
  CallArgs args;
};

// ---- statements ----

enum class StmtKind {
  kText,
  kPrint,
  kFor,
  kIf,
  kSet,
  kSetBlock,
  kMacro,
  kCallBlock,
  kFilterBlock,
  kWith,
  kScope,
  kBreak,
  kContinue,
};

struct Stmt {
  Stmt(StmtKind k, int l) : kind(k), line(l) {}
  virtual ~Stmt() = default;

  const StmtKind kind;
  const int line;
};
using StmtPtr = std::unique_ptr<Stmt>;
using Block = std::vector<StmtPtr>;

// What an assignment names.
struct Target {
  std::string name;           // empty: a tuple
  std::string attribute;      // of the namespace `name`; empty: the name itself
  std::vector<Target> items;  // of the tuple
};

struct TextStmt : Stmt {
  explicit TextStmt(int l) : Stmt(StmtKind::kText, l) {}
  Str text;
};

struct PrintStmt : Stmt {
  explicit PrintStmt(int l) : Stmt(StmtKind::kPrint, l) {}
  ExprPtr value;
};

struct ForStmt : Stmt {
  explicit ForStmt(int l) : Stmt(StmtKind::kFor, l) {}
  Target target;
  ExprPtr items;
  ExprPtr test;  // of `for x in items if test`, or null
  Block body;
  Block otherwise;
};

struct IfStmt : Stmt {
  explicit IfStmt(int l) : Stmt(StmtKind::kIf, l) {}
  std::vector<std::pair<ExprPtr, Block>> branches;
  Block otherwise;
};

struct SetStmt : Stmt {
  explicit SetStmt(int l) : Stmt(StmtKind::kSet, l) {}
  Target target;
  ExprPtr value;
};

struct SetBlockStmt : Stmt {
  explicit SetBlockStmt(int l) : Stmt(StmtKind::kSetBlock, l) {}
  Target target;
  ExprPtr filter;  // a chain of FilterExpr, or null
  Block body;
};

// What a macro and the body of a call block have in common.
struct MacroNode {
  struct Parameter {
    std::string name;
    ExprPtr fallback;  // null: undefined when not given
  };
  std::string name;
  std::vector<Parameter> parameters;
  Block body;
  // Which of the special names the body looks at: only then may a call give them.
  bool uses_caller = false;
  bool uses_varargs = false;
  bool uses_kwargs = false;
};

struct MacroStmt : Stmt {
  explicit MacroStmt(int l) : Stmt(StmtKind::kMacro, l) {}
  MacroNode macro;
};

struct CallBlockStmt : Stmt {
  explicit CallBlockStmt(int l) : Stmt(StmtKind::kCallBlock, l) {}
  ExprPtr call;  // a CallExpr
  MacroNode caller;
};

struct FilterBlockStmt : Stmt {
  explicit FilterBlockStmt(int l) : Stmt(StmtKind::kFilterBlock, l) {}
  ExprPtr filter;
  Block body;
};

struct WithStmt : Stmt {
  explicit WithStmt(int l) : Stmt(StmtKind::kWith, l) {}
  std::vector<std::pair<Target, ExprPtr>> variables;
  Block body;
};

struct ScopeStmt : Stmt {  // {% generation %}: only a scope of its own
  explicit ScopeStmt(int l) : Stmt(StmtKind::kScope, l) {}
  Block body;
};

struct JumpStmt : Stmt {
  JumpStmt(StmtKind k, int l) : Stmt(k, l) {}
};

}  // namespace omnikv::jinja
