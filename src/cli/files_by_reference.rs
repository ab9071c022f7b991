//! `--file PATH=ADDRESS`: files of other workspaces, by their addresses in the API.

use serde_json::{Value, json};

use super::UsageError;

/// The field `files` of an invocation.
pub(super) fn file_references(options: &[String]) -> anyhow::Result<Value> {
    let references = options.iter().map(|option| {
        file_reference(option).ok_or_else(|| {
            UsageError(format!(
                "--file: {option:?} is not PATH=ADDRESS with an address such as runs/ID/files/PATH, \
                 sessions/ID/files/PATH or agents/NAME/files/PATH"
            ))
        })
    });
    Ok(references.collect::<Result<Vec<_>, _>>()?.into())
}

fn file_reference(option: &str) -> Option<Value> {
    let (path, address) = option.split_once('=').filter(|(path, _)| !path.is_empty())?;
    let address = address.trim_start_matches('/');
    let address = address.strip_prefix("v1/").unwrap_or(address);
    let (kind, rest) = address.split_once('/')?;
    let (owner, source) = rest.split_once("/files/")?;
    let owner_field = match kind {
        "runs" => "run_id",
        "sessions" => "session_id",
        "agents" => "agent",
        _ => return None,
    };
    let decoded = |text: &str| {
        let text = percent_encoding::percent_decode_str(text).decode_utf8().ok()?;
        (!text.is_empty()).then(|| text.into_owned())
    };
    let mut from = json!({"path": decoded(source)?});
    from[owner_field] = decoded(owner)?.into();
    Some(json!({"path": path, "from": from}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_files_are_read() {
        let file = |owner: &str, id: &str| json!([{"path": "in/a", "from": {"path": "b c/d=e", owner: id}}]);
        for (option, expected) in [
            ("in/a=runs/7/files/b%20c/d=e", file("run_id", "7")),
            ("in/a=/v1/sessions/x%2Fy/files/b%20c/d=e", file("session_id", "x/y")),
            ("in/a=agents/n/files/b c/d=e", file("agent", "n")),
        ] {
            assert_eq!(file_references(&[option.to_owned()]).unwrap(), expected, "{option}");
        }
        for wrong in [
            "in/a",
            "=runs/7/files/a",
            "a=runs/7",
            "a=skills/7/files/b",
            "a=runs//files/b",
            "a=runs/7/files/",
        ] {
            assert!(file_references(&[wrong.to_owned()]).is_err(), "{wrong}");
        }
    }
}
