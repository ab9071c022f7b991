//! Cuts a stream of bytes into frames: server-sent events, or one JSON text a line.
//!
//! Pure and incremental: chunks go in, complete frames come out, and the chunk boundaries make no
//! difference. The only incomplete frame that is delivered is a last line without its end
//! ([`Splitter::last_line`]). Data is not decoded.
//!
//! Events follow <https://html.spec.whatwg.org/multipage/server-sent-events.html>, but for two
//! things: `retry` is ignored, and an event without `id` does not inherit the last one.

use std::collections::VecDeque;

/// How a stream is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// Server-sent events.
    Sse,
    /// One frame per line.
    Lines,
}

/// One server-sent event, or one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The `event` field; empty for lines, and for events without one.
    pub event: String,
    /// The `id` field; empty for lines, and for events without one.
    pub id: String,
    /// The `data` fields joined by line feeds, or the line without its end; a line is never empty.
    pub data: Vec<u8>,
}

/// A frame is larger than this many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a frame is larger than {} MiB", .0 >> 20)]
pub struct FrameTooLarge(pub usize);

/// Takes bytes, gives frames.
#[derive(Debug)]
pub struct Splitter {
    framing: Framing,
    /// Bytes of the largest line, and of the largest data of one event.
    max_frame: usize,
    /// The line that has not ended yet.
    line: Vec<u8>,
    /// Whether the last byte was a carriage return: a following line feed belongs to it.
    after_return: bool,
    at_start: bool,
    event: String,
    id: String,
    /// The lines of data so far, each with a line feed.
    data: Vec<u8>,
    ready: VecDeque<Frame>,
}

impl Splitter {
    /// A frame of more than `max_frame` bytes is an error.
    pub fn new(framing: Framing, max_frame: usize) -> Self {
        Self {
            framing,
            max_frame,
            line: Vec::new(),
            after_return: false,
            at_start: true,
            event: String::new(),
            id: String::new(),
            data: Vec::new(),
            ready: VecDeque::new(),
        }
    }

    /// Takes the next bytes. Not to be called again after an error.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<(), FrameTooLarge> {
        while !bytes.is_empty() {
            if self.after_return {
                self.after_return = false;
                bytes = bytes.strip_prefix(b"\n").unwrap_or(bytes);
                continue;
            }
            let end = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            let (piece, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
            if self.line.len() + piece.len() > self.max_frame {
                return Err(FrameTooLarge(self.max_frame));
            }
            self.line.extend_from_slice(piece);
            if let Some((ending, rest)) = rest.split_first() {
                self.after_return = *ending == b'\r';
                let mut line = std::mem::take(&mut self.line);
                self.end_line(&line)?;
                line.clear();
                self.line = line;
                bytes = rest;
            } else {
                bytes = rest;
            }
        }
        Ok(())
    }

    /// The next complete frame.
    #[expect(clippy::should_implement_trait, reason = "more frames may follow after none")]
    pub fn next(&mut self) -> Option<Frame> {
        self.ready.pop_front()
    }

    /// Bytes of the frame that has not ended yet.
    pub fn pending(&self) -> usize {
        self.line.len() + self.data.len()
    }

    /// The line that has not ended, as a frame. An event that has not ended is dropped.
    pub fn last_line(&mut self) -> Option<Frame> {
        let line = std::mem::take(&mut self.line);
        if self.framing == Framing::Lines {
            self.end_line(&line).ok()?;
        }
        self.next()
    }

    fn end_line(&mut self, line: &[u8]) -> Result<(), FrameTooLarge> {
        let is_first = std::mem::take(&mut self.at_start);
        let line = line.strip_prefix("\u{feff}".as_bytes()).filter(|_| is_first).unwrap_or(line);
        match self.framing {
            Framing::Lines if line.trim_ascii().is_empty() => {}
            Framing::Lines => {
                let (event, id) = (String::new(), String::new());
                self.ready.push_back(Frame { event, id, data: line.to_vec() });
            }
            Framing::Sse if line.is_empty() => self.dispatch(),
            Framing::Sse => self.field(line)?,
        }
        Ok(())
    }

    fn field(&mut self, line: &[u8]) -> Result<(), FrameTooLarge> {
        let colon = line.iter().position(|byte| *byte == b':').unwrap_or(line.len());
        let (name, value) = line.split_at(colon);
        let value = value.strip_prefix(b":").unwrap_or(value);
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match name {
            b"data" if self.data.len() + value.len() > self.max_frame => {
                return Err(FrameTooLarge(self.max_frame));
            }
            b"data" => {
                self.data.extend_from_slice(value);
                self.data.push(b'\n');
            }
            b"event" => self.event = String::from_utf8_lossy(value).into_owned(),
            b"id" => self.id = String::from_utf8_lossy(value).into_owned(),
            _ => {} // comments have an empty name
        }
        Ok(())
    }

    /// A blank line ends an event; without data there is no event.
    fn dispatch(&mut self) {
        let (event, id) = (std::mem::take(&mut self.event), std::mem::take(&mut self.id));
        let mut data = std::mem::take(&mut self.data);
        if data.pop().is_some() {
            self.ready.push_back(Frame { event, id, data });
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MAX_FRAME: usize = 1 << 20;

    fn split(framing: Framing, chunks: &[&[u8]]) -> Vec<(String, String)> {
        let mut splitter = Splitter::new(framing, MAX_FRAME);
        let mut frames = Vec::new();
        for chunk in chunks {
            splitter.push(chunk).unwrap();
            while let Some(frame) = splitter.next() {
                frames.push((frame.event, String::from_utf8_lossy(&frame.data).into_owned()));
            }
        }
        frames
    }

    #[test]
    fn streams_are_cut_into_frames() {
        type Row = (Framing, &'static str, &'static [(&'static str, &'static str)]);
        use Framing::{Lines, Sse};
        let table: &[Row] = &[
            (Sse, "data: a\n\ndata: b\n\n", &[("", "a"), ("", "b")]),
            (Sse, "event: ping\ndata: {}\n\ndata:x\n\n", &[("ping", "{}"), ("", "x")]),
            (Sse, "data: a\r\ndata:  b\r\n\r\n", &[("", "a\n b")]),
            (Sse, "data: a\r\rdata: b\n\r\n", &[("", "a"), ("", "b")]),
            (Sse, ": alive\n\n:\n\nid: 7\nretry: 1\ndata: a\n\n", &[("", "a")]),
            (Sse, "\u{feff}data: a\n\n\u{feff}data: b\n\n", &[("", "a")]),
            (Sse, "event: lost\n\ndata\n\n", &[("", "")]),
            (Sse, "data: whole\n\ndata: not ended\n", &[("", "whole")]),
            (Sse, "{\"choices\": []}\n\n", &[]),
            (
                Lines,
                "{\"a\":1}\n\n  \n{\"b\":2}\r\n{\"c\":",
                &[("", "{\"a\":1}"), ("", "{\"b\":2}")],
            ),
            (Lines, "", &[]),
        ];
        for (framing, text, expected) in table {
            let expected: Vec<_> =
                expected.iter().map(|(e, d)| ((*e).to_owned(), (*d).to_owned())).collect();
            assert_eq!(split(*framing, &[text.as_bytes()]), expected, "{text:?}");
        }
    }

    #[test]
    fn a_last_line_may_lack_its_end() {
        for (framing, text, expected) in [
            (Framing::Lines, "{}\n{\"a\":1}", Some("{\"a\":1}")),
            (Framing::Lines, "{}\n \n ", None),
            (Framing::Sse, "data: a", None),
            (Framing::Sse, "data: a\n", None),
        ] {
            let mut splitter = Splitter::new(framing, MAX_FRAME);
            splitter.push(text.as_bytes()).unwrap();
            while splitter.next().is_some() {}
            let last = splitter.last_line().map(|frame| String::from_utf8(frame.data).unwrap());
            assert_eq!(last.as_deref(), expected, "{text:?}");
            assert_eq!(splitter.last_line(), None);
        }
    }

    #[test]
    fn a_frame_has_a_cap_however_it_grows() {
        let endless = vec![b'x'; MAX_FRAME / 2 + 1];
        let long_data = [b"data: ".as_slice(), &endless, b"\n"].concat();
        for (framing, piece) in
            [(Framing::Sse, &endless), (Framing::Lines, &endless), (Framing::Sse, &long_data)]
        {
            let mut splitter = Splitter::new(framing, MAX_FRAME);
            assert_eq!(splitter.push(piece), Ok(()));
            assert_eq!(splitter.push(piece), Err(FrameTooLarge(MAX_FRAME)));
        }
    }

    #[test]
    fn an_event_has_its_own_id_and_name() {
        let stream = ": hello\n\nevent: run.started\nid: 1\ndata: {\"a\":\ndata:  1}\nretry: 5\n\n\
                      id: 2\r\nevent:x\r\ndata\r\n\r\nevent: without data\nid: 3\n\ndata: b\n\n";
        let mut splitter = Splitter::new(Framing::Sse, MAX_FRAME);
        splitter.push(stream.as_bytes()).unwrap();
        let frame = |event: &str, id: &str, data: &str| {
            Some(Frame { event: event.into(), id: id.into(), data: data.into() })
        };
        assert_eq!(splitter.next(), frame("run.started", "1", "{\"a\":\n 1}"));
        assert_eq!(splitter.next(), frame("x", "2", ""));
        assert_eq!(splitter.next(), frame("", "", "b"));
        assert_eq!(splitter.next(), None);
    }

    proptest! {
        #[test]
        fn any_chunking_gives_the_same_frames(
            text in prop::collection::vec(prop::sample::select(vec![
                "data", "event", ":", ": ", "\n", "\r", "\r\n", "\n\n", "\u{feff}", "é", "{\"a\":1}", " ",
            ]), 0..40),
            cuts in prop::collection::vec(1_usize..8, 0..60),
        ) {
            let text = text.concat();
            let mut chunks = Vec::new();
            let mut rest = text.as_bytes();
            for cut in cuts {
                let (chunk, after) = rest.split_at(cut.min(rest.len()));
                chunks.push(chunk);
                rest = after;
            }
            chunks.push(rest);
            for framing in [Framing::Sse, Framing::Lines] {
                prop_assert_eq!(split(framing, &chunks), split(framing, &[text.as_bytes()]));
            }
        }
    }
}
