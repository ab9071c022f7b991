//! The tools of a run: those of its agent that the request does not remove, and those of its caller.

use super::{PlanError, refused};
use crate::agents::Definition;
use crate::bounds::name::{self, means};
use crate::bounds::text::quoted;
use crate::engine::client_tools::{self, ClientTools};
use crate::event::SkillActivated;
use crate::providers::ToolOffer;
use crate::run::{Delegation, Overrides, RunKind};
use crate::tools::executor::Executor;
use crate::tools::mcp::Unlisted;
use crate::tools::use_skill;

const DEGRADED: &str =
    "No tools are available to this agent: the loop was reduced to a single model call.";

/// Refuses names in a request that cannot be names of tools.
pub(super) fn check_tool_names(overrides: &Overrides) -> Result<(), PlanError> {
    let tools = overrides.tools.as_deref().unwrap_or_default();
    if tools.len() > name::MAX_TOOLS {
        return Err(refused("/tools", format!("must have at most {} entries", name::MAX_TOOLS)));
    }
    if let Some(index) = tools.iter().position(|tool| !name::is_tool(tool)) {
        let message = format!(
            "{} is not the name of a tool: 1 to {} bytes of letters, digits and -_.:/, and * for any of them",
            quoted(&tools[index]),
            name::MAX_NAME
        );
        return Err(refused(&format!("/tools/{index}"), message));
    }
    Ok(())
}

/// The run's tools, before its skills take some away: the agent's, then the caller's.
pub(super) fn tools_of_run(
    executor: &Executor,
    overrides: &Overrides,
    definition: &Definition,
    kind: RunKind,
    bounds: &[SkillActivated],
) -> Vec<ToolOffer> {
    if kind == RunKind::Single {
        return Vec::new();
    }
    let own = bounds.iter().filter(|skill| !skill.inherited).count();
    let has_more_skills = definition.skills.len() > own;
    let mut tools = agent_tools(executor, overrides.tools.as_deref(), has_more_skills);
    tools.extend(overrides.client_tools.iter().flatten().map(client_tools::offer));
    tools
}

/// The agent's tools that the request does not remove.
fn agent_tools(
    executor: &Executor,
    wanted: Option<&[String]>,
    has_more_skills: bool,
) -> Vec<ToolOffer> {
    let is_offered = |tool: &str| match tool {
        use_skill::NAME => has_more_skills && wanted.is_none_or(|wanted| !wanted.is_empty()),
        _ => wanted.is_none_or(|wanted| wanted.iter().any(|name| means(name, tool))),
    };
    let offered = executor.infos().filter(|tool| is_offered(&tool.name)).map(|tool| ToolOffer {
        name: tool.name.clone(),
        description: tool.description.clone(),
        input_schema: tool.input_schema.clone(),
    });
    offered.collect()
}

/// Warnings about tools: that some are left out, and each name or glob of a request that matches none of
/// the agent's. If the agent can delegate to other agents, it may match one of theirs.
pub(super) fn about_tools(wanted: &[String], executor: &Executor) -> Vec<String> {
    let left_out = executor.left_out().map(str::to_owned);
    let has_agents = executor.infos().any(|tool| Delegation::of_tool(&tool.name).is_some());
    let is_unknown =
        |name: &&String| !has_agents && !executor.infos().any(|tool| means(name, &tool.name));
    let warning = |name: &String| {
        format!("The request names the tool {name:?}, which this agent does not have.")
    };
    left_out.into_iter().chain(wanted.iter().filter(is_unknown).map(warning)).collect()
}

/// The caller's tools, whose names must not be those of other tools.
pub(super) fn client_tools(
    overrides: &Overrides,
    executor: &Executor,
    definition: &Definition,
) -> Result<ClientTools, PlanError> {
    let wanted = overrides.client_tools.as_deref().unwrap_or_default();
    let output = definition.output.as_ref();
    let is_taken = |name: &str| {
        executor.infos().any(|tool| tool.name == name)
            || output.is_some_and(|output| output.tool.name == name)
            || output
                .and_then(|output| output.reflection.as_ref())
                .is_some_and(|it| it.submit.name == name)
    };
    ClientTools::new(wanted, is_taken).map_err(PlanError)
}

/// The warning about a loop without tools, with the servers that might have some.
pub(super) fn degraded(executor: &Executor) -> String {
    let down = executor.unlisted().iter().map(Unlisted::why);
    std::iter::once(DEGRADED.to_owned()).chain(down).collect::<Vec<_>>().join(" ")
}
