//! `[server]`: where the service listens, and what a connection may take.

use std::net::SocketAddr;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;

use super::values::{self, count, duration, size};

/// `[server]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Server {
    /// Address and port to listen on; port 0 chooses a free one.
    #[serde(deserialize_with = "address")]
    #[schemars(with = "String", regex(pattern = r"^\S+:[0-9]{1,5}$"))]
    pub listen: SocketAddr,
    /// Maximum size of a request body.
    #[serde(deserialize_with = "size::<1_024, 1_073_741_824, _>")]
    #[schemars(schema_with = "values::size_schema::<1_024, 1_073_741_824>")]
    pub body_limit: usize,
    /// Maximum time to a response.
    #[serde(deserialize_with = "duration::<1_000, 604_800, _>")]
    #[schemars(schema_with = "values::duration_schema")]
    pub request_timeout: Duration,
    /// How long runs may continue after SIGTERM.
    #[serde(deserialize_with = "duration::<0, 3_600, _>")]
    #[schemars(schema_with = "values::duration_schema")]
    pub shutdown_grace: Duration,
    /// Maximum number of concurrent connections.
    #[serde(deserialize_with = "count::<1, 1_000_000, _, _>")]
    #[schemars(schema_with = "values::count_schema::<1, 1_000_000>")]
    pub max_connections: usize,
    /// Maximum number of concurrent requests of a key, event streams and waits included.
    #[serde(deserialize_with = "count::<1, 1_000_000, _, _>")]
    #[schemars(schema_with = "values::count_schema::<1, 1_000_000>")]
    pub max_requests_per_key: usize,
    /// Time to receive the first byte of a connection, and a request's head.
    #[serde(deserialize_with = "duration::<100, 3_600, _>")]
    #[schemars(schema_with = "values::duration_schema")]
    pub header_timeout: Duration,
    /// Time to receive a request's body.
    #[serde(deserialize_with = "duration::<100, 86_400, _>")]
    #[schemars(schema_with = "values::duration_schema")]
    pub body_timeout: Duration,
    /// How long a connection may be idle between requests.
    #[serde(deserialize_with = "duration::<100, 86_400, _>")]
    #[schemars(schema_with = "values::duration_schema")]
    pub idle_timeout: Duration,
    /// How long sending a response may make no progress.
    #[serde(deserialize_with = "duration::<100, 86_400, _>")]
    #[schemars(schema_with = "values::duration_schema")]
    pub write_timeout: Duration,
    /// Routes that are served without a key; the others answer 404.
    pub expose: Vec<Exposed>,
    /// Origins whose pages may use the API from a browser, e.g. `https://app.example.com`.
    #[serde(deserialize_with = "values::origins")]
    #[schemars(inner(regex(pattern = "^https?://[^/?#@*\\s]+$")), length(max = 64))]
    pub cors_origins: Vec<String>,
}

/// A route that is served without a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Exposed {
    /// `GET /metrics`, for Prometheus.
    Metrics,
    /// `GET /docs`, the API document as a page.
    Docs,
    /// `GET /console`; the page itself asks for a key.
    Console,
}

fn address<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(|_| {
        serde::de::Error::custom(format!(
            "{text:?} is not an IP address and a port, e.g. 127.0.0.1:8080"
        ))
    })
}
