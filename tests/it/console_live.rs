//! A run while it goes on, in a real browser: text that is being written, long runs, lost
//! connections, and every type of event.
//!
//! | together with | here |
//! |---|---|
//! | the first answer of a run that the form starts | `an_answer_is_one_text_that_grows` |
//! | a connection that breaks within an answer | `a_broken_connection_costs_no_step` |
//! | cancel, keyboard, markup of models | `console.rs` |
//! | ended runs, two thousand iterations | `a_long_run_stays_a_small_page` |
//! | events of later versions | `every_type_of_event_has_a_picture` |
//! | SQLite and PostgreSQL | the page sees the API alone: one store is enough |

use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::chromium::Chromium;
use crate::console::signed_in;
use crate::mock_model::{MockModel, Reply};
use crate::service::{Db, Service, Setup};

const WRITER: &str = "
description: Writes at length.
model: scripted/writer
tools: [file_ops]
enable_double_confirmation: false
";
const WORDS: usize = 120;
/// More words than an answer has: all of it.
const ALL: usize = usize::MAX;

fn words() -> String {
    (0..WORDS).map(|n| format!("word{n}")).collect::<Vec<_>>().join(" ")
}

/// A service whose model answers twice: as many words of each answer as are allowed.
struct Writing {
    service: Service,
    _mock: MockModel,
    first: watch::Sender<usize>,
    second: watch::Sender<usize>,
}

async fn writing() -> Writing {
    let mock = MockModel::start().await;
    let list =
        json!({"name": "file_ops", "arguments": "{\"operation\": \"list\", \"path\": \".\"}"});
    let call = json!({"id": "call_1", "type": "function", "function": list});
    let opening = json!({"role": "assistant", "content": "first of all", "tool_calls": [call]});
    let (first, of_first) = watch::channel(0);
    let (second, of_second) = watch::channel(0);
    let rest = json!({"role": "assistant", "content": words()});
    mock.script([Reply::Words(of_first, opening), Reply::Words(of_second, rest)]);
    let config = format!(
        "[auth]\nmode = \"none\"\n[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\n\
         timeout = \"1h\"\nfirst_byte_timeout = \"1h\"\nidle_timeout = \"1h\"\n",
        mock.base_url()
    );
    let agent = WRITER.replace("scripted/writer", "mock/any");
    let service = Setup::new().agent("writer", &agent).config(&config).start(Db::Sqlite).await;
    Writing { service, _mock: mock, first, second }
}

#[tokio::test]
async fn an_answer_is_one_text_that_grows() {
    let Writing { service, first, second, .. } = &writing().await;
    let browser = Chromium::start().await;
    browser.open(&service.url("/console#/agents/writer")).await;
    let live = "document.querySelector('.iteration.live .said.live')";
    // The first answer about the run is read only when that is told.
    let delayed = "(() => {
        const real = window.fetch;
        let isFirst = true;
        window.fetch = async (url, options) => {
            const answer = await real(url, options);
            if (!isFirst || !/\\/runs\\/[^/?]+$/.test(url)) return answer;
            isFirst = false;
            const text = await answer.text();
            answer.text = () => new Promise((resolve) => {
                window.release = () => {
                    setTimeout(() => { document.body.dataset.read = 'late'; });
                    resolve(text);
                };
            });
            return answer;
        };
    })()";
    browser.eval(delayed).await;
    browser.click("button.main").await;

    // The very first answer, and then the one behind the call.
    first.send_replace(1);
    browser.until(&format!("{live}?.textContent.startsWith('first')")).await;
    first.send_replace(ALL);
    second.send_replace(6);
    browser.until(&format!("{live}?.textContent.includes('word5')")).await;
    let node = format!("window.grows = {live}; grows.textContent.length");
    let before = browser.eval(&node).await.as_u64().unwrap();
    second.send_replace(60);
    browser.until(&format!("grows.textContent.length > {before}")).await;
    assert_eq!(browser.eval(&format!("grows === {live}")).await, true, "it is drawn once");
    assert_eq!(browser.eval("document.querySelectorAll('.iteration').length").await, 2);
    assert_eq!(browser.eval("document.querySelectorAll('.iteration.live').length").await, 1);
    browser.screenshot("run-writing").await;

    // What is durable takes its place.
    second.send_replace(ALL);
    browser.until("document.querySelector('.end.completed')").await;
    assert_eq!(browser.eval("document.querySelectorAll('.live').length").await, 0);
    assert_eq!(browser.eval("document.querySelectorAll('.iteration').length").await, 2);
    let text = "document.querySelectorAll('.iteration .said')[1].textContent.split(' ').length";
    assert_eq!(browser.eval(text).await, WORDS);

    // What was asked while it was in progress does not make an ended run one in progress.
    let status = "document.querySelector('.title .status')?.dataset.status";
    browser.until_eq(status, "completed").await;
    browser.eval("release()").await;
    browser.until("document.body.dataset.read === 'late'").await;
    assert_eq!(browser.eval(status).await, "completed");
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn scrolling_up_stops_the_page_from_following() {
    let Writing { service, first, second, .. } = &writing().await;
    let browser = Chromium::start().await;
    browser.window(700, 420).await;
    browser.open(&service.url("/console#/agents/writer")).await;
    browser.click("button.main").await;
    let at_end = "document.documentElement.scrollHeight - innerHeight - scrollY < 80";
    first.send_replace(ALL);
    second.send_replace(10);
    browser.until("document.querySelector('.said.live')?.textContent.includes('word9')").await;
    browser.until(at_end).await;
    browser.until_eq("document.querySelector('.follow').hidden", true).await;

    browser.eval("scrollTo(0, 0)").await;
    browser.until("!document.querySelector('.follow').hidden").await;
    let words = browser.eval("document.querySelector('.said.live').textContent.length").await;
    second.send_replace(60);
    browser
        .until(&format!("document.querySelector('.said.live').textContent.length > {words} + 40"))
        .await;
    assert_eq!(browser.eval("scrollY").await, 0);
    browser.click(".follow").await;
    browser.until("document.querySelector('.follow').hidden").await;
    browser.until(at_end).await;
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn a_long_run_stays_a_small_page() {
    const ITERATIONS: usize = 2000;
    let step = |n: usize| {
        format!(
            "  - {{text: look {n}, tool_calls: [{{tool: file_ops, arguments: {{operation: glob, pattern: n{n}.txt}}}}]}}\n"
        )
    };
    let steps: String = (1..ITERATIONS).map(step).collect();
    let agent = "
model: scripted/long
tools: [file_ops]
enable_double_confirmation: false
limits: {max_iterations: 5000, max_iterations_per_attempt: 5000}
governance: {budget: {max_iterations: 5000, max_tool_calls: 5000}}
";
    let service = Setup::new()
        .agent("long", agent)
        .scenario("long", &format!("steps:\n{steps}  - text: the end\n"))
        .start(Db::Sqlite)
        .await;
    let run = service.run("long", &json!({})).await;
    assert_eq!(run["iterations"], ITERATIONS, "{}", run["error"]);

    let browser = signed_in(&service, &format!("#/runs/{}", run["run_id"].as_str().unwrap())).await;
    let last = "document.querySelector('.timeline > li:last-child')";
    browser.until(&format!("{last}?.getAttribute('aria-setsize') > 0")).await;
    let heading = |n: usize| {
        format!("document.querySelector('.timeline').innerText.includes('Iteration {n}\\n')")
    };
    browser.until(&heading(1)).await;
    let mut most = 0;
    browser.until("document.querySelector('.timeline').offsetHeight > 2000 * 50").await;
    for part in [0.25, 0.5, 0.75, 1.0] {
        let middle = "[...document.querySelectorAll('.timeline > li')].some((li) => {
            const box = li.getBoundingClientRect(); return box.top < innerHeight / 2 && box.bottom > innerHeight / 2; })";
        browser.eval(&format!("scrollTo(0, document.documentElement.scrollHeight * {part})")).await;
        browser.until(middle).await;
        let elements = browser.eval("document.querySelectorAll('*').length").await;
        most = most.max(elements.as_u64().unwrap());
    }
    assert!(most <= 5000, "{most} elements");
    browser.eval("document.querySelector('.follow').click()").await;
    browser.until("document.querySelector('.end.completed')").await;
    browser.until(&heading(ITERATIONS)).await;
    browser.close(&service.url("/")).await;
}

/// Stands between browser and service, and breaks what goes through it when told to.
pub(crate) async fn fragile_proxy(to: String) -> (String, watch::Sender<u32>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let breaks = watch::Sender::new(0);
    let broken = breaks.subscribe();
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            let (to, mut broken) = (to.clone(), broken.clone());
            broken.mark_unchanged();
            tokio::spawn(async move {
                let mut far = TcpStream::connect(to).await.unwrap();
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                    _ = broken.changed() => {}
                }
            });
        }
    });
    (format!("http://{address}"), breaks)
}

#[tokio::test]
async fn a_broken_connection_costs_no_step() {
    let Writing { service, first, second, .. } = &writing().await;
    let (proxy, breaks) = fragile_proxy(service.url("").replace("http://", "")).await;
    let browser = Chromium::start().await;
    browser.open(&format!("{proxy}/console#/agents/writer")).await;
    browser.click("button.main").await;
    // Within the first answer, and within the second: a reader gets its pieces if it is there at its beginning.
    let is_lost = "document.body.innerText.includes('connection lost')";
    for (answer, begun) in [(first, "first"), (second, "word")] {
        answer.send_replace(1);
        let live = "document.querySelector('.said.live')?.textContent";
        browser.until(&format!("{live}.includes('{begun}')")).await;
        browser.watch_for(is_lost).await;
        breaks.send_modify(|n| *n += 1);
        browser.until_seen().await;
        browser.until(&format!("!{is_lost}")).await;
        // A stream that is open reads the journal first, and then hears of the next answer.
        tokio::time::sleep(std::time::Duration::from_secs(2)).await;
        answer.send_replace(ALL);
    }
    browser.until("document.querySelector('.end.completed')").await;
    assert_eq!(browser.eval("document.querySelectorAll('.iteration').length").await, 2);
    assert_eq!(browser.eval("document.querySelectorAll('.call').length").await, 1);
    assert_eq!(browser.eval("document.querySelectorAll('.end').length").await, 1);
    let text = "document.querySelectorAll('.iteration .said')[1].textContent.split(' ').length";
    assert_eq!(browser.eval(text).await, WORDS);
    browser.close(&proxy).await;
}

#[tokio::test]
async fn every_type_of_event_has_a_picture() {
    let service = Setup::new().config("[auth]\nmode = \"none\"").start(Db::Sqlite).await;
    let document = service.get("/v1/openapi.json").await.body;
    let schema = &document["components"]["schemas"]["StreamEvent"];
    let types: Vec<&String> =
        schema["discriminator"]["mapping"].as_object().unwrap().keys().collect();
    assert!(types.len() > 30, "{schema:#}");
    let browser = Chromium::start().await;
    browser.open(&service.url("/console")).await;
    let known = browser
        .eval("import('/console/pictures.js').then((m) => [...Object.keys(m.NOTES), ...m.PARTS])")
        .await;
    let known: Vec<&str> = known.as_array().unwrap().iter().filter_map(Value::as_str).collect();
    let missing: Vec<&&String> = types.iter().filter(|t| !known.contains(&t.as_str())).collect();
    assert!(missing.is_empty(), "no picture for {missing:?}");

    // An unknown one is a line that can be opened.
    let drawn = "Promise.all([import('/console/story.js'), import('/console/rows.js')]).then(([s, r]) => {
        const story = new s.Story();
        story.add({seq: 1, at: '2026-01-01T00:00:00Z', type: 'moon.rose', data: {bright: '<b>very</b>'}});
        const { node } = r.drawn(story.rows[0], (id) => id);
        const details = node.querySelector('details');
        details.open = true;
        document.body.append(node);
        return new Promise((resolve) => details.addEventListener('toggle', () => resolve(node.innerText))); })";
    let drawn = browser.eval(drawn).await;
    let drawn = drawn.as_str().unwrap();
    assert!(drawn.contains("moon.rose") && drawn.contains("<b>very</b>"), "{drawn}");

    // What a model wrote at length is cut.
    let cut =
        "Promise.all([import('/console/story.js'), import('/console/rows.js')]).then(([s, r]) => {
        const story = new s.Story();
        const data = {agent: 'other', reason: 'x'.repeat(1_000_000)};
        story.add({seq: 1, at: '2026-01-01T00:00:00Z', type: 'handoff.started', data});
        return r.drawn(story.rows[0]).node.textContent.length; })";
    let shown = browser.eval(cut).await.as_u64().unwrap();
    assert!((3000..4000).contains(&shown), "{shown} characters");
    browser.close(&service.url("/")).await;
}

/// A stream more than a key may have open is refused with 429.
#[tokio::test]
async fn a_stream_that_is_one_too_many_is_opened_later() {
    let setup = Setup::new().agent("writer", WRITER).scenario("writer", "steps: [{text: done}]");
    let service = setup.start(Db::Sqlite).await;
    let run = service.run("writer", &json!({})).await;
    let browser = signed_in(&service, "#/runs").await;
    let refused = "(() => {
        const real = window.fetch;
        let streams = 0;
        window.fetch = (url, options) => (String(url).endsWith('/events') && (streams += 1) === 1
            ? Promise.resolve(new Response('{\"detail\": \"too many\"}', {status: 429})) : real(url, options));
    })()";
    browser.eval(refused).await;
    browser.go(&format!("runs/{}", run["run_id"].as_str().unwrap())).await;
    browser.until("document.querySelector('.end.completed')").await;

    // A run that cannot be followed any more, as one that was deleted, is not asked for again and again.
    let gone = "(() => {
        const { fetch, setInterval, clearInterval } = window;
        window.timers = new Map();
        window.setInterval = (go, ms) => {
            const timer = setInterval(go, ms);
            if (ms >= 500) timers.set(timer, ms); // `until` has one of its own
            return timer;
        };
        window.clearInterval = (timer) => {
            timers.delete(timer);
            clearInterval(timer);
        };
        window.fetch = (url, options) => (String(url).endsWith('/events')
            ? Promise.resolve(Response.json({detail: 'It is gone.'}, {status: 404})) : fetch(url, options));
    })()";
    browser.eval(gone).await;
    browser.go("runs").await;
    browser.until("timers.size === 1").await;
    browser.go(&format!("runs/{}", run["run_id"].as_str().unwrap())).await;
    browser.until_text("It is gone.").await;
    assert_eq!(browser.eval("[...timers.values()]").await, json!([]));
    browser.go("runs/01970000-0000-7000-8000-000000000000").await;
    browser.until("document.querySelector('main > .notice.bad')").await;
    assert_eq!(browser.eval("[...timers.values()]").await, json!([]));

    // A stream that fails again and again is opened less and less often.
    let pauses = "import('/console/stream.js').then(async ({ follow }) => {
        const { fetch, setTimeout } = window;
        const left = new AbortController();
        const pauses = [];
        window.fetch = () => Promise.resolve(new Response('{}', {status: 500}));
        window.setTimeout = (go, ms) => {
            if (ms >= 1000 && pauses.push(ms) === 7) left.abort();
            return setTimeout(go, 0);
        };
        try {
            for await (const event of follow('any', left.signal)) pauses.push(event);
        } catch {
            Object.assign(window, { fetch, setTimeout });
        }
        return pauses;
    })";
    let doubled = json!([1000, 2000, 4000, 8000, 16000, 30000, 30000]);
    assert_eq!(browser.eval(pauses).await, doubled);
    browser.close(&service.url("/")).await;
}

#[tokio::test]
async fn an_answer_to_filters_that_have_changed_is_not_shown() {
    let setup = Setup::new().agent("writer", WRITER).scenario("writer", "steps: [{text: done}]");
    let service = setup.start(Db::Sqlite).await;
    let run = service.run("writer", &json!({})).await;
    let browser = signed_in(&service, "#/runs").await;
    let search = async |words: &str| {
        let change = format!(
            "(() => {{
                const field = document.querySelector('[name=q]');
                field.value = '{words}';
                field.dispatchEvent(new Event('change', {{bubbles: true}}));
            }})()"
        );
        browser.eval(&change).await;
    };

    // The answer to one search comes when that to the next one is shown.
    let delayed = "(() => {
        const real = window.fetch;
        const released = new Promise((resolve) => { window.release = resolve; });
        window.fetch = async (url, options) => {
            const answer = await real(url, options);
            const search = new URL(url).searchParams.get('q');
            if (!search) return answer;
            if (search === 'nothing') await released;
            const text = await answer.text();
            answer.text = async () => {
                setTimeout(() => { document.body.dataset.read = search; });
                return text;
            };
            return answer;
        };
    })()";
    browser.eval(delayed).await;
    let id = run["run_id"].as_str().unwrap();
    search("nothing").await;
    search(id).await;
    browser.until(&format!("document.body.dataset.read === '{id}'")).await;
    assert_eq!(browser.eval("document.querySelectorAll('[data-run]').length").await, 1);
    browser.eval("release()").await;
    browser.until("document.body.dataset.read === 'nothing'").await;
    assert_eq!(browser.eval("document.querySelectorAll('[data-run]').length").await, 1);
    browser.close(&service.url("/")).await;
}
