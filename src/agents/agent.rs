//! A definition together with everything that is compiled from it once.
//!
//! Schemas and templates are compiled when a definition is loaded, or when a run is recovered from
//! its snapshot; a run compiles nothing. Both ways apply the same checks ([`super::checks`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use chrono::{DateTime, Utc};
use serde_json::Value;
use uuid::Uuid;

use super::Definition;
use super::checks::{self, compile_schema};
use super::definition::{
    CommandRule, CommandsSection, DenyRule, GovernanceSection, NetworkSection, PathsSection,
};
use super::directories::{directory_of, sha256_hex};
use super::mistakes::with_section;
use super::prompt::{PromptError, Templates};
use super::rules::Rules;
use super::yaml::{self, DefinitionError};
use crate::bounds::schema::{Fault, Schema, allows_objects};
use crate::event::ValidationError;
use crate::run::{Autonomy, FlowRule, GovernanceMode};

/// Errors that one validation reports at most.
const MAX_ERRORS: usize = 20;

/// An agent, ready to run.
#[derive(Debug)]
pub struct Agent {
    /// Its definition.
    pub definition: Definition,
    /// The definition as JSON text: the snapshot that runs keep.
    pub json: String,
    /// SHA-256 of `json`, hex.
    pub hash: String,
    /// When this version was loaded.
    pub loaded_at: DateTime<Utc>,
    inputs_validator: Option<Schema>,
    output_validator: Option<Schema>,
    /// The schema of the fields that decisions have in addition to the usual ones.
    pub decision_validator: Option<Arc<Schema>>,
    rules: Rules,
    pub(super) templates: Templates,
}

impl Agent {
    /// An agent from the text of its file, whose stem is `name`.
    ///
    /// # Errors
    /// What is wrong, with line, column and key.
    pub fn from_yaml(name: &str, text: &str) -> Result<Self, DefinitionError> {
        let definition: Definition = yaml::read(text).map_err(with_section)?;
        let json = serde_json::to_string(&definition)
            .map_err(|e| DefinitionError::at("", e.to_string()))?;
        if definition.name != name {
            let message = format!("{:?} does not equal the file's name, {name:?}", definition.name);
            return Err(DefinitionError::at("name", message).located_in(text));
        }
        Self::compile(definition, json).map_err(|e| e.located_in(text))
    }

    /// An agent from a run's snapshot.
    ///
    /// # Errors
    /// What is wrong: the snapshot is damaged, or was made by an incompatible version.
    pub fn from_json(json: &str) -> Result<Self, DefinitionError> {
        let definition =
            serde_json::from_str(json).map_err(|e| DefinitionError::at("", e.to_string()))?;
        Self::compile(definition, json.to_owned())
    }

    /// This agent with the restrictions of its parent: it may do no more without approval than
    /// `autonomy` says, and what the parent forbids or asks for holds too. `directory` is the parent's
    /// workspace, relative to the tenant's directory. If `is_elsewhere`, it is not this agent's own
    /// workspace, so the parent's denied and private paths are those of the parent's workspace.
    ///
    /// # Errors
    /// None in practice: what compiled once compiles again.
    pub fn narrowed_by_parent(
        self: &Arc<Self>,
        autonomy: Autonomy,
        parent: &Definition,
        (directory, is_elsewhere): (&str, bool),
    ) -> Result<Arc<Self>, DefinitionError> {
        let own = &self.definition;
        let elsewhere = Some(directory).filter(|_| is_elsewhere);
        let governance = narrowed(&own.governance, autonomy, &parent.governance, elsewhere);
        let interceptors = own.interceptors.narrowed_by(&parent.interceptors, directory);
        if governance == own.governance && interceptors == own.interceptors {
            return Ok(Arc::clone(self));
        }
        let definition = Definition { interceptors, governance, ..own.clone() };
        let json = serde_json::to_string(&definition)
            .map_err(|e| DefinitionError::at("", e.to_string()))?;
        Self::compile(definition, json).map(Arc::new)
    }

    fn compile(definition: Definition, json: String) -> Result<Self, DefinitionError> {
        checks::check(&definition)?;
        let inputs_validator =
            definition.inputs.as_ref().map(|s| compile_schema("inputs", s)).transpose()?;
        if definition.inputs.as_ref().is_some_and(|schema| !allows_objects(schema)) {
            let message = "must allow `type: object`: inputs are objects";
            return Err(DefinitionError::at("inputs", message));
        }
        let output_validator = definition
            .output
            .as_ref()
            .map(|o| compile_schema("output.schema", &o.schema))
            .transpose()?;
        let decision_validator = definition
            .react
            .decision_schema
            .as_ref()
            .map(|schema| compile_schema("react.decision_schema", schema).map(Arc::new))
            .transpose()?;
        let rules = Rules::compile(&definition)?;
        let templates = Templates::compile(&definition)?;
        if json.contains("\\u0000") {
            return Err(DefinitionError::at("", "NUL characters cannot be stored"));
        }
        let hash = sha256_hex(&json);
        let loaded_at = Utc::now();
        Ok(Self {
            definition,
            json,
            hash,
            loaded_at,
            inputs_validator,
            output_validator,
            decision_validator,
            rules,
            templates,
        })
    }

    /// Checks a request's inputs. Without a schema any object will do.
    ///
    /// # Errors
    /// What is wrong, with JSON pointers into the inputs.
    pub fn check_inputs(&self, inputs: &Value) -> Result<(), Vec<ValidationError>> {
        if !inputs.is_object() {
            let message = "inputs must be an object".to_owned();
            return Err(vec![ValidationError { pointer: String::new(), message }]);
        }
        self.inputs_validator.as_ref().map_or(Ok(()), |schema| validate(schema, inputs))
    }

    /// Checks a proposed output against the schema of the contract. A text contract accepts all.
    ///
    /// # Errors
    /// What is wrong, with JSON pointers into the output.
    pub fn check_output(&self, output: &Value) -> Result<(), Vec<ValidationError>> {
        self.output_validator.as_ref().map_or(Ok(()), |schema| validate(schema, output))
    }

    /// What the rules of the contract say against an output that its schema accepts; a rule that
    /// cannot be evaluated is broken.
    pub fn rules_broken_by(&self, output: &Value, inputs: &Value) -> Vec<ValidationError> {
        self.rules.broken_by(output, inputs)
    }

    /// The index of the first stop condition that is met and is not among those that were
    /// `already` met, and why it counts as met if it cannot be evaluated: a check that cannot decide
    /// denies. `facts` holds `usage`, `counters` and `elapsed`, as documented on
    /// [`crate::run::StopCondition`].
    pub fn condition_met(
        &self,
        already: &BTreeSet<usize>,
        facts: &Value,
    ) -> Option<(usize, Option<String>)> {
        self.rules.condition_met(already, facts)
    }

    /// A proposed output as the contract's template shows it; `None` without one.
    ///
    /// # Errors
    /// [`PromptError`] where the template asks for what the output lacks, or exceeds its bounds.
    pub fn reflected(&self, output: &Value, inputs: &Value) -> Option<Result<String, PromptError>> {
        self.definition.output.as_ref()?.reflection.as_ref()?.template.as_ref()?;
        Some(self.templates.reflection(&self.definition, output, inputs))
    }

    /// The directory of a run's files, relative to its tenant's.
    pub fn workspace_of(&self, run: Uuid, session: Option<&str>) -> String {
        directory_of(&self.definition.workspace, run, session)
    }
}

/// The rules of an agent whose run was started by another run.
fn narrowed(
    own: &GovernanceSection,
    autonomy: Autonomy,
    parent: &GovernanceSection,
    elsewhere: Option<&str>,
) -> GovernanceSection {
    let as_observed;
    let parent = if parent.mode > own.mode {
        as_observed = observed(parent, autonomy);
        &as_observed
    } else {
        parent
    };
    // Named one by one, so that a new section does not compile until it is handled here.
    let GovernanceSection {
        autonomy: _, // that of the run, which its skills may have narrowed
        mode,
        paths: PathsSection { read: _, write: _, deny, private, deny_in, private_in },
        network:
            NetworkSection {
                allow: _,
                deny: denied_hosts,
                allow_private: _,
                credentials: _,
                max_requests,
            },
        commands: CommandsSection { allow: _, deny: denied_commands, require_approval },
        tool_policies,
        flow: _,
        injection: _,
        approval_timeout: _,
        budget: _, // of the whole tree
        observed_autonomy,
    } = parent;
    let mut rules = own.clone();
    if parent.mode <= own.mode {
        rules.autonomy = rules.autonomy.min(autonomy);
    }
    rules.observed_autonomy = rules.observed_autonomy.into_iter().chain(*observed_autonomy).min();
    rules.mode = rules.mode.min(*mode);
    for (tools, policy) in tool_policies {
        let own = rules.tool_policies.entry(tools.clone()).or_insert(*policy);
        *own = own.stricter(*policy);
    }
    let mut flow = rules.flow_rules();
    add_missing(&mut flow, &parent.flow_rules());
    if flow != rules.flow_rules() {
        rules.flow = Some(flow);
    }
    add_missing(&mut rules.commands.deny, denied_commands);
    add_missing(&mut rules.commands.require_approval, require_approval);
    match elsewhere {
        None => {
            add_missing(&mut rules.paths.private, private);
            add_missing(&mut rules.paths.deny, deny);
        }
        Some(directory) => {
            add_missing_in(&mut rules.paths.private_in, directory, private);
            add_missing_in(&mut rules.paths.deny_in, directory, deny);
        }
    }
    for (directory, globs) in private_in {
        add_missing_in(&mut rules.paths.private_in, directory, globs);
    }
    for (directory, globs) in deny_in {
        add_missing_in(&mut rules.paths.deny_in, directory, globs);
    }
    add_missing(&mut rules.network.deny, denied_hosts);
    rules.network.max_requests = rules.network.max_requests.into_iter().chain(*max_requests).min();
    rules
}

/// The same rules for an agent that enforces its own: each of them only observes.
fn observed(rules: &GovernanceSection, autonomy: Autonomy) -> GovernanceSection {
    let deny = |rules: &[DenyRule]| -> Vec<DenyRule> {
        rules.iter().map(|rule| DenyRule::observing(rule.pattern())).collect()
    };
    let commands = |rules: &[CommandRule]| -> Vec<CommandRule> {
        let observing =
            |rule: &CommandRule| CommandRule { mode: GovernanceMode::Observe, ..rule.clone() };
        rules.iter().map(observing).collect()
    };
    let flow = rules.flow_rules().into_iter();
    let tools = rules.tool_policies.iter();
    let deny_in = rules.paths.deny_in.iter();
    GovernanceSection {
        paths: PathsSection {
            deny: deny(&rules.paths.deny),
            deny_in: deny_in.map(|(directory, rules)| (directory.clone(), deny(rules))).collect(),
            ..rules.paths.clone()
        },
        network: NetworkSection { deny: deny(&rules.network.deny), ..rules.network.clone() },
        commands: CommandsSection {
            deny: commands(&rules.commands.deny),
            require_approval: commands(&rules.commands.require_approval),
            ..rules.commands.clone()
        },
        tool_policies: tools.map(|(tool, rule)| (tool.clone(), rule.observing())).collect(),
        observed_autonomy: rules
            .observed_autonomy
            .into_iter()
            .chain((autonomy != Autonomy::Full).then_some(autonomy))
            .min(),
        flow: Some(flow.map(|rule| FlowRule { mode: GovernanceMode::Observe, ..rule }).collect()),
        ..rules.clone()
    }
}

fn add_missing_in<T: PartialEq + Clone>(
    rules: &mut BTreeMap<String, Vec<T>>,
    directory: &str,
    more: &[T],
) {
    if !more.is_empty() {
        add_missing(rules.entry(directory.to_owned()).or_default(), more);
    }
}

fn add_missing<T: PartialEq + Clone>(rules: &mut Vec<T>, more: &[T]) {
    for rule in more {
        if !rules.contains(rule) {
            rules.push(rule.clone());
        }
    }
}

fn validate(schema: &Schema, value: &Value) -> Result<(), Vec<ValidationError>> {
    schema.check(value, MAX_ERRORS).map_err(|rejected| {
        let error =
            |fault: Fault| ValidationError { pointer: fault.pointer, message: fault.message };
        rejected.faults().into_iter().map(error).collect()
    })
}
