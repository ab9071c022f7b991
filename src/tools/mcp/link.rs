//! What a connection to a server can do, whichever way and in whichever era.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::FutureExt;
use http::HeaderMap;
use serde_json::{Value, json};

use super::era::{self, DISCOVER, Era, Found};
use super::http::{Address, Question};
use super::listing::Described;
use super::messages::{self, Failure, INITIALIZE, PATIENCE};
use super::mirrored;
use super::pipes::Pipes;
use crate::tools::requests::Requests;

/// Pages of one list of tools.
const MAX_PAGES: usize = 32;
/// Entries that are looked at.
const MAX_ENTRIES: usize = 1024;

/// A connection.
#[derive(Clone)]
pub(super) struct Link {
    way: Way,
    spoken: Arc<OnceLock<Spoken>>,
}

#[derive(Clone)]
pub(super) enum Way {
    Pipes(Pipes),
    Address(Address),
}

/// What was found out of the server.
#[derive(Debug, Clone, Copy)]
struct Spoken {
    era: Era,
    /// Whether it can be asked to tell that its list has changed.
    tells_changes: bool,
}

const OLD: Spoken = Spoken { era: Era::Old, tells_changes: false };

/// A list of tools.
pub(super) struct Entries {
    pub(super) entries: Vec<Value>,
    /// How long it may be used, by what the server says.
    pub(super) fresh: Duration,
}

impl Link {
    /// One of which nothing is known yet.
    pub(super) fn new(way: Way) -> Self {
        Self { way, spoken: Arc::default() }
    }

    pub(super) fn era(&self) -> Era {
        self.spoken.get().map_or(Era::Old, |spoken| spoken.era)
    }

    pub(super) fn is_address(&self) -> bool {
        matches!(self.way, Way::Address(_))
    }

    /// Whether arguments are repeated in headers.
    pub(super) fn mirrors(&self) -> bool {
        self.is_address() && self.era() == Era::New
    }

    async fn asked(
        &self,
        era: Era,
        method: &'static str,
        params: Value,
        mirrored: HeaderMap,
        requests: &Requests,
    ) -> Result<Value, Failure> {
        let params = match era {
            Era::Old => params,
            Era::New => messages::in_new_era(params),
        };
        match &self.way {
            Way::Pipes(pipes) => pipes.ask(method, &params).await,
            Way::Address(address) => {
                address.ask(&Question { era, method, params, mirrored }, requests).await
            }
        }
    }

    /// The result of a call. Dropping the future tells the server that it is not needed any more.
    pub(super) async fn call(
        &self,
        tool: &Described,
        params: Value,
        requests: &Requests,
    ) -> Result<Value, Failure> {
        let mirrored = mirrored::headers(&tool.mirrored, &params["arguments"]);
        self.asked(self.era(), "tools/call", params, mirrored, requests).await
    }

    /// The result of a request that counts for no run and that must be answered soon.
    async fn ask_soon(
        &self,
        era: Era,
        method: &'static str,
        params: Value,
    ) -> Result<Value, Failure> {
        let requests = Requests::default();
        let asked = self.asked(era, method, params, HeaderMap::new(), &requests);
        tokio::time::timeout(PATIENCE, asked).await.unwrap_or_else(|_| {
            let seconds = PATIENCE.as_secs();
            Err(Failure::Lost(format!("it does not answer {method} within {seconds} s")))
        })
    }

    /// Gets acquainted: finds out the era, unless that is known to be the old one. While a server that
    /// may be of the old era has to take what it cannot know, `is_probing` is set.
    ///
    /// # Errors
    /// Why that fails: a phrase.
    pub(super) async fn introduce(
        &self,
        finds_out: bool,
        is_probing: &AtomicBool,
    ) -> Result<(), String> {
        if !finds_out {
            return self.introduce_as_of_old().await;
        }
        is_probing.store(true, Ordering::Relaxed);
        let requests = Requests::default();
        let asked = self.asked(Era::New, DISCOVER, json!({}), HeaderMap::new(), &requests);
        let mut asked = std::pin::pin!(asked);
        let answer = tokio::time::timeout(era::PATIENCE, &mut asked).await;
        let (found, silent) = if let Ok(answer) = answer {
            (era::found(answer), None)
        } else {
            let introduced = self.introduce_as_of_old().await;
            // A server that starts slowly may have answered meanwhile.
            let late = asked.now_or_never().map(era::found);
            (late.unwrap_or(Found::Old), Some(introduced))
        };
        is_probing.store(false, Ordering::Relaxed);
        match (found, silent) {
            (_, Some(Ok(()))) => Ok(()),
            (Found::New { tells_changes }, _) => {
                let _ = self.spoken.set(Spoken { era: Era::New, tells_changes }); // asked once
                self.follow();
                Ok(())
            }
            (Found::Old, Some(Err(why))) | (Found::Neither(why), _) => Err(why),
            (Found::Old, None) => self.introduce_as_of_old().await,
        }
    }

    async fn introduce_as_of_old(&self) -> Result<(), String> {
        let introduced = self.ask_soon(Era::Old, INITIALIZE, messages::introduction()).await;
        let introduced = introduced.map_err(|failure| failure.to_string())?;
        match &self.way {
            Way::Pipes(pipes) => {
                messages::version_in(&introduced)?;
                pipes.tell(messages::initialized());
            }
            Way::Address(address) => address.introduced(&introduced).await?,
        }
        let _ = self.spoken.set(OLD); // asked once
        Ok(())
    }

    /// Asks a program to tell changes of its list. Over HTTP that would keep a request open for ever: the
    /// list is looked at there.
    fn follow(&self) {
        if let (Way::Pipes(pipes), Some(Spoken { tells_changes: true, .. })) =
            (&self.way, self.spoken.get())
        {
            let wanted = json!({"notifications": {"toolsListChanged": true}});
            pipes.open("subscriptions/listen", &messages::in_new_era(wanted));
        }
    }

    /// The server's list of tools.
    ///
    /// # Errors
    /// Why there is no list: a phrase.
    pub(super) async fn list(&self) -> Result<Entries, String> {
        let mut entries: Vec<Value> = Vec::new();
        let mut cursor: Option<String> = None;
        let mut fresh = u64::MAX;
        for _ in 0..MAX_PAGES {
            let params = cursor.map_or_else(|| json!({}), |cursor| json!({"cursor": cursor}));
            let page = self.ask_soon(self.era(), "tools/list", params).await;
            let mut page = page.map_err(|failure| failure.to_string())?;
            let Value::Array(more) = page["tools"].take() else {
                return Err("its list of tools is none".to_owned());
            };
            fresh = fresh.min(page["ttlMs"].as_u64().unwrap_or(0));
            entries.extend(more.into_iter().take(MAX_ENTRIES.saturating_sub(entries.len())));
            cursor = page["nextCursor"].as_str().map(str::to_owned);
            if cursor.is_none() || entries.len() >= MAX_ENTRIES {
                break;
            }
        }
        Ok(Entries { entries, fresh: Duration::from_millis(fresh) })
    }

    /// Whether the server answers at all, and in the era that it is asked in.
    pub(super) async fn answers(&self) -> bool {
        let era = self.era();
        let method = match era {
            Era::Old => "ping",
            Era::New => DISCOVER,
        };
        match self.ask_soon(era, method, json!({})).await {
            Ok(discovered) => era == Era::Old || era::speaks_new(&discovered),
            Err(Failure::Refused(fault)) => !era::may_have_changed(era, &fault),
            Err(Failure::Lost(_) | Failure::NotSent(_)) => false,
        }
    }
}
