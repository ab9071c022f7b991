//! Files that a page of the tool `browser` downloads: where they go, what they are called, and what bounds
//! them.
//!
//! | together with | here |
//! |---|---|
//! | changes, files, audit, labels, budget | `a_click_saves_a_file_in_the_workspace` |
//! | rules of paths and flow, quota, budget | `a_refused_download_says_why` |
//! | hostile names, endless answers, floods | `hostile_downloads_stay_within_bounds` |
//! | cancel | `a_cancelled_call_saves_nothing` |

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::HeaderValue;
use axum::response::{Html, IntoResponse, Response};
use serde_json::{Value, json};

use crate::browser::{Site, id, result, rows, scenario};
use crate::chromium;
use crate::service::{Db, Service, Setup, on_both_stores, on_one_store};

on_both_stores! {
    a_click_saves_a_file_in_the_workspace,
}

on_one_store! {
    a_refused_download_says_why,
}

/// Names that a site gives its file, and how the name of the file in the workspace ends.
const NAMES: &[(&str, &str)] = &[
    ("report.pdf", "report.pdf"),
    ("../../../etc/passwd", "passwd"),
    ("/etc/cron.d/evil", "evil"),
    ("..\\..\\evil.exe", "evil.exe"),
    (".bashrc", "bashrc"),
    (".toolloop-x.tmp", ".tmp"),
    ("..", "download"),
    ("a%00b.txt", "b.txt"),
    ("%2e%2e%2fx.txt", "x.txt"),
    ("CON.txt", ".txt"),
    ("\u{202e}gpj.exe", "gpj.exe"),
];

const LINKS: &str = "<title>Links</title>
    <a id=plain href='/file?name=report.pdf'>report</a>
    <a id=named href=/page download='notes.html'>notes</a>
    <a id=text download='.env' href='data:text/plain,SECRET=1'>data</a>
    <button id=export>export</button>
    <button id=large>large</button>
    <button id=flood>flood</button>
    <button id=many>many</button>
    <a id=huge href=/huge>huge</a>
    <a id=slow href=/slow>slow</a>
    <form action='/file?name=form.csv' method=post><input id=field name=q></form>
    <script>
      const save = (parts, name) => {
        const link = document.createElement('a');
        link.href = URL.createObjectURL(new Blob(parts));
        link.download = name;
        link.click();
      };
      document.getElementById('export').onclick = () => save(['a,b\\n1,2\\n'], 'table.csv');
      document.getElementById('large').onclick = () => save([new Uint8Array(7e7)], 'large.bin');
      document.getElementById('flood').onclick = () => {
        for (let i = 0; i < 100; i++) save(['x'.repeat(1e6)], 'same.bin');
      };
      document.getElementById('many').onclick = () => {
        for (let i = 0; i < 100; i++) {
          const frame = document.createElement('iframe');
          frame.src = '/file?name=frame.zip&' + i;
          document.body.append(frame);
        }
      };
    </script>";

async fn respond(request: Request) -> Response {
    let endless = |pause: Duration| {
        let chunks = futures::stream::unfold((), move |()| async move {
            tokio::time::sleep(pause).await;
            Some((Ok::<_, Infallible>(Bytes::from(vec![b'x'; 1 << 16])), ()))
        });
        let headers = [("content-disposition", "attachment; filename=endless.bin")];
        (headers, Body::from_stream(chunks)).into_response()
    };
    let query = request.uri().query().unwrap_or_default().to_owned();
    match request.uri().path() {
        "/" => Html(LINKS).into_response(),
        "/page" => Html("<p>notes").into_response(),
        "/huge" => endless(Duration::ZERO),
        "/slow" => endless(Duration::from_secs(1)),
        "/file" => {
            let name = query.strip_prefix("name=").unwrap_or_default();
            let name = name.split('&').next().unwrap_or_default();
            let header = format!("attachment; filename=\"{name}\"");
            let header = HeaderValue::from_bytes(header.as_bytes()).unwrap();
            ([("content-disposition", header)], "the content".repeat(100)).into_response()
        }
        path => {
            let number =
                path.strip_prefix("/names/").and_then(|number| number.parse::<usize>().ok());
            if let Some(number) = number {
                let name = NAMES[number].0;
                let header = format!("attachment; filename=\"{name}\"; filename*=UTF-8''{name}");
                let header = HeaderValue::from_bytes(header.as_bytes()).unwrap();
                ([("content-disposition", header)], name).into_response()
            } else {
                let link = |number| format!("<a id=n{number} href=/names/{number}>n</a> ");
                Html((0..NAMES.len()).map(link).collect::<String>()).into_response()
            }
        }
    }
}

async fn started(site: &Site, governance: &str, config: &str, calls: &[Value], db: Db) -> Service {
    chromium::program();
    let port = site.port;
    let agent = format!(
        "model: scripted/surfer\ntools: [browser]\nenable_double_confirmation: false\n\
         limits: {{error_threshold: 1000, max_iterations: 100, max_iterations_per_attempt: 100}}\n\
         governance: {{autonomy: full, {governance}, \
         network: {{allow: ['127.0.0.2:{port}'], allow_private: [127.0.0.2]}}}}\n"
    );
    Setup::new()
        .agent("surfer", &agent)
        .scenario("surfer", &scenario(calls))
        .config("[tools.browser]\ntimeout = \"2m\"")
        .config(config)
        .start(db)
        .await
}

fn open(site: &Site) -> Value {
    json!({"action": "open", "url": site.at("/")})
}

fn click(selector: &str) -> Value {
    json!({"action": "click", "selector": selector})
}

/// Paths and sizes of a run's files.
async fn files(service: &Service, run: &str) -> Vec<(String, u64)> {
    let listed = service.get(&format!("/v1/runs/{run}/files?limit=200")).await.body;
    let file = |file: &Value| {
        let path = file["path"].as_str().unwrap().to_owned();
        file["size"].as_u64().map(|size| (path, size))
    };
    let mut files: Vec<_> = listed["data"].as_array().unwrap().iter().filter_map(file).collect();
    files.sort();
    files
}

async fn a_click_saves_a_file_in_the_workspace(db: Db) {
    let site = Site::serving(respond).await;
    let calls = [
        open(&site),
        click("#plain"),
        click("#plain"),
        click("#named"),
        click("#text"),
        click("#export"),
        json!({"action": "type", "selector": "#field", "text": "x\n"}),
        json!({"action": "open", "url": site.at("/file?name=report.pdf")}),
    ];
    let service = started(&site, "paths: {write: ['downloads/**']}", "", &calls, db).await;
    let run = service.run("surfer", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let rows = rows(&service, id(&run)).await;
    let expected = [
        "Title: Links",
        "Saved a file of 1100 bytes as downloads/report.pdf.",
        "Saved a file of 1100 bytes as downloads/report-2.pdf.",
        "Saved a file of 8 bytes as downloads/notes.html.",
        "Saved a file of 8 bytes as downloads/env",
        "Saved a file of 8 bytes as downloads/table.csv.",
        "Saved a file of 1100 bytes as downloads/form.csv.",
        "open only reads",
    ];
    assert_eq!(rows.len(), expected.len());
    for (row, expected) in rows.iter().zip(expected) {
        assert!(result(row).contains(expected), "{expected}\n{row:#}");
        let is_open = row["arguments"].to_string().contains("open");
        assert_eq!(row["effect"], if is_open { "read" } else { "once" }, "{row:#}");
    }
    let files = files(&service, id(&run)).await;
    let paths: Vec<&str> = files.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(files.len(), 6, "{files:?}");
    let answer = service.url(&format!("/v1/runs/{}/files/downloads/table.csv", id(&run)));
    let answer = service.http.get(answer).bearer_auth(&service.key).send().await.unwrap();
    assert_eq!(answer.text().await.unwrap(), "a,b\n1,2\n");

    let changes = service.get(&format!("/v1/runs/{}/changes", id(&run))).await.body;
    let changes = changes["data"].as_array().unwrap();
    let mut listed: Vec<&str> =
        changes.iter().map(|change| change["path"].as_str().unwrap()).collect();
    listed.sort_unstable();
    assert_eq!(listed, paths);
    assert!(changes.iter().all(|change| change["change"] == "created"), "{changes:#?}");

    let run = service.get(&format!("/v1/runs/{}", id(&run))).await.body;
    assert_eq!(run["labels"], json!(["untrusted"]), "{run:#}");
    assert_eq!(run["budget"]["used"]["files_modified"], 6, "{run:#}");
    let audit = service.get(&format!("/v1/audit?run_id={}&limit=200", id(&run))).await.body;
    let records = audit["data"].as_array().unwrap().iter();
    let of_files: Vec<&Value> = records
        .filter(|record| {
            record["arguments"].to_string().contains("download\\\":")
                || record["arguments"]["download"].is_object()
        })
        .collect();
    assert_eq!(of_files.len(), 6, "{audit:#}");
    assert!(of_files.iter().all(|record| record["outcome"] == "succeeded"), "{of_files:#?}");
}

async fn a_refused_download_says_why(db: Db) {
    let site = Site::serving(respond).await;
    let calls = [open(&site), click("#plain"), click("#export")];
    let writes = "paths: {write: ['downloads/**']";
    let untrusted = "labels.untrusted && action.kind == 'write'";
    for (governance, config, first, second) in [
        ("budget: {}", "", "may be written is nothing", "may be written is nothing"),
        (&*format!("{writes}, deny: ['**/*.csv']}}"), "", "Saved a file", "is denied by **/*.csv"),
        (
            &*format!("{writes}}}"),
            "[tools.file_ops]\nmax_file = \"1KiB\"\n",
            "at most 1024",
            "Saved a file of 8",
        ),
        (
            &*format!("{writes}}}, budget: {{max_files_modified: 1}}"),
            "",
            "Saved a file",
            "max_files_modified",
        ),
        (
            &*format!("{writes}}}, flow: [{{when: \"{untrusted}\", do: deny}}]"),
            "",
            "this run has read what is untrusted",
            "this run has read what is untrusted",
        ),
        (&*format!("mode: observe, {writes}, deny: ['**/*.csv']}}"), "", "Saved", "Saved"),
    ] {
        let service = started(&site, governance, config, &calls, db).await;
        let run = service.run("surfer", &json!({})).await;
        assert_eq!(run["status"], "completed", "{run:#}");
        let rows = rows(&service, id(&run)).await;
        assert!(result(&rows[1]).contains(first), "{governance}\n{:#}", rows[1]);
        assert!(result(&rows[2]).contains(second), "{governance}\n{:#}", rows[2]);
        let saved = rows.iter().filter(|row| result(row).contains("Saved a file")).count();
        // What rules deny is not listed, though they only observe.
        let listed = saved - usize::from(governance.contains("observe"));
        assert_eq!(files(&service, id(&run)).await.len(), listed, "{governance}");
    }
}

#[tokio::test]
async fn hostile_downloads_stay_within_bounds() {
    let site = Site::serving(respond).await;
    let mut calls = vec![json!({"action": "open", "url": site.at("/names")})];
    calls.extend((0..NAMES.len()).map(|number| click(&format!("#n{number}"))));
    let floods = [open(&site), click("#large"), click("#flood"), click("#many"), click("#huge")];
    calls.extend(floods);
    calls.extend([open(&site), click("#export")]);
    let governance = "paths: {write: ['downloads/**']}";
    let service = started(&site, governance, "", &calls, Db::Sqlite).await;
    let before = service.peak_memory_mib();
    let run = service.run("surfer", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let rows = rows(&service, id(&run)).await;
    for ((suggested, name), row) in NAMES.iter().zip(&rows[1..]) {
        let saved = result(row).split("as downloads/").nth(1).unwrap_or_default();
        let saved = saved.trim_end_matches('.');
        assert!(saved.ends_with(name), "{suggested:?} is to be {name:?}\n{row:#}");
        assert!(!saved.starts_with('.') && !saved.contains(['/', '\\']), "{row:#}");
    }
    let of_floods = &rows[NAMES.len() + 2..];
    // A page that takes long to make a file makes it after the call, which then tells of none.
    assert!(!result(&of_floods[0]).contains("Saved a file"), "{:#}", of_floods[0]);
    for row in &of_floods[1..3] {
        assert!(result(row).matches("Saved a file").count() <= 10, "{row:#}");
    }
    assert!(result(&of_floods[3]).contains("bytes"), "{:#}", of_floods[3]);
    assert!(result(&of_floods[5]).contains("as downloads/table.csv"), "{:#}", of_floods[5]);
    let files = files(&service, id(&run)).await;
    let saved: usize = rows.iter().map(|row| result(row).matches("Saved a file").count()).sum();
    assert_eq!(files.len(), saved, "{files:?}");
    assert!(files.iter().all(|(path, _)| path.starts_with("downloads/")), "{files:?}");
    let grown = service.peak_memory_mib().saturating_sub(before);
    assert!(grown < 100, "the service took {grown} MiB");
}

#[tokio::test]
async fn a_cancelled_call_saves_nothing() {
    let site = Site::serving(respond).await;
    let calls = [open(&site), click("#slow"), click("#export")];
    let governance = "paths: {write: ['downloads/**']}";
    let service = started(&site, governance, "", &calls, Db::Sqlite).await;
    let run = service.enqueue("surfer").await;
    while !site.asked().iter().any(|asked| asked.contains("/slow")) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let cancelled = service.post(&format!("{run}/cancel"), &json!({})).await;
    assert!(cancelled.status.is_success(), "{:#}", cancelled.body);
    service.until(&run, |run| run["status"] == "cancelled").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let id = run.rsplit('/').next().unwrap();
    assert_eq!(files(&service, id).await, []);
}
