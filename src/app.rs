//! Puts the parts together: the only place that picks concrete types, and the order in which they
//! start and stop.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use secrecy::ExposeSecret;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::agents::{Catalogue, catalogue};
use crate::config::{AuthMode, Config, Model};
use crate::event::Event;
use crate::http::{self, Auth, HttpSettings, HttpState};
use crate::providers::openai::{OpenAi, OpenAiSettings};
use crate::providers::router::{ProviderEntry, Router};
use crate::providers::scripted::Scripted;
use crate::run::{Caller, Overrides, RunKind};
use crate::runtime::{
    self, Accepted, HeartbeatStore, Mode, Runtime, Settings, StartError, StartRequest, WaitError, keys,
};
use crate::store::{self, RateLimit, Store, StoreError};
use crate::tools::registry::Registry;

/// How often agent files are looked at.
const RELOAD: Duration = Duration::from_secs(1);
/// How long connections may stay open after the last run has ended.
const LAST_WAIT: Duration = Duration::from_secs(2);
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
    /// The first key.
    #[error(transparent)]
    Key(#[from] keys::KeyError),
    /// The listener failed while serving, or signals cannot be heard.
    #[error("the service cannot go on: {0}")]
    Serve(std::io::Error),
    /// The run was refused.
    #[error(transparent)]
    Refused(#[from] StartError),
    /// The run's end is not known here.
    #[error(transparent)]
    Detached(#[from] WaitError),
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
/// The service cannot start, or its listener failed.
pub async fn serve(config: Config) -> Result<(), AppError> {
    let parts = Parts::assemble(&config).await?;
    let listener = listen(config.server.listen)?;
    let signals = Signals::listen()?;
    parts.join(&config).await?;
    let first_key = match config.auth.mode {
        AuthMode::ApiKey => keys::bootstrap(parts.store.as_ref(), config.admin_key.as_ref()).await?,
        AuthMode::None => None,
    };
    let stop = CancellationToken::new();
    tokio::spawn(catalogue::watch(Arc::clone(&parts.catalogue), RELOAD, stop.clone()));

    let state = HttpState {
        runtime: parts.runtime.clone(),
        store: Arc::clone(&parts.store),
        catalogue: Arc::clone(&parts.catalogue),
        tools: Arc::new(parts.registry.infos().cloned().collect()),
        auth: match config.auth.mode {
            AuthMode::ApiKey => Auth::ApiKeys,
            AuthMode::None => Auth::None,
        },
    };
    let settings = HttpSettings {
        body_limit: config.server.body_limit,
        request_timeout: config.server.request_timeout,
        rate_limit: RateLimit {
            per_minute: config.governance.rate_limit_per_minute,
            burst: config.governance.rate_limit_burst,
        },
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
    let server = axum::serve(listener, http::router(state, settings)).with_graceful_shutdown(draining);
    let last_answers = async {
        drained.cancelled().await;
        tokio::time::sleep(LAST_WAIT).await;
    };
    let outcome = tokio::select! {
        ended = server => ended.map_err(AppError::Serve),
        () = last_answers => {
            tracing::warn!("connections were still open after the last run");
            Ok(())
        }
    };
    stop.cancel();
    parts.runtime.leave().await;
    parts.store.close().await;
    outcome
}

/// Runs an agent in this process and answers what the API would. Ctrl-C cancels the run, and the
/// answer says so.
///
/// # Errors
/// No run was started.
pub async fn invoke(
    config: Config,
    agent: &str,
    inputs: Value,
    kind: RunKind,
    progress: impl Fn(&Event) + Send + Sync + 'static,
) -> Result<Value, AppError> {
    let parts = Parts::assemble(&config).await?;
    parts.join(&config).await?;
    let run_id = Uuid::now_v7();
    let mut events = parts.runtime.follow_new(keys::DEFAULT_TENANT, run_id);
    let accepted = parts
        .runtime
        .start(StartRequest {
            caller: Arc::new(Caller::local()),
            agent: agent.to_owned(),
            kind,
            mode: Mode::Now,
            idempotency: None,
            traceparent: None,
            run_id: Some(run_id),
            inputs,
            metadata: BTreeMap::new(),
            session_id: None,
            overrides: Overrides::default(),
        })
        .await?;
    let Accepted::Started(started) = accepted else {
        return Err(AppError::Detached(WaitError::Detached(run_id)));
    };
    loop {
        tokio::select! {
            biased;
            next = events.next() => match next? {
                Some(published) => progress(&published.event),
                None => break,
            },
            _ = tokio::signal::ctrl_c() => {
                parts.runtime.cancel(keys::DEFAULT_TENANT, run_id, Some("interrupted at the terminal")).await?;
            }
        }
    }
    let ended = started.finished().await;
    parts.runtime.drain(config.server.shutdown_grace).await;
    parts.runtime.leave().await;
    parts.store.close().await;
    Ok(http::answer(&ended?))
}

/// What is wrong with the agents and models of this configuration, one line each.
pub fn check(config: &Config) -> Vec<String> {
    let router = match router(config) {
        Ok(router) => Arc::new(router),
        Err(error) => return vec![error.to_string()],
    };
    let catalogue = load_agents(config, &router, &Arc::new(Registry::builtin()));
    catalogue.problems().into_iter().map(|problem| format!("{}: {}", problem.file, problem.error)).collect()
}

/// The service without its listener.
struct Parts {
    store: Arc<dyn Store>,
    catalogue: Arc<Catalogue>,
    registry: Arc<Registry>,
    runtime: Runtime,
}

impl Parts {
    async fn assemble(config: &Config) -> Result<Self, AppError> {
        let router = Arc::new(router(config)?);
        let registry = Arc::new(Registry::builtin());
        let catalogue = Arc::new(load_agents(config, &router, &registry));
        for problem in catalogue.problems() {
            tracing::error!(file = problem.file, error = problem.error, "agent not loaded");
        }
        let store = open_store(config).await?;
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
        };
        let runtime = Runtime::new(Arc::clone(&store), Arc::clone(&catalogue), router, Arc::clone(&registry), settings);
        Ok(Self { store, catalogue, registry, runtime })
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

fn load_agents(config: &Config, router: &Arc<Router>, registry: &Arc<Registry>) -> Catalogue {
    let (router, registry) = (Arc::clone(router), Arc::clone(registry));
    Catalogue::load(
        &config.agents_dir,
        Box::new(move |definition| {
            router.resolve(&definition.model).map_err(|e| format!("model: {e}"))?;
            runtime::check_tools(&registry, definition)
        }),
    )
}

fn router(config: &Config) -> Result<Router, AppError> {
    let mut providers = BTreeMap::new();
    for (name, model) in &config.models {
        let entry = match model {
            Model::Scripted { dir } => ProviderEntry::new(Arc::new(Scripted::new(dir.clone()))),
            Model::Openai(settings) => {
                let broken = |message: String| AppError::Provider { name: name.clone(), message };
                let provider = OpenAi::new(OpenAiSettings {
                    name: name.clone(),
                    base_url: settings.base_url.parse().map_err(|e| broken(format!("base_url: {e}")))?,
                    api_key: settings.api_key.clone(),
                    headers: settings
                        .headers
                        .iter()
                        .map(|(key, value)| (key.clone(), value.expose_secret().to_owned()))
                        .collect(),
                    connect_timeout: settings.connect_timeout,
                });
                ProviderEntry {
                    provider: Arc::new(provider.map_err(|e| broken(e.to_string()))?),
                    max_retries: settings.max_retries,
                    timeout: settings.timeout,
                }
            }
        };
        providers.insert(name.clone(), entry);
    }
    Ok(Router::new(providers))
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
    let agents: Vec<String> = parts.catalogue.agents().iter().map(|a| a.definition.name.clone()).collect();
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
        Ok(Self { terminate: hear(SignalKind::terminate())?, interrupt: hear(SignalKind::interrupt())? })
    }

    async fn first(mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
