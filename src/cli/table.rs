//! Text tables: columns are as wide as their widest cell is on a terminal, the last one is not padded.
//!
//! Scripts get JSON instead; nothing here is meant to be parsed.

use unicode_width::UnicodeWidthStr;

use super::output::one_line;

/// Characters of one cell at most; the last column is not cut.
const WIDEST: usize = 60;

/// Rows beneath a head. Every row has as many cells as the head.
pub(super) fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let last = head.len().saturating_sub(1);
    let cell = |column: usize, text: &str| {
        one_line(text, if column == last { usize::MAX } else { WIDEST })
    };
    let head: Vec<String> = head.iter().map(|title| (*title).to_owned()).collect();
    let lines: Vec<Vec<String>> = std::iter::once(&head)
        .chain(rows)
        .map(|row| row.iter().enumerate().map(|(column, text)| cell(column, text)).collect())
        .collect();
    let width = |column: usize| {
        lines
            .iter()
            .filter_map(|row: &Vec<String>| row.get(column))
            .map(|cell| cell.as_str().width())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..last).map(width).chain([0]).collect();
    let shown = lines.iter().map(|row| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| {
            let rest = width.saturating_sub(cell.width());
            format!("{cell}{}", " ".repeat(rest))
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    });
    shown.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [
            vec!["1".into(), "ä".into(), "x".repeat(70_000)],
            vec!["22".into(), "b\nc".into(), String::new()],
        ];
        let long = "x".repeat(70_000);
        assert_eq!(
            table(&["N", "NAME", "REST"], &rows),
            format!("N   NAME  REST\n1   ä     {long}\n22  b c")
        );
    }

    #[test]
    fn wide_characters_take_two_places() {
        let rows = [vec!["日本🙂".into(), "x".into()], vec!["abc".into(), "y".into()]];
        assert_eq!(table(&["N", "V"], &rows), "N       V\n日本🙂  x\nabc     y");
    }
}
