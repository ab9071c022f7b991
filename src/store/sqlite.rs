//! The embedded store: one SQLite file, one process.
//!
//! One connection writes, always in `BEGIN IMMEDIATE`; a few others read. A lock file beside the
//! database keeps a second process out, so every replica row that this process did not write is one
//! of a process that is gone, whatever its lease says, and wake-ups never leave the process.

mod approvals;
mod budgets;
mod commit;
mod ownership;
mod retention;
mod statements;

use std::collections::HashSet;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::migrations::SQLITE as MIGRATIONS;
use async_trait::async_trait;
use chrono::{DateTime, Utc};
use sqlx::query::Query;
use sqlx::sqlite::{
    SqliteArguments, SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePool,
    SqlitePoolOptions, SqliteRow, SqliteSynchronous,
};
use sqlx::{ConnectOptions, Connection, Row, Sqlite as Dialect, Transaction};
use tokio::sync::{MappedMutexGuard, Mutex as AsyncMutex, MutexGuard, broadcast};
use uuid::Uuid;

use self::statements::DIALECT;
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

/// Connections that read at the same time.
const READERS: u32 = 4;

/// An SQLite database file.
pub struct Sqlite {
    /// `None` once closed, as the lock below.
    writer: AsyncMutex<Option<SqliteConnection>>,
    lock: Mutex<Option<File>>,
    options: SqliteConnectOptions,
    readers: SqlitePool,
    /// Replicas that live in this process.
    registered: Mutex<HashSet<String>>,
    definitions: Definitions,
    wakeups: broadcast::Sender<Wakeup>,
}

impl Sqlite {
    /// Opens the file of a path or of a URL `sqlite://path`, and makes it and its directory.
    ///
    /// # Errors
    /// [`StoreError::Locked`] where another process has it open, [`StoreError::Failed`] where it
    /// cannot be made or is no database.
    pub async fn open(location: &str) -> Result<Self, StoreError> {
        let path = location.strip_prefix("sqlite:").unwrap_or(location);
        let path = PathBuf::from(path.strip_prefix("//").unwrap_or(path));
        let cannot = |error: std::io::Error| {
            StoreError::Failed(format!("{} cannot be opened: {error}", path.display()))
        };
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(cannot)?;
        }
        let lock = lock(&path)?;
        let options = SqliteConnectOptions::new()
            .filename(&path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(Duration::from_secs(5))
            .foreign_keys(false)
            .disable_statement_logging();
        let writer = options.connect().await?;
        let readers = SqlitePoolOptions::new().max_connections(READERS).test_before_acquire(false);
        Ok(Self {
            writer: AsyncMutex::new(Some(writer)),
            lock: Mutex::new(Some(lock)),
            readers: readers.connect_lazy_with(options.clone()),
            options,
            registered: Mutex::default(),
            definitions: Definitions::default(),
            wakeups: broadcast::Sender::new(1024),
        })
    }

    async fn writer(&self) -> Result<MappedMutexGuard<'_, SqliteConnection>, StoreError> {
        let closed = |_| StoreError::Unavailable("it is closed".to_owned());
        let mut writer =
            MutexGuard::try_map(self.writer.lock().await, Option::as_mut).map_err(closed)?;
        if writer.is_in_transaction() {
            writer.ping().await?; // until a rollback that is on its way has been carried out
        }
        if writer.is_in_transaction() {
            // SQLite ends a transaction by itself where the disk is full, and the driver never
            // learns it.
            *writer = self.options.connect().await?;
        }
        Ok(writer)
    }

    /// Runs one statement that reads.
    async fn read(
        &self,
        query: Query<'_, Dialect, SqliteArguments>,
    ) -> Result<Vec<SqliteRow>, StoreError> {
        query.fetch_all(&self.readers).await.map_err(StoreError::from)
    }

    /// Runs one statement that writes; how many rows it changed.
    async fn change(&self, query: Query<'_, Dialect, SqliteArguments>) -> Result<u64, StoreError> {
        Ok(query.execute(&mut *self.writer().await?).await?.rows_affected())
    }

    fn registered(&self) -> Vec<String> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    fn hint(&self, wakeup: Wakeup) {
        // Nobody listening is nothing to worry about.
        let _ = self.wakeups.send(wakeup);
    }

    /// Runs one of the statements that count.
    async fn stats(
        &self,
        statement: &'static str,
        tenant: &str,
        filter: &StatsFilter,
    ) -> Result<Vec<SqliteRow>, StoreError> {
        let stats = sqlx::query(statement)
            .bind(tenant)
            .bind(filter.since.timestamp_micros())
            .bind(filter.until.timestamp_micros());
        self.read(stats.bind(&filter.agent)).await
    }
}

/// Holds `<database>.lock` for as long as the file lives.
fn lock(database: &Path) -> Result<File, StoreError> {
    let mut name = database.as_os_str().to_owned();
    name.push(".lock");
    let cannot =
        |error| StoreError::Failed(format!("{} cannot be locked: {error}", database.display()));
    let file =
        File::options().create(true).truncate(false).write(true).open(name).map_err(cannot)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::Error(error)) => Err(cannot(error)),
        Err(TryLockError::WouldBlock) => Err(StoreError::Locked(format!(
            "{} is in use by another toolloop process; stop it, or use PostgreSQL to run several",
            database.display()
        ))),
    }
}

async fn begin(connection: &mut SqliteConnection) -> Result<Transaction<'_, Dialect>, StoreError> {
    connection.begin_with("BEGIN IMMEDIATE").await.map_err(StoreError::from)
}

fn now() -> i64 {
    Utc::now().timestamp_micros()
}

#[async_trait]
impl Store for Sqlite {
    fn kind(&self) -> &'static str {
        "sqlite"
    }

    async fn migrate(&self) -> Result<(), StoreError> {
        let migrated = MIGRATIONS.run_direct(None, &mut *self.writer().await?, false).await;
        migrated.map_err(|error| {
            StoreError::Failed(format!("the schema cannot be brought up to date: {error}"))
        })
    }

    async fn about(&self) -> Result<DatabaseInfo, StoreError> {
        let rows = self.read(sqlx::query(statements::ABOUT)).await?;
        let row = rows
            .first()
            .ok_or_else(|| StoreError::Failed("it says nothing about itself".to_owned()))?;
        let applied: i64 = if row.try_get("is_migrated")? {
            let rows = self.read(sqlx::query(statements::MIGRATED)).await?;
            rows.first().map_or(Ok(0), |row| row.try_get(0))?
        } else {
            0
        };
        Ok(DatabaseInfo {
            version: format!("SQLite {}", row.try_get::<&str, _>("version")?),
            applied: usize::try_from(applied).unwrap_or_default(),
            known: MIGRATIONS.iter().count(),
            now: None,
        })
    }

    async fn try_writing(&self) -> Result<(), StoreError> {
        // One heartbeat more harms nobody.
        let living = serde_json::Value::from(self.registered()).to_string();
        self.change(sqlx::query(statements::BEAT).bind(living).bind(now())).await?;
        Ok(())
    }

    fn wakeups(&self) -> broadcast::Receiver<Wakeup> {
        self.wakeups.subscribe()
    }

    async fn close(&self) {
        self.readers.close().await;
        if let Some(writer) = self.writer.lock().await.take()
            && let Err(error) = writer.close().await
        {
            tracing::warn!(%error, "the database was not closed cleanly");
        }
        self.lock.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    async fn commit(
        &self,
        owner: &str,
        batch: &[RunWrite],
    ) -> Result<Vec<WriteOutcome>, StoreError> {
        let changes = project(batch)?;
        let mut writer = self.writer().await?;
        let mut tx = begin(&mut writer).await?;
        let missing = self.definitions.missing(batch);
        for definition in &missing {
            let define = sqlx::query(statements::DEFINE)
                .bind(&definition.hash)
                .bind(&definition.json)
                .bind(now());
            define.execute(&mut *tx).await?;
        }
        let written = commit::write(&mut tx, owner, &changes, Utc::now()).await?;
        let mut outcomes = Vec::with_capacity(batch.len());
        for write in batch {
            outcomes.push(
                if written.contains(&write.run_id)
                    || write.is_repeated && commit::stored_earlier(&mut tx, write).await?
                {
                    WriteOutcome::Committed
                } else if write.new.is_some() {
                    WriteOutcome::IdTaken
                } else {
                    WriteOutcome::Fenced
                },
            );
        }
        let parked = batch.iter().filter(|write| write.park.is_some());
        let parked: Vec<String> = parked.map(|write| write.run_id.to_string()).collect();
        if !parked.is_empty() {
            approvals::go_on(&mut tx, &parked, Utc::now()).await?; // what it waits for may have come by now
        }
        tx.commit().await?;
        drop(writer);
        self.definitions.note(&missing);
        if !parked.is_empty()
            || batch
                .iter()
                .any(|write| write.new.as_ref().is_some_and(|new| new.status == RunStatus::Queued))
        {
            self.hint(Wakeup::Queue);
        }
        Ok(outcomes)
    }

    async fn queued(&self) -> Result<u64, StoreError> {
        let rows = self.read(sqlx::query(statements::QUEUED)).await?;
        let queued: i64 = rows.first().map_or(Ok(0), |row| row.try_get(0))?;
        Ok(queued.unsigned_abs())
    }

    async fn claim(&self, owner: &str, limit: u32) -> Result<Vec<ClaimedRun>, StoreError> {
        let claim = sqlx::query(statements::CLAIM).bind(owner).bind(i64::from(limit)).bind(now());
        let rows = claim.fetch_all(&mut *self.writer().await?).await?;
        Ok(claimed(&rows))
    }

    async fn claim_run(&self, owner: &str, run: Uuid) -> Result<Option<ClaimedRun>, StoreError> {
        let claim =
            sqlx::query(statements::CLAIM_RUN).bind(owner).bind(run.to_string()).bind(now());
        let row = claim.fetch_optional(&mut *self.writer().await?).await?;
        row.map(|row| Columns(&row).claimed()).transpose()
    }

    async fn claim_cancelled(
        &self,
        owner: &str,
        limit: u32,
    ) -> Result<Vec<ClaimedRun>, StoreError> {
        if self.read(sqlx::query(statements::ARE_CANCELLED)).await?.is_empty() {
            return Ok(Vec::new()); // and nothing is written
        }
        let claim = sqlx::query(statements::CLAIM_CANCELLED).bind(owner).bind(i64::from(limit));
        let rows = claim.fetch_all(&mut *self.writer().await?).await?;
        Ok(claimed(&rows))
    }

    async fn request_cancel(
        &self,
        tenant: &str,
        run: Uuid,
        reason: Option<&str>,
    ) -> Result<Option<CancelOutcome>, StoreError> {
        let mut writer = self.writer().await?;
        let mut tx = begin(&mut writer).await?;
        let outcome = ownership::request_cancel(&mut tx, tenant, run, reason).await?;
        tx.commit().await?;
        if outcome.is_some() {
            self.hint(Wakeup::Cancel(run)); // whoever hears it asks for all requests
        }
        Ok(outcome)
    }

    async fn cancel_requests(
        &self,
        owner: &str,
    ) -> Result<Vec<(Uuid, Option<String>)>, StoreError> {
        let rows = self.read(sqlx::query(statements::CANCEL_REQUESTS).bind(owner)).await?;
        rows.iter().map(|row| Columns(row).cancel_request()).collect()
    }

    async fn delete_ended(&self, before: DateTime<Utc>, limit: u32) -> Result<u64, StoreError> {
        let mut writer = self.writer().await?;
        let mut tx = begin(&mut writer).await?;
        let deleted = retention::delete_ended(&mut tx, before, limit).await?;
        tx.commit().await?;
        Ok(deleted)
    }

    async fn release(&self, owner: &str) -> Result<u64, StoreError> {
        let release = sqlx::query(statements::RELEASE).bind(owner);
        let released = self.change(release.bind(now())).await?;
        self.hint(Wakeup::Queue);
        Ok(released)
    }

    async fn owned_runs(&self, owner: &str) -> Result<Vec<(Uuid, i64)>, StoreError> {
        let rows = self.read(sqlx::query(statements::OWNED).bind(owner)).await?;
        rows.iter().map(|row| Columns(row).ownership()).collect()
    }

    async fn give_back(
        &self,
        owner: &str,
        run: Uuid,
        epoch: i64,
        has_crashed: bool,
    ) -> Result<bool, StoreError> {
        let give_back = sqlx::query(statements::GIVE_BACK).bind(owner).bind(run.to_string());
        let give_back = give_back.bind(epoch).bind(i64::from(has_crashed)).bind(now());
        let had = self.change(give_back).await? > 0;
        self.hint(Wakeup::Queue);
        Ok(had)
    }

    async fn answer(
        &self,
        tenant: &str,
        run: Uuid,
        call: Uuid,
        answer: &Answer,
    ) -> Result<Option<RunRecord>, StoreError> {
        let mut writer = self.writer().await?;
        let mut tx = begin(&mut writer).await?;
        let answered = approvals::answer(&mut tx, tenant, run, call, answer).await?;
        tx.commit().await?;
        if answered.is_some() {
            self.hint(Wakeup::Queue);
        }
        Ok(answered)
    }

    async fn expire_approvals(&self) -> Result<u64, StoreError> {
        if self.read(sqlx::query(approvals::IS_DUE).bind(now())).await?.is_empty() {
            return Ok(0); // and nothing is written
        }
        let mut writer = self.writer().await?;
        let mut tx = begin(&mut writer).await?;
        let expired = approvals::expire(&mut tx, Utc::now()).await?;
        tx.commit().await?;
        self.hint(Wakeup::Queue);
        Ok(expired)
    }

    async fn approvals(
        &self,
        tenant: &str,
        filter: &ApprovalFilter,
        page: &Page<RunCursor>,
    ) -> Result<Vec<ApprovalRecord>, StoreError> {
        let mut list = listing::approvals(&DIALECT, tenant, filter, page);
        self.read(list.build()).await?.iter().map(|row| Columns(row).approval()).collect()
    }

    async fn definition(&self, hash: &str) -> Result<Option<String>, StoreError> {
        let rows = self.read(sqlx::query(statements::DEFINITION).bind(hash)).await?;
        rows.first().map(|row| Ok(row.try_get(0)?)).transpose()
    }

    async fn register_replica(&self, id: &str) -> Result<(), StoreError> {
        self.change(sqlx::query(statements::REGISTER).bind(id).bind(now())).await?;
        self.registered.lock().unwrap_or_else(PoisonError::into_inner).insert(id.to_owned());
        Ok(())
    }

    async fn heartbeat(&self, id: &str) -> Result<bool, StoreError> {
        Ok(self.change(sqlx::query(statements::HEARTBEAT).bind(id).bind(now())).await? > 0)
    }

    async fn sweep(&self, sweeper: &str, lease: Duration) -> Result<Swept, StoreError> {
        let living = self.registered();
        let mut writer = self.writer().await?;
        let mut tx = begin(&mut writer).await?;
        let replicas = ownership::bury(&mut tx, sweeper, Utc::now() - lease, &living).await?;
        let requeued = ownership::requeue_orphans(&mut tx).await?;
        let strays = ownership::cancel_strays(&mut tx).await?;
        budgets::settle_rest(&mut tx).await?;
        tx.commit().await?;
        if !requeued.is_empty() {
            self.hint(Wakeup::Queue);
        }
        if strays {
            self.hint(Wakeup::Resync);
        }
        Ok(Swept { replicas, requeued })
    }

    async fn run(&self, tenant: &str, run: Uuid) -> Result<Option<RunRecord>, StoreError> {
        let rows =
            self.read(sqlx::query(statements::RUN).bind(tenant).bind(run.to_string())).await?;
        rows.first().map(|row| Columns(row).run()).transpose()
    }

    async fn idempotent_run(
        &self,
        tenant: &str,
        key: &str,
    ) -> Result<Option<IdempotentRun>, StoreError> {
        let rows =
            self.read(sqlx::query(statements::IDEMPOTENT_RUN).bind(tenant).bind(key)).await?;
        rows.first().map(|row| Columns(row).idempotent_run()).transpose()
    }

    async fn forget_idempotency_key(
        &self,
        tenant: &str,
        key: &str,
        before: DateTime<Utc>,
    ) -> Result<(), StoreError> {
        self.change(
            sqlx::query(statements::FORGET_KEY)
                .bind(tenant)
                .bind(key)
                .bind(before.timestamp_micros()),
        )
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
        self.read(list.build()).await?.iter().map(|row| Columns(row).run()).collect()
    }

    async fn events(
        &self,
        tenant: &str,
        run: Uuid,
        after: i64,
        limit: u32,
    ) -> Result<Vec<Event>, StoreError> {
        let page = sqlx::query(statements::EVENTS).bind(tenant).bind(run.to_string());
        let rows = self.read(page.bind(after).bind(i64::from(limit))).await?;
        rows.iter().map(|row| Columns(row).event()).collect()
    }

    async fn journals(&self, tenant: &str, runs: &[Uuid]) -> Result<Vec<Event>, StoreError> {
        let ids =
            serde_json::to_string(runs).map_err(|error| StoreError::Failed(error.to_string()))?;
        let rows = self.read(sqlx::query(statements::JOURNALS).bind(tenant).bind(ids)).await?;
        rows.iter().map(|row| Columns(row).event()).collect()
    }

    async fn session(
        &self,
        tenant: &str,
        session: &str,
        ended: u32,
    ) -> Result<Option<SessionRecord>, StoreError> {
        let rows = self
            .read(sqlx::query(statements::SESSION).bind(tenant).bind(session).bind(ended))
            .await?;
        rows.first().map(|row| Columns(row).session()).transpose()
    }

    async fn delete_session(
        &self,
        tenant: &str,
        session: &str,
    ) -> Result<SessionDeleted, StoreError> {
        let mut writer = self.writer().await?;
        let mut tx = begin(&mut writer).await?;
        let deleted = retention::delete_session(&mut tx, tenant, session).await?;
        tx.commit().await?;
        Ok(deleted)
    }

    async fn recall(
        &self,
        tenant: &str,
        agent: &str,
        except: Uuid,
        text: &str,
        limit: u32,
    ) -> Result<Vec<Observation>, StoreError> {
        let words: Vec<String> =
            words(text).into_iter().map(|word| format!("\"{word}\"")).collect();
        if words.is_empty() {
            return Ok(Vec::new());
        }
        let look =
            sqlx::query(statements::RECALL).bind(tenant).bind(agent).bind(except.to_string());
        let rows = self.read(look.bind(words.join(" OR ")).bind(i64::from(limit))).await?;
        rows.iter().map(|row| Columns(row).observation()).collect()
    }

    async fn iterations(
        &self,
        tenant: &str,
        run: Uuid,
        page: &Page<i64>,
    ) -> Result<Vec<IterationRecord>, StoreError> {
        let list = sqlx::query(statements::ITERATIONS).bind(tenant).bind(run.to_string());
        let rows = self
            .read(list.bind(i64::from(page.limit)).bind(page.after.unwrap_or_default()))
            .await?;
        rows.iter().map(|row| Columns(row).iteration()).collect()
    }

    async fn tool_calls(
        &self,
        tenant: &str,
        run: Uuid,
        page: &Page<i64>,
    ) -> Result<Vec<ToolCallRecord>, StoreError> {
        let list = sqlx::query(statements::TOOL_CALLS).bind(tenant).bind(run.to_string());
        let rows = self
            .read(list.bind(i64::from(page.limit)).bind(page.after.unwrap_or_default()))
            .await?;
        let calls = rows.iter().map(|row| Columns(row).call()).collect::<Result<Vec<_>, _>>()?;
        let sources: Vec<i64> = calls.iter().flat_map(StoredCall::sources).collect();
        let sources = serde_json::Value::from(sources).to_string();
        let rows = self
            .read(sqlx::query(statements::EVENTS_AT).bind(run.to_string()).bind(sources))
            .await?;
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
        self.read(list.build()).await?.iter().map(|row| Columns(row).audit()).collect()
    }

    async fn insert_key(&self, key: &ApiKeyRecord) -> Result<bool, StoreError> {
        let insert = sqlx::query(statements::INSERT_KEY)
            .bind(&key.id)
            .bind(&key.tenant)
            .bind(&key.name)
            .bind(serde_json::Value::from(key.scopes.clone()).to_string())
            .bind(&key.secret_hash)
            .bind(key.created_at.timestamp_micros())
            .bind(key.expires_at.map(|at| at.timestamp_micros()))
            .bind(key.revoked_at.map(|at| at.timestamp_micros()))
            .bind(key.rate_limit_per_minute)
            .bind(key.rate_limit_burst);
        Ok(self.change(insert).await? > 0)
    }

    async fn has_keys(&self) -> Result<bool, StoreError> {
        Ok(!self.read(sqlx::query(statements::HAS_KEYS)).await?.is_empty())
    }

    async fn key(&self, id: &str) -> Result<Option<ApiKeyRecord>, StoreError> {
        let rows = self.read(sqlx::query(statements::KEY).bind(id)).await?;
        rows.first().map(|row| Columns(row).key()).transpose()
    }

    async fn keys(
        &self,
        tenant: &str,
        page: &Page<RunCursor>,
    ) -> Result<Vec<ApiKeyRecord>, StoreError> {
        let mut list = listing::keys(&DIALECT, tenant, page);
        self.read(list.build()).await?.iter().map(|row| Columns(row).key()).collect()
    }

    async fn revoke_key(&self, tenant: &str, id: &str) -> Result<bool, StoreError> {
        Ok(self
            .change(sqlx::query(statements::REVOKE_KEY).bind(tenant).bind(id).bind(now()))
            .await?
            > 0)
    }

    async fn open_budget(&self, root: Uuid, caps: Caps, spent: Amounts) -> Result<(), StoreError> {
        let mut writer = self.writer().await?;
        let mut tx = begin(&mut writer).await?;
        budgets::open(&mut tx, root, caps, spent).await?;
        Ok(tx.commit().await?)
    }

    async fn reserve(
        &self,
        root: Uuid,
        run: Uuid,
        wanted: Amounts,
    ) -> Result<Reserved, StoreError> {
        let mut writer = self.writer().await?;
        let mut tx = begin(&mut writer).await?;
        let reserved = budgets::reserve(&mut tx, (root, run), wanted).await?;
        tx.commit().await?;
        Ok(reserved)
    }

    async fn settle(
        &self,
        root: Uuid,
        run: Uuid,
        spent: Amounts,
        ended: bool,
    ) -> Result<(), StoreError> {
        let mut writer = self.writer().await?;
        let mut tx = begin(&mut writer).await?;
        budgets::settle(&mut tx, (root, run), spent, ended).await?;
        Ok(tx.commit().await?)
    }

    async fn shared_budget(&self, root: Uuid) -> Result<Option<SharedBudget>, StoreError> {
        budgets::read(&mut *self.readers.acquire().await?, root).await
    }

    async fn take_tokens(
        &self,
        bucket: &str,
        limit: RateLimit,
        tokens: u32,
    ) -> Result<Taken, StoreError> {
        let mut writer = self.writer().await?;
        let now = Utc::now().timestamp_micros() * 1000;
        let take = sqlx::query(statements::TAKE_TOKENS)
            .bind(bucket)
            .bind(limit.interval())
            .bind(limit.window());
        let row = take.bind(tokens).bind(now).fetch_one(&mut *writer).await?;
        Columns(&row).taken(limit)
    }
}
