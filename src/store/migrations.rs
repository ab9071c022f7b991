//! The schema's migrations, embedded in the binary.

use std::sync::LazyLock;

use sqlx::SqlStr;
use sqlx::migrate::{Migration, MigrationType, Migrator};

use super::{DatabaseInfo, StoreError};

macro_rules! embedded {
    ($database:literal: $($version:literal $name:literal),+ $(,)?) => {
        LazyLock::new(|| {
            let mut migrator = Migrator::with_migrations(vec![$(Migration::new(
                $version,
                $name.into(),
                MigrationType::Simple,
                SqlStr::from_static(include_str!(concat!(
                    "../../migrations/", $database, "/000", $version, "_", $name, ".sql"
                ))),
                false,
            )),+]);
            // Ignore migrations of a newer version; see `refuse_too_far_ahead`.
            migrator.set_ignore_missing(true);
            migrator
        })
    };
}

/// Refuses a schema that is too far ahead.
pub(super) fn refuse_too_far_ahead(about: &DatabaseInfo) -> Result<(), StoreError> {
    if !about.is_too_far_ahead() {
        return Ok(());
    }
    Err(StoreError::Failed(format!(
        "the schema is {} migrations ahead of this version, which tolerates one; start a newer version",
        about.applied - about.known
    )))
}

pub(super) static POSTGRES: LazyLock<Migrator> = embedded!("postgres": 1 "schema");
pub(super) static SQLITE: LazyLock<Migrator> = embedded!("sqlite": 1 "schema");
