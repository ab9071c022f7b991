//! How a parameter that is a list is sent: its items joined, or each as a parameter of its own.

use serde_json::{Value, json};

/// How a parameter becomes text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// As it is; of a list in the query, each item.
    Plain,
    /// The items of a list with this between them.
    Joined(&'static str),
}

impl Style {
    /// A template over the argument of this expression; an empty list is left out.
    pub(super) fn template(self, argument: &str) -> String {
        match self {
            Self::Plain => format!("{{{{ {argument} }}}}"),
            Self::Joined(between) => {
                format!("{{{{ {argument} | join('{between}') if {argument} }}}}")
            }
        }
    }
}

/// How the description of an API wants a parameter.
///
/// # Errors
/// Why a list cannot be sent so.
pub(super) fn style(parameter: &Value, schema: &Value, place: &str) -> Result<Style, String> {
    let is_list = match schema.get("type") {
        Some(Value::Array(types)) => types.contains(&json!("array")),
        kind => kind == Some(&json!("array")),
    };
    let default = if place == "query" { "form" } else { "simple" };
    let style = parameter.get("style").and_then(Value::as_str).unwrap_or(default);
    if !is_list || place == "cookie" || parameter.get("content").is_some() {
        return Ok(Style::Plain);
    }
    let explode = parameter.get("explode").and_then(Value::as_bool).unwrap_or(style == "form");
    match (place, style) {
        ("query", "form" | "spaceDelimited" | "pipeDelimited") if explode => Ok(Style::Plain),
        ("query", "form") | ("path" | "header", "simple") => Ok(Style::Joined(",")),
        ("query", "spaceDelimited") => Ok(Style::Joined(" ")),
        ("query", "pipeDelimited") => Ok(Style::Joined("|")),
        _ => Err(format!("the style {} cannot be sent", crate::bounds::text::quoted(style))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_joined_as_the_description_says() {
        let list = json!({"type": ["array", "null"]});
        for (place, parameter, expected) in [
            ("query", json!({}), Ok(Style::Plain)),
            ("query", json!({"explode": false}), Ok(Style::Joined(","))),
            ("query", json!({"style": "form", "explode": true}), Ok(Style::Plain)),
            ("query", json!({"style": "spaceDelimited"}), Ok(Style::Joined(" "))),
            ("query", json!({"style": "pipeDelimited", "explode": true}), Ok(Style::Plain)),
            ("query", json!({"content": {"application/json": {}}}), Ok(Style::Plain)),
            (
                "query",
                json!({"style": "deepObject"}),
                Err("the style \"deepObject\" cannot be sent"),
            ),
            ("path", json!({}), Ok(Style::Joined(","))),
            ("path", json!({"style": "matrix"}), Err("the style \"matrix\" cannot be sent")),
            ("header", json!({"explode": true}), Ok(Style::Joined(","))),
            ("cookie", json!({"style": "form"}), Ok(Style::Plain)),
        ] {
            let found = style(&parameter, &list, place);
            assert_eq!(found, expected.map_err(str::to_owned), "{place} {parameter}");
            assert_eq!(style(&parameter, &json!({"type": "string"}), place), Ok(Style::Plain));
        }
        assert_eq!(Style::Plain.template("args.a"), "{{ args.a }}");
        assert_eq!(Style::Joined(",").template("args.a"), "{{ args.a | join(',') if args.a }}");
    }
}
