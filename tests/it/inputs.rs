//! Inputs of an invocation, on every route that takes them: what is refused, where, and what stands for none.
//!
//! Children are told by their parent's result (`delegation.rs`), multipart bodies are in `files.rs`;
//! nothing else meets inputs before a run is accepted.

use serde_json::{Value, json};

use crate::service::{Db, Setup, on_both_stores};

on_both_stores! {
    errors_point_into_the_body,
    null_stands_for_no_inputs,
    a_template_names_what_it_lacks,
}

const ROUTES: [&str; 4] = ["invoke", "invoke-iterative", "dry-run", "stream"];

fn setup() -> Setup {
    let schema = "inputs: {type: object, required: [n], properties: {n: {type: integer}}}\n";
    Setup::new()
        .agent("typed", &format!("model: scripted/x\n{schema}"))
        .agent("free", "model: scripted/x\n")
        .agent("lacking", "model: scripted/x\ninstructions: 'About {{ inputs.topic }}.'\n")
        .scenario("x", "steps: [{text: fine}]")
}

async fn errors_point_into_the_body(db: Db) {
    let service = setup().start(db).await;
    for route in ROUTES {
        for (inputs, pointer) in
            [(json!({"n": "x"}), "/inputs/n"), (json!({}), "/inputs"), (json!(5), "/inputs")]
        {
            let body = json!({"inputs": inputs});
            let refused = service.post(&format!("/v1/agents/typed/{route}"), &body).await;
            assert_eq!(
                (refused.status.as_u16(), &refused.body["code"]),
                (422, &json!("INVALID_INPUTS"))
            );
            assert_eq!(refused.body["errors"][0]["pointer"], pointer, "{route} {body}");
        }
    }
}

async fn null_stands_for_no_inputs(db: Db) {
    let service = setup().start(db).await;
    for route in ["invoke", "invoke-iterative", "dry-run"] {
        for body in [json!({}), json!({"inputs": null}), json!({"inputs": {}})] {
            let taken = service.post(&format!("/v1/agents/free/{route}"), &body).await;
            assert_eq!(taken.status, 200, "{route} {body}: {:#}", taken.body);
            if let Some(run) = taken.body.get("run_id").and_then(Value::as_str) {
                assert_eq!(service.get(&format!("/v1/runs/{run}")).await.body["inputs"], json!({}));
            }
        }
    }
}

async fn a_template_names_what_it_lacks(db: Db) {
    let service = setup().start(db).await;
    let refused = service.post("/v1/agents/lacking/dry-run", &json!({})).await;
    let error = &refused.body["errors"][0];
    assert_eq!((refused.status.as_u16(), &error["pointer"]), (422, &json!("/inputs")));
    assert!(error["message"].as_str().unwrap().contains("inputs.topic"), "{error:#}");
}
