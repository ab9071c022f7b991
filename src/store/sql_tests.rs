use super::*;

fn rendered(query: Query, dialect: Dialect) -> (String, Vec<Value>) {
    let Rendered { text, values } = query.render(dialect).unwrap();
    (text, values)
}

#[test]
fn parameters_are_numbered_by_their_first_use() {
    let query =
        Query::new("SELECT 'a: {b}', x::text FROM t WHERE a = :one AND (b = :two OR :one = 2)");
    let query = query.bind("two", "2").bind("one", 1_i64);
    for dialect in [Dialect::Postgres, Dialect::Sqlite] {
        let (text, values) = rendered(query.clone(), dialect);
        assert_eq!(text, "SELECT 'a: {b}', x::text FROM t WHERE a = $1 AND (b = $2 OR $1 = 2)");
        assert_eq!(values, [Value::Int(Some(1)), Value::Text(Some("2".into()))]);
    }
}

#[test]
fn databases_spell_lists_spans_and_locks_differently() {
    let run = Uuid::nil();
    let query =
        Query::new("SELECT id FROM runs WHERE id IN :runs AND at < :at - :span{for_update}");
    let query = query.bind("runs", &[run][..]).bind("at", 1_i64).bind("span", Duration::ZERO);
    let (postgres, _) = rendered(query.clone(), Dialect::Postgres);
    assert_eq!(
        postgres,
        "SELECT id FROM runs WHERE id = ANY($1) AND at < $2 - ($3 * interval '1 microsecond') FOR UPDATE"
    );
    let (sqlite, _) = rendered(query, Dialect::Sqlite);
    assert_eq!(
        sqlite,
        "SELECT id FROM runs WHERE id IN (SELECT value FROM json_each($1)) AND at < $2 - $3"
    );
}

#[test]
fn the_clock_is_the_database_s_where_it_has_one() {
    let query = || Query::new("UPDATE t SET at = {now} WHERE id = :id").bind("id", "x");
    let (postgres, values) = rendered(query(), Dialect::Postgres);
    assert_eq!(postgres, "UPDATE t SET at = clock_timestamp() WHERE id = $1");
    assert_eq!(values.len(), 1);
    let (sqlite, values) = rendered(query(), Dialect::Sqlite);
    assert_eq!(sqlite, "UPDATE t SET at = $1 WHERE id = $2");
    assert!(matches!(values[..], [Value::Int(Some(_)), Value::Text(Some(_))]));
}

#[test]
fn a_wrong_statement_is_an_error() {
    for template in ["SELECT :x", "SELECT {x}", "SELECT {x", "SELECT :"] {
        assert!(Query::new(template).bind("y", 1_i64).render(Dialect::Sqlite).is_err());
    }
}

#[test]
fn text_has_no_nul() {
    assert_eq!("a\0b".value(), Value::Text(Some("a\u{FFFD}b".into())));
}
