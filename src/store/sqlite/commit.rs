//! A batch as two scripts, so that the thread of the connection is asked twice and not once a
//! statement: the fence, and what follows for the runs that passed it.

use std::collections::HashSet;
use std::fmt::Write;

use sqlx::AssertSqlSafe;
use sqlx::sqlite::{SqliteArguments, SqliteConnection, SqliteRow};
use uuid::Uuid;

use super::add_value;
use crate::store::StoreError;
use crate::store::commit::{Batch, Step};
use crate::store::sql::{Row, Value};

/// Rows of one statement: under SQLite's limit of 32,766 parameters whatever the table.
const MAX_ROWS: usize = 500;

/// Several statements that run one after the other.
#[derive(Default)]
struct Script {
    text: String,
    arguments: SqliteArguments,
}

/// Writes a batch between two statements; the runs that passed.
pub(super) async fn write(
    connection: &mut SqliteConnection,
    batch: Batch,
    before: &str,
    after: &str,
) -> Result<HashSet<Uuid>, StoreError> {
    let mut script = Script { text: before.to_owned(), ..Script::default() };
    for step in batch.fence {
        script.add(step)?;
    }
    let mut passed = HashSet::new();
    for row in script.run(connection).await? {
        passed.insert(Row::Sqlite(row).read("id")?);
    }
    let mut script = Script::default();
    for mut step in batch.rest {
        step.keep(&passed);
        script.add(step)?;
    }
    script.text.push_str(after);
    if !script.text.is_empty() {
        script.run(connection).await?;
    }
    Ok(passed)
}

impl Script {
    fn add(&mut self, step: Step) -> Result<(), StoreError> {
        let names: Vec<&str> = step.columns.iter().map(|column| column.name).collect();
        let row = format!("(?{})", ", ?".repeat(names.len().saturating_sub(1)));
        let mut rows = step.rows.into_iter().peekable();
        while rows.peek().is_some() {
            let chunk: Vec<Vec<Value>> = rows.by_ref().take(MAX_ROWS).collect();
            let values = vec![row.as_str(); chunk.len()].join(", ");
            let condition = if step.condition.is_empty() { "true" } else { step.condition };
            let _ = writeln!(
                self.text,
                "WITH w ({}) AS (VALUES {values}) {} w WHERE {condition} {};",
                names.join(", "),
                step.head,
                step.tail,
            );
            for value in chunk.into_iter().flatten() {
                add_value(&mut self.arguments, value)?;
            }
        }
        Ok(())
    }

    async fn run(self, connection: &mut SqliteConnection) -> Result<Vec<SqliteRow>, StoreError> {
        let query = sqlx::query_with(AssertSqlSafe(self.text), self.arguments);
        Ok(query.fetch_all(connection).await?)
    }
}
