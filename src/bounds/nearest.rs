//! The known name that an unknown one was probably meant to be.

/// Longer names are not compared, in characters.
const MAX: usize = 64;

/// The name that is most like `name`, if one is much like it.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let length = name.chars().count();
    let most = match length {
        ..3 => return None,
        3..5 => 1,
        _ => 2,
    };
    let near = known.into_iter().filter(|other| *other != name).filter_map(|other| {
        let is_short = length <= MAX && other.chars().count() <= MAX;
        let distance = is_short.then(|| strsim::levenshtein(name, other))?;
        (distance <= most).then_some((distance, other))
    });
    near.min_by_key(|(distance, _)| *distance).map(|(_, other)| other)
}

/// A question behind an unknown name, if it was probably meant to be a known one.
pub fn meant<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    nearest(name, known).map(|other| format!(" (did you mean {other:?}?)")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_much_like_it_is_meant() {
        let known = ["tools", "tool_options", "model", "models", "limits"];
        assert_eq!(nearest("tool", known), Some("tools"));
        assert_eq!(nearest("modle", known), Some("model"));
        assert_eq!(nearest("limtis", known), Some("limits"));
        assert_eq!(nearest("colour", known), None);
        assert_eq!(nearest("gone", ["fine"]), None);
        assert_eq!(nearest("q", ["p"]), None);
        assert_eq!(nearest(&"x".repeat(1000), known), None);
    }
}
