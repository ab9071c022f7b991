//! The OpenAPI document, made from the routes and the types that they answer.

pub(super) mod answers;
pub(super) mod docs;
pub(super) mod openapi;
pub(super) mod schemas;
pub(super) mod vocabulary;
