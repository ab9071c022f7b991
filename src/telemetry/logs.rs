//! Non-blocking logging to standard error, which may be slow, blocked or closed.
//!
//! `TOOLLOOP_LOG` filters the lines (`debug`, `toolloop=trace,sqlx=warn`, …). Lines of libraries below
//! `warn` are shown only if the filter names the library. At `info` and above, the log has no secrets
//! and nothing that a caller sent, except what the operator's script tools write to standard error.
//! Lines are copied into a bounded buffer, which a dedicated thread writes. Lines that do not fit are
//! dropped and counted.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal as _, Write};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use serde_json::Value;
use tracing_subscriber::EnvFilter;

use crate::bounds::secrets::{redact, redacted};
use crate::message::visible::escaped;

const FILTER_VARIABLE: &str = "TOOLLOOP_LOG";
/// OpenTelemetry's own errors are reported by [`super::traces`], less often.
const QUIET: &str = "opentelemetry=off";
/// Capacity of the buffer, in bytes.
const CAPACITY: usize = 4 << 20;
/// How long the process waits at exit for the buffer to be written.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
/// How long lines are gathered before they are written together: a thread that wakes up for each
/// takes more of the processors than the lines do.
const GATHER_TIME: Duration = Duration::from_millis(2);
/// Delay before writing again when the reader would block.
const RETRY_DELAY: Duration = Duration::from_millis(10);

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Plain text
    #[default]
    Text,
    /// One JSON object per line
    Json,
}

/// Logging to standard error; flushes the buffer when dropped.
pub struct Logs {
    buffer: Arc<Buffer>,
}

#[derive(Default)]
struct Buffer {
    pending: Mutex<Pending>,
    /// Notified when the buffer is no longer empty.
    filled: Condvar,
    /// Notified when everything has been written.
    emptied: Condvar,
}

#[derive(Default)]
struct Pending {
    text: Vec<u8>,
    /// Lines dropped since this was last reported.
    dropped: u64,
    /// Whether the thread is writing text taken from the buffer.
    writing: bool,
}

/// Writes one line per call of `write`.
struct LineWriter {
    buffer: Arc<Buffer>,
    lines: Lines,
}

/// What a line may contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lines {
    /// JSON escapes by itself what could be taken for something else.
    Json,
    Plain,
    /// With colours.
    Coloured,
}

impl Logs {
    /// `default` is the filter if `TOOLLOOP_LOG` is unset. Panics are logged, too.
    ///
    /// # Errors
    /// The filter is invalid, or logging was started before.
    pub fn start(
        format: LogFormat,
        default: &str,
    ) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let filter = match std::env::var(FILTER_VARIABLE) {
            Ok(filter) if !filter.is_empty() => {
                EnvFilter::try_new(with_quiet_libraries(&filter))
                    .map_err(|e| format!("environment variable {FILTER_VARIABLE}: {e}"))?
            }
            _ => EnvFilter::try_new(format!("{},{QUIET}", with_quiet_libraries(default)))?,
        };
        // Not std's handle, whose lock would be held while the reader is blocked.
        let stderr = File::from(io::stderr().as_fd().try_clone_to_owned()?);
        let buffer = Buffer::start_writer(stderr)?;
        let has_colours = io::stderr().is_terminal();
        let lines = match format {
            LogFormat::Json => Lines::Json,
            LogFormat::Text if has_colours => Lines::Coloured,
            LogFormat::Text => Lines::Plain,
        };
        let shared = Arc::clone(&buffer);
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(move || LineWriter { buffer: Arc::clone(&shared), lines });
        match format {
            LogFormat::Text => subscriber.with_ansi(has_colours).try_init()?,
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

/// A filter in which a level without a target is that of the service alone where it shows more than
/// `warn`: what libraries say below is for their developers, and shown only where they are named.
fn with_quiet_libraries(filter: &str) -> String {
    let parts = filter.split(',').map(|part| match part.trim() {
        level if ["info", "debug", "trace"].iter().any(|it| level.eq_ignore_ascii_case(it)) => {
            format!("warn,toolloop={level}").into()
        }
        part => Cow::Borrowed(part),
    });
    parts.collect::<Vec<_>>().join(",")
}

impl Drop for Logs {
    fn drop(&mut self) {
        self.buffer.flush(FLUSH_TIMEOUT);
    }
}

impl Buffer {
    /// Starts the writer thread.
    fn start_writer(mut reader: impl Write + Send + 'static) -> io::Result<Arc<Self>> {
        let buffer = Arc::<Self>::default();
        let writer_buffer = Arc::clone(&buffer);
        thread::Builder::new().name("logs".into()).spawn(move || {
            let mut text = Vec::new();
            loop {
                let dropped = writer_buffer.take(&mut text);
                write_all(&mut reader, &text);
                text.clear();
                text.shrink_to(CAPACITY / 64); // release the memory of a burst
                if dropped > 0 {
                    tracing::warn!(dropped, "log lines were dropped: standard error is too slow");
                }
            }
        })?;
        Ok(buffer)
    }

    /// Never blocks on the reader.
    fn add(&self, line: &[u8]) {
        let mut pending = self.lock();
        if pending.text.len() + line.len() > CAPACITY {
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

    /// Waits for text, swaps it with the empty `text`, and returns the number of dropped lines.
    fn take(&self, text: &mut Vec<u8>) -> u64 {
        let mut pending = self.lock();
        pending.writing = false;
        if pending.text.is_empty() {
            self.emptied.notify_all();
        }
        let has_none = |pending: &mut Pending| pending.text.is_empty();
        self.filled.wait_while(&mut pending, has_none);
        MutexGuard::unlocked(&mut pending, || thread::park_timeout(GATHER_TIME));
        std::mem::swap(&mut pending.text, text);
        pending.writing = true;
        std::mem::take(&mut pending.dropped)
    }

    /// Waits until everything is written, or for `patience`.
    fn flush(&self, patience: Duration) {
        let is_busy = |pending: &mut Pending| pending.writing || !pending.text.is_empty();
        self.emptied.wait_while_for(&mut self.lock(), is_busy, patience);
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock()
    }
}

/// Writes everything, unless the reader has closed the pipe.
fn write_all(reader: &mut impl Write, mut text: &[u8]) {
    while !text.is_empty() {
        match reader.write(text) {
            Ok(written) if written > 0 => text = text.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                thread::park_timeout(RETRY_DELAY);
            }
            Ok(_) | Err(_) => return,
        }
    }
}

impl Write for LineWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match self.lines {
            Lines::Json => self.buffer.add(&json_line(line)),
            lines => {
                let line = one_line(line, lines == Lines::Coloured);
                self.buffer.add(redacted(&line).as_bytes());
            }
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A line without what looks like a secret; as it is, where it is not JSON.
fn json_line(line: &[u8]) -> Cow<'_, [u8]> {
    let Ok(mut document) = serde_json::from_slice::<Value>(line) else { return line.into() };
    let before = document.clone();
    redact(&mut document);
    if document == before {
        return line.into();
    }
    format!("{document}\n").into_bytes().into()
}

/// A line in which no text from outside looks like another line, moves the cursor or is not seen. Colours are the formatter's: it escapes the sequences of others.
fn one_line(line: &[u8], has_colours: bool) -> String {
    let line = String::from_utf8_lossy(line);
    let mut shown = String::with_capacity(line.len() + 16);
    let mut rest = line.strip_suffix('\n').unwrap_or(&line);
    while !rest.is_empty() {
        let colour = if has_colours { colour_at_start(rest) } else { 0 };
        let (raw, after) = rest.split_at(colour);
        shown.push_str(raw);
        let begun = usize::from(colour == 0); // an escape that begins no colour is text
        let end = after.char_indices().skip(begun).find(|(_, c)| *c == '\u{1b}');
        let (text, after) = after.split_at(end.map_or(after.len(), |(end, _)| end));
        shown.push_str(&escaped(text).replace('\n', "\\n"));
        rest = after;
    }
    shown.push('\n');
    shown
}

/// The length of a sequence `ESC [ digits m` at the start; 0 without one.
fn colour_at_start(text: &str) -> usize {
    let digits = text.strip_prefix("\u{1b}[").unwrap_or_default();
    let count = digits.bytes().take_while(u8::is_ascii_digit).count();
    if (1..=2).contains(&count) && digits[count..].starts_with('m') { count + 3 } else { 0 }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// A reader that accepts one write per message on its channel.
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
    fn a_blocked_reader_loses_lines_but_does_not_block() {
        let (go_on, may_write) = channel();
        let (written, read) = channel();
        let buffer = Buffer::start_writer(Stuck(may_write, written)).unwrap();
        let line = vec![b'x'; 1 << 20];
        for _ in 0..20 {
            buffer.add(&line); // at most a buffer's worth is on its way, and another one waits
        }
        assert!(buffer.lock().dropped >= 12);
        assert!(buffer.lock().text.len() <= CAPACITY);

        (0..20).for_each(|_| go_on.send(()).unwrap());
        buffer.flush(Duration::from_secs(10));
        buffer.add(b"after\n");
        buffer.flush(Duration::from_secs(10));
        let text: Vec<u8> = read.try_iter().flatten().collect();
        assert!(text.ends_with(b"xafter\n"));
        assert!(((1 << 20)..=(8 << 20) + 6).contains(&text.len()), "{}", text.len());
    }

    #[test]
    fn nothing_in_a_line_looks_like_another_line() {
        for (line, plain, coloured) in [
            ("INFO a\tb\n", "INFO a\tb\n", "INFO a\tb\n"),
            ("a\nINFO forged\n", "a\\nINFO forged\n", "a\\nINFO forged\n"),
            ("a\r\u{9b}2J\u{202e}b\n", "a\\r\\u{9b}2J\\u{202e}b\n", "a\\r\\u{9b}2J\\u{202e}b\n"),
            (
                "\u{1b}[32mINFO\u{1b}[0m x\n",
                "\\u{1b}[32mINFO\\u{1b}[0m x\n",
                "\u{1b}[32mINFO\u{1b}[0m x\n",
            ),
            (
                "\u{1b}[2J\u{1b}]0;t\u{7}\u{1b}",
                "\\u{1b}[2J\\u{1b}]0;t\\u{7}\\u{1b}\n",
                "\\u{1b}[2J\\u{1b}]0;t\\u{7}\\u{1b}\n",
            ),
            ("é\u{1b}[1mü\u{1b}", "é\\u{1b}[1mü\\u{1b}\n", "é\u{1b}[1mü\\u{1b}\n"),
            (
                "\u{1b}[2mapp\u{1b}[0m\u{1b}[2m:\u{1b}[0m \u{1b}[3mn\u{1b}[0m\u{1b}[2m=\u{1b}[0m1\u{1b}\u{1b}[2J",
                "\\u{1b}[2mapp\\u{1b}[0m\\u{1b}[2m:\\u{1b}[0m \\u{1b}[3mn\\u{1b}[0m\\u{1b}[2m=\\u{1b}[0m1\\u{1b}\\u{1b}[2J\n",
                "\u{1b}[2mapp\u{1b}[0m\u{1b}[2m:\u{1b}[0m \u{1b}[3mn\u{1b}[0m\u{1b}[2m=\u{1b}[0m1\\u{1b}\\u{1b}[2J\n",
            ),
            ("", "\n", "\n"),
        ] {
            assert_eq!(one_line(line.as_bytes(), false), plain);
            assert_eq!(one_line(line.as_bytes(), true), coloured);
        }
    }

    #[test]
    fn libraries_say_less_unless_they_are_named() {
        for (filter, expected) in [
            ("debug", "warn,toolloop=debug"),
            ("TRACE", "warn,toolloop=TRACE"),
            ("info", "warn,toolloop=info"),
            ("warn", "warn"),
            ("toolloop=trace,sqlx=warn", "toolloop=trace,sqlx=warn"),
            ("debug, html5ever=debug", "warn,toolloop=debug,html5ever=debug"),
            ("hyper", "hyper"),
        ] {
            assert_eq!(with_quiet_libraries(filter), expected);
            assert!(EnvFilter::try_new(with_quiet_libraries(filter)).is_ok(), "{filter}");
        }
    }

    #[test]
    fn a_closed_reader_is_ignored() {
        let (gone, may_write) = channel();
        let buffer = Buffer::start_writer(Stuck(may_write, channel().0)).unwrap();
        drop(gone);
        (0..100).for_each(|_| buffer.add(b"line\n"));
        buffer.flush(Duration::from_secs(10));
        assert!(buffer.lock().text.is_empty());
    }
}
