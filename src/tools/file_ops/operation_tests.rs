//! What each operation does, answers and declares.
//!
//! Calls go through the real gate on a real disk ([`super::fixture_tests`]). That nothing outside the
//! workspace can be reached is `confinement_tests`'s.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures::FutureExt as _;
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::fixture_tests::{Fixture, permissive};
use super::{SEARCHES, blocking, changing, reading, writing};
use crate::governance::{ActionKind, Policy};
use crate::run::Autonomy;
use crate::run::Effect::{self, Idempotent, Once, Read};
use crate::tools::lease::Lease;
use crate::tools::quota::{Growth, Quota, QuotaLimits};
use crate::tools::staged_file::link_and_unlink;
use crate::tools::{ChangeRecorder, Standing, Workspace};

#[test]
fn a_story_of_every_operation() {
    let world = Fixture::new();
    #[rustfmt::skip]
    let story = [
        (json!({"operation": "list"}),                                              Ok("[The directory is empty.]")),
        (json!({"operation": "write", "path": "notes/a.md", "content": "one\ntwo\n"}), Ok("Wrote 8 bytes to notes/a.md.")),
        (json!({"operation": "write", "path": "notes/a.md", "content": "one\ntwo\n"}), Ok("notes/a.md holds exactly this text already.")),
        (json!({"operation": "append", "path": "notes/a.md", "content": "three"}),  Ok("Appended 5 bytes to notes/a.md, which is 13 bytes long now.")),
        (json!({"operation": "append", "path": "b.md", "content": "two"}),          Ok("Appended 3 bytes to b.md, which is 3 bytes long now.")),
        (json!({"operation": "read", "path": "./notes//a.md"}),                     Ok("one\ntwo\nthree")),
        (json!({"operation": "read", "path": "notes/a.md", "offset": 2}),           Ok("two\nthree")),
        (json!({"operation": "read", "path": "notes/a.md", "offset": 3, "limit": 9}), Ok("three")),
        (json!({"operation": "read", "path": "notes/a.md", "limit": 1}),            Ok("one\n[Lines 1 to 1. The file continues: read it with offset 2.]")),
        (json!({"operation": "read", "path": "notes/a.md", "offset": 4}),           Err("\"notes/a.md\" has only 3 lines; line 4 is beyond its end")),
        (json!({"operation": "read", "path": "notes"}),                             Err("\"notes\" is a directory; use list to see what is in it")),
        (json!({"operation": "read", "path": "."}),                                 Err("\".\" is a directory; use list to see what is in it")),
        (json!({"operation": "read", "path": "nope.md"}),                           Err("\"nope.md\" does not exist")),
        (json!({"operation": "read", "path": "b.md/x"}),                            Err("\"b.md/x\" is not a directory, or a part of the path is not one")),
        (json!({"operation": "edit", "path": "notes/a.md", "old": "two", "new": "2"}), Ok("Replaced 1 occurrence in notes/a.md.")),
        (json!({"operation": "edit", "path": "notes/a.md", "old": "two", "new": "2"}), Err("the old text occurs 0 times in \"notes/a.md\"; read the file and copy the text exactly, white space included")),
        (json!({"operation": "edit", "path": "notes/a.md", "old": "e", "new": "E"}), Err("the old text occurs 3 times in \"notes/a.md\"; add lines around it until it occurs once, or set replace_all")),
        (json!({"operation": "edit", "path": "notes/a.md", "old": "e", "new": "E", "replace_all": true}), Ok("Replaced 3 occurrences in notes/a.md.")),
        (json!({"operation": "edit", "path": "notes/a.md", "old": "E", "new": "E"}), Err("old and new are the same text; nothing to edit")),
        (json!({"operation": "edit", "path": "nope.md", "old": "a", "new": "b"}),   Err("\"nope.md\" does not exist")),
        (json!({"operation": "read", "path": "notes/a.md"}),                        Ok("onE\n2\nthrEE")),
        (json!({"operation": "mkdir", "path": "notes/deep/er"}),                    Ok("notes/deep/er is a directory.")),
        (json!({"operation": "mkdir", "path": "notes/deep/er"}),                    Ok("notes/deep/er is a directory.")),
        (json!({"operation": "mkdir", "path": "b.md"}),                             Err("\"b.md\" exists already")),
        (json!({"operation": "write", "path": "notes", "content": ""}),             Err("\"notes\" is a directory")),
        (json!({"operation": "append", "path": "notes", "content": ""}),            Err("\"notes\" is a directory")),
        (json!({"operation": "list"}),                                              Ok("b.md\nnotes/")),
        (json!({"operation": "list", "path": "notes"}),                             Ok("a.md\ndeep/")),
        (json!({"operation": "list", "path": "b.md"}),                              Err("\"b.md\" is not a directory, or a part of the path is not one")),
        (json!({"operation": "glob", "pattern": "**/*.md"}),                        Ok("b.md\nnotes/a.md")),
        (json!({"operation": "glob", "pattern": "*"}),                              Ok("b.md\nnotes/")),
        (json!({"operation": "glob", "pattern": "./d*", "path": "notes"}),          Ok("notes/deep/")),
        (json!({"operation": "glob", "pattern": "*.rs"}),                           Ok("[Nothing matches *.rs.]")),
        (json!({"operation": "glob", "pattern": "a["}),                             Err("the pattern \"a[\" is not a glob: unclosed character class; missing ']'")),
        (json!({"operation": "search", "pattern": "t(h|w)"}),                       Ok("b.md:1: two\nnotes/a.md:3: thrEE")),
        (json!({"operation": "search", "pattern": "t", "path": "notes"}),           Ok("notes/a.md:3: thrEE")),
        (json!({"operation": "search", "pattern": "t", "path": "b.md"}),            Ok("b.md:1: two")),
        (json!({"operation": "search", "pattern": "t", "glob": "b.*"}),             Ok("b.md:1: two")),
        (json!({"operation": "search", "pattern": "t", "glob": "notes/*"}),         Ok("notes/a.md:3: thrEE")),
        (json!({"operation": "search", "pattern": "zzz"}),                          Ok("[No line matches.]")),
        (json!({"operation": "search", "pattern": "t", "path": "nope"}),            Err("\"nope\" does not exist")),
        (json!({"operation": "move", "path": "b.md", "to": "notes/b.md"}),          Ok("Moved b.md to notes/b.md.")),
        (json!({"operation": "move", "path": "b.md", "to": "c.md"}),                Err("\"b.md\" does not exist")),
        (json!({"operation": "move", "path": "notes/b.md", "to": "notes/deep"}),    Err("\"notes/deep\" is a directory; give the full new path, e.g. notes/deep/b.md")),
        (json!({"operation": "move", "path": "notes", "to": "notes/deep/n"}),       Err("\"notes\" cannot be moved to \"notes/deep/n\", which is itself or within it")),
        (json!({"operation": "move", "path": "notes", "to": "."}),                  Err("the workspace itself cannot be used like that")),
        (json!({"operation": "move", "path": "notes/b.md", "to": "notes/a.md"}),    Ok("Moved notes/b.md to notes/a.md.")),
        (json!({"operation": "move", "path": "notes", "to": "texts"}),              Ok("Moved notes to texts.")),
        (json!({"operation": "read", "path": "texts/a.md"}),                        Ok("two")),
        (json!({"operation": "delete", "path": "texts"}),                           Err("\"texts\" is a directory that is not empty")),
        (json!({"operation": "delete", "path": "texts/deep/er"}),                   Ok("Deleted texts/deep/er.")),
        (json!({"operation": "delete", "path": "texts/a.md"}),                      Ok("Deleted texts/a.md.")),
        (json!({"operation": "delete", "path": "texts/a.md"}),                      Err("\"texts/a.md\" does not exist")),
        (json!({"operation": "delete", "path": "."}),                               Err("the workspace itself cannot be used like that")),
        (json!({"operation": "read"}),                                              Err("read: missing field `path`")),
        (json!({"operation": "write", "path": "x"}),                                Err("write: missing field `content`")),
        (json!({"operation": "edit", "path": "x", "old": "a"}),                     Err("edit: missing field `new`")),
        (json!({"operation": "move", "path": "x"}),                                 Err("move: missing field `to`")),
        (json!({"operation": "search"}),                                            Err("search: missing field `pattern`")),
    ];
    for (arguments, expected) in story {
        let answer = world.call(&arguments);
        assert_eq!(answer.as_deref().map_err(String::as_str), expected, "{arguments}");
    }
    let left: Vec<_> =
        fs::read_dir(world.at("texts")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["deep"], "nothing temporary stays behind");
}

#[test]
fn a_bad_regular_expression_is_explained() {
    let answer = Fixture::new().call(&json!({"operation": "search", "pattern": "(a"})).unwrap_err();
    assert!(
        answer.starts_with("the pattern is not a regular expression: ")
            && answer.contains("unclosed group")
    );
    let huge = Fixture::new()
        .call(&json!({"operation": "search", "pattern": "(\\w{500}){500}"}))
        .unwrap_err();
    assert!(huge.contains("larger than 262144 bytes when compiled"), "{huge}");
}

#[tokio::test]
async fn no_tenant_makes_all_searches() {
    let half = [SEARCHES.acquire("one").await, SEARCHES.acquire("one").await];
    assert!(half.iter().all(Option::is_some));
    assert!(SEARCHES.acquire("one").now_or_never().is_none());
}

#[test]
fn files_on_their_way_to_their_places_are_not_found() {
    let world = Fixture::new();
    let staged = ".toolloop-0123456789abcdef0123456789abcdef.tmp";
    for path in [staged, &format!("d/{staged}"), "d/.toolloop-own.tmp"] {
        world.put(path, "needle");
    }
    for (call, expected) in [
        (json!({"operation": "list"}), "d/"),
        (json!({"operation": "list", "path": "d"}), ".toolloop-own.tmp"),
        (json!({"operation": "glob", "pattern": "**/*.tmp"}), "d/.toolloop-own.tmp"),
        (json!({"operation": "search", "pattern": "needle"}), "d/.toolloop-own.tmp:1: needle"),
    ] {
        assert_eq!(world.call(&call).as_deref(), Ok(expected), "{call}");
    }
}

#[test]
fn stat_is_json() {
    let world = Fixture::new();
    world.put("a/b.txt", "12345");
    let stat = |path: &str| {
        serde_json::from_str::<Value>(
            &world.call(&json!({"operation": "stat", "path": path})).unwrap(),
        )
    };
    let file = stat("a/b.txt").unwrap();
    assert_eq!(
        (&file["path"], &file["type"], &file["size"]),
        (&json!("a/b.txt"), &json!("file"), &json!(5))
    );
    assert!(chrono::DateTime::parse_from_rfc3339(file["modified"].as_str().unwrap()).is_ok());
    assert_eq!(stat("a").unwrap()["type"], "directory");
    assert_eq!(stat(".").unwrap()["type"], "directory");
}

/// A call and its actions: r and w for read and write, ! where something would be lost.
type DeclaredRow = (Value, &'static [(&'static str, &'static str, Effect)]);

#[test]
fn every_operation_declares_what_it_would_do() {
    let world = Fixture::new();
    world.put("old.txt", "text");
    world.put("dir/inner.txt", "text");
    std::os::unix::fs::symlink("old.txt", world.at("link")).unwrap();
    #[rustfmt::skip]
    let table: [DeclaredRow; 20] = [
        (json!({"operation": "read", "path": "x/../old.txt"}),                     &[("r", "old.txt", Read)]),
        (json!({"operation": "read", "path": "link"}),                             &[("r", "old.txt", Read)]),
        (json!({"operation": "stat", "path": "nope"}),                             &[("r", "nope", Read)]),
        (json!({"operation": "list"}),                                             &[("r", ".", Read)]),
        (json!({"operation": "glob", "pattern": "*", "path": "dir"}),              &[("r", "dir", Read)]),
        (json!({"operation": "search", "pattern": "x"}),                           &[("r", ".", Read)]),
        (json!({"operation": "write", "path": "new.txt", "content": ""}),          &[("w", "new.txt", Idempotent)]),
        (json!({"operation": "write", "path": "old.txt", "content": "other"}),     &[("w!", "old.txt", Idempotent)]),
        (json!({"operation": "write", "path": "old.txt", "content": "TEXT"}),      &[("w!", "old.txt", Idempotent)]),
        (json!({"operation": "write", "path": "old.txt", "content": "text"}),      &[("w", "old.txt", Idempotent)]),
        (json!({"operation": "write", "path": "link", "content": "other"}),        &[("w!", "old.txt", Idempotent)]),
        (json!({"operation": "append", "path": "old.txt", "content": ""}),         &[("w", "old.txt", Once)]),
        (json!({"operation": "edit", "path": "old.txt", "old": "a", "new": ""}),   &[("w", "old.txt", Once), ("r", "old.txt", Read)]),
        (json!({"operation": "mkdir", "path": "dir"}),                             &[("w", "dir", Idempotent)]),
        (json!({"operation": "delete", "path": "old.txt"}),                        &[("w!", "old.txt", Once)]),
        (json!({"operation": "delete", "path": "link"}),                           &[("w!", "link", Once)]),
        (json!({"operation": "move", "path": "old.txt", "to": "new.txt"}),         &[("w", "old.txt", Once), ("w", "new.txt", Once), ("r", "old.txt", Read)]),
        (json!({"operation": "move", "path": "old.txt", "to": "dir/inner.txt"}),   &[("w", "old.txt", Once), ("w!", "dir/inner.txt", Once), ("r", "old.txt", Read)]),
        (json!({"operation": "move", "path": "old.txt", "to": "link"}),            &[("w", "old.txt", Once), ("w!", "link", Once), ("r", "old.txt", Read)]),
        (json!({"operation": "move", "path": "dir", "to": "moved"}),               &[("w", "dir", Once), ("w", "moved", Once), ("r", "dir", Read),
            ("w", "dir/inner.txt", Once), ("w", "moved/inner.txt", Once), ("r", "dir/inner.txt", Read)]),
    ];
    for (arguments, expected) in table {
        let declared = world.actions(&arguments).unwrap();
        let declared: Vec<_> = declared
            .iter()
            .map(|action| match (&action.what, action.destructive) {
                (ActionKind::Read { path }, false) => ("r", path.as_str(), action.effect),
                (ActionKind::Write { path }, false) => ("w", path.as_str(), action.effect),
                (ActionKind::Write { path }, true) => ("w!", path.as_str(), action.effect),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(declared, expected, "{arguments}");
    }
}

#[test]
fn a_supervised_agent_loses_nothing_even_where_a_file_appears_after_the_decision() {
    let world = Fixture::under(&Policy { autonomy: Autonomy::Supervised, ..permissive() });
    let write = json!({"operation": "write", "path": "a.txt", "content": "mine"});
    let permit = world.permit(&write).unwrap();
    world.put("a.txt", "theirs");
    let refused = world.execute(permit, &write).unwrap_err();
    assert!(refused.contains("was not overwritten"), "{refused}");
    assert!(world.permit(&write).unwrap_err().contains("autonomy rule asks for an approval"));

    world.put("from.txt", "mine");
    let rename = json!({"operation": "move", "path": "from.txt", "to": "to.txt"});
    let permit = world.permit(&rename).unwrap();
    world.put("to.txt", "theirs");
    world.execute(permit, &rename).unwrap_err();

    assert_eq!(
        [world.text("a.txt"), world.text("to.txt"), world.text("from.txt")],
        ["theirs", "theirs", "mine"]
    );
    let names: Vec<_> =
        fs::read_dir(world.at(".")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 3, "{names:?}");
}

#[test]
fn a_directory_that_changes_after_the_decision_is_not_moved() {
    let world = Fixture::under(&Policy { deny: vec!["dir/secret".into()], ..permissive() });
    world.put("dir/plain", "");
    let rename = json!({"operation": "move", "path": "dir", "to": "open"});
    let permit = world.permit(&rename).unwrap();
    world.put("dir/secret", "");
    assert!(world.execute(permit, &rename).unwrap_err().contains("changed while"));
    assert!(
        world.permit(&rename).unwrap_err().contains("denied by dir/secret"),
        "a rule holds for what moves along"
    );
}

#[test]
fn a_file_is_not_moved_onto_another_link_of_itself() {
    let world = Fixture::new();
    world.put("one", "text");
    fs::hard_link(world.at("one"), world.at("other")).unwrap();
    let refused = world.call(&json!({"operation": "move", "path": "one", "to": "other"}));
    let refused = refused.unwrap_err();
    assert!(refused.contains("hard links of one file"), "{refused}");
}

#[test]
fn a_deleted_link_makes_no_room() {
    let root = tempfile::tempdir().unwrap();
    let limits = QuotaLimits { bytes: 10_000, ..QuotaLimits::default() };
    let workspace = Workspace::open(root.path(), "t", ".").unwrap();
    let workspace = workspace.within(&Arc::new(Quota::new(limits)));
    fs::write(root.path().join("t/file"), [b'x'; 9_000]).unwrap();
    workspace.admit(Growth::of_file(None, 0)).unwrap();
    std::os::unix::fs::symlink("x".repeat(4_000), root.path().join("t/link")).unwrap();
    let (stop, changed) = (CancellationToken::new(), ChangeRecorder::default());
    writing::delete(&workspace, "link", &stop, &changed).unwrap();
    assert!(workspace.admit(Growth::of_file(None, 3_000)).is_err());
}

#[test]
fn where_the_system_has_no_rename_without_loss_a_link_does_it() {
    let world = Fixture::new();
    world.put("from", "mine");
    world.put("taken", "theirs");
    let dir = world.workspace().open_dir(".").unwrap();
    world.put("dir/file", "mine");
    for (from, free, taken, moved) in
        [("from", "free", "taken", "free"), ("dir", "other", "taken", "other/file")]
    {
        let error = link_and_unlink(&dir, from, &dir, taken).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::AlreadyExists, "{from}");
        link_and_unlink(&dir, from, &dir, free).unwrap();
        assert_eq!([world.text(taken), world.text(moved)], ["theirs", "mine"]);
        assert!(!world.at(from).exists(), "{from}");
    }
}

#[test]
fn writing_keeps_permissions_and_leaves_links_alone() {
    let world = Fixture::new();
    world.put("run.sh", "old");
    fs::set_permissions(world.at("run.sh"), fs::Permissions::from_mode(0o750)).unwrap();
    std::os::unix::fs::symlink("run.sh", world.at("link")).unwrap();
    world.call(&json!({"operation": "write", "path": "link", "content": "new"})).unwrap();
    world
        .call(&json!({"operation": "edit", "path": "link", "old": "new", "new": "newer"}))
        .unwrap();
    assert_eq!(world.text("run.sh"), "newer");
    assert_eq!(fs::metadata(world.at("run.sh")).unwrap().permissions().mode() & 0o777, 0o750);
    assert!(fs::symlink_metadata(world.at("link")).unwrap().is_symlink());
    world.call(&json!({"operation": "delete", "path": "link"})).unwrap();
    assert_eq!(world.text("run.sh"), "newer", "the link was deleted, not what it names");
}

#[test]
fn a_large_file_is_read_in_pages_that_add_up() {
    let world = Fixture::new();
    let text =
        (0..80_000).map(|n| format!("line {n}: äöü – some words\n")).collect::<Vec<_>>().concat();
    assert!(text.len() > 2 * 1024 * 1024);
    world.put("big.txt", &text);
    let (mut offset, mut read, mut pages) = (1, String::new(), 0);
    loop {
        let page =
            world.call(&json!({"operation": "read", "path": "big.txt", "offset": offset})).unwrap();
        pages += 1;
        let Some((lines, note)) = page.split_once("[Lines ") else {
            read.push_str(&page);
            break;
        };
        read.push_str(lines);
        offset =
            note.rsplit_once("offset ").unwrap().1.trim_end_matches(".]").parse::<u64>().unwrap();
    }
    assert_eq!(pages, 3);
    assert!(read == text, "the pages are the file");
}

#[test]
fn a_line_that_fills_a_page_is_cut_between_characters() {
    let world = Fixture::new();
    world.put("line.txt", format!("x{}\nlast", "ä".repeat(600_000)));
    let page = world.call(&json!({"operation": "read", "path": "line.txt"})).unwrap();
    let (text, note) = page.split_once('\n').unwrap();
    assert_eq!(text.len(), 1024 * 1024 - 1);
    assert_eq!(
        note,
        "[Line 1 is cut here: it is longer than 1048576 bytes.]\n[Lines 1 to 1. The file continues: read it with offset 2.]"
    );
    assert_eq!(
        world.call(&json!({"operation": "read", "path": "line.txt", "offset": 2})).unwrap(),
        "last"
    );
}

#[test]
fn binary_and_monstrous_files_are_refused_at_once() {
    let world = Fixture::new();
    world.put("nul", "a\0b");
    world.put("latin1", b"caf\xe9");
    world.put("large-nul", [b"text\n".repeat(20_000), vec![0]].concat());
    fs::File::create(world.at("sparse")).unwrap().set_len(100 << 30).unwrap();
    for path in ["nul", "latin1", "large-nul", "sparse"] {
        let refused = world.call(&json!({"operation": "read", "path": path})).unwrap_err();
        assert_eq!(refused, format!("{path:?} is a binary file; only text can be read"));
    }
    let edit = |path: &str| {
        world.call(&json!({"operation": "edit", "path": path, "old": "a", "new": "b"})).unwrap_err()
    };
    assert_eq!(edit("sparse"), "\"sparse\" is larger than 16777216 bytes, too large to edit");
    assert_eq!(edit("latin1"), "\"latin1\" is a binary file; only text can be edited");
    let found = world.call(&json!({"operation": "search", "pattern": "."})).unwrap();
    assert_eq!(
        found,
        "[No line matches.]\n[… 4 files that are binary, too large or unreadable were not searched]"
    );
    let overwritten =
        world.call(&json!({"operation": "write", "path": "sparse", "content": "small"}));
    assert_eq!(overwritten.unwrap(), "Wrote 5 bytes to sparse.");
}

#[test]
fn long_answers_are_cut_and_counted() {
    let world = Fixture::new();
    for n in 0..1203 {
        world.put(&format!("many/{n:04}.txt"), "");
    }
    world.put("hits.txt", "hit\n".repeat(250));
    world.put("wide.txt", format!("needle {}", "w".repeat(1000)));
    let list = world.call(&json!({"operation": "list", "path": "many"})).unwrap();
    assert_eq!(list.lines().count(), 1001);
    assert!(list.ends_with("0999.txt\n[… 203 more entries; list a directory further down]"));
    let glob = world.call(&json!({"operation": "glob", "pattern": "many/*"})).unwrap();
    assert!(glob.ends_with("[… 203 more matches; use a narrower pattern or path]"));
    let keys = format!("needle {} ghp_hunter2hunter2hunter2hunter2", "w".repeat(280));
    world.put("keys.txt", keys);
    let found = json!({"operation": "search", "pattern": "needle", "path": "keys.txt"});
    let found = world.call(&found).unwrap();
    assert!(found.starts_with("keys.txt:1: needle www") && found.ends_with("ww…"), "{found}");
    fs::remove_file(world.at("keys.txt")).unwrap();
    let hits = world.call(&json!({"operation": "search", "pattern": "hit"})).unwrap();
    assert!(hits.ends_with(
        "hits.txt:200: hit\n[… 50 more matching lines; narrow the pattern, path or glob]"
    ));
    let wide = world.call(&json!({"operation": "search", "pattern": "needle"})).unwrap();
    assert_eq!(wide.chars().count(), "wide.txt:1: ".len() + 300 + 1);
}

#[test]
fn what_the_path_rules_deny_is_not_found_either() {
    let world = Fixture::under(&Policy {
        deny: vec!["**/.env".into(), "**/.git/**".into()],
        ..permissive()
    });
    for path in [".env", "sub/.env", ".git/config", "sub/ok.txt"] {
        world.put(path, "KEY=value");
    }
    let call = |arguments: Value| world.call(&arguments).unwrap();
    assert_eq!(call(json!({"operation": "list"})), "sub/\n[… 2 entries that the path rules hide]");
    assert_eq!(
        call(json!({"operation": "glob", "pattern": "**"})),
        "sub/\nsub/ok.txt\n[… 3 entries that the path rules hide]"
    );
    assert_eq!(
        call(json!({"operation": "search", "pattern": "KEY"})),
        "sub/ok.txt:1: KEY=value\n[… 3 entries that the path rules hide]"
    );
    std::os::unix::fs::symlink("../.env", world.at("sub/innocent")).unwrap();
    let through_link =
        world.call(&json!({"operation": "read", "path": "sub/innocent"})).unwrap_err();
    assert!(through_link.contains("\".env\" may not be read"), "{through_link}");
}

#[test]
fn names_that_are_no_text_are_counted_and_cannot_be_moved() {
    use std::os::unix::ffi::OsStrExt;
    let world = Fixture::new();
    world.put("dir/ok", "");
    fs::write(world.at("dir").join(std::ffi::OsStr::from_bytes(b"b\xffd")), "").unwrap();
    let list = world.call(&json!({"operation": "list", "path": "dir"})).unwrap();
    assert_eq!(list, "ok\n[… 1 entries whose names are not UTF-8]");
    let moved =
        world.call(&json!({"operation": "move", "path": "dir", "to": "other"})).unwrap_err();
    assert!(moved.contains("not UTF-8"), "{moved}");
}

#[test]
fn stopped_work_changes_nothing() {
    let world = Fixture::new();
    world.put("old.txt", "old");
    world.put("page.txt", "x".repeat(200_000));
    let stop = CancellationToken::new();
    stop.cancel();
    let permit =
        world.permit(&json!({"operation": "write", "path": "new.txt", "content": "new"})).unwrap();
    let changed = crate::tools::ChangeRecorder::default();
    assert!(writing::write(world.workspace(), "new.txt", "new", &permit, &stop, &changed).is_err());
    let one = writing::Occurrences::One;
    assert!(
        writing::edit(world.workspace(), "old.txt", "old", "new", one, &stop, &changed).is_err()
    );
    assert!(reading::read(world.workspace(), "page.txt", None, None, &stop).is_err());
    assert_eq!(world.text("old.txt"), "old");
    assert_eq!(fs::read_dir(world.at(".")).unwrap().count(), 2);
}

/// A volume may hang, and would hang the thread of its task.
#[test]
fn no_call_looks_at_files_of_a_volume_on_the_thread_of_its_task() {
    let world = Fixture::on_volume();
    world.put("a.txt", "one\n");
    for arguments in [
        json!({"operation": "read", "path": "a.txt"}),
        json!({"operation": "list"}),
        json!({"operation": "stat", "path": "a.txt"}),
        json!({"operation": "append", "path": "a.txt", "content": "two\n"}),
        json!({"operation": "edit", "path": "a.txt", "old": "two", "new": "three"}),
        json!({"operation": "edit", "path": "a.txt", "old": "three", "new": "four", "replace_all": true}),
        json!({"operation": "mkdir", "path": "d"}),
        json!({"operation": "delete", "path": "d"}),
    ] {
        assert_eq!(world.waits_for_threads(&arguments), [true, true], "{arguments}");
    }
    assert_eq!(world.text("a.txt"), "one\nfour\n");
}

#[tokio::test]
async fn work_is_told_to_stop_when_nobody_waits_for_it_and_its_panics_surface() {
    let (started, has_started) = std::sync::mpsc::channel();
    let (ended, has_ended) = std::sync::mpsc::channel();
    let work = tokio::spawn(blocking(move |stop| {
        started.send(()).unwrap();
        while !stop.is_cancelled() {
            std::thread::yield_now();
        }
        ended.send(()).unwrap();
        Ok(())
    }));
    tokio::task::spawn_blocking(move || has_started.recv().unwrap()).await.unwrap();
    work.abort();
    tokio::task::spawn_blocking(move || has_ended.recv().unwrap()).await.unwrap();

    let panicked = tokio::spawn(blocking::<()>(|_| panic!("as it must"))).await.unwrap_err();
    assert!(panicked.is_panic());
}

/// The one thread is busy until the lease has run out, as after the process was stopped.
#[test]
fn a_change_that_waited_for_a_thread_checks_the_lease_before_it_acts() {
    const SHORT: Duration = Duration::from_millis(200);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(1)
        .build()
        .unwrap();
    runtime.block_on(async {
        for is_lost in [false, true] {
            let lease = Arc::new(Lease::new(Duration::from_millis(30)));
            let lost = CancellationToken::new();
            let standing = Standing::new(Arc::clone(&lease), lost.clone());
            let (free, is_free) = std::sync::mpsc::channel();
            let busy = tokio::task::spawn_blocking(move || is_free.recv().unwrap());
            let changes = Arc::new(AtomicU32::new(0));
            let counted = Arc::clone(&changes);
            let mut change = tokio::spawn(async move {
                let count = move |_: &CancellationToken| {
                    counted.fetch_add(1, Ordering::SeqCst);
                    Ok(())
                };
                changing(&standing, count).await.unwrap();
            });
            lease.over().await;
            free.send(()).unwrap();
            busy.await.unwrap();
            assert!(tokio::time::timeout(SHORT, &mut change).await.is_err());
            assert_eq!(changes.load(Ordering::SeqCst), 0);
            if is_lost {
                lost.cancel();
            }
            lease.renew(Instant::now() + Duration::from_hours(1));
            let done = tokio::time::timeout(10 * SHORT, &mut change).await.is_ok();
            assert_eq!((done, changes.load(Ordering::SeqCst)), (!is_lost, u32::from(!is_lost)));
        }
    });
}

#[test]
fn the_description_is_as_short_as_servers_demand() {
    assert!(super::DESCRIPTION.chars().count() <= 1024);
}
