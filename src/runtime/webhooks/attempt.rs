//! One try of a delivery, and when the next one is made.
//!
//! An answer with 2xx is a success. Redirects are not followed, and no body is read. Failures are retried with
//! growing pauses, until the delivery is too old. 410 ends it at once.

use std::time::Duration;

use chrono::TimeDelta;
use http::header::{CONTENT_TYPE, HeaderName, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use serde::Serialize;
use serde_json::Value;

use super::{Body, Webhooks};
use crate::bounds::retry_after::retry_after;
use crate::bounds::secrets::redact_beside_output;
use crate::event::Event;
use crate::outbound::{Request, Terms};
use crate::store::{AttemptOutcome, Delivery, DeliveryStatus};
use crate::{clock, jitter};

/// The timeout from the name resolution to the head of the answer.
pub(super) const DEADLINE: Duration = Duration::from_secs(15);
/// The pause after the first try; each further one is four times as long.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
const LONGEST_PAUSE: Duration = Duration::from_hours(6);
/// The random part of a pause, so that many pauses do not end at once.
const JITTER: f64 = 0.2;

/// The message, which is the same in every try.
#[derive(Serialize)]
struct Message {
    #[serde(rename = "type")]
    kind: &'static str,
    timestamp: chrono::DateTime<chrono::Utc>,
    data: Value,
}

/// The body for an event.
pub(super) fn body_of(event: &Event) -> Result<Vec<u8>, String> {
    let mut served = event.served().map_err(|error| error.to_string())?;
    if let Some(data) = served.get_mut("data") {
        redact_beside_output(data);
    }
    let message = Message { kind: event.what.type_name(), timestamp: event.at, data: served };
    serde_json::to_vec(&message).map_err(|error| error.to_string())
}

/// Sends a body; returns the outcome.
pub(super) async fn attempt(
    webhooks: &Webhooks,
    delivery: &Delivery,
    body: Body,
) -> AttemptOutcome {
    let Body { json, _reservation } = body; // held until the answer
    let answer = match post(webhooks, delivery, json).await {
        Ok((status, _)) if status.is_success() => {
            return AttemptOutcome {
                status: DeliveryStatus::Delivered,
                response_status: Some(status.as_u16()),
                error: None,
                pause: Duration::ZERO,
                was_sent: true,
            };
        }
        Ok((status, wanted)) => {
            (Some(status), wanted, format!("the receiver answered {}", status.as_u16()))
        }
        Err(error) => (None, None, error),
    };
    let (status, wanted, error) = answer;
    let pause = pause(delivery.tries, jitter::fraction()).max(wanted.unwrap_or_default());
    let is_over = TimeDelta::from_std(pause)
        .ok()
        .and_then(|pause| clock::now().checked_add_signed(pause))
        .is_none_or(|next| next > delivery.retry_until);
    let is_failed = is_over || status == Some(StatusCode::GONE);
    AttemptOutcome {
        status: if is_failed { DeliveryStatus::Failed } else { DeliveryStatus::Pending },
        response_status: status.map(|status| status.as_u16()),
        error: Some(error),
        pause: if is_failed { Duration::ZERO } else { pause },
        was_sent: true,
    }
}

/// The status of the answer, and its `Retry-After`.
async fn post(
    webhooks: &Webhooks,
    delivery: &Delivery,
    json: Result<Vec<u8>, String>,
) -> Result<(StatusCode, Option<Duration>), String> {
    let url = webhooks.receivers.read(&delivery.url).map_err(|why| format!("its URL {why}"))?;
    let body = json?;
    let terms = Terms {
        addresses: webhooks.receivers.policy(&url),
        judge: &|_| Ok(()),
        redirects: 0,
        deadline: DEADLINE,
        max_body: 0,
        tenant: &delivery.tenant,
    };
    let headers = headers(webhooks, &delivery.id.to_string(), &body);
    let request = Request { method: Method::POST, url, headers, body: body.into() };
    let answer = webhooks.client.send(request, &terms).await.map_err(|error| error.to_string())?;
    Ok((answer.status, retry_after(&answer.headers, clock::now())))
}

fn headers(webhooks: &Webhooks, id: &str, body: &[u8]) -> HeaderMap {
    let timestamp = clock::now().timestamp();
    let signature = webhooks.signer.sign(id, timestamp, body);
    let ours = [("webhook-id", id), ("webhook-signature", &signature)].map(|(name, value)| {
        let value = HeaderValue::from_str(value).unwrap_or(HeaderValue::from_static(""));
        (HeaderName::from_static(name), value)
    });
    let fixed = [
        (CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (USER_AGENT, HeaderValue::from_static(concat!("toolloop/", env!("CARGO_PKG_VERSION")))),
        (HeaderName::from_static("webhook-timestamp"), HeaderValue::from(timestamp)),
    ];
    ours.into_iter().chain(fixed).collect()
}

/// The pause after the n-th try. `random` is between 0 and 1.
fn pause(tries: u32, random: f64) -> Duration {
    let factor = 4_u32.saturating_pow(tries.saturating_sub(1));
    let pause = FIRST_PAUSE.saturating_mul(factor).min(LONGEST_PAUSE);
    pause.mul_f64(1.0 - JITTER + 2.0 * JITTER * random)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tries_fill_a_day_at_growing_distances() {
        let day = Duration::from_hours(24);
        for random in [0.0, 0.5, 1.0] {
            let mut pauses = (1..).map(|tries| pause(tries, random));
            let (mut passed, mut tries, mut last) = (Duration::ZERO, 1, Duration::ZERO);
            while let Some(next) = pauses.next().filter(|next| passed + *next <= day) {
                assert!(next >= last);
                (passed, tries, last) = (passed + next, tries + 1, next);
            }
            assert!((9..=13).contains(&tries), "{tries}");
            assert!(passed > Duration::from_hours(17), "{passed:?}");
        }
        assert!(pause(u32::MAX, 1.0) <= LONGEST_PAUSE.mul_f64(1.2));
    }
}
