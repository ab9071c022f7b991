//! Lines of an untrusted stream, of bounded length, read at a bounded rate.
//!
//! A line that is too long is skipped. Its beginning is returned, so that a waiting request can be found
//! by its id.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::time::Instant;

/// Bytes of the beginning of a line that is too long.
const HEAD: usize = 512;
/// A line of more than this many times its bound counts as endless.
const ENDLESS: usize = 16;
/// Bytes that are read within a second at most; the other side waits.
const MOST_IN_A_SECOND: usize = 32 * 1024 * 1024;
const SECOND: Duration = Duration::from_secs(1);

/// A line, without its end.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line {
    Whole(Vec<u8>),
    /// The beginning of one that was too long.
    TooLong(Vec<u8>),
}

/// Reads lines.
pub(super) struct Lines<R> {
    from: BufReader<R>,
    max: usize,
    taken: usize,
    since: Instant,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    pub(super) fn new(from: R, max: usize) -> Self {
        Self { from: BufReader::new(from), max, taken: 0, since: Instant::now() }
    }

    /// The next line; `None` at the end of the stream. An incomplete last line is dropped.
    ///
    /// # Errors
    /// The stream cannot be read, or a line has no end (`InvalidData`); the next one begins in it.
    pub(super) async fn next(&mut self) -> io::Result<Option<Line>> {
        let (mut line, mut length) = (Vec::new(), 0_usize);
        loop {
            self.rest_if_much().await;
            let piece = self.from.fill_buf().await?;
            if piece.is_empty() {
                return Ok(None);
            }
            let end = piece.iter().position(|byte| *byte == b'\n');
            let part = &piece[..end.unwrap_or(piece.len())];
            length += part.len();
            if length <= self.max {
                line.extend_from_slice(part);
            } else if line.len() > HEAD {
                line.truncate(HEAD);
                line.shrink_to_fit();
            }
            let taken = part.len() + usize::from(end.is_some());
            self.from.consume(taken);
            self.taken += taken;
            if end.is_some() {
                return Ok(Some(self.bounded(line, length)));
            }
            if length > self.max.saturating_mul(ENDLESS) {
                let message = "it wrote a line without an end";
                return Err(io::Error::new(io::ErrorKind::InvalidData, message));
            }
        }
    }

    fn bounded(&self, line: Vec<u8>, length: usize) -> Line {
        if length > self.max { Line::TooLong(line) } else { Line::Whole(line) }
    }

    async fn rest_if_much(&mut self) {
        if self.taken < MOST_IN_A_SECOND {
            return;
        }
        tokio::time::sleep_until(self.since + SECOND).await;
        (self.taken, self.since) = (0, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_have_a_length() {
        let text = format!("a\n\n{}\nb\n{}", "x".repeat(11), "no end");
        let mut lines = Lines::new(text.as_bytes(), 10);
        let whole = |text: &str| Some(Line::Whole(text.as_bytes().to_vec()));
        assert_eq!(lines.next().await.unwrap(), whole("a"));
        assert_eq!(lines.next().await.unwrap(), whole(""));
        assert!(matches!(lines.next().await.unwrap(), Some(Line::TooLong(_))));
        assert_eq!(lines.next().await.unwrap(), whole("b"));
        assert_eq!(lines.next().await.unwrap(), None);
    }

    #[tokio::test]
    async fn a_long_line_shows_its_beginning_and_takes_no_memory() {
        let text = format!("{}{}\nafter\n", "id".repeat(50), "x".repeat(150_000));
        let mut lines = Lines::new(text.as_bytes(), 20_000);
        let Some(Line::TooLong(head)) = lines.next().await.unwrap() else { panic!("too long") };
        assert!(head.starts_with(b"idid") && head.len() <= HEAD);
        assert_eq!(lines.next().await.unwrap(), Some(Line::Whole(b"after".to_vec())));
        let endless = "x".repeat(1_000);
        assert!(Lines::new(endless.as_bytes(), 10).next().await.is_err());
    }
}
