//! A batch as one statement: one round trip, one implicit transaction.
//!
//! `own` is the fence: it takes only rows that are still ours and stand exactly where the write
//! begins, so a journal has no gap and a repeated write changes nothing. Everything else is written
//! only for the runs that passed it. The statement is put together from the parts that a batch
//! needs, because PostgreSQL prepares every part of a plan, used or not, each time it runs; a batch
//! has one of a dozen shapes, each prepared once per connection.
//!
//! The `IS TRUE` forms are deliberate: `IN (SELECT …) IS TRUE` stays a hashed subplan, where a
//! plain `IN` would become a join, and a fence in that form leaves the planner no index but the
//! primary key.

use std::collections::HashSet;
use std::fmt::Write;

use sqlx::postgres::{PgArguments, PgBindIterExt, PgConnection};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Postgres, Row};
use uuid::Uuid;

use crate::store::changes::{
    ApprovalInsert, AuditInsert, CallChange, CallProposed, Changes, EndColumns, EventInsert,
    IterationInsert, NewColumns, ObservationInsert, RunChange, UsageColumns,
};
use crate::store::{RunWrite, StoreError};

/// One common table expression over one list of rows.
struct Part {
    name: &'static str,
    /// Up to the rows.
    before: &'static str,
    /// Name and type of each column of the rows, in the order in which they are bound.
    columns: &'static str,
    /// From the rows on; they are called `w`.
    after: &'static str,
}

/// What a write says of a run's row, be it new or known.
macro_rules! run_columns {
    () => {
        "id uuid, epoch bigint, first_seq bigint, next_seq bigint, status text, started_at timestamptz, \
         attempts bigint, iterations bigint, tool_calls_made bigint, model text, tools_used text, warnings text, \
         callback_errors text, consumption text, input_tokens bigint, output_tokens bigint, cached_input_tokens bigint, \
         cache_write_tokens bigint, reasoning_tokens bigint, cost_micro_usd bigint, estimated boolean, output text, \
         raw_response text, error text, termination_reason text, partial boolean, latency_ms bigint, \
         finished_at timestamptz"
    };
}

const KNOWN_RUNS: Part = Part {
    name: "own",
    before: "UPDATE runs r SET
        next_seq = w.next_seq, status = w.status, owner = CASE WHEN w.status = 'running' THEN r.owner END,
        started_at = COALESCE(r.started_at, w.started_at), attempts = w.attempts, iterations = w.iterations,
        tool_calls_made = w.tool_calls_made, model = w.model, tools_used = w.tools_used::json,
        warnings = w.warnings::json, callback_errors = w.callback_errors::json,
        consumption = w.consumption::json,
        input_tokens = w.input_tokens, output_tokens = w.output_tokens, cached_input_tokens = w.cached_input_tokens,
        cache_write_tokens = w.cache_write_tokens, reasoning_tokens = w.reasoning_tokens,
        cost_micro_usd = w.cost_micro_usd, estimated = w.estimated, output = w.output::json,
        raw_response = w.raw_response, error = w.error::json, termination_reason = w.termination_reason,
        partial = w.partial, latency_ms = w.latency_ms, finished_at = w.finished_at
    FROM",
    columns: run_columns!(),
    after: "WHERE r.id = w.id AND (r.owner = $1) IS TRUE AND (r.status = 'running') IS TRUE AND r.epoch = w.epoch
        AND r.next_seq = w.first_seq
    RETURNING r.id",
};

/// Inserts runs with so many more columns.
macro_rules! insert_runs {
    ($more:literal) => {
        concat!(
            "INSERT INTO runs (
        id, epoch, next_seq, status, owner, available_at, started_at, attempts, iterations, tool_calls_made, model,
        tools_used, warnings, callback_errors, consumption, input_tokens, output_tokens, cached_input_tokens, cache_write_tokens,
        reasoning_tokens, cost_micro_usd, estimated, output, raw_response, error, termination_reason, partial,
        latency_ms, finished_at, tenant, subject, agent, agent_version, definition_hash, kind, scopes, inputs,
        overrides, session_id, parent_run_id, metadata, created_at, idempotency_key, request_hash, traceparent",
            $more,
            ")
    SELECT
        id, epoch, next_seq, status, CASE WHEN status = 'running' THEN $1 END,
        CASE WHEN status = 'queued' THEN clock_timestamp() END, started_at, attempts, iterations, tool_calls_made,
        model, tools_used::json, warnings::json, callback_errors::json, consumption::json, input_tokens, output_tokens,
        cached_input_tokens, cache_write_tokens, reasoning_tokens, cost_micro_usd, estimated, output::json,
        raw_response, error::json, termination_reason, partial, latency_ms, finished_at, tenant, subject, agent,
        agent_version, definition_hash, kind, scopes::json, inputs::json, overrides::json, session_id,
        parent_run_id, metadata::jsonb, created_at, idempotency_key, request_hash, traceparent",
            $more,
            "
    FROM"
        )
    };
}

/// What never changes in a run's row.
macro_rules! new_columns {
    () => {
        concat!(
            run_columns!(),
            ", tenant text, subject text, agent text, agent_version text, definition_hash text, kind text, \
             scopes text, inputs text, overrides text, session_id text, parent_run_id uuid, metadata text, \
             created_at timestamptz, idempotency_key text, request_hash text, traceparent text"
        )
    };
}

const NEW_RUNS: Part = Part {
    name: "new",
    before: insert_runs!(""),
    columns: new_columns!(),
    after: "ON CONFLICT DO NOTHING RETURNING id",
};

/// Runs with a place in their session. A holder comes after all that wait; that there is one, and
/// that its turn was nobody's, is the indexes' to say.
const NEW_SESSION_RUNS: Part = Part {
    name: "placed",
    before: insert_runs!(", session_place, session_turn"),
    columns: concat!(new_columns!(), ", session_place text, session_turn bigint"),
    after: "WHERE w.session_place <> 'holds' OR NOT EXISTS (SELECT 1 FROM runs r WHERE r.tenant = w.tenant
        AND r.session_id = w.session_id AND r.status = 'queued' AND r.session_place <> 'holds')
    ON CONFLICT DO NOTHING RETURNING id",
};

const EVENTS: Part = Part {
    name: "journal",
    before: "INSERT INTO run_events (run_id, seq, epoch, at, type, data)
        SELECT run_id, seq, epoch, at, type, data::json FROM",
    columns: "run_id uuid, seq bigint, epoch bigint, at timestamptz, type text, data text",
    after: PASSED,
};

const ITERATIONS: Part = Part {
    name: "responses",
    before: "INSERT INTO iterations (
        run_id, attempt, number, seq, started_at, latency_ms, retries, fallback, provider, model, finish_reason,
        input_tokens, output_tokens, cached_input_tokens, cache_write_tokens, reasoning_tokens, cost_micro_usd, estimated
    )
    SELECT * FROM",
    columns: "run_id uuid, attempt bigint, number bigint, seq bigint, started_at timestamptz, latency_ms bigint, \
        retries bigint, fallback boolean, provider text, model text, finish_reason text, input_tokens bigint, \
        output_tokens bigint, cached_input_tokens bigint, cache_write_tokens bigint, reasoning_tokens bigint, \
        cost_micro_usd bigint, estimated boolean",
    after: PASSED,
};

const NEW_CALLS: Part = Part {
    name: "proposed",
    before: "INSERT INTO tool_calls (
        run_id, call_id, attempt, iteration, ordinal, tool, proposed_seq, result_seq, state, effect, decision,
        reason, is_error, cached, started_at, finished_at, duration_ms
    )
    SELECT * FROM",
    columns: "run_id uuid, call_id uuid, attempt bigint, iteration bigint, ordinal bigint, tool text, \
        proposed_seq bigint, result_seq bigint, state text, effect text, decision text, reason text, \
        is_error boolean, cached boolean, started_at timestamptz, finished_at timestamptz, duration_ms bigint",
    after: PASSED,
};

const KNOWN_CALLS: Part = Part {
    name: "settled",
    before: "UPDATE tool_calls t SET
        state = w.state, effect = COALESCE(w.effect, t.effect), decision = COALESCE(w.decision, t.decision),
        reason = COALESCE(w.reason, t.reason), is_error = w.is_error, cached = w.cached,
        started_at = COALESCE(w.started_at, t.started_at), finished_at = COALESCE(w.finished_at, t.finished_at),
        duration_ms = COALESCE(w.duration_ms, t.duration_ms), result_seq = COALESCE(w.result_seq, t.result_seq)
    FROM",
    columns: "run_id uuid, call_id uuid, result_seq bigint, state text, effect text, decision text, reason text, \
        is_error boolean, cached boolean, started_at timestamptz, finished_at timestamptz, duration_ms bigint",
    after: "WHERE t.run_id = w.run_id AND t.call_id = w.call_id AND (w.run_id IN (SELECT id FROM done)) IS TRUE",
};

const AUDIT: Part = Part {
    name: "audited",
    before: "INSERT INTO audit_log (
        tenant, at, id, run_id, call_id, duration_ms, subject, tool, rule, decision, reason, outcome, arguments
    )
    SELECT * FROM",
    columns: "tenant text, at timestamptz, id uuid, run_id uuid, call_id uuid, duration_ms bigint, subject text, \
        tool text, rule text, decision text, reason text, outcome text, arguments text",
    after: PASSED,
};

const OBSERVATIONS: Part = Part {
    name: "observed",
    before: "INSERT INTO observations (run_id, seq, tenant, agent, session_id, at, kind, content) SELECT * FROM",
    columns: "run_id uuid, seq bigint, tenant text, agent text, session_id text, at timestamptz, kind text, \
        content text",
    after: PASSED,
};

const APPROVALS: Part = Part {
    name: "asked",
    before: "INSERT INTO approvals (
        run_id, seq, call_id, tenant, at, expires_at, kind, tool, reason, arguments, status
    )
    SELECT run_id, seq, call_id, tenant, at, expires_at, kind, tool, reason, arguments::json, status FROM",
    columns: "run_id uuid, seq bigint, call_id uuid, tenant text, at timestamptz, expires_at timestamptz, kind text, \
        tool text, reason text, arguments text, status text",
    after: PASSED,
};

const VOIDED: Part = Part {
    name: "voided",
    before: "UPDATE approvals a SET status = 'void' FROM",
    columns: "run_id uuid",
    after: "WHERE a.run_id = w.run_id AND a.status = 'pending' AND (w.run_id IN (SELECT id FROM done)) IS TRUE",
};

const PASSED: &str = "WHERE (w.run_id IN (SELECT id FROM done)) IS TRUE";

/// The statement of some parts. Rows are arrays that `unnest` walks side by side in a select list:
/// in `FROM` each array would be spooled on its own.
fn compose(known: &[&Part], rest: &[&Part]) -> String {
    let mut sql = String::from("WITH ");
    let mut bound = 1;
    let mut add = |sql: &mut String, part: &Part| {
        let _ = write!(sql, "{} AS ({} (SELECT ", part.name, part.before);
        for (index, column) in part.columns.split(", ").enumerate() {
            let (name, kind) = column.split_once(' ').unwrap_or((column, "text"));
            bound += 1;
            let comma = if index > 0 { ", " } else { "" };
            let _ = write!(sql, "{comma}unnest(${bound}::{kind}[]) AS {name}");
        }
        let _ = write!(sql, ") AS w {}), ", part.after);
    };
    for part in known {
        add(&mut sql, part);
    }
    let done: Vec<String> =
        known.iter().map(|part| format!("SELECT id FROM {}", part.name)).collect();
    let _ = write!(sql, "done AS ({}), ", done.join(" UNION ALL "));
    for part in rest {
        add(&mut sql, part);
    }
    sql.truncate(sql.len() - 2);
    sql.push_str(" SELECT id FROM done");
    sql
}

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
    let (mut new_runs, known_runs): (Vec<_>, Vec<_>) =
        changes.runs.iter().partition(|run| run.new.is_some());
    // In one order everywhere, so that two batches with the same keys never wait for each other.
    new_runs.sort_by_key(|run| run.new.as_ref().map(|new| (new.session_id, new.idempotency_key)));
    let (session_runs, new_runs): (Vec<_>, Vec<_>) = new_runs
        .into_iter()
        .partition(|run| run.new.as_ref().is_some_and(|new| new.session_place.is_some()));
    let (new_calls, known_calls): (Vec<_>, Vec<_>) =
        changes.calls.iter().partition(|call| call.proposed.is_some());
    let present = |parts: &[(&'static Part, usize)]| {
        parts.iter().filter(|(_, rows)| *rows > 0).map(|(part, _)| *part).collect::<Vec<_>>()
    };
    let sql = compose(
        &present(&[
            (&KNOWN_RUNS, known_runs.len()),
            (&NEW_RUNS, new_runs.len()),
            (&NEW_SESSION_RUNS, session_runs.len()),
        ]),
        &present(&[
            (&EVENTS, changes.events.len()),
            (&ITERATIONS, changes.iterations.len()),
            (&NEW_CALLS, new_calls.len()),
            (&KNOWN_CALLS, known_calls.len()),
            (&AUDIT, changes.audit.len()),
            (&OBSERVATIONS, changes.observations.len()),
            (&APPROVALS, changes.approvals.len()),
            (&VOIDED, changes.voided.len()),
        ]),
    );
    let mut statement = sqlx::query(AssertSqlSafe(sql)).bind(owner);
    statement = bind_runs(statement, &known_runs);
    statement = bind_new_runs(statement, &new_runs);
    statement = bind_session_runs(statement, &session_runs);
    statement = bind_events(statement, &changes.events);
    statement = bind_iterations(statement, &changes.iterations);
    statement = bind_new_calls(statement, &new_calls);
    statement = bind_known_calls(statement, &known_calls);
    statement = bind_audit(statement, &changes.audit);
    statement = bind_observations(statement, &changes.observations);
    statement = bind_approvals(statement, &changes.approvals);
    if !changes.voided.is_empty() {
        statement = statement.bind(changes.voided.iter().map(|v| v.run_id).bind_iter());
    }
    let rows = statement.fetch_all(connection).await?;
    rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
}

/// Of repeated writes that did not pass, those that are durable all the same.
pub(super) async fn stored_earlier(
    connection: &mut PgConnection,
    missed: &[&RunWrite],
) -> Result<HashSet<Uuid>, StoreError> {
    let last: Vec<_> =
        missed.iter().filter_map(|write| Some((write, write.events.last()?))).collect();
    let statement = sqlx::query(STORED_EARLIER)
        .bind(last.iter().map(|(write, _)| write.run_id).bind_iter())
        .bind(last.iter().map(|(_, event)| event.seq).bind_iter())
        .bind(last.iter().map(|(write, _)| write.epoch).bind_iter())
        .bind(last.iter().map(|(_, event)| event.at).bind_iter());
    let rows = statement.fetch_all(connection).await?;
    rows.iter().map(|row| row.try_get(0).map_err(StoreError::from)).collect()
}

// Each binds nothing where there are no rows, as its part is left out then.

fn bind_runs<'q>(statement: Statement<'q>, runs: &[&'q RunChange<'q>]) -> Statement<'q> {
    if runs.is_empty() {
        return statement;
    }
    let runs = runs.iter().copied();
    let statement = statement
        .bind(runs.clone().map(|r| r.id).bind_iter())
        .bind(runs.clone().map(|r| r.epoch).bind_iter())
        .bind(runs.clone().map(|r| r.first_seq).bind_iter())
        .bind(runs.clone().map(|r| r.next_seq).bind_iter())
        .bind(runs.clone().map(|r| r.status).bind_iter())
        .bind(runs.clone().map(|r| r.started_at).bind_iter())
        .bind(runs.clone().map(|r| i64::from(r.attempts)).bind_iter())
        .bind(runs.clone().map(|r| i64::from(r.iterations)).bind_iter())
        .bind(runs.clone().map(|r| i64::from(r.tool_calls_made)).bind_iter())
        .bind(runs.clone().map(|r| r.model).bind_iter())
        .bind(runs.clone().map(|r| r.tools_used.as_deref()).bind_iter())
        .bind(runs.clone().map(|r| r.warnings.as_deref()).bind_iter())
        .bind(runs.clone().map(|r| r.callback_errors.as_deref()).bind_iter())
        .bind(runs.clone().map(|r| r.consumption.as_deref()).bind_iter());
    let statement = bind_usage(statement, runs.clone().map(|r| r.usage));
    let ends = runs.map(|r| r.end.as_ref());
    statement
        .bind(ends.clone().map(|e| e.and_then(|e| e.output.as_deref())).bind_iter())
        .bind(ends.clone().map(|e| e.map(|e| &*e.raw_response)).bind_iter())
        .bind(ends.clone().map(|e| e.and_then(|e| e.error.as_deref())).bind_iter())
        .bind(ends.clone().map(|e| e.map(|e| e.termination_reason)).bind_iter())
        .bind(ends.clone().map(|e: Option<&EndColumns>| e.is_some_and(|e| e.partial)).bind_iter())
        .bind(ends.clone().map(|e| e.map(|e| e.latency_ms)).bind_iter())
        .bind(ends.map(|e| e.map(|e| e.finished_at)).bind_iter())
}

fn bind_new_runs<'q>(statement: Statement<'q>, runs: &[&'q RunChange<'q>]) -> Statement<'q> {
    if runs.is_empty() {
        return statement;
    }
    let new = runs.iter().filter_map(|r| r.new.as_ref());
    bind_runs(statement, runs)
        .bind(runs.iter().map(|r| r.tenant).bind_iter())
        .bind(runs.iter().map(|r| r.subject).bind_iter())
        .bind(new.clone().map(|n| n.agent).bind_iter())
        .bind(new.clone().map(|n| n.agent_version).bind_iter())
        .bind(new.clone().map(|n| n.definition_hash).bind_iter())
        .bind(new.clone().map(|n| n.kind).bind_iter())
        .bind(new.clone().map(|n| n.scopes.as_str()).bind_iter())
        .bind(new.clone().map(|n| n.inputs.as_str()).bind_iter())
        .bind(new.clone().map(|n| n.overrides.as_str()).bind_iter())
        .bind(new.clone().map(|n| n.session_id).bind_iter())
        .bind(new.clone().map(|n| n.parent_run_id).bind_iter())
        .bind(new.clone().map(|n| n.metadata.as_str()).bind_iter())
        .bind(new.clone().map(|n| n.created_at).bind_iter())
        .bind(new.clone().map(|n| n.idempotency_key).bind_iter())
        .bind(new.clone().map(|n| n.request_hash).bind_iter())
        .bind(new.map(|n: &NewColumns| n.traceparent).bind_iter())
}

fn bind_session_runs<'q>(statement: Statement<'q>, runs: &[&'q RunChange<'q>]) -> Statement<'q> {
    if runs.is_empty() {
        return statement;
    }
    let new = runs.iter().filter_map(|r| r.new.as_ref());
    bind_new_runs(statement, runs)
        .bind(new.clone().map(|n| n.session_place).bind_iter())
        .bind(new.map(|n: &NewColumns| n.session_turn).bind_iter())
}

fn bind_events<'q>(statement: Statement<'q>, events: &'q [EventInsert]) -> Statement<'q> {
    if events.is_empty() {
        return statement;
    }
    statement
        .bind(events.iter().map(|e| e.run_id).bind_iter())
        .bind(events.iter().map(|e| e.seq).bind_iter())
        .bind(events.iter().map(|e| e.epoch).bind_iter())
        .bind(events.iter().map(|e| e.at).bind_iter())
        .bind(events.iter().map(|e| e.kind).bind_iter())
        .bind(events.iter().map(|e| e.data.as_str()).bind_iter())
}

fn bind_iterations<'q>(
    statement: Statement<'q>,
    iterations: &'q [IterationInsert<'q>],
) -> Statement<'q> {
    if iterations.is_empty() {
        return statement;
    }
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

fn bind_usage(
    statement: Statement<'_>,
    usage: impl Iterator<Item = UsageColumns> + Clone,
) -> Statement<'_> {
    statement
        .bind(usage.clone().map(|u| u.input_tokens).collect::<Vec<_>>())
        .bind(usage.clone().map(|u| u.output_tokens).collect::<Vec<_>>())
        .bind(usage.clone().map(|u| u.cached_input_tokens).collect::<Vec<_>>())
        .bind(usage.clone().map(|u| u.cache_write_tokens).collect::<Vec<_>>())
        .bind(usage.clone().map(|u| u.reasoning_tokens).collect::<Vec<_>>())
        .bind(usage.clone().map(|u| u.cost_micro_usd).collect::<Vec<_>>())
        .bind(usage.map(|u| u.estimated).collect::<Vec<_>>())
}

fn bind_new_calls<'q>(statement: Statement<'q>, calls: &[&'q CallChange<'q>]) -> Statement<'q> {
    if calls.is_empty() {
        return statement;
    }
    let proposed = calls.iter().filter_map(|c| c.proposed.as_ref());
    let statement = statement
        .bind(calls.iter().map(|c| c.run_id).bind_iter())
        .bind(calls.iter().map(|c| c.call_id).bind_iter())
        .bind(proposed.clone().map(|p| i64::from(p.attempt)).bind_iter())
        .bind(proposed.clone().map(|p| i64::from(p.iteration)).bind_iter())
        .bind(proposed.clone().map(|p| p.ordinal).bind_iter())
        .bind(proposed.clone().map(|p| &*p.tool).bind_iter())
        .bind(proposed.map(|p: &CallProposed| p.seq).bind_iter());
    bind_call_states(statement, calls)
}

fn bind_known_calls<'q>(statement: Statement<'q>, calls: &[&'q CallChange<'q>]) -> Statement<'q> {
    if calls.is_empty() {
        return statement;
    }
    let statement = statement
        .bind(calls.iter().map(|c| c.run_id).bind_iter())
        .bind(calls.iter().map(|c| c.call_id).bind_iter());
    bind_call_states(statement, calls)
}

fn bind_call_states<'q>(statement: Statement<'q>, calls: &[&'q CallChange<'q>]) -> Statement<'q> {
    statement
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

fn bind_approvals<'q>(statement: Statement<'q>, asked: &'q [ApprovalInsert<'q>]) -> Statement<'q> {
    if asked.is_empty() {
        return statement;
    }
    statement
        .bind(asked.iter().map(|a| a.run_id).bind_iter())
        .bind(asked.iter().map(|a| a.seq).bind_iter())
        .bind(asked.iter().map(|a| a.call_id).bind_iter())
        .bind(asked.iter().map(|a| a.tenant).bind_iter())
        .bind(asked.iter().map(|a| a.at).bind_iter())
        .bind(asked.iter().map(|a| a.expires_at).bind_iter())
        .bind(asked.iter().map(|a| a.kind).bind_iter())
        .bind(asked.iter().map(|a| &*a.tool).bind_iter())
        .bind(asked.iter().map(|a| &*a.reason).bind_iter())
        .bind(asked.iter().map(|a| a.arguments.as_str()).bind_iter())
        .bind(asked.iter().map(|a| a.status).bind_iter())
}

fn bind_audit<'q>(statement: Statement<'q>, audit: &'q [AuditInsert<'q>]) -> Statement<'q> {
    if audit.is_empty() {
        return statement;
    }
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

fn bind_observations<'q>(
    statement: Statement<'q>,
    observations: &'q [ObservationInsert<'q>],
) -> Statement<'q> {
    if observations.is_empty() {
        return statement;
    }
    statement
        .bind(observations.iter().map(|o| o.run_id).bind_iter())
        .bind(observations.iter().map(|o| o.seq).bind_iter())
        .bind(observations.iter().map(|o| o.tenant).bind_iter())
        .bind(observations.iter().map(|o| o.agent).bind_iter())
        .bind(observations.iter().map(|o| o.session_id).bind_iter())
        .bind(observations.iter().map(|o| o.at).bind_iter())
        .bind(observations.iter().map(|o| o.kind).bind_iter())
        .bind(observations.iter().map(|o| o.content.as_str()).bind_iter())
}
