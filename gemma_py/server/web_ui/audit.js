// --- the page at /audit: one card for each receipt, and a span for each token of its answer ------------------------------

const STAGES = ["signature", "structure", "model", "text", "sampling", "logits", "choice", "finish", "kv"];
const FROM_LOGITS = STAGES.indexOf("logits");
const PREFIXES = { "other model": "another model: ", "unreadable": "cannot be read: ", "unknown": "cannot tell: " };
let working = false;

function say(text) { $("note").textContent = text; }

class Card {
  constructor(begun) {
    this.checked = 0;
    this.spans = begun.pieces.map((piece, index) => make("span", {
      textContent: piece || "\u00b7", title: `token ${index}, position ${begun.prompt_tokens + index}`,
    }));
    this.stages = STAGES.map(name => make("li", { textContent: name }));
    this.verdict = make("p", { className: "verdict", textContent: "checking" });
    const tokens = make("div", { className: "tokens", tabIndex: 0 }, ...this.spans);
    tokens.setAttribute("aria-label", "Tokens of the answer");
    this.element = make("article", { className: "receipt" }, make("h2", { textContent: begun.name }), this.verdict,
      make("ul", { className: "stages" }, ...this.stages), tokens);
    this.signature = begun.signature;
    $("results").append(this.element);
  }

  hold(count) {
    for (const span of this.spans.slice(this.checked, this.checked + count)) span.classList.add("held");
    this.checked += count;
    this.verdict.textContent = `checking: ${this.checked} of ${this.spans.length} tokens`;
  }

  end(verdict) {
    this.element.classList.add(verdict.verdict.split(" ")[0]);
    const at = verdict.stage === null ? STAGES.length : STAGES.indexOf(verdict.stage);
    this.stages.forEach((stage, number) => {
      const signed = STAGES[number] !== "signature";
      // The stages from FROM_LOGITS on are checked for each token. If one token differs, none of these stages is marked as held.
      if (number < Math.min(at, verdict.stage === null ? at : FROM_LOGITS) && signed) stage.classList.add("held");
      if (number === at) stage.classList.add("broke");
    });
    this.stages[0].textContent = this.signature === "none" ? "not signed" : "signature not checked";
    this.verdict.textContent = verdict.verdict === "equal"
      ? `equal: ${this.spans.length} tokens after a prompt of ${verdict.prompt_tokens}`
      : (PREFIXES[verdict.verdict] || "") + verdict.message;
    if (verdict.token !== null && this.spans[verdict.token]) {
      this.spans[verdict.token].classList.add("broke");
      this.spans[verdict.token].scrollIntoView({ block: "nearest" });
    }
  }
}

async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part);
  }
}

async function audit(file) {
  const key = document.querySelector("#key input").value;
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch("/v1/audit", { method: "POST", headers, body: file });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const cards = [];
  for await (const event of lines(response)) {
    if (event.type === "receipt") cards.push(new Card({ ...event, name: `${file.name}${event.name}` }));
    else if (event.type === "tokens") cards[event.receipt].hold(event.count);
    else if (event.type === "verdict") cards[event.receipt].end(event);
    else throw new Error(event.message);
  }
}

async function auditAll(files) {
  if (working) return say("Wait until the audit of the last file has ended.");
  working = true;
  $("results").replaceChildren();
  try {
    for (const file of files) {
      say(`checking ${file.name}`);
      await audit(file);
    }
    say("done");
  } catch (error) {
    say(error.message);
  } finally {
    working = false;
    $("file").value = "";
  }
}

$("access").addEventListener("submit", event => event.preventDefault());
$("file").addEventListener("change", () => auditAll([...$("file").files]));
addEventListener("dragover", event => { event.preventDefault(); $("drop").classList.add("over"); });
addEventListener("dragleave", () => $("drop").classList.remove("over"));
addEventListener("drop", event => {
  event.preventDefault();
  $("drop").classList.remove("over");
  auditAll([...event.dataTransfer.files]);
});
