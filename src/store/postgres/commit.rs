//! A batch as one statement: one round trip, one implicit transaction.
//!
//! `own` is the fence: it takes only rows that are still ours and stand exactly where the write
//! begins, so a journal has no gap and a repeated write changes nothing. Everything else is written
//! only for the runs that passed it. The `IN (SELECT …) IS TRUE` forms are deliberate: they stay
//! hashed subplans, where a plain `IN` would become a join.

use std::collections::HashSet;

use sqlx::postgres::{PgArguments, PgBindIterExt, PgConnection};
use sqlx::query::Query;
use sqlx::{Postgres, Row};
use uuid::Uuid;

use crate::store::changes::{
    AuditInsert, CallChange, CallProposed, Changes, EndColumns, EventInsert, IterationInsert, NewColumns, RunChange,
    UsageColumns,
};
use crate::store::{RunWrite, StoreError};

const COMMIT: &str = "
WITH w AS (
    SELECT * FROM unnest(
        $2::uuid[], $3::bigint[], $4::bigint[], $5::bigint[], $6::text[], $7::timestamptz[], $8::bigint[], $9::bigint[],
        $10::bigint[], $11::text[], $12::text[], $13::text[], $14::text[], $15::text[], $16::text[],
        $17::bigint[], $18::bigint[], $19::bigint[], $20::bigint[], $21::bigint[], $22::bigint[], $23::boolean[],
        $24::text[], $25::text[], $26::text[], $27::text[], $28::boolean[], $29::bigint[], $30::timestamptz[],
        $31::text[], $32::text[], $33::text[], $34::text[], $35::text[], $36::text[], $37::text[], $38::text[],
        $39::uuid[], $40::text[], $41::timestamptz[], $42::timestamptz[]
    ) AS w (
        id, epoch, first_seq, next_seq, status, started_at, attempts, iterations,
        tool_calls_made, model, tools_used, warnings, callback_errors, tenant, subject,
        input_tokens, output_tokens, cached_input_tokens, cache_write_tokens, reasoning_tokens, cost_micro_usd, estimated,
        output, raw_response, error, termination_reason, partial, latency_ms, finished_at,
        agent, agent_version, definition_hash, kind, scopes, inputs, overrides, session_id,
        parent_run_id, metadata, created_at, deadline_at
    )
), own AS (
    UPDATE runs r SET
        next_seq = COALESCE(w.next_seq, r.next_seq), status = w.status,
        owner = CASE WHEN w.status = 'running' THEN r.owner END,
        started_at = COALESCE(r.started_at, w.started_at), attempts = w.attempts, iterations = w.iterations,
        tool_calls_made = w.tool_calls_made, model = w.model, tools_used = w.tools_used::json,
        warnings = w.warnings::json, callback_errors = w.callback_errors::json,
        input_tokens = w.input_tokens, output_tokens = w.output_tokens, cached_input_tokens = w.cached_input_tokens,
        cache_write_tokens = w.cache_write_tokens, reasoning_tokens = w.reasoning_tokens,
        cost_micro_usd = w.cost_micro_usd, estimated = w.estimated, output = w.output::json,
        raw_response = w.raw_response, error = w.error::json, termination_reason = w.termination_reason,
        partial = w.partial, latency_ms = w.latency_ms, finished_at = w.finished_at
    FROM w
    WHERE w.agent IS NULL AND r.id = w.id AND r.owner = $1 AND r.epoch = w.epoch AND r.status = 'running'
        AND (w.first_seq IS NULL OR r.next_seq = w.first_seq)
    RETURNING r.id
), new AS (
    INSERT INTO runs (
        id, epoch, next_seq, status, owner, available_at, started_at, attempts, iterations, tool_calls_made, model,
        tools_used, warnings, callback_errors, tenant, subject, input_tokens, output_tokens, cached_input_tokens,
        cache_write_tokens, reasoning_tokens, cost_micro_usd, estimated, output, raw_response, error,
        termination_reason, partial, latency_ms, finished_at, agent, agent_version, definition_hash, kind, scopes,
        inputs, overrides, session_id, parent_run_id, metadata, created_at, deadline_at
    )
    SELECT
        id, epoch, COALESCE(next_seq, 1), status, CASE WHEN status = 'running' THEN $1 END,
        CASE WHEN status = 'queued' THEN clock_timestamp() END, started_at, attempts, iterations, tool_calls_made, model,
        tools_used::json, warnings::json, callback_errors::json, tenant, subject, input_tokens, output_tokens,
        cached_input_tokens, cache_write_tokens, reasoning_tokens, cost_micro_usd, estimated, output::json, raw_response,
        error::json, termination_reason, partial, latency_ms, finished_at, agent, agent_version, definition_hash, kind,
        scopes::json, inputs::json, overrides::json, session_id, parent_run_id, metadata::jsonb, created_at, deadline_at
    FROM w WHERE w.agent IS NOT NULL
    ON CONFLICT DO NOTHING
    RETURNING id
), done AS (
    SELECT id FROM own UNION ALL SELECT id FROM new
), journal AS (
    INSERT INTO run_events (run_id, seq, epoch, at, type, data)
    SELECT e.run_id, e.seq, e.epoch, e.at, e.type, e.data::json
    FROM unnest($43::uuid[], $44::bigint[], $45::bigint[], $46::timestamptz[], $47::text[], $48::text[])
        AS e (run_id, seq, epoch, at, type, data)
    WHERE (e.run_id IN (SELECT id FROM done)) IS TRUE
), responses AS (
    INSERT INTO iterations (
        run_id, attempt, number, seq, started_at, latency_ms, retries, fallback, provider, model, finish_reason,
        input_tokens, output_tokens, cached_input_tokens, cache_write_tokens, reasoning_tokens, cost_micro_usd, estimated
    )
    SELECT i.* FROM unnest(
        $49::uuid[], $50::bigint[], $51::bigint[], $52::bigint[], $53::timestamptz[], $54::bigint[], $55::bigint[],
        $56::boolean[], $57::text[], $58::text[], $59::text[],
        $60::bigint[], $61::bigint[], $62::bigint[], $63::bigint[], $64::bigint[], $65::bigint[], $66::boolean[]
    ) AS i (
        run_id, attempt, number, seq, started_at, latency_ms, retries, fallback, provider, model, finish_reason,
        input_tokens, output_tokens, cached_input_tokens, cache_write_tokens, reasoning_tokens, cost_micro_usd, estimated
    )
    WHERE (i.run_id IN (SELECT id FROM done)) IS TRUE
), c AS (
    SELECT * FROM unnest(
        $67::uuid[], $68::uuid[], $69::bigint[], $70::bigint[], $71::bigint[], $72::text[], $73::bigint[], $74::bigint[],
        $75::text[], $76::text[], $77::text[], $78::text[], $79::boolean[], $80::boolean[], $81::timestamptz[],
        $82::timestamptz[], $83::bigint[]
    ) AS c (
        run_id, call_id, attempt, iteration, ordinal, tool, proposed_seq, result_seq,
        state, effect, decision, reason, is_error, cached, started_at, finished_at, duration_ms
    )
    WHERE (c.run_id IN (SELECT id FROM done)) IS TRUE
), proposed AS (
    INSERT INTO tool_calls (
        run_id, call_id, attempt, iteration, ordinal, tool, proposed_seq, result_seq,
        state, effect, decision, reason, is_error, cached, started_at, finished_at, duration_ms
    )
    SELECT * FROM c WHERE c.tool IS NOT NULL
), changed AS (
    UPDATE tool_calls t SET
        state = c.state, effect = COALESCE(c.effect, t.effect), decision = COALESCE(c.decision, t.decision),
        reason = COALESCE(c.reason, t.reason), is_error = c.is_error, cached = c.cached,
        started_at = COALESCE(c.started_at, t.started_at), finished_at = COALESCE(c.finished_at, t.finished_at),
        duration_ms = COALESCE(c.duration_ms, t.duration_ms), result_seq = COALESCE(c.result_seq, t.result_seq)
    FROM c WHERE c.tool IS NULL AND t.run_id = c.run_id AND t.call_id = c.call_id
), audited AS (
    INSERT INTO audit_log (
        tenant, at, id, run_id, call_id, duration_ms, subject, tool, rule, decision, reason, outcome, arguments
    )
    SELECT a.* FROM unnest(
        $84::text[], $85::timestamptz[], $86::uuid[], $87::uuid[], $88::uuid[], $89::bigint[], $90::text[], $91::text[],
        $92::text[], $93::text[], $94::text[], $95::text[], $96::text[]
    ) AS a (tenant, at, id, run_id, call_id, duration_ms, subject, tool, rule, decision, reason, outcome, arguments)
    WHERE (a.run_id IN (SELECT id FROM done)) IS TRUE
    ON CONFLICT DO NOTHING
)
SELECT id FROM done";

/// Writes of this batch that an earlier try has stored: their last event is in the journal.
const STORED_EARLIER: &str = "
SELECT e.run_id FROM unnest($1::uuid[], $2::bigint[], $3::bigint[], $4::timestamptz[]) AS w (id, seq, epoch, at)
JOIN run_events e ON e.run_id = w.id AND e.seq = w.seq AND e.epoch = w.epoch AND e.at = w.at";

type Statement<'q> = Query<'q, Postgres, PgArguments>;

/// Commits the changes, in the transaction of the connection or in their own; the runs that passed.
pub(super) async fn write(
    connection: &mut PgConnection,
    owner: &str,
    changes: &Changes<'_>,
) -> Result<HashSet<Uuid>, StoreError> {
    let statement = bind_runs(sqlx::query(COMMIT).bind(owner), &changes.runs);
    let statement = bind_iterations(bind_events(statement, &changes.events), &changes.iterations);
    let statement = bind_audit(bind_calls(statement, &changes.calls), &changes.audit);
    let rows = statement.fetch_all(connection).await?;
    rows.iter().map(|row| row.try_get(0).map_err(StoreError::from)).collect()
}

/// Of writes that did not pass, those that are durable all the same.
pub(super) async fn stored_earlier(
    connection: &mut PgConnection,
    missed: &[&RunWrite],
) -> Result<HashSet<Uuid>, StoreError> {
    let last: Vec<_> = missed.iter().filter_map(|write| Some((write, write.events.last()?))).collect();
    let statement = sqlx::query(STORED_EARLIER)
        .bind(last.iter().map(|(write, _)| write.run_id).bind_iter())
        .bind(last.iter().map(|(_, event)| event.seq).bind_iter())
        .bind(last.iter().map(|(write, _)| write.epoch).bind_iter())
        .bind(last.iter().map(|(_, event)| event.at).bind_iter());
    let rows = statement.fetch_all(connection).await?;
    rows.iter().map(|row| row.try_get(0).map_err(StoreError::from)).collect()
}

fn bind_runs<'q>(statement: Statement<'q>, runs: &'q [RunChange<'q>]) -> Statement<'q> {
    let statement = statement
        .bind(runs.iter().map(|r| r.id).bind_iter())
        .bind(runs.iter().map(|r| r.epoch).bind_iter())
        .bind(runs.iter().map(|r| r.first_seq).bind_iter())
        .bind(runs.iter().map(|r| r.next_seq).bind_iter())
        .bind(runs.iter().map(|r| r.status).bind_iter())
        .bind(runs.iter().map(|r| r.started_at).bind_iter())
        .bind(runs.iter().map(|r| i64::from(r.attempts)).bind_iter())
        .bind(runs.iter().map(|r| i64::from(r.iterations)).bind_iter())
        .bind(runs.iter().map(|r| i64::from(r.tool_calls_made)).bind_iter())
        .bind(runs.iter().map(|r| r.model).bind_iter())
        .bind(runs.iter().map(|r| r.tools_used.as_deref()).bind_iter())
        .bind(runs.iter().map(|r| r.warnings.as_deref()).bind_iter())
        .bind(runs.iter().map(|r| r.callback_errors.as_deref()).bind_iter())
        .bind(runs.iter().map(|r| r.tenant).bind_iter())
        .bind(runs.iter().map(|r| r.subject).bind_iter());
    let statement = bind_usage(statement, runs.iter().map(|r| r.usage));
    let ends = runs.iter().map(|r| r.end.as_ref());
    let statement = statement
        .bind(ends.clone().map(|e| e.and_then(|e| e.output.as_deref())).bind_iter())
        .bind(ends.clone().map(|e| e.map(|e| &*e.raw_response)).bind_iter())
        .bind(ends.clone().map(|e| e.and_then(|e| e.error.as_deref())).bind_iter())
        .bind(ends.clone().map(|e| e.map(|e| e.termination_reason)).bind_iter())
        .bind(ends.clone().map(|e: Option<&EndColumns>| e.is_some_and(|e| e.partial)).bind_iter())
        .bind(ends.clone().map(|e| e.map(|e| e.latency_ms)).bind_iter())
        .bind(ends.map(|e| e.map(|e| e.finished_at)).bind_iter());
    bind_new(statement, runs.iter().map(|r| r.new.as_ref()))
}

fn bind_new<'q>(
    statement: Statement<'q>,
    new: impl Iterator<Item = Option<&'q NewColumns<'q>>> + Clone + 'q,
) -> Statement<'q> {
    statement
        .bind(new.clone().map(|n| n.map(|n| n.agent)).bind_iter())
        .bind(new.clone().map(|n| n.map(|n| n.agent_version)).bind_iter())
        .bind(new.clone().map(|n| n.map(|n| n.definition_hash)).bind_iter())
        .bind(new.clone().map(|n| n.map(|n| n.kind)).bind_iter())
        .bind(new.clone().map(|n| n.map(|n| n.scopes.as_str())).bind_iter())
        .bind(new.clone().map(|n| n.map(|n| n.inputs.as_str())).bind_iter())
        .bind(new.clone().map(|n| n.map(|n| n.overrides.as_str())).bind_iter())
        .bind(new.clone().map(|n| n.and_then(|n| n.session_id)).bind_iter())
        .bind(new.clone().map(|n| n.and_then(|n| n.parent_run_id)).bind_iter())
        .bind(new.clone().map(|n| n.map(|n| n.metadata.as_str())).bind_iter())
        .bind(new.clone().map(|n| n.map(|n| n.created_at)).bind_iter())
        .bind(new.map(|n| n.and_then(|n| n.deadline_at)).bind_iter())
}

fn bind_events<'q>(statement: Statement<'q>, events: &'q [EventInsert]) -> Statement<'q> {
    statement
        .bind(events.iter().map(|e| e.run_id).bind_iter())
        .bind(events.iter().map(|e| e.seq).bind_iter())
        .bind(events.iter().map(|e| e.epoch).bind_iter())
        .bind(events.iter().map(|e| e.at).bind_iter())
        .bind(events.iter().map(|e| e.kind).bind_iter())
        .bind(events.iter().map(|e| e.data.as_str()).bind_iter())
}

fn bind_iterations<'q>(statement: Statement<'q>, iterations: &'q [IterationInsert<'q>]) -> Statement<'q> {
    let statement = statement
        .bind(iterations.iter().map(|i| i.run_id).bind_iter())
        .bind(iterations.iter().map(|i| i64::from(i.attempt)).bind_iter())
        .bind(iterations.iter().map(|i| i64::from(i.number)).bind_iter())
        .bind(iterations.iter().map(|i| i.seq).bind_iter())
        .bind(iterations.iter().map(|i| i.started_at).bind_iter())
        .bind(iterations.iter().map(|i| i.latency_ms).bind_iter())
        .bind(iterations.iter().map(|i| i64::from(i.retries)).bind_iter())
        .bind(iterations.iter().map(|i| i.fallback).bind_iter())
        .bind(iterations.iter().map(|i| &*i.provider).bind_iter())
        .bind(iterations.iter().map(|i| &*i.model).bind_iter())
        .bind(iterations.iter().map(|i| i.finish_reason).bind_iter());
    bind_usage(statement, iterations.iter().map(|i| i.usage))
}

fn bind_usage<'q>(statement: Statement<'q>, usage: impl Iterator<Item = UsageColumns> + Clone + 'q) -> Statement<'q> {
    statement
        .bind(usage.clone().map(|u| u.input_tokens).bind_iter())
        .bind(usage.clone().map(|u| u.output_tokens).bind_iter())
        .bind(usage.clone().map(|u| u.cached_input_tokens).bind_iter())
        .bind(usage.clone().map(|u| u.cache_write_tokens).bind_iter())
        .bind(usage.clone().map(|u| u.reasoning_tokens).bind_iter())
        .bind(usage.clone().map(|u| u.cost_micro_usd).bind_iter())
        .bind(usage.map(|u| u.estimated).bind_iter())
}

fn bind_calls<'q>(statement: Statement<'q>, calls: &'q [CallChange<'q>]) -> Statement<'q> {
    let proposed = calls.iter().map(|c| c.proposed.as_ref());
    statement
        .bind(calls.iter().map(|c| c.run_id).bind_iter())
        .bind(calls.iter().map(|c| c.call_id).bind_iter())
        .bind(proposed.clone().map(|p| p.map(|p| i64::from(p.attempt))).bind_iter())
        .bind(proposed.clone().map(|p| p.map(|p| i64::from(p.iteration))).bind_iter())
        .bind(proposed.clone().map(|p| p.map(|p| p.ordinal)).bind_iter())
        .bind(proposed.clone().map(|p: Option<&CallProposed>| p.map(|p| &*p.tool)).bind_iter())
        .bind(proposed.map(|p| p.map(|p| p.seq)).bind_iter())
        .bind(calls.iter().map(|c| c.result_seq).bind_iter())
        .bind(calls.iter().map(|c| c.state).bind_iter())
        .bind(calls.iter().map(|c| c.effect).bind_iter())
        .bind(calls.iter().map(|c| c.decision).bind_iter())
        .bind(calls.iter().map(|c| c.reason.as_deref()).bind_iter())
        .bind(calls.iter().map(|c| c.is_error).bind_iter())
        .bind(calls.iter().map(|c| c.cached).bind_iter())
        .bind(calls.iter().map(|c| c.started_at).bind_iter())
        .bind(calls.iter().map(|c| c.finished_at).bind_iter())
        .bind(calls.iter().map(|c| c.duration_ms).bind_iter())
}

fn bind_audit<'q>(statement: Statement<'q>, audit: &'q [AuditInsert<'q>]) -> Statement<'q> {
    statement
        .bind(audit.iter().map(|a| a.tenant).bind_iter())
        .bind(audit.iter().map(|a| a.at).bind_iter())
        .bind(audit.iter().map(|a| a.id).bind_iter())
        .bind(audit.iter().map(|a| a.run_id).bind_iter())
        .bind(audit.iter().map(|a| a.call_id).bind_iter())
        .bind(audit.iter().map(|a| a.duration_ms).bind_iter())
        .bind(audit.iter().map(|a| a.subject).bind_iter())
        .bind(audit.iter().map(|a| &*a.tool).bind_iter())
        .bind(audit.iter().map(|a| a.rule).bind_iter())
        .bind(audit.iter().map(|a| a.decision).bind_iter())
        .bind(audit.iter().map(|a| a.reason.as_deref()).bind_iter())
        .bind(audit.iter().map(|a| a.outcome).bind_iter())
        .bind(audit.iter().map(|a| &*a.arguments).bind_iter())
}
