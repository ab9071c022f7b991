//! Rewrites the tree of a template so that the size of every value that an expression creates is
//! checked ([`super::made`]), and that no constant is computed while compiling.

use std::collections::BTreeSet;

use minijinja::machinery::ast::{
    BinOp, BinOpKind, Call, CallArg, CallBlock, Compare, CompareOp, Const, EmitExpr, Expr, Filter,
    FilterBlock, ForLoop, GetAttr, GetItem, IfCond, IfExpr, List, Macro, Map, Set, SetBlock, Slice,
    Spanned, Stmt, Template, Test, Tuple, UnaryOp, UnaryOpKind, Var, WithBlock,
};
use minijinja::machinery::{CodeGenerator, Instructions, parse, parse_expr};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Error, ErrorKind, Value};

use super::made::{MADE, Raw, TIMES};

/// What is run, the variables that it asks for, and what of the environment it uses.
pub(super) struct Compiled<'s> {
    pub(super) instructions: Instructions<'s>,
    pub(super) asks: BTreeSet<&'s str>,
    pub(super) uses: Vec<Used<'s>>,
}

/// A filter or a test that a template names.
pub(super) struct Used<'s> {
    /// `filter` or `test`, which is also the test for whether there is one.
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
    let mut writer = Writer::default();
    let whole = writer.stmt(&whole)?;
    let mut generator = CodeGenerator::new(name, source);
    generator.compile_stmt(&whole);
    Ok(Compiled { instructions: generator.finish().0, asks: writer.asks, uses: writer.uses })
}

pub(super) fn expression(source: &str) -> Result<Instructions<'_>, Error> {
    let whole = Writer::default().expr(&parse_expr(source)?)?;
    let mut generator = CodeGenerator::new("<expression>", source);
    generator.compile_expr(&whole);
    Ok(generator.finish().0)
}

#[derive(Default)]
struct Writer<'s> {
    /// Names that are bound around the current node.
    bound: Vec<&'s str>,
    asks: BTreeSet<&'s str>,
    uses: Vec<Used<'s>>,
}

type Made<T> = Result<T, Error>;

impl<'s> Writer<'s> {
    fn stmt(&mut self, stmt: &Stmt<'s>) -> Made<Stmt<'s>> {
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
                let made = IfCond {
                    expr: self.expr(&it.expr)?,
                    true_body: self.body(&it.true_body)?,
                    false_body: self.body(&it.false_body)?,
                };
                Stmt::IfCond(Spanned::new(made, it.span()))
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
                let made =
                    FilterBlock { filter: self.expr(&it.filter)?, body: self.scoped(&it.body)? };
                Stmt::FilterBlock(Spanned::new(made, it.span()))
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
            Stmt::AutoEscape(_) => return Err(none_such("autoescape")),
            Stmt::Do(_) => return Err(none_such("do")),
            Stmt::Block(_) => return Err(none_such("block")),
            Stmt::Import(_) => return Err(none_such("import")),
            Stmt::FromImport(_) => return Err(none_such("from")),
            Stmt::Extends(_) => return Err(none_such("extends")),
            Stmt::Include(_) => return Err(none_such("include")),
        })
    }

    fn body(&mut self, body: &[Stmt<'s>]) -> Made<Vec<Stmt<'s>>> {
        body.iter().map(|stmt| self.stmt(stmt)).collect()
    }

    /// Rewrites a body with a scope of its own.
    fn scoped(&mut self, body: &[Stmt<'s>]) -> Made<Vec<Stmt<'s>>> {
        let outside = self.bound.len();
        let body = self.body(body)?;
        self.bound.truncate(outside);
        Ok(body)
    }

    fn for_loop(&mut self, it: &Spanned<ForLoop<'s>>) -> Made<Stmt<'s>> {
        let iter = self.expr(&it.iter)?;
        let outside = self.bound.len();
        self.bound.push("loop");
        let target = self.target(&it.target)?;
        let filter_expr = self.optional(it.filter_expr.as_ref())?;
        let body = self.body(&it.body)?;
        self.bound.truncate(outside);
        let else_body = self.scoped(&it.else_body)?;
        let made = ForLoop { target, iter, filter_expr, recursive: it.recursive, body, else_body };
        Ok(Stmt::ForLoop(Spanned::new(made, it.span())))
    }

    fn macro_of(&mut self, it: &Spanned<Macro<'s>>) -> Made<Spanned<Macro<'s>>> {
        let outside = self.bound.len();
        self.bound.push("caller");
        let args = it.args.iter().map(|arg| self.target(arg)).collect::<Made<_>>()?;
        let defaults = self.exprs(&it.defaults)?;
        let body = self.body(&it.body)?;
        self.bound.truncate(outside);
        Ok(Spanned::new(Macro { name: it.name, args, defaults, body }, it.span()))
    }

    /// What is assigned to.
    fn target(&mut self, target: &Expr<'s>) -> Made<Expr<'s>> {
        match target {
            Expr::Var(it) => {
                self.bound.push(it.id);
                Ok(Expr::Var(Spanned::new(Var { id: it.id }, it.span())))
            }
            Expr::List(it) => {
                let items = it.items.iter().map(|item| self.target(item)).collect::<Made<_>>()?;
                Ok(Expr::List(Spanned::new(List { items }, it.span())))
            }
            _ => Err(refused("only names can be assigned to")),
        }
    }

    fn expr(&mut self, expr: &Expr<'s>) -> Made<Expr<'s>> {
        let span = expr.span();
        Ok(match expr {
            Expr::Var(it) => {
                if !self.bound.contains(&it.id) {
                    self.asks.insert(it.id);
                }
                Expr::Var(Spanned::new(Var { id: it.id }, span))
            }
            Expr::Const(it) => Expr::Const(Spanned::new(Const { value: it.value.clone() }, span)),
            Expr::Slice(it) => {
                let made = Slice {
                    expr: self.expr(&it.expr)?,
                    start: self.optional(it.start.as_ref())?,
                    stop: self.optional(it.stop.as_ref())?,
                    step: self.optional(it.step.as_ref())?,
                };
                looked_at(Expr::Slice(Spanned::new(made, span)))
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
                let ops = ops.collect::<Made<_>>()?;
                Expr::Compare(Spanned::new(Compare { expr: first, ops }, span))
            }
            Expr::IfExpr(it) => {
                let made = IfExpr {
                    test_expr: self.expr(&it.test_expr)?,
                    true_expr: self.expr(&it.true_expr)?,
                    false_expr: self.optional(it.false_expr.as_ref())?,
                };
                Expr::IfExpr(Spanned::new(made, span))
            }
            Expr::Filter(it) => {
                self.uses.push(Used {
                    kind: "filter",
                    name: it.name,
                    line: span.start_line.into(),
                });
                let expr = self.optional(it.expr.as_ref())?;
                let made = Filter { name: it.name, expr, args: self.args(&it.args)? };
                looked_at(Expr::Filter(Spanned::new(made, span)))
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
                let made = Expr::Call(Spanned::new(self.call(it)?, span));
                // What these make is counted as it is written, or small.
                let is_own = |name: &str| ["range", "loop", "caller"].contains(&name);
                let is_plain = matches!(&it.expr, Expr::Var(var) if is_own(var.id));
                if is_plain { made } else { looked_at(made) }
            }
            Expr::List(it) => {
                looked_at(Expr::List(Spanned::new(List { items: self.exprs(&it.items)? }, span)))
            }
            Expr::Tuple(it) => {
                looked_at(Expr::Tuple(Spanned::new(Tuple { items: self.exprs(&it.items)? }, span)))
            }
            Expr::Map(it) => {
                let (keys, values) = (self.exprs(&it.keys)?, self.exprs(&it.values)?);
                looked_at(Expr::Map(Spanned::new(Map { keys, values }, span)))
            }
        })
    }

    fn test(&mut self, it: &Spanned<Test<'s>>) -> Made<Expr<'s>> {
        let (span, expr) = (it.span(), self.expr(&it.expr)?);
        self.uses.push(Used { kind: "test", name: it.name, line: span.start_line.into() });
        let made = Test { name: it.name, expr, args: self.args(&it.args)? };
        Ok(Expr::Test(Spanned::new(made, span)))
    }

    fn operator(&mut self, it: &Spanned<BinOp<'s>>) -> Made<Expr<'s>> {
        let (left, right) = (self.expr(&it.left)?, self.expr(&it.right)?);
        let span = it.span();
        Ok(match it.op {
            BinOpKind::Mul => {
                let args = vec![CallArg::Pos(right)];
                Expr::Filter(Spanned::new(Filter { name: TIMES, expr: Some(left), args }, span))
            }
            op @ (BinOpKind::Add | BinOpKind::Concat) => {
                looked_at(Expr::BinOp(Spanned::new(BinOp { op, left, right }, span)))
            }
            op => Expr::BinOp(Spanned::new(BinOp { op, left, right }, span)),
        })
    }

    fn call(&mut self, it: &Spanned<Call<'s>>) -> Made<Call<'s>> {
        Ok(Call { expr: self.expr(&it.expr)?, args: self.args(&it.args)? })
    }

    fn args(&mut self, args: &[CallArg<'s>]) -> Made<Vec<CallArg<'s>>> {
        let mut made = Vec::with_capacity(args.len());
        for arg in args {
            made.push(match arg {
                CallArg::Pos(expr) => CallArg::Pos(self.expr(expr)?),
                CallArg::Kwarg(name, expr) => CallArg::Kwarg(name, self.expr(expr)?),
                CallArg::PosSplat(_) | CallArg::KwargSplat(_) => {
                    return Err(refused("arguments cannot be taken from a list or a map"));
                }
            });
        }
        Ok(made)
    }

    fn exprs(&mut self, exprs: &[Expr<'s>]) -> Made<Vec<Expr<'s>>> {
        exprs.iter().map(|expr| self.expr(expr)).collect()
    }

    fn optional(&mut self, expr: Option<&Expr<'s>>) -> Made<Option<Expr<'s>>> {
        expr.map(|expr| self.expr(expr)).transpose()
    }
}

/// The same expression, with a check of the size of its value.
fn looked_at(expr: Expr<'_>) -> Expr<'_> {
    let span = expr.span();
    let args = Vec::new();
    Expr::Filter(Spanned::new(Filter { name: MADE, expr: Some(expr), args }, span))
}

fn none_such(statement: &str) -> Error {
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
