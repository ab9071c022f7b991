import { readFileSync } from "node:fs";

const DAY = 24 * 60 * 60 * 1000;
const { from, to } = JSON.parse(readFileSync(0, "utf8"));
const [first, last] = [from, to].map((text) => {
  const time = Date.parse(`${text}T00:00:00Z`);
  if (Number.isNaN(time) || new Date(time).toISOString().slice(0, 10) !== text) {
    console.error(`${text} is not a date`);
    process.exit(1);
  }
  return time / DAY;
});
const days = last - first;
const weeks = Math.trunc(days / 7);
const step = Math.sign(days);
let working = weeks * 5;
for (let day = first + weeks * 7; day !== last; day += step) {
  // The first of January 1970 was a Thursday.
  if ((((day + (step < 0 ? -1 : 0) + 4) % 7) + 7) % 7 % 6 !== 0) working += step;
}
console.log(JSON.stringify({ days, working_days: working }));
