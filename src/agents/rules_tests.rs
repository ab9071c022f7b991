use crate::agents::Agent;

use super::*;

fn agent(more: &str) -> Agent {
    let yaml = format!("name: ab\nmodel: m/x\n{more}");
    Agent::from_yaml("ab", &yaml).unwrap_or_else(|e| panic!("{more}: {e}"))
}

fn error(more: &str) -> String {
    Agent::from_yaml("ab", &format!("name: ab\nmodel: m/x\n{more}")).expect_err(more).to_string()
}

fn messages(agent: &Agent, output: &Value, inputs: &Value) -> Vec<String> {
    agent.rules_broken_by(output, inputs).into_iter().map(|error| error.message).collect()
}

#[test]
fn broken_rules_say_their_messages() {
    let agent = agent(
        "output:\n  schema: {type: object}\n  rules:\n  - {rule: 'output.notes.all(n, size(n) < 3)', message: Short notes.}\n  \
         - {rule: 'size(output.notes) <= inputs.max', message: Few notes.}\n",
    );
    let broken = |output: Value, inputs: Value| messages(&agent, &output, &inputs);
    assert!(broken(json!({"notes": ["ab"]}), json!({"max": 1})).is_empty());
    assert_eq!(
        broken(json!({"notes": ["abc", "d"]}), json!({"max": 1})),
        ["Short notes.", "Few notes."]
    );
    assert_eq!(
        broken(json!({"notes": []}), json!({})),
        ["Few notes. (The rule size(output.notes) <= inputs.max fails: there is no key \"max\".)"]
    );
}

#[test]
fn examples_are_judged_when_a_rule_is_loaded() {
    let rule = |examples: &str| {
        format!(
            "output:\n  schema: {{type: object}}\n  rules:\n  - rule: 'output.n > 1'\n    message: more\n    {examples}\n"
        )
    };
    agent(&rule("match: [{n: 2}, {n: 3}]\n    no_match: [{n: 1}, {}]"));
    for (examples, expected) in [
        (
            "match: [{n: 2}, {n: 1}]",
            "output.rules[0].match[1]: the rule does not accept this example",
        ),
        (
            "match: [{}]",
            "output.rules[0].match[0]: the rule does not accept this example: there is no key \"n\"",
        ),
        (
            "no_match: [{n: 2}]",
            "output.rules[0].no_match[0]: the rule accepts this example, which it must not",
        ),
    ] {
        let error = error(&rule(examples));
        assert!(error.ends_with(expected) && error.starts_with("line 8, column"), "{error}");
    }
}

#[test]
fn what_is_wrong_with_a_contract_is_found_at_its_key() {
    let output = "output:\n  schema: {type: object}\n";
    for (section, key, words) in [
        (
            "  rules: [{rule: 'ouput.n > 1', message: m}]",
            "output.rules[0].rule",
            "unknown variable \"ouput\"",
        ),
        (
            "  rules: [{rule: 'output.n >', message: m}]",
            "output.rules[0].rule",
            "not a valid CEL expression: at line 1",
        ),
        ("  rules: [{rule: 'true', message: ''}]", "output.rules[0].message", "1 to 4096"),
        ("  validator: {url: 'ftp://x'}", "output.validator.url", "http://"),
        ("  validator: {url: 'http://me:secret@x/'}", "output.validator.url", "user name"),
        (
            "  validator: {url: 'http://x', timeout_seconds: 0}",
            "output.validator.timeout_seconds",
            "between 1 and 600",
        ),
        ("  reflection: {}", "output.reflection", "either `template` or `url`"),
        (
            "  reflection: {template: t, url: 'http://x'}",
            "output.reflection",
            "either `template` or `url`",
        ),
        ("  reflection: {url: nowhere}", "output.reflection.url", "is not a URL"),
        (
            "  reflection: {url: 'http://x', timeout_seconds: 601}",
            "output.reflection.timeout_seconds",
            "601",
        ),
        (
            "  reflection: {template: '{{ outputs }}'}",
            "output.reflection.template",
            "unknown variable \"outputs\"",
        ),
        (
            "  reflection: {template: '{{ output'}",
            "output.reflection.template",
            "is not a valid template",
        ),
        (
            "  reflection: {template: t, submit: {name: output}}",
            "output.reflection.submit.name",
            "output tool",
        ),
        (
            "  reflection: {template: t, submit: {name: a b}}",
            "output.reflection.submit.name",
            "does not match",
        ),
        (
            "  reflection: {template: t, submit: {name: file_ops}}\ntools: [file_ops]",
            "submit.name",
            "agent's tools",
        ),
        ("  tool: {name: use_skill}\nskills: [style]", "output.tool.name", "use_skill"),
    ] {
        let error = error(&format!("{output}{section}\n"));
        assert!(error.contains(key) && error.contains(words), "{section}: {error}");
        assert!(!error.contains("secret"), "{error}");
    }
}

#[test]
fn what_is_wrong_with_tool_settings_is_found_at_its_key() {
    for (section, key) in [
        ("tools: [a, recall]", "tools[1]"),
        ("tools: [a, use_skill]", "tools[1]"),
        ("tool_options: {'[': {retries: 1}}", "tool_options.["),
        ("tool_options: {a: {retries: 11}}", "tool_options.a.retries"),
        ("tool_options: {'agent:x': {retries: 1}}", "tool_options.agent:x.retries"),
        ("tool_options: {transfer_to_x: {retries: 2}}", "tool_options.transfer_to_x.retries"),
        ("tool_options: {a: {timeout_seconds: 0}}", "tool_options.a.timeout_seconds"),
        ("interceptors: {before: [{tool: a}]}", "interceptors.before[0]"),
        (
            "interceptors: {before: [{tool: a, block: no, rewrite: {/x: '1'}}]}",
            "interceptors.before[0]",
        ),
        ("interceptors: {before: [{tool: a, rewrite: {}}]}", "interceptors.before[0]"),
        ("interceptors: {before: [{tool: '[', block: 'no'}]}", "interceptors.before[0].tool"),
        (
            "interceptors: {before: [{tool: a, when: 'arg.x', block: 'no'}]}",
            "interceptors.before[0].when",
        ),
        (
            "interceptors: {before: [{tool: a, rewrite: {x: '1'}}]}",
            "interceptors.before[0].rewrite.x",
        ),
        (
            "interceptors: {before: [{tool: a, rewrite: {/x~2: '1'}}]}",
            "interceptors.before[0].rewrite./x~2",
        ),
        (
            "interceptors: {before: [{tool: a, rewrite: {/x: '1 +'}}]}",
            "interceptors.before[0].rewrite./x",
        ),
        ("interceptors: {after: [{tool: a, redact: '('}]}", "interceptors.after[0].redact"),
        ("interceptors: {after: [{tool: a, redact: '(?<=x)y'}]}", "interceptors.after[0].redact"),
        ("skills: [Style]", "skills[0]"),
        ("skills: [style, style]", "skills[1]"),
        ("skills: [style]\nactive_skills: [other]", "active_skills[0]"),
    ] {
        let error = error(section);
        assert!(error.contains(&format!("{key}: ")), "{section}: {error}");
    }
}

#[test]
fn stop_conditions_are_met_once_and_in_order() {
    let agent = agent(
        "governance: {budget: {stop_conditions: [{when: 'usage.cost_usd > 1.0'}, {when: 'counters.tool_calls >= 3 && \
         elapsed > 10', action: warn}, {when: 'usage.output_tokens / usage.input_tokens > 2', action: escalate}]}}\n",
    );
    let facts = |cost: Value, calls: u32, input: u32| {
        json!({"usage": {"input_tokens": input, "output_tokens": 6, "total_tokens": 6, "cost_usd": cost},
            "counters": {"tool_calls": calls}, "elapsed": 11})
    };
    let met = |already: &[usize], facts: &Value| {
        agent.condition_met(&already.iter().copied().collect(), facts)
    };
    let sure = |place| Some((place, None));
    assert_eq!(met(&[], &facts(json!(0.5), 2, 5)), None);
    assert_eq!(met(&[], &facts(json!(1.5), 3, 1)), sure(0));
    assert_eq!(met(&[0], &facts(json!(1.5), 3, 1)), sure(1));
    assert_eq!(met(&[0, 1], &facts(json!(1.5), 3, 1)), sure(2));
    assert_eq!(met(&[0, 1, 2], &facts(json!(1.5), 3, 1)), None);
    let (place, undecided) = met(&[0, 1], &facts(json!(0), 0, 0)).unwrap();
    assert_eq!(place, 2);
    assert!(
        undecided.unwrap().starts_with("it cannot be evaluated: "),
        "a check that cannot decide denies"
    );
}

#[test]
fn stop_conditions_know_the_names_of_all_facts() {
    for (when, words) in [
        ("usage.tokens > 5", "there is no key \"tokens\""),
        ("cost > 1", "unknown variable \"cost\""),
        ("counters.iterations", "neither true nor false"),
        ("elapsed >", "at line 1"),
    ] {
        let error =
            error(&format!("governance: {{budget: {{stop_conditions: [{{when: '{when}'}}]}}}}\n"));
        assert!(
            error.contains("governance.budget.stop_conditions[0].when: ") && error.contains(words),
            "{error}"
        );
    }
}

#[test]
fn an_output_is_shown_by_its_template() {
    let agent = agent(
        "output:\n  schema: {type: object}\n  reflection:\n    template: '{% for n in output.notes %}* {{ n }} of {{ inputs.who }}\n\n      {% endfor %}'\n",
    );
    let shown =
        agent.reflected(&json!({"notes": ["a", "b"]}), &json!({"who": "me"})).unwrap().unwrap();
    assert_eq!(
        shown.split_whitespace().collect::<Vec<_>>(),
        ["*", "a", "of", "me", "*", "b", "of", "me"]
    );
    let error = agent.reflected(&json!({}), &json!({})).unwrap().unwrap_err().to_string();
    assert!(error.contains("output.reflection.template"), "{error}");
    let plain = "output:\n  schema: {type: object}\n  reflection: {template: Look again.}\n";
    assert_eq!(
        super::tests::agent(plain).reflected(&json!({}), &json!({})),
        Some(Ok("Look again.".to_owned()))
    );
}

#[test]
fn schemas_refer_to_nothing_outside_and_explode_at_nothing() {
    let schema = |schema: &str| {
        format!("output:\n  schema: {{type: object, properties: {{a: {schema}}}}}\n")
    };
    for (broken, words) in [
        ("{$ref: 'https://example.com/schema.json'}", "references to other documents"),
        ("{$ref: 'file:///etc/passwd'}", "references to other documents"),
        ("{$ref: '#/$defs/none'}", "leads nowhere"),
        ("{type: string, pattern: '(?=x)y'}", "linear time"),
        ("{type: string, pattern: '(a)\\1'}", "linear time"),
        ("{patternProperties: {'(?!x)': true}}", "linear time"),
    ] {
        let error = error(&schema(broken));
        assert!(error.contains("output.schema: ") && error.contains(words), "{broken}: {error}");
    }
    let slow = agent(&schema("{type: string, pattern: '^(a+)+$'}"));
    let errors = slow.check_output(&json!({"a": format!("{}!", "a".repeat(50_000))})).unwrap_err();
    assert_eq!(errors[0].pointer, "/a");
}

#[test]
fn schemas_may_refer_to_themselves() {
    let tree = agent(
        "output:\n  schema: {type: object, required: [n], properties: {n: {type: integer}, left: {$ref: '#'}, right: {$ref: '#'}}}\n",
    );
    let mut deep = json!({"n": 1});
    for _ in 0..100 {
        deep = json!({"n": 1, "left": deep});
    }
    assert!(tree.check_output(&deep).is_ok());
    let errors = tree.check_output(&json!({"n": 1, "left": {"n": 1, "right": {}}})).unwrap_err();
    assert_eq!(errors[0].pointer, "/left/right");
}

/// A schema that is nothing but itself says nothing, and must not take the process with it.
#[test]
fn schemas_that_go_in_circles_end() {
    for circle in [
        "{type: object, $ref: '#'}",
        "{type: object, allOf: [{$ref: '#/$defs/a'}], $defs: {a: {$ref: '#/$defs/b'}, b: {$ref: '#/$defs/a'}}}",
    ] {
        let yaml = format!("name: ab\nmodel: m/x\noutput:\n  schema: {circle}\n");
        if let Ok(agent) = Agent::from_yaml("ab", &yaml) {
            let _ = agent.check_output(&json!({"a": 1}));
        }
    }
}
