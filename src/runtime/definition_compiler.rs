//! Translates a definition for `tools` and `governance`: its tools behind its gate, the options of their calls, and
//! its policy. Checks that the tools that it names exist here.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use crate::agents::catalogue::missing;
use crate::agents::definition::{
    AfterInterceptor, BeforeInterceptor, Cache, CommandRule, CommandsSection, DenyRule,
    GovernanceSection, InheritedInterceptors, Interceptors, ToolOptions, ToolPolicySetting,
    options_of,
};
use crate::agents::{Definition, DefinitionError, Skills};
use crate::bounds::glob::{self, Glob};
use crate::bounds::json::unescaped_key;
use crate::bounds::nearest::nearest;
use crate::bounds::text::quoted;
use crate::engine::client_tools::ClientTools;
use crate::governance::{self, FLOW, Gate, Policy, PolicyError, ToolPolicy};
use crate::run::{Delegation, Effect, GovernanceMode, Labels};
use crate::tools::executor::{CallOptions, Executor};
use crate::tools::interceptors::{
    self, AfterRule, BeforeRule, Interception, InterceptorError, Revision,
};
use crate::tools::mcp;
use crate::tools::recall;
use crate::tools::registry::Registry;
use crate::tools::shell;
use crate::tools::use_skill::{self, UseSkill};
use crate::tools::{Defaults, Tool};
use crate::tools::{browser, web_fetch};

/// Bytes of the names, descriptions and schemas of all tools of one agent.
const MAX_TOOLS: usize = 2 << 20;

/// Why a definition cannot run here: one sentence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct LoadError(pub(super) DefinitionError);

/// A definition's tools, including those of other agents, behind its gate. Checks that the tools exist, and that
/// settings of single tools refer to tools of the definition.
pub(super) fn executor(
    registry: &Registry,
    skills: &Arc<Skills>,
    definition: &Definition,
    subagents: impl Iterator<Item = Arc<dyn Tool>>,
) -> Result<Executor, LoadError> {
    let error = |e: &dyn std::error::Error| at("", e.to_string());
    let plain = definition.tools.iter().filter(|tool| Delegation::of_tool(tool).is_none());
    let mut tools = registry.resolve(&plain.cloned().collect::<Vec<_>>()).map_err(|unknown| {
        let index = definition.tools.iter().position(|tool| *tool == unknown.0).unwrap_or_default();
        let there = registry.tools().into_iter().map(|tool| tool.info().name.clone());
        at(&format!("tools[{index}]"), missing("tool", &unknown.0, there))
    })?;
    tools.retain(|tool| definition.memory.is_some() || tool.info().name != recall::NAME); // a glob may mean it
    let asks_nobody = definition.governance.network.allow.is_empty();
    let names = |tool: &str| definition.tools.iter().any(|name| name == tool);
    tools.retain(|tool| {
        let name = tool.info().name.as_str();
        let asks = [web_fetch::NAME, browser::NAME].contains(&name);
        !asks || !asks_nobody || names(name) // a glob may mean it
    });
    tools.extend(subagents);
    tools.retain(|tool| tool.info().name != use_skill::NAME);
    if !definition.skills.is_empty() {
        tools.push(Arc::new(UseSkill::new(&definition.skills, lookup(skills))));
    }
    let (mut tools, left_out) = bounded(tools)?;
    if let Some(warning) = &left_out {
        tracing::warn!(agent = definition.name, warning, "the tools of an agent");
    }
    check_tool_settings(registry, definition, &tools)?;
    let gate = Gate::new(&policy(&definition.governance)).map_err(|e| of_policy(definition, &e))?;
    check_credentials(registry, &gate, &definition.governance.network.credentials)?;
    for tool in tools.iter_mut().filter(|tool| tool.info().name == shell::NAME) {
        if let Some(shell) = registry.shell(gate.commands(), gate.has_network()) {
            *tool = Arc::new(shell);
        }
    }
    let interceptors = interceptors(&definition.interceptors)
        .map_err(|e| at(&format!("interceptors.{}", e.key), e.message))?;
    let defaults: BTreeMap<String, Defaults> =
        tools.iter().map(|tool| (tool.info().name.clone(), tool.info().defaults)).collect();
    let options = |tool: &str| {
        let mut defaults = defaults.get(tool).copied().unwrap_or_default();
        if definition.limits.tool_call_timeout_seconds.is_some() {
            defaults.timeout = None;
        }
        call_options(&definition.tool_options, tool, defaults)
    };
    let entry = |tool: &str| {
        let means = |entry: &&String| *entry == tool || glob::means(entry, tool) == Some(true);
        definition.tools.iter().find(means).cloned()
    };
    let executor = Executor::new(tools, gate, options).map_err(|e| error(&e))?;
    let unlisted = registry.unlisted(&definition.tools);
    Ok(executor.listed(entry).intercepted(interceptors).beside(unlisted).without(left_out))
}

type BoundedTools = (Vec<Arc<dyn Tool>>, Option<String>);

/// The tools within the size limit, and a warning about the others. Only tools of MCP servers are left out, because
/// they can change at any time.
fn bounded(tools: Vec<Arc<dyn Tool>>) -> Result<BoundedTools, LoadError> {
    let is_of_server = |tool: &Arc<dyn Tool>| tool.info().name.starts_with(mcp::PREFIX);
    let own = tools.iter().filter(|tool| !is_of_server(tool)).map(|tool| tool.info().bytes());
    let mut bytes = own.sum::<usize>();
    let most = MAX_TOOLS / 1024;
    if bytes > MAX_TOOLS {
        let message = format!("together take {} KiB, more than {most} KiB", bytes / 1024);
        return Err(at("tools", message));
    }
    let (kept, others): (Vec<_>, Vec<_>) = tools.into_iter().partition(|tool| {
        bytes += if is_of_server(tool) { tool.info().bytes() } else { 0 };
        !is_of_server(tool) || bytes <= MAX_TOOLS
    });
    let left_out = others.first().map(|first| {
        let (first, count) = (&first.info().name, others.len());
        format!(
            "The tools of this agent take more than {most} KiB together: {count} tools of MCP servers are left out, from {first} on."
        )
    });
    Ok((kept, left_out))
}

/// Checks that each credential exists, and is for a host that the agent's programs may reach.
fn check_credentials(registry: &Registry, gate: &Gate, names: &[String]) -> Result<(), LoadError> {
    for (i, name) in names.iter().enumerate() {
        let wrong = |why: String| at(&format!("governance.network.credentials[{i}]"), why);
        let credential = registry.credential(name).map_err(wrong)?;
        if let Some(why) = gate.objection_to(&credential.url) {
            return Err(wrong(format!("{name:?} is for {}, but {why}", credential.url)));
        }
    }
    Ok(())
}

/// The error with the position of the wrong flow rule; the other sections are checked before.
fn of_policy(definition: &Definition, error: &PolicyError) -> LoadError {
    let PolicyError { setting, pattern, message } = error;
    let mut rules = definition.governance.flow.iter().flatten();
    match rules.position(|rule| *setting == FLOW && rule.when == *pattern) {
        Some(i) => at(&format!("{FLOW}[{i}].when"), format!("{} {message}", quoted(pattern))),
        None => at("", error.to_string()),
    }
}

fn at(key: &str, message: String) -> LoadError {
    LoadError(DefinitionError::at(key, message))
}

/// How the tool that reads skills finds them.
pub(super) fn lookup(skills: &Arc<Skills>) -> use_skill::Lookup {
    let skills = Arc::clone(skills);
    Arc::new(move |name| {
        let skill = skills.skill(name)?;
        Some((skill.bounds.clone(), skill.instructions.clone()))
    })
}

/// Refuses names and globs that match no tool, and caching for tools that do more than read. Names that may match
/// tools of MCP servers are accepted if the definition lists such tools.
fn check_tool_settings(
    registry: &Registry,
    definition: &Definition,
    tools: &[Arc<dyn Tool>],
) -> Result<(), LoadError> {
    let lists_others = definition.tools.iter().any(|tool| registry.may_have(tool));
    let may_mean = |name: &str| lists_others && registry.may_have(name);
    let delegations = || {
        definition
            .tools
            .iter()
            .filter(|tool| Delegation::of_tool(tool).is_some())
            .map(String::as_str)
    };
    let names = || tools.iter().map(|tool| tool.info().name.as_str()).chain(delegations());
    for (name, options) in definition.tool_options.iter().filter(|(name, _)| !may_mean(name)) {
        let key = format!("tool_options.{name}");
        let glob = Glob::of_names(name).map_err(|e| at(&key, e.to_string()))?;
        let mut meant = tools.iter().filter(|tool| glob.is_match(&tool.info().name));
        let is_idle = !names().any(|tool| glob.is_match(tool));
        if is_idle && !may_be_of_caller(registry, name) {
            let there = names().collect::<Vec<_>>().join(", ");
            return Err(at(
                &key,
                format!("{name:?} means none of this agent's tools, which are: {there}"),
            ));
        }
        let may_only_read = |tool: &Arc<dyn Tool>| match tool.info().name.as_str() {
            shell::NAME => has_reading_commands(&definition.governance.commands),
            _ => tool.info().may_only_read(),
        };
        if options.cache.is_some() && !meant.any(may_only_read) {
            let message = format!("{name:?} has no calls that only read");
            return Err(at(&format!("{key}.cache"), message));
        }
    }
    check_declared_paths(definition, tools, &may_mean)?;
    let Interceptors { before, after, inherited: _ } = &definition.interceptors;
    let before = before.iter().enumerate().map(|(i, rule)| (format!("before[{i}]"), &rule.tool));
    let after = after.iter().enumerate().map(|(i, rule)| (format!("after[{i}]"), &rule.tool));
    let is_glob = |name: &str| name.contains(['*', '?', '[', '{']);
    // They hold for the tools of child runs, too.
    let of_child = |name: &str| {
        delegations().next().is_some()
            && (registry.may_have(name)
                || registry.tools().iter().any(|tool| tool.info().name == name))
    };
    for (key, name) in before.chain(after).filter(|(_, name)| !is_glob(name)) {
        if !names().any(|tool| tool == name) && !may_mean(name) && !of_child(name) {
            let there = names().collect::<Vec<_>>().join(", ");
            return Err(at(
                &format!("interceptors.{key}.tool"),
                format!("{name:?} is not one of this agent's tools: {there}"),
            ));
        }
    }
    Ok(())
}

/// Whether a name that matches none of an agent's tools may be that of a caller's tool: it is not the name of another
/// tool, nor similar to one.
fn may_be_of_caller(registry: &Registry, name: &str) -> bool {
    let known = registry.tools();
    let mut names = known.iter().map(|tool| tool.info().name.as_str());
    ClientTools::is_name(name)
        && Delegation::of_tool(name).is_none()
        && !names.clone().any(|known| known == name)
        && nearest(name, &mut names).is_none()
}

/// Whether there are commands that only read.
fn has_reading_commands(CommandsSection { allow, require_approval, .. }: &CommandsSection) -> bool {
    allow.iter().chain(require_approval).any(|rule| rule.effect == Effect::Read)
}

/// Refuses path rules for arguments that no tool has, because they would have no effect.
fn check_declared_paths(
    definition: &Definition,
    tools: &[Arc<dyn Tool>],
    may_mean: &dyn Fn(&str) -> bool,
) -> Result<(), LoadError> {
    for (name, options) in definition.tool_options.iter().filter(|(name, _)| !may_mean(name)) {
        let is_meant = |tool: &&Arc<dyn Tool>| glob::means(name, &tool.info().name) == Some(true);
        for (i, pointer) in options.paths.iter().enumerate() {
            let argument = unescaped_key(pointer.split('/').nth(1).unwrap_or_default());
            let has = |tool: &Arc<dyn Tool>| {
                let properties =
                    tool.info().input_schema.get("properties").and_then(Value::as_object);
                properties.is_none_or(|properties| properties.contains_key(&argument))
            };
            if !tools.iter().filter(is_meant).any(has) {
                let key = format!("tool_options.{name}.paths[{i}]");
                return Err(at(&key, format!("{name:?} has no argument {argument:?}")));
            }
        }
    }
    Ok(())
}

fn interceptors(section: &Interceptors) -> Result<interceptors::Interceptors, InterceptorError> {
    let Interceptors { before, after, inherited } = section;
    let mut all = interceptors::Interceptors::new(&before_rules(before), &after_rules(after))?;
    for InheritedInterceptors { directory, before, after } in inherited {
        let of_parent =
            interceptors::Interceptors::new(&before_rules(before), &after_rules(after))?;
        all.add_of_parent(of_parent, directory);
    }
    Ok(all)
}

fn before_rules(section: &[BeforeInterceptor]) -> Vec<BeforeRule> {
    let rule = |rule: &BeforeInterceptor| BeforeRule {
        tool: rule.tool.clone(),
        when: rule.when.clone(),
        what: match &rule.block {
            Some(reason) => Interception::Block(reason.clone()),
            None => Interception::Rewrite(rule.rewrite.clone().into_iter().collect()),
        },
    };
    section.iter().map(rule).collect()
}

fn after_rules(section: &[AfterInterceptor]) -> Vec<AfterRule> {
    let rule = |rule: &AfterInterceptor| AfterRule {
        tool: rule.tool.clone(),
        when: rule.when.clone(),
        what: match (&rule.replace, &rule.redact) {
            (Some(template), _) => Revision::Replace(template.clone()),
            (None, pattern) => Revision::Redact {
                pattern: pattern.clone().unwrap_or_default(),
                with: rule.with.clone(),
            },
        },
    };
    section.iter().map(rule).collect()
}

/// The options of a tool. Each option comes from the entry of its name, else from the first matching glob, else from
/// the tool's own declaration.
pub(super) fn call_options(
    sections: &BTreeMap<String, ToolOptions>,
    tool: &str,
    defaults: Defaults,
) -> CallOptions {
    let meant = options_of(sections, tool);
    let declared = meant.iter().find_map(|options| options.yields.as_deref());
    let declared = declared.map(Labels::yielded).or(defaults.yields);
    let retries = meant.iter().find_map(|options| options.retries).unwrap_or(0);
    CallOptions {
        // A repeated call of an agent finds the run that the first one started, as it ended.
        retries: if Delegation::of_tool(tool).is_some() { 0 } else { retries },
        timeout: meant
            .iter()
            .find_map(|options| options.timeout_seconds)
            .map(Duration::from_secs)
            .or(defaults.timeout),
        per_minute: meant.iter().find_map(|options| options.rate_limit_per_minute),
        cache: meant.iter().any(|options| options.cache == Some(Cache::Attempt)),
        on_unknown_outcome: meant
            .iter()
            .find_map(|options| options.on_unknown_outcome)
            .unwrap_or_default(),
        yields: declared.unwrap_or_else(|| usual_yields(tool)),
        declares_yields: declared.is_some(),
        paths: meant.iter().flat_map(|options| options.paths.iter().cloned()).collect(),
        sanitizes: meant
            .iter()
            .fold(defaults.sanitizes, |all, options| all.and(options.sanitizes.clone().into())),
    }
}

/// The default labels of a tool's results: what comes from outside is untrusted.
fn usual_yields(tool: &str) -> Labels {
    let is_outside = matches!(tool, "web_fetch" | "browser")
        || tool.starts_with("mcp:")
        || tool.starts_with("http:");
    if is_outside { Labels::UNTRUSTED } else { Labels::default() }
}

fn commands(section: &CommandsSection) -> governance::Commands {
    let rules = |rules: &[CommandRule]| {
        let rule = |rule: &CommandRule| governance::CommandRule {
            command: rule.command.clone(),
            args: rule.args.clone(),
            effect: rule.effect,
            destructive: rule.destructive,
            observes: rule.mode == GovernanceMode::Observe,
        };
        rules.iter().map(rule).collect()
    };
    governance::Commands {
        allow: rules(&section.allow),
        deny: rules(&section.deny),
        require_approval: rules(&section.require_approval),
    }
}

/// The rules of a definition, for its gate.
pub(super) fn policy(section: &GovernanceSection) -> Policy {
    let setting = |setting: ToolPolicySetting| match setting {
        ToolPolicySetting::Allow => ToolPolicy::Allow,
        ToolPolicySetting::Ask => ToolPolicy::Ask,
        ToolPolicySetting::Deny => ToolPolicy::Deny,
    };
    let elsewhere = |observed: bool| {
        let rules = section.paths.deny_in.iter();
        rules
            .map(|(directory, rules)| (directory.clone(), DenyRule::patterns(rules, observed)))
            .collect()
    };
    Policy {
        tool_policies: section
            .tool_policies
            .iter()
            .map(|(glob, rule)| governance::ToolRule {
                tools: glob.clone(),
                policy: setting(rule.setting()),
                observes: rule.observes(),
            })
            .collect(),
        autonomy: section.autonomy,
        observed_autonomy: section.observed_autonomy,
        observes: section.mode == GovernanceMode::Observe,
        read: section.paths.read.clone(),
        write: section.paths.write.clone(),
        deny: DenyRule::patterns(&section.paths.deny, false),
        deny_observed: DenyRule::patterns(&section.paths.deny, true),
        private: section.paths.private.clone(),
        private_in: section.paths.private_in.clone().into_iter().collect(),
        flow: section.flow_rules(),
        deny_in: elsewhere(false),
        deny_in_observed: elsewhere(true),
        allow_hosts: section.network.allow.clone(),
        deny_hosts: DenyRule::patterns(&section.network.deny, false),
        deny_hosts_observed: DenyRule::patterns(&section.network.deny, true),
        allow_private: section.network.allow_private.clone(),
        credentials: section.network.credentials.clone(),
        commands: commands(&section.commands),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::governance::{Action, Permit};
    use crate::tools::{ToolContext, ToolError, ToolInfo};

    #[test]
    fn calls_of_agents_are_not_retried() {
        let retries = ToolOptions { retries: Some(3), ..ToolOptions::default() };
        let sections = BTreeMap::from([("*".to_owned(), retries)]);
        let of = |tool: &str| call_options(&sections, tool, Defaults::default()).retries;
        assert_eq!(["file_ops", "agent:x", "transfer_to_x"].map(of), [3, 0, 0]);
    }

    struct Large(ToolInfo);

    #[async_trait::async_trait]
    impl Tool for Large {
        fn info(&self) -> &ToolInfo {
            &self.0
        }

        async fn actions(&self, _: &Value, _: &ToolContext) -> Result<Vec<Action>, ToolError> {
            Ok(Vec::new())
        }

        async fn execute(&self, _: Permit, _: Value, _: &ToolContext) -> Result<String, ToolError> {
            Ok(String::new())
        }
    }

    fn large(name: &str, bytes: usize) -> Arc<dyn Tool> {
        Arc::new(Large(ToolInfo {
            name: name.to_owned(),
            description: "d".repeat(bytes - name.len() - 2),
            input_schema: serde_json::json!({}).into(),
            effect: Effect::Read,
            varies: false,
            concurrent: false,
            source: String::new(),
            destructive: false,
            defaults: Defaults::default(),
        }))
    }

    #[test]
    fn tools_that_do_not_fit_are_left_out_or_refused() {
        let half = MAX_TOOLS / 2;
        let tools = |sizes: &[(&str, usize)]| {
            bounded(sizes.iter().map(|(name, bytes)| large(name, *bytes)).collect())
        };
        let names = |tools: &[Arc<dyn Tool>]| -> Vec<String> {
            tools.iter().map(|tool| tool.info().name.clone()).collect()
        };
        let (kept, left_out) = tools(&[("mcp:a/x", half), ("http:b/y", half)]).unwrap();
        assert_eq!((names(&kept).len(), left_out), (2, None));
        let listed = [("mcp:a/x", half), ("mcp:a/y", half), ("mcp:a/z", 100), ("http:b/y", 100)];
        let (kept, left_out) = tools(&listed).unwrap();
        assert_eq!(names(&kept), ["mcp:a/x", "http:b/y"]);
        let said =
            "more than 2048 KiB together: 2 tools of MCP servers are left out, from mcp:a/y on";
        assert!(left_out.unwrap().contains(said));
        let refused = tools(&[("http:a/x", half), ("http:b/y", half + 1024)]).err().unwrap();
        assert_eq!(refused.to_string(), "tools: together take 2049 KiB, more than 2048 KiB");
    }
}
