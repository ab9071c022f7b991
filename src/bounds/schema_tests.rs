use serde_json::json;

use super::*;

fn operator(schema: &Value) -> Schema {
    Schema::compile(schema, Author::Operator).unwrap()
}

fn refused(schema: &Value) -> String {
    Schema::compile(schema, Author::Caller).unwrap_err().0
}

/// Each level names the next twice.
fn doubling(levels: usize, keyword: &str, leaf: &Value) -> Value {
    let mut defs = serde_json::Map::new();
    for level in 0..levels {
        let next = json!({"$ref": format!("#/$defs/a{}", level + 1)});
        defs.insert(format!("a{level}"), json!({keyword: [next, next]}));
    }
    defs.insert(format!("a{levels}"), leaf.clone());
    json!({"type": "object", "$ref": "#/$defs/a0", "$defs": defs})
}

fn nested(levels: usize, leaf: Value) -> Value {
    (0..levels).fold(leaf, |inner, _| json!({"items": [inner]}))
}

#[test]
fn ordinary_values_are_judged_and_explained() {
    let schema = operator(&json!({
        "type": "object",
        "properties": {"n": {"type": "integer"}, "tags": {"items": {"maxLength": 3}}},
        "required": ["n"],
    }));
    assert_eq!(schema.check(&json!({"n": 1, "tags": ["abc"]}), 9), Ok(()));
    let faults = schema.check(&json!({"n": "x", "tags": ["abcd"]}), 9).unwrap_err().faults();
    assert_eq!(faults.iter().map(|f| f.pointer.as_str()).collect::<Vec<_>>(), ["/n", "/tags/0"]);
    assert_eq!(faults[0].message, r#""x" is not of type "integer""#);
    assert_eq!(faults[0].masked, r#"value is not of type "integer""#);
    let many = json!({"n": 1, "tags": vec!["long"; 50]});
    assert!(
        matches!(schema.check(&many, 9), Err(Rejected::Faults(faults, true)) if faults.len() == 9)
    );
}

#[test]
fn what_is_repeated_of_a_value_is_short() {
    let schema = operator(&json!({"additionalProperties": {"type": "integer"}}));
    let faults =
        schema.check(&json!({"k".repeat(9000): "v".repeat(9000)}), 9).unwrap_err().faults();
    assert!(faults[0].message.chars().count() <= 201 && faults[0].pointer.chars().count() <= 201);
}

#[test]
fn a_recursive_choice_is_decided_or_given_up_and_never_explodes() {
    let schema = operator(&json!({
        "$ref": "#/$defs/node",
        "$defs": {"node": {"oneOf": [
            {"type": "object", "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "required": ["items"], "additionalProperties": false},
            {"type": "object", "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/node"}}, "x": true}},
            {"type": "string"},
        ]}},
    }));
    for levels in [1, 15, 16, 17, 30, 60] {
        let rejected = schema.check(&nested(levels, json!(5)), 9).unwrap_err();
        let faults = rejected.clone().faults();
        assert!(!faults.is_empty() && faults.len() <= 9, "{levels}: {rejected:?}");
    }
}

#[test]
fn doubling_references_are_given_up_whatever_combines_them() {
    for keyword in ["anyOf", "allOf", "oneOf"] {
        for leaf in [json!({"required": ["z"]}), json!({}), json!({"type": "string"})] {
            let schema = Schema::compile(&doubling(40, keyword, &leaf), Author::Caller).unwrap();
            // Whatever the verdict, it comes.
            let _ = schema.check(&json!({}), 9);
        }
    }
    let schema = operator(&doubling(40, "oneOf", &json!({"type": "string"})));
    assert_eq!(schema.check(&json!({}), 9), Err(Rejected::Undecided));
    assert_eq!(Rejected::Undecided.faults()[0].message, UNDECIDED);
}

#[test]
fn long_chains_of_references_need_no_stack() {
    let chain = |n: usize| {
        let mut defs = serde_json::Map::new();
        for level in 0..n {
            let next = json!({"$ref": format!("#/$defs/a{}", level + 1)});
            defs.insert(format!("a{level}"), json!({"allOf": [next]}));
        }
        defs.insert(format!("a{n}"), json!({"required": ["z"]}));
        json!({"type": "object", "$ref": "#/$defs/a0", "$defs": defs})
    };
    let schema = operator(&chain(990));
    assert!(schema.check(&json!({}), 9).is_err());
    assert!(refused(&chain(990)).contains("bytes"));
}

#[test]
fn a_value_that_is_large_but_plain_is_decided() {
    let schema = operator(
        &json!({"type": "array", "items": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string", "pattern": "^x+$"}}, "required": ["a", "b"]}, "uniqueItems": true}),
    );
    let items: Vec<Value> = (0..20_000).map(|n| json!({"a": n, "b": "xxxxxxxx"})).collect();
    assert_eq!(schema.check(&Value::from(items), 9), Ok(()));
}

#[test]
fn callers_get_less_room() {
    let object = |more: &Value| {
        let mut schema = json!({"type": "object"});
        schema.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        schema
    };
    let bombs: serde_json::Map<String, Value> = (0..400)
        .map(|n| (format!("p{n}"), json!({"pattern": format!(r"(\pL{{10}}){{20}}{n}")})))
        .collect();
    let table = [
        (json!({"properties": bombs}), "patterns, more than 64"),
        (json!({"properties": {"a": {"pattern": r"(\pL{10}){20}"}}}), "larger than 65536 bytes"),
        (json!({"patternProperties": {r"(\pL{10}){20}": true}}), "larger than 65536 bytes"),
        (json!({"propertyNames": {"pattern": r"(\pL{10}){20}"}}), "larger than 65536 bytes"),
        (json!({"description": "x".repeat(40_000)}), "bytes, more than 32768"),
        (json!({"unevaluatedProperties": false}), "unevaluatedProperties"),
        (json!({"properties": {"a": {"unevaluatedItems": {}}}}), "unevaluatedItems"),
        (json!({"$dynamicRef": "#a"}), "$dynamicRef"),
        (json!({"not": (0..40).fold(json!({}), |inner, _| json!({"not": inner}))}), "levels deep"),
        (json!({"enum": (0..2000).map(|_| json!({})).collect::<Vec<_>>()}), "schemas in it"),
        (json!({"$ref": "http://a.b/c"}), "$ref that leads nowhere"),
        (json!({"required": 1}), "is not a JSON Schema"),
        (json!({"pattern": "(?=x)"}), "linear time"),
    ];
    for (schema, why) in table {
        let message = refused(&object(&schema));
        assert!(message.contains(why), "{message}");
    }
    let fine = object(
        &json!({"properties": {"pattern": {"type": "string"}, "unevaluatedItems": {"type": "string"}}}),
    );
    assert!(
        Schema::of_caller(&fine).is_err(),
        "a property of that name is refused too, on the safe side"
    );
}

#[test]
fn a_callers_schema_is_compiled_once() {
    let schema = json!({"type": "object", "properties": {"only": {"const": "here"}}});
    let (first, second) =
        (Schema::of_caller(&schema).unwrap(), Schema::of_caller(&schema).unwrap());
    assert!(Arc::ptr_eq(&first, &second));
}

type Make<'m> = &'m dyn Fn(usize, Value) -> Value;

#[test]
fn what_a_schema_leaves_unevaluated_does_not_double() {
    let defs = |levels: usize, make: &dyn Fn(usize, Value) -> Value| {
        let reference = |level: usize| json!({"$ref": format!("#/$defs/a{level}")});
        let mut defs = serde_json::Map::new();
        for level in 0..levels {
            defs.insert(format!("a{level}"), make(level, reference(level + 1)));
        }
        defs.insert(format!("a{levels}"), json!({"$anchor": "end"}));
        json!({"$ref": "#/$defs/a0", "$defs": defs})
    };
    let doubling: [Make<'_>; 7] = [
        &|_, next| json!({"allOf": [next, next], "unevaluatedProperties": false}),
        &|_, next| json!({"anyOf": [next, next], "unevaluatedItems": false}),
        &|_, next| json!({"oneOf": [next, next], "unevaluatedProperties": {"type": "string"}}),
        &|_, next| json!({"if": next, "then": next, "else": next, "unevaluatedItems": false}),
        &|_, next| json!({"dependentSchemas": {"a": next, "b": next}, "unevaluatedProperties": false}),
        &|_, next| json!({"$ref": next["$ref"], "unevaluatedProperties": next}),
        &|level, next| {
            if level == 0 {
                json!({"allOf": [next], "unevaluatedProperties": false})
            } else {
                json!({"allOf": [next, next]})
            }
        },
    ];
    for (number, make) in doubling.iter().enumerate() {
        let refused = Schema::compile(&defs(16, make), Author::Operator).unwrap_err();
        assert!(refused.0.contains("more than 2000 schemas"), "{number}: {refused}");
        // What is not refused is compiled at once.
        let begun = std::time::Instant::now();
        for levels in 1..9 {
            let _ = Schema::compile(&defs(levels, make), Author::Operator);
        }
        assert!(begun.elapsed().as_secs() < 10, "{number}: {:?}", begun.elapsed());
    }
    let harmless: [Make<'_>; 3] = [
        &|_, next| json!({"properties": {"x": next, "y": next}, "unevaluatedProperties": false}),
        &|_, next| json!({"allOf": [next, next]}),
        &|_, next| json!({"items": next, "prefixItems": [{"type": "string"}], "unevaluatedItems": false}),
    ];
    for (number, make) in harmless.iter().enumerate() {
        let begun = std::time::Instant::now();
        Schema::compile(&defs(16, make), Author::Operator).unwrap();
        assert!(begun.elapsed().as_secs() < 10, "{number}: {:?}", begun.elapsed());
    }
    let extended = json!({"$defs": {"base": {"properties": {"a": true}}},
        "allOf": [{"$ref": "#/$defs/base"}, {"$ref": "#"}], "unevaluatedProperties": false});
    let extended = Schema::compile(&extended, Author::Operator);
    assert!(extended.is_ok() || extended.unwrap_err().0.contains("itself"));
}

#[test]
fn all_values_of_an_enum_are_listed() {
    let fault = |options: &Value, value: &Value| {
        let checked = operator(&json!({"enum": options})).check(value, 1);
        checked.unwrap_err().faults().remove(0)
    };
    let words = json!(["read", "write", "append", "edit", "list", "glob", 7]);
    let told = fault(&words, &json!("rename"));
    let list = r#""read", "write", "append", "edit", "list", "glob", 7"#;
    assert_eq!(told.message, format!("\"rename\" is not one of {list}"));
    assert_eq!(told.masked, format!("value is not one of {list}"));
    let long = fault(&words, &json!("x".repeat(300)));
    assert_eq!(long.message, told.masked);
    let many = fault(&(0..30).collect(), &json!("a"));
    assert!(many.message.contains("other candidates"), "{}", many.message);
}
