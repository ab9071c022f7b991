//! Writes a batch as scripts of several statements, so that there are few round trips to the thread of the
//! connection. A small batch needs two scripts: the fence, and the other steps for the runs that passed. A large
//! batch needs one script per step. Scripts are prepared once per connection, because their texts repeat: small
//! batches have few variants, and the rows of large ones are padded to a power of two.

use std::fmt::Write;

use sqlx::AssertSqlSafe;
use sqlx::sqlite::{SqliteArguments, SqliteConnection, SqliteRow};

use super::add_value;
use crate::store::StoreError;
use crate::store::batch::{Batch, Cancelling, Passed, Step};
use crate::store::sql::{Row, Value};

/// Rows of one statement: below SQLite's limit of 32,766 parameters for every table.
const MAX_ROWS: usize = 256;
/// Rows of a small batch, at most.
const SMALL: usize = 16;

/// Several statements that run one after the other.
#[derive(Default)]
struct Script {
    text: String,
    arguments: SqliteArguments,
}

/// Writes a batch between two statements; returns the runs that passed.
pub(super) async fn write(
    connection: &mut SqliteConnection,
    mut batch: Batch,
    before: &str,
    after: &str,
) -> Result<Passed, StoreError> {
    let mut passed = Passed::new();
    let fence = std::mem::take(&mut batch.fence);
    for row in run(connection, before, fence, "").await? {
        let row = Row::Sqlite(row);
        let reason = row.read("cancel_reason")?;
        let is_cancelled: bool = row.read("is_cancelled")?;
        passed.insert(row.read("id")?, is_cancelled.then_some(Cancelling { reason }));
    }
    let usage = batch.usage_step(|run| passed.contains_key(run));
    let mut rest = batch.rest;
    for step in &mut rest {
        step.keep(&passed);
    }
    rest.extend(usage);
    run(connection, "", rest, after).await?;
    Ok(passed)
}

/// Runs steps between two statements; returns their rows.
async fn run(
    connection: &mut SqliteConnection,
    before: &str,
    steps: Vec<Step>,
    after: &str,
) -> Result<Vec<SqliteRow>, StoreError> {
    let is_small = steps.iter().map(|step| step.rows.len()).sum::<usize>() <= SMALL;
    let mut script = Script { text: before.to_owned(), ..Script::default() };
    let mut returned = Vec::new();
    for step in steps {
        script.add(step, is_small)?;
        if !is_small {
            returned.extend(std::mem::take(&mut script).run(connection).await?);
        }
    }
    script.text.push_str(after);
    returned.extend(script.run(connection).await?);
    Ok(returned)
}

impl Script {
    /// `is_exact`: the statements have no more rows than the step.
    fn add(&mut self, step: Step, is_exact: bool) -> Result<(), StoreError> {
        let Step { statement, rows } = step;
        let names: Vec<&str> = statement.columns.iter().map(|column| column.name).collect();
        // A column that has a value in every row; padding rows have NULL.
        let keys = ["run_id", "id", "tenant"];
        let key = keys.into_iter().find(|key| names.contains(key)).unwrap_or_default();
        let row = format!("(?{})", ", ?".repeat(names.len().saturating_sub(1)));
        let condition = if statement.condition.is_empty() { "true" } else { statement.condition };
        let mut rows = rows.into_iter().peekable();
        while rows.peek().is_some() {
            let chunk: Vec<Vec<Value>> = rows.by_ref().take(MAX_ROWS).collect();
            let written = chunk.len();
            let filled = if is_exact { written } else { written.next_power_of_two() };
            let values = vec![row.as_str(); filled].join(", ");
            let _ = writeln!(
                self.text,
                "WITH w ({}) AS (VALUES {values}) {} w WHERE w.{key} IS NOT NULL AND ({condition}) {};",
                names.join(", "),
                statement.head,
                statement.tail,
            );
            for value in chunk.into_iter().flatten() {
                add_value(&mut self.arguments, value)?;
            }
            for _ in 0..(filled - written) * names.len() {
                add_value(&mut self.arguments, Value::Int(None))?;
            }
        }
        Ok(())
    }

    async fn run(self, connection: &mut SqliteConnection) -> Result<Vec<SqliteRow>, StoreError> {
        if self.text.is_empty() {
            return Ok(Vec::new());
        }
        let query = sqlx::query_with(AssertSqlSafe(self.text), self.arguments);
        Ok(query.fetch_all(connection).await?)
    }
}
