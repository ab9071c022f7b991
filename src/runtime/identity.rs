//! The identity of a run while this replica owns it: its row, its caller, its epoch, and its lineage.

use std::sync::Arc;

use uuid::Uuid;

use crate::engine::{Entry, Plan};
use crate::run::{Caller, RunOrigin, TraceContext};
use crate::store::{ClaimedRun, DefinitionSnapshot, NewRun, QueuePlace, RunWrite};

/// What is fixed while this replica owns a run: row, caller, epoch, origin.
#[derive(Clone)]
pub(super) struct RunIdentity {
    pub(super) new: Arc<NewRun>,
    pub(super) caller: Arc<Caller>,
    pub(super) epoch: i64,
    pub(super) origin: Arc<RunOrigin>,
    /// Its lineage, if another run started it.
    pub(super) lineage: Option<Arc<Lineage>>,
}

/// The lineage of a child run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Lineage {
    /// The run's ancestors, from the root to its parent.
    pub(super) ancestors: Vec<Uuid>,
    /// The agents from the root to the run, both included.
    pub(super) agents: Vec<String>,
}

/// The ancestors of a run, from the root on, and the run itself: the runs whose budgets bind it.
pub(super) fn with_ancestors(run: Uuid, lineage: Option<&Lineage>) -> Vec<Uuid> {
    let mut line = lineage.map(|lineage| lineage.ancestors.clone()).unwrap_or_default();
    line.push(run);
    line
}

impl RunIdentity {
    /// `sample_ratio`: the share of traces that are recorded, of those that begin here.
    pub(super) fn new(
        new: Arc<NewRun>,
        caller: Arc<Caller>,
        epoch: i64,
        sample_ratio: f64,
    ) -> Self {
        let origin = RunOrigin {
            tenant: caller.tenant.clone(),
            subject: caller.subject.clone(),
            agent: new.agent.clone(),
            agent_version: new.agent_version.clone(),
            definition_hash: new.definition.hash.clone(),
            session_id: new.session_id.clone(),
            model: None, // until its plan is known
            is_child: new.parent_run_id.is_some(),
            is_observed: false, // the same
            created_at: new.created_at,
            webhook: new.webhook.clone(),
            trace: TraceContext::of_run(new.id, new.traceparent.as_deref(), sample_ratio),
        };
        Self { new, caller, epoch, origin: Arc::new(origin), lineage: None }
    }

    /// The identity of a run that this replica has claimed.
    pub(super) fn of_claimed(claimed: &ClaimedRun, sample_ratio: f64) -> Self {
        let row = &claimed.run;
        let definition = DefinitionSnapshot {
            hash: row.definition_hash.clone(),
            json: claimed.definition.clone(),
        };
        let new = NewRun {
            id: row.id,
            agent: row.agent.clone(),
            agent_version: row.agent_version.clone(),
            definition: Arc::new(definition),
            kind: row.kind,
            status: row.status,
            inputs: Arc::new(row.inputs.clone()),
            overrides: row.overrides.clone(),
            session_id: row.session_id.clone(),
            session_place: None, // written once, with the row
            parent_run_id: row.parent_run_id,
            metadata: row.metadata.0.clone(),
            created_at: row.created_at,
            idempotency: None, // the same
            traceparent: row.traceparent.clone(),
            webhook: row.webhook.clone(),
            queue: QueuePlace::default(), // the same
        };
        let scopes = row.scopes.clone();
        let caller = Caller { subject: row.subject.clone(), tenant: row.tenant.clone(), scopes };
        Self::new(Arc::new(new), Arc::new(caller), row.epoch, sample_ratio)
    }

    /// The root of its tree, which may be the run itself.
    pub(super) fn root(&self) -> Uuid {
        let root = self.lineage.as_ref().and_then(|lineage| lineage.ancestors.first());
        root.copied().unwrap_or(self.new.id)
    }

    /// Adds what follows from its plan.
    pub(super) fn planned(&mut self, plan: &Plan) {
        let origin = Arc::make_mut(&mut self.origin);
        origin.is_observed = plan.is_observed;
        origin.model = plan.models_and_sampling(false).0.first().cloned();
    }

    /// The write of an entry of its journal, with its row if that is not stored yet.
    pub(super) fn write(&self, new: Option<Arc<NewRun>>, entry: Entry) -> RunWrite {
        RunWrite {
            run_id: self.new.id,
            epoch: self.epoch,
            caller: Arc::clone(&self.caller),
            new,
            origin: Arc::clone(&self.origin),
            events: entry.events,
            audit: entry.audit,
            totals: entry.totals,
            park: entry.park,
            is_repeated: false,
        }
    }
}
