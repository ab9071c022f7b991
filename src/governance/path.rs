//! The path rule: which paths of the workspace may be read and written.
//!
//! `deny` beats everything and covers everything below a denied directory. Reading needs a `read`
//! glob, writing a `write` glob; an empty list permits nothing. Paths arrive resolved and
//! normalised, relative to the workspace (`.` is its root); any other path is a bug of the tool and
//! is denied. The globs in `deny_in` and `private_in` are relative to another directory of the tenant:
//! the path is made relative to that directory before it is matched. The rule matches names without
//! touching the file system.

use super::gate::{PolicyError, Question, Ruling};
use super::{ActionKind, Decision, Policy};
use crate::bounds::glob::{Glob, PathGlobs};

/// The compiled lists.
#[derive(Debug)]
pub(super) struct PathRules {
    read: Patterns,
    write: Patterns,
    private: PathPatterns,
    denied: PathPatterns,
    /// Deny globs that only cause a warning.
    observed: PathPatterns,
}

/// Patterns of paths in the workspace, and in other directories of the tenant.
#[derive(Debug)]
struct PathPatterns {
    here: Patterns,
    /// With the directory beneath the tenant's that the globs are relative to.
    elsewhere: Vec<(String, Patterns)>,
}

impl PathPatterns {
    fn new(
        (setting, here): (&'static str, &[String]),
        (setting_in, elsewhere): (&'static str, &[(String, Vec<String>)]),
    ) -> Result<Self, PolicyError> {
        let elsewhere = elsewhere
            .iter()
            .map(|(directory, globs)| Ok((directory.clone(), Patterns::new(setting_in, globs)?)));
        let elsewhere = elsewhere.collect::<Result<_, _>>()?;
        Ok(Self { here: Patterns::new(setting, here)?, elsewhere })
    }

    fn denied(here: &[String], elsewhere: &[(String, Vec<String>)]) -> Result<Self, PolicyError> {
        Self::new(("paths.deny", here), ("paths.deny_in", elsewhere))
    }

    fn are_none(&self) -> bool {
        self.here.written.is_empty()
            && self.elsewhere.iter().all(|(_, globs)| globs.written.is_empty())
    }

    /// Whether a pattern matches the path itself; the directories above it do not count.
    fn match_itself(&self, workspace: &str, path: &str) -> bool {
        let elsewhere = |(directory, globs): &(String, Patterns)| {
            !globs.written.is_empty()
                && path_relative_to(directory, workspace, path)
                    .is_some_and(|path| globs.matching(&path).is_some())
        };
        self.here.matching(path).is_some() || self.elsewhere.iter().any(elsewhere)
    }

    /// The pattern that covers the path, or a directory above it, in the workspace at that directory
    /// beneath the tenant's.
    fn covering(&self, workspace: &str, path: &str) -> Option<&str> {
        self.here.covering(path).or_else(|| {
            self.elsewhere.iter().find_map(|(directory, globs)| {
                globs.covering(&path_relative_to(directory, workspace, path)?)
            })
        })
    }
}

/// The part of the path rules that the kernel can enforce: it knows directories and files, and no
/// globs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WholePaths {
    /// Directories with all that is in them, and single files; `.` for the workspace.
    pub trees: Vec<String>,
    /// Whether there are also rules that only globs express.
    pub by_glob: bool,
}

/// Globs as written, and one or two compiled ones for each.
#[derive(Debug)]
struct Patterns {
    written: Vec<String>,
    /// With the index into `written`.
    compiled: Vec<(Glob, usize)>,
    /// All of them at once, since most paths match none.
    together: Option<PathGlobs>,
}

impl PathRules {
    pub(super) fn new(policy: &Policy) -> Result<Self, PolicyError> {
        Ok(Self {
            read: Patterns::new("paths.read", &policy.read)?,
            write: Patterns::new("paths.write", &policy.write)?,
            private: PathPatterns::new(
                ("paths.private", &policy.private),
                ("paths.private_in", &policy.private_in),
            )?,
            denied: PathPatterns::denied(&policy.deny, &policy.deny_in)?,
            observed: PathPatterns::denied(&policy.deny_observed, &policy.deny_in_observed)?,
        })
    }

    /// The pattern that denies the path, or a directory above it, in the workspace at that directory
    /// beneath the tenant's.
    pub(super) fn denied_by(&self, workspace: &str, path: &str) -> Option<&str> {
        self.denied.covering(workspace, path)
    }

    /// Whether a pattern denies the path itself, whatever lies above it.
    pub(super) fn denies_itself(&self, workspace: &str, path: &str) -> bool {
        self.denied.match_itself(workspace, path)
    }

    /// Whether the path of the workspace at that directory beneath the tenant's is private.
    pub(super) fn is_private(&self, workspace: &str, path: &str) -> bool {
        self.private.covering(workspace, path).is_some()
    }

    pub(super) fn has_private(&self) -> bool {
        !self.private.are_none()
    }

    /// The pattern that lets a path be read.
    pub(super) fn read_by(&self, path: &str) -> Option<String> {
        self.read.matching(path).map(str::to_owned)
    }

    /// The pattern that lets a path be written.
    pub(super) fn written_by(&self, path: &str) -> Option<String> {
        self.write.matching(path).map(str::to_owned)
    }

    pub(super) fn may_write(&self, workspace: &str, path: &str) -> bool {
        self.write.matching(path).is_some() && self.denied_by(workspace, path).is_none()
    }

    pub(super) fn readable(&self) -> WholePaths {
        self.read.whole()
    }

    pub(super) fn writable(&self) -> WholePaths {
        self.write.whole()
    }

    /// The deny rules that are relative to the workspace; rules of other directories count as globs.
    pub(super) fn denied(&self) -> WholePaths {
        let mut denied = self.denied.here.whole();
        denied.by_glob |= self.denied.elsewhere.iter().any(|(_, deny)| !deny.written.is_empty());
        denied
    }

    /// The deny rules as written in the definition, with the directory of the workspace.
    pub(super) fn denied_as_written(&self, workspace: &str) -> String {
        let elsewhere = self.denied.elsewhere.iter().map(|(at, globs)| (at, &globs.written));
        format!("{workspace:?} {:?} {:?}", self.denied.here.written, elsewhere.collect::<Vec<_>>())
    }

    pub(super) fn may_read(&self, workspace: &str, path: &str) -> bool {
        self.read.matching(path).is_some() && self.denied_by(workspace, path).is_none()
    }
}

/// A path of a workspace, relative to another directory of the tenant; `None` where it is not in
/// there.
pub fn path_relative_to(directory: &str, workspace: &str, path: &str) -> Option<String> {
    let whole = match (workspace, path) {
        (".", path) => path.to_owned(),
        (workspace, ".") => workspace.to_owned(),
        (workspace, path) => format!("{workspace}/{path}"),
    };
    if directory == "." {
        return Some(whole);
    }
    match whole.strip_prefix(directory)? {
        "" => Some(".".to_owned()),
        rest => rest.strip_prefix('/').map(str::to_owned),
    }
}

impl Patterns {
    fn new(setting: &'static str, written: &[String]) -> Result<Self, PolicyError> {
        let mut compiled = Vec::new();
        for (index, pattern) in written.iter().enumerate() {
            let wrong =
                |message: String| PolicyError { setting, pattern: pattern.clone(), message };
            for glob in globs(pattern).map_err(|message| wrong(message.to_owned()))? {
                let glob = Glob::of_paths(&glob).map_err(|refused| wrong(refused.0))?;
                compiled.push((glob, index));
            }
        }
        let several = compiled.iter().map(|(glob, _)| glob.written());
        let together = if compiled.len() > 1 { PathGlobs::new(several) } else { None };
        Ok(Self { written: written.to_vec(), compiled, together })
    }

    fn whole(&self) -> WholePaths {
        let mut whole = WholePaths::default();
        for pattern in &self.written {
            let relative = pattern.trim_start_matches("./");
            // As in `globs`: stars behind a part of a name stay within that name.
            let tree = match relative {
                "**" => Some("."),
                _ => relative.strip_suffix("/**").or_else(|| relative.strip_suffix('/')),
            };
            let is_plain = |tree: &&str| {
                let is_named = |part: &str| !part.is_empty() && (part != "." || *tree == ".");
                !tree.contains(['*', '?', '[', '{', '\\']) && tree.split('/').all(is_named)
            };
            match tree.filter(is_plain) {
                Some(tree) => whole.trees.push(tree.to_owned()),
                None => whole.by_glob = true,
            }
        }
        whole
    }

    fn matching(&self, path: &str) -> Option<&str> {
        let path = if path == "." { "" } else { path };
        if self.together.as_ref().is_some_and(|globs| !globs.any_is_match(path)) {
            return None;
        }
        let (_, index) = self.compiled.iter().find(|(glob, _)| glob.is_match(path))?;
        self.written.get(*index).map(String::as_str)
    }

    /// The pattern that matches the path or a directory above it.
    fn covering(&self, path: &str) -> Option<&str> {
        if self.written.is_empty() {
            return None;
        }
        let above = path.match_indices('/').map(|(end, _)| &path[..end]);
        above.chain([path]).find_map(|path| self.matching(path))
    }

    /// The allowed patterns, for a reason.
    fn listed(&self) -> String {
        match self.written.as_slice() {
            [] => "nothing".to_owned(),
            [one] => one.clone(),
            [some @ .., last] => format!("{} and {last}", some.join(", ")),
        }
    }
}

/// The globs of a written pattern. `dir/**`, and `dir/` for short, include `dir`
/// itself.
fn globs(pattern: &str) -> Result<Vec<String>, &'static str> {
    let mut relative = pattern;
    while let Some(rest) = relative.strip_prefix("./") {
        relative = rest;
    }
    if pattern.is_empty() {
        return Err("is empty");
    }
    if relative.starts_with('/') {
        return Err("is absolute, but paths are relative to the workspace");
    }
    if relative.split('/').any(|part| part == "..") {
        return Err("has a `..`, but no path has one");
    }
    let tree = relative.strip_suffix("/**").or_else(|| relative.strip_suffix('/'));
    Ok(match (relative, tree) {
        ("" | ".", _) => vec![String::new()],
        (_, Some(dir)) => vec![dir.to_owned(), format!("{dir}/**")],
        _ => vec![relative.to_owned()],
    })
}

pub(super) fn judge(question: &Question<'_>) -> Ruling {
    let rules = &question.policy.paths;
    let mut observed = Ruling::NoObjection;
    for action in question.call.actions.iter() {
        let (verb, path, allowed) = match &action.what {
            ActionKind::Read { path } => ("read", path, &rules.read),
            ActionKind::Write { path } => ("written", path, &rules.write),
            ActionKind::Exec { .. }
            | ActionKind::Fetch(_)
            | ActionKind::Call { .. }
            | ActionKind::Delegate { .. } => continue,
        };
        if path != "." && path.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Ruling::Undecided(format!("{path:?} is not a normalised path"), None);
        }
        let reason = if let Some(pattern) = rules.denied_by(&question.call.directory, path) {
            let reason = format!(
                "{path:?} may not be {verb}, it is denied by {pattern}; choose another path"
            );
            return Ruling::Matched(Decision::Blocked, reason, pattern.to_owned());
        } else if allowed.matching(path).is_none() {
            format!("{path:?} may not be {verb}; what may be {verb} is {}", allowed.listed())
        } else {
            if let Some(pattern) = rules.observed.covering(&question.call.directory, path) {
                let why = format!("{path:?} would be denied by {pattern}, which only observes");
                observed = Ruling::Observed(Decision::Blocked, why, Some(pattern.to_owned()));
            }
            continue;
        };
        return Ruling::Objection(Decision::Blocked, reason);
    }
    observed
}
