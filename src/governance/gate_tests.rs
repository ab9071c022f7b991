//! The gate's rules as tables: one row is one case, to be read as documentation.
//!
//! Each table leaves everything to its own rule, so that what it shows is that rule alone; how
//! rules are weighed against one another has a table of its own.

#[path = "gate/paths_tests.rs"]
mod paths;
#[path = "gate/skills_tests.rs"]
mod skills;

use std::time::Instant;

use super::{
    Action, ActionKind, Call, CommandRule, Commands, Decision, Gate, Objection, Policy,
    PolicyError, ToolPolicy, ToolRule, Verdict,
};
use crate::run::{Autonomy, Effect, FlowRule, Labels, Target};
use Decision::{Allowed, Blocked, Escalated, Warned};
use Effect::{Idempotent, Once, Read};
use ToolPolicy::{Allow, Ask, Deny};

/// Everything is allowed, so that a table shows what its own rule says.
fn permissive() -> Policy {
    Policy {
        autonomy: Autonomy::Full,
        read: vec!["./**".into()],
        write: vec!["./**".into()],
        ..Policy::default()
    }
}

fn tools(glob: &str, policy: ToolPolicy, observes: bool) -> ToolRule {
    ToolRule { tools: glob.to_owned(), policy, observes }
}

/// `r path` reads, `w path` writes, `x path` writes and loses what is there, `c name` calls, `f
/// url` fetches.
fn action(text: &str) -> Action {
    let (kind, name) = text.split_once(' ').unwrap();
    let (what, effect) = match kind {
        "r" => (ActionKind::Read { path: name.into() }, Read),
        "w" | "x" => (ActionKind::Write { path: name.into() }, Once),
        "c" => (ActionKind::Call { tool: name.into() }, Once),
        "f" => (ActionKind::Fetch(Target::of(&name.parse().unwrap(), false)), Read),
        other => panic!("unknown action {other}"),
    };
    Action { destructive: kind == "x", ..Action::new(what, effect) }
}

fn call(tool: &str, effect: Effect, actions: Vec<Action>) -> Call<'_> {
    Call {
        labels: Labels::default(),
        tool,
        effect,
        actions: actions.into(),
        is_undeclared: false,
        approved_by: None,
        skills: &[],
        directory: ".".into(),
    }
}

/// Decision, rule and reason of a call of `file_ops` that does `actions`.
fn judged(
    policy: &Policy,
    scopes: &[&str],
    tool: &str,
    actions: &[&str],
) -> (Decision, &'static str, String) {
    let scopes: Vec<String> = scopes.iter().map(ToString::to_string).collect();
    let actions = actions.iter().map(|a| action(a)).collect();
    match Gate::new(policy).unwrap().judge(&scopes, call(tool, Once, actions)) {
        Verdict::Pass { decision, rule, reason, .. } => {
            (decision, rule, reason.unwrap_or_default())
        }
        Verdict::Stop(Objection { decision, rule, reason, .. }) => (decision, rule, reason),
    }
}

/// Policies, a tool's name, the decision.
type PolicyRow = (&'static [(&'static str, ToolPolicy)], &'static str, Decision);

#[test]
fn tool_policies_go_by_name_and_the_strictest_match_wins() {
    #[rustfmt::skip]
    let table: [PolicyRow; 15] = [
        (&[],                                              "file_ops",      Allowed),
        (&[("file_ops", Allow)],                           "file_ops",      Allowed),
        (&[("file_ops", Ask)],                             "file_ops",      Escalated),
        (&[("file_ops", Deny)],                            "file_ops",      Blocked),
        (&[("file_ops", Deny)],                            "file_ops2",     Allowed),
        (&[("file_ops", Deny)],                            "FILE_OPS",      Allowed),
        (&[("shell", Deny)],                               "file_ops",      Allowed),
        (&[("*", Deny)],                                   "file_ops",      Blocked),
        (&[("*", Deny), ("file_ops", Allow)],              "file_ops",      Blocked),
        (&[("file_*", Ask), ("file_ops", Allow)],          "file_ops",      Escalated),
        (&[("file_ops", Deny), ("file_*", Ask)],           "file_ops",      Blocked),
        (&[("mcp:time/*", Deny)],                          "mcp:time/now",  Blocked),
        (&[("mcp:time/*", Deny)],                          "mcp:timex/now", Allowed),
        (&[("mcp:*", Deny)],                               "mcp:time/now",  Blocked),
        (&[("*", Deny)],                                   "mcp:time/now",  Blocked),
    ];
    for (policies, tool, expected) in table {
        let tool_policies =
            policies.iter().map(|(glob, policy)| tools(glob, *policy, false)).collect();
        let (decision, rule, _) =
            judged(&Policy { tool_policies, ..permissive() }, &["tools:execute"], tool, &["r a"]);
        assert_eq!(decision, expected, "{policies:?} on {tool}");
        assert_eq!(rule == "tool_policy", expected != Allowed, "{policies:?} on {tool}");
    }
}

#[test]
fn an_observed_autonomy_warns_of_what_it_would_decide() {
    #[rustfmt::skip]
    let table = [
        (Autonomy::Full,       Some(Autonomy::ReadOnly),   "w a", Warned,    "only observes, this agent is read-only"),
        (Autonomy::Full,       Some(Autonomy::Supervised), "x a", Warned,    "would lose what exists there"),
        (Autonomy::Full,       Some(Autonomy::Supervised), "w a", Allowed,   ""),
        (Autonomy::Full,       Some(Autonomy::ReadOnly),   "r a", Allowed,   ""),
        (Autonomy::Full,       Some(Autonomy::Full),       "x a", Allowed,   ""),
        (Autonomy::Supervised, Some(Autonomy::ReadOnly),   "w a", Warned,    "only observes"),
        (Autonomy::Supervised, Some(Autonomy::ReadOnly),   "x a", Escalated, "would lose what exists there"),
        (Autonomy::ReadOnly,   Some(Autonomy::Full),       "w a", Blocked,   "this agent is read-only"),
    ];
    for (autonomy, observed_autonomy, action, expected, told) in table {
        let policy = Policy { autonomy, observed_autonomy, ..permissive() };
        let (decision, rule, reason) = judged(&policy, &["tools:execute"], "file_ops", &[action]);
        assert_eq!(decision, expected, "{autonomy:?} {observed_autonomy:?} {action}: {reason}");
        assert_eq!(rule == "autonomy", expected != Allowed, "{rule}");
        assert!(reason.contains(told), "{reason}");
    }
}

#[test]
fn rules_that_only_observe_warn_behind_those_that_are_enforced() {
    let policy = Policy {
        tool_policies: vec![
            tools("shell", Deny, true),
            tools("web_fetch", Ask, true),
            tools("*_ops", Ask, true),
            tools("mem_ops", Ask, false),
        ],
        deny: vec!["secret/**".into()],
        deny_observed: vec!["**/*.env".into(), "secret/**".into()],
        deny_in_observed: vec![("other".into(), vec!["**".into()]), (".".into(), vec!["x".into()])],
        allow_hosts: vec!["*".into()],
        deny_hosts: vec!["a.test".into()],
        deny_hosts_observed: vec!["a.test".into(), "*.b.test".into()],
        ..permissive()
    };
    #[rustfmt::skip]
    let table: [(&str, &[&str], _, _, _); 11] = [
        ("shell",     &["c a"],                            Warned,    "tool_policy", "would deny every call of shell, but only observes"),
        ("web_fetch", &["f https://c.test/"],              Warned,    "tool_policy", "would have a person decide"),
        ("mem_ops",   &["c a"],                            Escalated, "tool_policy", "for mem_ops has a person decide"),
        ("other",     &["r a"],                            Allowed,   "none",        ""),
        ("other",     &["r a.env"],                        Warned,    "path",        "would be denied by **/*.env, which only observes"),
        ("other",     &["w x"],                            Warned,    "path",        "would be denied by x, which only observes"),
        ("other",     &["r a.env", "r secret/k"],          Blocked,   "path",        "is denied by secret/**"),
        ("other",     &["f https://x.b.test/"],            Warned,    "network",     "which only observes"),
        ("other",     &["f https://a.test/"],              Blocked,   "network",     "is denied by"),
        ("other",     &["f https://x.b.test/", "r a.env"], Warned,    "path",        "which only observes"),
        ("other",     &["f https://x.b.test/", "f https://a.test/"], Blocked, "network", "is denied by"),
    ];
    for (tool, actions, decision, rule, why) in table {
        let (decided, by, reason) = judged(&policy, &["tools:execute"], tool, actions);
        assert_eq!((decided, by), (decision, rule), "{tool} {actions:?}: {reason}");
        assert!(reason.contains(why), "{tool} {actions:?}: {reason}");
    }
}

#[test]
fn autonomy_bounds_what_is_done_unasked() {
    use Autonomy::{Full, ReadOnly, Supervised};
    #[rustfmt::skip]
    let table: [(Autonomy, &[&str], Decision); 15] = [
        (ReadOnly,   &["r a"],          Allowed),
        (ReadOnly,   &["r a", "r b"],   Allowed),
        (ReadOnly,   &["w a"],          Blocked),
        (ReadOnly,   &["x a"],          Blocked),
        (ReadOnly,   &["r a", "w a"],   Blocked),
        (ReadOnly,   &["c clock"],      Blocked),
        (ReadOnly,   &[],               Blocked),
        (Supervised, &["r a"],          Allowed),
        (Supervised, &["w a"],          Allowed),
        (Supervised, &["x a"],          Escalated),
        (Supervised, &["w a", "x b"],   Escalated),
        (Supervised, &[],               Allowed),
        (Full,       &["r a"],          Allowed),
        (Full,       &["w a", "x b"],   Allowed),
        (Full,       &[],               Allowed),
    ];
    for (autonomy, actions, expected) in table {
        let (decision, rule, _) =
            judged(&Policy { autonomy, ..permissive() }, &["admin"], "file_ops", actions);
        assert_eq!(decision, expected, "{autonomy:?} {actions:?}");
        assert_eq!(rule == "autonomy", expected != Allowed, "{autonomy:?} {actions:?}");
    }
}

#[test]
fn read_only_goes_by_the_tool_where_it_declares_no_action_and_by_effect_otherwise() {
    let policy = Policy { autonomy: Autonomy::ReadOnly, ..permissive() };
    let gate = Gate::new(&policy).unwrap();
    let scopes = ["admin".to_owned()];
    let mkdir = Action::new(ActionKind::Write { path: "a".into() }, Idempotent);
    let odd =
        Action { destructive: true, ..Action::new(ActionKind::Read { path: "a".into() }, Read) };
    for (effect, actions, passes) in [
        (Read, vec![], true),
        (Idempotent, vec![], false),
        (Read, vec![mkdir], false),
        (Read, vec![odd], false),
        (Once, vec![action("r a")], true),
    ] {
        let verdict = gate.judge(&scopes, call("t", effect, actions.clone()));
        assert_eq!(matches!(verdict, Verdict::Pass { .. }), passes, "{effect:?} {actions:?}");
    }
}

#[test]
fn a_scope_for_tools_is_needed() {
    #[rustfmt::skip]
    let table: [(&[&str], &str, Decision); 13] = [
        (&["tools:execute"],                  "file_ops",     Allowed),
        (&["admin"],                          "file_ops",     Allowed),
        (&["tools:file_ops"],                 "file_ops",     Allowed),
        (&["agents:invoke", "tools:execute"], "file_ops",     Allowed),
        (&["tools:mcp:time/now"],             "mcp:time/now", Allowed),
        (&[],                                 "file_ops",     Blocked),
        (&["agents:invoke"],                  "file_ops",     Blocked),
        (&["tools:shell"],                    "file_ops",     Blocked),
        (&["tools:file_op"],                  "file_ops",     Blocked),
        (&["tools:*"],                        "file_ops",     Allowed),
        (&["tools:mcp:time/*"],               "mcp:time/now", Allowed),
        (&["tools:mcp:time/*"],               "mcp:timer/go", Blocked),
        (&["file_ops"],                       "file_ops",     Blocked),
    ];
    for (scopes, tool, expected) in table {
        let (decision, rule, _) = judged(&permissive(), scopes, tool, &["r a"]);
        assert_eq!(decision, expected, "{scopes:?} on {tool}");
        assert_eq!(rule == "scope", expected != Allowed, "{scopes:?} on {tool}");
    }
}

#[test]
fn every_action_of_a_call_must_pass() {
    let policy = Policy { write: vec!["out/**".into()], ..permissive() };
    let (decision, rule, reason) =
        judged(&policy, &["admin"], "file_ops", &["r src/a", "w out/a", "w src/a"]);
    assert_eq!((decision, rule), (Blocked, "path"));
    assert!(reason.contains("\"src/a\""), "{reason}");
}

#[test]
fn the_strictest_decision_wins_and_the_first_rule_among_equals() {
    let ask = vec![tools("file_ops", Ask, false)];
    let deny = vec![tools("file_ops", Deny, false)];
    #[rustfmt::skip]
    let table = [
        // asked by two rules, blocked by none
        (Policy { tool_policies: ask.clone(), autonomy: Autonomy::Supervised, ..permissive() },  &["admin"][..], (Escalated, "tool_policy")),
        // a later block beats an earlier question
        (Policy { tool_policies: ask.clone(), write: vec![], ..permissive() },                   &["admin"][..], (Blocked, "path")),
        (Policy { autonomy: Autonomy::Supervised, ..permissive() },                              &[][..],        (Blocked, "scope")),
        // blocked by all
        (Policy { tool_policies: deny, autonomy: Autonomy::ReadOnly, ..Policy::default() },      &[][..],        (Blocked, "tool_policy")),
        (Policy { autonomy: Autonomy::ReadOnly, ..Policy::default() },                           &[][..],        (Blocked, "autonomy")),
    ];
    for (policy, scopes, expected) in table {
        let (decision, rule, _) = judged(&policy, scopes, "file_ops", &["x a"]);
        assert_eq!((decision, rule), expected, "{policy:?}");
    }
}

#[test]
fn reasons_are_sentences_that_name_the_rule() {
    let policy = Policy {
        write: vec!["./out/**".into(), "tmp".into()],
        deny: vec!["**/.env".into()],
        ..permissive()
    };
    let reason = |policy: &Policy, scopes: &[&str], action: &str| {
        judged(policy, scopes, "file_ops", &[action]).2
    };
    insta::assert_snapshot!(
        [
            reason(&policy, &["admin"], "w src/a"),
            reason(&policy, &["admin"], "r .env"),
            reason(&policy, &["agents:invoke"], "r a"),
            reason(&policy, &["admin"], "r a/../b"),
            reason(&Policy { autonomy: Autonomy::ReadOnly, ..permissive() }, &["admin"], "w a"),
            reason(&Policy { autonomy: Autonomy::Supervised, ..permissive() }, &["admin"], "x a"),
            reason(&Policy { tool_policies: vec![tools("file_*", Ask, false)], ..permissive() }, &["admin"], "r a"),
        ]
        .join("\n"),
        @r#"
    Blocked by the path rule: "src/a" may not be written; what may be written is ./out/** and tmp.
    Blocked by the path rule: ".env" may not be read, it is denied by **/.env; choose another path.
    Blocked by the scope rule: the caller who started this run has neither the scope tools:execute nor tools:file_ops; answer without this tool.
    Blocked by the path rule: it cannot decide: "a/../b" is not a normalised path.
    Blocked by the autonomy rule: this agent is read-only and may not write, move or delete "a".
    The autonomy rule asks for an approval: to write, move or delete "a" would lose what exists there.
    The tool_policy rule asks for an approval: the policy for file_* has a person decide on every call of file_ops.
    "#
    );
}

#[test]
fn a_permit_holds_the_actions_and_shows_only_what_may_be_read() {
    let policy =
        Policy { read: vec!["src/**".into()], deny: vec!["**/keys".into()], ..permissive() };
    let verdict = Gate::new(&policy)
        .unwrap()
        .judge(&["admin".to_owned()], call("file_ops", Once, vec![action("r src")]));
    let Verdict::Pass { permit, decision, rule, reason, .. } = verdict else {
        panic!("{verdict:?}")
    };
    assert_eq!((decision, rule, reason), (Allowed, "none", None));
    assert_eq!(permit.actions(), [action("r src")]);
    assert!(!permit.allows_destruction());
    let shown = ["src/a", "src/keys", "src/keys/a", "other"].map(|path| permit.may_read(path));
    assert_eq!(shown, [true, false, false, false]);
    let entered = ["src/a", "src/keys", "other"].map(|path| permit.may_enter(path));
    assert_eq!(entered, [true, false, true]);
}

#[test]
fn a_pattern_that_means_nothing_is_refused() {
    let with =
        |read: &str| Gate::new(&Policy { read: vec![read.into()], ..Policy::default() }).err();
    for pattern in ["", "/etc/**", ".//etc", "../**", "a/../b", "a[", "{a"] {
        let error: PolicyError =
            with(pattern).unwrap_or_else(|| panic!("{pattern:?} was accepted"));
        assert_eq!((error.setting, error.pattern.as_str()), ("paths.read", pattern));
    }
    let tools = Policy { tool_policies: vec![tools("a[", Deny, false)], ..Policy::default() };
    assert_eq!(Gate::new(&tools).err().map(|e| e.setting), Some("tool_policies"));
}

/// A policy in which every section has rules, none of which objects to [`everyday_calls`].
fn policy_of_all_sections() -> Policy {
    let numbered =
        |pattern: &str| (0..20).map(|n| pattern.replace('#', &n.to_string())).collect::<Vec<_>>();
    let rule = |command: String, args: &str| CommandRule {
        command,
        args: Some(args.to_owned()),
        effect: Once,
        destructive: false,
        observes: false,
    };
    let commands = Commands {
        allow: numbered("/usr/bin/tool#").into_iter().map(|c| rule(c, "^-[a-z]+ ")).collect(),
        deny: numbered("/usr/bin/tool#").into_iter().map(|c| rule(c, "--force")).collect(),
        require_approval: numbered("/usr/bin/tool#")
            .into_iter()
            .map(|c| rule(c, "--remote"))
            .collect(),
    };
    Policy {
        tool_policies: numbered("other#_*").iter().map(|glob| tools(glob, Deny, false)).collect(),
        read: numbered("./area#/**"),
        write: numbered("./area#/**"),
        deny: numbered("./area#/secret/**"),
        deny_in: vec![("other".into(), numbered("area#/**"))],
        deny_observed: numbered("./area#/*.env"),
        private: numbered("./area#/private/**"),
        allow_hosts: numbered("*.host#.test"),
        deny_hosts: numbered("bad.host#.test"),
        flow: FlowRule::defaults(),
        commands,
        ..permissive()
    }
}

/// One call of each kind of action, and the labels of a run that makes it.
fn everyday_calls() -> Vec<(&'static str, Action, Labels)> {
    let argv = ["/usr/bin/tool19", "-l", "area19/a", "area19/b"].map(str::to_owned).to_vec();
    let run = Action::new(ActionKind::Exec { argv, declared: false }, Once);
    let unread = Labels::default();
    vec![
        ("file_ops", action("r area19/src/deep/down/main.rs"), Labels::PRIVATE),
        (
            "file_ops",
            action("w area19/src/deep/down/main.rs"),
            Labels::UNTRUSTED.and(Labels::PRIVATE),
        ),
        ("web_fetch", action("f https://www.host19.test/a/b"), unread),
        ("shell", run, unread),
        ("lookup", action("c lookup"), Labels::UNTRUSTED),
    ]
}

#[test]
#[ignore = "prints a measurement"]
fn how_long_a_decision_with_rules_in_every_section_takes() {
    let gate = Gate::new(&policy_of_all_sections()).unwrap();
    let scopes = ["tools:execute".to_owned()];
    for (tool, action, labels) in everyday_calls() {
        let mut took: Vec<_> = (0..20_001)
            .map(|_| {
                let asked = Call { labels, ..call(tool, action.effect, vec![action.clone()]) };
                let began = Instant::now();
                let verdict = gate.judge(&scopes, asked);
                let took = began.elapsed();
                assert!(matches!(verdict, Verdict::Pass { decision: Allowed, .. }), "{verdict:?}");
                took
            })
            .collect();
        took.sort_unstable();
        let (median, most) = (took[took.len() / 2], took[took.len() * 99 / 100]);
        println!("{tool}: median {median:?}, 99 % {most:?}");
    }
}

#[test]
fn what_allows_a_call_is_the_entry_that_is_most_about_it() {
    let policy = Policy {
        tool_policies: vec![tools("file_*", Allow, false)],
        allow_hosts: vec!["*.example.com".into()],
        read: vec!["in/**".into()],
        write: vec!["out/**".into()],
        commands: Commands {
            allow: vec![CommandRule {
                command: "ls".into(),
                args: Some("-l".into()),
                effect: Read,
                destructive: false,
                observes: false,
            }],
            ..Commands::default()
        },
        ..permissive()
    };
    let gate = Gate::new(&policy).unwrap();
    let ls = ActionKind::Exec { argv: vec!["/bin/ls".into(), "-l".into()], declared: false };
    for (tool, actions, expected) in [
        ("file_ops", vec![action("r in/a"), action("w out/a")], Some(("path", "in/**"))),
        ("file_ops", vec![action("w out/a")], Some(("path", "out/**"))),
        (
            "browser",
            vec![action("w out/a"), action("f https://a.example.com/x")],
            Some(("network", "*.example.com")),
        ),
        ("shell", vec![action("r in/a"), Action::new(ls, Read)], Some(("command", "ls -l"))),
        ("file_x", vec![action("c file_x")], Some(("tool_policy", "file_*"))),
        ("recall", vec![action("c recall")], None),
    ] {
        let scopes = ["tools:execute".to_owned()];
        let Verdict::Pass { decision, allowance, .. } =
            gate.judge(&scopes, call(tool, Read, actions))
        else {
            panic!("{tool}")
        };
        let allowance = allowance.map(|it| (it.rule, it.pattern.unwrap()));
        let expected = expected.map(|(rule, pattern)| (rule, pattern.to_owned()));
        assert_eq!((decision, allowance), (Allowed, expected), "{tool}");
    }
}
