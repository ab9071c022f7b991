//! Files of workspaces in an object store: which path of a tenant has which content.
//!
//! A path is relative to the directory of its tenant, because workspaces can be nested. Each writer names the
//! version of a path that it changes. A path is not written if others have changed it since that version, or if
//! other paths above or beneath it make it impossible. Writes of a run are fenced. Every writing transaction
//! locks the row of the tenant, after the row of a run, so that versions become visible in their order.

mod owners;
mod path_conflicts;

use std::collections::BTreeMap;

use uuid::Uuid;

use super::backend::{Transaction, Work};
use super::budget::Ownership;
use super::conflict::retry_conflicts;
use super::sql::{Query, Row};
use super::{Store, StoreError};

/// Rows that one statement reads, and rows that one statement writes, at most.
const PAGE: u32 = 2_000;
const CHUNK: usize = 100;

/// What is at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeptContent {
    File(KeptFile),
    Directory,
    /// A symbolic link, and its target.
    Link(String),
}

/// The content of a file, and its metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptFile {
    /// Its name in the object store.
    pub object: String,
    /// The SHA-256 in hexadecimal digits.
    pub hash: String,
    pub size: u64,
    /// The permissions.
    pub mode: u32,
    /// Nanoseconds since 1970.
    pub modified_ns: i64,
}

impl KeptContent {
    /// Whether both contents are equal; the object name and the time do not count.
    pub fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::File(one), Self::File(other)) => {
                (&one.hash, one.size, one.mode) == (&other.hash, other.size, other.mode)
            }
            (one, other) => one == other,
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::File(_) => "file",
            Self::Directory => "directory",
            Self::Link(_) => "link",
        }
    }
}

/// A stored path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptPath {
    pub path: String,
    pub version: i64,
    /// `None` if the path was deleted.
    pub content: Option<KeptContent>,
}

/// A change of one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathWrite {
    pub path: String,
    /// The version that is changed; 0 if nothing is at the path.
    pub base: i64,
    /// `None` if the path is deleted.
    pub content: Option<KeptContent>,
}

/// Paths that are written in one transaction.
#[derive(Debug, Clone, Copy)]
pub struct FileWrites<'a> {
    /// Identifies the write. A write that is repeated because its answer was lost has the same id.
    pub id: Uuid,
    /// Whether nothing is written if some paths cannot be written.
    pub is_whole: bool,
    pub paths: &'a [PathWrite],
}

/// The writer, and the condition under which the write is allowed.
#[derive(Debug, Clone, Copy)]
pub enum FileWriter<'a> {
    /// A run, which this owner must own.
    Run(Uuid, Ownership<'a>),
    /// A caller; if a run is named, it must exist.
    Caller(Option<Uuid>),
}

/// The outcome of writing paths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PathsWritten {
    /// All paths were written except those that others have changed or made impossible. If the write is whole and
    /// there are any of these, no path was written.
    Done { version: i64, changed_by_others: Vec<String> },
    /// Another replica owns the run: nothing was written.
    Fenced,
    /// The run that had to exist does not: nothing was written.
    Orphaned,
    /// An object that the write refers to is missing: nothing was written.
    Lost,
}

/// Where a content is stored, or where to store it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ObjectClaim {
    /// It is stored.
    Stored(String),
    /// It is to be stored under this name, which is used once.
    New(String),
}

/// The paths that have changed beneath a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathsChanged {
    /// The version up to which the list is complete.
    pub version: i64,
    /// Whether all paths are listed, not only changed ones.
    pub is_all: bool,
    pub paths: Vec<KeptPath>,
}

/// A write, and the previous content of its path.
struct PathChange<'a> {
    write: &'a PathWrite,
    before: Option<KeptContent>,
}

impl Store {
    /// The version of a tenant's files.
    pub async fn files_version(&self, tenant: &str) -> Result<i64, StoreError> {
        Ok(self.versions(tenant).await?.0)
    }

    async fn versions(&self, tenant: &str) -> Result<(i64, i64), StoreError> {
        let look = Query::new("SELECT version, purged FROM workspaces WHERE tenant = :tenant");
        let rows = self.backend.read(Work::Data, look.bind("tenant", tenant)).await?;
        rows.first().map_or(Ok((0, 0)), |row| Ok((row.read("version")?, row.read("purged")?)))
    }

    /// The paths beneath a directory of a tenant, or only those that have changed since a version.
    pub async fn files_since(
        &self,
        tenant: &str,
        directory: &str,
        since: Option<i64>,
    ) -> Result<PathsChanged, StoreError> {
        let (version, purged) = self.versions(tenant).await?;
        if let Some(since) = since.filter(|since| *since >= purged) {
            let paths = self.paths_beneath(tenant, directory, Some(since)).await?;
            // Deletions that were forgotten while the paths were read are not among them.
            if since >= self.versions(tenant).await?.1 {
                return Ok(PathsChanged { version, is_all: false, paths });
            }
        }
        let paths = self.paths_beneath(tenant, directory, None).await?;
        Ok(PathsChanged { version, is_all: true, paths })
    }

    /// The paths beneath a directory that have changed since a version; all that are there, without one.
    async fn paths_beneath(
        &self,
        tenant: &str,
        directory: &str,
        since: Option<i64>,
    ) -> Result<Vec<KeptPath>, StoreError> {
        let mut paths: Vec<KeptPath> = Vec::new();
        loop {
            let list = beneath(
                Query::new("SELECT * FROM workspace_files WHERE tenant = :tenant"),
                directory,
            );
            let list = match since {
                Some(since) => list.push(" AND version > :since").bind("since", since),
                None => list.push(" AND kind <> 'gone'"),
            };
            let after = paths.last().map(|last| last.path.clone());
            let list = list.and("path > :after", "after", after);
            let list = list.push(" ORDER BY path LIMIT :limit").bind("limit", PAGE);
            let rows = self.backend.read(Work::Data, list.bind("tenant", tenant)).await?;
            for row in &rows {
                paths.push(read(row)?);
            }
            if rows.len() < PAGE as usize {
                return Ok(paths);
            }
        }
    }

    /// The stored ones of these paths of a tenant.
    pub async fn files_at(
        &self,
        tenant: &str,
        paths: &[String],
    ) -> Result<Vec<KeptPath>, StoreError> {
        let mut known = Vec::new();
        for some in paths.chunks(PAGE as usize) {
            let look = Query::new(
                "SELECT * FROM workspace_files WHERE tenant = :tenant AND path IN :paths",
            );
            let look = look.bind("tenant", tenant).bind("paths", some);
            let rows = self.backend.read(Work::Data, look).await?;
            for row in &rows {
                known.push(read(row)?);
            }
        }
        Ok(known)
    }

    /// Writes paths of a tenant in one transaction; the writes of a run are fenced. Repeating a write under the same
    /// id is harmless.
    pub async fn write_files(
        &self,
        tenant: &str,
        by: FileWriter<'_>,
        writes: FileWrites<'_>,
    ) -> Result<PathsWritten, StoreError> {
        retry_conflicts(|| self.try_to_write_files(tenant, by, writes)).await
    }

    async fn try_to_write_files(
        &self,
        tenant: &str,
        by: FileWriter<'_>,
        writes: FileWrites<'_>,
    ) -> Result<PathsWritten, StoreError> {
        let mut tx = self.backend.begin(Work::Data).await?;
        if let FileWriter::Run(run, by) = by {
            let fence = Query::new(
                "SELECT 1 FROM runs WHERE id = :run AND epoch = :epoch AND owner = :owner \
                 AND status = 'running'{for_update}",
            );
            let fence = fence.bind("run", run).bind("epoch", by.epoch).bind("owner", by.owner);
            if tx.run(fence).await?.is_empty() {
                return Ok(PathsWritten::Fenced);
            }
        }
        let version = next_version(&mut *tx, tenant).await?;
        // A transaction that deletes the run has deleted its files before, or waits and deletes these files too.
        if let FileWriter::Caller(Some(run)) = by
            && tx.run(owners::query_run(run)).await?.is_empty()
        {
            return Ok(PathsWritten::Orphaned);
        }
        let (mut changes, mut changed_by_others) =
            split_by_conflict(&mut *tx, tenant, writes).await?;
        let blocked = path_conflicts::blocked_paths(&mut *tx, tenant, &changes).await?;
        changes.retain(|change| !blocked.contains(&change.write.path));
        changed_by_others.extend(blocked);
        if writes.is_whole && !changed_by_others.is_empty() {
            changed_by_others.extend(changes.drain(..).map(|change| change.write.path.clone()));
        }
        let loose: Vec<String> =
            changes.iter().filter_map(|change| object_of(change.before.as_ref())).collect();
        let changes: Vec<&PathWrite> = changes.into_iter().map(|change| change.write).collect();
        if !mark_objects_used(&mut *tx, &changes).await? {
            return Ok(PathsWritten::Lost);
        }
        for some in changes.chunks(CHUNK) {
            tx.run(upsert(tenant, version, Some(writes.id), some)).await?;
        }
        release_objects(&mut *tx, &loose).await?;
        tx.commit().await?;
        Ok(PathsWritten::Done { version, changed_by_others })
    }

    /// Where a content of a tenant is stored, or where to store it.
    pub async fn claim_object(&self, tenant: &str, hash: &str) -> Result<ObjectClaim, StoreError> {
        let touch = Query::new(
            "UPDATE workspace_objects SET used_at = {now} WHERE tenant = :tenant AND hash = :hash \
             AND state IN ('stored', 'loose') RETURNING object",
        );
        let touch = touch.bind("tenant", tenant).bind("hash", hash);
        if let Some(row) = self.backend.write(Work::Data, touch).await?.first() {
            return Ok(ObjectClaim::Stored(row.read("object")?));
        }
        let start = hash.get(..2).unwrap_or("00");
        let object = format!("{tenant}/{start}/{hash}.{}", Uuid::new_v4().simple());
        let announce = Query::new(
            "INSERT INTO workspace_objects (object, tenant, hash, state, used_at) \
             VALUES (:object, :tenant, :hash, 'coming', {now})",
        );
        let announce = announce.bind("object", &object).bind("tenant", tenant).bind("hash", hash);
        self.backend.write(Work::Data, announce).await?;
        Ok(ObjectClaim::New(object))
    }

    /// Notes that a content is stored. False if it came too late and is being deleted.
    pub async fn object_stored(&self, object: &str) -> Result<bool, StoreError> {
        let note = Query::new(
            "UPDATE workspace_objects SET state = 'loose', used_at = {now} \
             WHERE object = :object AND state <> 'dead' RETURNING object",
        );
        Ok(!self.backend.write(Work::Data, note.bind("object", object)).await?.is_empty())
    }

    /// Some contents that no path refers to and that have not been used since an instant. The caller deletes them
    /// from the object store and then calls [`Store::forget_objects`].
    pub async fn unused_objects(
        &self,
        before: chrono::DateTime<chrono::Utc>,
        limit: u32,
    ) -> Result<Vec<String>, StoreError> {
        // Contents that a path refers to again. A writer takes a content's row before it refers to it.
        let restore = Query::new(
            "UPDATE workspace_objects SET state = 'stored' WHERE object IN (\
             SELECT o.object FROM workspace_objects o WHERE o.state = 'loose' AND o.used_at < :before \
             AND EXISTS (SELECT 1 FROM workspace_files f WHERE f.object = o.object) LIMIT :limit)",
        );
        let restore = restore.bind("before", before).bind("limit", limit);
        self.backend.write(Work::Data, restore).await?;
        let mark_dead = Query::new(
            "UPDATE workspace_objects SET state = 'dead' WHERE object IN (\
             SELECT o.object FROM workspace_objects o WHERE o.state IN ('coming', 'loose') \
             AND o.used_at < :before AND NOT EXISTS \
             (SELECT 1 FROM workspace_files f WHERE f.object = o.object) LIMIT :limit) \
             AND state <> 'stored' AND used_at < :before",
        );
        let mark_dead = mark_dead.bind("before", before).bind("limit", limit);
        self.backend.write(Work::Data, mark_dead).await?;
        let dead =
            Query::new("SELECT object FROM workspace_objects WHERE state = 'dead' LIMIT :limit");
        let rows = self.backend.read(Work::Data, dead.bind("limit", limit)).await?;
        rows.iter().map(|row| row.read("object")).collect()
    }

    /// Forgets contents that have been deleted from the object store.
    pub async fn forget_objects(&self, objects: &[String]) -> Result<(), StoreError> {
        let forget =
            Query::new("DELETE FROM workspace_objects WHERE object IN :objects AND state = 'dead'");
        self.backend.write(Work::Data, forget.bind("objects", objects)).await?;
        Ok(())
    }

    /// Forgets that paths were deleted before an instant; of some tenants.
    pub async fn purge_deleted_files(
        &self,
        before: chrono::DateTime<chrono::Utc>,
    ) -> Result<(), StoreError> {
        let tenants = Query::new(
            "SELECT DISTINCT tenant FROM workspace_files WHERE kind = 'gone' AND at < :before LIMIT 50",
        );
        for row in self.backend.read(Work::Data, tenants.bind("before", before)).await? {
            let tenant: String = row.read("tenant")?;
            let mut tx = self.backend.begin(Work::Data).await?;
            let lock = Query::new("SELECT 1 FROM workspaces WHERE tenant = :tenant{for_update}");
            tx.run(lock.bind("tenant", &tenant)).await?;
            let purge = Query::new(
                "UPDATE workspaces SET purged = {greatest}(purged, COALESCE((SELECT max(version) \
                 FROM workspace_files WHERE tenant = :tenant AND kind = 'gone' AND at < :before), 0)) \
                 WHERE tenant = :tenant",
            );
            tx.run(purge.bind("tenant", &tenant).bind("before", before)).await?;
            let delete = Query::new(
                "DELETE FROM workspace_files WHERE tenant = :tenant AND kind = 'gone' AND at < :before",
            );
            tx.run(delete.bind("tenant", &tenant).bind("before", before)).await?;
            tx.commit().await?;
        }
        Ok(())
    }
}

/// The name of a file's content in the object store.
fn object_of(content: Option<&KeptContent>) -> Option<String> {
    match content {
        Some(KeptContent::File(file)) => Some(file.object.clone()),
        _ => None,
    }
}

/// Gives contents that paths referred to until now the state `loose`: they are deleted later, unless a path refers
/// to them.
async fn release_objects(tx: &mut dyn Transaction, objects: &[String]) -> Result<(), StoreError> {
    for some in objects.chunks(PAGE as usize) {
        let release = Query::new(
            "UPDATE workspace_objects SET state = 'loose', used_at = {now} \
             WHERE object IN :objects AND state = 'stored'",
        );
        tx.run(release.bind("objects", some)).await?;
    }
    Ok(())
}

/// Splits writes: those whose paths are unchanged since the writer read them, and the paths that others
/// have changed. The tenant's files are locked.
async fn split_by_conflict<'a>(
    tx: &mut dyn Transaction,
    tenant: &str,
    writes: FileWrites<'a>,
) -> Result<(Vec<PathChange<'a>>, Vec<String>), StoreError> {
    let (mut changes, mut changed_by_others) = (Vec::new(), Vec::new());
    for some in writes.paths.chunks(PAGE as usize) {
        let paths: Vec<String> = some.iter().map(|write| write.path.clone()).collect();
        let mut known_paths = BTreeMap::new();
        for row in &rows_at(tx, tenant, &paths).await? {
            let (known, by) = (read(row)?, row.read::<Option<Uuid>>("write_id")?);
            known_paths.insert(known.path.clone(), (known, by));
        }
        for write in some {
            let (before, at, by) = match known_paths.remove(&write.path) {
                Some((known, by)) => (known.content, known.version, by),
                None => (None, 0, None),
            };
            let is_base = if before.is_none() { write.base == 0 } else { write.base == at };
            // An equal change by others is still theirs, except that a directory exists either way.
            let is_there = matches!(
                (&before, &write.content),
                (Some(KeptContent::Directory), Some(KeptContent::Directory))
            );
            if is_base || is_there || by == Some(writes.id) {
                changes.push(PathChange { write, before });
            } else {
                changed_by_others.push(write.path.clone());
            }
        }
    }
    Ok((changes, changed_by_others))
}

/// The stored ones of these paths of a tenant.
async fn at_paths(
    tx: &mut dyn Transaction,
    tenant: &str,
    paths: &[String],
) -> Result<Vec<KeptPath>, StoreError> {
    rows_at(tx, tenant, paths).await?.iter().map(read).collect()
}

async fn rows_at(
    tx: &mut dyn Transaction,
    tenant: &str,
    paths: &[String],
) -> Result<Vec<Row>, StoreError> {
    let look =
        Query::new("SELECT * FROM workspace_files WHERE tenant = :tenant AND path IN :paths");
    tx.run(look.bind("tenant", tenant).bind("paths", paths)).await
}

/// Deletes everything beneath a directory of a tenant.
pub(super) async fn delete_beneath(
    tx: &mut dyn Transaction,
    tenant: &str,
    directory: &str,
) -> Result<(), StoreError> {
    let version = next_version(tx, tenant).await?;
    let release = beneath(
        Query::new(
            "UPDATE workspace_objects SET state = 'loose', used_at = {now} WHERE state = 'stored' \
             AND object IN (SELECT object FROM workspace_files WHERE tenant = :tenant \
             AND object IS NOT NULL",
        ),
        directory,
    );
    tx.run(release.push(")").bind("tenant", tenant)).await?;
    let delete = beneath(
        Query::new(
            "UPDATE workspace_files SET kind = 'gone', object = NULL, hash = NULL, size = NULL, \
             mode = NULL, modified_ns = NULL, target = NULL, version = :version, write_id = NULL, at = {now} \
             WHERE tenant = :tenant AND kind <> 'gone'",
        ),
        directory,
    );
    tx.run(delete.bind("tenant", tenant).bind("version", version)).await?;
    Ok(())
}

/// Locks the tenant's files, and returns the version of the next write.
async fn next_version(tx: &mut dyn Transaction, tenant: &str) -> Result<i64, StoreError> {
    let next = Query::new(
        "INSERT INTO workspaces (tenant, version, purged) VALUES (:tenant, 1, 0) \
         ON CONFLICT (tenant) DO UPDATE SET version = workspaces.version + 1 RETURNING version",
    );
    let rows = tx.run(next.bind("tenant", tenant)).await?;
    let row =
        rows.first().ok_or_else(|| StoreError::Failed("the version row is missing".to_owned()))?;
    row.read("version")
}

/// Adds the condition that a path is strictly beneath a directory.
fn beneath(query: Query, directory: &str) -> Query {
    if directory == "." {
        return query;
    }
    query
        .push(" AND path > :above AND path < :below")
        .bind("above", format!("{directory}/"))
        .bind("below", format!("{directory}0")) // the character after the slash
}

/// Marks the contents of these writes as stored; false if one of them is missing.
async fn mark_objects_used(
    tx: &mut dyn Transaction,
    writes: &[&PathWrite],
) -> Result<bool, StoreError> {
    let mut objects: Vec<String> =
        writes.iter().filter_map(|write| object_of(write.content.as_ref())).collect();
    objects.sort_unstable();
    objects.dedup();
    for some in objects.chunks(PAGE as usize) {
        let take = Query::new(
            "UPDATE workspace_objects SET state = 'stored', used_at = {now} \
             WHERE object IN :objects AND state IN ('stored', 'loose') RETURNING object",
        );
        if tx.run(take.bind("objects", some)).await?.len() < some.len() {
            return Ok(false);
        }
    }
    Ok(true)
}

fn upsert(tenant: &str, version: i64, by: Option<Uuid>, writes: &[&PathWrite]) -> Query {
    let mut query = Query::new(
        "INSERT INTO workspace_files (tenant, path, kind, object, hash, size, mode, modified_ns, \
         target, version, write_id, at) VALUES ",
    )
    .bind("tenant", tenant)
    .bind("version", version)
    .bind("write_id", by);
    for (number, write) in writes.iter().enumerate() {
        let comma = if number == 0 { "" } else { ", " };
        query = query.push(&format!(
            "{comma}(:tenant, :path{number}, :kind{number}, :object{number}, :hash{number}, \
             :size{number}, :mode{number}, :modified{number}, :target{number}, :version, :write_id, {{now}})"
        ));
        let file = match &write.content {
            Some(KeptContent::File(file)) => Some(file),
            _ => None,
        };
        let target = match &write.content {
            Some(KeptContent::Link(target)) => Some(target.as_str()),
            _ => None,
        };
        let kind = write.content.as_ref().map_or("gone", KeptContent::kind);
        query = query
            .bind(format!("path{number}"), &write.path)
            .bind(format!("kind{number}"), kind)
            .bind(format!("object{number}"), file.map(|file| file.object.as_str()))
            .bind(format!("hash{number}"), file.map(|file| file.hash.as_str()))
            .bind(format!("size{number}"), file.map(|file| file.size))
            .bind(format!("mode{number}"), file.map(|file| file.mode))
            .bind(format!("modified{number}"), file.map(|file| file.modified_ns))
            .bind(format!("target{number}"), target);
    }
    query.push(
        " ON CONFLICT (tenant, path) DO UPDATE SET kind = excluded.kind, object = excluded.object, \
         hash = excluded.hash, size = excluded.size, mode = excluded.mode, \
         modified_ns = excluded.modified_ns, target = excluded.target, \
         version = excluded.version, write_id = excluded.write_id, at = excluded.at",
    )
}

fn read(row: &Row) -> Result<KeptPath, StoreError> {
    let kind: String = row.read("kind")?;
    let content = match kind.as_str() {
        "gone" => None,
        "directory" => Some(KeptContent::Directory),
        "link" => Some(KeptContent::Link(row.read("target")?)),
        "file" => Some(KeptContent::File(KeptFile {
            object: row.read("object")?,
            hash: row.read("hash")?,
            size: row.read("size")?,
            mode: row.read("mode")?,
            modified_ns: row.read("modified_ns")?,
        })),
        other => return Err(StoreError::Failed(format!("a path is a {other:?}"))),
    };
    Ok(KeptPath { path: row.read("path")?, version: row.read("version")?, content })
}
