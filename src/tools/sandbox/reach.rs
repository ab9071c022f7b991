//! Which files programs reach: those of the system that every program needs, the programs
//! themselves, and of the workspace what the permit's path rules say.
//!
//! The kernel grants directories and files and knows no globs. A rule that names a whole directory
//! becomes a grant of it. Any other rule, and `paths.deny` by glob, is applied to the existing files, in a
//! walk of at most [`MAX_WALKED`] entries for each call. If the workspace has more entries, the call is
//! refused. The same walk records the files before programs change them, unless they are still cached
//! (`tree_cache`).

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cap_std::fs::Dir;

use super::plan::{Access, Grant, GrantKind, Reach};
use super::startable_programs::{self, StartablePrograms};
use super::tree_cache::{self, Size, Stamp, Tree};
use super::walk::{MAX_WALKED, WalkEntry, WalkLimit, walk};
use crate::governance::Permit;
use crate::tools::own_writes::Watch;

/// How long that may take.
const MAX_WALK: Duration = Duration::from_secs(5);
/// What programs of any kind read.
const SYSTEM: &[&str] = &["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store"];
const SYSTEM_SETTINGS: &[&str] = &[
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/ld.so.preload",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/ssl/openssl.cnf",
    "/etc/timezone",
];
/// The certificates by which programs verify other hosts.
const CERTIFICATES: &[&str] = &[
    "/etc/ca-certificates",
    "/etc/pki/ca-trust/extracted",
    "/etc/pki/tls/certs",
    "/etc/ssl/cert.pem",
    "/etc/ssl/certs",
];
const SOURCES: &[&str] = &["/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];
/// Why rules cannot be enforced.
#[derive(Debug, thiserror::Error)]
pub enum ReachError {
    #[error(
        "the workspace has more than {MAX_WALKED} entries, too many to enforce its path rules ({0}) \
         for a program; use file_ops, or ask for rules that name whole directories"
    )]
    TooMany(&'static str),
    #[error(
        "the workspace takes longer than {seconds} s to walk, too long to enforce its path rules ({0}) for \
         a program; use file_ops, or ask for rules that name whole directories",
        seconds = MAX_WALK.as_secs()
    )]
    TooSlow(&'static str),
    #[error(
        "{0} contains a file whose name is not UTF-8, for which paths.deny cannot be enforced; rename it, \
         or use file_ops"
    )]
    NotText(String),
    #[error("the directories of the workspace are nested too deeply")]
    TooDeep,
    #[error("the workspace cannot be read: {0}")]
    Unreadable(#[from] io::Error),
}

/// The grants for files of the system.
pub fn system(path: &[PathBuf], startable: StartablePrograms<'_>) -> Vec<Grant> {
    let everything = !matches!(startable, StartablePrograms::Only(_));
    let shared = if everything { Access::RUN } else { Access::READ };
    let directories = SYSTEM.iter().map(PathBuf::from).chain(path.iter().cloned());
    let mut grants: Vec<Grant> =
        directories.filter_map(|directory| granted(&directory, shared, GrantKind::Tree)).collect();
    let read = |path: &&str| granted(Path::new(path), Access::READ, kind_of(Path::new(path)));
    grants.extend(SYSTEM_SETTINGS.iter().filter_map(read));
    grants.extend(SOURCES.iter().filter_map(read));
    let nowhere = Access { read: true, write: true, execute: false };
    grants.extend(granted(Path::new("/dev/null"), nowhere, GrantKind::File));
    if let StartablePrograms::Only(programs) = startable {
        let file = |file: &PathBuf| granted(file, Access::RUN, kind_of(file));
        grants.extend(startable_programs::files_of(programs).iter().filter_map(file));
    }
    grants
}

/// The additional grants for programs with a network.
pub fn certificates() -> impl Iterator<Item = Grant> {
    let paths = CERTIFICATES.iter().map(Path::new);
    paths.filter_map(|path| granted(path, Access::READ, kind_of(path)))
}

fn kind_of(path: &Path) -> GrantKind {
    if path.is_dir() { GrantKind::Tree } else { GrantKind::File }
}

fn granted(path: &Path, access: Access, kind: GrantKind) -> Option<Grant> {
    let path = path.exists().then(|| path.to_str())??;
    Some(Grant { path: path.to_owned(), access, kind })
}

/// What is in a workspace before programs change it.
#[derive(Debug)]
pub struct Before {
    /// None where there is too much of it.
    pub tree: Option<Tree>,
    /// Denied entries, without their contents.
    pub denied: HashSet<String>,
    /// Its size; `None` if a part of it was not inspected.
    pub size: Option<Size>,
    /// Whether the programs have mounts of their own.
    pub has_mounts: bool,
    /// The watch for the service's own writes, begun before the walk.
    pub own: Watch,
}

/// The grants for the workspace, and its contents if the programs may change it.
///
/// # Errors
/// [`ReachError`] if the rules cannot be enforced.
pub fn workspace(
    permit: &Permit,
    root: &Dir,
    writes: bool,
    executes: bool,
    has_mounts: bool,
) -> Result<(Reach, Option<Before>), ReachError> {
    let own = writes.then(Watch::default);
    let (read, write) = (permit.readable(), permit.writable());
    let by_glob = read.by_glob || (writes && write.by_glob);
    let deny = permit.denied();
    let forbids = deny.by_glob || !deny.trees.is_empty();
    let looked = if by_glob || deny.by_glob || (!has_mounts && forbids) {
        let what = if by_glob { "paths.read, paths.write" } else { "paths.deny" };
        let names = by_glob || !has_mounts;
        Some(look(permit, root, what, Wanted { forbids, names, stamps: writes }, has_mounts)?)
    } else if writes {
        // The rules are enforced without it; the changes of the programs may stay unknown.
        let wanted = Wanted { forbids: false, names: false, stamps: true };
        look(permit, root, "paths", wanted, has_mounts).ok()
    } else {
        None
    };
    let denied: HashSet<String> = looked.as_ref().map_or_else(
        || deny.trees.into_iter().filter(|path| root.symlink_metadata(path).is_ok()).collect(),
        |tree| tree.denied.clone(),
    );
    let found = Found::of(looked.as_ref(), &denied, by_glob || !has_mounts);
    let mut reach = Reach::default();
    let access = if executes { Access::RUN } else { Access::READ };
    let trees = read.trees.iter().map(|tree| (tree, access));
    let written = write.trees.iter().filter(|_| writes).map(|tree| (tree, Access::WRITE));
    for (tree, access) in trees.chain(written) {
        if permit.may_enter(tree) {
            grant(&mut reach.grants, tree, access, &found, has_mounts);
        }
    }
    if by_glob {
        let by_directory = reach.grants.clone();
        for file in &found.files {
            let mut by_itself = |access| {
                if !by_directory.iter().any(|grant| grant.covers(file, access)) {
                    push(&mut reach.grants, file, access, GrantKind::File);
                }
            };
            if permit.may_read(file) {
                by_itself(access);
            }
            if writes && permit.may_write(file) {
                by_itself(Access::WRITE);
            }
        }
        push(&mut reach.grants, ".", Access::READ, GrantKind::Names);
    }
    if has_mounts {
        reach.masked = found.denied.iter().map(|path| (*path).to_owned()).collect();
    }
    let Some(own) = own else {
        if let Some(tree) = looked {
            tree_cache::put(root, permit.denied_as_written(), tree);
        }
        return Ok((reach, None));
    };
    let size = looked.as_ref().filter(|_| denied.is_empty()).map(Tree::size);
    Ok((reach, Some(Before { tree: looked, denied, size, has_mounts, own })))
}

impl Grant {
    /// Whether a file needs no grant of its own. One that has it is a mount point, which cannot be
    /// deleted or renamed.
    fn covers(&self, file: &str, access: Access) -> bool {
        self.kind == GrantKind::Tree && self.access == access && lies_in(file, &self.path)
    }
}

fn lies_in(path: &str, tree: &str) -> bool {
    tree == "." || path.strip_prefix(tree).is_some_and(|rest| rest.starts_with('/'))
}

fn push(grants: &mut Vec<Grant>, path: &str, access: Access, kind: GrantKind) {
    grants.push(Grant { path: path.to_owned(), access, kind });
}

/// Grants a directory as a whole. If something in it is denied and cannot be masked, grants listing its
/// names and, one by one, the entries that are not denied.
fn grant(grants: &mut Vec<Grant>, tree: &str, access: Access, found: &Found<'_>, has_mounts: bool) {
    let within = |path: &str| lies_in(path, tree);
    if has_mounts || !found.denied.iter().any(|denied| within(denied)) {
        let kind = if found.files.contains(tree) { GrantKind::File } else { GrantKind::Tree };
        return push(grants, tree, access, kind);
    }
    push(grants, tree, access, GrantKind::Names);
    let is_child = |path: &&&str| {
        let rest = if tree == "." { Some(**path) } else { path.strip_prefix(tree) };
        rest.is_some_and(|rest| within(path) && !rest.trim_start_matches('/').contains('/'))
    };
    for file in found.files.iter().filter(is_child) {
        push(grants, file, access, GrantKind::File);
    }
    for directory in found.directories.iter().filter(is_child) {
        grant(grants, directory, access, found, has_mounts);
    }
}

/// The entries of a workspace, in order.
struct Found<'a> {
    files: BTreeSet<&'a str>,
    directories: BTreeSet<&'a str>,
    denied: BTreeSet<&'a str>,
}

impl<'a> Found<'a> {
    fn of(tree: Option<&'a Tree>, denied: &'a HashSet<String>, with_names: bool) -> Self {
        let tree = tree.filter(|_| with_names);
        let files = tree.map(|tree| tree.files.keys().map(String::as_str).collect());
        let directories = tree.map(|tree| tree.directories.iter().map(String::as_str).collect());
        Self {
            files: files.unwrap_or_default(),
            directories: directories.unwrap_or_default(),
            denied: denied.iter().map(String::as_str).collect(),
        }
    }
}

/// What a walk of a workspace collects.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    /// Whether anything is denied.
    forbids: bool,
    /// Each file and directory, to be granted by itself.
    names: bool,
    stamps: bool,
}

fn look(
    permit: &Permit,
    root: &Dir,
    what: &'static str,
    wanted: Wanted,
    has_mounts: bool,
) -> Result<Tree, ReachError> {
    let rules = permit.denied_as_written();
    if let Some(cached) = tree_cache::take(root, &rules, |path| permit.may_visit(path)) {
        return Ok(cached);
    }
    let mut tree = if wanted.stamps { Tree::watched(root, has_mounts) } else { Tree::default() };
    let refused = |beyond| match beyond {
        WalkLimit::Entries => ReachError::TooMany(what),
        WalkLimit::Depth => ReachError::TooDeep,
        WalkLimit::Time => ReachError::TooSlow(what),
    };
    walk(root, (MAX_WALKED, Some(MAX_WALK)), refused, |entry: &WalkEntry<'_>| {
        if entry.name.to_str().is_none() {
            if wanted.forbids {
                let place = if entry.above.is_empty() { "the workspace" } else { entry.above };
                return Err(ReachError::NotText(place.to_owned()));
            }
            tree.is_incomplete();
            return Ok(false);
        }
        if !permit.may_visit(entry.path) {
            tree.denied.insert(entry.path.to_owned());
            return Ok(false);
        }
        if entry.is_directory {
            tree.add_directory(entry);
            return Ok(true);
        }
        if wanted.stamps {
            if let Ok(found) = entry.stat() {
                tree.add_file(entry.path, &found);
            }
        } else if wanted.names {
            tree.files.insert(entry.path.to_owned(), Stamp::default());
        }
        Ok(false)
    })?;
    Ok(tree)
}
