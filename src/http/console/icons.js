// Small line drawings that tell kinds of steps apart; the words beside them say the same.

import { svg } from "./dom.js";

const PATHS = {
  agent: "M4 6h8v6H4zM8 6V3M6 9h.01M10 9h.01",
  ask: "M5.5 6a2.5 2.5 0 1 1 3.5 2.3c-.7.3-1 .8-1 1.7M8 12.5h.01",
  branch: "M5 3v10M5 9c6 0 6-2 6-4M11 3.5h.01",
  check: "M3 8.5l3.5 3.5L13 4.5",
  clock: "M8 2.5a5.5 5.5 0 1 0 0 11a5.5 5.5 0 1 0 0-11M8 5v3l2 1.5",
  compress: "M8 2v4M6 4.5L8 6.5l2-2M8 14v-4M6 11.5l2-2 2 2M3 8h10",
  cross: "M4 4l8 8M12 4l-8 8",
  doc: "M4 2h5l3 3v9H4zM9 2v3h3",
  eye: "M2 8s2-4 6-4 6 4 6 4-2 4-6 4-6-4-6-4M8 7a1 1 0 1 0 0 2a1 1 0 1 0 0-2",
  flag: "M4 14V2.5h7L9.5 5.5 11 8.5H4",
  limit: "M2.5 12a5.5 5.5 0 1 1 11 0M8 12l3-4",
  loop: "M12.5 6A5 5 0 1 0 13 9M13 3v3h-3",
  play: "M5 3l7 5-7 5z",
  pulse: "M1.5 8H5l2-4.5 3 9L12 8h2.5",
  queue: "M3 4h10M3 8h10M3 12h6",
  shield: "M8 2l5 2v4c0 3-2 5-5 6-3-1-5-3-5-6V4z",
  skill: "M3 3h4a1 1 0 0 1 1 1v9a1 1 0 0 0-1-1H3zM13 3H9a1 1 0 0 0-1 1v9a1 1 0 0 1 1-1h4z",
  stop: "M4 4h8v8H4z",
  tag: "M3 3h5l5 5-5 5-5-5zM5.5 5.5h.01",
  talk: "M3 3h10v7H8l-3 3v-3H3z",
  tool: "M10 3a3 3 0 0 0-3.5 4L3 10.5 5.5 13 9 9.5A3 3 0 0 0 13 6l-2 2-2-.5L8.500 5.500z",
  warn: "M8 2.5l6 10.5H2zM8 6.500v3M8 11.200h.01",
};

export const icon = (name) =>
  svg("svg", { class: "icon", viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: PATHS[name] ?? PATHS.pulse }));
