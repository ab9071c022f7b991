//! The bytes of files that callers send or copy while the files are not in their places: no quota of a
//! workspace counts them. They are bounded for each tenant, and for all tenants together.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

/// Why a staged file may not grow now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the uploads in progress hold too many bytes")]
pub struct TooManyStaged;

/// The bytes of staged files, by tenant.
#[derive(Debug)]
pub struct StagedBytes {
    of_tenant: u64,
    of_all: u64,
    held: Mutex<HashMap<String, u64>>,
}

/// Bytes of one staged file; free again when it is dropped.
#[derive(Debug)]
pub struct HeldBytes {
    among: Arc<StagedBytes>,
    tenant: String,
    bytes: u64,
}

impl StagedBytes {
    /// At most so many bytes of one tenant, and twice as many of all.
    pub fn new(of_tenant: u64) -> Self {
        Self { of_tenant, of_all: of_tenant.saturating_mul(2), held: Mutex::default() }
    }

    /// For a file of this tenant that is empty.
    pub fn hold(self: &Arc<Self>, tenant: &str) -> HeldBytes {
        HeldBytes { among: Arc::clone(self), tenant: tenant.to_owned(), bytes: 0 }
    }
}

impl HeldBytes {
    /// Counts further bytes.
    ///
    /// # Errors
    /// [`TooManyStaged`]; nothing is counted then.
    pub fn add(&mut self, bytes: u64) -> Result<(), TooManyStaged> {
        let StagedBytes { of_tenant, of_all, held } = &*self.among;
        let mut held = held.lock();
        let own = held.get(&self.tenant).copied().unwrap_or(0).saturating_add(bytes);
        let all = held.values().sum::<u64>().saturating_add(bytes);
        if own > *of_tenant || all > *of_all {
            return Err(TooManyStaged);
        }
        held.insert(self.tenant.clone(), own);
        self.bytes += bytes;
        Ok(())
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        let mut held = self.among.held.lock();
        if let Some(own) = held.get_mut(&self.tenant) {
            *own -= self.bytes;
            if *own == 0 {
                held.remove(&self.tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_holds_its_part_and_all_together_twice_as_much() {
        let bytes = Arc::new(StagedBytes::new(10));
        let [mut one, mut again, mut other, mut third] =
            ["one", "one", "other", "third"].map(|tenant| bytes.hold(tenant));
        assert_eq!((one.add(6), again.add(5)), (Ok(()), Err(TooManyStaged)));
        assert_eq!((again.add(4), other.add(9)), (Ok(()), Ok(())));
        assert_eq!((third.add(2), third.add(1)), (Err(TooManyStaged), Ok(())));
        drop(one);
        assert_eq!((again.add(6), third.add(1)), (Ok(()), Err(TooManyStaged)));
        drop((again, other, third));
        assert!(bytes.held.lock().is_empty());
    }
}
