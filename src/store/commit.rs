//! Commits a batch of writes, and returns the outcome of each.

use std::collections::HashSet;

use uuid::Uuid;

use super::approvals::requeue_answered;
use super::audit::date_late;
use super::backend::Work;
use super::batch::{Batch, Cancelling};
use super::projection::project;
use super::sql::Query;
use super::{RunWrite, Store, StoreError, Wakeup, WriteOutcome};
use crate::clock;
use crate::run::RunStatus;

/// The outcome of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Commit {
    /// One per write, in order.
    pub outcomes: Vec<WriteOutcome>,
    /// Runs of the batch that have a cancel request, from any replica.
    pub cancelling: Vec<(Uuid, Cancelling)>,
}

impl Store {
    /// Commits a batch in one transaction. A batch has at most one write per run. Repeating a batch after a lost
    /// answer is harmless.
    pub async fn commit(&self, owner: &str, batch: &[RunWrite]) -> Result<Commit, StoreError> {
        self.define(batch).await?;
        let mut changes = project(owner, batch)?;
        date_late(&mut changes.audit, clock::now());
        let steps = Batch::of(self.backend.dialect(), owner, changes);
        let parked = batch.iter().filter(|write| write.park.is_some());
        let parked: Vec<Uuid> = parked.map(|write| write.run_id).collect();
        let mut stored = if parked.is_empty() {
            self.backend.commit(steps).await?
        } else {
            let mut tx = self.backend.begin(Work::Commit).await?;
            let stored = tx.write(steps).await?;
            requeue_answered(&mut *tx, &parked).await?; // answers may have arrived already
            tx.commit().await?;
            stored
        };
        let mut cancelling = HashSet::new();
        for write in batch {
            if stored.contains_key(&write.run_id) {
                continue;
            }
            if write.is_repeated && self.is_stored(write).await? {
                stored.insert(write.run_id, None);
            } else if write.ends() && self.is_cancelling(owner, write).await? {
                cancelling.insert(write.run_id);
            }
        }
        let is_queued = |write: &RunWrite| {
            write.new.as_ref().is_some_and(|new| new.status == RunStatus::Queued)
        };
        if !parked.is_empty() || batch.iter().any(is_queued) {
            self.backend.hint(Wakeup::Queue).await;
        }
        let outcome = |write: &RunWrite| match &write.new {
            _ if stored.contains_key(&write.run_id) => WriteOutcome::Committed,
            Some(_) => WriteOutcome::IdTaken,
            None if cancelling.contains(&write.run_id) => WriteOutcome::Cancelling,
            None => WriteOutcome::Fenced,
        };
        let outcomes = batch.iter().map(outcome).collect();
        let to_cancel = |(run, cancelling): (Uuid, Option<Cancelling>)| Some((run, cancelling?));
        Ok(Commit { outcomes, cancelling: stored.into_iter().filter_map(to_cancel).collect() })
    }

    /// Whether an earlier attempt has stored a write: its last event is in the journal.
    async fn is_stored(&self, write: &RunWrite) -> Result<bool, StoreError> {
        let Some(last) = write.events.last() else { return Ok(false) };
        let look = Query::new(
            "SELECT 1 FROM run_events \
             WHERE run_id = :run AND seq = :seq AND epoch = :epoch AND at = :at",
        );
        let look = look.bind("run", write.run_id).bind("seq", last.seq);
        let look = look.bind("epoch", write.epoch).bind("at", last.at);
        Ok(!self.backend.read(Work::Data, look).await?.is_empty())
    }

    /// Whether a write was refused because its run has a cancel request.
    async fn is_cancelling(&self, owner: &str, write: &RunWrite) -> Result<bool, StoreError> {
        let Some(first) = write.events.first() else { return Ok(false) };
        let look = Query::new(
            "SELECT 1 FROM runs WHERE id = :run AND owner = :owner AND status = 'running' \
             AND epoch = :epoch AND next_seq = :first AND cancel_requested_at IS NOT NULL",
        );
        let look = look.bind("run", write.run_id).bind("owner", owner);
        let look = look.bind("epoch", write.epoch).bind("first", first.seq);
        Ok(!self.backend.read(Work::Control, look).await?.is_empty())
    }

    /// Stores the definitions of new runs, unless they are known to be stored.
    async fn define(&self, batch: &[RunWrite]) -> Result<(), StoreError> {
        let missing = self.definitions.missing(batch);
        for definition in &missing {
            let define = Query::new(
                "INSERT INTO definitions (hash, body, used_at) VALUES (:hash, :body, {now}) \
                 ON CONFLICT (hash) DO UPDATE SET used_at = excluded.used_at",
            );
            let define = define.bind("hash", &definition.hash).bind("body", &definition.json);
            self.backend.write(Work::Commit, define).await?;
        }
        self.definitions.note(&missing);
        Ok(())
    }
}
