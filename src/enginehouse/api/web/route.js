// The address of what is shown: `#/page/part…?filter=…`. Reload, share and back work because nothing of it is kept elsewhere.

/** `{page, parts, query}` of the present address. */
export function current() {
  const text = location.hash.replace(/^#\/?/, "");
  const [path, search = ""] = text.split("?");
  const [page, ...parts] = path.split("/").map(decoded);
  return { page: page || "fleet", parts, query: new URLSearchParams(search), text: path };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export const to = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;

export function go(address) {
  location.hash = address.replace(/^#/, "");
}

/** Changes one filter in the address, without a step in the history. */
export function setQuery(name, value) {
  const { text, query } = current();
  if (value) query.set(name, value);
  else query.delete(name);
  const search = query.toString();
  history.replaceState(null, "", `#/${text}${search ? `?${search}` : ""}`);
}
