//! Running the programs of a call, for the tools that start them: in the sandbox, and within what the
//! workspace may hold.
//!
//! The service does not see what programs write, so it measures the workspace while they run, more
//! rarely where that takes long, and looks it through when they have ended (`left_behind`).

mod left_behind;

use std::time::{Duration, Instant};

use super::quota::OverQuota;
use super::sandbox::reach::Before;
use super::sandbox::{Job, Ran, Sandbox, SandboxError};
use super::{ToolContext, ToolError, Workspace};
use crate::governance::Permit;
use left_behind::LooksThrough;

/// Between two looks at a workspace, at least.
const PAUSE: Duration = Duration::from_millis(500);
/// The share of the time that looking may take.
const SHARE: u32 = 20;

/// Runs programs, which are ended where they fill the workspace beyond its bounds. Where they may
/// change it, `before` is what was in there.
///
/// # Errors
/// Nothing ran, or the workspace is full.
pub(super) async fn run(
    sandbox: &Sandbox,
    mut job: Job<'_>,
    context: &ToolContext,
    permit: Permit,
    before: Option<Before>,
) -> Result<Ran, ToolError> {
    let Some(before) = before else {
        return sandbox.run(job).await.map_err(|error| failed(&error));
    };
    context.standing.held().await;
    let (held, looks_through) = LooksThrough::after(permit, context, before);
    job.held = Some(held);
    let running = async { sandbox.run(job).await.map_err(|error| failed(&error)) };
    let ran = tokio::select! {
        ran = running => ran,
        over = filled(&context.workspace) => {
            Err(ToolError::ForModel(format!("The programs were ended: {over}.")))
        }
    };
    drop(looks_through);
    context.changed.settled().await;
    ran
}

/// Answers when a workspace holds more than it may and does not become smaller.
async fn filled(workspace: &Workspace) -> OverQuota {
    let mut before: Option<u64> = None;
    let mut pause = PAUSE;
    loop {
        tokio::time::sleep(pause).await;
        let since = Instant::now();
        let looked_at = workspace.clone();
        let looked = tokio::task::spawn_blocking(move || looked_at.excess()).await;
        let excess = looked.ok().flatten();
        if let Some(over) = excess
            && before.is_some_and(|before| over.amount() >= before)
        {
            return over;
        }
        before = excess.map(OverQuota::amount);
        pause = PAUSE.max(since.elapsed() * SHARE);
    }
}

/// What a model reads where programs did not run.
fn failed(error: &SandboxError) -> ToolError {
    if let SandboxError::Io(_) | SandboxError::NotStarted(_) = error {
        tracing::warn!(%error, "programs in the sandbox did not run");
    }
    ToolError::ForModel(error.to_string())
}
