//! The process of a Chromium without a window.
//!
//! It is controlled through a pipe, and ends when the pipe closes, however this process ends. It cannot
//! reach the network: no name resolves, and its proxy does not exist. Requests are intercepted and
//! answered before they are sent (`traffic`).

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStderr, Command};
use tokio::task::JoinHandle;

use super::connection::Connection;
use super::profile::{NOBODY, Profile};
use crate::bounds::secrets;

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
/// How long a browser that has ended has to say why.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// What it writes where the machine lets it make no sandbox for its pages, and the files of its code that give up then.
const NO_NAMESPACES: &str = "Failed to move to new namespace";
const SANDBOX_SOURCES: [&str; 3] = ["zygote_host", "sandbox", "credentials.cc"];

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
    profile: Profile,
}

/// What it writes to its standard error.
struct StandardError {
    said: Arc<Mutex<Said>>,
    reading: JoinHandle<()>,
}

#[derive(Default)]
struct Said {
    last_line: String,
    /// The line that says that the machine lets it make no sandbox.
    no_sandbox: Option<String>,
}

/// Why it does not start.
struct NotStarted {
    why: String,
    no_sandbox: Option<String>,
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
    /// Starts it, with its own sandbox for pages unless the machine does not permit that.
    ///
    /// # Errors
    /// Why it does not start.
    pub(super) async fn start(program: &Path) -> Result<Self, String> {
        match Self::start_as(program, true).await {
            Err(NotStarted { no_sandbox: Some(why), .. }) => {
                let started = Self::start_as(program, false).await.map_err(|failed| failed.why)?;
                tracing::warn!(%why, "the browser runs without its own sandbox");
                Ok(started)
            }
            started => started.map_err(|failed| failed.why),
        }
    }

    async fn start_as(program: &Path, sandboxed: bool) -> Result<Self, NotStarted> {
        let (started, StandardError { said, reading }) = Self::spawn(program, sandboxed)
            .map_err(|error| NotStarted { why: error.to_string(), no_sandbox: None })?;
        // A new window or worker is paused until it is set up.
        let targets = json!({"autoAttach": true, "waitForDebuggerOnStart": true, "flatten": true});
        let Err(why) = started.connection.call(None, "Target.setAutoAttach", targets).await else {
            return Ok(started);
        };
        drop(started); // ends it, unless it has ended
        let _ = tokio::time::timeout(LAST_WORDS, reading).await; // what it has said by then counts
        let Said { last_line, no_sandbox } = std::mem::take(&mut *said.lock());
        let why = if last_line.is_empty() { why } else { format!("{why}: {last_line}") };
        Err(NotStarted { why, no_sandbox })
    }

    fn spawn(program: &Path, sandboxed: bool) -> io::Result<(Self, StandardError)> {
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
        let said = Arc::<Mutex<Said>>::default();
        let reading = tokio::spawn(listen(errors, Arc::clone(&said)));
        let connection = Connection::new(to, from);
        let started = Self { connection, child: child.into(), profile };
        Ok((started, StandardError { said, reading }))
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

/// Keeps the lines of its standard error that say why it does not start.
async fn listen(errors: ChildStderr, said: Arc<Mutex<Said>>) {
    let mut errors = BufReader::new(errors);
    let mut line = Vec::new();
    while let Ok(1..) = (&mut errors).take(4_096).read_until(b'\n', &mut line).await {
        let text = kept(&line);
        if !text.is_empty() {
            let mut said = said.lock();
            if is_without_sandbox(&text) {
                said.no_sandbox = Some(text.clone());
            }
            said.last_line = text;
        }
        line.clear();
    }
}

/// A line up to the length that is kept, without a part of a secret at its end.
fn kept(line: &[u8]) -> String {
    let line = String::from_utf8_lossy(line);
    let line = line.trim();
    let end = line.char_indices().nth(MAX_LINE).map_or(line.len(), |(at, _)| at);
    secrets::head(line, end).to_owned()
}

/// Whether a line says that the machine lets it make no sandbox.
fn is_without_sandbox(line: &str) -> bool {
    let source = line.split_once("FATAL:").and_then(|(_, rest)| rest.split(']').next());
    line.contains(NO_NAMESPACES)
        || source.is_some_and(|source| SANDBOX_SOURCES.iter().any(|part| source.contains(part)))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_long_line_keeps_no_part_of_a_secret() {
        assert_eq!(kept(b" it failed \n"), "it failed");
        let long = "é".repeat(MAX_LINE + 1);
        assert_eq!(kept(long.as_bytes()).chars().count(), MAX_LINE);
        let cut = format!("{} ghp_hunter2hunter2hunter2hunter2", " x".repeat(MAX_LINE / 2 - 6));
        assert!(!kept(cut.as_bytes()).contains("hunter"));
    }

    #[tokio::test]
    async fn only_a_machine_without_a_sandbox_makes_it_start_without_one() {
        let table = [
            ("FATAL:zygote_host_impl_linux.cc(128)] No usable sandbox!", true),
            ("FATAL:content/browser/zygote_host/zygote_host_impl_linux.cc:132] No usable", true),
            ("FATAL:setuid_sandbox_host.cc(157)] The SUID sandbox helper binary was found", true),
            ("FATAL:credentials.cc(127)] Check failed: . : Permission denied (13)", true),
            ("Failed to move to new namespace: PID namespaces supported, but failed", true),
            ("FATAL:profile.cc(1)] The profile is in use, see zygote_host", false),
            ("WARNING:sandbox_linux.cc(393)] InitializeSandbox() called late", false),
        ];
        for (line, starts_again) in table {
            let place = tempfile::tempdir().unwrap();
            let program = place.path().join("browser");
            let how = "case \"$*\" in *--no-sandbox*) echo without;; *) echo with;; esac >&2";
            fs::write(&program, format!("#!/bin/sh\necho '[1:1:{line}' >&2\n{how}\n")).unwrap();
            for path in [place.path(), program.as_path()] {
                fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
            }
            let why = Chromium::start(&program).await.err().unwrap_or_default();
            let expected = if starts_again { "without" } else { "with" };
            assert_eq!(why, format!("the browser has ended: {expected}"), "{line}");
        }
    }
}
