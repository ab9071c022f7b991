//! The recent processor time of each tenant, and which tenants take more than their share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The time constant of the decay: usage of this age counts about a third.
const WINDOW: Duration = Duration::from_secs(1);
/// How often shares are computed.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Below this part of all processors, there is enough for all tenants.
const BUSY: f64 = 0.25;
/// Seconds in a window from which a tenant counts as active, and beneath which it is forgotten.
const ACTIVE: f64 = 0.001;
const FORGOTTEN: f64 = 0.000_01;
/// A tenant that takes more than the average times this factor exceeds its share.
const EXCESS_FACTOR: f64 = 1.25;

static SHARES: LazyLock<Shares> = LazyLock::new(Shares::new);

/// The usage of one tenant.
#[derive(Debug)]
pub(super) struct Share {
    /// Nanoseconds used since the last computation.
    used: AtomicU64,
    is_over: AtomicBool,
    /// Permits for scarce resources, while the tenant takes more than its share.
    permits: Arc<Semaphore>,
    /// The same for work on files, which may hang.
    file_permits: Arc<Semaphore>,
}

impl Default for Share {
    fn default() -> Self {
        let permits = || Arc::new(Semaphore::new(max_concurrency()));
        Self {
            used: AtomicU64::default(),
            is_over: AtomicBool::default(),
            permits: permits(),
            file_permits: permits(),
        }
    }
}

struct Shares {
    tenants: Mutex<HashMap<String, Tenant>>,
    /// The number of tenants.
    count: AtomicUsize,
    begun: Instant,
    /// When shares were last computed, in nanoseconds since the start.
    last: AtomicU64,
    processors: f64,
}

#[derive(Default)]
struct Tenant {
    share: Arc<Share>,
    /// Seconds used recently, with decay.
    recent: f64,
}

/// The share of a tenant.
pub(super) fn of(tenant: &str) -> Arc<Share> {
    let mut tenants = SHARES.tenants.lock();
    if let Some(known) = tenants.get(tenant) {
        return Arc::clone(&known.share);
    }
    let share = Arc::clone(&tenants.entry(tenant.to_owned()).or_default().share);
    SHARES.count.store(tenants.len(), Ordering::Relaxed);
    share
}

/// Whether there is more than one tenant.
pub(super) fn are_several() -> bool {
    SHARES.count.load(Ordering::Relaxed) > 1
}

impl Share {
    pub(super) fn charge(&self, took: Duration) {
        self.used.fetch_add(nanos(took), Ordering::Relaxed);
        SHARES.recompute_if_due(Instant::now());
    }

    #[cfg(test)]
    pub(super) fn set_over(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// Waits for one of the tenant's permits for scarce resources.
    pub(super) async fn permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.permits).acquire_owned().await.ok() // never closed
    }

    /// Waits for one of the tenant's permits for work on files.
    pub(super) async fn file_permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.file_permits).acquire_owned().await.ok() // never closed
    }

    /// Whether the tenant takes more than its share.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }
}

impl Shares {
    fn new() -> Self {
        let processors = u32::try_from(processors()).unwrap_or(u32::MAX);
        Self {
            tenants: Mutex::default(),
            count: AtomicUsize::new(0),
            begun: Instant::now(),
            last: AtomicU64::new(0),
            processors: f64::from(processors),
        }
    }

    fn recompute_if_due(&self, now: Instant) {
        let now = nanos(now.saturating_duration_since(self.begun));
        let last = self.last.load(Ordering::Relaxed);
        let since = Duration::from_nanos(now.saturating_sub(last));
        let is_claimed = since >= POLL_INTERVAL
            && self.last.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if is_claimed {
            let mut tenants = self.tenants.lock();
            recompute(&mut tenants, since, self.processors);
            self.count.store(tenants.len(), Ordering::Relaxed);
        }
    }
}

fn recompute(tenants: &mut HashMap<String, Tenant>, since: Duration, processors: f64) {
    let kept = (-since.as_secs_f64() / WINDOW.as_secs_f64()).exp();
    for tenant in tenants.values_mut() {
        let used = Duration::from_nanos(tenant.share.used.swap(0, Ordering::Relaxed));
        tenant.recent = tenant.recent * kept + used.as_secs_f64();
    }
    tenants.retain(|_, it| it.recent > FORGOTTEN || Arc::strong_count(&it.share) > 1);
    let average = average(tenants.values().map(|tenant| tenant.recent), processors);
    for tenant in tenants.values() {
        let most =
            average.map(|fair| if tenant.share.is_over() { fair } else { fair * EXCESS_FACTOR });
        let is_over = most.is_some_and(|most| tenant.recent > most);
        tenant.share.is_over.store(is_over, Ordering::Relaxed);
    }
}

/// The average usage of active tenants; `None` unless the processors are busy with several tenants.
fn average(recent: impl Iterator<Item = f64>, processors: f64) -> Option<f64> {
    let (mut all, mut active) = (0.0, 0_u32);
    for used in recent.filter(|used| *used > ACTIVE) {
        all += used;
        active += 1;
    }
    let is_busy = all > BUSY * processors * WINDOW.as_secs_f64();
    (is_busy && active > 1).then(|| all / f64::from(active))
}

/// The concurrency of a tenant that takes more than its share.
pub(super) fn max_concurrency() -> usize {
    (processors() / 2).max(1)
}

pub(super) fn processors() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which tenants exceed their share, after each used this many seconds per second for a while.
    fn over(used: &[f64]) -> Vec<bool> {
        let mut tenants: HashMap<String, Tenant> = HashMap::new();
        for _ in 0..100 {
            for (number, used) in used.iter().enumerate() {
                let tenant = tenants.entry(number.to_string()).or_default();
                let used = POLL_INTERVAL.mul_f64(*used);
                tenant.share.used.fetch_add(nanos(used), Ordering::Relaxed);
            }
            recompute(&mut tenants, POLL_INTERVAL, 2.0);
        }
        let is_over = |number: usize| {
            tenants.get(&number.to_string()).is_some_and(|tenant| tenant.share.is_over())
        };
        (0..used.len()).map(is_over).collect()
    }

    #[test]
    fn tenants_far_above_the_average_of_busy_processors_are_over() {
        assert_eq!(over(&[1.5, 0.2]), [true, false]);
        assert_eq!(over(&[1.0, 0.9]), [false, false], "equals");
        assert_eq!(over(&[2.0]), [false], "alone");
        assert_eq!(over(&[2.0, 0.0]), [false, false], "as good as alone");
        assert_eq!(over(&[0.3, 0.01]), [false, false], "there is enough for both");
        assert_eq!(over(&[0.9, 0.8, 0.1, 0.1]), [true, true, false, false]);
    }

    #[test]
    fn tenants_stay_over_until_they_take_the_average() {
        let mut tenants: HashMap<String, Tenant> = HashMap::new();
        for (name, recent) in [("a", 1.5), ("b", 0.5)] {
            tenants.insert(name.to_owned(), Tenant { recent, ..Tenant::default() });
        }
        let mut is_over = |a: f64| {
            tenants.get_mut("a").unwrap().recent = a;
            recompute(&mut tenants, Duration::ZERO, 2.0);
            tenants["a"].share.is_over()
        };
        assert!(is_over(1.5));
        assert!(is_over(0.6), "it would not become so with this");
        assert!(!is_over(0.5));
        assert!(!is_over(0.6));
    }

    #[test]
    fn tenants_that_are_gone_are_forgotten() {
        let mut tenants: HashMap<String, Tenant> = HashMap::new();
        tenants.insert("gone".to_owned(), Tenant { recent: 1.0, ..Tenant::default() });
        recompute(&mut tenants, Duration::from_secs(20), 2.0);
        assert!(tenants.is_empty());
    }
}
