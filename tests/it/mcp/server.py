import json, os, socket, sys, time

def say(it):
    sys.stdout.write(json.dumps(it) + "\n")
    sys.stdout.flush()

def tried(what):
    try:
        return str(what() or "done")
    except OSError as e:
        return type(e).__name__

def fetched(url):
    import urllib.error, urllib.request
    try:
        return urllib.request.urlopen(url).read().decode()
    except urllib.error.HTTPError as e:
        return e.read().decode()
    except OSError as e:
        return type(e).__name__

def text(it, **more):
    it = it if isinstance(it, str) else json.dumps(it)
    return {"content": [{"type": "text", "text": it}], **more}

NAMES = "echo fail die hang huge stderr notes junk spawn reach slow ask change boom structured wait fetch internal".split()

def tools():
    if os.path.exists("tools.json"):
        return json.load(open("tools.json"))
    kind = {"type": "object", "properties": {"n": {"type": "integer"}}}
    more = {"structured": {"outputSchema": kind}}
    return [{"name": n, "description": f"Does {n}.", "inputSchema": kind, **more.get(n, {})} for n in NAMES]

def call(name, args, params):
    n = args.get("n", 1)
    open("calls.txt", "a").write(name + "\n")
    if name == "echo":
        return text({"args": args, "meta": params.get("_meta"), "pid": os.getpid()})
    if name == "fail":
        return text("no such tide", isError=True)
    if name == "die":
        os._exit(3)
    if name == "hang":
        if os.fork() == 0:
            os.setsid()
            os.execvp("sleep", ["sleep", args["seconds"]])
        time.sleep(9999)
    if name == "huge":
        return text("x" * n)
    if name == "stderr":
        for i in range(n):
            sys.stderr.write("e" * 9999 + "\n")
        return text("wrote")
    if name == "notes":
        for i in range(n):
            say({"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": i}})
        return text("noted")
    if name == "junk":
        sys.stdout.write("this is no message\n{}\n[]\n" + "[" * 5000 + "\n\xff\n")
        return text("junk")
    if name == "spawn":
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp("sleep", ["sleep", args["seconds"]])
            os._exit(0)
        return text("spawned")
    if name == "reach":
        return text({
            "environment": sorted(os.environ),
            "named": os.environ.get("GREETING"),
            "shadow": tried(lambda: open("/etc/shadow").read()),
            "settings": tried(lambda: open("../../../toolloop.toml").read()),
            "other tenant": tried(lambda: os.listdir("../../default")),
            "network": tried(lambda: socket.create_connection(("127.0.0.1", args["port"]), 1)),
            "own file": tried(lambda: open("own.txt", "w").write("x") and "done"),
            "outside": tried(lambda: open("/var/tmp/outside.txt", "w")),
        })
    if name == "internal":
        return "internal"
    if name == "slow":
        time.sleep(n / 1000)
        return text("slept")
    if name == "ask":
        say({"jsonrpc": "2.0", "id": "q1", "method": "elicitation/create", "params": {"message": "who?"}})
        answer = json.loads(sys.stdin.readline())
        return text(answer["error"]["message"])
    if name == "change":
        json.dump(args["tools"], open("tools.json", "w"))
        say({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
        return text("changed")
    if name == "structured":
        return text("here", **({"structuredContent": args["value"]} if "value" in args else {}))
    if name == "wait":
        open("waiting.txt", "w").write(f"{params['id']}\n")
        said = sys.stdin.readline()
        open("cancelled.txt", "w").write(said)
        return text("stopped")
    if name == "fetch":
        return text({url: fetched(url) for url in args["urls"]})
    if name == "boom":
        while True:
            sys.stdout.write("x" * 65536)
    return None

for line in sys.stdin:
    asked = json.loads(line)
    name, params, id = asked.get("method"), asked.get("params") or {}, asked.get("id")
    if name == "notifications/cancelled":
        open("cancelled.txt", "a").write(line)
    if id is None:
        continue
    if name == "initialize":
        result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {"listChanged": True}}, "serverInfo": {"name": "odd", "version": "1"}}
    elif name == "tools/list":
        result = {"tools": tools()}
    elif name == "tools/call":
        result = call(params["name"], params["arguments"], {**params, "id": id})
    else:
        result = {}
    if result == "internal":
        say({"jsonrpc": "2.0", "id": id, "error": {"code": -32603, "message": "broke in the middle"}})
    elif result is None:
        say({"jsonrpc": "2.0", "id": id, "error": {"code": -32602, "message": "Unknown tool"}})
    else:
        say({"jsonrpc": "2.0", "id": id, "result": result})
