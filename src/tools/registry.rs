//! All tools by name, and which of them a definition means.
//!
//! A name or glob that means no tool is an error when a definition is loaded, and not a surprise in
//! a run.

use std::collections::BTreeMap;
use std::sync::Arc;

use uuid::Uuid;

use super::credentials::Credential;
use super::file_ops::FileOps;
use super::proxy::Proxy;
use super::recall::Recall;
use super::sandbox::Sandbox;
use super::sandbox::plan::Holds;
use super::shell::Shell;
use super::{Tool, ToolInfo};
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
}

impl Registry {
    /// The tools that need no configuration. Nothing is remembered until `recall` is replaced by
    /// one that does.
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

    /// What confines programs, where that is known.
    pub fn holds(&self) -> Option<&Holds> {
        let (sandbox, _) = self.programs.as_ref()?;
        Some(&sandbox.known_kernel()?.holds)
    }

    /// Adds a tool, in place of one of the same name.
    pub fn add(&mut self, tool: Arc<dyn Tool>) {
        self.tools.insert(tool.info().name.clone(), tool);
    }

    /// The tools that a list of names and globs means, each once, in the order of the list.
    ///
    /// # Errors
    /// The first entry that means no tool.
    pub fn resolve(&self, names: &[String]) -> Result<Vec<Arc<dyn Tool>>, UnknownTool> {
        let mut meant: Vec<&str> = Vec::new();
        for name in names {
            let unknown = || UnknownTool(name.clone());
            let before = meant.len();
            if let Some((name, _)) = self.tools.get_key_value(name) {
                meant.push(name);
            } else {
                meant
                    .extend(self.tools.keys().map(String::as_str).filter(|tool| means(name, tool)));
            }
            if meant.len() == before {
                return Err(unknown());
            }
        }
        let mut tools: Vec<Arc<dyn Tool>> = Vec::with_capacity(meant.len());
        for (index, name) in meant.iter().enumerate() {
            if !meant[..index].contains(name) {
                tools.extend(self.tools.get(*name).cloned());
            }
        }
        Ok(tools)
    }

    /// This replica does not drive a run any more.
    pub fn run_left(&self, run: Uuid, is_parked: bool) {
        for tool in self.tools.values() {
            tool.run_left(run, is_parked);
        }
    }

    /// What is known of every tool, by name.
    pub fn infos(&self) -> impl Iterator<Item = &ToolInfo> {
        self.tools.values().map(|tool| tool.info())
    }
}
