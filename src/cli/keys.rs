//! `toolloop keys`: API keys, straight in the store. Who can reach the database needs no key.

use anyhow::{Context as _, bail};
use chrono::{DateTime, Utc};
use clap::Subcommand;
use serde_json::{Value, json};

use super::{JsonArg, UsageError};
use crate::app;
use crate::config::Config;
use crate::runtime::keys::{DEFAULT_TENANT, SCOPES, generate, is_scope, is_tenant};
use crate::store::{ApiKeyRecord, Page, RunCursor, Store};

#[derive(Debug, Subcommand)]
pub(super) enum KeysCommand {
    /// Make a key and show it, this once
    Create {
        /// For people
        #[arg(long)]
        name: String,
        /// The tenant that it acts for
        #[arg(long, default_value = DEFAULT_TENANT)]
        tenant: String,
        /// What it may do; may be repeated
        #[arg(long = "scope", value_name = "SCOPE", required = true)]
        scopes: Vec<String>,
        /// When it stops working, e.g. 2030-01-01T00:00:00Z
        #[arg(long, value_name = "TIME")]
        expires_at: Option<DateTime<Utc>>,
        #[command(flatten)]
        output: JsonArg,
    },
    /// List a tenant's keys, newest first
    List {
        /// Whose keys
        #[arg(long, default_value = DEFAULT_TENANT)]
        tenant: String,
        #[command(flatten)]
        output: JsonArg,
    },
    /// Revoke a key
    Revoke {
        /// The part between tl_ and the secret
        id: String,
        /// Whose key
        #[arg(long, default_value = DEFAULT_TENANT)]
        tenant: String,
        #[command(flatten)]
        output: JsonArg,
    },
}

pub(super) async fn keys(config: &Config, command: KeysCommand) -> anyhow::Result<()> {
    if let KeysCommand::Create { tenant, scopes, .. } = &command {
        if !is_tenant(tenant) {
            bail!(UsageError(format!("--tenant: {tenant:?} does not match ^[a-z0-9][a-z0-9_-]{{0,63}}$")));
        }
        if let Some(scope) = scopes.iter().find(|scope| !is_scope(scope)) {
            bail!(UsageError(format!(
                "--scope: there is no {scope:?}; there are {} and tools:<name>",
                SCOPES.join(", ")
            )));
        }
    }
    let store = app::open_store(config).await?;
    store.migrate().await?;
    match command {
        KeysCommand::Create { name, tenant, scopes, expires_at, output } => {
            let new = generate()?;
            let key = ApiKeyRecord {
                id: new.id,
                name,
                tenant,
                scopes,
                secret_hash: new.secret_hash,
                created_at: Utc::now(),
                expires_at,
                revoked_at: None,
                rate_limit_per_minute: None,
                rate_limit_burst: None,
            };
            if !store.insert_key(&key).await? {
                bail!("the key's id is taken; try again");
            }
            if output.json {
                let mut shown = as_json(&key);
                shown["key"] = new.token.into();
                println!("{shown}");
            } else {
                println!("{}", new.token);
                eprintln!("This is the only time that the key is shown.");
            }
        }
        KeysCommand::List { tenant, output } => {
            let keys = all_keys(store.as_ref(), &tenant).await?;
            if output.json {
                println!("{}", json!({ "data": keys.iter().map(as_json).collect::<Vec<_>>(), "next_cursor": null }));
            } else {
                print_table(&keys);
            }
        }
        KeysCommand::Revoke { id, tenant, output } => {
            if !store.revoke_key(&tenant, &id).await? {
                bail!("tenant {tenant} has no key {id}");
            }
            let key = store.key(&id).await?.context("the key is gone")?;
            if output.json {
                println!("{}", as_json(&key));
            } else {
                println!("Key {id} ({}) is revoked.", key.name);
            }
        }
    }
    store.close().await;
    Ok(())
}

async fn all_keys(store: &dyn Store, tenant: &str) -> anyhow::Result<Vec<ApiKeyRecord>> {
    const PAGE: u32 = 200;
    let mut keys: Vec<ApiKeyRecord> = Vec::new();
    loop {
        let after = keys.last().map(|key| RunCursor { at: key.created_at, id: key.id.clone() });
        let page = store.keys(tenant, &Page { limit: PAGE, after }).await?;
        let is_last = page.len() < PAGE as usize;
        keys.extend(page);
        if is_last {
            return Ok(keys);
        }
    }
}

fn as_json(key: &ApiKeyRecord) -> Value {
    json!({
        "id": key.id,
        "name": key.name,
        "tenant": key.tenant,
        "scopes": key.scopes,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "rate_limit_per_minute": key.rate_limit_per_minute,
        "rate_limit_burst": key.rate_limit_burst,
    })
}

fn print_table(keys: &[ApiKeyRecord]) {
    println!("{:<18} {:<24} {:<20} {:<10} SCOPES", "ID", "NAME", "CREATED", "STATE");
    for key in keys {
        let state = match (key.revoked_at, key.expires_at) {
            (Some(_), _) => "revoked",
            (None, Some(end)) if end <= Utc::now() => "expired",
            _ => "active",
        };
        let created = key.created_at.format("%Y-%m-%dT%H:%M:%SZ");
        println!("{:<18} {:<24} {created:<20} {state:<10} {}", key.id, key.name, key.scopes.join(" "));
    }
}
