//! A connection to a server, over either transport and in either era.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::HeaderMap;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::era::{self, DISCOVER, Era, Found};
use super::header_parameters;
use super::http::{Address, Question};
use super::listing::Described;
use super::messages::{self, CALL, Failure, INITIALIZE, MAX_WAIT};
use super::pipes::Pipes;
use crate::tools::requests::Requests;

/// Pages of one list of tools.
const MAX_PAGES: usize = 32;
/// Bytes of pages, after which no further one is asked for.
const MAX_LIST: usize = 2 * 1024 * 1024;
/// Entries that are looked at.
const MAX_ENTRIES: usize = 1024;

/// A connection.
#[derive(Clone)]
pub(super) struct Link {
    transport: Transport,
    handshake: Arc<OnceLock<Handshake>>,
}

#[derive(Clone)]
pub(super) enum Transport {
    Pipes(Pipes),
    Address(Address),
}

/// The result of the handshake.
#[derive(Debug, Clone, Copy)]
struct Handshake {
    era: Era,
    /// Whether the server can notify of changes of its list.
    notifies_of_changes: bool,
}

const OLD: Handshake = Handshake { era: Era::Old, notifies_of_changes: false };

/// A list of tools.
pub(super) struct ToolList {
    pub(super) tools: Vec<Value>,
    /// How long it may be used, as stated by the server.
    pub(super) fresh: Duration,
    /// Whether the server has no more of them.
    pub(super) is_whole: bool,
}

impl Link {
    /// A connection before its handshake.
    pub(super) fn new(transport: Transport) -> Self {
        Self { transport, handshake: Arc::default() }
    }

    pub(super) fn era(&self) -> Era {
        self.handshake.get().map_or(Era::Old, |handshake| handshake.era)
    }

    pub(super) fn is_address(&self) -> bool {
        matches!(self.transport, Transport::Address(_))
    }

    /// Whether arguments are repeated in headers.
    pub(super) fn has_parameter_headers(&self) -> bool {
        self.is_address() && self.era() == Era::New
    }

    async fn request(
        &self,
        era: Era,
        method: &'static str,
        params: Value,
        parameter_headers: HeaderMap,
        requests: &Requests,
    ) -> Result<Value, Failure> {
        let params = match era {
            Era::Old => params,
            Era::New => messages::in_new_era(params),
        };
        match &self.transport {
            Transport::Pipes(pipes) => pipes.ask(method, &params, &requests.tenant()).await,
            Transport::Address(address) => {
                address.ask(&Question { era, method, params, parameter_headers }, requests).await
            }
        }
    }

    /// The result of a call. Dropping the future notifies the server that it is no longer needed.
    pub(super) async fn call(
        &self,
        tool: &Described,
        params: Value,
        requests: &Requests,
    ) -> Result<Value, Failure> {
        let parameter_headers =
            header_parameters::headers(&tool.header_parameters, &params["arguments"]);
        self.request(self.era(), CALL, params, parameter_headers, requests).await
    }

    /// The result of a request that belongs to no run and has a short timeout.
    async fn ask_soon(
        &self,
        era: Era,
        method: &'static str,
        params: Value,
    ) -> Result<Value, Failure> {
        let requests = Requests::default();
        let asked = self.request(era, method, params, HeaderMap::new(), &requests);
        tokio::time::timeout(MAX_WAIT, asked).await.unwrap_or_else(|_| {
            let seconds = MAX_WAIT.as_secs();
            Err(Failure::Lost(format!("it does not answer {method} within {seconds} s")))
        })
    }

    /// Performs the handshake: detects the era, unless it is known to be the old one. `is_probing` is set
    /// while a server that may be of the old era has received `server/discover`, which it does not know.
    /// It stays set if the server answers neither that nor `initialize`.
    ///
    /// # Errors
    /// Why that fails: a phrase.
    pub(super) async fn introduce(
        &self,
        finds_out: bool,
        is_probing: &AtomicBool,
    ) -> Result<(), String> {
        if !finds_out {
            let introduced = self.initialize().await?;
            return self.begin_as_of_old(&introduced).await;
        }
        let latest = Instant::now() + MAX_WAIT;
        is_probing.store(true, Ordering::Relaxed);
        let requests = Requests::default();
        let discovered = async {
            let asked = self.request(Era::New, DISCOVER, json!({}), HeaderMap::new(), &requests);
            let found = era::found(asked.await);
            is_probing.store(false, Ordering::Relaxed);
            found
        };
        let mut discovered = std::pin::pin!(discovered);
        let (found, introduced) =
            match tokio::time::timeout(era::MAX_WAIT, discovered.as_mut()).await {
                Ok(found) => (found, None),
                Err(_) => self.found_of_silent(discovered, latest).await?,
            };
        is_probing.store(false, Ordering::Relaxed);
        match found {
            Found::New { notifies_of_changes } => {
                let _ = self.handshake.set(Handshake { era: Era::New, notifies_of_changes }); // asked once
                self.follow();
                Ok(())
            }
            Found::Neither(why) => Err(why),
            Found::Old => {
                let introduced = match introduced {
                    Some(introduced) => introduced,
                    None => self.initialize().await?,
                };
                self.begin_as_of_old(&introduced).await
            }
        }
    }

    /// The era of a server that has not answered `server/discover` soon, and its answer to `initialize` if
    /// it is of the old era. A slow server may be of either era, so both answers are awaited, and one of
    /// the new era takes precedence.
    async fn found_of_silent(
        &self,
        mut discovered: Pin<&mut impl Future<Output = Found>>,
        latest: Instant,
    ) -> Result<(Found, Option<Value>), String> {
        let mut introduced = std::pin::pin!(self.initialize());
        let found = tokio::select! {
            biased; // both may have been answered
            found = discovered.as_mut() => found,
            introduced = introduced.as_mut() => {
                let latest = if introduced.is_ok() {
                    latest.min(Instant::now() + era::LATE)
                } else {
                    latest
                };
                let found = tokio::time::timeout_at(latest, discovered).await;
                return match (found, introduced) {
                    (Ok(Found::Old | Found::Neither(_)) | Err(_), Ok(introduced)) => {
                        Ok((Found::Old, Some(introduced)))
                    }
                    (Ok(Found::Old) | Err(_), Err(why)) => Err(why),
                    (Ok(found), _) => Ok((found, None)),
                };
            }
        };
        match found {
            Found::New { .. } => Ok((found, None)),
            Found::Old => Ok((Found::Old, Some(introduced.await?))),
            Found::Neither(why) => match introduced.await {
                Ok(introduced) => Ok((Found::Old, Some(introduced))),
                Err(_) => Err(why),
            },
        }
    }

    /// The answer of a server of the old era to the first request, in a version that is known.
    async fn initialize(&self) -> Result<Value, String> {
        let introduced = self.ask_soon(Era::Old, INITIALIZE, messages::initialize_params()).await;
        let introduced = introduced.map_err(|failure| failure.to_string())?;
        messages::version_in(&introduced)?;
        Ok(introduced)
    }

    async fn begin_as_of_old(&self, introduced: &Value) -> Result<(), String> {
        match &self.transport {
            Transport::Pipes(pipes) => pipes.tell(messages::initialized()),
            Transport::Address(address) => address.introduced(introduced).await?,
        }
        let _ = self.handshake.set(OLD); // asked once
        Ok(())
    }

    /// Asks a program for notifications of changes of its list. Over HTTP that would keep a request open
    /// forever, so the list is polled there.
    fn follow(&self) {
        if let (Transport::Pipes(pipes), Some(Handshake { notifies_of_changes: true, .. })) =
            (&self.transport, self.handshake.get())
        {
            let wanted = json!({"notifications": {"toolsListChanged": true}});
            pipes.open("subscriptions/listen", &messages::in_new_era(wanted));
        }
    }

    /// The server's list of tools.
    ///
    /// # Errors
    /// Why there is no list: a phrase.
    pub(super) async fn list(&self) -> Result<ToolList, String> {
        let (mut tools, mut is_whole) = (Vec::new(), true);
        let mut cursor: Option<String> = None;
        let (mut fresh, mut size) = (u64::MAX, 0);
        for _ in 0..MAX_PAGES {
            let params = cursor.map_or_else(|| json!({}), |cursor| json!({"cursor": cursor}));
            let page = self.ask_soon(self.era(), "tools/list", params).await;
            let mut page = page.map_err(|failure| failure.to_string())?;
            let more = page.get_mut("tools").map(Value::take).unwrap_or_default();
            size += more.to_string().len();
            let Value::Array(more) = more else {
                return Err("the `tools/list` result has no valid `tools` array".to_owned());
            };
            fresh = fresh.min(page["ttlMs"].as_u64().unwrap_or(0));
            let left = MAX_ENTRIES - tools.len();
            cursor = page["nextCursor"].as_str().map(str::to_owned);
            is_whole = cursor.is_none() && more.len() <= left;
            tools.extend(more.into_iter().take(left));
            if cursor.is_none() || tools.len() >= MAX_ENTRIES || size >= MAX_LIST {
                break;
            }
        }
        Ok(ToolList { tools, fresh: Duration::from_millis(fresh), is_whole })
    }

    /// Whether the server answers at all, and in the era that it is asked in.
    ///
    /// # Errors
    /// Why it does not: a phrase.
    pub(super) async fn answers(&self) -> Result<(), String> {
        let era = self.era();
        let method = match era {
            Era::Old => "ping",
            Era::New => DISCOVER,
        };
        match self.ask_soon(era, method, json!({})).await {
            Ok(discovered) if era == Era::New && !era::speaks_new(&discovered) => {
                Err("it speaks another protocol version than before".to_owned())
            }
            Err(Failure::Refused(fault)) if era::may_have_changed(era, &fault) => {
                Err(Failure::Refused(fault).to_string())
            }
            Err(failure @ (Failure::Lost(_) | Failure::NotSent(_))) => Err(failure.to_string()),
            Ok(_) | Err(Failure::Refused(_)) => Ok(()),
        }
    }
}
