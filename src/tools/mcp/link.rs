//! What a connection to a server can do, whichever it is.

use serde_json::{Value, json};

use super::http::Address;
use super::messages::{self, Failure, INITIALIZE, PATIENCE};
use super::pipes::Pipes;
use crate::tools::requests::Requests;

/// Pages of one list of tools.
const MAX_PAGES: usize = 32;
/// Entries that are looked at.
const MAX_ENTRIES: usize = 1024;

/// A connection.
#[derive(Clone)]
pub(super) enum Link {
    Pipes(Pipes),
    Address(Address),
}

impl Link {
    /// The result of a request. Dropping the future tells the server that it is not needed any more.
    pub(super) async fn ask(
        &self,
        method: &'static str,
        params: Value,
        requests: &Requests,
    ) -> Result<Value, Failure> {
        match self {
            Self::Pipes(pipes) => pipes.ask(method, &params).await,
            Self::Address(address) => address.ask(method, &params, requests).await,
        }
    }

    /// The same, of a request that counts for no run and that must be answered soon.
    async fn ask_soon(&self, method: &'static str, params: Value) -> Result<Value, Failure> {
        let requests = Requests::default();
        let asked = self.ask(method, params, &requests);
        tokio::time::timeout(PATIENCE, asked).await.unwrap_or_else(|_| {
            let seconds = PATIENCE.as_secs();
            Err(Failure::Lost(format!("it does not answer {method} within {seconds} s")))
        })
    }

    /// Gets acquainted.
    ///
    /// # Errors
    /// Why that fails: a phrase.
    pub(super) async fn introduce(&self) -> Result<(), String> {
        let introduced = self.ask_soon(INITIALIZE, messages::introduction()).await;
        let introduced = introduced.map_err(|failure| failure.to_string())?;
        match self {
            Self::Pipes(pipes) => {
                messages::version_in(&introduced)?;
                pipes.tell(messages::initialized());
                Ok(())
            }
            Self::Address(address) => address.introduced(&introduced).await,
        }
    }

    /// The entries of the server's list of tools.
    ///
    /// # Errors
    /// Why there is no list: a phrase.
    pub(super) async fn list(&self) -> Result<Vec<Value>, String> {
        let mut entries: Vec<Value> = Vec::new();
        let mut cursor: Option<String> = None;
        for _ in 0..MAX_PAGES {
            let params = cursor.map_or_else(|| json!({}), |cursor| json!({"cursor": cursor}));
            let page = self.ask_soon("tools/list", params).await;
            let mut page = page.map_err(|failure| failure.to_string())?;
            let Value::Array(more) = page["tools"].take() else {
                return Err("its list of tools is none".to_owned());
            };
            entries.extend(more.into_iter().take(MAX_ENTRIES.saturating_sub(entries.len())));
            cursor = page["nextCursor"].as_str().map(str::to_owned);
            if cursor.is_none() || entries.len() >= MAX_ENTRIES {
                break;
            }
        }
        Ok(entries)
    }

    /// Whether the server answers at all.
    pub(super) async fn answers(&self) -> bool {
        !matches!(
            self.ask_soon("ping", json!({})).await,
            Err(Failure::Lost(_) | Failure::NotSent(_))
        )
    }
}
