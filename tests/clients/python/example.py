"""What a service written in Python does with toolloop: every call through the generated client, every
answer by its generated type. `toolloop_client` is made from the service's own document by
openapi-python-client.
"""

import os
from http import HTTPStatus

import httpx

from toolloop_client import AuthenticatedClient
from toolloop_client.api.agents import get_agent, invoke_agent, invoke_agent_iterative, list_agents
from toolloop_client.api.keys import create_key, list_keys, revoke_key
from toolloop_client.api.runs import (
    cancel_run,
    get_run,
    list_events,
    list_iterations,
    list_messages,
    list_runs,
    list_tool_calls,
    wait_for_run,
)
from toolloop_client.api.tools import list_tools
from toolloop_client.models import (
    AgentDetail,
    AgentPage,
    BudgetOverrides,
    CancelRequest,
    CreatedKey,
    Decision,
    EventPage,
    FinishReason,
    InvokeIterativeRequest,
    InvokeRequest,
    IterationPage,
    KeyPage,
    KeyRequest,
    ListRunsMetadata,
    MessagePage,
    Problem,
    ProblemCode,
    Role,
    Run,
    RunCompletedEvent,
    RunDetail,
    RunInputs,
    RunMetadata,
    RunPage,
    RunStatus,
    TerminationReason,
    ToolCallPage,
    ToolCallState,
    ToolChoiceMode,
    ToolPage,
)

client = AuthenticatedClient(base_url=os.environ["TOOLLOOP_URL"] + "/v1", token=os.environ["TOOLLOOP_KEY"])


def the_catalogue() -> None:
    agents = list_agents.sync(client=client)
    assert isinstance(agents, AgentPage)
    assert [agent.name for agent in agents.data] == ["reader", "stuck"]
    reader = get_agent.sync("reader", client=client)
    assert isinstance(reader, AgentDetail)
    assert reader.limits.max_attempts == 3
    tools = list_tools.sync(client=client)
    assert isinstance(tools, ToolPage)
    assert any(tool.name == "file_ops" and tool.allowed for tool in tools.data)


def a_run_that_is_waited_for() -> None:
    request = InvokeIterativeRequest(
        inputs=RunInputs.from_dict({"path": "note.txt"}),
        metadata=RunMetadata.from_dict({"ticket": "py 42"}),
        budget=BudgetOverrides(max_tool_calls=5),
        tool_choice=ToolChoiceMode.AUTO,
    )
    answer = invoke_agent_iterative.sync_detailed("reader", client=client, body=request, idempotency_key="python")
    run = answer.parsed
    assert isinstance(run, Run), answer
    assert answer.headers["x-run-id"] == str(run.run_id)
    assert run.status is RunStatus.COMPLETED
    assert run.output == {"text": "hello"}
    assert run.error is None
    assert run.tools_used == ["file_ops"]

    detail = get_run.sync(run.run_id, client=client)
    assert isinstance(detail, RunDetail)
    assert detail.metadata["ticket"] == "py 42"
    assert detail.budget.limits is not None and detail.budget.limits.max_tool_calls == 5
    events = list_events.sync(run.run_id, client=client, last_event_id=0)
    assert isinstance(events, EventPage)
    assert [event.seq for event in events.data] == list(range(1, len(events.data) + 1))
    assert isinstance(events.data[-1], RunCompletedEvent)
    iterations = list_iterations.sync(run.run_id, client=client)
    assert isinstance(iterations, IterationPage)
    assert [iteration.finish_reason for iteration in iterations.data] == [FinishReason.TOOL_CALLS] * 2
    calls = list_tool_calls.sync(run.run_id, client=client)
    assert isinstance(calls, ToolCallPage)
    shown = [(call.tool, call.decision, call.state) for call in calls.data]
    assert shown == [("file_ops", Decision.ALLOWED, ToolCallState.SUCCEEDED)]
    messages = list_messages.sync(run.run_id, client=client)
    assert isinstance(messages, MessagePage)
    assert any(message.role is Role.TOOL and "hello" in message.content for message in messages.data)

    labels = ListRunsMetadata.from_dict({"metadata.ticket": "py 42"})
    found = list_runs.sync(client=client, status=RunStatus.COMPLETED, metadata=labels, limit=5)
    assert isinstance(found, RunPage)
    assert [row.run_id for row in found.data] == [run.run_id]
    assert found.next_cursor is None


def a_run_that_is_not() -> None:
    answer = invoke_agent_iterative.sync_detailed(
        "stuck", client=client, body=InvokeIterativeRequest(), prefer="respond-async"
    )
    run = answer.parsed
    assert answer.status_code == HTTPStatus.ACCEPTED
    assert isinstance(run, RunDetail)
    assert answer.headers["location"] == f"/v1/runs/{run.run_id}"
    early = wait_for_run.sync(run.run_id, client=client, timeout=0)
    assert isinstance(early, RunDetail)
    assert early.status in (RunStatus.QUEUED, RunStatus.RUNNING)
    cancelled = cancel_run.sync_detailed(run.run_id, client=client, body=CancelRequest(reason="seen enough"))
    assert cancelled.status_code == HTTPStatus.ACCEPTED
    late = wait_for_run.sync(run.run_id, client=client.with_timeout(httpx.Timeout(30)), timeout=20)
    assert isinstance(late, RunDetail)
    assert late.status is RunStatus.CANCELLED
    assert late.termination_reason is TerminationReason.CANCELLED
    assert late.error is not None and late.error.code == "EXECUTION_CANCELLED"


def a_key() -> None:
    key = create_key.sync(client=client, body=KeyRequest(name="python", scopes=["runs:read"]))
    assert isinstance(key, CreatedKey)
    assert key.key.startswith(f"tl_{key.id}_")
    assert revoke_key.sync_detailed(key.id, client=client).status_code == HTTPStatus.NO_CONTENT
    keys = list_keys.sync(client=client)
    assert isinstance(keys, KeyPage)
    assert [listed.revoked_at is not None for listed in keys.data if listed.id == key.id] == [True]


def refusals() -> None:
    unknown = invoke_agent.sync("nobody", client=client, body=InvokeRequest())
    assert isinstance(unknown, Problem)
    assert unknown.code is ProblemCode.NOT_FOUND
    body = InvokeRequest(inputs=RunInputs.from_dict({"path": 7}))
    answer = invoke_agent.sync_detailed("reader", client=client, body=body)
    problem = answer.parsed
    assert answer.status_code == HTTPStatus.UNPROCESSABLE_ENTITY
    assert isinstance(problem, Problem)
    assert problem.code is ProblemCode.INVALID_INPUTS
    assert problem.errors and [error.pointer for error in problem.errors] == ["/inputs/path"]
    assert problem.request_id == answer.headers["x-request-id"]


the_catalogue()
a_run_that_is_waited_for()
a_run_that_is_not()
a_key()
refusals()
print("all calls answered as documented")
