//! What somebody may have meant by a name that is not known.

/// Longer names are not compared, in characters.
const MAX: usize = 64;

/// The name that is most like `name`, if one is much like it.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let length = name.chars().count();
    let most = (length / 2).clamp(1, 2);
    let near = known.into_iter().filter(|other| *other != name).filter_map(|other| {
        let is_short = length <= MAX && other.chars().count() <= MAX;
        let distance = is_short.then(|| distance(name, other))?;
        (distance <= most).then_some((distance, other))
    });
    near.min_by_key(|(distance, _)| *distance).map(|(_, other)| other)
}

/// How many characters must be put in, taken out or replaced.
fn distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (index, here) in from.chars().enumerate() {
        let mut diagonal = index;
        let mut left = index + 1;
        for (above, there) in row.iter_mut().skip(1).zip(&to) {
            let replaced = diagonal + usize::from(here != *there);
            diagonal = *above;
            left = replaced.min(*above + 1).min(left + 1);
            *above = left;
        }
        row[0] = index + 1;
    }
    row.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_counted() {
        for (from, to, expected) in
            [("", "abc", 3), ("abc", "", 3), ("tool", "tools", 1), ("kitten", "sitting", 3)]
        {
            assert_eq!(distance(from, to), expected, "{from} {to}");
            assert_eq!(distance(to, from), expected, "{to} {from}");
        }
    }

    #[test]
    fn only_what_is_much_like_it_is_meant() {
        let known = ["tools", "tool_options", "model", "models", "limits"];
        assert_eq!(nearest("tool", known), Some("tools"));
        assert_eq!(nearest("modle", known), Some("model"));
        assert_eq!(nearest("limtis", known), Some("limits"));
        assert_eq!(nearest("colour", known), None);
        assert_eq!(nearest(&"x".repeat(1000), known), None);
    }
}
