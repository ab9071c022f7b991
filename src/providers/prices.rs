//! Prices of models, and the cost of an answer.
//!
//! Prices come from the configuration, or else from the list prices in [`shipped`]. Money is counted
//! in whole millionths of a dollar. The engine checks what a run may spend.

pub mod shipped;

use serde::{Deserialize, Serialize};

use super::capabilities::ModelPattern;
use crate::message::Usage;

/// A price is for this many tokens.
const PER: u128 = 1_000_000;

/// Millionths of a dollar per million tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Price {
    /// Uncached input.
    pub input: u64,
    /// Input read from the provider's cache.
    pub cached_input: u64,
    /// Input written to the provider's cache.
    pub cache_write: u64,
    /// Output, reasoning included.
    pub output: u64,
}

impl Price {
    /// From US dollars per million tokens, each from 0 to 1,000,000.
    pub fn of_dollars(input: f64, cached_input: f64, cache_write: f64, output: f64) -> Self {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "0 to 10^6 dollars"
        )]
        let micro = |dollars: f64| (dollars * 1e6).round() as u64;
        Self {
            input: micro(input),
            cached_input: micro(cached_input),
            cache_write: micro(cache_write),
            output: micro(output),
        }
    }

    /// Cost in millionths of a dollar, rounded to the nearest.
    pub fn of(&self, usage: &Usage) -> i64 {
        let fresh = usage
            .input_tokens
            .saturating_sub(usage.cached_input_tokens.saturating_add(usage.cache_write_tokens));
        let parts = [
            (fresh, self.input),
            (usage.cached_input_tokens, self.cached_input),
            (usage.cache_write_tokens, self.cache_write),
            (usage.output_tokens, self.output),
        ];
        let costs = parts.into_iter().map(|(tokens, price)| u128::from(tokens) * u128::from(price));
        i64::try_from(costs.fold(PER / 2, u128::saturating_add) / PER).unwrap_or(i64::MAX)
    }

    /// Output tokens that `left` millionths of a dollar pay for after `input` tokens; `None` if
    /// they do not even pay for the input. The most expensive kind of input is assumed.
    pub fn affordable_output(&self, input: u64, left: i64) -> Option<u64> {
        let dearest = self.input.max(self.cached_input).max(self.cache_write);
        let left = u128::try_from(left).ok()? * PER;
        let left = left.checked_sub(u128::from(input) * u128::from(dearest))?;
        match self.output {
            0 => Some(u64::MAX),
            output => Some(u64::try_from(left / u128::from(output)).unwrap_or(u64::MAX)),
        }
    }

    /// The highest cost of a call in millionths of a dollar: the most expensive kind of input is
    /// assumed.
    pub fn at_most(&self, input: u64, output: u64) -> u64 {
        let dearest = self.input.max(self.cached_input).max(self.cache_write);
        let read = u128::from(input) * u128::from(dearest);
        let cost = read.saturating_add(u128::from(output) * u128::from(self.output));
        u64::try_from(cost.div_ceil(PER)).unwrap_or(u64::MAX)
    }

    /// The higher price of two, field by field.
    #[must_use]
    pub fn dearest(self, other: Self) -> Self {
        Self {
            input: self.input.max(other.input),
            cached_input: self.cached_input.max(other.cached_input),
            cache_write: self.cache_write.max(other.cache_write),
            output: self.output.max(other.output),
        }
    }
}

#[derive(Debug, Clone, Default)]
pub struct PriceTable {
    /// Sorted by length of the pattern, so that more specific ones come later.
    rows: Vec<(ModelPattern, Price)>,
    /// For models that no row matches.
    shipped: Vec<(ModelPattern, Price)>,
}

impl PriceTable {
    /// If several patterns match a model, the longest wins.
    pub fn new(mut rows: Vec<(ModelPattern, Price)>) -> Self {
        rows.sort_by_key(|(pattern, _)| pattern.length());
        Self { rows, shipped: Vec::new() }
    }

    /// The price of a model, if known.
    pub fn of(&self, provider: &str, model: &str) -> Option<Price> {
        self.rows
            .iter()
            .rev()
            .chain(&self.shipped)
            .find(|(pattern, _)| pattern.matches(provider, model))
            .map(|(_, price)| *price)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINI: Price =
        Price { input: 400_000, cached_input: 100_000, cache_write: 500_000, output: 1_600_000 };

    #[test]
    fn every_kind_of_token_has_its_price() {
        let usage = Usage {
            input_tokens: 1000,
            cached_input_tokens: 600,
            cache_write_tokens: 100,
            output_tokens: 250,
            reasoning_tokens: 200,
            ..Usage::default()
        };
        // 300 x 0.4 + 600 x 0.1 + 100 x 0.5 + 250 x 1.6
        assert_eq!(MINI.of(&usage), 120 + 60 + 50 + 400);
        assert_eq!(
            MINI.of(&Usage { input_tokens: 1, ..Usage::default() }),
            0,
            "0.4 is rounded down"
        );
        assert_eq!(
            MINI.of(&Usage { output_tokens: 1, ..Usage::default() }),
            2,
            "1.6 is rounded up"
        );
        let endless = Usage { input_tokens: u64::MAX, output_tokens: u64::MAX, ..Usage::default() };
        assert_eq!(Price { input: u64::MAX, ..MINI }.of(&endless), i64::MAX);
    }

    #[test]
    fn what_the_rest_of_a_budget_buys() {
        // 1000 x 0.5 (the dearest input) leave 500 of 1000.
        assert_eq!(MINI.affordable_output(1000, 1000), Some(312));
        assert_eq!(MINI.affordable_output(2000, 1000), Some(0));
        assert_eq!(MINI.affordable_output(2001, 1000), None);
        assert_eq!(MINI.affordable_output(0, -1), None);
        assert_eq!(Price::default().affordable_output(10, 0), Some(u64::MAX));
        assert_eq!(MINI.at_most(1000, 312), 1000, "as much as that paid for, rounded up");
        assert_eq!(Price { output: u64::MAX, ..MINI }.at_most(u64::MAX, u64::MAX), u64::MAX);
    }

    #[test]
    fn the_longest_pattern_counts() {
        let row = |pattern: &str, input| {
            (ModelPattern::parse(pattern).unwrap(), Price { input, ..Price::default() })
        };
        let table =
            PriceTable::new(vec![row("p/gpt-4.1*", 2), row("p/*", 1), row("p/gpt-4.1-mini", 3)]);
        let input = |model| table.of("p", model).map(|price| price.input);
        assert_eq!(
            (input("gpt-4.1-mini"), input("gpt-4.1"), input("o3")),
            (Some(3), Some(2), Some(1))
        );
        assert_eq!(table.of("q", "gpt-4.1"), None);
    }
}
