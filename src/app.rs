//! Puts the parts together: the only place that picks concrete types, and the order in which they
//! start and stop.

mod model_tables;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use secrecy::ExposeSecret;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::agents::{Catalogue, Skills, catalogue};
use crate::config::{AuthMode, Config, Exposed, Model, ModelApi, ModelServer};
use crate::engine::demands;
use crate::http::{self, Auth, HttpSettings, HttpState, Limits, Meters};
use crate::providers::anthropic::Anthropic;
use crate::providers::ollama::Ollama;
use crate::providers::openai::OpenAi;
use crate::providers::responses::Responses;
use crate::providers::router::{OnTry, ProviderEntry, Router};
use crate::providers::scripted::Scripted;
use crate::providers::wire::WireSettings;
use crate::providers::{Provider, ProviderKind};
use crate::run::Caller;
use crate::runtime::{self, HeartbeatStore, Runtime, Settings, keys};
use crate::store::writer::OnDurable;
use crate::store::{self, RateLimit, RunWrite, Store, StoreError};
use crate::telemetry::{ModelTry, Observed, Sampled, Telemetry, TelemetryError, TraceSettings};
use crate::tools::recall::{Recall, Recollect};
use crate::tools::registry::Registry;

/// How often agent files are looked at.
const RELOAD: Duration = Duration::from_secs(1);
/// How long connections may stay open after the last run has ended.
const LAST_WAIT: Duration = Duration::from_secs(2);
/// How often telemetry does its upkeep.
const UPKEEP: Duration = Duration::from_secs(5);
/// Connections that may wait to be accepted.
const BACKLOG: u32 = 4096;

/// Why the service could not be put together, or stopped.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A model provider cannot be set up.
    #[error("[models.{name}]: {message}")]
    Provider {
        /// Which.
        name: String,
        /// Why.
        message: String,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// Metrics or traces.
    #[error(transparent)]
    Telemetry(#[from] TelemetryError),
    /// The first key.
    #[error(transparent)]
    Key(#[from] keys::KeyError),
    /// The listener has no address, or signals cannot be heard.
    #[error("the service cannot go on: {0}")]
    Serve(std::io::Error),
}

/// Opens the configured store. Its schema may be out of date.
///
/// # Errors
/// It cannot be reached, or another process holds it.
pub async fn open_store(config: &Config) -> Result<Arc<dyn Store>, AppError> {
    Ok(store::open(config.database.url.expose_secret(), config.database.max_connections).await?)
}

/// Serves until told to stop by SIGTERM or SIGINT, then lets runs finish.
///
/// # Errors
/// The service cannot start.
pub async fn serve(config: Config) -> Result<(), AppError> {
    let parts = Parts::assemble(&config).await?;
    let listener = listen(config.server.listen)?;
    let signals = Signals::listen()?;
    parts.join(&config).await?;
    let first_key = match config.auth.mode {
        AuthMode::ApiKey => {
            keys::bootstrap(parts.store.as_ref(), config.admin_key.as_ref()).await?
        }
        AuthMode::None => None,
    };
    let stop = CancellationToken::new();
    tokio::spawn(catalogue::watch(Arc::clone(&parts.catalogue), RELOAD, stop.clone()));
    tokio::spawn(stop.clone().run_until_cancelled_owned(keep_up(Arc::clone(&parts.telemetry))));

    let auth = match config.auth.mode {
        AuthMode::ApiKey => Auth::ApiKeys,
        AuthMode::None => Auth::None,
    };
    let routes = parts.routes(&config, auth);
    let limits = Limits {
        header_timeout: config.server.header_timeout,
        idle_timeout: config.server.idle_timeout,
        write_timeout: config.server.write_timeout,
        max_connections: config.server.max_connections,
    };
    let address = listener.local_addr().map_err(AppError::Serve)?;
    greet(address, &parts, first_key.as_deref());

    let (runtime, grace) = (parts.runtime.clone(), config.server.shutdown_grace);
    let drained = CancellationToken::new();
    let draining = {
        let drained = drained.clone();
        async move {
            signals.first().await;
            tracing::info!("draining: no new runs, waiting for those in progress");
            runtime.drain(grace).await; // meanwhile reads, cancels and probes are answered
            drained.cancel();
        }
    };
    let server = http::serve(listener, routes, limits, draining);
    let last_answers = async {
        drained.cancelled().await;
        tokio::time::sleep(LAST_WAIT).await;
    };
    tokio::select! {
        () = server => {}
        () = last_answers => tracing::warn!("connections were still open after the last run"),
    }
    stop.cancel();
    parts.close().await;
    Ok(())
}

/// The service inside this process, without a listener: whoever holds it is its only caller, the
/// administrator of one tenant.
pub struct Local {
    parts: Parts,
    router: axum::Router,
    config: Config,
}

/// Puts the service together for callers in this process. It drives only what they start: the queue
/// is left to services.
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

impl Local {
    /// The API.
    pub fn router(&self) -> axum::Router {
        self.router.clone()
    }

    /// Makes this process a replica, so that runs can be started.
    ///
    /// # Errors
    /// The store cannot be reached.
    pub async fn join(&self) -> Result<(), AppError> {
        self.parts.join(&self.config).await
    }

    /// Lets runs finish, then lets go of the store.
    pub async fn close(self) {
        self.parts.runtime.drain(self.config.server.shutdown_grace).await;
        self.parts.close().await;
    }
}

/// What is wrong with the agents and models of this configuration, one line each.
pub fn check(config: &Config) -> Vec<String> {
    match agents(config) {
        Ok(agents) => agents
            .problems()
            .into_iter()
            .map(|problem| format!("{}: {}", problem.file, problem.error))
            .collect(),
        Err(error) => vec![error.to_string()],
    }
}

/// The agents of this configuration, and what is wrong with the others.
///
/// # Errors
/// A model provider cannot be set up.
pub fn agents(config: &Config) -> Result<Catalogue, AppError> {
    let no_memory: Recollect =
        Arc::new(|_| Box::pin(async { Err("no run is executed here".to_owned()) }));
    let (registry, skills) = tools(config, no_memory);
    Ok(load_agents(config, &Arc::new(router(config)?), &registry, &skills))
}

/// The service without its listener.
struct Parts {
    store: Arc<dyn Store>,
    catalogue: Arc<Catalogue>,
    registry: Arc<Registry>,
    runtime: Runtime,
    telemetry: Arc<Telemetry>,
}

impl Parts {
    async fn assemble(config: &Config) -> Result<Self, AppError> {
        let telemetry = Arc::new(telemetry(config)?);
        let loaded = Arc::new(OnceLock::new());
        let router = Arc::new(
            router(config)?.observed_by(on_try(&telemetry, named_models(config, &loaded))),
        );
        let store = open_store(config).await?;
        let (registry, skills) = tools(config, runtime::recollection(Arc::clone(&store)));
        let catalogue = Arc::new(load_agents(config, &router, &registry, &skills));
        let _ = loaded.set(Arc::downgrade(&catalogue));
        for problem in catalogue.problems() {
            tracing::error!(file = problem.file, error = problem.error, "agent not loaded");
        }
        store.migrate().await?;
        let settings = Settings {
            max_concurrent_runs: config.runtime.max_concurrent_runs,
            max_queued_runs: config.runtime.max_queued_runs,
            queue_workers: config.runtime.queue_workers,
            lease: config.runtime.lease,
            store_patience: config.runtime.store_patience,
            max_crashes: config.runtime.max_crashes,
            retention: config.runtime.retention,
            workspace: config.tools.workspace.clone(),
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
            router,
            tools,
            settings,
            on_durable(&telemetry),
        );
        Ok(Self { store, catalogue, registry, runtime, telemetry })
    }

    /// Leaves no lease, no connection and no trace behind. Nothing runs here any more.
    async fn close(self) {
        self.runtime.leave().await;
        self.store.close().await;
        let telemetry = self.telemetry;
        // Only a panic could fail it, and that has been logged.
        let _ = tokio::task::spawn_blocking(move || telemetry.finish(LAST_WAIT)).await;
    }

    /// The API over these parts.
    fn routes(&self, config: &Config, auth: Auth) -> axum::Router {
        let state = HttpState {
            runtime: self.runtime.clone(),
            store: Arc::clone(&self.store),
            catalogue: Arc::clone(&self.catalogue),
            tools: Arc::new(self.registry.infos().cloned().collect()),
            auth,
            meters: meters(&self.telemetry),
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
            rate_limit: RateLimit {
                per_minute: config.governance.rate_limit_per_minute,
                burst: config.governance.rate_limit_burst,
            },
        };
        http::router(state, settings)
    }

    /// Makes this process a replica. A shared database gets a heartbeat connection of its own; an
    /// embedded one belongs to this process alone, whose heart may beat through the same handle.
    async fn join(&self, config: &Config) -> Result<(), AppError> {
        let url = config.database.url.clone();
        let shared = Arc::clone(&self.store);
        let heartbeat: HeartbeatStore = Box::new(move || {
            Box::pin(async move {
                match shared.kind() {
                    "sqlite" => Ok(shared),
                    _ => store::open(url.expose_secret(), 1).await,
                }
            })
        });
        Ok(self.runtime.join(heartbeat).await?)
    }
}

fn telemetry(config: &Config) -> Result<Telemetry, TelemetryError> {
    let settings = config.telemetry.otlp_endpoint.clone().map(|endpoint| TraceSettings {
        endpoint,
        service_name: config.telemetry.service_name.clone(),
    });
    Telemetry::start(settings.as_ref())
}

/// What this replica writes, told to telemetry.
fn on_durable(telemetry: &Arc<Telemetry>) -> OnDurable {
    let telemetry = Arc::clone(telemetry);
    Arc::new(move |write| {
        if let Some(origin) = &write.origin {
            let RunWrite { events, audit, totals, .. } = write;
            telemetry.observe(Observed { origin, events, audit, totals });
        }
    })
}

/// Whether a definition or a price names a model; callers can make up others.
fn named_models(
    config: &Config,
    loaded: &Arc<OnceLock<Weak<Catalogue>>>,
) -> impl Fn(&str, &str) -> bool + Send + Sync + 'static {
    let priced: BTreeSet<String> = config.prices.keys().cloned().collect();
    let loaded = Arc::clone(loaded);
    move |provider, model| {
        let name = format!("{provider}/{model}");
        priced.contains(&name)
            || loaded.get().and_then(Weak::upgrade).is_some_and(|agents| agents.names(&name))
    }
}

/// Tries of model calls, told to telemetry.
fn on_try(
    telemetry: &Arc<Telemetry>,
    is_named: impl Fn(&str, &str) -> bool + Send + Sync + 'static,
) -> OnTry {
    let telemetry = Arc::clone(telemetry);
    Arc::new(move |tried| {
        telemetry.model_tried(ModelTry {
            is_named: is_named(tried.provider, tried.model),
            provider: tried.provider,
            model: tried.model,
            took: tried.took,
            failure: tried.error.map(|error| error.kind.as_str()),
            given_up: tried.trace.filter(|_| tried.is_last).map(|span| (span, tried.call_took)),
        });
    })
}

fn meters(telemetry: &Arc<Telemetry>) -> Meters {
    let (counting, scraping) = (Arc::clone(telemetry), Arc::clone(telemetry));
    Meters {
        on_answer: Box::new(move |route, method, status| {
            counting.http_answered(route, method, status.as_u16());
        }),
        scrape: Box::new(move |queued, in_flight| scraping.scrape(Sampled { queued, in_flight })),
    }
}

async fn keep_up(telemetry: Arc<Telemetry>) {
    loop {
        tokio::time::sleep(UPKEEP).await;
        telemetry.upkeep();
    }
}

/// The tools of this configuration, and the skills that one of them reads.
fn tools(config: &Config, recollect: Recollect) -> (Arc<Registry>, Arc<Skills>) {
    let skills = Arc::new(Skills::load(&config.skills_dir));
    let mut registry = Registry::builtin();
    registry.add(runtime::use_skill(&skills));
    registry.add(Arc::new(Recall::new(recollect)));
    (Arc::new(registry), skills)
}

fn load_agents(
    config: &Config,
    router: &Arc<Router>,
    registry: &Arc<Registry>,
    skills: &Arc<Skills>,
) -> Catalogue {
    let (router, registry, known) = (Arc::clone(router), Arc::clone(registry), Arc::clone(skills));
    Catalogue::load(
        &config.agents_dir,
        Arc::clone(skills),
        Box::new(move |definition| {
            demands::check_definition(definition, &router).map_err(|unmet| unmet.to_string())?;
            runtime::check_tools(&registry, &known, definition)
        }),
    )
}

/// The model providers of this configuration, and what is known of their models.
///
/// # Errors
/// A provider cannot be set up.
pub fn router(config: &Config) -> Result<Router, AppError> {
    let mut providers = BTreeMap::new();
    for (name, model) in &config.models {
        let entry = match model {
            Model::Scripted { dir } => {
                let scripted = Arc::new(Scripted::new(dir.clone()));
                ProviderEntry { kind: ProviderKind::Scripted, ..ProviderEntry::new(scripted) }
            }
            Model::Server(server) => ProviderEntry {
                provider: model_server(name, server)
                    .map_err(|message| AppError::Provider { name: name.clone(), message })?,
                kind: match server.api {
                    ModelApi::Openai => ProviderKind::Openai,
                    ModelApi::OpenaiResponses => ProviderKind::OpenaiResponses,
                    ModelApi::Anthropic => ProviderKind::Anthropic,
                    ModelApi::Ollama { .. } => ProviderKind::Ollama,
                },
                max_retries: server.max_retries,
                timeout: server.timeout,
                max_concurrency: server.max_concurrency,
            },
        };
        providers.insert(name.clone(), entry);
    }
    Ok(Router::new(providers)
        .with_tables(model_tables::capabilities(config), model_tables::prices(config)))
}

fn model_server(name: &str, server: &ModelServer) -> Result<Arc<dyn Provider>, String> {
    let headers =
        server.headers.iter().map(|(key, value)| (key.clone(), value.expose_secret().to_owned()));
    let settings = WireSettings {
        name: name.to_owned(),
        base_url: server.base_url.parse().map_err(|e| format!("base_url: {e}"))?,
        api_key: server.api_key.clone(),
        headers: headers.collect(),
        connect_timeout: server.connect_timeout,
        first_byte_timeout: server.first_byte_timeout,
        idle_timeout: server.idle_timeout,
    };
    let provider: Arc<dyn Provider> = match server.api {
        ModelApi::Openai => Arc::new(OpenAi::new(settings).map_err(|e| e.to_string())?),
        ModelApi::OpenaiResponses => Arc::new(Responses::new(settings).map_err(|e| e.to_string())?),
        ModelApi::Anthropic => Arc::new(Anthropic::new(settings).map_err(|e| e.to_string())?),
        ModelApi::Ollama { .. } => Arc::new(Ollama::new(settings).map_err(|e| e.to_string())?),
    };
    Ok(provider)
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

/// What a person who has just started the service wants to know.
fn greet(address: SocketAddr, parts: &Parts, first_key: Option<&str>) {
    let agents: Vec<String> =
        parts.catalogue.agents().iter().map(|a| a.definition.name.clone()).collect();
    tracing::info!(%address, store = parts.store.kind(), agents = agents.join(" "), "listening");
    if let Some(key) = first_key {
        println!(
            "This is the administrator's key. It is shown only now:\n\n    export TOOLLOOP_KEY={key}\n\n\
             Then, in another terminal:\n\n    curl -s http://{address}/v1/agents/repo-guide/invoke-iterative \\\n      \
             -H \"Authorization: Bearer $TOOLLOOP_KEY\" -H 'Content-Type: application/json' \\\n      \
             -d '{{\"inputs\": {{\"path\": \".\"}}}}'\n"
        );
    }
}

/// SIGTERM and SIGINT, heard from the moment this is made.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn listen() -> Result<Self, AppError> {
        let hear = |kind| signal(kind).map_err(AppError::Serve);
        Ok(Self {
            terminate: hear(SignalKind::terminate())?,
            interrupt: hear(SignalKind::interrupt())?,
        })
    }

    async fn first(mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
