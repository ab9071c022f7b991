// What a service written in Java does with toolloop: every call through the generated client, every answer by
// its generated type. The client is made from the service's own document by openapi-generator.

import java.util.Map;
import org.openapitools.client.ApiClient;
import org.openapitools.client.ApiException;
import org.openapitools.client.api.AgentsApi;
import org.openapitools.client.api.RunsApi;
import org.openapitools.client.model.*;

class Example {
    public static void main(String[] arguments) throws ApiException {
        var client = new ApiClient();
        client.updateBaseUri(System.getenv("TOOLLOOP_URL") + "/v1");
        client.setRequestInterceptor(
            request -> request.header("Authorization", "Bearer " + System.getenv("TOOLLOOP_KEY")));
        var agents = new AgentsApi(client);
        var runs = new RunsApi(client);
        aRunThatIsWaitedFor(agents, runs);
        aRunThatIsNot(agents, runs);
        refusals(agents);
        System.out.println("all calls answered as documented");
    }

    static void aRunThatIsWaitedFor(AgentsApi agents, RunsApi runs) throws ApiException {
        var reader = agents.getAgent("reader");
        same(reader.getLimits().getMaxAttempts(), 3L);
        var deny = reader.getGovernance().getPaths().getDeny();
        same(deny.get(0).getString(), "*.key");
        same(deny.get(1).getPatternWithMode().getPattern(), "*.pem");
        var request = new InvokeIterativeRequest()
            .inputs(Map.of("path", "note.txt"))
            .toolChoice(new ToolChoice("auto"));
        var run = agents.invokeAgentIterative("reader", null, "java", null, null, request);
        same(run.getStatus(), RunStatus.COMPLETED);
        same(run.getOutput(), Map.of("text", "hello"));
        same(runs.getRun(run.getRunId()).getToolCallsMade(), 1);
        var events = runs.listEvents(run.getRunId(), null, null, null, null, null).getData();
        var last = (RunCompletedEvent) events.get(events.size() - 1).getActualInstance();
        same(last.getData().getTerminationReason(), TerminationReason.COMPLETED);
    }

    static void aRunThatIsNot(AgentsApi agents, RunsApi runs) throws ApiException {
        var request = new InvokeIterativeRequest();
        var run = agents.invokeAgentIterative("stuck", "respond-async", null, null, null, request);
        var answer = runs.cancelRun(run.getRunId(), new CancelRequest().reason("seen enough"));
        same(answer.getRunDetail().getRunId(), run.getRunId());
        same(runs.waitForRun(run.getRunId(), 20).getStatus(), RunStatus.CANCELLED);
    }

    static void refusals(AgentsApi agents) {
        try {
            agents.invokeAgent("nobody", null, null, null, null, new InvokeRequest());
            throw new AssertionError("an unknown agent was invoked");
        } catch (ApiException told) {
            same(told.getCode(), 404);
            same(told.getResponseBody().contains("\"NOT_FOUND\""), true);
        }
    }

    static void same(Object is, Object expected) {
        if (!expected.equals(is)) throw new AssertionError(is + " is not " + expected);
    }
}
