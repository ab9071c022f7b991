use std::fs;

use super::*;

const STYLE: &str = "---\nname: house-style\ndescription: How we\n  write.\nallowed_tools: [file_ops, 'mcp:*']\n\
                     disallowed_tools: [shell]\nautonomy: read-only\napproval_required: [file_ops]\n---\n\n# Style\n\n---\nBe brief.\n";

fn error(text: &str) -> String {
    Skill::from_markdown("house-style", text).unwrap_err().to_string()
}

#[test]
fn a_skill_is_its_front_matter_and_its_body() {
    for text in [STYLE.to_owned(), STYLE.replace('\n', "\r\n"), format!("\u{feff}{STYLE}")] {
        let skill = Skill::from_markdown("house-style", &text).unwrap();
        assert_eq!(
            (skill.description.as_str(), skill.instructions.as_str()),
            ("How we write.", "# Style\n\n---\nBe brief.")
        );
        let expected = SkillActivated {
            skill: "house-style".into(),
            allowed_tools: Some(vec!["file_ops".into(), "mcp:*".into()]),
            disallowed_tools: vec!["shell".into()],
            autonomy: Some(Autonomy::ReadOnly),
            approval_required: vec!["file_ops".into()],
            inherited: false,
        };
        assert_eq!(skill.bounds, expected);
    }
    let small = Skill::from_markdown(
        "ab",
        "---\nname: ab\ndescription: d\napproval_required: true\n---\nx",
    )
    .unwrap();
    assert_eq!(
        (small.bounds.allowed_tools, small.bounds.approval_required),
        (None, vec!["*".to_owned()])
    );
}

#[test]
fn what_is_wrong_is_found_at_its_place() {
    for (text, expected) in [
        ("# Style\n", "line 1, column 1: must begin with front matter"),
        ("---\nname: house-style\n", "line 1, column 1: the front matter has no end"),
        ("---\nname: house-style\n---\nx", "missing field `description`"),
        ("---\nname: house-style\ndescription: d\nallowed-tools: []\n---\nx", "line 4, column "),
        (
            "---\nname: other\ndescription: d\n---\nx",
            "line 2, column 1: name: \"other\" does not equal",
        ),
        (
            "---\nname: house-style\ndescription: ''\n---\nx",
            "line 3, column 1: description: must have 1 to 1024",
        ),
        ("---\nname: house-style\ndescription: d\nautonomy: total\n---\nx", "line 4, column "),
        (
            "---\nname: house-style\ndescription: d\ndisallowed_tools: ['[']\n---\nx",
            "line 4, column 20: disallowed_tools[0]: ",
        ),
        ("---\nname: house-style\ndescription: d\n---\n \n", "has no instructions"),
    ] {
        let error = error(text);
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn skills_are_read_again_and_broken_ones_keep_their_last_good_version() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        fs::create_dir_all(dir.path().join(name)).unwrap();
        fs::write(dir.path().join(name).join(FILE), text).unwrap();
    };
    write("house-style", STYLE);
    write("Bad Name", STYLE);
    fs::create_dir(dir.path().join("empty")).unwrap();
    let skills = Skills::load(dir.path());
    assert_eq!(skills.skill("house-style").unwrap().instructions, "# Style\n\n---\nBe brief.");
    assert_eq!(
        skills.problems().iter().map(|p| p.file.as_str()).collect::<Vec<_>>(),
        ["skills/Bad Name/SKILL.md"]
    );
    assert!(skills.refresh().is_empty());

    write("house-style", &STYLE.replace("brief", "long"));
    assert!(
        matches!(&skills.refresh()[..], [Change::SkillLoaded(skill, Some(_))] if skill.bounds.skill == "house-style")
    );
    write("house-style", "nothing");
    assert!(matches!(&skills.refresh()[..], [Change::Broken(_)]));
    assert!(skills.skill("house-style").unwrap().instructions.ends_with("Be long."));
    assert_eq!(skills.problems().len(), 2);
    fs::remove_dir_all(dir.path().join("house-style")).unwrap();
    assert!(matches!(&skills.refresh()[..], [Change::SkillRemoved(_)]));
    assert!(skills.skill("house-style").is_none());
    assert!(Skills::load(Path::new("/nonexistent")).problems().is_empty());
}
