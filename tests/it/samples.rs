//! The shipped agents and scenarios: each loads, and each finds what it names.

use std::path::Path;

use toolloop::agents::Definition;

#[test]
fn every_shipped_agent_is_well_formed() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut names = Vec::new();
    for entry in std::fs::read_dir(root.join("agents")).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let options = serde_saphyr::options! { strict_booleans: true };
        let agent: Definition = serde_saphyr::from_str_with_options(&text, options)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert_eq!(path.file_stem().and_then(|stem| stem.to_str()), Some(agent.name.as_str()));
        if let Some(scenario) = agent.model.strip_prefix("scripted/") {
            assert!(
                root.join(format!("scenarios/{scenario}.yaml")).is_file(),
                "{} has no scenario",
                agent.name
            );
        }
        names.push(agent.name);
    }
    names.sort();
    assert_eq!(names, ["assistant", "repo-guide"]);
}
