//! Generated clients: made from the document that the service serves, compiled, and used by
//! programs in their languages (`tests/clients`) as their authors would.

use std::fs;
use std::time::Duration;

use crate::installing::{GO_PACKAGES, Workshop};
use crate::service::{ADMIN_KEY, Db, Service, Setup};

const GOODBYE: &str = "all calls answered as documented";

async fn service() -> Service {
    let reader = r#"
description: Reads a file.
model: scripted/reader
instructions: Read.
inputs: {type: object, properties: {path: {type: string}}, required: [path]}
tools: [file_ops]
governance: {paths: {deny: ["*.key", {pattern: "*.pem", mode: observe}]}}
output: {schema: {type: object, properties: {text: {type: string}}, required: [text]}}
"#;
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

/// Generates a client with openapi-generator into a directory.
async fn generate(workshop: &Workshop, language: &str, into: &str, options: &str) {
    let _ = fs::remove_dir_all(workshop.dir.join(into));
    let arguments =
        ["generate", "-i", "openapi.json", "-g", language, "-o", into, "--additional-properties"];
    let only = ["apiDocs=false", "modelDocs=false", "apiTests=false", "modelTests=false"].join(",");
    let arguments = [&arguments[..], &[options, "--global-property", &only]].concat();
    let patience = Duration::from_mins(5);
    workshop.run_within(patience, "venv/bin/openapi-generator-cli", &arguments, &[]).await;
}

#[tokio::test]
async fn a_go_client_compiles_and_calls() {
    let workshop = Workshop::go().await;
    let service = service().await;
    fetch_document(&service, &workshop).await;
    let options = "enumClassPrefix=true,useOneOfDiscriminatorLookup=true,disallowAdditionalPropertiesIfNotPresent=false,\
                   packageName=toolloop,withGoMod=false";
    generate(&workshop, "go", "go/src/toolloop", options).await;
    let here = workshop.dir.display();
    let (path, cache) = (format!("{here}/go:{GO_PACKAGES}"), format!("{here}/cache"));
    let environment = [
        ("GO111MODULE", "off"),
        ("GOPATH", &*path),
        ("GOCACHE", &*cache),
        ("TOOLLOOP_URL", &*service.url("")),
        ("TOOLLOOP_KEY", ADMIN_KEY),
    ];
    let patience = Duration::from_mins(5);
    let said = workshop.run_within(patience, "go", &["run", "example.go"], &environment).await;
    assert!(said.contains(GOODBYE), "{said}\n{}", service.log());
}

#[tokio::test]
#[ignore = "takes a minute and a Java compiler"]
async fn a_java_client_compiles_and_calls() {
    let workshop = Workshop::java().await;
    let service = service().await;
    fetch_document(&service, &workshop).await;
    let options =
        "library=native,openApiNullable=false,useJakartaEe=true,hideGenerationTimestamp=true";
    generate(&workshop, "java", "client", options).await;
    // The generator brings Jackson, which the client needs.
    let jar = "$(find venv -name openapi-generator.jar)";
    let classes = format!(
        "classes:{jar}:/usr/share/java/jsr305.jar:/usr/share/java/jakarta-annotation-api.jar"
    );
    let compile = format!(
        "javac -nowarn -d classes -cp {classes} Example.java $(find client/src/main -name '*.java')"
    );
    workshop.run("sh", &["-c", &compile], &[]).await;
    let environment = [("TOOLLOOP_URL", &*service.url("")), ("TOOLLOOP_KEY", ADMIN_KEY)];
    let start = format!("java -cp {classes} Example");
    let said = workshop.run("sh", &["-c", &start], &environment).await;
    assert!(said.contains(GOODBYE), "{said}\n{}", service.log());
}

#[tokio::test]
#[ignore = "takes minutes: it compiles an HTTP client of its own"]
async fn a_rust_client_compiles_and_calls() {
    let workshop = Workshop::rust().await;
    let service = service().await;
    fetch_document(&service, &workshop).await;
    generate(&workshop, "rust", "client", "packageName=toolloop-client").await;
    let environment = [
        ("TOOLLOOP_URL", &*service.url("")),
        ("TOOLLOOP_KEY", ADMIN_KEY),
        ("CARGO_TARGET_DIR", "target"),
    ];
    let patience = Duration::from_mins(10);
    let said = workshop.run_within(patience, "cargo", &["run", "--quiet"], &environment).await;
    assert!(said.contains(GOODBYE), "{said}\n{}", service.log());
}
