//! Definitions made ready to run: compiled once, shared by all runs of that version.
//!
//! They are cached by the definition's hash, so a run that is resumed after a reload or a restart gets exactly
//! what it started with. Only the agents that it can delegate to are the present ones of the catalogue.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::RwLock;
use uuid::Uuid;

use super::definition_compiler::{LoadError, executor};
use crate::agents::{Agent, Catalogue, Definition, Skills};
use crate::run::{Autonomy, Delegation, Effect, GovernanceMode};
use crate::store::DefinitionSnapshot;
use crate::tools::Tool;
use crate::tools::executor::Executor;
use crate::tools::registry::Registry;
use crate::tools::subagent::{ChildAgent, StartRun, Subagent};

/// The cache holds at most this many versions.
const MAX_LOADED: usize = 1024;

/// One version of one agent, ready to run.
#[derive(Clone)]
pub(super) struct LoadedAgent {
    /// The compiled definition.
    pub agent: Arc<Agent>,
    /// Its tools behind its gate.
    pub executor: Arc<Executor>,
    /// The snapshot that its runs store.
    pub snapshot: Arc<DefinitionSnapshot>,
    /// The agents that it can delegate to, when this was made; `None` for a missing one.
    delegates: Arc<[(String, Option<Arc<Agent>>)]>,
    /// The generation of the registry's tools, when this was made; `None` if it does not depend on them.
    generation: Option<u64>,
}

/// The recently used versions.
pub(super) struct LoadedAgents {
    registry: Arc<Registry>,
    catalogue: Arc<Catalogue>,
    start: Arc<dyn StartRun>,
    by_hash: RwLock<HashMap<String, LoadedAgent>>,
}

impl LoadedAgents {
    /// The tools and skills with which definitions are loaded.
    pub(super) fn tools(&self) -> (&Registry, &Arc<Skills>) {
        (&self.registry, self.skills())
    }

    /// The agent of that name, as the catalogue has it now.
    pub(super) fn named(&self, name: &str) -> Option<Arc<Agent>> {
        self.catalogue.agent(name)
    }

    /// The skills that there are now.
    pub(super) fn skills(&self) -> &Arc<Skills> {
        self.catalogue.skills()
    }

    /// An empty cache.
    pub(super) fn new(
        registry: Arc<Registry>,
        catalogue: Arc<Catalogue>,
        start: Arc<dyn StartRun>,
    ) -> Self {
        Self { registry, catalogue, start, by_hash: RwLock::default() }
    }

    /// This version, ready to run.
    pub(super) fn get(&self, agent: &Arc<Agent>) -> Result<LoadedAgent, LoadError> {
        match self.known(&agent.hash) {
            Some(loaded) => Ok(loaded),
            None => self.load(Arc::clone(agent)),
        }
    }

    /// This version, ready to run; not cached, because no run uses it.
    pub(super) fn made(&self, agent: &Arc<Agent>) -> Result<LoadedAgent, LoadError> {
        self.known(&agent.hash).map_or_else(|| self.make(Arc::clone(agent)), Ok)
    }

    /// The version of a run's snapshot, ready to run.
    pub(super) fn of_snapshot(&self, hash: &str, json: &str) -> Result<LoadedAgent, LoadError> {
        match self.known(hash) {
            Some(loaded) => Ok(loaded),
            None => self.load(Arc::new(Agent::from_json(json).map_err(LoadError)?)),
        }
    }

    /// This replica does not drive a run any more.
    pub(super) fn release_run(&self, run: Uuid, is_parked: bool) {
        self.registry.release_run(run, is_parked);
    }

    fn known(&self, hash: &str) -> Option<LoadedAgent> {
        let is_current = |(name, before): &(String, Option<Arc<Agent>>)| {
            let now = self.catalogue.agent(name);
            before.as_ref().map(|agent| &agent.hash) == now.as_ref().map(|agent| &agent.hash)
        };
        let now = self.registry.generation();
        let by_hash = self.by_hash.read();
        let known = by_hash.get(hash)?;
        let has_tools = known.generation.is_none_or(|generation| generation == now);
        (has_tools && known.delegates.iter().all(is_current)).then(|| known.clone())
    }

    fn load(&self, agent: Arc<Agent>) -> Result<LoadedAgent, LoadError> {
        let loaded = self.make(agent)?;
        let mut by_hash = self.by_hash.write();
        if by_hash.len() >= MAX_LOADED {
            by_hash.clear();
        }
        by_hash.insert(loaded.agent.hash.clone(), loaded.clone());
        Ok(loaded)
    }

    fn make(&self, agent: Arc<Agent>) -> Result<LoadedAgent, LoadError> {
        let generation = self.registry.generation();
        let delegates =
            agent.definition.delegates().map(|name| (name.to_owned(), self.catalogue.agent(name)));
        let delegates: Arc<[_]> = delegates.collect();
        let subagents = agent.definition.tools.iter().filter_map(|tool| {
            let delegation = Delegation::of_tool(tool)?;
            let child = self
                .catalogue
                .agent(delegation.agent())
                .map(|child| self.described(&child.definition, &agent.definition));
            let start = Arc::clone(&self.start);
            Some(Arc::new(Subagent::new(tool, delegation, child.unwrap_or_default(), start))
                as Arc<dyn Tool>)
        });
        let executor = Arc::new(executor(
            &self.registry,
            self.catalogue.skills(),
            &agent.definition,
            subagents,
        )?);
        let snapshot =
            Arc::new(DefinitionSnapshot { hash: agent.hash.clone(), json: agent.json.clone() });
        let may_change = agent.definition.tools.iter().any(|tool| self.registry.may_have(tool));
        let generation = may_change.then_some(generation);
        Ok(LoadedAgent { agent, executor, snapshot, delegates, generation })
    }

    fn described(&self, child: &Definition, parent: &Definition) -> ChildAgent {
        let tools = self.registry.resolve(&child.tools); // fails where one of them is an agent again
        let has_only_reading_tools =
            || tools.is_ok_and(|tools| tools.iter().all(|tool| tool.info().effect == Effect::Read));
        let autonomy = child.governance.autonomy.min(parent.governance.autonomy);
        let is_enforced =
            child.governance.mode.min(parent.governance.mode) == GovernanceMode::Enforce;
        ChildAgent {
            description: child.description.clone(),
            inputs: child.inputs.clone(),
            only_reads: (autonomy == Autonomy::ReadOnly && is_enforced) || has_only_reading_tools(),
        }
    }
}
