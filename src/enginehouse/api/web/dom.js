// The one place that touches elements. Views return plain descriptions (`h`), and `render` changes the document until it
// shows them: existing elements stay, so focus, selection and open menus survive every update. Text is always text; no
// markup is ever parsed. An unchanged description (the same object, see `memo`) costs nothing.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "rect", "line", "polyline", "polygon", "circle", "g", "text", "title"]);
const SPOKEN = new Set(["title", "aria-label", "aria-valuetext", "data-name", "alt"]);
const PROPERTIES = new Set(["value", "checked", "disabled", "selected", "open", "indeterminate", "scrollTop"]);

/** Describes an element. `props`: attributes, `on…` listeners, `key`, `class` (text or list), `style` (object), `ref`. */
export function h(tag, props, ...children) {
  return { tag, props: props || {}, key: props ? props.key : undefined, children: flat(children, []), element: null };
}

function flat(children, into) {
  for (const child of children) {
    if (child === null || child === undefined || child === false || child === true) continue;
    if (Array.isArray(child)) flat(child, into);
    else if (typeof child === "object") into.push(child);
    else into.push({ tag: "", text: plain(String(child)), key: undefined, element: null });
  }
  return into;
}

// Sequences of terminals go; other control characters and marks that turn the direction of text are shown as unknown.
const SEQUENCES = /\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\))/g;
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** Text from elsewhere as it may be shown: it cannot reorder or hide what stands beside it. */
export function plain(text) {
  CONTROLS.lastIndex = 0;
  return CONTROLS.test(text) ? text.replace(SEQUENCES, "").replace(CONTROLS, "\ufffd") : text;
}

const memos = new Map();

/** Returns the description made last under this name while every dependency is the same. */
export function memo(name, dependencies, make) {
  const known = memos.get(name);
  if (
    known &&
    known.dependencies.length === dependencies.length &&
    known.dependencies.every((one, at) => one === dependencies[at])
  ) {
    known.used = true;
    return known.made;
  }
  const made = make();
  memos.set(name, { dependencies, made, used: true });
  return made;
}

/** Drops what the last drawing did not use. */
export function forgetUnused() {
  for (const [name, known] of memos) {
    if (known.used) known.used = false;
    else memos.delete(name);
  }
}

/** Makes the children of `parent` show `description` (one or a list). */
export function render(parent, description) {
  update(parent, parent.shownChildren || [], flat([description], []), parent.namespaceURI === SVG);
}

function update(parent, before, after, isSvg) {
  const keyed = new Map();
  const unkeyed = [];
  for (const old of before) {
    if (old.key === undefined) unkeyed.push(old);
    else keyed.set(old.key, old);
  }
  let next = 0;
  const shown = [];
  for (const wanted of after) {
    let old;
    if (wanted.key !== undefined) {
      old = keyed.get(wanted.key);
      if (old && old.tag === wanted.tag) keyed.delete(wanted.key);
      else old = undefined;
    } else if (next < unkeyed.length && unkeyed[next].tag === wanted.tag) {
      old = unkeyed[next++];
    }
    shown.push(old ? patch(old, wanted, isSvg) : create(wanted, isSvg));
  }
  for (const old of keyed.values()) remove(old);
  while (next < unkeyed.length) remove(unkeyed[next++]);
  // Only what is not in its place is moved: a moved element loses its focus.
  let place = parent.firstChild;
  for (const one of shown) {
    if (one.element === place) place = place.nextSibling;
    else parent.insertBefore(one.element, place);
  }
  parent.shownChildren = shown;
}

function remove(old) {
  if (old.props && old.props.ref) old.props.ref(null);
  old.element.remove();
}

function create(wanted, isSvg) {
  if (wanted.tag === "") {
    wanted.element = document.createTextNode(wanted.text);
    return wanted;
  }
  const inSvg = isSvg || wanted.tag === "svg";
  const element =
    inSvg && SVG_TAGS.has(wanted.tag) ? document.createElementNS(SVG, wanted.tag) : document.createElement(wanted.tag);
  wanted.element = element;
  update(element, [], wanted.children, inSvg);
  for (const name in wanted.props) set(element, name, undefined, wanted.props[name]);
  if (wanted.props.ref) wanted.props.ref(element);
  return wanted;
}

function patch(old, wanted, isSvg) {
  if (old === wanted) return old;
  const element = old.element;
  wanted.element = element;
  if (wanted.tag === "") {
    if (old.text !== wanted.text) element.data = wanted.text;
    return wanted;
  }
  update(element, element.shownChildren || [], wanted.children, isSvg || wanted.tag === "svg");
  for (const name in old.props) if (!(name in wanted.props)) set(element, name, old.props[name], undefined);
  for (const name in wanted.props) {
    // A person may have typed since the last drawing, so the value of a field is compared with the field itself.
    if (name === "value" || old.props[name] !== wanted.props[name])
      set(element, name, old.props[name], wanted.props[name]);
  }
  return wanted;
}

function set(element, name, before, value) {
  if (name === "key" || name === "ref") return;
  if (name.startsWith("on")) {
    element[name] = value || null;
  } else if (name === "class") {
    const text = Array.isArray(value) ? value.filter(Boolean).join(" ") : value || "";
    if (element.getAttribute("class") !== text) element.setAttribute("class", text);
  } else if (name === "style") {
    for (const key in before || {}) if (!value || !(key in value)) element.style.removeProperty(key);
    for (const key in value || {})
      if (!before || before[key] !== value[key]) element.style.setProperty(key, value[key]);
  } else if (PROPERTIES.has(name)) {
    // A value is set only where it differs, so a cursor stays in its place.
    const wanted = name === "value" ? String(value ?? "") : (value ?? false);
    if (element[name] !== wanted) element[name] = wanted;
  } else if (value === undefined || value === null || value === false) {
    element.removeAttribute(name);
  } else {
    element.setAttribute(name, value === true ? "" : SPOKEN.has(name) ? plain(String(value)) : String(value));
  }
}

/** Says something to people who listen to the page: ends and failures, not every percent. */
export function announce(text) {
  const place = document.getElementById("announcements");
  if (place) place.textContent = text;
}
