//! List prices of the providers' current models, so that runs have a cost without typing.
//!
//! As of 2026-11-06, from <https://platform.claude.com/docs/en/about-claude/pricing> and
//! <https://developers.openai.com/api/docs/pricing>: standard processing, caches of five minutes.
//! Models whose price depends on the length of the prompt or on a tier are left out, because a wrong
//! price is worse than none. The configuration overrides every row.

use super::{Price, PriceTable};
use crate::model::ProviderKind;
use crate::providers::capabilities::ModelPattern;

/// The day of the prices.
pub const AS_OF: &str = "2026-11-06";

/// US dollars per million tokens.
struct Listed {
    model: &'static str,
    input: f64,
    cached_input: f64,
    /// Where it costs more than other input.
    cache_write: Option<f64>,
    output: f64,
}

const fn gpt(model: &'static str, input: f64, cached_input: f64, output: f64) -> Listed {
    Listed { model, input, cached_input, cache_write: None, output }
}

const fn claude(model: &'static str, input: f64, cached_input: f64, output: f64) -> Listed {
    Listed { model, input, cached_input, cache_write: Some(input * 1.25), output }
}

const OPENAI: [Listed; 15] = [
    gpt("gpt-4.1", 2.0, 0.5, 8.0),
    gpt("gpt-4.1-mini", 0.4, 0.1, 1.6),
    gpt("gpt-4.1-nano", 0.1, 0.025, 0.4),
    gpt("gpt-4o", 2.5, 1.25, 10.0),
    gpt("gpt-4o-mini", 0.15, 0.075, 0.6),
    gpt("gpt-5", 1.25, 0.125, 10.0),
    gpt("gpt-5-mini", 0.25, 0.025, 2.0),
    gpt("gpt-5-nano", 0.05, 0.005, 0.4),
    gpt("gpt-5.1", 1.25, 0.125, 10.0),
    gpt("gpt-5.2", 1.75, 0.175, 14.0),
    gpt("gpt-5.4-mini", 0.75, 0.075, 4.5),
    gpt("gpt-5.4-nano", 0.2, 0.02, 1.25),
    gpt("o3", 2.0, 0.5, 8.0),
    gpt("o3-mini", 1.1, 0.55, 4.4),
    gpt("o4-mini", 1.1, 0.275, 4.4),
];

const ANTHROPIC: [Listed; 14] = [
    claude("claude-fable-5-1", 10.0, 0.25, 50.0),
    claude("claude-fable-5", 10.0, 1.0, 50.0),
    claude("claude-opus-5-5", 4.0, 0.2, 20.0),
    claude("claude-opus-5", 5.0, 0.5, 25.0),
    claude("claude-opus-4-8", 5.0, 0.5, 25.0),
    claude("claude-opus-4-7", 5.0, 0.5, 25.0),
    claude("claude-opus-4-6", 5.0, 0.5, 25.0),
    claude("claude-opus-4-5", 5.0, 0.5, 25.0),
    claude("claude-opus-4-1", 15.0, 1.5, 75.0),
    claude("claude-sonnet-5-5", 2.0, 0.1, 10.0),
    claude("claude-sonnet-5", 2.0, 0.2, 10.0),
    claude("claude-sonnet-4-6", 3.0, 0.3, 15.0),
    claude("claude-sonnet-4-5", 3.0, 0.3, 15.0),
    claude("claude-haiku-4-5", 1.0, 0.1, 5.0),
];

/// The rows for a provider of this name, if its server is the one whose prices these are.
fn listed(kind: ProviderKind, base_url: &str) -> &'static [Listed] {
    let host = url::Url::parse(base_url).ok();
    let host = host.as_ref().and_then(url::Url::host_str);
    match (kind, host) {
        (ProviderKind::Openai | ProviderKind::OpenaiResponses, Some("api.openai.com")) => &OPENAI,
        (ProviderKind::Anthropic, Some("api.anthropic.com")) => &ANTHROPIC,
        _ => &[],
    }
}

impl PriceTable {
    /// Adds the list prices for a provider, behind all other rows.
    #[must_use]
    pub fn with_listed(mut self, provider: &str, kind: ProviderKind, base_url: &str) -> Self {
        for row in listed(kind, base_url) {
            let Listed { input, cached_input, cache_write, output, .. } = *row;
            let cache_write = cache_write.unwrap_or(input);
            let price = Price::of_dollars(input, cached_input, cache_write, output);
            // The name itself, and the snapshots that are named after it and a day.
            for pattern in [row.model.to_owned(), format!("{}-20*", row.model)] {
                let pattern = ModelPattern::parse(&format!("{provider}/{pattern}"));
                self.shipped.extend(pattern.map(|pattern| (pattern, price)));
            }
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> PriceTable {
        let own = ModelPattern::parse("openai/gpt-4.1*").unwrap();
        PriceTable::new(vec![(own, Price { input: 7, ..Price::default() })])
            .with_listed("openai", ProviderKind::Openai, "https://api.openai.com/v1")
            .with_listed("claude", ProviderKind::Anthropic, "https://api.anthropic.com")
            .with_listed("local", ProviderKind::Openai, "http://127.0.0.1:8000/v1")
    }

    #[test]
    fn a_model_and_its_snapshots_have_the_list_price() {
        let table = table();
        let haiku = table.of("claude", "claude-haiku-4-5").unwrap();
        let expected = Price {
            input: 1_000_000,
            cached_input: 100_000,
            cache_write: 1_250_000,
            output: 5_000_000,
        };
        assert_eq!(haiku, expected);
        assert_eq!(table.of("claude", "claude-haiku-4-5-20251001"), Some(haiku));
        let [opus, newer] =
            ["claude-opus-5", "claude-opus-5-5"].map(|name| table.of("claude", name));
        assert_ne!(opus, newer);
        assert_eq!(table.of("openai", "gpt-5").unwrap().cache_write, 1_250_000);
    }

    #[test]
    fn own_prices_override_and_other_servers_have_none() {
        let table = table();
        assert_eq!(table.of("openai", "gpt-4.1-mini").unwrap().input, 7);
        assert_eq!(table.of("local", "gpt-5"), None);
        assert_eq!(table.of("openai", "gpt-99"), None);
        assert_eq!(table.of("anthropic", "claude-opus-5"), None, "no provider has this name");
    }
}
