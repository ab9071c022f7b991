//! The output of a program, read as it is written and bounded: its beginning, its end, and how
//! much was left out between them.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;

use tokio::io::{AsyncRead, AsyncReadExt};

use crate::bounds::secrets;

/// Bytes that are read at once.
const PIECE: usize = 64 * 1024;
/// Bytes beside a cut by which secrets there are recognised.
const BESIDE: usize = 8 * 1024;
/// Bytes of a character after its first one, at most.
const MAX_CONTINUED: usize = 3;
/// Bytes of a line that is inspected while it arrives.
const MAX_LINE: usize = 16 * 1024;

/// Bytes of each stream that are kept.
#[derive(Debug, Clone, Copy)]
pub(super) struct MaxOutput {
    pub(super) stdout: usize,
    pub(super) stderr: usize,
}

/// A stream of a program, without its middle where it was long.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Output {
    pub text: String,
    /// Bytes that were left out between the beginning and the end.
    pub omitted: u64,
    /// Where the text says so.
    note: Range<usize>,
}

impl Output {
    /// The beginning and the end; all of it is the beginning where nothing was left out.
    pub fn ends(&self) -> (&str, &str) {
        if self.omitted == 0 {
            return (&self.text, "");
        }
        (&self.text[..self.note.start], &self.text[self.note.end..])
    }
}

/// Reads to the end. `each_line` sees every line of moderate length as it comes and says whether it
/// is part of the output.
pub(super) async fn captured(
    mut from: impl AsyncRead + Unpin,
    most: usize,
    mut each_line: Option<&mut (dyn FnMut(&str) -> bool + Send)>,
) -> io::Result<Output> {
    let mut kept = KeptOutput::new(most);
    let mut line: Vec<u8> = Vec::new();
    let mut is_long = false;
    let mut piece = vec![0; PIECE];
    loop {
        let read = from.read(&mut piece).await?;
        let Some(each_line) = each_line.as_deref_mut() else {
            if read == 0 {
                return Ok(kept.output());
            }
            kept.add(&piece[..read]);
            continue;
        };
        for part in piece[..read].split_inclusive(|byte| *byte == b'\n') {
            let ends = part.ends_with(b"\n");
            if is_long || line.len() + part.len() > MAX_LINE {
                kept.add(&line);
                kept.add(part);
                line.clear();
                is_long = !ends;
                continue;
            }
            line.extend_from_slice(part);
            if ends {
                pass(&mut line, &mut kept, each_line);
            }
        }
        if read == 0 {
            if line.is_empty() {
                return Ok(kept.output());
            }
            pass(&mut line, &mut kept, each_line);
            return Ok(kept.output());
        }
    }
}

fn pass(
    line: &mut Vec<u8>,
    kept: &mut KeptOutput,
    each_line: &mut (dyn FnMut(&str) -> bool + Send),
) {
    let is_output = std::str::from_utf8(line).map_or(true, |text| each_line(text.trim_end()));
    if is_output {
        kept.add(line);
    }
    line.clear();
}

/// The first and the last bytes of a stream, with those beside their cuts.
struct KeptOutput {
    first: Vec<u8>,
    last: VecDeque<u8>,
    /// Of each of the two, without those beside its cut.
    most: usize,
    /// Bytes between the two.
    dropped: u64,
}

impl KeptOutput {
    fn new(most: usize) -> Self {
        Self { first: Vec::new(), last: VecDeque::new(), most: most / 2, dropped: 0 }
    }

    fn add(&mut self, bytes: &[u8]) {
        let most = self.most + BESIDE;
        let (first, rest) = bytes.split_at(bytes.len().min(most - self.first.len()));
        self.first.extend_from_slice(first);
        let skipped = rest.len().saturating_sub(most);
        self.last.extend(&rest[skipped..]);
        let over = self.last.len().saturating_sub(most);
        self.last.drain(..over);
        self.dropped += (skipped + over) as u64;
    }

    fn output(self) -> Output {
        let Self { mut first, last, most, dropped } = self;
        let mut last: Vec<u8> = last.into();
        if dropped == 0 {
            first.append(&mut last);
            if first.len() <= 2 * most {
                let text = String::from_utf8_lossy(&first).into_owned();
                return Output { text, ..Output::default() };
            }
            last.clone_from(&first);
        }
        let all = if dropped == 0 { first.len() } else { first.len() + last.len() };
        let (mut text, cut_first) = beginning(&first, most);
        let (end, cut_last) = ending(&last, most);
        let kept = 2 * most - cut_first - cut_last;
        let omitted = dropped + (all - kept) as u64;
        let start = text.len();
        text.push_str(&left_out(omitted));
        let note = start..text.len();
        text.push_str(&end);
        Output { text, omitted, note }
    }
}

/// The text of the first bytes, of at most so many, without a part of a secret or of a character at its end;
/// and how many bytes were cut off for that, at most all of them.
fn beginning(bytes: &[u8], most: usize) -> (String, usize) {
    let at = (most.saturating_sub(MAX_CONTINUED)..=most)
        .rev()
        .find(|at| bytes.get(*at).is_none_or(|byte| !is_continuation(*byte)));
    let at = at.unwrap_or(most);
    let mut text = String::from_utf8_lossy(&bytes[..at]).into_owned();
    let whole = text.len();
    text.push_str(&String::from_utf8_lossy(&bytes[at..]));
    text.truncate(secrets::head(&text, whole).len());
    let cut = most - at + whole - text.len();
    (text, cut.min(most))
}

/// The same of the last bytes.
fn ending(bytes: &[u8], most: usize) -> (String, usize) {
    let start = bytes.len() - most;
    let at = (start..=bytes.len().min(start + MAX_CONTINUED))
        .find(|at| bytes.get(*at).is_none_or(|byte| !is_continuation(*byte)));
    let at = at.unwrap_or(start);
    let mut text = String::from_utf8_lossy(&bytes[..at]).into_owned();
    let before = text.len();
    text.push_str(&String::from_utf8_lossy(&bytes[at..]));
    let whole = text.len() - before;
    let end = secrets::tail(&text, whole).to_owned();
    let cut = at - start + whole - end.len();
    (end, cut.min(most))
}

fn is_continuation(byte: u8) -> bool {
    byte & 0b1100_0000 == 0b1000_0000
}

/// The note between a beginning and an end.
fn left_out(bytes: u64) -> String {
    format!("\n[… {bytes} bytes left out …]\n")
}

/// More than the size of that note, as JSON text.
const NOTE: usize = 64;

/// A beginning and an end with so many bytes between them, cut so that all of it takes `most` at
/// most, where a character takes what `size` says, and that no part of a secret is left at the cut.
pub fn shortened(
    (head, tail): (&str, &str),
    omitted: u64,
    most: usize,
    size: fn(char) -> usize,
) -> String {
    let sum = |text: &str| text.chars().map(size).sum::<usize>();
    let note = if omitted > 0 { NOTE } else { 0 };
    if sum(head) + note + sum(tail) <= most {
        let note = if omitted > 0 { left_out(omitted) } else { String::new() };
        return format!("{head}{note}{tail}");
    }
    // What is whole is cut at both ends.
    let (first, last) = if omitted == 0 { (head, head) } else { (head, tail) };
    let room = most.saturating_sub(NOTE) / 2;
    let kept = within(first.char_indices().map(|(at, c)| (at + c.len_utf8(), c)), room, size);
    let kept_first = secrets::head(first, kept);
    let end = last.len();
    let kept = within(last.char_indices().rev().map(|(at, c)| (end - at, c)), room, size);
    let kept_last = secrets::tail(last, kept);
    let all = head.len() + tail.len();
    let omitted = omitted + (all - kept_first.len() - kept_last.len()) as u64;
    format!("{kept_first}{}{kept_last}", left_out(omitted))
}

/// How many bytes of a text fit, given how many there are up to each of its characters.
fn within(
    characters: impl Iterator<Item = (usize, char)>,
    room: usize,
    size: fn(char) -> usize,
) -> usize {
    let mut taken = 0;
    let fits = characters.take_while(|(_, character)| {
        taken += size(*character);
        taken <= room
    });
    fits.last().map_or(0, |(bytes, _)| bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_middle_is_left_out_and_counted() {
        let all: Vec<u8> = (0..100_000_u32).map(|n| b'a' + (n % 26) as u8).collect();
        for length in [0, 1, 9, 10, 11, 100, 99_999] {
            let output = captured(&all[..length], 10, None).await.unwrap();
            let omitted = length.saturating_sub(10);
            assert_eq!(output.omitted, omitted as u64, "{length}");
            let first = String::from_utf8_lossy(&all[..length.min(5)]).into_owned();
            let last = String::from_utf8_lossy(&all[length.saturating_sub(5)..length]).into_owned();
            assert!(output.text.starts_with(&first) && output.text.ends_with(&last), "{length}");
            assert_eq!(output.text.contains("left out"), omitted > 0, "{length}");
        }
    }

    #[tokio::test]
    async fn no_part_of_a_secret_is_left_where_a_stream_is_cut() {
        let secret = "password: hunter2hunter2";
        let most = 2000;
        let fill = |bytes: usize| "words \n".repeat(bytes).split_off(6 * bytes);
        for part in 0..=secret.len() {
            for rest in [0, 100, 50_000] {
                let (before, after) = (fill(1000 - part), fill(1000 + rest));
                let at_first_cut = format!("{before}{secret}\n{after}");
                let at_last_cut = format!("{after}\n{secret}{before}");
                for all in [at_first_cut, at_last_cut] {
                    let output = captured(all.as_bytes(), most, None).await.unwrap();
                    let shown = secrets::redacted(&output.text);
                    assert!(!shown.contains("unter") && !shown.contains("er2"), "{part}: {shown}");
                    let (head, tail) = output.ends();
                    let kept = (head.len() + tail.len()) as u64;
                    assert_eq!(output.omitted + kept, all.len() as u64, "{part} {rest}");
                    assert!(kept > 1800, "{part} {rest}");
                }
            }
        }
    }

    #[tokio::test]
    async fn a_character_at_a_cut_is_left_out_whole() {
        let all = "ä".repeat(10_000);
        let output = captured(all.as_bytes(), 10, None).await.unwrap();
        assert_eq!(output.ends(), ("ää", "ää"));
        assert_eq!(output.omitted, 19_992);
    }

    #[tokio::test]
    async fn what_is_cut_again_is_counted_once() {
        let all = "0123456789".repeat(1000);
        let output = captured(all.as_bytes(), 1000, None).await.unwrap();
        assert_eq!(output.ends(), (&all[..500], &all[all.len() - 500..]));
        for most in [0, 64, 65, 264, 900, 1063] {
            let short = shortened(output.ends(), output.omitted, most, char::len_utf8);
            let half = most.saturating_sub(NOTE) / 2;
            let expected = format!(
                "{}\n[… {} bytes left out …]\n{}",
                &all[..half],
                all.len() - 2 * half,
                &all[all.len() - half..]
            );
            assert_eq!(short, expected, "{most}");
        }
        assert_eq!(shortened(output.ends(), output.omitted, 1064, char::len_utf8), output.text);
        let whole = captured("ä\n\"x".as_bytes(), 1000, None).await.unwrap();
        assert_eq!(shortened(whole.ends(), 0, 5, char::len_utf8), "ä\n\"x");
        let wide = "ä".repeat(100);
        let short = shortened((&wide, ""), 0, 78, char::len_utf8);
        assert_eq!(short, "äää\n[… 188 bytes left out …]\näää");
    }

    #[tokio::test]
    async fn lines_can_be_taken_out() {
        let mut seen = Vec::new();
        let mut look = |line: &str| {
            seen.push(line.to_owned());
            !line.starts_with('#')
        };
        let text = b"one\n#two\nthree\n\xff\nlast";
        let output = captured(&text[..], 1000, Some(&mut look)).await.unwrap();
        assert_eq!(output.text, "one\nthree\n\u{fffd}\nlast");
        assert_eq!(seen, ["one", "#two", "three", "last"]);
    }

    #[tokio::test]
    async fn of_long_lines_nothing_is_looked_at() {
        let mut seen = Vec::new();
        let mut look = |line: &str| {
            seen.push(line.to_owned());
            false
        };
        let long = "#".repeat(MAX_LINE * 5 + 7);
        let text = format!("short\n{long}\nlater\n{long}");
        let output = captured(text.as_bytes(), 1 << 20, Some(&mut look)).await.unwrap();
        assert_eq!(output.text, format!("{long}\n{long}"));
        assert_eq!(seen, ["short", "later"]);
    }
}
