import json, os, sys, threading, time

NEW = "2026-07-28"
META = "io.modelcontextprotocol/"
mode = sys.argv[1]
if mode == "file":
    mode = open("era.txt").read() if os.path.exists("era.txt") else sys.argv[2]
is_slow, is_late = mode.startswith("slow-"), mode.startswith("late-")
if is_slow or is_late:
    mode = mode[5:]
has_session = is_mute = False

def say(it):
    sys.stdout.write(json.dumps(it) + "\n")
    sys.stdout.flush()

def note(file, it):
    with open(file, "a") as f:
        f.write(json.dumps(it) + "\n")

def text(it, **more):
    return {"resultType": "complete", "content": [{"type": "text", "text": json.dumps(it)}], **more}

def book(params, id):
    # Each step is what is answered in that round.
    steps, state = params["arguments"]["steps"], params.get("requestState")
    n = 0 if state is None else json.loads(state)["n"]
    note("book.txt", {"n": n, "id": id, "state": state, "responses": params.get("inputResponses")})
    if n >= len(steps):
        return text({"rounds": n, "responses": params.get("inputResponses")})
    step = dict(steps[n])
    if "sleep" in step:
        time.sleep(step.pop("sleep"))
    state = json.dumps({"n": n + 1, "odd": "ä \u2603 \" \\ /"}, ensure_ascii=False)
    return {"resultType": "input_required", "requestState": state, **step}

def call(params, id, is_new):
    name, args = params["name"], params["arguments"]
    if name == "echo":
        return text({"args": args, "new": is_new, "meta": params.get("_meta"), "pid": os.getpid()})
    if name == "book":
        return book(params, id)
    if name == "odd":
        return {"resultType": "task", "content": []}
    if name == "become":
        with open("era.txt", "w") as f:
            f.write(args["mode"])
        say({"jsonrpc": "2.0", "id": id, "result": text("until then")})
        os._exit(0)
    if name == "change":
        note("changed.txt", 1)
        for listener in listeners:
            say({"jsonrpc": "2.0", "method": "notifications/tools/list_changed", "params": {"_meta": {META + "subscriptionId": listener}}})
        return text("changed")

listeners = []
NAMES = ["echo", "book", "odd", "become", "change"]

def tools():
    names = NAMES + (["new"] if os.path.exists("changed.txt") else [])
    return [{"name": n, "description": f"Does {n}.", "inputSchema": {"type": "object", "properties": {}}} for n in names]

def answered(name, params, id):
    """A result, or a code and a message and data."""
    global has_session, is_mute
    meta = params.get("_meta") or {}
    version, capabilities = meta.get(META + "protocolVersion"), meta.get(META + "clientCapabilities")
    is_new = mode in ("new", "both") and not (mode == "both" and version is None)
    if is_new:
        if version is None or capabilities is None:
            return (-32602, "The request has no _meta", None)
        if version != NEW:
            return (-32022, "Unsupported protocol version", {"supported": [NEW], "requested": version})
        if capabilities != {"elicitation": {"form": {}}} or "name" not in meta.get(META + "clientInfo", {}):
            return (-32602, f"Odd _meta: {meta}", None)
        if name == "server/discover":
            versions = [NEW] if mode == "new" else [NEW, "2025-11-25"]
            return {"resultType": "complete", "supportedVersions": versions, "capabilities": {"tools": {"listChanged": True}}, "ttlMs": 0, "cacheScope": "public"}
        if name == "subscriptions/listen":
            listeners.append(id)
            say({"jsonrpc": "2.0", "method": "notifications/subscriptions/acknowledged", "params": {"_meta": {META + "subscriptionId": id}, "notifications": params["notifications"]}})
            return None
    else:
        if name == "initialize":
            has_session = True
            return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {"listChanged": True}}, "serverInfo": {"name": "eras", "version": "1"}}
        if not has_session:
            if mode == "dies":
                os._exit(7)
            if mode == "silent":
                return None
            is_mute = mode == "mute"
            return (-32602, "Received request before initialization was complete", None)
        if mode == "silent" and not name.startswith("tools/"):
            return None
        if name == "ping":
            return {}
    if name == "tools/list":
        note("listed.txt", 1)
        return {"resultType": "complete", "tools": tools(), "ttlMs": 0, "cacheScope": "public"} if is_new else {"tools": tools()}
    if name == "tools/call":
        return call(params, id, is_new)
    return (-32601, f"Method not found: {name}", None)

def respond(asked):
    result = answered(asked.get("method"), asked.get("params") or {}, asked["id"])
    if is_mute:
        return
    if isinstance(result, tuple):
        code, message, data = result
        say({"jsonrpc": "2.0", "id": asked["id"], "error": {"code": code, "message": message, **({"data": data} if data else {})}})
    elif result is not None:
        say({"jsonrpc": "2.0", "id": asked["id"], "result": result})

first = None
for line in sys.stdin:
    asked = json.loads(line)
    note("said.txt", asked)
    if mode == "hangs":
        note("asked_at.txt", int(time.time() * 1000))
    if mode == "hangs" or asked.get("id") is None:
        continue
    if not (is_slow or is_late):
        respond(asked)
    elif asked["method"] != "initialize":
        first = asked
    elif is_slow:
        # Asked in both eras, it answers in the order of the questions.
        is_slow = False
        for it in filter(None, [first, asked]):
            respond(it)
    else:
        is_late = False
        respond(asked)
        if first:
            threading.Timer(0.2, respond, [first]).start()
