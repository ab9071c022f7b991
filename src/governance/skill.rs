//! The skill rule: the tools and the autonomy that active skills allow.
//!
//! Skills only narrow: a tool must be allowed by all of them and disallowed by none, and the
//! strictest autonomy applies. `use_skill` itself is always allowed.

use super::Decision;
use super::autonomy::objection;
use super::gate::{Question, Ruling};
use crate::bounds::glob::means;
use crate::event::SkillActivated;

/// The tool that activates skills, which no skill may forbid.
const USE_SKILL: &str = "use_skill";

pub(super) fn judge(question: &Question<'_>) -> Ruling {
    let call = question.call;
    let mut strictest: Option<(Decision, String)> = None;
    for skill in call.skills.iter().filter(|_| call.tool != USE_SKILL) {
        let name = &skill.skill;
        let found = if !allows(skill, call.tool) {
            Some((
                Decision::Blocked,
                format!("the skill {name} does not allow {}; continue without it", call.tool),
            ))
        } else if let Some((decision, reason)) =
            skill.autonomy.and_then(|autonomy| objection(autonomy, call))
        {
            Some((decision, format!("while the skill {name} is active, {reason}")))
        } else {
            let asks = any(&skill.approval_required, call.tool);
            asks.then(|| {
                (
                    Decision::Escalated,
                    format!("the skill {name} asks before every call of {}", call.tool),
                )
            })
        };
        strictest = match (strictest, found) {
            (Some(so_far), Some(found)) if found.0 <= so_far.0 => Some(so_far),
            (so_far, found) => found.or(so_far),
        };
    }
    strictest.map_or(Ruling::NoObjection, |(decision, reason)| Ruling::Objection(decision, reason))
}

/// Whether a skill allows a tool.
pub(super) fn allows(skill: &SkillActivated, tool: &str) -> bool {
    skill.allowed_tools.as_ref().is_none_or(|allowed| any(allowed, tool))
        && !denies(&skill.disallowed_tools, tool)
}

fn any(globs: &[String], tool: &str) -> bool {
    globs.iter().any(|glob| means(glob, tool) == Some(true))
}

/// Whether a list denies a tool; an invalid glob denies.
fn denies(globs: &[String], tool: &str) -> bool {
    globs.iter().any(|glob| means(glob, tool).unwrap_or(true))
}
