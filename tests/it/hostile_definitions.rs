//! Templates, expressions and schemas that mean harm, in definitions of callers and files of
//! operators: they neither end the process nor take its memory or its time.

use std::time::Duration;

use serde_json::{Value, json};

use crate::hostile::{GUIDE, call, guide, is_unharmed};
use crate::service::{Db, Setup, answer, on_both_stores, on_one_store};

on_both_stores! {
    definitions_of_a_request_neither_grow_nor_take_long,
}

on_one_store! {
    templates_make_no_more_than_they_may,
    files_that_are_too_deep_are_refused_while_the_service_runs,
}

async fn definitions_of_a_request_neither_grow_nor_take_long(db: Db) {
    let steps = format!("{}  - text: done\n", call(&json!({"operation": "list", "path": "."})));
    let mut service = guide(&steps).start(db).await;
    service.run("guide", &json!({})).await;
    let path = "/v1/agents/guide/policy/replay";
    let base = "name: guide\nmodel: scripted/guide\ntools: [file_ops]\n";
    let prompt = |inside: String| format!("{base}instructions: \"{inside}\"");
    let levels: Vec<String> = (0..16)
        .map(|n| {
            let next = format!("{{$ref: \"#/$defs/a{}\"}}", n + 1);
            format!("a{n}: {{allOf: [{next}, {next}], unevaluatedProperties: false}}")
        })
        .collect();
    for definition in [
        prompt(format!("{{{{ {}1 }}}}", "not ".repeat(5_000))),
        prompt(format!("{{{{ {}1 }}}}", "1~".repeat(20_000))),
        prompt(format!("{{{{ a{} }}}}", "|e".repeat(20_000))),
        prompt(format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(4_500))),
        format!("{base}prompt: \"{{{{ {}1 }}}}\"", "-".repeat(50_000)),
        format!(
            "{base}inputs: {{$ref: \"#/$defs/a0\", $defs: {{{}, a16: {{}}}}}}",
            levels.join(", ")
        ),
    ] {
        let refused = service.post(path, &json!({"definition": definition})).await;
        assert_eq!(refused.status, 422, "{definition:.90}: {}", refused.body);
        assert_eq!(refused.body["errors"][0]["pointer"], "/definition", "{}", refused.body);
        is_unharmed(&mut service);
    }
    let ten = format!("[{}]", ["0"; 10].join(","));
    let grown = format!("{ten}{}==[]", format!(".map(x,[{}])", ["x"; 10].join(",")).repeat(8));
    let nested = (0..7).fold("true".to_owned(), |inner, n| format!("{ten}.all(x{n},{inner})"));
    let ruled = |when: &str| {
        let rule = format!("governance: {{autonomy: full, flow: [{{when: \"{when}\", do: ask}}]}}");
        json!({"definition": format!("{base}{rule}")})
    };
    let answer = service.post(path, &ruled(&grown)).await;
    assert_eq!(
        (answer.status.as_u16(), &answer.body["newly"]["blocked"]),
        (200, &json!(1)),
        "{}",
        answer.body
    );
    is_unharmed(&mut service);
    let body = ruled(&nested);
    let replays = futures::future::join_all((0..8).map(|_| service.post(path, &body)));
    let others = async {
        for _ in 0..5 {
            tokio::time::sleep(Duration::from_millis(200)).await;
            let served =
                tokio::time::timeout(Duration::from_secs(30), service.get("/v1/runs")).await;
            assert_eq!(served.expect("others are served meanwhile").status, 200);
        }
    };
    let (answers, ()) = tokio::join!(replays, others);
    assert!(
        answers.iter().all(|answer| answer.body["newly"]["blocked"] == 1),
        "{}",
        answers[0].body
    );
    is_unharmed(&mut service);
}

async fn templates_make_no_more_than_they_may(db: Db) {
    let agent = "model: scripted/guide\ninputs: {type: object}\ninstructions: \"Fill: {{ inputs.doc | replace(inputs.old, inputs.new) }}\"\n";
    let double = "{% set x = x ~ x %}".repeat(40);
    let steps = format!("  - text: \"{{% set x = 'ab' %}}{double}{{{{ x }}}}\"\n");
    let mut service = guide(&steps).agent("filled", agent).start(db).await;
    let inputs = json!({"doc": "a".repeat(400_000), "old": "a", "new": "b".repeat(400_000)});
    let path = "/v1/agents/filled/invoke-iterative";
    let refused = service.post(path, &json!({"inputs": inputs})).await;
    assert!(refused.body.to_string().contains("more than 4194304 bytes"), "{:.600}", refused.body);
    is_unharmed(&mut service);
    let run = service.run("guide", &json!({})).await;
    assert_eq!(run["status"], "failed", "{run:#}");
    is_unharmed(&mut service);
}

async fn files_that_are_too_deep_are_refused_while_the_service_runs(db: Db) {
    let mut service = guide("  - text: done\n").start(db).await;
    let deep = format!("name: deep{GUIDE}instructions: \"{{{{ {}1 }}}}\"\n", "not ".repeat(5_000));
    std::fs::write(service.dir.path().join("agents/deep.yaml"), deep).unwrap();
    let is_told = |ready: &Value| {
        let problem = &ready["definitions"][0];
        let why = problem["error"].as_str().unwrap_or_default();
        problem["file"] == "deep.yaml" && why.contains("more than 200 operators")
    };
    service.until("/readyz", is_told).await;
    assert_eq!(service.get("/v1/agents/deep").await.status, 404);
    assert_eq!(service.run("guide", &json!({})).await["status"], "completed");
    is_unharmed(&mut service);
}

#[tokio::test]
async fn readiness_shows_at_most_twenty_broken_files() {
    let mut setup = Setup::new().scenario("none", "steps: [{text: x}]");
    for number in 0..25 {
        let unknown = format!("tools: [{}]\n", "x".repeat(2000));
        setup =
            setup.agent(&format!("bad-{number:02}"), &format!("model: scripted/none\n{unknown}"));
    }
    let service = setup.start(Db::Sqlite).await;
    let ready = answer(service.http.get(service.url("/readyz"))).await;
    assert_eq!(ready.status, 200, "{:#}", ready.body);
    let shown = ready.body["definitions"].as_array().unwrap();
    assert_eq!((shown.len(), &ready.body["more_definitions"]), (20, &json!(5)));
    assert_eq!(shown[19]["file"], "bad-19.yaml");
    assert!(shown.iter().all(|shown| shown["error"].as_str().unwrap().len() <= 500));
    for number in 5..25 {
        std::fs::remove_file(service.dir.path().join(format!("agents/bad-{number:02}.yaml")))
            .unwrap();
    }
    let few = |ready: &Value| ready["definitions"].as_array().is_some_and(|shown| shown.len() == 5);
    let ready = service.until("/readyz", few).await;
    assert_eq!(ready.get("more_definitions"), None, "{ready:#}");
}

#[tokio::test]
async fn definitions_beyond_their_part_of_the_memory_are_not_loaded() {
    let mut setup = Setup::new().scenario("none", "steps: [{text: x}]");
    setup = setup.config("[runtime]\nmax_memory = \"64MiB\"");
    for number in 0..12 {
        let text = "x".repeat(500_000);
        let agent = format!("model: scripted/none\ninstructions: {text}\n");
        setup = setup.agent(&format!("agent-{number:02}"), &agent);
    }
    let service = setup.start(Db::Sqlite).await;
    let agents = service.get("/v1/agents").await.body["data"].as_array().unwrap().len();
    assert_eq!(agents, 8, "four MiB");
    let ready = service.get("/readyz").await.body;
    let refused = ready["definitions"].as_array().unwrap();
    assert_eq!((refused.len(), &refused[0]["file"]), (4, &json!("agent-08.yaml")));
    assert!(refused[0]["error"].as_str().unwrap().contains("a sixteenth of the memory limit"));
    service.until_logged("together may have 4194304 bytes").await;
}
