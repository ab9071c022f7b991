import collections
import json
import re
import sys

arguments = json.load(sys.stdin)
text = arguments["text"]
words = re.findall(r"\w+(?:['’-]\w+)*", text.lower())
print(json.dumps({"progress": {"words": len(words)}}), file=sys.stderr, flush=True)
frequent = collections.Counter(words).most_common(arguments.get("top", 5))
json.dump({
    "words": len(words),
    "lines": len(text.splitlines()),
    "characters": len(text),
    "frequent": [{"word": word, "times": times} for word, times in frequent],
}, sys.stdout)
