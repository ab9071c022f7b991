//! Running the programs of a call, for the tools that start them: in the sandbox, and within what the
//! workspace may hold.
//!
//! The service does not see what programs write, so it measures the workspace while they run
//! (`quota_watch`), and inspects it when they have ended (`inspection`).

mod inspection;
mod quota_watch;
mod redirection_targets;

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::sandbox::reach::Before;
use super::sandbox::tree_cache::Size;
use super::sandbox::{Job, JobResult, Sandbox, SandboxError};
use super::{ToolContext, ToolError};
use crate::bounds::text::quoted;
use crate::bounds::{off_worker, secrets};
use crate::fairness;
use crate::governance::Permit;
use inspection::InspectOnDrop;

/// Runs programs, and ends them if they fill the workspace beyond its quota. If they may change the
/// workspace, `before` is its earlier content.
///
/// # Errors
/// Nothing ran, or the workspace is full.
pub(super) async fn run(
    sandbox: &Sandbox,
    mut job: Job<'_>,
    context: &ToolContext,
    permit: Permit,
    before: Option<Before>,
) -> Result<JobResult, ToolError> {
    let Some(before) = before else {
        context.changed.is_read_only(); // the kernel lets these programs change nothing
        return sandbox.run(job).await.map_err(|error| failed(&error));
    };
    let denied = permit.denied();
    if denied.by_glob || !denied.trees.is_empty() {
        there_is_room_aside(context).await?;
    }
    let size = before.size;
    job.largest_file = Some(largest_file(context.workspace.bounds()[0], size));
    context.standing.until_valid().await;
    let missing = off_worker(|| redirection_targets::missing(&job, &permit, &context.workspace));
    let missing = Arc::new(missing);
    let (held, inspect_on_drop) =
        InspectOnDrop::after(permit, context, before, Arc::clone(&missing));
    if missing.is_empty() {
        job.held = Some(held);
    } else {
        let workspace = context.workspace.clone();
        // If the call ends meanwhile, the sender is dropped after the files were created.
        let making = move || (redirection_targets::create(&missing, &workspace), held);
        let made = fairness::on_files(making).await;
        let (made, held) =
            made.map_err(|error| failed(&SandboxError::Io(io::Error::other(error.to_string()))))?;
        job.reach.grants.splice(0..0, made);
        job.held = Some(held);
    }
    let running = async { sandbox.run(job).await.map_err(|error| failed(&error)) };
    let ran = tokio::select! {
        ran = running => ran,
        over = quota_watch::exceeded(&context.workspace, size) => {
            Err(ToolError::ForModel(format!("The programs were ended: {over}.")))
        }
    };
    drop(inspect_on_drop);
    context.changed.settled().await;
    ran
}

/// The largest file, in bytes, that programs may write in a workspace of `most` bytes: the remaining room
/// (at least an eighth of `most`) plus the size of the largest existing file.
fn largest_file(most: u64, size: Option<Size>) -> u64 {
    let Some(Size { bytes, largest, .. }) = size else { return most };
    let room = most.saturating_sub(bytes).max(most / 8);
    room.saturating_add(largest).min(most)
}

/// The file of a program of the operator's: by its name where programs are looked for, by a path from
/// the directory.
///
/// # Errors
/// Why there is none: a phrase.
pub(super) fn found(name: &str, directory: &Path, path: &[PathBuf]) -> Result<PathBuf, String> {
    let executable = |file: &PathBuf| {
        let found = file.metadata();
        found.is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    if name.contains('/') {
        let file = std::fs::canonicalize(directory.join(name)).ok().filter(executable);
        return file.ok_or_else(|| format!("{} is not an executable file", quoted(name)));
    }
    path.iter().map(|dir| dir.join(name)).find(executable).ok_or_else(|| {
        let places = path.iter().map(|dir| dir.display().to_string()).collect::<Vec<_>>();
        format!("there is no program {} in {}", quoted(name), places.join(", "))
    })
}

/// The values among variables that are kept from the model, by their names or shapes.
pub fn secrets_among(variables: &[(String, String)]) -> Vec<String> {
    let is_secret = |(name, value): &&(String, String)| {
        let written = format!("{name}={value}");
        secrets::redacted(&written) != written
    };
    variables.iter().filter(is_secret).map(|(_, value)| value.clone()).collect()
}

/// Refuses programs if the quarantine, where denied files are moved, is full. It may hold as much as a
/// workspace.
async fn there_is_room_aside(context: &ToolContext) -> Result<(), ToolError> {
    let workspace = context.workspace.clone();
    let looked = fairness::on_files(move || workspace.quarantine_is_full()).await;
    if !looked.unwrap_or(true) {
        return Ok(());
    }
    tracing::warn!(
        tenant = %context.caller.tenant,
        "programs do not start, since the quarantine of the tenant is full; see docs/tools.md"
    );
    Err(ToolError::ForModel(
        "No program that may change files starts: what programs made under denied names has filled \
         the quarantine, which an operator must look through. Use file_ops."
            .into(),
    ))
}

/// What a model reads where programs did not run.
fn failed(error: &SandboxError) -> ToolError {
    if let SandboxError::Io(_) | SandboxError::NotStarted(_) = error {
        tracing::warn!(%error, "programs did not run in the sandbox");
    }
    ToolError::ForModel(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_becomes_no_larger_than_there_is_room() {
        let size = |bytes, largest| Some(Size { bytes, largest, files: 1 });
        let table = [
            (None, 800),
            (size(0, 0), 800),
            (size(300, 0), 500),
            (size(700, 300), 400),
            (size(700, 700), 800),
            (size(9000, 50), 150),
        ];
        for (size, expected) in table {
            assert_eq!(largest_file(800, size), expected, "{size:?}");
        }
    }
}
