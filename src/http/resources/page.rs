//! Pagination: `limit`, `cursor` and `{data, next_cursor}`.
//!
//! A cursor is opaque to clients: the base64url encoding of a position in a list. It needs no
//! signature, since it never names the tenant, and its content is validated like any input.

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use chrono::{DateTime, Utc};
use serde::Serialize;
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use crate::http::edge::extract::{Params, invalid_parameter};
use crate::http::edge::problem::Problem;
use crate::store::{Page, RunCursor};

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

/// One page of a list.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Page)]
pub(crate) struct Listing<T> {
    /// The items of this page.
    pub(super) data: Vec<T>,
    /// The `cursor` of the next page; null on the last page.
    #[schema(example = json!(null))]
    pub(super) next_cursor: Option<String>,
}

impl<T> Listing<T> {
    /// `rows` were queried with `page`, whose limit is one more than the page size.
    pub(crate) fn of<R, C>(
        mut rows: Vec<R>,
        page: &Page<C>,
        cursor: impl FnOnce(&R) -> String,
        view: impl FnMut(R) -> T,
    ) -> Self {
        let size = page.limit as usize - 1;
        let more = rows.len() > size;
        rows.truncate(size);
        let next_cursor = if more { rows.last().map(cursor) } else { None };
        Self { data: rows.into_iter().map(view).collect(), next_cursor }
    }

    /// A page of a list that is wholly in memory.
    pub(crate) fn of_all(all: Vec<T>, page: &Page<i64>) -> Self {
        let start = page.after.unwrap_or(0);
        let rows: Vec<T> = all.into_iter().skip(offset(start)).take(page.limit as usize).collect();
        Self::of(rows, page, |_| next_offset(page), |row| row)
    }

    /// The same of large items: the page ends behind so many bytes, too.
    pub(crate) fn of_large(
        all: Vec<T>,
        page: &Page<i64>,
        most_bytes: usize,
        size: impl Fn(&T) -> usize,
    ) -> Self {
        let start = page.after.unwrap_or(0);
        let mut bytes = 0;
        let mut fits = |item: &T| {
            let is_open = bytes <= most_bytes;
            bytes += size(item);
            is_open
        };
        let rows = all.iter().skip(offset(start)).take(page.limit as usize);
        let count = rows.take_while(|item| fits(item)).count();
        let shorter = u32::try_from(count).unwrap_or(u32::MAX).saturating_add(1);
        let limit = page.limit.min(shorter);
        Self::of_all(all, &Page { limit, after: page.after })
    }
}

fn offset(number: i64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// The cursor after this page, in a list whose cursors are offsets.
pub(crate) fn next_offset(page: &Page<i64>) -> String {
    number_cursor(page.after.unwrap_or(0) + i64::from(page.limit) - 1)
}

pub(crate) fn number_cursor(number: i64) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(format!("n{number}"))
}

pub(crate) fn time_cursor(at: DateTime<Utc>, id: &str) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(format!("t{}.{id}", at.timestamp_micros()))
}

/// Parses `limit` and `cursor` of a list whose cursors are numbers. The page's limit is one more than
/// requested, to detect whether there is a next page.
pub(crate) fn by_number(params: &mut Params, size: PageSize) -> Result<Page<i64>, Problem> {
    let after = params.value("cursor", "the next_cursor of a page of this list", |text| {
        let number = decoded(text)?.strip_prefix('n')?.parse().ok()?;
        (0..=i64::MAX / 2).contains(&number).then_some(number)
    })?;
    Ok(Page { limit: limit(params, size)?, after })
}

/// As [`by_number`], for a list sorted by a text.
pub(crate) fn by_text(params: &mut Params, size: PageSize) -> Result<Page<String>, Problem> {
    let after = params.value("cursor", "the next_cursor of a page of this list", |text| {
        decoded(text)?.strip_prefix('s').map(str::to_owned)
    })?;
    Ok(Page { limit: limit(params, size)?, after })
}

pub(crate) fn text_cursor(text: &str) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(format!("s{text}"))
}

/// As [`by_number`], for a list sorted by time whose ids are UUIDs.
pub(crate) fn by_time(params: &mut Params, size: PageSize) -> Result<Page<RunCursor>, Problem> {
    by_time_and(params, size, |id| Uuid::try_parse(id).is_ok())
}

/// As [`by_time`], for other ids.
pub(crate) fn by_time_and(
    params: &mut Params,
    size: PageSize,
    is_id: impl FnOnce(&str) -> bool,
) -> Result<Page<RunCursor>, Problem> {
    let after = params.value("cursor", "the next_cursor of a page of this list", |text| {
        in_time(text).filter(|place| is_id(&place.id))
    })?;
    Ok(Page { limit: limit(params, size)?, after })
}

/// The place that a cursor of a list of runs names.
pub(crate) fn time_of_cursor(cursor: &str) -> Option<RunCursor> {
    in_time(cursor).filter(|place| Uuid::try_parse(&place.id).is_ok())
}

fn in_time(cursor: &str) -> Option<RunCursor> {
    let text = decoded(cursor)?;
    let (micros, id) = text.strip_prefix('t')?.split_once('.')?;
    let at = DateTime::from_timestamp_micros(micros.parse().ok()?)?;
    Some(RunCursor { at, id: id.to_owned() })
}

fn limit(params: &mut Params, size: PageSize) -> Result<u32, Problem> {
    let Some(text) = params.text("limit") else { return Ok(size.default + 1) };
    match text.parse() {
        Ok(limit) if (1..=size.max).contains(&limit) => Ok(limit + 1),
        _ => Err(invalid_parameter("limit", &format!("must be a number from 1 to {}", size.max))),
    }
}

fn decoded(cursor: &str) -> Option<String> {
    String::from_utf8(BASE64_URL_SAFE_NO_PAD.decode(cursor).ok()?).ok()
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
            "The `next_cursor` of the previous page.",
            ObjectBuilder::new().schema_type(Type::String),
        ),
    ]
}

#[cfg(test)]
#[path = "page_tests.rs"]
mod tests;
