//! Which command lines the rules let pass.

use super::*;
use crate::governance::{Commands, gate::PolicyError};

fn rule(written: &str) -> CommandRule {
    let (command, args) = match written.split_once(' ') {
        Some((command, args)) => (command, Some(args.to_owned())),
        None => (written, None),
    };
    CommandRule {
        command: command.into(),
        args,
        effect: Effect::Once,
        destructive: false,
        observes: false,
    }
}

fn rules(allow: &[&str], deny: &[&str], ask: &[&str]) -> CommandRules {
    let list = |rules: &[&str]| rules.iter().map(|written| rule(written)).collect();
    let commands = Commands { allow: list(allow), deny: list(deny), require_approval: list(ask) };
    CommandRules::new(&Policy { commands, ..Policy::default() }).unwrap()
}

fn argv(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// `allowed`, `asked`, or the reason.
fn judged(rules: &CommandRules, words: &[&str]) -> String {
    match rules.judge(&argv(words), false) {
        Ruling::NoObjection => "allowed".into(),
        Ruling::Objection(Decision::Escalated, _) | Ruling::Matched(Decision::Escalated, ..) => {
            "asked".into()
        }
        Ruling::Objection(_, reason)
        | Ruling::Matched(_, reason, _)
        | Ruling::Observed(_, reason, _)
        | Ruling::Undecided(reason, _) => reason,
    }
}

#[test]
fn deny_beats_asking_and_asking_beats_allowing() {
    type Row<'a> = (&'a [&'a str], &'a [&'a str], &'a [&'a str], &'a [&'a str], &'a str);
    #[rustfmt::skip]
    let table: &[Row<'_>] = &[
        // allow                  deny                ask              argv                                     expected
        (&[],                     &[],                &[],             &["/usr/bin/ls"],                        "no command may"),
        (&["ls"],                 &[],                &[],             &["/usr/bin/ls", "-la"],                 "allowed"),
        (&["ls"],                 &[],                &[],             &["/usr/bin/lsof"],                      "what may run is ls"),
        (&["ls"],                 &[],                &[],             &["/usr/bin/LS"],                        "what may run is ls"),
        (&["/usr/bin/ls"],        &[],                &[],             &["/usr/bin/ls"],                        "allowed"),
        (&["/usr/bin/ls"],        &[],                &[],             &["/usr/local/bin/ls"],                  "may not run"),
        (&["git ^log\\b"],        &[],                &[],             &["/usr/bin/git", "log", "-3"],          "allowed"),
        (&["git ^log\\b"],        &[],                &[],             &["/usr/bin/git", "push"],               "what may run is git ^log"),
        (&["git ^log\\b"],        &[],                &[],             &["/usr/bin/git", "log -3"],             "may not run"),
        (&["git ^log\\b"],        &[],                &[],             &["/usr/bin/git", "-c", "a=b", "log"],   "may not run"),
        (&["git"],                &["git --force"],   &[],             &["/usr/bin/git", "push", "--force"],    "denied by git --force"),
        (&["git"],                &[],                &["git ^push"],  &["/usr/bin/git", "push"],               "asked"),
        (&[],                     &[],                &["git ^push"],  &["/usr/bin/git", "push"],               "asked"),
        (&[],                     &[],                &["git ^push"],  &["/usr/bin/git", "log"],                "may not run"),
        (&["git"],                &["git"],           &["git ^push"],  &["/usr/bin/git", "push"],               "denied by git"),
        // programs that run others
        (&["bash"],               &[],                &[],             &["/usr/bin/bash", "-c", "id"],          "runs other programs"),
        (&["python3"],            &[],                &[],             &["/usr/bin/python3", "x.py"],           "runs other programs"),
        (&["python3 ^x\\.py$"],   &[],                &[],             &["/usr/bin/python3", "x.py"],           "allowed"),
        (&["python3.11"],         &[],                &[],             &["/usr/bin/python3.11", "x.py"],        "runs other programs"),
        (&[],                     &[],                &["env"],        &["/usr/bin/env", "id"],                 "runs other programs"),
        // options that write or run
        (&["sort"],               &[],                &[],             &["/usr/bin/sort", "-o", "x"],           "makes sort write"),
        (&["sort ."],             &[],                &[],             &["/usr/bin/sort", "-o", "x"],           "makes sort write"),
        (&["sort -o"],            &[],                &[],             &["/usr/bin/sort", "-o", "x"],           "allowed"),
        (&["git ^log"],           &[],                &[],             &["/usr/bin/git", "log", "--output=x"],  "--output makes git write"),
        (&["find"],               &[],                &[],             &["/usr/bin/find", ".", "-name", "a"],   "find runs other programs"),
        (&["tar"],                &[],                &[],             &["/usr/bin/tar", "tf", "a.tar"],        "tar runs other programs"),
        (&["tar t"],              &[],                &[],             &["/usr/bin/tar", "tf", "a.tar"],        "allowed"),
        (&["find ^"],             &[],                &[],             &["/usr/bin/find", ".", "-exec", "id"],  "-exec makes find write"),
        (&["find ^"],             &[],                &[],             &["/usr/bin/find", ".", "-name", "a"],   "allowed"),
    ];
    for (allow, deny, ask, argv, expected) in table {
        let said = judged(&rules(allow, deny, ask), argv);
        assert!(said.contains(expected), "{allow:?} {deny:?} {ask:?} {argv:?}: {said}");
        assert!(said.len() < 500, "{said}");
    }
}

#[test]
fn rules_hold_for_what_a_program_is_told_to_run() {
    let any = ["env .*", "sh .*", "xargs .*", "find -exec", "git", "grep", "sudo .*"];
    let rules = rules(&any, &["touch", "/usr/bin/rm -rf?\\b", "curl"], &["mkdir"]);
    #[rustfmt::skip]
    let table: &[(&[&str], &str)] = &[
        (&["/usr/bin/env", "touch", "x"],                            "it names touch, which is denied by touch"),
        (&["/usr/bin/env", "A=b", "/bin/touch", "x"],                "it names touch"),
        (&["/bin/sh", "-c", "echo a;touch x"],                       "it names touch"),
        (&["/bin/sh", "-c", "echo $(curl -s x)|cat"],                "it names curl"),
        (&["/usr/bin/env", "rm", "-r", "x"],                         "it names /usr/bin/rm"),
        (&["/usr/bin/env", "rm", "x"],                               "allowed"),
        (&["/usr/bin/xargs", "-n1", "mkdir"],                        "asked"),
        (&["/usr/bin/sudo", "env", "mkdir", "x", "touch"],           "it names touch"),
        (&["/usr/bin/find", ".", "-exec", "touch", "x", ";"],        "it names touch"),
        (&["/usr/bin/find", ".", "-execdir", "busybox", "touch", ";"], "it names touch"),
        (&["/bin/busybox", "sh", "-c", "touch x"],                   "it names touch"),
        (&["/usr/bin/parallel", "-j1", "touch", ":::", "x"],         "it names touch"),
        (&["/usr/bin/rsync", "-e", "sh -c 'touch x'", "h:", "."],    "it names touch"),
        (&["/usr/bin/git", "-c", "alias.x=!touch y", "x"],           "it names touch"),
        (&["/usr/bin/git", "-ccore.pager=touch y", "log"],           "it names touch"),
        (&["/usr/bin/git", "-c", "protocol.ext.allow=always", "clone", "ext::touch% y"], "it names touch"),
        (&["/usr/bin/make", "--eval=x: ; @touch y", "x"],            "it names touch"),
        (&["/usr/bin/tar", "xf", "t", "--to-command=touch x"],       "it names touch"),
        (&["/usr/bin/tar", "cf", "t", "x", "--checkpoint-action=exec=touch y"], "it names touch"),
        (&["/usr/bin/awk", "BEGIN{system(\"touch x\")}"],            "it names touch"),
        (&["/usr/bin/vim", "-c", ":!touch x", "y"],                  "it names touch"),
        (&["/usr/bin/ssh", "-o", "ProxyCommand=touch x", "h"],       "it names touch"),
        (&["/usr/bin/man", "-P", "touch x", "ls"],                   "it names touch"),
        (&["/usr/bin/less", "+!touch x", "y"],                       "it names touch"),
        (&["/usr/bin/script", "-qc", "touch x"],                     "it names touch"),
        (&["/usr/bin/nsenter", "-t", "1", "-a", "touch", "x"],       "it names touch"),
        (&["/usr/bin/unshare", "-r", "touch", "x"],                  "it names touch"),
        (&["/usr/bin/setpriv", "--no-new-privs", "touch", "x"],      "it names touch"),
        (&["/usr/bin/systemd-run", "--user", "touch", "x"],          "it names touch"),
        (&["/usr/bin/python3.12", "-c", "os.system('touch x')"],     "it names touch"),
        (&["/usr/bin/env", "echo", "touching", "touch.txt"],         "allowed"),
        (&["/usr/bin/grep", "touch", "a"],                           "allowed"),
        (&["/usr/bin/git", "log", "--grep", "touch"],                "allowed"),
    ];
    for (words, expected) in table {
        let told = judged(&rules, words);
        assert!(told.contains(expected), "{words:?}: {told}");
    }
    let many = "mkdir ".repeat(MAX_CANDIDATES + 1);
    let asks = super::CommandRules { require_approval: Vec::new(), ..rules.clone() };
    assert_eq!(judged(&asks, &["/bin/sh", "-c", &many]), "allowed");
    assert_eq!(judged(&rules, &["/bin/sh", "-c", &many]), "asked");
}

#[test]
fn a_command_does_what_the_strictest_of_its_rules_says() {
    let mut policy = Policy::default();
    policy.commands.allow = vec![
        CommandRule { effect: Effect::Read, ..rule("git ^log") },
        CommandRule { destructive: true, ..rule("rm") },
        rule("git"),
        CommandRule { effect: Effect::Read, ..rule("cat") },
    ];
    let rules = CommandRules::new(&policy).unwrap();
    let does = |words: &[&str]| {
        let CommandEffect { effect, destructive, runs_others } = rules.effect_of(&argv(words));
        (effect, destructive, runs_others)
    };
    assert_eq!(does(&["/bin/cat", "a"]), (Effect::Read, false, false));
    assert_eq!(does(&["/usr/bin/git", "log"]), (Effect::Once, false, false), "two rules match");
    assert_eq!(does(&["/bin/rm", "a"]), (Effect::Once, true, false));
    assert_eq!(does(&["/bin/sh"]), (Effect::Once, true, true), "no rule is about it");
}

#[test]
fn a_broken_pattern_is_told() {
    let mut policy = Policy::default();
    policy.commands.deny = vec![rule("git (")];
    let PolicyError { setting, pattern, .. } = CommandRules::new(&policy).unwrap_err();
    assert_eq!((setting, pattern.as_str()), ("commands.deny", "("));
}
