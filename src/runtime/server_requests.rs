//! Records the network requests of MCP servers that are programs in the audit log.
//!
//! A server serves all runs and tenants, so its requests are recorded in the tenant of the operator's own key:
//! the first request of a kind within a second, further ones once a minute.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::keys::DEFAULT_TENANT;
use crate::clock;
use crate::event::{Act, AuditAction, SERVICE};
use crate::store::Store;
use crate::tools::proxy::{ServerRequest, ServerRequests};

/// Flush interval.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Records what is noted, until the service stops.
pub(super) async fn record(requests: ServerRequests, store: Arc<Store>, stop: CancellationToken) {
    let mut look = clock::every(POLL_INTERVAL);
    while stop.run_until_cancelled(look.tick()).await.is_some() {
        record_noted(&requests, &store, false).await;
    }
}

/// Records what is due, or all of it.
pub(super) async fn record_noted(requests: &ServerRequests, store: &Store, is_last: bool) {
    for (request, count) in requests.take(Instant::now(), is_last) {
        let ServerRequest { server, to, is_refused, reason } = request.clone();
        let (host, port) =
            to.map_or(("others".to_owned(), None), |(host, port)| (host, Some(port)));
        let action = if is_refused { AuditAction::McpRefused } else { AuditAction::McpRequested };
        let act = Act {
            tenant: DEFAULT_TENANT.to_owned(),
            subject: SERVICE.to_owned(),
            action,
            run_id: None,
            reason,
            details: json!({"server": server, "host": host, "port": port, "count": count}),
        };
        if let Err(error) = store.record_act(act).await {
            tracing::warn!(%error, count, "requests of an MCP server could not be recorded; retrying in a minute");
            requests.give_back(request, count);
        }
    }
}
