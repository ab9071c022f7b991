//! The names under which an agent is a tool of another one.
//!
//! `agent:<name>` gives it a task and takes its output back; `transfer_to_<name>` hands it the
//! conversation. Both start a child run. What that run may do is decided in `runtime`.

/// How one agent leaves work to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delegation<'a> {
    /// It has a task of its own: `agent:<name>`.
    Subagent(&'a str),
    /// It goes on with the conversation: `transfer_to_<name>`.
    Handoff(&'a str),
}

impl<'a> Delegation<'a> {
    /// What a tool's name says; nothing for other tools.
    pub fn of_tool(name: &'a str) -> Option<Self> {
        let subagent = name.strip_prefix("agent:").map(Self::Subagent);
        subagent.or_else(|| name.strip_prefix("transfer_to_").map(Self::Handoff))
    }

    /// The agent that does the work.
    pub fn agent(self) -> &'a str {
        match self {
            Self::Subagent(agent) | Self::Handoff(agent) => agent,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        assert_eq!(Delegation::of_tool("agent:writer"), Some(Delegation::Subagent("writer")));
        assert_eq!(Delegation::of_tool("transfer_to_writer"), Some(Delegation::Handoff("writer")));
        for other in ["agent", "agents:writer", "file_ops", "mcp:agent:x", "transfer_writer"] {
            assert_eq!(Delegation::of_tool(other), None, "{other}");
        }
    }
}
