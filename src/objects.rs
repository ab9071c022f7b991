//! Contents that are kept under names beside the database: in a directory, or in a bucket of a server
//! that speaks S3.
//!
//! A name is never used for a second content, and no path is made from a name that the store
//! returns. What a name means, and whose it is, is decided by the caller.

use std::fmt;
use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use object_store::aws::AmazonS3Builder;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientOptions, Error, MultipartUpload, ObjectStore, ObjectStoreExt, PutPayload,
    RetryConfig,
};
use secrecy::{ExposeSecret, SecretString};
use tokio::io::AsyncWriteExt;

/// Bytes that are sent at once: a larger content goes in parts.
pub const PART: usize = 8 << 20;
/// The maximum size of a small content, in bytes.
const MAX_SMALL: u64 = 4096;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long no byte may arrive.
const READ_TIMEOUT: Duration = Duration::from_secs(20);
const REQUEST_TIMEOUT: Duration = Duration::from_mins(5);
const EVERY_HOST: &str = "*,0.0.0.0/0,::/0";

/// A place that keeps contents.
#[derive(Clone)]
pub struct Objects {
    store: Arc<dyn ObjectStore>,
    prefix: String,
    shown: Arc<str>,
    is_directory: bool,
}

/// Why a content cannot be put, read or deleted.
#[derive(Debug, thiserror::Error)]
pub enum ObjectsError {
    #[error("there is no such object")]
    Missing,
    #[error("the object store cannot be used: {0}")]
    Unavailable(String),
}

/// A bucket of a server that speaks S3.
#[derive(Debug)]
pub struct S3<'a> {
    pub bucket: &'a str,
    /// What the names of all objects begin with; may be empty.
    pub prefix: &'a str,
    pub endpoint: Option<&'a str>,
    /// Whether the endpoint is on this machine, so that no proxy is used.
    pub is_local: bool,
    pub region: Option<&'a str>,
    /// Id and secret of the access key.
    pub key: Option<(&'a str, &'a SecretString)>,
}

impl fmt::Debug for Objects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Objects").field(&self.shown).finish()
    }
}

impl fmt::Display for Objects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl From<Error> for ObjectsError {
    fn from(error: Error) -> Self {
        match error {
            Error::NotFound { .. } => Self::Missing,
            error => Self::Unavailable(error.to_string()),
        }
    }
}

impl From<std::io::Error> for ObjectsError {
    fn from(error: std::io::Error) -> Self {
        Self::Unavailable(error.to_string())
    }
}

impl Objects {
    /// In a directory, which is there.
    ///
    /// # Errors
    /// It cannot be used.
    pub fn in_directory(dir: &FilePath) -> Result<Self, ObjectsError> {
        let store = LocalFileSystem::new_with_prefix(dir)?.with_fsync(true);
        let shown = dir.display().to_string().into();
        Ok(Self { store: Arc::new(store), prefix: String::new(), shown, is_directory: true })
    }

    /// # Errors
    /// The settings do not fit together.
    pub fn in_bucket(s3: &S3<'_>) -> Result<Self, ObjectsError> {
        let S3 { bucket, prefix, endpoint, is_local, region, key } = s3;
        let mut client = ClientOptions::new()
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_read_timeout(READ_TIMEOUT)
            .with_timeout(REQUEST_TIMEOUT);
        if *is_local {
            // A proxy that no host uses takes the place of the one that the environment names.
            client = client.with_proxy_url("http://localhost").with_proxy_excludes(EVERY_HOST);
        }
        let retry = RetryConfig {
            max_retries: 2,
            retry_timeout: READ_TIMEOUT,
            backoff: BackoffConfig::default(),
        };
        // What is not set here may be a role that the machine has.
        let mut builder = AmazonS3Builder::from_env()
            .with_bucket_name(*bucket)
            .with_client_options(client)
            .with_retry(retry);
        if let Some(region) = region {
            builder = builder.with_region(*region);
        }
        if let Some(endpoint) = endpoint {
            let is_plain = endpoint.starts_with("http://");
            builder =
                builder.with_endpoint(endpoint.trim_end_matches('/')).with_allow_http(is_plain);
        }
        if let Some((id, secret)) = key {
            builder =
                builder.with_access_key_id(*id).with_secret_access_key(secret.expose_secret());
        }
        let shown = format!("s3://{bucket}/{prefix}").into();
        let (store, prefix) = (Arc::new(builder.build()?), (*prefix).to_owned());
        Ok(Self { store, prefix, shown, is_directory: false })
    }

    /// Whether it is a directory. One that goes away is made anew by what is put into it.
    pub fn is_directory(&self) -> bool {
        self.is_directory
    }

    fn path(&self, name: &str) -> Result<Path, ObjectsError> {
        let whole = if self.prefix.is_empty() {
            name.to_owned()
        } else {
            format!("{}/{name}", self.prefix)
        };
        Path::parse(whole).map_err(|error| ObjectsError::Unavailable(error.to_string()))
    }

    /// Puts a content of at most [`PART`] bytes.
    ///
    /// # Errors
    /// [`ObjectsError`]; it may be there all the same.
    pub async fn put(&self, name: &str, content: Bytes) -> Result<(), ObjectsError> {
        self.store.put(&self.path(name)?, PutPayload::from_bytes(content)).await?;
        Ok(())
    }

    /// Puts a larger one, part by part.
    ///
    /// # Errors
    /// [`ObjectsError`].
    pub async fn put_parts(&self, name: &str) -> Result<Parts, ObjectsError> {
        Ok(Parts(self.store.put_multipart(&self.path(name)?).await?))
    }

    /// Writes a content to a file, as much as there is up to a byte more than expected.
    ///
    /// # Errors
    /// [`ObjectsError`].
    pub async fn get(
        &self,
        name: &str,
        file: std::fs::File,
        expected: u64,
        mut seen: impl FnMut(&[u8]) + Send,
    ) -> Result<u64, ObjectsError> {
        let mut content = self.store.get(&self.path(name)?).await?.into_stream();
        let mut file = tokio::fs::File::from_std(file);
        let mut size = 0;
        while let Some(piece) = content.next().await {
            let piece = piece?;
            size += piece.len() as u64;
            if size > expected {
                break;
            }
            seen(&piece);
            file.write_all(&piece).await?;
        }
        file.flush().await?;
        Ok(size)
    }

    /// A small content.
    ///
    /// # Errors
    /// [`ObjectsError`].
    pub async fn get_small(&self, name: &str) -> Result<Bytes, ObjectsError> {
        let found = self.store.get(&self.path(name)?).await?;
        if found.meta.size > MAX_SMALL {
            return Err(ObjectsError::Unavailable(format!("the object {name} is too large")));
        }
        Ok(found.bytes().await?)
    }

    /// Deletes an object; one that is not there is deleted.
    ///
    /// # Errors
    /// [`ObjectsError`].
    pub async fn delete(&self, name: &str) -> Result<(), ObjectsError> {
        match self.store.delete(&self.path(name)?).await {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// A content that is put in parts of [`PART`] bytes, but for the last.
#[derive(Debug)]
pub struct Parts(Box<dyn MultipartUpload>);

impl Parts {
    /// # Errors
    /// [`ObjectsError`].
    pub async fn put(&mut self, part: Bytes) -> Result<(), ObjectsError> {
        Ok(self.0.put_part(PutPayload::from_bytes(part)).await?)
    }

    /// # Errors
    /// [`ObjectsError`]; it may be there all the same.
    pub async fn complete(mut self) -> Result<(), ObjectsError> {
        self.0.complete().await?;
        Ok(())
    }

    /// Nothing is kept of it.
    pub async fn abort(mut self) {
        let _ = self.0.abort().await; // a bucket's own rules delete what is left of uploads
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_put_is_read_until_it_is_deleted() {
        let dir = tempfile::tempdir().unwrap();
        let objects = Objects::in_directory(dir.path()).unwrap();
        objects.put("t/aa/one", Bytes::from_static(b"one")).await.unwrap();
        let mut parts = objects.put_parts("t/bb/two").await.unwrap();
        parts.put(vec![b'x'; PART].into()).await.unwrap();
        parts.put(Bytes::from_static(b"end")).await.unwrap();
        parts.complete().await.unwrap();
        assert_eq!(objects.get_small("t/aa/one").await.unwrap(), "one");
        assert!(objects.get_small("t/bb/two").await.is_err(), "it is too large");
        for (name, expected, size) in
            [("t/aa/one", 3, 3), ("t/aa/one", 1, 3), ("t/bb/two", PART as u64 + 3, PART as u64 + 3)]
        {
            let mut hashed = 0;
            let file = tempfile::tempfile().unwrap();
            let got = objects.get(name, file, expected, |piece| hashed += piece.len()).await;
            assert_eq!(got.unwrap(), size);
            assert_eq!(hashed as u64, if expected < size { 0 } else { size });
        }
        objects.delete("t/aa/one").await.unwrap();
        objects.delete("t/aa/one").await.unwrap();
        assert!(matches!(objects.get_small("t/aa/one").await, Err(ObjectsError::Missing)));
        assert!(objects.put("../out", Bytes::new()).await.is_err());
    }
}
