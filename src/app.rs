//! Wires the modules together: the only place that chooses concrete types, and the order of startup
//! and shutdown.

mod banner;
mod changes;
mod check;
mod models;
mod objects;
mod restart;
mod secrets;
mod tools;
mod warnings;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use secrecy::ExposeSecret;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::agents::catalogue::{self, Change};
use crate::agents::{Catalogue, Definition};
use crate::bounds::memory;
use crate::config::{self, AuthMode, Config, Exposed, Flags, UnsetVariables, WorkspaceStore};
use crate::http::{self, Auth, HttpSettings, HttpState, Limits, MetricsSink, TokenSigner};
use crate::objects::ObjectsError;
use crate::outbound::Client;
use crate::providers::router::{OnTry, Router};
use crate::run::{Caller, Delegation};
use crate::runtime::jwt::IdentityProvider;
use crate::runtime::{
    self, Approver, AuditKey, ChildIds, HeartbeatStore, PolicyBench, Runtime, Settings, Sharing,
    Webhooks, WorkspaceSettings, keys,
};
use crate::store::RunLimits;
use crate::store::writer::OnDurable;
use crate::store::{self, RateLimit, RunWrite, Store, StoreError};
use crate::telemetry::{
    IsNamed, IsOwnTool, ModelTry, Observed, Sampled, Telemetry, TelemetryError, TraceSettings,
};
use crate::tools::quota::{Quota, QuotaLimits};
use crate::tools::registry::Registry;

pub use check::{
    Findings, Scenarios, check, check_admin_key, check_key_set, due_restarts, missing_scenarios,
    scenarios, unset_messages,
};
pub use models::router;
pub use objects::objects;
pub use tools::{mcp_servers, sandbox};
use warnings::Warnings;

/// How often agent files are checked for changes.
const RELOAD: Duration = Duration::from_secs(1);
/// How long connections may stay open after the last run has ended, and the timeout of the last
/// telemetry export.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval of telemetry upkeep.
const UPKEEP: Duration = Duration::from_secs(5);
/// Length of the kernel's accept queue.
const BACKLOG: u32 = 4096;

/// Why the service cannot start or continue.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("[models.{name}]: {message}")]
    Provider { name: String, message: String },
    #[error("[tools.workspace.object]: {0}")]
    Objects(ObjectsError),
    #[error("cannot listen on {address}")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error(transparent)]
    Telemetry(#[from] TelemetryError),
    /// The first admin key.
    #[error(transparent)]
    Key(#[from] keys::KeyError),
    /// The listener has no address, or signal handlers cannot be installed.
    #[error("the service cannot run: {0}")]
    Serve(std::io::Error),
}

/// Opens the configured store without migrating it.
///
/// # Errors
/// The store is unreachable, or locked by another process.
pub async fn open_store(config: &Config) -> Result<Arc<Store>, AppError> {
    keep_files_private();
    let database = &config.database;
    let url = database.url.expose_secret();
    let (max, pooler) = (database.max_connections, database.transaction_pooler);
    let read_url = Some(database.read_url.expose_secret()).filter(|url| !url.is_empty());
    Ok(store::open_with_lists(url, max, pooler, read_url).await?)
}

/// Sets the umask so that new files and directories of this process, such as the database and the workspaces, are
/// accessible to its user only.
fn keep_files_private() {
    let own = rustix::process::umask(rustix::fs::Mode::from_bits_retain(0o077));
    // Keep the bits that the operator has set.
    let _ = rustix::process::umask(own | rustix::fs::Mode::from_bits_retain(0o077));
}

/// Serves until SIGTERM or SIGINT, then drains; another SIGINT ends the grace of the drain.
///
/// # Errors
/// The service cannot start.
pub async fn serve(config: Config, flags: Flags) -> Result<(), AppError> {
    if let Some(bytes) = config.runtime.max_memory {
        memory::set_limit(bytes as u64);
    }
    let read = restart::StartupFiles::of(&config, flags);
    let parts = Parts::assemble(&config).await?;
    let listener = listen(config.server.listen)?;
    let mut signals = Signals::listen()?;
    parts.join(&config).await?;
    let first_key = match config.auth.mode {
        AuthMode::ApiKey | AuthMode::Jwt => {
            keys::bootstrap(parts.store.as_ref(), config.admin_key.as_ref()).await?
        }
        AuthMode::None => None,
    };
    let stop = CancellationToken::new();
    let store = Arc::clone(&parts.store);
    let recorded = async move |change: &Change| changes::record(&store, change).await;
    tokio::spawn(catalogue::watch(Arc::clone(&parts.catalogue), RELOAD, stop.clone(), recorded));
    let watching = read.watch(Arc::clone(&parts.catalogue), RELOAD);
    tokio::spawn(stop.clone().run_until_cancelled_owned(watching));
    tokio::spawn(stop.clone().run_until_cancelled_owned(run_upkeep(Arc::clone(&parts.telemetry))));

    let auth = match &config.jwt {
        _ if config.auth.mode == AuthMode::None => Auth::None,
        Some(settings) => Auth::ApiKeysAndJwts(identity_provider(settings, &stop).await),
        None => Auth::ApiKeys,
    };
    let routes = parts.routes(&config, auth);
    let limits = Limits {
        header_timeout: config.server.header_timeout,
        idle_timeout: config.server.idle_timeout,
        write_timeout: config.server.write_timeout,
        max_connections: config.server.max_connections,
    };
    let address = listener.local_addr().map_err(AppError::Serve)?;
    banner::announce(address, &parts, &config, first_key.as_deref());

    let (runtime, grace) = (parts.runtime.clone(), config.server.shutdown_grace);
    let drained = CancellationToken::new();
    let draining = {
        let drained = drained.clone();
        async move {
            signals.first().await;
            tracing::info!("draining: no new runs are accepted, waiting for those in progress");
            // Other requests are still served in the meantime.
            tokio::select! {
                () = runtime.drain(grace) => {}
                _ = signals.interrupt.recv() => runtime.drain(Duration::ZERO).await,
            }
            drained.cancel();
        }
    };
    let server = http::serve(listener, routes, limits, draining);
    let close_timeout = async {
        drained.cancelled().await;
        tokio::time::sleep(CLOSE_TIMEOUT).await;
    };
    tokio::select! {
        () = server => {}
        () = close_timeout => tracing::warn!("closing connections that are still open after the last run"),
    }
    stop.cancel();
    parts.close().await;
    Ok(())
}

/// The identity provider, with keys that are read now and kept fresh. Where they cannot be read,
/// tokens are refused until they can.
async fn identity_provider(
    settings: &config::Jwt,
    stop: &CancellationToken,
) -> Arc<IdentityProvider> {
    let provider = Arc::new(IdentityProvider::new(settings));
    if let Err(error) = provider.keys().read().await {
        tracing::error!(%error, "tokens of the identity provider cannot be verified yet");
    }
    let fresh = Arc::clone(&provider);
    let refresh = async move { fresh.keys().keep_fresh().await };
    tokio::spawn(stop.clone().run_until_cancelled_owned(refresh));
    provider
}

/// The service in this process, without a listener. Its only caller is an administrator of one
/// tenant.
pub struct Local {
    parts: Parts,
    router: axum::Router,
    config: Config,
}

/// The service for callers in this process. It has no workers, so it executes only runs that these callers start, and
/// their child runs.
///
/// # Errors
/// The store cannot be opened, or a model provider cannot be set up.
pub async fn local(mut config: Config, tenant: &str) -> Result<Local, AppError> {
    config.runtime.queue_workers = 0;
    let parts = Parts::assemble(&config).await?;
    let caller = Caller { tenant: tenant.to_owned(), ..Caller::local() };
    let router = parts.routes(&config, Auth::Local(Arc::new(caller)));
    Ok(Local { parts, router, config })
}

impl AppError {
    /// Whether the configuration is at fault.
    pub fn is_of_configuration(&self) -> bool {
        matches!(
            self,
            Self::Provider { .. }
                | Self::Objects(_)
                | Self::Key(keys::KeyError::MalformedAdminKey | keys::KeyError::AdminKeyTaken)
        )
    }
}

impl Local {
    pub fn router(&self) -> axum::Router {
        self.router.clone()
    }

    /// Whether this process has exclusive access to the database.
    pub fn is_alone(&self) -> bool {
        self.parts.store.kind() == "sqlite"
    }

    /// Starts the servers of tools, without executing runs.
    pub async fn prepare(&self) {
        self.parts.prepare(&self.config).await;
    }

    /// Like [`Local::prepare`]; also registers this process as a replica, so that it can execute runs.
    ///
    /// # Errors
    /// The store is unreachable.
    pub async fn join(&self) -> Result<(), AppError> {
        self.parts.join(&self.config).await
    }

    /// Drains, then closes the store.
    pub async fn close(self) {
        self.parts.runtime.drain(self.config.server.shutdown_grace).await;
        self.parts.close().await;
    }
}

/// Loads the configured agents; invalid ones are among the catalogue's problems.
///
/// # Errors
/// A model provider cannot be set up.
pub fn agents(config: &Config) -> Result<Catalogue, AppError> {
    Ok(tools::load_agents(config, &Arc::new(router(config)?), &tools::loaded_anew(config)))
}

/// A bench that judges policy cases of a definition. Variables that are not set are added to `unset`.
///
/// # Errors
/// What is wrong with the definition.
pub fn policy_bench(
    config: &Config,
    definition: &Definition,
    unset: &mut UnsetVariables,
) -> Result<PolicyBench, String> {
    let tools = tools::without_secrets(config, unset);
    PolicyBench::new(&tools.registry, tools.skills(), definition)
}

/// The catalogue and the registry, once they are loaded; metrics start earlier.
type Loaded = OnceLock<(Weak<Catalogue>, Weak<Registry>)>;

/// The service without its listener.
struct Parts {
    store: Arc<Store>,
    catalogue: Arc<Catalogue>,
    registry: Arc<Registry>,
    runtime: Runtime,
    tokens: Arc<TokenSigner>,
    telemetry: Arc<Telemetry>,
    router: Arc<Router>,
    warnings: Warnings,
}

impl Parts {
    async fn assemble(config: &Config) -> Result<Self, AppError> {
        secrets::remember(config);
        let loaded = Arc::new(Loaded::new());
        let telemetry = Arc::new(telemetry(config, &loaded)?);
        let router = Arc::new(router(config)?.observed_by(on_try(&telemetry)));
        let store = open_store(config).await?;
        let sandbox = sandbox(config);
        sandbox.kernel().await; // models and callers are told what it confines
        let recollection = runtime::recollection(Arc::clone(&store));
        let tools = tools::configured(config, recollection, sandbox);
        let catalogue = Arc::new(tools::load_agents(config, &router, &tools));
        let registry = Arc::clone(&tools.registry);
        let _ = loaded.set((Arc::downgrade(&catalogue), Arc::downgrade(&registry)));
        let warnings = Warnings::of(config, tools);
        store.migrate().await?;
        let child_ids = ChildIds::of(&store).await?;
        let tokens = Arc::new(TokenSigner::of(&store).await?);
        let limit = |runs: u32| (runs > 0).then_some(runs);
        let settings = Settings {
            max_concurrent_runs: config.runtime.max_concurrent_runs,
            run_limits: RunLimits {
                of_tenant: limit(config.runtime.max_concurrent_runs_per_tenant),
                of_key: limit(config.runtime.max_concurrent_runs_per_key),
            },
            max_queued_runs: config.runtime.max_queued_runs,
            queue_workers: config.runtime.queue_workers,
            lease: config.runtime.lease,
            store_patience: config.runtime.store_patience,
            max_crashes: config.runtime.max_crashes,
            retention: config.runtime.retention,
            audit_retention: config.audit.retention,
            audit_key: AuditKey::new(config.audit_keys.iter().map(ExposeSecret::expose_secret)),
            approver: match config.governance.approver {
                config::Approver::Any => Approver::Any,
                config::Approver::NotTheCaller => Approver::NotTheCaller,
            },
            rate_limit: rate_limit(config),
            webhooks: Webhooks::of(&config.webhooks, Client::new()),
            workspaces: workspaces(config)?,
            sample_ratio: config
                .telemetry
                .otlp_endpoint
                .as_ref()
                .map_or(0.0, |_| config.telemetry.sample_ratio),
        };
        let (shared, tools) = (Arc::clone(&store), Arc::clone(&registry));
        let runtime = Runtime::new(
            shared,
            Arc::clone(&catalogue),
            Arc::clone(&router),
            tools,
            child_ids,
            settings,
            on_durable(&telemetry),
        );
        Ok(Self { store, catalogue, registry, runtime, tokens, telemetry, router, warnings })
    }

    /// Releases the lease, closes the store and exports the remaining traces. No run may be in progress.
    async fn close(self) {
        tools::stop_servers(&self.registry);
        self.runtime.leave().await;
        self.store.close().await;
        let telemetry = self.telemetry;
        // Fails only after a panic, which has been logged.
        let _ = tokio::task::spawn_blocking(move || telemetry.finish(CLOSE_TIMEOUT)).await;
    }

    fn routes(&self, config: &Config, auth: Auth) -> axum::Router {
        let (scenarios, catalogue) = (scenarios(config), Arc::clone(&self.catalogue));
        let state = HttpState {
            unplayable: Arc::new(move || missing_scenarios(&scenarios, &catalogue)),
            runtime: self.runtime.clone(),
            store: Arc::clone(&self.store),
            catalogue: Arc::clone(&self.catalogue),
            tools: tools::tool_list(&self.registry),
            servers: tools::server_list(&self.registry),
            sandbox: self.registry.confinement().cloned(),
            auth,
            tokens: Arc::clone(&self.tokens),
            metrics: metrics_sink(&self.telemetry, Arc::clone(&self.router)),
        };
        let settings = HttpSettings {
            body_limit: config.server.body_limit,
            body_timeout: config.server.body_timeout,
            request_timeout: config.server.request_timeout,
            expose: http::Exposed {
                metrics: config.server.expose.contains(&Exposed::Metrics),
                docs: config.server.expose.contains(&Exposed::Docs),
                console: config.server.expose.contains(&Exposed::Console),
            },
            cors: http::CorsOrigins::new(&config.server.cors_origins),
            requests_per_key: requests_per_key(&config.server),
            console_session: config.auth.console_session,
            rate_limit: rate_limit(config),
        };
        http::router(state, settings)
    }

    /// Logs warnings about definitions and settings, which commands without runs do not need, and starts the servers of
    /// tools.
    async fn prepare(&self, config: &Config) {
        self.warnings.log(config, &self.catalogue);
        tools::start_servers(&self.registry).await;
    }

    /// Like [`Parts::prepare`]; also registers this process as a replica. With PostgreSQL, heartbeats have a connection
    /// of their own, so that the lease is not lost because the pool is busy. SQLite is used by this process only.
    async fn join(&self, config: &Config) -> Result<(), AppError> {
        self.prepare(config).await;
        let database = &config.database;
        let (url, pooler) = (database.url.clone(), database.transaction_pooler);
        let shared = Arc::clone(&self.store);
        let heartbeat: HeartbeatStore = Box::new(move || {
            let (shared, url) = (Arc::clone(&shared), url.clone());
            Box::pin(async move {
                match shared.kind() {
                    "sqlite" => Ok(shared),
                    _ => store::open(url.expose_secret(), 1, pooler).await,
                }
            })
        });
        Ok(self.runtime.join(heartbeat).await?)
    }
}

fn workspaces(config: &Config) -> Result<WorkspaceSettings, AppError> {
    let section = &config.tools.workspace;
    let sharing = match &config.objects {
        Some(settings) => Sharing::Objects(objects(settings)?),
        None if section.store == WorkspaceStore::Shared => Sharing::Volume,
        None => Sharing::None,
    };
    let files = &config.tools.file_ops;
    let limits = QuotaLimits {
        max_file: files.max_file as u64,
        bytes: files.workspace_quota as u64,
        files: files.workspace_files,
    };
    let is_shared = matches!(sharing, Sharing::Volume);
    Ok(WorkspaceSettings {
        root: section.dir.clone(),
        sharing,
        quota: Arc::new(if is_shared { Quota::shared(limits) } else { Quota::new(limits) }),
        quarantine_retention: section.quarantine_retention,
    })
}

/// How many requests one key may have open, so that connections remain for other keys.
fn requests_per_key(server: &config::Server) -> usize {
    let most = http::affordable_connections(server.max_connections);
    server.max_requests_per_key.min(most - most.div_ceil(5)).max(1)
}

fn telemetry(config: &Config, loaded: &Arc<Loaded>) -> Result<Telemetry, TelemetryError> {
    let settings = config.telemetry.otlp_endpoint.clone().map(|endpoint| TraceSettings {
        endpoint,
        service_name: config.telemetry.service_name.clone(),
    });
    Telemetry::start(settings.as_ref(), named_models(config, loaded), own_tools(loaded))
}

/// Passes committed writes to telemetry.
fn on_durable(telemetry: &Arc<Telemetry>) -> OnDurable {
    let telemetry = Arc::clone(telemetry);
    Arc::new(move |write| {
        let RunWrite { origin, events, audit, totals, .. } = write;
        telemetry.observe(Observed { origin, events, audit, totals });
    })
}

/// Whether a definition or a price names a model; callers can name arbitrary others.
fn named_models(config: &Config, loaded: &Arc<Loaded>) -> IsNamed {
    let priced: BTreeSet<String> = config.prices.keys().cloned().collect();
    let loaded = Arc::clone(loaded);
    Box::new(move |provider, model| {
        let name = format!("{provider}/{model}");
        priced.contains(&name)
            || loaded
                .get()
                .and_then(|(agents, _)| agents.upgrade())
                .is_some_and(|agents| agents.names(&name))
    })
}

/// Whether a tool is one of the service's; other names come from callers and models.
fn own_tools(loaded: &Arc<Loaded>) -> IsOwnTool {
    let loaded = Arc::clone(loaded);
    Box::new(move |name: &str| {
        let Some((agents, registry)) = loaded.get() else { return false };
        if let Some(delegation) = Delegation::of_tool(name) {
            let agents = agents.upgrade();
            return agents.is_some_and(|agents| agents.agent(delegation.agent()).is_some());
        }
        registry.upgrade().is_some_and(|registry| registry.has(name))
    })
}

/// Passes attempted model calls to telemetry.
fn on_try(telemetry: &Arc<Telemetry>) -> OnTry {
    let telemetry = Arc::clone(telemetry);
    Arc::new(move |tried| {
        telemetry.model_tried(ModelTry {
            provider: tried.provider,
            model: tried.model,
            took: tried.took,
            failure: tried.error.map(|error| error.kind.as_str()),
            given_up: tried.trace.filter(|_| tried.is_last).map(|span| (span, tried.call_took)),
        });
    })
}

/// The default rate limit of keys.
fn rate_limit(config: &Config) -> RateLimit {
    RateLimit {
        per_minute: config.governance.rate_limit_per_minute,
        burst: config.governance.rate_limit_burst,
    }
}

fn metrics_sink(telemetry: &Arc<Telemetry>, router: Arc<Router>) -> MetricsSink {
    let (counting, scraping) = (Arc::clone(telemetry), Arc::clone(telemetry));
    MetricsSink {
        on_response: Box::new(move |route, method, status, took| {
            counting.http_answered(route, method, status.as_u16(), took);
        }),
        scrape: Box::new(move |gauges| {
            let http::Gauges { backlog, connections, in_flight } = gauges;
            scraping.scrape(Sampled {
                queued: backlog.map(|backlog| backlog.queued),
                oldest: backlog.map(|backlog| backlog.oldest),
                approvals: backlog.map(|backlog| backlog.approvals),
                used: connections.used,
                idle: connections.idle,
                in_flight,
                open_breakers: router.open_breakers().collect(),
            })
        }),
    }
}

async fn run_upkeep(telemetry: Arc<Telemetry>) {
    loop {
        tokio::time::sleep(UPKEEP).await;
        telemetry.upkeep();
    }
}

fn listen(address: SocketAddr) -> Result<TcpListener, AppError> {
    let bound = || {
        let socket = match address {
            SocketAddr::V4(_) => tokio::net::TcpSocket::new_v4(),
            SocketAddr::V6(_) => tokio::net::TcpSocket::new_v6(),
        }?;
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    bound().map_err(|source| AppError::Listen { address, source })
}

/// SIGTERM and SIGINT; the handlers are installed on creation.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn listen() -> Result<Self, AppError> {
        let handler = |kind| signal(kind).map_err(AppError::Serve);
        Ok(Self {
            terminate: handler(SignalKind::terminate())?,
            interrupt: handler(SignalKind::interrupt())?,
        })
    }

    async fn first(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
