//! Pages of others as readable Markdown.
//!
//! A page is rewritten before a library sees it: only known elements, properly nested and to a
//! bounded depth, with absolute addresses, without scripts and styles. So the parser never has to
//! repair nesting, which is how small pages become large trees, and its recursion stays shallow. How
//! an element is rendered is decided by the library.

use dom_query::Document;
use dom_smoothie::{Config, Readability, TextMode};
use url::Url;

use super::{Refused, off_worker, on_large_stack};

/// Elements within one another; deeper ones are dropped, and their text kept.
const MAX_DEPTH: usize = 64;
/// Bytes of a rewritten page. The rest is dropped: no result shows as much.
const MAX_REWRITTEN: usize = 512 * 1024;
/// Elements of a page; further ones are dropped, and their text kept.
const MAX_ELEMENTS: usize = 50_000;
/// `&` characters in the text of a page: a library may search the rest of the page for each of them.
const MAX_AMPERSANDS: usize = 5000;
/// Bytes of an attribute.
const MAX_ATTRIBUTE: usize = 2048;
/// Attributes of one element that are looked at.
const MAX_ATTRIBUTES: usize = 32;
/// Bytes of an article under which the whole page is shown instead.
const LEAST_ARTICLE: usize = 400;

/// Elements that are kept.
const KEPT: &[&str] = &[
    "a",
    "abbr",
    "address",
    "article",
    "aside",
    "b",
    "blockquote",
    "br",
    "caption",
    "cite",
    "code",
    "dd",
    "del",
    "details",
    "dfn",
    "div",
    "dl",
    "dt",
    "em",
    "figcaption",
    "figure",
    "footer",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "header",
    "hr",
    "i",
    "img",
    "ins",
    "kbd",
    "li",
    "main",
    "mark",
    "nav",
    "ol",
    "p",
    "pre",
    "q",
    "s",
    "samp",
    "section",
    "small",
    "span",
    "strong",
    "sub",
    "summary",
    "sup",
    "table",
    "tbody",
    "td",
    "th",
    "thead",
    "tr",
    "ul",
];
/// Elements that are left out with everything in them.
const LEFT_OUT: &[&str] = &[
    "script", "style", "template", "svg", "math", "iframe", "object", "noembed", "noframes", "xmp",
    "textarea", "select", "canvas",
];
/// Elements that end an open paragraph.
const BLOCKS: &[&str] = &[
    "address",
    "article",
    "aside",
    "blockquote",
    "details",
    "div",
    "dl",
    "figcaption",
    "figure",
    "footer",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "header",
    "hr",
    "li",
    "main",
    "nav",
    "ol",
    "p",
    "pre",
    "section",
    "summary",
    "table",
    "ul",
    "dd",
    "dt",
    "caption",
];

/// A page as a reader sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    pub title: String,
    /// Its main text, or all of its text if no main text is found.
    pub markdown: String,
}

/// A page as Markdown, its links resolved against its address `from`. May take long, so it belongs on
/// the blocking pool.
///
/// # Errors
/// The library fails on the page.
pub fn readable(html: &str, from: &Url) -> Result<Page, Refused> {
    let (title, mut body) = rewritten(html, from);
    body.truncate(body.floor_char_boundary(MAX_REWRITTEN));
    let shown_title = escaped(&title);
    let whole = format!(
        "<!DOCTYPE html><html><head><title>{shown_title}</title></head><body>{body}</body></html>"
    );
    let markdown = off_worker(|| on_large_stack(|| converted(&whole)))
        .ok_or_else(|| Refused("cannot be made readable".to_owned()))?;
    Ok(Page { title, markdown })
}

fn converted(html: &str) -> String {
    let config = Config {
        disable_json_ld: true,
        text_mode: TextMode::Markdown,
        max_elements_to_parse: 2 * MAX_ELEMENTS,
        ..Config::default()
    };
    let article = Readability::new(html, None, Some(config)).ok().and_then(|mut r| r.parse().ok());
    match article {
        Some(article) if article.text_content.len() >= LEAST_ARTICLE => {
            article.text_content.trim().to_owned()
        }
        _ => Document::from(html).md(Some(&["head"])).trim().to_owned(),
    }
}

/// The title of a page, and its body written anew.
fn rewritten(html: &str, from: &Url) -> (String, String) {
    let mut writer = Writer {
        from,
        out: String::with_capacity(html.len() + html.len() / 8),
        open: Vec::new(),
        beyond: 0,
        elements: 0,
        ampersands: 0,
    };
    let mut title = None;
    let mut rest = html;
    while let Some(at) = rest.find('<') {
        writer.text(&rest[..at]);
        rest = &rest[at..];
        rest = match Tag::read(rest) {
            Read::Tag(tag, behind) if !tag.closes && tag.name == "title" => {
                let (text, behind) = until_closed(behind, "title");
                title.get_or_insert_with(|| collapsed(text));
                behind
            }
            Read::Tag(tag, behind) if !tag.closes && LEFT_OUT.contains(&tag.name.as_str()) => {
                let is_empty = tag.closes_itself && matches!(tag.name.as_str(), "svg" | "math");
                if is_empty { behind } else { until_closed(behind, &tag.name).1 }
            }
            Read::Tag(tag, behind) => {
                if tag.closes {
                    writer.close(&tag.name);
                } else {
                    writer.open(&tag);
                }
                behind
            }
            Read::Nothing(behind) => behind,
            Read::Text => {
                writer.out.push_str("&lt;");
                &rest[1..]
            }
        };
    }
    writer.text(rest);
    while writer.pop().is_some() {}
    (title.unwrap_or_default(), writer.out)
}

/// A tag as it was written.
struct Tag<'a> {
    /// In lower case.
    name: String,
    closes: bool,
    closes_itself: bool,
    attributes: Vec<(String, &'a str)>,
}

enum Read<'a> {
    Tag(Tag<'a>, &'a str),
    /// A comment, or something like one.
    Nothing(&'a str),
    /// A plain `<`.
    Text,
}

impl<'a> Tag<'a> {
    /// Parses what begins at a `<`, and returns it with the rest of the text.
    fn read(text: &'a str) -> Read<'a> {
        let after =
            |text: &'a str, mark: &str| text.find(mark).map_or("", |at| &text[at + mark.len()..]);
        if let Some(comment) = text.strip_prefix("<!--") {
            return Read::Nothing(after(comment, "-->"));
        }
        let closes = text.starts_with("</");
        let inside = &text[if closes { 2 } else { 1 }..];
        if !inside.starts_with(|c: char| c.is_ascii_alphabetic()) {
            let is_odd = closes || inside.starts_with(['!', '?']);
            return if is_odd { Read::Nothing(after(text, ">")) } else { Read::Text };
        }
        let end = inside
            .find(|c: char| c.is_ascii_whitespace() || c == '/' || c == '>')
            .unwrap_or(inside.len());
        let mut tag = Tag {
            name: inside[..inside.floor_char_boundary(end.min(32))].to_ascii_lowercase(),
            closes,
            closes_itself: false,
            attributes: Vec::new(),
        };
        let behind = tag.read_attributes(&inside[end..]);
        Read::Tag(tag, behind)
    }

    /// What stands behind the tag's end.
    fn read_attributes(&mut self, mut rest: &'a str) -> &'a str {
        loop {
            rest = rest.trim_start_matches(|c: char| c.is_ascii_whitespace());
            if let Some(behind) = rest.strip_prefix('>') {
                return behind;
            }
            if let Some(behind) = rest.strip_prefix("/>") {
                self.closes_itself = true;
                return behind;
            }
            if let Some(behind) = rest.strip_prefix('/') {
                rest = behind;
                continue;
            }
            if rest.is_empty() {
                return rest;
            }
            let is_end = |c: char| c.is_ascii_whitespace() || matches!(c, '=' | '>' | '/');
            // An `=` in front is part of the name.
            let first = rest.chars().next().map_or(0, char::len_utf8);
            let end = rest[first..].find(is_end).map_or(rest.len(), |at| at + first);
            let (name, behind) = rest.split_at(end);
            let value_at = behind.trim_start_matches(|c: char| c.is_ascii_whitespace());
            let (value, behind) = match value_at.strip_prefix('=') {
                Some(value) => {
                    read_value(value.trim_start_matches(|c: char| c.is_ascii_whitespace()))
                }
                None => ("", behind),
            };
            if self.attributes.len() < MAX_ATTRIBUTES && name.len() <= 32 {
                self.attributes.push((name.to_ascii_lowercase(), value));
            }
            rest = behind;
        }
    }
}

fn read_value(text: &str) -> (&str, &str) {
    for quote in ['"', '\''] {
        if let Some(inside) = text.strip_prefix(quote) {
            return inside.split_once(quote).unwrap_or((inside, ""));
        }
    }
    let end = text.find(|c: char| c.is_ascii_whitespace() || c == '>').unwrap_or(text.len());
    text.split_at(end)
}

/// What stands in front of and behind the tag that closes an element.
fn until_closed<'a>(text: &'a str, name: &str) -> (&'a str, &'a str) {
    for (at, _) in text.match_indices("</") {
        let inside = &text.as_bytes()[at + 2..];
        let is_meant = inside.len() >= name.len()
            && inside[..name.len()].eq_ignore_ascii_case(name.as_bytes())
            && inside.get(name.len()).is_none_or(|b| !b.is_ascii_alphanumeric());
        if is_meant {
            let behind = &text[at..];
            return (&text[..at], behind.find('>').map_or("", |end| &behind[end + 1..]));
        }
    }
    (text, "")
}

/// Writes a body whose elements are closed in the order in which they were opened.
struct Writer<'a> {
    from: &'a Url,
    out: String,
    open: Vec<&'static str>,
    /// Elements that are open and were dropped for being too deep.
    beyond: usize,
    elements: usize,
    /// Of the text.
    ampersands: usize,
}

impl Writer<'_> {
    fn text(&mut self, text: &str) {
        let left = MAX_AMPERSANDS.saturating_sub(self.ampersands);
        match text.match_indices('&').nth(left) {
            None => {
                self.ampersands += text.matches('&').count();
                self.out.push_str(text);
            }
            Some((at, _)) => {
                self.ampersands = MAX_AMPERSANDS;
                self.out.push_str(&text[..at]);
                self.out.push_str(&text[at..].replace('&', " "));
            }
        }
    }

    fn pop(&mut self) -> Option<&'static str> {
        let name = self.open.pop()?;
        self.out.push_str("</");
        self.out.push_str(name);
        self.out.push('>');
        Some(name)
    }

    /// Closes elements until that many are open.
    fn close_down_to(&mut self, depth: usize) {
        while self.open.len() > depth {
            self.pop();
        }
    }

    /// The innermost open element among `names` that lies within the innermost one of `held_by`.
    fn innermost(&self, names: &[&str], held_by: &[&str]) -> Option<usize> {
        for (at, open) in self.open.iter().enumerate().rev() {
            if names.contains(open) {
                return Some(at);
            }
            if held_by.contains(open) {
                return None;
            }
        }
        None
    }

    fn open(&mut self, tag: &Tag<'_>) {
        let Some(name) = KEPT.iter().find(|kept| **kept == tag.name).copied() else {
            // Words on both sides of an unknown element are not one word.
            self.out.push(' ');
            return;
        };
        if self.elements >= MAX_ELEMENTS {
            self.out.push(' ');
            return;
        }
        self.make_room_for(name);
        let in_table =
            self.open.last().is_some_and(|top| matches!(*top, "table" | "thead" | "tbody" | "tr"));
        let of_table = matches!(name, "thead" | "tbody" | "tr" | "td" | "th" | "caption");
        if of_table != in_table {
            return;
        }
        let is_void = matches!(name, "br" | "hr" | "img");
        if !is_void && self.open.len() >= MAX_DEPTH {
            self.beyond += 1;
            return;
        }
        self.elements += 1;
        self.out.push('<');
        self.out.push_str(name);
        self.attributes(name, tag);
        self.out.push('>');
        if !is_void {
            self.open.push(name);
        }
    }

    /// Closes the elements that end where an element of this name begins.
    fn make_room_for(&mut self, name: &str) {
        const CELLS: [&str; 4] = ["td", "th", "caption", "table"];
        let ended = match name {
            "li" => self.innermost(&["li"], &["ul", "ol", "td", "th", "table"]),
            "dd" | "dt" => self.innermost(&["dd", "dt"], &["dl", "td", "th", "table"]),
            "td" | "th" => self.innermost(&["td", "th", "caption"], &["table"]),
            "tr" => self.innermost(&["tr", "caption"], &["table"]),
            "thead" | "tbody" => self.innermost(&["thead", "tbody", "caption"], &["table"]),
            "a" => self.innermost(&["a"], &CELLS),
            "h1" | "h2" | "h3" | "h4" | "h5" | "h6" => {
                self.innermost(&["h1", "h2", "h3", "h4", "h5", "h6"], &CELLS)
            }
            _ => None,
        };
        if let Some(depth) = ended {
            self.close_down_to(depth);
        }
        if BLOCKS.contains(&name)
            && let Some(depth) = self.innermost(&["p"], &CELLS)
        {
            self.close_down_to(depth);
        }
    }

    fn close(&mut self, name: &str) {
        if !KEPT.contains(&name) || matches!(name, "br" | "hr" | "img") {
            self.out.push(' ');
            return;
        }
        if self.beyond > 0 {
            self.beyond -= 1;
            return;
        }
        let held_by: &[&str] = match name {
            "table" => &[],
            "thead" | "tbody" | "tr" | "td" | "th" | "caption" => &["table"],
            _ => &["td", "th", "caption", "table"],
        };
        if let Some(depth) = self.innermost(&[name], held_by) {
            self.close_down_to(depth);
        }
    }

    fn attributes(&mut self, name: &str, tag: &Tag<'_>) {
        for (attribute, value) in &tag.attributes {
            let value = *value;
            if value.len() > MAX_ATTRIBUTE {
                continue;
            }
            let shown = match (name, attribute.as_str()) {
                ("a", "href") | ("img", "src") => self.absolute(value),
                ("img", "alt") | (_, "id" | "class" | "role") => Some(value.to_owned()),
                _ => None,
            };
            if let Some(shown) = shown {
                self.out.push(' ');
                self.out.push_str(attribute);
                self.out.push_str("=\"");
                self.out.push_str(&shown.replace('"', "&quot;").replace('<', "&lt;"));
                self.out.push('"');
            }
        }
    }

    /// An address that can be asked for.
    fn absolute(&self, written: &str) -> Option<String> {
        let url = self.from.join(&written.trim().replace("&amp;", "&")).ok()?;
        let is_shown = matches!(url.scheme(), "http" | "https" | "mailto");
        is_shown.then(|| url.as_str().replace('&', "&amp;"))
    }
}

fn escaped(text: &str) -> String {
    text.replace('<', "&lt;")
}

/// Text on one line.
fn collapsed(text: &str) -> String {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let text = [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#39;", "'"), ("&amp;", "&")]
        .iter()
        .fold(text, |text, (entity, plain)| text.replace(entity, plain));
    text.chars().take(300).collect()
}

#[cfg(test)]
#[path = "html_tests.rs"]
mod tests;
