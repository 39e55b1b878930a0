// Curves as SVG: `chart(host, spec)` draws into `host`, again whenever its width changes.
// spec: {title, unit, about, series: [{label, steps, values, low, high, smooth}], stacked, range, height}. Of a series, low
// and high are an interval around its values, and smooth a line in front of them; they, range (steps) and height are optional.

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes = {}) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1).replace("-", "−");
  const text = Number.isInteger(value) ? String(value) : String(Number(value.toFixed(size < 1 ? digits : size < 100 ? 2 : 0)));
  return text.replace("-", "−");
}

function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

const MARGIN = { left: 52, right: 10, top: 22, bottom: 36 };
const HEIGHT = 218;
const DOTS = 40; // a series of at most so many points shows each
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const redrawing = new ResizeObserver((entries) => entries.forEach((entry) => entry.target.redraw()));

function chart(host, spec) {
  if (host.firstChild) host.replaceChildren();
  spec.series.forEach((each, i) => { each.color = `var(--c${i % 8})`; each.dash = spec.stacked ? "" : DASHES[(i + Math.floor(i / 8)) % 4]; });
  const steps = [...new Set(spec.series.flatMap((each) => each.steps))].sort((a, b) => a - b);
  for (const each of spec.series) each.at = new Map(each.steps.map((step, i) => [step, i]));
  const reading = el("span", { class: "reading", "aria-live": "polite" });
  const cells = spec.series.map(() => el("b"));
  const legend = el("ul", { class: "legend" }, ...spec.series.map((each, i) =>
    el("li", {}, swatch(each, spec.stacked), `${each.label} `, cells[i])));
  const drawing = el("div", { class: "drawing" });
  drawing.style.height = `${spec.height || HEIGHT}px`;
  host.append(el("figure", { class: "chart" },
    el("figcaption", {}, el("strong", {}, spec.title), " ", reading), drawing, legend,
    spec.about ? el("p", { class: "note" }, spec.about) : null));

  let rule = null, x = null, place = steps.length - 1;
  const read = (index) => {
    place = Math.max(0, Math.min(steps.length - 1, index));
    const step = steps[place];
    reading.textContent = `step ${step}`;
    spec.series.forEach((each, i) => {
      const at = each.at.get(step);
      cells[i].textContent = at === undefined ? "" : number(each.values[at]) + aside(each, at);
    });
    if (rule) { rule.setAttribute("x1", x(step)); rule.setAttribute("x2", x(step)); }
  };
  const nearest = (event) => {
    const box = drawing.getBoundingClientRect();
    const wanted = event.clientX - box.left;
    let best = 0;
    steps.forEach((step, i) => { if (Math.abs(x(step) - wanted) < Math.abs(x(steps[best]) - wanted)) best = i; });
    read(best);
  };
  drawing.redraw = () => {
    const width = drawing.clientWidth;
    if (width < 80 || !steps.length) return;
    const painted = paint(spec, steps, width);
    [x, rule] = [painted.x, painted.rule];
    drawing.replaceChildren(painted.picture);
    painted.picture.addEventListener("pointermove", nearest);
    painted.picture.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -steps.length, End: steps.length };
      if (event.key in moves) { event.preventDefault(); read(place + moves[event.key]); }
    });
    read(place);
  };
  redrawing.observe(drawing);
}

function swatch(each, filled) {
  const picture = svg("svg", { width: 22, height: 10, "aria-hidden": "true" });
  picture.append(filled
    ? svg("rect", { width: 22, height: 10, fill: each.color })
    : svg("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: each.color, "stroke-width": 2.5, "stroke-dasharray": each.dash }));
  return picture;
}

function aside(each, at) {
  if (each.smooth) return `, mean ${number(each.smooth[at])}`;
  return each.low ? ` ${interval(each.low[at], each.high[at])}` : "";
}

function interval(low, high) {
  return `[${number(low)}, ${number(high)}]`;
}

function paint(spec, steps, width) {
  const layers = spec.stacked ? stack(spec.series, steps) : spec.series;
  const all = layers.flatMap((each) => [...each.values, ...(each.low || []), ...(each.high || [])]).filter((v) => v !== null);
  let low = spec.stacked ? 0 : Math.min(...extent(all)), high = Math.max(...extent(all));
  if (low === high) { const pad = Math.abs(low) / 2 || 1; low -= low === 0 ? 0 : pad; high += pad; }
  if (low > 0 && low < high / 2) low = 0;
  high += (high - low) * 0.05;
  const [first, last] = spec.range || [steps[0], steps[steps.length - 1]], height = spec.height || HEIGHT;
  const inner = width - MARGIN.left - MARGIN.right, tall = height - MARGIN.top - MARGIN.bottom;
  const x = (step) => MARGIN.left + (last === first ? inner / 2 : ((step - first) / (last - first)) * inner);
  const y = (value) => MARGIN.top + tall - ((value - low) / (high - low)) * tall;
  const from = spec.series.map((each) => `${each.label}: ${number(each.values[0])} to ${number(each.values[each.values.length - 1])}`);
  const picture = svg("svg", { width, height, tabindex: 0, role: "img",
    "aria-label": `${spec.title}, steps ${first} to ${last}. ${from.join("; ")}` });
  for (const value of ticks(low, high, 4)) {
    picture.append(svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value), class: "grid" }));
    picture.append(text(MARGIN.left - 6, y(value) + 4, number(value), "end"));
  }
  for (const step of ticks(first, last, Math.max(2, width / 110)).filter(Number.isInteger)) {
    picture.append(text(x(step), height - 20, String(step), "middle"));
  }
  picture.append(text(2, 12, spec.unit || "", "start"), text(width - MARGIN.right, height - 4, "optimizer step", "end"));
  for (const each of layers) {
    if (each.low) picture.append(svg("path", { d: area(each, x, y), fill: each.color, "fill-opacity": spec.stacked ? 0.85 : 0.18 }));
    if (spec.stacked) continue;
    const curve = (values, look) => picture.append(svg("path", { d: line({ steps: each.steps, values }, x, y), fill: "none",
      stroke: each.color, "stroke-width": 1.8, "stroke-dasharray": each.dash, "stroke-linejoin": "round", ...look }));
    curve(each.values, each.smooth ? { "stroke-width": 1, "stroke-dasharray": "", "stroke-opacity": 0.45 } : {});
    if (each.smooth) curve(each.smooth, { "stroke-width": 3 });
    if (each.steps.length <= DOTS && !each.smooth) {
      each.steps.forEach((step, i) => each.values[i] === null
        || picture.append(svg("circle", { cx: x(step), cy: y(each.values[i]), r: each.steps.length === 1 ? 3.5 : 2, fill: each.color })));
    }
  }
  const rule = svg("line", { y1: MARGIN.top, y2: height - MARGIN.bottom, class: "rule" });
  picture.append(rule);
  return { picture, x, rule };
}

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  return low > high ? [0, 1] : [low, high];
}

function stack(series, steps) {
  const base = steps.map(() => 0);
  return series.map((each) => {
    const low = [...base];
    steps.forEach((step, i) => { const at = each.at.get(step); base[i] += at === undefined ? 0 : each.values[at] || 0; });
    return { ...each, steps, values: [...base], low, high: [...base] };
  });
}

function line(each, x, y) {
  let path = "", pen = "M";
  each.steps.forEach((step, i) => {
    if (each.values[i] === null) { pen = "M"; return; }
    path += `${pen}${x(step).toFixed(1)} ${y(each.values[i]).toFixed(1)}`;
    pen = "L";
  });
  return path;
}

function area(each, x, y) {
  const along = (values, i) => `${x(each.steps[i]).toFixed(1)} ${y(values[i]).toFixed(1)}`;
  const there = each.steps.map((_, i) => along(each.high, i));
  const back = each.steps.map((_, i) => along(each.low, i)).reverse();
  return `M${there.join("L")}L${back.join("L")}Z`;
}

function text(x, y, content, anchor) {
  const node = svg("text", { x, y, "text-anchor": anchor });
  node.textContent = content;
  return node;
}
