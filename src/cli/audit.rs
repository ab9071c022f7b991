//! `toolloop audit`: verify that the audit log is as it was written, and export it.
//!
//! With direct access to the database no key is needed and every tenant is accessible; over the
//! network, the key determines the tenant. What is wrong is found by the service; here the order of
//! the stretches is checked once more, so that no page can be left out.

use std::process::ExitCode;

use chrono::{DateTime, SecondsFormat, Utc};
use clap::{Args, Subcommand};
use serde_json::{Value, json};
use url::form_urlencoded::Serializer;

use super::JsonArg;
use super::client::{Client, ClientError};
use super::kinds::{AUDIT_RECORD, AUDIT_STRETCH};
use super::output::{json_line, print, print_json};
use super::pages::{PAGE, Pages};
use super::tenants::TenantArgs;
use crate::config::Flags;
use crate::message::visible::escaped;

/// Stretches of a page: the service compares each with its records.
const STRETCHES: usize = 20;

const VERIFY_EXAMPLES: &str = "\
Exit code 1 if anything was changed, deleted, added or reordered after it was closed. The newest number and hash can be
kept elsewhere, which shows whether stretches at the end are missing. With a key in the variable of [audit] key_env, every
stretch must be signed with it; those from before the key was set are excepted with --unsigned-until, and the audit record
audit.signing_changed has the number of the first one that is signed. Stretches that were closed late are listed; that is not an error.

Examples:
  toolloop audit verify
  toolloop audit verify --unsigned-until 41
  toolloop audit verify --tenant acme --json";

const EXPORT_EXAMPLES: &str = "\
Examples:
  toolloop audit export --since 2026-01-01T00:00:00Z > audit.jsonl
  toolloop audit export --agent support --since 7d
  toolloop audit export --ocsf --server https://toolloop.example.com --key \"$KEY\"";

#[derive(Debug, Subcommand)]
pub(super) enum AuditCommand {
    /// Compare the audit log with its chain of hashes
    #[command(after_help = VERIFY_EXAMPLES)]
    Verify {
        /// The last stretch that was closed before signing began [default: 0]
        #[arg(long, value_name = "NUMBER")]
        unsigned_until: Option<u32>,
        #[command(flatten)]
        output: JsonArg,
        #[command(flatten)]
        access: TenantArgs,
    },
    /// Print audit records as JSON lines, newest first
    #[command(after_help = EXPORT_EXAMPLES)]
    Export {
        #[command(flatten)]
        which: Which,
        /// As events of the Open Cybersecurity Schema Framework, class API Activity
        #[arg(long)]
        ocsf: bool,
        #[command(flatten)]
        access: TenantArgs,
    },
}

/// Which records.
#[derive(Debug, Args)]
pub(super) struct Which {
    /// Records of this agent's runs, and acts on this agent
    #[arg(long)]
    agent: Option<String>,
    /// Records of this session's runs, and acts on this session
    #[arg(long)]
    session: Option<String>,
    /// Records after this: a time, or an age (30m, 24h, 7d)
    #[arg(long, value_name = "TIME", value_parser = super::times::past)]
    since: Option<DateTime<Utc>>,
    /// Records before this: a time, or an age
    #[arg(long, value_name = "TIME", value_parser = super::times::past)]
    until: Option<DateTime<Utc>>,
}

impl Which {
    fn query(&self) -> String {
        let mut query = Serializer::new(String::new());
        for (name, value) in [("agent", &self.agent), ("session_id", &self.session)] {
            query.extend_pairs(value.as_ref().map(|value| (name, value)));
        }
        for (name, time) in [("created_after", self.since), ("created_before", self.until)] {
            let time = time.map(|time| time.to_rfc3339_opts(SecondsFormat::Micros, true));
            query.extend_pairs(time.map(|time| (name, time)));
        }
        query.finish()
    }
}

pub(super) async fn audit(flags: &Flags, command: AuditCommand) -> anyhow::Result<ExitCode> {
    let (AuditCommand::Verify { access, .. } | AuditCommand::Export { access, .. }) = &command;
    let client = access.open_existing(flags).await?;
    let done = match &command {
        AuditCommand::Verify { unsigned_until, output, .. } => {
            verify(&client, unsigned_until.unwrap_or_default(), output.json).await
        }
        AuditCommand::Export { which, ocsf, .. } => export(&client, which, *ocsf).await,
    };
    client.close().await;
    done
}

async fn verify(client: &Client, unsigned_until: u32, json: bool) -> anyhow::Result<ExitCode> {
    let stretches = stretches(client, unsigned_until).await?;
    let replacements = replacements(client).await?;
    let number = |stretch: &Value| stretch.get("number").and_then(Value::as_i64);
    let mut faults = Vec::new();
    let mut records = 0;
    for (place, stretch) in stretches.iter().enumerate() {
        records += stretch.get("records").and_then(Value::as_u64).unwrap_or_default();
        let reported = stretch.get("faults").and_then(Value::as_array).into_iter().flatten();
        let reported = reported.filter_map(Value::as_str).map(str::to_owned);
        let before = place.checked_sub(1).and_then(|place| stretches.get(place));
        let continues = |before: &Value| {
            before.get("hash") == stretch.get("previous")
                && number(before).map(|number| number + 1) == number(stretch)
        };
        let is_torn = before.is_some_and(|before| !continues(before));
        let torn = is_torn.then(|| "it does not continue the stretch before it".to_owned());
        let mut found: Vec<String> = reported.chain(torn).collect();
        found.dedup();
        let number = number(stretch);
        faults.extend(found.into_iter().map(|fault| json!({"stretch": number, "fault": fault})));
    }
    faults.extend(replacements);
    let late: Vec<&Value> = stretches
        .iter()
        .filter(|stretch| stretch.get("closed_late") == Some(&Value::Bool(true)))
        .collect();
    let newest = stretches.last();
    let field = |name: &str| newest.and_then(|stretch| stretch.get(name)).cloned();
    if json {
        print_json(&json!({
            "stretches": stretches.len(), "records": records, "faults": faults,
            "closed_late": late.iter().map(|stretch| closing_times(stretch)).collect::<Vec<_>>(),
            "newest": newest.map(|_| json!({"number": field("number"), "hash": field("hash")})),
        }))?;
    } else {
        for fault in &faults {
            let text = fault.get("fault").and_then(Value::as_str).unwrap_or_default();
            let number = fault.get("stretch").unwrap_or(&Value::Null);
            print(&escaped(&format!("stretch {number}: {text}")))?;
        }
        if let (Some(first), Some(last)) = (late.first(), late.last()) {
            print(&escaped(&late_note(late.len(), first, last)))?;
        }
        let verdict = if faults.is_empty() { "as they were written" } else { "NOT as written" };
        let head = match (field("number"), field("hash").as_ref().and_then(Value::as_str)) {
            (Some(number), Some(hash)) => format!("; the newest is number {number}, {hash}"),
            _ => String::new(),
        };
        print(&escaped(&format!(
            "{} closed stretches with {records} records are {verdict}{head}.",
            stretches.len()
        )))?;
    }
    Ok(ExitCode::from(u8::from(!faults.is_empty())))
}

/// When a stretch was closed, and when its newest record was written.
fn closing_times(stretch: &Value) -> Value {
    let field = |name: &str| stretch.get(name).cloned().unwrap_or_default();
    json!({"number": field("number"), "last_at": field("last_at"), "closed_at": field("closed_at")})
}

fn late_note(count: usize, first: &Value, last: &Value) -> String {
    let number = |stretch: &Value| stretch.get("number").cloned().unwrap_or_default();
    let text = |name: &str| first.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    format!(
        "note: {count} stretches, from {} to {}, were closed more than two hours after their newest \
         records were written (number {}: {}, closed {}): the service was down then, or the chain \
         was made anew.",
        number(first),
        number(last),
        number(first),
        text("last_at"),
        text("closed_at"),
    )
}

/// What running services found: closed stretches that were gone, or others.
async fn replacements(client: &Client) -> Result<Vec<Value>, ClientError> {
    let path = "/audit?action=audit.chain_replaced";
    let (found, _) = client.list(path, usize::MAX, &AUDIT_RECORD).await?;
    let fault = |record: &Value| {
        let number = record.pointer("/arguments/number");
        let at = record.get("at").and_then(Value::as_str).unwrap_or_default();
        let fault = format!("a service that had it closed found it gone, or another one, at {at}");
        json!({"stretch": number, "fault": fault})
    };
    Ok(found.iter().map(fault).collect())
}

async fn stretches(client: &Client, unsigned_until: u32) -> Result<Vec<Value>, ClientError> {
    let path = format!("/audit/stretches?unsigned_until={unsigned_until}");
    let mut pages = Pages::of(client, path, &AUDIT_STRETCH);
    let mut all = Vec::new();
    while let Some(stretches) = pages.next(STRETCHES).await? {
        all.extend(stretches);
    }
    Ok(all)
}

async fn export(client: &Client, which: &Which, as_ocsf: bool) -> anyhow::Result<ExitCode> {
    let mut pages = Pages::of(client, format!("/audit?{}", which.query()), &AUDIT_RECORD);
    while let Some(records) = pages.next(PAGE).await? {
        for record in records {
            json_line(&if as_ocsf { ocsf(&record) } else { record })?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A record as an event of OCSF 1.4, class API Activity (6003); what has no place there is unmapped.
fn ocsf(record: &Value) -> Value {
    let field = |name: &str| record.get(name).cloned().unwrap_or_default();
    let text = |name: &str| record.get(name).and_then(Value::as_str).unwrap_or_default();
    let time = |name| text(name).parse::<DateTime<Utc>>().ok();
    let time = time("decided_at").or_else(|| time("at")).map(|time| time.timestamp_millis());
    let is_refused = text("decision") == "blocked";
    let (status_id, status) = match text("outcome") {
        "succeeded" => (1, "Success"),
        "failed" | "blocked" | "timed_out" => (2, "Failure"),
        "not_executed" if is_refused => (2, "Failure"), // records of earlier versions
        _ => (0, "Unknown"),
    };
    let (severity_id, severity) = if is_refused { (3, "Medium") } else { (1, "Informational") };
    let operation = record.get("tool").and_then(Value::as_str).unwrap_or(text("action"));
    json!({
        "class_uid": 6003, "class_name": "API Activity",
        "category_uid": 6, "category_name": "Application Activity",
        "activity_id": 99, "activity_name": text("action"), "type_uid": 600_399,
        "time": time, "severity_id": severity_id, "severity": severity,
        "status_id": status_id, "status": status, "status_detail": field("reason"),
        "duration": field("duration_ms"),
        "actor": {"user": {"uid": field("subject"), "type_id": 0}},
        "api": {"operation": operation, "request": {"uid": field("run_id")}},
        "metadata": {"version": "1.4.0", "uid": field("id"),
            "product": {"name": "toolloop", "version": env!("CARGO_PKG_VERSION")}},
        "unmapped": {"decision": field("decision"), "rule": field("rule"),
            "pattern": field("pattern"), "definition_hash": field("definition_hash"),
            "agent": field("agent"), "session_id": field("session_id"), "arguments": field("arguments"), "outcome": field("outcome"), "result_bytes": field("result_bytes"),
            "labels": field("labels")},
    })
}
