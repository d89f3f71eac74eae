// --- storage in the browser --------------------------------------------------------------------------------------------

function read(name, otherwise) {
  try { return JSON.parse(localStorage.getItem(name)) ?? otherwise; } catch { return otherwise; }
}

function keep(name, value) {
  try { localStorage.setItem(name, JSON.stringify(value)); }
  catch { say("The browser's storage is full: delete some conversations."); }
}

let conversations = read(STORE, []), options = read(OPTIONS, {});
let current = conversations[0]?.id ?? null, running = null, model = null;

const find = id => conversations.find(c => c.id === id);
const save = () => keep(STORE, conversations);
const say = text => { $("note").textContent = text; };
const headers = () => ({ "Content-Type": "application/json", ...(options.key ? { Authorization: `Bearer ${options.key}` } : {}) });

// --- rendering ---------------------------------------------------------------------------------------------------------

function show() {
  document.documentElement.style.colorScheme = options.theme || "light dark";
  const conversation = find(current);
  $("title").textContent = conversation?.title ?? "New conversation";
  $("list").replaceChildren(...conversations.map(c => {
    const open = make("button", { type: "button", className: "open", textContent: c.title, onclick: () => choose(c.id) });
    const drop = iconButton("drop", "Delete this conversation", () => {
      if (!confirm(`Delete “${c.title}”?`)) return;
      if (running?.conversation === c) running.controller.abort();
      conversations = conversations.filter(other => other !== c);
      if (current === c.id) current = conversations[0]?.id ?? null;
      save(); show(); enterList();
    });
    drop.classList.add("drop");
    const row = make("li", { className: c.id === current ? "current" : "" }, open, drop);
    if (c.id === current) open.setAttribute("aria-current", "true");
    return row;
  }));
  const turns = (conversation?.messages ?? []).map((message, at) => turn(conversation, message, at));
  if (!turns.length) turns.push(make("p", { id: "empty", textContent: "Conversations are stored in this browser, not on the server." }));
  $("log").replaceChildren(...turns);
  $("log").scrollTop = $("log").scrollHeight;
  showState();
}

function showState() {
  const [shown, gone] = running ? [$("stop"), $("send")] : [$("send"), $("stop")];
  const lost = [gone, document.body].includes(document.activeElement);
  shown.classList.remove("hidden");
  gone.classList.add("hidden");
  if (lost) rest();
}

// Focuses the input field. On a touch screen, focuses the conversation instead, because the input field would open the keyboard.
function rest() { (touch.matches ? $("log") : $("input")).focus(); }

function enterList() { ($("list").querySelector("[aria-current]") ?? $("new")).focus(); }

function setMenu(open) {
  document.body.classList.toggle("menu", open);
  $("menu").setAttribute("aria-expanded", String(open));
}

function turn(conversation, message, at) {
  const text = make("div", { className: "text" });
  const tools = make("div", { className: "tools" });
  const element = make("article", { className: `turn ${message.role}` }, text, tools);
  element.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
  if (message.role === "user") {
    text.textContent = message.content;
    tools.append(iconButton("edit", "Edit and send again", () => edit(conversation, at, element)), copyButton("Copy", () => message.content));
    return element;
  }
  const live = running?.message === message;
  text.append(...thoughts(message, live), ...markdown(message.content));
  if (live) {
    running.element = text; running.tools = tools;
    element.setAttribute("aria-busy", "true");
    if (!message.content && !message.thoughts) text.append(make("span", { className: "reading", textContent: running.reading || "…" }));
    return element;
  }
  if (message.error) element.insertBefore(make("p", { className: "failed", textContent: message.error }), tools);
  tools.append(copyButton("Copy", () => message.content));
  if (at === conversation.messages.length - 1) tools.append(iconButton("retry", "Answer again", () => retry(conversation)));
  tools.append(make("span", { className: "stats", textContent: [message.stats, message.stopped ? "stopped" : "", message.cut ? "cut at the token limit" : ""].filter(Boolean).join(" · ") }));
  return element;
}

// The model's thoughts before an answer are shown and stored, but never sent back to the server.
function thoughts(message, open) {
  if (!message.thoughts) return [];
  return [make("details", { className: "thoughts", open }, make("summary", { textContent: "Thoughts" }), make("p", { textContent: message.thoughts }))];
}

function choose(id) {
  current = id;
  setMenu(false);
  show();
  rest();
}

function edit(conversation, at, element) {
  if (running) return say(BUSY);
  const area = make("textarea", { value: conversation.messages[at].content, rows: 1 });
  area.setAttribute("aria-label", "Edit the message");
  const done = make("button", { type: "button", className: "plain", textContent: "Send" });
  const before = [...element.children];
  const leave = () => { element.replaceChildren(...before); element.querySelector("button").focus(); };
  const back = make("button", { type: "button", className: "plain", textContent: "Cancel", onclick: leave });
  const send = () => {
    if (!area.value.trim()) return;
    conversation.messages.length = at;
    ask(conversation, area.value);
  };
  done.onclick = send;
  area.onkeydown = event => {
    if (event.key === "Escape") { event.stopPropagation(); leave(); }
    if (sends(event)) { event.preventDefault(); send(); }
  };
  element.replaceChildren(make("div", { className: "edit" }, make("div", { className: "box" }, area), make("div", { className: "tools" }, done, back)));
  area.focus();
}

// --- requests ----------------------------------------------------------------------------------------------------------

function ask(conversation, content) {
  conversation.messages.push({ role: "user", content });
  if (conversation.messages.length === 1) conversation.title = content.trim().split("\n")[0].slice(0, 80);
  answer(conversation);
}

function retry(conversation) {
  if (running) return say(BUSY);
  conversation.messages.pop();
  answer(conversation);
}

async function answer(conversation) {
  const message = { role: "assistant", content: "" };
  const asked = conversation.messages.map(({ role, content }) => ({ role, content }));
  if (options.system) asked.unshift({ role: "system", content: options.system });
  const body = { messages: asked, stream: true, stream_options: { include_usage: true }, return_progress: true };
  for (const name of [...NUMBERS, "reasoning_effort"]) if (options[name] !== undefined) body[name] = options[name];
  conversation.messages.push(message);
  conversations = [conversation, ...conversations.filter(other => other !== conversation)];
  running = { conversation, message, controller: new AbortController(), saved: performance.now() };
  const mine = running;
  say("");
  save(); show();
  try {
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal: mine.controller.signal });
    if (response.status === 401) openSettings("key");
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const piece of events(response.body)) take(mine, piece);
  } catch (error) {
    if (error.name === "AbortError") message.stopped = true;
    else message.error = error instanceof TypeError ? "The server cannot be reached." : error.message;
  }
  if (mine.first && mine.tokens > 1) {
    const rate = (mine.tokens - 1) * 1000 / (mine.last - mine.first);
    if (Number.isFinite(rate)) message.stats = `${mine.usage ?? mine.tokens} tokens · ${rate.toFixed(1)} tok/s`;
  }
  running = null;
  save();
  if (current === conversation.id) keepPlace(() => $("log").lastChild.replaceWith(turn(conversation, message, conversation.messages.length - 1)));
  showState();
  say(message.error ? "" : message.stopped ? "Stopped." : "Answered.");
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection ended before the answer was complete.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      if (part === "data: [DONE]") return;
      yield JSON.parse(part.slice(6));
    }
  }
}

function take(run, piece) {
  if (piece.error) throw new Error(piece.error.message);
  const { message } = run;
  if (piece.usage) run.usage = piece.usage.completion_tokens;
  if (piece.prompt_progress) {
    const { processed, total } = piece.prompt_progress;
    run.reading = processed < total ? `reading ${processed.toLocaleString()} of ${total.toLocaleString()} tokens` : "…";
  }
  for (const choice of piece.choices ?? []) {
    const { content, reasoning_content } = choice.delta ?? {};
    if (content || reasoning_content) {
      run.last = performance.now();
      run.first ??= run.last;
      run.tokens = (run.tokens ?? 0) + 1;
      message.content += content ?? "";
      if (reasoning_content) message.thoughts = (message.thoughts ?? "") + reasoning_content;
    }
    if (choice.finish_reason === "length") message.cut = true;
  }
  if (performance.now() - run.saved > 1000) { run.saved = performance.now(); save(); }
  if (!run.drawing) { run.drawing = true; requestAnimationFrame(() => draw(run)); }
}

function draw(run) {
  run.drawing = false;
  if (running !== run || current !== run.conversation.id || !run.element) return;
  keepPlace(() => {
    const { message, element } = run;
    const open = element.querySelector("details")?.open ?? true;
    const waits = message.content || message.thoughts ? [] : [make("span", { className: "reading", textContent: run.reading || "…" })];
    element.replaceChildren(...thoughts(message, open), ...markdown(message.content), ...waits);
    if (run.tokens > 2) run.tools.replaceChildren(make("span", { className: "stats", textContent: `${((run.tokens - 1) * 1000 / (run.last - run.first)).toFixed(1)} tok/s` }));
  });
}

// Makes a change and scrolls to the end of the conversation, unless the reader has scrolled up.
function keepPlace(change) {
  const log = $("log"), top = log.scrollTop, follow = log.scrollHeight - top - log.clientHeight < 60;
  change();
  log.scrollTop = follow ? log.scrollHeight : top;
}

// Scrolls to the end again when the on-screen keyboard or a longer input field makes the conversation's area smaller.
let room = 0;
new ResizeObserver(() => {
  const log = $("log");
  if (log.scrollHeight - log.scrollTop - room < 60) log.scrollTop = log.scrollHeight;
  room = log.clientHeight;
}).observe($("log"));

// --- settings ----------------------------------------------------------------------------------------------------------

function openSettings(name) {
  const fields = $("options").elements;
  for (const field of fields) if (field.name) field.value = options[field.name] ?? "";
  if (!$("dialog").open) $("dialog").showModal();
  (name ? fields[name] : touch.matches ? $("dialog-title") : fields.system).focus();
}

$("dialog").onclose = () => {
  if ($("dialog").returnValue !== "save") return;
  $("dialog").returnValue = "";
  options = {};
  for (const field of $("options").elements) {
    const value = field.name && field.value.trim();
    if (value) options[field.name] = NUMBERS.includes(field.name) ? Number(value) : value;
  }
  keep(OPTIONS, options);
  show();
  describe();
};

async function describe() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    const told = await response.json();
    if (!response.ok) { if (response.status === 401) openSettings("key"); return say(told.error.message); }
    model = told.data[0];
    $("thinking").classList.toggle("hidden", !model.thinking);
    $("model").textContent = `${model.id}, context of ${model.context_length.toLocaleString()} tokens`;
    say(model.note ? model.note[0].toUpperCase() + model.note.slice(1) + "." : "");
  } catch { say("The server cannot be reached."); }
}

// --- controls ----------------------------------------------------------------------------------------------------------

const BUSY = "An answer is being generated: stop it first.";
const sends = event => event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch.matches;

function fresh() { choose(null); }

$("composer").onsubmit = event => {
  event.preventDefault();
  const content = $("input").value;
  if (!content.trim()) return;
  if (running) return say(BUSY);
  $("input").value = "";
  let conversation = find(current);
  if (!conversation) {
    conversation = { id: crypto.randomUUID?.() ?? String(Date.now() + Math.random()), title: "", messages: [] };
    current = conversation.id;
  }
  ask(conversation, content);
};
$("input").onkeydown = event => {
  if (sends(event)) { event.preventDefault(); $("composer").requestSubmit(); }
};
$("stop").onclick = () => running?.controller.abort();
$("new").onclick = fresh;
$("settings").onclick = () => openSettings();
$("cancel").onclick = () => $("dialog").close();
$("menu").onclick = () => { setMenu(true); enterList(); };
$("veil").onclick = () => setMenu(false);
$("side").addEventListener("focusout", event => {
  if (event.relatedTarget && !$("side").contains(event.relatedTarget)) setMenu(false);
});
document.onkeydown = event => {
  if (event.key === "Escape" && document.body.classList.contains("menu")) { setMenu(false); $("menu").focus(); }
  else if (event.key === "Escape" && running && !$("dialog").open) running.controller.abort();
  if (event.ctrlKey && event.shiftKey && event.key.toLowerCase() === "o") { event.preventDefault(); fresh(); }
  if (event.ctrlKey && event.key === ",") { event.preventDefault(); openSettings(); }
};
window.onstorage = event => {
  if (running || (event.key !== STORE && event.key !== OPTIONS)) return;
  conversations = read(STORE, []); options = read(OPTIONS, {});
  show();
};
window.onpagehide = () => { if (running) { running.message.stopped = true; save(); } };

for (const [id, name] of [["new", "plus"], ["settings", "gear"], ["menu", "menu"], ["send", "up"], ["stop", "stop"]]) {
  $(id).append(icon(name));
  $(id).setAttribute("aria-label", $(id).title.replace(/ \(.*/, ""));
}
show();
describe();
