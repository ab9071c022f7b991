//! A TCP proxy between a service and its PostgreSQL, which can make connections half-open and lose
//! the answers to commits.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

/// What only the statement of a heartbeat has in it.
const HEARTBEAT: &[u8] = b"UPDATE replicas SET heartbeat_at";
/// What only the statement that commits events has in it.
const COMMIT: &[u8] = b"run_events_rows AS (";
/// How the server begins to say that it has done that statement. It says so when the transaction is
/// committed.
const COMMITTED: &[u8] = b"SELECT ";
/// How long a silent connection stays open: then the server closes it, whose other end does not answer.
const SILENCE: Duration = Duration::from_secs(20);

pub(crate) struct Proxy {
    /// The database's, by way of this.
    pub(crate) url: String,
    lines: Arc<Lines>,
}

#[derive(Default)]
struct Lines {
    open: Mutex<Vec<Weak<Line>>>,
    /// Of so many answers to commits, the last is lost; none where this is zero.
    loses: AtomicUsize,
    answers: AtomicUsize,
    lost: AtomicUsize,
}

/// A connection.
#[derive(Default)]
struct Line {
    has_heartbeats: AtomicBool,
    has_commits: AtomicBool,
    silent: CancellationToken,
}

impl Proxy {
    pub(crate) async fn to(database_url: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let own = listener.local_addr().unwrap();
        let server = database_url.split_once('@').unwrap().1;
        let server = server.split_once('/').unwrap().0.to_owned();
        let url = database_url.replace(&server, &own.to_string());
        let lines = Arc::<Lines>::default();
        let known = Arc::clone(&lines);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(&server).await else { continue };
                let line = Arc::<Line>::default();
                known.open.lock().push(Arc::downgrade(&line));
                tokio::spawn(carry(client, server, line, Arc::clone(&known)));
            }
        });
        Self { url, lines }
    }

    /// Whether a heartbeat has come over a connection that is open.
    pub(crate) fn has_heartbeats(&self) -> bool {
        let open = self.lines.open.lock();
        open.iter()
            .filter_map(Weak::upgrade)
            .any(|line| line.has_heartbeats.load(Ordering::Relaxed))
    }

    /// Stops forwarding on the connections that have carried heartbeats so far; how many.
    pub(crate) fn silence_heartbeats(&self) -> usize {
        self.silence(|line| line.has_heartbeats.load(Ordering::Relaxed))
    }

    /// Stops forwarding on all connections that are open; how many.
    pub(crate) fn silence_all(&self) -> usize {
        self.silence(|_| true)
    }

    fn silence(&self, which: impl Fn(&Line) -> bool) -> usize {
        let mut count = 0;
        self.lines.open.lock().retain(|line| {
            let Some(line) = line.upgrade() else { return false };
            let is_silent = which(&line);
            if is_silent {
                line.silent.cancel();
                count += 1;
            }
            !is_silent
        });
        count
    }

    /// From now on the last of so many answers to commits is lost, and its connection with it; none
    /// where that is zero.
    pub(crate) fn lose_answers(&self, of: usize) {
        self.lines.loses.store(of, Ordering::Relaxed);
    }

    /// How many answers to commits were lost.
    pub(crate) fn lost(&self) -> usize {
        self.lines.lost.load(Ordering::Relaxed)
    }
}

impl Lines {
    /// Whether what the server sends is an answer that is to be lost.
    fn loses(&self, line: &Line, bytes: &[u8]) -> bool {
        let of = self.loses.load(Ordering::Relaxed);
        if of == 0 || !line.has_commits.load(Ordering::Relaxed) || !has(bytes, COMMITTED) {
            return false;
        }
        let is_lost = (self.answers.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(of);
        if is_lost {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        is_lost
    }
}

fn has(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

async fn carry(client: TcpStream, server: TcpStream, line: Arc<Line>, lines: Arc<Lines>) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let there = async {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from_client.read(&mut bytes).await {
            for (flag, part) in [(&line.has_heartbeats, HEARTBEAT), (&line.has_commits, COMMIT)] {
                if !flag.load(Ordering::Relaxed) && has(&bytes[..count], part) {
                    flag.store(true, Ordering::Relaxed);
                }
            }
            if to_server.write_all(&bytes[..count]).await.is_err() {
                break;
            }
        }
    };
    let back = async {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from_server.read(&mut bytes).await {
            if lines.loses(&line, &bytes[..count])
                || to_client.write_all(&bytes[..count]).await.is_err()
            {
                break;
            }
        }
    };
    tokio::select! {
        () = there => {}
        () = back => {}
        () = line.silent.cancelled() => {}
    }
    if line.silent.is_cancelled() {
        tokio::time::sleep(SILENCE).await; // open, and nothing comes through any more
    }
}
