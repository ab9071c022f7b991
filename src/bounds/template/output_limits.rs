//! Bounds on the values that expressions of a template create: on the size and nesting of each value,
//! and on all that one rendering creates and writes. Filters whose result may be much larger than
//! their input compute its size before they create it.

#![expect(clippy::needless_pass_by_value, reason = "filters take their arguments by value")]

use std::borrow::Cow;
use std::cell::Cell;
use std::fmt::Write as _;
use std::sync::Arc;

use minijinja::value::{Kwargs, Object, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value, filters};

/// The names of the filters that check a value and that multiply. No template can name them.
pub(super) const CHECK: &str = "@made";
pub(super) const TIMES: &str = "@times";

/// Bytes of one value, approximately those of its text; entries of lists and maps count [`ENTRY`] more.
pub(super) const MAX_VALUE: usize = 4 * 1024 * 1024;
/// Bytes of all values that one rendering creates, plus all that it writes.
pub(super) const MAX_TOTAL: usize = 32 * 1024 * 1024;
/// Nesting depth of lists and maps.
const MAX_NESTING: usize = 128;
/// Bytes of an entry of a list or a map in addition to its value.
const ENTRY: usize = 32;
/// Entries of a list that is created from a text.
const MAX_PARTS: usize = MAX_VALUE / ENTRY;
/// Spaces that a line is indented by.
const MAX_INDENT: usize = 256;
/// Spaces that a level of JSON is indented by.
const MAX_JSON_INDENT: usize = 8;

thread_local! {
    /// Bytes that the current rendering may still create.
    static BUDGET: Cell<usize> = const { Cell::new(0) };
}

/// Text of the template itself.
#[derive(Debug)]
pub(super) struct Raw(pub(super) String);

impl Object for Raw {}

/// Resets the budget at the beginning of a rendering.
pub(super) fn reset() {
    BUDGET.set(MAX_TOTAL);
}

/// Replaces the filters and functions that have no bounds, and removes those that are not needed.
pub(super) fn install(environment: &mut Environment<'_>) {
    environment.set_recursion_limit(80);
    for name in ["chain", "format", "pprint"] {
        environment.remove_filter(name);
    }
    for name in ["debug", "namespace"] {
        environment.remove_global(name);
    }
    environment.add_filter(CHECK, checked);
    environment.add_filter(TIMES, times);
    environment.add_filter("replace", replace);
    environment.add_filter("join", join);
    environment.add_filter("indent", indent);
    environment.add_filter("tojson", tojson);
    environment.add_filter("batch", |state: &State, value: Value, count: usize, fill| {
        check_length(count)?;
        filters::batch(state, value, count, fill)
    });
    environment.add_filter("slice", |state: &State, value: Value, count: usize, fill| {
        check_length(count)?;
        filters::slice(state, value, count, fill)
    });
    environment.add_filter("sum", sum);
    environment.add_filter("lines", |value: &Value| {
        check_length(value.as_str().map_or(0, |text| text.matches('\n').count()))?;
        filters::lines(value)
    });
    environment.add_filter("list", |state: &State, value: Value| {
        check_length(value.as_str().map_or(0, str::len))?;
        filters::list(state, value)
    });
    environment.add_filter("split", split);
    environment
        .set_formatter(|out, _, value| write_value(out, value, &|out, text| out.write_str(text)));
}

/// Writes a value, or the template's own text, as it is.
pub(super) fn write_value(
    out: &mut Output<'_>,
    value: &Value,
    write: &dyn Fn(&mut Output<'_>, &str) -> std::fmt::Result,
) -> Result<(), Error> {
    if let Some(Raw(text)) = value.downcast_object_ref::<Raw>() {
        spend(text.len())?;
        return Ok(out.write_str(text)?);
    }
    if let Some(text) = value.as_str() {
        spend(text.len())?;
        return Ok(write(out, text)?);
    }
    spend(size(value)?)?;
    Ok(write(out, &value.to_string())?)
}

fn too_large() -> Error {
    let why = format!("it makes a value of more than {MAX_VALUE} bytes");
    Error::new(ErrorKind::InvalidOperation, why)
}

/// Subtracts bytes from the budget of the rendering.
fn spend(bytes: usize) -> Result<(), Error> {
    if bytes > MAX_VALUE {
        return Err(too_large());
    }
    let left = BUDGET.get().saturating_sub(bytes);
    BUDGET.set(left);
    if left > 0 {
        return Ok(());
    }
    let why = format!("all that it makes has more than {MAX_TOTAL} bytes");
    Err(Error::new(ErrorKind::InvalidOperation, why))
}

fn check_length(count: usize) -> Result<(), Error> {
    if count <= MAX_PARTS {
        return Ok(());
    }
    let why = format!("it makes a list of more than {MAX_PARTS} entries");
    Err(Error::new(ErrorKind::InvalidOperation, why))
}

/// The size of a value.
fn size(value: &Value) -> Result<usize, Error> {
    let mut room = MAX_VALUE;
    measure(value, MAX_NESTING, &mut room)?;
    Ok(MAX_VALUE - room)
}

fn measure(value: &Value, levels: usize, room: &mut usize) -> Result<(), Error> {
    let own = value.as_bytes().map_or(ENTRY, |bytes| ENTRY + bytes.len());
    *room = room.checked_sub(own).ok_or_else(too_large)?;
    let is_map = value.kind() == ValueKind::Map;
    if !is_map && !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
        return Ok(());
    }
    let Some(levels) = levels.checked_sub(1) else {
        let why = format!("it makes a value of more than {MAX_NESTING} levels");
        return Err(Error::new(ErrorKind::InvalidOperation, why));
    };
    for item in value.try_iter()? {
        measure(&item, levels, room)?;
        if is_map {
            measure(&value.get_item(&item)?, levels, room)?;
        }
    }
    Ok(())
}

/// Checks a value that an expression created. An iterator is read once, and is therefore never nested
/// in another value.
fn checked(value: Value) -> Result<Value, Error> {
    if value.kind() != ValueKind::Iterable {
        spend(size(&value)?)?;
        return Ok(value);
    }
    let mut items = Vec::new();
    for item in value.try_iter()? {
        check_length(items.len() + 1)?;
        items.push(item);
    }
    let items = Value::from(items);
    spend(size(&items)?)?;
    Ok(items)
}

/// The product of two numbers, or a text or a list repeated.
fn times(left: Value, right: Value) -> Result<Value, Error> {
    let is_sequence = |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Iterable)
    };
    let (sequence, count) = match (is_sequence(&left), is_sequence(&right)) {
        (true, _) => (left, right),
        (_, true) => (right, left),
        _ => return product(&left, &right),
    };
    let count = usize::try_from(count)?;
    if let Some(text) = sequence.as_str() {
        spend(text.len().saturating_mul(count))?;
        return Ok(Value::from(text.repeat(count)));
    }
    spend(size(&sequence)?.saturating_mul(count))?;
    let items: Vec<Value> = sequence.try_iter()?.collect();
    let all = std::iter::repeat_n(items, count).flatten();
    Ok(Value::from(all.collect::<Vec<Value>>()))
}

fn product(left: &Value, right: &Value) -> Result<Value, Error> {
    let is_float = |value: &Value| value.is_number() && !value.is_integer();
    if is_float(left) || is_float(right) {
        return Ok(Value::from(f64::try_from(left.clone())? * f64::try_from(right.clone())?));
    }
    let product = i128::try_from(left.clone())?.checked_mul(i128::try_from(right.clone())?);
    let beyond = || Error::new(ErrorKind::InvalidOperation, "the product is too large");
    let product = product.ok_or_else(beyond)?;
    Ok(i64::try_from(product).map_or_else(|_| Value::from(product), Value::from))
}

fn replace(text: Cow<'_, str>, old: Cow<'_, str>, new: Cow<'_, str>) -> Result<String, Error> {
    let count = text.matches(old.as_ref()).count();
    spend(text.len().saturating_add(count.saturating_mul(new.len())))?;
    Ok(text.replace(old.as_ref(), new.as_ref()))
}

fn join(
    values: &Value,
    joiner: Option<Cow<'_, str>>,
    attribute: Option<&str>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let attribute = attribute.or(kwargs.get::<Option<&str>>("attribute")?);
    let joiner = joiner.or(kwargs.get::<Option<Cow<'_, str>>>("d")?).unwrap_or_default();
    kwargs.assert_all_used()?;
    let mut text = String::new();
    for (number, item) in values.try_iter()?.enumerate() {
        let item = match attribute {
            Some(attribute) => filters::attr(&item, &Value::from(attribute))?,
            None => item,
        };
        let bytes = item.as_str().map_or_else(|| size(&item), |text| Ok(text.len()))?;
        if text.len() + joiner.len() + bytes > MAX_VALUE {
            return Err(too_large());
        }
        if number > 0 {
            text.push_str(&joiner);
        }
        match item.as_str() {
            Some(item) => text.push_str(item),
            None => write!(text, "{item}")?,
        }
    }
    spend(text.len())?;
    Ok(text)
}

/// Indents every line except the first and blank ones, unless the arguments include these.
fn indent(
    text: Cow<'_, str>,
    width: Option<usize>,
    first: Option<bool>,
    blank: Option<bool>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let width = width.or(kwargs.get::<Option<usize>>("width")?).unwrap_or(4);
    let first = first.or(kwargs.get::<Option<bool>>("first")?).unwrap_or(false);
    let blank = blank.or(kwargs.get::<Option<bool>>("blank")?).unwrap_or(false);
    kwargs.assert_all_used()?;
    if width > MAX_INDENT {
        let why = format!("a line is indented by more than {MAX_INDENT}");
        return Err(Error::new(ErrorKind::InvalidOperation, why));
    }
    let text = text.strip_suffix('\n').unwrap_or(&text);
    let text = text.strip_suffix('\r').unwrap_or(text);
    spend(text.len().saturating_add((text.matches('\n').count() + 1).saturating_mul(width)))?;
    let margin = " ".repeat(width);
    let lines = text.split('\n').enumerate().map(|(number, line)| {
        let is_blank = line.is_empty() || line == "\r";
        let has_margin = if number == 0 { first } else { blank || !is_blank };
        format!("{}{line}", if has_margin { margin.as_str() } else { "" })
    });
    Ok(lines.collect::<Vec<_>>().join("\n"))
}

fn tojson(value: &Value, indent: Option<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let indent = indent.or(kwargs.get::<Option<Value>>("indent")?);
    let width = indent.as_ref().and_then(|width| usize::try_from(width.clone()).ok());
    if width.is_some_and(|width| width > MAX_JSON_INDENT) {
        let why = format!("JSON is indented by more than {MAX_JSON_INDENT}");
        return Err(Error::new(ErrorKind::InvalidOperation, why));
    }
    spend(size(value)?)?;
    filters::tojson(value, indent, kwargs)
}

/// The sum of numbers. Lists are refused: adding them one by one takes quadratic time.
fn sum(
    state: &State,
    values: Value,
    attribute: Option<&str>,
    start: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let start = start.or(kwargs.get::<Option<Value>>("start")?);
    if start.as_ref().is_some_and(|start| !start.is_number()) {
        return Err(Error::new(ErrorKind::InvalidOperation, "can only sum numbers"));
    }
    filters::sum(state, values, attribute, start, kwargs)
}

fn split(text: &Value, separator: Option<Arc<str>>, most: Option<i64>) -> Result<Value, Error> {
    let count = text.as_str().map_or(0, |text| match separator.as_deref() {
        Some(separator) => text.matches(separator).count(),
        None => text.split_whitespace().count(),
    });
    check_length(count)?;
    filters::split(text, separator, most)
}
