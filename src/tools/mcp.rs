//! Servers of the Model Context Protocol, whose tools are `mcp:<server>/<tool>`.
//!
//! A server may be down, come back and list other tools at any time. Agents that name its tools load in
//! any case, and every call gets an answer. This file knows the servers and finds their tools. The parts
//! of a connection are in `mcp/`: `server` is its life cycle, `pipes` and `http` the two transports,
//! `messages` the protocol, `era` the detection of its two forms, `lines` reading a pipe, `listing` the
//! tools of a list that can be offered, `header_parameters` the arguments that headers repeat, `answer` results
//! for the model, `elicitation` questions to a person, and `tool` a call.
//!
//! The protocol is implemented here and not by a library, so that a hostile server's lines, lists and
//! answers are bounded before they are parsed. Programs run in the sandbox, and HTTP requests go through
//! the outbound client.

mod answer;
mod elicitation;
mod era;
mod header_parameters;
mod http;
mod lines;
mod link;
mod listing;
mod messages;
mod pipes;
mod reading;
mod server;
mod tool;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::join_all;
use parking_lot::Mutex;
use tokio_util::task::AbortOnDropHandle;

pub use super::programs::secrets_among;
use super::proxy::Proxy;
use super::sandbox::Sandbox;
use super::{Tool, ToolInfo, ToolNow};
use crate::bounds::name::means;
use crate::outbound::Client;
pub use listing::Declared;
pub use server::{Connection, Settings};
use server::{Dependencies, Server};
use tool::{McpTool, Missing};

/// How names of these tools begin.
pub const PREFIX: &str = "mcp:";

/// All servers of the service.
pub struct Servers {
    by_name: BTreeMap<String, Arc<Server>>,
    generation: Arc<AtomicU64>,
    driven: Mutex<Vec<AbortOnDropHandle<()>>>,
}

/// The current state of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerStatus {
    pub name: String,
    /// Tools that it listed last.
    pub tools: usize,
    /// Why it is not available, as a sentence.
    pub fault: Option<String>,
    /// The last lines of a program's standard error, of which control characters are escaped.
    pub last_words: Vec<String>,
    /// Problems of its list of tools.
    pub warnings: Vec<String>,
}

impl Servers {
    /// Creates the servers without starting them.
    pub fn new(
        settings: Vec<Settings>,
        sandbox: &Arc<Sandbox>,
        client: &Client,
        proxy: &Proxy,
    ) -> Self {
        let generation = Arc::<AtomicU64>::default();
        let server = |settings: Settings| {
            let dependencies = Dependencies {
                sandbox: Arc::clone(sandbox),
                client: client.clone(),
                proxy: proxy.clone(),
                generation: Arc::clone(&generation),
            };
            (settings.name.clone(), Arc::new(Server::new(settings, dependencies)))
        };
        let by_name = settings.into_iter().map(server).collect();
        Self { by_name, generation, driven: Mutex::default() }
    }

    /// Starts all of them, and waits until each is up or down, at most for `most`.
    pub async fn start(&self, most: Duration) {
        {
            let mut driven = self.driven.lock();
            if driven.is_empty() {
                let drive = |server: &Arc<Server>| {
                    AbortOnDropHandle::new(tokio::spawn(Arc::clone(server).run()))
                };
                driven.extend(self.by_name.values().map(drive));
            }
        }
        let settled = join_all(self.by_name.values().map(|server| server.settled()));
        let _ = tokio::time::timeout(most, settled).await; // the others come later
    }

    /// Ends all of them.
    pub fn stop(&self) {
        self.driven.lock().clear();
    }

    /// Counts changes of what the servers list.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    pub fn statuses(&self) -> Vec<ServerStatus> {
        let status = |server: &Arc<Server>| ServerStatus {
            name: server.name().to_owned(),
            tools: server.tools().len(),
            fault: server.fault(),
            last_words: server.last_words(),
            warnings: server.warnings(),
        };
        self.by_name.values().map(status).collect()
    }

    /// For each server of which no tool is known, one placeholder for all of them.
    pub fn stand_ins(&self) -> Vec<ToolNow> {
        let unknown = self.by_name.values().filter(|server| tools_of(server).is_empty());
        let stand_in = |server: &Arc<Server>| {
            let info = listing::info(server.name(), "*", listing::UNDECLARED);
            let name = server.name();
            ToolNow {
                info: ToolInfo {
                    description: format!(
                        "The tools of the MCP server {name}, which are not known."
                    ),
                    ..info
                },
                runs_programs: server.sandbox_level().is_some(),
                may_lead_out: server.leads_out(),
                unavailable: server.fault(),
            }
        };
        unknown.filter(|server| server.fault().is_some()).map(stand_in).collect()
    }

    /// The listed tools of all servers, sorted by server and name. For a server that has not listed
    /// anything, these are the tools that the operator declared.
    pub fn tools(&self) -> Vec<Arc<dyn Tool>> {
        self.by_name.values().flat_map(tools_of).collect()
    }

    /// The tool of that name, or a placeholder if its server does not list it.
    pub fn tool(&self, name: &str) -> Option<Arc<dyn Tool>> {
        let (server, own_name) = name.strip_prefix(PREFIX)?.split_once('/')?;
        let server = self.by_name.get(server)?;
        if own_name.is_empty() || own_name.contains('*') {
            return None;
        }
        let tools = server.tools();
        let described = tools.iter().find(|tool| tool.own_name == own_name);
        Some(match described {
            Some(described) => {
                Arc::new(McpTool { described: described.clone(), server: Arc::clone(server) })
            }
            None => missing(server, own_name),
        })
    }

    /// Whether a name or glob may match tools of these servers, whatever they list now.
    pub fn may_have(&self, pattern: &str) -> bool {
        self.by_name.keys().any(|server| may_mean(pattern, server))
    }

    /// The servers that have not listed anything, and whose tools a glob may match.
    pub fn unlisted(&self, pattern: &str) -> impl Iterator<Item = Unlisted> {
        let meant = self.by_name.values().filter(move |server| {
            pattern.contains('*') && !server.is_listed() && may_mean(pattern, server.name())
        });
        meant
            .map(move |server| Unlisted { pattern: pattern.to_owned(), server: Arc::clone(server) })
    }

    /// The currently listed tools that a name with `*` in it matches.
    pub fn meant<'a>(&self, pattern: &'a str) -> impl Iterator<Item = Arc<dyn Tool>> + use<'a> {
        self.tools().into_iter().filter(move |tool| means(pattern, &tool.info().name))
    }
}

/// A server that has not listed anything, and what a definition calls its tools.
pub struct Unlisted {
    pattern: String,
    server: Arc<Server>,
}

impl Unlisted {
    /// How the names of its tools begin.
    pub fn beginning(&self) -> String {
        beginning(self.server.name())
    }

    /// Whether a tool of that name would be one of those.
    pub fn has(&self, name: &str) -> bool {
        name.starts_with(&self.beginning()) && means(&self.pattern, name)
    }

    /// Why its tools cannot be called: a sentence.
    pub fn why(&self) -> String {
        let name = self.server.name();
        let since = || format!("The MCP server {name} was not there when this run began.");
        self.server.fault().unwrap_or_else(since)
    }
}

/// How the names of a server's tools begin.
fn beginning(server: &str) -> String {
    format!("{PREFIX}{server}/")
}

fn may_mean(pattern: &str, server: &str) -> bool {
    let literal = pattern.split(['*', '?', '[', '{']).next().unwrap_or_default();
    let beginning = beginning(server);
    beginning.starts_with(literal) && pattern != literal || literal.starts_with(&beginning)
}

fn missing(server: &Arc<Server>, own_name: &str) -> Arc<dyn Tool> {
    let declared = server.effects().get(own_name).copied().unwrap_or(listing::UNDECLARED);
    let info = listing::info(server.name(), own_name, declared);
    Arc::new(Missing { info, server: Arc::clone(server) })
}

fn tools_of(server: &Arc<Server>) -> Vec<Arc<dyn Tool>> {
    if !server.is_listed() {
        return server.effects().keys().map(|own_name| missing(server, own_name)).collect();
    }
    let tools = server.tools();
    let tool = |described: &listing::Described| -> Arc<dyn Tool> {
        Arc::new(McpTool { described: described.clone(), server: Arc::clone(server) })
    };
    tools.iter().map(tool).collect()
}
