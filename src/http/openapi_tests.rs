//! The document: committed, complete and fit for generators.

use std::path::Path;

use super::*;

fn operations() -> Vec<(String, Value)> {
    let api = serde_json::to_value(crate::http::openapi()).unwrap();
    let paths = api["paths"].as_object().unwrap().clone();
    let operations = paths.into_iter().flat_map(|(path, item)| {
        let methods = item.as_object().unwrap().clone();
        methods.into_iter().map(move |(method, operation)| (format!("{method} {path}"), operation))
    });
    operations.collect()
}

#[test]
fn the_committed_document_is_the_generated_one() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("openapi/openapi.json");
    let generated = crate::http::openapi_json() + "\n";
    if std::env::var_os("UPDATE_OPENAPI").is_some() {
        std::fs::write(&file, &generated).unwrap();
    }
    let committed = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        committed == generated,
        "openapi/openapi.json is not what the code says; look at the difference that\n    \
         UPDATE_OPENAPI=1 cargo test --lib openapi && git diff openapi\nmakes, and commit it if it is meant"
    );
}

#[test]
fn the_document_is_openapi_3_1_of_the_versioned_api() {
    let api = serde_json::to_value(crate::http::openapi()).unwrap();
    assert_eq!(api["openapi"], "3.1.0");
    assert_eq!(api["servers"], json!([{"url": "/v1"}]));
    assert_eq!(api["components"]["securitySchemes"]["bearer"]["scheme"], "bearer");
}

#[test]
fn every_operation_has_what_generated_clients_need() {
    let mut ids = Vec::new();
    for (name, operation) in operations() {
        ids.push(operation["operationId"].as_str().unwrap().to_owned());
        assert!(operation["summary"].as_str().is_some_and(|s| !s.is_empty()), "{name} has no summary");
        assert_eq!(operation["tags"].as_array().map(Vec::len), Some(1), "{name} needs one tag");
        let responses = operation["responses"].as_object().unwrap();
        assert!(responses.contains_key("500"), "{name}");
        for (status, response) in responses {
            assert!(response["description"].as_str().is_some_and(|d| !d.is_empty()), "{name} {status}");
            for (kind, content) in response["content"].as_object().into_iter().flatten() {
                assert!(!content["example"].is_null(), "{name} {status} {kind} has no example");
                let problem = kind == "application/problem+json";
                assert_eq!(problem, content["schema"]["$ref"] == "#/components/schemas/Problem", "{name} {status}");
            }
        }
        for parameter in operation["parameters"].as_array().into_iter().flatten() {
            assert!(parameter["description"].is_string(), "{name} {parameter}");
        }
        if operation["security"].is_array() {
            assert!(responses.contains_key("401") && responses.contains_key("403"), "{name}");
        }
        if let Some(body) = operation.get("requestBody") {
            assert!(body["content"]["application/json"]["example"].is_object(), "{name}");
            assert!(["400", "413", "415", "422"].iter().all(|status| responses.contains_key(*status)), "{name}");
        }
    }
    let count = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), count, "operation ids repeat");
}

#[test]
fn only_health_and_the_document_itself_are_open() {
    let open = operations().into_iter().filter(|(_, operation)| operation.get("security").is_none());
    let open: Vec<String> = open.map(|(name, _)| name).collect();
    assert_eq!(open, ["get /healthz", "get /metrics", "get /openapi.json", "get /readyz"]);
}

#[test]
fn every_reference_leads_somewhere() {
    let api = serde_json::to_value(crate::http::openapi()).unwrap();
    let mut rest = vec![&api];
    while let Some(value) = rest.pop() {
        if let Some(path) = value["$ref"].as_str() {
            assert!(api.pointer(path.trim_start_matches('#')).is_some(), "{path} leads nowhere");
        }
        match value {
            Value::Object(object) => rest.extend(object.values()),
            Value::Array(array) => rest.extend(array),
            _ => {}
        }
    }
}
