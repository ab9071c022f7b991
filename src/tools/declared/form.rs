//! A body that is sent as a form: a flat object, whose members are scalars or lists of scalars.

use serde_json::{Map, Value};
use url::form_urlencoded::Serializer;

use super::Wrong;

/// The media type of a form.
pub(super) const TYPE: &str = "application/x-www-form-urlencoded";

/// Checks the declared body of a form. `is_expression` says whether a text is a single `{{ … }}`.
pub(super) fn check(
    body: Option<&Value>,
    is_expression: impl Fn(&str) -> bool,
) -> Result<(), Wrong> {
    match body {
        None => Err(Wrong::at("body_format", "has no meaning without `body`")),
        Some(Value::String(template)) if is_expression(template) => Ok(()),
        Some(Value::Object(members)) => match members.iter().find(|(_, value)| is_nested(value)) {
            None => Ok(()),
            Some((name, _)) => {
                let message = "a form holds no objects; use `body_format: json` if the service takes \
                    JSON, or write their members side by side";
                Err(Wrong::at(format!("body.{name}"), message))
            }
        },
        Some(_) => {
            let message = "with `body_format: form` must be an object or one expression that \
                makes one, e.g. \"{{ args.body }}\"";
            Err(Wrong::at("body", message))
        }
    }
}

/// The text of a form. A member that is null is left out, a list is its name with each of its items.
pub(super) fn encoded(form: &Value) -> Result<String, String> {
    let members: &Map<String, Value> =
        form.as_object().ok_or("The body is sent as a form and must be an object.")?;
    let mut text = Serializer::new(String::new());
    for (name, value) in members {
        if is_nested(value) {
            return Err(format!(
                "The body is sent as a form: {name} must be a text, a number, a boolean or a list of these."
            ));
        }
        match value {
            Value::Null => {}
            Value::Array(items) => {
                text.extend_pairs(items.iter().map(|item| (name, text_of(item))));
            }
            value => {
                text.append_pair(name, &text_of(value));
            }
        }
    }
    Ok(text.finish())
}

/// A value as it stands in a form, a query or a header.
pub(super) fn text_of(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Whether a value is more than a scalar or a list of scalars.
fn is_nested(value: &Value) -> bool {
    let is_scalar = |value: &Value| !value.is_object() && !value.is_array();
    match value {
        Value::Array(items) => !items.iter().all(is_scalar),
        value => !is_scalar(value),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn flat_objects_are_encoded() {
        let form =
            json!({"To": "+1 & 2=ü", "n": 7, "on": true, "none": null, "t": ["a b", 2], "e": []});
        assert_eq!(encoded(&form).unwrap(), "To=%2B1+%26+2%3D%C3%BC&n=7&on=true&t=a+b&t=2");
        assert_eq!(encoded(&json!({})).unwrap(), "");
        for (wrong, name) in [
            (json!({"a": {"b": 1}}), "a must be"),
            (json!({"a": [[1]]}), "a must be"),
            (json!({"a": [{}]}), "a must be"),
            (json!("a=b"), "must be an object"),
        ] {
            assert!(encoded(&wrong).unwrap_err().contains(name), "{wrong}");
        }
    }
}
