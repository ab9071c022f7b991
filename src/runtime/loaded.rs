//! Definitions made ready to run: compiled once, shared by all runs of that version.
//!
//! The key is the definition's hash, so a run that goes on after a reload or a restart finds, or
//! makes again, exactly what it started with.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use globset::Glob;

use crate::agents::definition::{Cache, GovernanceSection, ToolOptions, ToolPolicySetting};
use crate::agents::{Agent, Definition};
use crate::governance::{Gate, Policy, ToolPolicy};
use crate::store::DefinitionSnapshot;
use crate::tools::executor::{CallOptions, Executor};
use crate::tools::recall;
use crate::tools::registry::Registry;

/// More versions than this are not kept ready.
const KEPT: usize = 1024;

/// One version of one agent, ready to run.
#[derive(Clone)]
pub(super) struct LoadedAgent {
    /// The compiled definition.
    pub agent: Arc<Agent>,
    /// Its tools behind its gate.
    pub executor: Arc<Executor>,
    /// What its runs keep.
    pub snapshot: Arc<DefinitionSnapshot>,
}

/// Why a definition cannot run here: one sentence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct LoadError(String);

/// All versions that were needed lately.
pub(super) struct LoadedAgents {
    registry: Arc<Registry>,
    by_hash: RwLock<HashMap<String, LoadedAgent>>,
}

impl LoadedAgents {
    /// None yet.
    pub(super) fn new(registry: Arc<Registry>) -> Self {
        Self { registry, by_hash: RwLock::default() }
    }

    /// This version, ready to run.
    pub(super) fn get(&self, agent: &Arc<Agent>) -> Result<LoadedAgent, LoadError> {
        match self.known(&agent.hash) {
            Some(loaded) => Ok(loaded),
            None => self.load(Arc::clone(agent)),
        }
    }

    /// The version of a run's snapshot, ready to run.
    pub(super) fn of_snapshot(&self, hash: &str, json: &str) -> Result<LoadedAgent, LoadError> {
        match self.known(hash) {
            Some(loaded) => Ok(loaded),
            None => self.load(Arc::new(Agent::from_json(json).map_err(|e| LoadError(e.to_string()))?)),
        }
    }

    fn known(&self, hash: &str) -> Option<LoadedAgent> {
        self.by_hash.read().unwrap_or_else(PoisonError::into_inner).get(hash).cloned()
    }

    fn load(&self, agent: Arc<Agent>) -> Result<LoadedAgent, LoadError> {
        let executor = Arc::new(executor(&self.registry, &agent.definition)?);
        let snapshot = Arc::new(DefinitionSnapshot { hash: agent.hash.clone(), json: agent.json.clone() });
        let loaded = LoadedAgent { agent, executor, snapshot };
        let mut by_hash = self.by_hash.write().unwrap_or_else(PoisonError::into_inner);
        if by_hash.len() >= KEPT {
            by_hash.clear();
        }
        by_hash.insert(loaded.agent.hash.clone(), loaded.clone());
        Ok(loaded)
    }
}

/// A definition's tools behind its gate. Also the check that a definition's tools exist.
pub(super) fn executor(registry: &Registry, definition: &Definition) -> Result<Executor, LoadError> {
    let mut tools = registry.resolve(&definition.tools).map_err(|e| LoadError(e.to_string()))?;
    tools.retain(|tool| definition.memory.is_some() || tool.info().name != recall::NAME); // a glob may mean it
    let gate = Gate::new(&policy(&definition.governance)).map_err(|e| LoadError(e.to_string()))?;
    let options = |tool: &str| call_options(&definition.tool_options, tool);
    Executor::new(tools, gate, options).map_err(|e| LoadError(e.to_string()))
}

/// The options of a tool: those under its name, else those of the first glob that means it, one by one.
fn call_options(sections: &BTreeMap<String, ToolOptions>, tool: &str) -> CallOptions {
    let is_meant = |glob: &&String| Glob::new(glob).is_ok_and(|glob| glob.compile_matcher().is_match(tool));
    let globs = sections.keys().filter(is_meant).filter_map(|glob| sections.get(glob));
    let meant: Vec<&ToolOptions> = sections.get(tool).into_iter().chain(globs).collect();
    CallOptions {
        retries: meant.iter().find_map(|options| options.retries).unwrap_or(0),
        timeout: meant.iter().find_map(|options| options.timeout_seconds).map(Duration::from_secs),
        cache: meant.iter().any(|options| options.cache == Some(Cache::Attempt)),
    }
}

fn policy(section: &GovernanceSection) -> Policy {
    let setting = |setting: ToolPolicySetting| match setting {
        ToolPolicySetting::Allow => ToolPolicy::Allow,
        ToolPolicySetting::Ask => ToolPolicy::Ask,
        ToolPolicySetting::Deny => ToolPolicy::Deny,
    };
    Policy {
        tool_policies: section.tool_policies.iter().map(|(glob, s)| (glob.clone(), setting(*s))).collect(),
        autonomy: section.autonomy,
        read: section.paths.read.clone(),
        write: section.paths.write.clone(),
        deny: section.paths.deny.clone(),
    }
}
