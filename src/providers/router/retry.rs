//! Whether a failed try is retried, and after which delay.
//!
//! Exponential backoff from 0.5 s to 8 s with full jitter. A provider's Retry-After is used as it
//! is; if it exceeds two minutes or the run's deadline, this model is not tried again.

use std::time::Duration;

use crate::jitter;
use crate::providers::ProviderError;

/// Upper end of the first delay.
const FIRST_WAIT: Duration = Duration::from_millis(500);
/// Upper end of any delay that we choose.
const LONGEST_WAIT: Duration = Duration::from_secs(8);
/// Longest Retry-After that is honoured.
const MAX_RETRY_AFTER: Duration = Duration::from_mins(2);

/// The delay before the next retry, after `retries` earlier ones; `None`: do not retry. `left` is
/// the time to the deadline.
pub(super) fn delay(
    error: &ProviderError,
    retries: u32,
    left: Option<Duration>,
) -> Option<Duration> {
    if !error.is_retryable() {
        return None;
    }
    let wait = match error.retry_after {
        Some(asked) if asked > MAX_RETRY_AFTER => return None,
        Some(asked) => asked,
        None => {
            let ceiling = FIRST_WAIT.saturating_mul(1 << retries.min(8)).min(LONGEST_WAIT);
            ceiling.mul_f64(jitter::fraction())
        }
    };
    left.is_none_or(|left| wait < left).then_some(wait)
}

/// The delay before one call probes a provider that refuses; `None`: it is not probed any more. There
/// were `refused` earlier refusals in the time `waited`, and `left` is the rest of the patience. At
/// first the provider's Retry-After is used as it is; later delays grow.
pub(super) fn cool_down(
    error: &ProviderError,
    refused: u32,
    waited: Duration,
    left: Duration,
) -> Option<Duration> {
    if left.is_zero() {
        return None;
    }
    let wait = delay(error, refused, None)?;
    let seldom = wait.max((waited / 4).min(LONGEST_WAIT));
    Some(seldom.min(left).max(error.retry_after.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::providers::FailureKind;

    fn error(kind: FailureKind, retry_after: Option<Duration>) -> ProviderError {
        ProviderError {
            provider: "p".into(),
            kind,
            status: None,
            code: None,
            message: "m".into(),
            retry_after,
            should_retry: None,
            usage: None,
        }
    }

    #[test]
    fn x_should_retry_overrides_the_kind() {
        let says = |kind, should_retry| {
            let error = ProviderError { should_retry, ..error(kind, None) };
            delay(&error, 0, None).is_some()
        };
        for kind in [FailureKind::Transient, FailureKind::RateLimited, FailureKind::BadRequest] {
            assert!(says(kind, Some(true)) && !says(kind, Some(false)), "{kind:?}");
        }
    }

    #[test]
    fn waits_follow_the_table() {
        let seconds = Duration::from_secs;
        let (limited, broken) = (FailureKind::RateLimited, FailureKind::Transient);
        let table = [
            (limited, Some(seconds(2)), None, Some(seconds(2))),
            (broken, Some(seconds(90)), None, Some(seconds(90))),
            (limited, Some(seconds(120)), None, Some(seconds(120))),
            (limited, Some(seconds(121)), None, None),
            (limited, Some(seconds(2)), Some(seconds(3)), Some(seconds(2))),
            (limited, Some(seconds(4)), Some(seconds(3)), None),
            (broken, None, Some(Duration::ZERO), None),
            (FailureKind::QuotaExhausted, Some(seconds(1)), None, None),
            (FailureKind::Unauthorized, None, None, None),
            (FailureKind::NotFound, None, None, None),
            (FailureKind::BadRequest, None, None, None),
            (FailureKind::ContextLength, None, None, None),
            (FailureKind::ContentFilter, None, None, None),
            (FailureKind::TooLarge, None, None, None),
        ];
        for (kind, wish, left, expected) in table {
            assert_eq!(delay(&error(kind, wish), 0, left), expected, "{kind:?} {wish:?} {left:?}");
        }
    }

    #[test]
    fn own_waits_are_jittered_and_bounded() {
        let broken = error(FailureKind::Transient, None);
        for (retries, ceiling) in [(0, 0.5), (1, 1.0), (2, 2.0), (4, 8.0), (40, 8.0)] {
            let waits: Vec<Duration> =
                (0..64).filter_map(|_| delay(&broken, retries, None)).collect();
            let longest = waits.iter().max().copied().unwrap_or_default();
            assert_eq!(waits.len(), 64);
            assert!(longest <= Duration::from_secs_f64(ceiling), "{retries}: {longest:?}");
            assert!(
                longest > Duration::from_secs_f64(ceiling / 2.0),
                "64 draws that stay in the lower half: {longest:?}"
            );
            assert!(waits.iter().any(|wait| *wait != longest), "no jitter");
        }
    }
}
