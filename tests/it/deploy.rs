//! What `deploy/` and the compose files promise of the service: its paths, ports, metrics, variables
//! and times are those of the binary.
//!
//! With other features. Stores, tenants, sessions, children, streaming: none, these files start the service and
//! look at it. Drain: the times of the manifests and the unit are longer (here). Replicas: the
//! workspace is one volume (here). Command line: `check` accepts their settings (here).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::service::{Db, Setup, answer, command};

/// The longest that the service takes to close after its drain.
const CLOSING: u64 = 4;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn text(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn yaml(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// The manifests, by kind and name.
fn manifests() -> BTreeMap<(String, String), Value> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(root().join("deploy/kubernetes")).unwrap() {
        let file = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        for document in file.split("\n---\n").map(yaml) {
            let of = |pointer: &str| document.pointer(pointer).and_then(Value::as_str);
            let kind = of("/kind").unwrap().to_owned();
            let name = of("/metadata/name").unwrap_or_default().to_owned();
            assert!(of("/apiVersion").is_some(), "{document:#}");
            assert!(found.insert((kind, name), document).is_none());
        }
    }
    found
}

fn manifest(kind: &str, name: &str) -> Value {
    manifests().remove(&(kind.to_owned(), name.to_owned())).unwrap()
}

fn seconds(text: &str) -> u64 {
    text.trim_end_matches('s').parse().unwrap()
}

fn strings(value: &Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(|item| item.as_str().unwrap()).collect()
}

fn shutdown_grace(settings: &str) -> u64 {
    let settings: toml::Table = toml::from_str(settings).unwrap();
    seconds(settings["server"]["shutdown_grace"].as_str().unwrap())
}

async fn check(dir: &Path) {
    let checked = command(dir).arg("check").output().await.unwrap();
    let said = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert!(checked.status.success() && !said.contains("warning"), "{said}");
}

#[test]
fn the_kustomization_names_the_files_that_are_there() {
    let kustomization = yaml(&text("deploy/kubernetes/kustomization.yaml"));
    let mut named = strings(&kustomization["resources"]);
    named.extend(["kustomization.yaml", "secret.example.yaml"]);
    named.sort_unstable();
    let mut there: Vec<String> = std::fs::read_dir(root().join("deploy/kubernetes"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    there.sort();
    assert_eq!(named, there);
}

#[tokio::test]
async fn probes_and_ports_are_those_of_the_service() {
    let deployment = manifest("Deployment", "toolloop");
    let pod = &deployment["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let service = Setup::new().start(Db::Sqlite).await;
    for (probe, path) in
        [("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")]
    {
        let get = &container[probe]["httpGet"];
        assert_eq!(*get, json!({"path": path, "port": "http"}), "{probe}");
        assert_eq!(answer(service.http.get(service.url(path))).await.status, 200, "{probe}");
    }
    let settings = manifest("ConfigMap", "toolloop")["data"]["toolloop.toml"].clone();
    let settings: toml::Table = toml::from_str(settings.as_str().unwrap()).unwrap();
    let listen = settings["server"]["listen"].as_str().unwrap();
    let port: u64 = listen.rsplit_once(':').unwrap().1.parse().unwrap();
    assert_eq!(container["ports"], json!([{"name": "http", "containerPort": port}]));
    assert_eq!(manifest("Service", "toolloop")["spec"]["ports"][0]["targetPort"], "http");
    let policy = manifest("NetworkPolicy", "toolloop");
    assert_eq!(policy["spec"]["ingress"][0]["ports"][0]["port"], port);
    let annotations = &deployment["spec"]["template"]["metadata"]["annotations"];
    assert_eq!(annotations["prometheus.io/port"], port.to_string());
    let scraped = annotations["prometheus.io/path"].as_str().unwrap();
    assert_eq!(answer(service.http.get(service.url(scraped))).await.status, 200);
    assert!(text("Dockerfile").contains(&format!("EXPOSE {port}")));
}

#[tokio::test]
async fn the_settings_and_agents_of_the_manifests_are_valid() {
    let dir = TempDir::new().unwrap();
    let settings = manifest("ConfigMap", "toolloop");
    let settings = settings["data"]["toolloop.toml"].as_str().unwrap();
    std::fs::write(dir.path().join("toolloop.toml"), settings).unwrap();
    std::fs::create_dir(dir.path().join("agents")).unwrap();
    for (name, agent) in manifest("ConfigMap", "toolloop-agents")["data"].as_object().unwrap() {
        std::fs::write(dir.path().join("agents").join(name), agent.as_str().unwrap()).unwrap();
    }
    check(dir.path()).await;
    let compose = TempDir::new().unwrap();
    std::fs::write(compose.path().join("toolloop.toml"), text("deploy/compose/toolloop.toml"))
        .unwrap();
    check(compose.path()).await;
}

#[test]
fn the_pod_is_confined_and_drains_in_time() {
    let deployment = manifest("Deployment", "toolloop");
    let pod = &deployment["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    assert_eq!(pod["automountServiceAccountToken"], false);
    let confined = &container["securityContext"];
    assert_eq!(confined["readOnlyRootFilesystem"], true);
    assert_eq!(confined["allowPrivilegeEscalation"], false);
    assert_eq!(confined["capabilities"]["drop"], json!(["ALL"]));
    let uid = pod["securityContext"]["runAsUser"].as_u64().unwrap();
    assert!(text("Dockerfile").contains(&format!("--uid {uid}")));

    let settings = manifest("ConfigMap", "toolloop");
    let settings = settings["data"]["toolloop.toml"].as_str().unwrap();
    let pre_stop = &container["lifecycle"]["preStop"]["exec"]["command"];
    let (wait, grace) = (seconds(pre_stop[1].as_str().unwrap()), shutdown_grace(settings));
    let patience = pod["terminationGracePeriodSeconds"].as_u64().unwrap();
    assert!(patience >= wait + grace + CLOSING, "{patience} < {wait} + {grace} + {CLOSING}");

    let mounts: BTreeMap<&str, &str> = container["volumeMounts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| (m["mountPath"].as_str().unwrap(), m["name"].as_str().unwrap()))
        .collect();
    let settings: toml::Table = toml::from_str(settings).unwrap();
    let workspace = settings["tools"]["workspace"]["dir"].as_str().unwrap();
    assert!(mounts.contains_key(workspace) && mounts.contains_key("/tmp"), "{mounts:?}");
    let volumes = pod["volumes"].as_array().unwrap();
    let named: BTreeSet<&str> = volumes.iter().map(|v| v["name"].as_str().unwrap()).collect();
    assert_eq!(named, mounts.values().copied().collect());
    let claim = manifest("PersistentVolumeClaim", "toolloop-workspace");
    assert_eq!(claim["spec"]["accessModes"], json!(["ReadWriteMany"]));

    let secret = manifest("Secret", "toolloop");
    for variable in container["env"].as_array().unwrap() {
        let reference = &variable["valueFrom"]["secretKeyRef"];
        assert_eq!(reference["name"], "toolloop", "a secret by reference: {variable:#}");
        let key = reference["key"].as_str().unwrap();
        assert!(secret["stringData"].get(key).is_some() || reference["optional"] == true, "{key}");
    }
    let budget = manifest("PodDisruptionBudget", "toolloop");
    let replicas = deployment["spec"]["replicas"].as_u64().unwrap();
    assert!(budget["spec"]["minAvailable"].as_u64().unwrap() < replicas);
}

#[test]
fn the_unit_stops_later_than_the_drain() {
    let unit = text("deploy/systemd/toolloop.service");
    let mut settings = BTreeMap::<&str, Vec<&str>>::new();
    for line in unit.lines().filter(|line| !line.is_empty() && !line.starts_with(['#', '['])) {
        let (name, value) = line.split_once('=').unwrap_or_else(|| panic!("{line}"));
        settings.entry(name).or_default().push(value);
    }
    let grace = shutdown_grace(&format!("{}\n", text("src/config/default.toml")));
    assert!(seconds(settings["TimeoutStopSec"][0]) >= grace + CLOSING);
    for (name, value) in [
        ("User", "toolloop"),
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "strict"),
        ("ProtectHome", "yes"),
        ("CapabilityBoundingSet", ""),
        ("StateDirectory", "toolloop"),
    ] {
        assert_eq!(settings[name], [value], "{name}");
    }
    assert!(settings["ExecStart"][0].starts_with("/usr/local/bin/toolloop serve "));
    let check = settings["ExecStartPre"][0];
    assert!(
        check.starts_with("-/usr/local/bin/toolloop check "),
        "no broken agent keeps it from starting"
    );
}

#[test]
fn the_compose_files_mount_existing_files_and_pass_every_key() {
    let defaults: toml::Table = toml::from_str(&text("src/config/default.toml")).unwrap();
    let models = defaults["models"].as_table().unwrap();
    let keys: Vec<&str> =
        models.values().filter_map(|model| model.get("api_key_env")?.as_str()).collect();
    assert!(keys.len() > 1);
    for (file, at, mounted) in [
        (
            "docker-compose.yml",
            "",
            &["agents", "skills", "scenarios", "tools", "toolloop.toml", "workspace"][..],
        ),
        (
            "src/cli/project/template/docker-compose.yml",
            "src/cli/project/template",
            &["agents", "scenarios", "tools", "toolloop.toml", "workspace"],
        ),
    ] {
        let compose = yaml(&text(file));
        let service = &compose["services"]["toolloop"];
        for key in &keys {
            assert_eq!(service["environment"][key], format!("${{{key}:-}}"), "{file}");
        }
        let volumes = strings(&service["volumes"]);
        let targets: BTreeSet<&str> = volumes
            .iter()
            .filter_map(|volume| volume.split(':').nth(1)?.rsplit('/').next())
            .collect();
        for target in mounted {
            assert!(targets.contains(target), "{file} mounts no {target}");
        }
        for volume in volumes {
            let source = volume.split(':').next().unwrap();
            let is_there = match source.strip_prefix("./") {
                Some(path) => root().join(at).join(path).exists(),
                None => compose["volumes"].get(source).is_some(),
            };
            assert!(is_there, "{file}: there is no {source}");
        }
        let stop = seconds(service["stop_grace_period"].as_str().unwrap());
        assert!(stop >= 30 + CLOSING, "{file}");
        let hardened = ["read_only", "tmpfs", "cap_drop", "security_opt"].map(|key| &service[key]);
        let expected =
            [json!(true), json!(["/tmp"]), json!(["ALL"]), json!(["no-new-privileges:true"])];
        assert_eq!(hardened, expected.each_ref(), "{file}");
        assert!(!text(file).contains("PASSWORD:-"), "{file} has a default password");
    }
}

#[test]
fn three_replicas_of_the_compose_file_are_behind_a_balancer() {
    let compose = yaml(&text("docker-compose.yml"));
    let services = compose["services"].as_object().unwrap();
    let replicas: Vec<&str> =
        services.keys().map(String::as_str).filter(|name| name.starts_with("toolloop")).collect();
    assert_eq!(replicas, ["toolloop", "toolloop-2", "toolloop-3"]);
    let balancer = text("deploy/compose/haproxy.cfg");
    let asked: Vec<&str> = balancer
        .lines()
        .filter_map(|line| line.trim().strip_prefix("server ")?.split(' ').nth(1))
        .collect();
    assert_eq!(asked, replicas.iter().map(|name| format!("{name}:8080")).collect::<Vec<_>>());
    assert!(balancer.contains("httpchk GET /readyz\n"));
    for replica in &replicas[1..] {
        let replica = &services[*replica];
        assert_eq!(replica["profiles"], json!(["replicas"]));
        assert_eq!(replica["ports"], json!([]), "only the balancer and the first have a port");
        for same in ["environment", "volumes", "stop_grace_period", "read_only", "cap_drop"] {
            assert_eq!(replica[same], services["toolloop"][same], "{same}");
        }
    }
    assert_eq!(services["balancer"]["profiles"], json!(["replicas"]));
}

#[test]
fn the_image_lets_the_service_write_its_data_and_its_workspaces_only() {
    let image = text("Dockerfile");
    let (_, run) = image.split_once("FROM debian").unwrap();
    assert!(!run.contains("--chown"), "definitions belong to root");
    assert!(!run.contains("COPY workspace"), "no workspace is in the image");
    let given: Vec<&str> =
        run.split("chown toolloop ").skip(1).filter_map(|rest| rest.split(" &&").next()).collect();
    assert_eq!(given, ["data workspace workspace/default"]);
    let compose = yaml(&text("docker-compose.yml"));
    for volume in strings(&compose["services"]["toolloop"]["volumes"]) {
        let path = volume.split(':').nth(1).unwrap().strip_prefix("/home/toolloop/").unwrap();
        if let Some((parent, _)) = path.rsplit_once('/') {
            let is_made = given[0].split(' ').any(|made| made == parent);
            assert!(is_made, "Docker makes {parent} as root");
        }
    }
}

/// The names of metrics in an expression.
fn metrics(expression: &str) -> BTreeSet<String> {
    expression
        .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
        .filter(|word| word.starts_with("toolloop_") || word.starts_with("process_"))
        .map(str::to_owned)
        .collect()
}

fn every_text(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::String(text) => found.push(text.clone()),
        Value::Array(items) => items.iter().for_each(|item| every_text(item, found)),
        Value::Object(fields) => fields.values().for_each(|field| every_text(field, found)),
        _ => {}
    }
}

#[tokio::test]
async fn dashboard_and_alerts_name_metrics_that_exist() {
    let reads =
        "steps: [{tool_calls: [{tool: file_ops, arguments: {operation: list}}]}, {text: done}]";
    let service = Setup::new()
        .agent(
            "reader",
            "model: scripted/reader\ntools: [file_ops]\nenable_double_confirmation: false\n",
        )
        .scenario("reader", reads)
        .start(Db::Sqlite)
        .await;
    service.run("reader", &json!({})).await;
    let scraped = service.get("/metrics").await.body;
    let mut known = BTreeSet::new();
    for line in scraped.as_str().unwrap().lines().filter_map(|l| l.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').unwrap();
        if kind == "histogram" {
            known.extend(["_bucket", "_sum", "_count"].map(|part| format!("{name}{part}")));
        } else {
            known.insert(name.to_owned());
        }
    }
    let dashboard: Value = serde_json::from_str(&text("deploy/grafana/dashboard.json")).unwrap();
    let alerts = yaml(&text("deploy/prometheus/alerts.yaml"));
    for (file, value) in [("dashboard", &dashboard), ("alerts", &alerts)] {
        let mut texts = Vec::new();
        every_text(value, &mut texts);
        let named: BTreeSet<String> = texts.iter().flat_map(|text| metrics(text)).collect();
        assert!(named.len() > 8, "{file}: {named:?}");
        let unknown: Vec<_> = named.difference(&known).collect();
        assert!(unknown.is_empty(), "{file} names {unknown:?}; there are {known:?}");
    }

    let panels = dashboard["panels"].as_array().unwrap();
    let ids: BTreeSet<u64> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len());
    for panel in panels.iter().filter(|panel| panel["type"] != "row") {
        assert!(panel["targets"][0]["expr"].is_string() && panel["gridPos"]["w"].is_u64());
    }
    let rules = alerts["groups"][0]["rules"].as_array().unwrap();
    for rule in rules {
        for pointer in [
            "/alert",
            "/expr",
            "/labels/severity",
            "/annotations/summary",
            "/annotations/description",
        ] {
            assert!(rule.pointer(pointer).is_some_and(Value::is_string), "{pointer}: {rule:#}");
        }
        assert!(!metrics(rule["expr"].as_str().unwrap()).is_empty(), "{rule:#}");
    }
}
