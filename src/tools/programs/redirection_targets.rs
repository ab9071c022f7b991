//! Files that redirections may create where the path rules permit single files but no whole directory.
//! The kernel can grant only existing files, so they are created before the programs start. Those that no
//! redirection has opened are deleted when the programs have ended.

use std::collections::BTreeSet;
use std::io;
use std::time::SystemTime;

use cap_std::fs::{MetadataExt, OpenOptions, OpenOptionsExt};

use crate::governance::Permit;
use crate::tools::Workspace;
use crate::tools::sandbox::Job;
use crate::tools::sandbox::plan::{Access, Grant, GrantKind, Target};

/// The paths of such files that do not exist yet.
pub(super) fn missing(job: &Job<'_>, permit: &Permit, workspace: &Workspace) -> BTreeSet<String> {
    let writable = permit.writable();
    if !writable.by_glob {
        return BTreeSet::new();
    }
    let commands = job.steps.iter().flat_map(|step| &step.commands);
    let targets =
        commands.flat_map(|command| &command.redirections).filter_map(|it| match &it.to {
            Target::Write(path) | Target::Append(path) => Some(path.trim_start_matches("../")),
            Target::Read(_) | Target::Stream(_) => None,
        });
    let is_missing = |path: &&str| {
        let found =
            workspace.holder(path).map(|(directory, name)| directory.symlink_metadata(name));
        found.is_ok_and(|found| found.is_err())
    };
    let missing = targets.filter(|path| permit.may_write(path)).filter(is_missing);
    missing.map(str::to_owned).collect()
}

/// Creates the files; returns the grants for them.
pub(super) fn create(missing: &BTreeSet<String>, workspace: &Workspace) -> Vec<Grant> {
    let created = missing.iter().filter(|path| create_file(path, workspace).is_ok());
    let grant =
        |path: &String| Grant { path: path.clone(), access: Access::WRITE, kind: GrantKind::File };
    created.map(grant).collect()
}

fn create_file(path: &str, workspace: &Workspace) -> io::Result<()> {
    let (directory, name) = workspace.holder(path)?;
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let file = directory.open_with(name, &options)?.into_std();
    // This time marks a file that nothing has opened since.
    file.set_modified(SystemTime::UNIX_EPOCH).or_else(|_| directory.remove_file(name))
}

/// Deletes those that nothing has opened.
pub(super) fn delete_unopened(missing: &BTreeSet<String>, workspace: &Workspace) {
    for path in missing {
        let Ok((directory, name)) = workspace.holder(path) else { continue };
        let found = directory.symlink_metadata(name);
        if found.is_ok_and(|it| it.is_file() && it.len() == 0 && it.mtime() == 0) {
            let _ = directory.remove_file(name);
        }
    }
}
