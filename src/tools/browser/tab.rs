//! The events of one page: requests that the browser holds, frames and workers, windows that the page
//! opens, dialogs, downloads, crashes.
//!
//! Every event is answered here, or the page would stop; none of them is trusted. A page that makes
//! too many of them is closed, and its context with it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use futures::future::try_join_all;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use url::Url;

use super::chromium::Chromium;
use super::connection::{Event, EventSender};
use super::downloads::Downloads;
use super::traffic::Traffic;
use crate::bounds::address;

/// Events between the start of one call and that of the next.
const MAX_EVENTS: u64 = 20_000;
/// Events that are being answered.
const MAX_ANSWERED: usize = 2_048;
/// Frames of other sites and workers of one page that run at the same time.
const MAX_TARGETS: usize = 64;
/// Notes for the model in addition to a page's text.
const MAX_NOTES: usize = 10;
const MAX_NOTE: usize = 300;

/// One page of the browser.
pub(super) struct Tab {
    pub(super) chromium: Arc<Chromium>,
    pub(super) traffic: Arc<Traffic>,
    /// Its browser context.
    pub(super) context: String,
    pub(super) session: String,
    /// Also the name of its main frame.
    pub(super) target: String,
    pub(super) address: Mutex<Option<Url>>,
    pub(super) is_loading: AtomicBool,
    pub(super) downloads: Downloads,
    /// Frames and workers that have a session of their own.
    targets: AtomicUsize,
    events: AtomicU64,
    notes: Mutex<BTreeSet<String>>,
    closed: CancellationToken,
    why_closed: Mutex<Option<&'static str>>,
}

impl Tab {
    pub(super) fn new(
        chromium: &Arc<Chromium>,
        traffic: Traffic,
        context: String,
        session: String,
        target: String,
    ) -> Self {
        Self {
            chromium: Arc::clone(chromium),
            traffic: Arc::new(traffic),
            context,
            session,
            target,
            address: Mutex::default(),
            is_loading: AtomicBool::default(),
            downloads: Downloads::default(),
            targets: AtomicUsize::default(),
            events: AtomicU64::default(),
            notes: Mutex::default(),
            closed: CancellationToken::new(),
            why_closed: Mutex::default(),
        }
    }

    pub(super) fn is_open(&self) -> bool {
        !self.closed.is_cancelled() && self.chromium.is_alive()
    }

    pub(super) fn close(&self) {
        self.closed.cancel();
    }

    /// A command of the page's own session.
    ///
    /// # Errors
    /// The browser's error, or why the page is closed.
    pub(super) async fn call(&self, method: &str, params: Value) -> Result<Value, String> {
        let called = self.chromium.call(Some(&self.session), method, params);
        match self.closed.run_until_cancelled(called).await {
            Some(Ok(reply)) => Ok(reply),
            Some(Err(why)) => Err(self.why_closed.lock().map_or(why, str::to_owned)),
            None => Err(self.why_closed.lock().unwrap_or("the page is closed").to_owned()),
        }
    }

    /// Begins a call: resets the counters.
    pub(super) fn begin(&self) {
        self.events.store(0, Ordering::Relaxed);
        self.notes.lock().clear();
    }

    /// Notes for the model since the call began.
    pub(super) fn notes(&self) -> Vec<String> {
        self.notes.lock().iter().cloned().collect()
    }

    fn note(&self, note: String) {
        let mut notes = self.notes.lock();
        if notes.len() < MAX_NOTES {
            notes.insert(note);
        }
    }

    /// Makes the browser hold the requests of a session, and pause the targets that it starts until they are set up.
    pub(super) async fn hold_requests(&self, session: &str) -> Result<(), String> {
        let targets = json!({"autoAttach": true, "waitForDebuggerOnStart": true, "flatten": true});
        let commands = [("Fetch.enable", json!({})), ("Target.setAutoAttach", targets)];
        let sent = commands
            .into_iter()
            .map(|(method, params)| self.chromium.call(Some(session), method, params));
        try_join_all(sent).await.map(|_| ())
    }

    async fn resume(&self, session: &str) {
        let resume = "Runtime.runIfWaitingForDebugger";
        let _ = self.chromium.call(Some(session), resume, json!({})).await; // it may be gone
    }

    /// A frame of another site or a worker that the page has started.
    async fn attend_to_part(&self, session: String, kind: &str, events: EventSender) {
        if self.targets.fetch_add(1, Ordering::Relaxed) >= MAX_TARGETS {
            return; // it stays stopped
        }
        if kind == "iframe" {
            self.chromium.connection().subscribe(&session, events);
            // Its downloads are reported to no one else.
            let enabled = self.chromium.call(Some(&session), "Page.enable", json!({}));
            let (held, enabled) = tokio::join!(self.hold_requests(&session), enabled);
            if held.is_err() || enabled.is_err() {
                return;
            }
        }
        self.resume(&session).await;
    }

    /// A window that the page has opened, or a worker that outlives pages: it is closed. A window goes
    /// on before that, for the page waits for it, and its requests stay held.
    async fn close_target(&self, session: &str, target: Value) {
        if target["type"] == "page" && self.hold_requests(session).await.is_ok() {
            self.resume(session).await;
        }
        let close = json!({"targetId": target["targetId"]});
        let _ = self.chromium.call(None, "Target.closeTarget", close).await; // it may be gone
    }

    async fn answer_dialog(&self, dialog: Value) {
        let leaves = dialog["type"] == "beforeunload";
        if !leaves {
            let said = dialog["message"].as_str().unwrap_or_default();
            self.note(format!("the page showed a dialog, which was dismissed: {:?}", cut(said)));
        }
        let answer = json!({"accept": leaves});
        let _ = self.call("Page.handleJavaScriptDialog", answer).await; // it may be gone
    }

    /// Records an event about the page. Events that need an answer are handled elsewhere.
    fn take_note(&self, method: &str, params: &Value) {
        let is_main = |frame: &Value| *frame == self.target.as_str();
        let shown = |url: &Value| cut(url.as_str().unwrap_or_default());
        match method {
            "Page.frameNavigated" if is_main(&params["frame"]["id"]) => {
                let url = params["frame"]["url"].as_str().unwrap_or_default();
                *self.address.lock() = address::read(url).ok();
            }
            "Page.frameStartedLoading" if is_main(&params["frameId"]) => {
                self.is_loading.store(true, Ordering::Relaxed);
            }
            "Page.frameStoppedLoading" if is_main(&params["frameId"]) => {
                self.is_loading.store(false, Ordering::Relaxed);
            }
            "Page.windowOpen" => {
                let url = shown(&params["url"]);
                self.note(format!("the page wanted a new window, which was closed: {url:?}"));
            }
            "Page.downloadWillBegin" => {
                if let Err(why) = self.downloads.begun(params) {
                    let url = shown(&params["url"]);
                    self.note(format!("the download of {url:?} was refused: {why}"));
                }
            }
            "Page.downloadProgress" => self.downloads.progressed(params),
            _ => {}
        }
    }

    fn fail(&self, why: &'static str) {
        self.why_closed.lock().get_or_insert(why);
    }
}

/// Answers the events of a page until it is closed, and then ends its context.
pub(super) async fn handle_events(
    tab: Arc<Tab>,
    sender: EventSender,
    mut events: mpsc::Receiver<Event>,
) {
    let subscription = sender.downgrade();
    drop(sender);
    let mut answers = JoinSet::new();
    loop {
        let event = tokio::select! {
            biased;
            () = tab.closed.cancelled() => break,
            event = events.recv() => event,
        };
        let (Some(event), Some(sender)) = (event, subscription.upgrade()) else {
            tab.fail(if tab.chromium.is_alive() { TOO_MUCH } else { "the browser has ended" });
            break;
        };
        while answers.try_join_next().is_some() {}
        let count = tab.events.fetch_add(1, Ordering::Relaxed);
        if count > MAX_EVENTS || answers.len() >= MAX_ANSWERED {
            tab.fail(TOO_MUCH);
            break;
        }
        tab.take_note(&event.method, &event.params);
        match event.method.as_str() {
            "Inspector.targetCrashed" if event.session.as_ref() == Some(&tab.session) => {
                tab.fail("the page crashed: it may have taken too much memory");
                break;
            }
            "Target.detachedFromTarget" => {
                let session = event.params["sessionId"].as_str().unwrap_or_default();
                if session == tab.session {
                    tab.fail("the page was closed");
                    break;
                }
                tab.chromium.connection().unsubscribe(session);
                if event.session.is_some() {
                    let less = |targets: usize| targets.checked_sub(1);
                    let _ = tab.targets.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
                }
            }
            _ => {
                answers.spawn(answer(Arc::clone(&tab), event, sender));
            }
        }
    }
    tab.closed.cancel();
    drop(answers);
    dispose(&tab.chromium, &tab.context, &subscription).await;
}

/// Ends a browser context and what is in it, and the subscription to its events.
pub(super) async fn dispose(
    chromium: &Chromium,
    context: &str,
    subscription: &mpsc::WeakSender<Event>,
) {
    if let Some(sender) = subscription.upgrade() {
        chromium.connection().unsubscribe_all(&sender);
    }
    let context = json!({"browserContextId": context});
    let _ = chromium.call(None, "Target.disposeBrowserContext", context).await; // it may be gone
}

const TOO_MUCH: &str = "the page was closed: it did too much at once";

async fn answer(tab: Arc<Tab>, event: Event, sender: EventSender) {
    let Event { session, method, mut params } = event;
    match (method.as_str(), session) {
        ("Fetch.requestPaused", Some(session)) => {
            drop(sender);
            let traffic = Arc::clone(&tab.traffic);
            traffic.answer(&tab.chromium, &session, params).await;
        }
        ("Page.downloadWillBegin" | "Page.downloadProgress", _)
            if tab.downloads.is_unwanted(&params) =>
        {
            let cancel = json!({"guid": params["guid"], "browserContextId": tab.context});
            let _ = tab.chromium.call(None, "Browser.cancelDownload", cancel).await; // it may have ended
        }
        ("Page.javascriptDialogOpening", _) => tab.answer_dialog(params).await,
        ("Target.attachedToTarget", session) => {
            let target = params["targetInfo"].take();
            let Some(attached) = params["sessionId"].as_str().map(str::to_owned) else { return };
            let kind = target["type"].as_str().unwrap_or_default().to_owned();
            if session.is_some() && matches!(kind.as_str(), "iframe" | "worker") {
                tab.attend_to_part(attached, &kind, sender).await;
            } else if target["targetId"] != tab.target.as_str() {
                drop(sender);
                tab.close_target(&attached, target).await;
            }
        }
        _ => {}
    }
}

fn cut(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_NOTE).collect()
}
