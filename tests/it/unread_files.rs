//! Files that are downloaded and not read: a caller has half of the permits at most, and gets them back.

use std::time::{Duration, Instant};

use reqwest::{Method, Response};
use serde_json::json;

use crate::service::{Db, Service, Setup};

/// More than the buffers of a connection take.
const BYTES: usize = 16 << 20;
/// More downloads than a caller may have with so little memory.
const MANY: usize = 64;

const FILE: &str = "/v1/agents/owner/files/large.bin";

async fn download(service: &Service, key: &str) -> Response {
    service.http.get(service.url(FILE)).bearer_auth(key).send().await.unwrap()
}

#[tokio::test]
async fn downloads_that_are_not_read_keep_no_file_from_others() {
    let service = Setup::new()
        .scenario("none", "steps: [{text: x}]")
        .agent("owner", "model: scripted/none\ngovernance: {autonomy: full}\n")
        .config("[runtime]\nmax_memory = \"64MiB\"\n[server]\nwrite_timeout = \"40s\"")
        .file("large.bin", &"x".repeat(BYTES))
        .start(Db::Sqlite)
        .await;
    let made = service.post("/v1/keys", &json!({"name": "b", "scopes": ["files:read"]})).await;
    let other = made.body["key"].as_str().unwrap().to_owned();
    let mut unread = Vec::new();
    let refused = loop {
        let download = download(&service, &service.key).await;
        if download.status() != 200 {
            break download;
        }
        unread.push(download);
        assert!(unread.len() < MANY, "downloads have no bound");
    };
    assert_eq!(refused.status(), 503);
    assert_eq!(refused.headers()["retry-after"], "1");
    let refused: serde_json::Value = refused.json().await.unwrap();
    assert_eq!(refused["code"], "OVERLOADED", "{refused:#}");
    let headers = service.request(Method::HEAD, FILE).send().await.unwrap();
    assert_eq!(headers.headers()["content-length"], BYTES.to_string(), "no content, no place");

    let whole = download(&service, &other).await;
    assert_eq!((whole.status().as_u16(), whole.bytes().await.unwrap().len()), (200, BYTES));

    let read = unread.pop().unwrap();
    assert_eq!(read.bytes().await.unwrap().len(), BYTES, "a reader that goes on gets all");
    let began = Instant::now();
    while download(&service, &service.key).await.status() != 200 {
        assert!(began.elapsed() < Duration::from_secs(20), "its place is not free");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Those that are not read are given up after the write timeout: as many others have their places.
    let (mut others, began) = (Vec::new(), Instant::now());
    while others.len() < unread.len() {
        let download = download(&service, &service.key).await;
        others.extend((download.status() == 200).then_some(download));
        assert!(began.elapsed() < Duration::from_mins(5), "no place gets free");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
