//! The signals by which a command is asked to end.

use std::future::pending;
use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The handlers are installed on creation.
pub(super) struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
    /// None where the command was started to outlive its terminal, as by `nohup`.
    hangup: Option<Signal>,
}

impl Interrupts {
    pub(super) fn listen() -> io::Result<Self> {
        let hangup = SignalKind::hangup();
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: (!is_ignored(hangup)).then(|| signal(hangup)).transpose()?,
        })
    }

    /// The next signal, as the reason for which a run is cancelled.
    pub(super) async fn next(&mut self) -> &'static str {
        let hangup = async {
            match &mut self.hangup {
                Some(hangup) => hangup.recv().await,
                None => pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupt.recv() => "interrupted at the terminal",
            _ = self.terminate.recv() => "terminated by SIGTERM",
            _ = hangup => "terminated by SIGHUP",
        }
    }
}

/// Whether the process was started with this signal ignored; false where that is not known.
fn is_ignored(kind: SignalKind) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (kind.as_raw_value() - 1) & 1 == 1
}
