//! The text that the service prints when it has started: addresses, and first steps.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde_json::{Map, Value, json};

use super::Parts;
use crate::agents::Agent;
use crate::config::{Config, Exposed};

/// Logs the address, and prints the banner. The first admin key is in no log.
pub(super) fn announce(address: SocketAddr, parts: &Parts, config: &Config, key: Option<&str>) {
    let agents = parts.catalogue.agents();
    let names: Vec<&str> = agents.iter().map(|agent| agent.definition.name.as_str()).collect();
    tracing::info!(%address, store = parts.store.kind(), agents = names.join(" "), "listening");
    let url = url(address);
    let mut text = addresses(&url, &config.server.expose);
    if let Some(key) = key {
        let _ = write!(
            text,
            "\nThis is the admin key. It is shown only once:\n\n    export TOOLLOOP_KEY={key}\n"
        );
    }
    // One that needs no key of a provider first.
    let agent = agents.iter().find(|agent| agent.definition.model.starts_with("scripted/"));
    match agent.or(agents.first()) {
        Some(agent) if key.is_some() => text.push_str(&request(&url, agent)),
        Some(_) => {}
        None if parts.catalogue.problems().is_empty() => {
            let _ = write!(
                text,
                "\nThere is no agent in {}. To make a first one, stop the service, then:\n\n    toolloop init\n    \
                 toolloop serve\n",
                config.agents_dir.display()
            );
        }
        None => text.push_str(
            "\nNo agent could be loaded. What is wrong with their files:\n\n    toolloop check\n",
        ),
    }
    if let Err(error) = writeln!(io::stdout(), "{text}") {
        let another = ": for another admin key, `toolloop keys create --name admin --scope admin`";
        let instead = key.map_or("", |_| another);
        tracing::warn!(%error, "standard output cannot be written to{instead}");
    }
}

fn addresses(url: &str, exposed: &[Exposed]) -> String {
    let mut text = format!("toolloop serves {url}\n");
    let mut line = |name: &str, where_it_is: &str| {
        let _ = writeln!(text, "    {name:<10}{where_it_is}");
    };
    if exposed.contains(&Exposed::Console) {
        line("console", &format!("{url}/console"));
    }
    if exposed.contains(&Exposed::Docs) {
        line("docs", &format!("{url}/docs"));
    }
    line("doctor", "toolloop doctor    checks the setup, with advice");
    text
}

/// An address that a browser on this machine can open.
fn url(address: SocketAddr) -> String {
    let host = match address.ip() {
        ip if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        ip => ip,
    };
    format!("http://{}", SocketAddr::new(host, address.port()))
}

fn request(url: &str, agent: &Agent) -> String {
    let definition = &agent.definition;
    let inputs = example(definition.inputs.as_ref().unwrap_or(&Value::Null));
    let body = json!({ "inputs": inputs }).to_string().replace('\'', r"'\''");
    format!(
        "\nThen, in another terminal:\n\n    curl -s {url}/v1/agents/{}/invoke-iterative \\\n      \
         -H \"Authorization: Bearer $TOOLLOOP_KEY\" -H 'Content-Type: application/json' \\\n      \
         -d '{body}'\n",
        definition.name
    )
}

/// Inputs that a person can change: what is required, or else the first that there is.
fn example(schema: &Value) -> Value {
    let mut inputs = Map::new();
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else {
        return inputs.into();
    };
    let required = schema.get("required").and_then(Value::as_array);
    let required: Vec<&str> = required.into_iter().flatten().filter_map(Value::as_str).collect();
    for (name, property) in properties {
        let is_first = required.is_empty() && inputs.is_empty();
        if required.contains(&name.as_str()) || is_first {
            inputs.insert(name.clone(), value(property));
        }
    }
    inputs.into()
}

fn value(property: &Value) -> Value {
    let given = [property.pointer("/examples/0"), property.get("default"), property.get("const")];
    let given = given.into_iter().chain([property.pointer("/enum/0")]).flatten().next();
    given.cloned().unwrap_or_else(|| match property.get("type").and_then(Value::as_str) {
        Some("integer" | "number") => json!(1),
        Some("boolean") => json!(true),
        Some("array") => json!([]),
        Some("object") => json!({}),
        _ => json!("…"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_example_has_what_is_required_or_else_one_input() {
        let schema = json!({
            "required": ["n", "word"],
            "properties": {"n": {"type": "integer"}, "word": {"examples": ["tide"]}, "more": {}},
        });
        assert_eq!(example(&schema), json!({"n": 1, "word": "tide"}));
        let optional = json!({"properties": {"path": {"default": "."}, "more": {}}});
        assert_eq!(example(&optional), json!({"path": "."}));
        assert_eq!(example(&Value::Null), json!({}));
        assert_eq!(example(&json!({"properties": 5, "required": "x"})), json!({}));
    }

    #[test]
    fn the_address_can_be_opened_on_this_machine() {
        assert_eq!(url("0.0.0.0:8080".parse().unwrap()), "http://127.0.0.1:8080");
        assert_eq!(url("[::]:80".parse().unwrap()), "http://127.0.0.1:80");
        assert_eq!(url("[::1]:80".parse().unwrap()), "http://[::1]:80");
    }

    #[test]
    fn only_what_is_served_is_named() {
        let all = addresses("http://h", &[Exposed::Console, Exposed::Docs]);
        assert!(all.contains("http://h/console") && all.contains("http://h/docs"), "{all}");
        let none = addresses("http://h", &[]);
        assert!(!none.contains("http://h/") && none.contains("toolloop doctor"), "{none}");
    }
}
