//! One page: an isolated context of the browser with one tab, as long as its run uses it.
//!
//! The content is read by `page.js` in an isolated world of the page. Clicks and keys are sent as input
//! events, like those of a person. The caller bounds the time. The content of a page is text for the
//! model and is never interpreted here.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use cap_std::fs::Dir;
use futures::future::try_join_all;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use url::Url;

use super::chromium::Chromium;
use super::connection::{Connection, Event};
use super::downloads::Download;
use super::tab::{Tab, dispose, handle_events};
use super::traffic::{NetworkAccess, OpenAccess, Traffic};
use crate::outbound::Client;

/// In the page's own world: defines `toolloop`, once a document.
const SCRIPT: &str = include_str!("page.js");
/// A page without requests for this long has settled.
const QUIET: Duration = Duration::from_millis(300);
/// A page whose requests are not answered has settled if it makes no more of them for this long.
const WAITS_IN_VAIN: Duration = Duration::from_secs(3);
/// A page that does not settle is taken as it is after this time, or after a part of the call's timeout.
const RESTLESS: Duration = Duration::from_secs(10);
const PART: u32 = 2;
/// Between two looks at a page that has not settled.
const POLL_INTERVAL: Duration = Duration::from_millis(25);
/// Tries to evaluate a script in a page that is reloaded in the meantime.
const TRIES: usize = 5;
const GONE: &str = "the browser has ended";
/// The browser's answer where a page has no document at the moment.
const DETACHED: &str = "Not attached to an active page";
/// Bytes of its text.
const MAX_TEXT: usize = 256 * 1024;

/// How large the page is, in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Viewport {
    pub width: u32,
    pub height: u32,
}

/// What a page shows.
#[derive(Debug, Default)]
pub(super) struct Shown {
    pub(super) title: String,
    pub(super) text: String,
    pub(super) is_whole: bool,
}

/// A page; its context ends when it is dropped.
pub(super) struct Page {
    tab: Arc<Tab>,
    /// The number of the next reference to an element: none is given twice.
    next_reference: AtomicU64,
    settles_within: Duration,
}

impl Page {
    pub(super) async fn new(
        chromium: &Arc<Chromium>,
        client: Client,
        viewport: Viewport,
        timeout: Duration,
    ) -> Result<Self, String> {
        let own = json!({"disposeOnDetach": true});
        let context = chromium.call(None, "Target.createBrowserContext", own).await?;
        let context = text(&context["browserContextId"])?;
        let (sender, mut events) = Connection::channel();
        let subscription = sender.downgrade();
        chromium.connection().watch_context(&context, sender);
        let attached = attached(chromium, &context, viewport, &mut events).await;
        let attached = attached.and_then(|ids| Ok((ids, subscription.upgrade().ok_or(GONE)?)));
        let ((target, session), sender) = match attached {
            Ok(attached) => attached,
            Err(why) => {
                dispose(chromium, &context, &subscription).await;
                return Err(why);
            }
        };
        chromium.connection().subscribe(&session, sender.clone());
        let traffic = Traffic::new(client, timeout);
        let tab = Arc::new(Tab::new(chromium, traffic, context, session, target));
        let settles_within = RESTLESS.min(timeout / PART);
        let page = Self { tab, next_reference: 1.into(), settles_within };
        tokio::spawn(handle_events(Arc::clone(&page.tab), sender, events));
        page.prepare(viewport).await?;
        Ok(page)
    }

    /// Sets the page up before any of its scripts runs.
    async fn prepare(&self, Viewport { width, height }: Viewport) -> Result<(), String> {
        let tab = &self.tab;
        let size =
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        let commands = [
            ("Page.enable", json!({})),
            ("Inspector.enable", json!({})),
            ("Page.setInterceptFileChooserDialog", json!({"enabled": true})),
            ("Network.setBypassServiceWorker", json!({"bypass": true})),
            ("Emulation.setDeviceMetricsOverride", size),
        ];
        let sent = commands.into_iter().map(|(method, params)| tab.call(method, params));
        let deny = json!({"behavior": "deny", "browserContextId": tab.context});
        let denied = tab.chromium.call(None, "Browser.setDownloadBehavior", deny);
        tokio::try_join!(tab.hold_requests(&tab.session), try_join_all(sent), denied)?;
        tab.call("Runtime.runIfWaitingForDebugger", json!({})).await.map(|_| ())
    }

    pub(super) fn is_open(&self) -> bool {
        self.tab.is_open()
    }

    /// Gives it the network access of a call, until the returned guard is dropped.
    pub(super) fn open_network(&self, access: NetworkAccess) -> OpenAccess<'_> {
        self.tab.begin();
        self.tab.traffic.open(access)
    }

    /// The address of what it shows; `None` before something was opened.
    pub(super) fn address(&self) -> Option<Url> {
        self.tab.address.lock().clone()
    }

    /// Notes for the model in addition to its text.
    pub(super) fn notes(&self) -> Vec<String> {
        self.tab.notes()
    }

    pub(super) async fn open(&self, url: &Url) -> Result<(), String> {
        let opened = self.tab.call("Page.navigate", json!({"url": url.as_str()})).await?;
        if opened["isDownload"] == true {
            let why = "it is a file to download, and open only reads: open the page that has the link \
                       to it, and click it";
            return Err(why.into());
        }
        match opened["errorText"].as_str() {
            Some("net::ERR_BLOCKED_BY_CLIENT") => Err("its request was refused, or failed".into()),
            Some(error) => Err(error.trim_start_matches("net::").to_owned()),
            None => self.settle().await,
        }
    }

    /// Makes the browser store the downloads of the page, until [`Self::downloaded`].
    pub(super) async fn accept_downloads(&self) -> Result<(), String> {
        let place = self.tab.downloads.begin(&self.tab.chromium.downloads());
        let place = place.map_err(|error| format!("no file can be stored: {}", error.kind()))?;
        let accept = json!({"behavior": "allowAndName", "downloadPath": place,
            "browserContextId": self.tab.context});
        self.tab.chromium.call(None, "Browser.setDownloadBehavior", accept).await.map(|_| ())
    }

    /// The downloads that began since then, and their directory.
    pub(super) async fn downloaded(&self) -> Option<(Arc<Dir>, Vec<Download>)> {
        let arrive = async {
            while self.tab.downloads.are_arriving() && self.is_open() {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        let _ = tokio::time::timeout(self.settles_within, arrive).await; // what is missing is reported
        let arrived = self.tab.downloads.end();
        let deny = json!({"behavior": "deny", "browserContextId": self.tab.context});
        if self.tab.chromium.call(None, "Browser.setDownloadBehavior", deny).await.is_err() {
            self.tab.close();
        }
        arrived
    }

    pub(super) async fn click(&self, selector: &str) -> Result<(), String> {
        let point = self.evaluate(&format!("point({})", Value::from(selector))).await?;
        accepted(selector, &point)?;
        let button = |kind: &str, buttons: u32| {
            json!({"type": kind, "x": point["x"], "y": point["y"], "button": "left",
                "buttons": buttons, "clickCount": 1})
        };
        for event in [button("mousePressed", 1), button("mouseReleased", 0)] {
            self.tab.call("Input.dispatchMouseEvent", event).await?;
        }
        self.settle().await
    }

    /// Replaces the content of a field. A line break at the end presses Enter.
    pub(super) async fn enter(&self, selector: &str, text: &str) -> Result<(), String> {
        let line = text.trim_end_matches('\n');
        let focus = format!("focus({}, {})", Value::from(selector), Value::from(line));
        let focused = self.evaluate(&focus).await?;
        accepted(selector, &focused)?;
        if focused["isDone"] != true {
            if line.is_empty() {
                self.press("Delete", 46, "").await?;
            } else {
                self.tab.call("Input.insertText", json!({"text": line})).await?;
            }
        }
        if line.len() < text.len() {
            self.press("Enter", 13, "\r").await?;
        }
        self.settle().await
    }

    async fn press(&self, key: &str, code: u32, text: &str) -> Result<(), String> {
        for kind in ["keyDown", "keyUp"] {
            let mut event =
                json!({"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code});
            if kind == "keyDown" && !text.is_empty() {
                event["text"] = text.into();
            }
            self.tab.call("Input.dispatchKeyEvent", event).await?;
        }
        Ok(())
    }

    pub(super) async fn read(&self) -> Result<Shown, String> {
        let first = self.next_reference.load(Ordering::Relaxed);
        let read = self.evaluate(&format!("read({first})")).await?;
        if let Some(next) = read["next"].as_u64() {
            self.next_reference.fetch_max(next, Ordering::Relaxed);
        }
        let part = |name: &str| {
            let part = read[name].as_str().unwrap_or_default();
            part[..part.floor_char_boundary(MAX_TEXT)].to_owned()
        };
        let (title, text) = (part("title"), part("text"));
        Ok(Shown { title, text, is_whole: read["isWhole"] == true })
    }

    /// A picture of it as PNG.
    pub(super) async fn picture(&self) -> Result<Vec<u8>, String> {
        let taken = self.tab.call("Page.captureScreenshot", json!({"format": "png"})).await?;
        let data = taken["data"].as_str().unwrap_or_default();
        BASE64_STANDARD.decode(data).map_err(|_| "the browser gave no picture".to_owned())
    }

    /// Waits until it is loaded and sends no more requests, within bounds.
    async fn settle(&self) -> Result<(), String> {
        let settled = async {
            loop {
                tokio::time::sleep(POLL_INTERVAL).await;
                let is_loading = self.tab.is_loading.load(Ordering::Relaxed);
                let traffic = &self.tab.traffic;
                let is_quiet = !is_loading && traffic.is_quiet(QUIET);
                if is_quiet && !self.awaits_files()
                    || traffic.is_stalled_for(WAITS_IN_VAIN)
                    || !self.is_open()
                {
                    break;
                }
            }
        };
        let _ = tokio::time::timeout(self.settles_within, settled).await; // it is taken as it is then
        self.check_attached().await
    }

    /// Checks that the browser still has the page. While a document is being replaced the browser may
    /// deny it, so a page counts as closed only if that persists.
    async fn check_attached(&self) -> Result<(), String> {
        for _ in 0..TRIES {
            match self.tab.call("Page.getNavigationHistory", json!({})).await {
                Err(why) if why == DETACHED => tokio::time::sleep(POLL_INTERVAL).await,
                asked => return asked.map(|_| ()),
            }
        }
        self.tab.close();
        Err("the page does not stay as it is for long enough, and was closed".into())
    }

    /// Whether a download is running, or was just answered and is not reported by the browser yet.
    fn awaits_files(&self) -> bool {
        let Tab { traffic, downloads, .. } = &*self.tab;
        let is_untold = downloads.are_fewer_than(traffic.files());
        downloads.are_arriving() || is_untold && !traffic.is_quiet(WAITS_IN_VAIN)
    }

    /// The value of a function of our script in the page, which may be replaced by another one
    /// in the meantime.
    async fn evaluate(&self, call: &str) -> Result<Value, String> {
        for _ in 0..TRIES {
            match self.evaluate_once(call).await {
                Err(why) if why.contains("context") => tokio::time::sleep(POLL_INTERVAL).await,
                evaluated => return evaluated,
            }
        }
        Err("the page does not stay as it is for long enough to be used".into())
    }

    async fn evaluate_once(&self, call: &str) -> Result<Value, String> {
        let world = json!({"frameId": self.tab.target, "worldName": "toolloop"});
        let world = self.tab.call("Page.createIsolatedWorld", world).await?;
        let expression = format!("if (!globalThis.toolloop) {{\n{SCRIPT}\n}}\ntoolloop.{call}");
        let evaluated = json!({"contextId": world["executionContextId"], "expression": expression,
            "returnByValue": true});
        let mut evaluated = self.tab.call("Runtime.evaluate", evaluated).await?;
        if evaluated.get("exceptionDetails").is_some() {
            return Err("the page cannot be read as it is now".into());
        }
        Ok(evaluated["result"]["value"].take())
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.tab.close();
    }
}

fn accepted(selector: &str, answer: &Value) -> Result<(), String> {
    match answer["wrong"].as_str() {
        Some(wrong) => Err(format!("{selector:?} {wrong}")),
        None => Ok(()),
    }
}

/// Opens a tab in a context; the ids of its target and its session.
async fn attached(
    chromium: &Chromium,
    context: &str,
    Viewport { width, height }: Viewport,
    events: &mut mpsc::Receiver<Event>,
) -> Result<(String, String), String> {
    let blank = json!({"url": "about:blank", "browserContextId": context, "width": width, "height": height});
    let created = chromium.call(None, "Target.createTarget", blank).await?;
    let target = text(&created["targetId"])?;
    while let Some(event) = events.recv().await {
        if event.params["targetInfo"]["targetId"] == target.as_str() {
            return Ok((target, text(&event.params["sessionId"])?));
        }
    }
    Err(GONE.into())
}

fn text(value: &Value) -> Result<String, String> {
    value.as_str().map(str::to_owned).ok_or_else(|| "the browser answers in an unknown way".into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// A browser without tabs: each is refused, or never attached.
    const BROWSER: &str = r#"#!/usr/bin/env python3
import json, os
left, contexts, tabs = b"", 0, 0
while chunk := os.read(3, 65536):
    *messages, left = (left + chunk).split(b"\0")
    for asked in map(json.loads, messages):
        answer = {"result": {"browserContextId": "c", "targetId": "t"}}
        if asked["method"] == "Target.createBrowserContext":
            contexts += 1
        elif asked["method"] == "Target.disposeBrowserContext":
            contexts -= 1
        elif asked["method"] == "Target.createTarget":
            tabs += 1
            if asked["params"]["width"] == 1:
                answer = {"error": {"message": "no room"}}
        elif asked["method"] == "count":
            answer = {"result": {"contexts": contexts, "tabs": tabs}}
        os.write(4, json.dumps({"id": asked["id"], **answer}).encode() + b"\0")
"#;

    #[tokio::test]
    async fn a_context_without_its_tab_ends_and_waits_for_no_browser_that_has_ended() {
        let place = tempfile::tempdir().unwrap();
        let program = place.path().join("browser");
        std::fs::write(&program, BROWSER).unwrap();
        for path in [place.path(), program.as_path()] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        let chromium = Arc::new(Chromium::start(&program).await.unwrap());
        let page = |width| {
            let viewport = Viewport { width, height: 1 };
            let chromium = Arc::clone(&chromium);
            async move { Page::new(&chromium, Client::new(), viewport, RESTLESS).await.err() }
        };
        let count = async || chromium.call(None, "count", json!({})).await.unwrap();
        assert_eq!(page(1).await.as_deref(), Some("no room"));
        assert_eq!(count().await, json!({"contexts": 0, "tabs": 1}));
        let waiting = tokio::spawn(page(2));
        while count().await["tabs"] == 1 {
            tokio::task::yield_now().await;
        }
        chromium.connection().close();
        assert_eq!(waiting.await.unwrap().as_deref(), Some(GONE));
    }
}
