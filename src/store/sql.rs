//! Statements with named parameters, and their rows: the same for both databases.
//!
//! A statement is written once. `:name` is a parameter, and `{name}` a fragment that the databases spell
//! differently; [`Query::render`] translates both for a database. [`Param`] and [`Field`] convert values and
//! columns. The columns of the tables are in [`super::tables`].

mod field;

use std::borrow::Cow;
use std::fmt::Write;
use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::sqlite::SqliteRow;
use sqlx::{ColumnIndex, Decode, Row as _, Type, TypeInfo, ValueRef};
use uuid::Uuid;

use super::StoreError;
use crate::clock;

pub(super) use field::{Field, Labels, Param, json};

/// The SQL dialect of a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    Postgres,
    Sqlite,
}

/// The type of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Int,
    Flag,
    Text,
    /// An object of strings that queries search: `jsonb` in PostgreSQL, text in SQLite.
    Labels,
    Id,
    Time,
    Bytes,
}

/// The value of a parameter.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Int(Option<i64>),
    Flag(Option<bool>),
    Text(Option<String>),
    Id(Option<Uuid>),
    Time(Option<DateTime<Utc>>),
    Bytes(Option<Vec<u8>>),
    /// A duration that is added to a time.
    Span(Duration),
    /// The right side of `IN`, as ids.
    Ids(Vec<Uuid>),
    /// The right side of `IN`, as texts.
    Texts(Vec<String>),
    /// The right side of `IN`, as numbers.
    Ints(Vec<i64>),
}

/// A column by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Column {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
}

/// A row of either database.
pub(super) enum Row {
    Postgres(PgRow),
    Sqlite(SqliteRow),
}

/// A statement with its parameters.
#[derive(Debug, Clone)]
pub(super) struct Query {
    template: Cow<'static, str>,
    values: Vec<(Cow<'static, str>, Value)>,
}

/// A statement in a dialect, with its values in the order of the parameter numbers.
pub(super) struct Rendered {
    pub(super) text: String,
    pub(super) values: Vec<Value>,
}

impl Value {
    pub(super) fn null(kind: Kind) -> Self {
        match kind {
            Kind::Int => Self::Int(None),
            Kind::Flag => Self::Flag(None),
            Kind::Text | Kind::Labels => Self::Text(None),
            Kind::Id => Self::Id(None),
            Kind::Time => Self::Time(None),
            Kind::Bytes => Self::Bytes(None),
        }
    }
}

impl Query {
    pub(super) fn new(template: impl Into<Cow<'static, str>>) -> Self {
        Self { template: template.into(), values: Vec::new() }
    }

    #[cfg(test)]
    pub(super) fn template(&self) -> &str {
        &self.template
    }

    /// The same statement with a text replaced by another one.
    #[cfg(test)]
    pub(super) fn replaced(mut self, text: &str, other: &str) -> Self {
        self.template = self.template.replace(text, other).into();
        self
    }

    /// Gives the parameter `:name` its value.
    pub(super) fn bind(mut self, name: impl Into<Cow<'static, str>>, value: impl Param) -> Self {
        self.values.push((name.into(), value.value()));
        self
    }

    pub(super) fn bind_value(mut self, name: &'static str, value: Value) -> Self {
        self.values.push((name.into(), value));
        self
    }

    /// Puts a text in front of the statement.
    pub(super) fn prefixed_with(mut self, text: &str) -> Self {
        self.template.to_mut().insert_str(0, text);
        self
    }

    pub(super) fn push(mut self, text: &str) -> Self {
        self.template.to_mut().push_str(text);
        self
    }

    /// The same statement, followed by another one.
    pub(super) fn followed_by(mut self, other: Self) -> Self {
        self.values.extend(other.values);
        self.push(&other.template)
    }

    /// Adds a condition if its one parameter has a value.
    pub(super) fn and(
        self,
        condition: &str,
        name: &'static str,
        value: Option<impl Param>,
    ) -> Self {
        match value {
            Some(value) => self.push(" AND ").push(condition).bind(name, value),
            None => self,
        }
    }

    /// # Errors
    /// [`StoreError::Failed`] for a parameter without a value and an unknown fragment.
    pub(super) fn render(self, dialect: Dialect) -> Result<Rendered, StoreError> {
        let mut text = String::with_capacity(self.template.len() + 64);
        let mut names: Vec<Cow<'static, str>> = Vec::new();
        let mut values = Vec::new();
        let mut given = self.values;
        let mut rest = &*self.template;
        while let Some(at) = rest.find(['\'', ':', '{']) {
            text.push_str(&rest[..at]);
            let (mark, after) = rest[at..].split_at(1);
            rest = after;
            if mark == "'" {
                let end = rest.find('\'').map_or(rest.len(), |end| end + 1);
                let _ = write!(text, "'{}", &rest[..end]);
                rest = &rest[end..];
            } else if mark == "{" {
                let (name, after) = rest.split_once('}').unwrap_or((rest, ""));
                rest = after;
                match dialect.fragment(name) {
                    Some(fragment) => text.push_str(fragment),
                    None if ["now", "nanos"].contains(&name) => {
                        let micros = clock::now().timestamp_micros();
                        let factor = if name == "now" { 1 } else { 1000 };
                        values.push(Value::Int(Some(micros * factor)));
                        names.push(Cow::Borrowed(""));
                        let _ = write!(text, "${}", values.len());
                    }
                    None => return Err(wrong("fragment", name)),
                }
            } else if let Some(after) = rest.strip_prefix(':') {
                text.push_str("::");
                rest = after;
            } else {
                let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                let (name, after) = rest.split_at(end.unwrap_or(rest.len()));
                rest = after;
                let known = names.iter().position(|known| known == name);
                let number = if let Some(position) = known {
                    position + 1
                } else {
                    let index = given.iter().position(|(given, _)| given == name);
                    let index = index.ok_or_else(|| wrong("parameter", name))?;
                    let (name, value) = given.swap_remove(index);
                    names.push(name);
                    values.push(value);
                    values.len()
                };
                dialect.parameter(&mut text, number, &values[number - 1]);
            }
        }
        text.push_str(rest);
        Ok(Rendered { text, values })
    }
}

fn wrong(what: &str, name: &str) -> StoreError {
    StoreError::Failed(format!("a statement has an unknown {what} {name:?}"))
}

impl Dialect {
    /// The SQL text of a fragment; `None` if it is unknown, and for the time in SQLite, which is this process's clock.
    fn fragment(self, name: &str) -> Option<&'static str> {
        let (postgres, sqlite) = match name {
            "now" | "nanos" if self == Self::Sqlite => return None,
            "now" => ("clock_timestamp()", ""),
            // Since 1970.
            "nanos" => ("(extract(epoch FROM clock_timestamp()) * 1000000000)::bigint", ""),
            // Locks rows before a decision on them; SQLite has only one writer.
            "for_update" => (" FOR UPDATE", ""),
            "skip_locked" => (" FOR UPDATE SKIP LOCKED", ""),
            // Takes the lock for closing stretches of the audit log until the end of the transaction; false if
            // another transaction holds it.
            "try_audit" => ("pg_try_advisory_xact_lock(7411)", "1"),
            // Takes the lock for deleting ended runs.
            "try_retention" => ("pg_try_advisory_xact_lock(7413)", "1"),
            // The overrides of a request, without large parts.
            "short_overrides" => (
                "CASE WHEN length(runs.overrides) > 4096 \
                 THEN CAST(CAST(runs.overrides AS jsonb) - 'client_tools' AS text) ELSE runs.overrides END",
                "CASE WHEN length(runs.overrides) > 4096 \
                 THEN json_remove(runs.overrides, '$.client_tools') ELSE runs.overrides END",
            ),
            // Prevents SQLite from using an index on the column that follows.
            "not_indexed" => ("", "+"),
            "least" => ("least", "min"),
            "greatest" => ("greatest", "max"),
            "json_array" => ("json_agg", "json_group_array"),
            "hour" => (
                "date_trunc('hour', r.created_at, 'UTC')",
                "r.created_at / 3600000000 * 3600000000",
            ),
            "day_of_hour" => {
                ("date_trunc('day', u.hour, 'UTC')", "u.hour / 86400000000 * 86400000000")
            }
            "day" => ("(r.created_at AT TIME ZONE 'UTC')::date", "(r.created_at / 86400000000)"),
            "day_name" => {
                ("to_char(u.day, 'YYYY-MM-DD')", "strftime('%Y-%m-%d', u.day * 86400, 'unixepoch')")
            }
            _ => return None,
        };
        Some(if self == Self::Postgres { postgres } else { sqlite })
    }

    fn parameter(self, text: &mut String, number: usize, value: &Value) {
        let is_list = matches!(value, Value::Ids(_) | Value::Texts(_) | Value::Ints(_));
        let _ = match (self, value) {
            (Self::Postgres, _) if is_list => {
                // `IN` of an array.
                text.truncate(text.trim_end_matches("IN ").len());
                write!(text, "= ANY(${number})")
            }
            (Self::Sqlite, _) if is_list => {
                write!(text, "(SELECT value FROM json_each(${number}))")
            }
            (Self::Postgres, Value::Span(_)) => {
                write!(text, "(${number} * interval '1 microsecond')")
            }
            _ => write!(text, "${number}"),
        };
    }
}

impl Row {
    fn get<'r, P, S>(&'r self, column: &str) -> Result<Result<Option<P>, Option<S>>, StoreError>
    where
        P: Decode<'r, sqlx::Postgres> + Type<sqlx::Postgres>,
        S: Decode<'r, sqlx::Sqlite> + Type<sqlx::Sqlite>,
        for<'c> &'c str: ColumnIndex<PgRow> + ColumnIndex<SqliteRow>,
    {
        match self {
            Self::Postgres(row) => row.try_get(column).map(Ok),
            Self::Sqlite(row) => row.try_get(column).map(Err),
        }
        .map_err(|error| unreadable(column, error))
    }

    fn int(&self, column: &str) -> Result<Option<i64>, StoreError> {
        Ok(self.get::<i64, i64>(column)?.unwrap_or_else(|other| other))
    }

    fn flag(&self, column: &str) -> Result<Option<bool>, StoreError> {
        Ok(self.get::<bool, i64>(column)?.unwrap_or_else(|int| int.map(|int| int != 0)))
    }

    fn bytes(&self, column: &str) -> Result<Option<Vec<u8>>, StoreError> {
        Ok(self.get::<Vec<u8>, Vec<u8>>(column)?.unwrap_or_else(|other| other))
    }

    fn id(&self, column: &str) -> Result<Option<Uuid>, StoreError> {
        self.get::<Uuid, &str>(column)?.or_else(|text| {
            text.map(Uuid::parse_str).transpose().map_err(|error| unreadable(column, error))
        })
    }

    fn time(&self, column: &str) -> Result<Option<DateTime<Utc>>, StoreError> {
        Ok(self
            .get::<DateTime<Utc>, i64>(column)?
            .unwrap_or_else(|micros| micros.and_then(DateTime::from_timestamp_micros)))
    }

    fn text(&self, column: &str) -> Result<Option<String>, StoreError> {
        if let Self::Postgres(row) = self {
            let value = row.try_get_raw(column).map_err(|error| unreadable(column, error))?;
            if value.type_info().name() == "JSONB" && !value.is_null() {
                let json: &serde_json::value::RawValue =
                    row.try_get(column).map_err(|error| unreadable(column, error))?;
                return Ok(Some(json.get().to_owned()));
            }
        }
        Ok(self.get::<String, String>(column)?.unwrap_or_else(|other| other))
    }

    /// A column that has a value in every row.
    pub(super) fn read<T: Field>(&self, column: &str) -> Result<T, StoreError> {
        T::read(self, column)?.ok_or_else(|| unreadable(column, "it is absent"))
    }
}

fn unreadable(column: &str, why: impl std::fmt::Display) -> StoreError {
    StoreError::Failed(format!("the column {column} cannot be read: {why}"))
}

#[cfg(test)]
#[path = "sql_tests.rs"]
mod tests;
