//! The API document: what the route table does not say by itself.
//!
//! Routes bring their paths, parameters and bodies. Added here by rule, so that no handler can forget
//! it: the errors that follow from what an operation takes, an example for every body (put together
//! from the examples of its fields), the server and the security scheme.

use std::sync::OnceLock;

use axum::body::Bytes;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderName, HeaderValue};
use serde_json::{Map, Value, json};
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{
    Components, Content, InfoBuilder, OpenApi, Ref, RefOr, Response, ResponseBuilder, Server, Tag,
};
use utoipa::{PartialSchema, ToSchema};

use super::problem::{Code, ProblemBody};

/// Get this document
///
/// The OpenAPI description of the service.
#[utoipa::path(
    get, path = "/openapi.json", tag = "health",
    responses((status = 200, description = "An OpenAPI 3.1 document.", body = Object, example = json!({"openapi": "3.1.0"}))),
)]
pub(crate) async fn get_openapi() -> ([(HeaderName, HeaderValue); 1], Bytes) {
    static JSON: OnceLock<Bytes> = OnceLock::new();
    let json = JSON.get_or_init(|| serde_json::to_vec(&super::openapi()).unwrap_or_default().into());
    ([(CONTENT_TYPE, HeaderValue::from_static("application/json"))], json.clone())
}
