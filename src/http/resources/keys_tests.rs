//! Validation of requests for keys, and who may grant what.

use super::*;

fn request() -> KeyRequest {
    KeyRequest { name: "ci".into(), scopes: vec!["runs:read".into()], ..KeyRequest::default() }
}

fn caller(scopes: &[&str]) -> Caller {
    Caller {
        subject: "k".into(),
        tenant: "acme".into(),
        scopes: scopes.iter().map(|scope| (*scope).to_owned()).collect(),
    }
}

#[test]
fn every_invalid_field_is_reported_with_its_pointer() {
    let now = Utc::now();
    assert_eq!(validation_errors(&request(), now), []);
    let bad = KeyRequest {
        name: String::new(),
        tenant: Some("Ac me".into()),
        scopes: vec!["runs:read".into(), "runs:write".into()],
        expires_at: Some(now),
        rate_limit_per_minute: Some(0),
        rate_limit_burst: Some(0),
    };
    let pointers: Vec<String> =
        validation_errors(&bad, now).into_iter().map(|fault| fault.pointer).collect();
    assert_eq!(
        pointers,
        [
            "/name",
            "/tenant",
            "/scopes/1",
            "/expires_at",
            "/rate_limit_per_minute",
            "/rate_limit_burst"
        ]
    );
    let pointer = |scopes: Vec<String>| {
        let faults = validation_errors(&KeyRequest { scopes, ..request() }, now);
        faults.first().map(|fault| fault.pointer.clone())
    };
    let many = |count| (0..count).map(|number| format!("tools:t{number}")).collect();
    let long = |bytes: usize| vec![format!("tools:{}", "t".repeat(bytes - "tools:".len()))];
    assert_eq!(pointer(Vec::new()).as_deref(), Some("/scopes"));
    assert_eq!(pointer(many(65)).as_deref(), Some("/scopes"));
    assert_eq!(pointer(long(257)).as_deref(), Some("/scopes/0"));
    assert_eq!((pointer(many(64)), pointer(long(256))), (None, None));
}

#[test]
fn a_caller_cannot_grant_scopes_that_it_does_not_have() {
    let may = |held: &[&str], tenant: &str, scope: &str| {
        authorise(&caller(held), tenant, &[scope.to_owned()]).is_ok()
    };
    assert!(may(&["keys:admin", "runs:read"], "acme", "runs:read"));
    assert!(may(&["keys:admin", "tools:execute"], "acme", "tools:shell"));
    assert!(may(&["admin"], "other", "admin"));
    assert!(!may(&["keys:admin", "runs:read"], "acme", "audit:read"));
    assert!(!may(&["keys:admin", "runs:read"], "other", "runs:read"));
    assert!(!may(&["keys:admin", "tools:execute"], "acme", "tools:read"));
    assert!(!may(&["keys:admin", "tools:shell"], "acme", "tools:execute"));
    assert!(!may(&["keys:admin"], "acme", "admin"));
}
