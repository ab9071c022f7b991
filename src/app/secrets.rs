//! Registers the secrets of the service: those in its configuration, and environment variables that are named like
//! secrets. Keys of declared tools are registered where these are read.

use secrecy::ExposeSecret;
use url::Url;

use crate::bounds::secrets;
use crate::config::{Bucket, Config, Model, ObjectPlace};

/// Minimum length of a database password that is registered, in bytes: shorter ones are often ordinary words.
const MIN_PASSWORD: usize = 12;

/// Registers the secrets, so that they are removed from all texts.
pub(super) fn remember(config: &Config) {
    let mut given: Vec<String> = Vec::new();
    for model in config.models.values() {
        if let Model::Server(server) = model {
            let headers = server.headers.values();
            let values = server.api_key.iter().chain(headers);
            given.extend(values.map(|value| value.expose_secret().to_owned()));
        }
    }
    let own = config.webhooks.secrets.iter().chain(&config.admin_key);
    given.extend(own.map(|secret| secret.expose_secret().to_owned()));
    if let Some(ObjectPlace::S3(Bucket { key: Some((_, secret)), .. })) = &config.objects {
        given.push(secret.expose_secret().to_owned());
    }
    for url in [&config.database.url, &config.database.read_url] {
        let database = Url::parse(url.expose_secret()).ok();
        let password = database.as_ref().and_then(Url::password);
        let password = password.filter(|password| password.len() >= MIN_PASSWORD);
        given.extend(password.map(str::to_owned));
    }
    secrets::remember(given);
    let variables = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    secrets::remember(secrets::of_environment(variables));
}
