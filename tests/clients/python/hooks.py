"""What the fuzzer must not do: revoke the key that it calls with, after which all it hears is 401."""

import os

import schemathesis

OWN_KEY = os.environ["TOOLLOOP_KEY"].split("_")[1]


@schemathesis.hook
def before_call(context, case, kwargs):
    if case.operation.label == "DELETE /keys/{id}" and case.path_parameters.get("id") == OWN_KEY:
        case.path_parameters["id"] = "somebodyelse"
