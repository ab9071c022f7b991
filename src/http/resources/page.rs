//! Pagination: `limit`, `cursor` and `{data, next_cursor}`.
//!
//! What a cursor is made of is in [`crate::http::edge::cursor`].

use std::ops::Deref;

use chrono::{DateTime, Datelike as _, Utc};
use serde::Serialize;
use serde_json::json;
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use crate::http::edge::cursor::ListId;
use crate::http::edge::extract::{Params, invalid_parameter};
use crate::http::edge::problem::Problem;
use crate::store::{Page, Piece, RunCursor, UsageCursor, UsageStats};

/// The default and maximum of `limit`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageSize {
    default: u32,
    max: u32,
}

/// For lists that grow without bound.
pub(crate) const LISTS: PageSize = PageSize { default: 50, max: 200 };
/// For the parts of one run, agents and tools.
pub(crate) const PARTS: PageSize = PageSize { default: 200, max: 1000 };

/// For stretches of the audit log, of which each is compared with a thousand records.
pub(crate) const STRETCHES: PageSize = PageSize { default: 20, max: 50 };

/// Bytes of large items behind which a page ends.
pub(crate) const MAX_PAGE: usize = 4 << 20;

/// One page of a list.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Page)]
pub(crate) struct Listing<T> {
    /// The items of this page.
    pub(super) data: Vec<T>,
    /// The `cursor` of the next page; null on the last page.
    #[schema(example = json!(null))]
    next_cursor: Option<String>,
}

impl<T> Listing<T> {
    /// A whole list.
    pub(crate) fn whole(data: Vec<T>) -> Self {
        Self { data, next_cursor: None }
    }

    /// A page that ends at a position; `None` if the list ends with it.
    pub(crate) fn until(data: Vec<T>, list: ListId, position: Option<Position>) -> Self {
        Self { data, next_cursor: position.map(|position| position.in_list(list)) }
    }

    /// `rows` were queried with `page`, whose limit is one more than the page size.
    pub(crate) fn of<R, C>(
        mut rows: Vec<R>,
        page: &ListPage<C>,
        position: impl FnOnce(&R) -> Position,
        view: impl FnMut(R) -> T,
    ) -> Self {
        let size = page.limit as usize - 1;
        let more = rows.len() > size;
        rows.truncate(size);
        let last = if more { rows.last().map(position) } else { None };
        Self::until(rows.into_iter().map(view).collect(), page.list, last)
    }

    /// A page of a list that is completely in memory.
    pub(crate) fn of_all(all: Vec<T>, page: &ListPage<i64>) -> Self {
        let start = page.after.unwrap_or(0);
        let rows: Vec<T> = all.into_iter().skip(offset(start)).take(page.limit as usize).collect();
        Self::of(rows, page, |_| next_offset(page), |row| row)
    }

    /// The same page with its items converted.
    pub(crate) fn map<V>(self, view: impl FnMut(T) -> V) -> Listing<V> {
        Listing { data: self.data.into_iter().map(view).collect(), next_cursor: self.next_cursor }
    }

    /// A page of a list of large items that is completely in memory: it has at most this many bytes, or one item.
    pub(crate) fn of_large(
        all: Vec<T>,
        page: &ListPage<i64>,
        most_bytes: usize,
        size: impl Fn(&T) -> usize,
    ) -> Self {
        let start = page.after.unwrap_or(0);
        let rows = all.iter().skip(offset(start)).take(page.limit as usize);
        let count = fitting(rows.map(size), most_bytes);
        Self::of_all(all, &page.of_size(u32::try_from(count).unwrap_or(u32::MAX)))
    }
}

/// How many of the first items of these sizes fit into this many bytes: at least one.
pub(super) fn fitting(sizes: impl Iterator<Item = usize>, most_bytes: usize) -> usize {
    let mut bytes = 0;
    let fits = |(index, size): &(usize, usize)| {
        bytes += size;
        *index == 0 || bytes <= most_bytes
    };
    sizes.enumerate().take_while(fits).count()
}

fn offset(number: i64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// A place in a list, of which its cursors are made.
#[derive(Debug, Clone)]
pub(crate) struct Position(String);

impl Position {
    pub(crate) fn in_list(&self, list: ListId) -> String {
        list.cursor(&self.0)
    }
}

/// The position after this page, in a list whose positions are offsets.
pub(crate) fn next_offset(page: &Page<i64>) -> Position {
    number_position(page.after.unwrap_or(0) + i64::from(page.limit) - 1)
}

pub(crate) fn number_position(number: i64) -> Position {
    Position(format!("n{number}"))
}

pub(crate) fn time_position(at: DateTime<Utc>, id: &str) -> Position {
    Position(format!("t{}.{id}", at.timestamp_micros()))
}

pub(crate) fn text_position(text: &str) -> Position {
    Position(format!("s{text}"))
}

pub(crate) fn usage_position(UsageStats { day, agent, model, .. }: &UsageStats) -> Position {
    Position(format!("u{}", json!([day, agent, model])))
}

/// A requested page, and its list.
#[derive(Debug, Clone)]
pub(crate) struct ListPage<C> {
    pub(super) page: Page<C>,
    pub(super) list: ListId,
}

impl<C> Deref for ListPage<C> {
    type Target = Page<C>;

    fn deref(&self) -> &Page<C> {
        &self.page
    }
}

impl<C: Clone> ListPage<C> {
    /// The same with at most this many items.
    pub(super) fn of_size(&self, size: u32) -> Self {
        let limit = self.page.limit.min(size.saturating_add(1));
        Self { page: Page { limit, after: self.page.after.clone() }, list: self.list }
    }

    /// The part of the page that fits, and whether more follows.
    pub(super) fn fitted(&self, piece: Piece) -> (Page<C>, bool) {
        let has_more = piece.has_more || piece.rows == self.page.limit;
        let limit = piece.rows.min(self.page.limit - 1);
        (Page { limit, after: self.page.after.clone() }, has_more)
    }
}

impl<C> ListPage<C> {
    /// Parses `limit` and `cursor`. The page's limit is one more than requested, to detect whether
    /// there is a next page.
    fn read(
        params: &mut Params,
        tenant: &str,
        size: PageSize,
        position: impl FnOnce(&str) -> Option<C>,
    ) -> Result<Self, Problem> {
        let list = params.list(tenant);
        let after = params.text("cursor").map(|cursor| list.position(&cursor, position));
        let after = after.transpose().map_err(|it| invalid_parameter("cursor", it.why()))?;
        Ok(Self { page: Page { limit: limit(params, size)?, after }, list })
    }
}

/// A page of this tenant's list whose positions are numbers.
pub(crate) fn by_number(
    params: &mut Params,
    tenant: &str,
    size: PageSize,
) -> Result<ListPage<i64>, Problem> {
    ListPage::read(params, tenant, size, |position| {
        let number = position.strip_prefix('n')?.parse().ok()?;
        (0..=i64::MAX / 2).contains(&number).then_some(number)
    })
}

/// As [`by_number`], for a list sorted by a text.
pub(crate) fn by_text(
    params: &mut Params,
    tenant: &str,
    size: PageSize,
) -> Result<ListPage<String>, Problem> {
    ListPage::read(params, tenant, size, |position| position.strip_prefix('s').map(str::to_owned))
}

/// As [`by_number`], for the sums of usage.
pub(crate) fn by_usage(
    params: &mut Params,
    tenant: &str,
    size: PageSize,
) -> Result<ListPage<UsageCursor>, Problem> {
    ListPage::read(params, tenant, size, |position| {
        let parts: [String; 3] = serde_json::from_str(position.strip_prefix('u')?).ok()?;
        let [day, agent, model] = parts;
        Some(UsageCursor { day, agent, model })
    })
}

/// As [`by_number`], for a list sorted by time whose ids are UUIDs.
pub(crate) fn by_time(
    params: &mut Params,
    tenant: &str,
    size: PageSize,
) -> Result<ListPage<RunCursor>, Problem> {
    ListPage::read(params, tenant, size, run_position)
}

/// As [`by_time`], for other ids.
pub(crate) fn by_time_and(
    params: &mut Params,
    tenant: &str,
    size: PageSize,
    is_id: impl FnOnce(&str) -> bool,
) -> Result<ListPage<RunCursor>, Problem> {
    ListPage::read(params, tenant, size, |position| {
        in_time(position).filter(|place| is_id(&place.id))
    })
}

/// A place in a list of runs.
pub(crate) fn run_position(position: &str) -> Option<RunCursor> {
    in_time(position).filter(|place| Uuid::try_parse(&place.id).is_ok())
}

fn in_time(position: &str) -> Option<RunCursor> {
    let (micros, id) = position.strip_prefix('t')?.split_once('.')?;
    let at = DateTime::from_timestamp_micros(micros.parse().ok()?)?;
    let has_time = (0..=9999).contains(&at.year()); // a database has an earliest one
    has_time.then(|| RunCursor { at, id: id.to_owned() })
}

fn limit(params: &mut Params, size: PageSize) -> Result<u32, Problem> {
    let Some(text) = params.text("limit") else { return Ok(size.default + 1) };
    match text.parse() {
        Ok(limit) if (1..=size.max).contains(&limit) => Ok(limit + 1),
        _ => Err(invalid_parameter("limit", &format!("must be a number from 1 to {}", size.max))),
    }
}

/// `limit` and `cursor` of [`LISTS`], for the API document.
pub(crate) struct ListParams;

impl IntoParams for ListParams {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        documented(LISTS)
    }
}

/// `limit` and `cursor` of [`PARTS`], for the API document.
pub(crate) struct PartParams;

impl IntoParams for PartParams {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        documented(PARTS)
    }
}

/// `limit` and `cursor` of [`STRETCHES`], for the API document.
pub(crate) struct StretchParams;

impl IntoParams for StretchParams {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        documented(STRETCHES)
    }
}

fn documented(size: PageSize) -> Vec<Parameter> {
    let limit = ObjectBuilder::new()
        .schema_type(Type::Integer)
        .minimum(Some(1))
        .maximum(Some(size.max))
        .default(Some(size.default.into()));
    let parameter = |name, description, schema: ObjectBuilder| {
        let query = ParameterBuilder::new().name(name).parameter_in(ParameterIn::Query);
        query.description(Some(description)).schema(Some(schema)).build()
    };
    vec![
        parameter("limit", "Maximum number of items per page.", limit),
        parameter(
            "cursor",
            "The `next_cursor` of the previous page, of the same list with the same filters.",
            ObjectBuilder::new().schema_type(Type::String).min_length(Some(1)),
        ),
    ]
}

#[cfg(test)]
#[path = "page_tests.rs"]
mod tests;
