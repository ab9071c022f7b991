//! Wrong usage, which is told before anything is asked or written.

use serde_json::{Value, json};

use super::{directory, toolloop};
use crate::service::command;

const API: &str = r#"{"openapi": "3.1.0", "info": {"title": "a", "version": "1"}, "servers": [{"url": "http://a.example"}],
"paths": {"/things": {"get": {"operationId": "ListThings", "responses": {}}, "post": {"operationId": "AddThing", "responses": {}}}}}"#;

#[tokio::test]
async fn wrong_usage_is_exit_code_two() {
    let dir = directory(&[("api.json", API)]);
    for (arguments, told) in [
        (&["runs", "list", "--status", "bogus"][..], "completed"),
        (&["runs", "list", "--reason", "bogus"], "max_iterations"),
        (
            &[
                "keys",
                "create",
                "--name",
                "a",
                "--scope",
                "runs:read",
                "--expires-at",
                "2020-01-01T00:00:00Z",
            ],
            "is not in the future",
        ),
        (&["policy", "replay", "--agent", "a", "--tenant", "A"], "does not match ^[a-z0-9]"),
        (&["doctor", "--config", "missing.toml"], "missing.toml: cannot be read"),
        (&["doctor", "--json", "--config", "missing.toml"], "missing.toml: cannot be read"),
        (&["tools", "import", "api.json", "--json", "--operation", "ListThings"], "--json"),
        (&["tools", "import", "none/api.json"], "none/api.json cannot be read"),
        (&["check", "--listen", "localhost:8080"], "an IP address and a port, e.g. 127.0.0.1:8080"),
    ] {
        let done = toolloop(dir.path(), arguments).await;
        assert_eq!(done.code, Some(2), "{arguments:?}: {}{}", done.out, done.err);
        assert!(done.err.contains(told), "{arguments:?}: {}", done.err);
    }
    for (option, value) in [("--status", "needs_review"), ("--reason", "max_iterations")] {
        let done = toolloop(dir.path(), &["runs", "list", option, value]).await;
        assert_eq!(done.code, Some(0), "{}", done.err);
    }
}

#[tokio::test]
async fn an_admin_key_with_another_secret_is_a_mistake_of_the_configuration() {
    let dir = directory(&[]);
    let mut keys = command(dir.path());
    keys.args(["keys", "create", "--name", "a", "--scope", "admin", "--json"]);
    let made: Value = serde_json::from_slice(&keys.output().await.unwrap().stdout).unwrap();
    let id = made["id"].as_str().unwrap();
    for (key, told) in [
        (format!("tl_{id}_another-secret-of-32-characters"), "but another secret"),
        (format!("tl_{id}"), "must have the form"),
    ] {
        let mut serve = command(dir.path());
        serve.args(["serve", "--listen", "127.0.0.1:0"]).env("TOOLLOOP_ADMIN_KEY", key);
        let done = serve.output().await.unwrap();
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(2), "{said}");
        assert!(said.contains(told), "{said}");
    }
}

#[tokio::test]
async fn an_object_store_that_cannot_be_opened_is_a_mistake_of_the_configuration() {
    let settings = "[tools.workspace]\nstore = \"object\"\n[tools.workspace.object]\nurl = \"toolloop.toml/objects\"\n";
    let dir = directory(&[("toolloop.toml", settings)]);
    let done = toolloop(dir.path(), &["serve", "--listen", "127.0.0.1:0"]).await;
    assert_eq!((done.code, &*done.out), (Some(2), ""), "{}", done.err);
    assert!(done.err.contains("[tools.workspace.object]: the object store"), "{}", done.err);
}

#[tokio::test]
async fn broken_settings_are_problems_of_a_check_in_json() {
    let dir =
        directory(&[("toolloop.toml", "[server]\nlissen = 1\nlisten = \"localhost:8080\"\n")]);
    let checked = toolloop(dir.path(), &["check", "--json"]).await;
    assert_eq!(checked.code, Some(2), "{}", checked.err);
    let found: Value = serde_json::from_str(&checked.out).unwrap();
    let problems = found["problems"].as_array().unwrap();
    assert_eq!(problems.len(), 2, "{found:#}");
    assert!(
        problems.iter().any(|it| it.as_str().unwrap().contains("toolloop.toml:2: ")),
        "{found:#}"
    );
    assert_eq!((&found["warnings"], &found["not_loaded"]), (&json!([]), &json!([])));
}

#[tokio::test]
async fn a_check_reads_the_keys_of_the_identity_provider() {
    let settings = "[auth]\nmode = \"jwt\"\n[auth.jwt]\nissuer = \"i\"\naudience = \"a\"\njwks_file = \"keys.json\"\n";
    let dir = directory(&[("toolloop.toml", settings)]);
    let check = async |content: Option<&str>| {
        if let Some(content) = content {
            std::fs::write(dir.path().join("keys.json"), content).unwrap();
        }
        toolloop(dir.path(), &["check", "--json"]).await
    };
    let of_tests = json!({"keys": [{"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]});
    for (content, why) in [
        (None, "the file keys.json does not exist"),
        (Some("-----BEGIN PUBLIC KEY-----"), "is not a JSON object with `keys`"),
        (Some("{\"keys\": []}"), "has no key for RS256, ES256 or EdDSA"),
    ] {
        let checked = check(content).await;
        assert_eq!(checked.code, Some(2), "{}{}", checked.out, checked.err);
        for told in [&checked.out, &checked.err] {
            assert!(told.contains("auth.jwt.jwks_file: ") && told.contains(why), "{told}");
        }
    }
    let checked = check(Some(&of_tests.to_string())).await;
    assert_eq!(checked.code, Some(0), "{}{}", checked.out, checked.err);
}

#[tokio::test]
async fn operations_are_listed_as_json_and_written_to_new_files_only() {
    let dir = directory(&[("api.json", API)]);
    let listed = toolloop(dir.path(), &["tools", "import", "api.json", "--json"]).await;
    assert_eq!(listed.code, Some(0), "{}", listed.err);
    let listed: Value = serde_json::from_str(&listed.out).unwrap();
    let expected = json!({"operations": [
        {"id": "ListThings", "method": "GET", "path": "/things"},
        {"id": "AddThing", "method": "POST", "path": "/things"},
    ]});
    assert_eq!(listed, expected);
    let table = toolloop(dir.path(), &["tools", "import", "api.json"]).await.out;
    assert_eq!(table, "ListThings  GET /things\nAddThing  POST /things\n");

    let hostile = API.replace("AddThing", "Add\\u001b[2J\\nListThings");
    std::fs::write(dir.path().join("hostile.json"), hostile).unwrap();
    let table = toolloop(dir.path(), &["tools", "import", "hostile.json"]).await.out;
    assert!(table.ends_with("\nAdd\\u{1b}[2J ListThings  POST /things\n"), "{table}");

    let import =
        ["tools", "import", "api.json", "--operation", "ListThings", "--output", "api.yaml"];
    let missing = [&import[..], &["--operation", "typo"]].concat();
    let missing = toolloop(dir.path(), &missing).await;
    assert!(
        missing.code == Some(2) && missing.err.contains("no such operation: typo"),
        "{}",
        missing.err
    );
    assert!(!dir.path().join("api.yaml").exists());
    let short = toolloop(dir.path(), &["runs", "show", "123"]).await;
    assert!(short.code == Some(2) && short.err.contains("an id is a UUID"), "{}", short.err);
    let written = toolloop(dir.path(), &import).await;
    assert_eq!(written.code, Some(0), "{}", written.err);
    std::fs::write(dir.path().join("api.yaml"), "mine").unwrap();
    let refused = toolloop(dir.path(), &import).await;
    assert_eq!(refused.code, Some(2), "{}", refused.err);
    assert!(refused.err.contains("api.yaml exists; nothing was written"), "{}", refused.err);
    assert_eq!(std::fs::read_to_string(dir.path().join("api.yaml")).unwrap(), "mine");
}
