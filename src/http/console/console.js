// The frame of the console: which page is shown, who is signed in, and the keys that work everywhere.

import { get, key, Problem } from "./api.js";
import { announce, el, heading, notice } from "./dom.js";
import { approvals, badge } from "./approvals.js";
import { agents, tools } from "./catalogue.js";
import { forget as forgetRights } from "./decide.js";
import { invoke } from "./invoke.js";
import { overview } from "./overview.js";
import { forget as forgetPeople } from "./people.js";
import { run } from "./run.js";
import { runs } from "./runs.js";
import { session, sessions } from "./sessions.js";

const main = document.getElementById("main");
const nav = document.querySelector("nav");
const signOut = document.getElementById("sign-out");
const countWaiting = badge(nav.querySelector("[href='#/approvals']"));
let page = new AbortController();

/** The page that the address names: `#/runs?status=failed`, `#/runs/<id>`, `#/agents/<name>`. */
function chosen() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [room, name] = path.split("/").map(decodeURIComponent);
  const params = new URLSearchParams(query);
  if (room === "agents") return name ? ["agents", (place, of, signal) => invoke(place, of, signal, params), name] : ["agents", agents];
  if (room === "tools") return ["tools", tools];
  if (room === "approvals") return ["approvals", approvals, params];
  if (room === "sessions") return name ? ["sessions", session, name] : ["sessions", sessions, params];
  if (room === "") return ["", overview, params];
  return name ? ["runs", run, name] : ["runs", runs, params];
}

async function show() {
  page.abort();
  page = new AbortController();
  const { signal } = page;
  main.replaceChildren();
  try {
    const [room, build, argument] = chosen();
    for (const link of nav.children) {
      if (link.hash === `#/${room}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    await build(main, argument, signal);
  } catch (problem) {
    if (signal.aborted || problem.status === 401) return;
    if (!(problem instanceof Problem)) console.error(problem);
    main.append(notice(problem));
  }
}

function askForKey(refused) {
  page.abort();
  nav.hidden = signOut.hidden = true;
  main.replaceChildren();
  heading("Sign in");
  const field = el("input", {
    id: "key", type: "password", autocomplete: "off", spellcheck: "false", required: true, placeholder: "tl_…",
    "aria-describedby": "key-help",
  });
  const enter = (event) => {
    event.preventDefault();
    key.set(field.value.trim());
    begin();
  };
  main.append(el("form", { class: "card sign-in", onsubmit: enter },
    refused && el("p", { class: "notice bad", role: "alert" }, "The key is unknown, expired or revoked."),
    el("label", { for: "key" }, "API key"), field,
    el("small", { id: "key-help" }, "Kept in this tab only, until you sign out or close it."),
    el("button", { class: "main" }, "Sign in")));
  field.focus();
}

/** Goes on without a key where the service asks for none. */
async function begin() {
  try {
    await get("agents?limit=1");
  } catch (problem) {
    if (problem.status === 401) return;
    if (problem.status !== 403) return main.replaceChildren(notice(problem));
  }
  nav.hidden = false;
  forgetPeople();
  forgetRights();
  countWaiting();
  signOut.hidden = !key.get();
  show();
}

function leave() {
  key.clear();
  announce("Signed out");
  askForKey(false);
}

document.addEventListener("unauthenticated", () => {
  const refused = key.get() !== null;
  key.clear();
  askForKey(refused);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !event.ctrlKey && !event.metaKey && !event.target.matches("input, select, textarea")) {
    const filter = main.querySelector("[data-filter]");
    filter?.focus();
    if (filter) event.preventDefault();
  }
  if (event.key === "Escape" && event.target.matches("form.filters *")) main.querySelector("h1").focus();
});
window.addEventListener("hashchange", () => nav.hidden || show());
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
signOut.addEventListener("click", leave);
begin();
