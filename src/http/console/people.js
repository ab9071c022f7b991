// Names of those who act: of API keys of the tenant; an id that is none stays as it is.

import { get } from "./api.js";
import { el } from "./dom.js";
import { visible } from "./format.js";

/** Ids of one request. */
const MOST = 100;

const known = new Map();
let wanted = new Map();

/** Who acted: the name, as soon as it is known, else the id. */
export function who(id) {
  if (known.has(id)) return el("span", {}, visible(known.get(id)));
  const node = el("span", {}, visible(id));
  if (!wanted.size) setTimeout(ask);
  wanted.set(id, [...(wanted.get(id) ?? []), node]);
  return node;
}

async function ask() {
  const waiting = wanted;
  wanted = new Map();
  const ids = [...waiting.keys()];
  for (let first = 0; first < ids.length; first += MOST) {
    const some = ids.slice(first, first + MOST).filter((id) => !id.includes(","));
    const told = some.length ? await get(`subjects?ids=${some.map(encodeURIComponent).join(",")}`).catch(() => null) : null;
    for (const { id, name } of told?.data ?? []) {
      known.set(id, name);
      for (const node of waiting.get(id) ?? []) node.textContent = visible(name);
    }
  }
}

/** Another person may sign in, who may see other names. */
export const forget = () => known.clear();
