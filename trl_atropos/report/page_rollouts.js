// The rollout browser: filter, sort and list what is in the page; open one, or the group that it is in.

const FATES = ["not known", "trained", "in training, or interrupted", "waiting", "dropped"];
const DROPPED = 4;
const SORTS = {
  index: "arrival", first_step: "step", score: "reward", advantage: "advantage", logprob: "sampler's log-probability",
  gap: "mean trainer–sampler gap", gap_max: "largest trainer–sampler gap", trained_tokens: "trained tokens", stale: "staleness",
};
const GROUP_SORTS = {
  index: "arrival", first_step: "step", score: "mean reward", group_std: "spread of rewards", gap: "mean trainer–sampler gap",
  gap_max: "largest trainer–sampler gap", stale: "staleness",
};
const GAPS = { gap: "mean gap", gap_max: "largest gap" }; // sorted by one of them, the list shows it
const HIDDEN = { first_step: -1, last_step: -1, stale: -1, policy_version: -1, newest_version: -1 }; // value of "not known"

class Browser {
  constructor(data, unpackChunk) {
    this.data = data;
    this.rows = data.rollouts;
    this.unpackChunk = unpackChunk;
    this.size = this.rows.index.length;
    this.mode = data.rollouts.advantage.some((value) => value !== null) ? "advantage" : "logprob";
    const sizes = this.rows.advantage.filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
    this.scale = sizes[Math.floor(sizes.length * 0.98)] || 1;
    this.groups = new Map();
    this.rows.group.forEach((group, i) => this.groups.set(group, [...(this.groups.get(group) || []), i]));
    this.texts = this.rows.index.map(() => ["", ""]); // prompt and completion, once they are read
    const ends = data.ends.filter((id) => id !== null);
    this.kinds = {
      truncated: (i) => ends.length > 0 && this.rows.last_tokens[i].some((id) => !ends.includes(id)),
      dropped: (i) => this.rows.fate[i] === DROPPED,
      "no variance": (i) => this.rows.group_std[i] === 0,
    };
    this.opened = -1;
    this.form = document.getElementById("filters");
    this.detail = document.getElementById("detail");
    this.list = new RowList(document.getElementById("list"), 54, (i) => this.drawRow(i), (i, jump) => this.open(this.found[i], jump));
    this.buildForm();
    this.update();
    this.detail.replaceChildren(el("p", { class: "note" }, this.size ? "Choose a rollout." : "There is none to show."));
    window.addEventListener("hashchange", () => this.openLinked());
  }

  // ------------------------------------------------------------------------------------------------------------- text

  async readTexts() {
    for (const number of new Set(this.rows.place.map(([chunk]) => chunk))) await this.readChunk(number);
    document.documentElement.dataset.texts = "read";
    if (this.query) this.update();
  }

  async readChunk(number) {
    const chunk = await unpack(`chunk-${number}`); // it is not kept: all of them together are large
    this.rows.place.forEach(([of, position], i) => {
      if (of !== number) return;
      const [prompt, completion] = chunk.rows[position];
      this.texts[i] = [plain(chunk.prompts[prompt], this.data.texts), plain(completion, this.data.texts)];
    });
    for (const [place, row] of this.list.rows) row.lastChild.textContent = this.snippet(this.found[place]);
  }

  has(i) {
    return this.texts[i].some((text) => text.toLowerCase().includes(this.query));
  }

  // What the list shows of a text: its beginning, or where the search finds something.
  snippet(i) {
    const texts = this.grouped ? this.texts[i] : [...this.texts[i]].reverse();
    const text = texts.find((each) => each.toLowerCase().includes(this.query)) ?? texts[0];
    const from = Math.max(0, text.toLowerCase().indexOf(this.query) - 15);
    return (from ? "…" : "") + text.slice(from, from + 200).replace(/\s+/g, " ");
  }

  value(name, i) {
    const value = this.rows[name][i];
    return value === null || value === HIDDEN[name] ? null : value;
  }

  // ------------------------------------------------------------------------------------------------- filter and sort

  buildForm() {
    const select = (name, label, options) => el("label", {}, label, " ",
      el("select", { name }, ...Object.entries(options).map(([value, shown]) => el("option", { value }, shown))));
    const input = (name, label) => el("label", {}, label, " ", el("input", { name, type: "number", step: "any", inputmode: "decimal" }));
    const kinds = Object.entries(this.kinds).map(([kind, is]) => [kind, `${kind} (${this.rows.index.filter((_, i) => is(i)).length})`]);
    const names = Object.fromEntries(byName([...new Set(this.rows.environment)]).map((name) => [`is ${name}`, name])); // one may be called "all"
    this.form.replaceChildren(
      select("view", "Show", { rollouts: "rollouts", groups: "groups" }),
      select("environment", "Environment", { all: "all", ...names }),
      select("only", "Only", { all: "all", ...Object.fromEntries(kinds) }),
      el("label", {}, "Text ", el("input", { name: "text", type: "search" })),
      input("step_from", "Step from"), input("step_to", "to"),
      input("reward_from", "Reward from"), input("reward_to", "to"),
      el("label", {}, "Sort by ", el("select", { name: "sort" }, ...this.sortOptions(SORTS))),
      select("order", "Order", { up: "lowest first", down: "highest first" }),
      el("button", { type: "reset" }, "Reset"));
    this.form.addEventListener("input", (event) => {
      if (event.target.name === "view") this.fillSorts();
      this.update();
    });
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("reset", () => setTimeout(() => { this.fillSorts(); this.update(); }));
  }

  sortOptions(sorts) {
    return Object.entries(sorts).map(([value, shown]) => {
      const none = value in GAPS ? this.data.no_gap : null;
      return el("option", { value, disabled: none !== null, title: none }, none === null ? shown : `${shown} (none known)`);
    });
  }

  fillSorts() {
    const sorts = this.form.elements.view.value === "groups" ? GROUP_SORTS : SORTS;
    const chosen = this.form.elements.sort.value;
    this.form.elements.sort.replaceChildren(...this.sortOptions(sorts));
    this.form.elements.sort.value = chosen in sorts ? chosen : "index";
  }

  passes(i) {
    const { environment, only, step_from, step_to, reward_from, reward_to } = this.form.elements;
    const members = this.grouped ? this.groups.get(this.rows.group[i]) : [i];
    const within = (value, from, to) => (from.value === "" || (value !== null && value >= Number(from.value)))
      && (to.value === "" || (value !== null && value <= Number(to.value)));
    const last = this.value("last_step", i), first = this.value("first_step", i);
    return (environment.value === "all" || environment.value === `is ${this.rows.environment[i]}`)
      && (step_from.value === "" || (last !== null && last >= Number(step_from.value)))
      && (step_to.value === "" || (first !== null && first <= Number(step_to.value)))
      && within(this.score(i), reward_from, reward_to)
      && (only.value === "all" || members.some(this.kinds[only.value]))
      && (!this.query || members.some((member) => this.has(member)));
  }

  score(i) {
    return this.grouped ? this.mean(this.rows.group[i]) : this.rows.score[i];
  }

  mean(group) {
    const members = this.groups.get(group);
    return members.reduce((sum, i) => sum + this.rows.score[i], 0) / members.length;
  }

  gap(name, i) {
    if (!this.grouped) return this.rows[name][i];
    const known = this.groups.get(this.rows.group[i]).map((member) => this.rows[name][member]).filter((value) => value !== null);
    if (!known.length) return null;
    return name === "gap" ? known.reduce((sum, value) => sum + value, 0) / known.length : Math.max(...known);
  }

  update() {
    const { sort, order, view, text } = this.form.elements;
    this.query = text.value.toLowerCase();
    this.grouped = view.value === "groups";
    const all = this.grouped ? [...this.groups.values()].map((members) => members[0]) : this.rows.index.map((_, i) => i);
    const sign = order.value === "down" ? -1 : 1;
    const key = (i) => (sort.value === "score" ? this.score(i) : sort.value in GAPS ? this.gap(sort.value, i) : this.value(sort.value, i));
    this.found = all.filter((i) => this.passes(i)).map((i) => [i, key(i)]);
    this.found.sort(([i, a], [j, b]) => (a === null) - (b === null) || sign * (a - b) || i - j); // not known comes last
    this.found = this.found.map(([i]) => i);
    const things = this.grouped ? "groups" : "rollouts";
    document.getElementById("count").textContent = `${this.found.length} of ${all.length} ${things}`;
    const further = GAPS[sort.value];
    const columns = this.grouped ? ["group", "step", "reward", further || "spread", "rollouts"]
      : ["rollout", "step", "reward", further || "advantage", "tokens"];
    document.getElementById("columns").replaceChildren(...columns.map((name) => el("span", { class: "cell" }, name)));
    this.list.host.setAttribute("aria-label", this.grouped ? "Groups" : "Rollouts");
    const same = (i) => (this.grouped ? this.rows.group[i] === this.rows.group[this.opened] : i === this.opened);
    this.list.show(this.found.length, this.opened < 0 ? -1 : this.found.findIndex(same));
  }

  drawRow(place) {
    const i = this.found[place], cell = (name, shown) => el("span", { class: `cell ${name}` }, shown), said = cell("said", this.snippet(i));
    const { sort } = this.form.elements, gap = sort.value in GAPS ? number(this.gap(sort.value, i)) : null;
    const step = this.value("first_step", i), when = cell("step", step === null ? FATES[this.rows.fate[i]] : String(step));
    if (this.grouped) {
      const members = this.groups.get(this.rows.group[i]);
      return [cell("name", String(this.rows.group[i])), when, cell("reward", number(this.score(i))),
        cell("more", gap || number(this.rows.group_std[i])), cell("size", String(members.length)), said];
    }
    return [cell("name", String(this.rows.index[i])), when, cell("reward", number(this.rows.score[i])),
      cell("more", gap || number(this.rows.advantage[i], 2)), cell("size", String(this.rows.trained_tokens[i])), said];
  }

  // ---------------------------------------------------------------------------------------------------------- opening

  // Opens the rollout that the page's address names: #rollout-12.
  async openLinked() {
    const wanted = /^#rollout-(\d+)$/.exec(window.location.hash);
    if (!wanted) return;
    const i = this.rows.index.indexOf(Number(wanted[1]));
    if (i >= 0) await this.open(i, false);
    else this.detail.replaceChildren(el("p", { class: "note" }, `Rollout ${wanted[1]} is not in this page (--max_rollouts changes how many are).`));
    this.update();
    this.detail.scrollIntoView({ block: "start" });
  }

  async open(i, jump) {
    this.opened = i;
    const [chunkNumber, position] = this.rows.place[i];
    const chunk = await this.unpackChunk(chunkNumber);
    if (this.opened !== i) return; // another was chosen meanwhile
    this.rollout = unfold(chunk.rows[position], chunk.prompts, this.data.texts);
    this.drawDetail();
    if (jump && window.matchMedia("(max-width: 760px)").matches) this.detail.scrollIntoView({ block: "start" });
  }

  drawDetail() {
    const i = this.opened, group = this.rows.group[i], members = this.groups.get(group);
    const others = el("div", { class: "members", role: "group", "aria-label": "Rollouts of the group" },
      ...members.map((member) => el("button", {
        type: "button", "aria-pressed": String(member === i), title: `rollout ${this.rows.index[member]}`,
        onclick: () => this.openMember(member),
      }, number(this.rows.score[member]))));
    const view = { mode: this.mode, advantage: this.rows.advantage[i], scale: this.scale };
    const messages = this.rollout.messages;
    this.detail.replaceChildren(
      el("h3", {}, el("a", { href: `#rollout-${this.rows.index[i]}`, title: "A link to this rollout" }, `Rollout ${this.rows.index[i]}`)),
      el("p", { class: "note" }, `Group ${group}, ${this.rows.environment[i]}: mean reward ${number(this.rows.group_mean[i])}, `
        + `standard deviation ${number(this.rows.group_std[i])}. Rewards of its rollouts:`),
      others, this.facts(i), this.modes(), tokenBox(this.rollout, view));
    if (messages) this.detail.append(el("details", { class: "messages" }, el("summary", {}, "Messages, as the environment sent them"), el("pre", {}, pretty(messages))));
  }

  openMember(member) {
    const place = this.found.indexOf(member);
    if (place >= 0 && !this.grouped) { this.list.active = place; this.list.reveal(); this.list.paint(); }
    this.open(member, false).then(() => this.detail.querySelector('[aria-pressed="true"]').focus());
  }

  facts(i) {
    const [first, last] = [this.value("first_step", i), this.value("last_step", i)];
    const [oldest, newest] = [this.value("policy_version", i), this.value("newest_version", i)];
    const steps = first === null ? "" : first === last ? `, step ${first}` : `, steps ${first} to ${last} (which of them is not noted)`;
    const versions = oldest === null ? "not known" : oldest === newest || newest === null ? `${oldest}` : `${oldest} to ${newest}`;
    const stale = this.value("stale", i);
    const special = ["sft", "zero_advantage", "raw_advantage"].filter((name) => this.rows[name][i]);
    const facts = {
      Reward: number(this.rows.score[i], 4),
      [this.rollout.own ? "Advantage, mean over tokens" : "Advantage"]: this.rows.advantage[i] === null ? "not known" : number(this.rows.advantage[i]),
      "What became of it": FATES[this.rows.fate[i]] + steps,
      "Sampled by version": versions + (stale === null ? "" : `, ${stale} step${stale === 1 ? "" : "s"} old when taken`),
      "Sampler's log-probability, mean": this.rows.logprob[i] === null ? "not known" : `${number(this.rows.logprob[i])} nats`,
      "Trainer–sampler gap": this.rows.gap[i] === null ? "not known"
        : `mean ${number(this.rows.gap[i])}, largest ${number(this.rows.gap_max[i])} nats`,
      Tokens: `${this.rows.prompt_tokens[i]} of the prompt, ${this.rows.trained_tokens[i]} trained of ${this.rows.completion_tokens[i]} after it${this.kinds.truncated(i) ? ", truncated" : ""}`,
    };
    const parts = Object.entries(this.rows.rewards[i] || {});
    if (this.rows.branches[i]) facts.Branches = String(this.rows.branches[i]);
    if (parts.length) facts["Parts of the reward"] = parts.map(([name, value]) => `${name} ${number(value)}`).join(", ");
    if (special.length) facts["Asked by the environment"] = special.join(", ");
    return el("dl", { class: "facts" }, ...Object.entries(facts).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  modes() {
    const none = this.data.no_gap;
    const choices = Object.entries(MODES).map(([mode, label]) => el("label", {},
      el("input", { type: "radio", name: "mode", value: mode, checked: mode === this.mode, disabled: mode === "gap" && none !== null,
        onchange: () => { this.mode = mode; this.redraw(); } }), ` ${label}`));
    return el("fieldset", { class: "modes" }, el("legend", {}, "Colour of tokens"), ...choices, this.legend(),
      none === null ? null : el("p", { class: "note" }, `No trainer–sampler gap: ${none}.`));
  }

  redraw() {
    this.drawDetail();
    this.detail.querySelector("input[name=mode]:checked").focus();
  }

  legend() {
    const ramp = (...stops) => { const bar = el("span", { class: "ramp" }); bar.style.background = `linear-gradient(90deg, ${stops.join(",")})`; return bar; };
    if (this.mode === "advantage" && this.rows.advantage[this.opened] === null) {
      return el("p", { class: "note" }, "The advantage is not known: this run has not noted its `scale_rewards`.");
    }
    if (this.mode === "advantage") {
      return el("p", { class: "note" }, `−${number(this.scale)} `, ramp(tint("--below", 0.6), "transparent", tint("--above", 0.6)),
        ` +${number(this.scale)}. Grey: prompt and context, not trained.`);
    }
    if (this.mode === "logprob") {
      return el("p", { class: "note" }, "0 ", ramp("transparent", tint("--unlikely", 0.6)), ` −${UNLIKELY} nats and below, under the policy that `
        + "sampled. Dotted: not known. Grey: prompt and context, not trained.");
    }
    if (this.mode === "gap" && this.rows.gap[this.opened] === null) {
      return el("p", { class: "note" }, "Not known for this rollout: it was not trained, or not known to be, or the sampler's log-probabilities of it are not known.");
    }
    if (this.mode === "gap") {
      return el("p", { class: "note" }, `−${APART} `, ramp(tint("--below", 0.6), "transparent", tint("--above", 0.6)),
        ` +${APART} nats and beyond: the trainer's log-probability when it took the rollout, minus the sampler's. Dotted: not known. Grey: prompt and context, not trained.`);
    }
    return el("p", { class: "note" }, "Grey: prompt and context, not trained.");
  }
}

function pretty(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }
}
