//! What a definition says in expressions: of outputs that are acceptable, and of runs that have
//! gone on long enough.
//!
//! Compiled with the definition, which is refused where an expression means nothing, or where one
//! of its examples is not judged as its author expects. What follows from a broken rule or a
//! condition that is met is the engine's.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::Definition;
use super::yaml::DefinitionError;
use crate::bounds::expression::{Expression, ExpressionError};
use crate::event::ValidationError;
use crate::run::StopCondition;

/// What output rules may use.
const OF_OUTPUTS: [&str; 2] = ["output", "inputs"];
/// What stop conditions may use.
const OF_RUNS: [&str; 3] = ["usage", "counters", "elapsed"];

/// The compiled expressions of an agent.
#[derive(Debug)]
pub(super) struct Rules {
    output: Vec<Rule>,
    stop: Vec<Expression>,
}

#[derive(Debug)]
struct Rule {
    holds: Expression,
    message: String,
}

impl Rules {
    pub(super) fn compile(definition: &Definition) -> Result<Self, DefinitionError> {
        let mut output = Vec::new();
        for (i, rule) in definition.output.iter().flat_map(|o| &o.rules).enumerate() {
            let key = format!("output.rules[{i}]");
            let holds = Expression::compile(&rule.rule, &OF_OUTPUTS)
                .map_err(|e| DefinitionError::at(format!("{key}.rule"), e.to_string()))?;
            check_examples(&holds, &format!("{key}.match"), &rule.matches, true)?;
            check_examples(&holds, &format!("{key}.no_match"), &rule.no_matches, false)?;
            output.push(Rule { holds, message: rule.message.clone() });
        }
        let conditions = &definition.governance.budget.stop_conditions;
        let stop =
            conditions.iter().enumerate().map(|(i, condition)| compile_condition(i, condition));
        Ok(Self { output, stop: stop.collect::<Result<_, _>>()? })
    }

    /// The messages of the rules that an output breaks. One that cannot be evaluated is broken.
    pub(super) fn broken_by(&self, output: &Value, inputs: &Value) -> Vec<ValidationError> {
        let broken = self.output.iter().filter_map(|rule| {
            let message = match rule.holds.is_true(&[("output", output), ("inputs", inputs)]) {
                Ok(true) => return None,
                Ok(false) => rule.message.clone(),
                Err(reason) => {
                    format!("{} (The rule {} fails: {reason}.)", rule.message, rule.holds.source())
                }
            };
            Some(ValidationError { pointer: String::new(), message })
        });
        broken.collect()
    }

    /// The place of the first condition that is met and was not before, and why it could not be
    /// evaluated.
    pub(super) fn condition_met(
        &self,
        already: &BTreeSet<usize>,
        facts: &Value,
    ) -> Option<(usize, Option<String>)> {
        let variables = OF_RUNS.map(|name| (name, &facts[name]));
        self.stop.iter().enumerate().filter(|(place, _)| !already.contains(place)).find_map(
            |(place, condition)| match condition.is_true(&variables) {
                Ok(false) => None,
                Ok(true) => Some((place, None)),
                Err(reason) => Some((place, Some(reason.to_string()))),
            },
        )
    }
}

/// Examples are judged without inputs.
fn check_examples(
    rule: &Expression,
    key: &str,
    examples: &[Value],
    expected: bool,
) -> Result<(), DefinitionError> {
    let inputs = Value::Object(Map::new());
    for (i, example) in examples.iter().enumerate() {
        let key = format!("{key}[{i}]");
        match rule.is_true(&[("output", example), ("inputs", &inputs)]) {
            Ok(judged) if judged == expected => {}
            Ok(true) => {
                return Err(DefinitionError::at(
                    key,
                    "the rule accepts this example, which it must not",
                ));
            }
            Ok(false) => {
                return Err(DefinitionError::at(key, "the rule does not accept this example"));
            }
            Err(_) if !expected => {}
            Err(reason) => {
                return Err(DefinitionError::at(
                    key,
                    format!("the rule does not accept this example: {reason}"),
                ));
            }
        }
    }
    Ok(())
}

/// The names of all facts are known, so that a condition on another one is found now.
fn compile_condition(
    place: usize,
    condition: &StopCondition,
) -> Result<Expression, DefinitionError> {
    let wrong = |e: &ExpressionError| {
        DefinitionError::at(
            format!("governance.budget.stop_conditions[{place}].when"),
            e.to_string(),
        )
    };
    let compiled = Expression::compile(&condition.when, &OF_RUNS).map_err(|e| wrong(&e))?;
    let usage = json!({"input_tokens": 1, "output_tokens": 1, "cached_input_tokens": 1, "cache_write_tokens": 1,
        "reasoning_tokens": 1, "total_tokens": 1, "cost_usd": 1.0});
    let counters = json!({"iterations": 1, "attempts": 1, "tool_calls": 1, "files_read": 1, "files_written": 1,
        "files_modified": 1, "lines_changed": 1, "commands": 1, "network_requests": 1});
    match compiled.is_true(&[("usage", &usage), ("counters", &counters), ("elapsed", &json!(1))]) {
        Err(error @ (ExpressionError::MissingKey(_) | ExpressionError::NotBoolean(_))) => {
            Err(wrong(&error))
        }
        _ => Ok(compiled),
    }
}

#[cfg(test)]
#[path = "rules_tests.rs"]
mod tests;
