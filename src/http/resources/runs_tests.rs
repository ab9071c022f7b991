//! Filters of the history.

use super::*;

#[test]
fn filters_are_parsed_from_their_parameters() {
    let query = "agent=a&status=failed&session_id=s&parent_run_id=00000000-0000-0000-0000-000000000000\
                 &termination_reason=max_iterations&created_after=2026-01-01T00:00:00Z&metadata.ticket=42";
    let mut params = Params::parse(query).unwrap();
    let filter = run_filter(&mut params).unwrap();
    assert!(params.finish().is_ok());
    assert_eq!(filter.status, Some(RunStatus::Failed));
    assert_eq!(filter.parent_run_id, Some(Uuid::nil()));
    assert_eq!(filter.termination_reason.as_deref(), Some("max_iterations"));
    assert_eq!(filter.metadata, [("ticket".into(), "42".into())]);
    assert!(filter.created_after.is_some() && filter.created_before.is_none());
    for query in
        ["status=done", "termination_reason=bored", "parent_run_id=7", "created_before=now"]
    {
        assert!(run_filter(&mut Params::parse(query).unwrap()).is_err(), "{query}");
    }
    let refused = run_filter(&mut Params::parse("termination_reason=bored").unwrap()).unwrap_err();
    assert!(format!("{refused:?}").contains("completed, max_iterations, "), "{refused:?}");
}
