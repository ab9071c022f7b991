//! What the recorder of the metrics cannot keep, in the text format of Prometheus: counters that
//! are no whole numbers, and gauges that are unknown at times and then left out.

use std::fmt::{Display, Write as _};

use crate::bounds::secrets::redacted;

/// Families of samples, one after another.
#[derive(Default)]
pub(super) struct Exposition {
    text: String,
}

impl Exposition {
    /// Begins a family. Its samples follow.
    pub(super) fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    pub(super) fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        self.text.push_str(name);
        for (index, (label, text)) in labels.iter().enumerate() {
            let before = if index == 0 { '{' } else { ',' };
            let _ = write!(self.text, "{before}{label}=\"{}\"", escaped(&redacted(text)));
        }
        let end = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.text, "{end} {value}");
    }

    /// A family of one sample without labels; nothing where its value is unknown.
    pub(super) fn single(
        &mut self,
        (name, kind, help): (&str, &str, &str),
        value: Option<impl Display>,
    ) {
        if let Some(value) = value {
            self.family(name, kind, help);
            self.sample(name, &[], value);
        }
    }

    pub(super) fn after(self, text: String) -> String {
        text + &self.text
    }
}

fn escaped(label: &str) -> String {
    label.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_in_the_text_format() {
        let mut exposition = Exposition::default();
        exposition.family("cost_usd_total", "counter", "Cost.");
        exposition.sample("cost_usd_total", &[("agent", "a\"b\\c\nd"), ("model", "m")], 0.25);
        exposition.single(("known", "gauge", "Known."), Some(3));
        exposition.single(("unknown", "gauge", "Unknown."), None::<u64>);
        assert_eq!(
            exposition.after("before 1\n".to_owned()),
            "before 1\n# HELP cost_usd_total Cost.\n# TYPE cost_usd_total counter\n\
             cost_usd_total{agent=\"a\\\"b\\\\c\\nd\",model=\"m\"} 0.25\n\
             # HELP known Known.\n# TYPE known gauge\nknown 3\n"
        );
    }
}
