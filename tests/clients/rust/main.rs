//! What a service written in Rust does with toolloop: every call through the generated client, every
//! answer by its generated type. `toolloop_client` is made from the service's own document by
//! openapi-generator.

use serde_json::json;
use toolloop_client::apis::configuration::Configuration;
use toolloop_client::apis::{Error, agents_api, runs_api};
use toolloop_client::models::{
    CancelRequest, DenyRule, Event, InvokeIterativeRequest, InvokeRequest, ProblemCode, RunAnswer,
    RunStatus, TerminationReason, ToolChoice,
};

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let mut service = Configuration::new();
    service.base_path = std::env::var("TOOLLOOP_URL").unwrap() + "/v1";
    service.bearer_access_token = std::env::var("TOOLLOOP_KEY").ok();
    a_run_that_is_waited_for(&service).await;
    a_run_that_is_not(&service).await;
    refusals(&service).await;
    println!("all calls answered as documented");
}

async fn a_run_that_is_waited_for(service: &Configuration) {
    let reader = agents_api::get_agent(service, "reader").await.unwrap();
    assert_eq!(reader.limits.max_attempts, 3);
    let deny = &reader.governance.paths.deny;
    assert_eq!(deny[0], DenyRule::String("*.key".into()));
    assert!(matches!(&deny[1], DenyRule::PatternWithMode(rule) if rule.pattern == "*.pem"));

    let mut request = InvokeIterativeRequest::new();
    request.inputs = Some([("path".to_owned(), json!("note.txt"))].into());
    request.tool_choice = Some(Some(Box::new(ToolChoice::ToolChoiceMode("auto".into()))));
    let run = agents_api::invoke_agent_iterative(
        service, "reader", None, Some("rust"), None, None, Some(request),
    );
    let run = run.await.unwrap();
    assert_eq!(run.status, RunStatus::Completed);
    assert_eq!(run.output, Some(json!({"text": "hello"})));
    let id = run.run_id.to_string();
    let detail = runs_api::get_run(service, &id).await.unwrap();
    assert_eq!(detail.tool_calls_made, 1);
    let events = runs_api::list_events(service, &id, None, None, None, None, None).await.unwrap();
    let Some(Event::RunCompleted(last)) = events.data.last() else { panic!("{events:?}") };
    assert_eq!(last.data.termination_reason, TerminationReason::Completed);
}

async fn a_run_that_is_not(service: &Configuration) {
    let run = agents_api::invoke_agent_iterative(
        service, "stuck", Some("respond-async"), None, None, None, Some(InvokeIterativeRequest::new()),
    );
    let id = run.await.unwrap().run_id.to_string();
    let request = CancelRequest { reason: Some(Some("seen enough".into())) };
    let answer = runs_api::cancel_run(service, &id, Some(request)).await.unwrap();
    assert!(matches!(answer, RunAnswer::RunDetail(run) if run.run_id.to_string() == id));
    let late = runs_api::wait_for_run(service, &id, Some(20)).await.unwrap();
    assert_eq!(late.status, RunStatus::Cancelled);
}

async fn refusals(service: &Configuration) {
    let request = Some(InvokeRequest::new());
    let unknown = agents_api::invoke_agent(service, "nobody", None, None, None, None, request).await;
    let Err(Error::ResponseError(told)) = unknown else { panic!("{unknown:?}") };
    assert_eq!(told.status, 404);
    let problem: toolloop_client::models::Problem = serde_json::from_str(&told.content).unwrap();
    assert_eq!(problem.code, ProblemCode::NotFound);
}
