//! `use_skill`: lets a model read a skill's instructions. From then on the skill's restrictions hold.
//!
//! The source of skills is passed in. The engine records that a skill is active, and the gate enforces
//! its restrictions, which never apply to this tool.

use crate::message::tool_schema::ToolSchema;
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Value, json};

use super::{Defaults, Tool, ToolContext, ToolError, ToolInfo};
use crate::event::SkillActivated;
use crate::governance::{self, Action, ActionKind, Permit};
use crate::run::Effect;

/// The tool's name.
pub const NAME: &str = "use_skill";

/// Bounds and instructions of a skill, by its name.
pub type Lookup = Arc<dyn Fn(&str) -> Option<(SkillActivated, String)> + Send + Sync>;

/// The tool, for the skills of one agent.
pub struct UseSkill {
    info: ToolInfo,
    lookup: Lookup,
}

impl UseSkill {
    /// The tool for these skills; for any where there are none.
    pub fn new(names: &[String], lookup: Lookup) -> Self {
        let mut name = json!({"type": "string", "description": "The skill."});
        if !names.is_empty() {
            name["enum"] = names.into();
        }
        let input_schema = json!({"type": "object", "properties": {"name": name}, "required": ["name"],
            "additionalProperties": false});
        let info = ToolInfo {
            name: NAME.into(),
            description:
                "Activates a skill and gives you its instructions. From then on its rules hold."
                    .into(),
            input_schema: ToolSchema::from(input_schema),
            effect: Effect::Read,
            varies: false,
            concurrent: true,
            source: "builtin".into(),
            destructive: false,
            defaults: Defaults::default(),
        };
        Self { info, lookup }
    }

    fn find(&self, arguments: &Value) -> Option<(SkillActivated, String)> {
        (self.lookup)(arguments.get("name")?.as_str()?)
    }
}

#[async_trait]
impl Tool for UseSkill {
    fn info(&self) -> &ToolInfo {
        &self.info
    }

    fn activates(&self, arguments: &Value) -> Option<SkillActivated> {
        self.find(arguments).map(|(bounds, _)| bounds)
    }

    async fn actions(&self, _: &Value, _: &ToolContext) -> Result<Vec<Action>, ToolError> {
        let what = ActionKind::Call { tool: NAME.to_owned() };
        Ok(vec![Action::new(what, Effect::Read)])
    }

    async fn execute(
        &self,
        _: Permit,
        arguments: Value,
        _: &ToolContext,
    ) -> Result<String, ToolError> {
        match self.find(&arguments) {
            Some((_, instructions)) => Ok(instructions),
            None => {
                Err(ToolError::ForModel("This skill no longer exists; continue without it.".into()))
            }
        }
    }
}

/// Whether active skills still allow a tool.
pub fn leaves(skills: &[SkillActivated], tool: &str) -> bool {
    tool == NAME || skills.iter().all(|skill| governance::skill_allows(skill, tool))
}
