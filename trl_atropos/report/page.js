// Puts the page together: unpacks the data, then status, tiles, curves, warnings, rollouts and settings.

const TIMES = ["wait_for_rollouts", "ingest", "forward_backward", "optimizer", "publish", "save", "evaluate", "other"]; // of timing.py
const WINDOW = 20; // values in a running mean, at most

async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const chunks = new Map();
function unpackChunk(index) {
  if (!chunks.has(index)) chunks.set(index, unpack(`chunk-${index}`));
  return chunks.get(index);
}

function when(seconds) {
  return new Date(seconds * 1000).toLocaleString();
}

function duration(seconds) {
  const whole = Math.round(seconds);
  if (whole < 120) return `${whole} s`;
  return whole < 7200 ? `${Math.round(whole / 60)} min` : `${(whole / 3600).toFixed(1)} h`;
}

function showStatus(data) {
  document.getElementById("name").textContent = data.name;
  const of = data.max_steps ? ` of ${data.max_steps}` : "";
  const end = data.ended !== null ? "Ended" : "Goes on, or was interrupted:";
  const last = data.last_at ? `, last heard of ${when(data.last_at)}` : "";
  const resumed = data.resumed.length ? ` Resumed at step ${data.resumed.join(", ")}.` : "";
  document.getElementById("status").textContent = `${end} ${data.ended !== null ? "after" : "at"} step ${data.steps}${of}${last}. `
    + `This page was made ${when(data.made_at)}${data.source ? ` from ${data.source}` : ""}.${resumed}`;
}

function showTiles(data) {
  const rewards = rewardSeries(data), logged = curve(data, "reward"); // of each batch, if there is one environment
  const reward = rewards.length === 1 ? rewards[0].smooth : logged && smoothed(logged.values), books = data.books;
  const dropped = books ? Object.entries(books.dropped).reduce((sum, [reason, count]) => sum + (reason === "joined" ? 0 : count), books.lost_with_api) : null;
  const speed = (name) => (data.metrics[name] ? Math.round(median(data.metrics[name][1])).toLocaleString("en") : null);
  const trained = speed("speed/trained_tokens_per_second"), sampled = speed("speed/sampled_tokens_per_second");
  const environments = byName([...new Set(data.rollouts.environment)]);
  const tiles = [
    ["Model", data.model.model_name_or_path || "–"],
    [environments.length > 1 ? "Environments" : "Environment", environments.join(", ") || "–"],
    ["Trained on", data.devices ? data.devices.replace(/^1 x /, "") : "–"],
    ["Steps", data.max_steps ? `${data.steps} of ${data.max_steps}` : data.steps,
      data.began_at && data.last_at ? `in ${duration(data.last_at - data.began_at)}` : null],
    ["Tokens per second, trained", trained || "–", sampled && `${sampled} of them sampled`],
    ["Reward, first → last", reward ? `${number(reward[0])} → ${number(reward[reward.length - 1])}` : "–"],
    ...evaluationTiles(data),
    ["Rollouts trained", books ? books.trained.toLocaleString("en") : "–",
      dropped === null ? null : `${dropped} dropped or lost (${number((100 * dropped) / Math.max(1, dropped + books.trained), 1)} %)`],
    ["Warnings", data.warnings.length],
  ];
  document.getElementById("tiles").replaceChildren(...tiles.map(([name, value, more]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, String(value)), more ? el("dd", { class: "note" }, more) : null)));
}

function byName(names) {
  return names.sort(new Intl.Collator(undefined, { numeric: true }).compare);
}

function median(values) {
  return [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
}

// A running mean over a tenth of the values around each, at most WINDOW of them.
function smoothed(values) {
  const half = Math.floor(Math.min(WINDOW, Math.ceil(values.length / 10)) / 2);
  return values.map((_, i) => {
    const near = values.slice(Math.max(0, i - half), i + half + 1).filter((value) => value !== null);
    return near.length ? near.reduce((sum, value) => sum + value, 0) / near.length : null;
  });
}

// Of each evaluation, what it found by step, and which of its metrics are shown: first the mean score if it is `graded`,
// that is, if scores are not only 0 and 1.
function evaluationsOf(data) {
  return byName([...new Set(data.evaluations.map((each) => each.evaluation))]).map((name) => {
    const found = data.evaluations.filter((each) => each.evaluation === name).sort((a, b) => a.step - b.step);
    const last = found[found.length - 1], all = Object.keys(last.metrics);
    const passes = all.filter((metric) => /^pass@\d+$/.test(metric)), [mean] = all.filter((metric) => metric.startsWith("avg@"));
    const graded = mean !== undefined && found.some(({ metrics }) => metrics[mean] !== metrics["pass@1"]);
    const ends = [...new Set([passes[0], passes[passes.length - 1]])];
    const shown = passes.length ? [...(graded ? [mean] : []), ...ends] : all.slice(0, 4);
    return { name, found, last, graded, metrics: shown };
  });
}

function evaluationTiles(data) {
  return evaluationsOf(data).map(({ name, found, last, graded, metrics: [metric] }) => {
    const of = last.metrics, value = (each) => number(each.metrics[metric]), told = [];
    const spread = (name) => (of[`${name}_low`] < of[`${name}_high`] ? ` ${interval(of[`${name}_low`], of[`${name}_high`])}` : ""); // none if all are equal
    const gain = graded ? "mean_gain" : "gain", varies = graded || (of[metric] > 0 && of[metric] < 1);
    if (varies && spread(metric)) told.push(`95 % interval${spread(metric)}`);
    if (found.length > 1 && gain in of) told.push(`gain ${signed(of[gain])}${spread(gain)}`);
    if (graded) told.push(`pass@1 ${number(of["pass@1"])}${passesAbove(last)}`);
    return [`Evaluation ${name}, ${graded ? "mean score" : metric}`, found.length > 1 ? `${value(found[0])} → ${value(last)}` : value(last), told.join("; ")];
  });
}

function passesAbove(found) {
  return typeof found.passes_above === "number" ? ` (scores above ${number(found.passes_above)})` : "";
}

function evaluationCharts(data, range) {
  return evaluationsOf(data).map(({ name, found, last, graded, metrics }) => {
    const values = (metric) => found.map((each) => each.metrics[metric] ?? null);
    const banded = (metric) => (`${metric}_low` in last.metrics ? { low: values(`${metric}_low`), high: values(`${metric}_high`) } : {});
    const [oldest, newest] = last.versions || [];
    const policy = oldest === undefined ? "" : ` The last answers are of ${oldest === newest ? `step ${oldest}` : `steps ${oldest} to ${newest}`}.`;
    const about = "problems" in last.metrics ? `Of ${last.metrics.problems} problems; ${graded ? `pass@1 counts what passes${passesAbove(last)}; the bands are` : "the band is"} the 95 % interval.` : "By the environment's own `evaluate`.";
    const unit = "problems" in last.metrics && !graded ? "share" : "";
    return { title: `Evaluation ${name}`, unit, range, about: about + policy,
      series: metrics.map((metric) => ({ label: metric, steps: found.map((each) => each.step), values: values(metric), ...banded(metric) })) };
  });
}

function curve(data, name, label) {
  return name in data.metrics ? { label: label || name, steps: data.metrics[name][0], values: data.metrics[name][1] } : null;
}

function rewardSeries(data) {
  const found = data.rewards.map((each) => ({ label: each.environment, steps: each.steps, values: each.means }));
  const logged = curve(data, "reward", "all, as logged");
  if (found.length && logged && logged.steps[0] < Math.min(...found.map((each) => each.steps[0]))) found.push(logged); // older ones were removed
  const shown = found.length ? found : [curve(data, "reward", "all environments")].filter(Boolean);
  return shown.map((each) => ({ ...each, smooth: smoothed(each.values) }));
}

// A curve for each metric whose name begins with the prefix.
function seriesOf(data, prefix) {
  return byName(Object.keys(data.metrics).filter((name) => name.startsWith(prefix))).map((name) => curve(data, name, name.slice(prefix.length)));
}

function timeSeries(data) {
  const found = TIMES.map((name) => curve(data, `time/${name}`, name.replaceAll("_", " "))).filter(Boolean);
  const other = found.find((each) => each.label === "other");
  for (const share of found.filter((each) => ["save", "evaluate"].includes(each.label))) { // of `other`
    if (other && other.values.length === share.values.length) other.values = other.values.map((value, i) => value - share.values[i]);
  }
  const total = found.flatMap((each) => each.values).reduce((sum, value) => sum + value, 0) || 1;
  for (const each of found) each.label += ` (${Math.round((100 * each.values.reduce((sum, value) => sum + value, 0)) / total)} %)`;
  return found;
}

function showCurves(data) {
  const of = (...names) => names.map(([name, label]) => curve(data, name, label));
  const whole = "time/other" in data.metrics;
  const range = [0, Math.max(1, data.steps)];
  const progress = [
    { title: "Reward", unit: "mean score", range, height: 300, series: rewardSeries(data), about: data.rewards.length
      ? "Thin: every batch. Thick: a running mean." : "As logged; which rollouts a step took was not noted." },
    { title: "Parts of the reward", unit: "mean", range, series: seriesOf(data, "reward/"), about: "Each over the rollouts that have it, as logged." },
    ...evaluationCharts(data, range),
  ];
  const specs = [
    { title: "Where the time went", unit: "seconds per step", series: timeSeries(data), stacked: true,
      about: whole ? "Of the wall time of an optimizer step." : "Only these parts were logged; the rest of a step is not shown." },
    { title: "Spread of rewards", unit: "standard deviation", series: of(["reward_std", "all rollouts"]) },
    { title: "Completion length", unit: "tokens", series: of(["completions/mean_length", "mean"], ["completions/max_length", "longest"]) },
    { title: "Staleness", unit: "optimizer steps", series: of(["rollouts/staleness_mean", "mean"], ["rollouts/staleness_max", "oldest"]) },
    { title: "Trainer–sampler gap, mean", unit: "nats per token", series: of(["health/logprob_gap", "all rollouts"], ["health/logprob_gap_fresh", "from the current weights"]) },
    { title: "Trainer–sampler gap, largest", unit: "nats", series: of(["sampling/logprob_gap/max", "rollouts"], ["policy/probe_max_abs_diff", "probe"]) },
    { title: "Publish", unit: "seconds", series: of(["time/publish", "publish"], ["time/probe", "probe"]) },
    { title: "Sessions", unit: "since the log before", series: seriesOf(data, "sessions/").filter(({ label }) => /^(opened|ended_)/.test(label)) },
    { title: "Loss", series: of(["loss", "loss"]) },
    { title: "Gradient norm", series: of(["grad_norm", "gradient norm"]) },
    { title: "Entropy", unit: "nats", series: of(["entropy", "entropy"]) },
  ];
  const host = document.getElementById("charts");
  for (const [where, all] of [[document.getElementById("progress-charts"), progress], [host, specs]]) {
    for (const spec of all) {
      spec.series = spec.series.filter(Boolean);
      if (!spec.series.length) continue;
      const place = el("div");
      where.append(place);
      chart(place, spec);
    }
  }
  if (!Object.keys(data.metrics).length) host.append(el("p", { class: "note" }, "Nothing has been logged yet."));
  const select = document.getElementById("any-metric"), names = Object.keys(data.metrics);
  document.getElementById("any").hidden = !names.length;
  select.replaceChildren(...names.map((name) => el("option", { value: name, selected: name === liveliest(data.metrics) }, name)));
  const draw = () => chart(document.getElementById("any-chart"), { title: select.value, unit: unitOf(select.value), series: [curve(data, select.value)] });
  select.addEventListener("change", draw);
  if (names.length) draw();
}

// An evaluation if it moves, else the reward, else what moves most for its size.
function liveliest(metrics) {
  const movement = (name) => { const [low, high] = extent(metrics[name][1]); return (high - low) / (Math.abs(high) + Math.abs(low) || 1); };
  const names = Object.keys(metrics).filter((name) => movement(name) > 0 && !/version|learning_rate|num_tokens|seconds$|_low$|_high$/.test(name));
  return names.find((name) => /^eval_.*pass@1$/.test(name)) || names.find((name) => /^eval_.*avg@\d+$/.test(name)) || names.find((name) => name.startsWith("eval_")) || names.find((name) => name === "reward")
    || names.sort((a, b) => movement(b) - movement(a))[0];
}

function unitOf(name) {
  const units = [[/tokens_per_second$/, "tokens per second"], [/^time\/|seconds$/, "seconds"], [/length/, "tokens"],
    [/staleness_m|version$/, "optimizer steps"], [/gap|entropy|_diff$|logprob/, "nats"], [/pass@\d+$/, "share"]];
  return (units.find(([pattern]) => pattern.test(name)) || [])[1];
}

// A rollout from the first step and one from the last, each of about the mean reward of its step.
function showSamples(data, browser) {
  const rows = data.rollouts, steps = rows.first_step.filter((step) => step > 0), host = document.getElementById("samples");
  const chosen = [["At the start", Math.min(...steps)], ["At the end", Math.max(...steps)]].map(([title, step]) => {
    const there = rows.first_step.flatMap((first, i) => (first === step ? [i] : []));
    const mean = there.reduce((sum, i) => sum + rows.score[i], 0) / there.length, far = (i) => Math.abs(rows.score[i] - mean);
    return [title, step, there.sort((a, b) => far(a) - far(b) || a - b)[0]];
  });
  host.hidden = !steps.length;
  return steps.length ? Promise.all(chosen.map(async ([title, step, i]) => {
    await browser.readChunk(rows.place[i][0]);
    const [prompt, said] = browser.texts[i];
    return el("figure", { class: "sample" }, el("figcaption", {}, el("strong", {}, title), ` step ${step}, reward ${number(rows.score[i])}, `,
      el("a", { href: `#rollout-${rows.index[i]}` }, `rollout ${rows.index[i]}`)),
    el("pre", { tabindex: 0, "aria-label": `${title}: prompt and completion` }, el("span", { class: "prompt" }, prompt), said));
  })).then((figures) => host.replaceChildren(...figures)) : null;
}

function showWarnings(data) {
  const list = document.getElementById("warning-list");
  if (!data.warnings.length) list.replaceWith(el("p", { class: "note" }, data.source === "run_log.jsonl" ? "None was given." : "Not known: this run has no run_log.jsonl."));
  list.append(...data.warnings.map((each) => el("li", {}, el("span", { class: "when" }, `step ${each.step} · ${when(each.at)} `), each.warning)));
}

// What sessions did: counts by name, and those that have a reason (`ended_deadline`) by reason, the largest first.
function showSessions(data) {
  const counts = data.sessions, names = Object.keys(counts), count = (name) => counts[name] || 0;
  if (!names.length) return;
  document.getElementById("sessions").hidden = document.querySelector("nav [href='#sessions']").hidden = false;
  const by = (prefix) => names.filter((name) => name.startsWith(prefix)).map((name) => [name.slice(prefix.length), count(name)])
    .filter(([, value]) => value).sort(([, a], [, b]) => b - a);
  const share = (value) => `${value.toLocaleString("en")} (${number((100 * value) / Math.max(1, count("tokens")), 1)} % of those sampled)`;
  const written = (rows) => rows.map(([name, value]) => [name, value.toLocaleString("en")]);
  const all = [["opened", "opened"], ["calls", "calls"], ["completions", "completions"], ["tokens", "tokens sampled"], ["context", "tokens of prompts, kept once"],
    ["reused", "answers whose sampled ids were put back"]].filter(([name]) => name in counts).map(([name, label]) => [label, count(name)]);
  const table = (title, rows) => (rows.length ? el("div", {}, el("h3", {}, title), el("table", {}, el("tbody", {},
    ...rows.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value)))))) : null);
  document.getElementById("session-tables").append(...[table("All", written(all)), table("Ended, by reason", written(by("ended_"))),
    table("Tokens that the trainer cannot recompute, by reason", by("marked_").map(([name, value]) => [name, share(value)])),
    table("Requests refused, by reason", written(by("refused_"))),
    ...Object.entries(data.episodes).map(([environment, outcomes]) => table(`Episodes of ${environment}, by outcome`,
      written(Object.entries(outcomes).filter(([, value]) => value).sort(([, a], [, b]) => b - a))))].filter(Boolean));
}

function showRollouts(data) {
  const shown = data.rollouts.index.length;
  const notes = [shown < data.total_rollouts
    ? `${shown} of the ${data.total_rollouts} rollouts in the run's folder are in this page: whole groups, evenly spread over the run (--max_rollouts changes how many).`
    : `All ${shown} rollouts in the run's folder.`];
  if (!data.total_rollouts) notes.push("A run from recordings (replay_paths) keeps none, and neither does one that has not yet pulled a batch.");
  else if (!data.has_tokenizer) notes.push("The run's folder has no tokenizer.json that can be read, so tokens are shown as numbers.");
  if (shown && !data.rollouts.first_step.some((step) => step >= 0)) notes.push("Which step took which rollout was not noted in this run.");
  if (data.unreadable.length) notes.push(`Could not be read: ${data.unreadable.join("; ")}.`);
  document.getElementById("rollouts-note").textContent = notes.join(" ");
  window.browser = new Browser(data, unpackChunk);
  Promise.resolve(showSamples(data, browser)).then(() => { browser.openLinked(); return browser.readTexts(); });
}

function showSettings(data) {
  const changed = Object.fromEntries(data.changed.filter((name) => name in data.config).map((name) => [name, data.config[name]]));
  const others = Object.fromEntries(Object.entries(data.config).filter(([name]) => !(name in changed)));
  const table = (values) => el("table", {}, el("tbody", {}, ...Object.entries(values).map(([name, value]) =>
    el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, typeof value === "string" ? value : JSON.stringify(value))))));
  const section = (title, values, open) => Object.keys(values).length
    ? el("details", { open }, el("summary", {}, `${title} (${Object.keys(values).length})`), table(values)) : null;
  const host = document.getElementById("setting-tables");
  host.append(...[section("Differ from the default", changed, true), section("Model", data.model, true),
    section("Versions", data.versions, true), section("All others", others, false)].filter(Boolean));
  if (!host.children.length) host.append(el("p", { class: "note" }, "Not known: this run has no run_log.jsonl."));
}

function setUpTheme() {
  const root = document.documentElement, button = document.getElementById("theme");
  const order = ["auto", "light", "dark"];
  let kept = "auto";
  try { kept = localStorage.getItem("trl_atropos.theme") || "auto"; } catch { /* a file may have no storage */ }
  const set = (theme) => {
    root.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    try { localStorage.setItem("trl_atropos.theme", theme); } catch { /* then it is not kept */ }
  };
  set(order.includes(kept) ? kept : "auto");
  button.addEventListener("click", () => set(order[(order.indexOf(root.dataset.theme) + 1) % order.length]));
}

async function show() {
  setUpTheme();
  const header = document.querySelector("header");
  new ResizeObserver(() => document.documentElement.style.setProperty("--header", `${header.offsetHeight}px`)).observe(header);
  const data = await unpack("data");
  for (const part of [showStatus, showTiles, showCurves, showWarnings, showSessions, showRollouts, showSettings]) part(data);
  // When it has been drawn: milliseconds since the page was asked for.
  requestAnimationFrame(() => requestAnimationFrame(() => { document.documentElement.dataset.ready = Math.round(performance.now()); }));
}

show().catch((error) => {
  const failed = document.getElementById("failed");
  failed.textContent = `This page could not be shown (${error}). It needs a browser from 2024 or later.`;
  failed.hidden = false;
  throw error;
});
