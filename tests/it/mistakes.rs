//! What a person is told of mistakes before and after the first run: all of those in a file, keys that
//! are not set, servers that do not answer.
//!
//! With other features. Stores: none of this is stored but the run's error, as of every run. Streaming, children,
//! sessions, replicas: a failed model call is one there as here. Secrets: a variable is named, never its
//! value. Command line: `check` (here). Console: it shows the run's error.

use serde_json::json;

use crate::mock_model::{MockModel, Reply};
use crate::service::{Db, Setup, command, on_both_stores};

on_both_stores! { a_restart_that_is_due_is_told, a_missing_key_is_named_at_start_and_in_the_run }

async fn a_missing_key_is_named_at_start_and_in_the_run(db: Db) {
    let mock = MockModel::start().await;
    let url = mock.base_url();
    let models = format!(
        "[models.mock]\nkind = \"openai\"\nbase_url = \"{url}\"\napi_key_env = \"NOT_SET_HERE\"\n\
         [models.away]\nkind = \"openai\"\nbase_url = \"http://127.0.0.1:9/v1\"\nmax_retries = 0"
    );
    let setup = Setup::new()
        .agent("writer", "model: mock/any\n")
        .agent("other", "model: scripted/x\nfallback_models: [mock/any]\n")
        .agent("lonely", "model: away/any\n")
        .scenario("x", "steps: [{text: fine}]")
        .config(&models);
    let service = setup.start(db).await;
    service.until_logged("NOT_SET_HERE").await;
    let log = service.log();
    let warning = log.lines().find(|line| line.contains("NOT_SET_HERE")).unwrap();
    assert!(warning.contains("other writer") && warning.contains("without a key"), "{warning}");

    mock.always(Reply::error(401, "invalid_api_key", None));
    let run = service.run("writer", &json!({})).await;
    let said = run["error"]["message"].as_str().unwrap();
    assert_eq!(run["error"]["code"], "MODEL_ERROR");
    assert!(said.contains("after 1 try: NOT_SET_HERE is not set, so no key was sent"), "{said}");

    let run = service.run("lonely", &json!({})).await;
    let said = run["error"]["message"].as_str().unwrap();
    assert!(said.contains("the server of away cannot be reached"), "{said}");
    assert!(!said.contains("127.0.0.1:9"), "the address is the operator's: {said}");
}

async fn a_restart_that_is_due_is_told(db: Db) {
    let service = Setup::new().agent("ab", "model: scripted/x\n").start(db).await;
    let settings = service.dir.path().join("toolloop.toml");
    let before = std::fs::read_to_string(&settings).unwrap();
    let due = |body: &serde_json::Value| -> Vec<String> {
        let all = body["definitions"].as_array().unwrap();
        let due = all.iter().filter(|it| it["error"].as_str().unwrap().contains("restart"));
        due.map(|it| it["file"].as_str().unwrap().to_owned()).collect()
    };
    assert!(due(&service.get("/readyz").await.body).is_empty());
    // A flag of the service has precedence.
    std::fs::write(&settings, format!("{before}\n[database]\nurl = \"mysql://x\"\n")).unwrap();
    service.until("/readyz", |body| due(body) == ["toolloop.toml"]).await;
    std::fs::write(&settings, format!("{before}\n[server]\nrequest_timeout = \"9m\"\n")).unwrap();
    service.write("tools/new.yaml", "tools: []\n");
    let ready =
        service.until("/readyz", |body| due(body) == ["toolloop.toml", "tools/new.yaml"]).await;
    assert_eq!(ready["status"], "ready", "{ready:#}");
    let address = service.url("").trim_start_matches("http://").to_owned();
    let checked = command(service.dir.path()).args(["check", "--listen", &address]).output().await;
    let said = String::from_utf8(checked.unwrap().stdout).unwrap();
    let told = format!(
        "warning: the service at {address}: toolloop.toml has changed since the start: restart"
    );
    assert!(said.contains(&told), "{said}");

    // One that is broken is no reason to restart.
    std::fs::write(&settings, format!("{before}\n[runtime]\nlaese = \"9s\"\n")).unwrap();
    let is_told = |body: &serde_json::Value| {
        let all = body["definitions"].as_array().unwrap();
        all.iter()
            .any(|it| it["error"].as_str().unwrap().contains("is broken; the service goes on"))
    };
    let ready = service.until("/readyz", is_told).await;
    assert_eq!(due(&ready), ["tools/new.yaml"]);
    let known = "unknown key `…` (did you mean `lease`?), expected one of `max_concurrent_runs`, ";
    assert!(ready["definitions"].to_string().contains(known), "{ready:#}");
    service.until_logged("did you mean `lease`?").await;
    service.until_logged("has changed since the start").await;
    std::fs::write(&settings, before).unwrap();
    service.until("/readyz", |body| due(body) == ["tools/new.yaml"]).await;

    // Nor is a broken file of tools, of which the service says what it goes on with.
    service.write("tools/new.yaml", "tools:\n  - {name: x, nonsense: 1}\n");
    let ready = service
        .until("/readyz", |body| body["definitions"].to_string().contains("goes on with the tools"))
        .await;
    assert!(ready.to_string().contains("nonsense"), "{ready:#}");
    service.until_logged("goes on with the tools that it read").await;
    let checked = command(service.dir.path()).args(["check", "--listen", &address]).output().await;
    let said = String::from_utf8(checked.unwrap().stdout).unwrap();
    assert!(said.contains("tools/new.yaml has changed since the start and is broken"), "{said}");
    service.write("tools/new.yaml", "tools: []\n");
    service.until("/readyz", |body| due(body) == ["tools/new.yaml"]).await;
}

#[tokio::test]
async fn check_tells_every_mistake_with_its_line_and_what_was_meant() {
    let bad = "version: 1\nmodel: scripted/x\ntool: [file_ops]\ntools: [file_ops, teleport]\n\
               skills: [none]\nlimits: {max_itertions: 5, max_attempts: 0}\n";
    let bad = bad.replace("version: 1\n", "");
    let dir = Setup::new()
        .agent("bad", &bad)
        .agent("fine", "model: scripted/x\n")
        .scenario("x", "steps: [{text: fine}]")
        .write_directory();
    let checked = command(dir.path()).arg("check").output().await.unwrap();
    assert_eq!(checked.status.code(), Some(1));
    let said = String::from_utf8(checked.stdout).unwrap();
    for part in [
        "agents/bad.yaml: line 3, column 1: tool: unknown key `tool` (did you mean `tools`?)",
        "agents/bad.yaml: line 6, column 10: limits.max_itertions: unknown key `max_itertions` (did you mean `max_iterations`?)",
        "agents/bad.yaml: line 6, column 28: limits.max_attempts: 0 is not between",
        "agents/bad.yaml: line 5, column 10: skills[0]: there is no skill named",
        "agents/bad.yaml: line 4, column 19: tools[1]: there is no tool named \"teleport\"",
    ] {
        assert!(said.contains(part), "{part}\n{said}");
    }
    assert_eq!(said.lines().count(), 5, "{said}");
}

#[tokio::test]
async fn scenarios_that_cannot_be_played_are_told() {
    let dir = Setup::new()
        .agent("lost", "model: scripted/gone\nmodels: [scripted/away, 'scripted/a*']\n")
        .scenario("odd", "steps: [{tool_calls: 5}]")
        .write_directory();
    let checked = command(dir.path()).arg("check").output().await.unwrap();
    assert_eq!(checked.status.code(), Some(1));
    let said = String::from_utf8(checked.stdout).unwrap();
    let parts = ["no scenario named \"gone\"", "no scenario named \"away\"", "odd.yaml"];
    assert!(parts.iter().all(|part| said.contains(part)), "{said}");
    assert_eq!(said.lines().count(), 3, "{said}");

    let service = Setup::new().start_in(dir, Db::Sqlite).await;
    let ready = service.get("/readyz").await;
    assert_eq!(ready.status, 200, "{:#}", ready.body);
    let files: Vec<_> = ready.body["definitions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|broken| &broken["file"])
        .collect();
    assert_eq!(files, ["lost.yaml", "lost.yaml"], "{:#}", ready.body);
}

#[tokio::test]
async fn check_tells_every_mistake_of_settings_scenarios_and_tools() {
    let scenario = "steps:\n  - {txt: typo}\n  - {text: fine, tool_cals: []}\n  - {delay_ms: 5}\n  - text: '{{ x'\n";
    let tools = "tools:\n  - {name: a, comand: [x]}\n  - {name: b, method: GTE, path: /x}\n  - {name: 'c d', command: [x]}\n\
        base_url: http://127.0.0.1:1\n";
    let dir = Setup::new()
        .agent("ab", "model: scripted/fin\ntools: [file_opps]\n")
        .scenario("fine", "steps: [{text: fine}]")
        .scenario("broken", scenario)
        .tools("set", tools)
        .write_directory();
    let checked = command(dir.path()).args(["check"]).output().await.unwrap();
    let said = String::from_utf8(checked.stdout).unwrap();
    assert_eq!(checked.status.code(), Some(1));
    for told in [
        "scenarios/broken.yaml: line 2, column 6: steps[0].txt: unknown key `txt` (did you mean `text`?)",
        "scenarios/broken.yaml: line 3, column 18: steps[1].tool_cals: unknown key `tool_cals` (did you mean `tool_calls`?)",
        "scenarios/broken.yaml: line 4, column 5: steps[2]: it needs text",
        "scenarios/broken.yaml: line 5, column 5: steps[3].text: ",
        "tools/set.yaml: line 2, column 15: tools[0].comand: unknown key `comand` (did you mean `command`?)",
        "tools/set.yaml: line 3, column 15: tools[1].method: ",
        "tools/set.yaml: line 4, column 6: tools[2].name: ",
        "there is no tool named \"file_opps\" (did you mean \"file_ops\"?)",
    ] {
        assert!(said.contains(told), "{told} is not in\n{said}");
    }
    let settings = dir.path().join("toolloop.toml");
    let before = std::fs::read_to_string(&settings).unwrap();
    let broken = "[runtime]\nlaese = \"2s\"\nmax_crashes = \"many\"\n[audit]\nretention = 7\n[prices.'scriptd/x']\ninput = 1\n";
    std::fs::write(&settings, format!("{before}\n{broken}")).unwrap();
    let checked = command(dir.path()).args(["check"]).output().await.unwrap();
    assert_eq!(checked.status.code(), Some(2));
    let said = String::from_utf8(checked.stderr).unwrap();
    for told in [
        "runtime.laese: unknown key `laese` (did you mean `lease`?)",
        "runtime.max_crashes: ",
        "audit.retention: ",
    ] {
        let line = said.lines().find(|line| line.contains(told));
        let line = line.unwrap_or_else(|| panic!("{told} is not in\n{said}"));
        assert!(line.contains("toolloop.toml:"), "with its line: {line}");
    }
}

/// Each mistake of settings is told once, and none that is there because of another.
#[tokio::test]
async fn mistakes_of_settings_are_told_once() {
    let jwt = "[auth]\nmode = \"jwt\"\n[auth.jwt]\nissuer = \"a\"\naudience = \"b\"\n";
    let table: [(&str, &[&str]); 9] = [
        ("[server]\nexpose = [\"bogus\"]\n", &["server.expose[0]: unknown variant"]),
        ("[models.x]\nkind = \"openai\"\n", &["models.x.base_url: is missing"]),
        (
            "[models.x]\nkind = \"openai\"\n[prices.\"x/y\"]\ninput = -1\n",
            &["prices.x/y.input: ", "models.x.base_url: is missing"],
        ),
        (
            "[models.x]\nkind = \"openai\"\nbase_url = \"nowhere\"\n",
            &["models.x.base_url: relative URL"],
        ),
        ("[models.x]\nkind = \"scripted\"\ndir = 3\n", &["models.x.dir: "]),
        (
            "[models.x]\nkind = \"scripted\"\ndir = \"none\"\n",
            &["models.x.dir: the directory none does not exist"],
        ),
        (
            &format!("{jwt}jwks_file = \"none\"\n"),
            &["auth.jwt.jwks_file: the file none does not exist"],
        ),
        ("[mcp.x]\nurl = \"ftp://a\"\n", &["mcp.x.url: "]),
        (jwt, &["auth.jwt: needs either jwks_file or jwks_url"]),
    ];
    for (settings, told) in table {
        let dir = tempfile::TempDir::new().unwrap();
        std::fs::write(dir.path().join("toolloop.toml"), settings).unwrap();
        let checked = command(dir.path()).arg("check").output().await.unwrap();
        let said = String::from_utf8(checked.stderr).unwrap();
        assert_eq!(checked.status.code(), Some(2), "{said}");
        assert!(told.iter().all(|told| said.contains(told)), "{settings}: {said}");
        assert_eq!(said.trim().lines().count(), told.len(), "{settings}: {said}");
    }
}

#[tokio::test]
async fn mistakes_of_definitions_have_their_place() {
    let flow = "model: scripted/x\ngovernance: {flow: [{when: 'labels.private', do: ask}, {when: 'bogus(', do: ask}]}\n";
    let dir = Setup::new()
        .agent("flow", flow)
        .agent("labels", "model: scripted/x\ninputs: {type: object, x-yields: [privat]}\n")
        .scenario("x", "steps: [{text: fine}]")
        .write_directory();
    let two = "name: two\nmodel: scripted/x\n---\nname: other\n";
    std::fs::write(dir.path().join("agents/two.yaml"), two).unwrap();
    let checked = command(dir.path()).arg("check").output().await.unwrap();
    let said = String::from_utf8(checked.stdout).unwrap();
    assert_eq!(checked.status.code(), Some(1), "{said}");
    for (file, key) in [
        ("flow", "governance.flow[1].when: \"bogus(\" is not a valid CEL expression"),
        ("labels", "inputs.x-yields[0]: \"privat\" is neither \"untrusted\" nor \"private\""),
    ] {
        let line = said
            .lines()
            .find(|line| line.starts_with(&format!("agents/{file}.yaml: line 3, column ")));
        assert!(line.is_some_and(|line| line.contains(key)), "{key}: {said}");
    }
    let two = "agents/two.yaml: line 3, column 1: begins another YAML document; a file has one";
    assert!(said.contains(two), "{said}");
    assert_eq!(said.lines().count(), 3, "{said}");
}

#[tokio::test]
async fn unknown_names_in_templates_are_told_before_a_run() {
    let part = "output: {schema: {type: object}, reflection: {template: '{{ output|nosuch }}'}}\n";
    let dir = Setup::new()
        .agent("filter", "model: scripted/x\ninstructions: |\n  Hello.\n  {{ inputs.x | nosuch }}\n")
        .agent("test", "model: scripted/x\nprompt: \"{% if inputs.x is nosuch %}a{% endif %}\"\n")
        .agent("call", "model: scripted/x\nprompt: \"{{ nosuch(inputs.x) }}\"\n")
        .agent("shown", &format!("model: scripted/x\n{part}"))
        .agent("fine", "model: scripted/x\nprompt: \"{{ inputs.x | default('a') | upper if inputs.x is defined }}\"\n")
        .scenario("x", "steps: [{text: \"{{ inputs.x|nosuch }}\"}]")
        .write_directory();
    let checked = command(dir.path()).arg("check").output().await.unwrap();
    assert_eq!(checked.status.code(), Some(1));
    let said = String::from_utf8(checked.stdout).unwrap();
    for part in [
        "agents/filter.yaml: line 3, column 1: instructions: is not a valid template: line 2: unknown filter: there is no filter \"nosuch\"",
        "agents/test.yaml: line 3, column 1: prompt: is not a valid template: line 1: unknown test: there is no test \"nosuch\"",
        "agents/call.yaml: line 3, column 1: prompt: is not a valid template: unknown variable \"nosuch\"",
        "output.reflection.template: is not a valid template: line 1: unknown filter",
        "scenarios/x.yaml: line 1, column 10: steps[0].text: there is no filter \"nosuch\" (line 1",
    ] {
        assert!(said.contains(part), "{part}\n{said}");
    }
    let service = Setup::new().start_in(dir, Db::Sqlite).await;
    let agents = service.get("/v1/agents").await.body;
    let names: Vec<_> = agents["data"].as_array().unwrap().iter().map(|it| &it["name"]).collect();
    assert_eq!(names, ["fine"]);
}

#[tokio::test]
async fn a_file_of_tools_is_checked_as_it_is_loaded() {
    let dir = Setup::new()
        .tools("empty", "base_url: x\n")
        .tools("header", "base_url: http://a.example\nheaders: {'a b': c}\n")
        .tools("secret", "base_url: http://a.example\nheaders: {A: '{{ env.NOT_SET_HERE }}'}\ntools: [{name: a, method: GET, path: /}]\n")
        .agent("needy", "model: scripted/x\ntools: ['http:secret/a']\n")
        .agent("above", "model: scripted/x\ntools: ['agent:needy']\n")
        .scenario("x", "steps: [{text: fine}]")
        .write_directory();
    let checked = command(dir.path()).arg("check").output().await.unwrap();
    assert_eq!(checked.status.code(), Some(1));
    let said = String::from_utf8(checked.stdout).unwrap();
    assert!(said.contains("tools/empty.yaml: line 1, column 1: base_url: "), "{said}");
    assert!(said.contains("tools/header.yaml: "), "{said}");
    let told = "warning: the environment variable NOT_SET_HERE is not set (tools/secret.yaml: its tools are left out until it is)";
    assert!(said.contains(told), "{said}");
    for lost in ["agents/needy.yaml", "agents/above.yaml"] {
        let told =
            format!("warning: {lost}: not loaded while a variable of its tools is not set: line 3");
        assert!(said.contains(&told), "{told}\n{said}");
    }
    // Alone it is no mistake: the project may be checked where there are no secrets.
    for broken in ["tools/empty.yaml", "tools/header.yaml"] {
        std::fs::remove_file(dir.path().join(broken)).unwrap();
    }
    let alone = command(dir.path()).arg("check").output().await.unwrap();
    let said = String::from_utf8(alone.stdout).unwrap();
    let lost = "are valid. A service started here would not load: above, needy.";
    assert!(alone.status.success() && said.contains(lost), "{said}");
    std::fs::write(dir.path().join("tools/empty.yaml"), "base_url: x\n").unwrap();
    let header = "base_url: http://a.example\nheaders: {'a b': c}\n";
    std::fs::write(dir.path().join("tools/header.yaml"), header).unwrap();
    let service = Setup::new().start_in(dir, Db::Sqlite).await;
    let ready = service.get("/readyz").await.body;
    let broken: Vec<_> =
        ready["definitions"].as_array().unwrap().iter().map(|it| &it["file"]).collect();
    let causes_first =
        ["tools/empty.yaml", "tools/header.yaml", "tools/secret.yaml", "above.yaml", "needy.yaml"];
    assert_eq!(broken, causes_first);
    service.until_logged("tools/secret.yaml").await;
    let log = service.log();
    let told = |file: &str| {
        let mut lines = log.lines().filter(|line| line.contains(file));
        lines.find(|line| line.contains("not loaded")).unwrap_or_default().to_owned()
    };
    for file in ["tools/empty.yaml", "tools/header.yaml", "tools/secret.yaml"] {
        let line = told(file);
        assert!(!line.is_empty() && !line.contains("agent"), "{file}: {line}\n{log}");
    }
}

#[tokio::test]
async fn uncacheable_tools_and_descriptions_that_are_no_text_are_told() {
    let shell = |commands: &str| {
        format!(
            "model: scripted/x\ntools: [shell]\ntool_options: {{shell: {{cache: attempt}}}}\ngovernance: {{commands: {commands}}}\n"
        )
    };
    let dir = Setup::new()
        .agent("writes", &shell("{allow: [{command: git}]}"))
        .agent("none", &shell("{allow: [{command: git}], deny: [{command: git, effect: read}]}"))
        .agent("reads", &shell("{allow: [{command: git, args: '^log', effect: read}]}"))
        .agent("asks", &shell("{require_approval: [{command: git, effect: read}]}"))
        .agent("number", "model: scripted/x\ndescription: 5\n")
        .agent("text", "model: scripted/x\ndescription: '5'\nversion: 1.2.0\n")
        .scenario("x", "steps: [{text: fine}]")
        .write_directory();
    let checked = command(dir.path()).arg("check").output().await.unwrap();
    let said = String::from_utf8(checked.stdout).unwrap();
    assert_eq!(checked.status.code(), Some(1), "{said}");
    for told in [
        "writes.yaml: line 4, column 24: tool_options.shell.cache: ",
        "none.yaml: line 4, column 24: tool_options.shell.cache: ",
        "number.yaml: line 3, column 1: description: must be a text",
    ] {
        assert!(said.contains(told), "{told}\n{said}");
    }
    assert_eq!(said.lines().count(), 3, "{said}");
}
