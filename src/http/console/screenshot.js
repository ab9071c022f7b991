// A screenshot among a run's files, as a picture. Its address needs the key, so it is read and shown as data.

import { part, request } from "./api.js";
import { el } from "./dom.js";
import { visible } from "./format.js";

/** Bytes of a picture that is shown, at most. */
const MAX_BYTES = 20_000_000;

const read = (blob) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });

async function pictureOf(run, path) {
  const answer = await request("GET", `runs/${part(run)}/files/${path.split("/").map(part).join("/")}`);
  const blob = await answer.blob();
  if (blob.type !== "image/png" || blob.size > MAX_BYTES) return el("p", { class: "meta" }, "The picture is not shown.");
  return el("img", { class: "screenshot", alt: `Screenshot ${visible(path)}`, src: await read(blob) });
}

/** What a call of `browser` saved, as far as it is still there. */
export function screenshots(row) {
  const saved = (row.changes ?? []).filter(({ path, change }) => change === "created" && path.endsWith(".png"));
  return saved.slice(0, 1).map(({ path }) => {
    const place = el("div", {}, el("p", { class: "meta" }, "The picture is being read …"));
    pictureOf(row.run, path).then(
      (node) => place.replaceChildren(node),
      () => place.replaceChildren(el("p", { class: "meta" }, "The picture is not there any more.")),
    );
    return place;
  });
}
