//! The embedded store: one SQLite file, one process.
//!
//! One connection writes, always in `BEGIN IMMEDIATE`; a few others read. A lock file beside the database excludes
//! a second process. So every replica row that this process did not write belongs to a process that has ended,
//! even if its lease has not expired, and wake-ups stay within the process.

mod checkpoints;
mod commit;

use std::collections::HashSet;
use std::fs::{File, TryLockError};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::Mutex;
use sqlx::sqlite::{
    SqliteArguments, SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePool,
    SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{Arguments, AssertSqlSafe, ConnectOptions, Connection, Row as _};
use tokio::sync::{Mutex as AsyncMutex, MutexGuard, broadcast};

use self::checkpoints::Checkpoints;
use super::backend::{Backend, Transaction, Work, hold};
use super::batch::{Batch, Passed};
use super::migrations::SQLITE as MIGRATIONS;
use super::sql::{Dialect, Query, Row, Value, json};
use super::{ConnectionCounts, DatabaseInfo, StoreError, Wakeup};
use crate::fairness::{self, Hold};

/// Connections that read at the same time.
const READERS: u32 = 4;
/// Prepared statements that each reader caches: statements of lists take some 50 KiB each.
const STATEMENTS_OF_READERS: usize = 48;
/// Prepared statements that the writer caches: one per table and power of two, and those of small batches.
const STATEMENTS_OF_WRITER: usize = 256;

/// An SQLite database file.
pub(super) struct Sqlite {
    writer: Arc<AsyncMutex<Writer>>,
    checkpoints: Checkpoints,
    /// `None` once closed.
    lock: Mutex<Option<File>>,
    options: SqliteConnectOptions,
    readers: SqlitePool,
    /// Replicas that live in this process.
    registered: Mutex<HashSet<String>>,
    wakeups: broadcast::Sender<Wakeup>,
}

impl Sqlite {
    /// Opens the file at a path or a URL `sqlite://path`; creates the file and its directory if necessary.
    ///
    /// # Errors
    /// [`StoreError::Locked`] if another process has it open, [`StoreError::Failed`] if it cannot be created or is not
    /// a database.
    pub(super) async fn open(location: &str) -> Result<Self, StoreError> {
        let path = location.strip_prefix("sqlite:").unwrap_or(location);
        let path = PathBuf::from(path.strip_prefix("//").unwrap_or(path));
        let cannot = |error: std::io::Error| {
            StoreError::Failed(format!("{} cannot be opened: {error}", path.display()))
        };
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(cannot)?;
        }
        let path = canonical_path(&path).map_err(cannot)?;
        let lock = lock(&path)?;
        let options = SqliteConnectOptions::new()
            .filename(&path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(Duration::from_secs(5))
            .foreign_keys(false)
            .pragma("wal_autocheckpoint", "0")
            .disable_statement_logging();
        let readers_options = options.clone().statement_cache_capacity(STATEMENTS_OF_READERS);
        let options = options.statement_cache_capacity(STATEMENTS_OF_WRITER);
        let writer = options.connect().await?;
        let readers = SqlitePoolOptions::new().max_connections(READERS).test_before_acquire(false);
        let writer = Writer { connection: Some(writer), is_broken: false };
        let writer = Arc::new(AsyncMutex::new(writer));
        Ok(Self {
            checkpoints: Checkpoints::begin(readers_options.clone(), Arc::clone(&writer)),
            writer,
            lock: Mutex::new(Some(lock)),
            readers: readers.connect_lazy_with(readers_options),
            options,
            registered: Mutex::default(),
            wakeups: broadcast::Sender::new(1024),
        })
    }

    /// The one connection that writes, outside any transaction.
    async fn writer(&self) -> Result<MutexGuard<'_, Writer>, StoreError> {
        let mut writer = self.writer.lock().await;
        if writer.is_broken
            && let Some(connection) = writer.connection.as_mut()
        {
            // SQLite may have ended the transaction itself, for example if the disk is full.
            if sqlx::raw_sql("ROLLBACK").execute(connection).await.is_err() {
                writer.connection = Some(self.options.connect().await?);
            }
            writer.is_broken = false;
        }
        Ok(writer)
    }
}

/// The connection that writes.
struct Writer {
    /// `None` once closed.
    connection: Option<SqliteConnection>,
    /// Whether a transaction was begun and not ended.
    is_broken: bool,
}

impl Writer {
    fn connection(&mut self) -> Result<&mut SqliteConnection, StoreError> {
        let closed = || StoreError::Unavailable("it is closed".to_owned());
        self.connection.as_mut().ok_or_else(closed)
    }
}

/// The path without symbolic links, so that the file has the same lock however it is opened. Creates the file if it
/// does not exist.
fn canonical_path(path: &Path) -> std::io::Result<PathBuf> {
    // An existing file is not opened: closing it would release SQLite's locks in this process.
    path.canonicalize().or_else(|_| {
        File::options().create(true).append(true).mode(0o600).open(path)?;
        path.canonicalize()
    })
}

/// Holds `<database>.lock` for as long as the file lives.
fn lock(database: &Path) -> Result<File, StoreError> {
    let mut name = database.as_os_str().to_owned();
    name.push(".lock");
    let cannot =
        |error| StoreError::Failed(format!("{} cannot be locked: {error}", database.display()));
    let file =
        File::options().create(true).truncate(false).write(true).open(name).map_err(cannot)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::Error(error)) => Err(cannot(error)),
        Err(TryLockError::WouldBlock) => Err(StoreError::Locked(format!(
            "{} is in use by another toolloop process; stop it, or use PostgreSQL to run several",
            database.display()
        ))),
    }
}

/// Runs one statement.
async fn run<'c, E>(executor: E, query: Query) -> Result<Vec<Row>, StoreError>
where
    E: sqlx::Executor<'c, Database = sqlx::Sqlite>,
{
    let rendered = query.render(Dialect::Sqlite)?;
    let mut arguments = SqliteArguments::default();
    for value in rendered.values {
        add_value(&mut arguments, value)?;
    }
    let query = sqlx::query_with(AssertSqlSafe(rendered.text), arguments);
    let rows = query.fetch_all(executor).await?;
    Ok(rows.into_iter().map(Row::Sqlite).collect())
}

/// Ids are text, times microseconds, lists JSON arrays.
fn add_value(arguments: &mut SqliteArguments, value: Value) -> Result<(), StoreError> {
    let micros = |span: Duration| i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
    match value {
        Value::Int(value) => arguments.add(value),
        Value::Flag(value) => arguments.add(value),
        Value::Text(value) => arguments.add(value),
        Value::Id(value) => arguments.add(value.map(|id| id.to_string())),
        Value::Time(value) => arguments.add(value.map(|at| at.timestamp_micros())),
        Value::Bytes(value) => arguments.add(value),
        Value::Span(span) => arguments.add(micros(span)),
        Value::Ids(values) => arguments.add(json(&values)?),
        Value::Texts(values) => arguments.add(json(&values)?),
        Value::Ints(values) => arguments.add(json(&values)?),
    }
    .map_err(|error| StoreError::from(sqlx::Error::Encode(error)))
}

#[async_trait]
impl Backend for Sqlite {
    fn dialect(&self) -> Dialect {
        Dialect::Sqlite
    }

    async fn migrate(&self) -> Result<(), StoreError> {
        let mut writer = self.writer().await?;
        let migrated = MIGRATIONS.run_direct(None, writer.connection()?, false).await;
        migrated.map_err(|error| {
            StoreError::Failed(format!("the schema could not be migrated: {error}"))
        })
    }

    async fn about(&self) -> Result<DatabaseInfo, StoreError> {
        const ABOUT: &str = "SELECT sqlite_version() AS version, \
             EXISTS (SELECT 1 FROM sqlite_master WHERE name = '_sqlx_migrations') AS is_migrated";
        const MIGRATED: &str = "SELECT count(*) FROM _sqlx_migrations WHERE success";
        let row = sqlx::query(ABOUT).fetch_one(&self.readers).await?;
        let applied: i64 = if row.try_get("is_migrated")? {
            sqlx::query_scalar(MIGRATED).fetch_one(&self.readers).await?
        } else {
            0
        };
        Ok(DatabaseInfo {
            version: format!("SQLite {}", row.try_get::<&str, _>("version")?),
            applied: usize::try_from(applied).unwrap_or_default(),
            known: MIGRATIONS.iter().count(),
            now: None,
        })
    }

    async fn close(&self) {
        self.checkpoints.end().await;
        self.readers.close().await;
        if let Some(writer) = self.writer.lock().await.connection.take()
            && let Err(error) = writer.close().await
        {
            tracing::warn!(%error, "the database was not closed cleanly");
        }
        self.lock.lock().take();
    }

    fn connection_counts(&self) -> ConnectionCounts {
        let writes = usize::from(self.writer.try_lock().is_err());
        let (open, idle) = (self.readers.size() as usize, self.readers.num_idle());
        ConnectionCounts { used: open.saturating_sub(idle) + writes, idle: idle + 1 - writes }
    }

    async fn read(&self, work: Work, query: Query) -> Result<Vec<Row>, StoreError> {
        if !work.is_scarce() {
            let _hold = hold(work).await;
            return run(&self.readers, query).await;
        }
        let readers = self.readers.clone();
        let read = fairness::charged(async move {
            let mut reader = match readers.acquire().await {
                Ok(reader) => reader,
                Err(error) => return (Err(error.into()), Duration::ZERO),
            };
            let begun = Instant::now();
            let rows = run(&mut *reader, query).await;
            (rows, begun.elapsed())
        });
        read.await.map_err(|error| StoreError::Failed(error.to_string()))?
    }

    async fn write(&self, work: Work, query: Query) -> Result<Vec<Row>, StoreError> {
        let _hold = hold(work).await;
        let rows = run(self.writer().await?.connection()?, query).await?;
        self.checkpoints.note_commit();
        Ok(rows)
    }

    async fn begin(&self, work: Work) -> Result<Box<dyn Transaction + '_>, StoreError> {
        let hold = hold(work).await;
        let mut writer = self.writer().await?;
        writer.connection()?;
        writer.is_broken = true;
        let mut begun = OpenTransaction { writer, checkpoints: &self.checkpoints, _hold: hold };
        begun.run(Query::new("BEGIN IMMEDIATE")).await?;
        Ok(Box::new(begun))
    }

    async fn commit(&self, batch: Batch) -> Result<Passed, StoreError> {
        let mut writer = self.writer().await?;
        writer.connection()?;
        writer.is_broken = true;
        let connection = writer.connection()?;
        let passed = commit::write(connection, batch, "BEGIN IMMEDIATE; ", "COMMIT").await?;
        writer.is_broken = false;
        self.checkpoints.note_commit();
        Ok(passed)
    }

    fn wakeups(&self) -> broadcast::Receiver<Wakeup> {
        self.wakeups.subscribe()
    }

    async fn hint(&self, wakeup: Wakeup) {
        // Without receivers, nothing waits for hints.
        let _ = self.wakeups.send(wakeup);
    }

    fn only_replicas(&self) -> Option<Vec<String>> {
        let registered = self.registered.lock();
        Some(registered.iter().cloned().collect())
    }

    fn note_replica(&self, id: &str) {
        self.registered.lock().insert(id.to_owned());
    }
}

/// A transaction on the writing connection, which also serves as the lock.
struct OpenTransaction<'c> {
    writer: MutexGuard<'c, Writer>,
    checkpoints: &'c Checkpoints,
    _hold: Hold,
}

#[async_trait]
impl Transaction for OpenTransaction<'_> {
    async fn run(&mut self, query: Query) -> Result<Vec<Row>, StoreError> {
        run(self.writer.connection()?, query).await
    }

    async fn lock_tenant(&mut self, _: &str, _: Duration) -> Result<bool, StoreError> {
        Ok(true) // of all of them: there is one writer
    }

    async fn write(&mut self, batch: Batch) -> Result<Passed, StoreError> {
        commit::write(self.writer.connection()?, batch, "", "").await
    }

    async fn commit(mut self: Box<Self>) -> Result<(), StoreError> {
        self.run(Query::new("COMMIT")).await?;
        self.writer.is_broken = false;
        self.checkpoints.note_commit();
        Ok(())
    }
}
