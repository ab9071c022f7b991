//! `shell` through the HTTP API, on both stores.
//!
//! With other features. Children and handoffs: what a parent denies or asks for holds in them (here). Parked
//! runs: a command that needs an approval (here). Sessions: nothing of a command is kept but its
//! result. Cancel: the programs end with the run (here). Crash at any commit: a command that changes
//! something is like any call of effect `once` (`crashes.rs`); its programs die with the service
//! (here). Other replica: the call is prepared again there. Streaming: as every tool. Tenants: the
//! workspace is the tenant's. Budgets: a command counts as one. Skills: as every tool. Dry
//! run: shows the tool. Console, CLI, generated clients: the result is text as of any tool.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::service::{Db, Service, Setup, on_both_stores, on_one_store};

on_both_stores! {
    commands_run_and_are_journaled_as_they_ran,
    commands_that_are_not_listed_are_refused_with_the_reason,
    a_command_can_need_an_approval,
    programs_end_with_their_run_and_with_the_service,
    a_parents_rules_hold_in_children,
    a_command_that_only_reads_does_so_beside_one_that_writes,
}

on_one_store! {
    rules_hold_for_programs_that_programs_run,
    names_that_no_rule_can_be_held_for_are_refused,
    a_file_with_another_hard_link_is_not_written,
    long_outputs_lose_their_middle_and_stay_json,
    files_that_the_rules_name_can_be_made,
    files_in_a_directory_that_may_be_written_can_go,
}

const RULES: &str = "{allow: [{command: echo}, {command: cat, effect: read}, {command: ls, effect: read}, {command: wc, \
     effect: read}, {command: touch}, {command: sleep}, {command: 'false'}, {command: git, args: '^log\\b', match: \
     ['git log -3'], no_match: ['git push']}], deny: [{command: touch, args: precious}], require_approval: [{command: \
     mkdir}]}";

fn agent(rules: &str, more: &str) -> String {
    format!(
        "model: scripted/worker\ntools: [shell]\nenable_double_confirmation: false\n{more}\ngovernance: {{autonomy: \
         full, paths: {{write: ['./**'], deny: ['**/.env']}}, commands: {rules}}}\n"
    )
}

fn scenario(commands: &[&str]) -> String {
    let call = |command: &&str| {
        json!({"tool_calls": [{"tool": "shell", "arguments": {"command": command}}]}).to_string()
    };
    let steps: Vec<String> = commands.iter().map(call).collect();
    format!("steps: [{}, {{text: done}}]", steps.join(", "))
}

async fn events(service: &Service, run: &Value, kind: &str) -> Vec<Value> {
    let path = format!("/v1/runs/{}/events?limit=200", run["run_id"].as_str().unwrap());
    let all = service.get(&path).await.body["data"].as_array().unwrap().clone();
    all.into_iter().filter(|e| e["type"] == kind).map(|e| e["data"].clone()).collect()
}

async fn results(service: &Service, run: &Value) -> Vec<Value> {
    let completed = events(service, run, "tool_call.completed").await;
    let content = |event: &Value| {
        serde_json::from_str(event["content"].as_str().unwrap()).unwrap_or(event.clone())
    };
    completed.iter().map(content).collect()
}

async fn commands_run_and_are_journaled_as_they_ran(db: Db) {
    let service = Setup::new()
        .agent("worker", &agent(RULES, ""))
        .scenario(
            "worker",
            &scenario(&[
                "cat a.txt b.txt | wc -l",
                "echo one > out.txt && echo two >> out.txt; cat out.txt",
                "false || echo else",
                "cat missing.txt",
                "cd sub && ls *.md",
                "cat *",
                "cat .env",
            ]),
        )
        .file("a.txt", "1\n2\n")
        .file("b.txt", "3\n")
        .file("sub/x.md", "")
        .file(".env", "TOKEN=canary\n")
        .start(db)
        .await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let results = results(&service, &run).await;
    assert_eq!(results.len(), 7, "{results:#?}\n{}", service.log());
    assert_eq!(results[0]["stdout"].as_str().map(str::trim), Some("3"), "{results:#?}");
    assert_eq!(results[0]["exit_code"], 0);
    assert_eq!(results[0]["sandbox"], "enforced");
    assert!(results[0]["duration_ms"].is_u64());
    assert_eq!(results[1]["stdout"], "one\ntwo\n");
    assert_eq!(results[2]["stdout"], "else\n");
    assert_eq!(results[3]["exit_code"], 1, "a command that fails is a result: {results:#?}");
    assert!(results[3]["stderr"].as_str().unwrap().contains("missing.txt"));
    assert_eq!(results[4]["stdout"], "x.md\n");
    assert!(!results[5].to_string().contains("canary"), "{results:#?}");
    assert!(!results[6].to_string().contains("canary"), "{results:#?}");

    let started = events(&service, &run, "tool_call.started").await;
    assert!(started.iter().all(|call| call["sandbox"] == "enforced"), "{started:#?}");
    let actions = &started[0]["actions"];
    assert_eq!(actions[0]["kind"], "exec", "{actions:#}");
    let argv = actions[0]["argv"].as_array().unwrap();
    assert!(argv[0].as_str().unwrap().ends_with("/cat"), "{actions:#}");
    assert_eq!(argv[1..], [json!("a.txt"), json!("b.txt")]);
    assert_eq!(started[0]["effect"], "read", "its rules say that it reads only");
    assert_eq!(started[1]["effect"], "once");
    let tool = service.get("/v1/tools/shell").await.body;
    assert_eq!(tool["sandbox"], "enforced", "{tool:#}");
    assert!(tool["description"].as_str().unwrap().contains("Sandbox: enforced"), "{tool:#}");
}

async fn commands_that_are_not_listed_are_refused_with_the_reason(db: Db) {
    let lines = [
        ("id", "what may run is echo, cat"),
        ("echo $(id)", "command substitution"),
        ("touch precious.txt", "denied by touch precious"),
        ("git push origin", "may not run"),
        ("echo x > ../x", "leaves the workspace"),
        ("echo x > .env", "denied by **/.env"),
        ("./evil", "is not in a directory where programs may be"),
        ("git log --output=x", "makes git write or run something"),
    ];
    let commands: Vec<&str> = lines.iter().map(|(line, _)| *line).collect();
    let service = Setup::new()
        .agent("worker", &agent(RULES, "limits: {error_threshold: 50}"))
        .scenario("worker", &scenario(&commands))
        .file("evil", "#!/bin/sh\ntouch pwned\n")
        .start(db)
        .await;
    let run = service.run("worker", &json!({})).await;
    let blocked = events(&service, &run, "tool_call.blocked").await;
    assert_eq!(blocked.len(), lines.len(), "{blocked:#?}");
    for ((line, reason), blocked) in lines.iter().zip(&blocked) {
        let said = blocked["reason"].as_str().unwrap();
        assert!(said.contains(reason), "{line}: {said}");
    }
    let broken = "model: scripted/worker\ntools: [shell]\n";
    service.write("agents/broken.yaml", &format!("name: broken\n{broken}"));
    let ready = service
        .until("/readyz", |ready| ready.to_string().contains("broken.yaml"))
        .await
        .to_string();
    assert!(ready.contains("runs nothing without"), "{ready}");
}

async fn a_command_can_need_an_approval(db: Db) {
    let service = Setup::new()
        .agent("worker", &agent(RULES, ""))
        .scenario("worker", &scenario(&["mkdir made", "ls"]))
        .start(db)
        .await;
    let path = service.enqueue("worker").await;
    let parked = service.until(&path, |run| run["status"] == "awaiting_approval").await;
    let pending = &parked["pending"][0];
    assert!(
        pending["reason"].as_str().unwrap().contains("mkdir made needs an approval"),
        "{pending:#}"
    );
    let call = pending["call_id"].as_str().unwrap();
    let approved = service.post(&format!("{path}/tool-calls/{call}/approve"), &json!({})).await;
    assert!(approved.status.is_success(), "{:#}", approved.body);
    let run = service.until(&path, |run| run["status"] == "completed").await;
    assert!(results(&service, &run).await[1]["stdout"].as_str().unwrap().contains("made"));
}

async fn rules_hold_for_programs_that_programs_run(db: Db) {
    let denied = [
        "env touch made",
        "echo made | xargs touch",
        "sh -c 'echo x; /usr/bin/touch made'",
        "find . -maxdepth 0 -exec touch made ';'",
        "nice -n 1 nohup touch made",
        "awk 'BEGIN{system(\"touch made\")}'",
        "env rm -f a.txt",
    ];
    let benign = ["env echo touching", "sh -c 'echo untouched'", "env rm made2"];
    let any = |name: &str| format!("{{command: {name}, args: '.*'}}");
    let find = "{command: find, args: '-exec'}";
    let allowed = ["env", "xargs", "sh", "nice", "awk"].map(any).join(", ");
    let rules = format!(
        "{{allow: [{{command: echo}}, {find}, {allowed}], deny: [{{command: touch}}, {{command: rm, args: '-f'}}], \
         require_approval: [{{command: mkdir}}]}}"
    );
    let commands: Vec<&str> = denied.into_iter().chain(benign).chain(["env mkdir made"]).collect();
    let service = Setup::new()
        .agent("worker", &agent(&rules, "limits: {error_threshold: 50}"))
        .scenario("worker", &scenario(&commands))
        .file("a.txt", "a")
        .file("made2", "")
        .start(db)
        .await;
    let path = service.enqueue("worker").await;
    let parked = service.until(&path, |run| run["status"] == "awaiting_approval").await;
    let reason = parked["pending"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("it names mkdir"), "{parked:#}");
    let blocked = events(&service, &parked, "tool_call.blocked").await;
    assert_eq!(blocked.len(), denied.len(), "{blocked:#?}");
    for blocked in &blocked {
        let reason = blocked["reason"].as_str().unwrap();
        assert!(reason.contains("which is denied by"), "{reason}");
    }
    let results = results(&service, &parked).await;
    assert_eq!(results.len(), benign.len(), "{results:#?}");
    assert!(results.iter().all(|result| result["exit_code"] == 0), "{results:#?}");
    let made = service.dir.path().join("workspace/default/made");
    assert!(!made.exists());
}

/// Whether a process with that argument is alive.
pub fn is_alive(argument: &str) -> bool {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes
        .filter_map(|p| std::fs::read(p.path().join("cmdline")).ok())
        .any(|line| line.split(|byte| *byte == 0).any(|word| word == argument.as_bytes()))
}

pub async fn until_alive(argument: &str, expected: bool) {
    let since = Instant::now();
    while is_alive(argument) != expected {
        assert!(since.elapsed() < Duration::from_mins(1), "sleep {argument}: not {expected}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn programs_end_with_their_run_and_with_the_service(db: Db) {
    let (own, id) = (if db == Db::Sqlite { "1" } else { "2" }, std::process::id());
    let [cancelled, killed] = [format!("7771{own}.{id}"), format!("7772{own}.{id}")];
    let mut service = Setup::new()
        .agent("worker", &agent(RULES, ""))
        .scenario("worker", &scenario(&[&format!("sleep {cancelled} | cat")]))
        .agent("second", &agent(RULES, "").replace("scripted/worker", "scripted/second"))
        .scenario("second", &scenario(&[&format!("sleep {killed}")]))
        .start(db)
        .await;
    let path = service.enqueue("worker").await;
    until_alive(&cancelled, true).await;
    let since = Instant::now();
    service.post(&format!("{path}/cancel"), &json!({})).await;
    until_alive(&cancelled, false).await;
    println!("cancelled programs were gone after {:?}", since.elapsed());
    service.until(&path, |run| run["status"] == "cancelled").await;

    service.enqueue("second").await;
    until_alive(&killed, true).await;
    let since = Instant::now();
    service.kill().await;
    until_alive(&killed, false).await;
    println!("programs of a killed service were gone after {:?}", since.elapsed());
}

async fn a_parents_rules_hold_in_children(db: Db) {
    let parent = "model: scripted/parent\ntools: ['agent:worker']\ngovernance: {autonomy: full, commands: {deny: \
                  [{command: touch}]}}\nenable_double_confirmation: false\n";
    let service = Setup::new()
        .agent("parent", parent)
        .scenario(
            "parent",
            "steps: [{tool_calls: [{tool: 'agent:worker', arguments: {}}]}, {text: done}]",
        )
        .agent("worker", &agent(RULES, ""))
        .scenario("worker", &scenario(&["touch made", "echo said"]))
        .start(db)
        .await;
    let run = service.run("parent", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let runs = service.get("/v1/runs?agent=worker").await.body;
    let child = &runs["data"][0];
    let blocked = events(&service, child, "tool_call.blocked").await;
    assert_eq!(blocked.len(), 1, "{blocked:#?}");
    assert!(blocked[0]["reason"].as_str().unwrap().contains("denied by touch"), "{blocked:#?}");
    assert_eq!(results(&service, child).await[0]["stdout"], "said\n");
}

async fn names_that_no_rule_can_be_held_for_are_refused(db: Db) {
    use std::os::unix::ffi::OsStrExt;
    let service = Setup::new()
        .agent("worker", &agent(RULES, ""))
        .scenario("worker", &scenario(&["ls", "ls"]))
        .file("a.txt", "a")
        .start(db)
        .await;
    let odd = std::ffi::OsStr::from_bytes(b"caf\xe9");
    let odd = service.dir.path().join("workspace/default").join(odd);
    std::fs::create_dir(&odd).unwrap();
    std::fs::write(odd.join(".env"), "canary").unwrap();
    let run = service.run("worker", &json!({})).await;
    let results = results(&service, &run).await;
    let told = results[0].to_string();
    assert!(told.contains("a file whose name is not UTF-8"), "{results:#?}");
    std::fs::remove_dir_all(&odd).unwrap();
    let run = service.run("worker", &json!({})).await;
    let told = self::results(&service, &run).await[0].to_string();
    assert!(told.contains("a.txt"), "{told}");
}

async fn a_file_with_another_hard_link_is_not_written(db: Db) {
    let service = Setup::new()
        .agent("worker", &agent(RULES, ""))
        .scenario(
            "worker",
            &scenario(&[
                "echo changed > hl",
                "echo changed >> hl",
                "cat missing 2> hl",
                "echo x > /dev/null",
                "echo new > plain",
            ]),
        )
        .file("plain", "a longer content\n")
        .start(db)
        .await;
    let (outside, workspace) =
        (service.dir.path().join("outside"), service.dir.path().join("workspace/default"));
    std::fs::write(&outside, "kept\n").unwrap();
    std::fs::hard_link(&outside, workspace.join("hl")).unwrap();
    let run = service.run("worker", &json!({})).await;
    let results = results(&service, &run).await;
    assert_eq!(std::fs::read_to_string(&outside).unwrap(), "kept\n", "{results:#?}");
    for result in &results[..2] {
        assert_eq!(result["exit_code"], 1, "{results:#?}");
        let why = result["stderr"].as_str().unwrap();
        assert!(why.contains("hl: has 2 hard links"), "{why}");
    }
    assert_eq!(results[2]["exit_code"], 1, "{results:#?}");
    assert_eq!((&results[3]["exit_code"], &results[4]["exit_code"]), (&json!(0), &json!(0)));
    assert_eq!(std::fs::read_to_string(workspace.join("plain")).unwrap(), "new\n");
}

async fn long_outputs_lose_their_middle_and_stay_json(db: Db) {
    let rules = "{allow: [{command: seq}, {command: python3, args: print}]}";
    let both =
        "python3 -c 'import sys; print(\"x\" * 500000); print(\"y\" * 500000, file=sys.stderr)'";
    let commands = ["python3 -c 'print(\"x\" * 500000)'", "seq 1 200000", both];
    let service = Setup::new()
        .agent("worker", &agent(rules, ""))
        .scenario("worker", &scenario(&commands))
        .start(db)
        .await;
    let run = service.run("worker", &json!({})).await;
    let results = results(&service, &run).await;
    let streams = [
        (&results[0]["stdout"], 500_001),
        (&results[1]["stdout"], 1_288_895),
        (&results[2]["stdout"], 500_001),
        (&results[2]["stderr"], 500_001),
    ];
    for (stream, bytes) in streams {
        let stream = stream.as_str().unwrap_or_else(|| panic!("{results:#?}"));
        let notes: Vec<&str> = stream.split("[… ").skip(1).collect();
        assert_eq!(notes.len(), 1, "{stream}");
        let omitted = notes[0].split(' ').next().unwrap().parse::<usize>().unwrap();
        let note = format!("\n[… {omitted} bytes left out …]\n");
        assert_eq!(stream.len() - note.len() + omitted, bytes);
    }
    assert!(results[1]["stdout"].as_str().unwrap().ends_with("\n200000\n"));
}

async fn files_that_the_rules_name_can_be_made(db: Db) {
    let rules = "{allow: [{command: echo}, {command: cat}, {command: touch}, {command: 'true'}, {command: 'false'}]}";
    let agent = agent(rules, "").replace("'./**'", "'*.txt', 'd/*.log'");
    let commands = [
        "echo a > made.txt",
        "echo b >> d/made.log && cat d/made.log",
        "cd d && echo c > ../other.txt",
        "true > empty.txt; true >> d/empty.log",
        "false && echo d > never.txt",
        "touch t.txt",
        "echo e > made.md",
        "echo f > d/made.txt",
    ];
    let service = Setup::new()
        .agent("worker", &agent)
        .scenario("worker", &scenario(&commands))
        .file("d/x", "")
        .start(db)
        .await;
    let run = service.run("worker", &json!({})).await;
    let results = results(&service, &run).await;
    let workspace = service.dir.path().join("workspace/default");
    let content = |path: &str| std::fs::read_to_string(workspace.join(path)).ok();
    let content = ["made.txt", "d/made.log", "other.txt", "empty.txt", "d/empty.log"].map(content);
    let expected = ["a\n", "b\n", "c\n", "", ""].map(|text| Some(text.to_owned()));
    assert_eq!(content, expected, "{results:#?}");
    for missing in ["never.txt", "t.txt", "made.md", "d/made.txt"] {
        assert!(!workspace.join(missing).exists(), "{missing}: {results:#?}");
    }
    assert_eq!(results[1]["stdout"], "b\n");
    let note = results[5]["note"].as_str().unwrap_or_else(|| panic!("{results:#?}"));
    assert!(results[5]["exit_code"] == 1 && note.contains("paths.write"), "{results:#?}");
    assert!(results[4].get("note").is_none(), "{results:#?}");
    let blocked = events(&service, &run, "tool_call.blocked").await;
    assert_eq!(blocked.iter().filter(|call| call["rule"] == "path").count(), 2, "{blocked:#?}");
    let completed = events(&service, &run, "tool_call.completed").await;
    let changes: Vec<_> = completed.iter().map(|call| &call["changes"]).collect();
    assert_eq!(changes[0][0]["path"], "made.txt", "{changes:#?}");
    assert_eq!(changes[0][0]["change"], "created", "{changes:#?}");
    assert!(changes[4].as_array().is_none_or(Vec::is_empty), "{changes:#?}");
}

/// Rules that name single files beside it change nothing about the directory.
async fn files_in_a_directory_that_may_be_written_can_go(db: Db) {
    let rules = "{allow: [{command: rm}, {command: mv}, {command: cat}]}";
    let paths = "read: ['out/**', '*.md'], write: ['out/**', '*.txt', 'd/x.log']";
    let agent = agent(rules, "")
        .replace("write: ['./**'], deny: ['**/.env']", &format!("{paths}, deny: ['**/*.key']"));
    let commands = [
        "rm out/a",
        "mv out/b out/c",
        "rm -r out/sub",
        "rm d/x.log",
        "cat out/kept.key",
        "rm out/kept.key",
        "cat x.md",
    ];
    let mut setup = Setup::new().agent("worker", &agent).scenario("worker", &scenario(&commands));
    for name in ["out/a", "out/b", "out/sub/s", "out/kept.key", "d/x.log", "b.txt", "x.md"] {
        setup = setup.file(name, "canary");
    }
    let service = setup.start(db).await;
    let run = service.run("worker", &json!({})).await;
    let workspace = service.dir.path().join("workspace/default");
    let is_there = |path: &str| workspace.join(path).exists();
    let found = ["out/a", "out/b", "out/c", "out/sub", "d/x.log", "out/kept.key"].map(is_there);
    let results = results(&service, &run).await;
    assert_eq!(found, [false, false, true, false, true, true], "{results:#?}");
    let last = results.last().unwrap();
    assert_eq!(last["stdout"], "canary", "{results:#?}");
}

async fn a_command_that_only_reads_does_so_beside_one_that_writes(db: Db) {
    let rules = "{allow: [{command: sh, args: report, effect: read}, {command: touch}]}";
    let commands = ["sh report.sh > out.txt", "touch made.txt && sh report.sh", "sh report.sh"];
    let script = "echo told; echo temporary > $TMPDIR/t && cat $TMPDIR/t; echo quiet > /dev/null; echo x > written.txt";
    let service = Setup::new()
        .agent("worker", &agent(rules, ""))
        .scenario("worker", &scenario(&commands))
        .file("report.sh", script)
        .start(db)
        .await;
    let run = service.run("worker", &json!({})).await;
    let workspace = service.dir.path().join("workspace/default");
    let results = results(&service, &run).await;
    let told = std::fs::read_to_string(workspace.join("out.txt")).unwrap();
    assert_eq!(told, "told\ntemporary\n", "{results:#?}");
    assert_eq!(results[1]["stdout"], "told\ntemporary\n", "{results:#?}");
    assert!(workspace.join("made.txt").exists(), "{results:#?}");
    assert!(!workspace.join("written.txt").exists(), "{results:#?}");
}
