//! The ancestors of a run, and the consumption of its descendants, from their rows, which every write of a run
//! updates.
//!
//! The budget of a tree is in [`super::budget`].

use std::collections::BTreeSet;

use uuid::Uuid;

use super::backend::Work;
use super::sql::{Query, Row};
use super::tables::{Record, ids};
use super::{Store, StoreError};
use crate::message::Usage;
use crate::run::{Consumption, Descendants};

/// The ids of the descendants of `:run`.
const TREE: &str = "WITH RECURSIVE tree (id) AS (SELECT id FROM runs \
    WHERE tenant = :tenant AND parent_run_id = :run UNION SELECT child.id FROM tree \
    JOIN runs child ON child.tenant = :tenant AND child.parent_run_id = tree.id) ";

/// How far the ancestors of a run are followed. In damaged rows, parents can be a circle.
const MAX_DISTANCE: u32 = 64;

impl Store {
    /// Tokens and cost of a run's descendants; `None` if there are none. The cost is known if the cost of every run
    /// with tokens is.
    pub async fn usage_below(&self, tenant: &str, run: Uuid) -> Result<Option<Usage>, StoreError> {
        let sum = Query::new(TREE).push(
            "SELECT count(*) AS runs, CAST(sum(r.input_tokens) AS bigint) AS input_tokens, \
             CAST(sum(r.output_tokens) AS bigint) AS output_tokens, \
             CAST(sum(r.cached_input_tokens) AS bigint) AS cached_input_tokens, \
             CAST(sum(r.cache_write_tokens) AS bigint) AS cache_write_tokens, \
             CAST(sum(r.reasoning_tokens) AS bigint) AS reasoning_tokens, \
             CASE WHEN count(*) FILTER (WHERE r.cost_micro_usd IS NULL \
             AND r.input_tokens + r.output_tokens > 0) = 0 \
             THEN CAST(sum(COALESCE(r.cost_micro_usd, 0)) AS bigint) END AS cost_micro_usd, \
             count(*) FILTER (WHERE r.estimated) > 0 AS estimated \
             FROM tree JOIN runs r ON r.id = tree.id",
        );
        let sum = sum.bind("tenant", tenant).bind("run", run);
        let rows = self.backend.read(Work::Data, sum).await?;
        match rows.first() {
            Some(row) if row.read::<u64>("runs")? > 0 => Ok(Some(Usage::read(row)?)),
            _ => Ok(None),
        }
    }

    /// The ancestors of a run with the names of their agents, from the root to the parent, each once. No other columns
    /// of theirs need be readable.
    pub async fn ancestors(
        &self,
        tenant: &str,
        run: Uuid,
    ) -> Result<Vec<(Uuid, String)>, StoreError> {
        let above = Query::new(
            "WITH RECURSIVE above (id, agent, parent_run_id, distance) AS (\
             SELECT p.id, p.agent, p.parent_run_id, 1 FROM runs r \
             JOIN runs p ON p.tenant = :tenant AND p.id = r.parent_run_id WHERE r.id = :run \
             UNION ALL SELECT p.id, p.agent, p.parent_run_id, above.distance + 1 FROM above \
             JOIN runs p ON p.tenant = :tenant AND p.id = above.parent_run_id \
             WHERE above.distance < :most) SELECT id, agent FROM above ORDER BY distance DESC",
        );
        let above = above.bind("tenant", tenant).bind("run", run).bind("most", MAX_DISTANCE);
        let mut known = BTreeSet::from([run]);
        let mut ancestors = Vec::new();
        for row in self.backend.read(Work::Data, above).await? {
            let id = row.read("id")?;
            if known.insert(id) {
                ancestors.push((id, row.read("agent")?));
            }
        }
        Ok(ancestors)
    }

    /// The child runs of a run that have not ended, newest first.
    pub async fn live_children(&self, tenant: &str, run: Uuid) -> Result<Vec<Uuid>, StoreError> {
        let children = Query::new(
            "SELECT id FROM runs WHERE tenant = :tenant AND parent_run_id = :run \
             AND finished_at IS NULL ORDER BY created_at DESC, id DESC",
        );
        let children = children.bind("tenant", tenant).bind("run", run);
        ids(&self.backend.read(Work::Data, children).await?)
    }

    /// Whether a descendant of this run has a pending request.
    pub async fn waits_below(&self, tenant: &str, run: Uuid) -> Result<bool, StoreError> {
        let waits = Query::new(
            "WITH RECURSIVE tree (id) AS (SELECT id FROM runs WHERE tenant = :tenant \
             AND parent_run_id = :run AND finished_at IS NULL UNION SELECT child.id FROM tree \
             JOIN runs child ON child.tenant = :tenant AND child.parent_run_id = tree.id \
             AND child.finished_at IS NULL) SELECT 1 FROM tree \
             JOIN approvals a ON a.run_id = tree.id AND a.status = 'pending' LIMIT 1",
        );
        let waits = waits.bind("tenant", tenant).bind("run", run);
        Ok(!self.backend.read(Work::Data, waits).await?.is_empty())
    }

    /// The total consumption of a run's descendants. What cannot be read does not count, so that it ends no other run.
    pub async fn descendants(&self, tenant: &str, run: Uuid) -> Result<Descendants, StoreError> {
        let all = Query::new(TREE).push(
            "SELECT r.attempts, r.iterations, r.tool_calls_made, r.consumption, r.input_tokens, \
             r.output_tokens, r.cached_input_tokens, r.cache_write_tokens, r.reasoning_tokens, \
             r.cost_micro_usd, r.estimated FROM tree JOIN runs r ON r.id = tree.id",
        );
        let all = all.bind("tenant", tenant).bind("run", run);
        let mut below = Descendants::default();
        for row in &self.backend.read(Work::Data, all).await? {
            add(&mut below, row)?;
        }
        Ok(below)
    }
}

fn add(below: &mut Descendants, row: &Row) -> Result<(), StoreError> {
    let mut consumption: Consumption = row.read("consumption").unwrap_or_else(|error| {
        tracing::warn!(%error, "what a child run has consumed cannot be read, and does not count");
        Consumption::default()
    });
    below.files_modified += consumption.files();
    consumption.files_modified = BTreeSet::new();
    (consumption.files_unlisted, consumption.files_of_programs) = (0, 0);
    below.consumption.add(&consumption);
    below.usage.add(&Usage::read(row)?);
    below.attempts += u64::from(row.read::<u32>("attempts")?);
    below.iterations += u64::from(row.read::<u32>("iterations")?);
    below.tool_calls += u64::from(row.read::<u32>("tool_calls_made")?);
    Ok(())
}
