//! `[tools.browser]`: how pages are opened in a browser.

use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::de::Error;
use serde::{Deserialize, Deserializer};

use super::sources::Sources;
use super::values::{self, count, duration};

/// Pixels of a viewport: its width, and its height.
const WIDTHS: std::ops::RangeInclusive<u32> = 320..=3840;
const HEIGHTS: std::ops::RangeInclusive<u32> = 240..=2160;

/// `[tools.browser]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Browser {
    /// The program, a Chromium; empty: it is looked for.
    pub path: PathBuf,
    /// Maximum time of one call.
    #[serde(deserialize_with = "duration::<1_000, 3_600, _>")]
    #[schemars(schema_with = "values::duration_schema")]
    pub timeout: Duration,
    /// Maximum number of pages that are open at the same time.
    #[serde(deserialize_with = "count::<1, 64, _, _>")]
    #[schemars(schema_with = "values::count_schema::<1, 64>")]
    pub pages: usize,
    /// Width and height of a page in pixels.
    #[serde(deserialize_with = "viewport")]
    #[schemars(with = "String", regex(pattern = "^[0-9]+x[0-9]+$"))]
    pub viewport: (u32, u32),
}

impl Browser {
    /// With the path of the program relative to the file that names it.
    pub(super) fn located(mut self, sources: &Sources) -> Self {
        if !self.path.as_os_str().is_empty() {
            self.path = sources.resolve("tools.browser.path", &self.path);
        }
        self
    }
}

fn viewport<'de, D: Deserializer<'de>>(deserializer: D) -> Result<(u32, u32), D::Error> {
    let text = String::deserialize(deserializer)?;
    let parts = text.split_once('x').and_then(|(width, height)| {
        let width = width.parse().ok().filter(|width| WIDTHS.contains(width))?;
        let height = height.parse().ok().filter(|height| HEIGHTS.contains(height))?;
        Some((width, height))
    });
    parts.ok_or_else(|| {
        D::Error::custom(format!("{text:?} is not a size from \"320x240\" to \"3840x2160\""))
    })
}
