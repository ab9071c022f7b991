//! Copies committed pages from the write-ahead log into the database file (<https://www.sqlite.org/wal.html>), on
//! a separate connection. If the writing connection did it, every thousandth page would make a commit wait until
//! a thousand pages are on the disk.

use std::sync::Arc;
use std::time::Duration;

use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{ConnectOptions, Connection, Row};
use tokio::sync::{Mutex, Notify};
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::Writer;

/// The pause between two checks of the log, while there are commits.
const PAUSE: Duration = Duration::from_millis(100);
/// The pause after a failure.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_secs(10);
/// Number of pages in the log from which on they are copied: 4 MiB.
const MIN_PAGES: i64 = 1_000;
/// Number of pages in the log from which on commits wait until the rest is copied, so that the log can start over:
/// 32 MiB.
const MAX_PAGES: i64 = 8_000;

/// The background task that copies. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Checkpoints {
    committed: Arc<Notify>,
    stop: DropGuard,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Checkpoints {
    pub(super) fn begin(options: SqliteConnectOptions, writer: Arc<Mutex<Writer>>) -> Self {
        let (committed, stop) = (Arc::new(Notify::new()), CancellationToken::new());
        let copying = copy_regularly(options, writer, Arc::clone(&committed), stop.clone());
        let task = Mutex::new(Some(tokio::spawn(copying)));
        Self { committed, stop: stop.drop_guard(), task }
    }

    /// Notes that a commit has added pages to the log.
    pub(super) fn note_commit(&self) {
        self.committed.notify_one();
    }

    /// Stops the task, and waits until its connection is closed.
    pub(super) async fn end(&self) {
        self.stop.token().cancel();
        if let Some(task) = self.task.lock().await.take() {
            let _ = task.await;
        }
    }
}

async fn copy_regularly(
    options: SqliteConnectOptions,
    writer: Arc<Mutex<Writer>>,
    committed: Arc<Notify>,
    stop: CancellationToken,
) {
    let mut connection = None;
    let mut pause = PAUSE;
    let next = async |pause| {
        committed.notified().await;
        tokio::time::sleep(pause).await;
    };
    while stop.run_until_cancelled(next(pause)).await.is_some() {
        pause = PAUSE;
        let copied = async {
            let connection = match &mut connection {
                Some(connection) => connection,
                none => none.insert(options.connect().await?),
            };
            copy(connection, &writer).await
        };
        if let Err(error) = copied.await {
            tracing::warn!(%error, "the database's log is not copied into its file; it grows");
            (connection, pause) = (None, PAUSE_AFTER_FAILURE);
        }
    }
    if let Some(connection) = connection
        && let Err(error) = connection.close().await
    {
        tracing::warn!(%error, "the database's log was not closed cleanly");
    }
}

async fn copy(connection: &mut SqliteConnection, writer: &Mutex<Writer>) -> sqlx::Result<()> {
    let before = checkpoint(connection, "PRAGMA wal_checkpoint(NOOP)").await?;
    if before.pages < MIN_PAGES {
        return Ok(());
    }
    let log = checkpoint(connection, "PRAGMA wal_checkpoint(PASSIVE)").await?;
    // A reader of an older state prevents the rest from being copied, however often that is tried.
    if log.pages >= MAX_PAGES && log.copied > before.copied {
        // Only the latest commits remain, and while nothing is written all of them can be copied.
        let _nothing_is_written = writer.lock().await;
        checkpoint(connection, "PRAGMA wal_checkpoint(PASSIVE)").await?;
    }
    Ok(())
}

/// The pages in the log, and how many of them are copied.
struct Log {
    pages: i64,
    copied: i64,
}

async fn checkpoint(connection: &mut SqliteConnection, pragma: &'static str) -> sqlx::Result<Log> {
    let row = sqlx::query(pragma).fetch_one(connection).await?;
    Ok(Log { pages: row.try_get("log")?, copied: row.try_get("checkpointed")? })
}
