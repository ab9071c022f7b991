//! Prepares a resumed run until it can be driven.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::claimed_run::{ResumeError, Resumption, unusable};
use super::identity::RunIdentity;
use super::worker::DrivenRun;
use crate::event::RunEvent;
use crate::store::ClaimedRun;

impl DrivenRun {
    /// Does what is left before a resumed run is driven: waits until it is alone if it may cause crashes, and
    /// opens it if it was never opened.
    pub(super) async fn prepare_resumption(
        &mut self,
        resumption: Resumption,
    ) -> Result<(), ResumeError> {
        let Resumption { claimed, has_crashed, is_alone } = resumption;
        if is_alone {
            self.slot.release(); // it may wait for a long time
            let parent = self.identity.new.parent_run_id;
            let runtime = self.runtime.clone();
            let driven = &runtime.inner.driven;
            if let Some(parent) = parent.and_then(|id| driven.parents.get(id)) {
                let RunIdentity { new, epoch, .. } = &parent.identity;
                driven.probation.leave(new.id, *epoch); // it waits for this run
            }
            let since = Instant::now();
            tokio::select! {
                biased;
                () = self.run.control.cancelled() => return Ok(()), // it is ended at once
                () = driven.probation.enter(self.identity.new.id, self.identity.epoch) => {}
            }
            self.record_wait(since.elapsed());
            let parent = parent.and_then(|id| driven.parents.get(id));
            let parent_slot = parent.as_ref().map(|parent| &parent.slot);
            let slot = runtime.inner.capacity.slots.of_parent_or_free(parent_slot);
            self.slot.take(&slot.ok_or(ResumeError::NoFreeSlot)?);
        }
        if has_crashed {
            self.run.persist().await?; // so that the next crash is counted
        }
        if let Some(shared) = &self.run.shared {
            let root = self.identity.root();
            if !shared.is_open() && self.runtime.inner.store.shared_budget(root).await?.is_some() {
                shared.open();
            }
            // Releases what was reserved when its replica stopped.
            self.run.settle().await?;
        }
        if self.run.state.started_at().is_none() {
            self.open(&claimed).await?;
        }
        Ok(())
    }

    /// Records how long it waited to be driven alone, in the event of its resumption, which is not appended yet.
    fn record_wait(&mut self, waited: Duration) {
        let resumed = self.run.outbox.iter_mut().find_map(|event| match &mut event.what {
            RunEvent::RunResumed { waited_ms, .. } => Some(waited_ms),
            _ => None,
        });
        if let Some(waited_ms) = resumed {
            *waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
            self.run.state.record_wait(*waited_ms);
        }
    }

    async fn open(&mut self, claimed: &ClaimedRun) -> Result<(), ResumeError> {
        let (identity, plan, runtime) = (&self.identity, Arc::clone(&self.run.plan), &self.runtime);
        let bounds = plan.agent.definition.history;
        let earlier = runtime.earlier_runs(&claimed.run.tenant, &identity.new, bounds).await?;
        let background =
            runtime.background(&plan, &identity.caller, &identity.new, &earlier).await?;
        let opening = plan.opening(&identity.new.inputs, &background).map_err(|e| unusable(&e))?;
        self.run.open(opening, background)?;
        Ok(())
    }
}
