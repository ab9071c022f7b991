use std::time::{Duration, Instant};

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn compiled(source: &str) -> Expression {
    Expression::compile(source, &["output", "inputs"]).unwrap_or_else(|e| panic!("{source}: {e}"))
}

fn refused(source: &str) -> String {
    Expression::compile(source, &["output", "inputs"]).expect_err(source).to_string()
}

#[test]
fn expressions_are_true_or_false_of_json() {
    let output = json!({"n": 5, "big": 18_446_744_073_709_551_615_u64, "x": 1.5, "notes": ["a", "bcd"], "nothing": null,
        "by": {"a": 1, "b": 2}, "rows": [{"id": 1}, {"id": 2}]});
    for (source, expected) in [
        ("output.n + 1 == 6", true),
        ("output.n * 2 > 10", false),
        ("output.x < 2", true),
        ("output.big > 5", true),
        ("output.notes.all(n, size(n) < 4)", true),
        ("output.notes.exists(n, n == 'bcd') && !output.notes.exists(n, n == 'x')", true),
        ("output.notes.exists_one(n, n.startsWith('b'))", true),
        ("output.notes.map(n, size(n)) == [1, 3]", true),
        ("output.notes.map(n, size(n) > 1, n + '!') == ['bcd!']", true),
        ("output.notes.filter(n, n.matches('^b')).size() == 1", true),
        ("output.rows.all(r, output.rows.filter(s, s.id == r.id).size() == 1)", true),
        ("output.by.all(key, output.by[key] < 2)", false),
        ("has(output.n) && !has(output.missing)", true),
        ("output.nothing == null", true),
        ("type(output.n) == int && type(output.x) == double", true),
        ("inputs.name in output.notes", true),
        ("output.missing.all(x, true) || output.n == 5", true),
        ("timestamp('2026-01-01T00:00:00Z') < timestamp('2026-01-02T00:00:00Z')", true),
    ] {
        let inputs = json!({"name": "a"});
        assert_eq!(
            compiled(source).is_true(&[("output", &output), ("inputs", &inputs)]),
            Ok(expected),
            "{source}"
        );
    }
}

#[test]
fn values_are_json_again_with_sorted_keys() {
    let expression = compiled("{'z': output.n + 1, 'a': [1.5, null, 'x', true]}");
    let value = expression.value(&[("output", &json!({"n": 1}))]).unwrap();
    assert_eq!(value.to_string(), r#"{"a":[1.5,null,"x",true],"z":2}"#);
}

#[test]
fn what_does_not_exist_is_found_when_it_is_compiled() {
    for (source, words) in [
        ("", "1 to 4096 bytes"),
        ("output.n >", "line 1"),
        ("ouput.n > 1", "at character 1: unknown variable \"ouput\"; there are output, inputs"),
        ("output.notes.all(n, size(m) < 1)", "unknown variable \"m\""),
        ("output.notes.all(n, true) && n == 1", "unknown variable \"n\""),
        ("lenght(output.notes) > 1", "there is no function \"lenght\""),
        ("output.notes.len() > 1", "there is no function \"len\""),
        ("Thing{a: 1} == output", "no message type"),
        ("@turn()", "line 1"),
    ] {
        let error = refused(source);
        assert!(error.contains(words), "{source}: {error}");
    }
    assert!(refused(&format!("output == '{}'", "x".repeat(MAX_SOURCE))).contains("4096"));
}

#[test]
fn no_source_is_too_deep_for_a_stack() {
    let of = |opening: &str, closing: &str, times: usize| {
        format!("{}1{}", opening.repeat(times), closing.repeat(times))
    };
    for (source, levels) in [("(", ")"), ("[", "]"), ("{1: ", "}"), ("true ? 1 : ", "")]
        .map(|(o, c)| (of(o, c, 300), o))
    {
        assert!(refused(&source).contains("nested more than 64"), "{levels}");
    }
    for (source, what) in [
        (of("(1 + ", ")", 60), "brackets"),
        (of("[", "]", 60), "lists"),
        (of("true ? 1 : ", "", 60), "choices"),
        (of("-", "", 4000), "signs"),
        (of("1 + ", "", 1000), "sums"),
        (of("output == ", "", 400), "comparisons"),
        (of("true && ", "", 500), "ands"),
        (format!("output{}", ".a".repeat(2000)), "selections"),
        (format!("output{}", "[0]".repeat(1000)), "indices"),
        (format!("output{}", ".size()".repeat(500)), "calls"),
    ] {
        if let Ok(expression) = Expression::compile(&source, &["output"]) {
            let _ = expression.value(&[("output", &json!({}))]);
        } else {
            assert!(!["brackets", "lists", "choices"].contains(&what), "{what}");
        }
    }
}

#[test]
fn data_that_do_not_fit_are_errors() {
    let of =
        |source: &str, output: Value| compiled(source).is_true(&[("output", &output)]).unwrap_err();
    assert_eq!(of("output.n > 1", json!({})), ExpressionError::MissingKey("n".into()));
    assert!(matches!(of("output.n > 'x'", json!({"n": 1})), ExpressionError::Failed(_)));
    assert!(matches!(of("output.n", json!({"n": 1})), ExpressionError::NotBoolean(_)));
    assert!(matches!(of("output.n / 0 == 1", json!({"n": 1})), ExpressionError::Failed(_)));
    assert!(matches!(of("output.n * 2 == 1", json!({"n": i64::MAX})), ExpressionError::Failed(_)));
    assert!(
        matches!(of("inputs.n == 1", json!({})), ExpressionError::Failed(_)),
        "a variable that is not given"
    );
    let long = "x".repeat(10_000);
    let message = of("output.n > 1", json!({"n": long})).to_string();
    assert!(message.len() < 2 * MAX_MESSAGE, "{message}");
}

#[test]
fn data_are_counted_only_where_they_are_used() {
    let large = json!({"text": "x".repeat(MAX_DATA)});
    let error = compiled("output.text == ''").is_true(&[("output", &large)]);
    assert_eq!(error, Err(ExpressionError::TooLarge));
    let unused =
        compiled("output.n == 1").is_true(&[("inputs", &large), ("output", &json!({"n": 1}))]);
    assert_eq!(unused, Ok(true));
    let half = json!("x".repeat(MAX_DATA / 2));
    assert_eq!(
        compiled("output + output + output").value(&[("output", &half)]),
        Err(ExpressionError::TooLarge)
    );
}

#[test]
fn loops_end_whatever_they_are_made_of() {
    let many = json!(vec![1; 1000]);
    for source in [
        "output.all(a, output.all(b, output.all(c, true)))",
        "output.exists(a, output.exists(b, output.exists(c, false)))",
        "output.map(a, output.filter(b, output.exists_one(c, true))).size() == 0",
        "output.all(a, output.all(b, output.all(c, true)) || true)",
        "output.all(a, output.all(b, output.all(c, true))) || true",
        "[1].all(one, output.map(a, output.map(b, output.map(c, c))).size() > 0)",
    ] {
        assert_eq!(
            compiled(source).is_true(&[("output", &many)]),
            Err(ExpressionError::TooLong),
            "{source}"
        );
    }
}

#[test]
fn values_do_not_grow_by_a_factor_for_each_word() {
    let ten = format!("[{}]", ["0"; 10].join(","));
    let of = |what: &str, sign: &str| [what; 10].join(sign);
    let chain = |body: String| format!("{ten}{}==[]", format!(".map(x,{body})").repeat(8));
    let inputs = json!("x".repeat(100_000));
    let begun = Instant::now();
    for source in [
        chain(format!("[{}]", of("x", ","))),
        chain(format!("{{1:[{}]}}", of("x", ","))),
        chain(format!(
            "{{{}}}",
            ["0:x", "1:x", "2:x", "3:x", "4:x", "5:x", "6:x", "7:x"].join(",")
        )),
        format!("['a']{} == []", format!(".map(x,{})", of("x", "+")).repeat(8)),
        format!("[[1]]{} == []", format!(".map(x,{})", of("x", "+")).repeat(8)),
        format!(
            "[1].map(a,{}) == []",
            (0..8).fold("a".to_owned(), |x, _| format!("[{}].map(a,[{}])", of("a", ","), x))
        ),
        format!("[{}].size() == 0", vec!["inputs"; 400].join(",")),
        format!("[{}].size() == 0", vec!["inputs + inputs"; 200].join(",")),
    ] {
        let outcome = compiled(&source).is_true(&[("inputs", &inputs)]);
        assert!(
            matches!(outcome, Err(ExpressionError::TooLarge | ExpressionError::TooLong)),
            "{source:.80}: {outcome:?}"
        );
    }
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    let many = json!(vec!["a word"; 20_000]);
    for source in [
        "output.map(x, x + '!').size() == 20000",
        "output.filter(x, x == 'a word').size() == 20000",
        "type(1) in [int, double] && [type(1), string].size() == 2",
    ] {
        assert_eq!(compiled(source).is_true(&[("output", &many)]), Ok(true), "{source}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_long_evaluation_leaves_its_thread_to_others() {
    let many = json!(vec![1; 1000]);
    let long = tokio::spawn(async move {
        compiled("output.all(a, output.all(b, true))").is_true(&[("output", &many)])
    });
    tokio::spawn(async {}).await.unwrap();
    assert_eq!(long.await.unwrap(), Err(ExpressionError::TooLong));
}

#[test]
fn data_are_as_deep_as_json_gets() {
    let deep: Value =
        serde_json::from_str(&format!("{}1{}", "[".repeat(127), "]".repeat(127))).unwrap();
    assert_eq!(
        compiled("output == inputs").is_true(&[("output", &deep), ("inputs", &deep)]),
        Ok(true)
    );
    assert_eq!(compiled("output").value(&[("output", &deep)]), Ok(deep));
}

proptest! {
    /// Whatever is written: it is refused or evaluated, and nothing panics.
    #[test]
    fn no_source_and_no_data_do_harm(source in "[a-z0-9_.()\\[\\]{}'\"+*/%<>=!&|?:, @-]{0,60}|output(\\.[a-z]{1,4}){0,2}\\.(all|map|filter|exists)\\([a-z], [a-z0-9 .<>=+]{1,20}\\)",
        number in any::<i64>(), text in "\\PC{0,20}") {
        if let Ok(expression) = Expression::compile(&source, &["output"]) {
            let output = json!({"a": number, "b": [text, number], "c": null});
            let _ = expression.is_true(&[("output", &output)]);
            let _ = expression.value(&[("output", &output)]);
        }
    }
}
