//! Checks of this machine: a writable workspace, a free address, the limit on open files, the clock.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use chrono::{DateTime, Utc};
use rustix::fs::{Access, access};
use serde_json::Value;

use super::Finding;
use crate::run::SandboxLevel;
use crate::tools::browser;
use crate::tools::sandbox::Kernel;
use crate::tools::sandbox::plan::Confinement;

/// Timeout of the request that identifies a service on the address.
const TIMEOUT: Duration = Duration::from_secs(2);
/// A limit on open files that suffices for a busy service.
const ENOUGH_FILES: u64 = 4096;
/// Tolerated clock skew in milliseconds; leases are short.
const SKEW_MS: i64 = 2_000;

/// `known` is the information from the database.
pub(super) fn workspace(dir: &Path, known: Option<Finding>) -> Finding {
    match (refuses_writing(dir), known) {
        (Some(reason), _) => Finding::fail(
            "workspace",
            format!("{}: {reason}", dir.display()),
            "make it writable, or set [tools.workspace] dir",
        ),
        (None, Some(known)) => known,
        (None, None) if dir.exists() => Finding::ok("workspace", dir.display().to_string()),
        (None, None) => {
            Finding::ok("workspace", format!("{} is created when it is needed", dir.display()))
        }
    }
}

/// What the kernel gives to confine programs.
pub(super) fn sandbox(kernel: &Kernel) -> Finding {
    let Confinement { landlock, seccomp, .. } = kernel.confinement;
    let landlock = match landlock {
        0 => "no Landlock".to_owned(),
        version => format!("Landlock {version}"),
    };
    let seccomp = if seccomp { "seccomp" } else { "no seccomp" };
    let namespaces = match &kernel.without_namespaces {
        None => "namespaces".to_owned(),
        Some(reason) => format!("no namespaces ({reason})"),
    };
    let network = match &kernel.without_network {
        None if kernel.confinement.network => "a network for programs".to_owned(),
        None => "no network for programs".to_owned(),
        Some(reason) => format!("no network for programs ({reason})"),
    };
    let level = kernel.level();
    let detail = format!("{}: {landlock}, {seccomp}, {namespaces}, {network}", <&str>::from(level));
    if level == SandboxLevel::Enforced {
        return Finding::ok("sandbox", detail);
    }
    let next = "programs run only on a kernel from 6.2 on with Landlock, or with [tools.shell] \
                require_sandbox = false";
    Finding::warn("sandbox", detail, next)
}

/// Whether there is a Chromium for the tool `browser`.
pub(super) fn browser(configured: &Path, is_used: bool) -> Finding {
    match browser::program(configured) {
        Some(program) => Finding::ok("browser", program.display().to_string()),
        None if is_used => Finding::warn(
            "browser",
            "an agent uses the browser, and there is none",
            browser::INSTALL,
        ),
        None => Finding::ok("browser", "none, and no agent uses one"),
    }
}

/// Why this process can neither write to the path nor create it; `None` if it can.
pub(super) fn refuses_writing(path: &Path) -> Option<String> {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let there = absolute.ancestors().find(|ancestor| ancestor.exists())?;
    if there != absolute && !there.is_dir() {
        return Some(format!("{} is not a directory", there.display()));
    }
    let error = access(there, Access::WRITE_OK).err()?;
    Some(format!(
        "{} cannot be written to: {}",
        there.display(),
        std::io::Error::from(error).kind()
    ))
}

/// Whether the address is free, or in use by a toolloop service.
pub(super) async fn listen(address: SocketAddr) -> Finding {
    let Err(error) = tokio::net::TcpListener::bind(address).await else {
        return Finding::ok("listen", format!("{address} is free"));
    };
    if error.kind() == ErrorKind::AddrInUse && is_toolloop(address).await {
        return Finding::ok("listen", format!("a toolloop service is listening on {address}"));
    }
    Finding::fail(
        "listen",
        format!("{address}: {}", error.kind()),
        "choose another address with --listen or in [server]",
    )
}

async fn is_toolloop(address: SocketAddr) -> bool {
    let ask = async {
        let http = reqwest::Client::builder().no_proxy().build().ok()?;
        let response = http.get(format!("http://{address}/readyz")).send().await.ok()?;
        let ready: Value = response.json().await.ok()?;
        Some(ready.get("status").is_some() && ready.get("definitions").is_some())
    };
    matches!(tokio::time::timeout(TIMEOUT, ask).await, Ok(Some(true)))
}

/// Every connection needs a file descriptor.
pub(super) fn open_files(max_concurrent_runs: usize) -> Finding {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    match soft_limit(&limits) {
        None => Finding::ok("open files", "the limit is unknown on this system"),
        Some(limit) if limit < ENOUGH_FILES => Finding::warn(
            "open files",
            format!(
                "{limit} at most, and each connection needs one; [runtime] max_concurrent_runs is {max_concurrent_runs}"
            ),
            "`ulimit -n 65536` before the service starts",
        ),
        Some(limit) => Finding::ok("open files", format!("{limit} at most")),
    }
}

/// The first number of the line `Max open files` (proc_pid_limits(5)).
fn soft_limit(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    }
}

/// Whether the clock is plausible: not before 2026, and close to the database's.
pub(super) fn clock(database: Option<(DateTime<Utc>, DateTime<Utc>)>) -> Finding {
    let now = Utc::now();
    if now.timestamp() < 1_767_225_600 {
        return Finding::fail(
            "clock",
            format!("says {now}, which is in the past"),
            "set it; key expiry and leases depend on it",
        );
    }
    let Some((theirs, ours)) = database else {
        return Finding::ok("clock", now.format("%Y-%m-%dT%H:%M:%SZ").to_string());
    };
    let ahead = (ours - theirs).num_milliseconds();
    if ahead.abs() > SKEW_MS {
        let detail = format!("{ahead} ms ahead of the database's");
        return Finding::warn("clock", detail, "synchronise both machines, e.g. with chrony");
    }
    Finding::ok("clock", "agrees with the database's")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::doctor::Health;

    #[test]
    fn the_soft_limit_is_read_from_proc_limits() {
        let text = "Limit                     Soft Limit           Hard Limit           Units     \n\
                    Max processes             127342               127342               processes \n\
                    Max open files            1024                 524288               files     \n";
        assert_eq!(soft_limit(text), Some(1024));
        assert_eq!(
            soft_limit("Max open files            unlimited            unlimited            files"),
            Some(u64::MAX)
        );
        assert_eq!(soft_limit(""), None);
    }

    #[test]
    fn a_path_that_can_be_created_is_writable() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(workspace(dir.path(), None).status, Health::Ok);
        assert_eq!(workspace(&dir.path().join("a/b"), None).status, Health::Ok);
        std::fs::write(dir.path().join("file"), "").unwrap();
        assert_eq!(workspace(&dir.path().join("file/b"), None).status, Health::Fail);
    }

    #[test]
    fn clock_skew_is_a_warning() {
        let now = Utc::now();
        assert_eq!(clock(None).status, Health::Ok);
        assert_eq!(clock(Some((now, now))).status, Health::Ok);
        assert_eq!(clock(Some((now, now + chrono::Duration::seconds(3)))).status, Health::Warn);
    }
}
