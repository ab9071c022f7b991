//! The command rule: which programs may run, with which arguments.
//!
//! A program needs a rule in `allow` or in `require_approval`. A rule in `deny` beats both, and one in
//! `require_approval` beats one in `allow`. Without rules only programs run that the operator declared
//! as tools; for these only `deny` is checked. Programs that run others need a rule with an argument
//! pattern. They are also judged by the programs that their arguments name: a rule that denies such a
//! program, or asks about it, holds for them. Options that make a program write or run something need
//! a rule that names them. Arguments are judged as they are executed, joined so that one argument
//! cannot be read as two. What a program can reach is up to the sandbox.

mod programs;

use super::gate::{PolicyError, Question, Ruling};
use super::{ActionKind, CommandRule, Decision, Policy};
use crate::bounds::command_line::shown;
use crate::bounds::pattern::{Author, Pattern};
use crate::run::Effect;

/// Words of one command that are compared with one rule.
const MAX_CANDIDATES: usize = 16;

/// The compiled rules.
#[derive(Debug, Clone, Default)]
pub struct CommandRules {
    allow: Vec<Rule>,
    deny: Vec<Rule>,
    require_approval: Vec<Rule>,
}

#[derive(Debug, Clone)]
struct Rule {
    written: CommandRule,
    arguments: Option<Pattern>,
}

/// What a rule says of a program with its arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommandEffect {
    pub effect: Effect,
    pub destructive: bool,
    /// Whether it may start any program of the system: it is one of those that run others.
    pub runs_others: bool,
}

impl CommandRules {
    pub(super) fn new(policy: &Policy) -> Result<Self, PolicyError> {
        let commands = &policy.commands;
        Ok(Self {
            allow: compiled("commands.allow", &commands.allow)?,
            deny: compiled("commands.deny", &commands.deny)?,
            require_approval: compiled("commands.require_approval", &commands.require_approval)?,
        })
    }

    /// The effect of running this command, by the strictest rule that it matches. Without a rule the
    /// worst effect is assumed, and the command is not permitted.
    pub fn effect_of(&self, argv: &[String]) -> CommandEffect {
        let matching = self.require_approval.iter().chain(&self.allow).filter(|r| r.matches(argv));
        let runs_others = programs::runs_others(name_of(argv));
        let mut effect: Option<CommandEffect> = None;
        for Rule { written, .. } in matching {
            let so_far = effect.map_or((Effect::Read, false), |it| (it.effect, it.destructive));
            effect = Some(CommandEffect {
                effect: written.effect.max(so_far.0),
                destructive: written.destructive || so_far.1,
                runs_others,
            });
        }
        effect.unwrap_or(CommandEffect { effect: Effect::Once, destructive: true, runs_others })
    }

    /// The rule that lets a program run.
    pub(super) fn allowed_by(&self, argv: &[String]) -> Option<String> {
        self.allow.iter().find(|rule| rule.matches(argv)).map(Rule::text)
    }

    /// Whether nothing may run.
    pub(super) fn are_none(&self) -> bool {
        self.allow.is_empty() && self.require_approval.is_empty()
    }

    fn judge(&self, argv: &[String], declared: bool) -> Ruling {
        let name = name_of(argv);
        let line = shown(&abbreviated(argv));
        let blocked = |why: String| Ruling::Objection(Decision::Blocked, why);
        if self.are_none() && !declared {
            return blocked(format!("{line} may not run; no command may"));
        }
        let denies = |observes: bool| {
            self.deny.iter().find(|rule| rule.written.observes == observes && rule.matches(argv))
        };
        if let Some(rule) = denies(false) {
            let why = format!("{line} may not run, it is denied by {}", rule.text());
            return Ruling::Matched(Decision::Blocked, why, rule.text());
        }
        let words = if declared { Vec::new() } else { words_for(name, argv) };
        let is_named = |rule: &&Rule| !rule.written.observes && rule.is_named_in(&words);
        if let Some(rule) = self.deny.iter().find(is_named) {
            let why = format!(
                "{line} may not run: it names {}, which is denied by {}",
                rule.written.command,
                rule.text()
            );
            return Ruling::Matched(Decision::Blocked, why, rule.text());
        }
        let observed = denies(true).map(|rule| {
            let why = format!("{line} would be denied by {}, which only observes", rule.text());
            Ruling::Observed(Decision::Blocked, why, Some(rule.text()))
        });
        let passes = observed.unwrap_or(Ruling::NoObjection);
        if declared {
            return passes;
        }
        let asking = |observes: bool| {
            let mut rules = self.require_approval.iter();
            rules.find(|rule| rule.written.observes == observes && rule.matches(argv))
        };
        let asks = asking(false).or_else(|| asking(true));
        let Some(rule) = asks.or_else(|| self.allow.iter().find(|rule| rule.matches(argv))) else {
            return blocked(format!("{line} may not run; what may run is {}", self.text()));
        };
        let pattern = rule.written.args.as_deref();
        if pattern.is_none() && programs::needs_pattern(name) {
            return blocked(format!(
                "{line} may not run: {name} runs other programs, and its rule does not say with \
                 which arguments it may"
            ));
        }
        let arguments = argv.get(1..).unwrap_or_default();
        if let Some(option) = programs::unsafe_option(name, arguments) {
            let plain = option.split('=').next().unwrap_or(option);
            if !pattern.is_some_and(|pattern| pattern.contains(plain)) {
                return blocked(format!(
                    "{line} may not run: {plain} makes {name} write or run something; leave it out"
                ));
            }
        }
        match asks {
            // An observed denial goes before an observed question.
            Some(asks) if asks.written.observes && matches!(passes, Ruling::Observed(..)) => passes,
            Some(rule) if rule.written.observes => Ruling::Observed(
                Decision::Escalated,
                format!("{line} would need an approval by {}, which only observes", rule.text()),
                Some(rule.text()),
            ),
            Some(rule) => Ruling::Matched(
                Decision::Escalated,
                format!("{line} needs an approval by the rule {}", rule.text()),
                rule.text(),
            ),
            None => match self.require_approval.iter().find(is_named) {
                Some(rule) => Ruling::Matched(
                    Decision::Escalated,
                    format!(
                        "{line} needs an approval: it names {}, by the rule {}",
                        rule.written.command,
                        rule.text()
                    ),
                    rule.text(),
                ),
                None => passes,
            },
        }
    }

    /// The rule as text, for the reason of a decision.
    fn text(&self) -> String {
        let rules: Vec<String> =
            self.allow.iter().chain(&self.require_approval).map(Rule::text).collect();
        rules.join(", ")
    }
}

impl Rule {
    fn matches(&self, argv: &[String]) -> bool {
        let Some((program, arguments)) = argv.split_first() else { return false };
        let command = self.written.command.as_str();
        let named =
            if command.contains('/') { program == command } else { name_of(argv) == command };
        named && self.arguments.as_ref().is_none_or(|pattern| pattern.is_match(&shown(arguments)))
    }

    /// Whether one of the words names the rule's program, in any directory, and the words after it match
    /// the rule's arguments. True if there are too many such words to check each.
    fn is_named_in(&self, words: &[String]) -> bool {
        let name = last_part(&self.written.command);
        let mut named = 0;
        (0..words.len()).any(|at| {
            let Some((word, arguments)) = words.get(at..).and_then(<[String]>::split_first) else {
                return false;
            };
            // As in `ext::rm`, or `@rm` of a rule of make.
            let behind_mark = word.rsplit(['/', ':', '@']).next();
            if last_part(word) != name && behind_mark != Some(name) {
                return false;
            }
            named += 1;
            let pattern = self.arguments.as_ref();
            named > MAX_CANDIDATES || pattern.is_none_or(|it| it.is_match(&shown(arguments)))
        })
    }

    fn text(&self) -> String {
        match &self.written.args {
            Some(args) => format!("{} {args}", self.written.command),
            None => self.written.command.clone(),
        }
    }
}

fn compiled(setting: &'static str, rules: &[CommandRule]) -> Result<Vec<Rule>, PolicyError> {
    let compile = |rule: &CommandRule| {
        let pattern = rule.args.as_deref().map(|args| Pattern::compile(args, Author::Operator));
        let arguments = pattern.transpose().map_err(|refused| PolicyError {
            setting,
            pattern: rule.args.clone().unwrap_or_default(),
            message: refused.0,
        })?;
        Ok(Rule { written: rule.clone(), arguments })
    };
    rules.iter().map(compile).collect()
}

/// The program's name without its directory.
fn name_of(argv: &[String]) -> &str {
    last_part(argv.first().map(String::as_str).unwrap_or_default())
}

fn last_part(program: &str) -> &str {
    program.rsplit('/').next().unwrap_or_default()
}

/// The words in the arguments of a program that runs other programs. Names that it computes cannot be
/// known.
fn words_for(name: &str, argv: &[String]) -> Vec<String> {
    let arguments = argv.get(1..).unwrap_or_default();
    if !programs::runs_others(name) && programs::unsafe_option(name, arguments).is_none() {
        return Vec::new();
    }
    let is_part = |c: char| c.is_alphanumeric() || "-_./+@:".contains(c);
    let words = arguments.iter().flat_map(|argument| argument.split(|c| !is_part(c)));
    words.filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// The command for a message: the program without its directory, and only the first arguments.
fn abbreviated(argv: &[String]) -> Vec<String> {
    let arguments = argv.iter().skip(1).take(10).cloned();
    std::iter::once(name_of(argv).to_owned())
        .chain(arguments)
        .map(|word| crate::bounds::text::shortened(&word))
        .collect()
}

pub(super) fn judge(question: &Question<'_>) -> Ruling {
    let mut strictest = Ruling::NoObjection;
    for action in question.call.actions.iter() {
        let ActionKind::Exec { argv, declared } = &action.what else { continue };
        match question.policy.commands.judge(argv, *declared) {
            Ruling::NoObjection => {}
            asks @ Ruling::Matched(Decision::Escalated, ..) => strictest = asks,
            observed @ Ruling::Observed(would, ..) => {
                let is_stricter = match &strictest {
                    Ruling::NoObjection => true,
                    Ruling::Observed(so_far, ..) => *so_far < would,
                    _ => false,
                };
                if is_stricter {
                    strictest = observed;
                }
            }
            ruling => return ruling,
        }
    }
    strictest
}

#[cfg(test)]
#[path = "command_tests.rs"]
mod command_tests;
