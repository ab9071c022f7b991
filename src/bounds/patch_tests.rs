use proptest::prelude::*;

use super::*;

const TEXT: &str = "one\ntwo\nthree\nfour\nfive\nsix\n";

fn applied(patch: &str, text: &str) -> Result<String, String> {
    let files = parse(patch).map_err(|refused| refused.0)?;
    assert_eq!(files.len(), 1, "{patch}");
    files[0].apply(text).map_err(|refused| refused.0)
}

fn of(hunks: &str) -> String {
    format!("--- a/f\n+++ b/f\n{hunks}")
}

#[test]
fn hunks_are_applied_where_they_fit() {
    let table = [
        ("@@ -2,2 +2,2 @@\n two\n-three\n+3\n", "one\ntwo\n3\nfour\nfive\nsix\n"),
        ("@@ -1 +1 @@ fn x()\n-one\n+1\n", "1\ntwo\nthree\nfour\nfive\nsix\n"),
        ("@@ -5,2 +5,2 @@\n two\n-three\n+3\n", "one\ntwo\n3\nfour\nfive\nsix\n"),
        (
            "@@ -3,2 +3,3 @@\n one\n+1.5\n two\n@@ -7,2 +8,1 @@\n five\n-six\n",
            "one\n1.5\ntwo\nthree\nfour\nfive\n",
        ),
        ("@@ -2,0 +3 @@\n+2.5\n", "one\ntwo\n2.5\nthree\nfour\nfive\nsix\n"),
        ("@@ -0,0 +1 @@\n+0\n", "0\none\ntwo\nthree\nfour\nfive\nsix\n"),
        ("@@ -6 +6 @@\n-six\n+6\n\\ No newline at end of file\n", "one\ntwo\nthree\nfour\nfive\n6"),
    ];
    for (hunks, expected) in table {
        assert_eq!(applied(&of(hunks), TEXT).as_deref(), Ok(expected), "{hunks}");
    }
    let added = applied(&of("@@ -1 +1,2 @@\n a\n+b"), "a").unwrap();
    assert_eq!(added, "a\nb\n", "the end of the last line is made where it was missing");
    let blank = applied(&of("@@ -1,3 +1,3 @@\n a\n\n-b\n+c\n"), "a\n\nb\n").unwrap();
    assert_eq!(blank, "a\n\nc\n", "a blank line may have lost its blank");
}

#[test]
fn what_does_not_fit_is_told() {
    let table = [
        (
            "@@ -2,2 +2,2 @@\n two\n-thre\n+3\n",
            "hunk 1 of \"f\" does not fit: at line 3 the file has \"three\", the hunk \"thre\"",
        ),
        (
            "@@ -6,2 +6,1 @@\n six\n-seven\n",
            "the file ends with line 6, the hunk goes on with \"seven\"",
        ),
        ("@@ -5 +5 @@\n-five\n+5\n@@ -1 +1 @@\n-one\n+1\n", "hunk 2 of \"f\" does not fit"),
        (
            "@@ -2,3 +2,2 @@\n two\n-three\n",
            "hunk 1 of \"f\" has 2 old and 1 new lines, its header counts 3 and 2",
        ),
        ("@@ -2,1 +2,1 @@\n two\n-three\n", "line 5 of the patch is one too many for hunk 1"),
        ("@@ -99,0 +99 @@\n+x\n", "hunk 1 of \"f\" does not fit"),
        ("@@ two @@\n", "should be `@@ -LINE,COUNT +LINE,COUNT @@`"),
        ("", "should be a hunk"),
    ];
    for (hunks, expected) in table {
        let told = applied(&of(hunks), TEXT).unwrap_err();
        assert!(told.contains(expected), "{hunks}: {told}");
    }
}

#[test]
fn files_are_made_changed_and_deleted() {
    let patch = "diff --git a/new.txt b/new.txt\nnew file mode 100644\nindex 000..111\n--- /dev/null\n+++ b/new.txt\n\
                 @@ -0,0 +1,2 @@\n+a\n+--- b\n\ndiff --git a/x/old b/x/old\n--- a/x/old\t2026-01-01\n+++ /dev/null\n\
                 @@ -1 +0,0 @@\n-gone\n--- plain.txt\n+++ plain.txt\n@@ -1 +1 @@\n--- c\n+d\n";
    let files = parse(patch).unwrap();
    let shown: Vec<_> = files.iter().map(|f| (f.path, f.what, f.added, f.removed)).collect();
    assert_eq!(
        shown,
        [
            ("new.txt", PatchKind::Create, 2, 0),
            ("x/old", PatchKind::Delete, 0, 1),
            ("plain.txt", PatchKind::Modify, 1, 1),
        ]
    );
    assert_eq!(files[0].apply("").unwrap(), "a\n--- b\n");
    assert_eq!(files[1].apply("gone\n").unwrap(), "");
    let told = files[1].apply("gone\nmore\n").unwrap_err().0;
    assert!(told.contains("does not remove"), "{told}");
    assert_eq!(files[2].apply("-- c\n").unwrap(), "d\n");
}

#[test]
fn what_is_more_than_lines_is_refused() {
    let table = [
        ("", "is empty"),
        ("just words", "line 1 of the patch is \"just words\""),
        ("*** Begin Patch\n", "is no unified diff"),
        ("@@ -1 +1 @@\n-a\n+b\n", "stands before the names"),
        ("diff --git a/x b/y\nrename from x\n", "line 2 of the patch renames a file"),
        ("old mode 100644\n", "changes the mode"),
        ("GIT binary patch\n", "binary"),
        ("--- a/x\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n", "use the operation move"),
        ("--- /dev/null\n+++ /dev/null\n", "names no file"),
        ("--- \"a/\\303\"\n+++ b/x\n", "write its plain path"),
        ("--- a/x\n@@ -1 +1 @@\n", "should be `+++ b/PATH`"),
    ];
    for (patch, expected) in table {
        let told = parse(patch).unwrap_err().0;
        assert!(told.contains(expected), "{patch}: {told}");
    }
    let twice = of("@@ -1 +1 @@\n-a\n+b\n").repeat(2);
    assert!(parse(&twice).unwrap_err().0.contains("is there twice"));
    let file = |n| format!("--- /dev/null\n+++ b/f{n}\n@@ -0,0 +1 @@\n+x\n");
    let files: Vec<String> = (0..=MAX_FILES).map(file).collect();
    let files = files.concat();
    assert!(parse(&files).unwrap_err().0.contains("more than 100 files"));
    let hunks = of(&"@@ -1,0 +1 @@\n+x\n".repeat(MAX_HUNKS + 1));
    assert!(parse(&hunks).unwrap_err().0.contains("more than 1000 hunks"));
    let lines = of(&format!("@@ -0,0 +1,{} @@\n{}", MAX_LINES + 1, "+x\n".repeat(MAX_LINES + 1)));
    assert!(parse(&lines).unwrap_err().0.contains("more than 50000 lines"));
    assert!(parse(&"x".repeat(MAX_PATCH + 1)).unwrap_err().0.contains("larger than"));
}

#[test]
fn looking_for_a_place_is_bounded() {
    let text = "x\n".repeat(200_000);
    let old = format!("{}-y\n", " x\n".repeat(4000));
    let hunk = format!("@@ -1,4001 +1,4000 @@\n{old}");
    let told = applied(&of(&hunk), &text).unwrap_err();
    assert!(told.contains("does not fit"), "{told}");
    let far = applied(&of("@@ -1 +1 @@\n-z\n+y\n"), &format!("{text}z\n")).unwrap_err();
    assert!(far.contains("does not fit"), "{far}");
}

proptest! {
    #[test]
    fn no_patch_panics(patch in "((--- |\\+\\+\\+ |@@ -|a/|b/|/dev/null| @@|,|[0-9]{1,11}| |\\+|-|\\\\|x|é|\n)){0,60}", text in "(x|é|\n){0,20}") {
        if let Ok(files) = parse(&patch) {
            for file in files {
                let _ = file.apply(&text);
            }
        }
    }
}
