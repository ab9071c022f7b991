//! A batch of writes as steps, each one statement over a list of rows.
//!
//! The first steps are the fence. A run passes if this replica still owns it and its journal ends exactly where
//! the write begins, so a journal has no gap and a repeated write changes nothing. A write that ends a run with
//! a cancel request passes only if the run ends as cancelled or interrupted. The other steps write only the runs
//! that passed. Each database puts the rows into the statement in its own way. The `IS TRUE` forms are
//! deliberate: they leave the planner no index but the primary key.

use std::collections::HashMap;
use std::sync::LazyLock;

use uuid::Uuid;

use super::projection::{CallChange, Changes, RunChange};
use super::sql::{Column, Dialect, Kind, Param, Value};
use super::tables::{
    ApprovalRequest, AuditRow, CallProposal, CallState, Group, IterationRecord, JournalRow,
    NewDelivery, Observation, RunOpening, RunProgress, UsageSum,
};

/// A statement over a list of rows, which it names `w`.
#[derive(Clone)]
pub(super) struct Statement {
    pub(super) name: &'static str,
    /// The text before the rows.
    pub(super) head: String,
    pub(super) columns: Vec<Column>,
    /// The condition for a row; empty if there is none.
    pub(super) condition: &'static str,
    /// The text after the condition.
    pub(super) tail: &'static str,
}

/// A statement with its rows.
pub(super) struct Step {
    pub(super) statement: &'static Statement,
    pub(super) rows: Vec<Vec<Value>>,
}

/// The statements in the dialect of a database.
struct Statements {
    known_runs: Statement,
    new_runs: Statement,
    /// The same, if a run is in a session.
    new_runs_in_turn: Statement,
    journal: Statement,
    iterations: Statement,
    new_calls: Statement,
    known_calls: Statement,
    audit: Statement,
    observations: Statement,
    approvals: Statement,
    deliveries: Statement,
    voided: Statement,
    usage: Statement,
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
    statements: &'static Statements,
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
        let statements = Statements::of(dialect);
        let (new, known): (Vec<_>, Vec<_>) =
            changes.runs.into_iter().partition(|run| run.opening.is_some());
        let (first, later): (Vec<_>, Vec<_>) =
            changes.calls.into_iter().partition(|call| call.proposal.is_some());
        let present = |steps: Vec<Step>| steps.into_iter().filter(|step| !step.rows.is_empty());
        let fence = vec![
            statements.known_runs.with(known.into_iter().map(|run| values_of_known(run, owner))),
            new_runs(statements, new),
        ];
        let rest = vec![
            statements.journal.with_all(changes.journal),
            statements.iterations.with_all(changes.iterations),
            statements.new_calls.with(first.into_iter().filter_map(values_of_new_call)),
            statements.known_calls.with_all(later.into_iter().map(|call| call.state)),
            statements.audit.with_all(changes.audit),
            statements.observations.with_all(changes.observations),
            statements.approvals.with_all(changes.approvals),
            statements.deliveries.with_all(changes.deliveries),
            statements.voided.with(changes.voided.into_iter().map(|run| vec![run.value()])),
        ];
        Self {
            fence: present(fence).collect(),
            rest: present(rest).collect(),
            usage: changes.usage,
            statements,
        }
    }

    /// The step that adds the usage of the runs that passed, summed so that it has few rows.
    pub(super) fn usage_step(&self, passed: impl Fn(&Uuid) -> bool) -> Option<Step> {
        let sums = self.usage.iter().filter(|(run, _)| passed(run)).map(|(_, sum)| sum);
        let step = self.statements.usage.with_all(UsageSum::merged(sums));
        (!step.rows.is_empty()).then_some(step)
    }
}

fn values_of_known(run: RunChange, owner: &str) -> Vec<Value> {
    let mut values = run.progress.values();
    values.extend([run.first_seq.value(), owner.value()]);
    values
}

fn values_of_new_call(call: CallChange) -> Option<Vec<Value>> {
    let mut values = call.proposal?.values();
    call.state.append(&mut values);
    Some(values)
}

fn new_runs(statements: &'static Statements, mut runs: Vec<RunChange>) -> Step {
    // In one order everywhere, so that two batches with the same keys never wait for each other.
    let keys = |run: &RunChange| {
        let opening = run.opening.as_ref()?;
        Some((opening.session_id.clone(), opening.tenant.clone(), opening.idempotency_key.clone()))
    };
    runs.sort_by_cached_key(keys);
    let has_session = |run: &RunChange| {
        run.opening.as_ref().is_some_and(|opening| opening.session_place.is_some())
    };
    let statement = if runs.iter().any(has_session) {
        &statements.new_runs_in_turn
    } else {
        &statements.new_runs
    };
    let values = |run: RunChange| {
        let mut values = run.opening?.values();
        run.progress.append(&mut values);
        Some(values)
    };
    statement.with(runs.into_iter().filter_map(values))
}

impl Statements {
    fn of(dialect: Dialect) -> &'static Self {
        static POSTGRES: LazyLock<Statements> =
            LazyLock::new(|| Statements::new(Dialect::Postgres));
        static SQLITE: LazyLock<Statements> = LazyLock::new(|| Statements::new(Dialect::Sqlite));
        match dialect {
            Dialect::Postgres => &POSTGRES,
            Dialect::Sqlite => &SQLITE,
        }
    }

    fn new(dialect: Dialect) -> Self {
        let in_turn = match dialect {
            Dialect::Postgres => in_turn!(" FOR KEY SHARE SKIP LOCKED"),
            Dialect::Sqlite => in_turn!(""),
        };
        Self {
            known_runs: update_of_runs(),
            new_runs: insert_of_runs(dialect, "true"),
            new_runs_in_turn: insert_of_runs(dialect, in_turn),
            journal: insert::<JournalRow>("run_events"),
            iterations: insert::<IterationRecord>("iterations"),
            new_calls: insert_of_calls(),
            known_calls: update_of_calls(),
            audit: insert::<AuditRow>("audit_log"),
            observations: insert::<Observation>("observations"),
            approvals: insert::<ApprovalRequest>("approvals"),
            deliveries: insert_of_deliveries(dialect),
            voided: update_of_approvals(),
            usage: insert::<UsageSum>("usage_added"),
        }
    }
}

impl Statement {
    fn with(&'static self, rows: impl Iterator<Item = Vec<Value>>) -> Step {
        Step { statement: self, rows: rows.collect() }
    }

    fn with_all<G: Group>(&'static self, rows: impl IntoIterator<Item = G>) -> Step {
        self.with(rows.into_iter().map(Group::values))
    }
}

fn update_of_runs() -> Statement {
    let mut columns = RunProgress::columns();
    let set = |column: &Column| match column.name {
        "id" | "epoch" => None,
        "started_at" => Some("started_at = COALESCE(runs.started_at, w.started_at)".to_owned()),
        name => Some(format!("{name} = w.{name}")),
    };
    let set: Vec<String> = columns.iter().filter_map(set).collect();
    columns.extend(FENCE);
    Statement {
        name: "known",
        head: format!("UPDATE runs SET {} FROM", set.join(", ")),
        columns,
        condition: "runs.id = w.id AND (runs.owner = w.writer) IS TRUE \
            AND (runs.status = 'running') IS TRUE AND runs.epoch = w.epoch \
            AND runs.next_seq = w.first_seq \
            AND (w.finished_at IS NULL OR w.status = 'cancelled' \
            OR w.termination_reason = 'interrupted' OR runs.cancel_requested_at IS NULL)",
        tail: "RETURNING runs.id, runs.cancel_requested_at IS NOT NULL AS is_cancelled, \
            runs.cancel_reason",
    }
}

fn insert_of_runs(dialect: Dialect, condition: &'static str) -> Statement {
    let mut columns = RunOpening::columns();
    columns.extend(RunProgress::columns());
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
    Statement {
        name: "new",
        head: insert_head("runs", &columns, &select),
        columns,
        condition,
        tail: "ON CONFLICT DO NOTHING \
            RETURNING id, cancel_requested_at IS NOT NULL AS is_cancelled, cancel_reason",
    }
}

fn insert_head(table: &str, columns: &[Column], select: &[String]) -> String {
    let names: Vec<&str> = columns.iter().map(|column| column.name).collect();
    format!("INSERT INTO {table} ({}) SELECT {} FROM", names.join(", "), select.join(", "))
}

/// Inserts rows of one group into a table.
fn insert<G: Group>(table: &'static str) -> Statement {
    insert_columns(table, G::columns())
}

fn insert_columns(table: &'static str, columns: Vec<Column>) -> Statement {
    let select: Vec<String> = columns.iter().map(|column| format!("w.{}", column.name)).collect();
    let head = insert_head(table, &columns, &select);
    Statement { name: table, head, columns, condition: "", tail: "" }
}

fn insert_of_calls() -> Statement {
    let mut columns = CallProposal::columns();
    columns.extend(CallState::columns());
    insert_columns("tool_calls", columns)
}

/// Changes rows of calls. Columns without a new value keep the old one.
fn update_of_calls() -> Statement {
    let columns = CallState::columns();
    let set = columns.iter().map(|column| column.name).filter(|name| !name.ends_with("_id"));
    let set = set.map(|name| match name {
        // The time of the first execution, even if the call is repeated.
        "started_at" => "started_at = COALESCE(tool_calls.started_at, w.started_at)".to_owned(),
        name => format!("{name} = COALESCE(w.{name}, tool_calls.{name})"),
    });
    let set: Vec<String> = set.collect();
    Statement {
        name: "settled",
        head: format!("UPDATE tool_calls SET {} FROM", set.join(", ")),
        columns,
        condition: "tool_calls.run_id = w.run_id AND tool_calls.call_id = w.call_id",
        tail: "",
    }
}

fn insert_of_deliveries(dialect: Dialect) -> Statement {
    let columns = NewDelivery::columns();
    let select = |column: &Column| match column.name {
        // By the clock of the database, where it has one.
        "due_at" if dialect == Dialect::Postgres => "clock_timestamp()".to_owned(),
        name => format!("w.{name}"),
    };
    let select: Vec<String> = columns.iter().map(select).collect();
    let head = insert_head("webhook_outbox", &columns, &select);
    Statement { name: "webhook_outbox", head, columns, condition: "", tail: "" }
}

/// Voids the pending approvals of runs.
fn update_of_approvals() -> Statement {
    Statement {
        name: "voided",
        head: "UPDATE approvals SET status = 'void' FROM".to_owned(),
        columns: vec![Column { name: "run_id", kind: Kind::Id }],
        condition: "approvals.run_id = w.run_id AND approvals.status = 'pending'",
        tail: "",
    }
}

impl Step {
    /// The rows of the runs that passed the fence.
    pub(super) fn keep(&mut self, passed: &Passed) {
        let run = self.statement.columns.iter().position(|column| column.name == "run_id");
        self.rows.retain(|row| {
            run.and_then(|run| row.get(run))
                .is_some_and(|id| matches!(id, Value::Id(Some(id)) if passed.contains_key(id)))
        });
    }
}
