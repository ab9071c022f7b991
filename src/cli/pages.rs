//! Lists of the API, read page by page.

use serde_json::Value;

use super::client::{Client, ClientError};
use super::kinds::{Kind, LIST};

/// Items of a page.
pub(super) const PAGE: usize = 200;

/// A list whose pages are read one by one.
pub(super) struct Pages<'c> {
    client: &'c Client,
    path: String,
    item: &'static Kind,
    /// Behind the pages that were read; null before the first one and behind the last one.
    cursor: Value,
    is_over: bool,
}

impl<'c> Pages<'c> {
    /// `path` must include a `?`.
    pub(super) fn of(client: &'c Client, path: impl Into<String>, item: &'static Kind) -> Self {
        Self { client, path: path.into(), item, cursor: Value::Null, is_over: false }
    }

    /// The next page, of at most `size` items; none behind the last one.
    pub(super) async fn next(&mut self, size: usize) -> Result<Option<Vec<Value>>, ClientError> {
        if self.is_over {
            return Ok(None);
        }
        let after =
            self.cursor.as_str().map(|cursor| format!("&cursor={cursor}")).unwrap_or_default();
        let path = format!("{}&limit={size}{after}", self.path);
        let mut page = self.client.get(&path, &LIST).await?;
        let next = page.get_mut("next_cursor").map(Value::take).unwrap_or_default();
        let unexpected = ClientError::UnexpectedResponse;
        if next.is_string() && next == self.cursor {
            return Err(unexpected("a page that leads to itself".to_owned()));
        }
        let items = page.get_mut("data").and_then(Value::as_array_mut).map(std::mem::take);
        let items = items.into_iter().flatten().map(|item| self.item.of(item));
        let items = items.collect::<Result<_, _>>().map_err(unexpected)?;
        self.is_over = next.is_null();
        self.cursor = next;
        Ok(Some(items))
    }
}

impl Client {
    /// Up to `limit` items of a list, and the cursor behind them. `path` must include a `?`.
    pub(super) async fn list(
        &self,
        path: &str,
        limit: usize,
        item: &'static Kind,
    ) -> Result<(Vec<Value>, Value), ClientError> {
        let (mut pages, mut rows) = (Pages::of(self, path, item), Vec::new());
        while rows.len() < limit
            && let Some(items) = pages.next(PAGE.min(limit - rows.len())).await?
        {
            rows.extend(items);
        }
        Ok((rows, pages.cursor))
    }
}
