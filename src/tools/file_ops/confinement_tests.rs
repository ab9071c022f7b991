//! Nothing outside the workspace is read or written, whatever the path and whatever happens
//! in the meantime.
//!
//! Known ways out as a table, made-up paths as a property, and links that are swapped in while
//! calls run, both towards the outside and towards what a rule denies within.

use std::fs;
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use proptest::prelude::*;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde_json::{Value, json};

use super::fixture_tests::{Fixture, SECRET, permissive};
use crate::governance::Policy;

/// Every operation that takes a path, on one.
fn operations(path: &str) -> Vec<Value> {
    vec![
        json!({"operation": "read", "path": path}),
        json!({"operation": "read", "path": path, "offset": 1, "limit": 1}),
        json!({"operation": "stat", "path": path}),
        json!({"operation": "list", "path": path}),
        json!({"operation": "glob", "path": path, "pattern": "**"}),
        json!({"operation": "search", "path": path, "pattern": "."}),
        json!({"operation": "write", "path": path, "content": "gotcha"}),
        json!({"operation": "append", "path": path, "content": "gotcha"}),
        json!({"operation": "edit", "path": path, "old": SECRET, "new": "gotcha"}),
        json!({"operation": "mkdir", "path": path}),
        json!({"operation": "move", "path": path, "to": "stolen"}),
        json!({"operation": "move", "path": "bait", "to": path}),
        json!({"operation": "delete", "path": path}),
    ]
}

#[test]
fn ways_out_are_refused_with_their_reason() {
    let world = Fixture::new();
    world.put_traps();
    world.put("bait", "bait");
    let long = "d/".repeat(2560);
    let name = "n".repeat(300);
    #[rustfmt::skip]
    let table = [
        ("../outside.txt",              "leaves the workspace"),
        ("..",                          "leaves the workspace"),
        ("a/../../outside.txt",         "leaves the workspace"),
        ("./.././tenant/bait",          "leaves the workspace"),
        ("../tenant-evil/secret.txt",   "leaves the workspace"),
        ("/etc/passwd",                 "is absolute"),
        ("//etc/passwd",                "is absolute"),
        ("/proc/self/root/etc/passwd",  "is absolute"),
        ("up/outside.txt",              "\"up\" is a symbolic link that leaves the workspace"),
        ("./bait/../up/outside.txt",    "\"up\" is a symbolic link that leaves the workspace"),
        ("sibling/secret.txt",          "\"sibling\" is a symbolic link that leaves the workspace"),
        ("proc/etc/passwd",             "\"proc\" is a symbolic link that leaves the workspace"),
        ("loop/x",                      "more than 40 symbolic links"),
        ("bait\0.txt",                  "control character '\\0'"),
        ("bait\n",                      "control character '\\n'"),
        (long.as_str(),                 "5120 bytes long"),
        (name.as_str(),                 "a name of 300 bytes"),
    ];
    for (path, reason) in table {
        for arguments in operations(path) {
            let refused = world.call(&arguments).expect_err(&arguments.to_string());
            assert!(refused.contains(reason), "{arguments}: {refused}");
        }
    }
    world.assert_outside_is_untouched();
    assert_eq!(world.text("bait"), "bait");
}

/// However a path is written, no operation shows or touches what lies outside.
#[test]
fn no_way_to_write_a_path_leads_outside() {
    let paths: Vec<String> = include_str!("../../../tests/corpora/paths_hostile.txt")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(paths.len() >= 100, "{}", paths.len());
    for path in &paths {
        let world = Fixture::new();
        world.put_traps();
        fs::remove_file(world.at("hard")).unwrap();
        world.put("bait", "bait");
        for arguments in operations(path) {
            if let Ok(answer) = world.call(&arguments) {
                let is_harmless = !answer.contains(SECRET) && !answer.contains("root:");
                assert!(is_harmless, "{arguments}: {answer}");
            }
        }
        world.assert_outside_is_untouched();
    }
}

#[test]
fn a_link_in_the_last_place_is_refused_unless_the_link_itself_is_meant() {
    for link in ["leak", "abs", "up", "sibling", "proc", "chain", "dangling"] {
        let world = Fixture::new();
        world.put_traps();
        for arguments in operations(link) {
            let means_the_link =
                arguments["operation"] == "delete" || arguments["operation"] == "move";
            let answer = world.call(&arguments);
            assert!(
                means_the_link || answer.unwrap_err().contains("symbolic link that leaves"),
                "{arguments}"
            );
        }
        world.assert_outside_is_untouched();
    }
}

#[test]
fn fifos_devices_and_shared_files_are_refused_without_waiting() {
    let world = Fixture::new();
    world.put_traps();
    world.put("bait", "bait");
    for arguments in operations("fifo") {
        let refused = world.call(&arguments).expect_err(&arguments.to_string());
        let reason = if arguments["operation"] == "mkdir" {
            "exists already"
        } else if matches!(arguments["operation"].as_str(), Some("list" | "glob" | "search")) {
            "is not a directory"
        } else {
            "is a device, FIFO or socket"
        };
        assert!(refused.contains(reason), "{arguments}: {refused}");
    }
    for operation in ["write", "append", "edit"] {
        let arguments = json!({"operation": operation, "path": "hard", "content": "x", "old": SECRET, "new": "x"});
        assert!(world.call(&arguments).unwrap_err().contains("has 2 hard links"), "{operation}");
    }
    world.assert_outside_is_untouched();
}

#[test]
fn a_walk_does_not_follow_links() {
    let world = Fixture::new();
    world.put_traps();
    fs::remove_file(world.at("hard")).unwrap();
    world.put("dir/file", "plain");
    symlink("..", world.at("dir/parent")).unwrap();
    for arguments in [
        json!({"operation": "search", "pattern": "."}),
        json!({"operation": "glob", "pattern": "**"}),
        json!({"operation": "list"}),
    ] {
        let answer = world.call(&arguments).unwrap();
        assert!(
            !answer.contains(SECRET) && !answer.contains("secret.txt"),
            "{arguments}: {answer}"
        );
    }
    assert_eq!(
        world.call(&json!({"operation": "search", "pattern": "."})).unwrap(),
        "dir/file:1: plain"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// The traps are put again for each case, because operations may move and delete them.
    #[test]
    fn no_path_reads_or_writes_outside(
        parts in prop::collection::vec(
            prop::sample::select(vec![
                "..", ".", "", "a", "bait", "leak", "abs", "up", "sibling", "proc", "loop", "chain", "dangling", "fifo",
                "outside.txt", "tenant", "tenant-evil", "secret.txt", "etc", "passwd", "stolen", "é", "\u{202e}", "\0",
            ]),
            1..6,
        ),
        separator in prop::sample::select(vec!["/", "//", "/./", "\\"]),
        absolute in prop::bool::weighted(0.1),
    ) {
        let world = Fixture::new();
        world.put_traps();
        fs::remove_file(world.at("hard")).unwrap();
        world.put("bait", "bait");
        let path = format!("{}{}", if absolute { "/" } else { "" }, parts.join(separator));
        for arguments in operations(&path) {
            if let Ok(answer) = world.call(&arguments) {
                prop_assert!(!answer.contains(SECRET) && !answer.contains("root:"), "{}: {}", arguments, answer);
            }
        }
        world.assert_outside_is_untouched();
    }
}

/// Swaps two names as fast as it can while `calls` runs, and says so if it could not.
fn while_swapping(world: &Fixture, a: &str, b: &str, calls: impl FnOnce()) {
    while_counting_swaps(world, a, b, |_| calls());
}

/// The same, for calls that look at how often that was.
fn while_counting_swaps(world: &Fixture, a: &str, b: &str, calls: impl FnOnce(&AtomicU32)) {
    /// Ends the swapping also where `calls` panics.
    struct Done<'a>(&'a AtomicBool);
    impl Drop for Done<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let (done, swaps) = (AtomicBool::new(false), AtomicU32::new(0));
    let (a, b) = (world.at(a), world.at(b));
    std::thread::scope(|threads| {
        let swapper = threads.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                renameat_with(CWD, &a, CWD, &b, RenameFlags::EXCHANGE).unwrap();
                swaps.fetch_add(1, Ordering::Relaxed);
            }
        });
        let over = Done(&done);
        calls(&swaps);
        drop(over);
        swapper.join().unwrap();
    });
    assert!(swaps.into_inner() > 0, "nothing was swapped");
}

#[test]
#[ignore = "takes a minute"]
fn a_million_swaps_lead_nowhere() {
    let world = Fixture::new();
    world.put("dir/secret.txt", "harmless");
    symlink("../tenant-evil", world.at("evil")).unwrap();
    let mut calls = 0_u64;
    while_counting_swaps(&world, "dir", "evil", |swaps| {
        while swaps.load(Ordering::Relaxed) < 1_000_000 {
            for arguments in [
                json!({"operation": "read", "path": "dir/secret.txt"}),
                json!({"operation": "write", "path": "dir/secret.txt", "content": "gotcha"}),
                json!({"operation": "list", "path": "dir"}),
            ] {
                if let Ok(answer) = world.call(&arguments) {
                    assert!(!answer.contains(SECRET), "{arguments}: {answer}");
                }
                calls += 1;
            }
        }
    });
    world.assert_outside_is_untouched();
    println!("{calls} calls during a million swaps");
}

#[test]
fn a_directory_swapped_for_a_link_while_it_is_used_leads_nowhere() {
    let world = Fixture::new();
    world.put("dir/secret.txt", "harmless");
    symlink("../tenant-evil", world.at("evil")).unwrap();
    while_swapping(&world, "dir", "evil", || {
        for n in 0..700 {
            for arguments in [
                json!({"operation": "read", "path": "dir/secret.txt"}),
                json!({"operation": "search", "path": "dir", "pattern": "."}),
                json!({"operation": "write", "path": format!("dir/{n}.txt"), "content": "gotcha"}),
            ] {
                if let Ok(answer) = world.call(&arguments) {
                    assert!(!answer.contains(SECRET), "{arguments}: {answer}");
                }
            }
        }
    });
    world.assert_outside_is_untouched();
}

#[test]
fn a_file_swapped_for_a_link_while_it_is_used_leads_nowhere() {
    let world = Fixture::new();
    world.put("file", "harmless");
    symlink("../outside.txt", world.at("evil")).unwrap();
    while_swapping(&world, "file", "evil", || {
        for _ in 0..700 {
            for arguments in [
                json!({"operation": "read", "path": "file"}),
                json!({"operation": "append", "path": "file", "content": "gotcha"}),
                json!({"operation": "edit", "path": "file", "old": SECRET, "new": "gotcha"}),
            ] {
                if let Ok(answer) = world.call(&arguments) {
                    assert!(!answer.contains(SECRET), "{arguments}: {answer}");
                }
            }
        }
    });
    world.assert_outside_is_untouched();
}

#[test]
fn a_link_that_appears_after_the_decision_does_not_lead_around_a_rule() {
    let world = Fixture::under(&Policy { deny: vec!["private/**".into()], ..permissive() });
    world.put("private/notes.txt", SECRET);
    world.put("dir/notes.txt", "harmless");
    symlink("private", world.at("evil")).unwrap();
    while_swapping(&world, "dir", "evil", || {
        for n in 0..700 {
            for arguments in [
                json!({"operation": "read", "path": "dir/notes.txt"}),
                json!({"operation": "search", "path": "dir", "pattern": "."}),
                json!({"operation": "mkdir", "path": format!("dir/{n}")}),
            ] {
                if let Ok(answer) = world.call(&arguments) {
                    assert!(!answer.contains(SECRET), "{arguments}: {answer}");
                }
            }
        }
    });
    assert_eq!(fs::read_dir(world.at("private")).unwrap().count(), 1);
}
