// Names of those who act: of API keys, where the caller may list them, else their ids.

import { all } from "./api.js";

let known = null;

/** Resolves to a function from an id to a name. */
export function people() {
  known ??= all("keys", undefined, 2000).then((keys) => new Map(keys.map((key) => [key.id, key.name])), () => new Map());
  return known.then((names) => (id) => names.get(id) ?? id);
}

/** Another person may sign in, who may see other names. */
export const forget = () => {
  known = null;
};
