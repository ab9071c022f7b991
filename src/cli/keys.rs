//! `toolloop keys`: create, list and revoke API keys.
//!
//! With direct access to the database no key is needed and every tenant is accessible. Over the
//! network, the key given with `--key` determines the tenant and the scopes that can be granted.

use anyhow::bail;
use chrono::{DateTime, Utc};
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::client::{Client, TargetArgs};
use super::kinds::{KEY, NEW_KEY};
use super::output::{confirmed, print, print_json, print_notice};
use super::table::table;
use super::{JsonArg, UsageError, tenants};
use crate::config::Flags;
use crate::message::visible::escaped;
use crate::runtime::keys::{DEFAULT_TENANT, MAX_SCOPES, SCOPES, is_id, is_scope};

const CREATE_EXAMPLES: &str = "\
Scopes: admin, agents:invoke, agents:read, audit:read, files:read, files:write, keys:admin, memory:read,
        memory:write, runs:approve, runs:cancel, runs:read, sessions:read, sessions:write, tools:execute, tools:read, tools:<name>

Examples:
  toolloop keys create --name ci --scope agents:invoke --scope tools:execute --scope runs:read
  TOOLLOOP_KEY=$(toolloop keys create --name me --scope admin)";

#[derive(Debug, Subcommand)]
pub(super) enum KeysCommand {
    /// Create a key and print it; it is shown only once
    #[command(after_help = CREATE_EXAMPLES)]
    Create {
        /// Display name of the key
        #[arg(long)]
        name: String,
        /// A scope of the key; can be repeated, up to 64 times
        #[arg(long = "scope", value_name = "SCOPE", required = true)]
        scopes: Vec<String>,
        /// When the key expires: a time, e.g. 2030-01-01T00:00:00Z, or how long it lasts (12h, 90d);
        /// default: never
        #[arg(long, value_name = "TIME", value_parser = super::times::future)]
        expires_at: Option<DateTime<Utc>>,
        /// Invocations a minute, and tool calls a minute [default: that of the service]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        rate_limit_per_minute: Option<u32>,
        /// Burst: how many may come at once [default: that of the service]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        rate_limit_burst: Option<u32>,
        #[command(flatten)]
        access: AccessArgs,
    },
    /// List a tenant's keys, newest first
    List {
        #[command(flatten)]
        access: AccessArgs,
    },
    /// Revoke a key
    Revoke {
        /// The key's id: the part between tl_ and the secret
        id: String,
        /// Also revoke the keys that it created, the keys that those created, and so on
        #[arg(long)]
        descendants: bool,
        /// Also cancel the runs that the keys started
        #[arg(long)]
        cancel_runs: bool,
        /// Do not ask before the operator's own key or the last key with admin is revoked
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        access: AccessArgs,
    },
}

/// Which tenant, and which service.
#[derive(Debug, Args)]
pub(super) struct AccessArgs {
    /// The tenant [default: default, or with --server the tenant of the key]
    #[arg(long)]
    tenant: Option<String>,
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    output: JsonArg,
}

impl KeysCommand {
    fn access(&self) -> &AccessArgs {
        match self {
            Self::Create { access, .. } | Self::List { access } | Self::Revoke { access, .. } => {
                access
            }
        }
    }

    /// Checks the arguments before a request is made.
    fn check(&self) -> Result<(), UsageError> {
        let wrong = |message: String| Err(UsageError(message));
        tenants::check(self.access().tenant.as_deref())?;
        match self {
            Self::Create { expires_at: Some(end), .. } if *end <= Utc::now() => {
                wrong(format!("--expires-at: {end} is not in the future"))
            }
            Self::Create { scopes, .. } if scopes.len() > MAX_SCOPES => wrong(format!(
                "--scope: a key can have {MAX_SCOPES} scopes, and not {}",
                scopes.len()
            )),
            Self::Create { scopes, .. } => match scopes.iter().find(|scope| !is_scope(scope)) {
                Some(scope) => wrong(format!(
                    "--scope: {scope:?} is not a scope; use one of {} or tools:<name>",
                    SCOPES.join(", ")
                )),
                None => Ok(()),
            },
            Self::Revoke { id, .. } if !is_id(id) => wrong(format!(
                "{id:?} is not a key id, which is the part between tl_ and the secret"
            )),
            _ => Ok(()),
        }
    }
}

pub(super) async fn keys(flags: &Flags, command: KeysCommand) -> anyhow::Result<()> {
    command.check()?;
    let access = command.access();
    let tenant = access.tenant.as_deref().unwrap_or(DEFAULT_TENANT);
    let client = Client::open(&access.target, flags, tenant).await?;
    let done = carry_out(&client, &command).await;
    client.close().await;
    done
}

async fn carry_out(client: &Client, command: &KeysCommand) -> anyhow::Result<()> {
    let AccessArgs { tenant, output, .. } = command.access();
    match command {
        KeysCommand::Create {
            name,
            scopes,
            expires_at,
            rate_limit_per_minute,
            rate_limit_burst,
            ..
        } => {
            let mut request = json!({
                "name": name, "scopes": scopes, "expires_at": expires_at,
                "rate_limit_per_minute": rate_limit_per_minute, "rate_limit_burst": rate_limit_burst,
            });
            if let Some(tenant) = tenant {
                request["tenant"] = tenant.as_str().into();
            }
            let made = client.post("/keys", &request, &NEW_KEY).await?;
            if output.json {
                print_json(&made)?;
            } else {
                print(&escaped(made.get("key").and_then(Value::as_str).unwrap_or_default()))?;
                print_notice("This key is shown only once.");
                for warning in made["warnings"].as_array().into_iter().flatten() {
                    let warning = escaped(warning.as_str().unwrap_or_default());
                    print_notice(&format!("Warning: {warning}"));
                }
            }
        }
        KeysCommand::List { .. } => {
            let (keys, next_cursor) =
                client.list(&list_path(tenant.as_deref()), usize::MAX, &KEY).await?;
            if output.json {
                print_json(&json!({"data": keys, "next_cursor": next_cursor}))?;
            } else if keys.is_empty() {
                print_notice("There are no keys.");
            } else {
                print(&key_table(&keys, Utc::now()))?;
            }
        }
        KeysCommand::Revoke { id, descendants, cancel_runs, force, .. } => {
            let path = format!("/keys/{id}?descendants={descendants}&cancel_runs={cancel_runs}");
            revoke(client, id, &path, *force).await?;
            if !output.json {
                print(&format!("Key {id} is revoked."))?;
                return Ok(());
            }
            let keys = match client.list(&list_path(tenant.as_deref()), usize::MAX, &KEY).await {
                // A key that has revoked itself may not list keys.
                Err(error) if error.code() == Some("UNAUTHENTICATED") => Vec::new(),
                listed => listed?.0,
            };
            let key = keys.iter().find(|key| key.get("id").and_then(Value::as_str) == Some(id));
            print_json(key.unwrap_or(&json!({"id": id})))?;
        }
    }
    Ok(())
}

/// The path of the list of a tenant's keys; of the caller's tenant if none is named.
fn list_path(tenant: Option<&str>) -> String {
    tenant.map_or_else(|| "/keys?".to_owned(), |tenant| format!("/keys?tenant={tenant}"))
}

/// Revokes a key; asks for confirmation if it should not be revoked by accident.
async fn revoke(client: &Client, id: &str, path: &str, force: bool) -> anyhow::Result<()> {
    let forced = format!("{path}&force=true");
    match client.delete(if force { &forced } else { path }).await {
        Ok(()) => Ok(()),
        Err(error) if error.code() == Some("NOT_FOUND") => {
            let options = client.options();
            bail!("there is no key {id}\n  `toolloop keys list{options}` shows the existing keys")
        }
        Err(error) if error.code() == Some("PROTECTED_KEY") => {
            // The rest is for callers of the API.
            let message = error.to_string();
            print_notice(message.split("; use `force").next().unwrap_or_default());
            if !confirmed("Revoke it?")? {
                bail!("key {id} was not revoked\n  `--force` revokes it without a question");
            }
            Ok(client.delete(&forced).await?)
        }
        Err(error) => Err(error.into()),
    }
}

fn key_table(keys: &[Value], now: DateTime<Utc>) -> String {
    let text = |key: &Value, field: &str| {
        key.get(field).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let row = |key: &Value| {
        let expired = text(key, "expires_at").parse::<DateTime<Utc>>().is_ok_and(|end| end <= now);
        let state = if key.get("revoked_at").is_some_and(|at| !at.is_null()) {
            "revoked"
        } else if expired {
            "expired"
        } else {
            "active"
        };
        let second = |field: &str| {
            let time = text(key, field);
            time.get(..19).map(|seconds| format!("{seconds}Z")).unwrap_or(time)
        };
        let scopes = key.get("scopes").and_then(Value::as_array).into_iter().flatten();
        let scopes: Vec<&str> = scopes.filter_map(Value::as_str).collect();
        vec![
            text(key, "id"),
            text(key, "name"),
            text(key, "tenant"),
            second("created_at"),
            second("last_used_at"),
            state.to_owned(),
            scopes.join(" "),
        ]
    };
    let titles = ["ID", "NAME", "TENANT", "CREATED", "LAST USED", "STATE", "SCOPES"];
    table(&titles, &keys.iter().map(row).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_shown_as_a_table() {
        let now = "2026-01-02T00:00:00Z".parse().unwrap();
        let key = |id: &str, expires: Option<&str>, revoked: Option<&str>| {
            json!({"id": id, "name": "ci", "tenant": "acme", "created_at": "2026-01-01T00:00:00.123456Z", "expires_at": expires,
                "revoked_at": revoked, "last_used_at": revoked, "scopes": ["runs:read", "tools:file_ops"]})
        };
        let keys = [
            key("a1", Some("2026-02-01T00:00:00Z"), None),
            key("b2", Some("2026-01-02T00:00:00Z"), None),
            key("c3", None, Some("2026-01-01T08:00:00Z")),
        ];
        insta::assert_snapshot!(key_table(&keys, now));
    }
}
