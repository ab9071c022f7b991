use std::fmt::Write as _;
use std::fs;

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::run::{Autonomy, ToolChoicePolicy};

const FULL: &str = r#"
name: repo-guide
version: 1.2.0
description: Explains a repository.
model: scripted/repo-guide
instructions: |
  You explain {{ inputs.project }}.
inputs: {type: object, required: [project], properties: {project: {type: string}}}
output:
  tool: {name: report}
  schema: {type: object, required: [notes], properties: {notes: {type: array, items: {type: string}, minItems: 1}}}
tools: [file_ops, "mcp:time/now"]
sampling: {temperature: 1, max_output_tokens: 4096}
tool_choice: {tool: file_ops}
parallel_tool_calls: true
limits: {max_attempts: 2}
enable_double_confirmation: false
workspace: "reports/{run_id}"
governance:
  autonomy: read-only
  paths: {read: ["./**"], deny: ["**/.env"]}
  tool_policies: {file_ops: allow, "mcp:time/*": ask}
  budget: {max_tool_calls: 10}
owner: {team: platform}
"#;

fn error(yaml: &str) -> String {
    Agent::from_yaml("repo-guide", yaml).unwrap_err().to_string()
}

fn catalogue(dir: &Path) -> Catalogue {
    Catalogue::load(dir, Arc::default(), Box::new(|_| Ok(())))
}

fn minimal(name: &str, version: &str) -> String {
    format!("name: {name}\nversion: {version}\nmodel: scripted/x\n")
}

#[test]
fn a_full_definition_loads_and_survives_its_snapshot() {
    let agent = Agent::from_yaml("repo-guide", FULL).unwrap();
    let d = &agent.definition;
    assert_eq!(d.tool_choice, ToolChoicePolicy::Tool("file_ops".into()));
    assert_eq!((d.limits.max_attempts, d.limits.max_iterations), (2, 20));
    assert_eq!(d.sampling.temperature, Some(1.0));
    assert_eq!(d.governance.autonomy, Autonomy::ReadOnly);
    assert_eq!(d.output.as_ref().unwrap().tool.name, "report");

    let again = Agent::from_json(&agent.json).unwrap();
    assert_eq!((&again.definition, &again.json, &again.hash), (d, &agent.json, &agent.hash));
    assert_eq!(agent.hash.len(), 64);
}

#[test]
fn tool_choice_has_both_forms() {
    for (yaml, choice) in [
        ("auto", ToolChoicePolicy::Auto),
        ("none", ToolChoicePolicy::None),
        ("first_required", ToolChoicePolicy::FirstRequired),
        ("{tool: a}", ToolChoicePolicy::Tool("a".into())),
    ] {
        let yaml = format!("name: x1\nmodel: a/b\ntools: [a]\ntool_choice: {yaml}\n");
        assert_eq!(Agent::from_yaml("x1", &yaml).unwrap().definition.tool_choice, choice);
    }
}

#[test]
fn inputs_and_outputs_are_checked_with_pointers() {
    let agent = Agent::from_yaml("repo-guide", FULL).unwrap();
    assert_eq!(agent.check_inputs(&json!({"project": "x", "more": 1})), Ok(()));
    let errors = agent.check_inputs(&json!({"project": 5})).unwrap_err();
    assert_eq!(errors[0].pointer, "/project");
    assert_eq!(errors[0].message, r#"5 is not of type "string""#);
    assert_eq!(agent.check_inputs(&json!([])).unwrap_err()[0].message, "inputs must be an object");
    let errors = agent.check_output(&json!({"notes": [1, "x".repeat(1000), 2]})).unwrap_err();
    assert_eq!(
        errors.iter().map(|e| e.pointer.as_str()).collect::<Vec<_>>(),
        ["/notes/0", "/notes/2"]
    );
    let long = agent.check_inputs(&json!({"project": ["x".repeat(1000)]})).unwrap_err();
    assert!(long[0].message.len() < 410);

    let free = Agent::from_yaml("free", "name: free\nmodel: a/b\n").unwrap();
    assert_eq!(free.check_inputs(&json!({"anything": 1})), Ok(()));
    assert!(free.check_inputs(&json!("text")).is_err());
}

#[test]
fn a_workspace_is_one_directory_whatever_the_session_is_called() {
    let of = |workspace: &str, session: Option<&str>| {
        let yaml = format!("name: x1\nmodel: a/b\nworkspace: '{workspace}'\n");
        Agent::from_yaml("x1", &yaml).unwrap().workspace_of(uuid::Uuid::nil(), session)
    };
    let run = format!("r-{}", uuid::Uuid::nil());
    assert_eq!(of(".", Some("s")), ".");
    assert_eq!(of("r/{run_id}", None), format!("r/{run}"));
    assert_eq!(of("{session_id}", Some("s-1")), "s-s-1");
    assert_eq!(of("{session_id}", None), run);
    let mut places = std::collections::BTreeSet::from([run.clone()]);
    for hostile in ["../up", "a/b", "", "{run_id}", "ä"] {
        let directory = of("{session_id}", Some(hostile));
        assert_eq!(directory.len(), 66, "{directory}");
        places.insert(directory);
    }
    // Sessions that are called like another place have one of their own.
    for taken in places.clone() {
        for name in [taken.as_str(), &taken[2..]] {
            assert!(places.insert(of("{session_id}", Some(name))), "{name}");
        }
    }
}

#[test]
fn errors_name_line_column_and_key() {
    let with = |extra: &str| error(&format!("name: repo-guide\nmodel: a/b\n{extra}"));
    let mut bomb = String::from("inputs:\n  l0: &l0 [x, x]\n");
    for level in 1..12 {
        let _ = writeln!(
            bomb,
            "  l{level}: &l{level} [{}]",
            vec![format!("*l{}", level - 1); 9].join(", ")
        );
    }
    let messages: Vec<String> = vec![
        error(""),
        error("name: [unclosed\n"),
        error("name: repo-guide\n"),
        error("name: other\nmodel: a/b\n"),
        error("name: repo-guide\nmodel: gpt\n"),
        with("colour: red\n"),
        with("limits:\n  max_attempts: many\n"),
        with("limits:\n  max_attempt: 1\n"),
        with("limits:\n  max_iterations: 2\n  max_attempts: 101\n"),
        with("enable_double_confirmation: yes\n"),
        with("sampling: {temperature: 2.5}\n"),
        with("inputs:\n  type: object\n  properties: {a: {type: strng}}\n"),
        with("inputs: {$ref: 'http://127.0.0.1:1/x'}\n"),
        with("inputs: {type: [array, 'null']}\n"),
        with("output: {schema: {type: array}}\n"),
        with("output:\n  schema: {type: object, required: 1}\n"),
        with("output: {tool: {name: 'a b'}, schema: {type: object}}\n"),
        with("tools: [output]\noutput: {schema: {type: object}}\n"),
        with("tools: [a, a]\n"),
        with("tools: [a, 'b c']\n"),
        with("tool_choice: sometimes\n"),
        with("tool_choice: required\n"),
        with("tool_choice: none\noutput: {schema: {type: object}}\n"),
        with("tool_choice: {tool: nope}\n"),
        with("instructions: 'Hello {{ inputs.name'\n"),
        with("instructions: |\n  fine\n  {{ tools }}\n"),
        with("prompt: '{% for x in %}'\n"),
        with("workspace: ../up\n"),
        with("workspace: '{tenant}'\n"),
        with("governance:\n  paths:\n    write:\n      - ok/**\n      - '[z-a]'\n"),
        with("governance: {paths: {read: [/etc/**]}}\n"),
        with("governance: {tool_policies: {'mcp:{': deny}}\n"),
        with("governance: {tool_policies: {shell: maybe}}\n"),
        with("governance: {budget: {max_duration_seconds: 0}}\n"),
        with("description: \"a\\0b\"\n"),
        with(&bomb),
    ];
    insta::assert_snapshot!(messages.join("\n"));
}

#[test]
fn labels_of_inputs_are_checked_at_every_depth() {
    let with =
        |inputs: &str| format!("name: repo-guide\nmodel: a/b\ninputs:\n  type: object\n{inputs}");
    for (inputs, wrong) in [
        ("  x-yields: [privat]\n", "line 5, column 14: inputs.x-yields[0]: \"privat\" is neither"),
        ("  x-yields: private\n", "line 5, column 3: inputs.x-yields: is not a list"),
        (
            "  properties:\n    a: {type: string, x-yields: [private, 7]}\n",
            "line 6, column 43: inputs.properties.a.x-yields[1]: 7 is neither",
        ),
        (
            "  allOf:\n    - {items: {x-yields: [x]}}\n",
            "line 6, column 27: inputs.allOf[0].items.x-yields[0]: \"x\" is neither",
        ),
        (
            "  $defs:\n    x-yields: {x-yields: [x]}\n",
            "line 6, column 27: inputs.$defs.x-yields.x-yields[0]: \"x\" is neither",
        ),
    ] {
        let error = error(&with(inputs));
        assert!(error.starts_with(wrong), "{error}");
    }
    for inputs in [
        "  x-yields: [private, untrusted]\n  properties: {a: {type: array, items: {x-yields: []}}}\n",
        "  properties: {x-yields: {type: string, default: {x-yields: x}}}\n",
    ] {
        Agent::from_yaml("repo-guide", &with(inputs)).unwrap();
    }
}

#[test]
fn files_come_and_go_and_break() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name);
    fs::write(file("good.yaml"), minimal("good", "1.0.0")).unwrap();
    fs::write(file("bad.yaml"), "name: bad\n").unwrap();
    fs::write(file("notes.txt"), "not yaml").unwrap();
    fs::write(file(".good.yaml"), "hidden").unwrap();
    let catalogue = catalogue(dir.path());
    assert_eq!(catalogue.agents().len(), 1);
    assert_eq!(
        catalogue.problems().iter().map(|p| p.file.as_str()).collect::<Vec<_>>(),
        ["bad.yaml"]
    );
    assert!(catalogue.refresh().is_empty(), "nothing has changed");

    let first = catalogue.agent("good").unwrap();
    fs::write(file("good.yaml"), minimal("good", "1.1.0")).unwrap();
    let changes = catalogue.refresh();
    assert!(
        matches!(&changes[..], [Change::Loaded(agent, Some(_))] if agent.definition.version == "1.1.0")
    );
    assert_eq!(first.definition.version, "1.0.0", "who holds the old version keeps it");

    fs::write(file("good.yaml"), "name: good\nmodel: nonsense\n").unwrap();
    assert!(
        matches!(&catalogue.refresh()[..], [Change::Broken(problem)] if problem.file == "good.yaml")
    );
    assert!(catalogue.refresh().is_empty(), "a problem is news once");
    assert_eq!(
        catalogue.agent("good").unwrap().definition.version,
        "1.1.0",
        "the last good version stays"
    );
    assert_eq!(catalogue.problems().len(), 2);

    fs::write(file("good.yaml"), minimal("good", "1.1.0")).unwrap();
    assert!(catalogue.refresh().is_empty(), "the same definition is the same version");
    assert_eq!(catalogue.problems().len(), 1);

    fs::remove_file(file("good.yaml")).unwrap();
    fs::remove_file(file("bad.yaml")).unwrap();
    assert!(matches!(&catalogue.refresh()[..], [Change::Removed(name)] if name == "good"));
    assert!(catalogue.agent("good").is_none() && catalogue.problems().is_empty());
}

#[test]
fn names_that_cannot_be_agents_and_doubles_are_problems() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("Upper.yaml"), minimal("upper", "1")).unwrap();
    fs::write(dir.path().join("twice.yaml"), minimal("twice", "1")).unwrap();
    fs::write(dir.path().join("twice.yml"), minimal("twice", "2")).unwrap();
    fs::write(dir.path().join("binary.yaml"), [0xff, 0xfe]).unwrap();
    let catalogue = catalogue(dir.path());
    assert_eq!(catalogue.agent("twice").unwrap().definition.version, "1");
    let problems: Vec<_> =
        catalogue.problems().into_iter().map(|p| format!("{}: {}", p.file, p.error)).collect();
    insta::assert_snapshot!(problems.join("\n"));
}

#[test]
fn a_directory_may_be_missing_or_appear_later() {
    let dir = tempfile::tempdir().unwrap();
    let agents = dir.path().join("agents");
    let catalogue = catalogue(&agents);
    assert!(catalogue.agents().is_empty() && catalogue.problems().is_empty());
    fs::create_dir(&agents).unwrap();
    fs::write(agents.join("late.yml"), minimal("late", "1")).unwrap();
    assert_eq!(catalogue.refresh().len(), 1);
    assert!(catalogue.agent("late").is_some());
}

#[test]
fn the_outside_has_a_say() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("lost.yaml"), minimal("lost", "1")).unwrap();
    let check = |d: &Definition| {
        Err(DefinitionError::at("model", format!("there is no provider for {}", d.model)))
    };
    let catalogue = Catalogue::load(dir.path(), Arc::default(), Box::new(check));
    assert!(catalogue.agents().is_empty());
    assert_eq!(
        catalogue.problems()[0].error,
        "line 3, column 1: model: there is no provider for scripted/x"
    );
}

#[tokio::test]
async fn watching_picks_up_changes_until_it_is_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let catalogue = Arc::new(catalogue(dir.path()));
    let stop = CancellationToken::new();
    let watcher = tokio::spawn(watch(
        Arc::clone(&catalogue),
        Duration::from_millis(1),
        stop.clone(),
        async |_: &Change| (),
    ));
    fs::write(dir.path().join("fresh.yaml"), minimal("fresh", "1")).unwrap();
    let seen = async {
        while catalogue.agent("fresh").is_none() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), seen).await.unwrap();
    stop.cancel();
    watcher.await.unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_text_makes_reading_panic(tail in "[a-z:{}\\[\\]\"'|>&*%!,#\\\\ \n0-9.-]{0,80}") {
        let result = Agent::from_yaml("x1", &format!("name: x1\nmodel: a/b\n{tail}"));
        if let Ok(agent) = result {
            prop_assert_eq!(agent.definition.name, "x1");
        }
    }
}

#[test]
fn agents_may_name_one_another_and_must_be_there() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(format!("{name}.yaml"));
    let naming = |name: &str, tool: &str| {
        fs::write(file(name), minimal(name, "1") + &format!("tools: ['{tool}']\n"))
    };
    for (name, tool) in [
        ("ping", "agent:pong"),
        ("pong", "transfer_to_ping"),
        ("far", "agent:near"),
        ("near", "agent:gone"),
    ] {
        naming(name, tool).unwrap();
    }
    let catalogue = catalogue(dir.path());
    let names =
        || catalogue.agents().iter().map(|agent| agent.definition.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(), ["ping", "pong"], "whatever the order in which they are read");
    let problems: Vec<_> =
        catalogue.problems().into_iter().map(|p| format!("{}: {}", p.file, p.error)).collect();
    let expected = [
        "far.yaml: line 4, column 9: tools[0]: there is no agent named \"near\"; there are: ping, pong",
        "near.yaml: line 4, column 9: tools[0]: there is no agent named \"gone\"; there are: far, ping, pong",
    ];
    assert_eq!(problems, expected);
    assert!(catalogue.refresh().is_empty(), "a problem is news once");

    fs::write(file("gone"), minimal("gone", "1")).unwrap();
    assert_eq!(catalogue.refresh().len(), 3);
    assert_eq!(names(), ["far", "gone", "near", "ping", "pong"]);
    assert!(catalogue.problems().is_empty());

    fs::remove_file(file("gone")).unwrap();
    let changes = catalogue.refresh();
    assert!(
        matches!(&changes[..], [Change::Broken(p), Change::Removed(gone)] if p.file == "near.yaml" && gone == "gone")
    );
    assert_eq!(names(), ["far", "near", "ping", "pong"], "what was good stays");
    assert!(catalogue.refresh().is_empty());

    naming("two", "agent:nobody', 'agent:pung").unwrap();
    catalogue.refresh();
    let mistakes: Vec<_> = catalogue.mistakes("two.yaml").iter().map(ToString::to_string).collect();
    let all = "there are: far, near, ping, pong";
    let expected = [
        format!("line 4, column 9: tools[0]: there is no agent named \"nobody\"; {all}"),
        format!(
            "line 4, column 25: tools[1]: there is no agent named \"pung\" (did you mean \"ping\"?); {all}"
        ),
    ];
    assert_eq!(mistakes, expected);

    let itself = "name: narcissus\nmodel: a/b\ntools: ['agent:narcissus']\n";
    assert!(Agent::from_yaml("narcissus", itself).unwrap_err().to_string().contains("to itself"));
}

#[test]
fn definitions_have_so_many_bytes_together() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: usize| {
        let text = format!("{}instructions: {}\n", minimal(name, "1"), "x".repeat(bytes));
        fs::write(dir.path().join(format!("{name}.yaml")), text).unwrap();
    };
    let most = 100_000;
    for name in ["first", "second", "third"] {
        write(name, 40_000);
    }
    let catalogue = Catalogue::load_bounded(dir.path(), Arc::default(), Box::new(|_| Ok(())), most);
    let names = || catalogue.agents().iter().map(|a| a.definition.name.clone()).collect::<Vec<_>>();
    let broken = || catalogue.problems().into_iter().map(|p| p.file).collect::<Vec<_>>();
    assert_eq!(
        (names(), broken()),
        (vec!["first".into(), "second".into()], vec!["third.yaml".into()])
    );
    assert!(catalogue.problems()[0].error.contains("together may have 100000 bytes"));

    write("first", 70_000);
    write("before", 40_000);
    catalogue.refresh();
    assert_eq!(broken(), ["before.yaml", "first.yaml", "third.yaml"], "what was there is there");
    assert_eq!(names(), ["first", "second"]);

    fs::remove_file(dir.path().join("second.yaml")).unwrap();
    catalogue.refresh();
    catalogue.refresh();
    assert_eq!((names().len(), broken().len()), (2, 2), "{:?}", catalogue.problems());
    write("first", 10);
    catalogue.refresh();
    catalogue.refresh();
    assert_eq!((names().len(), broken().len()), (3, 0), "{:?}", catalogue.problems());
}
