// Names of those who act: of API keys, where the caller may list them, else their ids.

import { all } from "./api.js";

/** Milliseconds after which names are asked for again because of an id that is not known. */
const PATIENCE = 5000;

let known = null;
let asked = 0;

/** Resolves to a function from an id to a name. One that is not known may be of a newer key: the next call looks again. */
export function people() {
  if (!known) {
    asked = Date.now();
    known = all("keys", undefined, 2000).then((keys) => new Map(keys.map((key) => [key.id, key.name])), () => new Map());
  }
  return known.then((names) => (id) => {
    if (!names.has(id) && Date.now() - asked > PATIENCE) known = null;
    return names.get(id) ?? id;
  });
}

/** Another person may sign in, who may see other names. */
export const forget = () => {
  known = null;
};
