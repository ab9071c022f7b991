//! Which models a request may choose: those that the author of the agent meant, and no others.

use serde_json::{Value, json};

use crate::service::{Db, Service, Setup, command, on_both_stores};

on_both_stores! {
    a_request_chooses_among_the_models_of_the_definition,
    other_agents_of_a_tree_keep_their_own_models,
}

const MODELS: [&str; 4] = ["own", "other", "third", "third-large"];

fn setup() -> Setup {
    let agent = |more: &str| {
        format!(
            "model: scripted/own\nfallback_models: [scripted/other]\n{more}tools: [file_ops]\nenable_double_confirmation: false\n"
        )
    };
    let agents = Setup::new()
        .agent("closed", &agent(""))
        .agent("listed", &agent("models: [scripted/third, 'scripted/*-large']\n"));
    MODELS.into_iter().fold(agents, |setup, model| {
        setup.scenario(model, &format!("steps: [{{text: from {model}}}]"))
    })
}

/// Status and body of an invocation, which must be the same whether it is a rehearsal or not.
async fn chosen(service: &Service, agent: &str, route: &str, model: &str) -> (u16, Value) {
    let path = format!("/v1/agents/{agent}/{route}");
    let real = service.post(&path, &json!({"model": model})).await;
    let dry = service.post(&path, &json!({"model": model, "dry_run": true})).await;
    assert_eq!(real.status, dry.status, "{agent} {model}: {:#}", dry.body);
    if real.status == 200 {
        assert_eq!(dry.body["models"][0], json!(model));
    } else {
        for field in ["code", "detail", "errors"] {
            assert_eq!(real.body[field], dry.body[field], "{agent} {model}");
        }
    }
    (real.status.as_u16(), real.body)
}

async fn a_request_chooses_among_the_models_of_the_definition(db: Db) {
    let service = setup().start(db).await;
    let table = [
        ("closed", "scripted/own", true),
        ("closed", "scripted/other", true),
        ("closed", "scripted/third", false),
        ("closed", "scripted/*", false),
        ("closed", "openai/gpt-5", false),
        ("listed", "scripted/own", true),
        ("listed", "scripted/third", true),
        ("listed", "scripted/third-large", true),
        ("listed", "scripted/other", false),
        ("listed", "scripted/thirdly", false),
        ("listed", "other/third", false),
    ];
    for (agent, model, allowed) in table {
        for route in ["invoke", "invoke-iterative"] {
            let (status, body) = chosen(&service, agent, route, model).await;
            if allowed {
                assert_eq!((status, &body["model"]), (200, &json!(model)), "{agent}: {body:#}");
                continue;
            }
            assert_eq!((status, &body["code"]), (422, &json!("INVALID_OVERRIDE")), "{body:#}");
            let error = &body["errors"][0];
            assert_eq!(error["pointer"], "/model", "{body:#}");
            let allowed = match agent {
                "closed" => "scripted/own, scripted/other",
                _ => "scripted/own, scripted/third, scripted/*-large",
            };
            let message = error["message"].as_str().unwrap();
            assert!(message.ends_with(allowed) && message.contains(model), "{message}");
        }
    }
}

async fn other_agents_of_a_tree_keep_their_own_models(db: Db) {
    let parent = "model: scripted/never\nmodels: ['scripted/*']\ntools: ['agent:child', transfer_to_child]\nenable_double_confirmation: false\n";
    let call = |tool: &str| format!("{{tool_calls: [{{tool: \"{tool}\"}}]}}");
    let steps =
        format!("steps: [{}, {}, {{text: done}}]", call("agent:child"), call("transfer_to_child"));
    let service = Setup::new()
        .agent("parent", parent)
        .scenario("chosen", &steps)
        .agent("child", "model: scripted/own\nenable_double_confirmation: false\n")
        .scenario("own", "steps: [{text: fine}]")
        .start(db)
        .await;
    let run = service.run("parent", &json!({"model": "scripted/chosen"})).await;
    assert_eq!((&run["status"], &run["model"]), (&json!("completed"), &json!("scripted/chosen")));
    let path = format!("/v1/runs?parent_run_id={}", run["run_id"].as_str().unwrap());
    let children = service.get(&path).await.body;
    let children = children["data"].as_array().unwrap();
    let ended: Vec<_> = children.iter().map(|run| (&run["status"], &run["model"])).collect();
    let expected = (&json!("completed"), &json!("scripted/own"));
    assert_eq!(ended, [expected, expected], "{children:#?}");
}

#[tokio::test]
async fn models_that_cannot_be_chosen_are_told_by_check() {
    let long = format!("openai/*{}", "x".repeat(300));
    let table = [
        ("models: ['nobody/*']", "line 3, column 10: models[0]: "),
        ("models: ['scripted/*', nobody/x]", "line 3, column 24: models[1]: "),
        ("models: [gpt-5]", "models[0]: "),
        ("models: ['scripted/*', '']", "models[1]: "),
        ("models: ['scripted/a b*']", "models[0]: "),
        ("models: ['scripted/[']", "models[0]: "),
        ("models: [scripted/x, scripted/x]", "models[1]: "),
        (&format!("models: ['{long}']"), "models[0]: "),
        ("models: ['*', 'scripted/*', '{scripted,openai}/x']", ""),
    ];
    for (models, expected) in table {
        let setup = Setup::new().agent("one", &format!("model: scripted/x\n{models}\n"));
        let dir = setup.scenario("x", "steps: [{text: fine}]").write_directory();
        let check = command(dir.path()).arg("check").output().await.unwrap();
        let said = String::from_utf8_lossy(&check.stdout) + String::from_utf8_lossy(&check.stderr);
        assert_eq!(check.status.success(), expected.is_empty(), "{models}: {said}");
        assert!(expected.is_empty() || said.contains("one.yaml"), "{models}: {said}");
        assert!(said.contains(expected), "{models}: {said}");
    }
    let schema = command(std::path::Path::new(".")).args(["schema", "agent"]).output();
    let schema: Value = serde_json::from_slice(&schema.await.unwrap().stdout).unwrap();
    assert_eq!(schema["properties"]["models"]["type"], "array", "{schema:#}");
}
