//! Which paths a call may read and write.

use super::*;

/// Read, write and deny globs, an action, the decision.
type PathRow = (
    &'static [&'static str],
    &'static [&'static str],
    &'static [&'static str],
    &'static str,
    Decision,
);

#[test]
fn paths_need_a_glob_and_deny_beats_all() {
    #[rustfmt::skip]
    let table: [PathRow; 53] = [
        // everything
        (&["./**"],        &[],            &[],              "r a.txt",           Allowed),
        (&["./**"],        &[],            &[],              "r a/b/c.txt",       Allowed),
        (&["./**"],        &[],            &[],              "r .hidden/x",       Allowed),
        (&["./**"],        &[],            &[],              "r .",               Allowed),
        (&["**"],          &[],            &[],              "r a/b",             Allowed),
        // nothing is the default
        (&[],              &[],            &[],              "r a.txt",           Blocked),
        (&["./**"],        &[],            &[],              "w a.txt",           Blocked),
        (&["./**"],        &[],            &[],              "x a.txt",           Blocked),
        (&[],              &["./**"],      &[],              "r a.txt",           Blocked),
        (&[],              &["./**"],      &[],              "w a.txt",           Allowed),
        // one directory
        (&["./**"],        &["./out/**"],  &[],              "w out/a.txt",       Allowed),
        (&["./**"],        &["./out/**"],  &[],              "w out/a/b.txt",     Allowed),
        (&["./**"],        &["./out/**"],  &[],              "w out",             Allowed),
        (&["./**"],        &["./out/**"],  &[],              "w outer/a.txt",     Blocked),
        (&["./**"],        &["./out/**"],  &[],              "w out.txt",         Blocked),
        (&["./**"],        &["./out/**"],  &[],              "w a/out/b.txt",     Blocked),
        (&["./**"],        &["./out/**"],  &[],              "w .",               Blocked),
        (&["./**"],        &["out/"],      &[],              "w out/a.txt",       Allowed),
        (&["./**"],        &["out/"],      &[],              "w out",             Allowed),
        (&["./**"],        &["././out/**"], &[],             "w out/a",           Allowed),
        // one level, one name, one kind
        (&["docs/*"],      &[],            &[],              "r docs/a.md",       Allowed),
        (&["docs/*"],      &[],            &[],              "r docs/a/b.md",     Blocked),
        (&["docs/*"],      &[],            &[],              "r docs",            Blocked),
        (&["./docs"],      &[],            &[],              "r docs",            Allowed),
        (&["./docs"],      &[],            &[],              "r docs/a.md",       Blocked),
        (&["."],           &[],            &[],              "r .",               Allowed),
        (&["."],           &[],            &[],              "r a",               Blocked),
        (&["**/*.md"],     &[],            &[],              "r a.md",            Allowed),
        (&["**/*.md"],     &[],            &[],              "r a/b/c.md",        Allowed),
        (&["**/*.md"],     &[],            &[],              "r a.txt",           Blocked),
        (&["*.md"],        &[],            &[],              "r a/b.md",          Blocked),
        (&["a?.txt"],      &[],            &[],              "r ab.txt",          Allowed),
        (&["{a,b}/**"],    &[],            &[],              "r b/c",             Allowed),
        (&["A/**"],        &[],            &[],              "r a/b",             Blocked),
        (&["a/**", "b"],   &[],            &[],              "r b",               Allowed),
        // deny
        (&["./**"],        &["./**"],      &["**/.env"],     "r .env",            Blocked),
        (&["./**"],        &["./**"],      &["**/.env"],     "r a/b/.env",        Blocked),
        (&["./**"],        &["./**"],      &["**/.env"],     "w .env",            Blocked),
        (&["./**"],        &["./**"],      &["**/.env"],     "r .env.example",    Allowed),
        (&["./**"],        &["./**"],      &["**/.env"],     "r my.env",          Allowed),
        (&["./**"],        &["./**"],      &["**/.env"],     "r .env/nested",     Blocked),
        (&["./**"],        &["./**"],      &["**/.git/**"],  "r .git/config",     Blocked),
        (&["./**"],        &["./**"],      &["**/.git/**"],  "r .git",            Blocked),
        (&["./**"],        &["./**"],      &["**/.git/**"],  "r sub/.git/HEAD",   Blocked),
        (&["./**"],        &["./**"],      &["**/.git/**"],  "r sub/.git",        Blocked),
        (&["./**"],        &["./**"],      &["**/.git/**"],  "r .gitignore",      Allowed),
        (&["./**"],        &["./**"],      &["secrets"],     "r secrets/deep/a",  Blocked),
        (&["./**"],        &["./**"],      &["secrets"],     "r a/secrets",       Allowed),
        (&["a/.env"],      &["./**"],      &["./**/.env"],   "r a/.env",          Blocked),
        (&["./**"],        &["./**"],      &["./**"],        "r a",               Blocked),
        // a path that is not normalised is denied, whatever the globs say
        (&["./**"],        &["./**"],      &[],              "r ../a",            Blocked),
        (&["./**"],        &["./**"],      &[],              "r /etc/passwd",     Blocked),
        (&["./**"],        &["./**"],      &[],              "w a//b",            Blocked),
    ];
    let owned = |globs: &[&str]| globs.iter().map(ToString::to_string).collect::<Vec<_>>();
    for (read, write, deny, action, expected) in table {
        let policy =
            Policy { read: owned(read), write: owned(write), deny: owned(deny), ..permissive() };
        let (decision, rule, reason) = judged(&policy, &["admin"], "file_ops", &[action]);
        assert_eq!(
            decision, expected,
            "read {read:?} write {write:?} deny {deny:?}: {action}: {reason}"
        );
        assert_eq!(rule == "path", expected != Allowed, "{action}");
    }
}

#[test]
fn globs_of_another_directory_deny_the_same_files_in_every_workspace() {
    #[rustfmt::skip]
    let table: &[(&str, &[&str], &str, &str, Decision)] = &[
        // directory    globs                workspace      action               decision
        ("rules",       &["secret/**"],      ".",           "r rules/secret/x",  Blocked),
        ("rules",       &["secret/**"],      ".",           "w rules/secret",    Blocked),
        ("rules",       &["secret/**"],      ".",           "w rules/other",     Allowed),
        ("rules",       &["secret/**"],      ".",           "w secret/x",        Allowed),
        ("rules",       &["secret/**"],      ".",           "w rulesets/secret", Allowed),
        ("rules",       &["secret/**"],      "rules",       "r secret/x",        Blocked),
        ("rules",       &["secret/**"],      "rules/secret","r x",               Blocked),
        ("rules",       &["secret/**"],      "rules/secret","r .",               Blocked),
        ("rules",       &["secret/**"],      "rules/a",     "r secret/x",        Allowed),
        ("rules",       &["secret"],         ".",           "r rules/secret/a/b",Blocked),
        ("rules",       &["*.key"],          ".",           "w a.key",           Allowed),
        ("rules",       &["*.key"],          "rules",       "w a.key",           Blocked),
        ("rules",       &["./**"],           "rules",       "r .",               Blocked),
        ("rules",       &["./**"],           ".",           "r .",               Allowed),
        (".",           &["rules/secret/**"],"rules",       "r secret/x",        Blocked),
        (".",           &["**/.env"],        "deep/er",     "r a/.env",          Blocked),
        (".",           &["**/.env"],        ".",           "w .env",            Blocked),
        ("a/b",         &["c"],              "a",           "w b/c",             Blocked),
        ("a/b",         &["c"],              "a/b/c",       "w d",               Blocked),
        ("a/b",         &["c"],              "a/bc",        "w c",               Allowed),
    ];
    for (directory, globs, workspace, does, expected) in table {
        let globs = globs.iter().map(ToString::to_string).collect();
        let policy = Policy { deny_in: vec![((*directory).to_owned(), globs)], ..permissive() };
        let call =
            Call { directory: (*workspace).into(), ..call("file_ops", Once, vec![action(does)]) };
        let verdict = Gate::new(&policy).unwrap().judge(&["admin".to_owned()], call);
        let decision = match &verdict {
            Verdict::Pass { decision, .. } | Verdict::Stop(Objection { decision, .. }) => *decision,
        };
        assert_eq!(decision, *expected, "{directory} {workspace} {does}: {verdict:?}");
    }
}

/// What is told to the kernel means what the globs mean.
#[test]
fn only_a_directory_with_all_that_is_in_it_is_denied_as_a_whole() {
    for (glob, trees, by_glob) in [
        ("./**", &["."][..], false),
        ("**", &["."], false),
        ("a/b/**", &["a/b"], false),
        ("./a/", &["a"], false),
        ("secret**", &[], true),
        ("a/secret**", &[], true),
        ("a/**b", &[], true),
        ("a//**", &[], true),
        ("**/a", &[], true),
        ("a", &[], true),
        (".", &[], true),
    ] {
        let policy = Policy { deny: vec![glob.to_owned()], ..permissive() };
        let call = call("file_ops", Read, Vec::new());
        let verdict = Gate::new(&policy).unwrap().judge(&["admin".to_owned()], call);
        let Verdict::Pass { permit, .. } = verdict else { panic!("{verdict:?}") };
        let denied = permit.denied();
        assert_eq!((denied.trees.as_slice(), denied.by_glob), (&*owned(trees), by_glob), "{glob}");
    }
}

fn owned(globs: &[&str]) -> Vec<String> {
    globs.iter().map(ToString::to_string).collect()
}
