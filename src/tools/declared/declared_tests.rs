use std::fs;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::tools::credentials::Credentials;

fn load(files: &[(&str, &str)]) -> Declared {
    let dir = TempDir::new().unwrap();
    for (name, text) in files {
        fs::write(dir.path().join(name), text).unwrap();
    }
    let environment = |name: &str| (name == "TOKEN").then(|| "hunter2".to_owned());
    loaded(dir.path(), &environment)
}

fn loaded(dir: &Path, environment: Environment<'_>) -> Declared {
    let sandbox = Arc::new(Sandbox::new(crate::tools::sandbox::Settings {
        path: vec!["/usr/bin".into(), "/bin".into()],
        environment: Vec::new(),
        require: true,
        timeout: Duration::from_secs(10),
        max_output: 1000,
        limits: crate::tools::sandbox::Limits::default(),
        namespaces: true,
        supervisor: "/nowhere".into(),
    }));
    Declared::load(
        dir,
        Dependencies {
            environment,
            client: &Client::new(),
            proxy: &Proxy::new(Client::new(), Credentials::new()),
            sandbox: &sandbox,
        },
    )
}

fn error(yaml: &str) -> String {
    let declared = load(&[("set.yaml", yaml)]);
    assert!(declared.tools.is_empty(), "{yaml}");
    let [broken] = &declared.broken[..] else { panic!("{yaml}: {:?}", declared.broken) };
    assert_eq!(broken.file, "set.yaml");
    broken.error.clone()
}

const SEARCH: &str = r#"
base_url: https://issues.example.com
headers: {Authorization: "Bearer {{ env.TOKEN }}"}
tools:
  - {name: search, description: "Finds issues.", method: GET, path: "/search", query: {q: "{{ args.q }}"}, effect: read,
     input_schema: {type: object, required: [q], properties: {q: {type: string}}}, response: {pointer: /items, max_bytes: 20000}}
"#;

#[test]
fn a_set_is_a_file() {
    let declared = load(&[
        ("issues.yaml", SEARCH),
        (".hidden.yaml", "x"),
        ("notes.txt", "x"),
        ("b.yml", "x: 1"),
    ]);
    let infos: Vec<_> = declared.tools.iter().map(|tool| tool.info()).collect();
    assert_eq!(infos.len(), 1);
    assert_eq!(
        (infos[0].name.as_str(), infos[0].source.as_str()),
        ("http:issues/search", "http:issues")
    );
    assert_eq!(infos[0].effect, crate::run::Effect::Read);
    let broken: Vec<_> = declared.broken.iter().map(|broken| broken.file.as_str()).collect();
    assert_eq!(broken, ["b.yml"]);
    assert!(loaded(Path::new("/nowhere"), &|_| None).broken.is_empty());
}

#[test]
fn broken_files_are_told_with_line_and_key() {
    let one =
        |line: &str| format!("base_url: https://a.example\ntools:\n  - {{name: a, {line}}}\n");
    let table = [
        ("tools: [".to_owned(), "line "),
        ("colour: red".to_owned(), "unknown key `colour`"),
        (one("method: GET, path: /x, verb: 1"), "line 3, column 38: tools[0].verb: unknown key"),
        ("tools: [{name: a, method: GET, path: /x}]".to_owned(), "base_url: is missing"),
        ("base_url: ftp://x\ntools: [{name: a, method: GET, path: /x}]".to_owned(), "base_url: is neither http nor https"),
        ("base_url: https://u:p@x\ntools: [{name: a, method: GET, path: /x}]".to_owned(), "contains credentials"),
        ("base_url: https://x/?a=b\ntools: [{name: a, method: GET, path: /x}]".to_owned(), "must not have a query"),
        (one("path: /x"), "line 3, column 5: tools[0].method: is missing"),
        (one("method: get, path: /x"), "tools[0].method: is not one of GET"),
        (one("method: TRACE, path: /x"), "is not one of GET"),
        (one("method: GET"), "tools[0].path: is missing"),
        (one("method: GET, path: x"), "tools[0].path: must begin with /"),
        (one("method: GET, path: '/x?a=b'"), "tools[0].path: must begin with / and have neither"),
        (one("method: GET, path: '/{{ args.a '"), "tools[0].path: is not a valid template"),
        (one("method: GET, path: '/{{ env.TOKEN }}'"), "cannot use env"),
        (one("method: POST, path: /x, body: {a: '{{ env.TOKEN }}'}"), "tools[0].body.a: cannot use env"),
        (one("method: GET, path: /x, body: {}"), "tools[0].body: has no meaning with GET"),
        (one("method: POST, path: /x, body_format: form"), "tools[0].body_format: has no meaning without `body`"),
        (one("method: POST, path: /x, body_format: form, body: {a: {b: 1}}"), "tools[0].body.a: a form holds no objects; use `body_format: json`"),
        (one("method: POST, path: /x, body_format: form, body: 'a={{ args.a }}'"), "tools[0].body: with `body_format: form` must be an object or one expression"),
        (one("method: POST, path: /x, body_format: fom, body: {}"), "unknown variant (did you mean `form`?), expected one of json, form"),
        (one("method: POST, path: /x, body_fromat: form, body: {}"), "did you mean `body_format`?"),
        (one("method: POST, path: /x, reconcile: {path: x}"), "tools[0].reconcile.path: must begin with /"),
        (one("method: POST, path: /x, reconcile: {path: /x, verb: GET}"), "line 3, column 61: tools[0].reconcile.verb: unknown key"),
        (one("method: POST, path: /x, reconcile: {method: GET}"), "tools[0].reconcile: missing field `path`"),
        (one("method: POST, path: /x, reconcile: {path: /x, method: PUT}"), "tools[0].reconcile.method: is not one of GET and POST"),
        (one("method: POST, path: /x, reconcile: {path: /x, body: {}}"), "tools[0].reconcile.body: has no meaning with GET"),
        (one("method: POST, path: /x, reconcile: {path: '/{{ env.TOKEN }}'}"), "tools[0].reconcile.path: cannot use env"),
        (one("method: POST, path: /x, reconcile: {path: /x, headers: {a: '{{ env.NONE }}'}}"), "tools[0].reconcile.headers.a: the environment variable NONE is not set"),
        (one("method: POST, path: /x, reconcile: [date]"), "tools[0].reconcile: is a request, as the tool is"),
        (one("method: POST, path: /x, reconcile: yes"), "a section of keys (HTTP) or a list of words (a program)"),
        (one("method: PUT, path: /x, effect: idempotent, reconcile: {path: /x}"), "tools[0].reconcile: has no meaning with `effect: idempotent`: only calls that are `once` are asked about"),
        ("tools: [{name: a, command: [date], reconcile: {path: /x}}]".to_owned(), "tools[0].reconcile: is a command, as the tool is"),
        ("tools: [{name: a, command: [date], reconcile: [nothing-of-that-name]}]".to_owned(), "tools[0].reconcile: there is no program"),
        ("tools: [{name: a, command: [date], reconcile: []}]".to_owned(), "tools[0].reconcile: is a list of a program and its arguments"),
        ("tools: [{name: a, command: [date], body_format: form}]".to_owned(), "tools[0].body_format: has no meaning with `command`"),
        (one("method: GET, path: /x, timeout_seconds: 5"), "tools[0].timeout_seconds: has no meaning without `command`; the definition of an agent limits the time of an HTTP tool, in tool_options.<tool>.timeout_seconds"),
        (one("method: GET, path: /x, query: {k: '{{ env.NONE }}'}"), "tools[0].query.k: the environment variable NONE is not set"),
        (one("method: GET, path: /x, headers: {Host: x}"), "tools[0].headers.Host: is set by the client"),
        (one("method: GET, path: /x, headers: {'a b': x}"), "is not the name of a header"),
        (one("method: GET, path: /x, effect: maybe"), "unknown variant"),
        (one("method: GET, path: /x, response: {pointer: items}"), "tools[0].response.pointer"),
        (one("method: GET, path: /x, response: {max_bytes: 0}"), "tools[0].response.max_bytes: 0 is not between"),
        (one("method: GET, path: /x, input_schema: {type: string}"), "tools[0].input_schema: must have `type: object`"),
        (one("method: GET, path: /x, input_schema: {type: object, properties: {a: {type: strng}}}"), "tools[0].input_schema: is not a JSON Schema"),
        ("base_url: https://x\nheaders: {A: '{{ env.NONE }}'}\ntools: [{name: a, method: GET, path: /x}]".to_owned(), "headers.A: the environment variable NONE is not set"),
        ("base_url: https://x\nheaders: {A: '{{ args.a }}'}\ntools: [{name: a, method: GET, path: /x}]".to_owned(), "headers.A: is not a valid template"),
        ("base_url: https://x\ntools: [{name: a, method: GET, path: /x}, {name: a, method: GET, path: /y}]".to_owned(), "tools[1].name: \"a\" appears twice"),
        ("base_url: https://x\ntools: [{name: a/b, method: GET, path: /x}]".to_owned(), "tools[0].name"),
        ("openapi: {file: none.json, operations: [a]}".to_owned(), "openapi.file: none.json cannot be read"),
    ];
    for (yaml, expected) in table {
        let error = error(&yaml);
        assert!(error.contains(expected), "{yaml}\n{error}");
        assert!(!error.contains("hunter2"), "{error}");
    }
}

#[test]
fn schemas_of_an_api_are_made_whole() {
    let document = json!({
        "openapi": "3.0.3",
        "servers": [{"url": "https://api.example.com/v2"}],
        "paths": {
            "/pets/{pet-id}/toys": {
                "parameters": [
                    {"name": "pet-id", "in": "path", "required": true, "schema": {"type": "integer"}},
                    {"$ref": "#/components/parameters/Trace"}
                ],
                "post": {
                    "operationId": "pets/add-toy",
                    "summary": "Adds a toy.",
                    "parameters": [
                        {"name": "body", "in": "query", "schema": {"type": "string", "nullable": true, "example": "x"}},
                        {"name": "Accept", "in": "header", "schema": {"type": "string"}}
                    ],
                    "requestBody": {"$ref": "#/components/requestBodies/Toy"}
                },
                "delete": {"operationId": "removeToys"}
            },
            "/odd/{missing}": {"get": {"operationId": "odd"}},
            "/out": {"post": {"operationId": "out", "requestBody": {"content": {"application/json": {"schema": {"$ref": "other.json#/X"}}}}}},
            "/xml": {"post": {"operationId": "xml", "requestBody": {"required": true, "content": {"application/xml": {}}}}}
        },
        "components": {
            "parameters": {"Trace": {"name": "x-trace", "in": "header", "description": "An id.", "schema": {"type": "string"}}},
            "requestBodies": {"Toy": {"required": true, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Toy"}}}}},
            "schemas": {
                "Toy": {"type": "object", "required": ["id", "name"], "properties": {
                    "id": {"type": "string", "readOnly": true},
                    "name": {"type": "string", "xml": {"attribute": true}},
                    "price": {"type": "number", "minimum": 0, "exclusiveMinimum": true},
                    "parts": {"type": "array", "items": {"$ref": "#/components/schemas/Toy"}}
                }}
            }
        }
    });
    let document = openapi::Document::of(document).unwrap();
    let server = openapi::Server::Address("https://api.example.com/v2".to_owned());
    assert_eq!(document.server(), server);
    let imported = document.operation("pets/add-toy").unwrap();
    let entry = imported.entry;
    assert_eq!(imported.left_out, Vec::<String>::new());
    assert_eq!(entry.name, "pets_add-toy");
    assert_eq!(entry.path.as_deref(), Some("/pets/{{ args[\"pet-id\"] }}/toys"));
    assert_eq!(entry.query["body"], "{{ args.body }}");
    assert_eq!(entry.headers["x-trace"], "{{ args[\"x-trace\"] }}");
    assert_eq!(entry.body, Some(Value::from("{{ args.body_ }}")));
    let expected = json!({
        "type": "object",
        "properties": {
            "body": {"type": ["string", "null"]},
            "pet-id": {"type": "integer"},
            "x-trace": {"type": "string", "description": "An id."},
            "body_": {"type": "object", "required": ["name"], "properties": {
                "name": {"type": "string"},
                "price": {"type": "number", "exclusiveMinimum": 0},
                "parts": {"type": "array", "items": {}}
            }}
        },
        "required": ["pet-id", "body_"],
        "additionalProperties": false
    });
    assert_eq!(entry.input_schema, expected);
    let removal = document.operation("removeToys").unwrap().entry;
    assert!(removal.destructive);
    assert_eq!(removal.description, "DELETE /pets/{pet-id}/toys");
    for (id, why) in [
        ("none", "there is no operation"),
        ("odd", "no parameter describes"),
        ("out", "leads out of the document"),
        ("xml", "application/xml cannot be sent"),
    ] {
        let error = document.operation(id).err().unwrap();
        assert!(error.contains(why), "{id}: {error}");
    }
}

#[test]
fn headers_that_the_client_sets_are_left_out() {
    let operation = |id: &str, required: bool| {
        json!({"get": {"operationId": id, "parameters": [
            {"name": "Cookie", "in": "header", "required": required, "schema": {"type": "string"}},
            {"name": "Idempotency-Key", "in": "header", "required": true, "schema": {"type": "string"}},
            {"name": "x-trace", "in": "header", "schema": {"type": "string"}}
        ]}})
    };
    let paths = json!({"/a": operation("optional", false), "/b": operation("needed", true)});
    let document = openapi::Document::of(json!({"openapi": "3.1.0", "paths": paths})).unwrap();
    let imported = document.operation("optional").unwrap();
    let why = "the parameter \"Cookie\": it is set by the client";
    assert_eq!(imported.left_out, [why]);
    assert_eq!(imported.entry.headers.keys().collect::<Vec<_>>(), ["x-trace"]);
    assert!(document.operation("needed").err().unwrap().ends_with(why));
}

#[test]
fn a_path_alone_is_no_address() {
    let document = json!({"openapi": "3.1.0", "servers": [{"url": "/v1"}], "paths": {"/runs": {"get": {"operationId": "runs"}}}}).to_string();
    let section = "openapi: {file: api.json, operations: [runs]}\n";
    let declared = load(&[("api.json", &document), ("set.yaml", section)]);
    let [broken] = &declared.broken[..] else { panic!("{:?}", declared.broken) };
    let why = "base_url: is missing; the document names its path alone, /v1";
    assert!(broken.error.ends_with(why), "{}", broken.error);
    let whole = format!("base_url: https://x/v1\n{section}");
    let declared = load(&[("api.json", &document), ("set.yaml", &whole)]);
    assert_eq!((declared.broken.len(), declared.tools.len()), (0, 1), "{:?}", declared.broken);
}

#[test]
fn other_documents_are_refused() {
    for (text, why) in [
        (json!({"swagger": "2.0"}), "OpenAPI 3.0 or 3.1"),
        (json!({"openapi": "3.1.0"}), "has no paths"),
        (json!([]), "OpenAPI"),
    ] {
        assert!(openapi::Document::of(text).err().unwrap().contains(why));
    }
}

/// A document with one operation for each body.
fn with_bodies(bodies: &[(&str, Value)]) -> openapi::Document {
    let operation = |(id, body): &(&str, Value)| {
        (format!("/{id}"), json!({"post": {"operationId": id, "requestBody": body}}))
    };
    let paths: serde_json::Map<_, _> = bodies.iter().map(operation).collect();
    let whole = json!({"openapi": "3.0.1", "paths": paths});
    openapi::Document::of(whole).unwrap()
}

#[test]
fn bodies_are_forms_where_they_are_not_json() {
    let form = |schema: Value| {
        json!({"content": {"application/x-www-form-urlencoded": {"schema": schema,
            "encoding": {"joined": {"style": "form", "explode": false}, "To": {"style": "deepObject"}}}}})
    };
    let text = json!({"type": "string"});
    let object = json!({"type": "object", "additionalProperties": true});
    let mut both = form(json!({"type": "object"}));
    both["content"]["application/json"] = json!({"schema": object});
    let document = with_bodies(&[
        (
            "flat",
            form(json!({"type": "object", "required": ["To"], "properties": {
                "To": text, "tags": {"type": "array", "items": text}, "metadata": object,
                "lines": {"type": "array", "items": object}, "joined": {"type": "array", "items": text},
                "either": {"anyOf": [text, object]}, "expand": {"oneOf": [object, object]}
            }})),
        ),
        (
            "parts",
            form(json!({"allOf": [
                {"type": "object", "required": ["a"], "properties": {"a": text}},
                {"required": ["a", "b"], "properties": {"b": text, "c": object}}
            ]})),
        ),
        ("nested", form(json!({"required": ["m"], "properties": {"m": object}}))),
        ("text", form(text.clone())),
        ("both", both),
        ("files", json!({"content": {"multipart/form-data": {}, "application/xml": {}}})),
        ("file", json!({"required": true, "content": {"multipart/form-data": {}}})),
        ("empty", json!({"required": true, "content": {}})),
    ]);
    let flat = document.operation("flat").unwrap();
    assert_eq!(flat.entry.body_format, file::BodyFormat::Form);
    assert_eq!(flat.entry.body, Some(Value::from("{{ args.body }}")));
    let members = flat.entry.input_schema["properties"]["body"]["properties"].as_object().unwrap();
    assert_eq!(members.keys().collect::<Vec<_>>(), ["To", "tags", "either"]);
    let left_out = flat.left_out.join("\n");
    for name in ["metadata", "lines", "joined", "expand"] {
        assert!(left_out.contains(&format!("the member \"{name}\" of its form: ")), "{left_out}");
    }
    let parts = document.operation("parts").unwrap();
    let expected =
        json!({"type": "object", "required": ["a", "b"], "properties": {"a": text, "b": text}});
    assert_eq!(parts.entry.input_schema["properties"]["body"], expected);
    assert_eq!(parts.left_out.len(), 1);
    assert_eq!(document.operation("both").unwrap().entry.body_format, file::BodyFormat::Json);
    let files = document.operation("files").unwrap();
    assert_eq!(
        (files.entry.body, files.entry.input_schema["properties"].clone()),
        (None, json!({}))
    );
    assert_eq!(files.left_out, ["its body: multipart/form-data, application/xml cannot be sent"]);
    for (id, why) in [
        ("nested", "the member \"m\" of its form is needed"),
        ("text", "a form, but no object"),
        ("file", "its body is needed, but multipart/form-data cannot be sent"),
        ("empty", "its body is needed, but it has no media type"),
    ] {
        let error = document.operation(id).err().unwrap();
        assert!(error.contains(why), "{id}: {error}");
    }
}

#[test]
fn what_refers_to_itself_ends() {
    let mut schemas = serde_json::Map::new();
    // Each refers twice to the next one: 2^40 schemas if nothing stopped.
    let wide: serde_json::Map<_, _> = (0..5000).map(|i| (format!("p{i}"), json!({}))).collect();
    schemas.insert("Wide".into(), json!({"properties": wide}));
    for i in 0..40 {
        let next = json!({"$ref": format!("#/components/schemas/S{}", i + 1)});
        schemas.insert(
            format!("S{i}"),
            json!({"type": "object", "properties": {"a": next, "b": next}}),
        );
    }
    schemas.insert("S40".into(), json!({"$ref": "#/components/schemas/S0"}));
    schemas.insert("Circle".into(), json!({"$ref": "#/components/schemas/Circle"}));
    let body = |name: &str| {
        let schema = json!({"$ref": format!("#/components/schemas/{name}")});
        json!({"operationId": name, "requestBody": {"content": {"application/json": {"schema": schema}}}})
    };
    let document = openapi::Document::of(json!({
        "openapi": "3.1.0",
        "paths": {
            "/a": {"post": body("S0")},
            "/b": {"post": body("Circle")},
            "/w": {"post": body("Wide")},
            "/c": {"post": {"operationId": "c", "requestBody": {"$ref": "#/paths/~1c/post/requestBody"}}}
        },
        "components": {"schemas": schemas}
    }))
    .unwrap();
    assert!(document.operation("S0").unwrap().entry.input_schema.to_string().len() < 10_000);
    assert!(document.operation("Wide").err().unwrap().contains("more than 4000"));
    let circle = document.operation("Circle").unwrap().entry;
    assert_eq!(circle.input_schema["properties"]["body"], json!({}));
    assert!(document.operation("c").err().unwrap().contains("too many others"));
}

#[test]
fn a_secret_that_begins_like_another_leaves_nothing_of_it() {
    let environment =
        |name: &str| Some(if name == "ORG" { "acme" } else { "acme-9f8e7d" }.to_owned());
    let mut secrets = mapping::Secrets::default();
    for template in ["{{ env.ORG }}", "{{ env.TOKEN }}"] {
        secrets.add("headers.a", template, &environment).unwrap();
    }
    let text = secrets.removed_from("acme-9f8e7d of acme".to_owned());
    assert_eq!(text, "[redacted] of [redacted]");
}
