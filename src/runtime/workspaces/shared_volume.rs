//! Checks that this replica's workspace directory is the volume that all replicas share, if so configured: a
//! marker file in it holds the id that the store knows.
//!
//! The first replica creates both, the marker first, so that the next replica can take the marker over after a
//! crash in between. From then on, a directory without the marker is not the volume.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use uuid::Uuid;

use crate::store::{Store, StoreError};
use crate::tools::marker;

/// The name of the id in the store.
const NAME: &str = "shared_workspace";

/// What is known of the volume.
#[derive(Debug, Default)]
pub(super) struct SharedVolume(OnceLock<String>);

impl SharedVolume {
    /// Why this directory cannot be used, if so.
    pub(super) async fn fault(&self, store: &Store, root: &Path) -> Option<String> {
        let id = match self.0.get() {
            Some(id) => id.clone(),
            None => match id_of(store, root.to_owned()).await {
                Ok(id) => self.0.get_or_init(|| id).clone(),
                Err(why) => return Some(why),
            },
        };
        let root = root.to_owned();
        let look = tokio::task::spawn_blocking(move || difference(&root, &id)).await;
        look.unwrap_or_else(|failed| Some(failed.to_string()))
    }

    /// The same by the id that is known here, without I/O on the store; false if none is known yet.
    pub(super) fn is_elsewhere(&self, root: &Path) -> bool {
        self.0.get().is_some_and(|id| difference(root, id).is_some())
    }
}

/// Why a workspace directory that all replicas should share cannot be used, if so. Creates nothing.
///
/// # Errors
/// [`StoreError`].
pub async fn shared_volume_fault(store: &Store, root: &Path) -> Result<Option<String>, StoreError> {
    let known = store.known_secret(NAME).await?;
    Ok(known.and_then(|id| difference(root, &text(&id))))
}

async fn id_of(store: &Store, root: PathBuf) -> Result<String, String> {
    let known = store.known_secret(NAME).await.map_err(|e| e.to_string())?;
    if let Some(known) = known {
        return Ok(text(&known));
    }
    let mark = move || marker::read_or_make(&root, &Uuid::new_v4().to_string());
    let id = tokio::task::spawn_blocking(mark).await.map_err(|e| e.to_string())?;
    let id = id.map_err(|e| format!("its marker cannot be made: {e}"))?;
    let id = store.secret(NAME, id.into_bytes()).await.map_err(|e| e.to_string())?;
    Ok(text(&id))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn difference(root: &Path, id: &str) -> Option<String> {
    let file = root.join(marker::NAME);
    let what = match marker::read(root) {
        Ok(Some(found)) if found == id => return None,
        Ok(Some(_)) => format!("{} holds another id", file.display()),
        Ok(None) => format!("{} is missing", file.display()),
        Err(error) => format!("{} cannot be read: {error}", file.display()),
    };
    Some(format!("it is not the volume that the replicas share ({what}; the id is {id})"))
}
