//! What a run changed in its workspace: the changes that its calls recorded.
//!
//! They come from the journal. Where a call's changes were not seen (the service stopped during it,
//! or it was given up), the paths that it was permitted to write are listed with unknown counts:
//! that is all that is known.

use std::collections::HashMap;
use std::ops::ControlFlow;

use axum::extract::State;
use axum::response::Response;
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use super::journal;
use super::page::{LISTS, ListPage, ListParams, Listing, MAX_PAGE, by_number, number_position};
use super::redaction;
use super::runs::existing;
use crate::event::{
    CallFailure, ChangeKind, Event, FileChange, RunEvent, ToolCallCompleted, ToolCallStarted,
};
use crate::http::edge::auth::{RunsRead, Scoped};
use crate::http::edge::cursor::ListId;
use crate::http::edge::extract::{Params, RunId};
use crate::http::edge::problem::Problem;
use crate::http::state::App;
use crate::run::ActionKind;
use crate::tools::{browser, file_ops, shell};

/// Bytes of a change without its texts, approximately.
const ROW: usize = 256;
/// Changes of one call that are listed; a cursor counts them.
const PER_CALL: i64 = 1024;

/// A change of a file by a tool call.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Change)]
pub(crate) struct ChangeView {
    /// The sequence number of the event that recorded the change; several changes can share it.
    #[schema(example = 12)]
    seq: i64,
    /// The tool call.
    call_id: Uuid,
    /// The path, relative to the run's workspace.
    #[schema(example = "out/report.md")]
    path: String,
    /// What happened to the file or directory.
    change: ChangeKind,
    /// Its earlier path, if it was moved.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = "draft.md")]
    from: Option<String>,
    /// Lines added; null if unknown or not text.
    #[schema(example = 1)]
    added: Option<u64>,
    /// Lines removed; null if unknown or not text.
    #[schema(example = 1)]
    removed: Option<u64>,
    /// The change as a unified diff of at most 64 KiB; null if the file is not text or too large, if it was only moved, or
    /// if the change was not seen because the service stopped during the call.
    #[schema(example = "--- a/out/report.md\n+++ b/out/report.md\n@@ -1 +1 @@\n-draft\n+done\n")]
    diff: Option<String>,
    /// Whether the diff is cut, or left out because of its size or because the change was not seen.
    #[schema(example = false)]
    truncated: bool,
}

/// List a run's changes of files
///
/// The changes that the run's calls made, in order. The lines that programs changed (`shell`, script tools) are unknown: `added`,
/// `removed` and `diff` are null. A page has at most 4 MiB, so it can have fewer than `limit`. At most 1,000 changes of one call are listed; `changes_omitted` of its `tool_call.completed` counts the others.
#[utoipa::path(
    get, path = "/runs/{id}/changes", tag = "runs", security(("bearer" = ["runs:read"])),
    params(("id" = Uuid, Path, description = "The run's id."), ListParams),
    responses((status = 200, description = "A page of changes, in order.", body = Listing<ChangeView>)),
)]
pub(crate) async fn list_changes(
    State(app): State<App>,
    caller: Scoped<RunsRead>,
    RunId(id): RunId,
    mut params: Params,
) -> Result<Response, Problem> {
    let page = by_number(&mut params, &caller.tenant, LISTS)?;
    params.finish()?;
    existing(&app, &caller.tenant, id).await?;
    let mut changes = Changes::new(&page);
    journal::read(&app, &caller.tenant, id, |event| {
        changes.take(&event);
        if changes.is_full() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
    .await?;
    let bytes = changes.bytes as u64;
    redaction::respond(bytes, move || Ok(changes.listed())).await
}

/// A call that was dispatched, perhaps more than once.
struct Dispatched {
    writes: Vec<String>,
    times: u32,
}

/// The changes of one page, while the journal is read.
struct Changes {
    /// The cursor.
    after: i64,
    size: usize,
    list: ListId,
    bytes: usize,
    dispatched: HashMap<Uuid, Dispatched>,
    /// With their places, one more than the page has.
    found: Vec<(i64, ChangeView)>,
}

impl Changes {
    fn new(page: &ListPage<i64>) -> Self {
        Self {
            after: page.after.unwrap_or(0),
            size: page.limit as usize - 1,
            list: page.list,
            bytes: 0,
            dispatched: HashMap::new(),
            found: Vec::new(),
        }
    }

    fn is_full(&self) -> bool {
        self.found.len() > self.size
    }

    fn take(&mut self, event: &Event) {
        if let RunEvent::ToolCallStarted(call) = &event.what
            && is_of_files(&call.tool)
        {
            let writes = writes_of(call);
            let known = self.dispatched.entry(call.call_id);
            known.or_insert(Dispatched { writes, times: 0 }).times += 1;
        }
        if let RunEvent::ToolCallCompleted(call) = &event.what
            && let Some(dispatched) = self.dispatched.remove(&call.call_id)
        {
            let first = event.seq * PER_CALL;
            let places = first..first + PER_CALL;
            for (place, change) in places.zip(changes_of(call, &dispatched)) {
                self.add(place, event.seq, call.call_id, change);
            }
        }
    }

    fn add(&mut self, place: i64, seq: i64, call_id: Uuid, change: FileChange) {
        if place <= self.after || self.is_full() {
            return;
        }
        let FileChange { path, change, from, added, removed, diff, truncated } = change;
        let texts = [Some(&path), from.as_ref(), diff.as_ref()];
        self.bytes += ROW + texts.into_iter().flatten().map(String::len).sum::<usize>();
        if self.bytes > MAX_PAGE && !self.found.is_empty() {
            self.size = self.size.min(self.found.len());
        }
        let view = ChangeView { seq, call_id, path, change, from, added, removed, diff, truncated };
        self.found.push((place, view));
    }

    fn listed(mut self) -> Listing<ChangeView> {
        let has_more = self.is_full();
        self.found.truncate(self.size);
        let last = self.found.last().map(|(place, _)| number_position(*place));
        let shown = |(_, change): (i64, ChangeView)| ChangeView {
            diff: change.diff.map(redaction::text),
            ..change
        };
        let data = self.found.into_iter().map(shown).collect();
        Listing::until(data, self.list, last.filter(|_| has_more))
    }
}

/// Whether calls of a tool report what they change.
fn is_of_files(tool: &str) -> bool {
    [file_ops::NAME, browser::NAME, shell::NAME].contains(&tool) || tool.starts_with("script:")
}

/// The paths that a call was permitted to write.
fn writes_of(call: &ToolCallStarted) -> Vec<String> {
    let path = |kind: &ActionKind| match kind {
        ActionKind::Write { path } => Some(path.clone()),
        ActionKind::Read { .. }
        | ActionKind::Exec { .. }
        | ActionKind::Fetch(_)
        | ActionKind::Call { .. }
        | ActionKind::Delegate { .. } => None,
    };
    call.actions.iter().filter_map(|action| path(&action.what)).collect()
}

fn changes_of(call: &ToolCallCompleted, dispatched: &Dispatched) -> Vec<FileChange> {
    let seen = call.changes.clone().unwrap_or_default();
    let is_given_up = call.failure.is_none_or(|failure| {
        use CallFailure::{Cancelled, Panicked, Timeout, UnknownOutcome, Withheld};
        matches!(failure, UnknownOutcome | Timeout | Cancelled | Panicked | Withheld)
    });
    let is_unseen = is_given_up && call.changes.is_none();
    // A repeated call does not report what was done before the service stopped.
    if !is_unseen && dispatched.times < 2 {
        return seen;
    }
    let is_seen = |path: &String| {
        seen.iter().any(|change| change.path == *path || change.from.as_ref() == Some(path))
    };
    let unseen: Vec<FileChange> = dispatched
        .writes
        .iter()
        .filter(|path| !is_seen(path))
        .map(|p| FileChange::unknown(p))
        .collect();
    seen.into_iter().chain(unseen).collect()
}
