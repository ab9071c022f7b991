//! Commands whose service is away for a while.

use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy, copy_bidirectional, sink};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Child;
use tokio::time::timeout;

use crate::service::{Db, Service, Setup, Signal, command, on_both_stores, send_signal};

on_both_stores!(
    a_cancel_is_sent_until_it_is_accepted,
    a_load_balancer_without_a_service_is_a_service_that_is_away,
    an_interrupt_before_the_first_answer_waits_for_the_end,
    a_second_interrupt_tells_that_the_run_may_continue,
);

const PATIENCE: Duration = Duration::from_mins(1);
/// What a load balancer answers while the service behind it restarts.
const BAD_GATEWAY: &str = "HTTP/1.1 502 Bad Gateway\r\ncontent-type: text/html\r\ncontent-length: 24\r\n\
     connection: close\r\n\r\n<html>Bad gateway</html>";

async fn slow(db: Db) -> Service {
    Setup::new()
        .agent("slow", "model: scripted/slow\nenable_double_confirmation: false\n")
        .scenario("slow", "steps: [{delay_ms: 600000, text: no}]")
        .start(db)
        .await
}

/// Passes connections on to the service, but gives as many of the next ones as it is told this answer
/// and closes them.
async fn relay(service: &Service, answer: &'static str) -> (String, Arc<AtomicUsize>) {
    let target = service.url("").replace("http://", "");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let closed = Arc::<AtomicUsize>::default();
    let left = Arc::clone(&closed);
    tokio::spawn(async move {
        loop {
            let (mut caller, _) = listener.accept().await.unwrap();
            if left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok() {
                tokio::spawn(async move {
                    let _ = caller.read(&mut [0; 4096]).await;
                    let _ = caller.write_all(answer.as_bytes()).await;
                    let _ = caller.shutdown().await;
                    let _ = copy(&mut caller, &mut sink()).await;
                });
                continue;
            }
            let mut service = TcpStream::connect(&target).await.unwrap();
            tokio::spawn(async move { copy_bidirectional(&mut caller, &mut service).await });
        }
    });
    (format!("http://{address}"), closed)
}

/// Passes connections on to the service, but keeps what is answered on the first one to itself.
async fn relay_without_first_answer(service: &Service) -> String {
    let target = service.url("").replace("http://", "");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut is_first = true;
        loop {
            let (mut caller, _) = listener.accept().await.unwrap();
            let mut service = TcpStream::connect(&target).await.unwrap();
            if std::mem::take(&mut is_first) {
                tokio::spawn(async move {
                    let (mut answers, mut asked) = service.split();
                    let mut nothing = sink();
                    let passed = copy(&mut caller, &mut asked);
                    let _ = tokio::join!(passed, copy(&mut answers, &mut nothing));
                });
                continue;
            }
            tokio::spawn(async move { copy_bidirectional(&mut caller, &mut service).await });
        }
    });
    format!("http://{address}")
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

async fn cancelled_while_away(db: Db, answer: &'static str) {
    let service = slow(db).await;
    let (url, closed) = relay(&service, answer).await;
    let (mut child, run) = invoked(&service, &url).await;
    until_said(&mut child, "iteration 1").await;
    closed.store(3, Ordering::SeqCst);
    send_signal(&child, Signal::TERM);
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

async fn a_cancel_is_sent_until_it_is_accepted(db: Db) {
    cancelled_while_away(db, "").await;
}

async fn a_load_balancer_without_a_service_is_a_service_that_is_away(db: Db) {
    cancelled_while_away(db, BAD_GATEWAY).await;
}

async fn an_interrupt_before_the_first_answer_waits_for_the_end(db: Db) {
    let service = slow(db).await;
    let url = relay_without_first_answer(&service).await;
    let (child, run) = invoked(&service, &url).await;
    send_signal(&child, Signal::INT);
    let output = ended(child).await;
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{said}");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&answer["run_id"], &answer["status"]), (&json!(run), &json!("cancelled")));
}

async fn a_second_interrupt_tells_that_the_run_may_continue(db: Db) {
    let service = slow(db).await;
    let (url, closed) = relay(&service, "").await;
    let (mut child, run) = invoked(&service, &url).await;
    until_said(&mut child, "iteration 1").await;
    closed.store(usize::MAX, Ordering::SeqCst);
    send_signal(&child, Signal::INT);
    until_said(&mut child, "sent again").await;
    send_signal(&child, Signal::INT);
    let output = ended(child).await;
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains(&run) && said.contains("the run may continue"), "{said}");
    let stored = service.get(&format!("/v1/runs/{run}")).await.body;
    assert_eq!(stored["status"], json!("running"));
}
