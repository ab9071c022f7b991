//! Patterns of paths in arguments, replaced by what they match beneath the workspace.
//!
//! They are replaced before the gate judges the call, and so what runs is what was judged. Names
//! that begin with a dot need a pattern that does. Where nothing matches, the pattern stands for
//! itself, as in a shell.

use cap_fs_ext::DirExt;
use cap_std::fs::Dir;

use crate::bounds::glob::Glob;
use crate::tools::ToolError;

/// Entries that are looked at for one pattern, and for all patterns of a line.
const MAX_WALKED: usize = 20_000;
const MAX_WALKED_BY_LINE: usize = 100_000;
/// Paths that a pattern may stand for.
const MAX_MATCHES: usize = 1000;

/// The paths that a pattern means beneath a directory, in order. `walked` counts the entries that are
/// looked at for a line.
pub(super) fn expanded(
    directory: &Dir,
    pattern: &str,
    walked: &mut usize,
) -> Result<Vec<String>, ToolError> {
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
    let mut waiting = vec![(String::new(), 0)];
    while let Some((above, level)) = waiting.pop() {
        let (Some(glob), Some(part)) = (globs.get(level), parts.get(level)) else { continue };
        let is_last = level + 1 == globs.len();
        // Opened when its turn comes, so that one directory is open at a time.
        let opened = match above.strip_suffix('/') {
            None => directory.try_clone().map_err(|e| refused(e.to_string()))?,
            Some(path) => match directory.open_dir_nofollow(path) {
                Ok(opened) => opened,
                Err(_) => continue, // it cannot be read, or is gone by now
            },
        };
        for entry in opened.entries().into_iter().flatten().flatten() {
            (seen, *walked) = (seen + 1, *walked + 1);
            if seen > MAX_WALKED || *walked > MAX_WALKED_BY_LINE || found.len() > MAX_MATCHES {
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
                if is_directory {
                    waiting.push((format!("{path}/"), level + 1));
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use cap_std::ambient_authority;
    use tempfile::TempDir;

    use super::*;

    /// Set in a process that may have few files open.
    const FEW_FILES: &str = "PATTERNS_WITH_FEW_FILES";

    fn opened(place: &TempDir) -> Dir {
        Dir::open_ambient_dir(place.path(), ambient_authority()).unwrap()
    }

    #[test]
    fn one_directory_is_open_at_a_time() {
        if std::env::var_os(FEW_FILES).is_none() {
            let again = Command::new("/bin/sh")
                .args(["-c", "ulimit -n 64; exec \"$0\" \"$@\""])
                .arg(std::env::current_exe().unwrap())
                .args(["--exact", "tools::shell::patterns::tests::one_directory_is_open_at_a_time"])
                .env(FEW_FILES, "1")
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&again.stdout);
            assert!(said.contains("1 passed"), "{said}");
            return;
        }
        let place = TempDir::new().unwrap();
        for number in 0..200 {
            let directory = place.path().join(number.to_string());
            fs::create_dir(&directory).unwrap();
            fs::write(directory.join("file"), "").unwrap();
        }
        std::os::unix::fs::symlink("0", place.path().join("link")).unwrap();
        assert_eq!(expanded(&opened(&place), "*/f*", &mut 0).unwrap().len(), 200);
    }

    #[test]
    fn the_patterns_of_a_line_look_at_so_many_entries_together() {
        let place = TempDir::new().unwrap();
        for name in ["a", "b"] {
            fs::write(place.path().join(name), "").unwrap();
        }
        let mut walked = MAX_WALKED_BY_LINE - 2;
        assert_eq!(expanded(&opened(&place), "*", &mut walked).unwrap(), ["a", "b"]);
        let refused = expanded(&opened(&place), "nothing*", &mut walked).unwrap_err();
        assert!(refused.to_string().contains("matches too much"), "{refused}");
    }
}
