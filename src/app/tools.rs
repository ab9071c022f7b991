//! Assembles the tools, and loads the agents that use them.
//!
//! This file decides where the settings of tools come from, not what the tools do.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use secrecy::ExposeSecret;

use crate::agents::{Catalogue, DefinitionError, DefinitionProblem, Skills};
use crate::bounds::secrets;
use crate::config::{
    self, Config, McpConnection, McpEffect, McpNetwork, McpServer, SECRET_PLACEHOLDER,
    UnsetVariables,
};
use crate::engine::requirements;
use crate::outbound::Client;
use crate::providers::router::Router;
use crate::run::Effect;
use crate::runtime;
use crate::tools::ToolNow;
use crate::tools::browser::{Browser, BrowserSettings, Viewport};
use crate::tools::credentials::{Credential, Credentials};
use crate::tools::declared::{BrokenFile, Declared, Dependencies, Environment};
use crate::tools::mcp::{self, ServerStatus, Servers};
use crate::tools::proxy::{Hosts, Proxy};
use crate::tools::recall::{Recall, RecallFn};
use crate::tools::registry::Registry;
use crate::tools::sandbox::{self, Sandbox};
use crate::tools::web_fetch::{WebFetch, WebFetchSettings};

/// Where MCP servers have their own directories, beneath the workspace's; no tenant can have its name.
const MCP_DIRECTORIES: &str = ".mcp";

/// How long the start waits for MCP servers.
const FIRST_SERVERS: Duration = Duration::from_secs(5);

/// The sandbox of programs. The features of the kernel are not checked yet.
pub fn sandbox(config: &Config) -> Arc<Sandbox> {
    let shell = &config.tools.shell;
    Arc::new(Sandbox::new(sandbox::Settings {
        path: shell.path.clone(),
        environment: shell.env.clone(),
        require: shell.require_sandbox,
        timeout: shell.timeout,
        max_output: shell.max_output,
        limits: sandbox::Limits {
            memory: shell.memory as u64,
            cpu_seconds: shell.cpu_seconds,
            processes: shell.processes,
            file_size: shell.file_size as u64,
            open_files: shell.open_files,
        },
        namespaces: true,
        supervisor: "/proc/self/exe".into(),
    }))
}

/// The tools, the skills that `use_skill` reads, and the files of tools that did not load.
pub(super) struct Tools {
    pub(super) registry: Arc<Registry>,
    skills: Arc<Skills>,
    broken: Vec<DefinitionProblem>,
    /// Other mistakes in these files.
    pub(super) also_wrong: Vec<DefinitionProblem>,
    /// Features that imported operations do not support.
    pub(super) left_out: Vec<DefinitionProblem>,
    /// The environment variables that files of tools ask for, each with the first of them.
    pub(super) variables: BTreeMap<String, String>,
}

impl Tools {
    pub(super) fn skills(&self) -> &Arc<Skills> {
        &self.skills
    }
}

pub(super) fn configured(config: &Config, recollect: RecallFn, sandbox: Arc<Sandbox>) -> Tools {
    configured_with(config, recollect, sandbox, &|name| std::env::var(name).ok())
}

/// The tools as far as they are known without their secrets: placeholders stand in for variables
/// that are not set, and those are added to `unset`.
pub(super) fn without_secrets(config: &Config, unset: &mut UnsetVariables) -> Tools {
    let asked = RefCell::new(BTreeSet::new());
    let variable = |name: &str| {
        let value = std::env::var(name).ok().filter(|value| !value.is_empty());
        value.or_else(|| {
            asked.borrow_mut().insert(name.to_owned());
            Some(SECRET_PLACEHOLDER.to_owned())
        })
    };
    let tools = configured_with(config, no_memory(), sandbox(config), &variable);
    let broken = mistakes(config);
    let asked = asked.into_inner();
    for (server, settings) in &config.mcp {
        let McpConnection::Program { env, .. } = &settings.connection else { continue };
        for name in env.iter().filter(|name| asked.contains(*name)) {
            unset.entry(name.clone()).or_insert_with(|| format!("mcp.{server}.env"));
        }
    }
    for (name, file) in tools.variables.iter().filter(|(name, _)| asked.contains(*name)) {
        let is_needed = broken.contains_key(file);
        let without = if is_needed { ": its tools are left out until it is" } else { "" };
        unset.entry(name.clone()).or_insert_with(|| format!("{file}{without}"));
    }
    tools
}

/// The tools that a service would have if it was started now.
pub(super) fn loaded_anew(config: &Config) -> Tools {
    configured(config, no_memory(), sandbox(config))
}

/// The current mistakes in files of tools, by the names that problems use for the files.
pub(super) fn mistakes(config: &Config) -> BTreeMap<String, String> {
    let Tools { broken, .. } = loaded_anew(config);
    broken.into_iter().map(|DefinitionProblem { file, error }| (file, error)).collect()
}

fn configured_with(
    config: &Config,
    recollect: RecallFn,
    sandbox: Arc<Sandbox>,
    variable: Environment<'_>,
) -> Tools {
    let skills = Arc::new(Skills::load(&config.skills_dir));
    let mut registry = Registry::builtin();
    registry.add(runtime::use_skill(&skills));
    registry.add(Arc::new(Recall::new(recollect)));
    let client = Client::new();
    let config::WebFetch { max_body, timeout, user_agent, robots, content_types } =
        config.tools.web_fetch.clone();
    let settings = WebFetchSettings { max_body, timeout, user_agent, robots, content_types };
    registry.add(Arc::new(WebFetch::new(client.clone(), settings)));
    let proxy = Proxy::new(client.clone(), credentials(&config.credentials));
    registry.add(Arc::new(Browser::new(client.clone(), browser_settings(config))));
    registry.ask(Arc::new(mcp_servers_with(config, &sandbox, (&client, &proxy), variable)));
    let dependencies =
        Dependencies { environment: variable, client: &client, proxy: &proxy, sandbox: &sandbox };
    let declared = Declared::load(&config.tools_dir, dependencies);
    registry.run_programs_in(sandbox, proxy);
    for tool in declared.tools {
        registry.add(tool);
    }
    let shown = |file: String| format!("tools/{file}");
    let problem = |(file, error): (String, String)| DefinitionProblem { file: shown(file), error };
    let (mut broken, mut also_wrong) = (Vec::new(), Vec::new());
    for BrokenFile { file, error, others } in declared.broken {
        also_wrong.extend(others.into_iter().map(|error| problem((file.clone(), error))));
        broken.push(problem((file, error)));
    }
    let left_out = declared.left_out.into_iter().map(problem).collect();
    let variables = declared.variables.into_iter().map(|(name, file)| (name, shown(file)));
    let (registry, variables) = (Arc::new(registry), variables.collect());
    Tools { registry, skills, broken, also_wrong, left_out, variables }
}

/// The MCP servers; none of them is started.
pub fn mcp_servers(config: &Config) -> Servers {
    let (client, sandbox) = (Client::new(), sandbox(config));
    let proxy = Proxy::new(client.clone(), Credentials::default());
    mcp_servers_with(config, &sandbox, (&client, &proxy), &|name| std::env::var(name).ok())
}

fn mcp_servers_with(
    config: &Config,
    sandbox: &Arc<Sandbox>,
    (client, proxy): (&Client, &Proxy),
    variable: Environment<'_>,
) -> Servers {
    let settings = |(name, server): (&String, &McpServer)| {
        let connection = match server.connection.clone() {
            McpConnection::Program { command, args, env, cwd, reads, network } => {
                let McpNetwork { written, listed, private } = network;
                let network = Arc::new(Hosts { listed, written, private });
                let value = |name: String| Some((name.clone(), variable(&name)?));
                let variables: Vec<(String, String)> = env.into_iter().filter_map(value).collect();
                secrets::remember(mcp::secrets_among(&variables));
                let own = Path::new(MCP_DIRECTORIES).join(name);
                let own = config.tools.workspace.dir.join(own);
                let directory = cwd.unwrap_or(std::path::absolute(&own).unwrap_or(own));
                mcp::Connection::Program { command, args, variables, directory, reads, network }
            }
            McpConnection::Address { url, api_key, api_key_env } => {
                secrets::remember(api_key.iter().map(|key| key.expose_secret().to_owned()));
                let missing_key = api_key_env.filter(|_| api_key.is_none());
                mcp::Connection::Address { url, key: api_key, missing_key }
            }
        };
        let effects = server.effects.iter().map(|(tool, effect)| (tool.clone(), declared(*effect)));
        mcp::Settings { name: name.clone(), connection, effects: effects.collect() }
    };
    Servers::new(config.mcp.iter().map(settings).collect(), sandbox, client, proxy)
}

/// Gives each request for the list of tools the current ones.
pub(super) fn tool_list(registry: &Arc<Registry>) -> Arc<dyn Fn() -> Vec<ToolNow> + Send + Sync> {
    let registry = Arc::clone(registry);
    Arc::new(move || registry.now())
}

/// Gives each readiness check the current state of the MCP servers.
pub(super) fn server_list(
    registry: &Arc<Registry>,
) -> Arc<dyn Fn() -> Vec<ServerStatus> + Send + Sync> {
    let registry = Arc::clone(registry);
    Arc::new(move || registry.servers().map(|it| it.statuses()).unwrap_or_default())
}

/// Starts the MCP servers, and waits a little, so that the first runs have their tools.
pub(super) async fn start_servers(registry: &Registry) {
    if let Some(servers) = registry.servers() {
        servers.start(FIRST_SERVERS).await;
    }
}

pub(super) fn stop_servers(registry: &Registry) {
    if let Some(servers) = registry.servers() {
        servers.stop();
    }
}

fn declared(effect: McpEffect) -> mcp::Declared {
    let (effect, destructive) = match effect {
        McpEffect::Read => (Effect::Read, false),
        McpEffect::Idempotent => (Effect::Idempotent, false),
        McpEffect::Once => (Effect::Once, false),
        McpEffect::Destructive => (Effect::Once, true),
    };
    mcp::Declared { effect, destructive }
}

fn credentials(configured: &BTreeMap<String, config::Credential>) -> Credentials {
    let given = |name: &String, credential: &config::Credential| {
        let config::Credential { url, header, secret, token_env } = credential.clone();
        let secret = secret.ok_or_else(|| {
            format!("[tools.credentials.{name}] needs the environment variable {token_env}, which is not set")
        })?;
        secrets::remember([secret.token]);
        Ok(Credential { url, header, value: secret.value })
    };
    configured.iter().map(|(name, it)| (name.clone(), given(name, it))).collect()
}

fn browser_settings(config: &Config) -> BrowserSettings {
    let config::Browser { path, timeout, pages, viewport } = config.tools.browser.clone();
    let (width, height) = viewport;
    BrowserSettings { path, timeout, pages, viewport: Viewport { width, height } }
}

pub(super) fn load_agents(
    config: &Config,
    router: &Arc<Router>,
    Tools { registry, skills, broken, .. }: &Tools,
) -> Catalogue {
    let (router, registry, known) = (Arc::clone(router), Arc::clone(registry), Arc::clone(skills));
    let catalogue = Catalogue::load(
        &config.agents_dir,
        Arc::clone(skills),
        Box::new(move |definition| {
            requirements::check_definition(definition, &router).map_err(|unsupported| {
                DefinitionError::at(unsupported.key(), unsupported.reason)
            })?;
            runtime::check_tools(&registry, &known, definition)
        }),
    );
    catalogue.with_other_problems(broken.clone())
}

/// The recall function of a process that executes no runs.
pub(super) fn no_memory() -> RecallFn {
    Arc::new(|_| Box::pin(async { Err("no run is executed here".to_owned()) }))
}
