//! Finds paths that cannot exist because of other stored paths: nothing can be beneath a file or a link.

use std::collections::{BTreeMap, BTreeSet};

use super::super::backend::{Transaction, Work};
use super::super::conflict::retry_conflicts;
use super::super::sql::Query;
use super::super::{Store, StoreError};
use super::{
    CHUNK, KeptContent, PAGE, PathChange, PathWrite, at_paths, next_version, object_of,
    release_objects, upsert,
};

/// The paths of writes: `None` if deleted, otherwise whether the path becomes a directory.
type WrittenPaths<'a> = BTreeMap<&'a str, Option<bool>>;

impl Store {
    /// Deletes those of these paths that are beneath a file or a link, where they cannot exist; returns them.
    pub async fn delete_shadowed_files(
        &self,
        tenant: &str,
        paths: &[String],
    ) -> Result<BTreeSet<String>, StoreError> {
        retry_conflicts(|| self.try_to_delete_shadowed(tenant, paths)).await
    }

    async fn try_to_delete_shadowed(
        &self,
        tenant: &str,
        paths: &[String],
    ) -> Result<BTreeSet<String>, StoreError> {
        let mut tx = self.backend.begin(Work::Data).await?;
        let version = next_version(&mut *tx, tenant).await?;
        let all = paths.iter().map(String::as_str);
        let shadowed = shadowed(&mut *tx, tenant, all, &WrittenPaths::new()).await?;
        let paths: Vec<String> = shadowed.iter().cloned().collect();
        for some in paths.chunks(CHUNK) {
            let there = at_paths(&mut *tx, tenant, some).await?;
            let objects: Vec<String> =
                there.iter().filter_map(|there| object_of(there.content.as_ref())).collect();
            let deletes: Vec<PathWrite> = some
                .iter()
                .map(|path| PathWrite { path: path.clone(), base: 0, content: None })
                .collect();
            let deletes: Vec<&PathWrite> = deletes.iter().collect();
            tx.run(upsert(tenant, version, None, &deletes)).await?;
            release_objects(&mut *tx, &objects).await?;
        }
        tx.commit().await?;
        Ok(shadowed)
    }
}

/// The paths of writes that cannot exist because of paths above or beneath them. The tenant's files are locked.
pub(super) async fn blocked_paths(
    tx: &mut dyn Transaction,
    tenant: &str,
    changes: &[PathChange<'_>],
) -> Result<BTreeSet<String>, StoreError> {
    let written: WrittenPaths<'_> = changes
        .iter()
        .map(|change| (change.write.path.as_str(), change.write.content.as_ref().map(is_directory)))
        .collect();
    let is_new =
        |change: &&PathChange<'_>| change.write.content.is_some() && change.before.is_none();
    let new = changes.iter().filter(is_new).map(|change| change.write.path.as_str());
    let mut blocked = shadowed(tx, tenant, new, &written).await?;
    // Paths beneath an unchanged file or link were found when the paths were written.
    let closing: Vec<&str> = changes
        .iter()
        .filter(|change| {
            change.write.content.as_ref().is_some_and(|content| !is_directory(content))
        })
        .filter(|change| change.before.as_ref().is_none_or(is_directory))
        .map(|change| change.write.path.as_str())
        .collect();
    for some in closing.chunks(CHUNK) {
        let beneath = beneath(tx, tenant, some).await?;
        for path in beneath.iter().filter(|path| written.get(path.as_str()) != Some(&None)) {
            let closed = directories_of(path).filter(|above| some.contains(above));
            blocked.extend(closed.map(str::to_owned));
        }
    }
    Ok(blocked)
}

/// Those of these paths that are beneath a file or a link after the writes.
async fn shadowed<'p>(
    tx: &mut dyn Transaction,
    tenant: &str,
    paths: impl Iterator<Item = &'p str>,
    written: &WrittenPaths<'_>,
) -> Result<BTreeSet<String>, StoreError> {
    let paths: Vec<&str> = paths.collect();
    let above: BTreeSet<&str> = paths.iter().flat_map(|path| directories_of(path)).collect();
    let unwritten = above.into_iter().filter(|path| !written.contains_key(*path));
    let unwritten: Vec<String> = unwritten.map(str::to_owned).collect();
    let mut closed: BTreeSet<String> = written
        .iter()
        .filter(|(_, holds)| **holds == Some(false))
        .map(|(path, _)| (*path).to_owned())
        .collect();
    for some in unwritten.chunks(PAGE as usize) {
        let there = at_paths(tx, tenant, some).await?;
        let is_no_directory = |content: &KeptContent| !is_directory(content);
        let there = there.into_iter().filter(|it| it.content.as_ref().is_some_and(is_no_directory));
        closed.extend(there.map(|it| it.path));
    }
    let is_shadowed = |path: &&str| directories_of(path).any(|above| closed.contains(above));
    Ok(paths.into_iter().filter(is_shadowed).map(str::to_owned).collect())
}

/// Only a directory can have paths beneath it.
fn is_directory(content: &KeptContent) -> bool {
    matches!(content, KeptContent::Directory)
}

fn directories_of(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/').map(|(end, _)| &path[..end])
}

/// The stored paths beneath these paths.
async fn beneath(
    tx: &mut dyn Transaction,
    tenant: &str,
    paths: &[&str],
) -> Result<Vec<String>, StoreError> {
    let look = "SELECT path FROM workspace_files WHERE tenant = :tenant AND kind <> 'gone' AND (";
    let mut look = Query::new(look).bind("tenant", tenant);
    for (number, path) in paths.iter().enumerate() {
        let or = if number == 0 { "" } else { " OR " };
        look = look
            .push(&format!("{or}(path > :above{number} AND path < :below{number})"))
            .bind(format!("above{number}"), format!("{path}/"))
            .bind(format!("below{number}"), format!("{path}0")); // the character after the slash
    }
    let rows = tx.run(look.push(")")).await?;
    rows.iter().map(|row| row.read("path")).collect()
}
