//! Writes entries as the text of a tools file: each key on a line of its own, its value as JSON, which is also
//! YAML.

use std::fmt::Write as _;

use serde_json::Value;

use super::file::{BodyFormat, Entry};
use super::openapi::Server;
use crate::run::Effect;

/// A file of these tools.
pub fn write(server: &Server, entries: &[Entry]) -> String {
    let base_url = match server {
        Server::Address(url) => format!("base_url: {}\n", Value::from(url.as_str())),
        Server::Path(path) => {
            format!("# base_url: https://…{path}   # the document names the path alone\n")
        }
        Server::Unknown => "# base_url: https://…   # the document names none\n".to_owned(),
    };
    let mut text =
        format!("{base_url}# headers: {{Authorization: \"Bearer {{{{ env.TOKEN }}}}\"}}\ntools:\n");
    for entry in entries {
        let mut line = |start: &str, key: &str, value: Value| {
            let _ = writeln!(text, "{start}{key}: {value}");
        };
        line("  - ", "name", entry.name.as_str().into());
        line("    ", "description", entry.description.as_str().into());
        line("    ", "method", entry.method.as_deref().into());
        line("    ", "path", entry.path.as_deref().into());
        if !entry.query.is_empty() {
            line("    ", "query", entry.query.clone().into_iter().collect());
        }
        if !entry.headers.is_empty() {
            line("    ", "headers", entry.headers.clone().into_iter().collect());
        }
        if let Some(body) = &entry.body {
            line("    ", "body", body.clone());
        }
        if entry.body_format == BodyFormat::Form {
            line("    ", "body_format", "form".into());
        }
        if entry.effect != Effect::Once {
            line("    ", "effect", entry.effect.as_str().into());
        }
        if entry.destructive {
            line("    ", "destructive", true.into());
        }
        line("    ", "input_schema", entry.input_schema.clone());
    }
    text
}
