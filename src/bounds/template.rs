//! Templates of definitions and scenarios. Bounds hold for the source, for each tag ([`shape`]), for
//! the steps of rendering, for the intermediate values of expressions ([`output_limits`]) and for the rendered
//! text. An undefined value is an error.

mod output_limits;
mod rewriter;
mod shape;

use std::collections::BTreeMap;
use std::fmt;

use minijinja::machinery::{Instructions, eval, make_string_output};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior};
use serde_json::Value;

use super::text::quoted;
use super::{json, on_large_stack};
use rewriter::FunctionRef;

/// Bytes of a template.
const MAX_SOURCE: usize = 1024 * 1024;
/// Steps of one rendering.
const FUEL: u64 = 200_000;
/// Bytes of the rendered text.
const MAX_TEXT: usize = 4 * 1024 * 1024;

/// A template that does not compile or cannot be rendered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateError {
    /// The line in the template, if known.
    pub line: Option<usize>,
    /// The kind of error.
    pub kind: String,
    /// Details, such as the name of an undefined variable; never other parts of the template or values of variables.
    pub detail: Option<String>,
}

impl fmt::Display for TemplateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        f.write_str(&self.kind)?;
        self.detail.as_ref().map_or(Ok(()), |detail| write!(f, ": {detail}"))
    }
}

/// How an undefined value is treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Undefined {
    /// Any use is an error.
    Strict,
    /// A test for it is allowed.
    Tested,
}

/// Templates by name.
#[derive(Debug)]
pub struct Templates {
    environment: Environment<'static>,
    sources: BTreeMap<&'static str, String>,
}

impl Templates {
    /// An empty set of templates.
    pub fn new(undefined: Undefined) -> Self {
        let mut environment = Environment::new();
        environment.set_fuel(Some(FUEL));
        environment.set_debug(true); // errors name the variable, in release builds too
        environment.set_undefined_behavior(match undefined {
            Undefined::Strict => UndefinedBehavior::Strict,
            Undefined::Tested => UndefinedBehavior::SemiStrict,
        });
        output_limits::install(&mut environment);
        Self { environment, sources: BTreeMap::new() }
    }

    /// Adds the filter `fromjson`, which parses JSON text.
    #[must_use]
    pub fn with_fromjson(mut self) -> Self {
        let read = |text: &str| match json::read::<Value>(text) {
            Ok(value) => Ok(minijinja::Value::from(Serde(value))),
            Err(e) => Err(Error::new(ErrorKind::InvalidOperation, format!("fromjson: {e}"))),
        };
        self.environment.add_filter("fromjson", read);
        self
    }

    /// Percent-encodes every inserted value, so that it stays one segment of a path.
    #[must_use]
    pub fn percent_encoding(mut self) -> Self {
        self.environment.set_formatter(|out, _, value| {
            output_limits::write_value(out, value, &|out, text| {
                for byte in text.bytes() {
                    if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
                        out.write_fmt(format_args!("{}", char::from(byte)))?;
                    } else {
                        out.write_fmt(format_args!("%{byte:02X}"))?;
                    }
                }
                Ok(())
            })
        });
        self
    }

    /// Compiles a template under a name, and returns the variables that it uses.
    ///
    /// # Errors
    /// [`TemplateError`].
    pub fn add(&mut self, name: &'static str, source: &str) -> Result<Vec<String>, TemplateError> {
        let compiled =
            self.compiled(source, false, |syntax| rewriter::template(name, source, syntax))?;
        self.check_functions(&compiled.functions)?;
        let is_global = |name: &str| self.environment.globals().any(|(global, _)| global == name);
        let asked = compiled.variables.into_iter().filter(|name| !is_global(name));
        let asked = asked.map(str::to_owned).collect();
        self.sources.insert(name, source.to_owned());
        Ok(asked)
    }

    /// Compiles a template under a name that may use only these variables.
    ///
    /// # Errors
    /// The error as text.
    pub fn add_over(
        &mut self,
        name: &'static str,
        source: &str,
        variables: &[&str],
    ) -> Result<(), String> {
        let asked = self.add(name, source).map_err(|error| error.to_string())?;
        match asked.iter().find(|name| !variables.contains(&name.as_str())) {
            Some(name) => Err(format!("there is no {name:?}, only {}", variables.join(", "))),
            None => Ok(()),
        }
    }

    /// Renders a template that was added.
    ///
    /// # Errors
    /// [`TemplateError`].
    pub fn render(
        &self,
        name: &str,
        variables: &[(&str, &Value)],
    ) -> Result<String, TemplateError> {
        let Some(source) = self.sources.get(name) else {
            return Err(of_kind(format!("there is no template {name}")));
        };
        self.rendered(name, source, variables)
    }

    /// Renders a source that is used once.
    ///
    /// # Errors
    /// [`TemplateError`].
    pub fn render_source(
        &self,
        source: &str,
        variables: &[(&str, &Value)],
    ) -> Result<String, TemplateError> {
        self.rendered("<string>", source, variables)
    }

    /// Whether a source compiles, and all filters and tests that it uses are known.
    ///
    /// # Errors
    /// [`TemplateError`].
    pub fn check(&self, source: &str) -> Result<(), TemplateError> {
        let compiled =
            self.compiled(source, false, |syntax| rewriter::template("<string>", source, syntax))?;
        self.check_functions(&compiled.functions)
    }

    fn check_functions(&self, uses: &[FunctionRef<'_>]) -> Result<(), TemplateError> {
        let mut state = self.environment.empty_state();
        let mut is_known = |used: &FunctionRef<'_>| {
            let known = state.perform_test(used.kind, &[minijinja::Value::from(used.name)]);
            known.unwrap_or_default()
        };
        match uses.iter().find(|used| !is_known(used)) {
            Some(FunctionRef { kind, name, line }) => Err(TemplateError {
                line: Some(*line),
                kind: format!("unknown {kind}"),
                detail: Some(format!("there is no {kind} {}", quoted(name))),
            }),
            None => Ok(()),
        }
    }

    /// Whether a source is one expression.
    pub fn is_expression(&self, source: &str) -> bool {
        self.compiled(source, true, |_| rewriter::expression(source)).is_ok()
    }

    /// The value of one expression; `None` if it is undefined.
    ///
    /// # Errors
    /// [`TemplateError`], also if the value cannot be represented in JSON.
    pub fn value(
        &self,
        expression: &str,
        variables: &[(&str, &Value)],
    ) -> Result<Option<Value>, TemplateError> {
        let instructions = self.compiled(expression, true, |_| rewriter::expression(expression))?;
        let value = self.evaluated(&instructions, variables, &mut String::new())?;
        let value = value.unwrap_or_default();
        if value.is_undefined() {
            return Ok(None);
        }
        serde_json::to_value(&value).map(Some).map_err(|e| TemplateError {
            line: None,
            kind: "not a JSON value".to_owned(),
            detail: Some(format!("{expression} is not a JSON value: {e}")),
        })
    }

    /// Compiles a source, after checking its size and nesting, on a stack that is large enough.
    fn compiled<T: Send>(
        &self,
        source: &str,
        is_expression: bool,
        compile: impl FnOnce(SyntaxConfig) -> Result<T, Error> + Send,
    ) -> Result<T, TemplateError> {
        if source.len() > MAX_SOURCE {
            return Err(of_kind(format!("it is longer than {MAX_SOURCE} bytes")));
        }
        let syntax = self.environment.syntax().clone();
        let done = if shape::is_deep(source, is_expression, syntax.clone())? {
            let unread = || of_kind("it cannot be read".to_owned());
            on_large_stack(|| compile(syntax)).ok_or_else(unread)?
        } else {
            compile(syntax)
        };
        done.map_err(|e| error(&e))
    }

    fn rendered(
        &self,
        name: &str,
        source: &str,
        variables: &[(&str, &Value)],
    ) -> Result<String, TemplateError> {
        let compiled =
            self.compiled(source, false, |syntax| rewriter::template(name, source, syntax))?;
        let mut text = String::new();
        let done = self.evaluated(&compiled.instructions, variables, &mut text);
        if text.len() > MAX_TEXT {
            return Err(of_kind(format!("it makes a text of more than {MAX_TEXT} bytes")));
        }
        done.map(|_| text)
    }

    /// Evaluates instructions: returns the value of an expression, and appends rendered text to `text`.
    fn evaluated<'a>(
        &'a self,
        instructions: &Instructions<'a>,
        variables: &[(&str, &Value)],
        text: &mut String,
    ) -> Result<Option<minijinja::Value>, TemplateError> {
        output_limits::reset();
        let mut output = make_string_output(text);
        let (variables, blocks) = (context(variables), BTreeMap::new());
        let none = AutoEscape::None;
        let done = eval(&self.environment, instructions, variables, &blocks, &mut output, none);
        done.map(|(value, _)| value).map_err(|e| error(&e))
    }
}

/// Whether a text has anything to render.
pub fn is_template(text: &str) -> bool {
    ["{{", "{%", "{#"].iter().any(|mark| text.contains(mark))
}

fn context(variables: &[(&str, &Value)]) -> minijinja::Value {
    let variable = |(name, value): &(&str, &Value)| {
        ((*name).to_owned(), minijinja::Value::from(Serde((*value).clone())))
    };
    minijinja::Value::from_pairs(variables.iter().map(variable))
}

fn of_kind(kind: String) -> TemplateError {
    TemplateError { line: None, kind, detail: None }
}

fn error(error: &Error) -> TemplateError {
    TemplateError {
        line: error.line(),
        kind: error.kind().to_string(),
        detail: error.detail().map(str::to_owned),
    }
}

#[cfg(test)]
#[path = "template_tests.rs"]
mod tests;
