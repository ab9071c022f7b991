//! Shared budgets on SQLite, inside the caller's `BEGIN IMMEDIATE`.

use sqlx::query::Query;
use sqlx::sqlite::{SqliteArguments, SqliteConnection};
use uuid::Uuid;

use crate::run::{Amounts, Caps, Reserved};
use crate::store::StoreError;
use crate::store::budget::{
    BUDGET, CHUNK, HOLD, OPEN, OPEN_HOLD, RELEASE_HOLD, RESERVE, SETTLE, SETTLE_HOLD, SharedBudget,
    UNSETTLED, columns,
};
use crate::store::changes::int;
use crate::store::decode::Columns;

fn bind(
    query: Query<'_, sqlx::Sqlite, SqliteArguments>,
    amounts: Amounts,
) -> Query<'_, sqlx::Sqlite, SqliteArguments> {
    columns(amounts).into_iter().fold(query, Query::bind)
}

/// See [`crate::store::Store::open_budget`].
pub(super) async fn open(
    connection: &mut SqliteConnection,
    root: Uuid,
    caps: Caps,
    spent: Amounts,
) -> Result<(), StoreError> {
    let open = sqlx::query(OPEN)
        .bind(root.to_string())
        .bind(caps.tokens.map(int))
        .bind(caps.micro_usd.map(int));
    let open = open.bind(int(caps.tool_calls)).bind(int(caps.iterations));
    if bind(open, spent).execute(&mut *connection).await?.rows_affected() > 0 {
        bind(sqlx::query(OPEN_HOLD).bind(root.to_string()), spent).execute(connection).await?;
    }
    Ok(())
}

/// See [`crate::store::Store::reserve`].
pub(super) async fn reserve(
    connection: &mut SqliteConnection,
    (root, run): (Uuid, Uuid),
    wanted: Amounts,
) -> Result<Reserved, StoreError> {
    let reserved =
        bind(sqlx::query(RESERVE).bind(root.to_string()), wanted).execute(&mut *connection).await?;
    if reserved.rows_affected() == 0 {
        let budget = read(connection, root).await?;
        let refusal = budget
            .and_then(|budget| budget.caps.refuses(budget.spent.and(budget.reserved), wanted));
        return Ok(refusal.map_or(Reserved::Granted, Reserved::Refused));
    }
    let hold = sqlx::query(HOLD).bind(run.to_string()).bind(root.to_string());
    bind(hold, wanted).execute(connection).await?;
    Ok(Reserved::Granted)
}

/// See [`crate::store::Store::settle`].
pub(super) async fn settle(
    connection: &mut SqliteConnection,
    (root, run): (Uuid, Uuid),
    spent: Amounts,
    ended: bool,
) -> Result<(), StoreError> {
    let run = run.to_string();
    sqlx::query(SETTLE_HOLD).bind(&run).bind(root.to_string()).execute(&mut *connection).await?;
    bind(sqlx::query(SETTLE).bind(&run), spent).execute(&mut *connection).await?;
    bind(sqlx::query(RELEASE_HOLD).bind(&run), spent)
        .bind(i64::from(ended))
        .execute(connection)
        .await?;
    Ok(())
}

/// See [`crate::store::Store::shared_budget`].
pub(super) async fn read(
    connection: &mut SqliteConnection,
    root: Uuid,
) -> Result<Option<SharedBudget>, StoreError> {
    let row = sqlx::query(BUDGET).bind(root.to_string()).fetch_optional(connection).await?;
    row.map(|row| Columns(&row).shared_budget()).transpose()
}

/// Settles what others left behind, by the rows of their runs.
pub(super) async fn settle_rest(connection: &mut SqliteConnection) -> Result<(), StoreError> {
    for row in sqlx::query(UNSETTLED).bind(CHUNK).fetch_all(&mut *connection).await? {
        let hold = Columns(&row).unsettled()?;
        settle(connection, (hold.root, hold.run), hold.spent, hold.ended).await?;
    }
    Ok(())
}
