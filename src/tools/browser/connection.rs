//! The DevTools protocol over a pipe: commands and their replies, and events by session.
//!
//! The browser's messages are not trusted: their size is bounded, events that are not read in time close
//! their page, and unreadable messages are skipped.
//!
//! Protocol: <https://chromedevtools.github.io/devtools-protocol/>, JSON texts that end in a zero byte.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{ChildStdin, ChildStdout};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::bounds;

/// Bytes of one message of the browser: a screenshot is the longest.
const MAX_MESSAGE: usize = 48 * 1024 * 1024;
/// Bytes of an event: that of a request holds its body twice.
const MAX_EVENT: usize = 4 * 1024 * 1024;
/// Messages above this are parsed on a thread of their own.
const LARGE_MESSAGE: usize = 256 * 1024;
/// Commands that wait to be written.
const MAX_COMMANDS: usize = 64;
/// Events that wait to be read.
const MAX_EVENTS: usize = 1_024;
/// The error of a command after the browser has ended.
const GONE: &str = "the browser has ended";
/// The error of a command to a page or a part of it that has gone in the meantime: the browser never answers it.
const CLOSED: &str = "the page was closed";

/// An event of a session, or of the browser itself.
#[derive(Debug)]
pub(super) struct Event {
    pub(super) session: Option<String>,
    pub(super) method: String,
    pub(super) params: Value,
}

/// Receives the events of a page.
pub(super) type EventSender = mpsc::Sender<Event>;

/// A connection to a browser. It closes when it is dropped.
pub(super) struct Connection {
    commands: mpsc::Sender<Vec<u8>>,
    shared: Arc<Shared>,
    next_id: AtomicU64,
}

#[derive(Default)]
struct Shared {
    commands: Mutex<HashMap<u64, SentCommand>>,
    /// The receivers of events by session.
    sessions: Mutex<HashMap<String, EventSender>>,
    /// Receivers of new targets in a browser context.
    contexts: Mutex<HashMap<String, EventSender>>,
    closed: CancellationToken,
}

/// A command that is not answered yet.
struct SentCommand {
    session: Option<String>,
    reply: oneshot::Sender<Result<Value, String>>,
}

/// Removes a command whose caller was cancelled.
struct Awaited<'a> {
    id: u64,
    shared: &'a Shared,
}

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        self.shared.commands.lock().remove(&self.id);
    }
}

impl Connection {
    pub(super) fn new(to: ChildStdin, from: ChildStdout) -> Self {
        let shared = Arc::<Shared>::default();
        let (commands, queued) = mpsc::channel(MAX_COMMANDS);
        tokio::spawn(write(to, queued, shared.closed.clone()));
        tokio::spawn(read(from, Arc::clone(&shared)));
        Self { commands, shared, next_id: 1.into() }
    }

    pub(super) fn is_open(&self) -> bool {
        !self.shared.closed.is_cancelled()
    }

    pub(super) fn close(&self) {
        self.shared.closed.cancel();
    }

    /// One command, of the browser or of a session, and its reply.
    ///
    /// # Errors
    /// The browser's error, or that it has ended.
    pub(super) async fn call(
        &self,
        session: Option<&str>,
        method: &str,
        params: Value,
    ) -> Result<Value, String> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let mut command = json!({"id": id, "method": method, "params": params});
        if let Some(session) = session {
            command["sessionId"] = session.into();
        }
        let mut bytes = command.to_string().into_bytes();
        drop(command);
        bytes.push(0);
        let (reply, replied) = oneshot::channel();
        let _awaited = Awaited { id, shared: &self.shared };
        let sent = SentCommand { session: session.map(str::to_owned), reply };
        self.shared.commands.lock().insert(id, sent);
        let replied = async {
            self.commands.send(bytes).await.ok()?;
            replied.await.ok()
        };
        tokio::select! {
            reply = replied => reply.unwrap_or_else(|| Err(GONE.to_owned())),
            () = self.shared.closed.cancelled() => Err(GONE.to_owned()),
        }
    }

    /// A bounded queue for events.
    pub(super) fn channel() -> (EventSender, mpsc::Receiver<Event>) {
        mpsc::channel(MAX_EVENTS)
    }

    /// Sends the events of a session there from now on.
    pub(super) fn subscribe(&self, session: &str, events: EventSender) {
        self.shared.sessions.lock().insert(session.to_owned(), events);
    }

    /// Sends events about new targets of a browser context there.
    pub(super) fn watch_context(&self, context: &str, events: EventSender) {
        self.shared.contexts.lock().insert(context.to_owned(), events);
    }

    pub(super) fn unsubscribe(&self, session: &str) {
        self.shared.sessions.lock().remove(session);
    }

    /// Stops sending events there.
    pub(super) fn unsubscribe_all(&self, events: &EventSender) {
        self.shared.sessions.lock().retain(|_, other| !other.same_channel(events));
        self.shared.contexts.lock().retain(|_, other| !other.same_channel(events));
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.close();
    }
}

async fn write(mut to: ChildStdin, mut queued: mpsc::Receiver<Vec<u8>>, closed: CancellationToken) {
    let writing = async {
        while let Some(command) = queued.recv().await {
            to.write_all(&command).await?;
            to.flush().await?;
        }
        io::Result::Ok(())
    };
    let _ = closed.run_until_cancelled(writing).await; // whatever ended it, the pipe is closed
    closed.cancel();
}

async fn read(from: ChildStdout, shared: Arc<Shared>) {
    let mut from = BufReader::with_capacity(64 * 1024, from);
    let reading = async {
        while let Ok(Some(message)) = next_message(&mut from).await {
            let length = message.len();
            let parse = move || bounds::json::read::<Value>(&message).ok();
            let parsed = if length > LARGE_MESSAGE {
                tokio::task::spawn_blocking(parse).await.ok().flatten()
            } else {
                parse()
            };
            if let Some(parsed) = parsed {
                shared.take(parsed, length);
            }
        }
    };
    shared.closed.run_until_cancelled(reading).await;
    shared.closed.cancel();
    shared.sessions.lock().clear();
    shared.contexts.lock().clear();
}

/// The next message that is not too long; none at the end.
async fn next_message(from: &mut BufReader<ChildStdout>) -> io::Result<Option<Vec<u8>>> {
    loop {
        let mut message = Vec::new();
        let mut is_too_long = false;
        loop {
            let chunk = from.fill_buf().await?;
            if chunk.is_empty() {
                return Ok(None);
            }
            let end = chunk.iter().position(|byte| *byte == 0);
            let taken = end.unwrap_or(chunk.len());
            is_too_long |= message.len() + taken > MAX_MESSAGE;
            if is_too_long {
                message = Vec::new();
            } else {
                message.extend_from_slice(chunk.get(..taken).unwrap_or_default());
            }
            from.consume(taken + usize::from(end.is_some()));
            if end.is_some() {
                break;
            }
        }
        if !is_too_long {
            return Ok(Some(message));
        }
    }
}

impl Shared {
    fn take(&self, mut message: Value, length: usize) {
        if let Some(id) = message["id"].as_u64() {
            let Some(command) = self.commands.lock().remove(&id) else { return };
            let error = message["error"]["message"].as_str().map(str::to_owned);
            let _ = command.reply.send(error.map_or_else(|| Ok(message["result"].take()), Err));
            return;
        }
        let Some(method) = message["method"].as_str().map(str::to_owned) else { return };
        let session = message["sessionId"].as_str().map(str::to_owned);
        let mut params = message["params"].take();
        if length > MAX_EVENT {
            let Some(request) = params["request"].as_object_mut() else { return };
            // Without its body it is refused.
            request.remove("postData");
            request.remove("postDataEntries");
        }
        if method == "Target.detachedFromTarget"
            && let Some(session) = params["sessionId"].as_str()
        {
            self.fail_commands(session);
        }
        let event = Event { session, method, params };
        if let Some(session) = event.session.clone() {
            send(&self.sessions, &session, event);
            return;
        }
        let context = event.params["targetInfo"]["browserContextId"].as_str().map(str::to_owned);
        let detached = event.params["sessionId"].as_str().map(str::to_owned);
        match (context, detached) {
            (Some(context), _) => send(&self.contexts, &context, event),
            (None, Some(detached)) => send(&self.sessions, &detached, event),
            (None, None) => {}
        }
    }

    /// Fails the commands of a session that has ended.
    fn fail_commands(&self, session: &str) {
        let is_of_session =
            |_: &u64, command: &mut SentCommand| command.session.as_deref() == Some(session);
        let failed: Vec<_> = self.commands.lock().extract_if(is_of_session).collect();
        for (_, SentCommand { reply, .. }) in failed {
            let _ = reply.send(Err(CLOSED.to_owned())); // its caller may have gone
        }
    }
}

/// Passes an event on. A reader that does not keep up is unsubscribed, and its channel closes.
fn send(readers: &Mutex<HashMap<String, EventSender>>, reader: &str, event: Event) {
    let mut readers = readers.lock();
    let is_lost = |events: &EventSender| events.try_send(event).is_err();
    let lost = readers.get(reader).cloned().filter(is_lost);
    if let Some(lost) = lost {
        readers.retain(|_, other| !other.same_channel(&lost));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_command_waits_for_a_session_that_has_ended() {
        let shared = Shared::default();
        let sent = |id, session: Option<&str>| {
            let (reply, replied) = oneshot::channel();
            let session = session.map(str::to_owned);
            shared.commands.lock().insert(id, SentCommand { session, reply });
            replied
        };
        let (mut of_frame, mut of_page, mut of_browser) =
            (sent(1, Some("frame")), sent(2, Some("page")), sent(3, None));
        let detached = json!({"method": "Target.detachedFromTarget", "sessionId": "page",
            "params": {"sessionId": "frame"}});
        shared.take(detached, 100);
        assert_eq!(of_frame.try_recv().ok(), Some(Err(CLOSED.to_owned())));
        assert!(of_page.try_recv().is_err() && of_browser.try_recv().is_err());
        shared.take(json!({"id": 2, "result": 7}), 100);
        assert_eq!(of_page.try_recv().ok(), Some(Ok(json!(7))));
        assert_eq!(shared.commands.lock().len(), 1);
    }
}
