// Tokens and cost of each model call as bars, their sum as a line below the limit, how full the context window was, and
// where the conversation was made smaller. Many calls share a bar, so that the drawing stays small.

import { el, svg } from "./dom.js";
import { brief, count, money, plural } from "./format.js";

const BARS = 160;
const HEIGHT = 100;
/** Fewer bars leave room to the right of them. */
const MIN_SLOTS = 24;

const round = (number) => Number(number.toFixed(2));

/** The mean of what falls on each bar. */
function bars(usage, amount) {
  const size = Math.ceil(usage.length / BARS);
  const means = [];
  for (let at = 0; at < usage.length; at += size) {
    const some = usage.slice(at, at + size);
    means.push({
      first: at + 1, last: at + some.length, compacted: some.some((one) => one.compacted),
      values: amount.map((of) => some.reduce((sum, one) => sum + (of(one) ?? 0), 0) / some.length),
    });
  }
  return means;
}

/** One chart: series are stacked. A level is not summed, and its bars reach for the limit. */
function chart(title, usage, series, limit, say, isLevel = false) {
  const drawn = bars(usage, series.map(({ of }) => of));
  const highest = Math.max(isLevel ? limit : 0, ...drawn.map(({ values }) => values.reduce((a, b) => a + b, 0)), Number.MIN_VALUE);
  const width = Math.max(MIN_SLOTS, drawn.length) * 10;
  const paths = series.map(() => []);
  drawn.forEach(({ values }, index) => {
    let top = HEIGHT;
    values.forEach((value, of) => {
      const height = (value / highest) * (HEIGHT - 14);
      if (height > 0) paths[of].push(`M${index * 10 + 1} ${round(top)}h8v${round(-height)}h-8z`);
      top -= height;
    });
  });
  let sum = 0;
  const sums = usage.map((one) => (sum += series.reduce((all, { of }) => all + (of(one) ?? 0), 0)));
  const ceiling = Math.max(limit ?? 0, sum, Number.MIN_VALUE);
  const y = (value) => round(HEIGHT - (value / ceiling) * (HEIGHT - 6));
  const line = drawn.map(({ last }, index) => `${index ? "L" : "M"}${index * 10 + 5} ${y(sums[last - 1])}`).join("");
  const marks = drawn.map(({ compacted }, index) => (compacted ? `M${index * 10 + 5} 0V${HEIGHT}` : "")).join("");
  const total = isLevel ? series[0].of(usage.at(-1)) : sum;
  const description = `${title}: ${say(total)} in ${plural(usage.length, "model call")}${limit ? `, of ${say(limit)}` : ""}`;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": description },
    series.map(({ tone }, of) => svg("path", { class: tone, d: paths[of].join("") })),
    !isLevel && svg("path", { class: "sum", d: line }), limit && svg("path", { class: "limit", d: `M0 ${isLevel ? 14 : y(limit)}H${width}` }),
    marks && svg("path", { class: "mark", d: marks }));
  const caption = el("p", { class: "meta", "aria-hidden": "true" });
  const rest = () => caption.replaceChildren(
    ...series.map(({ tone, name }) => el("span", { class: `key ${tone}` }, name)), ...(isLevel ? [] : [el("span", { class: "key sum" }, "sum")]),
    ...(limit ? [el("span", { class: "key limit" }, "limit")] : []), ...(marks ? [el("span", { class: "key mark" }, "conversation made smaller")] : []));
  drawing.addEventListener("mousemove", (event) => {
    const box = drawing.getBoundingClientRect();
    const bar = drawn[Math.min(drawn.length - 1, Math.max(0, Math.floor((((event.clientX - box.left) / box.width) * width) / 10)))];
    const which = bar.first === bar.last ? `Model call ${bar.first}` : `Model calls ${bar.first} to ${bar.last}, mean`;
    caption.textContent = `${which}: ${series.map(({ name }, of) => `${say(bar.values[of])} ${name}`).join(", ")}${isLevel ? "" : `; sum ${say(sums[bar.last - 1])}`}`;
  });
  drawing.addEventListener("mouseleave", rest);
  rest();
  return el("figure", { class: "chart" }, el("figcaption", {}, el("strong", {}, title), ` ${say(total)}`, limit ? ` of ${say(limit)}` : ""), drawing, caption);
}

export function usageCharts(usage, limits) {
  if (!usage.length) return [];
  const tokens = chart("Tokens by model call", usage, [
    { name: "in", tone: "in", of: (one) => one.input_tokens - one.cached_input_tokens },
    { name: "from cache", tone: "cached", of: (one) => one.cached_input_tokens },
    { name: "out", tone: "out", of: (one) => one.output_tokens },
  ].filter(({ of }) => usage.some((one) => of(one) > 0)), limits?.max_total_tokens, (value) => (value < 100_000 ? count(Math.round(value)) : brief(value)));
  const hasCost = usage.some((one) => one.cost_usd > 0);
  const cost = hasCost
    && chart("Cost by model call", usage, [{ name: "cost", tone: "out", of: (one) => one.cost_usd }], limits?.max_cost_usd, money);
  return [tokens, cost, contextWindow(usage)].filter(Boolean);
}

/** How full the context window was after each call whose model's window is known. */
function contextWindow(usage) {
  const known = usage.filter(({ window }) => window);
  if (!known.length) return null;
  const { window } = known.at(-1);
  const fill = (one) => (one.input_tokens + one.output_tokens) / one.window * 100;
  const say = (percent) => (percent === 100 ? `${count(window)} tokens` : `${Math.round(percent)} %`);
  return chart("Context window", known, [{ name: "full", tone: "in", of: fill }], 100, say, true);
}
