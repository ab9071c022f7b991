//! Whether memory is scarce: compares the RAM that this process uses with `[runtime] max_memory`,
//! the limit of its control group and the memory of the machine.
//!
//! Large texts take many times their size while they are worked on, so those that come when memory is
//! scarce are refused or wait: an allocation that fails would end all runs of the process.

use std::fs;
use std::path::Path;
use std::sync::{LazyLock, OnceLock};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};
use tokio::time::Instant;

use super::key_locks::ByKey;

/// Percentage of the limit from which on memory is scarce.
const SCARCE_PERCENT: u64 = 65;
/// Each kind of large contents may take the limit divided by this number.
const SHARES: u64 = 8;
/// How often a waiting task checks the memory.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// How long something waits for memory: bounded, because it holds memory that others wait for.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// The operator's setting, in bytes.
static SETTING: OnceLock<u64> = OnceLock::new();
static LIMIT: LazyLock<Option<u64>> =
    LazyLock::new(|| outer_limit().into_iter().chain(SETTING.get().copied()).min());

/// Sets the memory limit of this process; a lower limit of its control group or of the machine still
/// holds. Must be called before anything else in this file; later calls have no effect.
pub fn set_limit(bytes: u64) {
    let _ = SETTING.set(bytes);
}

/// The memory limit of this process in bytes. `None` if it is unknown.
pub fn limit() -> Option<u64> {
    *LIMIT
}

/// The bytes that all contents of one kind may take together: a fraction of the limit, because there
/// are several kinds and each content is in memory several times. `None` if the limit is unknown.
pub fn share_of_limit() -> Option<u64> {
    LIMIT.map(|limit| limit / SHARES)
}

/// Whether the process should allocate no more. False if the limit is unknown.
pub fn is_scarce() -> bool {
    let used = || {
        let pages = fs::read_to_string("/proc/self/statm").ok()?;
        let resident: u64 = pages.split(' ').nth(1)?.parse().ok()?;
        Some(resident.saturating_mul(rustix::param::page_size() as u64))
    };
    LIMIT.is_some_and(|limit| used().is_some_and(|used| used > limit / 100 * SCARCE_PERCENT))
}

/// A share of the memory limit, between 16 MiB and 1 GiB.
fn share_in_kib() -> u32 {
    let kib = share_of_limit().map_or(u64::MAX, |part| part >> 10).clamp(16 << 10, 1 << 20);
    u32::try_from(kib).unwrap_or(u32::MAX)
}

/// A semaphore over the memory that all contents of one kind may take together.
#[derive(Debug)]
pub struct MemorySemaphore {
    kib: u32,
    free: Semaphore,
}

impl MemorySemaphore {
    pub const fn of_kib(kib: u32) -> Self {
        Self { kib, free: Semaphore::const_new(kib as usize) }
    }

    /// Permits for a share of the memory limit, between 16 MiB and 1 GiB.
    pub fn of_share() -> Self {
        Self::of_kib(share_in_kib())
    }

    /// The size of all permits together, in bytes.
    pub fn bytes(&self) -> u64 {
        u64::from(self.kib) << 10
    }

    /// Waits for a permit for this number of bytes. A content that is larger than all permits together takes
    /// all of them. Never `None`, because nothing closes the semaphore.
    pub async fn acquire(&self, bytes: u64) -> Option<SemaphorePermit<'_>> {
        let kib = u32::try_from(bytes >> 10).unwrap_or(u32::MAX).min(self.kib);
        self.free.acquire_many(kib).await.ok()
    }
}

/// Permits of which one tenant, or other name, holds at most a part, because the holder decides for how
/// long it holds them.
#[derive(Debug)]
pub struct TenantSemaphore {
    permits_per_tenant: usize,
    free: Semaphore,
    tenants: ByKey<String, Semaphore>,
}

/// A permit of a [`TenantSemaphore`], or several.
#[derive(Debug)]
pub struct TenantPermit<'a> {
    permit: SemaphorePermit<'a>,
    of_tenant: OwnedSemaphorePermit,
}

impl TenantSemaphore {
    /// One tenant holds at most half of them.
    pub fn new(permits: usize) -> Self {
        Self::with_share(permits, permits / 2)
    }

    /// One tenant holds at most `permits_per_tenant` of them.
    pub fn with_share(permits: usize, permits_per_tenant: usize) -> Self {
        let free = Semaphore::new(permits);
        Self { permits_per_tenant, free, tenants: ByKey::default() }
    }

    /// Waits for a permit. Never `None`, because nothing closes the semaphores.
    pub async fn acquire(&self, tenant: &str) -> Option<TenantPermit<'_>> {
        self.acquire_many(tenant, 1).await
    }

    /// The same for several permits at once.
    pub async fn acquire_many(&self, tenant: &str, permits: u32) -> Option<TenantPermit<'_>> {
        let new = || Semaphore::new(self.permits_per_tenant);
        let own = self.tenants.get_or_insert_with(tenant.to_owned(), new);
        let of_tenant = own.acquire_many_owned(permits).await.ok()?;
        let permit = self.free.acquire_many(permits).await.ok()?;
        Some(TenantPermit { permit, of_tenant })
    }

    /// Takes several permits if they are free now.
    pub fn try_acquire_many(&self, tenant: &str, permits: u32) -> Option<TenantPermit<'_>> {
        let new = || Semaphore::new(self.permits_per_tenant);
        let own = self.tenants.get_or_insert_with(tenant.to_owned(), new);
        let of_tenant = own.try_acquire_many_owned(permits).ok()?;
        let permit = self.free.try_acquire_many(permits).ok()?;
        Some(TenantPermit { permit, of_tenant })
    }
}

impl TenantPermit<'_> {
    /// Releases so many of several permits.
    pub fn release(&mut self, permits: usize) {
        drop((self.permit.split(permits), self.of_tenant.split(permits)));
    }
}

/// A semaphore over the memory that all contents of one kind may take together, those of one tenant half of it,
/// because their clients decide for how long they take it.
#[derive(Debug)]
pub struct TenantMemory {
    kib: TenantSemaphore,
    most_of_tenant: u32,
}

impl TenantMemory {
    pub fn of_kib(kib: u32) -> Self {
        Self { kib: TenantSemaphore::new(kib as usize), most_of_tenant: kib / 2 }
    }

    /// Permits for a share of the memory limit, between 16 MiB and 1 GiB.
    pub fn of_share() -> Self {
        Self::of_kib(share_in_kib())
    }

    /// Waits for a permit for this number of bytes. A content that is larger than a tenant's part takes all of
    /// that. Never `None`, because nothing closes the semaphores.
    pub async fn acquire(&self, tenant: &str, bytes: u64) -> Option<TenantPermit<'_>> {
        self.kib.acquire_many(tenant, self.permits(bytes)).await
    }

    /// Takes a permit for this number of bytes if it is free now.
    pub fn try_acquire(&self, tenant: &str, bytes: u64) -> Option<TenantPermit<'_>> {
        self.kib.try_acquire_many(tenant, self.permits(bytes))
    }

    fn permits(&self, bytes: u64) -> u32 {
        u32::try_from(bytes >> 10).unwrap_or(u32::MAX).min(self.most_of_tenant)
    }
}

/// Waits while memory is scarce, for ten seconds at most.
pub async fn wait_while_scarce() {
    MemoryPatience::default().wait().await;
}

/// How long several waits for memory may still take together.
#[derive(Debug)]
pub struct MemoryPatience(Duration);

impl Default for MemoryPatience {
    fn default() -> Self {
        Self(MAX_WAIT)
    }
}

impl MemoryPatience {
    /// Waits while memory is scarce, as long as the patience lasts.
    pub async fn wait(&mut self) {
        self.wait_while(is_scarce).await;
    }

    async fn wait_while(&mut self, is_scarce: fn() -> bool) {
        let began = Instant::now();
        while began.elapsed() < self.0 && is_scarce() {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        self.0 = self.0.saturating_sub(began.elapsed());
    }
}

/// The least of the limits of all control groups that the process is in (cgroups(7)), and the
/// machine's memory.
fn outer_limit() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok();
    let machine = machine.as_deref().and_then(total_of);
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let files = groups.lines().flat_map(limit_files);
    files.filter_map(|file| limit_in(&file)).chain(machine).min()
}

/// `MemTotal` in bytes.
fn total_of(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib.saturating_mul(1024))
}

/// The limit files of a control group in `/proc/self/cgroup`, and of its ancestors.
fn limit_files(line: &str) -> Vec<String> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
        return Vec::new();
    };
    let (root, file) = match controllers {
        "" => ("/sys/fs/cgroup", "memory.max"),
        v1 if v1.split(',').any(|one| one == "memory") => {
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
        }
        _ => return Vec::new(),
    };
    let groups = Path::new(path).ancestors();
    groups.map(|group| format!("{root}{}/{file}", group.display()).replace("//", "/")).collect()
}

/// `max`, and the largest number of the first version, are no limits.
fn limit_in(file: &str) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn limits_stand_in_all_groups_around_the_process() {
        let v2 = ["/sys/fs/cgroup/a/b/memory.max", "/sys/fs/cgroup/a/memory.max"];
        assert_eq!(limit_files("0::/a/b")[..2], v2);
        assert_eq!(limit_files("0::/"), ["/sys/fs/cgroup/memory.max"]);
        let v1 = "/sys/fs/cgroup/memory/a/memory.limit_in_bytes";
        assert_eq!(limit_files("4:memory,hugetlb:/a")[0], v1);
        for other in ["3:cpu:/a", "", "x", "4:memory"] {
            assert!(limit_files(other).is_empty(), "{other}");
        }
    }

    #[test]
    fn the_machine_has_memory() {
        assert_eq!(total_of("MemTotal:       24 kB\nMemFree: 1 kB\n"), Some(24 * 1024));
        assert_eq!(total_of("MemFree: 1 kB\n"), None);
        assert!(outer_limit().is_some_and(|limit| limit > 1 << 20));
    }

    #[tokio::test(start_paused = true)]
    async fn many_waits_for_memory_are_bounded_together() {
        let mut patience = MemoryPatience::default();
        let began = Instant::now();
        for _ in 0..100 {
            patience.wait_while(|| true).await;
        }
        assert!((MAX_WAIT..2 * MAX_WAIT).contains(&began.elapsed()), "{:?}", began.elapsed());
    }

    #[tokio::test]
    async fn no_tenant_holds_all_permits() {
        let permits = TenantSemaphore::new(4);
        let take = |tenant| permits.acquire(tenant).now_or_never().flatten();
        let one = [take("one"), take("one")];
        assert!(one.iter().all(Option::is_some) && take("one").is_none(), "it has its half");
        let other = take("other").unwrap();
        let mut waiting = std::pin::pin!(permits.acquire("one"));
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(one);
        assert!(waiting.await.is_some());
        drop(other);
        let mut several = permits.acquire_many("other", 2).await.unwrap();
        assert!(take("other").is_none());
        several.release(1);
        assert!(take("other").is_some());
    }

    #[tokio::test]
    async fn a_tenant_has_half_of_the_memory_however_large_a_content_is() {
        let memory = TenantMemory::of_kib(8);
        let huge = memory.try_acquire("one", 1 << 40).unwrap();
        assert!(memory.try_acquire("one", 1 << 10).is_none());
        let mut waiting = std::pin::pin!(memory.acquire("one", 1 << 10));
        assert!(waiting.as_mut().now_or_never().is_none());
        let other = memory.try_acquire("other", 4 << 10).unwrap();
        assert!(memory.try_acquire("third", 1 << 10).is_none(), "all of it is taken");
        drop(huge);
        assert!(waiting.await.is_some());
        drop(other);
        assert!(memory.try_acquire("third", 4 << 10).is_some());
    }
}
