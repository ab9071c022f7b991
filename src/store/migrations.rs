//! The schema's migrations, embedded in the binary.

use std::sync::LazyLock;

use sqlx::SqlStr;
use sqlx::migrate::{Migration, MigrationType, Migrator};

macro_rules! embedded {
    ($database:literal: $($version:literal $name:literal),+ $(,)?) => {
        LazyLock::new(|| {
            Migrator::with_migrations(vec![$(Migration::new(
                $version,
                $name.into(),
                MigrationType::Simple,
                SqlStr::from_static(include_str!(concat!(
                    "../../migrations/", $database, "/000", $version, "_", $name, ".sql"
                ))),
                false,
            )),+])
        })
    };
}

pub(super) static POSTGRES: LazyLock<Migrator> = embedded!("postgres": 1 "schema");
pub(super) static SQLITE: LazyLock<Migrator> = embedded!("sqlite": 1 "schema");
