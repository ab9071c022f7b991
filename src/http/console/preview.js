// A preview of a call, from its arguments: the difference that it would make to a file, and long texts with their lines.

import { part, request } from "./api.js";
import { compared, unified } from "./diff.js";
import { el, long, pre } from "./dom.js";
import { visible } from "./format.js";

/** Characters of a file that is compared with what would be written. */
const MAX_CHARACTERS = 300_000;
/** Bytes of it that are read: whatever it is written in, a larger file has more characters than that. */
const MAX_BYTES = 4 * MAX_CHARACTERS;

const titled = (title, ...content) => [el("p", { class: "sub" }, title), content];

/** Stands for the content of a file that does not exist. */
const NO_FILE = Symbol("none");

/** The current content of a file of the run; null if it is unknown. */
async function currentContent(run, path, signal) {
  try {
    const headers = { Range: `bytes=0-${MAX_BYTES - 1}` };
    const answer = await request("GET", `runs/${part(run)}/files/${path.split("/").map(part).join("/")}`, { headers, signal });
    const text = await answer.text();
    return text.length > MAX_CHARACTERS || text.includes("\u0000") ? null : text;
  } catch (problem) {
    if (problem.status === 416) return ""; // an empty file has no such range
    return problem.status === 404 ? NO_FILE : null;
  }
}

const FILES = {
  async write({ path, content }, call, signal) {
    const now = await currentContent(call.run_id, path, signal);
    if (now === NO_FILE) return titled(`${visible(path)} would be a new file`, compared("", content));
    return now === null
      ? titled(`${visible(path)} would hold`, compared("", content), el("p", { class: "meta" }, "What it holds now is not known here."))
      : titled(`${visible(path)} would change`, compared(now, content));
  },
  append: ({ path, content }) => titled(`Added to the end of ${visible(path)}`, unified(content.split("\n").map((line) => `+${line}`).join("\n"))),
  edit: ({ path, old, new: replacement, replace_all: isAll }) =>
    titled(`In ${visible(path)}, ${isAll ? "wherever it occurs" : "once"}`, compared(old, replacement)),
  patch: ({ patch }) => titled("The patch", unified(patch)),
  delete: ({ path }) => titled(`${visible(path)} would be deleted`),
  move: ({ path, to }) => titled(`${visible(path)} would become ${visible(to)}`),
  mkdir: ({ path }) => titled(`The directory ${visible(path)} would be made`),
};

const areTexts = (values) => values.every((value) => value === undefined || typeof value === "string");

/** A section that fills itself, or nothing where the arguments say it all. */
export function preview(call, args, signal) {
  const node = el("div", { class: "preview-of-call" });
  const { operation, path, content, old, patch, to } = args ?? {};
  const draw = call.tool === "file_ops" && areTexts([path, content, old, args.new, patch, to]) && FILES[operation];
  const fill = async () => {
    try {
      if (draw) return await draw(args, call, signal);
    } catch {
      // Incomplete arguments: there is nothing to compare.
    }
    const texts = Object.entries(args ?? {}).filter(([, value]) => typeof value === "string" && value.includes("\n"));
    return texts.flatMap(([name, text]) => titled(visible(name), long(text, "pre", { tabindex: 0, role: "group", "aria-label": visible(name) })));
  };
  fill().then((content) => node.replaceChildren(...content.flat(3)));
  return node;
}

/** The arguments as they are, and what they would do. */
export const argumentsWithPreview = (call, signal) =>
  [pre(call.arguments, `Arguments of ${visible(call.tool)}`), preview(call, call.arguments, signal)];
