//! What active skills take away.

use super::*;
use crate::event::SkillActivated;

/// Allowed (none: all), disallowed, autonomy, tools that need approval.
type SkillRule = (
    Option<&'static [&'static str]>,
    &'static [&'static str],
    Option<Autonomy>,
    &'static [&'static str],
);

#[test]
fn active_skills_only_narrow() {
    let every: SkillRule = (None, &[], None, &[]);
    let reads: SkillRule = (Some(&["file_*", "mcp:*"]), &["file_write"], None, &[]);
    let careful: SkillRule = (None, &[], Some(Autonomy::ReadOnly), &[]);
    let asking: SkillRule = (None, &[], None, &["shell"]);
    let rows: Vec<(Vec<SkillRule>, &str, &str, Decision)> = vec![
        (vec![], "shell", "c x", Allowed),
        (vec![every], "shell", "c x", Allowed),
        (vec![reads], "shell", "c x", Blocked),
        (vec![reads], "file_ops", "r x", Allowed),
        (vec![reads], "mcp:time/now", "c x", Allowed),
        (vec![reads], "file_write", "r x", Blocked),
        (vec![reads, every], "shell", "c x", Blocked),
        (vec![careful], "file_ops", "w x", Blocked),
        (vec![careful], "file_ops", "r x", Allowed),
        (vec![asking], "shell", "c x", Escalated),
        (vec![asking], "file_ops", "r x", Allowed),
        (vec![asking, careful], "shell", "c x", Blocked),
        (vec![(Some(&[]), &["*"], Some(Autonomy::ReadOnly), &["*"])], "use_skill", "c x", Allowed),
        (vec![(None, &["["], None, &[])], "shell", "r x", Blocked),
    ];
    let policy = Policy {
        autonomy: Autonomy::Full,
        read: vec!["./**".into()],
        write: vec!["./**".into()],
        ..Policy::default()
    };
    for (rules, tool, does, expected) in rows {
        let names = |globs: &[&str]| globs.iter().map(ToString::to_string).collect::<Vec<_>>();
        let skill = |(allowed, denied, autonomy, asks): &SkillRule| SkillActivated {
            skill: "s".into(),
            allowed_tools: allowed.map(names),
            disallowed_tools: names(denied),
            autonomy: *autonomy,
            approval_required: names(asks),
            inherited: false,
        };
        let skills: Vec<SkillActivated> = rules.iter().map(skill).collect();
        let call = Call { skills: &skills, ..call(tool, Once, vec![action(does)]) };
        let (decision, rule) = match Gate::new(&policy).unwrap().judge(&["admin".to_owned()], call)
        {
            Verdict::Pass { decision, rule, .. }
            | Verdict::Stop(Objection { decision, rule, .. }) => (decision, rule),
        };
        let by = if expected == Allowed { "none" } else { "skill" };
        assert_eq!((decision, rule), (expected, by), "{rules:?} {tool} {does}");
    }
}
