//! Interceptors of the operator: they change or block calls before these are judged, and change results
//! before these are read.
//!
//! They are compiled once for a definition. They apply in their order, each to what the earlier ones
//! left; those of parent runs come last. One that cannot be evaluated blocks. In addition to the
//! arguments, an interceptor may look at the paths that the call would read and write, as the tool
//! resolves them. The executor asks the tool for these paths, and checks whether rewritten arguments
//! still fit the tool.

mod after;

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::Value;

use super::results::capped;
use crate::bounds::expression::Expression;
use crate::bounds::glob::Glob;
use crate::bounds::json::unescaped_key;
use crate::bounds::secrets;
use crate::event::Replaced;
use crate::governance::{Action, ActionKind, path_relative_to};
use crate::run::OF_CALLS;

use self::after::After;
pub use self::after::{AfterRule, Returned, Revision};

/// An interceptor of calls, as it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BeforeRule {
    /// Name or glob of tools.
    pub tool: String,
    /// CEL over `args`, `inputs`, `reads`, `tool` and `writes`; absent: every call.
    pub when: Option<String>,
    /// What it does.
    pub what: Interception,
}

/// What an interceptor does to a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Interception {
    /// It is not executed, for this reason.
    Block(String),
    /// Arguments are changed: JSON pointer and CEL.
    Rewrite(Vec<(String, String)>),
}

/// An interceptor that does not compile.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("interceptors.{key}: {message}")]
pub struct InterceptorError {
    /// Which, e.g. `before[0].when`.
    pub key: String,
    /// What is wrong with it.
    pub message: String,
}

/// All interceptors of an agent.
#[derive(Debug, Default)]
pub struct Interceptors {
    before: Vec<Before>,
    after: Vec<After>,
}

/// An interceptor of calls, compiled.
#[derive(Debug)]
pub(super) struct Before {
    /// 1-based.
    place: usize,
    /// The directory that paths are made relative to, if the interceptor is of a parent's definition.
    paths_relative_to: Option<Arc<str>>,
    tool: Glob,
    when: Option<Expression>,
    what: Compiled,
}

#[derive(Debug)]
enum Compiled {
    Block(String),
    Rewrite(Vec<(String, Expression)>),
}

/// A call as interceptors see it.
pub(super) struct CallView<'a> {
    pub(super) tool: &'a str,
    pub(super) arguments: &'a Value,
    pub(super) inputs: &'a Value,
    /// What the call would do; `None` for an interceptor that does not look at it.
    pub(super) actions: Option<&'a [Action]>,
    /// The workspace, relative to its tenant's directory.
    pub(super) directory: &'a str,
}

/// The outcome of an interceptor of calls.
#[derive(Debug, PartialEq)]
pub(super) enum Intercepted {
    /// The arguments are unchanged.
    Untouched,
    /// The arguments are replaced by these.
    Rewritten(Value),
    /// The call is not executed, for this reason.
    Blocked(String),
}

impl Interceptors {
    /// Compiles what is written.
    ///
    /// # Errors
    /// The first invalid glob, expression or pattern.
    pub fn new(before: &[BeforeRule], after: &[AfterRule]) -> Result<Self, InterceptorError> {
        let before = before.iter().enumerate().map(|(i, rule)| Before::new(i, rule));
        let after = after.iter().enumerate().map(|(i, rule)| After::new(i, rule));
        Ok(Self {
            before: before.collect::<Result<_, _>>()?,
            after: after.collect::<Result<_, _>>()?,
        })
    }

    /// Adds those of a parent, which apply to what the earlier ones left. Their paths are relative to
    /// that directory of the tenant; paths outside of it are left out.
    pub fn add_of_parent(&mut self, of_parent: Self, directory: &str) {
        let directory: Arc<str> = directory.into();
        self.before.extend(
            of_parent
                .before
                .into_iter()
                .map(|before| Before { paths_relative_to: Some(Arc::clone(&directory)), ..before }),
        );
        self.after.extend(of_parent.after);
    }

    /// Those for calls of a tool, in order. Arguments that an approver has edited are not rewritten: they
    /// are what the person wants.
    pub(super) fn before(&self, tool: &str, is_edited: bool) -> impl Iterator<Item = &Before> {
        let applies =
            move |before: &&Before| before.tool.is_match(tool) && !(is_edited && before.rewrites());
        self.before.iter().filter(applies)
    }

    /// Whether one of them may change the arguments of a call of the tool.
    pub(super) fn may_rewrite(&self, tool: &str) -> bool {
        self.before(tool, false).any(Before::rewrites)
    }

    /// A text of a tool as the model reads it, or why it is withheld. Called before the text is capped,
    /// since capping could cut a match in two. Known secrets are removed first, because interceptors
    /// could disguise them.
    pub(super) fn readable(
        &self,
        returned: &Returned<'_>,
        text: &str,
    ) -> Result<(String, Option<Replaced>), String> {
        let known = secrets::without_known_secrets(text).into_owned();
        let (text, replaced) =
            self.after(returned, known).map_err(|why| format!("The result is withheld. {why}"))?;
        Ok((capped(secrets::without_known_secrets(&text).into_owned()), replaced))
    }

    /// Applies those for results of a tool, and returns which one replaced it last.
    ///
    /// # Errors
    /// Why the result is withheld.
    pub(super) fn after(
        &self,
        returned: &Returned<'_>,
        mut text: String,
    ) -> Result<(String, Option<Replaced>), String> {
        let bytes = text.len() as u64;
        let mut replaced = None;
        for after in self.after.iter().filter(|after| after.is_for(returned.tool)) {
            replaced = after.revise(returned, &mut text)?.or(replaced);
        }
        Ok((text, replaced.map(|interceptor| Replaced { interceptor, bytes })))
    }
}

impl Before {
    fn new(index: usize, rule: &BeforeRule) -> Result<Self, InterceptorError> {
        let key = format!("before[{index}]");
        let compile = |key: String, source: &str| {
            Expression::compile(source, &OF_CALLS)
                .map_err(|e| InterceptorError { key, message: e.to_string() })
        };
        let when =
            rule.when.as_ref().map(|when| compile(format!("{key}.when"), when)).transpose()?;
        let what = match &rule.what {
            Interception::Block(reason) => Compiled::Block(reason.clone()),
            Interception::Rewrite(changes) => {
                let change = |(pointer, value): &(String, String)| {
                    Ok((pointer.clone(), compile(format!("{key}.rewrite.{pointer}"), value)?))
                };
                Compiled::Rewrite(changes.iter().map(change).collect::<Result<_, _>>()?)
            }
        };
        let tool = glob(&key, &rule.tool)?;
        Ok(Self { place: index + 1, paths_relative_to: None, tool, when, what })
    }

    fn rewrites(&self) -> bool {
        matches!(self.what, Compiled::Rewrite(_))
    }

    /// Its place in the definition, 1-based.
    pub(super) fn place(&self) -> usize {
        self.place
    }

    /// Whether it looks at what a call would do, and not only at its arguments.
    pub(super) fn looks_at_paths(&self) -> bool {
        let changes = match &self.what {
            Compiled::Block(_) => [].as_slice(),
            Compiled::Rewrite(changes) => changes,
        };
        let mut expressions = self.when.iter().chain(changes.iter().map(|(_, value)| value));
        expressions.any(|expression| expression.uses("reads") || expression.uses("writes"))
    }

    /// Applies it to a call.
    pub(super) fn judge(&self, seen: &CallView<'_>) -> Intercepted {
        let name = Value::from(seen.tool);
        let (reads, writes) = paths(seen.actions.unwrap_or_default(), |path| {
            self.paths_relative_to.as_deref().map_or_else(
                || Some(path.to_owned()),
                |directory| path_relative_to(directory, seen.directory, path),
            )
        });
        let variables = [
            ("args", seen.arguments),
            ("inputs", seen.inputs),
            ("reads", &reads),
            ("tool", &name),
            ("writes", &writes),
        ];
        let undecided = |why: &dyn std::fmt::Display| {
            let (place, of) =
                (self.place, self.paths_relative_to.as_ref().map_or("", |_| " of its parent"));
            Intercepted::Blocked(format!(
                "interceptor {place}{of} cannot decide on this call: {why}."
            ))
        };
        match self.when.as_ref().map_or(Ok(true), |when| when.is_true(&variables)) {
            Ok(true) => {}
            Ok(false) => return Intercepted::Untouched,
            Err(why) => return undecided(&why),
        }
        let changes = match &self.what {
            Compiled::Block(reason) => return Intercepted::Blocked(reason.clone()),
            Compiled::Rewrite(changes) => changes,
        };
        let mut altered = seen.arguments.clone();
        for (pointer, value) in changes {
            match value.value(&variables).map(|value| put(&mut altered, pointer, value)) {
                Ok(Some(())) => {}
                Ok(None) => {
                    return undecided(&format!("the arguments have no place {pointer}"));
                }
                Err(why) => return undecided(&why),
            }
        }
        Intercepted::Rewritten(altered)
    }
}

/// The paths that actions read, and those that they write or create, each once and in order, mapped by
/// `seen`.
fn paths(actions: &[Action], seen: impl Fn(&str) -> Option<String>) -> (Value, Value) {
    let (mut reads, mut writes) = (BTreeSet::new(), BTreeSet::new());
    for action in actions {
        match &action.what {
            ActionKind::Read { path } => reads.extend(seen(path)),
            ActionKind::Write { path } => {
                writes.extend(seen(path));
                writes.extend(action.makes.iter().filter_map(|path| seen(path)));
            }
            ActionKind::Exec { .. }
            | ActionKind::Fetch(_)
            | ActionKind::Call { .. }
            | ActionKind::Delegate { .. } => {}
        }
    }
    (reads.into_iter().collect(), writes.into_iter().collect())
}

/// Names are no paths: `*` matches a `/` too.
fn glob(key: &str, pattern: &str) -> Result<Glob, InterceptorError> {
    Glob::of_names(pattern)
        .map_err(|refused| InterceptorError { key: format!("{key}.tool"), message: refused.0 })
}

/// Sets the value at a pointer; that may add a member, or an item at the end of a list (`-`).
fn put(arguments: &mut Value, pointer: &str, value: Value) -> Option<()> {
    let (parent, last) = pointer.rsplit_once('/')?;
    let key = unescaped_key(last);
    match arguments.pointer_mut(parent)? {
        Value::Object(members) => {
            members.insert(key, value);
        }
        Value::Array(items) if key == "-" => items.push(value),
        Value::Array(items) => *items.get_mut(key.parse::<usize>().ok()?)? = value,
        _ => return None,
    }
    Some(())
}

#[cfg(test)]
#[path = "interceptors_tests.rs"]
mod tests;
