//! Arguments that a definition declares to be paths of the workspace: the path rules judge them, though
//! the tool itself does not say what it does with files.

use serde_json::Value;

use super::file_ops::blocking;
use super::workspace::Workspace;
use super::{Tool, ToolContext, ToolError};
use crate::governance::{Action, ActionKind};
use crate::run::Effect;

/// Paths in the arguments of one call.
const MAX_PATHS: usize = 1000;

/// The actions of a call, and in addition: it reads the files whose paths stand in its arguments at
/// these JSON pointers, and writes them unless it only reads.
///
/// # Errors
/// [`ToolError::ForModel`] where there is something else than paths, or a path that leaves the
/// workspace.
pub(super) async fn actions_of(
    tool: &dyn Tool,
    pointers: &[String],
    arguments: &Value,
    context: &ToolContext,
) -> Result<Vec<Action>, ToolError> {
    let mut actions = tool.actions(arguments, context).await?;
    let paths = paths(pointers, arguments)?;
    if paths.is_empty() {
        return Ok(actions);
    }
    let strongest = actions.iter().map(|action| action.effect).max().unwrap_or(tool.info().effect);
    let workspace = context.workspace.clone();
    let declared = blocking(move |_| resolved(&workspace, &paths, strongest)).await?;
    actions.extend(declared);
    Ok(actions)
}

fn paths(pointers: &[String], arguments: &Value) -> Result<Vec<String>, ToolError> {
    let wrong = |pointer: &str| {
        ToolError::ForModel(format!("{pointer} must be a path of the workspace, or a list of them"))
    };
    let mut paths = Vec::new();
    for pointer in pointers {
        match arguments.pointer(pointer) {
            None | Some(Value::Null) => {}
            Some(Value::String(path)) => paths.push(path.clone()),
            Some(Value::Array(list)) => {
                for path in list {
                    paths.push(path.as_str().ok_or_else(|| wrong(pointer))?.to_owned());
                }
            }
            Some(_) => return Err(wrong(pointer)),
        }
    }
    if paths.len() > MAX_PATHS {
        let message = format!("a call can name {MAX_PATHS} paths, not {}", paths.len());
        return Err(ToolError::ForModel(message));
    }
    Ok(paths)
}

fn resolved(
    workspace: &Workspace,
    paths: &[String],
    effect: Effect,
) -> Result<Vec<Action>, ToolError> {
    let mut actions = Vec::new();
    for path in paths {
        let path = workspace.resolve(path)?.path;
        actions.push(Action::new(ActionKind::Read { path: path.clone() }, Effect::Read));
        if effect != Effect::Read {
            actions.push(Action::new(ActionKind::Write { path }, effect));
        }
    }
    Ok(actions)
}
