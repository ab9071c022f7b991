//! The one browser of this process, and the pages of its runs.
//!
//! It starts with the first page and ends a minute after the last one was used. A page belongs to one
//! run and is found by no other. It closes with its run; a minute after the run was parked; after ten
//! minutes without use; or when another run needs its place. Where all are in use, runs wait for one: those
//! of a tenant in the order in which they came, and tenants in turn.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::{Mutex, MutexGuard, Notify, OwnedMutexGuard};
use tokio::time::{Instant, timeout, timeout_at};
use uuid::Uuid;

use super::chromium::{self, Chromium, INSTALL};
use super::page::{Page, Viewport};
use crate::bounds::key_locks::KeyLocks;
use crate::outbound::Client;

/// A browser without pages, and the page of a parked run, closes after this time.
const IDLE: Duration = Duration::from_mins(1);
/// A page that is not used closes after this time.
const UNUSED: Duration = Duration::from_mins(10);
/// The interval at which idle pages are looked for.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// The longest interval at which a free page is looked for.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// A browser that has no page ready after this time is ended.
const READY: Duration = Duration::from_secs(20);

/// How pages are opened.
#[derive(Debug, Clone)]
pub struct BrowserSettings {
    /// The program; empty: it is looked for.
    pub path: PathBuf,
    /// One call.
    pub timeout: Duration,
    /// Pages that are open at the same time.
    pub pages: usize,
    pub viewport: Viewport,
}

pub(super) struct Pool {
    settings: BrowserSettings,
    client: Client,
    state: Mutex<State>,
    /// Whether there is a browser, as far as that is known without waiting.
    is_running: AtomicBool,
    /// A lock for each run, so that its calls use its page one after another.
    turns: KeyLocks<Uuid>,
    /// A lock for each tenant, which serialises its runs that wait for a page.
    queues: KeyLocks<String>,
    /// Held by the run that is next to get a page. The first waiting run of each tenant queues for it.
    queue: Mutex<()>,
    /// Notified when a page may have become free.
    freed: Notify,
}

struct State {
    chromium: Option<Arc<Chromium>>,
    pages: HashMap<Uuid, KeptPage>,
    /// A page that was opened before a run needs it.
    spare: Option<Page>,
    is_preparing_spare: bool,
    /// Its reference count, less one, is the number of runs whose pages are being opened.
    opening: Arc<()>,
    used: Instant,
}

struct KeptPage {
    page: Arc<Page>,
    used: Instant,
    is_driven: bool,
}

impl State {
    /// Whether there is room for one more page. If necessary, closes one that is not in use.
    fn makes_room(&mut self, most: usize) -> bool {
        self.pages.retain(|_, kept| kept.is_kept());
        if self.pages.len() + self.opening() < most {
            return true;
        }
        let idle = self.pages.iter().filter(|(_, kept)| !kept.is_busy());
        let oldest = idle.min_by_key(|(_, kept)| (kept.is_driven, kept.used)).map(|(run, _)| *run);
        oldest.is_some_and(|oldest| self.pages.remove(&oldest).is_some())
    }

    /// How many runs have a place whose page is not open yet.
    fn opening(&self) -> usize {
        Arc::strong_count(&self.opening) - 1
    }

    fn has_browser(&self, chromium: &Arc<Chromium>) -> bool {
        self.chromium.as_ref().is_some_and(|it| Arc::ptr_eq(it, chromium))
    }
}

impl KeptPage {
    /// Whether a call uses it now.
    fn is_busy(&self) -> bool {
        Arc::strong_count(&self.page) > 1
    }

    fn is_kept(&self) -> bool {
        let most = if self.is_driven { UNUSED } else { IDLE };
        self.is_busy() || (self.page.is_open() && self.used.elapsed() < most)
    }
}

/// The right of a call to use its run's page. If it is dropped before [`Turn::end`], the page is closed
/// before the next call begins.
pub(super) struct Turn<'a> {
    pool: &'a Arc<Pool>,
    run: Uuid,
    /// `None` once the call has ended.
    held: Option<OwnedMutexGuard<()>>,
}

impl Turn<'_> {
    /// Ends the call; its page stays open.
    pub(super) fn end(mut self) {
        self.held = None;
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.pool.freed.notify_one();
        if let (Some(held), Ok(runtime)) = (self.held.take(), tokio::runtime::Handle::try_current())
        {
            let (pool, run) = (Arc::clone(self.pool), self.run);
            runtime.spawn(async move {
                pool.close(run).await;
                drop(held);
            });
        }
    }
}

impl Pool {
    pub(super) fn new(client: Client, settings: BrowserSettings) -> Arc<Self> {
        let used = Instant::now();
        let state = State {
            chromium: None,
            pages: HashMap::new(),
            spare: None,
            is_preparing_spare: false,
            opening: Arc::default(),
            used,
        };
        Arc::new(Self {
            settings,
            client,
            state: state.into(),
            is_running: AtomicBool::new(false),
            turns: KeyLocks::default(),
            queues: KeyLocks::default(),
            queue: Mutex::default(),
            freed: Notify::new(),
        })
    }

    /// Whether a run may have a page.
    pub(super) fn is_running(&self) -> bool {
        self.is_running.load(Ordering::Relaxed)
    }

    /// Why no browser can be started, unless one is running: a phrase.
    pub(super) fn lacks_a_browser(&self) -> Option<String> {
        (!self.is_running()).then(|| self.program().err())?
    }

    fn program(&self) -> Result<PathBuf, String> {
        chromium::program(&self.settings.path).ok_or_else(|| {
            format!("Chromium is not installed on this machine; the operator can {INSTALL}")
        })
    }

    /// Waits for earlier calls of this run.
    pub(super) async fn turn(self: &Arc<Self>, run: Uuid) -> Turn<'_> {
        Turn { pool: self, run, held: Some(self.turns.lock(run).await) }
    }

    /// The page of a run, if one is open.
    pub(super) async fn page(&self, run: Uuid) -> Option<Arc<Page>> {
        let mut state = self.state.lock().await;
        let now = Instant::now();
        let kept = state.pages.get_mut(&run).filter(|kept| kept.page.is_open());
        let page = kept.map(|kept| {
            (kept.used, kept.is_driven) = (now, true);
            Arc::clone(&kept.page)
        });
        match page {
            Some(_) => state.used = now,
            None => drop(state.pages.remove(&run)),
        }
        page
    }

    /// The page of a run, a new one where there is none. Where there are too many, the one that was
    /// not used for the longest time is closed; where all are in use, one is waited for until then.
    pub(super) async fn page_or_new(
        self: &Arc<Self>,
        run: Uuid,
        tenant: &str,
        until: Instant,
    ) -> Result<Arc<Page>, String> {
        if let Some(page) = self.page(run).await {
            return Ok(page);
        }
        let since = Instant::now();
        let mut state = timeout_at(until, self.place(tenant)).await.map_err(|_elapsed| {
            let all = self.settings.pages;
            format!("all {all} pages are in use; try again in a moment")
        })?;
        let spare = state.spare.take().filter(Page::is_open);
        state.used = since;
        let mut place = None;
        let page = if let Some(page) = spare {
            page
        } else {
            let chromium = self.running(&mut state).await?;
            place = Some(Arc::clone(&state.opening));
            drop(state); // other runs go on in the meantime
            let page = self.new_page(&chromium).await?;
            state = self.state.lock().await;
            if !state.has_browser(&chromium) {
                return Err("it has ended; try again".into());
            }
            page
        };
        let (page, used) = (Arc::new(page), Instant::now());
        state.used = used;
        state.pages.insert(run, KeptPage { page: Arc::clone(&page), used, is_driven: true });
        drop(place);
        drop(state);
        tracing::debug!(run_id = %run, elapsed = ?since.elapsed(), "a page is ready");
        tokio::spawn(Arc::clone(self).prepare_spare());
        Ok(page)
    }

    /// Waits until there is room for one more page. Tenants whose runs wait take turns.
    async fn place(&self, tenant: &str) -> MutexGuard<'_, State> {
        let _first_of_tenant = self.queues.lock(tenant.to_owned()).await;
        let _first = self.queue.lock().await;
        loop {
            let mut state = self.state.lock().await;
            if state.makes_room(self.settings.pages) {
                return state;
            }
            drop(state);
            let _ = timeout(LOOK_AGAIN, self.freed.notified()).await;
        }
    }

    /// The running browser, or a new one.
    async fn running(self: &Arc<Self>, state: &mut State) -> Result<Arc<Chromium>, String> {
        let running = state.chromium.clone().filter(|chromium| chromium.is_alive());
        match running {
            Some(chromium) => Ok(chromium),
            None => self.started(state).await,
        }
    }

    async fn new_page(&self, chromium: &Arc<Chromium>) -> Result<Page, String> {
        if let Ok(page) = timeout(READY, self.page_of(chromium)).await {
            return page;
        }
        let mut state = self.state.lock().await;
        if state.has_browser(chromium) {
            (state.chromium, state.spare) = (None, None);
            state.pages.clear();
        }
        chromium.connection().close(); // what waits for its answers would keep it
        Err("it did not open a page in time and was ended; try again".into())
    }

    /// A new page; it is closed again if its call was cancelled.
    async fn page_of(&self, chromium: &Arc<Chromium>) -> Result<Page, String> {
        let BrowserSettings { viewport, timeout, .. } = self.settings;
        let (chromium, client) = (Arc::clone(chromium), self.client.clone());
        let opening = async move { Page::new(&chromium, client, viewport, timeout).await };
        tokio::spawn(opening).await.unwrap_or_else(|_| Err("the page cannot be opened".into()))
    }

    async fn started(self: &Arc<Self>, state: &mut State) -> Result<Arc<Chromium>, String> {
        let program = self.program()?;
        (state.chromium, state.spare) = (None, None);
        state.pages.clear();
        let started = timeout(READY, Chromium::start(&program)).await;
        let started = started.unwrap_or_else(|_| Err("it does not answer".into()));
        let started = started.map_err(|why| {
            tracing::warn!(program = %program.display(), %why, "the browser does not start");
            format!("it does not start: {why}")
        })?;
        tracing::info!(program = %program.display(), "the browser is started");
        let started = Arc::new(started);
        state.chromium = Some(Arc::clone(&started));
        self.is_running.store(true, Ordering::Relaxed);
        tokio::spawn(close_what_is_idle(Arc::downgrade(self), Arc::downgrade(&started)));
        Ok(started)
    }

    /// Opens a page for the next run, unless runs wait for theirs: the last of them does it.
    async fn prepare_spare(self: Arc<Self>) {
        let chromium = {
            let mut state = self.state.lock().await;
            if state.spare.is_some() || state.is_preparing_spare || state.opening() > 0 {
                return;
            }
            let Some(chromium) = state.chromium.clone() else { return };
            state.is_preparing_spare = true;
            chromium
        };
        let page = timeout(READY, self.page_of(&chromium)).await;
        let mut state = self.state.lock().await;
        state.is_preparing_spare = false;
        if let Ok(Ok(page)) = page
            && state.has_browser(&chromium)
            && state.spare.is_none()
        {
            state.spare = Some(page);
        }
    }

    pub(super) async fn close(&self, run: Uuid) -> bool {
        self.state.lock().await.pages.remove(&run).is_some_and(|kept| kept.page.is_open())
    }

    /// The run is not driven here any more.
    pub(super) async fn release_run(&self, run: Uuid, is_parked: bool) {
        let mut state = self.state.lock().await;
        if !is_parked {
            state.pages.remove(&run);
        } else if let Some(kept) = state.pages.get_mut(&run) {
            (kept.used, kept.is_driven) = (Instant::now(), false);
        }
    }
}

/// Until that browser is closed.
async fn close_what_is_idle(pool: Weak<Pool>, chromium: Weak<Chromium>) {
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        let (Some(pool), Some(_)) = (pool.upgrade(), chromium.upgrade()) else { return };
        let mut state = pool.state.lock().await;
        state.pages.retain(|_, kept| kept.is_kept());
        if state.pages.is_empty() && state.used.elapsed() >= IDLE {
            if let Some(chromium) = state.chromium.take() {
                chromium.connection().close();
            }
            state.spare = None;
            pool.is_running.store(false, Ordering::Relaxed);
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(pages: usize) -> Arc<Pool> {
        let settings = BrowserSettings {
            path: PathBuf::new(),
            timeout: Duration::from_secs(30),
            pages,
            viewport: Viewport { width: 800, height: 600 },
        };
        Pool::new(Client::new(), settings)
    }

    #[tokio::test(start_paused = true)]
    async fn the_page_of_a_call_that_did_not_end_is_closed_before_the_next_call() {
        let (pool, run) = (pool(0), Uuid::nil());
        let soon = Duration::from_secs(1);
        let state = pool.state.lock().await;
        drop(pool.turn(run).await);
        assert!(timeout(soon, pool.turn(run)).await.is_err(), "the page is not closed yet");
        drop(state);
        let turn = timeout(soon, pool.turn(run)).await.expect("the page is closed");
        let _state = pool.state.lock().await;
        turn.end();
        assert!(timeout(soon, pool.turn(run)).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_run_waits_for_a_page_as_long_as_it_may() {
        let pool = pool(0);
        let since = Instant::now();
        let refused = pool.page_or_new(Uuid::nil(), "a", since + Duration::from_secs(27)).await;
        assert_eq!(refused.err().as_deref(), Some("all 0 pages are in use; try again in a moment"));
        assert_eq!(since.elapsed().as_secs(), 27);
    }

    #[tokio::test(start_paused = true)]
    async fn tenants_wait_for_pages_in_turn() {
        let pool = pool(1);
        let opening = Arc::clone(&pool.state.lock().await.opening);
        let order = parking_lot::Mutex::new(Vec::new());
        let wait = async |tenant: &'static str| {
            let state = pool.place(tenant).await;
            order.lock().push(tenant);
            drop(state);
        };
        let opened = async { drop(opening) };
        tokio::join!(wait("a"), wait("a"), wait("a"), wait("b"), opened);
        assert_eq!(*order.lock(), ["a", "b", "a", "a"]);
    }
}
