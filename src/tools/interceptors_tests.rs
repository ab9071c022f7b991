use serde_json::json;

use super::*;
use crate::run::Effect;

fn block(tool: &str, when: Option<&str>, reason: &str) -> BeforeRule {
    BeforeRule {
        tool: tool.into(),
        when: when.map(Into::into),
        what: Interception::Block(reason.into()),
    }
}

fn rewrite(tool: &str, when: Option<&str>, changes: &[(&str, &str)]) -> BeforeRule {
    let changes =
        changes.iter().map(|(pointer, value)| ((*pointer).into(), (*value).into())).collect();
    BeforeRule {
        tool: tool.into(),
        when: when.map(Into::into),
        what: Interception::Rewrite(changes),
    }
}

/// All of them in order, for calls that do nothing with paths.
fn before(rules: &[BeforeRule], tool: &str, arguments: &Value) -> Intercepted {
    let inputs = json!({"root": "base", "max": 2});
    let interceptors = Interceptors::new(rules, &[]).unwrap();
    let mut rewritten = None;
    for interceptor in interceptors.before(tool, false) {
        let arguments = rewritten.as_ref().unwrap_or(arguments);
        match interceptor.judge(&CallView {
            tool,
            arguments,
            inputs: &inputs,
            actions: None,
            directory: ".",
        }) {
            Intercepted::Untouched => {}
            Intercepted::Rewritten(arguments) => rewritten = Some(arguments),
            blocked @ Intercepted::Blocked(_) => return blocked,
        }
    }
    rewritten.map_or(Intercepted::Untouched, Intercepted::Rewritten)
}

#[test]
fn calls_are_blocked_by_rule() {
    let force = [block("shell", Some("args.command.contains('--force')"), "No force.")];
    let blocked = Intercepted::Blocked("No force.".into());
    assert_eq!(before(&force, "shell", &json!({"command": "git push --force"})), blocked);
    assert_eq!(before(&force, "shell", &json!({"command": "git push"})), Intercepted::Untouched);
    assert_eq!(before(&force, "file_ops", &json!({"command": "--force"})), Intercepted::Untouched);
    let Intercepted::Blocked(why) = before(&force, "shell", &json!({})) else {
        panic!("it cannot decide")
    };
    assert_eq!(why, "interceptor 1 cannot decide on this call: there is no key \"command\".");

    let all = [block("mcp:*", None, "Not today.")];
    assert_eq!(before(&all, "mcp:time/now", &json!({})), Intercepted::Blocked("Not today.".into()));
    let by_name = [block("*", Some("tool == 'shell' && inputs.max > 1"), "No shell.")];
    assert_eq!(before(&by_name, "shell", &json!({})), Intercepted::Blocked("No shell.".into()));
    assert_eq!(before(&by_name, "other", &json!({})), Intercepted::Untouched);
}

#[test]
fn arguments_are_rewritten_in_order() {
    let rules = [
        rewrite(
            "file_ops",
            Some("!args.path.startsWith('base/')"),
            &[("/path", "inputs.root + '/' + args.path")],
        ),
        block("file_ops", Some("args.path == 'base/secret'"), "Not that one."),
        rewrite(
            "*",
            None,
            &[("/limit", "inputs.max * 10"), ("/list/0", "args.path"), ("/list/-", "'new'")],
        ),
    ];
    let arguments = json!({"path": "a.txt", "list": ["x"]});
    let expected = json!({"path": "base/a.txt", "list": ["base/a.txt", "new"], "limit": 20});
    assert_eq!(before(&rules, "file_ops", &arguments), Intercepted::Rewritten(expected));
    let blocked = Intercepted::Blocked("Not that one.".into());
    assert_eq!(before(&rules, "file_ops", &json!({"path": "secret", "list": []})), blocked);
    let Intercepted::Blocked(why) = before(&rules, "file_ops", &json!({"path": "b"})) else {
        panic!("no place")
    };
    assert_eq!(
        why,
        "interceptor 3 cannot decide on this call: the arguments have no place /list/0."
    );
}

#[test]
fn paths_are_those_of_the_actions() {
    let action = |what: ActionKind, makes: &[&str]| Action {
        makes: makes.iter().map(ToString::to_string).collect(),
        ..Action::new(what, Effect::Once)
    };
    let read = |path: &str| ActionKind::Read { path: path.into() };
    let write = |path: &str| ActionKind::Write { path: path.into() };
    let actions = [
        action(write("b.lock"), &[]),
        action(write("new/b"), &["new"]),
        action(write("b.lock"), &[]),
        action(read("a"), &[]),
        action(ActionKind::Call { tool: "x".into() }, &[]),
    ];
    let table = [
        ("writes == ['b.lock', 'new', 'new/b'] && reads == ['a']", true, true),
        ("writes.exists(path, path.endsWith('.lock'))", true, true),
        ("reads.exists(path, path.endsWith('.lock'))", true, false),
        ("args.path == 'written/'", false, true),
        ("tool == 'file_ops'", false, true),
    ];
    for (when, looks, met) in table {
        let rules = [block("file_ops", Some(when), "No.")];
        let interceptors = Interceptors::new(&rules, &[]).unwrap();
        let interceptor = interceptors.before("file_ops", false).next().unwrap();
        let (arguments, inputs) = (json!({"path": "written/"}), json!({}));
        let (tool, actions) = ("file_ops", Some(actions.as_slice()));
        let judged = interceptor.judge(&CallView {
            tool,
            arguments: &arguments,
            inputs: &inputs,
            actions,
            directory: ".",
        });
        let expected =
            if met { Intercepted::Blocked("No.".into()) } else { Intercepted::Untouched };
        assert_eq!((interceptor.looks_at_paths(), judged), (looks, expected), "{when}");
    }
    let changes = [rewrite("file_ops", None, &[("/path", "writes[0]")])];
    let interceptors = Interceptors::new(&changes, &[]).unwrap();
    assert!(interceptors.before("file_ops", false).all(Before::looks_at_paths));
}

#[test]
fn pointers_are_unescaped() {
    let rules = [rewrite("*", None, &[("/a~1b/m~0n", "1")])];
    let expected = json!({"a/b": {"m~n": 1}});
    assert_eq!(before(&rules, "t", &json!({"a/b": {}})), Intercepted::Rewritten(expected));
}

#[test]
fn results_are_redacted() {
    let after = |tool: &str, pattern: &str, with: Option<&str>| AfterRule {
        tool: tool.into(),
        when: None,
        what: Revision::Redact { pattern: pattern.into(), with: with.map(Into::into) },
    };
    let revised = |interceptors: &Interceptors, tool: &str, text: &str| {
        let (arguments, inputs) = (&json!({}), &json!({}));
        let returned = Returned { tool, arguments, inputs, is_error: false };
        interceptors.after(&returned, text.into()).unwrap().0
    };
    let rules = [after("*", r"\b\d{16}\b", None), after("shell", "(?i)bob", Some("$0!"))];
    let interceptors = Interceptors::new(&[], &rules).unwrap();
    let text = "Card 1234567890123456 of Bob, 42.";
    assert_eq!(revised(&interceptors, "file_ops", text), "Card [redacted] of Bob, 42.");
    assert_eq!(revised(&interceptors, "shell", text), "Card [redacted] of $0!, 42.");
}

#[test]
fn what_means_nothing_is_an_error() {
    let error = |before: &[BeforeRule], after: &[AfterRule]| {
        Interceptors::new(before, after).unwrap_err().to_string()
    };
    assert!(error(&[block("[", None, "x")], &[]).starts_with("interceptors.before[0].tool: "));
    assert!(
        error(&[block("*", Some("argh"), "x")], &[]).starts_with("interceptors.before[0].when: ")
    );
    assert!(
        error(&[rewrite("*", None, &[("/a", "1 +")])], &[])
            .starts_with("interceptors.before[0].rewrite./a: ")
    );
    let what = Revision::Redact { pattern: "(?=x)".into(), with: None };
    let look_around = AfterRule { tool: "*".into(), when: None, what };
    assert!(error(&[], &[look_around]).starts_with("interceptors.after[0].redact: "));
}
