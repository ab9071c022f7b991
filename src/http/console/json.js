// JSON whose numbers stay what they are: those that JavaScript's own cannot hold, such as integers above 2^53, keep their digits.
// Browsers that read and write such numbers themselves are too new to count on, so they travel as marked strings.

/** Stands in front of a number that is read or written as a string; no text can have it in it. */
const MARK = `${crypto.getRandomValues(new Uint32Array(4)).join("-")}:`;
const MARKED = new RegExp(`"${MARK}([^"]*)"`, "g");
/** A number that may be too long: of 16 digits, or with a large exponent. */
const LONG = "-?\\d(?:[\\d.]{15}|[\\d.]*e[+-]?\\d{3})[\\d.e+-]*";
const HAS_LONG = new RegExp(`(?:^|[\\s:,[])${LONG}`, "i");
/** What ends or begins a string, what does not, and such numbers. */
const TOKEN = new RegExp(`"|\\\\.|${LONG}`, "gi");

/** A number by its digits. It counts as the nearest number that there is. */
export class Exact {
  constructor(digits) {
    this.digits = digits;
  }

  valueOf() {
    return Number(this.digits);
  }

  toString() {
    return this.digits;
  }

  toJSON() {
    return MARK + this.digits;
  }
}

/** Digits and the power of ten of the last one: the same for each way to write a number. */
function decimal(text) {
  const [, whole, fraction = "", power = 0] = /^-?(\d+)(?:\.(\d+))?(?:e(.+))?$/i.exec(text);
  const digits = `${whole}${fraction}`.replace(/^0+/, "");
  const kept = digits.replace(/0+$/, "");
  return kept && `${kept}e${Number(power) - fraction.length + digits.length - kept.length}`;
}

const isExactNumber = (text) => Number.isFinite(Number(text)) && decimal(String(Number(text))) === decimal(text);

/** The value of a JSON text. */
export function parse(text) {
  const value = JSON.parse(text);
  if (!HAS_LONG.test(text)) return value;
  let isInString = false;
  const marked = text.replace(TOKEN, (token) => {
    if (token === '"') isInString = !isInString;
    return isInString || /^["\\]/.test(token) || isExactNumber(token) ? token : `"${MARK}${token}"`;
  });
  return JSON.parse(marked, (_, part) => (typeof part === "string" && part.startsWith(MARK) ? new Exact(part.slice(MARK.length)) : part));
}

/** The JSON text of a value. */
export const stringify = (value, space) => JSON.stringify(value, null, space)?.replace(MARKED, "$1");

/** The value of what a field for numbers holds, where `.5` and `007` are numbers too. */
export const number = (text) => parse(text.replace(/^(-?)0+(?=\d)/, "$1").replace(/^(-?)\./, (_, sign) => `${sign}0.`));

/** A value with the names of its objects in order. */
function ordered(value) {
  if (Array.isArray(value)) return value.map(ordered);
  if (typeof value !== "object" || value === null || value instanceof Exact) return value;
  return Object.fromEntries(Object.keys(value).sort().map((name) => [name, ordered(value[name])]));
}

/** Whether two values are the same JSON. */
export const same = (a, b) => stringify(ordered(a)) === stringify(ordered(b));
