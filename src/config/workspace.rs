//! `[tools.workspace]`: where the runs' files lie, and how they reach other replicas. A string in
//! place of the table is `dir` alone.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use secrecy::SecretString;
use serde::Deserialize;
use url::Url;

use super::sources::Sources;
use super::{ConfigError, values};

/// `[tools.workspace]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Workspace {
    /// Directory of the runs' files, which are below `<dir>/<tenant>/`.
    pub dir: PathBuf,
    /// Where the files are kept.
    pub store: WorkspaceStore,
    /// How long what was taken out of a workspace is kept in `<dir>/.quarantine`; `never` deletes none.
    #[serde(deserialize_with = "values::retention::<1_000, 3_153_600_000, _>")]
    #[schemars(schema_with = "values::retention_schema")]
    pub quarantine_retention: Option<Duration>,
    pub(super) object: ObjectSettings,
}

/// `[tools.workspace.object]`: where `store = "object"` keeps the files.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ObjectSettings {
    /// `s3://<bucket>/<prefix>`, or a directory that all replicas see, as a path or `file:///…`.
    url: String,
    /// Base URL of a server that speaks S3; empty: Amazon's.
    endpoint: String,
    /// The region of the bucket; empty: `AWS_REGION`, or us-east-1.
    region: String,
    /// The environment variable with the id of the access key.
    access_key_env: String,
    /// The environment variable with the secret of the access key.
    secret_key_env: String,
}

/// A place that keeps objects by name.
#[derive(Debug, Clone)]
pub enum ObjectPlace {
    Directory(PathBuf),
    S3(Bucket),
}

/// A bucket of a server that speaks S3.
#[derive(Debug, Clone)]
pub struct Bucket {
    pub name: String,
    /// What the names of all objects begin with; may be empty.
    pub prefix: String,
    pub endpoint: Option<Url>,
    pub region: Option<String>,
    /// Id and secret of the access key; absent: what the machine has.
    pub key: Option<(String, SecretString)>,
}

/// Where the runs' files are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WorkspaceStore {
    /// In the directory of this machine alone.
    Local,
    /// In the directory, which is the same on all replicas; they check that.
    Shared,
    /// In an object store, before a call is recorded as completed; the directory holds copies.
    Object,
}

/// Where the files are kept, where that is not in the directory.
pub(super) fn resolve_objects(
    workspace: &Workspace,
    sources: &Sources,
    env: &HashMap<String, String>,
) -> Result<Option<ObjectPlace>, ConfigError> {
    const KEY: &str = "tools.workspace.object";
    let settings = &workspace.object;
    if workspace.store != WorkspaceStore::Object {
        return Ok(None);
    }
    let wrong = |name: &str, why: &str| Err(sources.error(&format!("{KEY}.{name}"), why));
    if settings.url.is_empty() {
        return wrong(
            "url",
            "must name a bucket, s3://…, or a directory: tools.workspace.store is \"object\"",
        );
    }
    let Some(bucket) = settings.url.strip_prefix("s3://") else {
        return match path_of(&settings.url) {
            Some(path) => {
                Ok(Some(ObjectPlace::Directory(sources.resolve(&format!("{KEY}.url"), &path))))
            }
            None => wrong("url", "must be s3://…, file:///… or a directory"),
        };
    };
    let (name, prefix) = bucket.split_once('/').unwrap_or((bucket, ""));
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if name.is_empty() || !name.chars().all(is_name) {
        return wrong("url", "names no bucket");
    }
    let endpoint = match settings.endpoint.as_str() {
        "" => None,
        text => match Url::parse(text) {
            Ok(url) if matches!(url.scheme(), "http" | "https") && url.username().is_empty() => {
                Some(url)
            }
            _ => return wrong("endpoint", "must be http://… or https://… without credentials"),
        },
    };
    let (id, secret) = (env.get(&settings.access_key_env), env.get(&settings.secret_key_env));
    if id.is_some() != secret.is_some() {
        return wrong(
            "secret_key_env",
            "one of the two variables of the access key is set, the other is not",
        );
    }
    Ok(Some(ObjectPlace::S3(Bucket {
        name: name.to_owned(),
        prefix: prefix.trim_matches('/').to_owned(),
        endpoint,
        region: Some(settings.region.clone()).filter(|region| !region.is_empty()),
        key: id.cloned().zip(secret.map(|secret| secret.as_str().into())),
    })))
}

/// The directory that is named by its path or a `file` URL.
fn path_of(url: &str) -> Option<PathBuf> {
    if !url.contains("://") {
        return Some(url.into());
    }
    let url = Url::parse(url).ok().filter(|url| url.scheme() == "file")?;
    let is_path_alone = url.query().is_none() && url.fragment().is_none();
    url.to_file_path().ok().filter(|_| is_path_alone)
}

/// The table, or the directory as a string.
pub(super) fn schema(generator: &mut SchemaGenerator) -> Schema {
    let table = generator.subschema_for::<Workspace>();
    json_schema!({"anyOf": [{"type": "string"}, table]})
}
