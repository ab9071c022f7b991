//! Coordinates how all calls of this process treat a provider that refuses (429, exhausted quota).
//!
//! After a 429 all calls of the model wait for one cool-down. Then one call is made as a probe. When
//! it is answered, the others follow in groups, each twice as large as the one before. If the provider
//! refuses for longer than the configured patience, without an answer in between, all calls fail
//! immediately for a while; then the next probe is made. An exhausted quota leaves no patience. The
//! router may let a call insist: it is made as a probe although others fail.
//!
//! An error about the account applies to all models of the provider. A 429 applies to its model only,
//! because providers limit each model by itself. Transient failures are up to [`super::breaker`]; the
//! router decides where a refused call goes.

use std::fmt;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::retry;
use crate::providers::{Completion, FailureKind, ProviderError};

/// For how long calls fail immediately if the provider requests no delay.
const BLOCK: Duration = Duration::from_secs(10);
/// The longest time for which calls fail immediately.
const LONGEST_BLOCK: Duration = Duration::from_secs(30);
/// A probe that was not refused within this time counts as being answered.
const PROBE_PATIENCE: Duration = Duration::from_secs(5);
/// How long after a cool-down a refusal still belongs to the same series.
const FORGOTTEN: Duration = Duration::from_secs(10);
/// Calls that follow a probe at first.
const FIRST_FOLLOWERS: u32 = 2;
/// Between two groups of calls that follow a probe.
const STEP: Duration = Duration::from_millis(200);
/// The size of the last group.
const MOST_FOLLOWERS: u32 = 64;
/// How long new runs let waiting calls go first after a cool-down.
const PRECEDENCE: Duration = Duration::from_millis(200);

/// Whether calls may be made.
#[derive(Debug, Default)]
pub(super) struct RefusalGate {
    state: Mutex<State>,
    /// The gate was opened or shut, or a probe was given up.
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// How often it was opened or shut: outcomes of earlier calls are out of date.
    turn: u64,
    shut: Option<Shut>,
    /// Set while the waiting calls follow a probe.
    opening: Option<Opening>,
    /// Refusals since the provider last answered.
    series: Option<RefusalSeries>,
}

/// How many calls may be made now.
#[derive(Debug)]
struct Opening {
    group: u32,
    /// Calls of the group that may still be made.
    left: u32,
    next_at: Instant,
}

/// Refusals without an answer in between.
#[derive(Debug, Clone, Copy)]
struct RefusalSeries {
    since: Instant,
    /// Refusals so far; those within one cool-down count once.
    refused: u32,
    /// The end of the last cool-down.
    until: Instant,
}

#[derive(Debug)]
struct Shut {
    kind: FailureKind,
    /// When a probe may be made.
    until: Instant,
    /// Refusals in a row, each after its cool-down.
    refused: u32,
    /// Whether calls wait; if not, they fail immediately.
    has_patience: bool,
    probed: Option<Instant>,
}

/// The gates that a call must pass: that of its provider's account and that of its model.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gates<'a> {
    pub(super) account: &'a RefusalGate,
    pub(super) model: &'a RefusalGate,
}

/// Why a call may not be made now.
#[derive(Debug)]
pub(super) enum Held<'a> {
    CoolsDown(Refusal, CoolDown),
    /// Others go first: the call may enter again after [`RefusalGate::settled`].
    IsProbed(&'a RefusalGate, Instant),
    Refused(Refusal),
}

/// The refusal of a call that is not made, because the provider refused other calls. It does not
/// contain the provider's message to those calls, which may be of other tenants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) kind: FailureKind,
    pub(super) left: Duration,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = match self.kind {
            FailureKind::QuotaExhausted => "its quota is used up",
            _ => "it limits the rate of calls",
        };
        write!(f, "no calls are made for another {} s: {why}", self.left.as_secs_f64().ceil())
    }
}

/// The permission to make one try.
#[derive(Debug)]
pub(super) struct Passes<'a> {
    account: Pass<'a>,
    model: Pass<'a>,
}

#[derive(Debug)]
struct Pass<'a> {
    gate: &'a RefusalGate,
    turn: u64,
    is_probe: bool,
}

/// How many refusals in a row are waited out, and for how long.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// Refusals without a Retry-After that are waited out. With 0, no refusal is waited out.
    pub(super) retries: u32,
    /// The time since the first refusal.
    pub(super) time: Duration,
}

impl Patience {
    /// The patience that is left after another refusal.
    fn left(&self, refusal: &ProviderError, earlier: u32, waited: Duration) -> Duration {
        let counted = if refusal.retry_after.is_some() { 0 } else { earlier };
        if counted < self.retries { self.time.saturating_sub(waited) } else { Duration::ZERO }
    }
}

/// A cool-down, for which all calls wait together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CoolDown {
    pub(super) wait: Duration,
    /// Refusals in a row so far, each after its cool-down.
    pub(super) refused: u32,
}

/// Whether a call that the provider refused is tried again.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RetryDecision {
    /// The call's own retries decide.
    Own,
    /// Another try after this cool-down.
    After(CoolDown),
    Nothing,
}

/// What a run that begins now can expect of the provider.
#[derive(Debug)]
pub(super) enum Outlook {
    Open,
    /// Whether the gate opens is known by this time.
    Undecided(Instant),
    Refused(Refusal),
}

/// Whether the provider will refuse the next call just as well.
fn is_refusal(error: &ProviderError) -> bool {
    match error.kind {
        FailureKind::QuotaExhausted => true,
        // OpenAI answers 429 to a request that is above the limit by itself.
        FailureKind::RateLimited => {
            !error.message.to_ascii_lowercase().contains("request too large")
        }
        _ => false,
    }
}

/// Whether a refusal concerns all models of the provider. Without such a code it may be about the quota
/// of one model.
fn is_of_account(error: &ProviderError) -> bool {
    error.kind == FailureKind::QuotaExhausted
        && (error.status == Some(402)
            || matches!(
                error.code.as_deref(),
                Some(
                    "insufficient_quota"
                        | "billing_hard_limit_reached"
                        | "billing_not_active"
                        | "billing_error"
                )
            ))
}

impl RefusalGate {
    fn enter(&self, now: Instant, insists: bool) -> Result<Pass<'_>, Held<'_>> {
        let mut state = self.state.lock();
        if state.shut.as_ref().is_some_and(|shut| shut.is_over(now)) {
            state.open(now);
            self.changed.notify_waiters();
        }
        let turn = state.turn;
        let Some(shut) = &mut state.shut else {
            return match state.follow(now) {
                Some(next_at) => Err(Held::IsProbed(self, next_at)),
                None => Ok(Pass { gate: self, turn, is_probe: false }),
            };
        };
        if let Some(probed) = shut.probed {
            return Err(Held::IsProbed(self, probed + PROBE_PATIENCE));
        }
        let left = shut.until.saturating_duration_since(now);
        if left.is_zero() || insists && !shut.has_patience {
            shut.probed = Some(now);
            return Ok(Pass { gate: self, turn, is_probe: true });
        }
        let refusal = Refusal { kind: shut.kind, left };
        let cool_down = CoolDown { wait: left, refused: shut.refused };
        Err(if shut.has_patience {
            Held::CoolsDown(refusal, cool_down)
        } else {
            Held::Refused(refusal)
        })
    }

    /// Resolves when the gate has changed after the calls that go first, or at this instant.
    pub(super) async fn settled(&self, at: Instant) {
        let changed = self.changed.notified();
        if self.state.lock().lets_others_go_first() {
            let _ = timeout_at(at, changed).await;
        }
    }

    fn outlook(&self, now: Instant) -> Outlook {
        let state = self.state.lock();
        let Some(shut) = state.shut.as_ref().filter(|shut| !shut.is_over(now)) else {
            return Outlook::Open;
        };
        match shut.probed {
            Some(probed) => Outlook::Undecided(probed + PROBE_PATIENCE),
            None if !shut.has_patience && shut.until > now => {
                Outlook::Refused(Refusal { kind: shut.kind, left: shut.until - now })
            }
            None if shut.has_patience && shut.until + PRECEDENCE > now => {
                Outlook::Undecided(shut.until + PRECEDENCE)
            }
            None => Outlook::Open,
        }
    }

    /// Resolves when the outlook may have changed, or at this instant.
    pub(super) async fn changed(&self, at: Instant) {
        let _ = timeout_at(at, self.changed.notified()).await;
    }

    pub(super) fn is_in_use(&self, now: Instant) -> bool {
        self.state.lock().shut.as_ref().is_some_and(|shut| !shut.is_over(now))
    }
}

impl State {
    /// Opens the gate: the waiting calls may follow in groups.
    fn open(&mut self, now: Instant) {
        self.turn += 1;
        self.shut = None;
        let group = FIRST_FOLLOWERS;
        self.opening = Some(Opening { group, left: group, next_at: now + STEP });
    }

    /// Takes a place in the current group; returns when the next group may go if this one is complete.
    fn follow(&mut self, now: Instant) -> Option<Instant> {
        let opening = self.opening.as_mut()?;
        if opening.next_at <= now {
            if opening.left > 0 || opening.group >= MOST_FOLLOWERS {
                self.opening = None; // no more are waiting, or enough have been answered
                return None;
            }
            let group = opening.group * 2;
            *opening = Opening { group, left: group, next_at: now + STEP };
        }
        match opening.left.checked_sub(1) {
            Some(left) => {
                opening.left = left;
                None
            }
            None => Some(opening.next_at),
        }
    }

    fn lets_others_go_first(&self) -> bool {
        self.shut.as_ref().is_some_and(|shut| shut.probed.is_some())
            || self.opening.as_ref().is_some_and(|opening| opening.left == 0)
    }

    /// Shuts the gate after a refusal.
    fn shut(&mut self, refusal: &ProviderError, patience: Patience, now: Instant) {
        self.turn += 1;
        self.opening = None;
        let is_at_end = self.shut.take().is_some_and(|shut| !shut.has_patience && shut.until > now);
        let earlier = self.series.take().filter(|series| now <= series.until + FORGOTTEN);
        let (since, refused) = earlier.map_or((now, 0), |series| (series.since, series.refused));
        let waited = now.saturating_duration_since(since);
        let left = if is_at_end { Duration::ZERO } else { patience.left(refusal, refused, waited) };
        let cool_down = retry::cool_down(refusal, refused, waited, left);
        let block = || refusal.retry_after.unwrap_or(BLOCK).min(LONGEST_BLOCK);
        let refused = refused + 1;
        tracing::warn!(
            provider = refusal.provider,
            error = %refusal,
            ?cool_down,
            refused,
            "the provider refuses: its calls wait together"
        );
        let until = now + cool_down.unwrap_or_else(block);
        // When the patience has run out, the next refusal begins a new series.
        self.series = cool_down.map(|_| RefusalSeries { since, refused, until });
        self.shut = Some(Shut {
            kind: refusal.kind,
            until,
            refused,
            has_patience: cool_down.is_some(),
            probed: None,
        });
    }
}

impl Shut {
    /// Whether it is out of date: no call came to probe, or the probe is being answered.
    fn is_over(&self, now: Instant) -> bool {
        match self.probed {
            Some(probed) => probed + PROBE_PATIENCE <= now,
            None => self.until + FORGOTTEN <= now,
        }
    }
}

impl<'a> Gates<'a> {
    /// Lets a call pass, or says why not. A call that insists is a probe where others fail immediately.
    pub(super) fn enter(self, now: Instant, insists: bool) -> Result<Passes<'a>, Held<'a>> {
        let account = self.account.enter(now, insists)?;
        Ok(Passes { account, model: self.model.enter(now, insists)? })
    }

    /// The outlook for a run that begins now, and the gate that decides it.
    pub(super) fn outlook(self, now: Instant) -> (&'a RefusalGate, Outlook) {
        match self.account.outlook(now) {
            Outlook::Open => (self.model, self.model.outlook(now)),
            outlook => (self.account, outlook),
        }
    }
}

impl Passes<'_> {
    /// Records the outcome of the try.
    pub(super) fn ended(
        self,
        outcome: &Result<Completion, ProviderError>,
        patience: Patience,
        now: Instant,
    ) -> RetryDecision {
        let refusal = outcome.as_ref().err().filter(|error| is_refusal(error));
        let outcome_for = |is_of_this: bool| match refusal.filter(|_| is_of_this) {
            Some(refusal) => TryOutcome::Refusal(refusal),
            None if outcome.is_ok() => TryOutcome::Answer,
            None => TryOutcome::Nothing,
        };
        let is_of_account = refusal.is_some_and(is_of_account);
        let hope = self.account.ended(outcome_for(is_of_account), patience, now);
        let hope_of_model = self.model.ended(outcome_for(!is_of_account), patience, now);
        if is_of_account { hope } else { hope_of_model }
    }
}

/// The outcome of a try, for its gate.
#[derive(Clone, Copy)]
enum TryOutcome<'a> {
    Answer,
    Refusal(&'a ProviderError),
    Nothing,
}

impl Pass<'_> {
    fn ended(self, outcome: TryOutcome<'_>, patience: Patience, now: Instant) -> RetryDecision {
        let mut state = self.gate.state.lock();
        let is_current = state.turn == self.turn;
        let refusal = match outcome {
            TryOutcome::Refusal(refusal) => refusal,
            TryOutcome::Answer | TryOutcome::Nothing => {
                if matches!(outcome, TryOutcome::Answer) {
                    state.series = None;
                }
                if is_current && self.is_probe {
                    state.open(now);
                    self.gate.changed.notify_waiters();
                }
                return RetryDecision::Own;
            }
        };
        if is_current || state.shut.is_none() {
            state.shut(refusal, patience, now);
            self.gate.changed.notify_waiters();
        } else if let Some(shut) = state.shut.as_mut().filter(|shut| shut.probed.is_none()) {
            let asked = refusal.retry_after.unwrap_or_default().min(LONGEST_BLOCK);
            shut.until = shut.until.max(now + asked);
        }
        match &state.shut {
            Some(shut) if shut.has_patience => RetryDecision::After(CoolDown {
                wait: shut.until.saturating_duration_since(now),
                refused: shut.refused,
            }),
            _ => RetryDecision::Nothing,
        }
    }
}

impl Drop for Pass<'_> {
    /// A probe that was given up makes room for another one.
    fn drop(&mut self) {
        let mut state = self.gate.state.lock();
        if self.is_probe
            && state.turn == self.turn
            && let Some(shut) = &mut state.shut
        {
            shut.probed = None;
            self.gate.changed.notify_waiters();
        }
    }
}
