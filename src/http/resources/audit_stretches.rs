//! The chain of the audit log: closed stretches, each compared with the records that it names.

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use serde::Serialize;
use utoipa::ToSchema;

use super::page::{Listing, STRETCHES, StretchParams, by_number, number_position};
use crate::http::edge::auth::{AuditRead, Scoped};
use crate::http::edge::extract::Params;
use crate::http::edge::problem::Problem;
use crate::http::state::App;
use crate::store::CheckedStretch;

/// Audit records that were closed together: a change of one of them, or of their order, changes the
/// hash, which the next stretch continues.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AuditStretch)]
pub(crate) struct StretchView {
    /// 1 for a tenant's first stretch; without gaps.
    #[schema(example = 1)]
    number: i64,
    /// How many records it has.
    #[schema(example = 1000)]
    records: u32,
    /// The time of its oldest record.
    first_at: DateTime<Utc>,
    /// The time of its newest record.
    last_at: DateTime<Utc>,
    /// When it was closed.
    closed_at: DateTime<Utc>,
    /// The hash of the stretch before it; empty for the first one.
    #[schema(example = "")]
    previous: String,
    /// SHA-256 of the tenant, the number, the times, the previous hash and the records.
    #[schema(example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")]
    hash: String,
    /// Whether it is signed.
    #[schema(example = true)]
    signed: bool,
    /// What is wrong; empty if it is as it was closed.
    #[schema(example = json!([]))]
    faults: Vec<String>,
    /// Whether it was closed more than two hours after its newest record was written: the service was
    /// down then, or the chain was made again.
    #[schema(example = false)]
    closed_late: bool,
}

impl From<CheckedStretch> for StretchView {
    fn from(CheckedStretch { stretch, faults, closed_late }: CheckedStretch) -> Self {
        Self {
            number: stretch.number,
            records: stretch.records,
            first_at: stretch.first_at,
            last_at: stretch.last_at,
            closed_at: stretch.closed_at,
            previous: hex::encode(&stretch.previous),
            hash: hex::encode(&stretch.hash),
            signed: stretch.signature.is_some(),
            faults,
            closed_late,
        }
    }
}

/// List closed stretches of the audit log
///
/// Oldest first, each compared with its records: what was changed, deleted or added since it was
/// closed is in `faults`. Records of the last hour may not be closed yet. Where the service has a key,
/// a stretch that it did not sign is a fault, except for those up to `unsigned_until`.
#[utoipa::path(
    get, path = "/audit/stretches", tag = "audit", security(("bearer" = ["audit:read"])),
    params(
        ("unsigned_until" = Option<i64>, Query, minimum = 0, description = "The number of the last stretch that was closed before signing began; up to it, stretches without a signature are no fault."),
        StretchParams,
    ),
    responses((status = 200, description = "A page of stretches.", body = Listing<StretchView>)),
)]
pub(crate) async fn list_audit_stretches(
    State(app): State<App>,
    caller: Scoped<AuditRead>,
    mut params: Params,
) -> Result<Json<Listing<StretchView>>, Problem> {
    let number = |text: &str| text.parse::<i64>().ok().filter(|number| *number >= 0);
    let unsigned_until = params.value("unsigned_until", "the number of a stretch", number)?;
    let page = by_number(&mut params, &caller.tenant, STRETCHES)?;
    params.finish()?;
    let unsigned_until = unsigned_until.unwrap_or_default();
    let checked =
        app.runtime.audit_chain().checked_stretches(&caller.tenant, &page, unsigned_until).await?;
    let cursor = |checked: &CheckedStretch| number_position(checked.stretch.number);
    Ok(Json(Listing::of(checked, &page, cursor, StretchView::from)))
}
