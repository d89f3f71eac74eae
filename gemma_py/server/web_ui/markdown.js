// --- Markdown, to elements ---------------------------------------------------------------------------------------------

const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|\*(?=[^\s*])((?:[^*]|\*\*)*?[^\s*])\*(?!\*)|\b_(?=\S)([^_]*?\S)_\b|~~(?=\S)([\s\S]*?\S)~~|!?\[([^\]\n]*)\]\(\s*<?([^\s)>]+)>?(?:[ \t][^)\n]*)?\)|(https?:\/\/[^\s<>"')\]]+)|\\([!-\/:-@[-`{-~])/;

function link(target, children) {
  let url;
  try { url = new URL(target); } catch { return children; }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return children;
  return [make("a", { href: url.href, target: "_blank", rel: "noopener noreferrer" }, ...children)];
}

function inline(text, depth = 0) {
  const made = [];
  while (text) {
    const found = depth < 8 ? INLINE.exec(text) : null;
    if (!found) { made.push(text); break; }
    if (found.index) made.push(text.slice(0, found.index));
    const [all, , code, bold, italic, under, struck, label, target, bare, escaped] = found;
    if (code !== undefined) made.push(make("code", {}, code.replace(/^ (.*) $/s, "$1")));
    else if (bold !== undefined) made.push(make("strong", {}, ...inline(bold, depth + 1)));
    else if (italic !== undefined || under !== undefined) made.push(make("em", {}, ...inline(italic ?? under, depth + 1)));
    else if (struck !== undefined) made.push(make("s", {}, ...inline(struck, depth + 1)));
    else if (label !== undefined) made.push(...link(target, inline(label || target, depth + 1)));
    else if (bare !== undefined) made.push(...link(bare, [bare]));
    else made.push(escaped);
    text = text.slice(found.index + all.length);
  }
  return made;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/, ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/, HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/, TABLE = /^\s*\|?[\s:|-]*-[\s:|-]*$/;

function codeBlock(text) {
  return make("div", { className: "code" }, make("pre", {}, make("code", {}, text)), copyButton("Copy", () => text));
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll("\\|", "|"));
}

function blocks(lines, depth = 0) {
  const made = [];
  let at = 0;
  const take = test => { const from = at; while (at < lines.length && test(lines[at])) at++; return lines.slice(from, at); };
  while (at < lines.length) {
    const line = lines[at];
    let found;
    if (!line.trim()) { at++; continue; }
    if ((found = FENCE.exec(line))) {
      at++;
      const closing = new RegExp(`^ {0,3}${found[1][0]}{${found[1].length},}\\s*$`);
      const body = take(l => !closing.test(l));
      at++;
      made.push(codeBlock(body.join("\n")));
    } else if (RULE.test(line)) { made.push(make("hr")); at++;
    } else if ((found = HEADING.exec(line))) { made.push(make("h" + found[1].length, {}, ...inline(found[2]))); at++;
    } else if (depth < 12 && /^\s*>/.test(line)) {
      made.push(make("blockquote", {}, ...blocks(take(l => /^\s*>/.test(l)).map(l => l.replace(/^\s*> ?/, "")), depth + 1)));
    } else if (depth < 12 && (found = ITEM.exec(line))) { made.push(list(found));
    } else if (line.includes("|") && TABLE.test(lines[at + 1] ?? "") && lines[at + 1].includes("|")) {
      const head = make("tr", {}, ...cells(line).map(cell => make("th", {}, ...inline(cell))));
      at += 2;
      const rows = take(l => l.includes("|")).map(l => make("tr", {}, ...cells(l).map(cell => make("td", {}, ...inline(cell)))));
      made.push(make("div", { className: "table" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))));
    } else {
      const first = at++;
      take(l => l.trim() && !FENCE.test(l) && !HEADING.test(l) && !RULE.test(l) && !ITEM.test(l) && !/^\s*>/.test(l));
      const paragraph = make("p");
      lines.slice(first, at).forEach((l, n) => { if (n) paragraph.append(make("br")); paragraph.append(...inline(l.trim())); });
      made.push(paragraph);
    }
  }
  return made;

  function list(found) {
    const ordered = /\d/.test(found[2]), indent = found[1].length;
    const made = make(ordered ? "ol" : "ul");
    if (ordered) made.start = parseInt(found[2]);
    let item;
    while (at < lines.length && (item = ITEM.exec(lines[at])) && item[1].length >= indent && item[1].length < indent + 2
           && /\d/.test(item[2]) === ordered && !RULE.test(lines[at])) {
      at++;
      const inner = [item[3], ...take(l => !l.trim() || l.search(/\S/) > indent + 1)];
      const strip = indent + 2;
      const content = blocks(inner.map((l, n) => n && !l.slice(0, strip).trim() ? l.slice(strip) : l), depth + 1);
      const lone = content.length && content[0].tagName === "P" ? content.shift() : null;
      made.append(make("li", {}, ...(lone ? lone.childNodes : []), ...content));
    }
    return made;
  }
}

const markdown = text => blocks(text.split(/\r?\n/));

