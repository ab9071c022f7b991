//! What a definition refers to and is not there: told with file, line, key and what there is, by
//! `check`, by `doctor`, at the start and by `/readyz`.

use serde_json::{Value, json};

use crate::service::{Db, Setup, command};

/// The line behind the name and the model, and what is said of it.
const MISSING: [(&str, &str, &str); 8] = [
    (
        "fallback",
        "fallback_models: [scripted/z, nobody/y]",
        "line 3, column 31: fallback_models[1]: ",
    ),
    ("selectable", "models: ['scripted/*', 'nobody/*']", "line 3, column 24: models[1]: "),
    (
        "tool",
        "tools: [file_ops, teleport]",
        "line 3, column 19: tools[1]: there is no tool named \"teleport\"; there are: browser, file_ops, recall, shell, use_skill",
    ),
    (
        "skill",
        "skills: [style, later]",
        "line 3, column 17: skills[1]: there is no skill named \"later\"; there are: style",
    ),
    (
        "child",
        "tools: [file_ops, 'agent:ghost']",
        "line 3, column 19: tools[1]: there is no agent named \"ghost\"; there are: good",
    ),
    (
        "price",
        "governance: {budget: {max_cost_usd: 1}}",
        "line 3, column 23: governance.budget.max_cost_usd: scripted/x has no price",
    ),
    (
        "option",
        "tools: [file_ops]\ntool_options: {shel: {retries: 1}}",
        "line 4, column 16: tool_options.shel: \"shel\" means none of this agent's tools, which are: file_ops",
    ),
    (
        "around",
        "tools: [file_ops]\ninterceptors: {before: [{tool: shell, block: No.}]}",
        "line 4, column 26: interceptors.before[0].tool: \"shell\" is not one of this agent's tools: file_ops",
    ),
];

fn setup() -> Setup {
    let setup = Setup::new()
        .agent("good", "model: scripted/x\n")
        .agent("model", "model: nobody/x\n")
        .scenario("x", "steps: [{text: fine}]")
        .skill("style", "", "Be brief.");
    MISSING.into_iter().fold(setup, |setup, (name, line, _)| {
        setup.agent(name, &format!("model: scripted/x\n{line}\n"))
    })
}

async fn said(dir: &std::path::Path, args: &[&str]) -> (Option<i32>, String) {
    let done = command(dir).args(args).output().await.unwrap();
    let text = String::from_utf8_lossy(&done.stdout) + String::from_utf8_lossy(&done.stderr);
    (done.status.code(), text.into_owned())
}

#[tokio::test]
async fn missing_references_are_reported_with_their_place() {
    let dir = setup().write_directory();
    let (code, check) = said(dir.path(), &["check"]).await;
    assert_eq!(code, Some(1), "{check}");
    let (_, doctor) = said(dir.path(), &["doctor", "--json"]).await;
    let doctor: Value = serde_json::from_str(&doctor).unwrap();
    let details: Vec<&str> = doctor["checks"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|it| it["detail"].as_str())
        .collect();
    let service = setup().start(Db::Sqlite).await;
    let ready = service.get("/readyz").await.body;
    let model = ("model", "", "line 2, column 1: model: ");
    for (name, _, expected) in MISSING.into_iter().chain([model]) {
        let line = check.lines().find(|line| line.starts_with(&format!("agents/{name}.yaml: ")));
        let line = line.unwrap_or_else(|| panic!("{name}: {check}"));
        assert!(line.contains(expected), "{line}");
        let error = line.split_once(": ").unwrap().1;
        assert!(details.iter().any(|detail| detail.ends_with(error)), "{error}: {details:#?}");
        let definitions = ready["definitions"].as_array().unwrap();
        let masked = masked(error);
        let told = definitions
            .iter()
            .any(|it| it["file"] == json!(format!("{name}.yaml")) && it["error"] == json!(masked));
        assert!(told, "{error}: {ready:#}");
        service.until_logged(name).await;
    }
    assert!(check.contains("nobody") && check.contains("openai, scripted"), "{check}");
}

/// As `/readyz` tells it, which needs no key: without what the definition says in quotes.
fn masked(error: &str) -> String {
    let parts = error.split('"').enumerate();
    let parts = parts.map(|(index, part)| if index % 2 == 0 { part } else { "…" });
    parts.collect::<Vec<_>>().join("\"")
}

#[tokio::test]
async fn scenarios_that_cannot_be_played_are_told() {
    let setup = Setup::new()
        .agent("gone", "model: scripted/gone\n")
        .agent("broken", "model: scripted/fine\nfallback_models: [scripted/broken]\n")
        .scenario("fine", "steps: [{text: fine}]")
        .scenario("broken", "steps:\n  - {txt: typo}\n");
    let dir = setup.write_directory();
    for args in ["check", "doctor"] {
        let (code, said) = said(dir.path(), &[args]).await;
        assert_eq!(code, Some(1), "{said}");
        for expected in [
            "gone.yaml: line 2, column 1: model: there is no scenario named \"gone\"; there are: broken, fine",
            "broken.yaml: line 3, column 19: fallback_models[0]: scenarios/broken.yaml: line 2, column 6: steps[0].txt: unknown key `txt` (did you mean `text`?)",
        ] {
            assert!(said.contains(expected), "{expected}: {said}");
        }
    }
    let service = setup.start(Db::Sqlite).await;
    service.until_logged("gone.yaml").await;
    let fine = service.run("broken", &json!({})).await;
    assert_eq!(
        fine["status"], "completed",
        "it is there as long as it need not be played: {fine:#}"
    );
}

#[tokio::test]
async fn a_malformed_key_is_a_mistake_of_the_configuration() {
    let models = "[models.far]\nkind = \"openai\"\nbase_url = \"http://127.0.0.1:1/v1\"\napi_key_env = \"FAR_KEY\"\n";
    let dir = Setup::new().config(models).write_directory();
    for (variable, key, told) in [
        ("TOOLLOOP_ADMIN_KEY", "tl_admin_hunter2", "TOOLLOOP_ADMIN_KEY"),
        ("FAR_KEY", "hunter2\nhunter2", "[models.far]"),
    ] {
        for args in [&["serve", "--listen", "127.0.0.1:0"][..], &["check"], &["check", "--json"]] {
            let done = command(dir.path())
                .args(args)
                .env(variable, key)
                .env("DATABASE_URL", format!("sqlite://{}", dir.path().join("x.db").display()))
                .output()
                .await
                .unwrap();
            let said =
                String::from_utf8_lossy(&done.stdout) + String::from_utf8_lossy(&done.stderr);
            assert_eq!(done.status.code(), Some(2), "{variable}, {args:?}: {said}");
            assert!(said.contains(told) && !said.contains("hunter2"), "{said}");
        }
    }
}

#[tokio::test]
async fn a_policy_without_a_tool_is_warned_of() {
    let agent = "model: scripted/x\ntools: [file_ops]\ngovernance:\n  tool_policies:\n    'file_*': ask\n    shel: deny\n";
    let setup = Setup::new().agent("picky", agent).scenario("x", "steps: [{text: fine}]");
    let dir = setup.write_directory();
    let (code, checked) = said(dir.path(), &["check"]).await;
    assert_eq!(code, Some(0), "{checked}");
    let warnings: Vec<&str> =
        checked.lines().filter(|line| line.starts_with("warning: ")).collect();
    assert_eq!(warnings.len(), 1, "{checked}");
    assert!(warnings[0].starts_with("warning: agents/picky.yaml: line 7, "), "{checked}");
    assert!(warnings[0].ends_with("\"shel\" means no tool of this service"), "{checked}");
    let (_, checked) = said(dir.path(), &["check", "--json"]).await;
    let checked: Value = serde_json::from_str(&checked).unwrap();
    assert_eq!(checked["problems"], json!([]));
    assert_eq!(checked["warnings"].as_array().unwrap().len(), 1, "{checked:#}");
    let flow = "model: scripted/x\ntools: [file_ops]\ngovernance:\n  flow:\n    - {when: 'labels.untrustd', do: deny}\n";
    let dir =
        Setup::new().agent("picky", flow).scenario("x", "steps: [{text: fine}]").write_directory();
    let (code, checked) = said(dir.path(), &["check"]).await;
    assert_eq!(code, Some(0), "{checked}");
    assert!(checked.contains("line 6, ") && checked.contains("no key \"untrustd\""), "{checked}");
    // The same of the tools of a skill.
    let skill = "allowed_tools: ['file_*', shel, 'agent:x']\n";
    let dir = Setup::new().skill("careful", skill, "Be careful.").write_directory();
    let (code, checked) = said(dir.path(), &["check"]).await;
    let warning =
        "warning: the skill careful: allowed_tools: \"shel\" means no tool of this service";
    assert_eq!(code, Some(0), "{checked}");
    assert_eq!(checked.matches("means no tool").count(), 1, "{checked}");
    assert!(checked.contains(warning), "{checked}");
}
