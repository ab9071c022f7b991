//! `--tenant`: which tenant a command is about.

use clap::Args;

use super::UsageError;
use super::client::{Client, TargetArgs};
use crate::config::Flags;
use crate::runtime::keys::{DEFAULT_TENANT, is_tenant};

/// Which tenant's records, and which service.
#[derive(Debug, Args)]
pub(super) struct TenantArgs {
    /// The tenant; not with --server, where the key determines it [default: default]
    #[arg(long)]
    tenant: Option<String>,
    #[command(flatten)]
    target: TargetArgs,
}

impl TenantArgs {
    /// Opens a database that exists as this tenant, or connects to a service.
    pub(super) async fn open_existing(&self, flags: &Flags) -> anyhow::Result<Client> {
        check(self.tenant.as_deref())?;
        if self.tenant.is_some() && self.target.server().is_some() {
            return Err(UsageError("--tenant: the key determines the tenant".to_owned()).into());
        }
        let tenant = self.tenant.as_deref().unwrap_or(DEFAULT_TENANT);
        Client::open_existing(&self.target, flags, tenant).await
    }
}

/// Checks that a tenant can have this name, where one is given.
pub(super) fn check(tenant: Option<&str>) -> Result<(), UsageError> {
    match tenant.filter(|tenant| !is_tenant(tenant)) {
        None => Ok(()),
        Some(tenant) => Err(UsageError(format!(
            "--tenant: {tenant:?} does not match ^[a-z0-9][a-z0-9_-]{{0,63}}$"
        ))),
    }
}
