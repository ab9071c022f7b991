//! What is read, what is refused, and that nothing makes the reader panic or recurse.

use proptest::prelude::*;

use super::*;

fn read(line: &str) -> Vec<Vec<String>> {
    let parsed = parse(line).unwrap_or_else(|refused| panic!("{line:?} {refused}"));
    let commands = parsed.pipelines.iter().flat_map(|pipeline| &pipeline.commands);
    commands.map(|command| command.words.iter().map(Word::text).collect()).collect()
}

#[test]
fn words_are_what_a_shell_would_make_of_them() {
    let table: &[(&str, &[&[&str]])] = &[
        ("ls -la", &[&["ls", "-la"]]),
        ("  ls\t-la \n", &[&["ls", "-la"]]),
        (r#"echo 'a b' "c d" e\ f"#, &[&["echo", "a b", "c d", "e f"]]),
        (r#"echo "a\"b" 'c"d' "e'f""#, &[&["echo", "a\"b", "c\"d", "e'f"]]),
        (r#"grep "foo$" x"#, &[&["grep", "foo$", "x"]]),
        (r"grep '$HOME `x` $(y)' f", &[&["grep", "$HOME `x` $(y)", "f"]]),
        (r"echo \$HOME \; \|", &[&["echo", "$HOME", ";", "|"]]),
        ("a | b && c || d; e", &[&["a"], &["b"], &["c"], &["d"], &["e"]]),
        ("echo ''", &[&["echo", ""]]),
        ("echo a''b", &[&["echo", "ab"]]),
        ("git commit -m 'two\n\nlines'", &[&["git", "commit", "-m", "two\n\nlines"]]),
        (
            "find . -name '*.rs' -exec echo {} +",
            &[&["find", ".", "-name", "*.rs", "-exec", "echo", "{}", "+"]],
        ),
        ("dd if=a of=b", &[&["dd", "if=a", "of=b"]]),
        ("echo a#b", &[&["echo", "a#b"]]),
        ("LC_ALL=C sort x", &[&["sort", "x"]]),
        ("! grep x y", &[&["grep", "x", "y"]]),
        ("echo 100% a:b x=y a@b", &[&["echo", "100%", "a:b", "x=y", "a@b"]]),
        ("awk '{print $1}' f", &[&["awk", "{print $1}", "f"]]),
        ("[ -f x ] && ls", &[&["[", "-f", "x", "]"], &["ls"]]),
        ("echo if then", &[&["echo", "if", "then"]]),
    ];
    for (line, expected) in table {
        assert_eq!(read(line), *expected, "{line:?}");
    }
}

#[test]
fn joints_and_redirections_are_read() {
    let line = parse("a <in >out 2>>log 2>&1 | b || ! c &>all; d 2>/dev/null && e >&2").unwrap();
    let runs: Vec<(Runs, bool, usize)> =
        line.pipelines.iter().map(|p| (p.runs, p.negated, p.commands.len())).collect();
    assert_eq!(
        runs,
        [
            (Runs::Always, false, 2),
            (Runs::AfterFailure, true, 1),
            (Runs::Always, false, 1),
            (Runs::AfterSuccess, false, 1)
        ]
    );
    let shown: Vec<String> = line
        .pipelines
        .iter()
        .flat_map(|pipeline| &pipeline.commands)
        .flat_map(|command| &command.redirections)
        .map(|redirection| match &redirection.to {
            Target::Read(file) => format!("{}<{}", redirection.stream, file.text()),
            Target::Write(file) => format!("{}>{}", redirection.stream, file.text()),
            Target::Append(file) => format!("{}>>{}", redirection.stream, file.text()),
            Target::Stream(other) => format!("{}>&{other}", redirection.stream),
        })
        .collect();
    assert_eq!(shown, ["0<in", "1>out", "2>>log", "2>&1", "1>all", "2>&1", "2>/dev/null", "1>&2"]);
}

#[test]
fn what_has_no_meaning_is_refused_with_what_to_do() {
    let table = [
        ("", "is empty"),
        ("   ", "is empty"),
        ("echo $(id)", "command substitution"),
        ("echo \"$(id)\"", "command substitution"),
        ("echo `id`", "command substitution"),
        ("echo \"`id`\"", "command substitution"),
        ("cat <(ls)", "process substitution"),
        ("ls >(cat)", "process substitution"),
        ("cat <<EOF", "here-document"),
        ("cat <<< x", "here-document"),
        ("ls &", "background"),
        ("sleep 9 & ls", "background"),
        ("ls\nid", "several lines"),
        ("ls \\\nid", "before the end of a line"),
        ("ls\rid", "control character"),
        ("ls\0id", "control character"),
        ("ls \u{85} id", "control character"),
        ("echo $HOME", "variable"),
        ("echo ${HOME}", "variable"),
        ("echo \"$IFS\"", "variable"),
        ("cat$IFS/etc/passwd", "variable"),
        ("echo $'a'", "quote after $"),
        ("(ls)", "bracket"),
        ("f() { ls; }", "bracket"),
        ("{ ls; }", "group"),
        ("if true; then ls; fi", "condition"),
        ("while true; do ls; done", "loop"),
        ("for a in b; do ls; done", "loop"),
        ("[[ a = b ]]", "condition"),
        ("eval ls", "part of a shell"),
        ("exec ls", "part of a shell"),
        (". ./x", "part of a shell"),
        ("source x", "part of a shell"),
        ("export A=b", "part of a shell"),
        ("command ls", "part of a shell"),
        ("'eval' ls", "part of a shell"),
        ("PATH=. ls", "variable PATH"),
        ("LD_PRELOAD=x ls", "variable LD_PRELOAD"),
        ("GIT_PAGER=x git log", "variable GIT_PAGER"),
        ("PAGER=x man ls", "variable PAGER"),
        ("A+=b ls", "part of a variable"),
        ("TERM=x", "without a command"),
        ("> x", "without a command"),
        ("ls 3> x", "unusual redirection"),
        ("ls <> x", "unusual redirection"),
        ("ls 2>&-", "unusual redirection"),
        ("ls >&9", "unusual redirection"),
        ("ls ~", "~"),
        ("ls ~root", "~"),
        ("time ls", "time"),
        ("ls 'a", "not closed"),
        ("ls \"a", "not closed"),
        ("ls a\\", "end of a line"),
        ("ls {a,b}", "alternatives"),
        ("ls x{1..3}", "alternatives"),
        ("* x", "a pattern"),
        ("'' x", "empty"),
        ("ls # x", "comment"),
        ("| ls", "not a complete command line"),
        ("ls |", "not a complete command line"),
        ("ls &&", "not a complete command line"),
    ];
    for (line, reason) in table {
        let refused = parse(line).expect_err(line);
        assert!(refused.0.contains(reason), "{line:?}: {refused}");
        assert!(refused.0.len() < 300, "{refused}");
    }
}

#[test]
fn length_and_nesting_are_bounded_before_the_parser() {
    let small = std::thread::Builder::new().stack_size(256 * 1024);
    let tried = small.spawn(|| {
        for open in
            ["(", "$(", "${", "{ ", "\"$(", "<(", "if ", "while ", "((", "[[ ", "! ", "case x in "]
        {
            let _ = parse(&open.repeat(8 * 1024 / open.len()));
        }
        for line in [
            "~99999999999999999999",
            "x=~99999999999999999999 ls",
            "ls x=~999999999999999999999",
            "a[999999999999999999999]=b ls",
            "ls 99999999999999999999>x",
            "ls {1..99999999999999999999}",
        ] {
            let _ = parse(line);
        }
    });
    tried.unwrap().join().unwrap();
    assert!(parse(&format!("echo {}", "a".repeat(MAX_LINE))).is_err());
    assert!(parse(&vec!["ls"; 51].join(";")).is_err());
    assert!(parse(&vec!["ls"; 50].join(";")).is_ok());
    assert!(parse(&vec!["a"; 1001].join(" ")).is_err());
}

#[test]
fn arguments_stay_apart_where_they_are_joined() {
    let shown = |words: &[&str]| {
        super::shown(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>())
    };
    assert_eq!(shown(&["log", "-3"]), "log -3");
    assert_eq!(shown(&["log -3"]), "'log -3'");
    assert_eq!(shown(&["", "it's", "a\nb"]), "'' 'it'\\''s' 'a\nb'");
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(line in "[ -~\\n\\t]{0,80}") {
        let _ = parse(&line);
    }

    #[test]
    fn texts_of_a_shell_are_read_or_refused(
        parts in prop::collection::vec(
            prop::sample::select(vec![
                "ls", " ", "|", "&&", "||", ";", "&", "'", "\"", "\\", "$", "(", ")", "{", "}", "<", ">", "2",
                "!", "=", "[", "]", "*", "~", "`", "#", "if", "then", "\n", "a", "é", "99999999999999999999",
            ]),
            0..40,
        ),
    ) {
        let _ = parse(&parts.concat());
    }

    #[test]
    fn a_quoted_word_is_read_as_it_was(words in prop::collection::vec("[ -&(-~]{1,20}", 1..5)) {
        let line = format!("echo {}", words.iter().map(|w| format!("'{w}'")).collect::<Vec<_>>().join(" "));
        let read = read(&line);
        prop_assert_eq!(&read[0][1..], &words[..]);
    }
}
