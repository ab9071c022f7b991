// Differences of texts: a unified diff with its lines coloured, and the diff of two texts.

import { el } from "./dom.js";
import { count, visible } from "./format.js";

/** Lines that are shown at first. */
const LINES = 200;
/** Beyond this many pairs of lines two texts are not compared line by line. */
const PAIRS = 1_000_000;

const KINDS = { "+": "added", "-": "removed", "@": "hunk" };

/** The lines of a unified diff; what stands before the first hunk is left out. */
export function unified(text) {
  const lines = text.split("\n");
  const first = lines.findIndex((line) => line.startsWith("@@"));
  return table(lines.slice(Math.max(0, first)).filter((line, index, all) => line !== "" || index < all.length - 1));
}

function table(lines) {
  const node = el("pre", { class: "diff", tabindex: 0, role: "group", "aria-label": "Changes" });
  // One element for lines of a kind that follow each other.
  const add = (some) => {
    let block = null;
    for (const line of some) {
      const kind = KINDS[line[0]] ?? "same";
      if (block?.className !== kind) node.append(block = el(kind === "added" ? "ins" : kind === "removed" ? "del" : "span", { class: kind }));
      block.append(`${visible(line.replaceAll("\r", "␍"))}\n`);
    }
  };
  add(lines.slice(0, LINES));
  if (lines.length <= LINES) return node;
  const more = el("button", { type: "button", class: "more", onclick: () => (add(lines.slice(LINES)), more.remove()) },
    `Show all: ${count(lines.length - LINES)} more lines`);
  return el("div", { class: "long" }, node, more);
}

/** A change of a file, as the API describes it; the lines are drawn when it is opened. */
export function changed(change, isOpen, ...more) {
  const { path, from, change: what, added, removed, diff, truncated } = change;
  const node = el("details", { class: "change" },
    el("summary", {}, el("span", { class: "what", "data-change": what }, what === "created" ? "new" : what), el("code", {}, from && `${visible(from)} → `, visible(path)),
      added !== null && el("span", { class: "plus" }, `+${count(added)}`), removed !== null && el("span", { class: "minus" }, `−${count(removed)}`)));
  const fill = () => node.children.length === 1 && node.append(
    diff ? unified(diff) : el("p", { class: "meta" }, truncated ? "The difference is too large, or was not seen." : "There are no lines to compare."),
    diff && truncated ? el("p", { class: "meta" }, "The rest of the difference is left out.") : "", ...more);
  node.addEventListener("toggle", () => node.open && fill());
  if (isOpen) {
    fill();
    node.open = true;
  }
  return node;
}

/** The diff of two texts: lines with `-`, `+` or a space in front. */
export function compared(before, after) {
  const split = (text) => (text === "" ? [] : text.replace(/\n$/, "").split("\n"));
  const a = split(before);
  const b = split(after);
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a.at(-1 - end) === b.at(-1 - end)) end += 1;
  const same = (lines) => lines.map((line) => ` ${line}`);
  const middle = lines(a.slice(start, a.length - end), b.slice(start, b.length - end));
  const isEndOther = before !== "" && after !== "" && before.endsWith("\n") !== after.endsWith("\n");
  const note = isEndOther ? [after.endsWith("\n") ? "@@ a line break at the end is added" : "@@ the line break at the end is removed"] : [];
  return table([...same(a.slice(Math.max(0, start - 3), start)), ...middle, ...same(a.slice(a.length - end, a.length - end + 3)), ...note]);
}

/** The longest common subsequence, or all removed and all added where that takes too long. */
function lines(a, b) {
  if (a.length * b.length > PAIRS) return [...a.map((line) => `-${line}`), ...b.map((line) => `+${line}`)];
  const width = b.length + 1;
  const longest = new Uint32Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      longest[i * width + j] = a[i] === b[j]
        ? longest[(i + 1) * width + j + 1] + 1
        : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
    }
  }
  const diffLines = [];
  for (let i = 0, j = 0; i < a.length || j < b.length;) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      diffLines.push(` ${a[i]}`);
      i += 1;
      j += 1;
    } else if (i < a.length && (j === b.length || longest[(i + 1) * width + j] >= longest[i * width + j + 1])) {
      diffLines.push(`-${a[i]}`);
      i += 1;
    } else {
      diffLines.push(`+${b[j]}`);
      j += 1;
    }
  }
  return diffLines;
}
