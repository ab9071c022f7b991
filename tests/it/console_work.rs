//! Working with the console in a real browser: the picture of a run with its children, the inbox,
//! edited arguments, runs once more, sessions, and hostile text on every page.
//!
//! | together with | here |
//! |---|---|
//! | children | `a_run_and_its_children_are_linked_both_ways` |
//! | parked runs, edited arguments, changed files | `a_call_is_approved_with_other_arguments` |
//! | several that wait | `the_inbox_answers_pending_calls`, `the_inbox_finds_pending_calls_behind_others` |
//! | names of keys, for one who may not list keys | `a_new_file_is_shown_as_new_and_newer_keys_by_their_names` |
//! | dry run, run again, copied requests | `a_run_is_done_once_more_as_it_was_or_otherwise` |
//! | queued runs | `a_run_that_is_to_wait_is_queued_by_the_form` |
//! | runs with secrets | `a_run_with_a_secret_is_not_repeated_as_it_is_shown` |
//! | sessions, streaming | `a_session_is_a_chat` |
//! | markup of models, tools, callers and files | `nothing_that_is_shown_is_executed` |
//! | budgets, tenants, another replica | as `GET /runs/{id}` tells them: the page knows no more |

use serde_json::{Value, json};

use crate::chromium::Chromium;
use crate::console::{signed_in, signed_in_with};
use crate::service::{ADMIN_KEY, Db, Service, Setup};

const OPEN: &str = "[auth]\nmode = \"none\"";

/// An agent that writes more than one page of its calls holds.
const BULKY: &str = "
model: scripted/bulky
tools: [file_ops]
enable_double_confirmation: false
governance: {autonomy: full, paths: {write: ['**']}, injection: {inputs: 'off', results: 'off'}}
";

fn id(run: &Value) -> &str {
    run["run_id"].as_str().unwrap()
}

async fn opened(service: &Service, page: &str) -> Chromium {
    let browser = Chromium::start().await;
    browser.open(&service.url(&format!("/console{page}"))).await;
    browser
}

/// A run that waits for a decision.
async fn parked(service: &Service, agent: &str, body: &Value) -> Value {
    let run = service.post(&format!("/v1/agents/{agent}/invoke-iterative"), body).await.body;
    assert_eq!(run["status"], "awaiting_approval", "{run:#}");
    run
}

#[tokio::test]
async fn a_run_and_its_children_are_linked_both_ways() {
    let parent = "
model: scripted/parent
tools: ['agent:helper']
parallel_tool_calls: true
enable_double_confirmation: false
";
    let helper = "
model: scripted/helper
inputs: {type: object, required: [task], properties: {task: {type: string}}}
enable_double_confirmation: false
";
    let asks = r#"
steps:
  - tool_calls:
      - {tool: "agent:helper", arguments: {task: one}}
      - {tool: "agent:helper", arguments: {task: two}}
      - {tool: "agent:helper", arguments: {task: three}}
  - text: all is done
"#;
    // More than a page of calls takes.
    let writes = "{tool_calls: [{tool: file_ops, arguments: {operation: write, path: a.txt, content: \"{{ 'y' * 900000 }}\"}}]}, ";
    let service = Setup::new()
        .agent("parent", parent)
        .scenario("parent", asks)
        .agent("helper", helper)
        .scenario("helper", "steps: [{text: 'did {{ inputs.task }}', delay_ms: 50}]")
        .agent(
            "heavy",
            &parent.replace("scripted/parent", "scripted/heavy").replace("helper", "bulky"),
        )
        .scenario(
            "heavy",
            "steps: [{tool_calls: [{tool: 'agent:bulky', arguments: {}}]}, {text: done}]",
        )
        .agent("bulky", BULKY)
        .scenario("bulky", &format!("steps: [{}{{text: done}}]", writes.repeat(5)))
        .config(OPEN)
        .start(Db::Sqlite)
        .await;
    let run = service.run("parent", &json!({})).await;
    let heavy = service.run("heavy", &json!({})).await;
    let browser = opened(&service, &format!("#/runs/{}", id(&run))).await;
    browser.until("document.querySelectorAll('.lane.child').length === 3").await;
    let lanes = "[...document.querySelectorAll('.lane .name')].slice(0, 2).map((n) => n.innerText.split(' ')[0])";
    browser.until_eq(lanes, json!(["Model", "Tools"])).await;
    browser
        .until(
            "document.querySelectorAll('.lane.child .status[data-status=completed]').length === 3",
        )
        .await;
    // Each call leads to the child that it started.
    let by_call = "[...document.querySelectorAll('.of-child a')].map((a) => a.hash)";
    browser.until_eq(&format!("[{by_call}.length, new Set({by_call}).size]"), json!([3, 3])).await;
    browser.screenshot("run-children").await;

    let second = browser.eval(&format!("{by_call}[1]")).await;
    let second = second.as_str().unwrap().replace("#/", "/v1/");
    assert_eq!(service.get(&second).await.body["inputs"], json!({"task": "two"}));
    browser.eval("document.querySelectorAll('.of-child a')[0].click()").await;
    browser.until_text("Delegated by").await;
    browser.until("document.querySelector('.end.completed')?.innerText.includes('did one')").await;
    browser.click("dd a[href^='#/runs/']").await;
    browser
        .until("document.querySelector('.end.completed')?.innerText.includes('all is done')")
        .await;

    // Its run, six answers of the model and five calls, however large these are.
    browser.go(&format!("runs/{}", id(&heavy))).await;
    let bars = "document.querySelector('.lane.child [aria-label$=bars]')?.ariaLabel === '12 bars'";
    browser.until(bars).await;
    browser.close(&service.url("/")).await;
}

const EDITOR: &str = "
model: scripted/editor
tools: [file_ops]
enable_double_confirmation: false
governance: {paths: {write: ['**']}}
";
const EDITING: &str = r#"
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: write, path: notes.txt, content: "one\ntwo\n"}}]
  - text: '{{ results[0] }}'
"#;

fn editors() -> Setup {
    Setup::new()
        .agent("editor", EDITOR)
        .scenario("editor", EDITING)
        .agent("author", &EDITOR.replace("scripted/editor", "scripted/author"))
        .scenario("author", EDITING)
        .agent(
            "seeker",
            &EDITOR
                .replace("scripted/editor", "scripted/seeker")
                .replace("governance: {", "governance: {tool_policies: {file_ops: ask}, "),
        )
        .scenario("seeker", SEEKING)
        .file("notes.txt", "zero\n")
}

/// A number that is another one in most programs.
const FAR: u64 = (1 << 53) + 1;
const SEEKING: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: \"no\\u202Etes.txt\", offset: 9007199254740993}}]
  - text: done
";

const ARGUMENTS: &str = ".editor textarea";

/// Enters arguments to approve instead.
fn put(text: &str) -> String {
    format!(
        "(() => {{ const f = document.querySelector('{ARGUMENTS}'); f.value = {}; f.dispatchEvent(new Event('input')); }})()",
        json!(text)
    )
}

/// The number that is shown, and with which the call is made, is its own; nothing is hidden in what is edited.
async fn a_long_number_is_called(service: &Service, browser: &Chromium) {
    let far = parked(service, "seeker", &json!({})).await;
    for page in ["approvals".to_owned(), format!("runs/{}", id(&far))] {
        browser.go(&page).await;
        browser.until("document.querySelector('main pre')?.innerText.includes('offset')").await;
        let shown = browser.eval("document.querySelector('main pre').innerText").await;
        assert!(shown.as_str().unwrap().contains(&FAR.to_string()), "{page}: {shown}");
    }
    browser.until("document.querySelector('.decision')?.hidden === false").await;
    browser.click(".decision [aria-expanded]").await;
    browser.until(&format!("document.activeElement.matches('{ARGUMENTS}')")).await;
    let text = browser.eval(&format!("document.querySelector('{ARGUMENTS}').value")).await;
    let text = text.as_str().unwrap();
    assert!(text.contains(&FAR.to_string()) && text.contains("no\\u202etes.txt"), "{text}");
    browser.eval(&put(&text.replace("no\\u202etes", "notes"))).await;
    browser.until("document.querySelector('.editor .diff .added')").await;
    browser.click(".decision .buttons button").await;
    browser.until("document.querySelector('.end.completed')").await;
    let preview = "document.querySelector('.call .preview')?.textContent";
    browser.until(&format!("{preview}.includes('\"notes.txt\",\"offset\":{FAR}')")).await;
    let calls = service.get(&format!("/v1/runs/{}/tool-calls", id(&far))).await.body;
    let expected = json!({"operation": "read", "path": "notes.txt", "offset": FAR});
    assert_eq!(calls["data"][0]["arguments"], expected);
}

#[tokio::test]
async fn a_call_is_approved_with_other_arguments() {
    let service = editors().start(Db::Sqlite).await;
    let first = parked(&service, "editor", &json!({})).await;
    let browser = signed_in(&service, &format!("#/runs/{}", id(&first))).await;
    let waits = "[aria-label='Waiting for']";
    browser
        .until(&format!("document.querySelector(\"{waits} .diff\")?.innerText.includes('+two')"))
        .await;

    browser.until("document.querySelector('.decision')?.hidden === false").await;
    browser.until("!document.querySelector('.picture [hidden]')").await;
    browser.click(".decision [aria-expanded]").await;
    browser.until(&format!("document.activeElement.matches('{ARGUMENTS}')")).await;
    // What is no JSON object is said at once, and not sent.
    for bad in ["{\"operation\":", "[]", "7"] {
        browser.eval(&put(bad)).await;
        browser
            .until(&format!("document.querySelector('{ARGUMENTS}').ariaInvalid === 'true'"))
            .await;
        browser.click(".decision .buttons button").await;
        browser.until("document.querySelector('.decision [role=alert]').innerText.includes('not a JSON object')").await;
    }
    assert_eq!(
        service.get(&format!("/v1/runs/{}", id(&first))).await.body["status"],
        "awaiting_approval"
    );

    let edited = json!({"operation": "write", "path": "notes.txt", "content": "one\nthree\n"});
    let asked = "performance.getEntriesByType('resource').filter((e) => e.name.endsWith('/files/notes.txt')).length";
    let asked_before = browser.eval(asked).await.as_u64().unwrap();
    let keystrokes: Vec<String> =
        (0..8).map(|spaces| put(&format!("{}{edited}", " ".repeat(spaces)))).collect();
    browser.eval(&keystrokes.join(";")).await;
    browser
        .until("document.querySelector('.editor .diff .removed')?.innerText.includes('two')")
        .await;
    browser
        .until("document.querySelector('.editor .diff .added')?.innerText.includes('three')")
        .await;
    browser
        .until("document.querySelector('.editor .preview-of-call .removed')?.innerText.includes('zero')")
        .await;
    let asked = browser.eval(asked).await.as_u64().unwrap();
    assert_eq!(asked, asked_before + 1, "typing asks for the file once, when it stops");
    browser.screenshot("approve-edited").await;
    browser.click(".decision .buttons button").await;
    browser.until("document.querySelector('.end.completed')").await;

    // The file holds what was approved, and the page shows how it changed.
    browser.until("document.querySelector('.changes .added')?.innerText.includes('three')").await;
    browser.until_eq("document.querySelector('.changes .removed').innerText.trim()", "-zero").await;
    let changes = service.get(&format!("/v1/runs/{}/changes", id(&first))).await.body;
    assert!(changes["data"][0]["diff"].as_str().unwrap().contains("+three"), "{changes:#}");
    browser.click(".changes .more").await;
    browser.until("document.querySelector('.call')?.innerText.includes('succeeded')").await;
    // The row tells what was executed, and calls that wait together wait once.
    browser.until("document.querySelector('.call .preview')?.innerText.includes('three')").await;
    let spans = "[{from: 0, to: 10}, {from: 5, to: 12}, {from: 20, to: null}]";
    let covered = format!("import('/console/spans.js').then((it) => it.covered({spans}, 25))");
    assert_eq!(browser.eval(&covered).await, 17);

    a_long_number_is_called(&service, &browser).await;
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn the_inbox_answers_pending_calls() {
    let service = editors().start(Db::Sqlite).await;
    let first = parked(&service, "editor", &json!({})).await;
    let second = parked(&service, "author", &json!({})).await;
    let browser = signed_in(&service, "#/approvals").await;
    browser.until("document.querySelectorAll('.inbox [data-call]').length === 2").await;
    browser.until("document.querySelector('.badge').textContent.startsWith('2')").await;
    browser.screenshot("inbox").await;

    browser.go("approvals?status=pending&agent=auth").await;
    browser.until("document.querySelectorAll('.inbox [data-call]').length === 1").await;
    browser.until_eq("document.querySelector('.inbox small').innerText", "author").await;
    browser.until("document.querySelector('.decision')?.hidden === false").await;
    browser.until("document.querySelector('.preview-of-call .diff')").await;
    browser.click(".decision input").await;
    browser.write("not now").await;
    browser.click(".decision button.danger").await;
    browser.until_text("Nothing waits for a decision.").await;
    browser.until("document.querySelector('.badge').textContent.startsWith('1')").await;
    let denied = service
        .until(&format!("/v1/runs/{}", id(&second)), |run| run["status"] == "completed")
        .await;
    assert!(denied["output"]["result"].as_str().unwrap().contains("not now"), "{denied:#}");

    // Who decided is named.
    browser.go("approvals?status=denied").await;
    let keys = service.get("/v1/keys").await.body;
    let name = keys["data"][0]["name"].as_str().unwrap().to_owned();
    browser.until_text(&format!("by {name}")).await;
    assert!(!browser.text().await.contains(ADMIN_KEY.split('_').nth(1).unwrap()));
    assert_eq!(
        service.get(&format!("/v1/runs/{}", id(&first))).await.body["status"],
        "awaiting_approval"
    );
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn the_inbox_finds_pending_calls_behind_others() {
    let service = editors().start(Db::Sqlite).await;
    parked(&service, "author", &json!({})).await;
    for _ in 0..100 {
        service.enqueue("editor").await;
    }
    let all_wait = |list: &Value| list["data"].as_array().is_some_and(|all| all.len() == 101);
    service.until("/v1/approvals?limit=200", all_wait).await;
    let browser = signed_in(&service, "#/approvals?agent=auth").await;
    browser.until("document.querySelectorAll('.inbox [data-call]').length === 1").await;
    browser.go("approvals").await;
    browser.until_text("100 requests among the newest 100; there are older ones.").await;
    // Of more that match, so many are shown.
    browser.go("approvals?agent=o").await;
    browser.until_text("100 requests among the newest 101; there are older ones.").await;
    browser.until_eq("document.querySelectorAll('.inbox [data-call]').length", 100).await;

    // Of a file that a call would replace, no more is read than is compared.
    let compared = "import('/console/preview.js').then(async ({ preview }) => {
        const real = window.fetch;
        const ranges = [];
        const answers = [new Response('', {status: 416}), new Response('x'.repeat(1_200_000), {status: 206})];
        window.fetch = (url, options) => {
            if (!String(url).includes('/files/')) return real(url, options);
            ranges.push(options.headers.Range);
            return Promise.resolve(answers.shift());
        };
        const isCompared = [];
        while (answers.length) {
            const node = preview({tool: 'file_ops', run_id: 'r'}, {operation: 'write', path: 'p', content: 'y'});
            await new Promise((resolve) => { new MutationObserver(resolve).observe(node, {childList: true}); });
            isCompared.push(node.textContent.includes('p would change'));
        }
        window.fetch = real;
        return [ranges, isCompared];
    })";
    let range = "bytes=0-1199999";
    assert_eq!(browser.eval(compared).await, json!([[range, range], [true, false]]));
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn a_new_file_is_shown_as_new_and_newer_keys_by_their_names() {
    let asked = "governance: {tool_policies: {file_ops: ask}, ";
    let asked =
        EDITOR.replace("governance: {", asked).replace("scripted/editor", "scripted/starter");
    let service = editors()
        .agent("starter", &asked)
        .scenario("starter", &EDITING.replace("notes.txt", "fresh.txt"))
        .start(Db::Sqlite)
        .await;
    let run = parked(&service, "starter", &json!({})).await;
    // One who decides need not see the list of keys: the names of those who acted are told all the same.
    let scopes = json!(["runs:read", "runs:approve", "agents:read", "files:read"]);
    let wanted = json!({"name": "day-shift", "scopes": scopes});
    let key = service.post("/v1/keys", &wanted).await.body["key"].clone();
    let page = format!("#/runs/{}", id(&run));
    let browser = signed_in_with(key.as_str().unwrap(), &service, &page).await;
    assert_eq!(browser.eval("fetch('/v1/keys').then((it) => it.status)").await, 403);
    browser.until_text("fresh.txt would be a new file").await;
    browser.screenshot("approve-new-file").await;
    browser.until("document.querySelector('.decision')?.hidden === false").await;
    browser.click(".decision .buttons button").await;
    browser.until("document.querySelector('.end.completed')").await;
    browser.until("document.querySelector('.changes .what')?.innerText === 'new'").await;
    browser.until_text("Continues: it has what it waited for").await;
    assert!(!browser.text().await.contains("after a restart"));
    let told = "document.querySelector('.timeline').textContent.includes('by day-shift')";
    browser.until(told).await;
    browser.screenshot("run-after-approval").await;

    // The names of keys were asked for before this one was made.
    let wanted = json!({"name": "night-shift", "scopes": ["runs:approve", "runs:read"]});
    let made = service.post("/v1/keys", &wanted).await.body;
    let second = parked(&service, "author", &json!({})).await;
    let call = second["pending"][0]["call_id"].as_str().unwrap();
    let path = format!("/v1/runs/{}/tool-calls/{call}/deny", id(&second));
    let by_other = reqwest::Client::new().post(service.url(&path)).json(&json!({}));
    let by_other = by_other.bearer_auth(made["key"].as_str().unwrap()).send().await.unwrap();
    assert!(by_other.status().is_success(), "{by_other:?}");
    browser.go("approvals?status=denied").await;
    browser.until_text("by night-shift").await;
    browser.close(&service.url("/")).await;
}

const ECHO: &str = "
model: scripted/echo
inputs:
  type: object
  required: [people]
  properties:
    people: {type: array, items: {type: object, required: [name], properties: {name: {type: string}, tags: {type: array, items: {type: string}}}}}
    address: {type: object, properties: {street: {type: string}, number: {type: integer}}}
    task: {type: string}
    size: {type: integer}
    empty: {type: string}
    nothing: {type: [string, 'null']}
    none: {type: array, items: {type: integer}}
    windows: {type: string}
    open: {type: object, properties: {known: {type: string}}}
enable_double_confirmation: false
";

/// Inputs, with those of which a form could make others.
fn with_kept(mut inputs: Value) -> Value {
    let kept = json!({
        "task": "delete a\nkeep b", "size": FAR, "empty": "", "nothing": null, "none": [],
        "windows": "one\r\ntwo", "open": {"known": "x", "unknown": [1e-7, u64::MAX]},
    });
    let all = inputs.as_object_mut().unwrap();
    all.extend(kept.as_object().unwrap().clone());
    inputs
}

/// What is left empty says what it is; a text has lines, and those that a field cannot have are entered as JSON.
async fn is_filled_in(browser: &Chromium) {
    let form = browser.eval("document.querySelector('form.invoke').innerText").await;
    for hint in ["Left empty, it is \"\".", "Left empty, it is null."] {
        assert!(form.as_str().unwrap().contains(hint), "{form}");
    }
    for (name, value) in [
        ("task", "delete a\nkeep b".to_owned()),
        ("size", FAR.to_string()),
        ("windows", "\"one\\r\\ntwo\"".to_owned()),
    ] {
        let field = format!("document.querySelector('#field-inputs-{name}').value");
        assert_eq!(browser.eval(&field).await, value, "{name}");
    }
}

async fn is_copied(browser: &Chromium) {
    for (language, sign) in
        [("curl", "curl -N -X POST"), ("TypeScript", "await fetch("), ("Python", "import requests")]
    {
        browser.eval(&format!("[...document.querySelectorAll('.tabs button')].find((b) => b.textContent === '{language}').click()")).await;
        let code = browser.eval("document.querySelector('.snippets pre').textContent").await;
        let code = code.as_str().unwrap();
        assert!(code.contains(sign) && code.contains("Ole") && !code.contains(ADMIN_KEY), "{code}");
        assert!(code.contains(&FAR.to_string()) && code.contains(&u64::MAX.to_string()), "{code}");
    }
}

/// Values that the control for a schema cannot show as they are.
fn odd_values() -> Vec<(Value, Value)> {
    let text = json!({"type": "string"});
    let texts = json!({"type": "array", "items": text});
    let object =
        json!({"type": "object", "properties": {"a": text, "length": {"type": "integer"}}});
    let mut values = vec![
        (json!({"type": "integer"}), json!("5")),
        (json!({"type": "integer"}), json!("five")),
        (json!({"type": "string", "format": "date"}), json!("tomorrow")),
        (json!({"type": "string", "format": "email"}), json!(" a@b.example ")),
        (json!({"type": "string", "writeOnly": true}), json!("one\ntwo")),
        (json!({"enum": ["a", null]}), json!("b")),
        (json!({"enum": ["a", null]}), json!(null)),
        (json!({"const": "a"}), json!("b")),
        (texts.clone(), (0..300).map(|n| n.to_string()).collect()),
        (texts, json!(["", null, "a\nb", 7])),
    ];
    let of = |schema: &Value, some: &[Value]| -> Vec<(Value, Value)> {
        some.iter().map(|value| (schema.clone(), value.clone())).collect()
    };
    values.extend(of(&text, &[json!(5), json!("a\rb"), json!("\na"), json!({})]));
    values
        .extend(of(&object, &[json!({}), json!(null), json!([1]), json!("abc"), json!({"b": 1})]));
    values
}

async fn odd_values_stay(browser: &Chromium) {
    for (schema, value) in odd_values() {
        let filled = format!(
            "import('/console/fields.js').then(({{makeField}}) => {{
                const field = makeField('x', 'X', {schema});
                field.set({value});
                return field.read([]);
            }})"
        );
        assert_eq!(browser.eval(&filled).await, value, "{schema}");
    }
}

#[tokio::test]
async fn a_run_is_done_once_more_as_it_was_or_otherwise() {
    let service = Setup::new()
        .agent("echo", ECHO)
        .scenario("echo", "steps: [{text: '{{ inputs | tojson }}'}]")
        .start(Db::Sqlite)
        .await;
    let inputs = with_kept(
        json!({"people": [{"name": "Ines", "tags": ["a", "b"]}, {"name": "Ola"}], "address": {"number": 3}}),
    );
    let request = json!({"inputs": inputs, "metadata": {"ticket": "42"}, "budget": {"max_tool_calls": 7}, "temperature": 0.5});
    let run = service.run("echo", &request).await;
    let browser = signed_in(&service, &format!("#/runs/{}", id(&run))).await;
    let newest = async |than: &str| {
        let there = format!(
            "location.hash.startsWith('#/runs/') && !location.hash.includes('{than}') && document.querySelector('.end')"
        );
        browser.until(&there).await;
        let path = browser.eval("location.hash").await.as_str().unwrap().replace("#/", "/v1/");
        let run = service.until(&path, |run| run["status"] == "completed").await;
        let link = format!("document.querySelector('.actions a.button[href$=\"{}\"]')", id(&run));
        browser.until(&link).await;
        run
    };

    browser.click(".actions button").await;
    let again = newest(id(&run)).await;
    for part in ["inputs", "metadata", "overrides"] {
        assert_eq!(
            again[part],
            service.get(&format!("/v1/runs/{}", id(&run))).await.body[part],
            "{part}"
        );
    }

    // With changes: lists and objects are edited part by part, the rest stays.
    browser.click(".actions a.button").await;
    browser.until("document.querySelector('#field-inputs-people-0-name')?.value === 'Ines'").await;
    browser.until_eq("document.querySelector('#field-inputs-people-0-tags-1').value", "b").await;
    browser.eval("document.querySelector('#field-inputs-people-1-name').value = ''").await;
    browser.click("#field-inputs-people-1-name").await;
    browser.write("Ole").await;
    browser.click("[aria-label='Remove an entry of tags']").await;
    browser.screenshot("form-prefilled").await;

    is_filled_in(&browser).await;

    // A dry run starts nothing; the request in other languages holds no key.
    let count = async || service.get("/v1/runs").await.body["data"].as_array().unwrap().len();
    let before = count().await;
    let button = |name: &str| {
        format!(
            "[...document.querySelectorAll('form button')].find((b) => b.textContent.startsWith('{name}')).click()"
        )
    };
    browser.eval(&button("Dry run")).await;
    browser.until("document.querySelector('[aria-label=\"Dry run\"]')?.innerText.includes('nothing was started')").await;
    assert_eq!(count().await, before);
    browser.eval(&button("Copy as")).await;
    is_copied(&browser).await;

    browser.click("button.main").await;
    let changed = newest(id(&again)).await;
    let expected = with_kept(
        json!({"people": [{"name": "Ines", "tags": ["b"]}, {"name": "Ole"}], "address": {"number": 3}}),
    );
    assert_eq!(changed["inputs"], expected);
    assert_eq!(changed["metadata"], json!({"ticket": "42"}));
    assert_eq!(
        (&changed["overrides"]["temperature"], &changed["overrides"]["budget"]["max_tool_calls"]),
        (&json!(0.5), &json!(7))
    );
    odd_values_stay(&browser).await;
    browser.close(&service.url("/")).await;
}

/// Opens a page of a service with one plain agent.
async fn plain(page: &str) -> (Service, Chromium) {
    let service = Setup::new()
        .agent("plain", "model: scripted/plain\nenable_double_confirmation: false\n")
        .scenario("plain", "steps: [{text: done}]")
        .config(OPEN)
        .start(Db::Sqlite)
        .await;
    let browser = opened(&service, page).await;
    (service, browser)
}

#[tokio::test]
async fn a_run_that_is_to_wait_is_queued_by_the_form() {
    let (service, browser) = plain("#/agents/plain").await;
    browser.until("document.querySelector('#field-available_at')").await;
    let later = chrono::Utc::now() + chrono::TimeDelta::hours(1);
    let later = later.format("%Y-%m-%dT%H:%M:%SZ");
    browser.eval(&format!("document.querySelector('#field-available_at').value = '{later}'")).await;
    let copy = "[...document.querySelectorAll('form button')].find((b) => b.textContent.startsWith('Copy as')).click()";
    browser.eval(copy).await;
    for (language, header) in [
        ("curl", "-H 'Prefer: respond-async'"),
        ("TypeScript", "\"Prefer\": \"respond-async\","),
        ("Python", ", \"Prefer\": \"respond-async\"}"),
    ] {
        let tab = format!(
            "[...document.querySelectorAll('.tabs button')].find((b) => b.textContent === '{language}')"
        );
        browser.until(&tab).await;
        browser.eval(&format!("{tab}.click()")).await;
        let code = browser.eval("document.querySelector('.snippets pre').textContent").await;
        assert!(code.as_str().unwrap().contains(header), "{code}");
    }
    browser.click("button.main").await;
    browser.until("location.hash.startsWith('#/runs/')").await;
    let path = browser.eval("location.hash").await.as_str().unwrap().replace("#/", "/v1/");
    let run = service.get(&path).await.body;
    assert_eq!((&run["status"], run["available_at"].is_string()), (&json!("queued"), true));

    // So is one with a priority, which another run can have again.
    browser.go("agents/plain").await;
    browser.until("document.querySelector('#field-priority')?.value === ''").await;
    browser.eval("document.querySelector('#field-priority').value = '7'").await;
    browser.click("button.main").await;
    browser.until("location.hash.startsWith('#/runs/')").await;
    let path = browser.eval("location.hash").await.as_str().unwrap().replace("#/", "/v1/");
    assert_eq!(service.get(&path).await.body["priority"], 7);
    browser.go(&path.replace("/v1/runs/", "agents/plain?from=")).await;
    browser.until("document.querySelector('#field-priority')?.value === '7'").await;
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn a_form_that_is_sent_twice_starts_one_run() {
    let (service, browser) = plain("#/agents/plain").await;
    browser.until("document.querySelector('form.invoke')").await;
    let twice = "(() => {
        const real = window.fetch;
        let posts = 0;
        window.fetch = (url, options) => {
            if (options?.method === 'POST') posts += 1;
            return real(url, options);
        };
        const form = document.querySelector('form.invoke');
        form.requestSubmit();
        form.requestSubmit();
        return posts;
    })()";
    assert_eq!(browser.eval(twice).await, 1);
    browser.until("document.querySelector('.end.completed')").await;

    // A form has an end, whatever the schema of a tool is: one that leads to itself, lists of lists by default.
    let endless = "import('/console/fields.js').then(({ makeField }) => {
        const names = Array.from({length: 60}, (_, number) => `p${number}`);
        const properties = Object.fromEntries(names.map((name) => [name, {$ref: '#/$defs/a'}]));
        const schema = {type: 'object', $defs: {a: {type: 'object', properties}}, properties};
        const field = makeField('f', '', schema, true);
        const value = {p0: {p1: {p2: {p3: {p4: {p5: 1}}}}}, p59: {p58: {}}};
        field.set(value);
        const list = (items) => ({type: 'array', default: Array(200).fill([]), items});
        const lists = makeField('l', '', list(list(list(list({type: 'string'})))), true);
        return [field.node.querySelectorAll('textarea').length, field.read([]), lists.node.querySelectorAll('li').length];
    })";
    let form = browser.eval(endless).await;
    assert!((1000..=2000).contains(&form[0].as_u64().unwrap()), "{form:#}");
    assert!((1..=2000).contains(&form[2].as_u64().unwrap()), "{form:#}");
    let value = json!({"p0": {"p1": {"p2": {"p3": {"p4": {"p5": 1}}}}}, "p59": {"p58": {}}});
    assert_eq!(form[1], value);
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn a_run_with_a_secret_is_not_repeated_as_it_is_shown() {
    let (service, browser) = plain("").await;
    // The overview of a service that has run nothing.
    let duration = "document.querySelectorAll('.tile')[3]?.textContent";
    browser.until_eq(duration, "Duration, median–").await;
    let repeats = "[...document.querySelectorAll('.actions button')].some((b) => b.textContent === 'Run again')";
    for (inputs, is_repeated) in [(json!({"a": 1}), true), (json!({"password": "hunter2"}), false)]
    {
        let run = service.run("plain", &json!({"inputs": inputs})).await;
        browser.go(&format!("runs/{}", id(&run))).await;
        let change = format!("document.querySelector('.actions a.button[href$=\"{}\"]')", id(&run));
        browser.until(&change).await;
        assert_eq!(browser.eval(repeats).await, is_repeated);
        browser.eval(&format!("{change}.click()")).await;
        browser.until("document.querySelector('form.invoke')").await;
        if is_repeated {
            assert!(!browser.text().await.contains("shown as [redacted]"));
        } else {
            browser.until_text("shown as [redacted]").await;
        }
    }
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn a_session_is_a_chat() {
    let agent = "
model: scripted/talk
prompt: '{{ inputs.message }}'
inputs: {type: object, required: [message], properties: {message: {type: string}}}
enable_double_confirmation: false
";
    let service = Setup::new()
        .agent("talk", agent)
        .scenario("talk", "steps: [{text: 'you said {{ inputs.message }}', delay_ms: 2500}]")
        .config(OPEN)
        .start(Db::Sqlite)
        .await;
    service.run("talk", &json!({"inputs": {"message": "hello"}, "session_id": "s/1 ü"})).await;
    // A run that begins tomorrow keeps none from being sent now.
    let tomorrow = chrono::Utc::now() + chrono::TimeDelta::days(1);
    let later = json!({
        "inputs": {"message": "later"}, "session_id": "s/1 ü", "available_at": tomorrow
    });
    let later = service
        .request(reqwest::Method::POST, "/v1/agents/talk/invoke-iterative")
        .header("prefer", "respond-async")
        .json(&later);
    assert_eq!(later.send().await.unwrap().status(), 202);
    let browser = opened(&service, "#/sessions").await;
    browser.click("td a").await;
    browser.until("document.querySelectorAll('.bubble').length === 2").await;
    browser.click("#message").await;
    browser.write("and again").await;
    browser
        .watch_for("document.querySelector('.bubble .live')?.textContent.includes('you ')")
        .await;
    browser.click(".composer button.main").await;
    browser.until_seen().await;
    let said = "!document.querySelector('.live') && \
                [...document.querySelectorAll('.bubble .said')].map((p) => p.innerText)";
    let expected = json!(["hello", "you said hello", "and again", "you said and again"]);
    browser.until_eq(said, expected).await;
    browser.until_eq("document.querySelectorAll('.bubble').length", 4).await;
    browser.screenshot("session").await;

    // Of more messages than are shown, the last ones.
    let messages = "sessions/s%2F1%20%C3%BC/messages?limit=1";
    for (most, more) in [(3, true), (4, false)] {
        let last = format!(
            "import('/console/api.js').then(({{last}}) => last('{messages}', undefined, {most}))"
        );
        let last = browser.eval(&last).await;
        let rows = last["rows"].as_array().unwrap();
        assert_eq!((rows.len(), &last["more"]), (most, &json!(more)), "{last:#}");
        assert_eq!(rows[most - 1]["content"], "you said and again");
    }
    // Of a long text that is being written, the last characters.
    let live = "import('/console/dom.js').then(({ grow }) => {
        const place = document.createElement('p');
        return [1, 20_000, 1_000_000].map((length) => {
            grow(place, 'x'.repeat(length));
            return place.textContent.length;
        });
    })";
    assert_eq!(browser.eval(live).await, json!([1, 20_000, 20_002]));
    browser.close(&service.url("/")).await;
}

/// Texts that a page which makes markup of them would execute or load.
const CORPUS: [&str; 8] = [
    "<img src=x onerror=\"window.struck=1\">",
    "<script>window.struck=1</script>",
    "<svg onload=\"window.struck=1\"><a href=\"javascript:window.struck=1\">x</a></svg>",
    "</pre></textarea></title><iframe srcdoc=\"<script>parent.struck=1</script>\"></iframe>",
    "javascript:window.struck=1",
    "[[constructor]] ${window.struck=1} `${window.struck=1}`",
    "<details open ontoggle=\"window.struck=1\"><style>@import 'http://x.invalid/'</style>",
    "__proto__ \u{202e}\u{2066}\u{200b} <base href=\"http://x.invalid/\"><form id=main><input name=key>",
];

#[tokio::test]
async fn nothing_that_is_shown_is_executed() {
    let all = CORPUS.join("\n");
    let text = serde_json::to_string(&all).unwrap();
    let steps = format!(
        "steps:\n  - {{text: {text}, delay_ms: 1500, tool_calls: [{{tool: file_ops, arguments: {{operation: read, path: x.txt}}}}, {{tool: {text}, arguments: {text}}}]}}\n  \
         - {{text: {text}, tool_calls: [{{tool: file_ops, arguments: {{operation: write, path: 'new.txt', content: {text}}}}}]}}\n  \
         - {{tool_calls: [{{tool: file_ops, arguments: {{operation: write, path: 'x.txt', content: {text}}}}}]}}\n  - text: {text}\n"
    );
    let agent = format!(
        "model: scripted/nasty\ndescription: {text}\ntools: [file_ops, 'script:odd/*']\nenable_double_confirmation: false\ngovernance: {{paths: {{write: ['**']}}, injection: {{inputs: off, results: off}}}}\n\
         inputs: {{type: object, properties: {{a: {{type: array, title: {text}, description: {text}, items: {{type: string}}}}}}}}"
    );
    let tool = format!(
        "tools: [{{name: nasty, command: [cat], description: {text}, input_schema: {{type: object, properties: {{\"p\u{202e}\": {{type: integer}}, \
         b: {{title: {text}, description: {text}, enum: [{text}]}}, c: {{const: {text}}}}}}}}}]"
    );
    let service = Setup::new()
        .agent("nasty", &agent)
        .scenario("nasty", &steps)
        .tools("odd", &tool)
        .file("x.txt", &format!("{all}\nand more\n"))
        .start(Db::Sqlite)
        .await;
    let request =
        json!({"inputs": {"a": CORPUS}, "metadata": {"k": CORPUS[0]}, "session_id": CORPUS[0]});
    let parked = parked(&service, "nasty", &request).await;

    let browser = signed_in(&service, "#/").await;
    let session = "%3Cimg%20src%3Dx%20onerror%3D%22window.struck%3D1%22%3E";
    for (page, drawn) in [
        ("/", ".panels"),
        ("/runs", "[data-run]"),
        (&format!("/runs/{}", id(&parked)) as &str, ".changes:not([hidden]) details"),
        ("/approvals", ".decision:not([hidden])"),
        ("/sessions", "td a"),
        (&format!("/sessions/{session}"), ".of-run"),
        ("/agents", ".card"),
        (&format!("/agents/nasty?from={}", id(&parked)), "form.invoke"),
        (&format!("/runs/{session}"), ".notice.bad"),
        ("/runs/%zz", ".notice.bad"),
        ("/tools", ".card"),
        ("/judge/nasty", "#judged-tool"),
    ] {
        browser.go(page).await;
        browser.until(&format!("document.querySelector('{drawn}')")).await;
        browser.eval("document.querySelectorAll('#judged-tool').forEach((s) => { s.selectedIndex = s.length - 1; s.dispatchEvent(new Event('change')); })").await;
        for press in ["Edit arguments", "Dry run", "Copy as", "Show all"] {
            browser.eval(&format!("[...document.querySelectorAll('button')].filter((b) => b.textContent.startsWith('{press}')).forEach((b) => b.click())")).await;
        }
        browser.eval("document.querySelectorAll('details').forEach((d) => d.open = true)").await;
        browser
            .until("[...document.querySelectorAll('details')].every((d) => d.children.length > 1)")
            .await;
        let made = "document.querySelectorAll('img, iframe, style, base, script:not([src]), a[href^=\"javascript:\"], [onerror], [onload], [ontoggle]').length";
        assert_eq!(browser.eval(made).await, 0, "{page}");
        assert_eq!(browser.eval("window.struck === undefined").await, true, "{page}");
        let hidden =
            "/.{0,40}[\\u202e\\u2066\\u200b]/.exec(document.title + document.body.textContent)";
        assert_eq!(browser.eval(hidden).await, Value::Null, "{page}");
        let is_unreachable = browser.eval("document.body.innerText.includes('cannot be reached')");
        assert_eq!(is_unreachable.await, false, "{page}");
    }
    // The same while it is written, and in the answer to an approval.
    browser.go("agents/nasty").await;
    browser
        .watch_for("document.querySelector('.said.live')?.textContent.includes('onerror')")
        .await;
    browser.click("button.main").await;
    browser.until_seen().await;
    browser.until("document.querySelector('.decision:not([hidden])')").await;
    browser.until("document.querySelector('.preview-of-call .diff')").await;
    browser.until("!document.querySelector('.picture [hidden]')").await;
    browser.click(".decision button").await;
    browser.until("document.querySelector('.end.completed')").await;
    assert_eq!(browser.eval("document.querySelectorAll('img, iframe').length").await, 0);
    assert_eq!(browser.eval("window.struck === undefined").await, true);
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn the_overview_counts_runs_and_errors() {
    let service = editors()
        .agent("hopeless", "model: scripted/hopeless")
        .scenario("hopeless", "steps: [{error: {status: 400, message: it is no use}}]")
        .start(Db::Sqlite)
        .await;
    parked(&service, "editor", &json!({})).await;
    for _ in 0..2 {
        service.run("hopeless", &json!({})).await;
    }
    let browser = signed_in(&service, "").await;
    browser.until("document.querySelectorAll('.tile').length === 5").await;
    let counted =
        "[...document.querySelectorAll('.tile strong')].slice(0, 3).map((t) => t.innerText)";
    browser.until_eq(counted, json!(["3", "2", "1"])).await;
    for part in ["Runs a minute", "model error", "editor", "scripted/editor", "latency"] {
        browser.until_text(part).await;
    }
    browser.screenshot("overview").await;
    browser.click(".bars a[href*='termination_reason=model_error']").await;
    browser.until("document.querySelectorAll('[data-run]').length === 2").await;

    // A part of an agent's name finds its runs.
    browser.go("runs?agent=hope").await;
    browser.until("document.querySelectorAll('[data-run]').length === 2").await;
    browser.go("runs?agent=EDIT").await;
    browser.until("document.querySelectorAll('[data-run]').length === 1").await;

    // The oldest request is told where all of them were read.
    let waiting = "document.querySelectorAll('.tile')[2]?.textContent";
    browser.go("").await;
    browser.until_eq(waiting, "Waiting for a decision1oldest: editor").await;
    let more = "(() => {
        const real = window.fetch;
        window.fetch = (url, options) => (String(url).includes('/approvals?')
            ? Promise.resolve(Response.json({data: [{agent: 'editor'}], next_cursor: 'x'})) : real(url, options));
    })()";
    browser.eval(more).await;
    browser.go("runs").await;
    browser.go("").await;
    browser.until_eq(waiting, "Waiting for a decision1+").await;
    browser.close(&service.url("/")).await;
}
