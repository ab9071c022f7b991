use std::time::{Duration, Instant};

use super::*;

fn page() -> Url {
    Url::parse("https://site.example/docs/page.html").unwrap()
}

fn body(html: &str) -> String {
    rewritten(html, &page()).1
}

#[test]
fn pages_are_written_anew() {
    let table = [
        ("<p>a<p>b", "<p>a</p><p>b</p>"),
        ("<P CLASS='x' onclick=evil()>a</P>", "<p class=\"x\">a</p>"),
        ("<b>a<p>b</b>c</p>", "<b>a<p>b</p></b>c"),
        ("<ul><li>a<li>b<ul><li>c</ul></ul>", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>"),
        ("<div>a</span>b</div></div>c", "<div>ab</div>c"),
        (
            "<a href=../x?a=1&amp;b=2>l<a href='javascript:0'>m",
            "<a href=\"https://site.example/x?a=1&amp;b=2\">l</a><a>m</a>",
        ),
        ("<script>if (a < b) { '</div>' }</script >x", "x"),
        ("<style>a</STYLE>x<!-- <p> -->y<!doctype html>z<?x?>", "xyz"),
        ("a < b <3 & c", "a &lt; b &lt;3 & c"),
        (
            "<table><b><tr><td>1<td>2<tr><td><div>3</table>4",
            "<table><tr><td>1</td><td>2</td></tr><tr><td><div>3</div></td></tr></table>4",
        ),
        ("<td>x</td><tr>y", "xy"),
        ("<custom-element>a</custom-element>b", " a b"),
        ("<aääääääääääääääää>b", " b"),
        (
            "<img src=/i.png alt='a \"b\"'><br/>",
            "<img src=\"https://site.example/i.png\" alt=\"a &quot;b&quot;\"><br>",
        ),
        ("<p", "<p></p>"),
        ("<p class=\"x", "<p class=\"x\"></p>"),
        ("</", ""),
        ("<", "&lt;"),
        ("<title>T &amp;\n t</title>x", "x"),
    ];
    for (html, expected) in table {
        assert_eq!(body(html), expected, "{html}");
    }
    assert_eq!(rewritten("<title>T &amp;\n t</title>x", &page()).0, "T & t");
}

#[test]
fn pages_are_read() {
    let html = "<html><head><title>Guide</title></head><body><nav><a href=/>Home</a></nav>\
        <h1>Guide</h1><p>Some <b>bold</b> text with a <a href='next'>link</a>.</p>\
        <ul><li>one<li>two</ul><pre><code>x &lt; y</code></pre></body></html>";
    let page = readable(html, &page()).unwrap();
    assert_eq!(page.title, "Guide");
    for part in
        ["# Guide", "**bold**", "[link](https://site.example/docs/next)", "one", "two", "x < y"]
    {
        assert!(page.markdown.contains(part), "{part}: {}", page.markdown);
    }
    let sentence = "This is a sentence of an article that goes on, and on, until it is long. ";
    let article = format!(
        "<body><nav>Menu</nav><article><h1>News</h1><p>{}</p><p>{}</p></article><footer>Imprint</footer></body>",
        sentence.repeat(10),
        sentence.repeat(10)
    );
    let page = readable(&article, &self::page()).unwrap();
    assert!(page.markdown.contains("This is a sentence"), "{}", page.markdown);
    assert!(!page.markdown.contains("Imprint"), "{}", page.markdown);
}

/// What made parsers of pages slow, large or crash.
#[test]
fn hostile_pages_end() {
    let formats = (0..40).map(|i| format!("<b id={i}><i id={i}>")).collect::<Vec<_>>().concat();
    let attributes = (0..4_000).map(|i| format!(" a{i}=b")).collect::<Vec<_>>().concat();
    let pages = [
        "<div>".repeat(20_000),
        format!("{}{}", "<div>".repeat(10_000), "</div>".repeat(10_000)),
        "<b>".repeat(20_000),
        "<p><b>".repeat(10_000),
        format!("{formats}{}", "<p>x".repeat(4_000)),
        format!("<table>{formats}{}", "<tr></tr>x".repeat(4_000)),
        "<table><tr><td>".repeat(6_000),
        "<ul><li>".repeat(10_000),
        "<a href=x>".repeat(10_000),
        "</p>".repeat(20_000),
        "<".repeat(60_000),
        "<!--".repeat(20_000),
        "<script>".repeat(10_000),
        "</script".repeat(10_000),
        "<svg><math>".repeat(6_000),
        "<select><option>".repeat(6_000),
        format!("<p{attributes}>x"),
        "<p a=\"".repeat(10_000),
        "&amp;".repeat(20_000),
        "\u{0}<\u{0}p\u{0}>".repeat(10_000),
    ];
    for html in &pages {
        let since = Instant::now();
        let page = readable(html, &page());
        let took = since.elapsed();
        let shown = &html[..html.floor_char_boundary(40)];
        assert!(page.is_ok(), "{shown}");
        assert!(took < Duration::from_mins(1), "{shown}: {took:?}");
    }
}
