//! Expressions that operators write: CEL, compiled once, evaluated over JSON.
//!
//! What an expression is for (an output rule, a stop condition, an interceptor) is its user's
//! concern. This file bounds the source and the evaluation: CEL loops only over data but has no
//! limits of its own, so source and data are capped, and every iteration of a loop is counted and
//! timed. Unknown variables and functions are errors of the compilation.

mod meter;

use std::collections::{BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};

use cel::common::ast::{
    CallExpr, EntryExpr, Expr, IdedExpr, ListExpr, LiteralValue, MapExpr, SourceInfo, StructExpr,
    operators,
};
use cel::{Context, Env, ExecutionError, Program};
use serde_json::Value;

use super::{off_worker, on_large_stack};
use meter::{KEPT, Meter, TURN};

/// Bytes of source.
pub const MAX_SOURCE: usize = 4096;
/// Levels of nested brackets, and the number of `?:` operators: more are too deep for the parser.
const MAX_NESTING: usize = 64;
/// Levels of the tree that an evaluation descends.
const MAX_DEPTH: usize = 80;
/// Levels of a tree that is evaluated on the ordinary stack.
const SHALLOW: usize = 16;
/// Bytes of the values that an expression uses, and of what it makes, as JSON.
const MAX_DATA: usize = 1024 * 1024;
/// An evaluation with a loop over more bytes than this lets the other tasks of its worker go on.
const QUICK: usize = 16 * 1024;
/// Bytes of an error's message: it may quote the data.
const MAX_MESSAGE: usize = 400;
/// Names of types, which are values.
const TYPES: [&str; 12] = [
    "bool",
    "bytes",
    "double",
    "duration",
    "dyn",
    "int",
    "list",
    "map",
    "null_type",
    "string",
    "timestamp",
    "uint",
];

static ENVIRONMENT: LazyLock<Arc<Env>> = LazyLock::new(|| Arc::new(Env::stdlib()));

/// An expression, ready to be evaluated.
#[derive(Debug)]
pub struct Expression {
    source: String,
    tree: IdedExpr,
    /// The variables that it uses.
    uses: BTreeSet<String>,
    /// The maximum depth of nested loops.
    loops: usize,
    /// Whether it builds larger values from others.
    keeps: bool,
    /// Levels of the tree.
    levels: usize,
}

/// Why an expression is refused, or has no value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExpressionError {
    /// It is no expression, or uses what does not exist.
    #[error("is not a valid CEL expression: {0}")]
    Invalid(String),
    /// The data lack a key that it asks for.
    #[error("there is no key {0:?}")]
    MissingKey(String),
    /// The data are not what it expects.
    #[error("it cannot be evaluated: {0}")]
    Failed(String),
    /// It is neither true nor false.
    #[error("it is neither true nor false but {0}")]
    NotBoolean(String),
    /// The data, or what it makes of them, are more than they may be.
    #[error("it would have to handle more than {MAX_DATA} bytes of data")]
    TooLarge,
    /// Its loops take more turns or time than an evaluation may.
    #[error("its loops take too long on these data")]
    TooLong,
}

impl Expression {
    /// Compiles a source that may use these variables.
    ///
    /// # Errors
    /// [`ExpressionError::Invalid`], with the place in the source.
    pub fn compile(source: &str, variables: &[&str]) -> Result<Self, ExpressionError> {
        if source.trim().is_empty() || source.len() > MAX_SOURCE {
            let message = format!("it must have 1 to {MAX_SOURCE} bytes");
            return Err(ExpressionError::Invalid(message));
        }
        let program = parsed(source)?;
        let mut tree = program.expression().clone();
        let mut names = Names {
            variables,
            places: program.source_info(),
            scope: Vec::new(),
            uses: BTreeSet::new(),
            loops: 0,
            keeps: false,
        };
        names.check(&mut tree)?;
        let Names { uses, loops, keeps, .. } = names;
        let levels = depth_of(&tree);
        Ok(Self { source: source.to_owned(), tree, uses, loops, keeps, levels })
    }

    /// What it was compiled from.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether it uses a variable.
    pub fn uses(&self, variable: &str) -> bool {
        self.uses.contains(variable)
    }

    /// Whether it is true of these variables; those that it does not use may be left out.
    ///
    /// # Errors
    /// Any but [`ExpressionError::Invalid`].
    pub fn is_true(&self, variables: &[(&str, &Value)]) -> Result<bool, ExpressionError> {
        match self.evaluate(variables)? {
            cel::Value::Bool(answer) => Ok(answer),
            other => Err(ExpressionError::NotBoolean(shortened(format!("{other:?}")))),
        }
    }

    /// Its value, as JSON with sorted keys.
    ///
    /// # Errors
    /// Any but [`ExpressionError::Invalid`] and [`ExpressionError::NotBoolean`].
    pub fn value(&self, variables: &[(&str, &Value)]) -> Result<Value, ExpressionError> {
        let value = self.evaluate(variables)?;
        let mut json =
            value.json().map_err(|e| ExpressionError::Failed(shortened(e.to_string())))?;
        take(&json, &mut { MAX_DATA }).ok_or(ExpressionError::TooLarge)?;
        json.sort_all_objects();
        Ok(json)
    }

    fn evaluate(&self, variables: &[(&str, &Value)]) -> Result<cel::Value, ExpressionError> {
        let is_quick = self.levels <= SHALLOW
            && self.loops < 2
            && (self.loops == 0 || self.is_small(variables));
        if is_quick {
            return self.evaluate_here(variables);
        }
        off_worker(|| self.evaluate_here(variables))
    }

    fn evaluate_here(&self, variables: &[(&str, &Value)]) -> Result<cel::Value, ExpressionError> {
        let meter = Arc::new(Meter::new());
        let resolve = || self.resolve(variables, &meter);
        let resolved = if self.levels > SHALLOW {
            on_large_stack(resolve)
        } else {
            catch_unwind(AssertUnwindSafe(resolve)).ok()
        };
        if meter.is_used_up() {
            return Err(ExpressionError::TooLong); // whatever came of it
        }
        if meter.is_full() {
            return Err(ExpressionError::TooLarge);
        }
        resolved.unwrap_or_else(|| {
            Err(ExpressionError::Failed("the data are out of every range".to_owned()))
        })
    }

    fn resolve(
        &self,
        variables: &[(&str, &Value)],
        meter: &Arc<Meter>,
    ) -> Result<cel::Value, ExpressionError> {
        let mut context = Context::with_env(Arc::clone(&ENVIRONMENT));
        let mut room = MAX_DATA;
        for (name, value) in self.used(variables) {
            context.add_variable_from_value(name, cel_of(value, &mut room)?);
        }
        if self.loops > 0 {
            let counted = Arc::clone(meter);
            let declared = context.add_function(TURN, move || counted.turn());
            declared.map_err(|e| ExpressionError::Failed(e.to_string()))?;
        }
        if self.keeps {
            let counted = Arc::clone(meter);
            let declared = context.add_function(KEPT, move |value: cel::Value| counted.kept(value));
            declared.map_err(|e| ExpressionError::Failed(e.to_string()))?;
        }
        cel::Value::resolve(&self.tree, &context).map_err(|error| match error {
            ExecutionError::NoSuchKey(key) => {
                ExpressionError::MissingKey(shortened(key.to_string()))
            }
            error => ExpressionError::Failed(shortened(error.to_string())),
        })
    }

    fn used<'a>(
        &'a self,
        variables: &'a [(&str, &Value)],
    ) -> impl Iterator<Item = (&'a str, &'a Value)> {
        variables.iter().copied().filter(|(name, _)| self.uses.contains(*name))
    }

    /// Whether loops over the data are short enough to run directly on an async worker.
    fn is_small(&self, variables: &[(&str, &Value)]) -> bool {
        let mut room = QUICK;
        self.used(variables).all(|(_, value)| take(value, &mut room).is_some())
    }
}

/// Parses a source, on a stack that is large enough for every source that passes the first checks.
fn parsed(source: &str) -> Result<Program, ExpressionError> {
    let mut nesting = 0_usize;
    let is_too_deep = source.chars().any(|c| {
        match c {
            '(' | '[' | '{' | '?' => nesting += 1,
            ')' | ']' | '}' => nesting = nesting.saturating_sub(1),
            _ => {}
        }
        nesting > MAX_NESTING
    });
    if is_too_deep {
        return Err(ExpressionError::Invalid(format!(
            "it is nested more than {MAX_NESTING} levels deep"
        )));
    }
    let unread = || ExpressionError::Invalid("it cannot be read".to_owned());
    let read = || {
        let program = ENVIRONMENT.compile(source).map_err(|errors| {
            let first = errors.errors.first();
            let message =
                first.map(|e| format!("at line {}, column {}: {}", e.pos.0, e.pos.1, e.msg));
            message.map_or_else(unread, |message| ExpressionError::Invalid(shortened(message)))
        })?;
        let levels = depth_of(program.expression());
        let too_deep =
            || ExpressionError::Invalid(format!("it has {levels} levels, more than {MAX_DEPTH}"));
        (levels <= MAX_DEPTH).then_some(program).ok_or_else(too_deep)
    };
    on_large_stack(read).unwrap_or_else(|| Err(unread()))
}

/// Levels of a tree.
fn depth_of(expr: &IdedExpr) -> usize {
    let deepest =
        |inner: &mut dyn Iterator<Item = &IdedExpr>| inner.map(depth_of).max().unwrap_or(0);
    1 + match &expr.expr {
        Expr::Unspecified | Expr::Literal(_) | Expr::Ident(_) => 0,
        Expr::Select(select) => depth_of(&select.operand),
        Expr::List(list) => deepest(&mut list.elements.iter()),
        Expr::Map(MapExpr { entries }) | Expr::Struct(StructExpr { entries, .. }) => {
            let inner = entries.iter().map(|entry| match &entry.expr {
                EntryExpr::MapEntry(entry) => depth_of(&entry.key).max(depth_of(&entry.value)),
                EntryExpr::StructField(field) => depth_of(&field.value),
            });
            inner.max().unwrap_or(0)
        }
        Expr::Call(call) => deepest(&mut call.target.iter().map(AsRef::as_ref).chain(&call.args)),
        Expr::Comprehension(made) => {
            let parts =
                [&made.iter_range, &made.accu_init, &made.loop_cond, &made.loop_step, &made.result];
            deepest(&mut parts.into_iter())
        }
    }
}

/// JSON as CEL sees it: integers are `int` where they fit, so that arithmetic with literals works.
fn cel_of(value: &Value, room: &mut usize) -> Result<cel::Value, ExpressionError> {
    take(value, room).ok_or(ExpressionError::TooLarge)?;
    Ok(converted(value))
}

/// Takes the size of a value, about as JSON, from the room that is left.
fn take(value: &Value, room: &mut usize) -> Option<()> {
    let own = match value {
        Value::String(text) => text.len() + 2,
        Value::Object(entries) => entries.keys().map(|key| key.len() + 3).sum::<usize>() + 2,
        _ => 2,
    };
    *room = room.checked_sub(own)?;
    match value {
        Value::Array(items) => items.iter().try_for_each(|item| take(item, room)),
        Value::Object(entries) => entries.values().try_for_each(|inner| take(inner, room)),
        _ => Some(()),
    }
}

fn converted(value: &Value) -> cel::Value {
    match value {
        Value::Null => cel::Value::Null,
        Value::Bool(truth) => cel::Value::Bool(*truth),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(int), _) => cel::Value::Int(int),
            (None, Some(uint)) => cel::Value::UInt(uint),
            (None, None) => cel::Value::Float(number.as_f64().unwrap_or(f64::NAN)),
        },
        Value::String(text) => text.as_str().into(),
        Value::Array(items) => cel::Value::List(Arc::new(items.iter().map(converted).collect())),
        Value::Object(entries) => {
            let entries = entries.iter().map(|(key, value)| (key.clone(), converted(value)));
            entries.collect::<HashMap<String, cel::Value>>().into()
        }
    }
}

/// Finds unknown names, and adds a counter to every loop.
struct Names<'a> {
    variables: &'a [&'a str],
    places: &'a SourceInfo,
    /// Variables of the loops around the current expression.
    scope: Vec<String>,
    uses: BTreeSet<String>,
    loops: usize,
    keeps: bool,
}

impl Names<'_> {
    fn check(&mut self, expr: &mut IdedExpr) -> Result<(), ExpressionError> {
        let id = expr.id;
        match &mut expr.expr {
            Expr::Unspecified => Err(self.wrong(id, "there is nothing")),
            Expr::Literal(_) => Ok(()),
            Expr::Ident(name) => self.variable(id, name),
            Expr::Select(select) => self.check(&mut select.operand),
            Expr::List(list) => {
                list.elements.iter_mut().try_for_each(|element| self.check_kept(element))
            }
            Expr::Map(map) => map.entries.iter_mut().try_for_each(|entry| match &mut entry.expr {
                EntryExpr::MapEntry(entry) => {
                    self.check_kept(&mut entry.key)?;
                    self.check_kept(&mut entry.value)
                }
                EntryExpr::StructField(field) => self.check(&mut field.value),
            }),
            Expr::Struct(made) => {
                let message = format!("there is no message type {:?}", made.type_name);
                Err(self.wrong(id, &message))
            }
            Expr::Call(call) => {
                self.function(id, call)?;
                call.target.iter_mut().try_for_each(|target| self.check(target))?;
                let is_result = |arg: &IdedExpr| matches!(&arg.expr, Expr::Ident(name) if name.starts_with('@'));
                if call.func_name == operators::ADD && !call.args.first().is_some_and(is_result) {
                    return call.args.iter_mut().try_for_each(|argument| self.check_kept(argument));
                }
                call.args.iter_mut().try_for_each(|argument| self.check(argument))
            }
            Expr::Comprehension(made) => {
                self.check(&mut made.iter_range)?;
                self.check(&mut made.accu_init)?;
                let outside = self.scope.len();
                self.scope.push(made.iter_var.clone());
                self.scope.extend(made.iter_var2.clone());
                self.loops = self.loops.max(self.loops_around() + 1);
                self.scope.push(made.accu_var.clone());
                self.check(&mut made.loop_cond)?;
                self.check(&mut made.loop_step)?;
                self.check(&mut made.result)?;
                self.scope.truncate(outside);
                let counted = counted(&mut made.loop_step, &made.accu_var);
                counted.ok_or_else(|| self.wrong(id, "there are no loops of this kind"))
            }
        }
    }

    /// Checks an expression whose value becomes part of a larger one, and wraps it in a call that checks
    /// its size: a short expression can make values grow by any factor.
    fn check_kept(&mut self, expr: &mut IdedExpr) -> Result<(), ExpressionError> {
        self.check(expr)?;
        let is_small = match &expr.expr {
            Expr::Literal(_) => true,
            Expr::Ident(name) => {
                !self.variables.contains(&name.as_str()) && TYPES.contains(&name.as_str())
            }
            _ => false,
        };
        if !is_small {
            let inner = IdedExpr { id: expr.id, expr: std::mem::take(&mut expr.expr) };
            let (func_name, args) = (KEPT.to_owned(), vec![inner]);
            expr.expr = Expr::Call(CallExpr { func_name, target: None, args });
            self.keeps = true;
        }
        Ok(())
    }

    /// Every loop has its result in scope.
    fn loops_around(&self) -> usize {
        self.scope.iter().filter(|name| name.starts_with('@')).count()
    }

    fn variable(&mut self, id: u64, name: &str) -> Result<(), ExpressionError> {
        if self.scope.iter().any(|inner| inner == name) || TYPES.contains(&name) {
            return Ok(());
        }
        if self.variables.contains(&name) {
            self.uses.insert(name.to_owned());
            return Ok(());
        }
        let message = format!("unknown variable {name:?}; there are {}", self.variables.join(", "));
        Err(self.wrong(id, &message))
    }

    /// An unknown function fails in every call, whatever its arguments, so one trial call finds it.
    fn function(&self, id: u64, call: &CallExpr) -> Result<(), ExpressionError> {
        let is_operator = !call.func_name.starts_with(|c: char| c.is_ascii_alphabetic());
        if is_operator {
            return Ok(());
        }
        let nothing = || IdedExpr { id: 0, expr: Expr::List(ListExpr::new(Vec::new())) };
        let target = call.target.is_some().then(|| Box::new(nothing()));
        let probe = CallExpr { func_name: call.func_name.clone(), target, args: Vec::new() };
        let context = Context::with_env(Arc::clone(&ENVIRONMENT));
        match cel::Value::resolve(&IdedExpr { id: 0, expr: Expr::Call(probe) }, &context) {
            Err(ExecutionError::UndeclaredReference(name)) => {
                Err(self.wrong(id, &format!("there is no function {name:?}")))
            }
            _ => Ok(()),
        }
    }

    fn wrong(&self, id: u64, message: &str) -> ExpressionError {
        let place =
            self.places.offset_for(id).map(|(start, _)| format!("at character {}: ", start + 1));
        ExpressionError::Invalid(format!("{}{message}", place.unwrap_or_default()))
    }
}

/// Has a turn of a loop begin with being counted: where the macros of CEL put what the author
/// wrote. The rest of the step keeps its form, by which the evaluation knows how to be quick.
fn counted(step: &mut IdedExpr, result: &str) -> Option<()> {
    let Expr::Call(call) = &mut step.expr else { return None };
    let is_result = |expr: &IdedExpr| matches!(&expr.expr, Expr::Ident(name) if name == result);
    let written = match (call.func_name.as_str(), call.args.as_mut_slice()) {
        (operators::LOGICAL_AND | operators::LOGICAL_OR, [so_far, written])
            if is_result(so_far) =>
        {
            written
        }
        (operators::CONDITIONAL, [written, _, otherwise]) if is_result(otherwise) => written,
        (operators::ADD, [so_far, IdedExpr { expr: Expr::List(added), .. }])
            if is_result(so_far) =>
        {
            added.elements.first_mut()?
        }
        _ => return None,
    };
    let turn = Expr::Call(CallExpr { func_name: TURN.to_owned(), target: None, args: Vec::new() });
    let never = Expr::Literal(LiteralValue::Boolean(false.into()));
    let id = written.id;
    let body = std::mem::take(&mut written.expr);
    let args = [turn, body, never].map(|expr| IdedExpr { id, expr }).into();
    written.expr =
        Expr::Call(CallExpr { func_name: operators::CONDITIONAL.to_owned(), target: None, args });
    Some(())
}

fn shortened(mut message: String) -> String {
    if message.len() > MAX_MESSAGE {
        message.truncate(message.floor_char_boundary(MAX_MESSAGE));
        message.push('…');
    }
    message
}

#[cfg(test)]
#[path = "expression_tests.rs"]
mod tests;
