//! Searches the observations of earlier runs.

use uuid::Uuid;

use super::backend::Work;
use super::observations::words;
use super::sql::{Dialect, Query};
use super::tables::{Observation, Record};
use super::{Store, StoreError};

/// Whether a text must have any or all of the words.
#[derive(Clone, Copy)]
pub(super) enum Wanted {
    Any,
    All,
}

/// The full-text search expression of a database.
pub(super) fn expression(words: &[String], wanted: Wanted, dialect: Dialect) -> String {
    let (quote, between) = match (dialect, wanted) {
        (Dialect::Postgres, Wanted::Any) => ('\'', " | "),
        (Dialect::Postgres, Wanted::All) => ('\'', " & "),
        (Dialect::Sqlite, Wanted::Any) => ('"', " OR "),
        (Dialect::Sqlite, Wanted::All) => ('"', " AND "),
    };
    let quoted: Vec<_> = words.iter().map(|word| format!("{quote}{word}{quote}")).collect();
    quoted.join(between)
}

impl Store {
    /// Observations of other runs of this tenant's agent that are most similar to a text: at most `limit`, the most
    /// relevant first.
    pub async fn recall(
        &self,
        tenant: &str,
        agent: &str,
        except: Uuid,
        text: &str,
        limit: u32,
    ) -> Result<Vec<Observation>, StoreError> {
        let words = words(text);
        if words.is_empty() {
            return Ok(Vec::new());
        }
        let dialect = self.backend.dialect();
        let look = match dialect {
            Dialect::Postgres => {
                "SELECT o.* FROM observations o, to_tsquery('english', :words) q \
                 WHERE o.words @@ q AND o.tenant = :tenant AND o.agent = :agent \
                 AND o.run_id <> :except ORDER BY ts_rank(o.words, q) DESC, o.at DESC, o.seq \
                 LIMIT :limit"
            }
            Dialect::Sqlite => {
                "SELECT o.* FROM observation_words w JOIN observations o ON o.id = w.rowid \
                 WHERE observation_words MATCH :words AND o.tenant = :tenant AND o.agent = :agent \
                 AND o.run_id <> :except ORDER BY bm25(observation_words), o.at DESC, o.seq \
                 LIMIT :limit"
            }
        };
        let look = Query::new(look).bind("tenant", tenant).bind("agent", agent);
        let look = look
            .bind("except", except)
            .bind("words", expression(&words, Wanted::Any, dialect))
            .bind("limit", limit);
        self.backend.read(Work::Data, look).await?.iter().map(Record::read).collect()
    }
}
