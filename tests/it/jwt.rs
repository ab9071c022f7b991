//! Callers that come with a token of an identity provider (`auth.mode = "jwt"`), on both stores.
//!
//! | together with | what holds |
//! |---|---|
//! | API keys, the console | keys work as in the mode `api_key`; the console signs in with a key alone (here) |
//! | tenants, scopes | those of the claims, as those of a key (here) |
//! | sessions, children, parked runs, crash, other replica | a run keeps its caller, who is the subject (here: an approval) |
//! | streaming | a stream ends with the token (here) |
//! | short-lived tokens | made with a JWT, they reach as far as it and end with it (here) |
//! | rate limits, budgets | one bucket a subject (here) |
//! | files, memory, audit | the subject stands where a key's id would (here: audit) |
//! | command line, clients | send a bearer token, whatever it is |
//! | dry run | as any other request |

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use rcgen::{KeyPair, PublicKeyData as _, SigningKey as _};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::service::{Answer, Db, Service, Setup, answer, on_both_stores, on_one_store};

on_both_stores! {
    callers_of_the_identity_provider_are_like_keys,
    tokens_and_keys_made_with_a_jwt_reach_no_further,
    a_stream_ends_with_its_token,
}

on_one_store! {
    tokens_that_are_not_accepted,
    keys_of_the_provider_change,
    a_key_set_that_cannot_be_fetched_is_fetched_later,
}

const ISSUER: &str = "https://id.example.com";

const CONFIG: &str = "[auth]\nmode = \"jwt\"\n[auth.jwt]\nissuer = \"https://id.example.com\"\naudience = \"toolloop\"\n";

const QUICK: &str = "model: scripted/quick\nenable_double_confirmation: false\n";

fn b64(bytes: impl AsRef<[u8]>) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(bytes)
}

fn in_seconds(seconds: i64) -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    i64::try_from(now.as_secs()).unwrap() + seconds
}

/// A key of the identity provider.
struct ProviderKey {
    id: String,
    algorithm: &'static str,
    pair: KeyPair,
}

impl ProviderKey {
    fn new(id: &str, algorithm: &'static str) -> Self {
        let of = match algorithm {
            "RS256" => &rcgen::PKCS_RSA_SHA256,
            "ES256" => &rcgen::PKCS_ECDSA_P256_SHA256,
            _ => &rcgen::PKCS_ED25519,
        };
        Self { id: id.to_owned(), algorithm, pair: KeyPair::generate_for(of).unwrap() }
    }

    fn public(&self) -> Value {
        let raw = self.pair.der_bytes();
        let mut jwk = match self.algorithm {
            "RS256" => {
                let (n, e) = rsa_numbers(raw);
                json!({"kty": "RSA", "n": b64(n), "e": b64(e)})
            }
            "ES256" => {
                json!({"kty": "EC", "crv": "P-256", "x": b64(&raw[1..33]), "y": b64(&raw[33..])})
            }
            _ => json!({"kty": "OKP", "crv": "Ed25519", "x": b64(raw)}),
        };
        jwk["kid"] = json!(self.id);
        jwk["use"] = json!("sig");
        jwk["alg"] = json!(self.algorithm);
        jwk
    }

    fn sign(&self, claims: &Value) -> String {
        self.sign_with(claims, None)
    }

    /// Signed, with these critical extensions in the header.
    fn sign_with(&self, claims: &Value, crit: Option<&[&str]>) -> String {
        let mut header = json!({"alg": self.algorithm, "typ": "JWT", "kid": self.id});
        if let Some(crit) = crit {
            header["crit"] = json!(crit);
        }
        if self.algorithm == "ES256" {
            let key = EncodingKey::from_ec_der(&self.pair.serialize_der());
            let crit = crit.map(|names| names.iter().map(|name| (*name).to_owned()).collect());
            let header =
                Header { kid: Some(self.id.clone()), crit, ..Header::new(Algorithm::ES256) };
            return jsonwebtoken::encode(&header, claims, &key).unwrap();
        }
        let signed = format!("{}.{}", b64(header.to_string()), b64(claims.to_string()));
        let signature = self.pair.sign(signed.as_bytes()).unwrap();
        format!("{signed}.{}", b64(signature))
    }
}

/// Modulus and exponent of an `RSAPublicKey` (RFC 8017, A.1.1) in DER.
fn rsa_numbers(der: &[u8]) -> (&[u8], &[u8]) {
    fn element(der: &[u8]) -> (&[u8], &[u8]) {
        let (length, start) = match der[1] {
            0x81 => (usize::from(der[2]), 3),
            0x82 => (usize::from(der[2]) << 8 | usize::from(der[3]), 4),
            short => (usize::from(short), 2),
        };
        der[start..].split_at(length)
    }
    let (sequence, _) = element(der);
    let (modulus, rest) = element(sequence);
    let (exponent, _) = element(rest);
    (modulus.strip_prefix(&[0]).unwrap_or(modulus), exponent)
}

fn key_set(keys: &[&ProviderKey]) -> String {
    let mut keys: Vec<Value> = keys.iter().map(|key| key.public()).collect();
    keys.push(json!({"kty": "EC", "crv": "P-521", "kid": "other", "x": "AA", "y": "AA"}));
    keys.push(json!({"kty": "of tomorrow"}));
    json!({ "keys": keys }).to_string()
}

fn claims(subject: &str, scope: &str) -> Value {
    json!({
        "iss": ISSUER, "aud": ["others", "toolloop"], "sub": subject, "tenant": "acme",
        "scope": format!("openid {scope}"), "exp": in_seconds(600), "iat": in_seconds(0),
    })
}

async fn with_keys(db: Db, keys: &[&ProviderKey], more: &str) -> Service {
    let deleting =
        "model: scripted/deleting\ntools: [file_ops]\nenable_double_confirmation: false\n";
    let deletes = "steps: [{tool_calls: [{tool: file_ops, arguments: {operation: write, path: a.txt, content: a}}]}, \
         {tool_calls: [{tool: file_ops, arguments: {operation: delete, path: a.txt}}]}, {text: done}]";
    let setup = Setup::new()
        .agent("quick", QUICK)
        .scenario("quick", "steps: [{text: done}]")
        .agent("slow", &QUICK.replace("quick", "slow"))
        .scenario("slow", "steps: [{delay_ms: 600000, text: done}]")
        .agent("deleting", &format!("{deleting}governance: {{paths: {{write: ['**']}}}}\n"))
        .scenario("deleting", deletes)
        .config(&format!("{CONFIG}jwks_file = \"keys.json\"\n{more}"));
    let dir = setup.write_directory();
    std::fs::write(dir.path().join("keys.json"), key_set(keys)).unwrap();
    setup.start_in(dir, db).await
}

async fn as_caller(
    service: &Service,
    token: &str,
    method: Method,
    path: &str,
    body: Option<&Value>,
) -> Answer {
    let request = service.http.request(method, service.url(path)).bearer_auth(token);
    answer(match body {
        Some(body) => request.json(body),
        None => request,
    })
    .await
}

async fn invoke(service: &Service, token: &str, agent: &str) -> Answer {
    let path = format!("/v1/agents/{agent}/invoke");
    as_caller(service, token, Method::POST, &path, Some(&json!({}))).await
}

async fn callers_of_the_identity_provider_are_like_keys(db: Db) {
    let keys = ["RS256", "ES256", "EdDSA"].map(|algorithm| ProviderKey::new(algorithm, algorithm));
    let limits = "[governance]\nrate_limit_per_minute = 1\nrate_limit_burst = 6\n";
    let service = with_keys(db, &keys.each_ref(), limits).await;
    for key in &keys {
        let token = key.sign(&claims("alice", "agents:invoke runs:read"));
        let run = invoke(&service, &token, "quick").await;
        assert_eq!(run.status, StatusCode::OK, "{}: {:#}", key.algorithm, run.body);
        let path = format!("/v1/runs/{}", run.body["run_id"].as_str().unwrap());
        assert_eq!(as_caller(&service, &token, Method::GET, &path, None).await.status, 200);
        assert_eq!(service.get(&path).await.status, 404, "another tenant's");
    }

    // Scopes may be a list, and decide; so do those of an administrator.
    let mut listed = claims("alice", "");
    listed["scope"] = json!(["runs:read", "profile"]);
    let refused = invoke(&service, &keys[1].sign(&listed), "quick").await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN, "{:#}", refused.body);
    assert!(refused.body["detail"].as_str().unwrap().contains("agents:invoke"));
    let admin = keys[2].sign(&claims("carol", "admin"));

    // The approver is named by the subject, and cannot be mistaken for a key.
    let worker = "agents:invoke runs:read runs:approve tools:execute";
    let bob = keys[0].sign(&claims("bob", worker));
    let parked = as_caller(
        &service,
        &bob,
        Method::POST,
        "/v1/agents/deleting/invoke-iterative",
        Some(&json!({})),
    )
    .await;
    assert_eq!(parked.status, StatusCode::ACCEPTED, "{:#}", parked.body);
    let run = parked.body["run_id"].as_str().unwrap();
    let call = parked.body["pending"][0]["call_id"].as_str().unwrap();
    let approve = format!("/v1/runs/{run}/tool-calls/{call}/approve");
    let local = keys[0].sign(&claims("local", worker));
    let approved = as_caller(&service, &local, Method::POST, &approve, Some(&json!({}))).await;
    assert_eq!(approved.status, StatusCode::OK, "{:#}", approved.body);
    let log = as_caller(&service, &admin, Method::GET, "/v1/audit?limit=200", None).await.body;
    assert!(
        log.to_string().contains("jwt:local") && log.to_string().contains("jwt:bob"),
        "{log:#}"
    );
    let mut acts = log["data"].as_array().unwrap().iter();
    let is_of_provider =
        |act: &Value| act["subject"].as_str().is_some_and(|subject| subject.starts_with("jwt:"));
    assert!(acts.all(is_of_provider), "{log:#}");
    let others = service.get("/v1/audit?limit=200").await.body.to_string();
    assert!(others.contains("testadmin") && !others.contains("jwt:"), "another tenant's: {others}");

    // One bucket for all tokens of a subject.
    let mut statuses = Vec::new();
    for _ in 0..7 {
        let token = keys[2].sign(&claims("alice", "agents:invoke"));
        statuses.push(invoke(&service, &token, "quick").await.status.as_u16());
    }
    assert!(statuses.contains(&200) && statuses.contains(&429), "{statuses:?}");

    // The console asks for a key.
    let request = service.http.post(service.url("/console/session")).bearer_auth(&admin);
    let own = service.url("");
    let request = request.header("origin", own).header("x-toolloop-console", "1");
    assert_eq!(answer(request).await.status, StatusCode::UNAUTHORIZED);
}

async fn tokens_and_keys_made_with_a_jwt_reach_no_further(db: Db) {
    let key = ProviderKey::new("one", "EdDSA");
    let service = with_keys(db, &[&key], "").await;
    let bob = key.sign(&claims("bob", "agents:invoke runs:read"));
    let ran = invoke(&service, &bob, "quick").await;
    let run = ran.body["run_id"].as_str().unwrap();

    // A short-lived token reaches no further than the one that it was made with.
    let request = json!({"run_id": run, "actions": ["read", "cancel"]});
    let made = as_caller(&service, &bob, Method::POST, "/v1/tokens", Some(&request)).await;
    assert_eq!(made.status, StatusCode::FORBIDDEN, "{:#}", made.body);
    let request = json!({"run_id": run, "actions": ["read"], "ttl_seconds": 3600});
    let made = as_caller(&service, &bob, Method::POST, "/v1/tokens", Some(&request)).await;
    assert_eq!(made.status, StatusCode::CREATED, "{:#}", made.body);
    let end = made.body["expires_at"].as_str().unwrap().parse::<chrono::DateTime<chrono::Utc>>();
    assert!(end.unwrap().timestamp() <= in_seconds(600), "{:#}", made.body);
    let short = made.body["token"].as_str().unwrap();
    let path = format!("/v1/runs/{run}");
    assert_eq!(as_caller(&service, short, Method::GET, &path, None).await.status, 200);
    assert_eq!(as_caller(&service, short, Method::GET, "/v1/runs", None).await.status, 403);

    // A key that is made by such a caller has at most its scopes, and its subject as its maker.
    let maker = key.sign(&claims("dora", "keys:admin runs:read"));
    let wide = json!({"name": "wide", "scopes": ["agents:invoke"]});
    let refused = as_caller(&service, &maker, Method::POST, "/v1/keys", Some(&wide)).await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN, "{:#}", refused.body);
    let fast = json!({"name": "fast", "scopes": ["runs:read"], "rate_limit_per_minute": 2_000_000});
    let refused = as_caller(&service, &maker, Method::POST, "/v1/keys", Some(&fast)).await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN, "{:#}", refused.body);
    let narrow = json!({"name": "narrow", "scopes": ["runs:read"]});
    let made = as_caller(&service, &maker, Method::POST, "/v1/keys", Some(&narrow)).await;
    assert_eq!(made.status, StatusCode::CREATED, "{:#}", made.body);
    assert_eq!(
        (&made.body["tenant"], &made.body["created_by"]),
        (&json!("acme"), &json!("jwt:dora"))
    );
    let key = made.body["key"].as_str().unwrap();
    assert_eq!(as_caller(&service, key, Method::GET, &path, None).await.status, 200);
}

async fn tokens_that_are_not_accepted(db: Db) {
    let (key, stranger) = (ProviderKey::new("one", "ES256"), ProviderKey::new("one", "ES256"));
    let service = with_keys(db, &[&key], "").await;
    let good = claims("alice", "runs:read");
    let with = |claim: &str, value: Value| {
        let mut claims = good.clone();
        claims[claim] = value;
        key.sign(&claims)
    };
    let without = |claim: &str| {
        let mut claims = good.clone();
        claims.as_object_mut().unwrap().remove(claim);
        key.sign(&claims)
    };
    let unsigned = |algorithm: &str| {
        let header = json!({"alg": algorithm, "typ": "JWT", "kid": "one"});
        format!("{}.{}.", b64(header.to_string()), b64(good.to_string()))
    };
    let shared_secret = {
        let public = key.public().to_string();
        let secret = EncodingKey::from_secret(public.as_bytes());
        let header = Header { kid: Some("one".into()), ..Header::new(Algorithm::HS256) };
        jsonwebtoken::encode(&header, &good, &secret).unwrap()
    };
    let whole = key.sign(&good);
    let parts: Vec<&str> = whole.split('.').collect();
    let widened = b64(claims("alice", "admin").to_string());
    let unknown = "unknown, expired or revoked";
    let table = [
        ("another key", stranger.sign(&good), unknown),
        ("not signed", unsigned("none"), unknown),
        ("signature left out", unsigned("ES256"), unknown),
        ("a shared secret", shared_secret, unknown),
        ("other claims", format!("{}.{widened}.{}", parts[0], parts[2]), unknown),
        ("cut off", whole[..whole.len() - 4].to_owned(), unknown),
        ("too long", with("more", json!("x".repeat(9000))), unknown),
        ("no token", "eyJ".into(), unknown),
        ("a critical extension", key.sign_with(&good, Some(&["exp"])), "has `crit`"),
        ("an empty list of them", key.sign_with(&good, Some(&[])), "has `crit`"),
        ("past", with("exp", json!(in_seconds(-1))), "has expired"),
        ("long past", with("exp", json!(-1e300)), "claim `exp` is missing or not a time"),
        ("no end", without("exp"), "claim `exp` is missing or not a time"),
        ("end as a text", with("exp", json!("2100")), "claim `exp` is missing or not a time"),
        ("not yet", with("nbf", json!(in_seconds(300))), "is not valid yet"),
        ("another issuer", with("iss", json!("https://evil.example.com")), "claim `iss`"),
        ("no issuer", without("iss"), "claim `iss`"),
        ("another audience", with("aud", json!("others")), "claim `aud`"),
        ("no audience", without("aud"), "claim `aud`"),
        ("no subject", without("sub"), "claim `sub`"),
        ("a long subject", with("sub", json!("x".repeat(257))), "claim `sub`"),
        ("a subject of two lines", with("sub", json!("a\nb")), "claim `sub`"),
        ("no tenant", without("tenant"), "claim `tenant`"),
        ("a path as tenant", with("tenant", json!("../default")), "claim `tenant`"),
        ("scopes as a number", with("scope", json!(7)), "claim `scope`"),
    ];
    for (what, token, says) in table {
        let refused = as_caller(&service, &token, Method::GET, "/v1/runs", None).await;
        assert_eq!(refused.status, StatusCode::UNAUTHORIZED, "{what}: {:#}", refused.body);
        assert_eq!(refused.body["code"], "UNAUTHENTICATED", "{what}");
        let detail = refused.body["detail"].as_str().unwrap();
        assert!(detail.contains(says), "{what}: {detail}");
    }
    // A token that is good says nothing in a URL, where it would be logged.
    let path = format!(
        "/v1/runs/01970000-0000-7000-8000-000000000000/events?access_token={}",
        key.sign(&good)
    );
    let request = service.http.get(service.url(&path)).header("accept", "text/event-stream");
    assert_eq!(answer(request).await.status, StatusCode::UNAUTHORIZED);
    let accepted = as_caller(&service, &whole, Method::GET, "/v1/runs", None).await;
    assert_eq!(accepted.status, StatusCode::OK, "{:#}", accepted.body);
    assert_eq!(service.get("/v1/runs").await.status, StatusCode::OK, "keys are accepted as ever");
    let soon = with("nbf", json!(in_seconds(30)));
    assert_eq!(as_caller(&service, &soon, Method::GET, "/v1/runs", None).await.status, 200);
    service
        .until("/v1/audit?action=login.refused", |log| {
            log.to_string().contains("not signed with a key of the identity provider")
        })
        .await;
}

async fn keys_of_the_provider_change(db: Db) {
    let [old, new] = ["old", "new"].map(|id| ProviderKey::new(id, "EdDSA"));
    let mut service = with_keys(db, &[&old], "").await;
    let [by_old, by_new] = [&old, &new].map(|key| key.sign(&claims("alice", "runs:read")));
    assert_eq!(as_caller(&service, &by_old, Method::GET, "/v1/runs", None).await.status, 200);
    // What cannot be read leaves the keys in use.
    service.write("keys.json", "{}");
    assert_eq!(as_caller(&service, &by_new, Method::GET, "/v1/runs", None).await.status, 401);
    service.until_logged("tokens of the identity provider may be refused").await;
    assert_eq!(as_caller(&service, &by_old, Method::GET, "/v1/runs", None).await.status, 200);
    service.write("keys.json", &key_set(&[&new]));
    service.key = by_new;
    service.until("/v1/runs", |list| list["data"].is_array()).await;
    assert_eq!(as_caller(&service, &by_old, Method::GET, "/v1/runs", None).await.status, 401);
    // Another key has the id of the one before.
    let namesake = ProviderKey::new("new", "EdDSA");
    service.write("keys.json", &key_set(&[&namesake]));
    service.key = namesake.sign(&claims("alice", "runs:read"));
    service.until("/v1/runs", |list| list["data"].is_array()).await;
}

async fn a_stream_ends_with_its_token(db: Db) {
    let key = ProviderKey::new("one", "ES256");
    let service = with_keys(db, &[&key], "").await;
    let lasting = key.sign(&claims("alice", "agents:invoke runs:read runs:cancel"));
    let request = service
        .http
        .post(service.url("/v1/agents/slow/invoke-iterative"))
        .bearer_auth(&lasting)
        .header("prefer", "respond-async")
        .json(&json!({}));
    let started = answer(request).await;
    assert_eq!(started.status, StatusCode::ACCEPTED, "{:#}", started.body);
    let path = format!("/v1/runs/{}", started.body["run_id"].as_str().unwrap());
    let streamed_for = async |seconds| {
        let mut short = claims("alice", "runs:read");
        short["exp"] = json!(in_seconds(seconds));
        let stream = service.http.get(service.url(&format!("{path}/events")));
        let stream = stream.bearer_auth(key.sign(&short)).header("accept", "text/event-stream");
        let ended = tokio::time::timeout(Duration::from_mins(2), answer(stream)).await;
        ended.expect("the stream stays open").status
    };
    let mut status = streamed_for(6).await;
    if status == StatusCode::UNAUTHORIZED {
        status = streamed_for(25).await; // a busy machine needs longer to use a token
    }
    assert_eq!(status, StatusCode::OK);
    let run = as_caller(&service, &lasting, Method::GET, &path, None).await;
    assert_eq!(run.body["status"], "running", "{:#}", run.body);
    let cancel = format!("{path}/cancel");
    as_caller(&service, &lasting, Method::POST, &cancel, Some(&json!({}))).await;
}

/// Serves a key set, as soon as there is one; how often it was asked.
async fn key_server(set: Arc<Mutex<Option<String>>>) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/keys", listener.local_addr().unwrap());
    let asked = Arc::<AtomicUsize>::default();
    let count = Arc::clone(&asked);
    let app = Router::new().fallback(move || {
        count.fetch_add(1, Ordering::Relaxed);
        let set = set.lock().unwrap().clone();
        async move { set.ok_or(StatusCode::SERVICE_UNAVAILABLE) }
    });
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    (url, asked)
}

async fn a_key_set_that_cannot_be_fetched_is_fetched_later(db: Db) {
    let key = ProviderKey::new("one", "RS256");
    let set = Arc::<Mutex<Option<String>>>::default();
    let (url, asked) = key_server(Arc::clone(&set)).await;
    let mut service =
        Setup::new().config(&format!("{CONFIG}jwks_url = \"{url}\"\n")).start(db).await;
    let token = key.sign(&claims("alice", "runs:read"));
    let since = Instant::now();
    for _ in 0..20 {
        let refused = as_caller(&service, &token, Method::GET, "/v1/runs", None).await;
        assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE, "{:#}", refused.body);
        assert_eq!(refused.body["code"], "IDENTITY_PROVIDER_UNAVAILABLE");
        assert!(refused.headers.contains_key("retry-after"));
    }
    // At most every five seconds.
    let most = 4 + since.elapsed().as_secs() / 5;
    let asked = asked.load(Ordering::Relaxed) as u64;
    assert!(asked <= most, "tokens do not make the service ask each time: {asked}");
    assert_eq!(service.get("/v1/runs").await.status, StatusCode::OK, "keys are accepted as ever");
    *set.lock().unwrap() = Some(key_set(&[&key]));
    service.key = token;
    service.until("/v1/runs", |list| list["data"].is_array()).await;
}
