// A small part of Markdown as elements: paragraphs, headings, lists, quotes, code, emphasis, links with http(s) only.
// It builds descriptions for `dom.js`, so whatever a model writes stays text. Unfinished text (a stream) is fine.

import { h } from "./dom.js";

const LIST = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const DEEPEST = 8; // emphasis in emphasis; nothing people write is deeper

export function markdown(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = line.match(/^\s*(```+|~~~+)\s*([\w+-]*)/);
    const heading = line.match(/^(#{1,6})\s+(.*)$/);
    if (fence) {
      let end = at + 1;
      while (end < lines.length && !lines[end].trim().startsWith(fence[1])) end += 1;
      const code = lines.slice(at + 1, end).join("\n");
      found.push(
        h("pre", { class: "code", "data-language": fence[2] || undefined, tabindex: "0" }, h("code", null, code)),
      );
      at = end + 1;
    } else if (heading) {
      found.push(h("p", { class: `heading level${heading[1].length}` }, inline(heading[2])));
      at += 1;
    } else if (LIST.test(line)) {
      const items = [];
      while (at < lines.length && (LIST.test(lines[at]) || (lines[at].startsWith("  ") && lines[at].trim()))) {
        const item = lines[at].match(LIST);
        if (item)
          items.push({
            depth: Math.min(4, Math.floor(item[1].length / 2)),
            isNumbered: /\d/.test(item[2]),
            start: parseInt(item[2], 10),
            text: item[3],
          });
        else items[items.length - 1].text += `\n${lines[at].trim()}`;
        at += 1;
      }
      found.push(
        h(
          items[0].isNumbered ? "ol" : "ul",
          { class: "list", start: items[0].isNumbered ? items[0].start : undefined },
          items.map((item) => h("li", { class: `depth${item.depth}` }, inline(item.text))),
        ),
      );
    } else if (/^\s*>/.test(line)) {
      const quoted = [];
      while (at < lines.length && /^\s*>/.test(lines[at])) quoted.push(lines[at++].replace(/^\s*>\s?/, ""));
      found.push(h("blockquote", null, inline(quoted.join("\n"))));
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      found.push(h("hr"));
      at += 1;
    } else if (line.trim() === "") {
      at += 1;
    } else {
      const paragraph = [];
      while (
        at < lines.length &&
        lines[at].trim() &&
        !/^(\s*(```|~~~|>)|#{1,6}\s)/.test(lines[at]) &&
        !(paragraph.length && LIST.test(lines[at]))
      )
        paragraph.push(lines[at++]);
      if (!paragraph.length) paragraph.push(lines[at++]);
      found.push(h("p", null, inline(paragraph.join("\n"))));
    }
  }
  return found;
}

const INLINE =
  /`([^`]+)`|\*\*([^*]+?)\*\*|\*([^*\s][^*]*?)\*|\b_([^_\s][^_]*?)_\b|\[([^[\]]{1,500})\]\(([^\s)]{1,2000})\)/;

function inline(text, depth = 0) {
  const found = [];
  let rest = text;
  while (rest) {
    const match = depth < DEEPEST ? rest.match(INLINE) : null;
    if (!match) break;
    if (match.index) found.push(...broken(rest.slice(0, match.index)));
    if (match[1] !== undefined) found.push(h("code", null, match[1]));
    else if (match[2] !== undefined) found.push(h("strong", null, inline(match[2], depth + 1)));
    else if (match[3] !== undefined || match[4] !== undefined)
      found.push(h("em", null, inline(match[3] ?? match[4], depth + 1)));
    else found.push(link(match[5], match[6]));
    rest = rest.slice(match.index + match[0].length);
  }
  return rest ? [...found, ...broken(rest)] : found;
}

/** Only http and https; anything else stays text, with its address shown. */
function link(text, address) {
  const isSafe = /^https?:\/\/[^\s]+$/i.test(address);
  return isSafe
    ? h("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, text)
    : `${text} (${address})`;
}

function broken(text) {
  return text.split("\n").flatMap((line, at) => (at ? [h("br"), line] : [line]));
}
