// Names of API keys for their ids in records. Other ids stay as they are.

import { get } from "./api.js";
import { el } from "./dom.js";
import { visible } from "./format.js";

/** Ids of one request, at most. */
const MAX_IDS = 100;

const known = new Map();
let wanted = new Map();

/** An element with the name of an id as soon as it is known, else the id. */
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
  for (let first = 0; first < ids.length; first += MAX_IDS) {
    const some = ids.slice(first, first + MAX_IDS).filter((id) => !id.includes(","));
    const answer = some.length ? await get(`subjects?ids=${some.map(encodeURIComponent).join(",")}`).catch(() => null) : null;
    for (const { id, name } of answer?.data ?? []) {
      known.set(id, name);
      for (const node of waiting.get(id) ?? []) node.textContent = visible(name);
    }
  }
}

/** Forgets the names: another person who signs in may see other ones. */
export const forget = () => known.clear();
