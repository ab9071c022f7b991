//! Names of the tools that delegate to another agent.
//!
//! `agent:<name>` gives the agent a task and returns its output; `transfer_to_<name>` hands over
//! the conversation. Both start a child run; `runtime` decides what that run may do.

/// How one agent delegates to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delegation<'a> {
    /// A task of its own: `agent:<name>`.
    Subagent(&'a str),
    /// Takes over the conversation: `transfer_to_<name>`.
    Handoff(&'a str),
}

impl<'a> Delegation<'a> {
    /// Parses a tool's name; `None` for other tools.
    pub fn of_tool(name: &'a str) -> Option<Self> {
        let subagent = name.strip_prefix("agent:").map(Self::Subagent);
        subagent.or_else(|| name.strip_prefix("transfer_to_").map(Self::Handoff))
    }

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
