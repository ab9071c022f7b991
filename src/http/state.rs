//! The state that all handlers share.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use super::edge::console_cookie::EndedSessions;
use super::edge::cors::CorsOrigins;
use super::edge::key_cache::{Auth, KeyCache};
use super::edge::metrics_sink::MetricsSink;
use super::edge::open_requests::OpenRequests;
use super::edge::store_check::StoreCheck;
use super::edge::token_signer::TokenSigner;
use crate::agents::{Catalogue, DefinitionProblem};
use crate::runtime::Runtime;
use crate::store::{RateLimit, Store};
use crate::tools::ToolNow;
use crate::tools::mcp::ServerStatus;
use crate::tools::sandbox::plan::Confinement;

/// The other modules that the HTTP API uses.
pub struct HttpState {
    /// For commands.
    pub runtime: Runtime,
    /// For reads.
    pub store: Arc<Store>,
    pub catalogue: Arc<Catalogue>,
    /// Problems of loaded agents, such as a missing scenario. Reads files.
    pub unplayable: Arc<dyn Fn() -> Vec<DefinitionProblem> + Send + Sync>,
    /// The current tools, sorted by name.
    pub tools: Arc<dyn Fn() -> Vec<ToolNow> + Send + Sync>,
    /// The current state of the MCP servers.
    pub servers: Arc<dyn Fn() -> Vec<ServerStatus> + Send + Sync>,
    /// How well the programs of tools are confined, if that is known.
    pub sandbox: Option<Confinement>,
    pub auth: Auth,
    pub tokens: Arc<TokenSigner>,
    pub metrics: MetricsSink,
}

/// Settings of the HTTP API.
#[derive(Debug, Clone)]
pub struct HttpSettings {
    /// Maximum size of a request body, in bytes.
    pub body_limit: usize,
    /// Time to receive a request body.
    pub body_timeout: Duration,
    /// Maximum time to a response. A run that takes longer continues without the caller.
    pub request_timeout: Duration,
    pub expose: Exposed,
    /// The origins whose pages may use the API.
    pub cors: CorsOrigins,
    /// Maximum number of concurrent requests of a key.
    pub requests_per_key: usize,
    /// How long a person stays signed in to the console.
    pub console_session: Duration,
    /// The limit of keys that have none of their own.
    pub rate_limit: RateLimit,
}

/// Which routes are served without authentication; the others answer 404.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exposed {
    pub metrics: bool,
    pub docs: bool,
    pub console: bool,
}

pub(super) type App = Arc<Shared>;

pub(super) struct Shared {
    pub(super) state: HttpState,
    pub(super) settings: HttpSettings,
    pub(super) keys: KeyCache,
    pub(super) open: Arc<OpenRequests>,
    pub(super) ended: EndedSessions,
    pub(super) store_check: StoreCheck,
}

impl Deref for Shared {
    type Target = HttpState;

    fn deref(&self) -> &HttpState {
        &self.state
    }
}
