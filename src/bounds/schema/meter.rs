//! JSON values that count every access to them.
//!
//! The library reads values through a trait, and this implementation counts. A validation that has
//! used up its budget unwinds to [`metered`] without calling the panic hook: the library offers no
//! other way to abort.

use std::any::Any;
use std::borrow::Cow;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use jsonschema::JsonType;
use jsonschema::json::{self, Json, NodeIdentity};
use serde_json::{Map, Number, Value};

/// What one validation may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Budget {
    /// Accesses to values; long texts and arrays cost several steps.
    pub(super) steps: u64,
    pub(super) time: Duration,
    /// Bytes of stack.
    pub(super) stack: usize,
}

/// A budget in use.
#[derive(Clone, Copy)]
struct Meter {
    left: u64,
    until: Instant,
    /// The stack pointer, about, where it began; and how far it may go from there.
    base: usize,
    stack: usize,
}

thread_local! {
    static METER: Cell<Option<Meter>> = const { Cell::new(None) };
}

/// The payload of the unwinding.
struct UsedUp;

/// Runs `work` within a budget; `None` if it ran out.
pub(super) fn metered<T>(budget: Budget, work: impl FnOnce() -> T) -> Option<T> {
    let meter = Meter {
        left: budget.steps,
        until: Instant::now() + budget.time,
        base: stack_pointer(),
        stack: budget.stack,
    };
    let outer = METER.replace(Some(meter));
    let done = catch_unwind(AssertUnwindSafe(work));
    METER.set(outer);
    done.map_err(|cause: Box<dyn Any + Send>| {
        if !cause.is::<UsedUp>() {
            tracing::error!("a schema validation failed");
        }
    })
    .ok()
}

/// Subtracts an access from the budget.
fn pay(price: usize) {
    let Some(mut meter) = METER.get() else { return };
    let price = price as u64;
    // The clock is looked at now and then only.
    let is_late =
        (meter.left ^ meter.left.saturating_sub(price)) >> 8 != 0 && Instant::now() >= meter.until;
    if meter.left < price || is_late || meter.base.abs_diff(stack_pointer()) > meter.stack {
        resume_unwind(Box::new(UsedUp));
    }
    meter.left -= price;
    METER.set(Some(meter));
}

fn stack_pointer() -> usize {
    let here = 0_u8;
    std::ptr::from_ref(&here).addr()
}

/// Steps that a text costs.
fn of_text(text: &str) -> usize {
    1 + text.len() / 32
}

/// Values in a value, itself included.
fn size(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(size).sum::<usize>(),
        Value::Object(members) => 1 + members.values().map(size).sum::<usize>(),
        Value::String(text) => of_text(text),
        _ => 1,
    }
}

/// The representation.
pub(super) struct Metered;

/// A value.
#[derive(Clone, Copy)]
pub(super) struct Node<'a>(pub(super) &'a Value);

pub(super) struct Members<'a>(&'a Map<String, Value>);

pub(super) struct Elements<'a>(&'a [Value]);

impl Json for Metered {
    type Node<'a> = Node<'a>;
    type PreparedKey = String;
    type StringBuffer = Value;

    fn prepare_key(key: &str) -> String {
        key.to_owned()
    }

    fn with_string_node<T>(buffer: &mut Value, text: &str, f: impl FnOnce(Node<'_>) -> T) -> T {
        pay(of_text(text));
        *buffer = Value::String(text.to_owned());
        f(Node(buffer))
    }
}

impl<'a> json::Node<'a, Metered> for Node<'a> {
    type Object = Members<'a>;
    type Array = Elements<'a>;
    type Number = &'a Number;

    fn as_object(&self) -> Option<Members<'a>> {
        pay(1);
        self.0.as_object().map(Members)
    }

    fn as_array(&self) -> Option<Elements<'a>> {
        pay(1);
        self.0.as_array().map(|items| Elements(items))
    }

    fn as_string(&self) -> Option<Cow<'a, str>> {
        let text = self.0.as_str();
        pay(text.map_or(1, of_text));
        text.map(Cow::Borrowed)
    }

    fn as_number(&self) -> Option<&'a Number> {
        pay(1);
        self.0.as_number()
    }

    fn as_boolean(&self) -> Option<bool> {
        pay(1);
        self.0.as_bool()
    }

    fn is_null(&self) -> bool {
        pay(1);
        self.0.is_null()
    }

    fn json_type(&self) -> JsonType {
        pay(1);
        match self.0 {
            Value::Null => JsonType::Null,
            Value::Bool(_) => JsonType::Boolean,
            Value::Number(_) => JsonType::Number,
            Value::String(_) => JsonType::String,
            Value::Array(_) => JsonType::Array,
            Value::Object(_) => JsonType::Object,
        }
    }

    fn equals_value(&self, expected: &Value) -> bool {
        pay(size(expected));
        json::Node::<json::SerdeJson>::equals_value(&self.0, expected)
    }

    fn to_value(&self) -> Cow<'a, Value> {
        Cow::Borrowed(self.0)
    }

    fn identity(&self) -> Option<NodeIdentity> {
        Some(NodeIdentity::new(std::ptr::from_ref(self.0).addr()))
    }
}

impl<'a> json::Object<'a, Metered> for Members<'a> {
    type Node = Node<'a>;
    type MemberName = &'a str;
    type MembersIter = MembersIter<'a>;

    fn len(&self) -> usize {
        self.0.len()
    }

    fn get(&self, key: &String) -> Option<Node<'a>> {
        pay(1);
        self.0.get(key).map(Node)
    }

    fn members(&self) -> MembersIter<'a> {
        MembersIter(self.0.iter())
    }
}

impl<'a> json::Array<'a, Metered> for Elements<'a> {
    type Node = Node<'a>;
    type ElementsIter = ElementsIter<'a>;

    fn len(&self) -> usize {
        self.0.len()
    }

    fn elements(&self) -> ElementsIter<'a> {
        ElementsIter(self.0.iter())
    }

    fn is_unique(&self) -> bool {
        pay(self.0.iter().map(size).sum());
        json::Array::<json::SerdeJson>::is_unique(&self.0)
    }
}

pub(super) struct MembersIter<'a>(serde_json::map::Iter<'a>);

impl<'a> Iterator for MembersIter<'a> {
    type Item = (&'a str, Node<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let (name, value) = self.0.next()?;
        pay(of_text(name));
        Some((name, Node(value)))
    }
}

pub(super) struct ElementsIter<'a>(std::slice::Iter<'a, Value>);

impl<'a> Iterator for ElementsIter<'a> {
    type Item = Node<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        let value = self.0.next()?;
        pay(1);
        Some(Node(value))
    }
}
