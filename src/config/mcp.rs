//! `[mcp.<name>]`: servers of the Model Context Protocol, whose tools agents can use.
//!
//! A server is a program that the service starts, or an address that it asks. What its tools do is
//! declared by the operator; its own description of its tools is not trusted.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use schemars::JsonSchema;
use secrecy::SecretString;
use serde::Deserialize;
use url::Url;

use super::sources::{ConfigError, Sources};
use crate::bounds::Refused;
use crate::bounds::address::{self, HostPattern, Network};

/// Servers.
const MAX_SERVERS: usize = 64;
/// Words of a command, and bytes of all of them.
const MAX_WORDS: usize = 64;
const MAX_COMMAND: usize = 8 * 1024;
/// Names and paths of one list, and declared effects.
const MAX_LISTED: usize = 64;
const MAX_EFFECTS: usize = 256;
/// The beginning of the variables by which the service itself is configured.
const OWN: &str = "TOOLLOOP_";

/// `[mcp.<name>]`
#[derive(Debug, Clone)]
pub struct McpServer {
    pub connection: McpConnection,
    /// By the server's own names of its tools.
    pub effects: BTreeMap<String, McpEffect>,
}

/// How a server is reached.
#[derive(Debug, Clone)]
pub enum McpConnection {
    /// A program that is spoken to through its standard input and output.
    Program {
        command: String,
        args: Vec<String>,
        /// Names of variables that it sees.
        env: Vec<String>,
        /// Where it starts, and what it may write.
        cwd: Option<PathBuf>,
        /// What it may read and execute in addition to the system's files.
        reads: Vec<PathBuf>,
        network: McpNetwork,
    },
    /// Streamable HTTP.
    Address {
        url: Url,
        /// `None` if none is configured or the variable is unset.
        api_key: Option<SecretString>,
        /// The environment variable with the key.
        api_key_env: Option<String>,
    },
}

/// What a program may ask of the network.
#[derive(Debug, Clone, Default)]
pub struct McpNetwork {
    pub written: Vec<String>,
    pub listed: Vec<HostPattern>,
    /// Networks that may be connected to although they are not public.
    pub private: Vec<Network>,
}

/// What a tool of a server does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum McpEffect {
    /// It only reads.
    Read,
    /// It may be repeated with the same outcome.
    Idempotent,
    /// It must not be repeated.
    Once,
    /// It must not be repeated, and can lose what exists.
    Destructive,
}

/// `[mcp.<name>]`: a program (`command`) or an address (`url`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct McpSettings {
    /// The program: a name that is looked for in `tools.shell.path`, or a path.
    command: Option<String>,
    /// Its arguments.
    #[serde(default)]
    #[schemars(length(max = 63))]
    args: Vec<String>,
    /// Names of variables of the service that it sees, beside PATH, HOME, LANG and TMPDIR.
    #[serde(default)]
    #[schemars(inner(regex(pattern = "^[A-Za-z_][A-Za-z0-9_]*$")), length(max = 64))]
    env: Vec<String>,
    /// Its directory, which it may write; default: one of its own beneath the workspace's.
    cwd: Option<PathBuf>,
    /// Further files and directories that it may read and execute, e.g. where it is installed.
    #[serde(default)]
    #[schemars(length(max = 64))]
    reads: Vec<PathBuf>,
    /// Hosts that it may ask by http and https through the service's proxy: `host`, `*.host`, `host:port`; default: none.
    #[serde(default)]
    #[schemars(length(max = 64))]
    network: Vec<String>,
    /// Networks (CIDR) that these hosts may be in although they are not public.
    #[serde(default)]
    #[schemars(length(max = 64))]
    allow_private: Vec<String>,
    /// The address of a server that speaks streamable HTTP.
    #[schemars(regex(pattern = "^https?://[^?#@]+$"))]
    url: Option<String>,
    /// The environment variable with its key, which is sent as a bearer token.
    api_key_env: Option<String>,
    /// The effects of its tools, by name; tools that are not listed count as destructive.
    #[serde(default)]
    effects: BTreeMap<String, McpEffect>,
}

impl McpSettings {
    /// The environment variable with the key.
    pub(super) fn variable(&self) -> Option<&str> {
        self.api_key_env.as_deref()
    }
}

pub(super) fn resolve(
    settings: &BTreeMap<String, McpSettings>,
    sources: &Sources,
    env: &HashMap<String, String>,
) -> Result<BTreeMap<String, McpServer>, ConfigError> {
    if settings.len() > MAX_SERVERS {
        return Err(sources.error("mcp", format!("has more than {MAX_SERVERS} servers")));
    }
    let resolved = settings.iter().map(|(name, written)| {
        let server = of_name(name, written, sources, env)?;
        Ok((name.clone(), server))
    });
    resolved.collect()
}

fn of_name(
    name: &str,
    written: &McpSettings,
    sources: &Sources,
    env: &HashMap<String, String>,
) -> Result<McpServer, ConfigError> {
    let wrong = |key: &str, why: &str| {
        let key = if key.is_empty() { format!("mcp.{name}") } else { format!("mcp.{name}.{key}") };
        Err(sources.error(&key, why))
    };
    let is_name = name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.len() <= 64
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
    if !is_name {
        return wrong("", "a server's name does not match ^[a-z][a-z0-9-]{0,63}$");
    }
    if written.effects.len() > MAX_EFFECTS {
        return wrong("effects", "has more than 256 tools");
    }
    let has_program_settings = [
        ("args", written.args.is_empty()),
        ("env", written.env.is_empty()),
        ("cwd", written.cwd.is_none()),
        ("reads", written.reads.is_empty()),
        ("network", written.network.is_empty()),
        ("allow_private", written.allow_private.is_empty()),
    ];
    let connection = match (&written.command, &written.url) {
        (Some(_), Some(_)) => return wrong("url", "must not be set together with command"),
        (None, None) => return wrong("", "needs command (a program) or url (an address)"),
        (Some(command), None) => {
            if written.api_key_env.is_some() {
                return wrong("api_key_env", "must not be set together with command; use env");
            }
            program(name, command, written, sources)?
        }
        (None, Some(url)) => {
            if let Some((key, _)) = has_program_settings.iter().find(|(_, is_unset)| !is_unset) {
                return wrong(key, "must not be set together with url");
            }
            let url = match address::read(url) {
                Ok(url) if url.query().is_none() => url,
                Ok(_) => return wrong("url", "must not have a query"),
                Err(why) => return wrong("url", &why.to_string()),
            };
            let api_key = written.api_key_env.as_ref().and_then(|variable| env.get(variable));
            if api_key.is_some_and(|key| http::HeaderValue::try_from(key.as_str()).is_err()) {
                return wrong("api_key_env", "its variable must hold one line of text");
            }
            McpConnection::Address {
                url,
                api_key: api_key.map(|key| key.as_str().into()),
                api_key_env: written.api_key_env.clone(),
            }
        }
    };
    Ok(McpServer { connection, effects: written.effects.clone() })
}

fn program(
    name: &str,
    command: &str,
    McpSettings { args, env, cwd, reads, network, allow_private, .. }: &McpSettings,
    sources: &Sources,
) -> Result<McpConnection, ConfigError> {
    let wrong = |key: &str, why: String| Err(sources.error(&format!("mcp.{name}.{key}"), why));
    let size: usize = args.iter().map(String::len).sum::<usize>() + command.len();
    if args.len() >= MAX_WORDS || size > MAX_COMMAND {
        return wrong("args", format!("has more than {MAX_WORDS} words or {MAX_COMMAND} bytes"));
    }
    let has_zero = |text: &String| text.contains('\0');
    if command.is_empty() || command.contains('\0') || args.iter().any(has_zero) {
        return wrong("command", "is not the name or the path of a program".to_owned());
    }
    let is_variable = |name: &String| {
        name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    if env.len() > MAX_LISTED || reads.len() > MAX_LISTED {
        return wrong("env", format!("it or reads has more than {MAX_LISTED} entries"));
    }
    if let Some(odd) = env.iter().find(|name| !is_variable(name)) {
        let why = format!(
            "{odd:?} is not the name of an environment variable; values are not written here"
        );
        return wrong("env", why);
    }
    if let Some(own) = env.iter().find(|name| name.starts_with(OWN)) {
        return wrong("env", format!("{own} is the service's own; no program sees it"));
    }
    if network.len() > MAX_LISTED || allow_private.len() > MAX_LISTED {
        let why = format!("it or allow_private has more than {MAX_LISTED} entries");
        return wrong("network", why);
    }
    let wrong_entry = |setting: &str, entry: &str, refused: Refused| {
        sources.error(&format!("mcp.{name}.{setting}"), format!("{entry:?}: {refused}"))
    };
    let listed = network
        .iter()
        .map(|host| host.parse().map_err(|refused| wrong_entry("network", host, refused)))
        .collect::<Result<Vec<HostPattern>, _>>()?;
    let private = allow_private
        .iter()
        .map(|cidr| cidr.parse().map_err(|refused| wrong_entry("allow_private", cidr, refused)))
        .collect::<Result<Vec<Network>, _>>()?;
    let key = |setting: &str| format!("mcp.{name}.{setting}");
    let resolved = |setting: &str, path: &PathBuf| {
        let path = sources.resolve(&key(setting), path);
        std::path::absolute(&path).unwrap_or(path)
    };
    if let Some(odd) = reads.iter().find(|path| path.as_os_str() == "/") {
        return wrong("reads", format!("{} is everything", odd.display()));
    }
    let command = if command.contains('/') {
        resolved("command", &PathBuf::from(command)).display().to_string()
    } else {
        command.to_owned()
    };
    Ok(McpConnection::Program {
        command,
        args: args.clone(),
        env: env.clone(),
        cwd: cwd.as_ref().map(|cwd| resolved("cwd", cwd)),
        reads: reads.iter().map(|path| resolved("reads", path)).collect(),
        network: McpNetwork { written: network.clone(), listed, private },
    })
}
