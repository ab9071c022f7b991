//! Where the files of a run lie, beneath the directory of its tenant, by the `workspace` of its agent.
//!
//! Ids come from callers: their kinds are distinguished by a prefix, and a session's id that could be
//! read as more than a name is replaced by its hash. Nothing is opened here.

use sha2::{Digest as _, Sha256};
use uuid::Uuid;

const RUN: &str = "{run_id}";
const SESSION: &str = "{session_id}";

/// The directory of a run's files. For a run without a session, `{session_id}` is a directory of its own.
pub fn directory_of(workspace: &str, run: Uuid, session: Option<&str>) -> String {
    let workspace = workspace.replace(RUN, &format!("r-{run}"));
    if workspace.contains(SESSION) {
        workspace.replace(SESSION, &session_name(run, session))
    } else {
        workspace
    }
}

fn session_name(run: Uuid, session: Option<&str>) -> String {
    let is_name = |id: &str| {
        (1..=64).contains(&id.len())
            && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    };
    match session {
        None => format!("r-{run}"),
        Some(id) if is_name(id) => format!("s-{id}"),
        Some(id) => format!("h-{}", sha256_hex(id)),
    }
}

/// The outermost directory that no run uses once this one is forgotten, and its session too where
/// `with_session`; `None` where other runs share it.
pub fn exclusive_directory(
    workspace: &str,
    run: Uuid,
    session: Option<&str>,
    with_session: bool,
) -> Option<String> {
    let is_left = |name: &str| {
        name.contains(RUN) || name.contains(SESSION) && (with_session || session.is_none())
    };
    let names: Vec<&str> = workspace.split('/').collect();
    let last = names.iter().position(|name| is_left(name))?;
    Some(directory_of(&names[..=last].join("/"), run, session))
}

pub(super) fn sha256_hex(text: &str) -> String {
    hex::encode(Sha256::digest(text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outermost_directory_that_no_other_run_uses_is_found() {
        let run = Uuid::from_u128(7);
        let (r, s) = (format!("r-{run}"), Some("x"));
        for (workspace, session, with_session, left) in [
            (".", s, true, None),
            ("shared/deep", None, true, None),
            ("own/{run_id}/in", s, false, Some(format!("own/{r}"))),
            ("chats/{session_id}", s, true, Some("chats/s-x".to_owned())),
            ("chats/{session_id}", s, false, None),
            ("chats/{session_id}/deep", None, false, Some(format!("chats/{r}"))),
            ("a/{session_id}/{run_id}", s, false, Some(format!("a/s-x/{r}"))),
            ("a/{session_id}/{run_id}", s, true, Some("a/s-x".to_owned())),
            ("a/{run_id}/{session_id}", s, false, Some(format!("a/{r}"))),
        ] {
            assert_eq!(
                exclusive_directory(workspace, run, session, with_session),
                left,
                "{workspace}"
            );
        }
        assert!(directory_of("{session_id}", run, Some("../x")).starts_with("h-"));
    }
}
