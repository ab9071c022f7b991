//! The outbox of webhooks: due deliveries, and the outcome of each attempt.
//!
//! A replica claims a row for a limited time; if the replica dies, the row becomes due again. [`super::outbox`]
//! decides which events are sent. The runtime decides when a failed attempt is repeated or abandoned.

use std::time::Duration;

use strum::{EnumString, IntoStaticStr, VariantNames};
use uuid::Uuid;

use super::backend::Work;
use super::conflict::retry_conflicts;
use super::listing::{DELIVERY_URL, readable};
use super::outbox::RETRY_PERIOD;
use super::sql::{Query, Row};
use super::tables::Delivery;
use super::{Store, StoreError};

/// Failed deliveries of a run that are returned with it.
const MAX_LISTED: u32 = 100;

/// Why a delivery failed whose row is damaged.
const UNREADABLE: &str = "its row cannot be read";

/// The status of a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, IntoStaticStr, EnumString, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum DeliveryStatus {
    /// The delivery will be sent, for the first time or again.
    Pending,
    /// The receiver has accepted it.
    Delivered,
    /// All attempts failed.
    Failed,
    /// The receiver has refused further events of this run (410 Gone).
    Disabled,
}

impl DeliveryStatus {
    /// The name used in JSON and SQL.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Which deliveries to list; absent means any.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "each field is the filter of that name")]
pub struct DeliveryFilter {
    pub run_id: Option<Uuid>,
    pub status: Option<DeliveryStatus>,
}

/// The outcome of an attempt to deliver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttemptOutcome {
    /// The new status of the delivery.
    pub status: DeliveryStatus,
    /// The HTTP status of the receiver's answer, if it answered.
    pub response_status: Option<u16>,
    /// The error, if the attempt failed.
    pub error: Option<String>,
    /// The pause before the next attempt, if there is one.
    pub pause: Duration,
    /// Whether something may have been sent.
    pub was_sent: bool,
}

impl Store {
    /// Lanes after `after`, in their order, in which a delivery is due.
    pub async fn due_lanes(&self, after: &str, limit: u32) -> Result<Vec<String>, StoreError> {
        // One look-up a lane, however many rows each has.
        let lanes = Query::new(
            "WITH RECURSIVE lanes (lane) AS ( \
             SELECT min(lane) FROM webhook_outbox WHERE status = 'pending' AND lane > :after \
             UNION ALL SELECT (SELECT min(w.lane) FROM webhook_outbox w \
             WHERE w.status = 'pending' AND w.lane > lanes.lane) \
             FROM lanes WHERE lanes.lane IS NOT NULL) \
             SELECT lane FROM lanes WHERE lane IS NOT NULL AND EXISTS (SELECT 1 \
             FROM webhook_outbox w WHERE w.status = 'pending' AND w.lane = lanes.lane \
             AND w.due_at <= (SELECT {now})) LIMIT :limit",
        );
        let lanes = lanes.bind("after", after).bind("limit", limit);
        let rows = self.backend.read(Work::Data, lanes).await?;
        rows.iter().map(|row| row.read("lane")).collect()
    }

    /// Claims due deliveries of a lane, the longest due first. For the time `hold`, no other replica can claim them.
    /// Those whose rows cannot be read fail.
    pub async fn claim_deliveries(
        &self,
        lane: &str,
        limit: u32,
        hold: Duration,
    ) -> Result<Vec<Delivery>, StoreError> {
        let claim = Query::new(
            "WITH due AS MATERIALIZED (SELECT run_id, seq FROM webhook_outbox \
             WHERE status = 'pending' AND lane = :lane AND due_at <= (SELECT {now}) \
             ORDER BY due_at LIMIT :limit{skip_locked}) \
             UPDATE webhook_outbox SET attempts = attempts + 1, tries = tries + 1, \
             attempted_at = {now}, due_at = {now} + :hold \
             WHERE (run_id, seq) IN (SELECT run_id, seq FROM due) RETURNING *, ",
        );
        let claim =
            claim.push(DELIVERY_URL).bind("lane", lane).bind("limit", limit).bind("hold", hold);
        let rows = self.backend.write(Work::Data, claim).await?;
        let mut claimed: Vec<Delivery> = readable(&rows).collect();
        if claimed.len() < rows.len() {
            self.fail_unreadable(&rows, &claimed).await;
        }
        claimed.sort_by_key(|delivery| (delivery.at, delivery.seq));
        Ok(claimed)
    }

    /// Marks claimed deliveries whose rows cannot be read as failed: nothing can be sent for them, and they would be
    /// claimed again and again.
    async fn fail_unreadable(&self, rows: &[Row], claimed: &[Delivery]) {
        let key = |row: &Row| Some((row.read::<Uuid>("run_id").ok()?, row.read("seq").ok()?));
        let mut unreadable: Vec<(Uuid, i64)> = rows.iter().filter_map(key).collect();
        unreadable.retain(|key| claimed.iter().all(|it| (it.run_id, it.seq) != *key));
        for (run, seq) in unreadable {
            let fail = Query::new(
                "UPDATE webhook_outbox SET status = 'failed', error = :error \
                 WHERE run_id = :run AND seq = :seq AND status = 'pending'",
            );
            let fail = fail.bind("error", UNREADABLE).bind("run", run).bind("seq", seq);
            match self.backend.write(Work::Data, fail).await {
                Ok(_) => tracing::error!(run_id = %run, seq, "a delivery failed: {UNREADABLE}"),
                Err(error) => error.log_retry("a delivery whose row cannot be read is due again"),
            }
        }
    }

    /// Those of these runs whose receiver has refused further events.
    pub async fn unwanted_runs(&self, runs: &[Uuid]) -> Result<Vec<Uuid>, StoreError> {
        let unwanted = Query::new(
            "SELECT DISTINCT run_id FROM webhook_outbox \
             WHERE run_id IN :runs AND status = 'failed' AND response_status = 410 \
             AND NOT asked_again",
        );
        let rows = self.backend.read(Work::Data, unwanted.bind("runs", runs)).await?;
        rows.iter().map(|row| row.read("run_id")).collect()
    }

    /// Stores the outcome of an attempt, unless the delivery has been claimed, or asked for, again since.
    pub async fn settle_delivery(
        &self,
        delivery: &Delivery,
        outcome: &AttemptOutcome,
    ) -> Result<(), StoreError> {
        let settle = Query::new(
            "UPDATE webhook_outbox SET status = :status, due_at = {now} + :pause, \
             response_status = :response, error = :error, asked_again = FALSE, \
             attempts = attempts - :unsent, tries = tries - :unsent, \
             attempted_at = CASE WHEN attempts > :unsent THEN attempted_at END \
             WHERE run_id = :run AND seq = :seq AND attempts = :attempts AND tries = :tries",
        );
        let settle = settle
            .bind("status", outcome.status)
            .bind("pause", outcome.pause)
            .bind("response", outcome.response_status.map(u32::from))
            .bind("error", outcome.error.as_deref())
            .bind("unsent", u32::from(!outcome.was_sent))
            .bind("run", delivery.run_id)
            .bind("seq", delivery.seq)
            .bind("attempts", delivery.attempts)
            .bind("tries", delivery.tries);
        self.backend.write(Work::Data, settle).await?;
        if outcome.response_status == Some(410) {
            let disable = Query::new(
                "UPDATE webhook_outbox SET status = 'disabled' \
                 WHERE run_id = :run AND status = 'pending'",
            );
            self.backend.write(Work::Data, disable.bind("run", delivery.run_id)).await?;
        }
        Ok(())
    }

    /// Gives back a claimed delivery whose attempt was interrupted.
    pub async fn release_delivery(&self, delivery: &Delivery) -> Result<(), StoreError> {
        let release = Query::new(
            "UPDATE webhook_outbox SET due_at = {now} WHERE run_id = :run AND seq = :seq \
             AND attempts = :attempts AND status = 'pending'",
        );
        let release = release
            .bind("run", delivery.run_id)
            .bind("seq", delivery.seq)
            .bind("attempts", delivery.attempts);
        self.backend.write(Work::Data, release).await.map(drop)
    }

    /// Makes a delivery due again, whatever its status; `None`: this tenant has no such delivery. A receiver that has
    /// refused further events of the run gets this delivery and later ones again.
    pub async fn redeliver(&self, tenant: &str, id: Uuid) -> Result<Option<Delivery>, StoreError> {
        retry_conflicts(|| self.try_to_redeliver(tenant, id)).await
    }

    async fn try_to_redeliver(
        &self,
        tenant: &str,
        id: Uuid,
    ) -> Result<Option<Delivery>, StoreError> {
        let again = Query::new(
            "UPDATE webhook_outbox SET status = 'pending', tries = 0, due_at = {now}, \
             retry_until = {now} + :day WHERE id = :id AND tenant = :tenant RETURNING *, ",
        );
        let again = again.push(DELIVERY_URL).bind("id", id).bind("tenant", tenant);
        let again = again.bind("day", RETRY_PERIOD.to_std().unwrap_or_default());
        let mut tx = self.backend.begin(Work::Data).await?;
        let delivery: Option<Delivery> = readable(&tx.run(again).await?).next();
        if let Some(Delivery { run_id, .. }) = &delivery {
            let wanted = Query::new(
                "UPDATE webhook_outbox SET asked_again = TRUE \
                 WHERE run_id = :run AND status = 'failed' AND response_status = 410",
            );
            tx.run(wanted.bind("run", *run_id)).await?;
        }
        tx.commit().await?;
        Ok(delivery)
    }

    /// The deliveries of a run whose last attempt failed, in the order of their events.
    pub async fn failed_deliveries(
        &self,
        tenant: &str,
        run: Uuid,
    ) -> Result<Vec<Delivery>, StoreError> {
        let failed = Query::new("SELECT webhook_outbox.*, ").push(DELIVERY_URL).push(
            " FROM webhook_outbox WHERE run_id = :run AND tenant = :tenant \
             AND error IS NOT NULL AND status <> 'delivered' ORDER BY seq LIMIT :limit",
        );
        let failed = failed.bind("run", run).bind("tenant", tenant).bind("limit", MAX_LISTED);
        Ok(readable(&self.backend.read(Work::Data, failed).await?).collect())
    }
}
