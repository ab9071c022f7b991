//! The store on PostgreSQL: any number of replicas share one database.
//!
//! Commits, reads and control (claims, heartbeats, cancellation) have connections of their own, so that slow lists
//! do not delay commits or heartbeats. Leases follow the database's clock.
//!
//! Every statement is written for index look-ups. Sequential scans are disabled, because a planner without
//! statistics chooses them for a small table and keeps them when the table has grown. The commit statement is
//! planned once per connection.

mod commit;
mod connections;
mod standby;
mod wakeups;

use std::str::FromStr;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::{PgArguments, PgConnectOptions, PgConnection};
use sqlx::{Arguments, AssertSqlSafe, ConnectOptions, Connection, Row as _};
use tokio::sync::broadcast;
use tokio::time::timeout;

use self::connections::{Connections, PooledConnection, within};
use self::standby::Standby;
use self::wakeups::{CHANNEL, Wakeups, payload};
use super::backend::{Backend, Transaction, Work, hold};
use super::batch::{Batch, Passed};
use super::conflict::retry_conflicts;
use super::migrations::POSTGRES as MIGRATIONS;
use super::sql::{Dialect, Query, Rendered, Row, Value};
use super::{ConnectionCounts, DatabaseInfo, StoreError, Wakeup};
use crate::fairness::Hold;

/// Connections for commits: two in flight and one to spare.
const COMMIT_CONNECTIONS: usize = 3;
/// Connections for claims, heartbeats, cancelling and the sweep.
const CONTROL_CONNECTIONS: usize = 3;

/// With these settings, the server closes a connection whose client is gone, and releases its locks.
const KEEPALIVE: [(&str, &str); 3] =
    [("tcp_keepalives_idle", "5"), ("tcp_keepalives_interval", "2"), ("tcp_keepalives_count", "3")];
const SESSION: [(&str, &str); 5] = [
    ("statement_timeout", "5s"),
    ("lock_timeout", "2s"),
    ("idle_in_transaction_session_timeout", "10s"),
    ("jit", "off"),
    ("enable_seqscan", "off"),
];
/// Additional settings of connections for the commit statement.
const PLANNED_ONCE: [(&str, &str); 3] = [
    ("plan_cache_mode", "force_generic_plan"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
];

/// A PostgreSQL database.
pub(super) struct Postgres {
    options: PgConnectOptions,
    commits: Connections,
    reads: Connections,
    /// The standby for lists, if configured.
    standby: Option<Standby>,
    control: Connections,
    wakeups: Wakeups,
    transaction_pooler: bool,
}

impl Postgres {
    /// Connects once, to check that the database can be reached.
    ///
    /// `max_connections` is the sum over all purposes, including the listener; at least 9 are used. With a transaction
    /// pooler, connections have no state: there are no session settings, no listener, and no lock for changing
    /// the schema. Lists are read from `read_url`, if given, with additional connections.
    ///
    /// # Errors
    /// [`StoreError::Failed`] for an invalid URL or a refused login, [`StoreError::Unavailable`] if no server answers.
    pub(super) async fn connect(
        url: &str,
        max_connections: u32,
        transaction_pooler: bool,
        read_url: Option<&str>,
    ) -> Result<Self, StoreError> {
        let invalid = |_| StoreError::Failed("the PostgreSQL URL is not valid".to_owned());
        let parse = |url| PgConnectOptions::from_str(url).map_err(invalid);
        let plain = parse(url)?.disable_statement_logging();
        let set = |options: PgConnectOptions, settings: &[(&str, &str)]| {
            if transaction_pooler { options } else { options.options(settings.iter().copied()) }
        };
        let plain = set(plain, &KEEPALIVE);
        let session = |plain: PgConnectOptions| set(plain.application_name("toolloop"), &SESSION);
        let options = session(plain.clone());
        let standby = read_url.map(parse).transpose()?;
        let standby =
            standby.map(|options| session(set(options.disable_statement_logging(), &KEEPALIVE)));
        let planned_once = set(options.clone(), &PLANNED_ONCE);
        let others = COMMIT_CONNECTIONS + CONTROL_CONNECTIONS + 1;
        let reads =
            usize::try_from(max_connections).unwrap_or(usize::MAX).saturating_sub(others).max(2);
        let store = Self {
            commits: Connections::new(planned_once, COMMIT_CONNECTIONS),
            reads: Connections::new(options.clone(), reads),
            standby: standby
                .map(|options| Standby::new(Connections::new(options, reads), transaction_pooler)),
            control: Connections::new(options, CONTROL_CONNECTIONS),
            wakeups: Wakeups::new(plain.clone(), !transaction_pooler),
            options: plain,
            transaction_pooler,
        };
        let connection = store.control.get().await.map_err(|error| store.with_address(error))?;
        connection.settle(Ok(()))?;
        Ok(store)
    }

    /// Adds the address to the error of the first connection.
    fn with_address(&self, error: StoreError) -> StoreError {
        let StoreError::Unavailable(why) = error else { return error };
        let (host, port) = (self.options.get_host(), self.options.get_port());
        let address = match self.options.get_socket() {
            Some(directory) => format!("{}, port {port}", directory.display()),
            None => format!("{host}:{port}"),
        };
        StoreError::Unavailable(format!("PostgreSQL at {address}: {why}"))
    }

    /// Runs one statement on the primary, and retries it when it conflicts with others.
    async fn run_statement(
        &self,
        work: Work,
        statement: &Rendered,
    ) -> Result<Vec<Row>, StoreError> {
        let is_prepared = work != Work::Lists || self.transaction_pooler;
        retry_conflicts(|| async {
            let mut connection = self.connections(work).get().await?;
            let rows = run_rendered(&mut connection, statement, is_prepared).await;
            connection.settle(rows)
        })
        .await
    }

    fn connections(&self, work: Work) -> &Connections {
        match work {
            Work::Control => &self.control,
            Work::Data | Work::Lists => &self.reads,
            Work::Commit => &self.commits,
        }
    }
}

/// Runs one statement on a connection as a prepared statement.
async fn run(connection: &mut PgConnection, query: Query) -> Result<Vec<Row>, StoreError> {
    run_rendered(connection, &query.render(Dialect::Postgres)?, true).await
}

/// Runs one statement. A prepared statement stays on the connection, and PostgreSQL soon uses one
/// generic plan for all its values. Such a plan does not know which of two filters of a list is
/// selective, and can take a hundred times as long. So lists are not prepared but planned each time.
///
/// A statement that is not prepared has no name, and is lost when a pooler changes the connection or
/// another statement is sent before it runs. sqlx sends one to ask for the type of a column that it
/// does not know, such as `tsvector`.
async fn run_rendered(
    connection: &mut PgConnection,
    statement: &Rendered,
    is_prepared: bool,
) -> Result<Vec<Row>, StoreError> {
    let mut arguments = PgArguments::default();
    for value in &statement.values {
        match value {
            Value::Int(value) => arguments.add(value),
            Value::Flag(value) => arguments.add(value),
            Value::Text(value) => arguments.add(value.as_deref()),
            Value::Id(value) => arguments.add(value),
            Value::Time(value) => arguments.add(value),
            Value::Bytes(value) => arguments.add(value.as_deref()),
            Value::Span(span) => arguments.add(i64::try_from(span.as_micros()).unwrap_or(i64::MAX)),
            Value::Ids(values) => arguments.add(values),
            Value::Texts(values) => arguments.add(values),
            Value::Ints(values) => arguments.add(values),
        }
        .map_err(sqlx::Error::Encode)?;
    }
    let text = AssertSqlSafe(statement.text.clone());
    let query = sqlx::query_with(text, arguments).persistent(is_prepared);
    within(async {
        let rows = query.fetch_all(connection).await?;
        Ok(rows.into_iter().map(Row::Postgres).collect())
    })
    .await
}

#[async_trait]
impl Backend for Postgres {
    fn dialect(&self) -> Dialect {
        Dialect::Postgres
    }

    async fn migrate(&self) -> Result<(), StoreError> {
        if self.transaction_pooler {
            let about = self.about().await?;
            return if about.applied < about.known { Err(not_through_a_pooler()) } else { Ok(()) };
        }
        // Without timeouts of the session: a migration may take long, and waits for that of another process.
        let mut connection = PgConnection::connect_with(&self.options).await?;
        let migrated = MIGRATIONS.run_direct(None, &mut connection, false).await;
        migrated.map_err(|error| {
            StoreError::Failed(format!("the schema could not be migrated: {error}"))
        })?;
        connection.close().await.map_err(StoreError::from)
    }

    async fn about(&self) -> Result<DatabaseInfo, StoreError> {
        let mut connection = self.control.get().await?;
        let about = within(about(&mut connection)).await;
        connection.settle(about)
    }

    fn connection_counts(&self) -> ConnectionCounts {
        let pools = [&self.commits, &self.reads, &self.control];
        let standby = self.standby.as_ref().map(Standby::connections);
        pools.into_iter().chain(standby).map(Connections::counts).sum()
    }

    async fn close(&self) {
        self.wakeups.close();
        self.commits.close().await;
        self.reads.close().await;
        if let Some(standby) = &self.standby {
            standby.connections().close().await;
        }
        self.control.close().await;
    }

    async fn read(&self, work: Work, query: Query) -> Result<Vec<Row>, StoreError> {
        let _hold = hold(work).await;
        let statement = query.render(Dialect::Postgres)?;
        if work == Work::Lists
            && let Some(standby) = &self.standby
            && let Some(rows) = standby.read(&statement).await
        {
            return Ok(rows);
        }
        self.run_statement(work, &statement).await
    }

    async fn write(&self, work: Work, query: Query) -> Result<Vec<Row>, StoreError> {
        let _hold = hold(work).await;
        self.run_statement(work, &query.render(Dialect::Postgres)?).await
    }

    async fn begin(&self, work: Work) -> Result<Box<dyn Transaction + '_>, StoreError> {
        let hold = hold(work).await;
        let mut connection = self.connections(work).get().await?;
        run(&mut connection, Query::new("BEGIN")).await?;
        Ok(Box::new(OpenTransaction { connection, _hold: hold }))
    }

    async fn commit(&self, batch: Batch) -> Result<Passed, StoreError> {
        let mut connection = self.commits.get().await?;
        let written = within(commit::write_at_once(&mut connection, &batch)).await;
        if let Some(passed) = connection.settle(written)? {
            return Ok(passed);
        }
        let mut tx = self.begin(Work::Commit).await?;
        let passed = tx.write(batch).await?;
        tx.commit().await?;
        Ok(passed)
    }

    fn wakeups(&self) -> broadcast::Receiver<Wakeup> {
        self.wakeups.subscribe()
    }

    async fn hint(&self, wakeup: Wakeup) {
        if self.transaction_pooler {
            return;
        }
        let hint = Query::new("SELECT pg_notify(:channel, :payload)");
        let hint = hint.bind("channel", CHANNEL).bind("payload", payload(wakeup));
        if let Err(error) = self.read(Work::Control, hint).await {
            tracing::debug!(%error, "a hint is lost; what it was about will be found by polling");
        }
    }

    fn only_replicas(&self) -> Option<Vec<String>> {
        None
    }

    fn note_replica(&self, _: &str) {}
}

fn not_through_a_pooler() -> StoreError {
    StoreError::Failed(
        "the schema is not up to date, and cannot be changed through a transaction pooler: run \
         `toolloop migrate` with the URL of the database itself and \
         database.transaction_pooler = false"
            .to_owned(),
    )
}

async fn about(connection: &mut PgConnection) -> Result<DatabaseInfo, StoreError> {
    const ABOUT: &str = "SELECT current_setting('server_version') AS version, \
         clock_timestamp() AS now, to_regclass('_sqlx_migrations') IS NOT NULL AS is_migrated";
    const MIGRATED: &str = "SELECT count(*) FROM _sqlx_migrations WHERE success";
    let row = sqlx::query(ABOUT).fetch_one(&mut *connection).await?;
    let applied: i64 = if row.try_get("is_migrated")? {
        sqlx::query_scalar(MIGRATED).fetch_one(connection).await?
    } else {
        0
    };
    Ok(DatabaseInfo {
        version: format!("PostgreSQL {}", row.try_get::<&str, _>("version")?),
        applied: usize::try_from(applied).unwrap_or_default(),
        known: MIGRATIONS.iter().count(),
        now: Some(row.try_get("now")?),
    })
}

/// A transaction; its connection is closed unless it is committed.
struct OpenTransaction<'c> {
    connection: PooledConnection<'c>,
    _hold: Hold,
}

#[async_trait]
impl Transaction for OpenTransaction<'_> {
    async fn run(&mut self, query: Query) -> Result<Vec<Row>, StoreError> {
        run(&mut self.connection, query).await
    }

    async fn lock_tenant(&mut self, tenant: &str, patience: Duration) -> Result<bool, StoreError> {
        // Tenants of the same hash share a lock.
        let lock = Query::new("SELECT pg_advisory_xact_lock(7412, hashtext(:tenant))");
        let locked = timeout(patience, self.run(lock.bind("tenant", tenant))).await;
        locked.map_or(Ok(false), |locked| locked.map(|_| true))
    }

    async fn write(&mut self, batch: Batch) -> Result<Passed, StoreError> {
        within(commit::write(&mut self.connection, &batch)).await
    }

    async fn commit(mut self: Box<Self>) -> Result<(), StoreError> {
        let committed = run(&mut self.connection, Query::new("COMMIT")).await;
        self.connection.settle(committed.map(|_| ()))
    }
}
