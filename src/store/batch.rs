//! A batch of writes as steps, each one statement over a list of rows.
//!
//! The first steps are the fence. A run passes if this replica still owns it and its journal ends exactly where
//! the write begins, so a journal has no gap and a repeated write changes nothing. A write that ends a run with
//! a cancel request passes only if the run ends as cancelled or interrupted. The other steps write only the runs
//! that passed. Each database puts the rows into the statement in its own way. The `IS TRUE` forms are
//! deliberate: they leave the planner no index but the primary key.

use std::collections::HashMap;

use uuid::Uuid;

use super::projection::{CallChange, Changes, RunChange};
use super::sql::{Column, Dialect, Kind, Param, Value};
use super::tables::{
    ApprovalRequest, AuditRow, CallProposal, CallState, Group, IterationRecord, JournalRow,
    NewDelivery, Observation, RunOpening, RunProgress, UsageSum,
};

/// One statement over a list of rows, which the statement names `w`.
pub(super) struct Step {
    pub(super) name: &'static str,
    /// The text of the statement before the rows.
    pub(super) head: String,
    pub(super) columns: Vec<Column>,
    pub(super) rows: Vec<Vec<Value>>,
    /// The condition for a row; empty if there is none.
    pub(super) condition: &'static str,
    /// The text of the statement after the condition.
    pub(super) tail: &'static str,
}

/// The runs that passed the fence, each with its cancel request, if any.
pub(super) type Passed = HashMap<Uuid, Option<Cancelling>>;

/// The cancel request of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cancelling {
    /// The reason, if one was given.
    pub reason: Option<String>,
}

/// What a batch of writes changes.
pub(super) struct Batch {
    /// Each returns the ids of the runs that passed, and their cancel requests.
    pub(super) fence: Vec<Step>,
    /// The other steps; all have a column `run_id`.
    pub(super) rest: Vec<Step>,
    /// The usage of models, by run.
    usage: Vec<(Uuid, UsageSum)>,
}

/// Columns of the fence that are not the row's.
const FENCE: [Column; 2] =
    [Column { name: "first_seq", kind: Kind::Int }, Column { name: "writer", kind: Kind::Text }];

/// Fence of a run that holds its session: no queued run of the session waits before it, and the run of
/// the previous turn exists, because its history is continued. On turn 1 the session has no runs, or
/// still has one. Unique indexes ensure that there is one holder and that its turn is free.
///
/// `$lock` locks a row of the session: it cannot be deleted before the new run is visible.
macro_rules! in_turn {
    ($lock:literal) => {
        concat!(
            "w.session_place IS NULL OR w.session_place <> 'holds' OR (NOT EXISTS \
             (SELECT 1 FROM runs r WHERE r.tenant = w.tenant AND r.session_id = w.session_id \
             AND r.status = 'queued' AND r.session_place <> 'holds' \
             AND r.available_at <= w.created_at) \
             AND CASE WHEN w.session_turn > 1 THEN EXISTS \
             (SELECT 1 FROM runs r WHERE r.tenant = w.tenant AND r.session_id = w.session_id \
             AND r.session_turn = w.session_turn - 1",
            $lock,
            ") ELSE NOT EXISTS \
             (SELECT 1 FROM runs r WHERE r.tenant = w.tenant AND r.session_id = w.session_id) \
             OR EXISTS (SELECT 1 FROM runs r WHERE r.tenant = w.tenant \
             AND r.session_id = w.session_id LIMIT 1",
            $lock,
            ") END)",
        )
    };
}

impl Batch {
    pub(super) fn of(dialect: Dialect, owner: &str, changes: Changes) -> Self {
        let (new, known): (Vec<_>, Vec<_>) =
            changes.runs.into_iter().partition(|run| run.opening.is_some());
        let (first, later): (Vec<_>, Vec<_>) =
            changes.calls.into_iter().partition(|call| call.proposal.is_some());
        let present = |steps: Vec<Step>| steps.into_iter().filter(|step| !step.rows.is_empty());
        Self {
            fence: present(vec![known_runs(owner, known), new_runs(dialect, new)]).collect(),
            rest: present(vec![
                inserts::<JournalRow>("run_events", changes.journal),
                inserts::<IterationRecord>("iterations", changes.iterations),
                new_calls(first),
                known_calls(later),
                inserts::<AuditRow>("audit_log", changes.audit),
                inserts::<Observation>("observations", changes.observations),
                inserts::<ApprovalRequest>("approvals", changes.approvals),
                deliveries(dialect, changes.deliveries),
                voided(changes.voided),
            ])
            .collect(),
            usage: changes.usage,
        }
    }

    /// The step that adds the usage of the runs that passed, summed so that it has few rows.
    pub(super) fn usage_step(&self, passed: impl Fn(&Uuid) -> bool) -> Option<Step> {
        let sums = self.usage.iter().filter(|(run, _)| passed(run)).map(|(_, sum)| sum);
        let rows = UsageSum::merged(sums);
        (!rows.is_empty()).then(|| inserts::<UsageSum>("usage_added", rows))
    }
}

fn known_runs(owner: &str, runs: Vec<RunChange>) -> Step {
    let mut columns = RunProgress::columns();
    let set = |column: &Column| match column.name {
        "id" | "epoch" => None,
        "started_at" => Some("started_at = COALESCE(runs.started_at, w.started_at)".to_owned()),
        name => Some(format!("{name} = w.{name}")),
    };
    let set: Vec<String> = columns.iter().filter_map(set).collect();
    let head = format!("UPDATE runs SET {} FROM", set.join(", "));
    columns.extend(FENCE);
    let row = |run: RunChange| {
        let mut row = run.progress.values();
        row.extend([run.first_seq.value(), owner.value()]);
        row
    };
    Step {
        name: "known",
        head,
        columns,
        rows: runs.into_iter().map(row).collect(),
        condition: "runs.id = w.id AND (runs.owner = w.writer) IS TRUE \
            AND (runs.status = 'running') IS TRUE AND runs.epoch = w.epoch \
            AND runs.next_seq = w.first_seq \
            AND (w.finished_at IS NULL OR w.status = 'cancelled' \
            OR w.termination_reason = 'interrupted' OR runs.cancel_requested_at IS NULL)",
        tail: "RETURNING runs.id, runs.cancel_requested_at IS NOT NULL AS is_cancelled, \
            runs.cancel_reason",
    }
}

fn new_runs(dialect: Dialect, mut runs: Vec<RunChange>) -> Step {
    // In one order everywhere, so that two batches with the same keys never wait for each other.
    let keys = |run: &RunChange| {
        let opening = run.opening.as_ref()?;
        Some((opening.session_id.clone(), opening.tenant.clone(), opening.idempotency_key.clone()))
    };
    runs.sort_by_cached_key(keys);
    let has_session = |run: &RunChange| {
        run.opening.as_ref().is_some_and(|opening| opening.session_place.is_some())
    };
    let condition = match dialect {
        _ if !runs.iter().any(has_session) => "true",
        Dialect::Postgres => in_turn!(" FOR KEY SHARE SKIP LOCKED"),
        Dialect::Sqlite => in_turn!(""),
    };
    let mut columns = RunOpening::columns();
    columns.extend(RunProgress::columns());
    let row = |run: RunChange| {
        let mut row = run.opening?.values();
        run.progress.append(&mut row);
        Some(row)
    };
    let select = |column: &Column| match column.name {
        // By the clock of the database, where it has one.
        "available_at" => match dialect {
            Dialect::Postgres => {
                "CASE WHEN w.available_at IS NOT NULL \
                THEN greatest(w.available_at, clock_timestamp()) END"
            }
            Dialect::Sqlite => {
                "CASE WHEN w.available_at IS NOT NULL \
                THEN max(w.available_at, w.created_at) END"
            }
        }
        .to_owned(),
        name => format!("w.{name}"),
    };
    let select: Vec<String> = columns.iter().map(select).collect();
    Step {
        name: "new",
        head: insert_head("runs", &columns, &select),
        columns,
        rows: runs.into_iter().filter_map(row).collect(),
        condition,
        tail: "ON CONFLICT DO NOTHING \
            RETURNING id, cancel_requested_at IS NOT NULL AS is_cancelled, cancel_reason",
    }
}

fn insert_head(table: &str, columns: &[Column], select: &[String]) -> String {
    let names: Vec<&str> = columns.iter().map(|column| column.name).collect();
    format!("INSERT INTO {table} ({}) SELECT {} FROM", names.join(", "), select.join(", "))
}

/// Rows of one group into a table.
fn inserts<G: Group>(table: &'static str, rows: Vec<G>) -> Step {
    insert_rows(table, G::columns(), rows.into_iter().map(Group::values).collect())
}

fn insert_rows(table: &'static str, columns: Vec<Column>, rows: Vec<Vec<Value>>) -> Step {
    let select: Vec<String> = columns.iter().map(|column| format!("w.{}", column.name)).collect();
    let head = insert_head(table, &columns, &select);
    Step { name: table, head, columns, rows, condition: "", tail: "" }
}

fn new_calls(calls: Vec<CallChange>) -> Step {
    let mut columns = CallProposal::columns();
    columns.extend(CallState::columns());
    let row = |call: CallChange| {
        let mut row = call.proposal?.values();
        call.state.append(&mut row);
        Some(row)
    };
    insert_rows("tool_calls", columns, calls.into_iter().filter_map(row).collect())
}

/// Changes rows of calls. Columns without a new value keep the old one.
fn known_calls(calls: Vec<CallChange>) -> Step {
    let columns = CallState::columns();
    let set = columns.iter().map(|column| column.name).filter(|name| !name.ends_with("_id"));
    let set = set.map(|name| match name {
        // The time of the first execution, even if the call is repeated.
        "started_at" => "started_at = COALESCE(tool_calls.started_at, w.started_at)".to_owned(),
        name => format!("{name} = COALESCE(w.{name}, tool_calls.{name})"),
    });
    let set: Vec<String> = set.collect();
    Step {
        name: "settled",
        head: format!("UPDATE tool_calls SET {} FROM", set.join(", ")),
        columns,
        rows: calls.into_iter().map(|call| call.state.values()).collect(),
        condition: "tool_calls.run_id = w.run_id AND tool_calls.call_id = w.call_id",
        tail: "",
    }
}

fn deliveries(dialect: Dialect, rows: Vec<NewDelivery>) -> Step {
    let columns = NewDelivery::columns();
    let select = |column: &Column| match column.name {
        // By the clock of the database, where it has one.
        "due_at" if dialect == Dialect::Postgres => "clock_timestamp()".to_owned(),
        name => format!("w.{name}"),
    };
    let select: Vec<String> = columns.iter().map(select).collect();
    Step {
        name: "webhook_outbox",
        head: insert_head("webhook_outbox", &columns, &select),
        columns,
        rows: rows.into_iter().map(Group::values).collect(),
        condition: "",
        tail: "",
    }
}

fn voided(runs: Vec<Uuid>) -> Step {
    Step {
        name: "voided",
        head: "UPDATE approvals SET status = 'void' FROM".to_owned(),
        columns: vec![Column { name: "run_id", kind: Kind::Id }],
        rows: runs.into_iter().map(|run| vec![run.value()]).collect(),
        condition: "approvals.run_id = w.run_id AND approvals.status = 'pending'",
        tail: "",
    }
}

impl Step {
    /// The rows of the runs that passed the fence.
    pub(super) fn keep(&mut self, passed: &Passed) {
        let run = self.columns.iter().position(|column| column.name == "run_id");
        self.rows.retain(|row| {
            run.and_then(|run| row.get(run))
                .is_some_and(|id| matches!(id, Value::Id(Some(id)) if passed.contains_key(id)))
        });
    }
}
