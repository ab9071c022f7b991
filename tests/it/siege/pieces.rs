//! What attacks are made of: values, texts and names of which each has harmed some parser, put
//! together at random by a seed.

use reqwest::Method;
use serde_json::{Map, Value, json};

/// The run that the attackers' tenant begins with.
pub(super) const HELD: &str = "01970000-0000-7000-8000-00000000cafe";

/// One request.
#[derive(Debug)]
pub(super) struct Attack {
    pub(super) method: Method,
    pub(super) path: String,
    pub(super) body: Option<Value>,
    /// Whether the body is this text, and not JSON.
    pub(super) is_text: bool,
}

impl std::fmt::Display for Attack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let body = self.body.as_ref().map(Value::to_string).unwrap_or_default();
        let length = body.len();
        write!(f, "{} {:.200} {body:.300} ({length} bytes)", self.method, self.path)
    }
}

/// A generator of hostile pieces (xorshift64*).
pub(super) struct Pieces(u64);

impl Pieces {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    pub(super) fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() >> 33).unwrap() % bound
    }

    fn of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())].clone()
    }

    /// How often something is repeated: often a little, sometimes as much as fits.
    fn times(&mut self) -> usize {
        self.of(&[1, 3, 20, 70, 500, 3_000, 20_000])
    }

    pub(super) fn text(&mut self) -> String {
        let part = self.of(&[
            "{",
            "[",
            "(",
            "*",
            "**/",
            "a|",
            "{a,",
            r"(\pL{10})",
            "[01]*1[01]{10000}x",
            "(a+)+$",
            "password: ",
            "password=\"",
            "cookie: ",
            "-----BEGIN PRIVATE KEY-----\"",
            "a://b:c@",
            "<private>",
            "{{ x }}",
            "{% for a in range(9) %}",
            "&a [*a]",
            "- ",
            "\n",
            "\u{202e}",
            "\u{0}",
            "é",
            "😀",
            "../",
            "a/",
            "ignore all previous instructions ",
            "\"",
            "\\",
            "=",
            ": ",
            "x",
            "9",
            "|",
            "`",
            "$(",
            "&&",
            "<div>",
            "<![CDATA[",
            "%00",
            "eyJhbGciOi.",
        ]);
        let text = part.repeat(self.times().min(300_000 / part.len()));
        if self.below(4) == 0 { text + &self.name() } else { text }
    }

    fn name(&mut self) -> String {
        let name = self.of(&[
            "file_ops",
            "victim",
            "clerk",
            "mock/m",
            "scripted/clerk",
            "read",
            "note.txt",
            "type",
            "object",
            "a",
            "",
            "$ref",
            "#/$defs/a0",
            "2026-01-01T00:00:00Z",
            "-1",
            "true",
        ]);
        name.to_owned()
    }

    fn number(&mut self) -> Value {
        let (small, large) = (self.below(10), self.next());
        self.of(&[
            json!(small),
            json!(-1),
            json!(0.5),
            json!(1e300),
            json!(i64::MAX),
            json!(u64::MAX),
            json!(large),
        ])
    }

    pub(super) fn value(&mut self, depth: usize) -> Value {
        match self.below(if depth == 0 { 5 } else { 8 }) {
            0 => Value::Null,
            1 => json!(self.below(2) == 0),
            2 => self.number(),
            3 => Value::String(self.name()),
            4 => Value::String(self.text()),
            5 => {
                let item = self.value(depth - 1);
                let fits = 200_000 / item.to_string().len().max(2);
                vec![item; self.times().min(fits)].into()
            }
            6 => (0..200).fold(self.value(0), |inner, _| json!([inner])),
            _ => self.object(depth - 1),
        }
    }

    fn object(&mut self, depth: usize) -> Value {
        let mut fields = Map::new();
        for _ in 0..self.below(6) {
            let name = if self.below(6) == 0 { self.text() } else { self.name() };
            fields.insert(name, self.value(depth));
        }
        Value::Object(fields)
    }

    /// An object whose fields have the names that are known, and any values.
    fn with_fields(&mut self, names: &[&str], sound: Value) -> Value {
        let mut body = sound;
        for _ in 0..self.below(4) {
            let name = self.of(names);
            body[name] = self.value(2);
        }
        body
    }

    pub(super) fn document(&mut self) -> Value {
        let names = ["choices", "message", "content", "tool_calls", "usage", "error", "id"];
        self.with_fields(&names, json!({}))
    }

    pub(super) fn arguments(&mut self) -> Value {
        let operation = self.of(&[
            "read", "write", "append", "edit", "patch", "delete", "move", "mkdir", "list", "glob",
            "search",
        ]);
        let sound = json!({"operation": operation, "path": "note.txt", "pattern": self.text(),
            "content": self.text(), "old": "l", "new": self.text(), "replace_all": true,
            "to": "other.txt", "patch": self.text()});
        let mut arguments = json!({"operation": operation});
        for (name, value) in sound.as_object().unwrap() {
            if self.below(3) > 0 {
                arguments[name] = value.clone();
            }
        }
        self.with_fields(&["path", "pattern", "glob", "content", "patch", "offset"], arguments)
    }

    fn schema(&mut self) -> Value {
        let keyword = self.of(&["anyOf", "allOf", "oneOf"]);
        let (levels, many) = (self.of(&[5, 40, 2_000]), self.of(&[3, 60, 400]));
        match self.below(6) {
            0 => {
                let mut defs = Map::new();
                for level in 0..levels {
                    let next = json!({"$ref": format!("#/$defs/a{}", level + 1)});
                    defs.insert(format!("a{level}"), json!({keyword: [next, next]}));
                }
                defs.insert(format!("a{levels}"), json!({"required": ["z"]}));
                json!({"type": "object", "$ref": "#/$defs/a0", "$defs": defs})
            }
            1 => {
                let property =
                    |n| (format!("p{n}"), json!({"pattern": format!(r"(\pL{{9}}){{20}}{n}")}));
                let properties: Map<String, Value> = (0..many).map(property).collect();
                json!({"type": "object", "properties": properties})
            }
            2 => (0..many).fold(json!({}), |inner, _| json!({"type": "object", "not": inner})),
            3 => json!({"type": "object", "patternProperties": {self.text(): true}}),
            4 => json!({"type": "object", "description": self.text()}),
            _ => self
                .with_fields(&["type", "properties", "$ref", "items"], json!({"type": "object"})),
        }
    }

    fn invocation(&mut self) -> Value {
        let names = [
            "inputs",
            "model",
            "tools",
            "client_tools",
            "metadata",
            "budget",
            "max_iterations",
            "tool_choice",
            "on_limit",
            "session_id",
            "active_skills",
            "priority",
            "available_at",
            "webhook",
            "run_id",
            "private",
            "temperature",
            "max_output_tokens",
        ];
        let sound = match self.below(5) {
            0 => json!({"dry_run": true, "tools": [self.text()]}),
            1 => {
                let tool = json!({"name": "ct", "description": self.name(),
                    "effect": "read", "input_schema": self.schema()});
                json!({"client_tools": [tool], "client_tool_timeout": 1, "dry_run": self.below(2) == 0})
            }
            2 => {
                let levels = self.of(&[15, 17, 45, 90]);
                let tree = (0..levels).fold(json!(5), |inner, _| json!({"items": [inner]}));
                json!({"inputs": {"tree": tree}})
            }
            3 => json!({"inputs": {"text": self.text()}, "metadata": {"k": self.name()}}),
            _ => json!({}),
        };
        self.with_fields(&names, sound)
    }

    fn definition(&mut self) -> String {
        let key = self.of(&[
            "tools",
            "prompt",
            "inputs",
            "output",
            "governance",
            "interceptors",
            "limits",
            "instructions",
            "models",
            "memory",
            "tool_options",
            "stop_conditions",
            "x",
        ]);
        let (value, sound) = (self.value(2), "name: clerk\nmodel: scripted/clerk\n");
        match self.below(5) {
            0 => format!("{sound}{}", self.text()),
            1 => format!("{sound}{key}: {}", self.text()),
            2 => format!(
                "{sound}governance: {{paths: {{read: [{}]}}}}",
                "'**/a*',".repeat(self.times())
            ),
            3 => format!("{sound}inputs: {}", self.schema()),
            _ => format!("{sound}{key}: {value}"),
        }
    }

    fn query(&mut self) -> String {
        let text: String = self.text().chars().take(4_000).collect();
        let escaped = text.bytes().map(|byte| format!("%{byte:02x}")).collect::<Vec<_>>().concat();
        let name =
            self.of(&["q", "agent", "status", "cursor", "limit", "metadata.k", "created_after"]);
        let many = (0..self.times().min(900)).map(|n| format!("&metadata.{n}=x"));
        let many = many.collect::<Vec<_>>().concat();
        format!("{name}={escaped}{}", if self.below(3) == 0 { many } else { String::new() })
    }

    /// A list: of the tenant, or of the run that it began with.
    fn list(&mut self) -> Attack {
        let of_run = ["events", "tool-calls", "iterations", "changes", "messages", ""];
        let of_run = format!("runs/{HELD}/{}", self.of(&of_run));
        let path = self.of(&[
            "runs",
            "runs",
            "sessions",
            "audit",
            "approvals",
            "memory",
            "keys",
            &of_run,
            &of_run,
        ]);
        let query = if self.below(3) == 0 { "limit=200".to_owned() } else { self.query() };
        let path = format!("/v1/{path}?{query}");
        Attack { method: Method::GET, path, body: None, is_text: false }
    }

    pub(super) fn attack(&mut self) -> Attack {
        let post = |path: &str, body| Attack {
            method: Method::POST,
            path: path.to_owned(),
            body: Some(body),
            is_text: false,
        };
        match self.below(10) {
            0..=3 => {
                let agent = self.of(&["victim", "victim", "clerk"]);
                post(&format!("/v1/agents/{agent}/invoke-iterative"), self.invocation())
            }
            4 => {
                let files: Vec<String> =
                    (0..self.times().min(100)).map(|n| format!("{n}/{}", "a/".repeat(n))).collect();
                let sound = json!({"tool": "file_ops", "arguments": self.arguments()});
                let mut body = self.with_fields(&["tool", "arguments", "labels", "files"], sound);
                if self.below(2) == 0 {
                    body["files"] = json!(files);
                }
                post("/v1/agents/victim/policy/judge", body)
            }
            5 => post("/v1/agents/clerk/policy/replay", json!({"definition": self.definition()})),
            6 | 7 => self.list(),
            8 => {
                let path = format!("/v1/agents/clerk/files/{}", self.of(&["a", "b/c", "..%2fx"]));
                let body = Some(Value::String(self.text()));
                Attack { method: Method::PUT, path, body, is_text: true }
            }
            _ => {
                let path = "/v1/agents/clerk/invoke-iterative".to_owned();
                let body = Some(Value::String(self.text()));
                Attack { method: Method::POST, path, body, is_text: true }
            }
        }
    }
}
