//! What the service is built of: every crate comes from the registry that `deny.toml` allows, under
//! a licence that it allows. `cargo deny check` reads the same file, and knows advisories as well.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

fn rules() -> toml::Table {
    own("deny.toml")
}

fn own(file: &str) -> toml::Table {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    fs::read_to_string(path).unwrap().parse().unwrap()
}

fn list(rules: &toml::Table, table: &str, key: &str) -> Vec<String> {
    rules[table][key].clone().try_into().unwrap()
}

#[test]
fn crates_come_from_the_registry_alone_and_are_locked() {
    let registries = list(&rules(), "sources", "allow-registry");
    let lock = own("Cargo.lock");
    let packages = lock["package"].as_array().unwrap();
    assert!(packages.len() > 300);
    for package in packages {
        let name = package["name"].as_str().unwrap();
        let Some(source) = package.get("source") else {
            assert_eq!(name, env!("CARGO_PKG_NAME"), "{name} has no source: it is a path");
            continue;
        };
        let registry = source.as_str().unwrap().strip_prefix("registry+");
        let is_allowed = registry.is_some_and(|registry| registries.iter().any(|r| r == registry));
        assert!(is_allowed, "{name} comes from {source}, which deny.toml does not allow");
        assert!(package.get("checksum").is_some(), "{name} has no checksum");
    }
}

#[test]
fn every_crate_has_a_licence_that_is_allowed() {
    let allowed = list(&rules(), "licenses", "allow");
    let mut used = Vec::new();
    for package in packages() {
        let (name, licence) = (&package["name"], package["license"].as_str());
        let expression = licence.unwrap_or_else(|| panic!("{name} does not say its licence"));
        let granted = granted(expression, &allowed);
        let granted =
            granted.unwrap_or_else(|| panic!("{name} is under {expression}, see deny.toml"));
        used.extend(granted);
    }
    let unused: Vec<_> = allowed.iter().filter(|licence| !used.contains(licence)).collect();
    assert_eq!(unused, Vec::<&String>::new(), "no crate needs it: take it out of deny.toml");
}

#[test]
fn licences_are_read_as_they_are_meant() {
    let allowed = ["MIT", "Apache-2.0 WITH LLVM-exception", "ISC"].map(str::to_owned);
    for (expression, is_granted) in [
        ("MIT", true),
        ("GPL-3.0-only", false),
        ("GPL-3.0-only OR MIT", true),
        ("GPL-3.0-only / MIT", true),
        ("MIT/GPL-3.0-only", true),
        ("GPL-3.0-only AND MIT", false),
        ("ISC AND (GPL-3.0-only OR MIT)", true),
        ("ISC AND (GPL-3.0-only OR Apache-2.0)", false),
        ("Apache-2.0 WITH LLVM-exception", true),
        ("Apache-2.0", false),
        ("GPL-3.0-only AND ISC OR MIT", true),
        ("MIT OR GPL-3.0-only AND ISC", true),
        ("GPL-3.0-only OR ISC AND (MIT AND GPL-3.0-only)", false),
    ] {
        assert_eq!(granted(expression, &allowed).is_some(), is_granted, "{expression}");
    }
}

/// The crates that are compiled here, for the service and for its tests.
fn packages() -> Vec<Value> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let version = Command::new("rustc").arg("-vV").output().unwrap();
    let version = String::from_utf8(version.stdout).unwrap();
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
    let arguments = ["metadata", "--format-version", "1", "--locked", "--offline"];
    let said = Command::new(cargo)
        .args(arguments)
        .args(["--filter-platform", host])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    let metadata: Value = serde_json::from_slice(&said.stdout).unwrap();
    metadata["packages"].as_array().unwrap().clone()
}

/// Which of the allowed licences an expression needs, if they are enough.
fn granted(expression: &str, allowed: &[String]) -> Option<Vec<String>> {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let (granted, rest) = any_of(&words, allowed);
    assert!(rest.is_empty(), "{expression} is no expression of licences");
    granted
}

type Read<'a> = (Option<Vec<String>>, &'a [&'a str]);

fn any_of<'a>(words: &'a [&'a str], allowed: &[String]) -> Read<'a> {
    let (mut granted, mut rest) = all_of(words, allowed);
    while let ["OR", more @ ..] = rest {
        let (other, after) = all_of(more, allowed);
        granted = match (granted, other) {
            (Some(one), Some(other)) => Some([one, other].concat()),
            (one, other) => one.or(other),
        };
        rest = after;
    }
    (granted, rest)
}

fn all_of<'a>(words: &'a [&'a str], allowed: &[String]) -> Read<'a> {
    let (mut granted, mut rest) = one(words, allowed);
    while let ["AND", more @ ..] = rest {
        let (other, after) = one(more, allowed);
        granted = granted.zip(other).map(|(one, other)| [one, other].concat());
        rest = after;
    }
    (granted, rest)
}

fn one<'a>(words: &'a [&'a str], allowed: &[String]) -> Read<'a> {
    let (licence, rest) = match words {
        ["(", inner @ ..] => {
            let (granted, rest) = any_of(inner, allowed);
            assert_eq!(rest.first(), Some(&")"), "a parenthesis is open");
            return (granted, &rest[1..]);
        }
        [licence, "WITH", exception, rest @ ..] => (format!("{licence} WITH {exception}"), rest),
        [licence, rest @ ..] => ((*licence).to_owned(), rest),
        [] => panic!("a licence is missing"),
    };
    (allowed.contains(&licence).then(|| vec![licence]), rest)
}
