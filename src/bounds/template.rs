//! Templates of definitions and scenarios: bounded in size, in the steps that rendering takes and
//! in the text that comes of it. An undefined value is an error.

use std::fmt::{self, Write as _};
use std::io::{self, Write};

use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior};
use serde_json::Value;

use super::Refused;
use super::json;

/// Bytes of a template.
const MAX_SOURCE: usize = 1024 * 1024;
/// Steps that rendering one takes.
const FUEL: u64 = 200_000;
/// Bytes of what is rendered.
const MAX_TEXT: usize = 4 * 1024 * 1024;

/// A template that does not compile or cannot be rendered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateError {
    /// Its line, where that is known.
    pub line: Option<usize>,
    /// What kind of error it is.
    pub kind: String,
    /// More, where there is more to say: the name of what is undefined, but neither the rest of the
    /// template nor the variables.
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

/// What becomes of an undefined value.
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
}

impl Templates {
    /// None yet.
    pub fn new(undefined: Undefined) -> Self {
        let mut environment = Environment::new();
        environment.set_fuel(Some(FUEL));
        environment.set_debug(true); // errors name the variable, in release builds too
        environment.set_undefined_behavior(match undefined {
            Undefined::Strict => UndefinedBehavior::Strict,
            Undefined::Tested => UndefinedBehavior::SemiStrict,
        });
        Self { environment }
    }

    /// The same, where `fromjson` makes a value of JSON text.
    #[must_use]
    pub fn with_fromjson(mut self) -> Self {
        let read = |text: &str| match json::read::<Value>(text) {
            Ok(value) => Ok(minijinja::Value::from(Serde(value))),
            Err(e) => Err(Error::new(ErrorKind::InvalidOperation, format!("fromjson: {e}"))),
        };
        self.environment.add_filter("fromjson", read);
        self
    }

    /// The same, where what is filled in is percent-encoded, so that it stays one segment of a path.
    #[must_use]
    pub fn percent_encoding(mut self) -> Self {
        self.environment.set_formatter(|out, _, value| {
            for byte in value.to_string().bytes() {
                if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
                    out.write_char(char::from(byte))?;
                } else {
                    write!(out, "%{byte:02X}")?;
                }
            }
            Ok(())
        });
        self
    }

    /// Compiles a template under a name, and answers the variables that it asks for.
    ///
    /// # Errors
    /// [`TemplateError`].
    pub fn add(&mut self, name: &'static str, source: &str) -> Result<Vec<String>, TemplateError> {
        check_size(source)?;
        self.environment.add_template_owned(name, source.to_owned()).map_err(|e| error(&e))?;
        let template = self.environment.get_template(name).map_err(|e| error(&e))?;
        let is_global = |name: &str| self.environment.globals().any(|(global, _)| global == name);
        let asked = template.undeclared_variables(false).into_iter();
        let mut asked: Vec<String> = asked.filter(|name| !is_global(name)).collect();
        asked.sort_unstable();
        Ok(asked)
    }

    /// Compiles a template under a name that asks for nothing but these variables.
    ///
    /// # Errors
    /// What is wrong with it, in words.
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
        let template = self.environment.get_template(name).map_err(|e| error(&e))?;
        rendered(&template, variables)
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
        check_size(source)?;
        let template = self.environment.template_from_str(source).map_err(|e| error(&e))?;
        rendered(&template, variables)
    }

    /// Whether a source compiles.
    ///
    /// # Errors
    /// [`TemplateError`].
    pub fn check(&self, source: &str) -> Result<(), TemplateError> {
        check_size(source)?;
        self.environment.template_from_str(source).map(drop).map_err(|e| error(&e))
    }

    /// Whether a source is one expression.
    pub fn is_expression(&self, source: &str) -> bool {
        source.len() <= MAX_SOURCE && self.environment.compile_expression(source).is_ok()
    }

    /// The value of one expression; none where it is undefined.
    ///
    /// # Errors
    /// [`TemplateError`], also where the value is not one of JSON.
    pub fn value(
        &self,
        expression: &str,
        variables: &[(&str, &Value)],
    ) -> Result<Option<Value>, TemplateError> {
        let value = self
            .environment
            .compile_expression(expression)
            .and_then(|compiled| compiled.eval(context(variables)))
            .map_err(|e| error(&e))?;
        if value.is_undefined() {
            return Ok(None);
        }
        serde_json::to_value(&value).map(Some).map_err(|e| TemplateError {
            line: None,
            kind: "not a JSON value".to_owned(),
            detail: Some(format!("{expression} is not a JSON value: {e}")),
        })
    }
}

/// Whether a text has anything to render.
pub fn is_template(text: &str) -> bool {
    ["{{", "{%", "{#"].iter().any(|mark| text.contains(mark))
}

fn check_size(source: &str) -> Result<(), TemplateError> {
    if source.len() <= MAX_SOURCE {
        return Ok(());
    }
    let Refused(kind) = Refused(format!("it is longer than {MAX_SOURCE} bytes"));
    Err(TemplateError { line: None, kind, detail: None })
}

fn context(variables: &[(&str, &Value)]) -> minijinja::Value {
    let variable = |(name, value): &(&str, &Value)| {
        ((*name).to_owned(), minijinja::Value::from(Serde((*value).clone())))
    };
    minijinja::Value::from_pairs(variables.iter().map(variable))
}

fn rendered(
    template: &minijinja::Template<'_, '_>,
    variables: &[(&str, &Value)],
) -> Result<String, TemplateError> {
    let mut text = Bounded(Vec::new());
    let done = template.render_captured_to(context(variables), &mut text).map(drop);
    if text.0.len() > MAX_TEXT {
        let kind = format!("it makes a text of more than {MAX_TEXT} bytes");
        return Err(TemplateError { line: None, kind, detail: None });
    }
    done.map_err(|e| error(&e))?;
    String::from_utf8(text.0).map_err(|_| TemplateError {
        line: None,
        kind: "the text is not UTF-8".to_owned(),
        detail: None,
    })
}

/// A text that takes no more than it may, and remembers that it was offered more.
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_TEXT {
            self.0.resize(MAX_TEXT + 1, 0);
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn error(error: &Error) -> TemplateError {
    TemplateError {
        line: error.line(),
        kind: error.kind().to_string(),
        detail: error.detail().map(str::to_owned),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_filled_in_stays_one_segment() {
        let templates = Templates::new(Undefined::Tested).percent_encoding();
        let args = json!({"a": "../x?y#z%2e é|", "n": 5});
        let render = |source: &str| templates.render_source(source, &[("args", &args)]);
        let path = render("/items:x/{{ args.a }}/{{ args.n }}/{{ args.a | safe }}").unwrap();
        let a = "..%2Fx%3Fy%23z%252e%20%C3%A9%7C";
        assert_eq!(path, format!("/items:x/{a}/5/{a}"));
        assert!(render("/{{ args.b }}").is_err());
    }

    #[test]
    fn what_is_rendered_has_an_end() {
        let templates = Templates::new(Undefined::Strict);
        let x = json!("x".repeat(10_000));
        let render = |source: &str| templates.render_source(source, &[("x", &x)]);
        assert_eq!(render("{{ x|length }}").unwrap(), "10000");
        let long = render("{% for i in range(1000) %}{{ x }}{% endfor %}").unwrap_err();
        assert!(long.kind.contains("more than 4194304 bytes"), "{long:?}");
        assert!(
            render("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}")
                .is_err()
        );
        for (source, name) in
            [("{{ y }}", "y"), ("{{ y.z }}", "y"), ("a\n{{ x.a.b | upper }}", "x.a")]
        {
            let undefined = render(source).unwrap_err().detail.unwrap_or_default();
            assert!(undefined.contains(&format!("`{name}` is undefined")), "{source}: {undefined}");
        }
        assert!(render(&"x".repeat(MAX_SOURCE + 1)).is_err());
        assert!(
            render(&format!("{{{{ {}1{} }}}}", "(".repeat(50_000), ")".repeat(50_000))).is_err()
        );
    }
}
