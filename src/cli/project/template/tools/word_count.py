#!/usr/bin/env python3
"""Counts words. Reads {"text": "…"} from standard input, writes the result to standard output."""

import json
import sys

text = json.load(sys.stdin)["text"]
# Lines of this form on standard error are shown to those who follow the run; other lines are logged.
print(json.dumps({"progress": "counting"}), file=sys.stderr, flush=True)
json.dump({"words": len(text.split()), "characters": len(text)}, sys.stdout)
# A failure is an exit code that is not 0; the model reads the end of standard error.
