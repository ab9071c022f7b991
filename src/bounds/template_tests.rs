use serde_json::json;

use super::*;

#[test]
fn what_is_filled_in_stays_one_segment() {
    let templates = Templates::new(Undefined::Tested).percent_encoding();
    let args = json!({"a": "../x?y#z%2e é|", "n": 5});
    let render = |source: &str| templates.render_source(source, &[("args", &args)]);
    let path = render("/items:x/{{ args.a }}/{{ args.n }}/{{ args.a | safe }}").unwrap();
    let a = "..%2Fx%3Fy%23z%252e%20%C3%A9%7C";
    assert_eq!(path, format!("/items:x/{a}/5/{a}"));
    assert!(render("/{{ args.b }}").is_err());
}

#[test]
fn what_is_rendered_has_an_end() {
    let templates = Templates::new(Undefined::Strict);
    let x = json!("x".repeat(10_000));
    let render = |source: &str| templates.render_source(source, &[("x", &x)]);
    assert_eq!(render("{{ x|length }}").unwrap(), "10000");
    let long = render("{% for i in range(1000) %}{{ x }}{% endfor %}").unwrap_err();
    assert!(long.kind.contains("more than 4194304 bytes"), "{long:?}");
    assert!(
        render("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}")
            .is_err()
    );
    for (source, name) in [("{{ y }}", "y"), ("{{ y.z }}", "y"), ("a\n{{ x.a.b | upper }}", "x.a")]
    {
        let undefined = render(source).unwrap_err().detail.unwrap_or_default();
        assert!(undefined.contains(&format!("`{name}` is undefined")), "{source}: {undefined}");
    }
    assert!(render(&"x".repeat(MAX_SOURCE + 1)).is_err());
    assert!(render(&format!("{{{{ {}1{} }}}}", "(".repeat(50_000), ")".repeat(50_000))).is_err());
}

/// On this thread, which has a stack of 2 MiB.
#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn no_template_is_too_deep_for_a_stack() {
    let templates = Templates::new(Undefined::Tested);
    let a = json!({"a": [1]});
    let of = |opening: &str, times: usize, closing: &str| {
        format!("{{{{ {}1{} }}}}", opening.repeat(times), closing.repeat(times))
    };
    let after = |what: &str, times: usize| format!("{{{{ a{} }}}}", what.repeat(times));
    let nested = |opening: &str, times: usize, closing: &str| {
        format!("{}1{}", opening.repeat(times), closing.repeat(times))
    };
    let elif = |times: usize| format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(times));
    for (large, most) in [
        (of("not ", 5_000, ""), of("not ", 200, "")),
        (of("1~", 30_000, ""), of("1~", 200, "")),
        (of("1+", 30_000, ""), of("1+", 200, "")),
        (of("-", 60_000, ""), of("-", 200, "")),
        (of("1**", 20_000, ""), of("1**", 200, "")),
        (of("1 and ", 20_000, ""), of("1 and ", 200, "")),
        (of("1 if 1 else ", 20_000, ""), of("1 if 1 else ", 100, "")),
        (of("1 == ", 20_000, ""), of("1 == ", 200, "")),
        (of("1 * ", 20_000, ""), of("1 * ", 200, "")),
        (after("[0]", 20_000), after("[0]", 200)),
        (after("[0:]", 20_000), after("[0:]", 200)),
        (after(".a", 20_000), after(".a", 200)),
        (after("|e", 20_000), after("|e", 200)),
        (after("()", 20_000), after("()", 200)),
        (after(" is defined", 20_000), after(" is defined", 200)),
        (of("(", 2_000, ")"), of("(", 32, ")")),
        (of("[", 2_000, "]"), of("[", 32, "]")),
        (of("{1:", 2_000, "}"), of("{1:", 32, "}")),
        (of("a(", 2_000, ")"), of("a(", 32, ")")),
        (of("a[not (-", 2_000, ")]"), of("a[not (-", 16, ")]")),
        (elif(4_500), elif(63)),
        (nested("{% if 1 %}", 4_500, "{% endif %}"), nested("{% if 1 %}", 64, "{% endif %}")),
        (
            nested("{% for b in a %}", 4_500, "{% endfor %}"),
            nested("{% for b in a %}", 64, "{% endfor %}"),
        ),
        (nested("{% set x %}", 4_500, "{% endset %}"), nested("{% set x %}", 64, "{% endset %}")),
        (
            nested("{% set x|replace(b='c') %}", 4_500, "{% endset %}"),
            nested("{% set x|indent(width=1) %}", 64, "{% endset %}"),
        ),
        (
            nested("{% filter e %}", 4_500, "{% endfilter %}"),
            nested("{% filter e %}", 64, "{% endfilter %}"),
        ),
        (
            nested("{% call a() %}", 4_500, "{% endcall %}"),
            nested("{% call a() %}", 64, "{% endcall %}"),
        ),
        (
            nested("{% macro m() %}", 4_500, "{% endmacro %}"),
            nested("{% macro m() %}", 64, "{% endmacro %}"),
        ),
        (
            nested("{% with b = 1 %}", 4_500, "{% endwith %}"),
            nested("{% with b = 1 %}", 64, "{% endwith %}"),
        ),
        (
            nested(&format!("{{% if {}1 %}}", "not ".repeat(190)), 1_000, ""),
            nested(&format!("{{% if {}1 %}}", "not ".repeat(190)), 64, "{% endif %}"),
        ),
        (
            format!("{{{{ '{}' }}}}", "x".repeat(9_000)),
            format!("{{{{ '{}' }}}}", "x".repeat(8_000)),
        ),
    ] {
        let refused = templates.check(&large).unwrap_err();
        assert!(refused.kind.starts_with("it has more than "), "{large:.60}: {refused}");
        if let Err(refused) = templates.check(&most) {
            assert!(!refused.kind.starts_with("it has more than "), "{most:.60}: {refused}");
        }
        let _ = templates.render_source(&most, &[("a", &a)]);
        let inside = |source: &str| source.trim_matches(['{', '}']).to_owned();
        assert!(!templates.is_expression(&inside(&large)), "{large:.60}");
        let _ = templates.value(&inside(&most), &[("a", &a)]);
        let mut templates = Templates::new(Undefined::Strict);
        assert!(templates.add("x", &large).is_err(), "{large:.60}");
        let _ = templates.add("x", &most);
    }
    for endless in [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m() %}{% call m() %}{% endcall %}{% endmacro %}{{ m() }}",
        "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    ] {
        templates.check(endless).unwrap();
        templates.render_source(endless, &[]).unwrap_err();
    }
}

#[test]
fn intermediate_values_are_bounded() {
    let templates = Templates::new(Undefined::Tested).with_fromjson();
    let inputs = json!({"doc": "a".repeat(400_000), "old": "a", "new": "b".repeat(400_000),
        "many": vec!["a"; 50_000], "n": 999_999_999, "breaks": "\n".repeat(400_000)});
    let often = |statement: &str, times: usize| statement.repeat(times);
    let doubled = format!("{{% set x = 'ab' %}}{}", often("{% set x = x ~ x %}", 60));
    let added =
        format!("{{% set x = [1] %}}{}{{{{ x|length }}}}", often("{% set x = x + x %}", 60));
    let listed =
        format!("{{% set x = 1 %}}{}{{{{ x == x }}}}", often("{% set x = [x, x, x, x] %}", 60));
    let mapped = format!("{{% set x = 1 %}}{}", often("{% set x = {'a': x, 'b': x} %}", 60));
    let given = format!("{{% set x = 1 %}}{}", often("{% set x = dict(a=x, b=x) %}", 60));
    let captured =
        format!("{{% set x = 'ab' %}}{}", often("{% set x %}{{ x }}{{ x }}{% endset %}", 60));
    let filtered =
        format!("{{% set x = 'a' %}}{}", often("{% set x = x|replace('a', 'aa') %}", 60));
    let nested = format!("{{% set x = 1 %}}{}", often("{% set x = [x] %}", 200));
    let raw = format!(
        "{{% set x %}}{{% for i in range(9999) %}}{}{{% endfor %}}{{% endset %}}",
        "r".repeat(60_000)
    );
    for source in [
        "{{ inputs.doc | replace(inputs.old, inputs.new) }}",
        "{{ inputs.doc | replace('', inputs.new) }}",
        "{{ [inputs.doc] | map('replace', inputs.old, inputs.new) | list }}",
        "{{ inputs.many | map('replace', 'a', inputs.new) | list | length }}",
        "{{ 'a' | indent(999999999) }}",
        "{{ 'a' | indent(inputs.n, true) }}",
        "{{ inputs.breaks | indent(256, true, true) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ [1] | tojson(indent=999999999) }}",
        "{{ [1] | tojson(999999999) }}",
        "{{ [1] | batch(999999999, 1) }}",
        "{{ [1] | slice(999999999) }}",
        "{{ 'a' * 999999999 }}",
        "{{ 999999999 * 'a' }}",
        "{{ ('a' * 4000000) * 4000000 }}",
        "{{ inputs.doc * 100 }}",
        "{{ [1] * 999999999 }}",
        "{{ [inputs.doc] * 100 }}",
        "{{ inputs.many | join(inputs.new) }}",
        "{{ ([inputs.doc] * 10 + [inputs.doc] * 10) | join }}",
        "{{ [inputs.doc] * 10 | map('upper') | list }}",
        "{{ inputs.many | sum(start='') }}",
        "{{ inputs.doc | list }}",
        "{{ inputs.doc | split('') | length }}",
        "{{ inputs.breaks | lines | length }}",
        "{{ range(999999999) }}",
        "{{ [inputs.many, inputs.many, inputs.many, inputs.many] | length }}",
        "{{ dict(*inputs.many) }}",
        "{{ debug() }}",
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=1) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}",
        "{% macro m(x) %}{{ m(x ~ x) }}{% endmacro %}{{ m('a' * 1000000) }}",
        "{% for x in ['a' * 100000] recursive %}{{ loop([x ~ x]) }}{% endfor %}",
        "{% for i in range(9999) %}{% set x = inputs.doc ~ i %}{% endfor %}",
        "{% for i in range(9999) %}{% set x %}{{ inputs }}{% endset %}{% endfor %}",
        &doubled,
        &added,
        &listed,
        &mapped,
        &given,
        &captured,
        &filtered,
        &nested,
        &raw,
    ] {
        let begun = std::time::Instant::now();
        assert!(templates.render_source(source, &[("inputs", &inputs)]).is_err(), "{source:.200}");
        assert!(begun.elapsed().as_secs() < 10, "{source:.200}");
    }
}

#[test]
fn expressions_say_what_they_always_said() {
    let templates = Templates::new(Undefined::Tested).with_fromjson();
    let x = json!({"a": "b", "n": 3, "f": 1.5, "l": ["x", "y"], "t": "one\n\ntwo\r\n", "o": [{"k": 1}, {"k": 2}]});
    let mut wrong = Vec::new();
    for (source, expected) in [
        ("{{ x.a ~ x.n ~ none }}", "b3None"),
        ("{{ x.n + 1 }} {{ x.f + x.n }} {{ 'a' + x.a }} {{ [1] + [2] }}", "4 4.5 ab [1, 2]"),
        (
            "{{ x.n * 2 }} {{ x.f * 2 }} {{ '-' * 3 }} {{ 2 * 'ab' }} {{ [0] * 2 }}",
            "6 3.0 --- abab [0, 0]",
        ),
        ("{{ x.n * 99999999999999999999 }} {{ -x.n }} {{ 2 ** 3 }}", "299999999999999999997 -3 8"),
        ("{{ x.l | join(', ') }}{{ x.l | join }}{{ x.o | join('-', attribute='k') }}", "x, yxy1-2"),
        ("{{ x.t | indent }}|{{ x.t | indent(2, true, true) }}", "one\n\n    two|  one\n  \n  two"),
        ("{{ 'a.b.c' | split('.') | last }} {{ 'a b' | split | length }}", "c 2"),
        ("{{ x.t | lines | select | list }}", "['one', 'two']"),
        ("{{ x.l | tojson }} {{ {'a': 1} | tojson(indent=1) }}", "[\"x\", \"y\"] {\n \"a\": 1\n}"),
        ("{{ x.a | replace('b', 'cc') | upper }}", "CC"),
        (
            "{{ [1, 2, 3] | batch(2) | list }} {{ [1, 2, 3] | sum }} {{ x.o | sum('k') }}",
            "[[1, 2], [3]] 6 3",
        ),
        ("{{ x.l[0:1] }} {{ x.a[0] }} {{ x.l[-1] }} {{ (1, 2) }}", "['x'] b y (1, 2)"),
        ("{{ x.missing | default('d') }} {{ x.missing is defined }} {{ 1 if false }}", "d False "),
        ("{% for i in range(3) %}{{ loop.index }}{{ ',' if not loop.last }}{% endfor %}", "1,2,3"),
        ("{% for l in x.l if l != 'x' %}{{ l }}{% else %}none{% endfor %}", "y"),
        (
            "{% for i in [[1, [[2]]]] recursive %}{{ i[0] }}{{ loop(i[1]) if i[1] }}{% endfor %}",
            "12",
        ),
        (
            "{% macro m(a, b='c') %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ m(1) }}{% call m(2, b='d') %}!{% endcall %}",
            "1c2d!",
        ),
        ("{% set a, b = x.l %}{{ b }}{% set c %}<{{ a }}>{% endset %}{{ c }}", "y<x>"),
        ("{% filter upper %}a{{ x.a }}{% endfilter %}{% with q = 1 %}{{ q }}{% endwith %}", "AB1"),
        (
            "{% if x.n > 5 %}a{% elif 1 < x.n < 5 %}b{% else %}c{% endif %}{# no #}{% raw %}{{{% endraw %}",
            "b{{",
        ),
        ("{{ ('[1, {\"a\": 2}]' | fromjson)[1].a }}", "2"),
    ] {
        let made = templates.render_source(source, &[("x", &x)]);
        if made.as_deref() != Ok(expected) {
            wrong.push((source, made));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let mut templates = templates;
    let asked = templates.add("t", "{% set a = b %}{{ a }}{% for c in d %}{{ c ~ loop.index }}{% endfor %}{{ c }}{% macro m(e) %}{{ e ~ f }}{% endmacro %}{{ m(range(g)) }}{% with h = i %}{{ h }}{% endwith %}");
    assert_eq!(asked.unwrap(), ["b", "c", "d", "f", "g", "i"]);
}
