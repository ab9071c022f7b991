//! Whose turn it is on a connection, and since when: what a client owes, and what it does not.
//!
//! A head must be finished, a connection without a request may rest for a while, and while an
//! answer is being made or taken the client owes nothing here. Kept by the socket, which hears
//! bytes, and by the service, which begins and ends requests; the connection's one timer looks at
//! it. Nothing is closed here.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::Limits;

/// How an HTTP/2 client introduces itself (RFC 9113, section 3.4).
const HTTP2_PREFACE: &[u8] = b"PRI ";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// Nothing was heard yet.
    Fresh,
    /// A head began.
    Head,
    /// The last answer was given.
    Resting,
    /// HTTP/2, where heads are frames and pings are answered between requests.
    Multiplexed,
}

#[derive(Debug)]
struct State {
    turn: Turn,
    since: Instant,
    /// Requests whose answers are not yet complete.
    requests: u32,
    /// Bytes of an answer wait for the client to take some.
    blocked: bool,
    /// The client may still send when the connection is closed.
    lingers: bool,
}

/// The pace of one connection.
#[derive(Debug)]
pub(super) struct Pace(Mutex<State>);

impl Pace {
    pub(super) fn new() -> Self {
        Self(Mutex::new(State {
            turn: Turn::Fresh,
            since: Instant::now(),
            requests: 0,
            blocked: false,
            lingers: false,
        }))
    }

    /// The connection is closed while the client may still send.
    pub(super) fn linger(&self) {
        self.state().lingers = true;
    }

    pub(super) fn lingers(&self) -> bool {
        self.state().lingers
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// The client sent something.
    pub(super) fn heard(&self, bytes: &[u8]) {
        let mut state = self.state();
        match state.turn {
            Turn::Fresh if bytes.starts_with(HTTP2_PREFACE) => state.enter(Turn::Multiplexed),
            Turn::Fresh | Turn::Resting if state.requests == 0 => state.enter(Turn::Head),
            _ => {}
        }
    }

    /// The socket takes nothing more, or takes again.
    pub(super) fn blocked(&self, blocked: bool) {
        let mut state = self.state();
        state.blocked = blocked;
        state.since = Instant::now();
    }

    /// Counts anew from now.
    pub(super) fn restart(&self) {
        self.state().since = Instant::now();
    }

    /// When the client will have been silent for too long; while that cannot happen, a time to ask
    /// again.
    pub(super) fn deadline(&self, limits: &Limits) -> Instant {
        let state = self.state();
        match state.turn {
            _ if state.requests > 0 || state.blocked => Instant::now() + limits.idle_timeout,
            Turn::Fresh | Turn::Head => state.since + limits.header_timeout,
            Turn::Resting | Turn::Multiplexed => state.since + limits.idle_timeout,
        }
    }

    /// Whether a head is awaited, so that there is nothing to be gentle about.
    pub(super) fn owes_a_head(&self) -> bool {
        matches!(self.state().turn, Turn::Fresh | Turn::Head)
    }
}

impl State {
    fn enter(&mut self, turn: Turn) {
        self.turn = turn;
        self.since = Instant::now();
    }
}

/// A request from its head to the end of its answer.
#[derive(Debug)]
pub(super) struct OpenRequest(Arc<Pace>);

impl OpenRequest {
    pub(super) fn new(pace: &Arc<Pace>) -> Self {
        pace.state().requests += 1;
        Self(Arc::clone(pace))
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.requests -= 1;
        let turn = if state.turn == Turn::Head { Turn::Resting } else { state.turn };
        state.enter(turn);
    }
}
