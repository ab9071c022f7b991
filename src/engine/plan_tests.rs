use super::*;
use crate::run::{Budget, Limits};

#[test]
fn a_timeout_that_is_written_out_bounds_delegation_whatever_it_is() {
    let budget = Budget { max_duration_seconds: 3600, ..Budget::default() };
    let table = [
        ("{}", None, (60, 3600)),
        (r#"{"tool_call_timeout_seconds": 59}"#, None, (59, 59)),
        (r#"{"tool_call_timeout_seconds": 60}"#, None, (60, 60)),
        (r#"{"tool_call_timeout_seconds": 90}"#, None, (90, 90)),
        (r#"{"tool_call_timeout_seconds": 90}"#, Some(60), (60, 60)),
        // The request's bound holds beside these.
        ("{}", Some(120), (60, 3600)),
    ];
    for (written, asked, expected) in table {
        let defined: Limits = serde_json::from_str(written).unwrap();
        let asked = Overrides { tool_call_timeout_seconds: asked, ..Overrides::default() };
        let limits = narrowed_limits(defined, &asked).unwrap();
        let seconds = (limits.call_seconds(), delegation_seconds(&limits, &budget));
        assert_eq!(seconds, expected, "{written} {asked:?}");
    }
    let none = Overrides { tool_call_timeout_seconds: Some(0), ..Overrides::default() };
    assert!(narrowed_limits(Limits::default(), &none).is_err());
}
