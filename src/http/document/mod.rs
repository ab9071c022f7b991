//! The OpenAPI document, generated from the routes and their types.

pub(super) mod answers;
pub(super) mod docs;
mod event_schemas;
pub(super) mod openapi;
pub(super) mod schemas;
mod scopes;
pub(super) mod vocabulary;
