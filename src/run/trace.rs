//! The place of a run and its parts in a distributed trace (W3C Trace Context).
//!
//! Ids are functions of the run's id and the place in the run, so they need no storage, and another
//! replica continues the same trace. `telemetry` builds and exports the spans.

use std::fmt;

use chrono::{DateTime, Utc};
use sha2::{Digest, Sha256};
use uuid::Uuid;

/// Longest suffix that a later version of `traceparent` may append, in bytes.
const MAX_SUFFIX: usize = 128;

/// Constant properties of a run, for observers of its writes.
#[derive(Debug, Clone, PartialEq)]
pub struct RunOrigin {
    pub tenant: String,
    /// The caller's key id or token subject.
    pub subject: String,
    pub agent: String,
    pub agent_version: String,
    /// What the run executes.
    pub definition_hash: String,
    pub session_id: Option<String>,
    /// The model that it asks first, as `provider/model`; absent until its plan is known.
    pub model: Option<String>,
    /// Whether another run started it.
    pub is_child: bool,
    /// Time of acceptance.
    pub created_at: DateTime<Utc>,
    /// Whether later runs may recall its events.
    pub is_observed: bool,
    /// Where its events are sent.
    pub webhook: Option<String>,
    pub trace: TraceContext,
}

/// The trace that a run belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceContext {
    pub run_id: Uuid,
    /// Never 0.
    pub trace_id: u128,
    /// The caller's span, if the caller sent a `traceparent`.
    pub parent: Option<u64>,
    /// Whether the trace is recorded.
    pub sampled: bool,
}

/// A part of a run that is a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpanPlace {
    /// The whole run.
    Run,
    /// A model call, all tries included.
    Chat {
        /// The attempt, 1-based.
        attempt: u32,
        /// The iteration within the attempt, 1-based.
        iteration: u32,
    },
    /// The model call that writes a summary before an iteration.
    Summary {
        /// The attempt, 1-based.
        attempt: u32,
        /// The iteration within the attempt, 1-based.
        iteration: u32,
    },
    /// A tool call.
    Tool(Uuid),
}

/// A span; displayed as the `traceparent` for the next service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceSpan {
    pub run: TraceContext,
    /// Never 0.
    pub span_id: u64,
}

impl TraceContext {
    /// Continues the caller's trace. Without a valid `traceparent` it starts a new trace, which is
    /// sampled for this share of all runs.
    pub fn of_run(run_id: Uuid, traceparent: Option<&str>, sample_ratio: f64) -> Self {
        if let Some((trace_id, parent, sampled)) = traceparent.and_then(parse) {
            return Self { run_id, trace_id, parent: Some(parent), sampled };
        }
        let trace_id = run_id.as_u128().max(1);
        #[expect(clippy::cast_precision_loss, reason = "a share needs no more than 53 bits")]
        let position = (hash(run_id, &[]) >> 11) as f64 / (1_u64 << 53) as f64;
        Self { run_id, trace_id, parent: None, sampled: position < sample_ratio }
    }

    pub fn span(self, place: SpanPlace) -> TraceSpan {
        let span_id = match place {
            SpanPlace::Run => hash(self.run_id, b"run"),
            SpanPlace::Chat { attempt, iteration } => {
                hash(self.run_id, &place_of(attempt, iteration))
            }
            SpanPlace::Summary { attempt, iteration } => {
                hash(self.run_id, &[&b"summary"[..], &place_of(attempt, iteration)].concat())
            }
            SpanPlace::Tool(call) => hash(self.run_id, call.as_bytes()),
        };
        TraceSpan { run: self, span_id: span_id.max(1) }
    }
}

impl fmt::Display for TraceSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "00-{:032x}-{:016x}-{:02x}",
            self.run.trace_id,
            self.span_id,
            u8::from(self.run.sampled)
        )
    }
}

fn place_of(attempt: u32, iteration: u32) -> [u8; 8] {
    (u64::from(attempt) << 32 | u64::from(iteration)).to_be_bytes()
}

/// A deterministic pseudo-random number.
fn hash(run: Uuid, place: &[u8]) -> u64 {
    let digest = Sha256::new().chain_update(run.as_bytes()).chain_update(place).finalize();
    digest.iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte))
}

pub fn is_traceparent(header: &str) -> bool {
    parse(header).is_some()
}

/// Trace, parent span and the sampled flag. The suffix of a later version is ignored up to
/// [`MAX_SUFFIX`] (W3C Trace Context, sections 3.2 and 4).
fn parse(header: &str) -> Option<(u128, u64, bool)> {
    let (known, rest) = header.split_at_checked(55)?;
    let mut fields = known.split('-');
    let mut field = |length: usize| {
        let hex = |text: &&str| {
            text.len() == length && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        };
        fields.next().filter(hex).and_then(|text| u128::from_str_radix(text, 16).ok())
    };
    let (version, trace_id, parent, flags) = (field(2)?, field(32)?, field(16)?, field(2)?);
    let fits = match version {
        0 => rest.is_empty(),
        0xff => false,
        _ => rest.is_empty() || rest.starts_with('-') && rest.len() <= MAX_SUFFIX,
    };
    let parent = u64::try_from(parent).ok()?;
    (fits && trace_id != 0 && parent != 0).then_some((trace_id, parent, flags & 1 == 1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    const PARENT: &str = "b7ad6b7169203331";

    #[test]
    fn a_callers_trace_is_continued() {
        let run = Uuid::from_u128(7);
        for (flags, sampled) in [("01", true), ("00", false), ("03", true), ("02", false)] {
            let context =
                TraceContext::of_run(run, Some(&format!("00-{TRACE}-{PARENT}-{flags}")), 0.0);
            let parent = Some(u64::from_str_radix(PARENT, 16).unwrap());
            let trace_id = u128::from_str_radix(TRACE, 16).unwrap();
            assert_eq!(context, TraceContext { run_id: run, trace_id, parent, sampled });
        }
        let later = format!("01-{TRACE}-{PARENT}-01-what-comes-later");
        assert!(is_traceparent(&later));
    }

    #[test]
    fn an_invalid_traceparent_begins_a_new_trace() {
        let good = format!("00-{TRACE}-{PARENT}-01");
        let bad = [
            String::new(),
            good.to_uppercase(),
            format!("{good}-x"),
            format!("ff-{TRACE}-{PARENT}-01"),
            format!("01-{TRACE}-{PARENT}-01x"),
            format!("00-{}-{PARENT}-01", "0".repeat(32)),
            format!("00-{TRACE}-{}-01", "0".repeat(16)),
            format!("00-{TRACE}-{PARENT}-0g"),
            format!("00-{TRACE}{PARENT}-01--"),
            good.replace("b7ad", "+7ad"),
        ];
        for header in bad {
            let context = TraceContext::of_run(Uuid::from_u128(7), Some(&header), 1.0);
            let own = TraceContext {
                run_id: Uuid::from_u128(7),
                trace_id: 7,
                parent: None,
                sampled: true,
            };
            assert_eq!(context, own, "{header}");
        }
    }

    #[test]
    fn the_ratio_is_a_share_of_the_runs() {
        let sampled = |ratio: f64| {
            let runs = (0..1000).map(Uuid::from_u128);
            runs.filter(|run| TraceContext::of_run(*run, None, ratio).sampled).count()
        };
        assert_eq!((sampled(0.0), sampled(1.0)), (0, 1000));
        assert!((200..300).contains(&sampled(0.25)), "{}", sampled(0.25));
    }

    #[test]
    fn spans_of_a_run_differ_and_stay_the_same() {
        let context = TraceContext::of_run(Uuid::from_u128(7), None, 1.0);
        let chat = |attempt, iteration| SpanPlace::Chat { attempt, iteration };
        let summary = SpanPlace::Summary { attempt: 1, iteration: 1 };
        let tool = SpanPlace::Tool(Uuid::from_u128(1));
        let places = [SpanPlace::Run, chat(1, 1), chat(1, 2), chat(2, 1), summary, tool];
        let ids: std::collections::BTreeSet<u64> =
            places.iter().map(|place| context.span(*place).span_id).collect();
        assert_eq!(ids.len(), places.len());
        assert_eq!(context.span(chat(2, 1)), context.span(chat(2, 1)));
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_panic(text in "\\PC{0,80}") {
            is_traceparent(&text);
        }

        #[test]
        fn a_written_traceparent_is_read_back(run in any::<u128>(), trace_id in 1..u128::MAX, span_id in 1..u64::MAX, sampled: bool) {
            let run = TraceContext { run_id: Uuid::from_u128(run), trace_id, parent: None, sampled };
            let header = TraceSpan { run, span_id }.to_string();
            prop_assert_eq!(parse(&header), Some((trace_id, span_id, sampled)));
        }
    }
}
