// The files of a workspace: a list, who changed each file, and uploads if the key permits them.

import { address, get, may, part, request } from "./api.js";
import { announce, el, folded, long, notice, time } from "./dom.js";
import { bytes, plural, visible } from "./format.js";
import { who } from "./people.js";

/** The maximum size of a text and of a picture that is shown, in bytes. */
const MAX_TEXT = 256 * 1024;
const MAX_PICTURE = 20_000_000;
const PICTURES = ["image/png", "image/jpeg", "image/gif", "image/webp", "image/avif"];

/** A path as a part of an address; null where it would lead elsewhere. */
function encoded(path) {
  const steps = path.split("/");
  return steps.some((step) => ["", ".", ".."].includes(step)) ? null : steps.map(part).join("/");
}

export class Files {
  /** `owner` is `runs/<id>` or `sessions/<id>`; `reveal` shows a call, where there is a timeline. */
  constructor(owner, signal, reveal) {
    this.base = `${owner}/files`;
    this.signal = signal;
    this.reveal = reveal;
    this.statusLine = el("p", { class: "meta", role: "status" });
    this.errorBox = el("div");
    this.list = el("ul", { class: "files" });
    this.pager = el("p", { class: "buttons start" });
    this.shown = el("section", { class: "result", "aria-label": "Content of the file", hidden: true });
    this.node = may("files:read")
      ? el("section", { class: "workspace card", "aria-label": "Files of the workspace" },
        folded("Files of the workspace", () => {
          this.load();
          return el("div", {}, this.statusLine, this.errorBox, this.list, this.pager, this.shown, may("files:write") ? this.uploader() : "");
        }))
      : "";
    signal.addEventListener("abort", () => this.release());
  }

  async load(cursor = "") {
    try {
      const page = await get(`${this.base}?limit=100${cursor && `&cursor=${part(cursor)}`}`, this.signal);
      const rows = page.data.map((file) => this.row(file));
      if (cursor) this.list.append(...rows);
      else this.list.replaceChildren(...rows);
      const more = page.next_cursor;
      this.statusLine.textContent = this.list.children.length ? `${plural(this.list.children.length, "file")}${more ? " so far" : ""}` : "There are none.";
      this.pager.replaceChildren(...(more ? [el("button", { type: "button", onclick: () => (this.errorBox.replaceChildren(), this.load(more)) }, "More files")] : []));
    } catch (problem) {
      if (this.signal.aborted) return;
      if (problem.status === 404) this.statusLine.textContent = "It has no files of its own.";
      else this.errorBox.append(notice(problem));
    }
  }

  row(file) {
    const path = visible(file.path);
    const place = encoded(file.path);
    const about = el("span", { class: "meta" }, el("span", {}, bytes(file.size)), time(file.modified_at),
      this.changer(file));
    const buttons = place === null ? "" : el("span", { class: "buttons start" },
      el("button", { type: "button", "aria-label": `View ${path}`, onclick: () => this.view(file) }, "View"),
      el("a", { class: "button", href: address(`${this.base}/${place}`), download: file.path.split("/").at(-1), "aria-label": `Download ${path}` }, "Download"),
      may("files:write") && this.remover(file, path));
    return el("li", { "data-path": file.path }, el("code", {}, path), about, buttons);
  }

  /** Who last changed a file: a call of this run, another run, or a caller. */
  changer(file) {
    if (file.changed_by_subject) return el("span", {}, "put by ", who(file.changed_by_subject));
    if (!file.changed_by) return "";
    if (this.reveal && this.base.includes(file.changed_by_run)) return el("button", { type: "button", class: "more", onclick: () => this.reveal(file.changed_by) }, "changed by a call");
    return el("a", { href: `#/runs/${part(file.changed_by_run)}` }, "changed by a run");
  }

  /** Two clicks delete a file, if it is still the one that is listed. */
  remover(file, path) {
    const button = el("button", { type: "button", class: "danger", "aria-label": `Delete ${path}`, onclick: async () => {
      if (button.dataset.asked === undefined) {
        button.dataset.asked = "";
        button.textContent = "Really delete?";
        button.setAttribute("aria-label", `Really delete ${path}?`);
        return;
      }
      await this.attempt(async () => {
        await request("DELETE", `${this.base}/${encoded(file.path)}`, { headers: file.etag ? { "If-Match": file.etag } : {} });
        announce(`${path} is deleted`);
        this.hide();
        await this.load();
      });
    }, onblur: () => {
      delete button.dataset.asked;
      button.textContent = "Delete";
      button.setAttribute("aria-label", `Delete ${path}`);
    } }, "Delete");
    return button;
  }

  async view(file) {
    this.hide();
    this.shown.hidden = false;
    this.shown.replaceChildren(el("p", { class: "meta" }, "The file is being read …"));
    const path = visible(file.path);
    try {
      const body = file.size === 0 ? el("p", { class: "meta" }, "It is empty.") : await this.content(file, path);
      this.shown.replaceChildren(el("h3", {}, el("code", {}, path)), body,
        el("p", { class: "buttons start" }, el("button", { type: "button", onclick: () => this.hide() }, "Close")));
      this.shown.scrollIntoView({ block: "nearest" });
      announce(`${path} is shown`);
    } catch (problem) {
      if (!this.signal.aborted) this.shown.replaceChildren(notice(problem));
    }
  }

  async content(file, path) {
    const kind = file.media_type.split(";")[0];
    const where = `${this.base}/${encoded(file.path)}`;
    if (PICTURES.includes(kind) && file.size <= MAX_PICTURE) {
      const blob = await (await request("GET", where, { signal: this.signal })).blob();
      this.picture = URL.createObjectURL(blob);
      return el("img", { class: "screenshot", alt: `Picture ${path}`, src: this.picture });
    }
    const headers = file.size > MAX_TEXT ? { Range: `bytes=0-${MAX_TEXT - 1}` } : {};
    const text = new TextDecoder().decode(await (await request("GET", where, { headers, signal: this.signal })).arrayBuffer());
    if (text.includes("\u0000")) return el("p", { class: "meta" }, "This file is not text; it can be downloaded.");
    return el("div", {}, long(text, "pre", { tabindex: 0, role: "group", "aria-label": path }),
      file.size > MAX_TEXT ? el("p", { class: "meta" }, `The first ${bytes(MAX_TEXT)} of ${bytes(file.size)}; the rest can be downloaded.`) : "");
  }

  hide() {
    this.release();
    this.shown.hidden = true;
    this.shown.replaceChildren();
  }

  release() {
    if (this.picture) URL.revokeObjectURL(this.picture);
    this.picture = null;
  }

  uploader() {
    const chosen = el("input", { type: "file", id: "upload", multiple: true });
    const folder = el("input", { id: "upload-folder", autocomplete: "off", placeholder: "e.g. data" });
    const send = el("button", {}, "Upload");
    return el("form", { class: "upload", onsubmit: (event) => {
      event.preventDefault();
      this.attempt(async () => {
        send.disabled = true;
        try {
          for (const file of chosen.files) await this.put(`${folder.value.trim().replace(/\/+$/, "")}/${file.name}`.replace(/^\/+/, ""), file);
          chosen.value = "";
        } finally {
          send.disabled = false;
        }
      });
    } }, el("label", { for: "upload" }, "Upload files"), chosen, el("label", { for: "upload-folder" }, "Into the directory"), folder, send);
  }

  /** Uploads a file. An existing file is replaced only after a confirmation (`isSure`). */
  async put(path, file, isSure = false) {
    const place = encoded(path);
    if (place === null) throw new Error("This is not a path in the workspace.");
    const headers = { "Content-Type": "application/octet-stream", ...(!isSure && { "If-None-Match": "*" }) };
    try {
      await request("PUT", `${this.base}/${place}`, { raw: file, headers });
      announce(`${visible(path)} is uploaded`);
      await this.load();
    } catch (problem) {
      if (problem.status !== 412 || isSure) throw problem;
      const ask = el("p", { class: "notice wait", role: "alert" }, `${visible(path)} already exists. `,
        el("button", { type: "button", onclick: () => (ask.remove(), this.tryAction(() => this.put(path, file, true))) }, "Replace it"));
      this.errorBox.append(ask);
    }
  }

  attempt(action) {
    this.errorBox.replaceChildren();
    return this.tryAction(action);
  }

  /** Runs an action, and adds its error to the messages about other files. */
  async tryAction(action) {
    try {
      await action();
    } catch (problem) {
      this.errorBox.append(notice(problem));
    }
  }
}
