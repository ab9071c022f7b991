//! Patterns of paths in arguments, replaced by what they match beneath the workspace.
//!
//! They are replaced before the gate judges the call, and so what runs is what was judged. Names
//! that begin with a dot need a pattern that does. Where nothing matches, the pattern stands for
//! itself, as in a shell.

use cap_fs_ext::DirExt;
use cap_std::fs::Dir;

use crate::bounds::glob::Glob;
use crate::tools::ToolError;

/// Entries that are looked at for one pattern, and paths that it may stand for.
const MAX_WALKED: usize = 20_000;
const MAX_MATCHES: usize = 1000;

/// The paths that a pattern means beneath a directory, in order.
pub(super) fn expanded(directory: &Dir, pattern: &str) -> Result<Vec<String>, ToolError> {
    let refused = |why: String| ToolError::ForModel(format!("the pattern {pattern:?} {why}"));
    let relative = pattern.strip_prefix("./").unwrap_or(pattern);
    if relative.starts_with('/') || relative.split('/').any(|part| part == "..") {
        return Err(refused("may lead out of the workspace; patterns are of paths in it".into()));
    }
    if relative.contains("**") {
        return Err(refused("has **, which is not possible; name each level with *".into()));
    }
    let parts: Vec<&str> = relative.trim_end_matches('/').split('/').collect();
    let globs = parts.iter().map(|part| Glob::of_paths(part)).collect::<Result<Vec<_>, _>>();
    let globs = globs.map_err(|e| refused(e.to_string()))?;
    let only_directories = relative.ends_with('/');
    let (mut found, mut seen) = (Vec::new(), 0_usize);
    let mut open =
        vec![(directory.try_clone().map_err(|e| refused(e.to_string()))?, String::new(), 0)];
    while let Some((directory, above, level)) = open.pop() {
        let (Some(glob), Some(part)) = (globs.get(level), parts.get(level)) else { continue };
        let is_last = level + 1 == globs.len();
        for entry in directory.entries().into_iter().flatten().flatten() {
            seen += 1;
            if seen > MAX_WALKED || found.len() > MAX_MATCHES {
                return Err(refused("matches too much; name fewer files".into()));
            }
            let Ok(name) = entry.file_name().into_string() else { continue };
            let is_hidden = name.starts_with('.') && !part.starts_with('.');
            if is_hidden || !glob.is_match(&name) {
                continue;
            }
            let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let path = format!("{above}{name}");
            if !is_last {
                if let Ok(next) = directory.open_dir_nofollow(&name) {
                    open.push((next, format!("{path}/"), level + 1));
                }
            } else if !only_directories {
                found.push(path);
            } else if is_directory {
                found.push(format!("{path}/"));
            }
        }
    }
    found.sort();
    let prefix = &pattern[..pattern.len() - relative.len()];
    // The name of a file must not become an option.
    let prefix = if prefix.is_empty() && found.iter().any(|path| path.starts_with('-')) {
        "./"
    } else {
        prefix
    };
    Ok(found.into_iter().map(|path| format!("{prefix}{path}")).collect())
}
