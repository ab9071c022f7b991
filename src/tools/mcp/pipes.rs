//! A server that is a program: one JSON-RPC message a line, through its standard input and output.
//!
//! Its output is read continuously. The length of lines and the rate of unsolicited messages are
//! bounded. Its standard error is logged at a bounded rate. Which program it is, and when it is
//! restarted, is decided elsewhere.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::Instant;

use super::era::DISCOVER;
use super::lines::{Line, Lines};
use super::messages::{self, CALL, Failure, INITIALIZE, MAX_MESSAGE, ServerMessage};
use super::reading;
use crate::bounds::memory::TenantSemaphore;
use crate::bounds::secrets::StreamRedactor;
use crate::bounds::text::shortened;
use crate::message::visible::escaped;

/// Messages that wait to be written.
const MAX_WRITTEN: usize = 64;
/// Calls that are under way at the same time, those of one tenant and all; further ones wait.
const MAX_CALLS_OF_TENANT: usize = 64;
const MAX_CALLS: usize = 128;
/// Messages that were not asked for: at once, and in a second.
const MAX_BURST: u32 = 2_000;
const MAX_A_SECOND: u32 = 200;
/// Bytes of a line of standard error, and lines: at once, and in a second.
const MAX_LOGGED: usize = 2 * 1024;
const MAX_LOG_BURST: u32 = 50;
const MAX_LOG_A_SECOND: u32 = 2;
/// The last lines of standard error that are kept.
const MAX_LAST: usize = 5;
/// Whose messages are parsed: those of no tenant.
const OF_SERVICE: &str = "";
/// How long a server that has closed its pipes has to say why it has ended.
pub(super) const LAST_WORDS: Duration = Duration::from_secs(1);

type Answer = Result<Value, Failure>;

/// The client's handle on a running server.
#[derive(Clone)]
pub(super) struct Pipes(Arc<Shared>);

struct Shared {
    asked: Mutex<Option<HashMap<u64, oneshot::Sender<Answer>>>>,
    next: AtomicU64,
    write: mpsc::Sender<String>,
    places: TenantSemaphore,
    list_changed: Arc<Notify>,
    /// Notified when a call was given up, because the server may hang.
    given_up: Arc<Notify>,
}

/// The other side of [`Pipes`], for the task that reads and writes the pipes.
pub(super) struct Ends {
    shared: Arc<Shared>,
    written: mpsc::Receiver<String>,
}

/// A token bucket: a burst, and a rate per second.
struct Throttle {
    left: u32,
    most: u32,
    a_second: u32,
    since: Instant,
}

impl Throttle {
    fn new(most: u32, a_second: u32) -> Self {
        Self { left: most, most, a_second, since: Instant::now() }
    }

    fn admits(&mut self) -> bool {
        let seconds = u32::try_from(self.since.elapsed().as_secs()).unwrap_or(u32::MAX);
        if seconds > 0 {
            let earned = seconds.saturating_mul(self.a_second);
            self.left = self.left.saturating_add(earned).min(self.most);
            self.since = Instant::now();
        }
        let may = self.left > 0;
        self.left = self.left.saturating_sub(1);
        may
    }
}

/// A pending request; the server is notified when its answer is no longer needed, unless it
/// is one of those by which its era is found out: of these it need not answer each.
struct PendingRequest<'a> {
    shared: &'a Arc<Shared>,
    id: u64,
    method: &'static str,
}

impl Drop for PendingRequest<'_> {
    fn drop(&mut self) {
        let is_open =
            self.shared.asked.lock().as_mut().is_some_and(|asked| asked.remove(&self.id).is_some());
        if is_open && !matches!(self.method, DISCOVER | INITIALIZE) {
            let _ = self.shared.write.try_send(messages::cancellation(self.id)); // it does not read
            self.shared.given_up.notify_one();
        }
    }
}

impl Pipes {
    pub(super) fn new(list_changed: Arc<Notify>, given_up: Arc<Notify>) -> (Self, Ends) {
        let (write, written) = mpsc::channel(MAX_WRITTEN);
        let shared = Arc::new(Shared {
            asked: Mutex::new(Some(HashMap::new())),
            next: AtomicU64::new(1),
            write,
            places: TenantSemaphore::with_share(MAX_CALLS, MAX_CALLS_OF_TENANT),
            list_changed,
            given_up,
        });
        (Self(Arc::clone(&shared)), Ends { shared, written })
    }

    pub(super) async fn ask(&self, method: &'static str, params: &Value, tenant: &str) -> Answer {
        let gone = || Failure::NotSent("it has ended".to_owned());
        // Only calls need a permit: health checks must not wait for calls.
        let _place = match method {
            CALL => Some(self.0.places.acquire(tenant).await.ok_or_else(gone)?),
            _ => None,
        };
        let id = self.0.next.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = oneshot::channel();
        self.0.asked.lock().as_mut().ok_or_else(gone)?.insert(id, sender);
        let asked = PendingRequest { shared: &self.0, id, method };
        let request = messages::request(id, method, params);
        self.0.write.send(request).await.map_err(|_| gone())?;
        let answer = receiver.await;
        drop(asked);
        answer.unwrap_or_else(|_| Err(Failure::Lost("it has ended".to_owned())))
    }

    /// Sends a request whose answer, if there is one, is ignored.
    pub(super) fn open(&self, method: &str, params: &Value) {
        let id = self.0.next.fetch_add(1, Ordering::Relaxed);
        self.tell(messages::request(id, method, params));
    }

    /// Sends a notification; drops it if the server does not read.
    pub(super) fn tell(&self, message: String) {
        let _ = self.0.write.try_send(message);
    }

    /// Fails all pending requests, and refuses further ones.
    pub(super) fn close(&self, why: &str) {
        let asked = self.0.asked.lock().take().unwrap_or_default();
        for (_, tell) in asked {
            let _ = tell.send(Err(Failure::Lost(why.to_owned())));
        }
    }
}

impl Ends {
    /// Reads and writes until one of both fails, or the server writes too much. Returns the reason, a
    /// phrase, unless the server has simply ended.
    pub(super) async fn served(
        self,
        input: pipe::Sender,
        output: impl AsyncRead + Unpin,
    ) -> Option<String> {
        let Self { shared, written } = self;
        tokio::select! {
            why = listened(&shared, output) => why,
            () = write_messages(written, input) => None,
        }
    }
}

async fn write_messages(mut written: mpsc::Receiver<String>, mut input: pipe::Sender) {
    while let Some(mut message) = written.recv().await {
        message.push('\n');
        if input.write_all(message.as_bytes()).await.is_err() {
            return;
        }
    }
}

async fn listened(shared: &Shared, output: impl AsyncRead + Unpin) -> Option<String> {
    let mut lines = Lines::new(output, MAX_MESSAGE);
    let mut throttle = Throttle::new(MAX_BURST, MAX_A_SECOND);
    loop {
        let message = match lines.next().await {
            Ok(None) => return None,
            Err(error) => return Some(error.to_string()),
            Ok(Some(Line::Whole(line))) => {
                let beginning = line.get(..line.len().min(512)).unwrap_or_default().to_vec();
                reading::read(line, OF_SERVICE).await.map_err(|why| (beginning, why))
            }
            Ok(Some(Line::TooLong(beginning))) => {
                let most = MAX_MESSAGE / (1024 * 1024);
                Err((beginning, format!("it has more than {most} MiB")))
            }
        };
        let is_answer = match message {
            Err((beginning, why)) => messages::id_in(&beginning).is_some_and(|id| {
                let why = format!("its answer cannot be read: {why}");
                answered(shared, id, Err(Failure::Lost(why)))
            }),
            Ok(ServerMessage::Answer(id, answer)) => {
                answered(shared, id, answer.map_err(Failure::Refused))
            }
            Ok(ServerMessage::Ping(reply) | ServerMessage::Refused(reply)) => {
                let _ = shared.write.try_send(reply); // it does not read
                false
            }
            Ok(ServerMessage::ListChanged) => {
                shared.list_changed.notify_one();
                false
            }
            Ok(ServerMessage::Other) => false,
        };
        if !is_answer && !throttle.admits() {
            return Some("it sends too much that was not asked for".to_owned());
        }
    }
}

/// Passes an answer to the request that waits for it; returns whether there is one.
fn answered(shared: &Shared, id: u64, answer: Answer) -> bool {
    let sender = shared.asked.lock().as_mut().and_then(|asked| asked.remove(&id));
    let Some(sender) = sender else { return false };
    let _ = sender.send(answer); // the request was given up
    true
}

/// What a server writes to standard error. One for all starts of a server: each has a burst of lines,
/// and a server that ends at once is started again and again.
pub(super) struct Errors {
    throttle: Throttle,
    dropped: u64,
    /// A secret may have several lines.
    redactor: StreamRedactor,
    /// The last lines since the last start.
    last: VecDeque<String>,
}

impl Errors {
    pub(super) fn new() -> Self {
        let throttle = Throttle::new(MAX_LOG_BURST, MAX_LOG_A_SECOND);
        let redactor = StreamRedactor::default();
        Self { throttle, dropped: 0, redactor, last: VecDeque::new() }
    }

    pub(super) fn last(&self) -> Vec<String> {
        self.last.iter().cloned().collect()
    }

    fn begin(&mut self) {
        self.last.clear();
        self.redactor = StreamRedactor::default();
    }

    fn take(&mut self, server: &str, line: &[u8]) {
        let said = self.redactor.push(&format!("{}\n", String::from_utf8_lossy(line)));
        self.note(server, &said);
    }

    fn end(&mut self, server: &str) {
        let said = self.redactor.finish();
        self.note(server, &said);
    }

    /// Logs lines without secrets.
    fn note(&mut self, server: &str, said: &str) {
        for said in said.lines().map(str::trim_end).filter(|said| !said.is_empty()) {
            if self.last.len() >= MAX_LAST {
                self.last.pop_front();
            }
            self.last.push_back(escaped(&shortened(said)).into_owned());
            if self.throttle.admits() {
                let dropped = std::mem::take(&mut self.dropped);
                tracing::info!(server, dropped, said = %said, "standard error of an MCP server");
            } else {
                self.dropped += 1;
            }
        }
    }
}

/// Logs what the server writes to standard error, until that ends.
pub(super) async fn logged(server: &str, errors: impl AsyncRead + Unpin, into: &Mutex<Errors>) {
    let mut lines = Lines::new(errors, MAX_LOGGED);
    into.lock().begin();
    loop {
        let line = match lines.next().await {
            Ok(Some(Line::Whole(line))) => line,
            Ok(Some(Line::TooLong(beginning))) => whole_words(beginning),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Vec::new(),
            Ok(None) | Err(_) => break,
        };
        into.lock().take(server, &line);
    }
    into.lock().end(server);
}

/// The beginning of a line without its last word, which may be a part of a secret.
fn whole_words(mut beginning: Vec<u8>) -> Vec<u8> {
    beginning.truncate(beginning.iter().rposition(u8::is_ascii_whitespace).map_or(0, |at| at + 1));
    beginning.extend_from_slice(b"[the rest of the line is left out]");
    beginning
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn no_tenant_has_all_places_and_a_health_check_needs_none() {
        let (pipes, mut ends) = Pipes::new(Arc::default(), Arc::default());
        let ask = |method: &'static str, tenant: &'static str| {
            let pipes = pipes.clone();
            tokio::spawn(async move { pipes.ask(method, &Value::Null, tenant).await })
        };
        let mut asked: Vec<_> = (0..=MAX_CALLS_OF_TENANT).map(|_| ask(CALL, "a")).collect();
        for _ in 0..MAX_CALLS_OF_TENANT {
            assert!(ends.written.recv().await.unwrap().contains(CALL));
        }
        asked.push(ask("ping", "a"));
        assert!(ends.written.recv().await.unwrap().contains("ping"));
        asked.push(ask(CALL, "b"));
        assert!(ends.written.recv().await.unwrap().contains(CALL));
        asked.iter().for_each(tokio::task::JoinHandle::abort);
    }

    #[tokio::test]
    async fn secrets_of_several_lines_and_parts_of_them_are_not_logged() {
        let key = "-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----";
        let long = format!("{} ghp_{}", "word ".repeat(98), "hunter2".repeat(300));
        let errors = Mutex::new(Errors::new());
        let lines = format!("it has\n{key}\n{long}\nthe password:\n  hunter2\ndone\n");
        logged("x", lines.as_bytes(), &errors).await;
        let last = errors.lock().last();
        assert!(last.iter().all(|line| !line.contains("hunter")), "{last:?}");
        assert_eq!((last.len(), last[4].as_str()), (MAX_LAST, "done"), "{last:?}");
    }

    #[tokio::test]
    async fn a_server_that_is_started_again_and_again_does_not_flood_the_log() {
        let errors = Mutex::new(Errors::new());
        let lines: Vec<String> = (0..40).map(|n| format!("line {n}\n")).collect();
        let lines = lines.concat();
        for _ in 0..3 {
            logged("x", lines.as_bytes(), &errors).await;
        }
        let errors = errors.lock();
        assert!(errors.dropped >= 120 - u64::from(MAX_LOG_BURST + MAX_LOG_A_SECOND * 3));
        assert_eq!(errors.last(), ["line 35", "line 36", "line 37", "line 38", "line 39"]);
    }
}
