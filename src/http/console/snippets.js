// A request as a command or a program, to be copied. The key is never in it: it comes from a variable.

import { address } from "./api.js";
import { announce, el } from "./dom.js";
import { escaped } from "./format.js";
import { Exact, same, stringify } from "./json.js";
import { queueHeaders } from "./stream.js";

/** Whether a request has the text [redacted] in place of a secret. */
export const lacksSecret = (body) => stringify(body).includes("[redacted]");

/** A warning about redacted secrets. */
export const secretWarning = () => el("p", { class: "notice" }, "A secret is shown as [redacted]. Write it anew: what is shown would be sent.");

/** The headers of a request that not every request has, each as a name and its value. */
const extraHeaders = (body) => Object.entries(queueHeaders(body));

const json = (value) => escaped(stringify(value, 2));

function curl(url, body) {
  return [
    `curl -N -X POST '${url.replaceAll("'", "'\\''")}' \\`,
    "  -H \"Authorization: Bearer $TOOLLOOP_KEY\" \\",
    "  -H 'Content-Type: application/json' \\",
    "  -H 'Accept: application/json' \\",
    ...extraHeaders(body).map(([name, value]) => `  -H '${name}: ${value}' \\`),
    `  -d '${json(body).replaceAll("'", "'\\''")}'`,
  ].join("\n");
}

function typescript(url, body) {
  const text = json(body);
  const isExact = same(JSON.parse(text), body);
  return [
    `const answer = await fetch(${JSON.stringify(url)}, {`,
    '  method: "POST",',
    "  headers: {",
    "    Authorization: `Bearer ${process.env.TOOLLOOP_KEY}`,",
    '    "Content-Type": "application/json",',
    ...extraHeaders(body).map(([name, value]) => `    "${name}": "${value}",`),
    "  },",
    `  body: ${isExact ? `JSON.stringify(${text.replaceAll("\n", "\n  ")})` : escaped(JSON.stringify(stringify(body)))},`,
    "});",
    "const run = await answer.json();",
    "if (!answer.ok) throw new Error(run.detail);",
    "console.log(run.status, run.output);",
  ].join("\n");
}

function python(url, body) {
  return [
    "import os",
    "import requests",
    "",
    "answer = requests.post(",
    `    ${JSON.stringify(url)},`,
    `    headers={"Authorization": f"Bearer {os.environ['TOOLLOOP_KEY']}"${extraHeaders(body).map(([name, value]) => `, "${name}": "${value}"`).join("")}},`,
    `    json=${literal(body, "    ")},`,
    ")",
    "answer.raise_for_status()",
    "run = answer.json()",
    'print(run["status"], run["output"])',
  ].join("\n");
}

/** A value as Python writes it. */
function literal(value, indent) {
  const inner = `${indent}    `;
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return value.length ? `[\n${value.map((v) => `${inner}${literal(v, inner)},\n`).join("")}${indent}]` : "[]";
  if (typeof value === "object" && !(value instanceof Exact)) {
    const pairs = Object.entries(value).map(([k, v]) => `${inner}${escaped(stringify(k))}: ${literal(v, inner)},\n`);
    return pairs.length ? `{\n${pairs.join("")}${indent}}` : "{}";
  }
  return escaped(stringify(value));
}

const LANGUAGES = [["curl", curl], ["TypeScript", typescript], ["Python", python]];

/** The request in three languages, one at a time. */
export function snippets(route, body) {
  const code = el("pre", { tabindex: 0, role: "group", "aria-label": "The request" });
  const buttons = LANGUAGES.map(([name, write]) => el("button", { type: "button", "aria-pressed": "false", onclick: (event) => {
    for (const button of buttons) button.setAttribute("aria-pressed", button === event.currentTarget);
    code.textContent = write(address(route), body);
  } }, name));
  const copy = el("button", { type: "button", onclick: async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      announce("Copied");
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      announce("Selected: copy it with the keyboard");
    }
  } }, "Copy");
  const node = el("section", { class: "result snippets", "aria-label": "Copy as" }, lacksSecret(body) && secretWarning(), el("p", { class: "tabs" }, buttons, copy), code);
  buttons[0].click();
  return node;
}
