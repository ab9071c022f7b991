//! One file per resource: its handlers, and the types that they read and answer.

pub(super) mod agents;
pub(super) mod approvals;
pub(super) mod audit;
pub(super) mod audit_stretches;
pub(super) mod changes;
pub(super) mod delivery;
pub(super) mod dry_run;
pub(super) mod events;
pub(super) mod health;
pub(super) mod invocation;
pub(super) mod invoke;
pub(super) mod keys;
pub(super) mod page;
pub(super) mod policy;
pub(super) mod redacted;
pub(super) mod run_parts;
pub(super) mod run_views;
pub(super) mod runs;
pub(super) mod session_messages;
pub(super) mod sessions;
pub(super) mod stats;
pub(super) mod stream;
pub(super) mod tools;
pub(super) mod webhooks;
