//! Checks the database: whether it is reachable, its schema version, and which process locks it.
//!
//! A missing SQLite file is not created; one that a service has locked is not opened.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};

use super::Finding;
use super::machine::refuses_writing;
use crate::app::{self, AppError};
use crate::config::{Config, WorkspaceStore};
use crate::runtime::{object_store_fault, shared_volume_fault};
use crate::store::{AdminKeys, DatabaseInfo, Store, StoreError};

const TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct Database {
    pub(super) findings: Vec<Finding>,
    /// Whether it has keys with `admin`; `None` if it could not be queried.
    pub(super) admins: Option<AdminKeys>,
    /// The server's clock and the local time at which it was read; `None` for SQLite.
    pub(super) now: Option<(DateTime<Utc>, DateTime<Utc>)>,
    /// What the database says about the workspace.
    pub(super) workspace: Option<Finding>,
}

/// What a database that was asked says.
struct Answer {
    store: Arc<Store>,
    about: DatabaseInfo,
    admins: Option<AdminKeys>,
}

pub(super) async fn examine(config: &Config) -> Database {
    let only =
        |finding| Database { findings: vec![finding], admins: None, now: None, workspace: None };
    let file = config.database.file();
    let place = match &file {
        Some(file) => file.display().to_string(),
        None => "PostgreSQL".to_owned(),
    };
    if let Some(file) = file.as_deref() {
        if let Some(finding) = not_usable(file) {
            return only(finding);
        }
        if !file.exists() {
            let detail = format!("{place} does not exist yet; it is created at the first start");
            return Database {
                admins: Some(AdminKeys::Never),
                ..only(Finding::ok("database", detail))
            };
        }
    }
    match tokio::time::timeout(TIMEOUT, ask(config)).await {
        Ok(Ok(Answer { store, about, admins })) => {
            let now = about.now.map(|now| (now, Utc::now()));
            let workspace = on_workspace(&store, config, &about).await;
            store.close().await;
            Database {
                findings: vec![
                    Finding::ok("database", about_database(&place, file.is_some(), &about.version)),
                    schema(&about),
                ],
                admins,
                now,
                workspace,
            }
        }
        Ok(Err(AppError::Store(StoreError::Locked(_)))) => {
            only(Finding::ok("database", in_use(&place, file.as_deref())))
        }
        Ok(Err(error)) => only(Finding::fail(
            "database",
            error.to_string(),
            "is it running, and is database.url right?",
        )),
        Err(_) => {
            let detail = format!("{place} does not answer within {TIMEOUT:?}");
            only(Finding::fail("database", detail, "is it running, and is database.url right?"))
        }
    }
}

async fn ask(config: &Config) -> Result<Answer, AppError> {
    let store = app::open_store(config).await?;
    let asked = async {
        let about = store.about().await?;
        let admins = match about.applied {
            0 => Some(AdminKeys::Never),
            _ if about.is_too_far_ahead() => None,
            _ => Some(store.admin_keys().await?),
        };
        Ok::<_, AppError>((about, admins))
    };
    let asked = asked.await;
    match asked {
        Ok((about, admins)) => Ok(Answer { store, about, admins }),
        Err(error) => {
            store.close().await;
            Err(error)
        }
    }
}

/// Whether other replicas find the files of this one. That something else than the database is silent
/// is not said of the database.
async fn on_workspace(store: &Store, config: &Config, about: &DatabaseInfo) -> Option<Finding> {
    let is_usable = about.applied >= about.known && !about.is_too_far_ahead();
    if !is_usable {
        return None;
    }
    let patience = 2 * TIMEOUT;
    let why = match tokio::time::timeout(patience, shared_files(store, config)).await {
        Ok(Ok(finding)) => return finding,
        Ok(Err(error)) => error.to_string(),
        Err(_) => {
            format!("it is not known within {patience:?} whether other replicas find the files")
        }
    };
    let next = "are the database and the store of [tools.workspace] available?";
    Some(Finding::fail("workspace", why, next))
}

async fn shared_files(store: &Store, config: &Config) -> Result<Option<Finding>, StoreError> {
    let workspace = &config.tools.workspace;
    match workspace.store {
        WorkspaceStore::Shared => {
            let fault = shared_volume_fault(store, &workspace.dir).await?;
            Ok(fault.map(|fault| {
                let detail = format!("{}: {fault}", workspace.dir.display());
                let next =
                    "mount the volume there; where it is a copy of it, write the id into the file";
                Finding::fail("workspace", detail, next)
            }))
        }
        WorkspaceStore::Object => {
            let Some(place) = &config.objects else { return Ok(None) };
            let next = "make it reachable with the credentials of [tools.workspace.object]";
            let objects = match crate::app::objects(place) {
                Ok(objects) => objects,
                Err(error) => return Ok(Some(Finding::fail("workspace", error.to_string(), next))),
            };
            Ok(object_store_fault(store, &objects)
                .await?
                .map(|fault| Finding::fail("workspace", fault, next)))
        }
        WorkspaceStore::Local if store.kind() == "postgres" => {
            let living = store.living_replicas().await?;
            Ok((living > 1).then(|| {
                let detail = format!(
                    "{}: {living} replicas are alive, and each has files of its own",
                    workspace.dir.display()
                );
                let next =
                    "mount one volume on all of them and set [tools.workspace] store = \"shared\", or keep them in an object store";
                Finding::warn("workspace", detail, next)
            }))
        }
        WorkspaceStore::Local => Ok(None),
    }
}

fn about_database(place: &str, is_file: bool, version: &str) -> String {
    if is_file { format!("{place}, {version}") } else { version.to_owned() }
}

fn schema(about: &DatabaseInfo) -> Finding {
    let DatabaseInfo { applied, known, .. } = about;
    match applied {
        0 => Finding::ok("schema", "not created yet; it is created at the first start"),
        _ if applied == known => Finding::ok("schema", format!("version {applied}")),
        _ if applied < known => {
            let detail = format!("version {applied}, current is {known}");
            Finding::warn("schema", detail, "`toolloop migrate`, or the next start, migrates it")
        }
        _ => {
            let detail = format!("version {applied} is of a newer program; this one knows {known}");
            if about.is_too_far_ahead() {
                Finding::fail("schema", detail, "use the newer program")
            } else {
                let next =
                    "this program works with it; after an upgrade, replace it by the newer one";
                Finding::warn("schema", detail, next)
            }
        }
    }
}

fn not_usable(file: &Path) -> Option<Finding> {
    let reason = refuses_writing(file)?;
    let next = "make it writable, or choose another file with --database-url";
    Some(Finding::fail("database", format!("{}: {reason}", file.display()), next))
}

/// The file is locked by a running service, which is normal.
fn in_use(place: &str, file: Option<&Path>) -> String {
    let holder = file.and_then(holder).map(|pid| format!(" (process {pid})")).unwrap_or_default();
    format!("{place} is in use by a running service{holder}; commands reach it with --server")
}

/// The process that holds the lock file, from `/proc/locks`: the sixth field of a line is
/// `major:minor:inode`, the fifth the process id (proc_locks(5)).
fn holder(file: &Path) -> Option<u32> {
    use std::os::unix::fs::MetadataExt as _;
    let mut lock = file.as_os_str().to_owned();
    lock.push(".lock");
    let inode = format!(":{}", std::fs::metadata(lock).ok()?.ino());
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words.get(5).filter(|place| place.ends_with(&inode))?;
        words.get(4)?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::doctor::Health;

    #[test]
    fn a_schema_fails_where_the_service_does_not_start() {
        let about = |applied| DatabaseInfo { version: "x".into(), applied, known: 3, now: None };
        let health = [0, 2, 3, 4, 5].map(|applied| schema(&about(applied)).status);
        assert_eq!(health, [Health::Ok, Health::Warn, Health::Ok, Health::Warn, Health::Fail]);
    }
}
