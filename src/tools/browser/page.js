// What a page shows, as text, and its elements by reference. Runs in a world of its own: the page's scripts see none of
// it. Properties are read by the getters of this world, because a page can name elements like them (`<img name=body>`).
(() => {
  const MAX_TEXT = 60_000, MAX_NODES = 50_000, MAX_LINE = 200, MAX_ADDRESS = 500, MAX_OPTIONS = 50;
  const getter = (type, name) => {
    const { get } = Object.getOwnPropertyDescriptor(type.prototype, name);
    return (object) => get.call(object);
  };
  const method = (type, name) => {
    const call = type.prototype[name];
    return (object, ...rest) => call.apply(object, rest);
  };
  const tagOf = getter(Element, "tagName"), shadowOf = getter(Element, "shadowRoot"), firstOf = getter(Node, "firstChild");
  const nextOf = getter(Node, "nextSibling"), kindOf = getter(Node, "nodeType"), valueOf = getter(Node, "nodeValue");
  const parentOf = getter(Node, "parentNode"), isThere = getter(Node, "isConnected"), innerText = getter(HTMLElement, "innerText");
  const bodyOf = getter(Document, "body"), titleOf = getter(Document, "title"), isEditable = getter(HTMLElement, "isContentEditable");
  const attribute = method(Element, "getAttribute"), boxOf = method(Element, "getBoundingClientRect");
  const isVisible = method(Element, "checkVisibility"), query = method(Document, "querySelector");
  const closest = method(Element, "closest"), assigned = method(HTMLSlotElement, "assignedNodes");
  const HIDDEN = new Set(["SCRIPT", "STYLE", "NOSCRIPT", "TEMPLATE", "HEAD", "SVG", "CANVAS", "OBJECT", "EMBED", "VIDEO", "AUDIO"]);
  const BLOCKS = new Set(["P", "DIV", "SECTION", "ARTICLE", "MAIN", "HEADER", "FOOTER", "NAV", "ASIDE", "UL", "OL", "LI", "TABLE",
    "TR", "FORM", "FIELDSET", "BLOCKQUOTE", "PRE", "DL", "DT", "DD", "FIGURE", "DETAILS", "SUMMARY", "BR", "HR"]);
  const PRESSED = ["submit", "button", "reset", "image"], CHECKED = ["checkbox", "radio"];

  const references = new WeakMap(), elements = new Map();
  let next = 1;
  const reference = (element) => {
    let name = references.get(element);
    if (!name) {
      name = `e${next++}`;
      references.set(element, name);
      elements.set(name, new WeakRef(element));
    }
    return name;
  };

  const short = (text, most = MAX_LINE) => {
    const line = String(text ?? "").slice(0, 20 * most).replace(/\s+/g, " ").trim();
    return line.length > most ? `${line.slice(0, most)}…` : line;
  };
  const textOf = (element) => (element instanceof HTMLElement ? short(innerText(element)) : "");

  /** Numbers of a CSS colour: red, green, blue, opacity. */
  const colour = (text) => {
    const numbers = text.match(/[\d.]+/g)?.map(Number) ?? [];
    return numbers.length < 3 ? null : [numbers[0], numbers[1], numbers[2], numbers[3] ?? 1];
  };
  /** What is behind an element: a colour, or null where that cannot be told. */
  const behind = (element) => {
    for (let at = element; at instanceof Element; at = parentOf(at)) {
      const style = getComputedStyle(at), own = colour(style.backgroundColor);
      if (style.backgroundImage !== "none") return null;
      if (own && own[3] > 0.9) return own;
    }
    return [255, 255, 255, 1];
  };
  /** Whether text in an element can be seen by a person. */
  const isReadable = (element) => {
    const style = getComputedStyle(element), box = boxOf(element);
    if (parseFloat(style.fontSize) < 4 || (style.display !== "contents" && (box.width < 2 || box.height < 2) && style.overflow !== "visible")) return false;
    if (/^(rect\(0|rect\(1px|inset\((50|100)%)/.test(style.clip) || /^inset\((50|100)%/.test(style.clipPath)) return false;
    if (Math.abs(parseFloat(style.textIndent)) > 900) return false;
    const right = box.right + scrollX, bottom = box.bottom + scrollY;
    if (box.width > 0 && (right <= 0 || bottom <= 0 || box.left + scrollX > 20_000)) return false;
    const text = colour(style.color);
    if (!text) return true;
    if (text[3] < 0.1) return false;
    const ground = behind(element);
    return !ground || text.slice(0, 3).some((part, index) => Math.abs(part - ground[index]) > 8);
  };

  const labelsOf = (element) => {
    const id = attribute(element, "id");
    const label = (id && query(document, `label[for="${CSS.escape(id)}"]`)) || closest(element, "label");
    return label ? textOf(label) : "";
  };
  const label = (element) => short(attribute(element, "aria-label") || labelsOf(element) || attribute(element, "placeholder") ||
    attribute(element, "title") || attribute(element, "name"));
  const kindOfControl = (element) => {
    if (element instanceof HTMLAnchorElement) return attribute(element, "href") === null ? null : "link";
    if (element instanceof HTMLButtonElement || attribute(element, "role") === "button") return "button";
    if (element instanceof HTMLSelectElement) return "select";
    if (element instanceof HTMLTextAreaElement) return "textbox";
    if (element instanceof HTMLInputElement) return element.type === "hidden" ? null : element.type;
    if (element instanceof HTMLElement && attribute(element, "contenteditable") !== null && isEditable(element)) return "textbox";
    return null;
  };
  /** A link, a button or a field as a line; null where it is none. */
  const control = (element) => {
    const kind = kindOfControl(element);
    if (!kind) return null;
    const at = `[${reference(element)}]`, off = attribute(element, "disabled") === null ? "" : " (disabled)";
    if (kind === "link") return `${at} link "${textOf(element) || label(element)}" ${short(element.href, MAX_ADDRESS)}`;
    if (kind === "button" && !(element instanceof HTMLInputElement)) return `${at} button "${textOf(element) || label(element)}"${off}`;
    if (kind === "select") {
      const options = [...element.options].slice(0, MAX_OPTIONS).map((option) => `${option.selected ? "*" : ""}${short(option.text, 80)}`);
      return `${at} select "${label(element)}": ${options.join(" | ")}${off}`;
    }
    if (PRESSED.includes(kind)) return `${at} button "${short(element.value) || label(element)}"${off}`;
    if (CHECKED.includes(kind)) return `${at} ${kind} "${label(element)}"${element.checked ? " (checked)" : ""}${off}`;
    if (kind === "file") return `${at} file "${label(element)}" (files cannot be chosen here)`;
    const value = kind === "password" ? "•".repeat(Math.min(element.value.length, 8)) : short(element.value ?? innerText(element));
    return `${at} ${kind} "${label(element)}": "${value}"${off}`;
  };

  const find = (selector) => {
    if (/^e[0-9]+$/.test(selector)) return elements.get(selector)?.deref() ?? null;
    return query(document, selector);
  };
  const located = (selector) => {
    let element;
    try { element = find(selector); } catch { return { wrong: "is neither a reference, such as e12, nor a CSS selector" }; }
    if (!element || !isThere(element)) return { wrong: "means no element of the page; read it again" };
    // Windows of its own are closed: it opens in this one.
    for (const opener of [closest(element, "a"), closest(element, "form")]) if (opener) Element.prototype.removeAttribute.call(opener, "target");
    Element.prototype.scrollIntoView.call(element, { block: "center", inline: "center", behavior: "instant" });
    const box = boxOf(element);
    if (!box.width || !box.height || !isVisible(element, { visibilityProperty: true })) return { wrong: "is not visible" };
    return { element, x: box.x + box.width / 2, y: box.y + box.height / 2 };
  };

  /** The text of the page in order. Without recursion: pages can be nested deeper than a stack. */
  const outline = () => {
    const pieces = [];
    let length = 0, nodes = 0, isWhole = true;
    const add = (piece) => { pieces.push(piece); length += piece.length; };
    const start = bodyOf(document);
    const stack = start ? [{ node: start, readable: true }] : [];
    while (stack.length > 0) {
      const top = stack.pop();
      if (top.after !== undefined) { add(top.after); continue; }
      if (++nodes > MAX_NODES || length > MAX_TEXT) return { pieces, isWhole: false };
      const { node, readable, inList } = top;
      const following = inList ? null : nextOf(node);
      if (following && node !== start) stack.push({ node: following, readable });
      if (kindOf(node) === Node.TEXT_NODE) {
        if (!readable) continue;
        const text = valueOf(node);
        if (text.length > MAX_TEXT) isWhole = false;
        add(text.slice(0, MAX_TEXT).replace(/\s+/g, " "));
        continue;
      }
      if (!(node instanceof Element)) continue;
      const name = tagOf(node).toUpperCase();
      if (HIDDEN.has(name) || !isVisible(node, { opacityProperty: true, visibilityProperty: false })) continue;
      const isClosed = name === "DETAILS" && attribute(node, "open") === null; // but for its summary
      const isShown = !isClosed && getComputedStyle(node).visibility === "visible" && isReadable(node);
      if (isShown) {
        const line = control(node);
        if (line) { add(`\n${line}\n`); continue; }
      }
      if (name === "IFRAME" || name === "FRAME") { if (isShown) add(`\n(frame: ${short(attribute(node, "src"), MAX_ADDRESS)})\n`); continue; }
      if (name === "IMG") { if (isShown && attribute(node, "alt")) add(` (image: ${short(attribute(node, "alt"))}) `); continue; }
      const heading = /^H([1-6])$/.exec(name);
      const isBlock = heading || BLOCKS.has(name);
      if (isBlock) add("\n");
      if (isShown && heading) add(`${"#".repeat(Number(heading[1]))} `);
      if (isShown && name === "LI") add("- ");
      if (isBlock) stack.push({ after: "\n" });
      else if (name === "TD" || name === "TH") stack.push({ after: " | " });
      const slotted = node instanceof HTMLSlotElement ? assigned(node, { flatten: true }) : [];
      if (slotted.length > 0) {
        for (const child of slotted.slice(0, MAX_NODES).reverse()) stack.push({ node: child, readable: isShown, inList: true });
      } else {
        const first = firstOf(shadowOf(node) ?? node);
        if (first) stack.push({ node: first, readable: isShown });
      }
    }
    return { pieces, isWhole };
  };

  globalThis.toolloop = {
    read(first) {
      next = Math.max(next, first);
      const { pieces, isWhole } = outline();
      const lines = pieces.join("").split("\n").map((line) => line.trim()).filter(Boolean);
      const text = lines.join("\n");
      return { title: short(titleOf(document)), text: text.slice(0, MAX_TEXT), isWhole: isWhole && text.length <= MAX_TEXT, next };
    },
    point(selector) {
      const { wrong, x, y } = located(selector);
      return { wrong, x, y };
    },
    focus(selector, text) {
      const { wrong, element } = located(selector);
      if (wrong) return { wrong };
      if (attribute(element, "disabled") !== null || attribute(element, "readonly") !== null) return { wrong: "cannot be changed" };
      if (element instanceof HTMLSelectElement) {
        const option = [...element.options].find((option) => [option.text.trim(), option.value].includes(text.trim()));
        if (!option) return { wrong: "has no such option" };
        element.value = option.value;
        for (const name of ["input", "change"]) element.dispatchEvent(new Event(name, { bubbles: true }));
        return { isDone: true };
      }
      const kind = kindOfControl(element);
      if (!kind || ["link", "button", "file", "color", "range", ...PRESSED, ...CHECKED].includes(kind)) return { wrong: "takes no text" };
      HTMLElement.prototype.focus.call(element);
      if (element instanceof HTMLInputElement || element instanceof HTMLTextAreaElement) element.select();
      else getSelection().selectAllChildren(element);
      return { isDone: false };
    },
  };
})();
