//! `robots.txt` (RFC 9309): which paths a host excludes for which user agents.
//!
//! The rules of a host are cached. A host without such a file permits everything; one that cannot be
//! reached permits nothing.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use url::Url;

use crate::outbound::Response;

/// Bytes of a file that are read.
pub(super) const MAX_FILE: usize = 256 * 1024;
/// Rules of a host, with the user agents that they are for.
const MAX_RULES: usize = 2000;
/// Hosts whose rules are kept.
const MAX_HOSTS: usize = 500;
/// How long.
const KEPT: Duration = Duration::from_hours(1);

/// The cached rules of hosts.
#[derive(Default)]
pub(super) struct Robots {
    hosts: Mutex<HashMap<String, (Instant, Rules)>>,
}

/// The rules of a host, in groups for named user agents or for all.
#[derive(Debug, Default, Clone)]
struct Rules {
    groups: Vec<(Vec<String>, Vec<Rule>)>,
    forbids_all: bool,
}

#[derive(Debug, Clone)]
struct Rule {
    allows: bool,
    pattern: String,
}

/// The address of a host's `robots.txt`.
pub(super) fn place(url: &Url) -> Url {
    let mut place = url.clone();
    place.set_path("/robots.txt");
    place.set_query(None);
    place
}

impl Robots {
    /// Whether the rules of a host are cached.
    pub(super) fn knows(&self, url: &Url) -> bool {
        let hosts = self.hosts.lock();
        hosts.get(place(url).as_str()).is_some_and(|(since, _)| since.elapsed() < KEPT)
    }

    /// Caches the rules of a host.
    pub(super) fn learn(&self, url: &Url, said: &Response) {
        let rules = match said.status {
            status if status.is_success() => Rules::read(&String::from_utf8_lossy(&said.body)),
            status if status.is_client_error() => Rules::default(),
            _ => Rules { forbids_all: true, ..Rules::default() },
        };
        let mut hosts = self.hosts.lock();
        if hosts.len() >= MAX_HOSTS {
            hosts.clear();
        }
        hosts.insert(place(url).into(), (Instant::now(), rules));
    }

    /// Whether the cached rules of its host permit an address.
    pub(super) fn permits(&self, url: &Url, agent: &str) -> bool {
        let path = &url[url::Position::BeforePath..url::Position::AfterQuery];
        let hosts = self.hosts.lock();
        hosts.get(place(url).as_str()).is_some_and(|(_, rules)| rules.permit(path, agent))
    }
}

impl Rules {
    fn read(text: &str) -> Self {
        let mut groups: Vec<(Vec<String>, Vec<Rule>)> = Vec::new();
        let mut count = 0;
        for line in text.trim_start_matches('\u{feff}').lines() {
            let line = line.split('#').next().unwrap_or_default();
            let Some((key, value)) = line.split_once(':') else { continue };
            let value = value.trim();
            match key.trim().to_ascii_lowercase().as_str() {
                "user-agent" if count < MAX_RULES => {
                    count += 1;
                    match groups.last_mut() {
                        Some((agents, rules)) if rules.is_empty() => {
                            agents.push(value.to_ascii_lowercase());
                        }
                        _ => groups.push((vec![value.to_ascii_lowercase()], Vec::new())),
                    }
                }
                kind @ ("allow" | "disallow") if count < MAX_RULES => {
                    let Some((_, rules)) = groups.last_mut() else { continue };
                    count += 1;
                    rules.push(Rule { allows: kind == "allow", pattern: value.to_owned() });
                }
                _ => {}
            }
        }
        Self { groups, forbids_all: false }
    }

    fn permit(&self, path: &str, agent: &str) -> bool {
        if self.forbids_all {
            return false;
        }
        let product = agent.split(['/', ' ']).next().unwrap_or_default().to_ascii_lowercase();
        let of = |name: &str| -> Vec<&Rule> {
            let named = self.groups.iter().filter(|(agents, _)| agents.iter().any(|a| a == name));
            named.flat_map(|(_, rules)| rules).collect()
        };
        let is_named = self.groups.iter().any(|(agents, _)| agents.contains(&product));
        let rules = of(if is_named { &product } else { "*" });
        let matching =
            rules.iter().filter(|rule| !rule.pattern.is_empty() && covers(&rule.pattern, path));
        let strongest = matching.max_by_key(|rule| (rule.pattern.len(), rule.allows));
        strongest.is_none_or(|rule| rule.allows)
    }
}

/// Whether a pattern covers a path: `*` stands for anything, `$` for the end. Takes no longer than
/// their lengths multiplied.
fn covers(pattern: &str, path: &str) -> bool {
    let (pattern, to_end) = match pattern.strip_suffix('$') {
        Some(pattern) => (pattern, true),
        None => (pattern, false),
    };
    let mut pieces = pattern.split('*');
    let Some(mut rest) = pieces.next().and_then(|first| path.strip_prefix(first)) else {
        return false;
    };
    let mut last = None;
    for piece in pieces {
        let Some(at) = rest.find(piece) else { return false };
        rest = &rest[at + piece.len()..];
        last = Some(piece);
    }
    match last {
        _ if !to_end => true,
        None => rest.is_empty(),
        Some(piece) => path.ends_with(piece),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_go_where() {
        let rules = Rules::read(
            "User-agent: other\nDisallow: /\n\nUser-agent: *\nDisallow: /private # not here\n\
             Disallow: /*.pdf$\nAllow: /private/open\nSitemap: x\n\nUSER-AGENT: picky\nuser-agent: toolloop\nDisallow: /only\nAllow:",
        );
        let table = [
            ("anybody/1.0", "/", true),
            ("anybody/1.0", "/private/x", false),
            ("anybody/1.0", "/private/open/x", true),
            ("anybody/1.0", "/a/b.pdf", false),
            ("anybody/1.0", "/a/b.pdf?x", true),
            ("Other", "/", false),
            ("toolloop/0.1 (x)", "/private", true),
            ("toolloop", "/only/x", false),
            ("picky", "/only", false),
        ];
        for (agent, path, expected) in table {
            assert_eq!(rules.permit(path, agent), expected, "{agent} {path}");
        }
        assert!(!Rules::read("\u{feff}User-agent: *\nDisallow: /").permit("/", "x"));
        assert!(Rules::read("").permit("/", "x"));
        let agents = Rules::read(&"user-agent: a\n".repeat(20_000)).groups;
        assert_eq!((agents.len(), agents[0].0.len()), (1, MAX_RULES));
        let many = format!("User-agent: *\nDisallow: {}", "*a".repeat(5000));
        assert!(Rules::read(&many).permit(&format!("/{}", "a".repeat(4000)), "x"));
    }
}
