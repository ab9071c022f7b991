//! Elicitation: the forms that a server asks to be filled in during a call.
//!
//! Pure. The sizes are bounded. Only the keywords of flat forms are kept of a form's schema, so that a
//! client needs to understand nothing else.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::bounds::pattern::Author;
use crate::bounds::schema::Schema;
use crate::bounds::text::{quoted, shortened};
use crate::event::InputRequest;

/// Forms of one question.
const MAX_FORMS: usize = 8;
/// Fields of one form.
const MAX_FIELDS: usize = 64;
/// Bytes of the name of a form.
const MAX_NAME: usize = 128;
/// Bytes of all forms of one question.
const MAX_FORMS_SIZE: usize = 32 * 1024;
/// Bytes of the state that is returned to the server.
const MAX_STATE: usize = 64 * 1024;
/// Keywords that a field may have, by its type.
const OF_ALL: [&str; 4] = ["type", "title", "description", "default"];
const OF_STRINGS: [&str; 6] = ["minLength", "maxLength", "format", "enum", "enumNames", "oneOf"];
const OF_NUMBERS: [&str; 2] = ["minimum", "maximum"];
const OF_CHOICES: [&str; 4] = ["minItems", "maxItems", "uniqueItems", "items"];

/// A question.
#[derive(Debug, PartialEq)]
pub(super) struct Elicitation {
    pub(super) forms: BTreeMap<String, InputRequest>,
    pub(super) state: Option<String>,
}

/// Parses a result that asks for input.
///
/// # Errors
/// Why it cannot be answered: a phrase.
pub(super) fn read(result: &Value) -> Result<Elicitation, String> {
    let state = match &result["requestState"] {
        Value::Null => None,
        Value::String(state) if state.len() > MAX_STATE => {
            return Err(format!("its `requestState` has more than {} KiB", MAX_STATE / 1024));
        }
        Value::String(state) if state.contains('\0') => {
            return Err("its `requestState` has NUL characters".to_owned());
        }
        Value::String(state) => Some(state.clone()),
        _ => return Err("its `requestState` is not a string".to_owned()),
    };
    let requests = match &result["inputRequests"] {
        Value::Null => &Map::new(),
        Value::Object(requests) => requests,
        _ => return Err("its `inputRequests` is not an object".to_owned()),
    };
    if requests.is_empty() && state.is_none() {
        return Err("it contains neither `inputRequests` nor `requestState`".to_owned());
    }
    if requests.len() > MAX_FORMS {
        return Err(format!("it asks for more than {MAX_FORMS} things at once"));
    }
    let mut forms = BTreeMap::new();
    let mut size = 0;
    for (name, request) in requests {
        if name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) {
            return Err(format!("it asks for something under the name {}", quoted(name)));
        }
        let form = form(request)?;
        size += name.len() + form.message.len() + form.requested_schema.to_string().len();
        forms.insert(name.clone(), form);
    }
    if size > MAX_FORMS_SIZE {
        return Err(format!("its questions have more than {} KiB", MAX_FORMS_SIZE / 1024));
    }
    Ok(Elicitation { forms, state })
}

fn form(request: &Value) -> Result<InputRequest, String> {
    let method = request["method"].as_str().unwrap_or_default();
    if method != "elicitation/create" {
        return Err(format!("it asks for {}, which is not offered here", quoted(method)));
    }
    let params = &request["params"];
    match &params["mode"] {
        Value::Null => {}
        Value::String(mode) if mode == "form" => {}
        mode => {
            let mode = mode.as_str().unwrap_or_default();
            return Err(format!("it asks in the mode {}, which is not offered here", quoted(mode)));
        }
    }
    let Some(message) = params["message"].as_str() else {
        return Err("its question has no message".to_owned());
    };
    let wrong = |why: String| format!("the schema of its form {why}");
    let requested_schema = schema(&params["requestedSchema"]).map_err(wrong)?;
    Ok(InputRequest { message: message.replace('\0', ""), requested_schema })
}

/// The schema of a form, with nothing but what forms have.
fn schema(requested: &Value) -> Result<Value, String> {
    let Value::Object(fields) = &requested["properties"] else {
        return Err("has no properties".to_owned());
    };
    if requested["type"] != "object" {
        return Err("is not an object schema".to_owned());
    }
    if fields.len() > MAX_FIELDS {
        return Err(format!("has more than {MAX_FIELDS} fields"));
    }
    let field = |(name, property): (&String, &Value)| {
        let field =
            field(property).map_err(|why| format!("has a field {} that {why}", quoted(name)));
        Ok((name.clone(), field?))
    };
    let properties = fields.iter().map(field).collect::<Result<Map<_, _>, String>>()?;
    let required = requested["required"].as_array().map(Vec::as_slice).unwrap_or_default();
    let is_field = |name: &&Value| name.as_str().is_some_and(|name| properties.contains_key(name));
    let required: Vec<&Value> = required.iter().filter(is_field).collect();
    let schema = json!({"type": "object", "properties": properties, "required": required});
    if schema.to_string().contains("\\u0000") {
        return Err("has NUL characters".to_owned());
    }
    if let Err(refused) = Schema::compile(&schema, Author::Caller) {
        return Err(format!("cannot be used: {}", shortened(&refused.to_string())));
    }
    Ok(schema)
}

fn field(property: &Value) -> Result<Value, String> {
    let own = match property["type"].as_str() {
        Some("string") => &OF_STRINGS[..],
        Some("number" | "integer") => &OF_NUMBERS,
        Some("boolean") => &[],
        Some("array") if choices(&property["items"]).is_some() => &OF_CHOICES,
        _ => return Err("is not a string, number, boolean or choice of strings".to_owned()),
    };
    let mut field = Map::new();
    for keyword in OF_ALL.iter().chain(own) {
        let value = match (*keyword, &property[*keyword]) {
            (_, Value::Null) => continue,
            ("items", items) => choices(items).unwrap_or_default(),
            ("oneOf", titled) => titles(titled).ok_or("has an invalid `oneOf`")?,
            (_, value) => value.clone(),
        };
        field.insert((*keyword).to_owned(), value);
    }
    Ok(Value::Object(field))
}

/// What may be chosen of a list.
fn choices(items: &Value) -> Option<Value> {
    if items["enum"].as_array().is_some_and(|all| all.iter().all(Value::is_string)) {
        return Some(json!({"type": "string", "enum": items["enum"]}));
    }
    Some(json!({"anyOf": titles(&items["anyOf"])?}))
}

/// Strings to choose from, with titles.
fn titles(choices: &Value) -> Option<Value> {
    let choice = |choice: &Value| {
        let value = choice["const"].as_str()?;
        let title = choice["title"].as_str().unwrap_or(value);
        Some(json!({"const": value, "title": title}))
    };
    choices.as_array()?.iter().map(choice).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asks(params: &Value) -> Value {
        json!({"resultType": "input_required", "requestState": "s",
            "inputRequests": {"who": {"method": "elicitation/create", "params": params}}})
    }

    fn with(property: &Value) -> Value {
        asks(
            &json!({"message": "m", "requestedSchema": {"type": "object", "required": ["a", "b", 7],
            "properties": {"a": property}}}),
        )
    }

    #[test]
    fn forms_keep_what_forms_are_made_of() {
        for (asked, kept) in [
            (
                json!({"type": "string", "format": "email", "$ref": "http://a/b"}),
                json!({"type": "string", "format": "email"}),
            ),
            (
                json!({"type": "integer", "minimum": 1, "pattern": "("}),
                json!({"type": "integer", "minimum": 1}),
            ),
            (
                json!({"type": "boolean", "default": true}),
                json!({"type": "boolean", "default": true}),
            ),
            (
                json!({"type": "string", "oneOf": [{"const": "r", "title": "Red", "x": 1}]}),
                json!({"type": "string", "oneOf": [{"const": "r", "title": "Red"}]}),
            ),
            (
                json!({"type": "array", "items": {"type": "string", "enum": ["r"], "allOf": []}, "maxItems": 1}),
                json!({"type": "array", "items": {"type": "string", "enum": ["r"]}, "maxItems": 1}),
            ),
        ] {
            let read = read(&with(&asked)).unwrap();
            assert_eq!(read.state.as_deref(), Some("s"));
            let form = &read.forms["who"];
            assert_eq!(form.requested_schema["properties"]["a"], kept, "{asked}");
            assert_eq!(form.requested_schema["required"], json!(["a"]));
        }
        let only_state = read(&json!({"requestState": "later"})).unwrap();
        assert_eq!((only_state.forms.len(), only_state.state.as_deref()), (0, Some("later")));
    }

    #[test]
    fn what_cannot_be_asked_is_refused() {
        let of = |method: &str| json!({"inputRequests": {"a": {"method": method, "params": {}}}});
        let form = json!({"type": "object", "properties": {}});
        for (asked, why) in [
            (json!({}), "neither `inputRequests` nor"),
            (json!({"inputRequests": 7}), "not an object"),
            (json!({"requestState": 7}), "not a string"),
            (json!({"requestState": "x".repeat(70_000)}), "64 KiB"),
            (of("sampling/createMessage"), "not offered"),
            (of("roots/list"), "not offered"),
            (asks(&json!({"mode": "url", "message": "m", "url": "https://a/"})), "mode \"url\""),
            (asks(&json!({"requestedSchema": form})), "no message"),
            (
                asks(&json!({"message": "m", "requestedSchema": {"type": "object"}})),
                "no properties",
            ),
            (asks(&json!({"message": "m".repeat(40_000), "requestedSchema": form})), "32 KiB"),
            (with(&json!({"type": "object", "properties": {}})), "field \"a\""),
            (with(&json!({"type": "array", "items": {"type": "object"}})), "field \"a\""),
            (with(&json!({"type": "string", "minLength": "x"})), "cannot be used"),
        ] {
            let refused = read(&asked).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
    }
}
