//! Ways to write a secret, which are all seen, and ordinary texts, which all stay as they are: each
//! as it is, and standing once and twice as JSON in JSON.

use proptest::prelude::*;
use serde_json::json;

use super::*;

/// Ways to write a secret; `hunter2…` is never left, nor what a secret of base64 begins with.
const WAYS: [&str; 83] = [
    "password=hunter2",
    "password: hunter2",
    "PASSWORD = \"hunter2 with blanks\"",
    "PASSWORD : hunter2",
    "password => 'hunter2'",
    "{\"password\": \"hunter2\"}",
    "{\"password\": \"a \\\"quoted\\\" hunter2\"}",
    "{\"password\":\"back\\\\slash hunter2\"}",
    "{\"arguments\": \"{\\\"api_key\\\": \\\"hunter2\\\"}\"}",
    "{\"a\": \"{\\\"b\\\": \\\"{\\\\\\\"api_key\\\\\\\": \\\\\\\"x hunter2\\\\\\\"}\\\"}\"}",
    "{'client_secret': 'hunter2'}",
    "{\"clientSecret\":\"hunter2\"}",
    "client_secret => hunter2",
    "secret = \"\"\"hunter2\"\"\"",
    "secret = \"\"\"\nfirst hunter2\nhunter2\n\"\"\"",
    "secret = '''hunter2'''",
    "secret: str = \"hunter2\"",
    "let api_key: &str = \"hunter2\";",
    "password := \"hunter2\"",
    "if password == \"hunter2\":",
    "password:\n  hunter2",
    "+password:\n+  hunter2",
    "password: |\n  hunter2",
    "db_password: 'hunter2 hunter2'",
    "export AWS_SECRET_ACCESS_KEY=hunter2",
    "aws_secret_access_key = hunter2/hunter2+hunter2",
    "DB_PASSWD=hunter2;",
    "DB_PASS=hunter2",
    "pwd=hunter2",
    "Server=db;Uid=app;Pwd=hunter2;",
    "api key: hunter2",
    "apiKey=hunter2&next=1",
    "X-Api-Key: hunter2",
    "MY_SECRET_TOKEN=\"hunter2\"",
    "kubectl secret data: token: hunter2==",
    "https://example.com/?access_token=hunter2&x=1",
    "https://user:hunter2@example.com/",
    "https://user:at@hunter2@example.com/",
    "postgres://app:hunter2@db/app",
    "no such file: x/postgres:/app:hunter2@db/app",
    "amqp://:hunter2@queue:5672",
    "Authorization: Bearer hunter2hunter2",
    "authorization: basic aHVudGVyMg==hunter2",
    "Authorization: hunter2",
    "curl -H 'Authorization: Bearer hunter2hunter2'",
    "{\"Authorization\": \"Bearer hunter2\"}",
    "send Bearer hunter2hunter2hunter2 with it",
    "<password>hunter2</password>",
    "mysql --password hunter2 app",
    "mysql --password=hunter2 app",
    "tool --api-key \"hunter2\"",
    "tool -token hunter2",
    "the password is hunter2",
    "The password was: hunter2",
    "The password is HunTerTwoHunter2.",
    "Set-Cookie: session=hunter2",
    "Cookie: theme=dark; session=hunter2; a=b",
    "private_key: hunter2",
    "credentials=hunter2",
    "passphrase: \"hunter2\"",
    "-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2",
    "AccountName=x;AccountKey=hunter2+hunter2/hunter2==;EndpointSuffix=core.windows.net",
    "Endpoint=sb://x/;SharedAccessKeyName=Root;SharedAccessKey=hunter2=",
    "machine example.com login bob password hunter2",
    "machine example.com\n  login bob\n  password hunter2",
    "default login anonymous password hunter2",
    "db.example.com:5432:app:bob:hunter2",
    "*:*:*:bob:hunter2",
    "{\"auths\":{\"r.io\":{\"auth\":\"Ym9iOmh1bnRlcjI=\"}}}",
    "pypi-AgEIcHlwaS5vcmchunter2hunter2",
    "sk-proj-hunter2hunter2hunter2",
    "sk_live_hunter2hunter2hunter2",
    "ghp_hunter2hunter2hunter2hunter2",
    "github_pat_hunter2hunter2hunter2_hunter2",
    "glpat-hunter2hunter2hunter2",
    "xoxb-hunter2-hunter2",
    "hf_hunter2hunter2hunter2hunter2",
    "AIzahunter2hunter2hunter2hunter2hunter2",
    "SG.hunter2hunter2hunter2.hunter2hunter2hunter2",
    "eyJhbGciOiJIUzI1NiJ9.hunter2hunter2.hunter2",
    "tl_admin_hunter2hunter2hunter2hunter2hunter2",
    "https://hooks.slack.com/services/hunter2/hunter2",
];

/// Ordinary texts.
const ORDINARY: [&str; 84] = [
    "my secret garden",
    "the token bucket has a basic understanding of tokens",
    "see https://example.com/a:b@c and user@example.com",
    "the password is required",
    "{\"path\": \"notes.txt\", \"n\": 17}",
    "skip sk-short and eyJ",
    "an author, not an authorization",
    "/etc/passwd: Permission denied",
    "cat: /etc/passwd: No such file or directory",
    "cat: secret: Is a directory",
    "token count: 512",
    "max_tokens: 4096",
    "tokens_used=45",
    "The password must be at least 12 characters.",
    "password: must be at least 12 characters",
    "Password: the one that you chose",
    "password: required",
    "authorization: required",
    "secret: true",
    "secret = false",
    "\"password\": null",
    "\"password\": true,",
    "password=\"\"",
    "password: ''",
    "token: 7",
    "key: value",
    "Author: Bearer of bad news",
    "Bearer authentication is basic authentication",
    "basic understanding",
    "sk-learn is a library",
    "task-force-of-something-long and disk_usage_of_everything",
    "sk_buff_release_head_state and sk-learn-contributed-packages",
    "author: bob",
    "https://example.com/?token_type=bearer&page=2",
    "password_reset_url=https://x.example/reset",
    "passwd: files systemd",
    "commit 9fceb02d0ae598e95dc970b74767f19372d61af8",
    "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "uuid 01a20955-f846-710c-b550-daae1b520c46",
    "token = parser.next_token()",
    "let secret = read_secret(path)?;",
    "The secret is that there is none.",
    "The token is 32 bytes long",
    "api_key_env = \"OPENAI_API_KEY\"",
    "password: ${DB_PASSWORD}",
    "password: $DB_PASSWORD",
    "password=%DB_PASSWORD%",
    "password: {{ env.PW }}",
    "token: ${{ secrets.GITHUB_TOKEN }}",
    "password: <your password>",
    "password: ********",
    "password: \"xxxxxxxx\"",
    "Key: Escape",
    "pass: 12, fail: 3",
    "tokenizer: cl100k",
    "session=open",
    "cookie: chocolate chip",
    "def password(self): return self._password",
    "secrets: inherit",
    "pwd=/home/bob/project",
    "PWD=/srv/app",
    "passed: true",
    "password: str",
    "fn login(user: &str, password: &str, token: Option<String>) {}",
    "interface Login { password: string; token: number }",
    "connect(user=user, password=password)",
    "self.token = config.token",
    "token = request.headers[0]",
    "token = os.environ[\"TOKEN\"]",
    "secret = getSecret(name)",
    "if token == expected:",
    "password:\n  min_length: 12",
    "password_file=/run/secrets/db",
    "secretName: my-certificate",
    "cookie_name: session",
    "docker login --password-stdin r.io",
    "--token requires a value",
    "anti-token measures",
    "use the <token> here, or <b>there</b>",
    "npm_config_cache and hf_transfer and tl_x",
    "10.0.0.1:8080 and src/main.rs:5123:12",
    "2001:0db8:85a3:0000:0000:8a2e:0370:7334 at 12:34:56",
    "\"auth\": \"required\", \"oauth\": \"none\"",
    "pypi-attestation-models-something",
];

/// A text as it is, and as JSON in JSON.
fn nested(text: &str) -> [String; 3] {
    let once = json!({"content": text, "n": 1}).to_string();
    let twice = json!({"arguments": once, "n": 1}).to_string();
    [text.to_owned(), once, twice]
}

#[test]
fn every_way_to_write_a_secret_is_seen() {
    for way in WAYS {
        for (depth, text) in nested(&format!("before {way}\nafter")).iter().enumerate() {
            assert!(may_hold_secret(text), "{text}");
            let kept = redacted(text);
            for secret in ["hunter2", "Ym9iOmh1bn"] {
                assert!(!kept.contains(secret) && kept.contains(REDACTED), "{text}: {kept}");
            }
            assert!(depth > 0 || kept.starts_with("before "), "{way}: {kept}");
            assert_eq!(redacted(&kept), kept, "once is enough");
        }
        let text = format!("before {way} after");
        let mut document = json!({"text": text, "list": [text]});
        redact(&mut document);
        assert!(!document.to_string().contains("hunter2"), "{document}");
    }
}

#[test]
fn ordinary_texts_stay() {
    let mut changed = Vec::new();
    for ordinary in ORDINARY {
        for text in nested(ordinary) {
            if redacted(&text) != text {
                changed.push(redacted(&text).into_owned());
            }
        }
    }
    assert_eq!(changed, Vec::<String>::new());
}

#[test]
fn a_field_is_a_secret_by_its_name_and_value() {
    let mut document = json!({
        "usage": {"input_tokens": 7}, "token": 71_234, "pin_token": 7, "api_key": ["a"],
        "secret": null, "has_password": true, "password": "", "token_type": "bearer",
        "auth": "Ym9iOmh1bnRlcjI=", "pwd": "hunter2", "cookie": "a=b",
    });
    redact(&mut document);
    let expected = json!({
        "usage": {"input_tokens": 7}, "token": "[redacted]", "pin_token": 7,
        "api_key": "[redacted]", "secret": null, "has_password": true, "password": "",
        "token_type": "bearer", "auth": "[redacted]", "pwd": "[redacted]", "cookie": "[redacted]",
    });
    assert_eq!(document, expected);
}

#[test]
fn the_description_of_a_secret_stays_but_for_its_values() {
    let mut document = json!({
        "inputs": {"properties": {
            "token": {"type": "string", "minLength": 3, "default": "hunter2hunter2"},
            "password": {"description": "Not ghp_hunter2hunter2hunter2hunter2.", "enum": ["hunter2", null]},
            "count": {"default": "hunter2"},
        }, "required": ["token"]},
        "credentials": ["github"], "owner": {"api_key": "hunter2hunter2"},
    });
    redact_described(&mut document);
    let expected = json!({
        "inputs": {"properties": {
            "token": {"type": "string", "minLength": 3, "default": "[redacted]"},
            "password": {"description": "Not [redacted].", "enum": ["[redacted]", null]},
            "count": {"default": "hunter2"},
        }, "required": ["token"]},
        "credentials": ["github"], "owner": {"api_key": "[redacted]"},
    });
    assert_eq!(document, expected);
}

#[test]
fn names_of_fields_have_no_secrets_and_stay_different() {
    let (one, other) = ("ghp_hunter2hunter2hunter2hunter2", "ghp_hunter3hunter3hunter3hunter3");
    let document =
        json!({one: 1, "token": null, other: {"[redacted]": 2, one: [{other: 3}]}, "z": 4});
    let expected = json!({
        "[redacted]": 1, "token": null, "z": 4,
        "[redacted] 2": {"[redacted]": 2, "[redacted] 2": [{"[redacted]": 3}]},
    });
    for change in [redact, redact_described, redact_texts] {
        let mut shown = document.clone();
        change(&mut shown);
        assert_eq!(shown, expected);
        let names = shown.as_object().unwrap().keys();
        assert_eq!(names.collect::<Vec<_>>(), ["[redacted]", "token", "[redacted] 2", "z"]);
        assert_eq!(restored(shown.clone(), &document), document);
        shown["[redacted] 2"]["[redacted]"] = json!(5);
        assert_eq!(restored(shown, &document)[other], json!({"[redacted]": 5, one: [{other: 3}]}));
    }
}

#[test]
fn no_secret_escapes_the_first_search() {
    for name in NAMES {
        for text in [format!("{name}=hunter2"), format!("<{name}>hunter2</{name}>")] {
            assert!(may_hold_secret(&text) && redacted(&text).contains(REDACTED), "{text}");
        }
    }
    for way in WAYS {
        let capitals = way.to_uppercase();
        assert!(may_hold_secret(&capitals) || without_looks(&capitals) == capitals, "{way}");
    }
}

/// A text without what looks like a secret, without the first search.
fn without_looks(text: &str) -> String {
    let text = shapes::without_token_shapes(text).into_owned();
    let text = named_secrets::without_named_secrets(&text).into_owned();
    credentials::without_credentials(&text).into_owned()
}

#[test]
fn what_was_left_as_it_was_shown_keeps_its_secret() {
    let original = json!({"password": "hunter2", "to": ["a", "key: tl_x", 1], "n": {"token": "t"}});
    let changed =
        json!({"password": "[redacted]", "to": ["b", "key: tl_x", 1], "n": {"token": "mine"}});
    let expected =
        json!({"password": "hunter2", "to": ["b", "key: tl_x", 1], "n": {"token": "mine"}});
    assert_eq!(restored(changed, &original), expected);
    assert_eq!(restored(json!("x"), &original), json!("x"));
}

#[test]
fn a_document_as_text_stays_one() {
    let text = redacted(r#"{"api_key": "hunter2", "n": [1, {"password": "a b"}]}"#).into_owned();
    let document: Value = serde_json::from_str(&text).unwrap();
    let expected = json!({"api_key": "[redacted]", "n": [1, {"password": "[redacted]"}]});
    assert_eq!(document, expected);
    for way in WAYS {
        let [_, once, twice] = nested(way);
        for text in [once, twice] {
            let kept = redacted(&text).into_owned();
            assert!(serde_json::from_str::<Value>(&kept).is_ok(), "{text}: {kept}");
        }
    }
}

/// What a token of each shape begins with, and the rest of it.
const TOKENS: [(&str, &str); 15] = [
    ("sk-", "hunter2hunter2hunter2"),
    ("sk_live_", "hunter2hunter2hunter2"),
    ("rk_live_", "hunter2hunter2hunter2"),
    ("ghp_", "hunter2hunter2hunter2hunter2"),
    ("github_pat_", "hunter2hunter2hunter2hunter2"),
    ("glpat-", "hunter2hunter2hunter2"),
    ("xoxb-", "1234-hunter2hunter2"),
    ("npm_", "hunter2hunter2hunter2hunter2"),
    ("hf_", "hunter2hunter2hunter2hunter2"),
    ("pypi-AgE", "hunter2hunter2hunter2"),
    ("AIza", "hunter2hunter2hunter2hunter2hunter2"),
    ("SG.", "hunter2hunter2hunter2.hunter2hunter2hunter2"),
    ("tl_key_", "hunter2_hunter2-hunter2hunter2hunter2"),
    ("AKIA", "HUNTER2HUNTER2XX"),
    ("eyJhbGciOi", "J9hunter2.hunter2hunter2.hunter2"),
];

#[test]
fn a_token_is_seen_behind_everything_that_is_no_letter() {
    let before = (0..128_u8).map(char::from).filter(|letter| !letter.is_ascii_alphanumeric());
    let before = before.chain(['é', '密', '\u{a0}', '\u{2028}', '😀']).map(String::from);
    let before =
        before.chain(["\u{1b}[31m", "\u{1b}[0;1m", "%20", "%0A", "\\x0a"].map(String::from));
    for before in before {
        for (beginning, rest) in TOKENS {
            for text in nested(&format!("a{before}{beginning}{rest}{before}")) {
                let kept = redacted(&text).to_lowercase();
                assert!(!kept.contains("hunter2"), "{text}: {kept}");
                assert!(may_hold_secret(&text), "{text}");
            }
        }
    }
    for letter in ('a'..='z').chain('A'..='Z').chain('0'..='9') {
        for (beginning, rest) in TOKENS {
            let text = format!("x{letter}{beginning}{rest}");
            assert_eq!(redacted(&text), text, "a part of a longer word is none");
        }
    }
}

/// What is repeated so that something is looked for behind each occurrence, up to the end of the text.
const REPEATED: [&str; 34] = [
    "password: ",
    "password=",
    "password=a.",
    "password=true",
    "password:",
    "password ",
    "password= ",
    "password=\"",
    "password=\"\"\"${",
    "password='",
    "password=`",
    "password: str",
    "password=bearer ",
    "password\\n",
    "password is ",
    "password is a",
    "<password>",
    "<password>x",
    "--password ",
    " --password=x",
    "set-cookie: ",
    "cookie:",
    "token",
    "-----BEGIN PRIVATE KEY-----\"",
    "-----BEGIN PRIVATE KEY-----",
    "-----END X-----",
    "-----BEGIN ",
    "a://a:b@",
    "a://a:",
    "bearer a",
    "eyJhbGciOiJIUzI1NiJ9.",
    "machine password ",
    "a:5432:",
    "'auth': '",
];

#[test]
fn time_grows_with_the_text_and_no_faster() {
    for part in REPEATED {
        let text = part.repeat((256 << 10) / part.len());
        let begun = processor_ticks();
        let _ = redacted(&text);
        let mut pieces = StreamRedactor::default();
        let _ = (pieces.push(&text), pieces.push(&"\n".repeat(256 << 10)));
        let took = processor_ticks() - begun;
        assert!(took < 800, "{part:?}: {took} hundredths of a second");
    }
}

/// What this thread has had of a processor, in hundredths of a second.
fn processor_ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap(); // the name of a program may have spaces
    let fields: Vec<&str> = fields.split_whitespace().collect();
    fields[11..=12].iter().map(|ticks| ticks.parse::<u64>().unwrap()).sum()
}

#[test]
fn a_long_secret_is_removed_whole() {
    let long = "hunter2".repeat(20_000);
    for text in [
        format!("password={long} and after"),
        format!("password is {long} and after"),
        format!("x --password {long} and after"),
        format!("cookie: a=b {long}\n and after"),
        format!("password='{}' and after", "hunter2".repeat(500)),
        format!("password=\"\"\"{long}\"\"\" and after"),
        format!("-----BEGIN PRIVATE KEY-----\n{long}\n-----END PRIVATE KEY----- and after"),
    ] {
        let kept = redacted(&text);
        assert!(!kept.contains("hunter2") && kept.ends_with(" and after"), "{kept:.300}");
    }
}

proptest! {
    #[test]
    fn nothing_of_a_key_of_the_service_is_left(
        id in "(bootstrapadmin|[0-9a-f]{18}|[A-Za-z0-9]{1,64})",
        secret in "[A-Za-z0-9_-]{43}",
    ) {
        let text = format!("it is tl_{id}_{secret} now");
        prop_assert_eq!(redacted(&text), "it is [redacted] now");
        for text in nested(&text) {
            let kept = redacted(&text).into_owned();
            prop_assert!(kept.contains("it is [redacted] now"), "{}: {}", text, kept);
        }
    }

    #[test]
    fn a_token_is_seen_in_every_text(
        token in 0..TOKENS.len(),
        before in "[\\PC\n\t\r\u{8}\u{c}]{0,12}[^A-Za-z0-9]",
        after in "([^A-Za-z0-9_/+=.-][\\PC\n\t\r]{0,12})?",
    ) {
        let (beginning, rest) = TOKENS[token];
        for text in nested(&format!("{before}{beginning}{rest}{after}")) {
            let kept = redacted(&text).to_lowercase();
            prop_assert!(!kept.contains("hunter2"), "{}: {}", text, kept);
        }
        let mut document = json!({"text": format!("{before}{beginning}{rest}{after}")});
        redact(&mut document);
        prop_assert!(!document.to_string().to_lowercase().contains("hunter2"));
    }

    #[test]
    fn a_value_in_quotes_is_removed_however_deep(
        value in "[A-Za-z0-9][ -~\n\t]{0,20}hunter2[ -~\n\t]{0,20}",
        name in "(password|api_key|clientSecret|Authorization)",
    ) {
        for text in nested(&json!({name: value}).to_string()) {
            let kept = redacted(&text).into_owned();
            prop_assert!(!kept.contains("hunter2"), "{}: {}", text, kept);
            if !text.starts_with("{\"content\"") && !text.starts_with("{\"arguments\"") {
                continue;
            }
            prop_assert!(serde_json::from_str::<Value>(&kept).is_ok(), "{}: {}", text, kept);
        }
    }

    #[test]
    fn no_text_panics_and_once_is_enough(text in "(\\PC|[\\\\\"'`:=\n]|password|token: |secret=|ghp_|://a:b@){0,30}") {
        let once = redacted(&text).into_owned();
        redacted(&once);
    }
}
