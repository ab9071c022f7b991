//! Webhooks: events of runs are sent to callers.
//!
//! Deliveries are written to the store's outbox together with each event, so that no crash loses them and a run
//! never waits for a receiver. All replicas share the work. A delivery that was claimed and not settled is due
//! again after a while, and so may be sent twice, with the same id. The order of the deliveries of a run is not
//! guaranteed; each event has its number.

mod attempt;
mod bodies;
mod lanes;
mod receivers;
mod signature;

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::TimeDelta;
use tokio::sync::Notify;
use tokio::task::{Id, JoinError, JoinSet};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use self::bodies::{Bodies, BodyReservation};
use self::lanes::{Lanes, ReceiverState};
use self::receivers::Receivers;
use self::signature::Signer;
use super::journals;
use super::start::StartError;
use crate::clock;
use crate::config;
use crate::event::ValidationError;
use crate::outbound::{AddressPolicy, Client};
use crate::store::{AttemptOutcome, Delivery, DeliveryStatus, Store, StoreError};

const DELIVERIES_METRIC: &str = "toolloop_webhook_deliveries_total";
/// How often the outbox is polled without a notification that it has grown.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How long a delivery is claimed: longer than a try takes.
const CLAIM_DURATION: Duration = Duration::from_secs(30);
/// How long a large body waits for memory. With the time of a try, this is less than [`CLAIM_DURATION`].
const MAX_WAIT: Duration = Duration::from_secs(8);
/// Lanes that are read at a time.
const LANES: u32 = 256;
/// The least and the longest pause before an unreadable event is read again.
const UNREAD_PAUSE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_mins(10));
/// How often writing the outcome of a try is attempted.
const SETTLE_TRIES: u32 = 3;
/// How long tries in progress may take when the service stops.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// The client, receivers and secrets for sending.
#[derive(Clone)]
pub struct Webhooks {
    signer: Signer,
    receivers: Receivers,
    client: Client,
}

impl fmt::Debug for Webhooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Webhooks").field("receivers", &self.receivers).finish_non_exhaustive()
    }
}

impl Webhooks {
    /// As configured; nothing without a secret.
    pub fn of(config: &config::Webhooks, client: Client) -> Option<Self> {
        let listed = AddressPolicy::public_and(config.networks.iter().copied());
        Some(Self {
            signer: Signer::new(&config.secrets)?,
            receivers: Receivers::new(config.hosts.clone(), listed),
            client,
        })
    }
}

/// Sends the deliveries in the store's outbox.
pub struct WebhookSender {
    store: Arc<Store>,
    /// Absent: there are no webhooks.
    webhooks: Option<Webhooks>,
    /// Notified when the outbox has grown.
    outbox: Notify,
    bodies: Arc<Bodies>,
    sending: TaskTracker,
}

/// The body of a delivery.
struct Body {
    json: Result<Vec<u8>, String>,
    _reservation: BodyReservation,
}

/// Why there is no body now.
#[derive(Debug, thiserror::Error)]
enum NoBody {
    #[error("no memory is free for it")]
    NoMemory,
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl WebhookSender {
    pub(super) fn new(store: Arc<Store>, webhooks: Option<Webhooks>) -> Self {
        let (outbox, bodies, sending) = (Notify::new(), Bodies::new(), TaskTracker::new());
        Self { store, webhooks, outbox, bodies, sending }
    }

    /// The address that a request wants its events sent to.
    pub(super) fn address(&self, url: Option<&str>) -> Result<Option<String>, StartError> {
        let Some(url) = url else { return Ok(None) };
        let webhooks = self.webhooks.as_ref().ok_or(StartError::WebhooksDisabled)?;
        let url = webhooks.receivers.read(url).map_err(|message| {
            StartError::InvalidOverride(ValidationError { pointer: "/webhook/url".into(), message })
        })?;
        Ok(Some(url.into()))
    }

    /// Sends a delivery again, now; `None`: this tenant has no such delivery.
    ///
    /// # Errors
    /// [`StartError::WebhooksDisabled`], and where the store fails.
    pub async fn redeliver(&self, tenant: &str, id: Uuid) -> Result<Option<Delivery>, StartError> {
        if self.webhooks.is_none() {
            return Err(StartError::WebhooksDisabled);
        }
        let due = self.store.redeliver(tenant, id).await?;
        self.outbox.notify_one();
        Ok(due)
    }

    /// Wakes the task that sends deliveries.
    pub(super) fn outbox_grew(&self) {
        self.outbox.notify_one();
    }

    /// Sends what is due, until the service stops.
    pub(super) fn start(self: &Arc<Self>, stop: CancellationToken) {
        if let Some(webhooks) = self.webhooks.clone() {
            let sender = Arc::clone(self);
            self.sending.spawn(async move { sender.send(webhooks, stop).await });
        }
    }

    /// Waits for the tries in progress when the service stops.
    pub(super) async fn stopped(&self) {
        self.sending.close();
        self.sending.wait().await;
    }

    async fn send(self: Arc<Self>, webhooks: Webhooks, stop: CancellationToken) {
        let mut poll = clock::every(POLL_INTERVAL);
        let mut deliveries = ActiveDeliveries {
            sender: Arc::clone(&self),
            webhooks: Arc::new(webhooks),
            lanes: Lanes::default(),
            tries: JoinSet::new(),
            under_way: HashMap::new(),
            last_lane: String::new(),
        };
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                Some(ended) = deliveries.tries.join_next_with_id() => deliveries.on_finished(ended),
                () = self.outbox.notified() => {}
                _ = poll.tick() => {}
            }
            if let Err(error) = deliveries.send_due().await {
                error.log_retry("the outbox will be read again later");
            }
        }
        deliveries.stop().await;
    }

    async fn deliver(
        &self,
        webhooks: &Webhooks,
        delivery: &Delivery,
        is_unwanted: Option<bool>,
    ) -> ReceiverState {
        let begun = Instant::now();
        let tried = self.try_to_deliver(webhooks, delivery, is_unwanted).await;
        let answering = match tried.response_status {
            _ if !tried.was_sent => ReceiverState::Unknown,
            None if begun.elapsed() >= attempt::DEADLINE => ReceiverState::Hangs,
            _ => ReceiverState::InTime,
        };
        let outcome = match tried.status {
            DeliveryStatus::Pending => "retried",
            status => status.as_str(),
        };
        metrics::counter!(DELIVERIES_METRIC, "outcome" => outcome).increment(1);
        for _ in 0..SETTLE_TRIES {
            match self.store.settle_delivery(delivery, &tried).await {
                Ok(()) => break,
                Err(error) => error.log_retry("the outcome of a delivery is stored later"),
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        answering
    }

    /// `is_unwanted`: whether the receiver has refused further events of the run, if that is known.
    async fn try_to_deliver(
        &self,
        webhooks: &Webhooks,
        delivery: &Delivery,
        is_unwanted: Option<bool>,
    ) -> AttemptOutcome {
        let not_sent = |status, error: &str| AttemptOutcome {
            status,
            response_status: None,
            error: Some(error.to_owned()),
            pause: Duration::ZERO,
            was_sent: false,
        };
        let store_failed = || AttemptOutcome {
            pause: UNREAD_PAUSE.0,
            ..not_sent(DeliveryStatus::Pending, "the store is temporarily unavailable")
        };
        match is_unwanted {
            Some(false) => {}
            Some(true) => {
                let why = "the receiver answered 410 Gone; no more events of this run are sent";
                return not_sent(DeliveryStatus::Disabled, why);
            }
            None => return store_failed(),
        }
        match self.body_of(delivery).await {
            Ok(Some(body)) => attempt::attempt(webhooks, delivery, body).await,
            Ok(None) => not_sent(DeliveryStatus::Failed, "the event was deleted"),
            Err(NoBody::NoMemory) => {
                let why = "there is no memory for its body yet: other large ones are on their way";
                not_sent(DeliveryStatus::Pending, why)
            }
            Err(NoBody::Store(error)) if error.is_transient() => store_failed(),
            Err(NoBody::Store(error)) => {
                tracing::error!(run_id = %delivery.run_id, %error, "an event cannot be sent");
                unreadable_outcome(delivery)
            }
        }
    }

    /// `None` where the event was deleted.
    async fn body_of(&self, delivery: &Delivery) -> Result<Option<Body>, NoBody> {
        let Delivery { tenant, run_id, seq, lane, .. } = delivery;
        let piece = self.store.journal_piece(tenant, *run_id, seq - 1, 1, 0).await?;
        let Some(piece) = piece else { return Ok(None) };
        let waits = async {
            let reservation = self.bodies.reserve(lane, piece.bytes).await;
            (reservation, journals::permit_for_bounded_use(piece.bytes).await)
        };
        let waited = tokio::time::timeout(MAX_WAIT, waits).await;
        let (mut reservation, _permit) = waited.map_err(|_| NoBody::NoMemory)?;
        let events = self.store.readable_until(tenant, *run_id, seq - 1, piece.until).await?;
        let event = events.first().filter(|event| event.seq == *seq);
        Ok(event.map(|event| {
            let json = attempt::body_of(event);
            reservation.shrink_to(json.as_ref().map_or(0, |json| json.len() as u64));
            Body { json, _reservation: reservation }
        }))
    }
}

/// The outcome for a delivery whose event cannot be read here. A replica of another version may be able to read
/// it, so it is retried until it is too old, with pauses that grow with its age.
fn unreadable_outcome(delivery: &Delivery) -> AttemptOutcome {
    let (shortest, longest) = UNREAD_PAUSE;
    let now = clock::now();
    let pause = (now - delivery.at).to_std().unwrap_or_default().clamp(shortest, longest);
    let is_over = now + TimeDelta::from_std(pause).unwrap_or_default() > delivery.retry_until;
    AttemptOutcome {
        status: if is_over { DeliveryStatus::Failed } else { DeliveryStatus::Pending },
        response_status: None,
        error: Some("the event cannot be read".to_owned()),
        pause: if is_over { Duration::ZERO } else { pause },
        was_sent: false,
    }
}

/// The deliveries that this replica is sending.
struct ActiveDeliveries {
    sender: Arc<WebhookSender>,
    webhooks: Arc<Webhooks>,
    lanes: Lanes,
    tries: JoinSet<ReceiverState>,
    under_way: HashMap<Id, Delivery>,
    /// The lane after which the next page of lanes begins.
    last_lane: String,
}

impl ActiveDeliveries {
    /// Begins as many tries as the limits allow.
    async fn send_due(&mut self) -> Result<(), StoreError> {
        while let Some(ended) = self.tries.try_join_next_with_id() {
            self.on_finished(ended);
        }
        let store = Arc::clone(&self.sender.store);
        let mut due = store.due_lanes(&self.last_lane, LANES).await?;
        let has_more = due.len() >= LANES as usize;
        if !has_more && !self.last_lane.is_empty() {
            // After the last lane, it begins again with the first one.
            let known: BTreeSet<String> = due.iter().cloned().collect();
            let first = store.due_lanes("", LANES).await?;
            due.extend(first.into_iter().filter(|lane| !known.contains(lane)));
        }
        let (mut last_served, mut is_full) = (None, false);
        for lane in &due {
            let free = u32::try_from(self.lanes.free(lane)).unwrap_or_default();
            if free == 0 {
                is_full = true;
                continue;
            }
            let claimed = match store.claim_deliveries(lane, free, CLAIM_DURATION).await {
                Ok(claimed) => claimed,
                Err(error) => {
                    self.last_lane.clone_from(lane); // the next page begins behind it
                    return Err(error);
                }
            };
            is_full |= claimed.len() >= free as usize;
            last_served = if claimed.is_empty() { last_served } else { Some(lane) };
            let runs: BTreeSet<Uuid> = claimed.iter().map(|delivery| delivery.run_id).collect();
            let runs: Vec<Uuid> = runs.into_iter().collect();
            let unwanted = match runs.as_slice() {
                [] => None,
                runs => {
                    let unwanted = store.unwanted_runs(runs).await;
                    let unwanted = unwanted.inspect_err(|error| {
                        error.log_retry("deliveries that were claimed are sent later");
                    });
                    unwanted.ok()
                }
            };
            for delivery in claimed {
                self.lanes.enter(lane);
                let is_unwanted = unwanted.as_ref().map(|runs| runs.contains(&delivery.run_id));
                let (sender, webhooks) = (Arc::clone(&self.sender), Arc::clone(&self.webhooks));
                let sent = delivery.clone();
                let task = self
                    .tries
                    .spawn(async move { sender.deliver(&webhooks, &sent, is_unwanted).await });
                self.under_way.insert(task.id(), delivery);
            }
        }
        // If there are more lanes than free sends, the lanes take turns.
        if has_more {
            self.last_lane = due.pop().unwrap_or_default();
        } else if !is_full {
            self.last_lane.clear();
        } else if let Some(lane) = last_served {
            self.last_lane.clone_from(lane);
        }
        Ok(())
    }

    fn on_finished(&mut self, ended: Result<(Id, ReceiverState), JoinError>) {
        let (id, answering) = ended.unwrap_or_else(|error| (error.id(), ReceiverState::Unknown));
        if let Some(delivery) = self.under_way.remove(&id) {
            self.lanes.leave(&delivery.lane, answering);
        }
    }

    /// Aborts tries that take too long; other replicas send them.
    async fn stop(mut self) {
        let all = async {
            while let Some(ended) = self.tries.join_next_with_id().await {
                let id = ended.map_or_else(|error| error.id(), |(id, _)| id);
                self.under_way.remove(&id);
            }
        };
        let _ = tokio::time::timeout(STOP_TIMEOUT, all).await;
        self.tries.shutdown().await;
        for delivery in self.under_way.values() {
            if let Err(error) = self.sender.store.release_delivery(delivery).await {
                error.log_retry("a delivery is due again later");
            }
        }
    }
}
