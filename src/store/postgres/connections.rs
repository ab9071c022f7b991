//! A pool of PostgreSQL connections without additional round trips.
//!
//! `sqlx::Pool` sends a ping whenever a connection is returned; this pool does not. A connection is returned only
//! after an answer. A connection that timed out, broke, or whose caller was dropped during a statement is closed.
//! If a connection breaks, all idle connections are closed as well, because they have probably broken, too.
//!
//! If a caller has waited for a connection without success, slow statements hold all connections. Later callers
//! then wait only for a short time, so that a request that needs several connections is refused soon.

use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sqlx::Connection;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use crate::store::{ConnectionCounts, StoreError};

/// How long a caller waits for a free connection, and for a new one to open.
const ACQUIRE: Duration = Duration::from_secs(2);
/// How long a caller waits for a free connection shortly after another one has waited without success.
const ACQUIRE_WHEN_EXHAUSTED: Duration = Duration::from_millis(300);
/// The limit of one operation, a little over the server's `statement_timeout`.
const OPERATION: Duration = Duration::from_secs(6);
/// A connection that was idle for longer is pinged before it is used.
const PING_AFTER_IDLE: Duration = Duration::from_secs(10);

/// Connections for one kind of work.
pub(super) struct Connections {
    options: PgConnectOptions,
    max: usize,
    permits: Semaphore,
    /// When a caller last waited for a free connection without success.
    exhausted_at: Mutex<Option<Instant>>,
    idle: Mutex<Vec<(PgConnection, Instant)>>,
}

/// A connection in use; closed unless it is [settled](PooledConnection::settle).
pub(super) struct PooledConnection<'p> {
    connection: PgConnection,
    pool: &'p Connections,
    _permit: SemaphorePermit<'p>,
}

impl Connections {
    /// A pool without open connections.
    pub(super) fn new(options: PgConnectOptions, max: usize) -> Self {
        Self {
            options,
            max,
            permits: Semaphore::new(max),
            exhausted_at: Mutex::default(),
            idle: Mutex::default(),
        }
    }

    /// Waits for a connection, for two seconds at most.
    pub(super) async fn get(&self) -> Result<PooledConnection<'_>, StoreError> {
        let permit = timeout(self.patience(), self.permits.acquire()).await;
        let permit = permit.map_err(|_| {
            *self.exhausted_at.lock() = Some(Instant::now());
            unavailable("all connections are busy")
        })?;
        let permit = permit.map_err(|_| unavailable("it is closed"))?;
        let pooled = |connection| PooledConnection { connection, pool: self, _permit: permit };
        let idle = self.idle().pop();
        if let Some((mut connection, since)) = idle {
            if since.elapsed() < PING_AFTER_IDLE
                || matches!(timeout(ACQUIRE, connection.ping()).await, Ok(Ok(())))
            {
                return Ok(pooled(connection));
            }
            self.idle().clear();
        }
        Ok(pooled(self.open().await?))
    }

    fn patience(&self) -> Duration {
        let exhausted_at = *self.exhausted_at.lock();
        if exhausted_at.is_some_and(|at| at.elapsed() < ACQUIRE) {
            ACQUIRE_WHEN_EXHAUSTED
        } else {
            ACQUIRE
        }
    }

    pub(super) fn counts(&self) -> ConnectionCounts {
        let used = self.max.saturating_sub(self.permits.available_permits());
        ConnectionCounts { used, idle: self.idle().len() }
    }

    async fn open(&self) -> Result<PgConnection, StoreError> {
        let opened = timeout(ACQUIRE, PgConnection::connect_with(&self.options)).await;
        opened
            .map_err(|_| unavailable("it does not accept connections in time"))?
            .map_err(StoreError::from)
    }

    /// Closes idle connections now, and the others when they are returned.
    pub(super) async fn close(&self) {
        self.permits.close();
        let idle = std::mem::take(&mut *self.idle());
        for (connection, _) in idle {
            // The server detects the disconnection in any case.
            let _ = timeout(ACQUIRE, connection.close()).await;
        }
    }

    fn idle(&self) -> parking_lot::MutexGuard<'_, Vec<(PgConnection, Instant)>> {
        self.idle.lock()
    }
}

impl PooledConnection<'_> {
    /// Returns the connection to the pool, unless the result shows that it may be broken.
    pub(super) fn settle<T>(self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        match &result {
            Err(error) if error.is_transient() && !matches!(error, StoreError::Conflict(_)) => {
                self.pool.idle().clear();
            }
            _ if self.pool.permits.is_closed() => {}
            _ => self.pool.idle().push((self.connection, Instant::now())),
        }
        result
    }
}

impl Deref for PooledConnection<'_> {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.connection
    }
}

impl DerefMut for PooledConnection<'_> {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.connection
    }
}

/// Runs an operation with a timeout.
pub(super) async fn within<T>(
    operation: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    timeout(OPERATION, operation)
        .await
        .unwrap_or_else(|_| Err(unavailable("it does not answer in time")))
}

fn unavailable(why: &str) -> StoreError {
    StoreError::Unavailable(why.to_owned())
}
