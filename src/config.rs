//! Typed settings; precedence: built-in values < `toolloop.toml` < environment < flags.
//!
//! [`Config::load`] is a pure function of its sources; [`Config::read`] fetches them. Unknown keys,
//! invalid values and missing directories are errors that name file, line and key, or the variable,
//! or the flag. `config/default.toml` is both the documentation and the lowest layer, so that no
//! default is defined twice. Nothing of ours is imported: modules get their settings as arguments.

mod browser;
mod credentials;
mod file_ops;
mod jwt;
mod mcp;
mod mistakes;
mod models;
mod server;
mod shell;
mod sources;
pub mod tables;
mod unset_variables;
mod values;
mod variables;
mod web_fetch;
pub mod webhooks;
mod workspace;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use secrecy::{ExposeSecret, SecretSlice, SecretString};
use serde::Deserialize;
use url::Url;

use crate::model::CapabilityOverrides;
pub use browser::Browser;
pub use credentials::Credential;
use credentials::CredentialSettings;
pub use file_ops::FileOps;
use jwt::JwtSettings;
pub use jwt::{Jwt, KeySetSource};
use mcp::McpSettings;
pub use mcp::{McpConnection, McpEffect, McpNetwork, McpServer};
use models::ModelSettings;
pub use models::{Model, ModelServer};
pub use server::{Exposed, Server};
pub use shell::Shell;
pub use sources::ConfigError;
use sources::{Origin, Sources};
use tables::ModelPrice;
pub use unset_variables::{SECRET_PLACEHOLDER, UnsetVariables};
pub use values::parse_duration;
use values::{count, duration, some_size};
pub use variables::unknown_variable_message;
pub use web_fetch::WebFetch;
use webhooks::WebhookSettings;
pub use webhooks::Webhooks;
pub use workspace::{Bucket, ObjectPlace, Workspace, WorkspaceStore};

/// Every setting with its built-in value, annotated.
pub const DEFAULT_TOML: &str = include_str!("config/default.toml");

/// Used if it exists and `--config` is not given.
pub const DEFAULT_FILE: &str = "toolloop.toml";

const PREFIX: &str = "TOOLLOOP_";

/// Settings given on the command line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Flags {
    pub config: Option<PathBuf>,
    pub listen: Option<String>,
    pub database_url: Option<String>,
    pub agents_dir: Option<String>,
}

/// All settings, validated; paths are relative to the current directory.
#[derive(Debug, Clone)]
pub struct Config {
    /// The configuration file, if one was read.
    pub file: Option<PathBuf>,
    pub server: Server,
    pub database: Database,
    pub auth: Auth,
    /// The identity provider; absent unless `auth.mode` is `jwt`.
    pub jwt: Option<Jwt>,
    pub runtime: Runtime,
    /// Directory of `<agent>.yaml` files.
    pub agents_dir: PathBuf,
    /// Directory of `<skill>/SKILL.md` files.
    pub skills_dir: PathBuf,
    /// Directory of `<set>.yaml` files.
    pub tools_dir: PathBuf,
    pub tools: Tools,
    /// Where the runs' files are kept, where that is not in the workspace's directory.
    pub objects: Option<ObjectPlace>,
    /// Secrets that the proxy of programs adds, by name.
    pub credentials: BTreeMap<String, Credential>,
    /// MCP servers by name.
    pub mcp: BTreeMap<String, McpServer>,
    /// Model providers by name.
    pub models: BTreeMap<String, Model>,
    /// By `provider/model` or glob.
    pub prices: BTreeMap<String, ModelPrice>,
    /// Corrections of the shipped table, by `provider/model` or glob.
    pub capabilities: BTreeMap<String, CapabilityOverrides>,
    pub governance: Governance,
    pub audit: Audit,
    /// What signs closed stretches of the audit log, as bytes.
    pub audit_keys: Vec<SecretSlice<u8>>,
    pub webhooks: Webhooks,
    pub telemetry: Telemetry,
    /// `TOOLLOOP_ADMIN_KEY`: the complete first admin key.
    pub admin_key: Option<SecretString>,
    /// Sorted names of the variables and flags that are set; never their values.
    pub overrides: Vec<String>,
    /// Names of variables that begin like settings, are not settings and are named by no setting.
    pub unknown_variables: BTreeSet<String>,
}

/// `[database]`
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Database {
    /// `sqlite://…` or `postgres://…`; may contain a password.
    #[schemars(with = "String", regex(pattern = "^(sqlite:|postgres://|postgresql://)."))]
    pub url: SecretString,
    /// Size of the connection pool.
    #[serde(deserialize_with = "count::<1, 10_000, _, _>")]
    #[schemars(schema_with = "values::count_schema::<1, 10_000>")]
    pub max_connections: u32,
    /// Whether `url` is that of a pooler that assigns a connection to each transaction.
    pub transaction_pooler: bool,
    /// The standby of `url` from which lists are read; empty: lists are read from `url`.
    #[schemars(with = "String", regex(pattern = "^$|^(postgres://|postgresql://)."))]
    pub read_url: SecretString,
}

impl Database {
    /// The file of the embedded store; `None` for PostgreSQL.
    pub fn file(&self) -> Option<PathBuf> {
        let path = self.url.expose_secret().strip_prefix("sqlite:")?;
        Some(PathBuf::from(path.strip_prefix("//").unwrap_or(path)))
    }
}

/// `[auth]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Auth {
    /// How requests are authenticated.
    pub mode: AuthMode,
    /// How long a person stays signed in to the console.
    #[serde(deserialize_with = "duration::<60_000, 2_592_000, _>")]
    #[schemars(schema_with = "values::duration_schema")]
    pub console_session: Duration,
    #[serde(default)]
    jwt: Option<JwtSettings>,
}

/// How requests are authenticated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AuthMode {
    /// By an API key of this service.
    ApiKey,
    /// By an API key, or by a JWT of an identity provider (`[auth.jwt]`).
    Jwt,
    /// Not at all: every caller is an administrator of the tenant `default`. Loopback only.
    None,
}

/// `[runtime]`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Runtime {
    /// Maximum number of concurrent runs of this replica.
    #[serde(deserialize_with = "count::<1, 1_000_000, _, _>")]
    #[schemars(schema_with = "values::count_schema::<1, 1_000_000>")]
    pub max_concurrent_runs: usize,
    /// Maximum number of concurrent runs of one tenant on all replicas; 0: any number.
    #[serde(deserialize_with = "count::<0, 1_000_000, _, _>")]
    #[schemars(schema_with = "values::count_schema::<0, 1_000_000>")]
    pub max_concurrent_runs_per_tenant: u32,
    /// Maximum number of concurrent runs of one key on all replicas; 0: any number.
    #[serde(deserialize_with = "count::<0, 1_000_000, _, _>")]
    #[schemars(schema_with = "values::count_schema::<0, 1_000_000>")]
    pub max_concurrent_runs_per_key: u32,
    /// Maximum number of queued runs.
    #[serde(deserialize_with = "count::<0, 100_000_000, _, _>")]
    #[schemars(schema_with = "values::count_schema::<0, 100_000_000>")]
    pub max_queued_runs: u64,
    /// Maximum number of them that may have come from the queue, recovered runs among them.
    #[serde(deserialize_with = "count::<1, 100_000, _, _>")]
    #[schemars(schema_with = "values::count_schema::<1, 100_000>")]
    pub queue_workers: usize,
    /// A replica without a heartbeat for this long is dead, and loses its runs to others.
    #[serde(deserialize_with = "duration::<2_000, 3_600, _>")]
    #[schemars(schema_with = "values::duration_schema")]
    pub lease: Duration,
    /// How long a run waits for an unavailable store.
    #[serde(deserialize_with = "duration::<0, 3_600, _>")]
    #[schemars(schema_with = "values::duration_schema")]
    pub store_patience: Duration,
    /// The run is ended after this many crashes that it is blamed for.
    #[serde(deserialize_with = "count::<1, 100, _, _>")]
    #[schemars(schema_with = "values::count_schema::<1, 100>")]
    pub max_crashes: u32,
    /// Memory that the process may take; default: as much as its control group or the machine has.
    #[serde(default, deserialize_with = "some_size::<67_108_864, 17_592_186_044_416, _>")]
    #[schemars(schema_with = "values::size_schema::<67_108_864, 17_592_186_044_416>")]
    pub max_memory: Option<usize>,
    /// How long an ended run is kept; `never` deletes none, which is the default.
    #[serde(default, deserialize_with = "values::retention::<1_000, 3_153_600_000, _>")]
    #[schemars(schema_with = "values::retention_schema")]
    pub retention: Option<Duration>,
}

/// `[tools]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Tools {
    /// Where the runs' files lie.
    #[schemars(schema_with = "workspace::schema")]
    pub workspace: Workspace,
    pub file_ops: FileOps,
    pub web_fetch: WebFetch,
    pub browser: Browser,
    pub shell: Shell,
    /// Secrets that the proxy of programs adds to their requests, by name.
    #[serde(default)]
    credentials: BTreeMap<String, CredentialSettings>,
}

/// `[governance]`: limits of keys that have none of their own, and who approves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Governance {
    /// Invocations per minute, and likewise tool calls per minute.
    #[serde(deserialize_with = "count::<1, 1_000_000_000, _, _>")]
    #[schemars(schema_with = "values::count_schema::<1, 1_000_000_000>")]
    pub rate_limit_per_minute: u32,
    /// Invocations or tool calls that can be made at once; where it is not set, no more than per
    /// minute.
    #[serde(deserialize_with = "count::<1, 1_000_000_000, _, _>")]
    #[schemars(schema_with = "values::count_schema::<1, 1_000_000_000>")]
    pub rate_limit_burst: u32,
    /// Who may approve tool calls.
    pub approver: Approver,
}

impl Governance {
    /// A burst that nothing sets does not pass the limit per minute.
    fn with_burst(mut self, sources: &Sources) -> Self {
        if *sources.origin("governance.rate_limit_burst") == Origin::BuiltIn {
            self.rate_limit_burst = self.rate_limit_burst.min(self.rate_limit_per_minute);
        }
        self
    }
}

/// Who may approve tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Approver {
    /// Every key with the scope `runs:approve`.
    Any,
    /// Every such key, except for the one that started the run.
    NotTheCaller,
}

/// `[audit]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Audit {
    /// How long an audit record is kept; `never` deletes none.
    #[serde(deserialize_with = "values::retention::<1_000, 3_153_600_000, _>")]
    #[schemars(schema_with = "values::retention_schema")]
    pub retention: Option<Duration>,
    /// The environment variable with the key that signs closed stretches; empty: they are not signed.
    pub key_env: String,
}

/// `[telemetry]`
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Telemetry {
    /// Base URL of the OTLP/HTTP collector, without `/v1/traces`; empty: no traces.
    #[serde(deserialize_with = "endpoint")]
    #[schemars(with = "String", regex(pattern = "^(https?://.+)?$"))]
    pub otlp_endpoint: Option<Url>,
    /// `service.name` of the traces.
    pub service_name: String,
    /// Share of the traces started by this service that are recorded, 0 to 1.
    #[serde(deserialize_with = "ratio")]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub sample_ratio: f64,
}

/// The settings as they are written; [`Config`] has them resolved.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Settings {
    /// Directory of agent definitions, one `<name>.yaml` each.
    agents_dir: PathBuf,
    /// Directory of skills, one `<name>/SKILL.md` each.
    skills_dir: PathBuf,
    /// Directory of declared tools, one `<set>.yaml` each.
    tools_dir: PathBuf,
    server: Server,
    database: Database,
    auth: Auth,
    runtime: Runtime,
    tools: Tools,
    governance: Governance,
    audit: Audit,
    webhooks: WebhookSettings,
    telemetry: Telemetry,
    /// Servers of the Model Context Protocol by name; their tools are mcp:<name>/<tool>.
    #[serde(default)]
    mcp: BTreeMap<String, McpSettings>,
    /// Model providers by name; a model is referred to as provider/model.
    models: BTreeMap<String, ModelSettings>,
    /// Prices by provider/model, where the model can be a glob.
    #[serde(default)]
    prices: BTreeMap<String, ModelPrice>,
    /// Corrections of the shipped capability table, by provider/model, where the model can be a glob.
    #[serde(default)]
    capabilities: BTreeMap<String, CapabilityOverrides>,
}

impl Config {
    /// Reads file and environment, and checks that configured directories exist.
    pub fn read(flags: &Flags) -> Result<Self, ConfigError> {
        Self::read_with(flags, |_, _| UnsetVariables::new(), &[]).map(|(config, _)| config)
    }

    /// The same, only to be checked and not to be used: placeholders replace secrets
    /// whose environment variables are not set.
    pub fn read_without_secrets(flags: &Flags) -> Result<(Self, UnsetVariables), ConfigError> {
        Self::read_with(flags, unset_variables::add_placeholders, &[])
    }

    fn read_with(
        flags: &Flags,
        add_placeholders: AddPlaceholders,
        left_out: &[String],
    ) -> Result<(Self, UnsetVariables), ConfigError> {
        let file = match &flags.config {
            Some(file) => Some(file.as_path()),
            None => Some(Path::new(DEFAULT_FILE)).filter(|file| file.exists()),
        };
        let text = match file {
            Some(file) => {
                Some(std::fs::read_to_string(file).map_err(|e| ConfigError::Unreadable {
                    file: file.to_owned(),
                    message: format!("cannot be read: {e}"),
                })?)
            }
            None => None,
        };
        let env = std::env::vars_os()
            .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)));
        let (config, sources, unset) =
            resolve(file.zip(text.as_deref()), env, flags, (add_placeholders, left_out))?;
        let scenarios = config.models.iter().filter_map(|(name, model)| match model {
            Model::Scripted { dir } => Some((format!("models.{name}.dir"), dir)),
            Model::Server(_) => None,
        });
        let definitions = [
            ("agents_dir".to_owned(), &config.agents_dir),
            ("skills_dir".to_owned(), &config.skills_dir),
            ("tools_dir".to_owned(), &config.tools_dir),
        ];
        for (key, dir) in definitions.into_iter().chain(scenarios) {
            if *sources.origin(&key) != Origin::BuiltIn && !dir.is_dir() {
                return Err(
                    sources.error(&key, format!("the directory {} does not exist", dir.display()))
                );
            }
        }
        if let Some(Jwt { key_set: KeySetSource::File(file), .. }) = &config.jwt
            && !file.is_file()
        {
            let message = format!("the file {} does not exist", file.display());
            return Err(sources.error("auth.jwt.jwks_file", message));
        }
        Ok((config, unset))
    }

    /// Settings from the given sources. `file` is a path and its content; no file is opened.
    pub fn load(
        file: Option<(&Path, &str)>,
        env: impl Iterator<Item = (String, String)>,
        flags: &Flags,
    ) -> Result<Self, ConfigError> {
        resolve(file, env, flags, (|_, _| UnsetVariables::new(), &[])).map(|(config, ..)| config)
    }
}

/// The JSON Schema (2020-12) of `toolloop.toml`. No key is required, because the file overrides the
/// built-in values.
pub fn schema() -> serde_json::Value {
    let mut settings = SchemaSettings::draft2020_12();
    settings.inline_subschemas = true;
    let mut schema = settings.into_generator().into_root_schema_for::<Settings>().to_value();
    schema["title"] = "toolloop.toml".into();
    values::require_nothing(&mut schema);
    schema
}

/// [`unset_variables::add_placeholders`], or a function that adds none.
type AddPlaceholders = fn(&Settings, &mut HashMap<String, String>) -> UnsetVariables;

fn resolve(
    file: Option<(&Path, &str)>,
    env: impl Iterator<Item = (String, String)>,
    flags: &Flags,
    (add_placeholders, left_out): (AddPlaceholders, &[String]),
) -> Result<(Config, Sources, UnsetVariables), ConfigError> {
    let mut sources = Sources::built_in(DEFAULT_TOML)?;
    sources.leave_out(left_out);
    if let Some((path, text)) = file {
        sources.add_file(path, text)?;
    }
    let mut env: HashMap<String, String> = env.filter(|(_, value)| !value.is_empty()).collect();
    add_environment(&mut sources, &env);
    for (flag, path, text) in [
        ("--listen", ["server", "listen"], flags.listen.as_deref()),
        ("--database-url", ["database", "url"], flags.database_url.as_deref()),
        ("--agents-dir", ["agents_dir", ""], flags.agents_dir.as_deref()),
    ] {
        if let Some(text) = text {
            sources.add_flag(flag, path, text);
        }
    }

    let settings: Settings = sources.read()?;
    let unset = add_placeholders(&settings, &mut env);
    if settings.auth.mode == AuthMode::None && !settings.server.listen.ip().is_loopback() {
        let message = format!(
            "\"none\" is allowed only on loopback addresses, but server.listen is {}",
            settings.server.listen
        );
        return Err(sources.error("auth.mode", message));
    }
    let is_jwt = settings.auth.mode == AuthMode::Jwt;
    let jwt = is_jwt.then(|| jwt::resolve(settings.auth.jwt.as_ref(), &sources)).transpose()?;
    let mut models = BTreeMap::new();
    for (name, model) in settings.models {
        models.insert(name.clone(), models::resolve(&name, model, &sources, &env)?);
    }
    let mut credentials = BTreeMap::new();
    for (name, written) in &settings.tools.credentials {
        let credential = credentials::resolve(name, written, &sources, &env)?;
        credentials.insert(name.clone(), credential);
    }
    tables::check_keys("prices", settings.prices.keys(), &models, &sources)?;
    tables::check_keys("capabilities", settings.capabilities.keys(), &models, &sources)?;
    let objects = workspace::resolve_objects(&settings.tools.workspace, &sources, &env)?;
    let config = Config {
        objects,
        file: file.map(|(path, _)| path.to_owned()),
        server: settings.server,
        database: Database {
            url: resolve_database(&settings.database.url, &sources)?,
            read_url: read_url(&settings.database, &sources)?,
            ..settings.database
        },
        auth: settings.auth,
        jwt,
        runtime: settings.runtime,
        agents_dir: sources.resolve("agents_dir", &settings.agents_dir),
        skills_dir: sources.resolve("skills_dir", &settings.skills_dir),
        tools_dir: sources.resolve("tools_dir", &settings.tools_dir),
        tools: Tools {
            workspace: Workspace {
                dir: sources.resolve("tools.workspace.dir", &settings.tools.workspace.dir),
                ..settings.tools.workspace
            },
            browser: settings.tools.browser.located(&sources),
            ..settings.tools
        },
        credentials,
        mcp: mcp::resolve(&settings.mcp, &sources, &env)?,
        models,
        prices: settings.prices,
        capabilities: settings.capabilities,
        governance: settings.governance.with_burst(&sources),
        audit_keys: audit_keys(&settings.audit.key_env, &sources, &env)?,
        audit: settings.audit,
        webhooks: webhooks::resolve(&settings.webhooks, &sources, &env)?,
        telemetry: settings.telemetry,
        admin_key: env.get("TOOLLOOP_ADMIN_KEY").map(|key| key.as_str().into()),
        overrides: sources.overrides(),
        unknown_variables: variables::unknown(env.keys(), sources.values()),
    };
    Ok((config, sources, unset))
}

/// `DATABASE_URL` and OpenTelemetry's own variables, then `TOOLLOOP_…`. A name without `__` is a
/// setting only if it is a top-level key; others (`TOOLLOOP_ADMIN_KEY`, a provider's key, variables
/// injected by a container platform) are ignored.
fn add_environment(sources: &mut Sources, env: &HashMap<String, String>) {
    for (name, segments) in [
        ("DATABASE_URL", "DATABASE__URL"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "TELEMETRY__OTLP_ENDPOINT"),
        ("OTEL_SERVICE_NAME", "TELEMETRY__SERVICE_NAME"),
    ] {
        if let Some(value) = env.get(name) {
            sources.add_variable(name, segments, value.clone());
        }
    }
    let mut names: Vec<&String> = env.keys().filter(|name| name.starts_with(PREFIX)).collect();
    names.sort_unstable();
    for name in names {
        let segments = name.get(PREFIX.len()..).unwrap_or_default();
        let outside_sections = matches!(segments, "AGENTS_DIR" | "SKILLS_DIR" | "TOOLS_DIR");
        if outside_sections || segments.contains("__") {
            sources.add_variable(name, segments, env.get(name).cloned().unwrap_or_default());
        }
    }
}

/// The keys that a variable holds, in base64: the one that signs, and those that it replaced.
fn audit_keys(
    variable: &str,
    sources: &Sources,
    env: &HashMap<String, String>,
) -> Result<Vec<SecretSlice<u8>>, ConfigError> {
    if variable.is_empty() {
        return Ok(Vec::new());
    }
    let key = |key: &str| {
        let key = BASE64_STANDARD.decode(key).ok().filter(|key| (32..=64).contains(&key.len()))?;
        Some(SecretSlice::from(key))
    };
    let Some(value) = env.get(variable).filter(|value| !value.is_empty()) else {
        let message = format!("the environment variable {variable} is not set");
        return Err(sources.error("audit.key_env", message));
    };
    let keys: Option<Vec<SecretSlice<u8>>> = value.split_whitespace().map(key).collect();
    keys.filter(|keys| !keys.is_empty()).ok_or_else(|| {
        let message = format!("the variable {variable} must hold the base64 of 32 to 64 bytes");
        sources.error("audit.key_env", message)
    })
}

/// The URL of a standby, where lists are to be read from one.
fn read_url(database: &Database, sources: &Sources) -> Result<SecretString, ConfigError> {
    let is_postgres = |url: &SecretString| url.expose_secret().starts_with("postgres");
    let url = &database.read_url;
    if url.expose_secret().is_empty() {
        return Ok(url.clone());
    }
    match Url::parse(url.expose_secret()) {
        Ok(_) if is_postgres(url) && is_postgres(&database.url) => Ok(url.clone()),
        Ok(_) => Err(sources
            .error("database.read_url", "must be that of a standby of a PostgreSQL database.url")),
        Err(reason) => Err(sources.error("database.read_url", format!("is not a URL: {reason}"))),
    }
}

/// Checks the scheme, and resolves a relative SQLite path.
fn resolve_database(url: &SecretString, sources: &Sources) -> Result<SecretString, ConfigError> {
    let text = url.expose_secret();
    if text.starts_with("postgres://") || text.starts_with("postgresql://") {
        return match Url::parse(text) {
            Ok(_) => Ok(url.clone()),
            Err(reason) => Err(sources.error("database.url", format!("is not a URL: {reason}"))),
        };
    }
    let Some(rest) = text.strip_prefix("sqlite:") else {
        return Err(sources.error("database.url", "must start with sqlite:// or postgres://"));
    };
    let path = rest.strip_prefix("//").unwrap_or(rest);
    let path = path.strip_suffix("?mode=rwc").unwrap_or(path);
    let mistake = if path.is_empty() {
        "names no file; write e.g. sqlite://toolloop.db"
    } else if path.starts_with(":memory:") {
        "must name a file, since runs outlive the process; write e.g. sqlite://toolloop.db"
    } else if path.contains('?') {
        "must not have parameters; write e.g. sqlite://toolloop.db"
    } else {
        let file = sources.resolve("database.url", Path::new(path));
        return Ok(format!("sqlite://{}", file.display()).into());
    };
    Err(sources.error("database.url", mistake))
}

/// An HTTP URL, or empty.
fn endpoint<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Url>, D::Error> {
    let text = String::deserialize(deserializer)?;
    if text.is_empty() {
        return Ok(None);
    }
    let invalid = || {
        serde::de::Error::custom(
            "must be an http or https URL, e.g. \"http://127.0.0.1:4318\", or empty",
        )
    };
    let url: Url = text.parse().map_err(|_| invalid())?;
    if matches!(url.scheme(), "http" | "https") { Ok(Some(url)) } else { Err(invalid()) }
}

fn ratio<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    let ratio = f64::deserialize(deserializer)?;
    if (0.0..=1.0).contains(&ratio) {
        return Ok(ratio);
    }
    Err(serde::de::Error::custom(format!("{ratio} is not between 0 and 1")))
}

#[cfg(test)]
#[path = "config/config_tests.rs"]
mod tests;
