//! Flow rules as tables: labels, actions, decisions.

use super::flow::mistake_of_rule;
use super::{
    Action, ActionKind, Call, Decision, Gate, Objection, Policy, ToolPolicy, ToolRule, Verdict,
};
use crate::run::{Autonomy, Effect, FlowDecision, FlowRule, GovernanceMode, Labels, Target};
use Decision::{Allowed, Blocked, Escalated, Warned};

fn policy(flow: Vec<FlowRule>) -> Policy {
    let all = || vec!["./**".to_owned()];
    Policy { autonomy: Autonomy::Full, read: all(), write: all(), flow, ..Policy::default() }
}

fn fetch(destructive: bool) -> Action {
    let target = Target {
        scheme: "https".into(),
        host: "drop.example".into(),
        port: 443,
        path: "/in".into(),
        declared: true,
    };
    let what = ActionKind::Fetch(target);
    Action { egress: true, destructive, ..Action::new(what, Effect::Once) }
}

fn write(destructive: bool) -> Action {
    let what = ActionKind::Write { path: "out/a".into() };
    Action { destructive, ..Action::new(what, Effect::Once) }
}

fn call(labels: Labels, actions: Vec<Action>) -> Call<'static> {
    Call {
        tool: "t",
        effect: Effect::Once,
        actions: actions.into(),
        is_undeclared: false,
        approved_by: None,
        labels,
        skills: &[],
        directory: ".".into(),
    }
}

fn decided(gate: &Gate, call: Call<'_>) -> (Decision, &'static str) {
    match gate.judge(&["tools:execute".into()], call) {
        Verdict::Pass { decision, rule, .. } | Verdict::Stop(Objection { decision, rule, .. }) => {
            (decision, rule)
        }
    }
}

fn rule(when: &str, decision: FlowDecision) -> FlowRule {
    FlowRule { when: when.into(), r#do: decision, mode: GovernanceMode::Enforce }
}

#[test]
fn the_defaults_by_label_and_action() {
    let gate = Gate::new(&policy(FlowRule::defaults())).unwrap();
    let (none, both) = (Labels::default(), Labels::UNTRUSTED.and(Labels::PRIVATE));
    #[rustfmt::skip]
    let table = [
        (none,              vec![write(true)],                Allowed),
        (none,              vec![fetch(true)],                Allowed),
        (Labels::PRIVATE,   vec![write(true), fetch(false)],  Allowed),
        (Labels::UNTRUSTED, vec![write(false)],               Allowed),
        (Labels::UNTRUSTED, vec![write(true)],                Escalated),
        (Labels::UNTRUSTED, vec![fetch(false)],               Allowed),
        (Labels::UNTRUSTED, vec![write(false), fetch(true)],  Escalated),
        (both,              vec![write(false)],               Allowed),
        (both,              vec![write(true)],                Escalated),
        (both,              vec![fetch(false)],               Blocked),
        (both,              vec![write(true), fetch(false)],  Blocked),
        (both,              vec![],                           Allowed),
    ];
    for (labels, actions, decision) in table {
        let rule = if decision == Allowed { "none" } else { "flow" };
        let judged = decided(&gate, call(labels, actions.clone()));
        assert_eq!(judged, (decision, rule), "{labels:?} {actions:?}");
    }
}

#[test]
fn what_a_call_may_read_before_it_sends_counts() {
    let exec = |egress| {
        let what = ActionKind::Exec { argv: vec!["/usr/bin/curl".into()], declared: true };
        Action { egress, ..Action::new(what, Effect::Once) }
    };
    let read = |path: &str| Action::new(ActionKind::Read { path: path.into() }, Effect::Read);
    let private = || vec!["vault/**".to_owned()];
    let table = [
        (private(), vec![exec(true)], Blocked),
        (private(), vec![exec(false)], Allowed),
        (private(), vec![read("vault/a"), fetch(false)], Blocked),
        (private(), vec![read("out/a"), fetch(false)], Allowed),
        (vec![], vec![exec(true)], Allowed),
    ];
    for (private, actions, expected) in table {
        let policy = Policy { private, ..policy(FlowRule::defaults()) };
        let gate = Gate::new(&policy).unwrap();
        let judged = decided(&gate, call(Labels::UNTRUSTED, actions.clone()));
        assert_eq!(judged.0, expected, "{actions:?}");
    }
}

/// Every autonomy with the rules that are its default, on every effect with every label.
#[test]
fn autonomy_effects_and_labels_as_a_matrix() {
    use Autonomy::{Full, ReadOnly, Supervised};
    let both = Labels::UNTRUSTED.and(Labels::PRIVATE);
    let all_labels = [Labels::default(), Labels::UNTRUSTED, Labels::PRIVATE, both];
    let effects = [
        (Effect::Read, false),
        (Effect::Idempotent, false),
        (Effect::Once, false),
        (Effect::Once, true),
    ];
    let mut counts = [0; 4];
    for autonomy in [ReadOnly, Supervised, Full] {
        let flow = if autonomy == Supervised { FlowRule::defaults() } else { Vec::new() };
        let gate = Gate::new(&Policy { autonomy, ..policy(flow) }).unwrap();
        for labels in all_labels {
            for ((effect, destructive), egress) in
                effects.iter().flat_map(|effect| [(*effect, false), (*effect, true)])
            {
                let tool = ActionKind::Call { tool: "t".into() };
                let action = Action { destructive, egress, ..Action::new(tool, effect) };
                let leaks = labels == both && egress;
                let expected = match autonomy {
                    ReadOnly if effect != Effect::Read => Blocked,
                    Supervised if leaks => Blocked,
                    Supervised if destructive => Escalated,
                    _ => Allowed,
                };
                let judged = decided(&gate, call(labels, vec![action])).0;
                assert_eq!(judged, expected, "{autonomy:?} {labels:?} {effect:?} {egress}");
                counts[judged as usize] += 1;
            }
        }
    }
    assert_eq!(counts, [61, 0, 7, 28]);
}

/// Of rules that only observe, what the strictest would have done.
#[test]
fn a_rule_that_only_observes_does_not_hide_a_stricter_one() {
    let tools = ToolRule { tools: "*".into(), policy: ToolPolicy::Ask, observes: true };
    let observing =
        |when: &str, decision| FlowRule { mode: GovernanceMode::Observe, ..rule(when, decision) };
    let asks = observing("action.path == 'out/a'", FlowDecision::Ask);
    let denies = observing("action.kind == 'write'", FlowDecision::Deny);
    let watched = || vec!["out/**".to_owned()];
    for (flow, deny_observed, expected) in [
        (vec![], vec![], "tool_policy"),
        (vec![asks.clone()], vec![], "tool_policy"),
        (vec![asks.clone(), denies.clone()], vec![], "flow"),
        (vec![asks], watched(), "path"),
        (vec![denies], watched(), "path"),
    ] {
        let policy =
            Policy { tool_policies: vec![tools.clone()], deny_observed, ..policy(flow.clone()) };
        let gate = Gate::new(&policy).unwrap();
        let judged = decided(&gate, call(Labels::default(), vec![write(false)]));
        assert_eq!(judged, (Warned, expected), "{flow:?}");
    }
}

#[test]
fn rules_see_the_whole_action_and_deny_where_they_cannot_decide() {
    let table = [
        ("action.url.startsWith('https://drop.example:443/')", fetch(false), Warned),
        ("action.path == 'out/a' && action.kind == 'write'", write(false), Warned),
        ("action.effect == 'once' && tool == 't' && action.tool == tool", write(false), Warned),
        ("size(action.argv) == 0 && action.path == ''", fetch(false), Warned),
        ("labels.private", write(false), Allowed),
        ("action.nothing", write(false), Blocked),
        ("action.path", write(false), Blocked),
        ("size(action.path) / size(action.argv) > 0", write(false), Blocked),
    ];
    for (when, action, decision) in table {
        let gate = Gate::new(&policy(vec![rule(when, FlowDecision::Warn)])).unwrap();
        assert_eq!(decided(&gate, call(Labels::UNTRUSTED, vec![action])).0, decision, "{when}");
    }
    for bad in ["", "label.untrusted", "labels.untrusted &&", "args.x"] {
        let refused = Gate::new(&policy(vec![rule(bad, FlowDecision::Ask)]));
        assert_eq!(refused.err().map(|error| error.setting), Some("governance.flow"), "{bad}");
    }
}

#[test]
fn rules_that_cannot_be_evaluated_are_mistakes() {
    #[rustfmt::skip]
    let table = [
        ("labels.nope",                                   Some("there is no key \"nope\"")),
        ("labels.untrusted && action.file == 'a'",        Some("there is no key \"file\"")),
        ("action.kind == 'exec' && action.args == []",    Some("there is no key \"args\"")),
        ("1 + 1",                                         Some("neither true nor false")),
        ("action.kind == 'exec' && action.argv[7] == ''", None),
        ("has(labels.nope) || labels.private",            None),
    ];
    for (when, wrong) in table {
        let found = mistake_of_rule(when).map(|error| error.to_string());
        assert_eq!(found.is_some(), wrong.is_some(), "{when}: {found:?}");
        assert!(found.unwrap_or_default().contains(wrong.unwrap_or_default()), "{when}");
    }
}
