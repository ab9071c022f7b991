//! The tables, each declared once: a column is the field of its name, with its type.
//!
//! A declaration generates the record that is read and the groups of columns that are written together. The
//! statements decide which group they write, and when.

use chrono::{DateTime, Utc};
use serde_json::Value as Json;
use uuid::Uuid;

use super::sql::{Column, Labels, Param, Query, Row, Value};
use super::{ApprovalStatus, DeliveryStatus, StoreError};
use crate::event::{AuditAction, InputRequired, Reconciled, Resolution, WaitKind};
use crate::message::Usage;
use crate::run::{Consumption, RunError, RunKind, RunStatus};

/// Columns that are written together.
pub(super) trait Group: Sized {
    /// The number of columns.
    const COUNT: usize;

    fn list(columns: &mut Vec<Column>);
    fn append(self, values: &mut Vec<Value>);

    fn columns() -> Vec<Column> {
        let mut columns = Vec::with_capacity(Self::COUNT);
        Self::list(&mut columns);
        columns
    }

    fn values(self) -> Vec<Value> {
        let mut values = Vec::with_capacity(Self::COUNT);
        self.append(&mut values);
        values
    }
}

/// The ids of these rows.
pub(super) fn ids(rows: &[Row]) -> Result<Vec<Uuid>, StoreError> {
    rows.iter().map(|row| row.read("id")).collect()
}

/// The statement that inserts one row.
pub(super) fn insert<G: Group>(table: &str, row: G) -> Query {
    let columns = G::columns();
    let names: Vec<&str> = columns.iter().map(|column| column.name).collect();
    let text =
        format!("INSERT INTO {table} ({}) VALUES (:{})", names.join(", "), names.join(", :"));
    let values = names.into_iter().zip(row.values());
    values.fold(Query::new(text), |query, (name, value)| query.bind_value(name, value))
}

/// A type that is read from a row.
pub(super) trait Record: Sized {
    fn read(row: &Row) -> Result<Self, StoreError>;
}

/// Declares a table as records and groups of columns:
/// - `Record { write Group { column: Type, … } … read { column: Type, … } made { field: Type, … } }`: the
///   record that is read, and the groups of columns that are written; a field that is made is no
///   column.
/// - `both Row { column: Type, … }`: one group, which is the record too.
/// - `part Type { column: Type, … }`: the same for a struct that is declared elsewhere.
/// - `read Record { column: Type, … }`: the record of a statement whose rows are not those of one table.
///
/// `..part: Type` are the columns of that type.
macro_rules! table {
    (
        $(#[$meta:meta])* $record:ident {
            $($(#[$group_meta:meta])* write $group:ident {
                $($field:ident: $type:ty,)* $(..$part:ident: $part_type:ty,)*
            })*
            $(read { $($read:ident: $read_type:ty,)* })?
            $(made { $($made:ident: $made_type:ty,)* })?
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq)]
        pub struct $record {
            $($(pub $field: $type,)* $(pub $part: $part_type,)*)*
            $($(pub $read: $read_type,)*)?
            $($(pub $made: $made_type,)*)?
        }
        impl Record for $record {
            fn read(row: &Row) -> Result<Self, StoreError> {
                Ok(Self {
                    $($($field: row.read(stringify!($field))?,)* $($part: Record::read(row)?,)*)*
                    $($($read: row.read(stringify!($read))?,)*)?
                    $($($made: <$made_type>::default(),)*)?
                })
            }
        }
        /// The record of a row of which only this is known.
        impl From<($($group,)*)> for $record {
            fn from(groups: ($($group,)*)) -> Self {
                let ($($group { $($field,)* $($part,)* },)*) = groups;
                Self {
                    $($($field,)* $($part,)*)*
                    $($($read: <$read_type>::default(),)*)?
                    $($($made: <$made_type>::default(),)*)?
                }
            }
        }
        $(table!(@group $(#[$group_meta])* $group {
            $($field: $type,)* $(..$part: $part_type,)*
        });)*
    };
    ($(#[$meta:meta])* both $row:ident {
        $($field:ident: $type:ty,)* $(..$part:ident: $part_type:ty,)*
    }) => {
        table!(@group $(#[$meta])* $row { $($field: $type,)* $(..$part: $part_type,)* });
        table!(@record $row { $($field: $type,)* $(..$part: $part_type,)* });
    };
    (part $part:ident { $($field:ident: $type:ty,)* }) => {
        table!(@columns $part { $($field: $type,)* });
        table!(@record $part { $($field: $type,)* });
    };
    ($(#[$meta:meta])* read $record:ident {
        $($field:ident: $type:ty,)* $(..$part:ident: $part_type:ty,)*
    }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq)]
        pub struct $record {
            $(pub $field: $type,)* $(pub $part: $part_type,)*
        }
        table!(@record $record { $($field: $type,)* $(..$part: $part_type,)* });
    };
    (@record $record:ident {
        $($field:ident: $type:ty,)* $(..$part:ident: $part_type:ty,)*
    }) => {
        impl Record for $record {
            fn read(row: &Row) -> Result<Self, StoreError> {
                Ok(Self {
                    $($field: row.read(stringify!($field))?,)* $($part: Record::read(row)?,)*
                })
            }
        }
    };
    (@group $(#[$meta:meta])* $group:ident {
        $($field:ident: $type:ty,)* $(..$part:ident: $part_type:ty,)*
    }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq)]
        pub struct $group {
            $(pub $field: $type,)* $(pub $part: $part_type,)*
        }
        table!(@columns $group { $($field: $type,)* $(..$part: $part_type,)* });
    };
    (@columns $group:ident {
        $($field:ident: $type:ty,)* $(..$part:ident: $part_type:ty,)*
    }) => {
        impl Group for $group {
            const COUNT: usize =
                <[&str]>::len(&[$(stringify!($field)),*]) $(+ <$part_type>::COUNT)*;

            fn list(columns: &mut Vec<Column>) {
                $(columns.push(Column {
                    name: stringify!($field),
                    kind: <$type as Param>::KIND,
                });)*
                $(<$part_type>::list(columns);)*
            }
            fn append(self, values: &mut Vec<Value>) {
                $(values.push(self.$field.value());)*
                $(self.$part.append(values);)*
            }
        }
    };
}

table! {
    /// A run as it is stored.
    RunRecord {
        /// The columns that never change.
        write RunOpening {
            created_at: DateTime<Utc>,
            parent_run_id: Option<Uuid>,
            tenant: String,
            subject: String,
            scopes: Vec<String>,
            agent: String,
            agent_version: String,
            engine_version: String,
            format: u32,
            definition_hash: String,
            kind: RunKind,
            session_id: Option<String>,
            session_place: Option<String>,
            session_turn: Option<i64>,
            inputs: Json,
            overrides: Json,
            metadata: Labels,
            idempotency_key: Option<String>,
            request_hash: Option<String>,
            traceparent: Option<String>,
            webhook: Option<String>,
            priority: i64,
            delayed: bool,
            available_at: Option<DateTime<Utc>>,
        }
        /// The columns that each write of the run sets.
        write RunProgress {
            id: Uuid,
            epoch: i64,
            next_seq: i64,
            status: RunStatus,
            owner: Option<String>,
            started_at: Option<DateTime<Utc>>,
            attempts: u32,
            iterations: u32,
            tool_calls_made: u32,
            model: Option<String>,
            mixed_usage: bool,
            tools_used: Vec<String>,
            warnings: Vec<String>,
            labels: Vec<String>,
            consumption: Consumption,
            error: Option<RunError>,
            termination_reason: Option<String>,
            partial: bool,
            waited_ms: i64,
            waiting_since: Option<DateTime<Utc>>,
            latency_ms: Option<i64>,
            finished_at: Option<DateTime<Utc>>,
            ..usage: Usage,
        }
        read {
            crash_count: u32,
            cancel_requested_at: Option<DateTime<Utc>>,
            cancel_reason: Option<String>,
        }
        made {
            output: Option<Json>,
            raw_response: Option<String>,
        }
    }
}

table! {
    part Usage {
        input_tokens: u64,
        output_tokens: u64,
        cached_input_tokens: u64,
        cache_write_tokens: u64,
        reasoning_tokens: u64,
        cost_micro_usd: Option<i64>,
        estimated: bool,
    }
}

table! {
    /// The events of one write, in the journal: `seq` and `at` are those of the last.
    both JournalRow {
        run_id: Uuid,
        seq: i64,
        first_seq: i64,
        epoch: i64,
        at: DateTime<Utc>,
        events: String,
    }
}

table! {
    /// One model response.
    both IterationRecord {
        run_id: Uuid,
        attempt: u32,
        number: u32,
        seq: i64,
        started_at: DateTime<Utc>,
        latency_ms: u64,
        retries: u32,
        fallback: bool,
        repeated: bool,
        provider: String,
        model: String,
        finish_reason: String,
        ..usage: Usage,
    }
}

table! {
    /// One tool call. Arguments that are not JSON are a string with the raw text.
    ToolCallRecord {
        /// The proposal of the call by the response in the event `proposed_seq`, which has the arguments at the
        /// 1-based position `ordinal`.
        write CallProposal {
            attempt: u32,
            iteration: u32,
            ordinal: u32,
            tool: String,
            proposed_seq: i64,
        }
        /// The state of the call. The event `result_seq` has the result. `approval_seq` is the last event that requests
        /// or resolves an approval; it has the arguments if an approver replaced them.
        write CallState {
            run_id: Uuid,
            call_id: Uuid,
            state: String,
            effect: Option<String>,
            decision: Option<String>,
            reason: Option<String>,
            is_error: bool,
            cached: bool,
            started_at: Option<DateTime<Utc>>,
            finished_at: Option<DateTime<Utc>>,
            duration_ms: Option<u64>,
            approval_seq: Option<i64>,
            result_seq: Option<i64>,
        }
        made {
            arguments: Json,
            edited: bool,
            result: Option<String>,
            child_run_id: Option<Uuid>,
            reconciled: Option<Reconciled>,
        }
    }
}

table! {
    /// The decision on a call and its outcome, or an administrative act.
    both AuditRow {
        tenant: String,
        at: DateTime<Utc>,
        decided_at: Option<DateTime<Utc>>,
        id: Uuid,
        action: AuditAction,
        run_id: Option<Uuid>,
        call_id: Option<Uuid>,
        subject: String,
        tool: Option<String>,
        rule: Option<String>,
        decision: String,
        reason: Option<String>,
        arguments: String,
        labels: Vec<String>,
        outcome: String,
        duration_ms: Option<u64>,
        result_bytes: Option<u64>,
        definition_hash: Option<String>,
        pattern: Option<String>,
        agent: Option<String>,
        session_id: Option<String>,
    }
}

/// The columns of the audit log that describe the run.
#[derive(Default)]
pub(super) struct AuditedRun {
    pub(super) agent: Option<String>,
    pub(super) session_id: Option<String>,
    pub(super) definition_hash: Option<String>,
}

impl Record for AuditedRun {
    fn read(row: &Row) -> Result<Self, StoreError> {
        Ok(Self {
            agent: row.read("agent")?,
            session_id: row.read("session_id")?,
            definition_hash: row.read("definition_hash")?,
        })
    }
}

table! {
    /// Records of the audit log that were closed together.
    both Stretch {
        tenant: String,
        number: i64,
        first_at: DateTime<Utc>,
        last_at: DateTime<Utc>,
        closed_at: DateTime<Utc>,
        records: u32,
        members: Vec<u8>,
        previous: Vec<u8>,
        hash: Vec<u8>,
        signature: Option<Vec<u8>>,
    }
}

table! {
    /// A short text about an event of a run, which later runs can recall.
    both Observation {
        run_id: Uuid,
        seq: i64,
        tenant: String,
        agent: String,
        session_id: Option<String>,
        at: DateTime<Utc>,
        kind: String,
        content: String,
        labels: Vec<String>,
    }
}

table! {
    /// A request of a run to a caller, an approver or a child run.
    ApprovalRecord {
        /// The request of the event `seq`. The tool is empty for an escalation.
        write ApprovalRequest {
            run_id: Uuid,
            seq: i64,
            call_id: Uuid,
            tenant: String,
            kind: WaitKind,
            tool: String,
            arguments: Json,
            reason: String,
            at: DateTime<Utc>,
            expires_at: Option<DateTime<Utc>>,
            child_run_id: Option<Uuid>,
            input: Option<InputRequired>,
            status: ApprovalStatus,
        }
        read {
            agent: Option<String>,
            decided_at: Option<DateTime<Utc>>,
            decided_by: Option<String>,
            decision_reason: Option<String>,
            resolution: Option<Resolution>,
        }
    }
}

table! {
    /// An event that is sent to the receiver of a webhook.
    Delivery {
        write NewDelivery {
            run_id: Uuid,
            seq: i64,
            id: Uuid,
            tenant: String,
            lane: String,
            event: String,
            at: DateTime<Utc>,
            status: DeliveryStatus,
            due_at: DateTime<Utc>,
            retry_until: DateTime<Utc>,
            attempts: u32,
            tries: u32,
        }
        read {
            attempted_at: Option<DateTime<Utc>>,
            response_status: Option<u32>,
            error: Option<String>,
            url: String,
        }
    }
}

table! {
    /// An API key without its secret. For an absent limit, the service's limit applies. A key without `created_by` is
    /// the operator's, which the service created.
    both ApiKeyRecord {
        id: String,
        name: String,
        tenant: String,
        scopes: Vec<String>,
        secret_hash: Vec<u8>,
        created_at: DateTime<Utc>,
        created_by: Option<String>,
        expires_at: Option<DateTime<Utc>>,
        revoked_at: Option<DateTime<Utc>>,
        last_used_at: Option<DateTime<Utc>>,
        rate_limit_per_minute: Option<u32>,
        rate_limit_burst: Option<u32>,
    }
}

table! {
    /// The current state of a session.
    read SessionRecord {
        agent: String,
        created_at: DateTime<Utc>,
        last_run_at: DateTime<Utc>,
        live: Vec<Uuid>,
        turn: i64,
        ended: Vec<Uuid>,
    }
}

table! {
    /// A session in a list; the id is that of its newest run. Of the newest ones, the oldest is first.
    read ListedSession {
        id: Uuid,
        session_id: String,
        agent: String,
        run_count: i64,
        newest_runs: Vec<Uuid>,
        created_at: DateTime<Utc>,
        last_run_at: DateTime<Utc>,
    }
}

table! {
    /// A run of a session.
    read SessionRunRecord {
        id: Uuid,
        created_at: DateTime<Utc>,
        turn: i64,
    }
}

table! {
    /// The run that holds an idempotency key.
    read IdempotentRun {
        id: Uuid,
        subject: String,
        request_hash: String,
        created_at: DateTime<Utc>,
    }
}

table! {
    /// A run that this replica has just claimed, with its definition as JSON text.
    read ClaimedRun {
        definition: String,
        ..run: RunRecord,
    }
}

table! {
    /// Statistics of a tool's calls; the quantiles are of executed calls, in milliseconds.
    read ToolStats {
        tool: String,
        calls: u64,
        errors: u64,
        blocked: u64,
        p50_ms: Option<u64>,
        p95_ms: Option<u64>,
        p99_ms: Option<u64>,
    }
}

table! {
    /// A run that a search has examined.
    read SearchCandidate {
        id: Uuid,
        created_at: DateTime<Utc>,
        may_match: bool,
    }
}

table! {
    /// The usage of a model, `provider/model`, by runs of an agent that were accepted in one hour.
    both UsageSum {
        tenant: String,
        hour: DateTime<Utc>,
        agent: String,
        model: String,
        runs: u64,
        ..usage: Usage,
    }
}

table! {
    /// The usage of a model, `provider/model`, by an agent on one day, `YYYY-MM-DD` in UTC.
    read UsageStats {
        day: String,
        agent: String,
        model: String,
        runs: u64,
        ..usage: Usage,
    }
}
