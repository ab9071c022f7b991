//! The webhook deliveries of a write: rows of the outbox.
//!
//! A row is written in the same statement as its event. It refers to the event, so that the body is made from the
//! journal. Deliveries are sent elsewhere.

use chrono::TimeDelta;
use sha2::{Digest, Sha256};
use url::Url;
use uuid::Uuid;

use super::tables::NewDelivery;
use super::{DeliveryStatus, RunWrite};
use crate::event::{Event, RunEvent};

/// How long a delivery is retried.
pub(super) const RETRY_PERIOD: TimeDelta = TimeDelta::days(1);

impl RunWrite {
    /// Whether the write has events for the receiver of a webhook.
    pub fn fills_outbox(&self) -> bool {
        deliveries(self).next().is_some()
    }
}

/// The events for the receiver of a run's webhook: changes of the run's state, and requests to approvers. For a
/// child run, only the requests: its parent's events report its state.
pub(super) fn deliveries(write: &RunWrite) -> impl Iterator<Item = NewDelivery> {
    let origin = write.origin.as_ref();
    origin.webhook.iter().flat_map(move |url| {
        let is_delivered = move |event: &&Event| match &event.what {
            RunEvent::ApprovalRequested(_) => true,
            what => !origin.is_child && what.type_name().starts_with("run."),
        };
        let tenant = &write.caller.tenant;
        write.events.iter().filter(is_delivered).map(move |event| NewDelivery {
            run_id: write.run_id,
            seq: event.seq,
            id: delivery_id(event),
            tenant: tenant.clone(),
            lane: lane(tenant, url),
            event: event.what.type_name().to_owned(),
            at: event.at,
            status: DeliveryStatus::Pending,
            due_at: event.at,
            retry_until: event.at + RETRY_PERIOD,
            attempts: 0,
            tries: 0,
        })
    })
}

/// The tenant and host of a delivery: those of one lane share a limit of concurrent deliveries.
fn lane(tenant: &str, url: &str) -> String {
    let url = Url::parse(url).ok();
    let host = url.as_ref().and_then(Url::host_str).unwrap_or_default();
    let port = url.as_ref().and_then(Url::port_or_known_default).unwrap_or_default();
    format!("{tenant} {host}:{port}")
}

/// A UUID v7 of the event's time, run and number: the same each time the event is written.
fn delivery_id(event: &Event) -> Uuid {
    let millis = u64::try_from(event.at.timestamp_millis()).unwrap_or_default();
    let digest = Sha256::new()
        .chain_update(event.run_id.as_bytes())
        .chain_update(event.seq.to_be_bytes())
        .finalize();
    let mut random = [0; 10];
    random.copy_from_slice(&digest[..10]);
    uuid::Builder::from_unix_timestamp_millis(millis, &random).into_uuid()
}
