// The frame of the console: which page is shown, who is signed in, and the keys that work everywhere.

import { loadCaller, Problem, signedIn, signIn, signOut } from "./api.js";
import { announce, el, heading, notice } from "./dom.js";
import { visible } from "./format.js";
import { approvals, badge } from "./approvals.js";
import { agents, tools } from "./catalogue.js";
import { forget as forgetRights } from "./decide.js";
import { invoke } from "./invoke.js";
import { judge } from "./judge.js";
import { overview } from "./overview.js";
import { forget as forgetPeople } from "./people.js";
import { run } from "./run.js";
import { runs } from "./runs.js";
import { session, sessions } from "./sessions.js";

const main = document.getElementById("main");
const nav = document.querySelector("nav");
const signOutButton = document.getElementById("sign-out");
const callerName = document.getElementById("who");
/** Tells the other tabs that the user signed in or out. */
const tabs = new BroadcastChannel("toolloop");
const countWaiting = badge(nav.querySelector("[href='#/approvals']"));
let page = new AbortController();

/** A step of an address; one that is badly encoded stands for itself, and nothing has that name. */
function decoded(step) {
  try {
    return decodeURIComponent(step);
  } catch {
    return step;
  }
}

/** The page that the address names: `#/runs?status=failed`, `#/runs/<id>`, `#/agents/<name>`. */
function pageOfAddress() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [section, name] = path.split("/").map(decoded);
  const params = new URLSearchParams(query);
  if (section === "agents") return name ? ["agents", (place, of, signal) => invoke(place, of, signal, params), name] : ["agents", agents];
  if (section === "judge" && name) return ["agents", (place, of, signal) => judge(place, of, signal, params), name];
  if (section === "tools") return ["tools", tools];
  if (section === "approvals") return ["approvals", approvals, params];
  if (section === "sessions") return name ? ["sessions", session, name] : ["sessions", sessions, params];
  if (section === "") return ["", overview, params];
  return name ? ["runs", run, name] : ["runs", runs, params];
}

async function show() {
  page.abort();
  page = new AbortController();
  const { signal } = page;
  main.replaceChildren();
  try {
    const [section, build, argument] = pageOfAddress();
    for (const link of nav.children) {
      if (link.hash === `#/${section}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    await build(main, argument, signal);
  } catch (problem) {
    if (signal.aborted || problem.status === 401) return;
    if (!(problem instanceof Problem)) console.error(problem);
    main.append(notice(problem));
  }
}

function updateFrame(isShown) {
  const { authentication, caller } = signedIn();
  nav.hidden = !isShown;
  signOutButton.hidden = callerName.hidden = !isShown || authentication === "none";
  callerName.textContent = caller?.key ? visible(`${caller.key.name} · ${caller.tenant}`) : "";
}

function askForKey(errorBox) {
  page.abort();
  updateFrame(false);
  main.replaceChildren();
  heading("Sign in");
  const field = el("input", {
    id: "key", type: "password", autocomplete: "off", spellcheck: "false", required: true, placeholder: "tl_…",
    "aria-describedby": "key-help",
  });
  const submitKey = async (event) => {
    event.preventDefault();
    button.disabled = true;
    try {
      await signIn(field.value.trim());
      tabs.postMessage("in");
      await begin();
    } catch (problem) {
      askForKey(problem.status === 401 ? el("p", { class: "notice bad", role: "alert" }, "The key is unknown, expired or revoked.") : notice(problem));
    }
  };
  const button = el("button", { class: "main" }, "Sign in");
  main.append(el("form", { class: "card sign-in", onsubmit: submitKey }, errorBox,
    el("label", { for: "key" }, "API key"), field,
    el("small", { id: "key-help" }, "For all tabs of this browser, until you sign out. The key itself is not kept."),
    button));
  field.focus();
}

/** Goes on where a user is signed in, or where none has to be. */
async function begin() {
  try {
    if ((await loadCaller()).caller === null) return askForKey();
  } catch (problem) {
    return main.replaceChildren(notice(problem));
  }
  updateFrame(true);
  forgetPeople();
  forgetRights();
  countWaiting();
  show();
}

async function leave() {
  try {
    await signOut();
  } catch (problem) {
    return main.prepend(notice(problem));
  }
  tabs.postMessage("out");
  announce("Signed out");
  askForKey();
}

document.addEventListener("unauthenticated", () =>
  nav.hidden || askForKey(el("p", { class: "notice", role: "alert" }, "You are signed out: the session or its key has ended.")));
tabs.addEventListener("message", ({ data }) => (data === "out" ? nav.hidden || askForKey() : begin()));
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
signOutButton.addEventListener("click", leave);
begin();
