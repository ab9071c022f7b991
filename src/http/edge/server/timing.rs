//! The state of a connection that decides which timeout applies.
//!
//! A request head has a deadline, and so has an idle connection; while a request is open there is
//! none. The socket reports received bytes and blocked writes, the service reports the begin and end
//! of requests, and the connection's only timer reads the deadline. Nothing is closed here.

use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::Limits;
use super::frames::Frames;
use super::head_memory::HeadMemory;

/// What an HTTP/2 connection begins with (RFC 9113, section 3.4).
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// No bytes received yet.
    Connected,
    /// A request head is incomplete.
    ReadingHead,
    /// Between two requests.
    Idle,
    /// HTTP/2, where clients answer pings between requests.
    Multiplexed,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    since: Instant,
    /// What is missing of the HTTP/2 preface, while nothing else was received.
    preface: Option<&'static [u8]>,
    /// Requests without a complete response.
    requests: u32,
    /// Those of them whose response is a large one.
    large_answers: u32,
    /// Response bytes cannot be written until the client reads.
    write_blocked: bool,
    /// The client may still be sending when the connection is closed.
    lingers: bool,
    /// Of the head that is being read, the last bytes, as far as they end lines; `None` outside of one.
    head: Option<LineEnd>,
    /// Those of HTTP/2.
    frames: Frames,
    head_memory: HeadMemory,
}

/// What the bytes of a request head end with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum LineEnd {
    /// There are empty lines at most, which do not count.
    #[default]
    Nothing,
    NothingButReturn,
    Other,
    Return,
    Line,
    ReturnBehindLine,
}

#[derive(Debug)]
pub(super) struct ConnectionTiming(Mutex<State>);

impl ConnectionTiming {
    pub(super) fn new() -> Self {
        Self(Mutex::new(State {
            phase: Phase::Connected,
            since: Instant::now(),
            preface: Some(HTTP2_PREFACE),
            requests: 0,
            large_answers: 0,
            write_blocked: false,
            lingers: false,
            head: None,
            frames: Frames::default(),
            head_memory: HeadMemory::default(),
        }))
    }

    /// Keeps the socket open for reading when the connection is closed.
    pub(super) fn linger(&self) {
        self.state().lingers = true;
    }

    pub(super) fn lingers(&self) -> bool {
        self.state().lingers
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// In the head of a request, makes a line end without a carriage return invalid: if one server reads it
    /// as the end of a header and another as a part of it, requests can be smuggled past one of them. The
    /// heads of pipelined requests are not inspected.
    pub(super) fn bytes_received(&self, bytes: &mut [u8]) {
        let mut state = self.state();
        if matches!(state.phase, Phase::Connected | Phase::Idle) && state.requests == 0 {
            state.enter(Phase::ReadingHead);
        }
        let frames = state.frames_in(bytes);
        state.frames.read(frames);
        let Some(mut end) = state.head.filter(|_| state.requests == 0) else { return };
        for byte in bytes.iter() {
            end = match (*byte, end) {
                (b'\n', LineEnd::ReturnBehindLine) => {
                    state.head = None;
                    return;
                }
                (b'\r', LineEnd::Nothing) => LineEnd::NothingButReturn,
                (b'\n', LineEnd::NothingButReturn) => LineEnd::Nothing,
                (b'\n', LineEnd::Return) => LineEnd::Line,
                (b'\n', _) => {
                    state.head = None;
                    return make_invalid(bytes);
                }
                (b'\r', LineEnd::Line) => LineEnd::ReturnBehindLine,
                (b'\r', _) => LineEnd::Return,
                _ => LineEnd::Other,
            };
        }
        state.head = Some(end);
    }

    /// Whether there is memory for so many bytes that were received; always, outside of a request head.
    pub(super) fn has_memory(&self, bytes: usize, client: IpAddr) -> bool {
        let mut state = self.state();
        let (phase, is_answering) = (state.phase, state.requests > 0);
        match phase {
            Phase::ReadingHead => is_answering || state.head_memory.grow(bytes, client),
            Phase::Multiplexed if state.frames.is_in_head() => state.head_memory.hold(client),
            Phase::Multiplexed => {
                state.head_memory = HeadMemory::default();
                true
            }
            Phase::Connected | Phase::Idle => true,
        }
    }

    pub(super) fn set_write_blocked(&self, blocked: bool) {
        let mut state = self.state();
        state.write_blocked = blocked;
        state.since = Instant::now();
    }

    /// Restarts the current timeout.
    pub(super) fn restart(&self) {
        self.state().since = Instant::now();
    }

    /// When the current timeout expires. While none applies: when to check again.
    pub(super) fn deadline(&self, limits: &Limits) -> Instant {
        let state = self.state();
        match state.phase {
            _ if state.requests > 0 || state.write_blocked => Instant::now() + limits.idle_timeout,
            Phase::Connected | Phase::ReadingHead => state.since + limits.header_timeout,
            Phase::Idle | Phase::Multiplexed => state.since + limits.idle_timeout,
        }
    }

    /// Whether a request has no complete response yet.
    pub(super) fn is_answering(&self) -> bool {
        self.state().requests > 0
    }

    /// The kind of response that is being sent; the larger one if there are several.
    pub(super) fn answer(&self) -> Answer {
        if self.state().large_answers > 0 { Answer::Large } else { Answer::Small }
    }

    /// In this phase the connection can be closed without a graceful shutdown.
    pub(super) fn awaits_request_head(&self) -> bool {
        matches!(self.state().phase, Phase::Connected | Phase::ReadingHead)
    }
}

/// Replaces a part of a request head with an invalid one, and ends the head if the part is long enough, so that it is refused at
/// once.
fn make_invalid(bytes: &mut [u8]) {
    bytes.fill(b'\0');
    if let [_, .., a, b, c, d] = bytes {
        (*a, *b, *c, *d) = (b'\r', b'\n', b'\r', b'\n');
    }
}

impl State {
    /// The frames of HTTP/2 in these bytes; the connection is one of HTTP/2 once its preface is complete.
    fn frames_in<'b>(&mut self, bytes: &'b [u8]) -> &'b [u8] {
        let Some(missing) = self.preface else {
            return if self.phase == Phase::Multiplexed { bytes } else { &[] };
        };
        let length = missing.len().min(bytes.len());
        let (came, rest) = missing.split_at(length);
        let goes_on = bytes.starts_with(came);
        self.preface = (goes_on && !rest.is_empty()).then_some(rest);
        if !goes_on || !rest.is_empty() {
            return &[];
        }
        self.enter(Phase::Multiplexed);
        &bytes[length..]
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.since = Instant::now();
        self.head = (phase == Phase::ReadingHead && !self.lingers).then(LineEnd::default);
    }
}

/// Whether a response takes memory that others may wait for ([`crate::http::edge::large_answers`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    Small,
    Large,
}

/// Counts a request as open, from its head to the end of its response.
#[derive(Debug)]
pub(super) struct OpenRequest {
    timing: Arc<ConnectionTiming>,
    answer: Answer,
}

impl OpenRequest {
    pub(super) fn new(timing: &Arc<ConnectionTiming>) -> Self {
        let mut state = timing.state();
        state.requests += 1;
        if state.phase != Phase::Multiplexed {
            state.head_memory = HeadMemory::default();
        }
        drop(state);
        Self { timing: Arc::clone(timing), answer: Answer::Small }
    }

    /// Says that its response is a large one.
    pub(super) fn set_large(&mut self) {
        self.timing.state().large_answers += 1;
        self.answer = Answer::Large;
    }

    pub(super) fn answer(&self) -> Answer {
        self.answer
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        let mut state = self.timing.state();
        state.requests -= 1;
        state.large_answers -= u32::from(self.answer == Answer::Large);
        let phase = if state.phase == Phase::ReadingHead { Phase::Idle } else { state.phase };
        state.enter(phase);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn http2_is_known_however_its_preface_is_split() {
        for length in 1..=HTTP2_PREFACE.len() {
            let timing = ConnectionTiming::new();
            for part in HTTP2_PREFACE.chunks(length) {
                assert_eq!(timing.state().preface.map(<[u8]>::is_empty), Some(false));
                timing.bytes_received(&mut part.to_vec());
            }
            assert_eq!(timing.state().phase, Phase::Multiplexed, "{length}");
        }
        let timing = ConnectionTiming::new();
        timing.bytes_received(&mut b"PRI / HTTP/1.1\r\n".to_vec());
        let mut header = b"X: 1\nY: 2\r\n\r\n".to_vec();
        timing.bytes_received(&mut header);
        assert_eq!((timing.state().phase, header[0]), (Phase::ReadingHead, 0));
    }
}
