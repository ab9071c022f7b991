//! Generated clients: made from the document that the service serves, compiled, and used by
//! programs in their languages (`tests/clients`) as their authors would.

use std::fs;

use crate::installing::Workshop;
use crate::service::{ADMIN_KEY, Db, Service, Setup};

const GOODBYE: &str = "all calls answered as documented";

async fn service() -> Service {
    let reader = "
description: Reads a file.
model: scripted/reader
instructions: Read.
inputs: {type: object, properties: {path: {type: string}}, required: [path]}
tools: [file_ops]
output: {schema: {type: object, properties: {text: {type: string}}, required: [text]}}
";
    let reads = r#"
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: "{{ inputs.path }}"}}]
  - tool_calls: [{tool: output, arguments: {text: hello}}]
"#;
    Setup::new()
        .agent("reader", reader)
        .scenario("reader", reads)
        .file("note.txt", "hello")
        .agent(
            "stuck",
            "model: scripted/stuck\ninstructions: Wait.\nenable_double_confirmation: false",
        )
        .scenario("stuck", "steps: [{delay_ms: 60000, text: late}]")
        .start(Db::Sqlite)
        .await
}

/// The document, as a generator would fetch it.
async fn fetch_document(service: &Service, workshop: &Workshop) {
    let document = service.http.get(service.url("/openapi.json")).send().await.unwrap();
    fs::write(workshop.dir.join("openapi.json"), document.bytes().await.unwrap()).unwrap();
}

#[tokio::test]
async fn a_typescript_client_compiles_and_calls() {
    let workshop = Workshop::node().await;
    let service = service().await;
    fetch_document(&service, &workshop).await;
    for script in ["generate", "compile"] {
        workshop.run("npm", &["run", "--silent", script], &[]).await;
    }
    let environment = [("TOOLLOOP_URL", &*service.url("")), ("TOOLLOOP_KEY", ADMIN_KEY)];
    let said = workshop.run("npm", &["run", "--silent", "start"], &environment).await;
    assert!(said.contains(GOODBYE), "{said}\n{}", service.log());
}

#[tokio::test]
async fn a_python_client_compiles_and_calls() {
    let workshop = Workshop::python().await;
    let service = service().await;
    fetch_document(&service, &workshop).await;
    let arguments =
        ["generate", "--path", "openapi.json", "--output-path", "toolloop_client", "--overwrite"];
    let arguments = [&arguments[..], &["--meta", "none", "--fail-on-warning"]].concat();
    workshop.run("venv/bin/openapi-python-client", &arguments, &[]).await;
    workshop.run("venv/bin/python", &["-m", "compileall", "-q", "toolloop_client"], &[]).await;
    workshop
        .run("venv/bin/mypy", &["--strict", "--follow-imports=silent", "example.py"], &[])
        .await;
    let environment = [("TOOLLOOP_URL", &*service.url("")), ("TOOLLOOP_KEY", ADMIN_KEY)];
    let said = workshop.run("venv/bin/python", &["example.py"], &environment).await;
    assert!(said.contains(GOODBYE), "{said}\n{}", service.log());
}
