//! Background tasks, from the start of the service to its stop: they record uses of keys and requests of MCP
//! servers, close stretches of the audit log, sum up usage, delete unused buckets of rate limits, interrupt
//! displaced runs of sessions, and send webhooks.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::{AuditChain, Logins, Settings, WebhookSender};
use super::{rate_limits, server_requests, sessions, usage_sums};
use crate::store::Store;
use crate::tools::proxy::ServerRequests;

/// The background tasks.
pub(super) struct Housekeeping {
    store: Arc<Store>,
    /// Which keys are in use, and which logins were refused.
    pub(super) logins: Arc<Logins>,
    /// The closed stretches of the audit log.
    pub(super) audit_chain: Arc<AuditChain>,
    /// What is sent to webhooks.
    pub(super) webhooks: Arc<WebhookSender>,
    /// Where programs are MCP servers.
    server_requests: Option<ServerRequests>,
}

impl Housekeeping {
    pub(super) fn new(
        store: &Arc<Store>,
        settings: &Settings,
        server_requests: Option<ServerRequests>,
    ) -> Self {
        let store = Arc::clone(store);
        Self {
            logins: Arc::new(Logins::new(Arc::clone(&store))),
            audit_chain: Arc::new(AuditChain::new(
                Arc::clone(&store),
                settings.audit_key.clone(),
                settings.audit_retention,
            )),
            webhooks: Arc::new(WebhookSender::new(Arc::clone(&store), settings.webhooks.clone())),
            server_requests,
            store,
        }
    }

    /// Starts all of it, each in a task of its own, until `stop`.
    pub(super) fn start(&self, stop: &CancellationToken) {
        tokio::spawn(Arc::clone(&self.audit_chain).close(stop.clone()));
        tokio::spawn(Arc::clone(&self.logins).write(stop.clone()));
        tokio::spawn(usage_sums::add_up(Arc::clone(&self.store), stop.clone()));
        tokio::spawn(rate_limits::delete_full(Arc::clone(&self.store), stop.clone()));
        tokio::spawn(sessions::interrupt_displaced(Arc::clone(&self.store), stop.clone()));
        if let Some(requests) = self.server_requests.clone() {
            tokio::spawn(server_requests::record(requests, Arc::clone(&self.store), stop.clone()));
        }
        self.webhooks.start(stop.clone());
    }

    /// Waits for the work in progress after a stop, and writes what is noted.
    pub(super) async fn finish(&self) {
        self.webhooks.stopped().await;
        self.logins.write_noted(true).await;
        if let Some(requests) = &self.server_requests {
            server_requests::record_noted(requests, &self.store, true).await;
        }
    }
}
