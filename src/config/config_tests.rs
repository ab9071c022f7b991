use secrecy::ExposeSecret as _;

use super::*;

fn load(file: &str, env: &[(&str, &str)], flags: &Flags) -> Result<Config, ConfigError> {
    let env = env.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
    Config::load(Some((Path::new("conf/toolloop.toml"), file)), env, flags)
}

fn from_file(file: &str) -> Result<Config, ConfigError> {
    load(file, &[], &Flags::default())
}

fn from_env(env: &[(&str, &str)]) -> Result<Config, ConfigError> {
    load("", env, &Flags::default())
}

#[test]
fn nothing_need_be_deleted() {
    let never =
        from_file("[runtime]\nretention = \"never\"\n[audit]\nretention = \"never\"").unwrap();
    assert_eq!((never.runtime.retention, never.audit.retention), (None, None));
    let days = from_file("[runtime]\nretention = \"30d\"").unwrap();
    assert_eq!(days.runtime.retention, Some(Duration::from_hours(30 * 24)));
}

#[test]
fn every_setting_has_a_default() {
    let config = Config::load(None, std::iter::empty(), &Flags::default()).unwrap();
    assert_eq!(config.server.listen, "127.0.0.1:8080".parse().unwrap());
    assert_eq!(config.server.body_limit, 1_048_576);
    assert_eq!(config.server.request_timeout, Duration::from_mins(10));
    assert_eq!(config.database.url.expose_secret(), "sqlite://toolloop.db");
    assert_eq!(config.auth.mode, AuthMode::ApiKey);
    assert_eq!((config.runtime.lease, config.runtime.retention), (Duration::from_secs(5), None));
    assert_eq!(config.agents_dir, Path::new("agents"));
    assert_eq!(config.server.expose, [Exposed::Metrics, Exposed::Docs, Exposed::Console]);
    assert_eq!(config.telemetry.otlp_endpoint, None);
    assert!(config.admin_key.is_none());
    let Model::Server(openai) = &config.models["openai"] else { panic!("openai is not openai") };
    assert_eq!(openai.base_url, "https://api.openai.com/v1");
    assert!(openai.api_key.is_none());
    let Model::Scripted { dir } = &config.models["scripted"] else {
        panic!("scripted is not scripted")
    };
    assert_eq!(dir, Path::new("scenarios"));
}

#[test]
fn a_configured_provider_has_the_documented_defaults() {
    let config =
        from_file("[models.own]\nkind = \"openai\"\nbase_url = \"http://127.0.0.1:1/v1/\"")
            .unwrap();
    let (Model::Server(own), Model::Server(documented)) =
        (&config.models["own"], &config.models["openai"])
    else {
        panic!("both are openai")
    };
    assert_eq!(own.base_url, "http://127.0.0.1:1/v1");
    assert_eq!(
        (own.timeout, own.connect_timeout, own.max_retries, own.rate_limit_patience),
        (
            documented.timeout,
            documented.connect_timeout,
            documented.max_retries,
            documented.rate_limit_patience
        )
    );
}

#[test]
fn every_setting_is_in_default_toml() {
    let sections = [
        "",
        "server",
        "database",
        "auth",
        "runtime",
        "tools",
        "tools.web_fetch",
        "tools.browser",
        "tools.shell",
        "governance",
        "telemetry",
        "models.openai",
        "prices.\"a/b\"",
        "capabilities.\"a/b\"",
    ];
    for section in sections {
        let header = if section.is_empty() { String::new() } else { format!("[{section}]\n") };
        let error = from_file(&format!("{header}zzz = 1")).unwrap_err().to_string();
        let (_, known) = error.split_once("expected ").unwrap();
        let keys: Vec<&str> = known.split('`').skip(1).step_by(2).collect();
        assert!(!keys.is_empty(), "{error}");
        for key in keys {
            let documented = [
                format!("{key} = "),
                format!("[{key}]"),
                format!("[{key}."),
                format!("[{section}.{key}]"),
                format!("[{section}.{key}."),
            ];
            assert!(
                documented.iter().any(|d| DEFAULT_TOML.contains(d)),
                "{section}.{key} is not in src/config/default.toml: describe it there"
            );
        }
    }
}

#[test]
fn the_environment_overrides_the_file_and_flags_override_both() {
    let file = "agents_dir = \"a\"\n[server]\nlisten = \"127.0.0.1:1\"\n[database]\nurl = \"sqlite://f.db\"";
    let env = [
        ("TOOLLOOP_SERVER__LISTEN", "127.0.0.1:2"),
        ("TOOLLOOP_AGENTS_DIR", "b"),
        ("DATABASE_URL", "sqlite://e.db"),
        ("TOOLLOOP_DATABASE__MAX_CONNECTIONS", "7"),
        ("TOOLLOOP_RUNTIME__LEASE", ""),
    ];
    let config = load(file, &env, &Flags::default()).unwrap();
    assert_eq!(config.server.listen.port(), 2);
    assert_eq!(config.agents_dir, Path::new("b"));
    assert_eq!(config.database.url.expose_secret(), "sqlite://e.db");
    assert_eq!(config.database.max_connections, 7);
    assert_eq!(config.runtime.lease, Duration::from_secs(5));

    let flags = Flags {
        config: None,
        listen: Some("127.0.0.1:3".into()),
        database_url: Some("postgres://u:p@h/d".into()),
        agents_dir: Some("c".into()),
    };
    let config = load(file, &env, &flags).unwrap();
    assert_eq!(config.server.listen.port(), 3);
    assert_eq!(config.agents_dir, Path::new("c"));
    assert_eq!(config.database.url.expose_secret(), "postgres://u:p@h/d");

    let both = [("DATABASE_URL", "sqlite://e.db"), ("TOOLLOOP_DATABASE__URL", "sqlite://t.db")];
    assert_eq!(from_env(&both).unwrap().database.url.expose_secret(), "sqlite://t.db");
}

#[test]
fn a_burst_that_is_not_set_is_no_more_than_the_limit_per_minute() {
    let limits = |config: Config| {
        (config.governance.rate_limit_per_minute, config.governance.rate_limit_burst)
    };
    for (settings, expected) in [
        ("", (300, 60)),
        ("rate_limit_per_minute = 3", (3, 3)),
        ("rate_limit_per_minute = 600", (600, 60)),
        ("rate_limit_per_minute = 3\nrate_limit_burst = 9", (3, 9)),
        ("rate_limit_burst = 400", (300, 400)),
    ] {
        let config = from_file(&format!("[governance]\n{settings}")).unwrap();
        assert_eq!(limits(config), expected, "{settings}");
    }
    let variable = ("TOOLLOOP_GOVERNANCE__RATE_LIMIT_PER_MINUTE", "4");
    assert_eq!(limits(from_env(&[variable]).unwrap()), (4, 4));
}

#[test]
fn paths_are_relative_to_the_file_or_the_current_directory() {
    let config =
        from_file("[tools]\nworkspace = \"w\"\n[models.scripted]\ndir = \"/abs\"").unwrap();
    assert_eq!(config.tools.workspace.dir, Path::new("conf/w"));
    assert_eq!(config.agents_dir, Path::new("conf/agents"));
    assert_eq!(config.database.url.expose_secret(), "sqlite://conf/toolloop.db");
    assert!(
        matches!(&config.models["scripted"], Model::Scripted { dir } if dir == Path::new("/abs"))
    );

    for (written, meant) in [
        ("sqlite://d/x.db?mode=rwc", "sqlite://conf/d/x.db"),
        ("sqlite:x.db", "sqlite://conf/x.db"),
        ("sqlite:///x.db", "sqlite:///x.db"),
    ] {
        let config = from_file(&format!("[database]\nurl = \"{written}\"")).unwrap();
        assert_eq!(config.database.url.expose_secret(), meant);
    }
    for written in ["sqlite://", "sqlite::memory:", "sqlite://x.db?mode=ro"] {
        let error = from_file(&format!("[database]\nurl = \"{written}\"")).unwrap_err();
        assert!(error.to_string().contains("write e.g. sqlite://toolloop.db"), "{error}");
    }
    let config = from_env(&[("TOOLLOOP_TOOLS__WORKSPACE", "w")]).unwrap();
    assert_eq!(config.tools.workspace.dir, Path::new("w"));

    let program = |file: &str, env: &[(&str, &str)]| {
        load(file, env, &Flags::default()).unwrap().tools.browser.path
    };
    let file = "[tools.browser]\npath = \"bin/chromium\"";
    assert_eq!(program(file, &[]), Path::new("conf/bin/chromium"));
    assert_eq!(program(file, &[("TOOLLOOP_TOOLS__BROWSER__PATH", "b")]), Path::new("b"));
    assert_eq!(program("", &[]), Path::new(""));
}

#[test]
fn a_workspace_is_a_directory_or_a_table() {
    let file = "[tools.workspace]\ndir = \"w\"\nstore = \"shared\"";
    let of = |env: &[(&str, &str)]| load(file, env, &Flags::default()).unwrap().tools.workspace;
    let shared = |dir: &str| Workspace {
        dir: dir.into(),
        store: WorkspaceStore::Shared,
        quarantine_retention: Some(Duration::from_hours(30 * 24)),
        ..from_file("").unwrap().tools.workspace
    };
    assert_eq!(of(&[]), shared("conf/w"));
    assert_eq!(of(&[("TOOLLOOP_TOOLS__WORKSPACE", "v")]), shared("v"));
    let moved = of(&[("TOOLLOOP_TOOLS__WORKSPACE__STORE", "local")]);
    assert_eq!(moved.store, WorkspaceStore::Local);
    for (file, at) in [
        ("[tools]\nworkspace = 1", "2: tools.workspace.dir:"),
        ("[tools.workspace]\nstore = \"nfs\"", "2: tools.workspace.store:"),
        ("[tools.workspace]\npath = \"w\"", "2: tools.workspace.path:"),
    ] {
        let error = from_file(file).unwrap_err().to_string();
        assert!(error.contains(at), "{error}");
    }
}

#[test]
fn files_are_kept_in_a_directory_or_a_bucket() {
    let of = |object: &str, env: &[(&str, &str)]| {
        let file =
            format!("tools.workspace.store = \"object\"\n[tools.workspace.object]\n{object}");
        load(&file, env, &Flags::default()).map(|config| config.objects.unwrap())
    };
    let Ok(ObjectPlace::Directory(dir)) = of("url = \"kept\"", &[]) else { panic!() };
    assert_eq!(dir, Path::new("conf/kept"));
    let Ok(ObjectPlace::Directory(dir)) = of("url = \"file:///mnt/kept%20here/\"", &[]) else {
        panic!()
    };
    assert_eq!(dir, Path::new("/mnt/kept here"));
    let keys = [("AWS_ACCESS_KEY_ID", "id"), ("S3_SECRET", "s3cr3t")];
    let bucket = "url = \"s3://files/of/toolloop/\"\nendpoint = \"http://127.0.0.1:9000\"\n\
                  secret_key_env = \"S3_SECRET\"";
    let Ok(ObjectPlace::S3(bucket)) = of(bucket, &keys) else { panic!() };
    assert_eq!((bucket.name.as_str(), bucket.prefix.as_str()), ("files", "of/toolloop"));
    assert_eq!(bucket.region, None);
    assert!(!format!("{bucket:?}").contains("s3cr3t"));
    assert_eq!(bucket.key.unwrap().0, "id");
    for (object, at) in [
        ("", "url"),
        ("url = \"ftp://x\"", "url"),
        ("url = \"file://host/x\"", "url"),
        ("url = \"file:///x?a\"", "url"),
        ("url = \"s3://\"", "url"),
        ("url = \"s3://a b\"", "url"),
        ("url = \"s3://b\"\nendpoint = \"x\"", "endpoint"),
        ("url = \"s3://b\"\nendpoint = \"http://me@x\"", "endpoint"),
        ("url = \"s3://b\"\nsecret_key_env = \"NOT_SET\"", "secret_key_env"),
    ] {
        let error = of(object, &keys).unwrap_err().to_string();
        assert!(error.contains(&format!("tools.workspace.object.{at}")), "{error}");
    }
    assert!(from_file("").unwrap().objects.is_none());
}

#[test]
fn variables_match_keys_in_any_case() {
    let file = "[models.my-llm]\nkind = \"openai\"\nbase_url = \"http://x/v1\"";
    let env = [
        ("TOOLLOOP_MODELS__MY_LLM__BASE_URL", "http://y/v1"),
        ("TOOLLOOP_MODELS__MY_LLM__MAX_RETRIES", "0"),
        ("TOOLLOOP_MODELS__MY_LLM__HEADERS", "{ x-team = \"a\" }"),
        ("TOOLLOOP_MODELS__FRESH__KIND", "scripted"),
        ("TOOLLOOP_MODELS__FRESH__DIR", "123"),
    ];
    let config = load(file, &env, &Flags::default()).unwrap();
    let Model::Server(own) = &config.models["my-llm"] else { panic!("my-llm is not openai") };
    assert_eq!((own.base_url.as_str(), own.max_retries), ("http://y/v1", 0));
    assert_eq!(own.headers["x-team"].expose_secret(), "a");
    assert!(matches!(&config.models["fresh"], Model::Scripted { dir } if dir == Path::new("123")));
}

#[test]
fn variables_that_are_not_settings_are_ignored() {
    let config = from_env(&[
        ("TOOLLOOP_ADMIN_KEY", "tl_a_b"),
        ("TOOLLOOP_LOG", "debug"),
        ("TOOLLOOP_PORT", "tcp://10.0.0.1:8080"),
        ("TOOLLOOP_SERVER", "x"),
        ("HOME", "/"),
    ])
    .unwrap();
    assert_eq!(config.admin_key.unwrap().expose_secret(), "tl_a_b");
}

#[test]
fn secrets_do_not_print() {
    let file = "[database]\nurl = \"postgres://u:hunter2@h/d\"\n\
                [models.own]\nkind = \"openai\"\nbase_url = \"http://x/v1\"\napi_key_env = \"OWN\"\nheaders = {a = \"hunter2\"}";
    let config =
        load(file, &[("OWN", "hunter2"), ("TOOLLOOP_ADMIN_KEY", "hunter2")], &Flags::default())
            .unwrap();
    let Model::Server(own) = &config.models["own"] else { panic!("own is not openai") };
    assert_eq!(own.api_key.as_ref().unwrap().expose_secret(), "hunter2");
    assert!(!format!("{config:?}").contains("hunter2"));
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn errors_in_the_file_name_file_line_and_key() {
    let table = [
        ("x = ", "conf/toolloop.toml:1: "),
        ("[server]\nlisten = 1\nlisten = 2", "conf/toolloop.toml:3: duplicate key"),
        (
            "\nagent_dir = \"x\"",
            "conf/toolloop.toml:2: agent_dir: unknown key `agent_dir` (did you mean `agents_dir`?), expected one of `agents_dir`",
        ),
        (
            "[server]\n\nlisten = \"localhost\"",
            "conf/toolloop.toml:3: server.listen: \"…\" is not an IP address and a port, e.g. 127.0.0.1:8080",
        ),
        (
            "[server]\nbody_limit = \"1MB\"",
            "conf/toolloop.toml:2: server.body_limit: \"…\" is not a size",
        ),
        (
            "[server]\nbody_limit = 10",
            "conf/toolloop.toml:2: server.body_limit: 10 is not between 1KiB and 1GiB",
        ),
        (
            "[server]\nrequest_timeout = \"0s\"",
            "conf/toolloop.toml:2: server.request_timeout: \"…\" is not between 1s and 7d",
        ),
        (
            "[server]\nshutdown_grace = 30",
            "conf/toolloop.toml:2: server.shutdown_grace: invalid type: integer, expected a string",
        ),
        (
            "[server]\nbody_limit = -1",
            "conf/toolloop.toml:2: server.body_limit: -1 is not between 1KiB and 1GiB",
        ),
        (
            "[server]\nbody_limit = 2048.5",
            "conf/toolloop.toml:2: server.body_limit: 2048.5 is not a size",
        ),
        (
            "[server]\nheader_timeout = \"90m\"",
            "conf/toolloop.toml:2: server.header_timeout: \"…\" is not between 100ms and 1h",
        ),
        (
            "[server]\nwrite_timeout = \"2d\"",
            "conf/toolloop.toml:2: server.write_timeout: \"…\" is not between 100ms and 24h",
        ),
        (
            "[runtime]\nstore_patience = \"2h\"",
            "conf/toolloop.toml:2: runtime.store_patience: \"…\" is not between 0s and 1h",
        ),
        (
            "[runtime]\nlease = \"1999ms\"",
            "conf/toolloop.toml:2: runtime.lease: \"…\" is not between 2s and 1h",
        ),
        (
            "[runtime]\nqueue_workers = -1",
            "conf/toolloop.toml:2: runtime.queue_workers: -1 is not between 1 and 100000",
        ),
        (
            "[runtime]\nmax_crashes = 0",
            "conf/toolloop.toml:2: runtime.max_crashes: 0 is not between 1 and 100",
        ),
        (
            "[database]\nmax_connections = \"16\"",
            "conf/toolloop.toml:2: database.max_connections: invalid type",
        ),
        (
            "[database]\nurl = \"mysql://x\"",
            "conf/toolloop.toml:2: database.url: must start with sqlite:// or postgres://",
        ),
        (
            "[database]\nread_url = \"postgres://standby/d\"",
            "conf/toolloop.toml:2: database.read_url: must be that of a standby",
        ),
        ("[database]\nurl = \"sqlite://\"", "conf/toolloop.toml:2: database.url: names no file"),
        ("[database]\nurl = \"postgres://[\"", "conf/toolloop.toml:2: database.url: is not a URL"),
        (
            "[auth]\nmode = \"oauth\"",
            "conf/toolloop.toml:2: auth.mode: unknown variant, expected one of `api_key`, `jwt`, `none`",
        ),
        ("server = 1", "conf/toolloop.toml:1: server: invalid type"),
        (
            "[server]\nlisten = \"0.0.0.0:1\"\n[auth]\nmode = \"none\"",
            "conf/toolloop.toml:4: auth.mode: \"none\" is allowed only on loopback addresses, but server.listen is 0.0.0.0:1",
        ),
        (
            "[runtime]\nretention = \"10ms\"",
            "conf/toolloop.toml:2: runtime.retention: \"…\" is not between 1s and 36500d",
        ),
        (
            "[governance]\nrate_limit_burst = 0",
            "conf/toolloop.toml:2: governance.rate_limit_burst: 0 is not between",
        ),
        ("[models.x]\nkind = \"gemini\"", "conf/toolloop.toml:2: models.x.kind: unknown variant"),
        (
            "[models.anthropic]\nnum_ctx = 4096",
            "conf/toolloop.toml:2: models.anthropic.num_ctx: is not a setting of kind \"anthropic\"",
        ),
        (
            "[models.x]\nbase_url = \"http://x\"",
            "conf/toolloop.toml:1: models.x: missing field `kind`",
        ),
        ("[models.x]\nkind = \"openai\"", "conf/toolloop.toml:1: models.x.base_url: is missing"),
        (
            "[models.x]\nkind = \"openai\"\nbase_url = \"ftp://x\"",
            "conf/toolloop.toml:3: models.x.base_url: must be an http or https URL",
        ),
        (
            "[models.x]\nkind = \"openai\"\nbase_url = \"http://u:p@x\"",
            "conf/toolloop.toml:3: models.x.base_url: must not contain credentials",
        ),
        (
            "[models.x]\nkind = \"openai\"\nbase_url = \"x\"",
            "conf/toolloop.toml:3: models.x.base_url: ",
        ),
        (
            "[models.openai]\ndir = \"x\"",
            "conf/toolloop.toml:2: models.openai.dir: is not a setting of kind \"openai\"",
        ),
        (
            "[models.scripted]\nbase_url = \"http://x\"",
            "conf/toolloop.toml:2: models.scripted.base_url: is not a setting",
        ),
        ("[models.x]\nkind = \"scripted\"", "conf/toolloop.toml:1: models.x.dir: is missing"),
        (
            "[models.\"a/b\"]\nkind = \"scripted\"\ndir = \"x\"",
            "conf/toolloop.toml:1: models.a/b: a provider's name",
        ),
        (
            "[models.openai]\n\nheaders = {\"a b\" = \"x\"}",
            "conf/toolloop.toml:3: models.openai.headers: one of them is not a valid header",
        ),
        ("[auth]\nmode = \"jwt\"", "conf/toolloop.toml:2: auth.mode: \"jwt\" needs [auth.jwt]"),
        (
            "[auth]\nmode = \"jwt\"\n[auth.jwt]\nissuer = \"i\"\naudience = \"a\"",
            "conf/toolloop.toml:3: auth.jwt: needs either jwks_file or jwks_url",
        ),
        (
            "[auth]\nmode = \"jwt\"\n[auth.jwt]\nissuer = \"i\"\naudience = \"a\"\njwks_file = \"f\"\njwks_url = \"https://x\"",
            "conf/toolloop.toml:3: auth.jwt: has both jwks_file and jwks_url",
        ),
        (
            "[audit]\nkey_env = \"AK\"",
            "conf/toolloop.toml:2: audit.key_env: the environment variable AK is not set",
        ),
        (
            "[auth]\nmode = \"jwt\"\n[auth.jwt]\nissuer = \"\"\naudience = \"a\"",
            "conf/toolloop.toml:4: auth.jwt.issuer: must not be empty",
        ),
        (
            "[auth]\nmode = \"jwt\"\n[auth.jwt]\nissuer = \"i\"\naudience = \"a\"\njwks_url = \"ftp://x\"",
            "conf/toolloop.toml:6: auth.jwt.jwks_url: ",
        ),
        (
            "[models.openai]\ntimeout = \"1ms\"",
            "conf/toolloop.toml:2: models.openai.timeout: \"…\" is not between 100ms and 1h",
        ),
    ];
    for (file, expected) in table {
        let error = from_file(file).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{file:?} says {error}");
    }
}

#[test]
fn the_embedded_store_is_a_file() {
    let file = |url: &str| {
        let flags = Flags { database_url: Some(url.into()), ..Flags::default() };
        load("", &[], &flags).unwrap().database.file()
    };
    assert_eq!(file("sqlite://a/b.db"), Some("a/b.db".into()));
    assert_eq!(file("sqlite:/b.db"), Some("/b.db".into()));
    assert_eq!(file("postgres://x"), None);
}

#[test]
fn errors_outside_the_file_name_the_variable_or_flag() {
    let table = [
        (
            ("TOOLLOOP_SERVER__LISTEN", "x"),
            "environment variable TOOLLOOP_SERVER__LISTEN: server.listen: \"…\" is not an IP address and a port",
        ),
        (
            ("TOOLLOOP_SERVER__LISTEN__X", "y"),
            "environment variable TOOLLOOP_SERVER__LISTEN__X: server.listen: invalid type: map",
        ),
        (
            ("TOOLLOOP_SERVER__LISTN", "x"),
            "environment variable TOOLLOOP_SERVER__LISTN: server.listn: unknown key",
        ),
        (
            ("TOOLLOOP_RUNTIME__QUEUE_WORKERS", "many"),
            "environment variable TOOLLOOP_RUNTIME__QUEUE_WORKERS: runtime.queue_workers: invalid type",
        ),
        (
            ("TOOLLOOP_RUNTIME__QUEUE_WORKERS", "0"),
            "environment variable TOOLLOOP_RUNTIME__QUEUE_WORKERS: runtime.queue_workers: 0 is not between",
        ),
        (
            ("TOOLLOOP_MODELS__X__DIR", "d"),
            "environment variable TOOLLOOP_MODELS__X__DIR: models.x: missing field `kind`",
        ),
        (
            ("DATABASE_URL", "mysql://u:hunter2@h/d"),
            "environment variable DATABASE_URL: database.url: must start with",
        ),
    ];
    for ((name, value), expected) in table {
        let error = from_env(&[(name, value)]).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{name} says {error}");
        assert!(!error.contains("hunter2"));
    }
    let flags = Flags { listen: Some("x".into()), ..Flags::default() };
    let error = load("", &[], &flags).unwrap_err().to_string();
    assert_eq!(error, "--listen: \"…\" is not an IP address and a port, e.g. 127.0.0.1:8080");
}

#[test]
fn configured_directories_must_exist() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("toolloop.toml");
    let flags = Flags { config: Some(file.clone()), ..Flags::default() };
    let error = Config::read(&flags).unwrap_err().to_string();
    assert!(error.starts_with(&format!("{}: cannot be read: ", file.display())), "{error}");

    std::fs::write(&file, "\nagents_dir = \"a\"\n").unwrap();
    let error = Config::read(&flags).unwrap_err().to_string();
    let agents = dir.path().join("a");
    assert_eq!(
        error,
        format!(
            "{}:2: agents_dir: the directory {} does not exist",
            file.display(),
            agents.display()
        )
    );

    std::fs::create_dir(&agents).unwrap();
    assert_eq!(Config::read(&flags).unwrap().agents_dir, agents);
}

#[test]
fn our_variables_override_those_of_opentelemetry() {
    let otel = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318");
    let telemetry = from_env(&[otel, ("OTEL_SERVICE_NAME", "orders")]).unwrap().telemetry;
    assert_eq!(telemetry.otlp_endpoint, Some("http://collector:4318".parse().unwrap()));
    assert_eq!(telemetry.service_name, "orders");
    let ours = [
        otel,
        ("TOOLLOOP_TELEMETRY__OTLP_ENDPOINT", "http://ours:4318"),
        ("TOOLLOOP_TELEMETRY__SAMPLE_RATIO", "0.5"),
    ];
    let telemetry = from_env(&ours).unwrap().telemetry;
    assert_eq!(
        (telemetry.otlp_endpoint.unwrap().as_str(), telemetry.sample_ratio),
        ("http://ours:4318/", 0.5)
    );
    for (file, complaint) in [
        ("[telemetry]\nsample_ratio = 1.5", "1.5 is not between 0 and 1"),
        ("[telemetry]\notlp_endpoint = \"collector:4318\"", "must be an http or https URL"),
        ("[server]\nexpose = [\"keys\"]", "unknown variant"),
    ] {
        let error = from_file(file).unwrap_err().to_string();
        assert!(error.contains(complaint), "{error}");
    }
}

#[test]
fn origins_are_written_as_browsers_send_them() {
    let read = |origins: &str| {
        let text = format!("[server]\ncors_origins = {origins}\n");
        Config::load(Some((Path::new("t.toml"), &text)), std::iter::empty(), &Flags::default())
    };
    let good = read(r#"["https://app.example.com", "http://localhost:3000", "http://[::1]:1"]"#);
    assert_eq!(good.unwrap().server.cors_origins.len(), 3);
    for odd in [
        "*",
        "null",
        "",
        "app.example.com",
        "https://app.example.com/",
        "https://a.b/c",
        "https://A.b",
        "https://*.example.com",
        "https://a.b:443",
        "ftp://a.b",
        "file:///a",
        "https://u@a.b",
    ] {
        let refused = read(&format!("[{odd:?}]")).unwrap_err().to_string();
        assert!(refused.contains("server.cors_origins"), "{odd}: {refused}");
    }
}
