//! What all routes share: the server, limits, authentication, extractors and error responses.

pub(super) mod accept;
pub(super) mod assets;
pub(super) mod auth;
pub(super) mod console_cookie;
pub(super) mod cors;
pub(super) mod cursor;
pub(super) mod extract;
pub(super) mod front;
pub(super) mod key_cache;
pub(super) mod large_answers;
pub(super) mod large_bodies;
pub(super) mod layer;
pub(super) mod metrics;
pub(super) mod metrics_sink;
pub(super) mod open_requests;
pub(super) mod origin;
pub(super) mod problem;
pub(super) mod rate_limit;
pub(super) mod responses;
pub(super) mod server;
pub(super) mod store_check;
pub(super) mod token_signer;
pub(super) mod tokens;
