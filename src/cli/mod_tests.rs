use chrono::Utc;
use serde_json::json;
use uuid::Uuid;

use super::*;
use crate::event::{CallFailure, Event, RunEvent, ToolCallCompleted};
use crate::message::CallTarget;

fn parse(line: &str) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(line.split_whitespace())
}

#[test]
fn the_definition_is_consistent() {
    use clap::CommandFactory as _;
    Cli::command().debug_assert();
}

#[test]
fn serving_is_the_default_and_flags_stand_anywhere() {
    let bare = parse("toolloop --listen 127.0.0.1:1 --config c.toml").unwrap();
    assert!(bare.command.is_none());
    assert_eq!(bare.settings.listen.as_deref(), Some("127.0.0.1:1"));
    assert_eq!(bare.settings.log_format, LogFormat::Text);
    let full = parse("toolloop serve --database-url sqlite://x --agents-dir a --log-format json").unwrap();
    assert!(matches!(full.command, Some(Command::Serve)));
    assert_eq!(full.settings.database_url.as_deref(), Some("sqlite://x"));
    assert_eq!(full.settings.agents_dir.as_deref(), Some("a"));
    assert_eq!(full.settings.log_format, LogFormat::Json);
    assert!(parse("toolloop --config c.toml check --json").is_ok());
}

#[test]
fn what_is_no_command_line() {
    for line in [
        "toolloop nonsense",
        "toolloop serve --port 1",
        "toolloop serve --log-format xml",
        "toolloop invoke",
        "toolloop keys",
        "toolloop keys create --name x",
        "toolloop keys create --scope admin",
        "toolloop keys create --name x --scope admin --expires-at tomorrow",
        "toolloop keys revoke",
    ] {
        assert_eq!(parse(line).unwrap_err().exit_code(), 2, "{line}");
    }
}

#[test]
fn keys_take_many_scopes() {
    let cli = parse("toolloop keys create --name ci --scope runs:read --scope tools:file_ops --json").unwrap();
    let Some(Command::Keys(keys::KeysCommand::Create { tenant, scopes, output, .. })) = cli.command else {
        panic!("not keys create")
    };
    assert_eq!((tenant.as_str(), scopes.len(), output.json), ("default", 2, true));
}

#[test]
fn inputs_are_merged() {
    let pairs = |list: &[&str]| list.iter().map(|p| (*p).to_owned()).collect::<Vec<_>>();
    let inputs = invoke::parse_inputs(Some(r#"{"a": 1, "b": 2}"#), &pairs(&["b=3", "c:=[1]", "d=x=y"])).unwrap();
    assert_eq!(inputs, json!({"a": 1, "b": "3", "c": [1], "d": "x=y"}));
    assert_eq!(invoke::parse_inputs(None, &[]).unwrap(), json!({}));
    for (object, pair) in
        [(Some("[]"), None), (Some("{"), None), (None, Some("a")), (None, Some("=b")), (None, Some("a:=x"))]
    {
        let error = invoke::parse_inputs(object, &pairs(&pair.into_iter().collect::<Vec<_>>())).unwrap_err();
        assert!(error.is::<UsageError>(), "{error}");
    }
}

#[test]
fn progress_tells_what_happened() {
    let line = |what| invoke::progress_line(&Event { seq: 1, at: Utc::now(), run_id: Uuid::nil(), what });
    let completed = ToolCallCompleted {
        call_id: Uuid::nil(),
        tool: "file_ops".into(),
        target: CallTarget::Tool,
        content: "secret content".into(),
        failure: Some(CallFailure::Timeout),
        duration_ms: 12,
        cached: false,
    };
    assert_eq!(line(RunEvent::ToolCallCompleted(completed)).as_deref(), Some("  file_ops: failed, 12 ms"));
    assert_eq!(
        line(RunEvent::cancelled("model_call", None, String::new(), 7)).as_deref(),
        Some("cancelled after 7 ms: The run was cancelled (phase: model_call).")
    );
    assert_eq!(line(RunEvent::RunQueued {}), None);
}
