//! TLS for connections that the service makes. The certificates that the machine trusts are read once a process, which
//! takes most of what a client costs.

use std::sync::{Arc, OnceLock};

use reqwest::{Client, ClientBuilder};
use rustls_platform_verifier::BuilderVerifierExt;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::{ClientConfig, Error};

/// Trust in what the machine trusts, without protocols to choose from (ALPN).
///
/// # Errors
/// The machine's certificates cannot be read, or none of them is usable.
pub fn client_config() -> Result<ClientConfig, Error> {
    static CONFIG: OnceLock<ClientConfig> = OnceLock::new();
    if let Some(config) = CONFIG.get() {
        return Ok(config.clone());
    }
    let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_platform_verifier()?
        .with_no_client_auth();
    Ok(CONFIG.get_or_init(|| config).clone())
}

/// For HTTP clients with this trust, which speak HTTP/2 where the server does.
///
/// # Errors
/// As [`client_config`].
pub fn http_client() -> Result<ClientBuilder, Error> {
    let mut config = client_config()?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Client::builder().tls_backend_preconfigured(config))
}
