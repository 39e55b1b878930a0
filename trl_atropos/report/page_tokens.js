// One rollout's tokens: the prompt, then every stretch that was sampled or put in by the environment, each in its place.

const UNLIKELY = 5, APART = 0.5; // nats at which the colour is full
const AT_ONCE = 6000; // tokens
const MODES = {
  advantage: "Advantage",
  logprob: "Sampler's log-probability",
  gap: "Trainer–sampler gap",
  none: "None",
};

// A rollout as `pack` in page.py wrote it, with the text of its tokens.
function unfold(packed, prompts, texts) {
  const [prompt, completion, stretches, logprobs, advantages, messages, gaps, branches] = packed;
  const tokens = prompts[prompt].map((id) => ({ id, part: "prompt" }));
  const parts = [{ kind: "prompt", from: 0, to: tokens.length }];
  let at = 0;
  stretches.forEach((length, i) => {
    if (!length) return;
    const kind = i % 2 ? "context" : "sampled";
    const branch = branches.findIndex(([begin]) => begin === at) + 1;
    parts.push({ kind, from: tokens.length, to: tokens.length + length, origin: branch ? originOf(branch, branches) : null });
    for (const end = at + length; at < end; at++) {
      tokens.push({ id: completion[at], part: kind, logprob: logprobs[at], gap: gaps ? gaps[at] : null,
        advantage: advantages ? advantages[at] : undefined });
    }
  });
  for (const token of tokens) token.text = token.shown = texts[token.id];
  for (const part of parts) joinBytes(tokens.slice(part.from, part.to));
  return { tokens, parts, messages, own: advantages !== null };
}

// Where a branch comes from. Branch 1 is the first, and 0 is the first path.
function originOf(number, branches) {
  const [, parent, shared] = branches[number - 1];
  if (parent < 0) return `Branch ${number}: a context of its own`;
  return `Branch ${number}: leaves ${parent ? `branch ${parent}` : "the first path"} after ${shared} token${shared === 1 ? "" : "s"}`;
}

// The text of tokens, or their numbers where there is no tokenizer.
function plain(ids, texts) {
  const bytes = (run) => Uint8Array.from(run.match(/[0-9A-F]{2}(?=>)/g), (byte) => parseInt(byte, 16));
  return ids.map((id) => texts[id] ?? `${id} `).join("").replace(/(<0x[0-9A-F]{2}>)+/g, (run) => new TextDecoder().decode(bytes(run)));
}

// Where the bytes of a character are tokens of their own, the first one shows it, and the others nothing.
function joinBytes(tokens) {
  const owners = [], bytes = [];
  const flush = () => {
    for (const owner of owners) owner.shown = "";
    for (let at = 0; at < bytes.length;) {
      const length = bytes[at] >= 0xf0 ? 4 : bytes[at] >= 0xe0 ? 3 : bytes[at] >= 0xc0 ? 2 : 1;
      const character = decoded(bytes.slice(at, at + length));
      owners[at].shown += character ?? `<0x${bytes[at].toString(16).toUpperCase()}>`;
      at += character === null ? 1 : length;
    }
    owners.length = bytes.length = 0;
  };
  for (const token of tokens) {
    const found = /^(<0x[0-9A-F]{2}>)+$/.test(token.text ?? "") ? token.text.match(/[0-9A-F]{2}(?=>)/g) : [];
    if (!found.length) flush();
    for (const byte of found) { owners.push(token); bytes.push(parseInt(byte, 16)); }
  }
  flush();
}

function decoded(bytes) {
  try { return new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(bytes)); } catch { return null; }
}

function shade(token, mode, advantage, scale) {
  if (token.part !== "sampled") return null;
  if (mode === "logprob") {
    return token.logprob === null ? null : ["--unlikely", Math.min(1, -token.logprob / 1000 / UNLIKELY)];
  }
  if (mode === "gap") {
    return token.gap ? [token.gap > 0 ? "--above" : "--below", Math.min(1, Math.abs(token.gap) / 1000 / APART)] : null;
  }
  const value = token.advantage !== undefined && token.advantage !== null ? token.advantage / 1000 : advantage;
  if (mode === "none" || value === null || !value) return null;
  return [value > 0 ? "--above" : "--below", Math.min(1, Math.abs(value) / scale)];
}

function tint(color, share) {
  return `color-mix(in srgb, var(${color}) ${(100 * share).toFixed(0)}%, transparent)`;
}

// `view` is {mode, advantage of the whole rollout or null, scale}. Returns an element that can be read by keyboard.
function tokenBox(rollout, view) {
  const reading = el("p", { class: "reading token-reading", "aria-live": "polite" }, "Point at a token, or focus the text and use the arrow keys.");
  const box = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens" });
  const spans = [];
  let current = -1;
  const read = (index) => {
    if (index < 0 || index >= spans.length) return;
    if (spans[current]) spans[current].classList.remove("current");
    current = index;
    spans[current].classList.add("current");
    reading.textContent = describe(rollout, index, view);
  };
  const add = (from, to) => {
    for (const part of rollout.parts) {
      const [first, end] = [Math.max(from, part.from), Math.min(to, part.to)];
      if (first >= end) continue;
      if (part.origin && first === part.from) box.append(el("div", { class: "origin" }, part.origin));
      const line = el("div", { class: `part ${part.kind}` });
      if (first === part.from) line.append(el("span", { class: "label" }, partName(rollout, part)));
      for (let i = first; i < end; i++) {
        const token = rollout.tokens[i];
        const span = el("span", { class: "t", "data-i": i }, token.text === undefined ? `${token.id} ` : visible(token.shown));
        if (token.shown === "") span.classList.add("rest");
        const color = shade(token, view.mode, view.advantage, view.scale);
        if (color) span.style.backgroundColor = tint(color[0], 0.06 + 0.54 * color[1]);
        if (token.part === "sampled" && (view.mode === "gap" ? token.gap : token.logprob) === null) span.classList.add("unknown");
        spans[i] = span;
        line.append(span);
      }
      box.append(line);
    }
  };
  add(0, AT_ONCE);
  const left = rollout.tokens.length - AT_ONCE;
  const more = left > 0 ? el("button", { type: "button", onclick: () => { add(AT_ONCE, Infinity); more.remove(); } }, `Show ${left} more tokens`) : null;
  box.addEventListener("pointerover", (event) => {
    if (event.target.dataset.i) read(Number(event.target.dataset.i));
  });
  box.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    read(Math.max(0, current + move));
    spans[current].scrollIntoView({ block: "nearest" });
  });
  return el("div", {}, reading, box, more);
}

function signed(value) {
  return value > 0 ? `+${number(value)}` : number(value);
}

function partName(rollout, part) {
  const length = part.to - part.from, tokens = `${length} token${length === 1 ? "" : "s"}`;
  if (part.kind === "prompt") return `prompt · ${tokens}`;
  if (part.kind === "context") return `context, not trained · ${tokens}`;
  const turns = rollout.parts.filter((each) => each.kind === "sampled");
  return `sampled${turns.length > 1 ? `, turn ${turns.indexOf(part) + 1}` : ""} · ${tokens}`;
}

function visible(text) {
  return text.replace(/[\x00-\x1f\x7f]/g, (control) => {
    const after = control === "\n" || control === "\t" ? control : "";
    return (control === "\n" ? "⏎" : String.fromCharCode(control === "\x7f" ? 0x2421 : 0x2400 + control.charCodeAt(0))) + after;
  });
}

function describe(rollout, index, view) {
  const token = rollout.tokens[index];
  const told = [`token ${index + 1} of ${rollout.tokens.length}`, `id ${token.id}`];
  if (token.text !== undefined) told.push(JSON.stringify(token.text));
  if (token.part !== "sampled") return [...told, token.part === "prompt" ? "prompt" : "masked, not trained"].join(" · ");
  told.push(token.logprob === null ? "log-probability not known" : `sampled at ${number(token.logprob / 1000)} nats`);
  if (token.gap !== null) told.push(`trainer at ${number((token.logprob + token.gap) / 1000)}, gap ${signed(token.gap / 1000)}`);
  const own = token.advantage !== undefined && token.advantage !== null;
  const advantage = own ? token.advantage / 1000 : view.advantage;
  told.push(advantage === null ? "advantage not known" : `advantage ${number(advantage)}`);
  return told.join(" · ");
}
