"""What the fuzzer needs to know of this service beside its document."""

import os

import schemathesis

OWN_KEY = os.environ["TOOLLOOP_KEY"].split("_")[1]
METHODS = {"get", "put", "post", "delete", "patch"}


@schemathesis.hook
def before_load_schema(context, raw_schema):
    """Lets each event of a stream be checked: the document describes a stream as text whose
    `contentSchema` is that of the data of its events; schemathesis reads an object for each event."""
    for path in raw_schema["paths"].values():
        for operation in (path[method] for method in METHODS & path.keys()):
            for response in operation.get("responses", {}).values():
                stream = response.get("content", {}).get("text/event-stream")
                if stream is not None:
                    data = {
                        "type": "string",
                        "contentMediaType": "application/json",
                        "contentSchema": stream["schema"]["contentSchema"],
                    }
                    stream["schema"] = {"type": "object", "properties": {"data": data}}


@schemathesis.hook
def before_call(context, case, kwargs):
    """Does not revoke the key that it calls with, after which all it hears is 401."""
    if case.operation.label == "DELETE /keys/{id}" and case.path_parameters.get("id") == OWN_KEY:
        case.path_parameters["id"] = "somebodyelse"


@schemathesis.hook
def filter_case(context, case):
    """Leaves out a body of `null`, which is taken like none where a body is optional."""
    return case.body is not None
