use serde_json::json;

use super::*;

fn agent(extra: &str) -> Agent {
    Agent::from_yaml("repo-guide", &format!("name: repo-guide\nmodel: a/b\n{extra}")).unwrap()
}

fn open(agent: &Agent, inputs: &Value, has_tools: bool) -> Result<Opening, PromptError> {
    let Definition { limits, governance, .. } = &agent.definition;
    opening(
        agent,
        inputs,
        &Terms { single_shot: !has_tools, has_tools, limits, budget: &governance.budget },
        &Background::default(),
    )
}

#[test]
fn a_governed_agent() {
    let agent = agent(
        r#"
description: Explains a repository.
instructions: |
  Explain {{ inputs.project }} to a newcomer, as {{ agent.name }} would.
inputs: {type: object, properties: {project: {type: string, description: The project's name.}, depth: {type: integer}}}
output: {schema: {type: object}}
tools: [file_ops]
governance:
  autonomy: supervised
  paths: {read: ["./**"], write: ["./out/**"], deny: ["**/.env"]}
  tool_policies: {browser: deny, shell: ask, "mcp:*": ask}
  budget: {max_tool_calls: 12, max_duration_seconds: 90}
"#,
    );
    let opening = open(&agent, &json!({"project": "toolloop", "depth": 2}), true).unwrap();
    insta::assert_snapshot!(format!("{}\n=== user\n{}", opening.system, opening.user));
}

#[test]
fn a_text_agent_without_tools() {
    let agent = agent("instructions: Be brief.\nprompt: 'Translate: {{ inputs.text }}'\n");
    let opening = open(&agent, &json!({"text": "a <b> & \"c\""}), false).unwrap();
    insta::assert_snapshot!(format!("{}\n=== user\n{}", opening.system, opening.user));
}

#[test]
fn a_single_shot_with_a_schema() {
    let agent = agent(
        "output: {schema: {type: object, required: [n], properties: {n: {type: integer}}}}\n",
    );
    let opening = open(&agent, &json!({}), false).unwrap();
    insta::assert_snapshot!(format!("{}\n=== user\n{}", opening.system, opening.user));
}

#[test]
fn inputs_have_a_stable_order() {
    let agent = agent("");
    let one =
        open(&agent, &json!({"b": {"d": 1, "c": [{"z": 1, "y": 2}]}, "a": 2}), false).unwrap();
    assert_eq!(one.user, r#"{"a":2,"b":{"c":[{"y":2,"z":1}],"d":1}}"#);
}

#[test]
fn templates_fail_by_name_and_line() {
    let instructions = agent("instructions: \"fine\\n{{ inputs.missing }}\"\n");
    let error = open(&instructions, &json!({}), false).unwrap_err();
    assert_eq!(error.part, "instructions");
    assert!(error.message.starts_with("line 2: undefined value"), "{error}");

    let runaway = agent(
        "prompt: '{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}'\n",
    );
    let error = open(&runaway, &json!({}), false).unwrap_err();
    assert_eq!(error.part, "prompt");
    assert!(error.message.contains("fuel"), "{error}");
}

#[test]
fn inputs_are_not_templates() {
    let agent = agent("prompt: 'Say {{ inputs.text }}'\n");
    let opening = open(&agent, &json!({"text": "{{ agent.name }}"}), false).unwrap();
    assert_eq!(opening.user, "Say {{ agent.name }}");
}
