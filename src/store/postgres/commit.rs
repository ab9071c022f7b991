//! A batch as one statement: one round trip, one implicit transaction.
//!
//! The statement is put together from the steps that a batch needs, because PostgreSQL prepares
//! every part of a plan, used or not, each time it runs; a batch has one of a dozen shapes, each
//! prepared once per connection. Rows are arrays, a column each, that `unnest` walks side by side
//! in a select list: in `FROM` each array would be spooled on its own.

use std::collections::HashSet;
use std::fmt::Write;

use sqlx::postgres::{PgArguments, PgBindIterExt, PgConnection};
use sqlx::{Arguments, AssertSqlSafe, Row};
use uuid::Uuid;

use crate::store::StoreError;
use crate::store::commit::{Batch, Step};
use crate::store::sql::{Kind, Value};

/// Writes a batch, in the transaction of the connection or in its own; the runs that passed.
pub(super) async fn write(
    connection: &mut PgConnection,
    batch: &Batch,
) -> Result<HashSet<Uuid>, StoreError> {
    let mut arguments = PgArguments::default();
    for step in batch.fence.iter().chain(&batch.rest) {
        bind(&mut arguments, step).map_err(sqlx::Error::Encode)?;
    }
    let statement = sqlx::query_with(AssertSqlSafe(compose(batch)), arguments);
    let rows = statement.fetch_all(connection).await?;
    rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
}

fn compose(batch: &Batch) -> String {
    let mut sql = String::from("WITH ");
    let mut bound = 0;
    for step in &batch.fence {
        add(&mut sql, &mut bound, step, "");
    }
    let passed: Vec<String> =
        batch.fence.iter().map(|step| format!("SELECT id FROM {}", step.name)).collect();
    let _ = write!(sql, "passed AS ({}), ", passed.join(" UNION ALL "));
    for step in &batch.rest {
        // `IS TRUE` keeps it a hashed subplan, where a plain `IN` would become a join.
        add(&mut sql, &mut bound, step, "(w.run_id IN (SELECT id FROM passed)) IS TRUE");
    }
    sql.truncate(sql.len() - 2);
    sql.push_str(" SELECT id FROM passed");
    sql
}

fn add(sql: &mut String, bound: &mut usize, step: &Step, fence: &str) {
    let name = if fence.is_empty() { step.name.to_owned() } else { format!("{}_rows", step.name) };
    let _ = write!(sql, "{name} AS ({} (SELECT ", step.head);
    for (index, column) in step.columns.iter().enumerate() {
        *bound += 1;
        let comma = if index > 0 { ", " } else { "" };
        let (kind, cast) = match column.kind {
            Kind::Int => ("bigint", ""),
            Kind::Flag => ("boolean", ""),
            Kind::Text => ("text", ""),
            Kind::Labels => ("text", "::jsonb"),
            Kind::Id => ("uuid", ""),
            Kind::Time => ("timestamptz", ""),
            Kind::Bytes => ("bytea", ""),
        };
        let _ = write!(sql, "{comma}unnest(${bound}::{kind}[]){cast} AS {}", column.name);
    }
    let conditions: Vec<&str> =
        [step.condition, fence].into_iter().filter(|part| !part.is_empty()).collect();
    let _ = write!(sql, ") AS w WHERE {} {}), ", conditions.join(" AND "), step.tail);
}

/// Binds the rows of a step column by column.
fn bind(arguments: &mut PgArguments, step: &Step) -> Result<(), sqlx::error::BoxDynError> {
    macro_rules! array {
        ($index:ident, $kind:ident, $map:expr) => {
            arguments.add(
                step.rows
                    .iter()
                    .map(|row| match row.get($index) {
                        Some(Value::$kind(value)) => $map(value),
                        _ => None,
                    })
                    .bind_iter(),
            )
        };
    }
    for (index, column) in step.columns.iter().enumerate() {
        match column.kind {
            Kind::Int => array!(index, Int, |value: &Option<i64>| *value),
            Kind::Flag => array!(index, Flag, |value: &Option<bool>| *value),
            Kind::Text | Kind::Labels => array!(index, Text, Option::<String>::as_deref),
            Kind::Id => array!(index, Id, |value: &Option<Uuid>| *value),
            Kind::Time => array!(index, Time, |value: &Option<_>| *value),
            Kind::Bytes => array!(index, Bytes, Option::<Vec<u8>>::as_deref),
        }?;
    }
    Ok(())
}
