//! Rewrites the tree of a template so that the size of every value that an expression creates is
//! checked ([`super::output_limits`]), and that no constant is computed while compiling.

use std::collections::BTreeSet;

use minijinja::machinery::ast::{
    BinOp, BinOpKind, Call, CallArg, CallBlock, Compare, CompareOp, Const, EmitExpr, Expr, Filter,
    FilterBlock, ForLoop, GetAttr, GetItem, IfCond, IfExpr, List, Macro, Map, Set, SetBlock, Slice,
    Spanned, Stmt, Template, Test, Tuple, UnaryOp, UnaryOpKind, Var, WithBlock,
};
use minijinja::machinery::{CodeGenerator, Instructions, parse, parse_expr};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Error, ErrorKind, Value};

use super::output_limits::{CHECK, Raw, TIMES};

/// A compiled template, the variables that it needs, and the filters and tests that it names.
pub(super) struct Compiled<'s> {
    pub(super) instructions: Instructions<'s>,
    pub(super) variables: BTreeSet<&'s str>,
    pub(super) functions: Vec<FunctionRef<'s>>,
}

/// A filter or a test that a template names.
pub(super) struct FunctionRef<'s> {
    /// `filter` or `test`, which is also the name of the test whether it exists.
    pub(super) kind: &'static str,
    pub(super) name: &'s str,
    pub(super) line: usize,
}

pub(super) fn template<'s>(
    name: &'s str,
    source: &'s str,
    syntax: SyntaxConfig,
) -> Result<Compiled<'s>, Error> {
    let whole = parse(source, name, syntax)?;
    let mut rewriter = Rewriter::default();
    let whole = rewriter.stmt(&whole)?;
    let mut generator = CodeGenerator::new(name, source);
    generator.compile_stmt(&whole);
    Ok(Compiled {
        instructions: generator.finish().0,
        variables: rewriter.variables,
        functions: rewriter.functions,
    })
}

pub(super) fn expression(source: &str) -> Result<Instructions<'_>, Error> {
    let whole = Rewriter::default().expr(&parse_expr(source)?)?;
    let mut generator = CodeGenerator::new("<expression>", source);
    generator.compile_expr(&whole);
    Ok(generator.finish().0)
}

#[derive(Default)]
struct Rewriter<'s> {
    /// Names that are bound around the current node.
    bound: Vec<&'s str>,
    variables: BTreeSet<&'s str>,
    functions: Vec<FunctionRef<'s>>,
}

type RewriteResult<T> = Result<T, Error>;

impl<'s> Rewriter<'s> {
    fn stmt(&mut self, stmt: &Stmt<'s>) -> RewriteResult<Stmt<'s>> {
        Ok(match stmt {
            Stmt::Template(it) => {
                let children = self.body(&it.children)?;
                Stmt::Template(Spanned::new(Template { children }, it.span()))
            }
            Stmt::EmitExpr(it) => {
                Stmt::EmitExpr(Spanned::new(EmitExpr { expr: self.expr(&it.expr)? }, it.span()))
            }
            Stmt::EmitRaw(it) => {
                let value = Value::from_object(Raw(it.raw.to_owned()));
                let expr = Expr::Const(Spanned::new(Const { value }, it.span()));
                Stmt::EmitExpr(Spanned::new(EmitExpr { expr }, it.span()))
            }
            Stmt::ForLoop(it) => self.for_loop(it)?,
            Stmt::IfCond(it) => {
                let rewritten = IfCond {
                    expr: self.expr(&it.expr)?,
                    true_body: self.body(&it.true_body)?,
                    false_body: self.body(&it.false_body)?,
                };
                Stmt::IfCond(Spanned::new(rewritten, it.span()))
            }
            Stmt::WithBlock(it) => {
                let outside = self.bound.len();
                let mut assignments = Vec::with_capacity(it.assignments.len());
                for (target, expr) in &it.assignments {
                    let expr = self.expr(expr)?;
                    assignments.push((self.target(target)?, expr));
                }
                let body = self.body(&it.body)?;
                self.bound.truncate(outside);
                Stmt::WithBlock(Spanned::new(WithBlock { assignments, body }, it.span()))
            }
            Stmt::Set(it) => {
                let expr = self.expr(&it.expr)?;
                let target = self.target(&it.target)?;
                Stmt::Set(Spanned::new(Set { target, expr }, it.span()))
            }
            Stmt::SetBlock(it) => {
                let body = self.scoped(&it.body)?;
                let filter = self.optional(it.filter.as_ref())?;
                let target = self.target(&it.target)?;
                Stmt::SetBlock(Spanned::new(SetBlock { target, filter, body }, it.span()))
            }
            Stmt::FilterBlock(it) => {
                let rewritten =
                    FilterBlock { filter: self.expr(&it.filter)?, body: self.scoped(&it.body)? };
                Stmt::FilterBlock(Spanned::new(rewritten, it.span()))
            }
            Stmt::Macro(it) => {
                self.bound.push(it.name);
                Stmt::Macro(self.macro_of(it)?)
            }
            Stmt::CallBlock(it) => {
                let call = Spanned::new(self.call(&it.call)?, it.call.span());
                let macro_decl = self.macro_of(&it.macro_decl)?;
                Stmt::CallBlock(Spanned::new(CallBlock { call, macro_decl }, it.span()))
            }
            Stmt::AutoEscape(_) => return Err(unsupported("autoescape")),
            Stmt::Do(_) => return Err(unsupported("do")),
            Stmt::Block(_) => return Err(unsupported("block")),
            Stmt::Import(_) => return Err(unsupported("import")),
            Stmt::FromImport(_) => return Err(unsupported("from")),
            Stmt::Extends(_) => return Err(unsupported("extends")),
            Stmt::Include(_) => return Err(unsupported("include")),
        })
    }

    fn body(&mut self, body: &[Stmt<'s>]) -> RewriteResult<Vec<Stmt<'s>>> {
        body.iter().map(|stmt| self.stmt(stmt)).collect()
    }

    /// Rewrites a body with a scope of its own.
    fn scoped(&mut self, body: &[Stmt<'s>]) -> RewriteResult<Vec<Stmt<'s>>> {
        let outside = self.bound.len();
        let body = self.body(body)?;
        self.bound.truncate(outside);
        Ok(body)
    }

    fn for_loop(&mut self, it: &Spanned<ForLoop<'s>>) -> RewriteResult<Stmt<'s>> {
        let iter = self.expr(&it.iter)?;
        let outside = self.bound.len();
        self.bound.push("loop");
        let target = self.target(&it.target)?;
        let filter_expr = self.optional(it.filter_expr.as_ref())?;
        let body = self.body(&it.body)?;
        self.bound.truncate(outside);
        let else_body = self.scoped(&it.else_body)?;
        let rewritten =
            ForLoop { target, iter, filter_expr, recursive: it.recursive, body, else_body };
        Ok(Stmt::ForLoop(Spanned::new(rewritten, it.span())))
    }

    fn macro_of(&mut self, it: &Spanned<Macro<'s>>) -> RewriteResult<Spanned<Macro<'s>>> {
        let outside = self.bound.len();
        self.bound.push("caller");
        let args = it.args.iter().map(|arg| self.target(arg)).collect::<RewriteResult<_>>()?;
        let defaults = self.exprs(&it.defaults)?;
        let body = self.body(&it.body)?;
        self.bound.truncate(outside);
        Ok(Spanned::new(Macro { name: it.name, args, defaults, body }, it.span()))
    }

    /// What is assigned to.
    fn target(&mut self, target: &Expr<'s>) -> RewriteResult<Expr<'s>> {
        match target {
            Expr::Var(it) => {
                self.bound.push(it.id);
                Ok(Expr::Var(Spanned::new(Var { id: it.id }, it.span())))
            }
            Expr::List(it) => {
                let items =
                    it.items.iter().map(|item| self.target(item)).collect::<RewriteResult<_>>()?;
                Ok(Expr::List(Spanned::new(List { items }, it.span())))
            }
            _ => Err(refused("only names can be assigned to")),
        }
    }

    fn expr(&mut self, expr: &Expr<'s>) -> RewriteResult<Expr<'s>> {
        let span = expr.span();
        Ok(match expr {
            Expr::Var(it) => {
                if !self.bound.contains(&it.id) {
                    self.variables.insert(it.id);
                }
                Expr::Var(Spanned::new(Var { id: it.id }, span))
            }
            Expr::Const(it) => Expr::Const(Spanned::new(Const { value: it.value.clone() }, span)),
            Expr::Slice(it) => {
                let rewritten = Slice {
                    expr: self.expr(&it.expr)?,
                    start: self.optional(it.start.as_ref())?,
                    stop: self.optional(it.stop.as_ref())?,
                    step: self.optional(it.step.as_ref())?,
                };
                checked(Expr::Slice(Spanned::new(rewritten, span)))
            }
            Expr::UnaryOp(it) => {
                let op = copied(&it.op);
                Expr::UnaryOp(Spanned::new(UnaryOp { op, expr: self.expr(&it.expr)? }, span))
            }
            Expr::BinOp(it) => self.operator(it)?,
            Expr::Compare(it) => {
                let first = self.expr(&it.expr)?;
                let ops = it
                    .ops
                    .iter()
                    .map(|other| Ok(CompareOp { op: other.op, expr: self.expr(&other.expr)? }));
                let ops = ops.collect::<RewriteResult<_>>()?;
                Expr::Compare(Spanned::new(Compare { expr: first, ops }, span))
            }
            Expr::IfExpr(it) => {
                let rewritten = IfExpr {
                    test_expr: self.expr(&it.test_expr)?,
                    true_expr: self.expr(&it.true_expr)?,
                    false_expr: self.optional(it.false_expr.as_ref())?,
                };
                Expr::IfExpr(Spanned::new(rewritten, span))
            }
            Expr::Filter(it) => {
                self.functions.push(FunctionRef {
                    kind: "filter",
                    name: it.name,
                    line: span.start_line.into(),
                });
                let expr = self.optional(it.expr.as_ref())?;
                let rewritten = Filter { name: it.name, expr, args: self.args(&it.args)? };
                checked(Expr::Filter(Spanned::new(rewritten, span)))
            }
            Expr::Test(it) => self.test(it)?,
            Expr::GetAttr(it) => Expr::GetAttr(Spanned::new(
                GetAttr { expr: self.expr(&it.expr)?, name: it.name },
                span,
            )),
            Expr::GetItem(it) => {
                let expr = self.expr(&it.expr)?;
                let subscript_expr = self.expr(&it.subscript_expr)?;
                Expr::GetItem(Spanned::new(GetItem { expr, subscript_expr }, span))
            }
            Expr::Call(it) => {
                let rewritten = Expr::Call(Spanned::new(self.call(it)?, span));
                // What these make is counted as it is written, or small.
                let is_own = |name: &str| ["range", "loop", "caller"].contains(&name);
                let is_plain = matches!(&it.expr, Expr::Var(var) if is_own(var.id));
                if is_plain { rewritten } else { checked(rewritten) }
            }
            Expr::List(it) => {
                checked(Expr::List(Spanned::new(List { items: self.exprs(&it.items)? }, span)))
            }
            Expr::Tuple(it) => {
                checked(Expr::Tuple(Spanned::new(Tuple { items: self.exprs(&it.items)? }, span)))
            }
            Expr::Map(it) => {
                let (keys, values) = (self.exprs(&it.keys)?, self.exprs(&it.values)?);
                checked(Expr::Map(Spanned::new(Map { keys, values }, span)))
            }
        })
    }

    fn test(&mut self, it: &Spanned<Test<'s>>) -> RewriteResult<Expr<'s>> {
        let (span, expr) = (it.span(), self.expr(&it.expr)?);
        self.functions.push(FunctionRef {
            kind: "test",
            name: it.name,
            line: span.start_line.into(),
        });
        let rewritten = Test { name: it.name, expr, args: self.args(&it.args)? };
        Ok(Expr::Test(Spanned::new(rewritten, span)))
    }

    fn operator(&mut self, it: &Spanned<BinOp<'s>>) -> RewriteResult<Expr<'s>> {
        let (left, right) = (self.expr(&it.left)?, self.expr(&it.right)?);
        let span = it.span();
        Ok(match it.op {
            BinOpKind::Mul => {
                let args = vec![CallArg::Pos(right)];
                Expr::Filter(Spanned::new(Filter { name: TIMES, expr: Some(left), args }, span))
            }
            op @ (BinOpKind::Add | BinOpKind::Concat) => {
                checked(Expr::BinOp(Spanned::new(BinOp { op, left, right }, span)))
            }
            op => Expr::BinOp(Spanned::new(BinOp { op, left, right }, span)),
        })
    }

    fn call(&mut self, it: &Spanned<Call<'s>>) -> RewriteResult<Call<'s>> {
        Ok(Call { expr: self.expr(&it.expr)?, args: self.args(&it.args)? })
    }

    fn args(&mut self, args: &[CallArg<'s>]) -> RewriteResult<Vec<CallArg<'s>>> {
        let mut rewritten = Vec::with_capacity(args.len());
        for arg in args {
            rewritten.push(match arg {
                CallArg::Pos(expr) => CallArg::Pos(self.expr(expr)?),
                CallArg::Kwarg(name, expr) => CallArg::Kwarg(name, self.expr(expr)?),
                CallArg::PosSplat(_) | CallArg::KwargSplat(_) => {
                    return Err(refused("arguments cannot be taken from a list or a map"));
                }
            });
        }
        Ok(rewritten)
    }

    fn exprs(&mut self, exprs: &[Expr<'s>]) -> RewriteResult<Vec<Expr<'s>>> {
        exprs.iter().map(|expr| self.expr(expr)).collect()
    }

    fn optional(&mut self, expr: Option<&Expr<'s>>) -> RewriteResult<Option<Expr<'s>>> {
        expr.map(|expr| self.expr(expr)).transpose()
    }
}

/// The same expression, with a check of the size of its value.
fn checked(expr: Expr<'_>) -> Expr<'_> {
    let span = expr.span();
    let args = Vec::new();
    Expr::Filter(Spanned::new(Filter { name: CHECK, expr: Some(expr), args }, span))
}

fn unsupported(statement: &str) -> Error {
    refused(&format!("there is no statement {statement}"))
}

fn refused(why: &str) -> Error {
    Error::new(ErrorKind::SyntaxError, why.to_owned())
}

/// The same kind, which is not `Copy`.
fn copied(kind: &UnaryOpKind) -> UnaryOpKind {
    match kind {
        UnaryOpKind::Not => UnaryOpKind::Not,
        UnaryOpKind::Neg => UnaryOpKind::Neg,
    }
}
