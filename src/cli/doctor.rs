//! `toolloop doctor`: checks the setup and what it depends on, with advice for each problem.
//!
//! Every check reports one line and changes nothing: it creates no database, migrates no schema and
//! starts no run. Only a failure sets the exit code to 1; a warning works but may surprise. Secrets
//! are never printed, only whether and where they are set.

mod database;
mod machine;
mod providers;

use std::process::ExitCode;
use std::time::Duration;

use serde::Serialize;
use serde_json::json;

use super::output::{print, print_json};
use crate::agents::{Agent, Catalogue, DefinitionProblem};
use crate::app;
use crate::config::{AuthMode, Config, ConfigError, Flags, McpConnection};
use crate::runtime::jwt::IdentityProvider;
use crate::runtime::keys;
use crate::store::AdminKeys;
use crate::tools::browser;
use crate::tools::mcp::ServerStatus;

/// Advice for a broken file of an agent or a skill.
const RELOADED: &str = "correct the file; it is reloaded within a second";
/// How long MCP servers have to be there.
const SERVERS: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
enum Health {
    Ok,
    /// Works, but may surprise.
    Warn,
    Fail,
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Finding {
    check: String,
    status: Health,
    detail: String,
    /// Advice.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

impl Finding {
    fn ok(check: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { check: check.into(), status: Health::Ok, detail: detail.into(), next: None }
    }

    fn warn(check: impl Into<String>, detail: impl Into<String>, next: impl Into<String>) -> Self {
        Self { status: Health::Warn, next: Some(next.into()), ..Self::ok(check, detail) }
    }

    fn fail(check: impl Into<String>, detail: impl Into<String>, next: impl Into<String>) -> Self {
        Self { status: Health::Fail, next: Some(next.into()), ..Self::ok(check, detail) }
    }
}

pub(super) async fn doctor(flags: &Flags, as_json: bool) -> anyhow::Result<ExitCode> {
    let findings = match Config::read(flags) {
        Ok(config) => examine(&config).await,
        Err(error @ ConfigError::Unreadable { .. }) if flags.config.is_some() => {
            return Err(error.into());
        }
        Err(error) => {
            vec![Finding::fail(
                "configuration",
                error.to_string(),
                "correct it; `toolloop schema config` prints the valid settings",
            )]
        }
    };
    let worst = findings.iter().map(|finding| finding.status).max().unwrap_or(Health::Ok);
    if as_json {
        print_json(&json!({"status": worst, "checks": findings}))?;
    } else {
        print(&text(&findings))?;
    }
    Ok(ExitCode::from(u8::from(worst == Health::Fail)))
}

async fn examine(config: &Config) -> Vec<Finding> {
    let agents = app::agents(config);
    let database = database::examine(config).await;
    let mut findings = vec![configuration(config)];
    let (admins, now) = (database.admins, database.now);
    findings.extend(database.findings);
    findings.push(machine::workspace(&config.tools.workspace.dir, database.workspace));
    match &agents {
        Ok(agents) => {
            findings.extend(definitions(config, agents));
            findings.extend(providers::examine(config, agents).await);
        }
        Err(error) => {
            findings.push(Finding::fail("models", error.to_string(), "correct the named section"));
        }
    }
    findings.push(machine::listen(config.server.listen).await);
    findings.extend(access(config, admins));
    findings.extend(identity_provider(config).await);
    findings.push(machine::open_files(config.runtime.max_concurrent_runs));
    findings.push(machine::clock(now));
    findings.extend(mcp_servers(config).await);
    findings.push(machine::sandbox(app::sandbox(config).kernel().await));
    let uses_browser = agents.as_ref().is_ok_and(|agents| {
        let tools = |agent: &Agent| agent.definition.tools.iter().any(|tool| tool == browser::NAME);
        agents.agents().iter().any(|agent| tools(agent))
    });
    findings.push(machine::browser(&config.tools.browser.path, uses_browser));
    findings
}

/// Whether the MCP servers can be asked: they are started for it, and ended.
async fn mcp_servers(config: &Config) -> Vec<Finding> {
    let servers = app::mcp_servers(config);
    servers.start(SERVERS).await;
    servers.statuses().into_iter().flat_map(|status| mcp_server(config, status)).collect()
}

fn mcp_server(config: &Config, status: ServerStatus) -> Vec<Finding> {
    let ServerStatus { name, tools, fault, last_words, warnings } = status;
    let check = format!("mcp {name}");
    let Some(fault) = fault else {
        let next = format!("correct [mcp.{name}], or the server");
        let odd = warnings.into_iter().map(|odd| Finding::warn(&check, odd, &next));
        return std::iter::once(Finding::ok(&check, format!("{tools} tools"))).chain(odd).collect();
    };
    let connection = config.mcp.get(&name).map(|server| &server.connection);
    let is_program = matches!(connection, Some(McpConnection::Program { .. }));
    let reads = if is_program {
        ", and list in its `reads` the files that the program needs in addition to those of the system"
    } else {
        ""
    };
    let next = format!(
        "correct [mcp.{name}]{reads}; until then calls of its tools are answered with an error"
    );
    let said = match last_words.as_slice() {
        [] => String::new(),
        lines => format!(" Its standard error ends with: {}", lines.join(" | ")),
    };
    vec![Finding::warn(check, format!("{fault}{said}"), next)]
}

fn configuration(config: &Config) -> Finding {
    let file = match &config.file {
        Some(file) => file.display().to_string(),
        None => "no file; built-in defaults".to_owned(),
    };
    let overrides = match config.overrides.as_slice() {
        [] => String::new(),
        names => format!("; overridden by {}", names.join(", ")),
    };
    Finding::ok("configuration", format!("{file}{overrides}"))
}

fn definitions(config: &Config, agents: &Catalogue) -> Vec<Finding> {
    let dir = config.agents_dir.display();
    let names: Vec<String> =
        agents.agents().iter().map(|agent| agent.definition.name.clone()).collect();
    let loaded = if names.is_empty() {
        Finding::warn(
            "agents",
            format!("none in {dir}"),
            format!("write {dir}/<name>.yaml; `toolloop schema agent` prints its schema"),
        )
    } else {
        Finding::ok("agents", format!("{} in {dir}: {}", names.len(), names.join(", ")))
    };
    let broken = agents.problems().into_iter().map(|DefinitionProblem { file, error }| {
        let (check, path, next) = match file.split_once('/') {
            Some(("skills", skill)) => ("skills", config.skills_dir.join(skill), RELOADED),
            Some(("tools", set)) => (
                "tools",
                config.tools_dir.join(set),
                "correct it, then restart the service: files of tools are read at its start",
            ),
            _ => ("agents", config.agents_dir.join(&file), RELOADED),
        };
        Finding::fail(check, format!("{}: {error}", path.display()), next)
    });
    let unplayable =
        app::missing_scenarios(&app::scenarios(config), agents).into_iter().map(|problem| {
            let detail = format!("{dir}/{}: {}", problem.file, problem.error);
            Finding::fail("agents", detail, "write the scenario, or name another model")
        });
    std::iter::once(loaded).chain(broken).chain(unplayable).collect()
}

/// The authentication mode, and whether an admin key exists.
fn access(config: &Config, admins: Option<AdminKeys>) -> Vec<Finding> {
    use secrecy::ExposeSecret as _;
    if config.auth.mode == AuthMode::None {
        let detail = "none: every local user is an administrator of the tenant default";
        return vec![Finding::warn(
            "authentication",
            detail,
            "set [auth] mode = \"api_key\" if other users have accounts on this machine",
        )];
    }
    let key = match (&config.admin_key, admins) {
        (Some(key), _) if keys::parse(key.expose_secret()).is_none() => {
            let detail = keys::KeyError::MalformedAdminKey.to_string();
            Finding::fail("administrator", detail, "set it to a token of this form, or to none")
        }
        (Some(_), _) => Finding::ok("administrator", "TOOLLOOP_ADMIN_KEY is set"),
        (None, Some(AdminKeys::Usable)) => {
            Finding::ok("administrator", "the database contains a key with admin")
        }
        (None, Some(AdminKeys::Unusable)) => Finding::warn(
            "administrator",
            "all keys with admin are revoked or expired",
            "`toolloop keys create --name admin --scope admin`, with access to the database",
        ),
        (None, Some(AdminKeys::Never)) => Finding::ok(
            "administrator",
            "no key with admin yet: the next start of `toolloop serve` creates one and prints it once",
        ),
        (None, None) => Finding::ok("administrator", "unknown: the database was not queried"),
    };
    let accepted = match &config.jwt {
        Some(jwt) => format!("API keys, and JWTs of {}", jwt.issuer),
        None => "API keys".to_owned(),
    };
    vec![Finding::ok("authentication", accepted), key]
}

/// Whether the keys of the identity provider can be read.
async fn identity_provider(config: &Config) -> Option<Finding> {
    let read = IdentityProvider::new(config.jwt.as_ref()?).keys().read().await;
    Some(match read {
        Ok(()) => Finding::ok("identity provider", "its keys can be read"),
        Err(error) => Finding::fail(
            "identity provider",
            error.to_string(),
            "correct [auth.jwt]; until its keys can be read, JWTs are answered 503",
        ),
    })
}

fn text(findings: &[Finding]) -> String {
    let width =
        findings.iter().map(|finding| finding.check.chars().count()).max().unwrap_or_default();
    let line = |finding: &Finding| {
        let status = match finding.status {
            Health::Ok => "ok  ",
            Health::Warn => "warn",
            Health::Fail => "FAIL",
        };
        let next = finding
            .next
            .as_ref()
            .map(|next| format!("\n      {:<width$}  → {next}", ""))
            .unwrap_or_default();
        format!("{status}  {:<width$}  {}{next}", finding.check, finding.detail)
    };
    findings.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_odd_about_a_servers_list_is_a_warning() {
        let config = Config::read(&Flags { config: None, ..Flags::default() }).unwrap();
        let status = ServerStatus {
            name: "x".into(),
            tools: 2,
            fault: None,
            last_words: vec!["fine".into()],
            warnings: vec!["effects names the tool \"gone\", which it does not have".into()],
        };
        let found = mcp_server(&config, status);
        let results: Vec<_> = found.iter().map(|it| (it.status, it.detail.as_str())).collect();
        let odd = "effects names the tool \"gone\", which it does not have";
        assert_eq!(results, [(Health::Ok, "2 tools"), (Health::Warn, odd)]);
    }

    #[test]
    fn findings_are_shown_with_their_advice() {
        let findings = [
            Finding::ok("configuration", "toolloop.toml; overridden by --listen"),
            Finding::warn("model openai", "OPENAI_API_KEY is not set", "export OPENAI_API_KEY=…"),
            Finding::fail(
                "listen",
                "127.0.0.1:80: permission denied",
                "choose another with --listen",
            ),
        ];
        insta::assert_snapshot!(text(&findings));
    }
}
