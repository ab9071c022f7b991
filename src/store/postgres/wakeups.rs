//! Hints between replicas over LISTEN/NOTIFY: a run was queued, a run shall be cancelled, a key was
//! revoked.
//!
//! A hint has no data: a receiver reads the tables, and on [`Wakeup::Resync`] reads everything. Commits of events
//! send no notifications, because these would serialise the commits of all replicas.

use std::sync::OnceLock;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use tokio::sync::broadcast;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use uuid::Uuid;

use crate::store::Wakeup;

/// The channel of all replicas on one database.
pub(super) const CHANNEL: &str = "toolloop";
const QUEUE: &str = "queue";
const KEYS: &str = "keys";
/// The pause before the listener connects again.
const RECONNECT_PAUSE: Duration = Duration::from_secs(1);
/// A connection is pinged after this time without a message.
const PING_AFTER_SILENCE: Duration = Duration::from_secs(5);
/// How long the answer to that ping may take.
const PING_TIMEOUT: Duration = Duration::from_secs(2);

/// The payload of a hint.
pub(super) fn payload(wakeup: Wakeup) -> String {
    match wakeup {
        Wakeup::Queue => QUEUE.to_owned(),
        Wakeup::Keys => KEYS.to_owned(),
        Wakeup::Cancel(run) => format!("cancel {run}"),
        Wakeup::Resync => "resync".to_owned(),
    }
}

/// The listener, started by the first subscription.
pub(super) struct Wakeups {
    options: PgConnectOptions,
    /// Whether there is a listener; without one, changes are found by polling.
    listens: bool,
    hints: broadcast::Sender<Wakeup>,
    task: OnceLock<AbortHandle>,
}

impl Wakeups {
    pub(super) fn new(options: PgConnectOptions, listens: bool) -> Self {
        Self { options, listens, hints: broadcast::Sender::new(1024), task: OnceLock::new() }
    }

    pub(super) fn subscribe(&self) -> broadcast::Receiver<Wakeup> {
        let receiver = self.hints.subscribe();
        if !self.listens {
            return receiver;
        }
        self.task.get_or_init(|| {
            let (options, hints) = (self.options.clone(), self.hints.clone());
            tokio::spawn(listen(options, hints)).abort_handle()
        });
        receiver
    }

    pub(super) fn close(&self) {
        if let Some(task) = self.task.get() {
            task.abort();
        }
    }
}

impl Drop for Wakeups {
    fn drop(&mut self) {
        self.close();
    }
}

async fn listen(options: PgConnectOptions, hints: broadcast::Sender<Wakeup>) {
    let pool = PgPoolOptions::new().max_connections(1).connect_lazy_with(options);
    loop {
        if let Err(error) = listen_until_broken(&pool, &hints).await {
            tracing::debug!(%error, "the listener lost its connection");
        }
        // Without a receiver there is nothing to do.
        let _ = hints.send(Wakeup::Resync);
        tokio::time::sleep(RECONNECT_PAUSE).await;
    }
}

/// Passes hints on until the connection breaks. A resync when listening begins, and one after it broke, make
/// up for missed hints.
async fn listen_until_broken(
    pool: &sqlx::PgPool,
    hints: &broadcast::Sender<Wakeup>,
) -> Result<(), sqlx::Error> {
    let mut listener = PgListener::connect_with(pool).await?;
    listener.eager_reconnect(false);
    listener.listen(CHANNEL).await?;
    let _ = hints.send(Wakeup::Resync);
    loop {
        let received = timeout(PING_AFTER_SILENCE, listener.try_recv()).await;
        let Ok(notification) = received else {
            let answer =
                timeout(PING_TIMEOUT, sqlx::query("SELECT 1").execute(&mut listener)).await;
            answer.map_err(|_| sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()))??;
            continue;
        };
        let Some(notification) = notification? else { return Ok(()) };
        let wakeup = match notification.payload().strip_prefix("cancel ") {
            Some(run) => Uuid::parse_str(run).map_or(Wakeup::Resync, Wakeup::Cancel),
            None if notification.payload() == QUEUE => Wakeup::Queue,
            None if notification.payload() == KEYS => Wakeup::Keys,
            None => Wakeup::Resync,
        };
        let _ = hints.send(wakeup);
    }
}
