//! Documents that `file_ops` reads as text, and hostile ones, through the HTTP API on both stores.
//!
//! With other features. Children, sessions, parked runs, other replica: as every file (`files.rs`). Cancel and
//! crash: the reader is a process that ends with its call or by its own limits. Streaming, tenants,
//! budgets, skills, dry run, console, command line, generated clients: as every read.

use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::service::{Db, Service, Setup, on_one_store};

on_one_store! {
    the_text_of_a_pdf_document_is_read_page_by_page,
    hostile_documents_are_refused_and_the_service_goes_on,
}

/// A document whose pages show these lines.
pub(crate) fn pdf(pages: &[&[&str]]) -> Vec<u8> {
    let kids: Vec<String> = (0..pages.len()).map(|i| format!("{} 0 R", 4 + 2 * i)).collect();
    let mut objects = vec![
        "<< /Type /Catalog /Pages 2 0 R >>".to_owned(),
        format!("<< /Type /Pages /Kids [{}] /Count {} >>", kids.join(" "), pages.len()),
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>".to_owned(),
    ];
    for (i, lines) in pages.iter().enumerate() {
        let mut content = "BT /F1 12 Tf 14 TL 72 720 Td\n".to_owned();
        for line in *lines {
            writeln!(content, "({line}) Tj T*").unwrap();
        }
        content.push_str("ET");
        objects.push(format!(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {} 0 R /Resources << /Font << /F1 3 0 R \
             >> >> >>",
            5 + 2 * i
        ));
        objects.push(format!("<< /Length {} >>\nstream\n{content}\nendstream", content.len()));
    }
    of_objects(&objects)
}

fn of_objects(objects: &[String]) -> Vec<u8> {
    let mut text = "%PDF-1.4\n".to_owned();
    let mut offsets = Vec::new();
    for (i, object) in objects.iter().enumerate() {
        offsets.push(text.len());
        write!(text, "{} 0 obj\n{object}\nendobj\n", i + 1).unwrap();
    }
    let table = text.len();
    write!(text, "xref\n0 {}\n0000000000 65535 f \n", objects.len() + 1).unwrap();
    for offset in offsets {
        writeln!(text, "{offset:010} 00000 n ").unwrap();
    }
    write!(
        text,
        "trailer\n<< /Size {} /Root 1 0 R >>\nstartxref\n{table}\n%%EOF\n",
        objects.len() + 1
    )
    .unwrap();
    text.into_bytes()
}

const AGENT: &str = "model: scripted/reader\ntools: [file_ops]\nenable_double_confirmation: false\n\
    limits: {error_threshold: 100, max_iterations: 50, max_iterations_per_attempt: 50}\ngovernance: {autonomy: full, paths: {read: ['**']}}\n";

async fn reading(db: Db, files: &[(String, Vec<u8>)], calls: &[Value]) -> (Service, Vec<String>) {
    let call = |arguments: &Value| {
        json!({"tool_calls": [{"tool": "file_ops", "arguments": arguments}]}).to_string()
    };
    let steps: Vec<String> = calls.iter().map(call).collect();
    let setup = Setup::new()
        .agent("reader", AGENT)
        .scenario("reader", &format!("steps: [{}, {{text: done}}]", steps.join(", ")));
    let service = setup.start(db).await;
    let workspace = service.dir.path().join("workspace/default");
    std::fs::create_dir_all(&workspace).unwrap();
    for (name, content) in files {
        std::fs::write(workspace.join(name), content).unwrap();
    }
    let run = service.run("reader", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}\n{}", service.log());
    let path = format!("/v1/runs/{}/tool-calls?limit=200", run["run_id"].as_str().unwrap());
    let calls = service.get(&path).await.body["data"].as_array().unwrap().clone();
    let text = |call: &Value| {
        let told = [&call["result"], &call["error"]["message"], &call["error"]];
        told.into_iter().find_map(Value::as_str).unwrap_or_default().to_owned()
    };
    let results = calls.iter().map(text).collect();
    (service, results)
}

fn read(path: &str) -> Value {
    json!({"operation": "read", "path": path})
}

async fn the_text_of_a_pdf_document_is_read_page_by_page(db: Db) {
    let document = pdf(&[&["Annual report", "Revenue grew."], &["Second page"]]);
    let many: Vec<String> = (0..2000).map(|i| format!("line {i} {}", "x".repeat(40))).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let large: Vec<&[&str]> = many.chunks(40).collect();
    let png = [
        &b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"[..],
        &640_u32.to_be_bytes(),
        &480_u32.to_be_bytes(),
        &[8, 2, 0, 0, 0, 0, 0, 0, 0],
    ];
    let files = [
        ("report.pdf".to_owned(), document),
        ("large.pdf".to_owned(), pdf(&large)),
        ("scan.pdf".to_owned(), pdf(&[&[]])),
        ("chart.png".to_owned(), png.concat()),
    ];
    let calls = [
        read("report.pdf"),
        json!({"operation": "read", "path": "report.pdf", "offset": 4, "limit": 1}),
        json!({"operation": "read", "path": "large.pdf", "offset": 1, "limit": 3}),
        read("scan.pdf"),
        read("chart.png"),
    ];
    let (_, results) = reading(db, &files, &calls).await;
    for line in ["[Page 1]", "Annual report", "Revenue grew.", "[Page 2]", "Second page"] {
        assert!(results[0].lines().any(|shown| shown.trim() == line), "{line}: {}", results[0]);
    }
    assert!(results[1].contains("offset 5") && !results[1].contains("Annual"), "{}", results[1]);
    assert!(results[2].starts_with("[Page 1]\nline 0 "), "{}", results[2]);
    assert!(results[3].contains("PDF document of 1 pages without text"), "{}", results[3]);
    assert!(results[4].contains("an image (PNG, 640 x 480 pixels)"), "{}", results[4]);
}

/// Whatever addresses its reader was given.
#[tokio::test]
async fn a_document_is_read_every_time() {
    let files = [("report.pdf".to_owned(), pdf(&[&["Annual report"]]))];
    let (service, _) = reading(Db::Sqlite, &files, &[read("report.pdf")]).await;
    for _ in 0..200 {
        let call = json!({"tool": "file_ops", "arguments": read("report.pdf")});
        let run = service.post("/v1/agents/reader/call", &call).await.body;
        let told = run["output"].to_string();
        assert!(told.contains("Annual report"), "{run:#}");
    }
}

async fn hostile_documents_are_refused_and_the_service_goes_on(db: Db) {
    let page =
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << >> >>";
    let around = |pages: &str, content: &str| {
        let objects = ["<< /Type /Catalog /Pages 2 0 R >>", pages, page, content];
        of_objects(&objects.map(str::to_owned))
    };
    let usual = "<< /Type /Pages /Kids [3 0 R] /Count 1 >>";
    let stream =
        |content: &str| format!("<< /Length {} >>\nstream\n{content}\nendstream", content.len());
    let deep = format!("{}1{}", "[".repeat(200_000), "]".repeat(200_000));
    let form = "<< /Type /XObject /Subtype /Form /BBox [0 0 1 1] /Resources << /XObject << /F 4 0 R >> >> /Length 5 \
                >>\nstream\n/F Do\nendstream";
    let calls_itself = of_objects(&[
        "<< /Type /Catalog /Pages 2 0 R >>".to_owned(),
        usual.to_owned(),
        page.replace("/Resources << >>", "/Resources << /XObject << /F 4 0 R >> >>"),
        form.to_owned(),
    ]);
    let table: Vec<(&str, Vec<u8>)> = vec![
        ("only-magic", b"%PDF-1.7".to_vec()),
        (
            "noise",
            [
                b"%PDF-1.4\n".to_vec(),
                (0..100_000_u32).map(|i| ((i * 7919) >> 3).to_le_bytes()[0]).collect(),
            ]
            .concat(),
        ),
        ("pages-of-pages", around("<< /Type /Pages /Kids [2 0 R] /Count 1 >>", &stream(""))),
        (
            "own-parent",
            around(
                "<< /Type /Pages /Parent 2 0 R /Kids [3 0 R] /Count 1 >>",
                &stream("BT (x) Tj ET"),
            ),
        ),
        ("deep-array", around(usual, &deep)),
        ("deep-content", around(usual, &stream(&deep))),
        ("deep-dictionary", around(usual, &"<< /A ".repeat(200_000))),
        ("calls-itself", calls_itself),
        ("huge-length", around(usual, "<< /Length 99999999999999 >>\nstream\nx\nendstream")),
        ("negative-length", around(usual, "<< /Length -5 >>\nstream\nx\nendstream")),
        ("no-font", around(usual, &stream("BT /Nope 12 Tf (x) Tj ET"))),
        ("many-saves", around(usual, &stream(&"q ".repeat(500_000)))),
        ("huge-count", around("<< /Type /Pages /Kids [3 0 R] /Count 2147483647 >>", &stream(""))),
        (
            "wrong-filter",
            around(usual, "<< /Length 4 /Filter /FlateDecode >>\nstream\nabcd\nendstream"),
        ),
        ("bomb", bomb(usual, page)),
    ];
    let files: Vec<(String, Vec<u8>)> =
        table.iter().map(|(name, content)| (format!("{name}.pdf"), content.clone())).collect();
    let calls: Vec<Value> = files.iter().map(|(name, _)| read(name)).collect();
    let (service, results) = reading(db, &files, &calls).await;
    assert_eq!(results.len(), table.len());
    for ((name, _), result) in table.iter().zip(&results) {
        let is_refused = ["PDF document", "cannot be read", "[Page 1]"];
        assert!(is_refused.iter().any(|it| result.contains(it)), "{name}: {result:.300}");
        assert!(result.len() < 9 << 20, "{name}");
    }
    assert_eq!(service.get("/healthz").await.status, 200);
    assert!(!service.log().contains("panicked"), "{}", service.log());
}

/// A page whose content is 128 MiB of nothing, deflated twice.
fn bomb(pages: &str, page: &str) -> Vec<u8> {
    use std::io::Write;
    let mut inner = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::best());
    let zeros = vec![b' '; 1 << 20];
    for _ in 0..128 {
        inner.write_all(&zeros).unwrap();
    }
    let inner = inner.finish().unwrap();
    let mut outer = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::best());
    outer.write_all(&inner).unwrap();
    let content = outer.finish().unwrap();
    let head = format!(
        "%PDF-1.4\n1 0 obj\n<< /Type /Catalog /Pages 2 0 R >>\nendobj\n2 0 obj\n{pages}\nendobj\n3 0 obj\n{page}\nendobj\n\
         4 0 obj\n<< /Length {} /Filter [/FlateDecode /FlateDecode] >>\nstream\n",
        content.len()
    );
    let tail = "\nendstream\nendobj\ntrailer\n<< /Size 5 /Root 1 0 R >>\nstartxref\n0\n%%EOF\n";
    [head.as_bytes(), &content, tail.as_bytes()].concat()
}
