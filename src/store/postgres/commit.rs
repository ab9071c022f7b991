//! Writes a batch as one statement: one round trip, one implicit transaction.
//!
//! The statement contains only the steps that a batch needs, because PostgreSQL initialises every part of a plan
//! each time it runs, even unused ones. There are about a dozen different statements, each prepared once per
//! connection. Rows are passed as one array per column, which `unnest` in a select list expands in parallel; in
//! `FROM`, each array would be spooled separately.

use std::fmt::Write;

use sqlx::postgres::{PgArguments, PgBindIterExt, PgConnection, PgRow};
use sqlx::{Arguments, AssertSqlSafe, Row};
use uuid::Uuid;

use crate::store::StoreError;
use crate::store::batch::{Batch, Cancelling, Passed, Statement, Step};
use crate::store::sql::{Kind, Value};

/// SQLSTATE of a division by zero, which only [`ALL_PASSED`] can cause.
const NOT_ALL_PASSED: &str = "22012";

/// Begins an expression that fails (division by zero) unless every run has passed. The number of runs follows.
const ALL_PASSED: &str = "1 / (CASE WHEN (SELECT count(*) FROM passed) =";

/// Writes a batch as one statement; returns the runs that passed. `None`: some runs do not pass the fence, and
/// nothing is written, because the sums of usage include all runs.
pub(super) async fn write_at_once(
    connection: &mut PgConnection,
    batch: &Batch,
) -> Result<Option<Passed>, StoreError> {
    match run(connection, batch, batch.usage_step(|_| true).as_ref()).await {
        Err(sqlx::Error::Database(error)) if error.code().is_some_and(|c| c == NOT_ALL_PASSED) => {
            Ok(None)
        }
        passed => Ok(Some(passed?)),
    }
}

/// Writes a batch in the transaction of the connection; returns the runs that passed.
pub(super) async fn write(
    connection: &mut PgConnection,
    batch: &Batch,
) -> Result<Passed, StoreError> {
    let passed = run(connection, batch, None).await?;
    if let Some(step) = batch.usage_step(|run| passed.contains_key(run)) {
        let (mut sql, mut arguments) = (String::new(), PgArguments::default());
        bind(&mut arguments, &step).map_err(sqlx::Error::Encode)?;
        add(&mut sql, &mut 0, step.statement, "true");
        sqlx::query_with(AssertSqlSafe(sql), arguments).execute(connection).await?;
    }
    Ok(passed)
}

/// Runs the statement of a batch. With the step `usage`, it fails unless all runs pass.
async fn run(
    connection: &mut PgConnection,
    batch: &Batch,
    usage: Option<&Step>,
) -> Result<Passed, sqlx::Error> {
    let mut arguments = PgArguments::default();
    for step in batch.fence.iter().chain(&batch.rest).chain(usage) {
        bind(&mut arguments, step).map_err(sqlx::Error::Encode)?;
    }
    if usage.is_some() {
        let runs: usize = batch.fence.iter().map(|step| step.rows.len()).sum();
        let runs = i64::try_from(runs).unwrap_or(i64::MAX);
        arguments.add(runs).map_err(sqlx::Error::Encode)?;
    }
    let statement = sqlx::query_with(AssertSqlSafe(compose(batch, usage)), arguments);
    let row = |row: &PgRow| {
        let reason = row.try_get(2)?;
        Ok((row.try_get(0)?, row.try_get::<bool, _>(1)?.then_some(Cancelling { reason })))
    };
    statement.fetch_all(connection).await?.iter().map(row).collect()
}

fn compose(batch: &Batch, usage: Option<&Step>) -> String {
    let mut sql = String::from("WITH ");
    let mut bound = 0;
    for step in &batch.fence {
        let _ = write!(sql, "{} AS (", step.statement.name);
        add(&mut sql, &mut bound, step.statement, "");
        sql.push_str("), ");
    }
    let passed: Vec<String> =
        batch.fence.iter().map(|step| format!("SELECT * FROM {}", step.statement.name)).collect();
    let _ = write!(sql, "passed AS ({})", passed.join(" UNION ALL "));
    for step in &batch.rest {
        let _ = write!(sql, ", {}_rows AS (", step.statement.name);
        // `IS TRUE` keeps it a hashed subplan, where a plain `IN` would become a join.
        add(&mut sql, &mut bound, step.statement, "(w.run_id IN (SELECT id FROM passed)) IS TRUE");
        sql.push(')');
    }
    if let Some(step) = usage {
        let runs = bound + step.statement.columns.len() + 1;
        let _ = write!(sql, ", {}_rows AS (", step.statement.name);
        let condition = format!("{ALL_PASSED} ${runs} THEN 1 ELSE 0 END) = 1");
        add(&mut sql, &mut bound, step.statement, &condition);
        sql.push(')');
    }
    sql.push_str(" SELECT * FROM passed");
    sql
}

/// Adds a statement, for the rows that satisfy both its own condition and this one.
fn add(sql: &mut String, bound: &mut usize, statement: &Statement, condition: &str) {
    let _ = write!(sql, "{} (SELECT ", statement.head);
    for (index, column) in statement.columns.iter().enumerate() {
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
        [statement.condition, condition].into_iter().filter(|part| !part.is_empty()).collect();
    let _ = write!(sql, ") AS w WHERE {} {}", conditions.join(" AND "), statement.tail);
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
    for (index, column) in step.statement.columns.iter().enumerate() {
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
