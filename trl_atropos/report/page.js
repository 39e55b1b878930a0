// Puts the page together: unpacks the data, then status, tiles, curves, warnings, rollouts and settings.

const TIMES = ["wait_for_rollouts", "ingest", "forward_backward", "optimizer", "publish", "save", "other"]; // of timing.py

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
  const reward = data.metrics.reward, books = data.books;
  const dropped = books ? Object.values(books.dropped).reduce((sum, count) => sum + count, books.lost_with_api) : null;
  const tiles = [
    ["Steps", data.max_steps ? `${data.steps} of ${data.max_steps}` : data.steps],
    ["Reward, first → last logged", reward ? `${number(reward[1][0])} → ${number(reward[1][reward[1].length - 1])}` : "–"],
    ["Rollouts taken", books ? books.trained : "–"],
    ["Dropped or lost", dropped === null ? "–" : `${dropped} (${number((100 * dropped) / Math.max(1, dropped + books.trained), 1)} %)`],
    ["Time", data.began_at && data.last_at ? duration(data.last_at - data.began_at) : "–"],
    ["Warnings", data.warnings.length],
  ];
  document.getElementById("tiles").replaceChildren(...tiles.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value)))));
}

function curve(data, name, label) {
  return name in data.metrics ? { label: label || name, steps: data.metrics[name][0], values: data.metrics[name][1] } : null;
}

function rewardSeries(data) {
  const banded = (label, steps, mean, std) => ({ label, steps, values: mean,
    low: mean.map((value, i) => value - std[i]), high: mean.map((value, i) => value + std[i]) });
  const found = data.rewards.map((each) => banded(each.environment, each.steps, each.mean, each.std));
  const logged = curve(data, "reward", "all, as logged");
  if (found.length && logged && logged.steps[0] < Math.min(...found.map((each) => each.steps[0]))) found.push(logged); // older ones were removed
  if (found.length) return found;
  const { reward, reward_std: spread } = data.metrics;
  return reward && spread && spread[1].length === reward[1].length ? [banded("all environments", reward[0], reward[1], spread[1])] : [curve(data, "reward", "all environments")];
}

function timeSeries(data) {
  const found = TIMES.map((name) => curve(data, `time/${name}`, name.replaceAll("_", " "))).filter(Boolean);
  const [other, save] = ["other", "save"].map((name) => found.find((each) => each.label === name));
  if (other && save && other.values.length === save.values.length) other.values = other.values.map((value, i) => value - save.values[i]); // it is a share
  const total = found.flatMap((each) => each.values).reduce((sum, value) => sum + value, 0) || 1;
  for (const each of found) each.label += ` (${Math.round((100 * each.values.reduce((sum, value) => sum + value, 0)) / total)} %)`;
  return found;
}

function showCurves(data) {
  const of = (...names) => names.map(([name, label]) => curve(data, name, label));
  const whole = "time/other" in data.metrics;
  const specs = [
    { title: "Reward", series: rewardSeries(data), about: data.rewards.length
      ? "Mean over the rollouts of a step, and one standard deviation around it." : "As logged; which rollouts a step took was not noted." },
    { title: "Where the time went, seconds per step", series: timeSeries(data), stacked: true,
      about: whole ? "Of the wall time of an optimizer step." : "Only these parts were logged; the rest of a step is not shown." },
    { title: "Completion length, tokens", series: of(["completions/mean_length", "mean"], ["completions/max_length", "longest"]) },
    { title: "Staleness, optimizer steps", series: of(["rollouts/staleness_mean", "mean"], ["rollouts/staleness_max", "oldest"]) },
    { title: "Trainer–sampler gap, mean, nats per token", series: of(["health/logprob_gap", "all rollouts"], ["health/logprob_gap_fresh", "from the current weights"]) },
    { title: "Trainer–sampler gap, largest, nats", series: of(["sampling/logprob_gap/max", "rollouts"], ["policy/probe_max_abs_diff", "probe"]) },
    { title: "Publish, seconds", series: of(["time/publish", "publish"], ["time/probe", "probe"]) },
    { title: "Loss", series: of(["loss", "loss"]) },
    { title: "Gradient norm", series: of(["grad_norm", "gradient norm"]) },
    { title: "Entropy, nats", series: of(["entropy", "entropy"]) },
  ];
  const host = document.getElementById("charts");
  for (const spec of specs) {
    spec.series = spec.series.filter(Boolean);
    if (!spec.series.length) continue;
    const place = el("div");
    host.append(place);
    chart(place, spec);
  }
  if (!host.children.length) host.append(el("p", { class: "note" }, "Nothing has been logged yet."));
  const select = document.getElementById("any-metric"), names = Object.keys(data.metrics);
  document.getElementById("any").hidden = !names.length;
  select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  const draw = () => chart(document.getElementById("any-chart"), { title: select.value, series: [curve(data, select.value)] });
  select.addEventListener("change", draw);
  if (names.length) draw();
}

function showWarnings(data) {
  const list = document.getElementById("warning-list");
  if (!data.warnings.length) list.replaceWith(el("p", { class: "note" }, data.source === "run_log.jsonl" ? "None was given." : "Not known: this run has no run_log.jsonl."));
  list.append(...data.warnings.map((each) => el("li", {}, el("span", { class: "when" }, `step ${each.step} · ${when(each.at)} `), each.warning)));
}

function showRollouts(data) {
  const shown = data.rollouts.index.length;
  const notes = [shown < data.total_rollouts
    ? `${shown} of the ${data.total_rollouts} rollouts in the run's folder are in this page: whole groups, evenly spread over the run (--max_rollouts changes how many).`
    : `All ${shown} rollouts in the run's folder.`];
  if (!data.total_rollouts) notes.push("A run from recordings (replay_paths) keeps none, and neither does one that has not yet pulled a batch.");
  else if (!data.has_tokenizer) notes.push("The run's folder has no tokenizer.json, so tokens are shown as numbers.");
  if (shown && !data.rollouts.first_step.some((step) => step >= 0)) notes.push("Which step took which rollout was not noted in this run.");
  if (data.unreadable.length) notes.push(`Could not be read: ${data.unreadable.join("; ")}.`);
  document.getElementById("rollouts-note").textContent = notes.join(" ");
  window.browser = new Browser(data, unpackChunk);
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
  const data = await unpack("data");
  for (const part of [showStatus, showTiles, showCurves, showWarnings, showRollouts, showSettings]) part(data);
  // When it has been drawn: milliseconds since the page was asked for.
  requestAnimationFrame(() => requestAnimationFrame(() => { document.documentElement.dataset.ready = Math.round(performance.now()); }));
}

show().catch((error) => {
  const failed = document.getElementById("failed");
  failed.textContent = `This page could not be shown (${error}). It needs a browser from 2024 or later.`;
  failed.hidden = false;
  throw error;
});
