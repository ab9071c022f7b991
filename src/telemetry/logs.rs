//! Log lines on their way to standard error, which may be slow, stuck or gone.
//!
//! `TOOLLOOP_LOG` filters them (`debug`, `toolloop=trace,sqlx=warn`, …). Nothing that a caller sent
//! and no secret is logged at `info` or above. Whoever logs copies the line into a bounded buffer
//! and goes on; a thread of its own writes. Lines that do not fit are dropped and counted.

use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal as _, Write};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use tracing_subscriber::EnvFilter;

/// The variable that filters logs.
const FILTER_VARIABLE: &str = "TOOLLOOP_LOG";
/// What OpenTelemetry says about itself is said by [`super::traces`], and less often.
const QUIET: &str = "opentelemetry=off";
/// Bytes that may wait for the reader.
const MOST: usize = 4 << 20;
/// How long the end of the process waits for the reader.
const LAST_PATIENCE: Duration = Duration::from_secs(1);
/// How long to leave a reader alone that takes nothing at the moment.
const PAUSE: Duration = Duration::from_millis(10);

/// How logs are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line, for machines.
    Json,
}

/// Sends logs to standard error for as long as it lives; what is left is written when it is
/// dropped.
pub struct Logs {
    buffer: Arc<Buffer>,
}

#[derive(Default)]
struct Buffer {
    pending: Mutex<Pending>,
    /// Told when there is something to write.
    filled: Condvar,
    /// Told when everything has been written.
    emptied: Condvar,
}

#[derive(Default)]
struct Pending {
    text: Vec<u8>,
    /// Lines that did not fit since this was last told.
    dropped: u64,
    /// Whether the thread has taken text that it has not written yet.
    writing: bool,
}

/// Takes one line at a time.
struct Lines(Arc<Buffer>);

impl Logs {
    /// Starts logging. `default` is the filter where the variable is unset. Panics are logged, too.
    ///
    /// # Errors
    /// The filter in the variable cannot be understood, or logging was started before.
    pub fn start(
        format: LogFormat,
        default: &str,
    ) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let filter = match std::env::var(FILTER_VARIABLE) {
            Ok(filter) if !filter.is_empty() => EnvFilter::try_new(&filter)
                .map_err(|e| format!("environment variable {FILTER_VARIABLE}: {e}"))?,
            _ => EnvFilter::try_new(format!("{default},{QUIET}"))?,
        };
        // Not std's handle: its lock would be held for as long as the reader is stuck.
        let stderr = File::from(io::stderr().as_fd().try_clone_to_owned()?);
        let buffer = Buffer::drained_to(stderr)?;
        let lines = Arc::clone(&buffer);
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(move || Lines(Arc::clone(&lines)));
        match format {
            LogFormat::Text => subscriber.with_ansi(io::stderr().is_terminal()).try_init()?,
            LogFormat::Json => {
                subscriber.json().flatten_event(true).with_current_span(false).try_init()?;
            }
        }
        std::panic::set_hook(Box::new(|panic| {
            let place = panic.location().map(tracing::field::display);
            tracing::error!(place, "panic: {}", panic.payload_as_str().unwrap_or("no message"));
        }));
        Ok(Self { buffer })
    }
}

impl Drop for Logs {
    fn drop(&mut self) {
        self.buffer.flush(LAST_PATIENCE);
    }
}

impl Buffer {
    /// Starts the thread that writes.
    fn drained_to(mut reader: impl Write + Send + 'static) -> io::Result<Arc<Self>> {
        let buffer = Arc::<Self>::default();
        let drained = Arc::clone(&buffer);
        thread::Builder::new().name("logs".into()).spawn(move || {
            let mut text = Vec::new();
            loop {
                let dropped = drained.take(&mut text);
                deliver(&mut reader, &text);
                text.clear();
                text.shrink_to(MOST / 64); // the buffer of a burst is not kept
                if dropped > 0 {
                    tracing::warn!(dropped, "log lines were dropped: nobody read them in time");
                }
            }
        })?;
        Ok(buffer)
    }

    /// Never waits for the reader.
    fn add(&self, line: &[u8]) {
        let mut pending = self.lock();
        if pending.text.len() + line.len() > MOST {
            pending.dropped += 1;
            return;
        }
        let was_empty = pending.text.is_empty();
        pending.text.extend_from_slice(line);
        drop(pending);
        if was_empty {
            self.filled.notify_one();
        }
    }

    /// Waits for text and swaps it for the empty `text`; answers how many lines did not fit.
    fn take(&self, text: &mut Vec<u8>) -> u64 {
        let mut pending = self.lock();
        pending.writing = false;
        if pending.text.is_empty() {
            self.emptied.notify_all();
        }
        let has_none = |pending: &mut Pending| pending.text.is_empty();
        self.filled.wait_while(&mut pending, has_none);
        std::mem::swap(&mut pending.text, text);
        pending.writing = true;
        std::mem::take(&mut pending.dropped)
    }

    /// Waits until everything is written, or no longer.
    fn flush(&self, patience: Duration) {
        let is_busy = |pending: &mut Pending| pending.writing || !pending.text.is_empty();
        self.emptied.wait_while_for(&mut self.lock(), is_busy, patience);
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock()
    }
}

/// Writes all of it, unless the reader is gone.
fn deliver(reader: &mut impl Write, mut text: &[u8]) {
    while !text.is_empty() {
        match reader.write(text) {
            Ok(written) if written > 0 => text = text.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::park_timeout(PAUSE),
            Ok(_) | Err(_) => return,
        }
    }
}

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.add(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// A reader that takes one write for each time that it is told to.
    struct Stuck(Receiver<()>, Sender<Vec<u8>>);

    impl Write for Stuck {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.0.recv().map_err(|_| ErrorKind::BrokenPipe)?;
            self.1.send(text.to_vec()).map_err(|_| ErrorKind::BrokenPipe)?;
            Ok(text.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_stuck_reader_costs_lines_and_nothing_else() {
        let (go_on, told) = channel();
        let (written, read) = channel();
        let buffer = Buffer::drained_to(Stuck(told, written)).unwrap();
        let line = vec![b'x'; 1 << 20];
        for _ in 0..20 {
            buffer.add(&line); // at most a buffer's worth is on its way, and another one waits
        }
        assert!(buffer.lock().dropped >= 12);
        assert!(buffer.lock().text.len() <= MOST);

        (0..20).for_each(|_| go_on.send(()).unwrap());
        buffer.flush(Duration::from_secs(10));
        buffer.add(b"after\n");
        buffer.flush(Duration::from_secs(10));
        let text: Vec<u8> = read.try_iter().flatten().collect();
        assert!(text.ends_with(b"xafter\n"));
        assert!(((1 << 20)..=(8 << 20) + 6).contains(&text.len()), "{}", text.len());
    }

    #[test]
    fn a_reader_that_is_gone_costs_nothing() {
        let (gone, told) = channel();
        let buffer = Buffer::drained_to(Stuck(told, channel().0)).unwrap();
        drop(gone);
        (0..100).for_each(|_| buffer.add(b"line\n"));
        buffer.flush(Duration::from_secs(10));
        assert!(buffer.lock().text.is_empty());
    }
}
