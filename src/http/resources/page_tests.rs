//! Cursors, limits and pages.

use proptest::prelude::*;

use super::*;
use crate::message::Usage;

fn params(query: &str) -> Params {
    Params::parse(query).unwrap()
}

/// The cursor of the list without a path and filters, whose tenant is `t`.
fn cursor(position: &Position) -> String {
    position.in_list(params("").list("t"))
}

proptest! {
    #[test]
    fn a_cursor_round_trips(micros in 0_i64..4_000_000_000_000_000, id in any::<u128>(), number in 0_i64..1 << 40) {
        let at = DateTime::from_timestamp_micros(micros).unwrap();
        let id = Uuid::from_u128(id).to_string();
        let page = by_time(&mut params(&format!("cursor={}", cursor(&time_position(at, &id)))), "t", LISTS).unwrap();
        prop_assert_eq!(page.page.after, Some(RunCursor { at, id }));
        let page = by_number(&mut params(&format!("cursor={}", cursor(&number_position(number)))), "t", PARTS).unwrap();
        prop_assert_eq!(page.after, Some(number));
    }

    #[test]
    fn an_arbitrary_position_is_rejected_or_valid(text in "[nts][0-9.-]{0,40}") {
        let text = cursor(&Position(text));
        if let Ok(page) = by_number(&mut params(&format!("cursor={text}")), "t", PARTS) {
            prop_assert!(page.after.unwrap() >= 0);
        }
        if let Ok(page) = by_time(&mut params(&format!("cursor={text}")), "t", LISTS) {
            prop_assert!(Uuid::try_parse(&page.page.after.unwrap().id).is_ok());
        }
    }

    #[test]
    fn pages_of_large_items_concatenate_to_the_list(sizes in prop::collection::vec(0_usize..9, 0..30), size in 1_u32..9) {
        let mut seen = Vec::new();
        let mut query = format!("limit={size}");
        loop {
            let page = by_number(&mut params(&query), "t", PARTS).unwrap();
            let listing = Listing::of_large(sizes.clone(), &page, 10, |size| *size);
            prop_assert!(listing.data.len() < 2 || listing.data.iter().sum::<usize>() <= 10);
            seen.extend(listing.data);
            let Some(next) = listing.next_cursor else { break };
            query = format!("limit={size}&cursor={next}");
        }
        prop_assert_eq!(seen, sizes);
    }

    #[test]
    fn pages_concatenate_to_the_list(length in 0_i64..50, size in 1_u32..20) {
        let mut seen = Vec::new();
        let mut query = format!("limit={size}");
        loop {
            let page = by_number(&mut params(&query), "t", PARTS).unwrap();
            let listing = Listing::of_all((0..length).collect(), &page);
            prop_assert!(listing.data.len() <= size as usize);
            seen.extend(listing.data);
            let Some(next) = listing.next_cursor else { break };
            query = format!("limit={size}&cursor={next}");
        }
        prop_assert_eq!(seen, (0..length).collect::<Vec<_>>());
    }
}

#[test]
fn a_cursor_of_another_kind_of_list_is_rejected() {
    let at = DateTime::from_timestamp_micros(1).unwrap();
    let foreign = cursor(&time_position(at, &Uuid::nil().to_string()));
    assert!(by_number(&mut params(&format!("cursor={foreign}")), "t", PARTS).is_err());
    assert!(
        by_time(&mut params(&format!("cursor={}", cursor(&number_position(3)))), "t", LISTS)
            .is_err()
    );
    let early = DateTime::from_timestamp_micros(-200_000_000_000_000_000).unwrap();
    let early = cursor(&time_position(early, &Uuid::nil().to_string()));
    assert!(by_time(&mut params(&format!("cursor={early}")), "t", LISTS).is_err());
    let key = cursor(&time_position(at, "abc"));
    assert!(by_time(&mut params(&format!("cursor={key}")), "t", LISTS).is_err());
    assert!(
        by_time_and(&mut params(&format!("cursor={key}")), "t", LISTS, |id| id == "abc").is_ok()
    );
}

#[test]
fn a_cursor_of_usage_has_day_agent_and_model() {
    let read = |position: String| {
        let query = format!("cursor={}", cursor(&Position(position)));
        by_usage(&mut params(&query), "t", LISTS).map(|page| page.page.after)
    };
    let [day, agent, model] = ["2026-01-31", "a-1", "m/x.y \"z\""].map(str::to_owned);
    let after = UsageCursor { day: day.clone(), agent: agent.clone(), model: model.clone() };
    let Position(position) =
        usage_position(&UsageStats { day, agent, model, runs: 1, usage: Usage::default() });
    assert_eq!(read(position).ok().flatten(), Some(after));
    for wrong in ["u", "u[]", "n50", "u[\"a\",\"b\"]", "u[1,2,3]"] {
        assert!(read(wrong.into()).is_err(), "{wrong}");
    }
}

#[test]
fn limits_have_bounds_and_a_default() {
    for (query, limit) in [("", 51), ("limit=1", 2), ("limit=200", 201)] {
        assert_eq!(by_time(&mut params(query), "t", LISTS).unwrap().limit, limit, "{query}");
    }
    for query in ["limit=0", "limit=201", "limit=-1", "limit=ten", "limit="] {
        assert!(by_time(&mut params(query), "t", LISTS).is_err(), "{query}");
    }
}

#[test]
fn a_further_row_is_not_shown_but_gives_a_cursor() {
    let page = by_number(&mut params("limit=2"), "t", PARTS).unwrap();
    let full = Listing::of(vec![1, 2, 3], &page, |last| number_position(*last), |row| row * 10);
    let behind = cursor(&number_position(2));
    assert_eq!((full.data, full.next_cursor), (vec![10, 20], Some(behind)));
    let last = Listing::of(vec![1, 2], &page, |last| number_position(*last), |row| row);
    assert_eq!(last.next_cursor, None);
}
