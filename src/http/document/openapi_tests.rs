//! The document: committed, complete and fit for generators.

use std::path::Path;

use super::*;

/// The operations, with the answers that they refer to in place.
fn operations() -> Vec<(String, Value)> {
    let api = crate::http::openapi();
    let paths = api["paths"].as_object().unwrap().clone();
    let operations = paths.into_iter().flat_map(|(path, item)| {
        let methods = item.as_object().unwrap().clone();
        methods.into_iter().map(move |(method, operation)| (format!("{method} {path}"), operation))
    });
    let operations = operations.map(|(name, mut operation)| {
        for response in operation["responses"].as_object_mut().unwrap().values_mut() {
            if let Some(path) = response["$ref"].as_str() {
                *response = api.pointer(path.trim_start_matches('#')).unwrap().clone();
            }
        }
        (name, operation)
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
    let api = crate::http::openapi();
    assert_eq!(api["openapi"], "3.1.0");
    assert_eq!(api["servers"], json!([{"url": "/v1"}]));
    assert_eq!(api["components"]["securitySchemes"]["bearer"]["scheme"], "bearer");
    assert!(!api.to_string().contains(schemas::OPTIONAL), "it is a mark of the derivation");
}

#[test]
fn every_operation_has_what_generated_clients_need() {
    let mut ids = Vec::new();
    for (name, operation) in operations() {
        ids.push(operation["operationId"].as_str().unwrap().to_owned());
        assert!(
            operation["summary"].as_str().is_some_and(|s| !s.is_empty()),
            "{name} has no summary"
        );
        assert_eq!(operation["tags"].as_array().map(Vec::len), Some(1), "{name} needs one tag");
        let responses = operation["responses"].as_object().unwrap();
        let is_probe = ["get /healthz", "get /readyz"].contains(&&*name);
        let of_all = ["400", "500", "504"];
        assert!(of_all.iter().all(|status| responses.contains_key(*status)), "{name}");
        let reads_journal = name.contains(" /runs/{id}") || name == "post /tokens";
        let can_be_damaged = responses["500"].to_string().contains("`JOURNAL_UNREADABLE`");
        assert!(!reads_journal || can_be_damaged, "{name}");
        assert!(is_probe || responses["503"].to_string().contains("`OVERLOADED`"), "{name}");
        for (status, response) in responses {
            assert!(
                response["description"].as_str().is_some_and(|d| !d.is_empty()),
                "{name} {status}"
            );
            for (kind, content) in response["content"].as_object().into_iter().flatten() {
                let is_open = content["schema"]["$ref"] == "#/components/schemas/EventPage";
                assert_eq!(content["example"].is_null(), is_open, "{name} {status} {kind}");
                let problem = kind == "application/problem+json";
                assert_eq!(
                    problem,
                    content["schema"]["$ref"] == "#/components/schemas/Problem",
                    "{name} {status}"
                );
            }
        }
        for parameter in operation["parameters"].as_array().into_iter().flatten() {
            assert!(parameter["description"].is_string(), "{name} {parameter}");
        }
        if operation["security"] != json!([]) {
            let of_keys = ["401", "403", "429"];
            assert!(of_keys.iter().all(|status| responses.contains_key(*status)), "{name}");
            assert!(responses["503"].to_string().contains("`STORE_UNAVAILABLE`"), "{name}");
        }
        if let Some(body) = operation.get("requestBody") {
            let json = body["content"].get("application/json");
            assert!(json.is_none_or(|json| json["example"].is_object()), "{name}");
            let statuses = ["400", "413", "415"].into_iter().chain(json.map(|_| "422"));
            for status in statuses {
                assert!(responses.contains_key(status), "{name} {status}");
            }
        }
    }
    let count = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), count, "operation ids repeat");
}

#[test]
fn headers_that_are_sent_are_declared() {
    let headers = |operation: &Value, status: &str| {
        let headers = operation["responses"][status]["headers"].as_object();
        headers.into_iter().flat_map(|all| all.keys().cloned()).collect::<Vec<_>>()
    };
    for (name, operation) in operations() {
        if operation["security"] != json!([]) {
            assert_eq!(headers(&operation, "401"), ["www-authenticate"], "{name}");
        }
        if !name.ends_with("/files/{path}") || !name.starts_with("get ") {
            continue;
        }
        let of_content = ["accept-ranges", "content-disposition", "etag", "last-modified"];
        assert_eq!(headers(&operation, "200"), of_content, "{name}");
        let mut of_range = [&of_content[..], &["content-range"]].concat();
        of_range.sort_unstable();
        assert_eq!(headers(&operation, "206"), of_range, "{name}");
        assert_eq!(headers(&operation, "304"), ["etag"], "{name}");
        assert_eq!(headers(&operation, "416"), ["content-range"], "{name}");
    }
}

#[test]
fn only_health_metrics_and_the_document_need_no_key() {
    let open = operations().into_iter().filter(|(_, operation)| operation["security"] == json!([]));
    let open: Vec<String> = open.map(|(name, _)| name).collect();
    assert_eq!(open, ["get /healthz", "get /metrics", "get /openapi.json", "get /readyz"]);
}

#[test]
fn every_reference_resolves() {
    let api = crate::http::openapi();
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

#[test]
fn every_schema_and_property_has_a_description() {
    let api = crate::http::openapi();
    let schemas = api["components"]["schemas"].as_object().unwrap();
    let says = |schema: &Value| {
        let own = schema["description"].as_str();
        own.is_some_and(|text| {
            !text.is_empty() && !text.contains("`crate::") && !text.contains("[`")
        })
    };
    let mut silent = Vec::new();
    for (name, schema) in schemas {
        let parts: Vec<&Value> =
            schema["allOf"].as_array().into_iter().flatten().chain([schema]).collect();
        for (property, schema) in
            parts.iter().filter_map(|part| part["properties"].as_object()).flatten()
        {
            let target =
                |schema: &Value| Some(&schemas[schema["$ref"].as_str()?.rsplit('/').next()?]);
            let choices = schema["oneOf"].as_array().into_iter().flatten();
            let mut voices =
                choices.chain([schema]).flat_map(|part| [Some(part), target(part)]).flatten();
            if !voices.any(says) {
                silent.push(format!("{name}.{property}"));
            }
        }
        if !parts.iter().any(|part| says(part)) {
            silent.push(name.clone());
        }
    }
    assert!(silent.is_empty(), "give these a sentence: {silent:?}");
}

/// Generators name a schema within another after its place, or not at all.
#[test]
fn enums_and_objects_are_named_schemas() {
    let api = crate::http::openapi();
    let mut nameless = Vec::new();
    for (name, schema) in api["components"]["schemas"].as_object().unwrap() {
        assert!(!name.contains('_'), "{name}");
        let parts = schema["allOf"].as_array().into_iter().flatten().chain([schema]);
        for (property, schema) in parts.filter_map(|part| part["properties"].as_object()).flatten()
        {
            assert!(
                schema["default"].is_null(),
                "{name}.{property}: a default makes generators ask for it"
            );
            if schema["enum"].is_array() || schema["properties"].is_object() {
                nameless.push(format!("{name}.{property}"));
            }
        }
    }
    assert!(nameless.is_empty(), "give these a type: {nameless:?}");
}

#[test]
fn every_tag_has_a_description() {
    let api = crate::http::openapi();
    let explained: Vec<&Value> =
        api["tags"].as_array().unwrap().iter().map(|tag| &tag["name"]).collect();
    for (name, operation) in operations() {
        assert!(explained.contains(&&operation["tags"][0]), "{name}: add its tag to TAGS");
    }
}

/// Generators make types, files and constructors of these names, in languages that fold cases.
#[test]
fn no_two_names_collide_in_generated_code() {
    let api = crate::http::openapi();
    let mut names: Vec<String> =
        api["components"]["schemas"].as_object().unwrap().keys().cloned().collect();
    let constructors: Vec<String> = names.iter().map(|name| format!("New{name}")).collect();
    names.extend(constructors);
    let operations = operations();
    names.extend(
        operations
            .iter()
            .map(|(_, operation)| operation["operationId"].as_str().unwrap().replace('_', "")),
    );
    let mut folded: Vec<String> = names.iter().map(|name| name.to_lowercase()).collect();
    folded.sort_unstable();
    let repeated: Vec<&String> =
        folded.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| &pair[0]).collect();
    assert!(repeated.is_empty(), "these collide: {repeated:?}");
}

#[test]
fn the_license_is_an_identifier() {
    assert_eq!(crate::http::openapi()["info"]["license"]["identifier"], "MIT OR Apache-2.0");
}

#[test]
fn every_example_is_valid() {
    let api = crate::http::openapi();
    let mut wrong = Vec::new();
    let mut check = |place: String, schema: &Value, example: &Value| {
        let mut schema = schema.clone();
        schema["components"] = api["components"].clone();
        let validator = jsonschema::validator_for(&schema).unwrap();
        let faults = validator.iter_errors(example);
        wrong.extend(faults.map(|fault| format!("{place}{}: {fault}", fault.instance_path())));
    };
    for (name, operation) in operations() {
        let body = [("the body", &operation["requestBody"])];
        let responses = operation["responses"].as_object().unwrap();
        let responses = responses.iter().map(|(status, response)| (status.as_str(), response));
        for (what, part) in body.into_iter().chain(responses) {
            for (_, content) in part["content"].as_object().into_iter().flatten() {
                if let Some(example) = content.get("example") {
                    check(format!("{name} {what} "), &content["schema"], example);
                }
            }
        }
    }
    for (name, schema) in api["components"]["schemas"].as_object().unwrap() {
        let given = schema["examples"].as_array().into_iter().flatten();
        for example in given.chain(schema.get("example")) {
            check(
                format!("{name} "),
                &json!({"$ref": format!("#/components/schemas/{name}")}),
                example,
            );
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_call_of_a_tool_is_refused_as_an_invocation_is() {
    let operations = operations();
    let statuses = |id: &str| {
        let found = operations.iter().find(|(_, operation)| operation["operationId"] == id);
        let responses = found.unwrap().1["responses"].as_object().unwrap().clone();
        responses.keys().cloned().collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(statuses("call_tool"), statuses("invoke_agent_iterative"));
}

/// What an invocation answers has one type; streams and dry runs have operations of their own.
#[test]
fn an_invocation_answers_one_type() {
    let operations = operations();
    let answer = |id: &str| {
        let found = operations.iter().find(|(_, operation)| operation["operationId"] == id);
        found.unwrap().1["responses"]["200"]["content"].clone()
    };
    for id in ["invoke_agent", "invoke_agent_iterative", "call_tool"] {
        let content = answer(id);
        assert_eq!(content.as_object().unwrap().len(), 1, "{id}");
        assert_eq!(content["application/json"]["schema"]["$ref"], "#/components/schemas/Run");
    }
    let stream = answer("stream_agent");
    assert_eq!(stream.as_object().unwrap().keys().collect::<Vec<_>>(), ["text/event-stream"]);
    for stream in [stream, answer("list_events")] {
        let each = &stream["text/event-stream"]["schema"]["contentSchema"]["$ref"];
        assert_eq!(each, "#/components/schemas/StreamEvent");
    }
    let dry = answer("dry_run_agent");
    assert_eq!(dry["application/json"]["schema"]["$ref"], "#/components/schemas/DryRun");
}
