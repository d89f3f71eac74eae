"use strict";
const $ = id => document.getElementById(id);
const STORE = "gemma_py.conversations", OPTIONS = "gemma_py.options";
const NUMBERS = ["temperature", "top_p", "top_k", "seed", "max_tokens"];
const ICONS = {
  menu: "M4 6h16M4 12h16M4 18h16", plus: "M12 5v14M5 12h14", gear: "M4 7h9M17 7h3M4 17h3M11 17h9M15 5v4M9 15v4",
  up: "M12 19V5M6 11l6-6 6 6", stop: "M7 7h10v10H7z", retry: "M20 11a8 8 0 1 0-2 6M20 4v7h-7", edit: "M4 20h4L19 9l-4-4L4 16z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1", done: "M5 13l4 4L19 7", drop: "M5 7h14M9 7V4h6v3M7 7l1 13h8l1-13",
};

// On a touch screen, Enter begins a new line. The page focuses no text field by itself, because that would open the keyboard.
const touch = matchMedia("(pointer: coarse)");

// --- elements: model output is only inserted as text nodes -------------------------------------------------------------

function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

function iconButton(name, title, action) {
  const button = make("button", { type: "button", title, onclick: action }, icon(name));
  button.setAttribute("aria-label", title);
  return button;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Browsers offer navigator.clipboard only to pages from HTTPS or localhost.
  const area = make("textarea", { value: text, readOnly: true }), focused = document.activeElement;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused.focus();
  if (!copied) throw new Error();
}

function copyButton(title, text) {
  const button = iconButton("copy", title, async () => {
    try { await copy(text()); } catch { return say("The browser does not allow this page to copy text."); }
    button.replaceChildren(icon("done"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

