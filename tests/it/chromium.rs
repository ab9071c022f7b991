//! A real Chromium without a window, driven over its DevTools protocol: one browser, one page unless more are opened.
//!
//! It does what a person does (keys, clicks, looking) and notes what a person would not see: errors
//! on the console, violations of the page's policy, requests to other hosts. It knows nothing of
//! our pages.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::sync::{oneshot, watch};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

use crate::installing;

/// How long something that must happen may take.
const PATIENCE: Duration = Duration::from_mins(4);

/// What an observer of a page is told of.
const ALL_CHANGES: &str = "{subtree: true, childList: true, attributes: true, characterData: true}";

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

pub(crate) struct Chromium {
    child: Child,
    _profile: TempDir,
    to_browser: tokio::sync::Mutex<SplitSink<Socket, Message>>,
    heard: Arc<Heard>,
    next_id: AtomicU64,
    session: String,
}

/// What the browser says.
#[derive(Default)]
struct Heard {
    waiting: Mutex<HashMap<u64, oneshot::Sender<Value>>>,
    events: watch::Sender<Vec<Value>>,
}

impl Chromium {
    pub(crate) async fn start() -> Self {
        let profile = TempDir::new().unwrap();
        let mut child = Command::new(program())
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
            ])
            .args([
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--disable-extensions",
                "--disable-component-extensions-with-background-pages",
                "--disable-default-apps",
                "--disable-breakpad",
                // A window's own pages cost more than the page in it.
                "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup,WebUIOmniboxFullPopup,OmniboxAimPopup,\
                 PreloadTopChromeWebUI,PreloadTopChromeWebUILessNavigations,MediaRouter,Translate,OptimizationHints",
            ])
            .args(["--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let (socket, _) = connect_async(address(&mut child).await).await.unwrap();
        let (to_browser, from_browser) = socket.split();
        let heard = Arc::<Heard>::default();
        tokio::spawn(listen(from_browser, Arc::clone(&heard)));
        let to_browser = to_browser.into();
        let mut browser = Self {
            child,
            _profile: profile,
            to_browser,
            heard,
            next_id: 1.into(),
            session: String::new(),
        };

        browser.new_tab().await;
        browser
    }

    /// Opens another tab, in which everything happens from now on; the one that it was before.
    pub(crate) async fn new_tab(&mut self) -> String {
        let before = std::mem::take(&mut self.session);
        let target = self.call("Target.createTarget", json!({"url": "about:blank"})).await;
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let attached = self.call("Target.attachToTarget", attach).await;
        self.session = attached["sessionId"].as_str().unwrap().into();
        for domain in ["Page", "Runtime", "Network", "Log"] {
            self.call(&format!("{domain}.enable"), json!({})).await;
        }
        self.call("Page.setLifecycleEventsEnabled", json!({"enabled": true})).await;
        self.window(1280, 900).await;
        before
    }

    /// Switches to another tab; returns the previous one.
    pub(crate) async fn switch_tab(&mut self, tab: String) -> String {
        let before = std::mem::replace(&mut self.session, tab);
        self.call("Page.bringToFront", json!({})).await;
        before
    }

    /// One command of the protocol.
    pub(crate) async fn call(&self, method: &str, params: Value) -> Value {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (tell, answer) = oneshot::channel();
        self.heard.waiting.lock().unwrap().insert(id, tell);
        let mut command = json!({"id": id, "method": method, "params": params});
        if !self.session.is_empty() {
            command["sessionId"] = self.session.as_str().into();
        }
        self.to_browser.lock().await.send(Message::text(command.to_string())).await.unwrap();
        let answer = tokio::time::timeout(PATIENCE, answer).await;
        let mut answer = answer.unwrap_or_else(|_| panic!("{method} was not answered")).unwrap();
        assert!(answer.get("error").is_none(), "{method}: {}", answer["error"]);
        answer["result"].take()
    }

    /// Loads a page anew.
    pub(crate) async fn open(&self, url: &str) {
        let navigation = self.call("Page.navigate", json!({"url": url})).await;
        let is_load = |event: &Value| {
            event["method"] == "Page.lifecycleEvent"
                && event["params"]["name"] == "load"
                && event["params"]["loaderId"] == navigation["loaderId"]
        };
        let mut events = self.heard.events.subscribe();
        let loaded = events.wait_for(|events| events.iter().any(is_load));
        tokio::time::timeout(PATIENCE, loaded).await.expect("the page is loaded").unwrap();
    }

    /// Goes to another page of the console. What the page before it showed is gone after it.
    pub(crate) async fn go(&self, page: &str) {
        let hash = json!(format!("#/{}", page.trim_start_matches('/')));
        self.eval(&format!(
            "new Promise((resolve) => {{
                const before = location.href;
                location.hash = {hash};
                if (location.href === before) return resolve();
                // An earlier change may not have been told yet.
                const look = (event) => {{
                    if (event.newURL !== location.href) return;
                    window.removeEventListener('hashchange', look);
                    resolve();
                }};
                window.addEventListener('hashchange', look);
            }})"
        ))
        .await;
    }

    /// The value of an expression in the page; promises are awaited.
    pub(crate) async fn eval(&self, expression: &str) -> Value {
        let params = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let mut answer = self.call("Runtime.evaluate", params).await;
        assert!(
            answer.get("exceptionDetails").is_none(),
            "{expression}: {:#}",
            answer["exceptionDetails"]
        );
        answer["result"]["value"].take()
    }

    /// Waits until an expression is true, looking again whenever the page has changed, and now and then
    /// for what is no change of the page: the focus, what is scrolled, time.
    pub(crate) async fn until(&self, expression: &str) {
        if !self.becomes_true(expression).await {
            self.picture("waited-in-vain").await;
            panic!("{expression}\nnever became true on this page:\n{}", self.text().await);
        }
    }

    /// Waits until an expression, which is no promise, has a value: what is drawn in steps or anew may have
    /// it later.
    pub(crate) async fn until_eq(&self, expression: &str, value: impl Into<Value>) {
        let value = value.into();
        let equal = format!("JSON.stringify(({expression}) ?? null) === JSON.stringify({value})");
        if !self.becomes_true(&equal).await {
            self.picture("waited-in-vain").await;
            let last = format!(
                "(() => {{ try {{ return ({expression}); }} catch (error) {{ return String(error); }} }})()"
            );
            let last = self.eval(&last).await;
            let text = self.text().await;
            panic!("{expression}\nis {last} and never became {value} on this page:\n{text}");
        }
    }

    /// Whether an expression becomes true in time.
    async fn becomes_true(&self, expression: &str) -> bool {
        let millis = PATIENCE.as_millis() / 2;
        let met = self
            .eval(&format!(
                "new Promise((resolve) => {{
                    const end = (met) => {{
                        changes.disconnect();
                        clearInterval(looks);
                        window.removeEventListener('hashchange', look);
                        resolve(met);
                    }};
                    const look = () => {{ try {{ if ({expression}) end(true); }} catch {{}} }};
                    const changes = new MutationObserver(look);
                    const looks = setInterval(look, 100);
                    changes.observe(document, {ALL_CHANGES});
                    window.addEventListener('hashchange', look);
                    setTimeout(() => end(false), {millis});
                    look();
                }})"
            ))
            .await;
        met == true
    }

    /// From now on it is noticed if an expression is true, however briefly. One at a time.
    pub(crate) async fn watch_for(&self, expression: &str) {
        self.eval(&format!(
            "(() => {{
                window.wasSeen = false;
                const look = () => {{ try {{ if ({expression}) window.wasSeen = true; }} catch {{}} }};
                new MutationObserver(look).observe(document, {ALL_CHANGES});
                look();
            }})()"
        ))
        .await;
    }

    /// Waits until what is watched for was true.
    pub(crate) async fn until_seen(&self) {
        self.until("window.wasSeen").await;
    }

    /// What the page says.
    pub(crate) async fn text(&self) -> String {
        self.eval("document.body.innerText").await.as_str().unwrap().into()
    }

    /// Waits until the page says something.
    pub(crate) async fn until_text(&self, text: &str) {
        self.until(&format!("document.body.innerText.includes({})", json!(text))).await;
    }

    /// Clicks in the middle of an element. What is drawn above it meanwhile can move it away from
    /// under the pointer; then the click is made again.
    pub(crate) async fn click(&self, selector: &str) {
        let find = format!("document.querySelector({})", json!(selector));
        let selector = json!(selector);
        let place = format!(
            "(() => {{ const element = {find};
                if (!element) return null;
                element.scrollIntoView({{block: 'center', behavior: 'instant'}});
                window.hasMissed = true;
                // A page that is live may have made the element anew meanwhile.
                const note = (event) => {{ window.hasMissed = !event.target.closest({selector}); }};
                document.addEventListener('click', note, {{capture: true, once: true}});
                const box = element.getBoundingClientRect();
                return {{x: box.x + box.width / 2, y: box.y + box.height / 2}}; }})()"
        );
        for _ in 0..20 {
            self.until(&format!("{find}?.checkVisibility()")).await;
            let place = self.eval(&place).await;
            if place.is_null() {
                continue;
            }
            for kind in ["mousePressed", "mouseReleased"] {
                let event = json!({"type": kind, "x": place["x"], "y": place["y"], "button": "left", "clickCount": 1});
                self.call("Input.dispatchMouseEvent", event).await;
            }
            if self.eval("window.hasMissed").await != true {
                return;
            }
        }
        panic!("{selector} moves, or is covered:\n{}", self.text().await);
    }

    /// Enters text where the focus is.
    pub(crate) async fn write(&self, text: &str) {
        self.call("Input.insertText", json!({ "text": text })).await;
    }

    /// Presses a key: `Tab`, `Enter`, `Escape`, a space or a slash.
    pub(crate) async fn press(&self, key: &str) {
        let (code, number, text) = match key {
            "Tab" => ("Tab", 9, ""),
            "Enter" => ("Enter", 13, "\r"),
            "Escape" => ("Escape", 27, ""),
            " " => ("Space", 32, " "),
            "/" => ("Slash", 191, "/"),
            other => panic!("there is no key {other}"),
        };
        let mut event =
            json!({"type": "keyDown", "key": key, "code": code, "windowsVirtualKeyCode": number});
        if !text.is_empty() {
            event["text"] = text.into();
        }
        self.call("Input.dispatchKeyEvent", event.clone()).await;
        event["type"] = "keyUp".into();
        event.as_object_mut().unwrap().shift_remove("text");
        self.call("Input.dispatchKeyEvent", event).await;
    }

    /// Presses Tab until the focus is on an element, once that is shown.
    pub(crate) async fn tab_to(&self, selector: &str) {
        self.until(&format!("document.querySelector({})?.checkVisibility()", json!(selector)))
            .await;
        for _ in 0..60 {
            if self.eval(&format!("document.activeElement.matches({})", json!(selector))).await
                == true
            {
                return;
            }
            self.press("Tab").await;
        }
        panic!("Tab does not lead to {selector}");
    }

    /// The size of the window in CSS pixels.
    pub(crate) async fn window(&self, width: u32, height: u32) {
        let size =
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", size).await;
    }

    /// `light` or `dark`
    pub(crate) async fn scheme(&self, scheme: &str) {
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.call("Emulation.setEmulatedMedia", json!({ "features": features })).await;
    }

    /// A picture for people, where `TOOLLOOP_TEST_PICTURES` is set: drawing all of them takes long.
    pub(crate) async fn screenshot(&self, name: &str) {
        if std::env::var_os("TOOLLOOP_TEST_PICTURES").is_some() {
            self.picture(name).await;
        }
    }

    /// A picture of the whole page: `console/<name>.png` in the directory for tests' files.
    async fn picture(&self, name: &str) {
        let shot =
            self.call("Page.captureScreenshot", json!({"captureBeyondViewport": true})).await;
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("console");
        std::fs::create_dir_all(&dir).unwrap();
        let png = BASE64_STANDARD.decode(shot["data"].as_str().unwrap()).unwrap();
        std::fs::write(dir.join(format!("{name}.png")), png).unwrap();
    }

    /// Every URL that was asked for.
    pub(crate) fn requests(&self) -> Vec<String> {
        let events = self.heard.events.borrow();
        let sent = events.iter().filter(|event| event["method"] == "Network.requestWillBeSent");
        sent.map(|event| event["params"]["request"]["url"].as_str().unwrap().to_owned()).collect()
    }

    /// Uncaught exceptions, errors on the console and violations of the policy. Answers that are
    /// errors are none: a page may ask and be refused.
    pub(crate) fn complaints(&self) -> Vec<Value> {
        let events = self.heard.events.borrow();
        let bad = events.iter().filter(|event| match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Runtime.consoleAPICalled") => {
                ["error", "warning"].contains(&event["params"]["type"].as_str().unwrap())
            }
            Some("Log.entryAdded") => {
                let entry = &event["params"]["entry"];
                entry["level"] == "error" && entry["source"] != "network"
            }
            _ => false,
        });
        bad.cloned().collect()
    }

    /// Asserts that nothing went wrong behind the scenes and no other host was asked, and ends the
    /// browser.
    pub(crate) async fn close(mut self, origin: &str) {
        assert_eq!(self.complaints(), Vec::<Value>::new());
        // A picture that the page has made itself of what it asked for.
        let made = format!("blob:{origin}");
        let ours = |url: &String| {
            let is_own = url.starts_with(origin) || url.starts_with(&made);
            is_own || url.starts_with("data:") || url == "about:blank"
        };
        let foreign: Vec<String> = self.requests().into_iter().filter(|url| !ours(url)).collect();
        assert!(foreign.is_empty(), "requests left {origin}: {foreign:?}");
        self.session.clear();
        self.call("Browser.close", json!({})).await;
        let _ = tokio::time::timeout(PATIENCE, self.child.wait()).await;
    }
}

/// `DevTools listening on ws://…`, once it does.
async fn address(child: &mut Child) -> String {
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut said = Vec::new();
    while let Some(line) =
        tokio::time::timeout(PATIENCE, lines.next_line()).await.expect("it speaks").unwrap()
    {
        if let Some(address) = line.strip_prefix("DevTools listening on ") {
            let address = address.to_owned();
            tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
            return address;
        }
        said.push(line);
    }
    panic!("Chromium did not start:\n{}", said.join("\n"));
}

async fn listen(mut from_browser: SplitStream<Socket>, heard: Arc<Heard>) {
    while let Some(Ok(message)) = from_browser.next().await {
        let Ok(message) = serde_json::from_str::<Value>(message.to_text().unwrap_or_default())
        else {
            continue;
        };
        let Some(id) = message["id"].as_u64() else {
            heard.events.send_modify(|events| events.push(message));
            continue;
        };
        if let Some(tell) = heard.waiting.lock().unwrap().remove(&id) {
            let _ = tell.send(message);
        }
    }
}

pub(crate) fn program() -> PathBuf {
    installed().unwrap_or_else(|| {
        installing::apt("chromium");
        installed().expect("chromium is not found: install it")
    })
}

fn installed() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|dir| dir.join("chromium")).find(|program| program.exists())
}
