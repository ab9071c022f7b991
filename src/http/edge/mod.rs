//! What every request passes: the socket, limits, who calls, what is refused, how an error is told.

pub(super) mod accept;
pub(super) mod assets;
pub(super) mod auth;
pub(super) mod extract;
pub(super) mod key_ring;
pub(super) mod layer;
pub(super) mod meters;
pub(super) mod metrics;
pub(super) mod outgoing;
pub(super) mod problem;
pub(super) mod rate_limit;
pub(super) mod server;
