//! Conversion between our types and columns.

use std::borrow::Cow;
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value as Json;
use uuid::Uuid;

use super::{Kind, Row, StoreError, Value, unreadable};
use crate::event::{AuditAction, InputRequired, Resolution, WaitKind};
use crate::run::{Consumption, RunError, RunKind, RunStatus};
use crate::store::{ApprovalStatus, DeliveryStatus};

/// A type that can be bound as a parameter.
pub(in crate::store) trait Param: Sized {
    const KIND: Kind;
    fn value(self) -> Value;
}

/// A type that can also be read from a column; `None` if the column is NULL.
pub(in crate::store) trait Field: Param {
    fn read(row: &Row, column: &str) -> Result<Option<Self>, StoreError>;
}

impl<T: Param> Param for Option<T> {
    const KIND: Kind = T::KIND;
    fn value(self) -> Value {
        self.map_or_else(|| Value::null(T::KIND), T::value)
    }
}

impl<T: Field> Field for Option<T> {
    fn read(row: &Row, column: &str) -> Result<Option<Self>, StoreError> {
        T::read(row, column).map(Some)
    }
}

macro_rules! plain {
    ($($type:ty: $kind:ident by $getter:ident,)+) => {$(
        impl Param for $type {
            const KIND: Kind = Kind::$kind;
            fn value(self) -> Value {
                Value::$kind(Some(self))
            }
        }
        impl Field for $type {
            fn read(row: &Row, column: &str) -> Result<Option<Self>, StoreError> {
                row.$getter(column)
            }
        }
    )+};
}

plain! {
    i64: Int by int,
    bool: Flag by flag,
    Uuid: Id by id,
    DateTime<Utc>: Time by time,
    Vec<u8>: Bytes by bytes,
}

macro_rules! counts {
    ($($type:ty),+) => {$(
        impl Param for $type {
            const KIND: Kind = Kind::Int;
            fn value(self) -> Value {
                Value::Int(Some(i64::try_from(self).unwrap_or(i64::MAX)))
            }
        }
        impl Field for $type {
            fn read(row: &Row, column: &str) -> Result<Option<Self>, StoreError> {
                let count = row.int(column)?.map(Self::try_from).transpose();
                count.map_err(|error| unreadable(column, error))
            }
        }
    )+};
}

counts!(u32, u64);

/// PostgreSQL text cannot contain NUL characters, which a model may write. The journal keeps them, escaped.
fn clean(text: Cow<'_, str>) -> String {
    if text.contains('\0') { text.replace('\0', "\u{FFFD}") } else { text.into_owned() }
}

macro_rules! texts {
    ($($type:ty),+) => {$(
        impl Param for $type {
            const KIND: Kind = Kind::Text;
            fn value(self) -> Value {
                Value::Text(Some(clean(self.into())))
            }
        }
    )+};
}

texts!(String, &str, &String, Cow<'_, str>);

impl Field for String {
    fn read(row: &Row, column: &str) -> Result<Option<Self>, StoreError> {
        row.text(column)
    }
}

macro_rules! names {
    ($($type:ty),+) => {$(
        impl Param for $type {
            const KIND: Kind = Kind::Text;
            fn value(self) -> Value {
                Value::Text(Some(self.as_str().to_owned()))
            }
        }
        impl Field for $type {
            fn read(row: &Row, column: &str) -> Result<Option<Self>, StoreError> {
                let Some(name) = row.text(column)? else { return Ok(None) };
                let known = name.parse().ok();
                known.map(Some).ok_or_else(|| unreadable(column, format!("unknown: {name:?}")))
            }
        }
    )+};
}

names!(RunKind, RunStatus, WaitKind, ApprovalStatus, DeliveryStatus, AuditAction);

/// A document as JSON text.
pub(in crate::store) fn json<T: Serialize + ?Sized>(document: &T) -> Result<String, StoreError> {
    serde_json::to_string(document)
        .map_err(|error| StoreError::Failed(format!("a value is not JSON: {error}")))
}

/// Documents are JSON text; one that cannot be written becomes `null`.
macro_rules! documents {
    ($($type:ty $(, absent where $is_empty:expr)?;)+) => {$(
        impl Param for $type {
            const KIND: Kind = Kind::Text;
            fn value(self) -> Value {
                $(if $is_empty(&self) { return Value::Text(None) })?
                Value::Text(Some(json(&self).unwrap_or_else(|_| "null".to_owned())))
            }
        }
        impl Field for $type {
            fn read(row: &Row, column: &str) -> Result<Option<Self>, StoreError> {
                let text = row.text(column)?;
                $(if text.is_none() {
                    let _: fn(&Self) -> bool = $is_empty;
                    return Ok(Some(Self::default()));
                })?
                let document = text.map(|text| serde_json::from_str(&text)).transpose();
                document.map_err(|error| unreadable(column, error))
            }
        }
    )+};
}

documents! {
    Json;
    RunError;
    Resolution;
    InputRequired;
    Vec<Uuid>, absent where Vec::<Uuid>::is_empty;
    Vec<String>, absent where Vec::<String>::is_empty;
    Consumption, absent where Consumption::is_nothing;
}

/// Labels by which runs are found.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Labels(pub Json);

impl Param for Labels {
    const KIND: Kind = Kind::Labels;
    fn value(self) -> Value {
        self.0.value()
    }
}

impl Field for Labels {
    fn read(row: &Row, column: &str) -> Result<Option<Self>, StoreError> {
        Ok(Json::read(row, column)?.map(Self))
    }
}

impl Param for Duration {
    const KIND: Kind = Kind::Int;
    fn value(self) -> Value {
        Value::Span(self)
    }
}

/// The right side of `IN`.
impl Param for &[Uuid] {
    const KIND: Kind = Kind::Id;
    fn value(self) -> Value {
        Value::Ids(self.to_vec())
    }
}

impl Param for &[i64] {
    const KIND: Kind = Kind::Int;
    fn value(self) -> Value {
        Value::Ints(self.to_vec())
    }
}

impl Param for &[String] {
    const KIND: Kind = Kind::Text;
    fn value(self) -> Value {
        Value::Texts(self.to_vec())
    }
}
