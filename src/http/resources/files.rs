//! The files of a run, of a session and of an agent: lists, contents, changes.
//!
//! The three are one resource under three names: the handlers say whose files are meant. Contents
//! stream in both directions. A path that the agent could neither read nor write, or that leads out
//! of the workspace, is not there for a caller either. What a browser could execute is served as a
//! download. Changes are recorded in the audit log before they are made.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::{FromRequestParts, Path, State};
use axum::http::header::{
    ACCEPT_RANGES, CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG,
    LAST_MODIFIED, LOCATION, RANGE,
};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use serde_json::json;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{KnownFormat, ObjectBuilder, Schema, SchemaFormat, Type};
use utoipa::{PartialSchema, ToSchema};
use uuid::Uuid;

use super::downloads;
use super::file_headers::{Preconditions, Range, Served, disposition, media_type};
use super::last_changes::{Changer, LastChanges};
use super::page::{LISTS, Listing, by_text, text_position};
use super::uploads::{Pace, Received, received};
use crate::event::{Act, AuditAction};
use crate::fairness::{CpuAccount, FairTask};
use crate::http::edge::auth::{FilesRead, FilesWrite, Scoped};
use crate::http::edge::extract::{Params, refuse_encoding};
use crate::http::edge::problem::{Code, Problem};
use crate::http::state::App;
use crate::run::Caller;
use crate::runtime::FileOwner as Owner;
use crate::store::Store;
use crate::tools::stored_files::{ListedFile, MAX_HASHED_FILE};

/// How long a change waits for its record.
const RECORD_TIMEOUT: Duration = Duration::from_secs(10);

/// A file of a workspace.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = File)]
pub(crate) struct FileView {
    /// Relative to the workspace.
    #[schema(example = "out/report.md")]
    path: String,
    /// Bytes.
    #[schema(example = 1234)]
    size: u64,
    /// When it was last changed.
    modified_at: DateTime<Utc>,
    /// By its name.
    #[schema(example = "text/markdown; charset=utf-8")]
    media_type: String,
    /// The SHA-256 of its content, in quotes, as the header `ETag`; null if it cannot be read, or is
    /// too large to be hashed for a list.
    #[schema(
        value_type = Option<String>,
        example = "\"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\""
    )]
    etag: Option<Arc<str>>,
    /// The call that last changed it; null if no call did, or if it is unknown.
    #[schema(example = json!(null))]
    changed_by: Option<Uuid>,
    /// The run of that call.
    #[schema(example = json!(null))]
    changed_by_run: Option<Uuid>,
    /// The key id or token subject that last put it there; null if no caller did, or if it is unknown.
    #[schema(example = json!(null))]
    changed_by_subject: Option<String>,
}

impl FileView {
    fn of(file: ListedFile, Changer { call, run, subject }: Changer) -> Self {
        Self {
            media_type: media_type(&file.path),
            path: file.path,
            size: file.size,
            modified_at: file.modified.into(),
            etag: file.etag,
            changed_by: call,
            changed_by_run: run,
            changed_by_subject: subject,
        }
    }
}

/// Bytes, for the API document.
struct Bytes;

impl PartialSchema for Bytes {
    fn schema() -> RefOr<Schema> {
        let binary = SchemaFormat::KnownFormat(KnownFormat::Binary);
        ObjectBuilder::new().schema_type(Type::String).format(Some(binary)).into()
    }
}

impl ToSchema for Bytes {}

/// Which of them a route is about.
#[derive(Debug, Clone, Copy)]
enum OwnerKind {
    Run,
    Session,
    Agent,
}

/// The parameters of a route: the owner's name, and the file's path where the route has one.
pub(crate) struct Names {
    owner: String,
    path: String,
}

impl FromRequestParts<App> for Names {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, Problem> {
        let unknown = || Problem::not_found("path");
        let given = Path::<Vec<(String, String)>>::from_request_parts(parts, &()).await;
        let Path(given) = given.map_err(|_| unknown())?;
        let mut given = given.into_iter().map(|(_, value)| value);
        let owner = given.next().ok_or_else(unknown)?;
        let path = given.next().unwrap_or_default();
        if owner.contains('\0') || path.contains('\0') {
            return Err(unknown());
        }
        Ok(Self { owner, path })
    }
}

/// The owner, and the path of one of its files.
struct Place {
    owner: Owner,
    path: String,
}

impl Place {
    fn of(kind: OwnerKind, Names { owner, path }: Names) -> Result<Self, Problem> {
        let owner = match kind {
            OwnerKind::Run => {
                Owner::Run(Uuid::try_parse(&owner).map_err(|_| Problem::not_found("run"))?)
            }
            OwnerKind::Session => Owner::Session(owner),
            OwnerKind::Agent => Owner::Agent(owner),
        };
        Ok(Self { owner, path })
    }
}

impl Owner {
    /// The place of a file of this owner.
    fn url(&self, path: &str) -> String {
        let encoded = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        let path: Vec<String> = path.split('/').map(encoded).collect();
        let path = path.join("/");
        match self {
            Self::Run(id) => format!("/v1/runs/{id}/files/{path}"),
            Self::Session(id) => format!("/v1/sessions/{}/files/{path}", encoded(id)),
            Self::Agent(name) => format!("/v1/agents/{}/files/{path}", encoded(name)),
        }
    }

    fn act(&self, caller: &Caller, action: AuditAction, path: &str, etag: Option<&str>) -> Act {
        let mut details = json!({"path": path});
        let mut add = |name: &str, value: &str| details[name] = value.into();
        match self {
            Self::Run(_) => {}
            Self::Session(id) => add("session_id", id),
            Self::Agent(name) => add("agent", name),
        }
        if let Some(etag) = etag {
            add("etag", etag);
        }
        Act {
            tenant: caller.tenant.clone(),
            subject: caller.subject.clone(),
            action,
            run_id: if let Self::Run(id) = self { Some(*id) } else { None },
            reason: None,
            details,
        }
    }
}

macro_rules! files_of {
    (
        $of:ident: $list:ident $get:ident $put:ident $delete:ident,
        $tag:literal, $route:literal, $file:literal, $id:literal: $kind:ty, $about:literal, $what:literal
    ) => {
        #[utoipa::path(
            get, path = $route, tag = $tag, security(("bearer" = ["files:read"])),
            summary = concat!("List the files of ", $what),
            description = "Sorted by path. Links are not listed.",
            params(
                ($id = $kind, Path, description = $about),
                ("prefix" = Option<String>, Query, description = "Only files whose paths begin with this."),
                super::page::ListParams,
            ),
            responses((status = 200, description = "A page of files.", body = Listing<FileView>)),
        )]
        pub(crate) async fn $list(
            State(app): State<App>,
            caller: Scoped<FilesRead>,
            names: Names,
            params: Params,
        ) -> Result<Json<Listing<FileView>>, Problem> {
            list(&app, &caller, Place::of(OwnerKind::$of, names)?, params).await
        }

        #[utoipa::path(
            get, path = $file, tag = $tag, security(("bearer" = ["files:read"])),
            summary = concat!("Get a file of ", $what),
            description = "Its content, or a range of it; `HEAD` answers the headers alone. `If-None-Match` answers 304 while the file is the same, `If-Match` 412 once it is another one. A file above 64 MiB has a weak entity tag, of its size, times and place, which `If-Match` never finds.",
            params(
                ($id = $kind, Path, description = $about),
                ("path" = String, Path, description = "The file's path in the workspace."),
                ("Range" = Option<String>, Header, description = "One range of bytes."),
                ("If-Match" = Option<String>, Header, description = "Succeeds only if the file has one of these entity tags."),
                ("If-None-Match" = Option<String>, Header, description = "Entity tags that the client has already."),
            ),
            responses(
                (status = 200, description = "The content.", content((inline(Bytes) = "application/octet-stream"), (inline(Bytes) = "*/*")),
                    headers(
                        ("etag" = String, description = "The quoted SHA-256 of the content; a weak tag above 64 MiB."),
                        ("accept-ranges" = String, description = "`bytes`: a range of it can be asked for."),
                        ("last-modified" = String, description = "When the file was changed."),
                        ("content-disposition" = String, description = "Whether a browser shows or saves it, and the file's name."),
                    )),
                (status = 206, description = "A range of it.", content((inline(Bytes) = "application/octet-stream"), (inline(Bytes) = "*/*")),
                    headers(
                        ("etag" = String, description = "The entity tag of the whole content."),
                        ("accept-ranges" = String, description = "`bytes`: a range of it can be asked for."),
                        ("content-range" = String, description = "Which bytes these are, and how many the file has: `bytes <first>-<last>/<size>`."),
                        ("last-modified" = String, description = "When the file was changed."),
                        ("content-disposition" = String, description = "Whether a browser shows or saves it, and the file's name."),
                    )),
                (status = 304, description = "The file has not changed since the client read it.",
                    headers(("etag" = String, description = "The one that it has."))),
            ),
        )]
        pub(crate) async fn $get(
            State(app): State<App>,
            caller: Scoped<FilesRead>,
            names: Names,
            params: Params,
            method: Method,
            mut headers: HeaderMap,
        ) -> Result<Response, Problem> {
            params.finish()?;
            if method == Method::HEAD {
                headers.remove(RANGE); // a range is one of what a GET answers
            }
            get(&app, &caller, Place::of(OwnerKind::$of, names)?, &method, &headers).await
        }

        #[utoipa::path(
            put, path = $file, tag = $tag, security(("bearer" = ["files:write"])),
            summary = concat!("Put a file of ", $what),
            description = "The body is the content. `If-None-Match: *` writes only if there is no file; `If-Match` only if the file is unchanged since the client read it.",
            params(
                ($id = $kind, Path, description = $about),
                ("path" = String, Path, description = "The file's path in the workspace."),
                ("If-Match" = Option<String>, Header, description = "Succeeds only if the file has one of these entity tags."),
                ("If-None-Match" = Option<String>, Header, description = "`*`: there must be no file."),
            ),
            request_body(content = inline(Bytes), content_type = "application/octet-stream", description = "The content."),
            responses(
                (status = 201, description = "The file is new.",
                    headers(("etag" = String, description = "The quoted SHA-256 of the content; absent above 64 MiB."), ("location" = String, description = "The URL of the file."))),
                (status = 204, description = "The file was replaced.",
                    headers(("etag" = String, description = "The quoted SHA-256 of the content; absent above 64 MiB."))),
            ),
        )]
        pub(crate) async fn $put(
            State(app): State<App>,
            caller: Scoped<FilesWrite>,
            names: Names,
            params: Params,
            request: Request<Body>,
        ) -> Result<Response, Problem> {
            params.finish()?;
            put(&app, &caller, Place::of(OwnerKind::$of, names)?, request).await
        }

        #[utoipa::path(
            delete, path = $file, tag = $tag, security(("bearer" = ["files:write"])),
            summary = concat!("Delete a file of ", $what),
            description = "`If-Match` deletes only if the file is unchanged since the client read it. A directory is not deleted (409): delete its files one by one. Directories that become empty are deleted with their last file.",
            params(
                ($id = $kind, Path, description = $about),
                ("path" = String, Path, description = "The file's path in the workspace."),
                ("If-Match" = Option<String>, Header, description = "Succeeds only if the file has one of these entity tags."),
            ),
            responses((status = 204, description = "The file is deleted.")),
        )]
        pub(crate) async fn $delete(
            State(app): State<App>,
            caller: Scoped<FilesWrite>,
            names: Names,
            params: Params,
            headers: HeaderMap,
        ) -> Result<StatusCode, Problem> {
            params.finish()?;
            delete(&app, &caller, Place::of(OwnerKind::$of, names)?, &headers).await
        }
    };
}

files_of! {
    Run: list_run_files get_run_file put_run_file delete_run_file,
    "runs", "/runs/{id}/files", "/runs/{id}/files/{*path}", "id": Uuid, "The run's id.", "a run"
}
files_of! {
    Session: list_session_files get_session_file put_session_file delete_session_file,
    "sessions", "/sessions/{id}/files", "/sessions/{id}/files/{*path}", "id": String, "The session's id.", "a session"
}
files_of! {
    Agent: list_agent_files get_agent_file put_agent_file delete_agent_file,
    "agents", "/agents/{name}/files", "/agents/{name}/files/{*path}", "name": String, "The agent's name.", "an agent"
}

async fn list(
    app: &App,
    caller: &Caller,
    Place { owner, .. }: Place,
    mut params: Params,
) -> Result<Json<Listing<FileView>>, Problem> {
    let page = by_text(&mut params, &caller.tenant, LISTS)?;
    let prefix = params.text("prefix").unwrap_or_default();
    params.finish()?;
    let files = app.runtime.files_of(&caller.tenant, &owner).await?;
    let rows = files.list(prefix, page.after.clone(), page.limit as usize).await?;
    let mut changed_by = LastChanges::of(app, &caller.tenant, files.users(), &rows).await?;
    let cursor = |file: &ListedFile| text_position(&file.path);
    let view = |file: ListedFile| {
        let changer = changed_by.take(&file);
        FileView::of(file, changer)
    };
    Ok(Json(Listing::of(rows, &page, cursor, view)))
}

async fn get(
    app: &App,
    caller: &Caller,
    Place { owner, path }: Place,
    method: &Method,
    headers: &HeaderMap,
) -> Result<Response, Problem> {
    let files = app.runtime.files_of(&caller.tenant, &owner).await?;
    let has_content = method != Method::HEAD;
    let place = if has_content { Some(downloads::place(caller).await?) } else { None };
    let opened = files.open(path).await?.ok_or_else(|| Problem::not_found("file"))?;
    let size = opened.size;
    let tag = HeaderValue::from_str(&opened.etag).map_err(|e| Problem::internal(e.to_string()))?;
    match Preconditions::read(headers).judge(&opened.etag) {
        Served::Content => {}
        Served::NotModified => return Ok((StatusCode::NOT_MODIFIED, [(ETAG, tag)]).into_response()),
        Served::PreconditionFailed => return Err(precondition_failed()),
    }
    let Ok(range) = Range::read(headers, size, &opened.etag) else {
        let detail = format!("The requested range is not in the file, which has {size} bytes.");
        let mut refused = Problem::new(Code::RangeNotSatisfiable, detail).into_response();
        add(refused.headers_mut(), CONTENT_RANGE, Some(format!("bytes */{size}")));
        return Ok(refused);
    };
    let (status, start, length) = match range {
        None => (StatusCode::OK, 0, size),
        Some(Range { start, end }) => (StatusCode::PARTIAL_CONTENT, start, end - start + 1),
    };
    let mut response = status.into_response();
    let headers = response.headers_mut();
    headers.insert(ETAG, tag);
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(CONTENT_LENGTH, length.into());
    let modified = DateTime::<Utc>::from(opened.modified).format("%a, %d %b %Y %H:%M:%S GMT");
    add(headers, CONTENT_TYPE, Some(media_type(&opened.path)));
    add(headers, LAST_MODIFIED, Some(modified.to_string()));
    add(headers, CONTENT_DISPOSITION, Some(disposition(&opened.path)));
    let range = range.map(|Range { start, end }| format!("bytes {start}-{end}/{size}"));
    add(headers, CONTENT_RANGE, range);
    if let Some(place) = place {
        *response.body_mut() = downloads::body(opened.content(start, length), length, place);
    }
    Ok(response)
}

async fn put(
    app: &App,
    caller: &Caller,
    Place { owner, path }: Place,
    request: Request<Body>,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    refuse_encoding(&parts.headers)?;
    if parts.headers.contains_key(CONTENT_RANGE) {
        let why = "The header Content-Range is not supported: the body must be the whole file.";
        return Err(Problem::new(Code::InvalidParameter, why)); // RFC 9110, section 14.5
    }
    let condition = Preconditions::read(&parts.headers).of_change();
    let files = app.runtime.files_of(&caller.tenant, &owner).await?;
    let pace = Pace::default();
    let received = received(app, caller, pace.of(body.into_data_stream()));
    let file = pace.enforce(app.settings.body_timeout, received).await?;
    let Received { staged, size, etag } = file;
    let (store, by, whose) = (Arc::clone(&app.store), caller.clone(), owner.clone());
    let tag = etag.clone();
    let change = async move {
        let (path, condition) = files.judge(path, Some(size), condition).await?;
        let act = whose.act(&by, AuditAction::FileWritten, &path, Some(&tag));
        record(&store, act).await?;
        let is_new = files.put(path.clone(), staged, size, condition).await?;
        Ok::<_, Problem>((path, is_new))
    };
    let (path, is_new) = completed(&caller.tenant, change).await?;
    let status = if is_new { StatusCode::CREATED } else { StatusCode::NO_CONTENT };
    let mut response = status.into_response();
    let headers = response.headers_mut();
    // The tag of a larger file does not identify the content that was sent.
    add(headers, ETAG, (size <= MAX_HASHED_FILE).then_some(etag));
    add(headers, LOCATION, is_new.then(|| owner.url(&path)));
    Ok(response)
}

async fn delete(
    app: &App,
    caller: &Caller,
    Place { owner, path }: Place,
    headers: &HeaderMap,
) -> Result<StatusCode, Problem> {
    let condition = Preconditions::read(headers).of_change();
    let files = app.runtime.files_of(&caller.tenant, &owner).await?;
    let (store, by) = (Arc::clone(&app.store), caller.clone());
    let change = async move {
        let (path, condition) = files.judge(path, None, condition).await?;
        record(&store, owner.act(&by, AuditAction::FileDeleted, &path, None)).await?;
        files.delete(path, condition).await.map_err(Problem::from)
    };
    completed(&caller.tenant, change).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Records a change of a file before it is made, so that a crash leaves no change without a record.
async fn record(store: &Store, act: Act) -> Result<(), Problem> {
    let Ok(recorded) = tokio::time::timeout(RECORD_TIMEOUT, store.record_act(act)).await else {
        let detail = "The file was not changed, because the change could not be recorded.";
        return Err(Problem::new(Code::StoreUnavailable, detail));
    };
    Ok(recorded?)
}

/// Completes a change even if the client disconnects.
async fn completed<T: Send + 'static>(
    tenant: &str,
    change: impl Future<Output = Result<T, Problem>> + Send + 'static,
) -> Result<T, Problem> {
    let done = tokio::spawn(FairTask::new(CpuAccount::tenant(tenant), change)).await;
    done.map_err(|panic| Problem::internal(panic.to_string()))?
}

fn add(headers: &mut HeaderMap, name: HeaderName, value: Option<String>) {
    let value = value.and_then(|value| HeaderValue::try_from(value).ok());
    headers.extend(value.map(|value| (name, value)));
}

fn precondition_failed() -> Problem {
    Problem::new(Code::PreconditionFailed, "The file does not match If-Match or If-None-Match.")
}

#[cfg(test)]
#[path = "files_tests.rs"]
mod tests;
