use super::*;

#[test]
fn only_a_plain_answer_counts() {
    for status in [200, 201, 202, 204] {
        assert_eq!(of_status(StatusCode::from_u16(status).unwrap()), None, "{status}");
    }
    assert_eq!(of_status(StatusCode::NOT_FOUND), Some(CallOutcome::DidNotHappen));
    for status in [302, 304, 400, 401, 405, 410, 429, 500, 502] {
        let outcome = of_status(StatusCode::from_u16(status).unwrap());
        let Some(CallOutcome::Unknown(why)) = outcome else { panic!("{status}: {outcome:?}") };
        assert!(why.starts_with(&format!("the service answered {status} ")), "{why}");
    }
}

#[test]
fn a_program_says_one_of_two_things() {
    let said = |text: &str| match json::read(text) {
        Ok(OutcomeAnswer::Happened { result }) => json!(["happened", result]),
        Ok(OutcomeAnswer::DidNotHappen {}) => json!("did not"),
        Err(_) => Value::Null,
    };
    for (text, expected) in [
        (r#"{"outcome": "happened", "result": {"id": 1}}"#, json!(["happened", {"id": 1}])),
        (r#"{"outcome": "happened"}"#, json!(["happened", null])),
        (r#"{"outcome": "did_not_happen"}"#, json!("did not")),
        (r#"{"outcome": "did_not_happen", "result": 1}"#, Value::Null),
        (r#"{"outcome": "unknown"}"#, Value::Null),
        (r#"{"outcome": "happened", "resultt": 1}"#, Value::Null),
        (r#"{"result": 1}"#, Value::Null),
        (r#"{"outcome": "did_not_happen"} {"outcome": "happened"}"#, Value::Null),
        ("did_not_happen", Value::Null),
        ("", Value::Null),
    ] {
        assert_eq!(said(text), expected, "{text}");
    }
}
