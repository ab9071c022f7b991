//! The process of a Chromium without a window.
//!
//! It is controlled through a pipe, and ends when the pipe closes, however this process ends. It cannot
//! reach the network: no name resolves, and its proxy does not exist. Requests are intercepted and
//! answered before they are sent (`traffic`).

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStderr, Command};

use super::connection::Connection;
use super::profile::{NOBODY, Profile};

/// Names of the program, in the order in which they are looked for.
const PROGRAMS: [&str; 4] =
    ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
/// Where it is looked for.
const DIRECTORIES: [&str; 3] = ["/usr/local/bin", "/usr/bin", "/bin"];
/// The advice in a message about a missing browser.
pub const INSTALL: &str =
    "install Chromium (Debian: apt install chromium), or name it in [tools.browser] path";
/// Characters of a line on its standard error that are kept.
const MAX_LINE: usize = 300;

/// Opens the pipe as the descriptors 3 and 4, where Chromium expects it, and bounds the data of each
/// of its processes, in KiB.
const WITH_PIPE: &str =
    "ulimit -c 0; ulimit -d 2097152; exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null";

const SWITCHES: [&str; 24] = [
    "--headless",
    "--remote-debugging-pipe",
    // All addresses, loopback included, go to a proxy that does not exist.
    "--proxy-server=http://127.0.0.1:9",
    "--proxy-bypass-list=<-loopback>",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--disable-quic",
    "--dns-prefetch-disable",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-domain-reliability",
    "--disable-breakpad",
    "--disable-sync",
    "--disable-extensions",
    "--deny-permission-prompts",
    // A window's own pages cost more than the page in it.
    "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup,WebUIOmniboxFullPopup,OmniboxAimPopup,\
     PreloadTopChromeWebUI,PreloadTopChromeWebUILessNavigations,WebTransport,Prerender2,MediaRouter",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-service-autorun",
    "--mute-audio",
    "--js-flags=--max-old-space-size=256",
];

/// A running browser; it ends when the last owner drops it.
pub(super) struct Chromium {
    connection: Connection,
    child: Mutex<Child>,
    last_line: Arc<Mutex<String>>,
    profile: Profile,
}

/// The program, if there is one.
pub fn program(configured: &Path) -> Option<PathBuf> {
    if !configured.as_os_str().is_empty() {
        return configured.is_file().then(|| configured.to_owned());
    }
    let mut places = DIRECTORIES.iter().flat_map(|directory| {
        PROGRAMS.iter().map(move |program| Path::new(directory).join(program))
    });
    places.find(|place| place.is_file())
}

impl Chromium {
    /// Starts it, with its own sandbox for pages if the machine supports that.
    ///
    /// # Errors
    /// Why it does not start.
    pub(super) async fn start(program: &Path) -> Result<Self, String> {
        match Self::start_as(program, true).await {
            Ok(started) => Ok(started),
            Err(why) => {
                let started = Self::start_as(program, false).await?;
                tracing::warn!(%why, "the browser runs without its own sandbox");
                Ok(started)
            }
        }
    }

    async fn start_as(program: &Path, sandboxed: bool) -> Result<Self, String> {
        let started = Self::spawn(program, sandboxed).map_err(|error| error.to_string())?;
        // A new window or worker is paused until it is set up.
        let targets = json!({"autoAttach": true, "waitForDebuggerOnStart": true, "flatten": true});
        match started.connection.call(None, "Target.setAutoAttach", targets).await {
            Ok(_) => Ok(started),
            Err(why) => {
                let line = started.last_line.lock().clone();
                Err(if line.is_empty() { why } else { format!("{why}: {line}") })
            }
        }
    }

    fn spawn(program: &Path, sandboxed: bool) -> io::Result<Self> {
        let profile = Profile::new()?;
        let mut command = Command::new("/bin/sh");
        command.args(["-c", WITH_PIPE]).arg(program).args(SWITCHES);
        if rustix::process::geteuid().is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        if !sandboxed {
            command.arg("--no-sandbox");
        }
        let mut child = command
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .env_clear()
            .env("PATH", DIRECTORIES.join(":"))
            .env("LANG", "C.UTF-8")
            .env("HOME", profile.path())
            .env("TMPDIR", profile.path())
            .current_dir(profile.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let (Some(to), Some(from), Some(errors)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(io::Error::other("it has no pipe"));
        };
        let last_line = Arc::<Mutex<String>>::default();
        tokio::spawn(keep_last_line(errors, Arc::clone(&last_line)));
        let connection = Connection::new(to, from);
        Ok(Self { connection, child: child.into(), last_line, profile })
    }

    pub(super) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Where each page has a directory for what it downloads.
    pub(super) fn downloads(&self) -> PathBuf {
        self.profile.downloads()
    }

    pub(super) fn is_alive(&self) -> bool {
        self.connection.is_open()
    }

    /// One command; see [`Connection::call`].
    pub(super) async fn call(
        &self,
        session: Option<&str>,
        method: &str,
        params: Value,
    ) -> Result<Value, String> {
        self.connection.call(session, method, params).await
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        self.connection.close();
        let id = self.child.lock().id().and_then(|id| i32::try_from(id).ok());
        if let Some(group) = id.and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL); // it may be gone already
        }
    }
}

/// Keeps the last line of its standard error, which says why it does not start.
async fn keep_last_line(errors: ChildStderr, last_line: Arc<Mutex<String>>) {
    let mut errors = BufReader::new(errors);
    let mut line = Vec::new();
    while let Ok(1..) = (&mut errors).take(4_096).read_until(b'\n', &mut line).await {
        let text = String::from_utf8_lossy(&line);
        let text: String = text.trim().chars().take(MAX_LINE).collect();
        if !text.is_empty() {
            *last_line.lock() = text;
        }
        line.clear();
    }
}
