//! JSON Schemas of any author: bounded before they are compiled, and validated with a budget of
//! steps, time and stack that fails closed.
//!
//! A schema of an operator may be recursive and choose between branches, so that a few hundred
//! bytes of input can cost exponential work; a schema of a caller may do so on purpose. Every access
//! of the library to a value is therefore counted ([`meter`]). A validation that exceeds its budget
//! is abandoned, and its result counts as undecided.

mod form;
mod meter;

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use jsonschema::error::ValidationErrorKind;
use jsonschema::{Draft, PatternOptions, Validator};
use parking_lot::Mutex;
use serde_json::Value;

use super::pattern::Author;
use super::text::{MAX_REPEATED, shortened};
use super::{Refused, off_worker, on_large_stack};
use meter::{Budget, Metered, Node, metered};

pub use form::{MAX_CALLER_BYTES, MAX_CALLER_PATTERNS, TABLES, VALUES, patterns};

/// The budget of the first attempt on the current thread: well under a millisecond.
const QUICK: Budget = Budget { steps: 2_000, time: Duration::from_millis(5), stack: 128 * 1024 };
/// The budget of a validation.
const FULL: Budget =
    Budget { steps: 2_000_000, time: Duration::from_secs(2), stack: 24 * 1024 * 1024 };
/// The budget of the search for errors, each of which may allocate.
const ERRORS: Budget =
    Budget { steps: 10_000, time: Duration::from_secs(1), stack: 24 * 1024 * 1024 };
/// Bytes of the cache that matching a pattern builds.
const MAX_CACHE: usize = 64 * 1024;
/// Values of an `enum` that a fault lists, and their bytes.
const MAX_CHOICES: usize = 20;
const MAX_LISTED: usize = 500;
/// Schemas of callers that are kept compiled.
const KEPT: usize = 32;

static OF_CALLERS: LazyLock<Mutex<HashMap<String, Arc<Schema>>>> = LazyLock::new(Mutex::default);

/// A compiled schema.
#[derive(Debug)]
pub struct Schema {
    validator: Validator<Metered>,
    /// Whether a validation is first tried on the current thread, because no single step can take long.
    is_quick: bool,
}

/// Something in a value that a schema does not accept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The position in the value: a JSON pointer, shortened like all repeated text.
    pub pointer: String,
    /// The message, with the value if it is short.
    pub message: String,
    /// The same without the value.
    pub masked: String,
}

/// Why a value is not accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rejected {
    /// The first few faults, and whether there are more.
    Faults(Vec<Fault>, bool),
    /// It does not match, but finding the faults would exceed the budget.
    Somewhere,
    /// The validation would exceed the budget.
    Undecided,
}

/// The message for a value whose validation exceeded the budget.
pub const UNDECIDED: &str = "cannot be decided: checking it against the schema takes more steps than a validation may; nest it less";
/// The message for a value that does not match, if its faults cannot be listed.
pub const SOMEWHERE: &str =
    "does not match the schema, in more ways than can be listed; nest it less to see them";

impl Rejected {
    /// The faults; a verdict on the value as a whole is one too.
    pub fn faults(self) -> Vec<Fault> {
        let whole = |message: &str| {
            let (message, masked) = (message.to_owned(), message.to_owned());
            vec![Fault { pointer: String::new(), message, masked }]
        };
        match self {
            Self::Faults(faults, _) => faults,
            Self::Somewhere => whole(SOMEWHERE),
            Self::Undecided => whole(UNDECIDED),
        }
    }
}

impl Schema {
    /// Compiles a JSON Schema 2020-12. References to other documents are refused, and so are
    /// patterns that cannot be matched in linear time.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn compile(schema: &Value, author: Author) -> Result<Self, Refused> {
        Self::compiled(schema, author, Some(Draft::Draft202012))
    }

    /// The schema of a tool's arguments, in the draft that it names.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn of_tool(schema: &Value) -> Result<Self, Refused> {
        Self::compiled(schema, Author::Operator, None)
    }

    fn compiled(schema: &Value, author: Author, draft: Option<Draft>) -> Result<Self, Refused> {
        form::check(schema, author)?;
        let has_patterns = form::patterns(schema) > 0;
        let counted = form::counted(schema);
        let build = || build(&counted, draft, author);
        let outcome = off_worker(|| on_large_stack(build));
        let validator =
            outcome.unwrap_or_else(|| Err(Refused("is nested too deep in itself".to_owned())))?;
        Ok(Self { validator, is_quick: author == Author::Operator || !has_patterns })
    }

    /// A schema of a caller, compiled now or taken from a cache.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn of_caller(schema: &Value) -> Result<Arc<Self>, Refused> {
        form::check(schema, Author::Caller)?;
        let key = schema.to_string();
        let kept = || OF_CALLERS.lock();
        if let Some(known) = kept().get(&key) {
            return Ok(Arc::clone(known));
        }
        let compiled = Arc::new(Self::compile(schema, Author::Caller)?);
        let mut kept = kept();
        if kept.len() >= KEPT {
            kept.clear();
        }
        kept.insert(key, Arc::clone(&compiled));
        Ok(compiled)
    }

    /// Checks whether a value matches; lists at most `most` faults.
    ///
    /// # Errors
    /// [`Rejected`].
    pub fn check(&self, value: &Value, most: usize) -> Result<(), Rejected> {
        let is_valid = |validator: &Validator<Metered>| validator.is_valid(Node(value));
        match self.within(FULL, is_valid) {
            Some(true) => return Ok(()),
            Some(false) => {}
            None => return Err(Rejected::Undecided),
        }
        let faults = self.within(ERRORS, |validator| {
            let mut errors = validator.iter_errors(Node(value));
            let faults: Vec<Fault> =
                errors.by_ref().take(most).map(|error| fault(&error)).collect();
            (faults, errors.next().is_some())
        });
        Err(match faults {
            Some((faults, more)) if !faults.is_empty() => Rejected::Faults(faults, more),
            _ => Rejected::Somewhere,
        })
    }

    /// Validates on the current thread if that is quick, otherwise on a separate large stack, without blocking other
    /// tasks of the worker.
    fn within<T: Send>(
        &self,
        budget: Budget,
        work: impl Fn(&Validator<Metered>) -> T + Sync,
    ) -> Option<T> {
        let quickly = self.is_quick.then(|| metered(QUICK, || work(&self.validator)));
        quickly.flatten().or_else(|| {
            off_worker(|| on_large_stack(|| metered(budget, || work(&self.validator)))).flatten()
        })
    }
}

/// Whether the root of a schema allows objects, as far as its type says.
pub fn allows_objects(schema: &Value) -> bool {
    match schema.get("type") {
        Some(Value::Array(types)) => types.iter().any(|kind| kind == "object"),
        Some(kind) => kind == "object",
        None => *schema != Value::Bool(false),
    }
}

/// Bytes of a compiled pattern of a schema. One `\w` of Unicode takes 50 KiB.
fn max_program(author: Author) -> usize {
    match author {
        Author::Operator => 256 * 1024,
        Author::Caller => 64 * 1024,
    }
}

fn build(
    schema: &Value,
    draft: Option<Draft>,
    author: Author,
) -> Result<Validator<Metered>, Refused> {
    let patterns =
        PatternOptions::regex().size_limit(max_program(author)).dfa_size_limit(MAX_CACHE);
    let mut options = jsonschema::options_for::<Metered>().with_pattern_options(patterns);
    if let Some(draft) = draft {
        options = options.with_draft(draft);
    }
    options.build(schema).map_err(|error| {
        if matches!(error.kind(), ValidationErrorKind::Referencing(_)) {
            return Refused("has a $ref that leads nowhere; references to other documents are not followed".to_owned());
        }
        let inside = shortened(error.instance_path().as_str());
        let inside = if inside.is_empty() { inside } else { format!("at {inside}: ") };
        if matches!(error.kind(), ValidationErrorKind::Format { format } if format == "regex") {
            let pattern = shortened(&error.instance().to_string());
            return Refused(format!("{inside}{pattern} is not a pattern that can be matched in linear time (without look-around and back-references), or is larger than {} bytes when compiled", max_program(author)));
        }
        Refused(format!("is not a JSON Schema: {inside}{}", brief(&error)))
    })
}

fn fault(error: &jsonschema::ValidationError<'_>) -> Fault {
    let masked = || shortened(&error.masked().to_string());
    Fault {
        pointer: shortened(error.instance_path().as_str()),
        message: brief(error),
        masked: choices(error)
            .map_or_else(masked, |choices| format!("value is not one of {choices}")),
    }
}

/// All values of an `enum`, unless there are too many; the library would name only a few.
fn choices(error: &jsonschema::ValidationError<'_>) -> Option<String> {
    let ValidationErrorKind::Enum { options } = error.kind() else { return None };
    let options = options.as_array()?;
    if options.len() > MAX_CHOICES {
        return None;
    }
    let listed = options.iter().map(Value::to_string).collect::<Vec<_>>().join(", ");
    (listed.len() <= MAX_LISTED).then_some(listed)
}

/// The library's message, with the value if it is short.
fn brief(error: &jsonschema::ValidationError<'_>) -> String {
    if let Some(choices) = choices(error) {
        let value = error.instance().to_string();
        let value = if value.len() > MAX_REPEATED { "value" } else { &value };
        return format!("{value} is not one of {choices}");
    }
    let full = error.to_string();
    if full.chars().nth(MAX_REPEATED).is_none() {
        return full;
    }
    shortened(&error.masked().to_string())
}

#[cfg(test)]
#[path = "schema_tests.rs"]
mod tests;
