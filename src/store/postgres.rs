//! The store on PostgreSQL: any number of replicas share one database.
//!
//! Commits, reads and control (claims, heartbeats, cancelling) have connections of their own, so
//! that slow lists cannot delay a commit, nor full queues a heartbeat. Leases follow the database's
//! clock. Plans are kept simple on purpose. Every statement is written for index look-ups, so
//! sequential scans, which a planner without statistics chooses for a table that is still small and
//! keeps when it has grown, are off; and the commit statement is planned once per connection.

mod approvals;
mod budgets;
mod commit;
mod connections;
mod ownership;
mod retention;
mod statements;
mod wakeups;

use std::str::FromStr;
use std::time::Duration;

use super::migrations::POSTGRES as MIGRATIONS;
use async_trait::async_trait;
use chrono::{DateTime, Utc};
use sqlx::postgres::{PgConnectOptions, PgConnection, PgRow};
use sqlx::{ConnectOptions, Connection, Row};
use tokio::sync::broadcast;
use uuid::Uuid;

use self::connections::{Connections, within};
use self::statements::DIALECT;
use self::wakeups::{CHANNEL, QUEUE_PAYLOAD, Wakeups};
use super::decode::{Columns, claimed};
use super::definitions::Definitions;
use super::observations::words;
use super::projection::{StoredCall, attach_payloads, project};
use super::{
    Answer, ApiKeyRecord, ApprovalFilter, ApprovalRecord, AuditFilter, AuditRow, CancelOutcome,
    ClaimedRun, DatabaseInfo, IdempotentRun, IterationRecord, Observation, Page, RateLimit,
    RunCursor, RunFilter, RunRecord, RunWrite, SessionDeleted, SessionRecord, SharedBudget,
    StatsFilter, Store, StoreError, Swept, Taken, ToolCallRecord, ToolStats, UsageStats, Wakeup,
    WriteOutcome, listing,
};
use crate::event::Event;
use crate::run::{Amounts, Caps, Reserved, RunStatus};

/// Connections for commits: two in flight and one to spare.
const COMMIT_CONNECTIONS: usize = 3;
/// Connections for claims, heartbeats, cancelling and the sweep.
const CONTROL_CONNECTIONS: usize = 3;

/// A PostgreSQL database.
pub struct Postgres {
    options: PgConnectOptions,
    commits: Connections,
    reads: Connections,
    control: Connections,
    definitions: Definitions,
    wakeups: Wakeups,
}

impl Postgres {
    /// Connects once, to find out whether the database can be reached.
    ///
    /// `max_connections` is the sum over all purposes, the listener included; at least 9 are used.
    ///
    /// # Errors
    /// [`StoreError::Failed`] for a URL that is not valid or a login that is refused,
    /// [`StoreError::Unavailable`] where nobody answers.
    pub async fn connect(url: &str, max_connections: u32) -> Result<Self, StoreError> {
        let invalid = |_| StoreError::Failed("the PostgreSQL URL is not valid".to_owned());
        let plain = PgConnectOptions::from_str(url).map_err(invalid)?.disable_statement_logging();
        let options = plain.clone().application_name("toolloop").options([
            ("statement_timeout", "5s"),
            ("lock_timeout", "2s"),
            ("idle_in_transaction_session_timeout", "10s"),
            ("jit", "off"),
            ("enable_seqscan", "off"),
        ]);
        let planned_once = options.clone().options([
            ("plan_cache_mode", "force_generic_plan"),
            ("enable_hashjoin", "off"),
            ("enable_mergejoin", "off"),
        ]);
        let others = COMMIT_CONNECTIONS + CONTROL_CONNECTIONS + 1;
        let reads =
            usize::try_from(max_connections).unwrap_or(usize::MAX).saturating_sub(others).max(2);
        let store = Self {
            commits: Connections::new(planned_once, COMMIT_CONNECTIONS),
            reads: Connections::new(options.clone(), reads),
            control: Connections::new(options, CONTROL_CONNECTIONS),
            definitions: Definitions::default(),
            wakeups: Wakeups::new(plain.clone()),
            options: plain,
        };
        let line = store.control.get().await?;
        line.settle(Ok(()))?;
        Ok(store)
    }

    /// Tells all replicas that something waits in the queue.
    async fn hint_queue(&self) {
        let hint = sqlx::query("SELECT pg_notify($1, $2)").bind(CHANNEL).bind(QUEUE_PAYLOAD);
        if let Err(error) = self.control.fetch(hint).await {
            tracing::debug!(%error, "nobody was told of a queued run; it will be found by polling");
        }
    }

    /// Stores the definitions of new runs that are not known to be stored.
    async fn define(&self, batch: &[RunWrite]) -> Result<(), StoreError> {
        let missing = self.definitions.missing(batch);
        if !missing.is_empty() {
            let (hashes, bodies): (Vec<&str>, Vec<&str>) =
                missing.iter().map(|d| (&*d.hash, &*d.json)).unzip();
            self.commits.fetch(sqlx::query(statements::DEFINE).bind(hashes).bind(bodies)).await?;
            self.definitions.note(&missing);
        }
        Ok(())
    }

    /// Runs one of the statements that count.
    async fn stats(
        &self,
        statement: &'static str,
        tenant: &str,
        filter: &StatsFilter,
    ) -> Result<Vec<PgRow>, StoreError> {
        let stats = sqlx::query(statement).bind(tenant).bind(filter.since).bind(filter.until);
        self.reads.fetch(stats.bind(&filter.agent)).await
    }
}

/// Commits a batch on one connection; the outcome of each write.
async fn commit_on(
    connection: &mut PgConnection,
    owner: &str,
    batch: &[RunWrite],
) -> Result<Vec<WriteOutcome>, StoreError> {
    let mut stored = commit::write(connection, owner, &project(batch)?).await?;
    let missed = |write: &&RunWrite| write.is_repeated && !stored.contains(&write.run_id);
    let missed: Vec<&RunWrite> = batch.iter().filter(missed).collect();
    if !missed.is_empty() {
        stored.extend(commit::stored_earlier(connection, &missed).await?);
    }
    let outcome = |write: &RunWrite| match &write.new {
        _ if stored.contains(&write.run_id) => WriteOutcome::Committed,
        Some(_) => WriteOutcome::IdTaken,
        None => WriteOutcome::Fenced,
    };
    Ok(batch.iter().map(outcome).collect())
}

/// The same, with runs in it that are given back: one that waits for nothing any more by then is
/// queued.
async fn park_on(
    connection: &mut PgConnection,
    owner: &str,
    batch: &[RunWrite],
) -> Result<Vec<WriteOutcome>, StoreError> {
    let mut tx = connection.begin().await?;
    let outcomes = commit_on(&mut tx, owner, batch).await?;
    let parked: Vec<Uuid> =
        batch.iter().filter(|write| write.park.is_some()).map(|write| write.run_id).collect();
    approvals::go_on(&mut tx, &parked).await?;
    tx.commit().await?;
    Ok(outcomes)
}

fn limit<C>(page: &Page<C>) -> i64 {
    i64::from(page.limit)
}

#[async_trait]
impl Store for Postgres {
    fn kind(&self) -> &'static str {
        "postgres"
    }

    async fn migrate(&self) -> Result<(), StoreError> {
        // Without the limits of a session: a migration may take its time, and waits for another's.
        let mut connection = PgConnection::connect_with(&self.options).await?;
        let migrated = MIGRATIONS.run_direct(None, &mut connection, false).await;
        migrated.map_err(|error| {
            StoreError::Failed(format!("the schema cannot be brought up to date: {error}"))
        })?;
        connection.close().await.map_err(StoreError::from)
    }

    async fn about(&self) -> Result<DatabaseInfo, StoreError> {
        let rows = self.control.fetch(sqlx::query(statements::ABOUT)).await?;
        let row = rows
            .first()
            .ok_or_else(|| StoreError::Failed("it says nothing about itself".to_owned()))?;
        let applied: i64 = if row.try_get("is_migrated")? {
            let rows = self.control.fetch(sqlx::query(statements::MIGRATED)).await?;
            rows.first().map_or(Ok(0), |row| row.try_get(0))?
        } else {
            0
        };
        Ok(DatabaseInfo {
            version: format!("PostgreSQL {}", row.try_get::<&str, _>("version")?),
            applied: usize::try_from(applied).unwrap_or_default(),
            known: MIGRATIONS.iter().count(),
            now: Some(row.try_get("now")?),
        })
    }

    fn wakeups(&self) -> broadcast::Receiver<Wakeup> {
        self.wakeups.subscribe()
    }

    async fn close(&self) {
        self.wakeups.close();
        self.commits.close().await;
        self.reads.close().await;
        self.control.close().await;
    }

    async fn commit(
        &self,
        owner: &str,
        batch: &[RunWrite],
    ) -> Result<Vec<WriteOutcome>, StoreError> {
        self.define(batch).await?;
        let mut line = self.commits.get().await?;
        let is_parking = batch.iter().any(|write| write.park.is_some());
        let outcomes = if is_parking {
            within(park_on(&mut line, owner, batch)).await
        } else {
            within(commit_on(&mut line, owner, batch)).await
        };
        let outcomes = line.settle(outcomes)?;
        if is_parking
            || batch
                .iter()
                .any(|write| write.new.as_ref().is_some_and(|new| new.status == RunStatus::Queued))
        {
            self.hint_queue().await;
        }
        Ok(outcomes)
    }

    async fn queued(&self) -> Result<u64, StoreError> {
        let rows = self.control.fetch(sqlx::query(statements::QUEUED)).await?;
        let queued: i64 = rows.first().map_or(Ok(0), |row| row.try_get(0))?;
        Ok(queued.unsigned_abs())
    }

    async fn claim(&self, owner: &str, limit: u32) -> Result<Vec<ClaimedRun>, StoreError> {
        let rows = self
            .control
            .fetch(sqlx::query(statements::CLAIM).bind(owner).bind(i64::from(limit)))
            .await?;
        Ok(claimed(&rows))
    }

    async fn claim_run(&self, owner: &str, run: Uuid) -> Result<Option<ClaimedRun>, StoreError> {
        let rows =
            self.control.fetch(sqlx::query(statements::CLAIM_RUN).bind(owner).bind(run)).await?;
        rows.first().map(|row| Columns(row).claimed()).transpose()
    }

    async fn claim_cancelled(
        &self,
        owner: &str,
        limit: u32,
    ) -> Result<Vec<ClaimedRun>, StoreError> {
        let claim = sqlx::query(statements::CLAIM_CANCELLED).bind(owner).bind(i64::from(limit));
        let rows = self.control.fetch(claim).await?;
        Ok(claimed(&rows))
    }

    async fn request_cancel(
        &self,
        tenant: &str,
        run: Uuid,
        reason: Option<&str>,
    ) -> Result<Option<CancelOutcome>, StoreError> {
        let mut line = self.control.get().await?;
        let outcome = within(ownership::request_cancel(&mut line, tenant, run, reason)).await;
        line.settle(outcome)
    }

    async fn cancel_requests(
        &self,
        owner: &str,
    ) -> Result<Vec<(Uuid, Option<String>)>, StoreError> {
        let rows = self.control.fetch(sqlx::query(statements::CANCEL_REQUESTS).bind(owner)).await?;
        rows.iter().map(|row| Columns(row).cancel_request()).collect()
    }

    async fn delete_ended(&self, before: DateTime<Utc>, limit: u32) -> Result<u64, StoreError> {
        let mut line = self.reads.get().await?;
        let deleted = within(retention::delete_ended(&mut line, before, limit)).await;
        line.settle(deleted)
    }

    async fn release(&self, owner: &str) -> Result<u64, StoreError> {
        let release = sqlx::query(statements::RELEASE).bind(owner);
        let mut line = self.control.get().await?;
        let released =
            within(async { Ok(release.execute(&mut *line).await?.rows_affected()) }).await;
        let released = line.settle(released)?;
        self.hint_queue().await;
        Ok(released)
    }

    async fn owned_runs(&self, owner: &str) -> Result<Vec<(Uuid, i64)>, StoreError> {
        let rows = self.control.fetch(sqlx::query(statements::OWNED).bind(owner)).await?;
        rows.iter().map(|row| Columns(row).ownership()).collect()
    }

    async fn give_back(
        &self,
        owner: &str,
        run: Uuid,
        epoch: i64,
        has_crashed: bool,
    ) -> Result<bool, StoreError> {
        let give_back = sqlx::query(statements::GIVE_BACK).bind(owner).bind(run);
        let give_back = give_back.bind(epoch).bind(i64::from(has_crashed));
        let mut line = self.control.get().await?;
        let had =
            within(async { Ok(give_back.execute(&mut *line).await?.rows_affected() > 0) }).await;
        let had = line.settle(had)?;
        self.hint_queue().await;
        Ok(had)
    }

    async fn answer(
        &self,
        tenant: &str,
        run: Uuid,
        call: Uuid,
        answer: &Answer,
    ) -> Result<Option<RunRecord>, StoreError> {
        let mut line = self.control.get().await?;
        let answered = within(approvals::answer(&mut line, tenant, run, call, answer)).await;
        let answered = line.settle(answered)?;
        if answered.is_some() {
            self.hint_queue().await;
        }
        Ok(answered)
    }

    async fn expire_approvals(&self) -> Result<u64, StoreError> {
        let mut line = self.control.get().await?;
        let expired = within(approvals::expire(&mut line)).await;
        let expired = line.settle(expired)?;
        if expired > 0 {
            self.hint_queue().await;
        }
        Ok(expired)
    }

    async fn approvals(
        &self,
        tenant: &str,
        filter: &ApprovalFilter,
        page: &Page<RunCursor>,
    ) -> Result<Vec<ApprovalRecord>, StoreError> {
        let mut list = listing::approvals(&DIALECT, tenant, filter, page);
        let rows = self.reads.fetch(list.build()).await?;
        rows.iter().map(|row| Columns(row).approval()).collect()
    }

    async fn definition(&self, hash: &str) -> Result<Option<String>, StoreError> {
        let rows = self.reads.fetch(sqlx::query(statements::DEFINITION).bind(hash)).await?;
        rows.first().map(|row| Ok(row.try_get(0)?)).transpose()
    }

    async fn register_replica(&self, id: &str) -> Result<(), StoreError> {
        self.control.fetch(sqlx::query(statements::REGISTER).bind(id)).await?;
        Ok(())
    }

    async fn heartbeat(&self, id: &str) -> Result<bool, StoreError> {
        let renewed = self.control.fetch(sqlx::query(statements::HEARTBEAT).bind(id)).await?;
        Ok(!renewed.is_empty())
    }

    async fn sweep(&self, sweeper: &str, lease: Duration) -> Result<Swept, StoreError> {
        let mut line = self.control.get().await?;
        let buried = within(ownership::bury(&mut line, sweeper, lease)).await;
        let mut swept = Swept { replicas: line.settle(buried)?, ..Swept::default() };
        loop {
            let mut line = self.control.get().await?;
            let requeued = within(ownership::requeue_orphans(&mut line)).await;
            let requeued = line.settle(requeued)?;
            if requeued.is_empty() {
                break;
            }
            swept.requeued.extend(requeued);
        }
        let mut line = self.control.get().await?;
        let strays = within(ownership::cancel_strays(&mut line)).await;
        line.settle(strays)?;
        let mut line = self.reads.get().await?;
        let settled = within(budgets::settle_rest(&mut line)).await;
        line.settle(settled)?;
        if !swept.requeued.is_empty() {
            self.hint_queue().await;
        }
        Ok(swept)
    }

    async fn run(&self, tenant: &str, run: Uuid) -> Result<Option<RunRecord>, StoreError> {
        let rows = self.reads.fetch(sqlx::query(statements::RUN).bind(tenant).bind(run)).await?;
        rows.first().map(|row| Columns(row).run()).transpose()
    }

    async fn idempotent_run(
        &self,
        tenant: &str,
        key: &str,
    ) -> Result<Option<IdempotentRun>, StoreError> {
        let rows = self
            .reads
            .fetch(sqlx::query(statements::IDEMPOTENT_RUN).bind(tenant).bind(key))
            .await?;
        rows.first().map(|row| Columns(row).idempotent_run()).transpose()
    }

    async fn forget_idempotency_key(
        &self,
        tenant: &str,
        key: &str,
        before: DateTime<Utc>,
    ) -> Result<(), StoreError> {
        self.reads
            .fetch(sqlx::query(statements::FORGET_KEY).bind(tenant).bind(key).bind(before))
            .await?;
        Ok(())
    }

    async fn runs(
        &self,
        tenant: &str,
        filter: &RunFilter,
        page: &Page<RunCursor>,
    ) -> Result<Vec<RunRecord>, StoreError> {
        let mut list = listing::runs(&DIALECT, tenant, filter, page);
        let rows = self.reads.fetch(list.build()).await?;
        rows.iter().map(|row| Columns(row).run()).collect()
    }

    async fn events(
        &self,
        tenant: &str,
        run: Uuid,
        after: i64,
        limit: u32,
    ) -> Result<Vec<Event>, StoreError> {
        let page = sqlx::query(statements::EVENTS)
            .bind(tenant)
            .bind(run)
            .bind(after)
            .bind(i64::from(limit));
        let rows = self.reads.fetch(page).await?;
        rows.iter().map(|row| Columns(row).event()).collect()
    }

    async fn journals(&self, tenant: &str, runs: &[Uuid]) -> Result<Vec<Event>, StoreError> {
        let rows =
            self.reads.fetch(sqlx::query(statements::JOURNALS).bind(tenant).bind(runs)).await?;
        rows.iter().map(|row| Columns(row).event()).collect()
    }

    async fn session(
        &self,
        tenant: &str,
        session: &str,
        ended: u32,
    ) -> Result<Option<SessionRecord>, StoreError> {
        let look =
            sqlx::query(statements::SESSION).bind(tenant).bind(session).bind(i64::from(ended));
        let rows = self.reads.fetch(look).await?;
        rows.first().map(|row| Columns(row).session()).transpose()
    }

    async fn delete_session(
        &self,
        tenant: &str,
        session: &str,
    ) -> Result<SessionDeleted, StoreError> {
        let mut line = self.reads.get().await?;
        let deleted = within(retention::delete_session(&mut line, tenant, session)).await;
        line.settle(deleted)
    }

    async fn recall(
        &self,
        tenant: &str,
        agent: &str,
        except: Uuid,
        text: &str,
        limit: u32,
    ) -> Result<Vec<Observation>, StoreError> {
        let words: Vec<String> = words(text).into_iter().map(|word| format!("'{word}'")).collect();
        if words.is_empty() {
            return Ok(Vec::new());
        }
        let look = sqlx::query(statements::RECALL).bind(tenant).bind(agent).bind(except);
        let rows = self.reads.fetch(look.bind(words.join(" | ")).bind(i64::from(limit))).await?;
        rows.iter().map(|row| Columns(row).observation()).collect()
    }

    async fn iterations(
        &self,
        tenant: &str,
        run: Uuid,
        page: &Page<i64>,
    ) -> Result<Vec<IterationRecord>, StoreError> {
        let list = sqlx::query(statements::ITERATIONS).bind(tenant).bind(run);
        let rows =
            self.reads.fetch(list.bind(limit(page)).bind(page.after.unwrap_or_default())).await?;
        rows.iter().map(|row| Columns(row).iteration()).collect()
    }

    async fn tool_calls(
        &self,
        tenant: &str,
        run: Uuid,
        page: &Page<i64>,
    ) -> Result<Vec<ToolCallRecord>, StoreError> {
        let list = sqlx::query(statements::TOOL_CALLS).bind(tenant).bind(run);
        let rows =
            self.reads.fetch(list.bind(limit(page)).bind(page.after.unwrap_or_default())).await?;
        let calls = rows.iter().map(|row| Columns(row).call()).collect::<Result<Vec<_>, _>>()?;
        let sources: Vec<i64> = calls.iter().flat_map(StoredCall::sources).collect();
        let rows =
            self.reads.fetch(sqlx::query(statements::EVENTS_AT).bind(run).bind(sources)).await?;
        let events = rows.iter().map(|row| Columns(row).event()).collect::<Result<Vec<_>, _>>()?;
        Ok(attach_payloads(calls, events))
    }

    async fn tool_stats(
        &self,
        tenant: &str,
        filter: &StatsFilter,
    ) -> Result<Vec<ToolStats>, StoreError> {
        let rows = self.stats(statements::TOOL_STATS, tenant, filter).await?;
        rows.iter().map(|row| Columns(row).tool_stats()).collect()
    }

    async fn usage_stats(
        &self,
        tenant: &str,
        filter: &StatsFilter,
    ) -> Result<Vec<UsageStats>, StoreError> {
        let rows = self.stats(statements::USAGE_STATS, tenant, filter).await?;
        rows.iter().map(|row| Columns(row).usage_stats()).collect()
    }

    async fn audit(
        &self,
        tenant: &str,
        filter: &AuditFilter,
        page: &Page<RunCursor>,
    ) -> Result<Vec<AuditRow>, StoreError> {
        let mut list = listing::audit(&DIALECT, tenant, filter, page);
        let rows = self.reads.fetch(list.build()).await?;
        rows.iter().map(|row| Columns(row).audit()).collect()
    }

    async fn insert_key(&self, key: &ApiKeyRecord) -> Result<bool, StoreError> {
        let insert = sqlx::query(statements::INSERT_KEY)
            .bind(&key.id)
            .bind(&key.tenant)
            .bind(&key.name)
            .bind(&key.scopes)
            .bind(&key.secret_hash)
            .bind(key.created_at)
            .bind(key.expires_at)
            .bind(key.revoked_at)
            .bind(key.rate_limit_per_minute.map(i64::from))
            .bind(key.rate_limit_burst.map(i64::from));
        Ok(!self.reads.fetch(insert).await?.is_empty())
    }

    async fn has_keys(&self) -> Result<bool, StoreError> {
        let rows = self.reads.fetch(sqlx::query(statements::HAS_KEYS)).await?;
        Ok(!rows.is_empty())
    }

    async fn key(&self, id: &str) -> Result<Option<ApiKeyRecord>, StoreError> {
        let rows = self.reads.fetch(sqlx::query(statements::KEY).bind(id)).await?;
        rows.first().map(|row| Columns(row).key()).transpose()
    }

    async fn keys(
        &self,
        tenant: &str,
        page: &Page<RunCursor>,
    ) -> Result<Vec<ApiKeyRecord>, StoreError> {
        let mut list = listing::keys(&DIALECT, tenant, page);
        let rows = self.reads.fetch(list.build()).await?;
        rows.iter().map(|row| Columns(row).key()).collect()
    }

    async fn revoke_key(&self, tenant: &str, id: &str) -> Result<bool, StoreError> {
        let revoked =
            self.reads.fetch(sqlx::query(statements::REVOKE_KEY).bind(tenant).bind(id)).await?;
        Ok(!revoked.is_empty())
    }

    async fn open_budget(&self, root: Uuid, caps: Caps, spent: Amounts) -> Result<(), StoreError> {
        let mut line = self.reads.get().await?;
        let opened = within(budgets::open(&mut line, root, caps, spent)).await;
        line.settle(opened)
    }

    async fn reserve(
        &self,
        root: Uuid,
        run: Uuid,
        wanted: Amounts,
    ) -> Result<Reserved, StoreError> {
        let mut line = self.reads.get().await?;
        let reserved = within(budgets::reserve(&mut line, (root, run), wanted)).await;
        line.settle(reserved)
    }

    async fn settle(
        &self,
        root: Uuid,
        run: Uuid,
        spent: Amounts,
        ended: bool,
    ) -> Result<(), StoreError> {
        let mut line = self.reads.get().await?;
        let settled = within(budgets::settle(&mut line, (root, run), spent, ended)).await;
        line.settle(settled)
    }

    async fn shared_budget(&self, root: Uuid) -> Result<Option<SharedBudget>, StoreError> {
        let mut line = self.reads.get().await?;
        let budget = within(budgets::read(&mut line, root)).await;
        line.settle(budget)
    }

    async fn take_tokens(
        &self,
        bucket: &str,
        limit: RateLimit,
        tokens: u32,
    ) -> Result<Taken, StoreError> {
        let take = sqlx::query(statements::TAKE_TOKENS)
            .bind(bucket)
            .bind(limit.interval())
            .bind(limit.window());
        let rows = self.reads.fetch(take.bind(i64::from(tokens))).await?;
        let row =
            rows.first().ok_or_else(|| StoreError::Failed("a bucket gave no answer".to_owned()))?;
        Columns(row).taken(limit)
    }
}
