//! Webhook deliveries: what was sent, what failed, and sending it again.
//!
//! The runtime decides when and how something is sent. An address is shown without its query, which may
//! hold a secret, and without what looks like one.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use serde::Serialize;
use url::Url;
use utoipa::ToSchema;
use uuid::Uuid;

use super::page::{LISTS, ListParams, Listing, by_time, time_position};
use super::redaction;
use crate::http::document::vocabulary::DeliveryStatus as StatusWord;
use crate::http::edge::auth::{AgentsInvoke, RunsRead, Scoped};
use crate::http::edge::extract::{Name, Params};
use crate::http::edge::problem::Problem;
use crate::http::state::App;
use crate::store::{Delivery, DeliveryFilter, DeliveryStatus};

/// A webhook event of a run and the state of its delivery.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = WebhookDelivery)]
pub(crate) struct DeliveryView {
    /// The delivery's id, which is the `webhook-id` of all its attempts.
    id: Uuid,
    /// The run's id.
    run_id: Uuid,
    /// The event's sequence number within the run.
    #[schema(example = 7)]
    seq: i64,
    /// The event's type.
    #[schema(example = "run.completed")]
    event: String,
    /// Where it is sent, without the query and secrets.
    #[schema(example = "https://example.com/hooks/toolloop")]
    url: String,
    /// The status of the delivery.
    #[schema(value_type = StatusWord, example = "delivered")]
    status: &'static str,
    /// Attempts so far.
    #[schema(example = 1)]
    attempts: u32,
    /// When the event happened.
    at: DateTime<Utc>,
    /// When the last attempt began.
    attempted_at: Option<DateTime<Utc>>,
    /// When the next attempt is made; null if none is.
    #[schema(example = json!(null))]
    next_attempt_at: Option<DateTime<Utc>>,
    /// The status of the receiver's last response.
    #[schema(example = 204)]
    response_status: Option<u32>,
    /// Why the last attempt failed.
    #[schema(example = json!(null))]
    error: Option<String>,
}

/// A failed attempt to deliver an event to the receiver of a run's webhook.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CallbackError {
    /// The delivery's id, which is the `webhook-id` of all its attempts.
    delivery_id: Uuid,
    /// The event's type.
    #[schema(example = "run.completed")]
    event: String,
    /// Where it was sent, without the query and secrets.
    #[schema(example = "https://example.com/hooks/toolloop")]
    url: String,
    /// The status of the receiver's response; null without one.
    #[schema(example = 503)]
    status: Option<u32>,
    /// What went wrong.
    #[schema(example = "the receiver answered 503")]
    message: String,
    /// When the attempt began.
    at: Option<DateTime<Utc>>,
    /// When the next attempt is made; null if the delivery was abandoned.
    #[schema(example = json!(null))]
    next_attempt_at: Option<DateTime<Utc>>,
}

impl From<Delivery> for DeliveryView {
    fn from(row: Delivery) -> Self {
        Self {
            next_attempt_at: next_attempt(&row),
            id: row.id,
            run_id: row.run_id,
            seq: row.seq,
            event: row.event,
            url: shown(&row.url),
            status: row.status.as_str(),
            attempts: row.attempts,
            at: row.at,
            attempted_at: row.attempted_at,
            response_status: row.response_status,
            error: row.error.map(redaction::text),
        }
    }
}

impl From<Delivery> for CallbackError {
    fn from(row: Delivery) -> Self {
        Self {
            next_attempt_at: next_attempt(&row),
            delivery_id: row.id,
            event: row.event,
            url: shown(&row.url),
            status: row.response_status,
            message: redaction::text(row.error.unwrap_or_default()),
            at: row.attempted_at,
        }
    }
}

fn next_attempt(row: &Delivery) -> Option<DateTime<Utc>> {
    (row.status == DeliveryStatus::Pending).then_some(row.due_at)
}

fn shown(url: &str) -> String {
    let Ok(mut url) = Url::parse(url) else { return String::new() };
    url.set_query(None);
    redaction::text(url.into())
}

/// List webhook deliveries
///
/// Newest event first.
#[utoipa::path(
    get, path = "/webhooks/deliveries", tag = "webhooks", security(("bearer" = ["runs:read"])),
    params(
        ("run_id" = Option<Uuid>, Query, description = "Deliveries of this run."),
        ("status" = Option<StatusWord>, Query, description = "Deliveries with this status."),
        ListParams,
    ),
    responses((status = 200, description = "A page of deliveries.", body = Listing<DeliveryView>)),
)]
pub(crate) async fn list_webhook_deliveries(
    State(app): State<App>,
    caller: Scoped<RunsRead>,
    mut params: Params,
) -> Result<Json<Listing<DeliveryView>>, Problem> {
    let filter =
        DeliveryFilter { run_id: params.uuid("run_id")?, status: params.one_of("status")? };
    let page = by_time(&mut params, &caller.tenant, LISTS)?;
    params.finish()?;
    let rows = app.store.deliveries(&caller.tenant, &filter, &page).await?;
    let cursor = |row: &Delivery| time_position(row.at, &row.id.to_string());
    Ok(Json(Listing::of(rows, &page, cursor, DeliveryView::from)))
}

/// Repeat a webhook delivery
///
/// Sends the event again, whatever the status of its delivery, and retries for another day.
#[utoipa::path(
    post, path = "/webhooks/deliveries/{id}/redeliver", tag = "webhooks",
    security(("bearer" = ["agents:invoke"])),
    params(("id" = Uuid, Path, description = "The delivery's id.")),
    responses((status = 202, description = "The delivery, which is sent now.", body = DeliveryView)),
)]
pub(crate) async fn redeliver_webhook(
    State(app): State<App>,
    caller: Scoped<AgentsInvoke>,
    Name(id): Name,
    params: Params,
) -> Result<(StatusCode, Json<DeliveryView>), Problem> {
    params.finish()?;
    let id = Uuid::try_parse(&id).map_err(|_| Problem::not_found("delivery"))?;
    let delivery = app.runtime.webhooks().redeliver(&caller.tenant, id).await?;
    let delivery = delivery.ok_or_else(|| Problem::not_found("delivery"))?;
    Ok((StatusCode::ACCEPTED, Json(delivery.into())))
}

#[cfg(test)]
mod tests {
    use super::shown;

    #[test]
    fn an_address_is_shown_without_secrets() {
        for (url, expected) in [
            ("https://a.example/hook?key=hunter2", "https://a.example/hook"),
            ("https://hooks.slack.com/services/T/B/hunter2", "https://[redacted]"),
            (
                "https://a.example/eyJhbGciOiJIUzI1NiJ9.hunter2hunter2.hunter2",
                "https://a.example/[redacted]",
            ),
        ] {
            assert_eq!(shown(url), expected);
        }
    }
}
