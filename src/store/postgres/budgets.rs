//! Shared budgets on PostgreSQL. Whoever reserves or settles holds the budget's row, taken before
//! any hold.

use sqlx::Connection;
use sqlx::postgres::{PgArguments, PgConnection};
use sqlx::query::Query;
use uuid::Uuid;

use crate::run::{Amounts, Caps, Reserved};
use crate::store::StoreError;
use crate::store::budget::{
    BUDGET, CHUNK, HOLD, OPEN, OPEN_HOLD, RELEASE_HOLD, RESERVE, SETTLE, SETTLE_HOLD, SharedBudget,
    UNSETTLED, columns,
};
use crate::store::changes::int;
use crate::store::decode::Columns;

const LOCK: &str = "SELECT 1 FROM budgets WHERE root_run_id = $1 FOR UPDATE";

fn bind(
    query: Query<'_, sqlx::Postgres, PgArguments>,
    amounts: Amounts,
) -> Query<'_, sqlx::Postgres, PgArguments> {
    columns(amounts).into_iter().fold(query, Query::bind)
}

/// See [`crate::store::Store::open_budget`].
pub(super) async fn open(
    connection: &mut PgConnection,
    root: Uuid,
    caps: Caps,
    spent: Amounts,
) -> Result<(), StoreError> {
    let mut tx = connection.begin().await?;
    let open =
        sqlx::query(OPEN).bind(root).bind(caps.tokens.map(int)).bind(caps.micro_usd.map(int));
    let open = open.bind(int(caps.tool_calls)).bind(int(caps.iterations));
    if bind(open, spent).execute(&mut *tx).await?.rows_affected() > 0 {
        bind(sqlx::query(OPEN_HOLD).bind(root), spent).execute(&mut *tx).await?;
    }
    Ok(tx.commit().await?)
}

/// See [`crate::store::Store::reserve`].
pub(super) async fn reserve(
    connection: &mut PgConnection,
    (root, run): (Uuid, Uuid),
    wanted: Amounts,
) -> Result<Reserved, StoreError> {
    let mut tx = connection.begin().await?;
    if bind(sqlx::query(RESERVE).bind(root), wanted).execute(&mut *tx).await?.rows_affected() == 0 {
        tx.rollback().await?;
        let budget = read(connection, root).await?;
        let refusal = budget
            .and_then(|budget| budget.caps.refuses(budget.spent.and(budget.reserved), wanted));
        return match (budget, refusal) {
            (Some(_), Some(refusal)) => Ok(Reserved::Refused(refusal)),
            (None, _) => Ok(Reserved::Granted),
            // What stood in the way was settled in between.
            (Some(_), None) => Box::pin(reserve(connection, (root, run), wanted)).await,
        };
    }
    bind(sqlx::query(HOLD).bind(run).bind(root), wanted).execute(&mut *tx).await?;
    tx.commit().await?;
    Ok(Reserved::Granted)
}

/// See [`crate::store::Store::settle`].
pub(super) async fn settle(
    connection: &mut PgConnection,
    (root, run): (Uuid, Uuid),
    spent: Amounts,
    ended: bool,
) -> Result<(), StoreError> {
    let mut tx = connection.begin().await?;
    sqlx::query(LOCK).bind(root).execute(&mut *tx).await?;
    sqlx::query(SETTLE_HOLD).bind(run).bind(root).execute(&mut *tx).await?;
    bind(sqlx::query(SETTLE).bind(run), spent).execute(&mut *tx).await?;
    bind(sqlx::query(RELEASE_HOLD).bind(run), spent)
        .bind(i64::from(ended))
        .execute(&mut *tx)
        .await?;
    Ok(tx.commit().await?)
}

/// See [`crate::store::Store::shared_budget`].
pub(super) async fn read(
    connection: &mut PgConnection,
    root: Uuid,
) -> Result<Option<SharedBudget>, StoreError> {
    let row = sqlx::query(BUDGET).bind(root).fetch_optional(connection).await?;
    row.map(|row| Columns(&row).shared_budget()).transpose()
}

/// Settles what others left behind, by the rows of their runs.
pub(super) async fn settle_rest(connection: &mut PgConnection) -> Result<(), StoreError> {
    for row in sqlx::query(UNSETTLED).bind(CHUNK).fetch_all(&mut *connection).await? {
        let hold = Columns(&row).unsettled()?;
        settle(connection, (hold.root, hold.run), hold.spent, hold.ended).await?;
    }
    Ok(())
}
