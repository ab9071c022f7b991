use serde_json::json;

use super::*;

fn parse(line: &str) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(line.split_whitespace())
}

#[test]
fn the_definition_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn serve_is_the_default_and_flags_are_global() {
    let bare = parse("toolloop --listen 127.0.0.1:1 --config c.toml").unwrap();
    assert!(bare.command.is_none());
    assert_eq!(bare.settings.listen.as_deref(), Some("127.0.0.1:1"));
    assert_eq!(bare.settings.log_format, LogFormat::Text);
    let full =
        parse("toolloop serve --database-url sqlite://x --agents-dir a --log-format json").unwrap();
    assert!(matches!(full.command, Some(Command::Serve)));
    assert_eq!(full.settings.database_url.as_deref(), Some("sqlite://x"));
    assert_eq!(full.settings.agents_dir.as_deref(), Some("a"));
    assert_eq!(full.settings.log_format, LogFormat::Json);
    assert!(parse("toolloop --config c.toml check --json").is_ok());
}

#[test]
fn invalid_command_lines_are_rejected() {
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
        "toolloop runs",
        "toolloop runs show",
        "toolloop runs show not-a-uuid",
        "toolloop runs list --since yesterday",
        "toolloop runs list --limit 0",
        "toolloop schema",
        "toolloop new",
        "toolloop new agent",
        "toolloop init a b",
        "toolloop completions tcsh",
    ] {
        assert_eq!(parse(line).unwrap_err().exit_code(), 2, "{line}");
    }
}

#[test]
fn keys_create_accepts_several_scopes() {
    let cli =
        parse("toolloop keys create --name ci --scope runs:read --scope tools:file_ops --json")
            .unwrap();
    let Some(Command::Keys(keys::KeysCommand::Create { scopes, .. })) = cli.command else {
        panic!("not keys create")
    };
    assert_eq!(scopes, ["runs:read", "tools:file_ops"]);
}

#[test]
fn single_inputs_override_the_object() {
    let pairs = |list: &[&str]| list.iter().map(|p| (*p).to_owned()).collect::<Vec<_>>();
    let inputs =
        invoke::parse_inputs(Some(r#"{"a": 1, "b": 2}"#), &pairs(&["b=3", "c:=[1]", "d=x=y"]))
            .unwrap();
    assert_eq!(inputs, json!({"a": 1, "b": "3", "c": [1], "d": "x=y"}));
    assert_eq!(invoke::parse_inputs(None, &[]).unwrap(), json!({}));
    for (object, pair) in [
        (Some("[]"), None),
        (Some("{"), None),
        (None, Some("a")),
        (None, Some("=b")),
        (None, Some("a:=x")),
    ] {
        let error = invoke::parse_inputs(object, &pairs(&pair.into_iter().collect::<Vec<_>>()))
            .unwrap_err();
        assert!(error.is::<UsageError>(), "{error}");
    }
}

/// A snapshot, so that a change of the help is noticed.
#[test]
fn the_help_texts() {
    let mut command = Cli::command();
    command.build();
    let mut pages = vec![command.render_help().to_string()];
    collect_help(&mut command, &mut pages);
    let pages: Vec<&str> = pages.iter().map(|page| page.trim_end()).collect();
    insta::assert_snapshot!(pages.join("\n\n=====\n\n"));
}

/// The help of all subcommands, without the global settings.
fn collect_help(command: &mut clap::Command, pages: &mut Vec<String>) {
    for subcommand in command.get_subcommands_mut().filter(|c| c.get_name() != "help") {
        let page = subcommand.render_help().to_string();
        let paragraphs: Vec<&str> =
            page.split("\n\n").filter(|part| !part.starts_with("Settings:")).collect();
        pages.push(paragraphs.join("\n\n"));
        collect_help(subcommand, pages);
    }
}

#[test]
fn completions_exist_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        assert!(parse(&format!("toolloop completions {shell}")).is_ok(), "{shell}");
    }
}
