//! The queue of runs: its length, the order of claims, and what a claim changes in a run.
//!
//! A run is claimed only by a version of the service that can read its journal: the run's row has the newest
//! format of all versions that have owned the run.

use std::time::Duration;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::backend::Work;
use super::listing::readable;
use super::sql::{Query, Row};
use super::tables::ids;
use super::{ClaimedRun, FORMAT, RunCounts, Store, StoreError};
use crate::clock;

/// Tenants that one statement returns, at most.
const MAX_TENANTS: u32 = 64;
/// How often one claim looks for tenants with claimable runs, at most.
const MAX_LOOKS: u32 = 4;
/// How long a claim waits for the lock of a tenant.
const MAX_WAIT: Duration = Duration::from_millis(250);
/// A run that waits for nothing else than a replica is due within this time, unless the clock was set back: no
/// pause before another claim is longer than a minute.
const MAX_PAUSE: Duration = Duration::from_mins(2);

/// The replica that claims runs from the queue.
#[derive(Debug, Clone, Copy)]
pub struct Claimant<'c> {
    /// The replica that owns them from then on.
    pub owner: &'c str,
    /// Runs that it does not claim.
    pub excluded: &'c [Uuid],
}

impl<'c> From<&'c str> for Claimant<'c> {
    fn from(owner: &'c str) -> Self {
        Self { owner, excluded: &[] }
    }
}

/// The condition for runs that wait for a replica and for nothing else; the same as that of their index.
macro_rules! waits_for_replica {
    ($table:literal) => {
        concat!(
            $table,
            "status = 'queued' AND (",
            $table,
            "session_place IS NULL OR ",
            $table,
            "session_place = 'holds') AND NOT ",
            $table,
            "delayed"
        )
    };
}

/// The condition for runs that wait for their session; the same as that of their index.
macro_rules! waits_for_session {
    ($table:literal) => {
        concat!($table, "status = 'queued' AND ", $table, "session_place <> 'holds'")
    };
}

/// The columns of a claimed run.
macro_rules! returning_claimed {
    () => {
        " RETURNING *, COALESCE((SELECT body FROM definitions WHERE hash = definition_hash), '') \
         AS definition"
    };
}

impl Store {
    /// How many runs of all tenants are queued.
    pub async fn queued(&self) -> Result<u64, StoreError> {
        let count = Query::new(concat!(
            "SELECT (SELECT count(*) FROM runs WHERE ",
            waits_for_replica!(""),
            ") + (SELECT count(*) FROM runs WHERE ",
            waits_for_session!(""),
            ") + (SELECT count(*) FROM runs WHERE status = 'queued' AND delayed) AS queued"
        ));
        let rows = self.backend.read(Work::Control, count).await?;
        rows.first().map_or(Ok(0), |row| row.read("queued"))
    }

    /// Since when the oldest queued run of all tenants has been claimable; `None` if no run is queued.
    pub async fn oldest_queued(&self) -> Result<Option<DateTime<Utc>>, StoreError> {
        let oldest = Query::new(concat!(
            "SELECT (SELECT min(available_at) FROM runs WHERE ",
            waits_for_replica!(""),
            ") AS in_line, (SELECT min(available_at) FROM runs WHERE ",
            waits_for_session!(""),
            ") AS waiting"
        ));
        let rows = self.backend.read(Work::Control, oldest).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let oldest: [Option<DateTime<Utc>>; 2] = [row.read("in_line")?, row.read("waiting")?];
        Ok(oldest.into_iter().flatten().min())
    }

    /// Claims up to `limit` queued runs: sets status and owner, and raises the epoch. A run that waits for its
    /// session is claimed when no run holds the session and no other run waits before it; then it holds the
    /// session. A run whose row cannot be read is parked.
    ///
    /// Tenants are served round-robin, beginning with the one after `last_served`. The runs of one tenant are
    /// claimed by priority, then in the order of acceptance or of the time before which they may not begin.
    /// A session has its own order, without priorities. Runs that would exceed a limit, given the counts in
    /// `running`, are skipped.
    ///
    /// Afterwards, also after an error, `last_served` is the tenant after which the next claim begins. If there are
    /// many tenants without claimable runs, one claim looks at some of them, and the next claim at the others.
    ///
    /// # Errors
    /// [`StoreError`] if no run was claimed.
    pub async fn claim_within<'c>(
        &self,
        claimant: impl Into<Claimant<'c>>,
        limit: u32,
        last_served: &mut String,
        running: &mut RunCounts,
    ) -> Result<Vec<ClaimedRun>, StoreError> {
        let claimant = claimant.into();
        let mut first: Option<String> = None;
        for _ in 0..MAX_LOOKS {
            let mut tenants = self.queued_tenants(last_served).await?;
            let mut is_complete = tenants.len() < MAX_TENANTS as usize;
            if let Some(again) = tenants.iter().position(|it| first.as_ref() == Some(it)) {
                tenants.truncate(again); // from there on they were looked at
                is_complete = true;
            }
            first = first.or_else(|| tenants.first().cloned());
            let last = tenants.last().cloned();
            let claimed = self.claim_in_turn(claimant, limit, tenants, running).await;
            if let Ok(runs) = &claimed
                && let Some(served) = runs.last()
            {
                served.run.tenant.clone_into(last_served);
                return claimed;
            }
            // They may have nothing that is due, wait for their sessions, or be at their limits.
            if let Some(last) = last {
                *last_served = last;
            }
            claimed?;
            if is_complete {
                break;
            }
        }
        Ok(Vec::new())
    }

    /// Claims up to `limit` queued runs of these tenants, round-robin. One tenant whose claim fails stops no other.
    async fn claim_in_turn(
        &self,
        claimant: Claimant<'_>,
        limit: u32,
        mut tenants: Vec<String>,
        running: &mut RunCounts,
    ) -> Result<Vec<ClaimedRun>, StoreError> {
        let mut claimed: Vec<ClaimedRun> = Vec::new();
        let mut failed = None;
        let mut left = limit;
        while !tenants.is_empty() && left > 0 {
            let share = (left / u32::try_from(tenants.len()).unwrap_or(u32::MAX)).max(1);
            let mut have_more = Vec::new();
            for tenant in tenants {
                if left == 0 {
                    break;
                }
                let wanted = share.min(left);
                let claim = if running.is_unlimited() {
                    self.claimed(claimant.owner, claim_of(claimant, &tenant, wanted, &[])).await
                } else {
                    self.claim_within_limits(claimant, &tenant, wanted, running).await
                };
                let batch = match claim {
                    Ok(batch) => batch,
                    // The claimed runs are driven; the next claim gets the same error.
                    Err(_) if !claimed.is_empty() => return Ok(claimed),
                    // It may be about runs of this tenant alone; otherwise, the next claim fails, too.
                    Err(error) if failed.is_none() => {
                        failed = Some(error);
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                let count = u32::try_from(batch.len()).unwrap_or(u32::MAX);
                left = left.saturating_sub(count);
                if count == wanted {
                    have_more.push(tenant);
                }
                claimed.extend(batch);
            }
            tenants = have_more;
        }
        match failed {
            Some(error) if claimed.is_empty() => Err(error),
            _ => Ok(claimed),
        }
    }

    /// Claims up to `limit` queued runs of one tenant within the limits: counts and claims them under the lock of
    /// the tenant.
    async fn claim_within_limits(
        &self,
        claimant: Claimant<'_>,
        tenant: &str,
        limit: u32,
        running: &mut RunCounts,
    ) -> Result<Vec<ClaimedRun>, StoreError> {
        let mut claimed: Vec<ClaimedRun> = Vec::new();
        if running.claimable(tenant) == 0 {
            running.has_held_back = true;
            return Ok(claimed);
        }
        let mut tx = self.backend.begin(Work::Control).await?;
        if !tx.lock_tenant(tenant, MAX_WAIT).await? {
            running.has_held_back = true; // other tenants do not wait for it
            return Ok(claimed);
        }
        running.recount(&mut *tx, tenant).await?;
        let mut left = limit;
        while left > 0 {
            let (wanted, full_keys) =
                (left.min(running.claimable(tenant)), running.full_keys(tenant));
            running.has_held_back |= wanted == 0 || !full_keys.is_empty();
            if wanted == 0 {
                break;
            }
            let claim = claim_of(claimant, tenant, wanted, &full_keys);
            let rows = tx.run(claim).await?;
            let batch: Vec<ClaimedRun> = readable(&rows).collect();
            if batch.len() < rows.len() {
                let unreadable = unreadable(&rows, &batch);
                tx.run(park(claimant.owner, &unreadable)).await?;
                log_parked(&unreadable);
            }
            for claimed_run in batch.iter().filter(|claimed| claimed.run.parent_run_id.is_none()) {
                running.add(tenant, &claimed_run.run.subject, 1);
            }
            let count = u32::try_from(batch.len()).unwrap_or(u32::MAX);
            left = left.saturating_sub(count);
            claimed.extend(batch);
            if count < wanted {
                break;
            }
        }
        tx.commit().await?;
        Ok(claimed)
    }

    /// As [`Self::claim_within`], without limits.
    ///
    /// # Errors
    /// [`StoreError`] if no run was claimed.
    pub async fn claim(
        &self,
        owner: &str,
        limit: u32,
        last_served: &str,
    ) -> Result<Vec<ClaimedRun>, StoreError> {
        let mut last_served = last_served.to_owned();
        self.claim_within(owner, limit, &mut last_served, &mut RunCounts::default()).await
    }

    /// Tenants with queued runs, in the order in which they are served; at most [`MAX_TENANTS`].
    async fn queued_tenants(&self, last_served: &str) -> Result<Vec<String>, StoreError> {
        let mut first = self.tenants_from("").await?;
        let mut turns = if first.len() == MAX_TENANTS as usize {
            self.tenants_from(last_served).await?
        } else {
            first.sort_unstable(); // the order of the database may be that of a language
            first.split_off(first.partition_point(|it| it.as_str() <= last_served))
        };
        first.retain(|it| !turns.contains(it));
        turns.extend(first);
        turns.truncate(MAX_TENANTS as usize);
        Ok(turns)
    }

    /// The first tenants with queued runs after this one, in the order of the database.
    async fn tenants_from(&self, tenant: &str) -> Result<Vec<String>, StoreError> {
        let tenants = Query::new(concat!(
            "WITH RECURSIVE in_line (tenant) AS (SELECT min(tenant) FROM runs WHERE tenant > :tenant AND ",
            waits_for_replica!(""),
            " UNION ALL SELECT (SELECT min(r.tenant) FROM runs r WHERE r.tenant > l.tenant AND ",
            waits_for_replica!("r."),
            ") FROM in_line l WHERE l.tenant IS NOT NULL), \
             waiting (tenant) AS (SELECT min(tenant) FROM runs WHERE tenant > :tenant AND ",
            waits_for_session!(""),
            " UNION ALL SELECT (SELECT min(r.tenant) FROM runs r WHERE r.tenant > w.tenant AND ",
            waits_for_session!("r."),
            ") FROM waiting w WHERE w.tenant IS NOT NULL) \
             SELECT tenant FROM (SELECT * FROM (SELECT tenant FROM in_line LIMIT :most) AS a \
             UNION SELECT * FROM (SELECT tenant FROM waiting LIMIT :most) AS b) AS both_lines \
             WHERE tenant IS NOT NULL ORDER BY tenant LIMIT :most",
        ));
        let tenants = tenants.bind("tenant", tenant).bind("most", MAX_TENANTS);
        let rows = self.backend.read(Work::Control, tenants).await?;
        rows.iter().map(|row| row.read("tenant")).collect()
    }

    /// Makes queued runs claimable that have to wait only because the clock was set back.
    pub async fn undo_clock_step(&self) -> Result<(), StoreError> {
        let last = Query::new(concat!(
            "SELECT max(available_at) AS at FROM runs WHERE ",
            waits_for_replica!("")
        ));
        let rows = self.backend.read(Work::Control, last).await?;
        let Some(row) = rows.first() else { return Ok(()) };
        let last: Option<DateTime<Utc>> = row.read("at")?;
        let pause = last.and_then(|last| (last - clock::now()).to_std().ok());
        if pause.is_some_and(|pause| pause > MAX_PAUSE) {
            let end = Query::new(concat!(
                "UPDATE runs SET available_at = {now} WHERE ",
                waits_for_replica!(""),
                " AND available_at > (SELECT {now}) + :pause"
            ));
            self.backend.write(Work::Control, end.bind("pause", MAX_PAUSE)).await?;
        }
        Ok(())
    }

    /// Makes up to `limit` delayed runs claimable if they are due.
    pub async fn end_delays(&self, limit: u32) -> Result<(), StoreError> {
        let first = Query::new(
            "SELECT min(available_at) AS at FROM runs WHERE status = 'queued' AND delayed",
        );
        let rows = self.backend.read(Work::Control, first).await?;
        let Some(row) = rows.first() else { return Ok(()) };
        let first: Option<DateTime<Utc>> = row.read("at")?;
        if first.is_none_or(|first| first > clock::now()) {
            return Ok(()); // without a write transaction
        }
        // By the clock of the database; read once, so that it bounds what is looked at.
        let due = Query::new(
            "UPDATE runs SET delayed = false WHERE id IN (SELECT id FROM runs \
             WHERE status = 'queued' AND delayed AND available_at <= (SELECT {now}) \
             ORDER BY available_at LIMIT :limit{skip_locked})",
        );
        self.backend.write(Work::Control, due.bind("limit", limit)).await?;
        Ok(())
    }

    /// Claims up to `limit` queued runs that were begun before; limits do not apply to them.
    pub async fn claim_begun<'c>(
        &self,
        claimant: impl Into<Claimant<'c>>,
        limit: u32,
    ) -> Result<Vec<ClaimedRun>, StoreError> {
        let Claimant { owner, excluded } = claimant.into();
        let not_excluded = if excluded.is_empty() { "" } else { " AND NOT (id IN :excluded)" };
        let due = format!(
            "FROM runs WHERE status = 'queued' AND started_at IS NOT NULL \
             AND available_at <= {{now}} AND format <= :format{not_excluded} \
             ORDER BY available_at, id LIMIT :limit"
        );
        let bound = |query: Query| {
            let query = query.bind("format", FORMAT);
            if excluded.is_empty() { query } else { query.bind("excluded", excluded) }
        };
        let any = bound(Query::new(format!("SELECT 1 {due}")).bind("limit", 1_u32));
        if self.backend.read(Work::Control, any).await?.is_empty() {
            return Ok(Vec::new()); // without a write transaction
        }
        let claim = Query::new(format!(
            "WITH next AS MATERIALIZED (SELECT id AS next_id {due}{{skip_locked}}) \
             UPDATE runs SET status = 'running', owner = :owner, epoch = epoch + 1, format = :format, \
             available_at = NULL FROM next WHERE id = next_id{}",
            returning_claimed!(),
        ));
        self.claimed(owner, bound(claim.bind("owner", owner).bind("limit", limit))).await
    }

    /// Queued runs of these trees that were begun before and are due.
    ///
    /// # Errors
    /// [`StoreError`] if the store does not answer.
    pub async fn begun_in_trees(&self, roots: &[Uuid]) -> Result<Vec<Uuid>, StoreError> {
        let begun = Query::new(
            "WITH RECURSIVE tree (id) AS (SELECT id FROM runs WHERE id IN :roots UNION \
             SELECT child.id FROM tree JOIN runs child ON child.parent_run_id = tree.id \
             AND child.finished_at IS NULL) SELECT runs.id FROM tree JOIN runs ON runs.id = tree.id \
             WHERE runs.status = 'queued' AND runs.started_at IS NOT NULL \
             AND runs.available_at <= {now}",
        );
        ids(&self.backend.read(Work::Control, begun.bind("roots", roots)).await?)
    }

    /// Claims this run, if it is queued and due.
    pub async fn claim_run(
        &self,
        owner: &str,
        run: Uuid,
    ) -> Result<Option<ClaimedRun>, StoreError> {
        self.claim_this(owner, run, "").await
    }

    /// Claims this run, if limits do not apply to it: it was begun before, or it is a child run.
    pub async fn claim_exempt_run(
        &self,
        owner: &str,
        run: Uuid,
    ) -> Result<Option<ClaimedRun>, StoreError> {
        let is_exempt = " AND (started_at IS NOT NULL OR parent_run_id IS NOT NULL)";
        self.claim_this(owner, run, is_exempt).await
    }

    async fn claim_this(
        &self,
        owner: &str,
        run: Uuid,
        condition: &str,
    ) -> Result<Option<ClaimedRun>, StoreError> {
        let claim = Query::new(
            "UPDATE runs SET status = 'running', owner = :owner, epoch = epoch + 1, format = :format, \
             available_at = NULL WHERE id = :run AND status = 'queued' AND available_at <= {now} \
             AND format <= :format",
        );
        let claim = claim.push(condition).push(returning_claimed!());
        let claim = claim.bind("owner", owner).bind("run", run).bind("format", FORMAT);
        Ok(self.claimed(owner, claim).await?.into_iter().next())
    }

    /// Claims up to `limit` queued runs with a cancel request, including those that wait for their session.
    pub async fn claim_cancelled(
        &self,
        owner: &str,
        limit: u32,
    ) -> Result<Vec<ClaimedRun>, StoreError> {
        let any = Query::new(
            "SELECT 1 FROM runs WHERE status = 'queued' AND cancel_requested_at IS NOT NULL LIMIT 1",
        );
        if self.backend.read(Work::Control, any).await?.is_empty() {
            return Ok(Vec::new()); // without a write transaction
        }
        let claim = Query::new(concat!(
            "UPDATE runs SET status = 'running', owner = :owner, epoch = epoch + 1, format = :format, \
             available_at = NULL WHERE id IN (SELECT id FROM runs WHERE status = 'queued' \
             AND cancel_requested_at IS NOT NULL AND format <= :format \
             ORDER BY cancel_requested_at \
             LIMIT :limit{skip_locked})",
            returning_claimed!(),
        ));
        let claim = claim.bind("owner", owner).bind("limit", limit);
        self.claimed(owner, claim.bind("format", FORMAT)).await
    }

    async fn claimed(&self, owner: &str, claim: Query) -> Result<Vec<ClaimedRun>, StoreError> {
        let rows = self.backend.write(Work::Control, claim).await?;
        let claimed: Vec<ClaimedRun> = readable(&rows).collect();
        if claimed.len() < rows.len() {
            let unreadable = unreadable(&rows, &claimed);
            match self.backend.write(Work::Control, park(owner, &unreadable)).await {
                Ok(_) => log_parked(&unreadable),
                Err(error) => error.log_retry("runs whose rows cannot be read are parked later"),
            }
        }
        Ok(claimed)
    }
}

/// The runs of a claim whose rows cannot be read.
fn unreadable(rows: &[Row], claimed: &[ClaimedRun]) -> Vec<Uuid> {
    let mut runs: Vec<Uuid> = rows.iter().filter_map(|row| row.read("id").ok()).collect();
    runs.retain(|run| claimed.iter().all(|claimed| claimed.run.id != *run));
    runs
}

/// Parks claimed runs until an operator has mended their rows: nothing can be decided about them, and from the
/// queue they would be claimed again and again.
fn park(owner: &str, runs: &[Uuid]) -> Query {
    let park = Query::new(
        "UPDATE runs SET status = 'needs_review', owner = NULL \
         WHERE id IN :runs AND status = 'running' AND owner = :owner",
    );
    park.bind("runs", runs).bind("owner", owner)
}

fn log_parked(runs: &[Uuid]) {
    tracing::error!(?runs, "runs whose rows cannot be read were parked as needs_review");
}

/// The statement that claims up to `limit` queued runs of one tenant, except runs of these keys.
fn claim_of(claimant: Claimant<'_>, tenant: &str, limit: u32, full_keys: &[String]) -> Query {
    let Claimant { owner, excluded } = claimant;
    // Omitted if empty, so that the query plan is that of the usual claim.
    let (no_full_key, no_full_key_of_w) = match full_keys {
        [] => ("", ""),
        _ => (" AND NOT (subject IN :full_keys)", " AND NOT (w.subject IN :full_keys)"),
    };
    let (not_excluded, not_excluded_of_w) = match excluded {
        [] => ("", ""),
        _ => (" AND NOT (id IN :excluded)", " AND NOT (w.id IN :excluded)"),
    };
    // The first of the runs that wait for each session: its turn comes if no run holds the session.
    // Materialised, so that the limits hold.
    let claim = format!(
        concat!(
            "WITH RECURSIVE heads (id) AS (SELECT * FROM (SELECT id FROM runs WHERE tenant = :tenant AND ",
            waits_for_session!(""),
            " ORDER BY session_id, session_place, available_at, id LIMIT 1) AS first \
         UNION ALL SELECT (SELECT r.id FROM runs r WHERE r.tenant = :tenant AND ",
            waits_for_session!("r."),
            " AND r.session_id > h.session_id \
         ORDER BY r.session_id, r.session_place, r.available_at, r.id LIMIT 1) \
         FROM heads JOIN runs h ON h.id = heads.id), \
         turned AS MATERIALIZED (SELECT id, priority, available_at FROM runs w \
         WHERE id IN (SELECT id FROM heads) AND ",
            waits_for_session!("w."),
            " AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.tenant = w.tenant \
         AND r.session_id = w.session_id AND r.session_place = 'holds' \
         AND r.finished_at IS NULL) AND w.available_at <= {{now}} \
         AND w.format <= :format{no_full_key_of_w}{not_excluded_of_w} \
         ORDER BY w.priority DESC, w.available_at, w.id LIMIT :limit{{skip_locked}}), \
         due AS MATERIALIZED (SELECT id, priority, available_at FROM runs WHERE ",
            waits_for_replica!(""),
            " AND tenant = :tenant AND available_at <= {{now}} AND format <= :format{no_full_key}{not_excluded} \
         ORDER BY priority DESC, available_at, id LIMIT :limit{{skip_locked}}), \
         next AS MATERIALIZED (SELECT id AS next_id FROM (SELECT * FROM turned \
         UNION ALL SELECT * FROM due) AS both_lines ORDER BY priority DESC, available_at, id LIMIT :limit) \
         UPDATE runs SET status = 'running', owner = :owner, epoch = epoch + 1, format = :format, \
         available_at = NULL, \
         session_place = CASE WHEN session_place IS NOT NULL THEN 'holds' END, \
         session_turn = CASE WHEN session_place <> 'holds' THEN \
         (SELECT COALESCE(max(r.session_turn), 0) + 1 FROM runs r \
         WHERE r.tenant = runs.tenant AND r.session_id = runs.session_id \
         AND r.session_turn IS NOT NULL) ELSE session_turn END \
         FROM next WHERE id = next_id",
            returning_claimed!(),
        ),
        no_full_key = no_full_key,
        no_full_key_of_w = no_full_key_of_w,
        not_excluded = not_excluded,
        not_excluded_of_w = not_excluded_of_w
    );
    let claim = Query::new(claim);
    let claim = if full_keys.is_empty() { claim } else { claim.bind("full_keys", full_keys) };
    let claim = if excluded.is_empty() { claim } else { claim.bind("excluded", excluded) };
    let claim = claim.bind("owner", owner).bind("tenant", tenant).bind("limit", limit);
    claim.bind("format", FORMAT)
}
