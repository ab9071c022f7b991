//! The tools that a caller brings with its request and executes itself.
//!
//! They are offered to the model, and their calls are judged, like those of other tools; only the execution
//! is left to the caller. This file has no I/O.

use crate::message::tool_schema::ToolSchema;
use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use crate::bounds::schema::{self, Schema};
use crate::bounds::text::quoted;
use crate::event::ValidationError;
use crate::providers::ToolOffer;
use crate::run::ClientTool;
use crate::tools::arguments::{self, arguments_of};

/// Tools of one request.
const MOST: usize = 128;
/// Bytes of their schemas together, as JSON.
const MAX_SCHEMAS: usize = 64 * 1024;

/// The tools of one caller, compiled.
#[derive(Debug, Default)]
pub struct ClientTools(BTreeMap<String, Compiled>);

#[derive(Debug)]
struct Compiled {
    tool: ClientTool,
    arguments: Arc<Schema>,
}

impl ClientTools {
    /// Compiles tools. `taken` are the names of other tools.
    ///
    /// # Errors
    /// What is wrong, with a pointer into the request.
    pub fn new(
        wanted: &[ClientTool],
        taken: impl Fn(&str) -> bool,
    ) -> Result<Self, ValidationError> {
        let mut tools = BTreeMap::new();
        if wanted.len() > MOST {
            return Err(wrong("/client_tools".into(), format!("must have at most {MOST} entries")));
        }
        check_together(wanted)?;
        for (index, tool) in wanted.iter().enumerate() {
            let ClientTool { name, input_schema, .. } = tool;
            let at = |field: &str| format!("/client_tools/{index}/{field}");
            if !Self::is_name(name) {
                return Err(wrong(
                    at("name"),
                    format!("{} does not match ^[A-Za-z0-9_-]{{1,64}}$", quoted(name)),
                ));
            }
            if taken(name) || tools.contains_key(name) {
                return Err(wrong(at("name"), format!("{name:?} is the name of another tool")));
            }
            if input_schema.get("type").and_then(Value::as_str) != Some("object") {
                return Err(wrong(at("input_schema"), "must have `type: object`".into()));
            }
            let schema = Schema::of_caller(input_schema);
            let schema = schema.map_err(|refused| wrong(at("input_schema"), refused.0))?;
            tools.insert(name.clone(), Compiled { tool: tool.clone(), arguments: schema });
        }
        Ok(Self(tools))
    }

    /// Whether such a tool may have this name.
    pub fn is_name(name: &str) -> bool {
        let is_part = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
        (1..=64).contains(&name.len()) && name.bytes().all(is_part)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Their names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// What the arguments of that tool must match, if it is one of these.
    pub fn schema(&self, tool: &str) -> Option<&Schema> {
        self.0.get(tool).map(|compiled| compiled.arguments.as_ref())
    }

    /// What is wrong with arguments, with JSON pointers into them; nothing where the tool is none
    /// of these.
    pub fn errors(&self, tool: &str, arguments: &Value) -> Option<Vec<ValidationError>> {
        self.0.get(tool).map(|compiled| arguments::errors(&compiled.arguments, arguments))
    }

    /// The tool and the arguments of a call, or what is wrong with them; nothing where the tool is
    /// none of these.
    pub fn called(&self, tool: &str, text: &str) -> Option<Result<(&ClientTool, Value), String>> {
        let Compiled { tool, arguments } = self.0.get(tool)?;
        Some(arguments_of(text, arguments).map(|arguments| (tool, arguments)))
    }

    /// The tool of that name, if it is one of these.
    pub fn tool(&self, name: &str) -> Option<&ClientTool> {
        self.0.get(name).map(|compiled| &compiled.tool)
    }
}

/// Checks the limits of the schemas of all tools together.
fn check_together(wanted: &[ClientTool]) -> Result<(), ValidationError> {
    let bytes: usize = wanted.iter().map(|tool| tool.input_schema.to_string().len()).sum();
    if bytes > MAX_SCHEMAS {
        let message = format!("has schemas of {bytes} bytes, more than {MAX_SCHEMAS}");
        return Err(wrong("/client_tools".into(), message));
    }
    let patterns: usize = wanted.iter().map(|tool| schema::patterns(&tool.input_schema)).sum();
    if patterns > schema::MAX_CALLER_PATTERNS {
        let most = schema::MAX_CALLER_PATTERNS;
        let message = format!("has schemas with {patterns} patterns, more than {most}");
        return Err(wrong("/client_tools".into(), message));
    }
    Ok(())
}

/// The declaration of a caller's tool for the model.
pub fn offer(tool: &ClientTool) -> ToolOffer {
    ToolOffer {
        name: tool.name.clone(),
        description: tool.description.clone(),
        input_schema: ToolSchema::from(tool.input_schema.clone()),
    }
}

fn wrong(pointer: String, message: String) -> ValidationError {
    ValidationError { pointer, message }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn tool(name: &str, input_schema: Value) -> ClientTool {
        ClientTool {
            name: name.into(),
            description: String::new(),
            input_schema,
            effect: None,
            destructive: false,
        }
    }

    #[test]
    fn invalid_tools_are_refused_with_a_pointer() {
        let object = || json!({"type": "object"});
        let table = [
            (vec![tool("", object())], "/client_tools/0/name"),
            (vec![tool("a b", object())], "/client_tools/0/name"),
            (vec![tool(&"n".repeat(65), object())], "/client_tools/0/name"),
            (vec![tool("shell", object())], "/client_tools/0/name"),
            (vec![tool("ask", object()), tool("ask", object())], "/client_tools/1/name"),
            (vec![tool("ask", json!({"type": "string"}))], "/client_tools/0/input_schema"),
            (vec![tool("ask", json!(true))], "/client_tools/0/input_schema"),
            (
                vec![tool("ask", json!({"type": "object", "required": 1}))],
                "/client_tools/0/input_schema",
            ),
            (
                vec![tool("ask", json!({"type": "object", "$ref": "http://a.b/c"}))],
                "/client_tools/0/input_schema",
            ),
            ((0..129).map(|n| tool(&format!("t{n}"), object())).collect(), "/client_tools"),
        ];
        for (tools, pointer) in table {
            let refused = ClientTools::new(&tools, |name| name == "shell").unwrap_err();
            assert_eq!(refused.pointer, pointer, "{refused:?}");
        }
    }

    #[test]
    fn arguments_are_checked_before_anybody_waits() {
        let schema = json!({"type": "object", "required": ["question"]});
        let tools = ClientTools::new(&[tool("ask_user-1", schema)], |_| false).unwrap();
        assert_eq!(tools.names().collect::<Vec<_>>(), ["ask_user-1"]);
        assert_eq!(tools.called("other", "{}"), None);
        let asked = tools.called("ask_user-1", r#"{"question": "why?"}"#).unwrap().unwrap();
        assert_eq!(asked.1, json!({"question": "why?"}));
        for wrong in ["", "{", "[]", r#"{"answer": 1}"#] {
            assert!(matches!(tools.called("ask_user-1", wrong), Some(Err(_))), "{wrong}");
        }
    }
}
