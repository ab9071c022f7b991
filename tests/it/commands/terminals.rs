//! What is told on a terminal.

use std::process::Stdio;

use tokio::process::Command;

use super::{ECHO, directory, toolloop};
use crate::service::command;

/// What a terminal of this kind shows of a command, and the command's exit code.
async fn on_terminal(dir: &std::path::Path, kind: &str, arguments: &str) -> (Option<i32>, String) {
    let program = command(dir).as_std().get_program().to_owned();
    let line = format!("{} {arguments}", program.to_str().unwrap());
    let done = Command::new("script")
        .args(["-qec", &line, "/dev/null"])
        .current_dir(dir)
        .env("TERM", kind)
        .env_remove("NO_COLOR")
        .stdin(Stdio::null())
        .output()
        .await
        .unwrap();
    (done.status.code(), String::from_utf8_lossy(&done.stdout).into_owned())
}

#[tokio::test]
async fn progress_is_shown_on_any_terminal() {
    let agent = "name: editor\nmodel: scripted/editor\ntools: [file_ops]\n\
        governance: {paths: {write: ['**']}, tool_policies: {file_ops: ask}}\n";
    let dir = directory(&[
        ("agents/echo.yaml", ECHO),
        ("scenarios/echo.yaml", "steps: [{error: {status: 400, message: no}}]"),
        ("agents/editor.yaml", agent),
        (
            "scenarios/editor.yaml",
            "steps: [{tool_calls: [{tool: file_ops, arguments: {operation: write, path: a, content: b}}]}]",
        ),
    ]);
    for kind in ["dumb", "xterm"] {
        let (code, told) = on_terminal(dir.path(), kind, "invoke echo").await;
        assert_eq!(code, Some(1), "{kind}: {told}");
        assert!(told.contains("failed after"), "{kind}: {told}");
        let (code, told) = on_terminal(dir.path(), kind, "invoke editor").await;
        assert_eq!(code, Some(3), "{kind}: {told}");
        assert!(told.contains("toolloop runs approve"), "{kind}: {told}");
        let call = "tools call editor file_ops --argument operation=list";
        let (code, told) = on_terminal(dir.path(), kind, call).await;
        assert_eq!(code, Some(3), "{kind}: {told}");
        assert!(told.contains("toolloop runs approve"), "{kind}: {told}");
    }
}

#[tokio::test]
async fn nothing_in_an_output_hides_on_a_terminal() {
    let dir = directory(&[
        ("agents/echo.yaml", ECHO),
        ("scenarios/echo.yaml", "steps: [{text: \"a\\u202eb\\u200bc\\e[2J\"}]"),
    ]);
    let (code, told) = on_terminal(dir.path(), "xterm", "invoke echo").await;
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("a\\u{202e}b\\u{200b}c\\u{1b}[2J"), "{told:?}");
    let listed = toolloop(dir.path(), &["runs", "list", "--json"]).await.out;
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    let id = listed["data"][0]["run_id"].as_str().unwrap();
    let shown = toolloop(dir.path(), &["runs", "show", id]).await.out;
    assert!(shown.ends_with("Output\na\\u{202e}b\\u{200b}c\\u{1b}[2J\n"), "{shown:?}");

    // Lines of JSON are exact in a pipe, and the same values on a terminal.
    let values = |text: &str| -> Vec<serde_json::Value> {
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let lines = ["runs", "watch", id, "--json"];
    let piped = toolloop(dir.path(), &lines).await.out;
    assert!(piped.contains("a\u{202e}b\u{200b}c\\u001b[2J"), "{piped:?}");
    let (_, told) = on_terminal(dir.path(), "xterm", &lines.join(" ")).await;
    assert!(told.contains("a\\u202eb\\u200bc\\u001b[2J"), "{told:?}");
    assert_eq!(values(&told), values(&piped));
}
