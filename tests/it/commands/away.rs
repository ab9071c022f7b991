//! Commands whose service is away for a while.

use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Child;
use tokio::time::timeout;

use crate::service::{Db, Service, Setup, Signal, command, on_both_stores, send};

on_both_stores!(
    a_cancel_is_sent_until_it_is_accepted,
    a_second_interrupt_tells_that_the_run_may_continue,
);

const PATIENCE: Duration = Duration::from_mins(1);

async fn slow(db: Db) -> Service {
    Setup::new()
        .agent("slow", "model: scripted/slow\nenable_double_confirmation: false\n")
        .scenario("slow", "steps: [{delay_ms: 600000, text: no}]")
        .start(db)
        .await
}

/// Passes connections on to the service, but for as many of the next ones as it is told to close.
async fn relay(service: &Service) -> (String, Arc<AtomicUsize>) {
    let target = service.url("").replace("http://", "");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let closed = Arc::<AtomicUsize>::default();
    let left = Arc::clone(&closed);
    tokio::spawn(async move {
        loop {
            let (mut caller, _) = listener.accept().await.unwrap();
            if left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok() {
                continue;
            }
            let mut service = TcpStream::connect(&target).await.unwrap();
            tokio::spawn(async move { copy_bidirectional(&mut caller, &mut service).await });
        }
    });
    (format!("http://{address}"), closed)
}

/// The command, and its run, which is under way.
async fn invoked(service: &Service, url: &str) -> (Child, String) {
    let mut invoke = command(service.dir.path());
    invoke.args(["invoke", "slow", "--server", url, "--key", &service.key]);
    let child = invoke.spawn().unwrap();
    let running = service.until("/v1/runs?status=running", |runs| runs["data"][0].is_object());
    let run = running.await["data"][0]["run_id"].as_str().unwrap().to_owned();
    (child, run)
}

/// What it has said, up to this text.
async fn until_said(child: &mut Child, text: &str) -> String {
    let err = child.stderr.as_mut().unwrap();
    let (mut said, mut buffer) = (String::new(), [0; 1024]);
    while !said.contains(text) {
        let read = timeout(PATIENCE, err.read(&mut buffer)).await.unwrap().unwrap();
        assert!(read > 0, "{said}");
        said.push_str(&String::from_utf8_lossy(&buffer[..read]));
    }
    said
}

async fn ended(child: Child) -> Output {
    timeout(PATIENCE, child.wait_with_output()).await.unwrap().unwrap()
}

async fn a_cancel_is_sent_until_it_is_accepted(db: Db) {
    let service = slow(db).await;
    let (url, closed) = relay(&service).await;
    let (mut child, run) = invoked(&service, &url).await;
    until_said(&mut child, "iteration 1").await;
    closed.store(3, Ordering::SeqCst);
    send(&child, Signal::TERM);
    let output = ended(child).await;
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert_eq!(closed.load(Ordering::SeqCst), 0, "{said}");
    assert_eq!(said.matches("sent again until it is accepted").count(), 1, "{said}");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["error"]["context"]["reason"], "terminated by SIGTERM", "{answer:#}");
    let stored = service.get(&format!("/v1/runs/{run}")).await.body;
    assert_eq!(stored["status"], json!("cancelled"));
}

async fn a_second_interrupt_tells_that_the_run_may_continue(db: Db) {
    let service = slow(db).await;
    let (url, closed) = relay(&service).await;
    let (mut child, run) = invoked(&service, &url).await;
    until_said(&mut child, "iteration 1").await;
    closed.store(usize::MAX, Ordering::SeqCst);
    send(&child, Signal::INT);
    until_said(&mut child, "sent again").await;
    send(&child, Signal::INT);
    let output = ended(child).await;
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains(&run) && said.contains("the run may continue"), "{said}");
    let stored = service.get(&format!("/v1/runs/{run}")).await.body;
    assert_eq!(stored["status"], json!("running"));
}
