use std::path::Path;

use jsonschema::Validator;
use serde_json::json;

use super::*;
use crate::agents::Agent;
use crate::config::{Config, DEFAULT_TOML, Flags};

fn validator(what: SchemaCommand) -> Validator {
    jsonschema::draft202012::new(&schema(what)).unwrap()
}

fn yaml(text: &str) -> Value {
    serde_saphyr::from_str_with_options(text, serde_saphyr::options! { strict_booleans: true })
        .unwrap()
}

/// Every number with bounds beneath a schema, as `(keys, minimum, maximum)`.
fn bounded(schema: &Value, at: &Value, path: &[String], found: &mut Vec<(Vec<String>, i64, i64)>) {
    let at = match at.get("$ref").and_then(Value::as_str).and_then(|name| name.strip_prefix('#')) {
        Some(pointer) => schema.pointer(pointer).unwrap(),
        None => at,
    };
    if let (Some(min), Some(max)) = (at["minimum"].as_i64(), at["maximum"].as_i64()) {
        found.push((path.to_vec(), min, max));
    }
    for (key, inner) in at["properties"].as_object().into_iter().flatten() {
        bounded(schema, inner, &[path, std::slice::from_ref(key)].concat(), found);
    }
}

/// The number on, just inside and just outside its bounds.
fn around(min: i64, max: i64) -> [i64; 4] {
    [min - 1, min, max, max + 1]
}

fn nested(path: &[String], value: i64) -> Value {
    path.iter().rev().fold(value.into(), |inner, key| json!({ key: inner }))
}

#[test]
fn shipped_agents_match_the_schema_and_invalid_ones_do_not() {
    let schema = validator(SchemaCommand::Agent);
    let agents = Path::new(env!("CARGO_MANIFEST_DIR")).join("agents");
    let mut fitting = 0;
    for file in agents.read_dir().unwrap() {
        let path = file.unwrap().path();
        let errors: Vec<_> = schema
            .iter_errors(&yaml(&std::fs::read_to_string(&path).unwrap()))
            .map(|e| e.to_string())
            .collect();
        assert!(errors.is_empty(), "{}: {errors:?}", path.display());
        fitting += 1;
    }
    assert!(fitting >= 2);
    for broken in [
        "{model: m/x}",
        "{name: A, model: m/x}",
        "{name: ab, model: x}",
        "{name: ab, model: m/x, tool: [file_ops]}",
        "{name: ab, model: m/x, tools: [a, a]}",
        "{name: ab, model: m/x, tools: ['two words']}",
        "{name: ab, model: m/x, tool_choice: sometimes}",
        "{name: ab, model: m/x, inputs: {type: objekt}}",
        "{name: ab, model: m/x, inputs: {properties: {a: {type: object, required: a}}}}",
        "{name: ab, model: m/x, inputs: {minLength: -1}}",
        "{name: ab, model: m/x, output: {schema: {type: string}}}",
        "{name: ab, model: m/x, output: {}}",
        "{name: ab, model: m/x, sampling: {temperature: 2.5}}",
        "{name: ab, model: m/x, workspace: /etc}",
        "{name: ab, model: m/x, governance: {autonomy: total}}",
        "{name: ab, model: m/x, governance: {paths: {read: [/etc]}}}",
        "{name: ab, model: m/x, governance: {tool_policies: {shell: maybe}}}",
        "{name: ab, model: m/x, governance: {network: {allow: ['https://example.com']}}}",
        "{name: ab, model: m/x, governance: {network: {allow: ['a*.example.com']}}}",
        "{name: ab, model: m/x, governance: {network: {deny: ['*.']}}}",
        "{name: ab, model: m/x, governance: {network: {deny: ['::1']}}}",
        "{name: ab, model: m/x, governance: {network: {deny: [{pattern: '*.'}]}}}",
        "{name: ab, model: m/x, governance: {network: {deny: [{host: 'a.test', mode: observe}]}}}",
        "{name: ab, model: m/x, governance: {paths: {deny: [{pattern: /etc, mode: observe}]}}}",
        "{name: ab, model: m/x, governance: {paths: {deny: [{pattern: etc, mode: watch}]}}}",
        "{name: ab, model: m/x, governance: {tool_policies: {shell: {mode: observe}}}}",
        "{name: ab, model: m/x, governance: {network: {allow_private: [localhost]}}}",
        "{name: ab, model: m/x, governance: {network: {hosts: [example.com]}}}",
    ] {
        assert!(!schema.is_valid(&yaml(broken)), "the schema takes {broken}");
        assert!(Agent::from_yaml("ab", broken).is_err(), "the parser takes {broken}");
    }
    for fine in [
        "{name: ab, model: m/x}",
        "{name: ab, model: m/x:y/z, tools: [a], tool_choice: {tool: a}}",
        "{name: ab, model: m/x, governance: {paths: {deny: [a, {pattern: b, mode: observe}]}, tool_policies: {a: ask, b: {do: deny, mode: observe}}}}",
        "{name: ab, model: m/x, governance: {network: {deny: [a.test, {pattern: '*.b.test', mode: observe}]}}}",
        "{name: ab, model: m/x, governance: {network: {allow: [example.com, '*.example.com:8080', '[::1]:81', '*'], allow_private: [10.0.0.0/8, '::1'], max_requests: 5}}}",
    ] {
        assert!(schema.is_valid(&yaml(fine)) && Agent::from_yaml("ab", fine).is_ok(), "{fine}");
    }
}

/// An editor without a network must be able to resolve them.
#[test]
fn no_schema_refers_to_another_document() {
    for what in [SchemaCommand::Agent, SchemaCommand::Config] {
        let text = schema(what).to_string();
        let references: Vec<&str> = text.split("\"$ref\":\"").skip(1).collect();
        assert!(references.iter().all(|reference| reference.starts_with('#')), "{references:?}");
    }
}

#[test]
fn the_bounds_in_the_agent_schema_are_enforced() {
    let (document, schema) = (schema(SchemaCommand::Agent), validator(SchemaCommand::Agent));
    let mut found = Vec::new();
    bounded(&document, &document, &[], &mut found);
    assert!(found.len() >= 11, "{found:?}");
    for (path, min, max) in found {
        for number in around(min, max) {
            let mut agent = nested(&path, number);
            agent["name"] = "ab".into();
            agent["model"] = "m/x".into();
            let parsed = Agent::from_yaml("ab", &agent.to_string());
            let fits = (min..=max).contains(&number);
            assert_eq!(
                (schema.is_valid(&agent), parsed.is_ok()),
                (fits, fits),
                "{agent}: {parsed:?}"
            );
        }
    }
}

#[test]
fn built_in_settings_match_the_schema_and_invalid_ones_do_not() {
    let schema = validator(SchemaCommand::Config);
    let read =
        |text: &str| serde_json::to_value(toml::from_str::<toml::Value>(text).unwrap()).unwrap();
    let errors: Vec<_> = schema
        .iter_errors(&read(DEFAULT_TOML))
        .map(|e| format!("{e} {}", e.instance_path()))
        .collect();
    assert!(errors.is_empty(), "{errors:?}");
    let load = |text: &str| {
        Config::load(Some((Path::new("t.toml"), text)), std::iter::empty(), &Flags::default())
    };
    for broken in [
        "[server]\nlissen = 1",
        "[server]\nlisten = \"here\"",
        "[server]\nbody_limit = \"1 MB\"",
        "[server]\nrequest_timeout = \"10\"",
        "[auth]\nmode = \"open\"",
        "[database]\nurl = \"mysql://x\"",
        "[models.x]\nkind = \"clay\"",
        "[models.openai]\nbase_url = \"ftp://x\"",
        "[models.openai]\nmax_retries = 21",
    ] {
        assert!(!schema.is_valid(&read(broken)), "the schema takes {broken}");
        assert!(load(broken).is_err(), "the parser takes {broken}");
    }
    for fine in
        ["", "[models.openai]\nbase_url = \"http://127.0.0.1:1/v1\"", "[server]\nbody_limit = 2048"]
    {
        assert!(schema.is_valid(&read(fine)) && load(fine).is_ok(), "{fine}");
    }
}

#[test]
fn the_bounds_in_the_settings_schema_are_enforced() {
    let (document, schema) = (schema(SchemaCommand::Config), validator(SchemaCommand::Config));
    let mut found = Vec::new();
    bounded(&document, &document, &[], &mut found);
    assert!(found.len() >= 6, "{found:?}");
    for (path, min, max) in found {
        for number in around(min, max) {
            let settings = nested(&path, number);
            let text = toml::to_string(&settings).unwrap();
            let loaded = Config::load(
                Some((Path::new("t.toml"), &text)),
                std::iter::empty(),
                &Flags::default(),
            );
            let fits = (min..=max).contains(&number);
            assert_eq!(
                (schema.is_valid(&settings), loaded.is_ok()),
                (fits, fits),
                "{text}: {:?}",
                loaded.err()
            );
        }
    }
}
