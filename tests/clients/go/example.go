// What a service written in Go does with toolloop: every call through the generated client, every answer by
// its generated type. The package `toolloop` is made from the service's own document by openapi-generator.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os"
	"reflect"
	"strings"

	"toolloop"
)

var (
	client = connect()
	ctx    = context.Background()
)

func connect() *toolloop.APIClient {
	configuration := toolloop.NewConfiguration()
	configuration.Servers = toolloop.ServerConfigurations{{URL: os.Getenv("TOOLLOOP_URL") + "/v1"}}
	configuration.AddDefaultHeader("Authorization", "Bearer "+os.Getenv("TOOLLOOP_KEY"))
	return toolloop.NewAPIClient(configuration)
}

func succeeded(response *http.Response, err error, status int) {
	var told *toolloop.GenericOpenAPIError
	if errors.As(err, &told) {
		log.Fatalf("%v: %s", err, told.Body())
	}
	if err != nil {
		log.Fatal(err)
	}
	same(response.StatusCode, status)
}

func refused(response *http.Response, err error, status int) toolloop.Problem {
	var told *toolloop.GenericOpenAPIError
	if !errors.As(err, &told) {
		log.Fatalf("%v is no answer of the service", err)
	}
	same(response.StatusCode, status)
	return told.Model().(toolloop.Problem)
}

func same[T any](is, expected T) {
	if !reflect.DeepEqual(is, expected) {
		log.Panicf("%v is not %v", is, expected)
	}
}

func catalogue() {
	agents, response, err := client.AgentsAPI.ListAgents(ctx).Execute()
	succeeded(response, err, 200)
	var names []string
	for _, agent := range agents.Data {
		names = append(names, agent.Name)
	}
	same(names, []string{"reader", "stuck"})
	reader, response, err := client.AgentsAPI.GetAgent(ctx, "reader").Execute()
	succeeded(response, err, 200)
	same(reader.Limits.MaxAttempts, 3)
	deny := reader.Governance.Paths.Deny
	same(*deny[0].String, "*.key")
	same(deny[1].PatternWithMode.Pattern, "*.pem")
}

func aRunThatIsWaitedFor() {
	tool := toolloop.StringAsToolChoice(toolloop.PtrString("auto"))
	budget := toolloop.BudgetOverrides{}
	budget.SetMaxToolCalls(5)
	request := toolloop.NewInvokeIterativeRequest()
	request.SetInputs(map[string]interface{}{"path": "note.txt"})
	request.SetMetadata(map[string]string{"ticket": "go 42"})
	request.SetToolChoice(tool)
	request.SetBudget(budget)
	run, response, err := client.AgentsAPI.InvokeAgentIterative(ctx, "reader").
		IdempotencyKey("go").InvokeIterativeRequest(*request).Execute()
	succeeded(response, err, 200)
	same(response.Header.Get("X-Run-Id"), run.RunId)
	same(run.Status, toolloop.RUNSTATUS_COMPLETED)
	same(run.Output.(map[string]interface{}), map[string]interface{}{"text": "hello"})
	same(run.Error.IsSet() && run.Error.Get() != nil, false)
	same(run.ToolsUsed, []string{"file_ops"})

	detail, response, err := client.RunsAPI.GetRun(ctx, run.RunId).Execute()
	succeeded(response, err, 200)
	same(detail.Metadata["ticket"], "go 42")
	same(detail.Budget.Limits.Get().MaxToolCalls, 5)

	events, response, err := client.RunsAPI.ListEvents(ctx, run.RunId).Execute()
	succeeded(response, err, 200)
	last := events.Data[len(events.Data)-1].RunCompletedEvent
	same(int(last.Seq), len(events.Data))
	same(last.Data.TerminationReason, toolloop.TERMINATIONREASON_COMPLETED)
	var started int
	for _, event := range events.Data {
		if call := event.ToolCallStartedEvent; call != nil && call.Data.Tool == "file_ops" {
			started++
		}
	}
	same(started, 1)

	calls, response, err := client.RunsAPI.ListToolCalls(ctx, run.RunId).Execute()
	succeeded(response, err, 200)
	same(calls.Data[0].Tool, "file_ops")
	same(calls.Data[0].State, toolloop.TOOLCALLSTATE_SUCCEEDED)
	messages, response, err := client.RunsAPI.ListMessages(ctx, run.RunId).Execute()
	succeeded(response, err, 200)
	same(messages.Data[len(messages.Data)-1].Role, toolloop.ROLE_TOOL)
	found, response, err := client.RunsAPI.ListRuns(ctx).Status(toolloop.RUNSTATUS_COMPLETED).
		Metadata(map[string]string{"metadata.ticket": "go 42"}).Limit(5).Execute()
	succeeded(response, err, 200)
	same(len(found.Data), 1)
	same(found.Data[0].RunId, run.RunId)
}

func aRunThatIsNot() {
	run, response, err := client.AgentsAPI.InvokeAgentIterative(ctx, "stuck").
		Prefer("respond-async").InvokeIterativeRequest(*toolloop.NewInvokeIterativeRequest()).Execute()
	succeeded(response, err, 202)
	same(response.Header.Get("Location"), "/v1/runs/"+run.RunId)
	cancelled, response, err := client.RunsAPI.CancelRun(ctx, run.RunId).
		CancelRequest(toolloop.CancelRequest{Reason: *toolloop.NewNullableString(toolloop.PtrString("seen enough"))}).Execute()
	succeeded(response, err, 202)
	same(cancelled.RunDetail.RunId, run.RunId)
	late, response, err := client.RunsAPI.WaitForRun(ctx, run.RunId).Timeout(20).Execute()
	succeeded(response, err, 200)
	same(late.Status, toolloop.RUNSTATUS_CANCELLED)
	same(late.Error.Get().Code, "EXECUTION_CANCELLED")
}

func aKey() {
	request := toolloop.NewKeyRequest("go", []string{"runs:read"})
	key, response, err := client.KeysAPI.CreateKey(ctx).KeyRequest(*request).Execute()
	succeeded(response, err, 201)
	same(strings.HasPrefix(key.Key, "tl_"+key.Id+"_"), true)
	response, err = client.KeysAPI.RevokeKey(ctx, key.Id).Execute()
	succeeded(response, err, 204)
}

func refusals() {
	_, response, err := client.AgentsAPI.InvokeAgent(ctx, "nobody").InvokeRequest(*toolloop.NewInvokeRequest()).Execute()
	same(refused(response, err, 404).Code, toolloop.PROBLEMCODE_NOT_FOUND)
	request := toolloop.NewInvokeRequest()
	request.SetInputs(map[string]interface{}{"path": 7})
	_, response, err = client.AgentsAPI.InvokeAgent(ctx, "reader").InvokeRequest(*request).Execute()
	problem := refused(response, err, 422)
	same(problem.Code, toolloop.PROBLEMCODE_INVALID_INPUTS)
	same(problem.Errors[0].Pointer, "/inputs/path")
	same(problem.RequestId, response.Header.Get("X-Request-Id"))
}

// An event of a type that the client does not know is passed over, so a newer service breaks nobody.
func whatComesLater() {
	var event toolloop.Event
	text := `{"seq": 1, "at": "2026-01-01T00:00:00Z", "run_id": "x", "type": "moon.rose", "data": {}}`
	if err := json.Unmarshal([]byte(text), &event); err != nil {
		log.Fatal(err)
	}
	same(event.GetActualInstance(), nil)
}

func main() {
	catalogue()
	aRunThatIsWaitedFor()
	aRunThatIsNot()
	aKey()
	refusals()
	whatComesLater()
	fmt.Println("all calls answered as documented")
}
