//! All tools by name, and which of them a definition means.
//!
//! A name or glob that matches no tool is an error when a definition is loaded, and not only in a run.
//! Tools of MCP servers come and go, so a name or glob that may match one of them is no error.

use std::collections::BTreeMap;
use std::sync::Arc;

use uuid::Uuid;

use super::credentials::Credential;
use super::file_ops::FileOps;
use super::mcp::{Servers, Unlisted};
use super::proxy::{Proxy, ServerRequests};
use super::recall::Recall;
use super::sandbox::Sandbox;
use super::sandbox::plan::Confinement;
use super::shell::Shell;
use super::{Tool, ToolNow};
use crate::bounds::name::means;
use crate::governance::CommandRules;
use crate::run::Labels;

/// A name or glob of a definition that no tool has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no tool named {0:?}")]
pub struct UnknownTool(pub String);

/// The tools of the service.
#[derive(Default)]
pub struct Registry {
    tools: BTreeMap<String, Arc<dyn Tool>>,
    programs: Option<(Arc<Sandbox>, Proxy)>,
    servers: Option<Arc<Servers>>,
}

impl Registry {
    /// The tools that need no configuration. `recall` finds nothing until it is replaced.
    pub fn builtin() -> Self {
        let mut registry = Self::default();
        registry.add(Arc::new(FileOps::new()));
        registry.add(Arc::new(Recall::new(Arc::new(|_| {
            Box::pin(async { Ok((Vec::new(), Labels::default())) })
        }))));
        registry
    }

    /// Adds the tool that runs programs. It runs none until an agent's rules say which.
    pub fn run_programs_in(&mut self, sandbox: Arc<Sandbox>, proxy: Proxy) {
        self.programs = Some((sandbox, proxy));
        if let Some(shell) = self.shell(Arc::default(), false) {
            self.add(Arc::new(shell));
        }
    }

    /// The tool that runs programs, for an agent with these rules.
    pub fn shell(&self, rules: Arc<CommandRules>, has_network: bool) -> Option<Shell> {
        let (sandbox, proxy) = self.programs.as_ref()?;
        Some(Shell::new(Arc::clone(sandbox), proxy.clone(), rules, has_network))
    }

    /// The secret of that name, for requests of programs.
    ///
    /// # Errors
    /// Why there is none: a phrase.
    pub fn credential(&self, name: &str) -> Result<&Credential, String> {
        let known = self.programs.as_ref().and_then(|(_, proxy)| proxy.credentials().get(name));
        let known = known.ok_or_else(|| format!("there is no [tools.credentials.{name}]"))?;
        known.as_ref().map_err(Clone::clone)
    }

    /// The network requests of MCP servers that are programs.
    pub fn requests_of_servers(&self) -> Option<&ServerRequests> {
        Some(self.programs.as_ref()?.1.requests_of_servers())
    }

    /// How well programs are confined, if that is known.
    pub fn confinement(&self) -> Option<&Confinement> {
        let (sandbox, _) = self.programs.as_ref()?;
        Some(&sandbox.known_kernel()?.confinement)
    }

    /// Adds the tools that these servers list, whatever those are.
    pub fn ask(&mut self, servers: Arc<Servers>) {
        self.servers = Some(servers);
    }

    /// The MCP servers, whose tools may change.
    pub fn servers(&self) -> Option<&Arc<Servers>> {
        self.servers.as_ref()
    }

    /// A number that increases with every change of the set of tools.
    pub fn generation(&self) -> u64 {
        self.servers.as_ref().map_or(0, |servers| servers.generation())
    }

    /// Whether a name or glob may mean tools that are not available now.
    pub fn may_have(&self, pattern: &str) -> bool {
        self.servers.as_ref().is_some_and(|servers| servers.may_have(pattern))
    }

    /// The servers that have not listed anything, of which a list of names and globs may mean tools.
    pub fn unlisted(&self, names: &[String]) -> Vec<Unlisted> {
        let servers = self.servers.iter();
        servers.flat_map(|it| names.iter().flat_map(|name| it.unlisted(name))).collect()
    }

    /// Adds a tool, in place of one of the same name.
    pub fn add(&mut self, tool: Arc<dyn Tool>) {
        self.tools.insert(tool.info().name.clone(), tool);
    }

    /// Whether a tool has this name.
    pub fn has(&self, name: &str) -> bool {
        let is_of_server = |servers: &Arc<Servers>| servers.tool(name).is_some();
        self.tools.contains_key(name) || self.servers.as_ref().is_some_and(is_of_server)
    }

    /// The tools that a list of names and globs means, each once, in the order of the list.
    ///
    /// # Errors
    /// The first entry that means no tool.
    pub fn resolve(&self, names: &[String]) -> Result<Vec<Arc<dyn Tool>>, UnknownTool> {
        let mut tools: Vec<Arc<dyn Tool>> = Vec::new();
        for name in names {
            let has_it = self.tools.contains_key(name);
            let is_own = |tool: &str| if has_it { tool == name } else { means(name, tool) };
            let own = self.tools.iter().filter(|(tool, _)| is_own(tool));
            let mut meant: Vec<Arc<dyn Tool>> = own.map(|(_, tool)| Arc::clone(tool)).collect();
            if let Some(servers) = &self.servers {
                match servers.tool(name) {
                    Some(tool) => meant.push(tool),
                    None => meant.extend(servers.meant(name)),
                }
            }
            if meant.is_empty() && !self.may_have(name) {
                return Err(UnknownTool(name.clone()));
            }
            for tool in meant {
                if !tools.iter().any(|known| known.info().name == tool.info().name) {
                    tools.push(tool);
                }
            }
        }
        Ok(tools)
    }

    /// This replica does not drive a run any more.
    pub fn release_run(&self, run: Uuid, is_parked: bool) {
        for tool in self.tools.values() {
            tool.release_run(run, is_parked);
        }
    }

    /// Every tool, by name.
    pub fn tools(&self) -> Vec<Arc<dyn Tool>> {
        let servers = self.servers.iter().flat_map(|servers| servers.tools());
        let mut all: Vec<Arc<dyn Tool>> = self.tools.values().cloned().chain(servers).collect();
        all.sort_by(|one, other| one.info().name.cmp(&other.info().name));
        all
    }

    /// Every tool in its current state, by name, and for a server of which no tool is known one
    /// placeholder for all of them.
    pub fn now(&self) -> Vec<ToolNow> {
        let now = |tool: &Arc<dyn Tool>| ToolNow {
            info: tool.info().clone(),
            runs_programs: tool.sandbox_level().is_some(),
            may_lead_out: tool.may_lead_out(),
            unavailable: tool.unavailable(),
        };
        let mut all: Vec<ToolNow> = self.tools().iter().map(now).collect();
        all.extend(self.servers.iter().flat_map(|servers| servers.stand_ins()));
        all.sort_by(|one, other| one.info.name.cmp(&other.info.name));
        all
    }
}
