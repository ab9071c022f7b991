//! Which tools there are, and the agents that may name them.
//!
//! Where their settings come from is decided here, and nothing of what they do.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::agents::{Catalogue, DefinitionError, DefinitionProblem, Skills};
use crate::bounds::secrets;
use crate::config::{self, Config};
use crate::engine::requirements;
use crate::outbound::Client;
use crate::providers::router::Router;
use crate::runtime;
use crate::tools::browser::{Browser, BrowserSettings, Viewport};
use crate::tools::credentials::{Credential, Credentials};
use crate::tools::declared::{BrokenFile, Declared, Surroundings};
use crate::tools::proxy::Proxy;
use crate::tools::recall::{Recall, RecallFn};
use crate::tools::registry::Registry;
use crate::tools::sandbox::{self, Sandbox};
use crate::tools::web_fetch::{WebFetch, WebFetchSettings};

/// Where programs run. What the kernel gives for it is not known yet.
pub fn sandbox(config: &Config) -> Arc<Sandbox> {
    let shell = &config.tools.shell;
    Arc::new(Sandbox::new(sandbox::Settings {
        path: shell.path.clone(),
        environment: shell.env.clone(),
        require: shell.require_sandbox,
        timeout: shell.timeout,
        max_output: shell.max_output,
        limits: sandbox::Limits {
            memory: shell.memory as u64,
            cpu_seconds: shell.cpu_seconds,
            processes: shell.processes,
            file_size: shell.file_size as u64,
            open_files: shell.open_files,
        },
        namespaces: true,
        supervisor: "/proc/self/exe".into(),
    }))
}

/// The tools, the skills that `use_skill` reads, and the files whose tools there are not.
pub(super) struct Tools {
    pub(super) registry: Arc<Registry>,
    skills: Arc<Skills>,
    broken: Vec<DefinitionProblem>,
}

impl Tools {
    pub(super) fn skills(&self) -> &Arc<Skills> {
        &self.skills
    }
}

pub(super) fn configured(config: &Config, recollect: RecallFn, sandbox: Arc<Sandbox>) -> Tools {
    let skills = Arc::new(Skills::load(&config.skills_dir));
    let mut registry = Registry::builtin();
    registry.add(runtime::use_skill(&skills));
    registry.add(Arc::new(Recall::new(recollect)));
    let variable = |name: &str| std::env::var(name).ok();
    let client = Client::new();
    let config::WebFetch { max_body, timeout, user_agent, robots, content_types } =
        config.tools.web_fetch.clone();
    let settings = WebFetchSettings { max_body, timeout, user_agent, robots, content_types };
    registry.add(Arc::new(WebFetch::new(client.clone(), settings)));
    let proxy = Proxy::new(client.clone(), credentials(&config.credentials));
    registry.add(Arc::new(Browser::new(client.clone(), browser_settings(config))));
    let surroundings =
        Surroundings { environment: &variable, client: &client, proxy: &proxy, sandbox: &sandbox };
    let declared = Declared::load(&config.tools_dir, surroundings);
    registry.run_programs_in(sandbox, proxy);
    for tool in declared.tools {
        registry.add(tool);
    }
    let broken = declared.broken.into_iter().map(|BrokenFile { file, error }| DefinitionProblem {
        file: format!("tools/{file}"),
        error,
    });
    Tools { registry: Arc::new(registry), skills, broken: broken.collect() }
}

fn credentials(configured: &BTreeMap<String, config::Credential>) -> Credentials {
    let given = |name: &String, credential: &config::Credential| {
        let config::Credential { url, header, secret, token_env } = credential.clone();
        let secret = secret.ok_or_else(|| {
            format!("[tools.credentials.{name}] needs the environment variable {token_env}, which is not set")
        })?;
        secrets::remember([secret.token]);
        Ok(Credential { url, header, value: secret.value })
    };
    configured.iter().map(|(name, it)| (name.clone(), given(name, it))).collect()
}

fn browser_settings(config: &Config) -> BrowserSettings {
    let config::Browser { path, timeout, pages, viewport } = config.tools.browser.clone();
    let (width, height) = viewport;
    BrowserSettings { path, timeout, pages, viewport: Viewport { width, height } }
}

pub(super) fn load_agents(
    config: &Config,
    router: &Arc<Router>,
    Tools { registry, skills, broken }: &Tools,
) -> Catalogue {
    let (router, registry, known) = (Arc::clone(router), Arc::clone(registry), Arc::clone(skills));
    let catalogue = Catalogue::load(
        &config.agents_dir,
        Arc::clone(skills),
        Box::new(move |definition| {
            requirements::check_definition(definition, &router).map_err(|unsupported| {
                DefinitionError::at(unsupported.key(), unsupported.reason)
            })?;
            runtime::check_tools(&registry, &known, definition)
        }),
    );
    catalogue.beside(broken.clone())
}
