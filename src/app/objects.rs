//! The object store that the configuration names.

use url::Url;

use super::AppError;
use crate::bounds::address::is_loopback;
use crate::config::ObjectPlace;
use crate::objects::{Objects, ObjectsError, S3};

/// The object store that keeps the runs' files. A directory is made where it is missing.
///
/// # Errors
/// The settings do not fit together.
pub fn objects(place: &ObjectPlace) -> Result<Objects, AppError> {
    let opened = match place {
        ObjectPlace::Directory(dir) => std::fs::create_dir_all(dir)
            .map_err(ObjectsError::from)
            .and_then(|()| Objects::in_directory(dir)),
        ObjectPlace::S3(bucket) => Objects::in_bucket(&S3 {
            bucket: &bucket.name,
            prefix: &bucket.prefix,
            endpoint: bucket.endpoint.as_ref().map(Url::as_str),
            is_local: bucket.endpoint.as_ref().is_some_and(is_loopback),
            region: bucket.region.as_deref(),
            key: bucket.key.as_ref().map(|(id, secret)| (id.as_str(), secret)),
        }),
    };
    opened.map_err(AppError::Objects)
}
