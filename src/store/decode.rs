//! Rows from either database to the portable records.
//!
//! Both dialects select integers, text and bytes only: times as microseconds since 1970, ids and
//! documents as text, booleans as 0 or 1. So one decoder serves both.

use chrono::{DateTime, Utc};
use serde::de::DeserializeOwned;
use sqlx::{ColumnIndex, Decode, Row, Type};
use uuid::Uuid;

use super::budget::{SharedBudget, Unsettled};
use super::projection::{StoredCall, event_from};
use super::{
    ApiKeyRecord, ApprovalRecord, ApprovalStatus, AuditRow, ClaimedRun, IdempotentRun,
    IterationRecord, Observation, RateLimit, RunRecord, SessionRecord, StoreError, Taken,
    ToolCallRecord, ToolStats, UsageStats,
};
use crate::event::{AuditRecord, Event, WaitKind};
use crate::message::Usage;
use crate::run::{Amounts, Caps, RunKind, RunStatus};

/// Runs that were just claimed. One whose row cannot be read is left out, so that it holds up no
/// other.
pub(super) fn claimed<'r, R: Row>(rows: &'r [R]) -> Vec<ClaimedRun>
where
    &'static str: ColumnIndex<R>,
    i64: Decode<'r, R::Database> + Type<R::Database>,
    String: Decode<'r, R::Database> + Type<R::Database>,
    Vec<u8>: Decode<'r, R::Database> + Type<R::Database>,
{
    let read = |row| {
        let row = Columns(row);
        row.claimed()
            .inspect_err(|error| {
                let id = row.text("id").unwrap_or_default();
                tracing::error!(run_id = %id, %error, "a claimed run cannot be read");
            })
            .ok()
    };
    rows.iter().filter_map(read).collect()
}

/// A row of either database, read by column name.
pub(super) struct Columns<'r, R>(pub(super) &'r R);

impl<'r, R: Row> Columns<'r, R>
where
    &'static str: ColumnIndex<R>,
    i64: Decode<'r, R::Database> + Type<R::Database>,
    String: Decode<'r, R::Database> + Type<R::Database>,
    Vec<u8>: Decode<'r, R::Database> + Type<R::Database>,
{
    fn get<T>(&self, name: &'static str) -> Result<T, StoreError>
    where
        T: Decode<'r, R::Database> + Type<R::Database>,
    {
        self.0.try_get(name).map_err(|error| unreadable(name, error))
    }

    fn optional<T>(&self, name: &'static str) -> Result<Option<T>, StoreError>
    where
        Option<T>: Decode<'r, R::Database> + Type<R::Database>,
    {
        self.0.try_get(name).map_err(|error| unreadable(name, error))
    }

    fn text(&self, name: &'static str) -> Result<String, StoreError> {
        self.get(name)
    }

    fn int(&self, name: &'static str) -> Result<i64, StoreError> {
        self.get(name)
    }

    fn flag(&self, name: &'static str) -> Result<bool, StoreError> {
        Ok(self.int(name)? != 0)
    }

    fn count<N: TryFrom<i64>>(&self, name: &'static str) -> Result<N, StoreError> {
        N::try_from(self.int(name)?).map_err(|_| unreadable(name, "out of range"))
    }

    fn optional_count<N: TryFrom<i64>>(&self, name: &'static str) -> Result<Option<N>, StoreError> {
        let value: Option<i64> = self.optional(name)?;
        value.map(|n| N::try_from(n).map_err(|_| unreadable(name, "out of range"))).transpose()
    }

    fn uuid(&self, name: &'static str) -> Result<Uuid, StoreError> {
        Uuid::parse_str(&self.text(name)?).map_err(|error| unreadable(name, error))
    }

    fn time(&self, name: &'static str) -> Result<DateTime<Utc>, StoreError> {
        self.optional_time(name)?.ok_or_else(|| unreadable(name, "no time"))
    }

    fn optional_time(&self, name: &'static str) -> Result<Option<DateTime<Utc>>, StoreError> {
        let micros: Option<i64> = self.optional(name)?;
        Ok(micros.and_then(DateTime::from_timestamp_micros))
    }

    fn json<T: DeserializeOwned>(&self, name: &'static str) -> Result<Option<T>, StoreError> {
        let text: Option<String> = self.optional(name)?;
        text.map(|text| serde_json::from_str(&text))
            .transpose()
            .map_err(|error| unreadable(name, error))
    }

    /// A budget that runs share.
    pub(super) fn shared_budget(&self) -> Result<SharedBudget, StoreError> {
        Ok(SharedBudget {
            caps: Caps {
                tokens: self.optional_count("max_tokens")?,
                micro_usd: self.optional_count("max_micro_usd")?,
                tool_calls: self.count("max_tool_calls")?,
                iterations: self.count("max_iterations")?,
            },
            spent: self.spent()?,
            reserved: Amounts {
                tokens: self.count("reserved_tokens")?,
                micro_usd: self.count("reserved_micro_usd")?,
                tool_calls: self.count("reserved_tool_calls")?,
                iterations: self.count("reserved_iterations")?,
            },
        })
    }

    /// A hold whose run has ended or is driven by nobody.
    pub(super) fn unsettled(&self) -> Result<Unsettled, StoreError> {
        let (run, root) = (self.uuid("run_id")?, self.uuid("root_run_id")?);
        Ok(Unsettled { run, root, spent: self.spent()?, ended: self.flag("ended")? })
    }

    fn spent(&self) -> Result<Amounts, StoreError> {
        Ok(Amounts {
            tokens: self.count("spent_tokens")?,
            micro_usd: self.count("spent_micro_usd")?,
            tool_calls: self.count("spent_tool_calls")?,
            iterations: self.count("spent_iterations")?,
        })
    }

    fn usage(&self) -> Result<Usage, StoreError> {
        Ok(Usage {
            input_tokens: self.count("input_tokens")?,
            output_tokens: self.count("output_tokens")?,
            cached_input_tokens: self.count("cached_input_tokens")?,
            cache_write_tokens: self.count("cache_write_tokens")?,
            reasoning_tokens: self.count("reasoning_tokens")?,
            cost_micro_usd: self.optional("cost_micro_usd")?,
            estimated: self.flag("estimated")?,
        })
    }

    pub(super) fn run(&self) -> Result<RunRecord, StoreError> {
        let kind = self.text("kind")?;
        let status = self.text("status")?;
        let parent: Option<String> = self.optional("parent_run_id")?;
        Ok(RunRecord {
            id: self.uuid("id")?,
            tenant: self.text("tenant")?,
            agent: self.text("agent")?,
            agent_version: self.text("agent_version")?,
            definition_hash: self.text("definition_hash")?,
            kind: if kind == "single" { RunKind::Single } else { RunKind::Iterative },
            status: RunStatus::parse(&status).ok_or_else(|| unreadable("status", &status))?,
            subject: self.text("subject")?,
            inputs: self.json("inputs")?.unwrap_or_default(),
            overrides: self.json("overrides")?.unwrap_or_default(),
            session_id: self.optional("session_id")?,
            parent_run_id: parent
                .map(|id| Uuid::parse_str(&id))
                .transpose()
                .map_err(|error| unreadable("parent_run_id", error))?,
            metadata: self.json("metadata")?.unwrap_or_default(),
            output: self.json("output")?,
            raw_response: self.optional("raw_response")?,
            error: self.json("error")?,
            termination_reason: self.optional("termination_reason")?,
            partial: self.flag("partial")?,
            latency_ms: self.optional("latency_ms")?,
            model: self.optional("model")?,
            attempts: self.count("attempts")?,
            iterations: self.count("iterations")?,
            tool_calls_made: self.count("tool_calls_made")?,
            tools_used: self.json("tools_used")?.unwrap_or_default(),
            usage: self.usage()?,
            warnings: self.json("warnings")?.unwrap_or_default(),
            callback_errors: self.json("callback_errors")?.unwrap_or_default(),
            consumption: self.json("consumption")?.unwrap_or_default(),
            created_at: self.time("created_at")?,
            started_at: self.optional_time("started_at")?,
            finished_at: self.optional_time("finished_at")?,
            owner: self.optional("owner")?,
            epoch: self.int("epoch")?,
            last_seq: self.int("next_seq")? - 1,
            crash_count: self.count("crash_count")?,
            cancel_requested_at: self.optional_time("cancel_requested_at")?,
            cancel_reason: self.optional("cancel_reason")?,
            traceparent: self.optional("traceparent")?,
        })
    }

    pub(super) fn claimed(&self) -> Result<ClaimedRun, StoreError> {
        Ok(ClaimedRun {
            run: self.run()?,
            scopes: self.json("scopes")?.unwrap_or_default(),
            definition: self.text("definition")?,
        })
    }

    pub(super) fn ownership(&self) -> Result<(Uuid, i64), StoreError> {
        Ok((self.uuid("id")?, self.int("epoch")?))
    }

    pub(super) fn idempotent_run(&self) -> Result<IdempotentRun, StoreError> {
        Ok(IdempotentRun {
            run_id: self.uuid("id")?,
            request_hash: self.text("request_hash")?,
            created_at: self.time("created_at")?,
        })
    }

    pub(super) fn cancel_request(&self) -> Result<(Uuid, Option<String>), StoreError> {
        Ok((self.uuid("id")?, self.optional("cancel_reason")?))
    }

    pub(super) fn event(&self) -> Result<Event, StoreError> {
        Ok(Event {
            seq: self.int("seq")?,
            at: self.time("at")?,
            run_id: self.uuid("run_id")?,
            what: event_from(&self.text("type")?, &self.text("data")?)?,
        })
    }

    pub(super) fn session(&self) -> Result<SessionRecord, StoreError> {
        Ok(SessionRecord {
            agent: self.text("agent")?,
            created_at: self.time("created_at")?,
            last_run_at: self.time("last_run_at")?,
            live: self.json("live")?.unwrap_or_default(),
            turn: self.int("turn")?,
            ended: self.json("ended")?.unwrap_or_default(),
        })
    }

    pub(super) fn observation(&self) -> Result<Observation, StoreError> {
        Ok(Observation {
            at: self.time("at")?,
            kind: self.text("kind")?,
            content: self.text("content")?,
        })
    }

    pub(super) fn tool_stats(&self) -> Result<ToolStats, StoreError> {
        Ok(ToolStats {
            tool: self.text("tool")?,
            calls: self.count("calls")?,
            errors: self.count("errors")?,
            blocked: self.count("blocked")?,
            p50_ms: self.optional_count("p50_ms")?,
            p95_ms: self.optional_count("p95_ms")?,
            p99_ms: self.optional_count("p99_ms")?,
        })
    }

    pub(super) fn usage_stats(&self) -> Result<UsageStats, StoreError> {
        Ok(UsageStats {
            day: self.text("day")?,
            agent: self.text("agent")?,
            model: self.text("model")?,
            runs: self.count("runs")?,
            usage: self.usage()?,
        })
    }

    pub(super) fn iteration(&self) -> Result<IterationRecord, StoreError> {
        Ok(IterationRecord {
            run_id: self.uuid("run_id")?,
            attempt: self.count("attempt")?,
            number: self.count("number")?,
            provider: self.text("provider")?,
            model: self.text("model")?,
            finish_reason: self.text("finish_reason")?,
            usage: self.usage()?,
            latency_ms: self.count("latency_ms")?,
            retries: self.count("retries")?,
            fallback: self.flag("fallback")?,
            started_at: self.time("started_at")?,
        })
    }

    pub(super) fn call(&self) -> Result<StoredCall, StoreError> {
        let record = ToolCallRecord {
            id: self.uuid("call_id")?,
            run_id: self.uuid("run_id")?,
            attempt: self.count("attempt")?,
            iteration: self.count("iteration")?,
            ordinal: self.count("ordinal")?,
            tool: self.text("tool")?,
            arguments: serde_json::Value::Null,
            effect: self.optional("effect")?,
            decision: self.optional("decision")?,
            reason: self.optional("reason")?,
            state: self.text("state")?,
            result: None,
            is_error: self.flag("is_error")?,
            cached: self.flag("cached")?,
            started_at: self.optional_time("started_at")?,
            finished_at: self.optional_time("finished_at")?,
            duration_ms: self.optional_count("duration_ms")?,
        };
        Ok(StoredCall {
            record,
            proposed_seq: self.int("proposed_seq")?,
            result_seq: self.optional("result_seq")?,
        })
    }

    pub(super) fn audit(&self) -> Result<AuditRow, StoreError> {
        let record = AuditRecord {
            at: self.time("at")?,
            call_id: self.uuid("call_id")?,
            tool: self.text("tool")?,
            rule: self.text("rule")?,
            decision: self.text("decision")?,
            reason: self.optional("reason")?,
            arguments: self.text("arguments")?,
            outcome: self.text("outcome")?,
            duration_ms: self.optional_count("duration_ms")?,
        };
        Ok(AuditRow {
            id: self.uuid("id")?,
            subject: self.text("subject")?,
            run_id: self.uuid("run_id")?,
            record,
        })
    }

    pub(super) fn approval(&self) -> Result<ApprovalRecord, StoreError> {
        let (kind, status) = (self.text("kind")?, self.text("status")?);
        Ok(ApprovalRecord {
            run_id: self.uuid("run_id")?,
            agent: self.optional("agent")?.unwrap_or_default(),
            seq: self.int("seq")?,
            call_id: self.uuid("call_id")?,
            kind: WaitKind::parse(&kind).ok_or_else(|| unreadable("kind", &kind))?,
            tool: self.text("tool")?,
            arguments: self.json("arguments")?.unwrap_or_default(),
            reason: self.text("reason")?,
            at: self.time("at")?,
            expires_at: self.optional_time("expires_at")?,
            status: ApprovalStatus::parse(&status).ok_or_else(|| unreadable("status", &status))?,
            decided_at: self.optional_time("decided_at")?,
            decided_by: self.optional("decided_by")?,
            decision_reason: self.optional("decision_reason")?,
            resolution: self.json("resolution")?,
        })
    }

    pub(super) fn taken(&self, limit: RateLimit) -> Result<Taken, StoreError> {
        Ok(Taken::read(limit, self.int("at")?, self.int("tat")?, self.int("granted")?))
    }

    pub(super) fn key(&self) -> Result<ApiKeyRecord, StoreError> {
        Ok(ApiKeyRecord {
            id: self.text("id")?,
            name: self.text("name")?,
            tenant: self.text("tenant")?,
            scopes: self.json("scopes")?.unwrap_or_default(),
            secret_hash: self.get("secret_hash")?,
            created_at: self.time("created_at")?,
            expires_at: self.optional_time("expires_at")?,
            revoked_at: self.optional_time("revoked_at")?,
            rate_limit_per_minute: self.optional_count("rate_limit_per_minute")?,
            rate_limit_burst: self.optional_count("rate_limit_burst")?,
        })
    }
}

fn unreadable(column: &str, why: impl std::fmt::Display) -> StoreError {
    StoreError::Failed(format!("the column {column} cannot be read: {why}"))
}
