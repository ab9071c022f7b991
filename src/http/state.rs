//! What handlers share: the runtime, the store, the agents, and the operator's settings.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use super::edge::key_ring::{Auth, KeyRing};
use super::edge::meters::Meters;
use crate::agents::Catalogue;
use crate::runtime::Runtime;
use crate::store::{RateLimit, Store};
use crate::tools::ToolInfo;

/// What the handlers work with.
pub struct HttpState {
    /// Takes commands.
    pub runtime: Runtime,
    /// Answers reads.
    pub store: Arc<Store>,
    /// The agents.
    pub catalogue: Arc<Catalogue>,
    /// The tools, by name.
    pub tools: Arc<Vec<ToolInfo>>,
    /// How callers prove who they are.
    pub auth: Auth,
    /// Where answers are counted and metrics come from.
    pub meters: Meters,
}

/// What the operator sets.
#[derive(Debug, Clone, Copy)]
pub struct HttpSettings {
    /// The largest body that is read, in bytes.
    pub body_limit: usize,
    /// How long a body may take to arrive.
    pub body_timeout: Duration,
    /// How long a caller may wait for an answer. A run that takes longer goes on.
    pub request_timeout: Duration,
    /// Which pages for operators are served.
    pub expose: Exposed,
    /// How often a key may invoke that has no limits of its own.
    pub rate_limit: RateLimit,
}

/// The pages that are served to everybody, or else to nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exposed {
    /// `/metrics`
    pub metrics: bool,
    /// `/docs`
    pub docs: bool,
    /// `/console`
    pub console: bool,
}

/// The state of the routes.
pub(super) type App = Arc<Shared>;

pub(super) struct Shared {
    pub(super) state: HttpState,
    pub(super) settings: HttpSettings,
    pub(super) keys: KeyRing,
}

impl Deref for Shared {
    type Target = HttpState;

    fn deref(&self) -> &HttpState {
        &self.state
    }
}
