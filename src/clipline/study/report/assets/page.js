"use strict";
// Draws the report from the JSON beside it. Text of runs goes onto the page as text only (textContent), never as HTML.
(() => {
  const MARKERS = { circle: "●", square: "■", up: "▲", diamond: "◆", down: "▼", star: "★", plus: "✚" }; // the first five in the order of colours
  const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
  const MANY = 12;         // legend entries from which on the legend scrolls
  const FEW = 3;           // curves up to which points are marked
  const READ_OUT = 6;      // curves whose values are all written below a chart; of more, the nearest one's
  const TABLE_RUNS = 10;   // runs whose every round stands in a table; of more, a line each
  const poll = Number(document.documentElement.dataset.poll);
  const main = document.getElementById("page");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const state = { hidden: new Set(), task: null, metric: null, sort: null, each: false, printing: false };
  let data = JSON.parse(document.getElementById("data").textContent);
  let charts = [];

  // Elements ---------------------------------------------------------------------------------------------------
  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || (value === false && !name.startsWith("aria-"))) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "style") Object.assign(node.style, value);
      else node.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : String(value));
    }
    for (const child of children.flat()) {
      if (child !== null && child !== undefined) node.append(child instanceof Node ? child : String(child));
    }
    return node;
  }
  const short = (value, digits = 4) => {
    if (value === null || value === undefined) return "–";
    if (typeof value !== "number") return String(value);
    if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
    const rounded = Number(value.toPrecision(digits));
    return rounded !== 0 && (Math.abs(rounded) < 1e-3 || Math.abs(rounded) >= 1e9) ? rounded.toExponential().replace("+", "") : String(rounded);
  };
  const list = (names, most = 8) =>
    names.slice(0, most).join(", ") + (names.length > most ? ` and ${names.length - most} more` : "");
  const count = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

  function table(columns, rows, attributes) {
    const head = columns.map((c) => el("th", { scope: "col", class: c.number ? "number" : null }, c.head || c.name || c));
    const body = rows.map((row) => el("tr", null, row.map((cell, i) =>
      el("td", { class: columns[i].number ? "number" : "words" }, cell instanceof Node ? cell : short(cell, 5)))));
    return el("table", attributes, el("thead", null, el("tr", null, head)), el("tbody", null, body));
  }
  const pairs = (rows) => el("dl", { class: "pairs" }, rows.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))));
  // Filled when it is opened: two hundred tables would make the page slow.
  function folded(key, title, fill, open = false) {
    const node = el("details", { id: key, open }, el("summary", null, title));
    const once = () => { if (node.open && node.childElementCount === 1) node.append(fill()); };
    node.addEventListener("toggle", once);
    if (open) once();
    node.refill = () => { while (node.childElementCount > 1) node.lastChild.remove(); once(); };
    return node;
  }

  // Groups: the entries of the legend. Runs that differ by chance alone share one. ------------------------------
  const darkNow = () => dark.matches && !state.printing;
  const shownRuns = () => data.runs.filter((run) => state.task === null || run.task === state.task);
  function groups() {
    const first = new Map();
    shownRuns().forEach((run) => { if (!first.has(run.label)) first.set(run.label, run); });
    const labels = [...first.keys()], runs = [...first.values()];
    const clips = [...new Set(runs.map((run) => run.clip_kind))].sort(byNumber), noises = [...new Set(runs.map((run) => run.noise))].sort((a, b) => a - b);
    const pairs = new Set(runs.map((run) => `${run.clip_kind} ${run.noise}`));
    // Of a study: clip and noise tell its groups apart, or its many clips matter most.
    const told = runs.some((run) => run.label !== run.name) && (pairs.size === runs.length || clips.length > FEW);
    if (!told && labels.length <= 2 * colours().runs.length) return new Map(labels.map((label, i) => [label, { label, marked: labels.length <= FEW, ...look(i) }]));
    // Clips and noises have an order: the colour is the clip's, the dash the noise's; fixed clips are drawn thinner.
    const kind = (clip) => clip.replace(/ .*/, "");
    const several = new Set(clips.map(kind)).size > 1;
    return new Map(runs.map((run) => {
      const alike = clips.filter((clip) => kind(clip) === kind(run.clip_kind)), z = noises.indexOf(run.noise);
      const shown = clips.length === 1 ? ordered(z, noises.length) : alike.length > 1 ? ordered(alike.indexOf(run.clip_kind), alike.length) : lookOf(run.clip_kind === "none" ? "plain" : "accent");
      return [run.label, { label: run.label, ...shown, dash: clips.length === 1 ? [] : DASHES[z % DASHES.length],
        width: several && kind(run.clip_kind) === "fixed" ? 1 : 2 }];
    }));
  }
  const byNumber = (a, b) => a.localeCompare(b, undefined, { numeric: true });
  const colours = () => data.colours[darkNow() ? "dark" : "light"];
  const marker = (i) => Object.keys(MARKERS)[i % 5];
  // What has no order: a colour each, and dashes where there are more than colours.
  function look(i) {
    const { runs } = colours();
    return { color: runs[i % runs.length], dash: DASHES[Math.floor(i / runs.length) % DASHES.length], marker: marker(i) };
  }
  // The i-th of so many that have an order, as `ordered_colours` in plotting.py.
  function ordered(i, of) {
    const stops = colours().ordered, place = (i * (stops.length - 1)) / Math.max(of - 1, 1), left = Math.min(Math.floor(place), stops.length - 2);
    const part = (stop, k) => parseInt(stops[stop].slice(1 + 2 * k, 3 + 2 * k), 16);
    const mixed = [0, 1, 2].map((k) => Math.round(part(left, k) + (part(left + 1, k) - part(left, k)) * (place - left)));
    return { color: `#${mixed.map((value) => value.toString(16).padStart(2, "0")).join("")}`, dash: [], marker: marker(i) };
  }
  // As `Look` in directory.py.
  function lookOf(which) {
    if (Array.isArray(which)) return ordered(...which);
    if (which === "accent") return { color: colours().accent, dash: [], marker: "star", width: 3 };
    return which === "plain" ? { color: axisLook().stroke, dash: [], marker: "plus" } : look(which);
  }
  const chip = (entry) => el("span", { class: "chip", "aria-hidden": "true",
    style: { borderTopColor: entry.color, borderTopStyle: entry.dash.length ? "dashed" : "solid", borderTopWidth: `${(entry.width || 2) + 1}px` } },
    entry.marked ? el("span", { class: "mark", style: { color: entry.color } }, MARKERS[entry.marker]) : null);
  function toggle(entry, pressed, onchange, title) {
    const button = el("button", { type: "button", "aria-pressed": pressed, title }, chip(entry), el("span", null, entry.label));
    button.addEventListener("click", () => {
      const now = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", now);
      onchange(now);
    });
    return button;
  }

  // Charts -----------------------------------------------------------------------------------------------------
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  function axisLook() {
    const print = state.printing;
    return { stroke: print ? "#333333" : css("--quiet"), grid: { stroke: print ? "#dddddd" : css("--line"), width: 1 },
      ticks: { stroke: print ? "#dddddd" : css("--line"), width: 1, size: 5 },
      font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", labelSize: 18 };
  }
  const widthOf = (node) => (state.printing ? 316 : Math.max(240, node.clientWidth || 320));
  const HEIGHT = 250;

  // `spec`: title, note, x_label, series [{label, color, dash, x, y, points, width, hidden, low, high}], log, range, xs, ticks,
  // numbers() for the table behind. The chart is kept in `charts`, to be drawn again in another theme or size.
  function chart(key, make) {
    const plot = el("div", { class: "plot", tabindex: "0", role: "group" });
    const readout = el("p", { class: "readout" }), tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    const save = (kind, text) => () => download(`${(kept.spec.title || key).replace(/[^\w.-]+/g, "_")}.${kind}`, text(kept));
    const saves = el("p", { class: "saves on-screen" }, el("button", { type: "button", onclick: save("csv", csvOf) }, "CSV"),
      el("button", { type: "button", onclick: save("svg", svgOf) }, "SVG"));
    const legend = el("div");
    const title = el("h3");
    const note = el("p", { class: "quiet" });
    const kept = { key, make, plot, readout, tip, u: null, spec: null };
    const numbers = folded(`${key}-numbers`, "The numbers behind this chart", () => kept.spec.numbers());
    kept.box = el("div", { class: "chart", id: key, role: "group", "aria-labelledby": `${key}-title` },
      title, note, legend, plot, readout, saves, numbers);
    title.id = `${key}-title`;
    kept.draw = () => {
      if (kept.u) kept.u.destroy();
      kept.u = null;
      plot.replaceChildren();
      const spec = (kept.spec = make());
      title.textContent = spec.title;
      note.textContent = spec.note || "";
      note.hidden = !spec.note;
      legend.replaceChildren(spec.legend || "");
      const drawn = spec.series.filter((one) => one.x.length);
      numbers.hidden = saves.hidden = !drawn.length;
      if (!drawn.length) {
        plot.removeAttribute("tabindex");
        note.hidden = true;
        plot.append(el("p", { class: "nothing" }, spec.nothing || "nothing was recorded"));
        return;
      }
      plot.setAttribute("tabindex", "0");
      plot.setAttribute("aria-label", `${spec.title}: ${count(drawn.filter((one) => !one.edge).length, "curve")}. Left and right arrow keys read values.`);
      kept.series = drawn;
      kept.u = new uPlot(options(kept, spec, drawn), joined(drawn), plot);
      plot.append(tip);
      if (numbers.open) numbers.refill();
    };
    kept.resize = () => kept.u && kept.u.setSize({ width: widthOf(plot), height: HEIGHT });
    kept.show = () => {
      if (!kept.u) return;
      kept.u.batch(() => kept.series.forEach((one, i) => {
        const show = !one.hidden();
        if (kept.u.series[i + 1].show !== show) kept.u.setSeries(i + 1, { show });
      }));
      if (numbers.open) numbers.refill();
    };
    plot.addEventListener("keydown", (event) => move(kept, event));
    charts.push(kept);
    return kept.box;
  }

  // Files: all values of a chart as CSV, and the chart as it stands as SVG.
  function download(name, text) {
    const url = URL.createObjectURL(new Blob([text], { type: name.endsWith("svg") ? "image/svg+xml" : "text/csv" }));
    el("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }
  function csvOf({ spec, series }) {
    const table = joined(series), cell = (v) => (v === null || v === undefined ? "" : /[",\n]/.test(v) ? `"${String(v).replaceAll('"', '""')}"` : v);
    const names = series.map((one) => `${one.label}${one.edge ? ` ${one.edge}` : one.mean ? " mean" : ""}`);
    const rows = table[0].map((x, i) => [spec.ticks ? spec.ticks[x] : x, ...series.map((_, k) => table[k + 1][i])]);
    return [[spec.ticks ? spec.x_label : "round", ...names], ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
  }
  function svgOf({ u, spec, series }) {
    const px = devicePixelRatio, { left, top, width, height } = u.bbox, look = axisLook(), space = "http://www.w3.org/2000/svg";
    const put = (tag, attributes, text = "") => {
      const node = document.createElementNS(space, tag);
      Object.entries(attributes).forEach(([name, value]) => node.setAttribute(name, value));
      node.textContent = text;
      root.append(node);
    };
    const at = (value, scale) => (u.valToPos(value, scale, true) / px).toFixed(1), shown = series.filter((one) => !one.hidden() && !one.edge);
    const root = document.createElementNS(space, "svg"), high = u.height + 18 * (shown.length + 1);
    Object.entries({ xmlns: space, viewBox: `0 0 ${u.width} ${high}`, "font-family": "sans-serif", "font-size": 11, fill: look.stroke }).forEach(([n, v]) => root.setAttribute(n, v));
    put("rect", { width: "100%", height: "100%", fill: css("--paper") });
    u.axes.forEach(({ scale, _splits: places, _values: words }) => (places || []).forEach((place, i) => {
      const p = at(place, scale), x = scale === "x";
      if (words[i] === null || words[i] === undefined || words[i] === "") return;
      put("line", x ? { x1: p, x2: p, y1: top / px, y2: (top + height) / px, stroke: look.grid.stroke } : { y1: p, y2: p, x1: left / px, x2: (left + width) / px, stroke: look.grid.stroke });
      put("text", x ? { x: p, y: (top + height) / px + 16, "text-anchor": "middle" } : { x: left / px - 8, y: Number(p) + 4, "text-anchor": "end" }, words[i]);
    }));
    put("text", { x: (left + width / 2) / px, y: u.height - 4, "text-anchor": "middle" }, spec.x_label);
    const line = (one) => one.x.map((x, i) => [x, one.y[i]]).filter(([, y]) => y !== null && y !== undefined).map(([x, y]) => `${at(x, "x")},${at(y, "y")}`);
    series.forEach((one, i) => {
      if (one.edge === "highest" && !one.hidden()) put("polygon", { points: [...line(one), ...line(series[i + 1]).reverse()].join(" "), fill: one.color, "fill-opacity": 0.2 });
    });
    shown.forEach((one, i) => {
      const points = line(one), y = u.height + 18 * (i + 1);
      if (one.dots || one.lone) points.forEach((p) => put("circle", { cx: p.split(",")[0], cy: p.split(",")[1], r: 3, fill: one.color }));
      else put("polyline", { points: points.join(" "), fill: "none", stroke: one.color, "stroke-width": one.width || 1.75, "stroke-dasharray": (one.dash || []).join(" ") || "none" });
      put("rect", { x: 10, y: y - 8, width: 18, height: 4, fill: one.color });
      put("text", { x: 34, y: y - 2 }, one.label);
    });
    return new XMLSerializer().serializeToString(root);
  }

  function joined(series) {
    const first = series[0].x;
    const alike = series.every((one) => one.x === first || (one.x.length === first.length && one.x.every((x, i) => x === first[i])));
    return alike ? [first, ...series.map((one) => one.y)] : uPlot.join(series.map((one) => [one.x, one.y]));
  }

  function options(kept, spec, drawn) {
    const look = axisLook();
    const many = drawn.filter((one) => !one.edge).length > 40;
    const x = { ...look, label: spec.x_label, size: 30, labelGap: 0 };
    if (spec.ticks) {
      x.splits = () => spec.ticks.map((_, i) => i);
      x.values = (u, splits) => splits.map((i) => spec.ticks[i].replace(", ", "\n"));
      if (spec.ticks.some((tick) => tick.includes(", "))) x.size = 46;
      x.grid = { show: false };
    } else x.incrs = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 1e6];
    const y = { ...look, size: (u, labels) => Math.max(58, 20 + 7 * Math.max(0, ...(labels || []).map((label) => label.length))),
      values: (u, splits, axis, space, step) => splits.map((v) => (v === null ? "" : spec.log ? short(v, 3) : v.toFixed(digitsOf(step)))) };
    if (spec.log) {
      const round = (u, splits) => splits.map((v) => (logTick(v, u.scales.y) ? v : null));
      Object.assign(y, { filter: round, grid: { ...look.grid, filter: round }, ticks: { ...look.ticks, filter: round } });
    }
    const named = spec.ends ? drawn.filter((one) => one.x.length > 1) : [];
    return {
      width: widthOf(kept.plot), height: HEIGHT, legend: { show: false },
      padding: [null, named.length ? 16 + 6.2 * Math.max(...named.map((one) => one.label.length)) : null, null, null],
      cursor: { y: false, drag: { x: !spec.ticks, y: false }, focus: { prox: many ? 30 : -1 }, points: { show: !many, size: 7 },
        dataIdx: (u, seriesIndex, i) => nearest(u.data[seriesIndex], i),
        sync: spec.ticks ? undefined : { key: "rounds", setSeries: false, scales: ["x", null] } },
      bands: drawn.flatMap((one, i) => (one.edge === "highest" ? [{ series: [i + 1, i + 2], fill: `${one.color}33` }] : [])),
      focus: { alpha: many ? 0.15 : 1 },
      scales: { x: { time: false, range: spec.ticks ? [-0.4, spec.ticks.length - 0.6] : spec.span },
        y: { distr: spec.log ? 3 : 1, range: spec.log ? logRange : spec.range } },
      axes: [x, y],
      series: [{}, ...drawn.map((one) => ({
        label: one.label, stroke: one.edge ? "transparent" : one.color, dash: one.dash, width: one.edge ? 0 : (one.width || 1.75) / (many ? 2 : 1), spanGaps: !spec.ticks, show: !one.hidden(),
        paths: one.dots || one.lone ? () => null : undefined, alpha: one.dots ? 0.8 : 1,
        points: { show: Boolean(one.dots) && !one.edge, size: one.dots, fill: one.color, stroke: one.color },
      }))],
      hooks: {
        draw: [(u) => { intervals(u, drawn); drawn.forEach((one) => marks(u, one)); ends(u, named); (spec.levels ? spec.levels() : []).forEach((level) => line(u, level)); }],
        setCursor: [(u) => read(kept, u)],
        setSeries: [(u) => read(kept, u)],
      },
    };
  }

  // As many digits after the point as the step between two labels needs: 0.0005 has four, 2.5 has one.
  function digitsOf(step) {
    for (let digits = 0; digits < 12; digits++) if (Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) < 1e-6) return digits;
    return 12;
  }

  // Of a logarithmic axis: out to the next whole digit on both sides, so that the curve fills the chart (uPlot goes to powers of ten).
  function logRange(u, low, high) {
    if (!(low > 0) || !Number.isFinite(high)) return [0.1, 1];
    const whole = (value, round) => {
      const power = 10 ** Math.floor(Math.log10(value) + 1e-9);
      return Number((round(Number((value / power).toPrecision(9))) * power).toPrecision(3));
    };
    const [from, to] = [whole(low, Math.floor), whole(high, Math.ceil)];
    return from < to ? [from, to] : [whole(from / 2, Math.floor), whole(to * 2, Math.ceil)];
  }

  // On a logarithmic axis: powers of ten, fewer on a long one, and on a short one also twice and five times these.
  function logTick(value, scale) {
    const power = Math.floor(Math.log10(value) + 1e-9);
    const digit = Number((value / 10 ** power).toPrecision(3));
    const decades = Math.log10(scale.max / scale.min);
    return (digit === 1 && power % Math.ceil(decades / 8) === 0) || (decades <= 2.01 && (digit === 2 || digit === 5)) || (decades <= 0.7 && Number.isInteger(digit));
  }

  function nearest(values, i) {
    if (i === null || values[i] !== null && values[i] !== undefined) return i;
    for (let step = 1; step < values.length; step++) {
      if (values[i - step] !== null && values[i - step] !== undefined) return i - step;
      if (values[i + step] !== null && values[i + step] !== undefined) return i + step;
    }
    return i;
  }

  function line(u, { value, color }) {
    const at = u.valToPos(value, "y", true);
    if (!(at >= u.bbox.top && at <= u.bbox.top + u.bbox.height)) return;
    u.ctx.save();
    u.ctx.strokeStyle = color;
    u.ctx.lineWidth = devicePixelRatio;
    u.ctx.setLineDash([6 * devicePixelRatio, 5 * devicePixelRatio]);
    u.ctx.beginPath();
    u.ctx.moveTo(u.bbox.left, at);
    u.ctx.lineTo(u.bbox.left + u.bbox.width, at);
    u.ctx.stroke();
    u.ctx.restore();
  }

  function intervals(u, drawn) {
    u.ctx.save();
    u.ctx.lineWidth = 1.5 * devicePixelRatio;
    drawn.forEach((one) => {
      if (!one.low || one.hidden()) return;
      one.x.forEach((x, i) => {
        if (one.low[i] === null || one.high[i] === null) return;
        u.ctx.strokeStyle = (one.looks && one.looks[i] || one).color;
        const at = u.valToPos(x, "x", true), cap = 6 * devicePixelRatio;
        const [low, high] = [u.valToPos(one.low[i], "y", true), u.valToPos(one.high[i], "y", true)];
        u.ctx.beginPath();
        for (const [a, b, c, d] of [[at, low, at, high], [at - cap, low, at + cap, low], [at - cap, high, at + cap, high]]) {
          u.ctx.moveTo(a, b);
          u.ctx.lineTo(c, d);
        }
        u.ctx.stroke();
      });
    });
    u.ctx.restore();
  }

  function marks(u, one) {
    if (!one.points || one.dots || one.edge || one.hidden()) return;
    const unit = (one.width > 2 || one.lone ? 6 : 4) * devicePixelRatio, turn = Math.PI / 180;
    const round = (x, y, angles, far = () => 1.2) => angles.forEach((angle, k) => u.ctx.lineTo(x + unit * far(k) * Math.sin(angle * turn), y - unit * far(k) * Math.cos(angle * turn)));
    const shapes = {
      circle: (x, y) => u.ctx.arc(x, y, unit, 0, 2 * Math.PI),
      square: (x, y) => u.ctx.rect(x - unit * 0.9, y - unit * 0.9, 1.8 * unit, 1.8 * unit),
      up: (x, y) => round(x, y, [0, 120, 240]), down: (x, y) => round(x, y, [60, 180, 300]), diamond: (x, y) => round(x, y, [0, 90, 180, 270]),
      star: (x, y) => round(x, y, [...Array(10).keys()].map((k) => 36 * k), (k) => (k % 2 ? 0.55 : 1.4)),
      plus: (x, y) => { u.ctx.rect(x - unit, y - unit / 3, 2 * unit, unit / 1.5); u.ctx.rect(x - unit / 3, y - unit, unit / 1.5, 2 * unit); },
    };
    u.ctx.save();
    one.x.forEach((x, i) => {
      if (one.y[i] === null || x < u.scales.x.min || x > u.scales.x.max) return;
      const shown = one.looks && one.looks[i] || one;
      u.ctx.fillStyle = shown.color;
      u.ctx.beginPath();
      shapes[shown.marker](u.valToPos(x, "x", true), u.valToPos(one.y[i], "y", true));
      u.ctx.fill();
    });
    u.ctx.restore();
  }

  // Names lines where they end, as `label_ends` in plotting.py.
  function ends(u, named) {
    const found = named.filter((one) => !one.hidden()).map((one) => ({ one, i: one.y.findLastIndex((v) => v !== null) })).filter(({ i }) => i >= 0);
    const at = found.map(({ one, i }) => u.valToPos(one.y[i], "y", true)), gap = 14 * devicePixelRatio;
    const right = u.bbox.left + u.bbox.width;
    u.ctx.save();
    u.ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    u.ctx.textAlign = "left";
    u.ctx.textBaseline = "middle";
    spread(at, gap, u.bbox.top, u.bbox.top + u.bbox.height).forEach((y, k) => {
      const { one, i } = found[k];
      u.ctx.strokeStyle = one.color;
      u.ctx.fillStyle = axisLook().stroke;
      u.ctx.lineWidth = devicePixelRatio;
      u.ctx.beginPath();
      u.ctx.moveTo(u.valToPos(one.x[i], "x", true), at[k]);
      u.ctx.lineTo(right + 4 * devicePixelRatio, y);
      u.ctx.stroke();
      u.ctx.fillText(one.label, right + 7 * devicePixelRatio, y);
    });
    u.ctx.restore();
  }
  function spread(places, gap, low, high) {
    const order = places.map((_, i) => i).sort((a, b) => places[a] - places[b]);
    const step = Math.min(gap, (high - low) / Math.max(places.length - 1, 1)), blocks = [];
    order.forEach((i, rank) => {
      blocks.push([places[i] - rank * step]);
      while (blocks.length > 1 && mean(blocks.at(-2)) > mean(blocks.at(-1))) blocks.push(blocks.splice(-2).flat());
    });
    const moved = blocks.flatMap((block) => block.map(() => Math.min(Math.max(mean(block), low), high - step * (places.length - 1))));
    const found = [];
    order.forEach((i, rank) => (found[i] = moved[rank] + rank * step));
    return found;
  }

  function read(kept, u) {
    const at = u.cursor.idx;
    kept.tip.hidden = true;
    if (at === null || at === undefined) { kept.readout.textContent = ""; return; }
    const name = (i) => (kept.spec.ticks ? kept.spec.ticks[u.data[0][i]] : `round ${short(u.data[0][i])}`);
    let shown = kept.series.map((one, i) => [one, i + 1]).filter(([one]) => !one.hidden() && !one.edge);
    if (kept.spec.ticks) shown = shown.filter(([, i]) => typeof u.data[i][at] === "number");
    const far = ([, i]) => { const v = u.data[i][nearest(u.data[i], at)]; return v === null ? Infinity : Math.abs(u.valToPos(v, "y") - u.cursor.top); };
    const closest = [...shown].sort((a, b) => far(a) - far(b));
    if (shown.length > READ_OUT) shown = closest.slice(0, 1);
    const words = ([one, i]) => {
      const place = nearest(u.data[i], at);
      const note = one.notes && one.notes[place] ? ` (${one.notes[place]})` : "";
      return `${one.label} ${short(u.data[i][place])}${place !== at && !kept.spec.ticks ? ` in ${name(place)}` : ""}${note}`;
    };
    kept.readout.textContent = `${name(at)}: ${shown.map(words).join(" · ")}`;
    if (!kept.plot.matches(":hover")) return; // the others of the shared crosshair have their line below
    const over = u.over, left = u.cursor.left > over.clientWidth / 2;
    kept.tip.replaceChildren(el("div", null, name(at)), ...shown.filter((one) => closest.indexOf(one) < FEW).map((one) =>
      el("div", null, el("span", { style: { color: one[0].color } }, "■ "), words(one)))); // those next to the pointer
    Object.assign(kept.tip.style, { top: `${over.offsetTop + 6}px`, left: left ? "" : `${over.offsetLeft + u.cursor.left + 12}px`,
      right: left ? `${kept.plot.clientWidth - over.offsetLeft - u.cursor.left + 12}px` : "" });
    kept.tip.hidden = false;
  }

  function move(kept, event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (!kept.u || !(event.key in steps) || event.target !== kept.plot) return;
    event.preventDefault();
    const u = kept.u, last = u.data[0].length - 1;
    const from = u.cursor.idx === null || u.cursor.idx === undefined ? -1 : u.cursor.idx;
    const to = Math.max(0, Math.min(last, from + steps[event.key]));
    kept.readout.setAttribute("aria-live", "polite");
    const i = u.series.findIndex((s, place) => place > 0 && s.show);
    const value = i > 0 ? u.data[i][nearest(u.data[i], to)] : null;
    u.setCursor({ left: u.valToPos(u.data[0][to], "x"), top: value === null ? 0 : u.valToPos(value, "y") });
  }

  // The four curves --------------------------------------------------------------------------------------------
  function curve(key, title, get, extra = {}) {
    return chart(key, () => {
      const known = groups(), runs = shownRuns();
      const series = seedsTogether(runs.map((run) => ({ ...known.get(run.label), ...get(run), run, label: runs.length > 1 ? nameOf(run) : title,
        hidden: () => state.hidden.has(run.label) })).filter((one) => one.x.length && one.y.some((v) => v !== null)));
      const few = series.filter((one) => !one.edge).length <= FEW;
      if (extra.dots && few) series.forEach((one) => (one.dots = 4));
      if (extra.points && few) series.forEach((one) => (one.points = one.x.length <= 60));
      const more = extra.more ? extra.more(onePer(runs), known) : [];
      const end = Math.max(1, ...runs.map((run) => Math.max(run.rounds, poll && run.planned || 0)));
      return { title, x_label: "round", span: (u, low, high) => (u.data[0].length < 2 || high === null ? [0, end] : [Math.min(low, 1) === 1 || low <= 1 ? 0 : low, high]),
        series: [...series, ...more], ...extra, ...(extra.words ? extra.words(runs) : {}),
        levels: extra.levels && (() => extra.levels(onePer(runs), known)), numbers: () => numbersOf(series, title) };
    });
  }
  const onePer = (runs) => [...new Map(runs.map((run) => [run.label, run])).values()];
  // Runs that differ by seed alone: their mean as one curve, with the lowest and highest of each round as a band.
  function seedsTogether(series) {
    const by = new Map();
    series.forEach((one) => by.set(one.run.label, [...(by.get(one.run.label) || []), one]));
    return [...by].flatMap(([label, members]) => {
      if (members.length === 1) return members;
      const [x, ...columns] = joined(members), rows = x.map((_, i) => columns.map((of) => of[i]).filter((v) => typeof v === "number"));
      const kept = x.map((_, i) => i).filter((i) => rows[i].length), of = (get) => kept.map((i) => get(rows[i]));
      const whole = { ...members[0], x: kept.map((i) => x[i]), label, mean: true };
      return [{ ...whole, y: of(mean) }, { ...whole, label, edge: "highest", y: of((row) => Math.max(...row)) }, { ...whole, label, edge: "lowest", y: of((row) => Math.min(...row)) }];
    });
  }
  const mean = (values) => values.reduce((a, b) => a + b) / values.length;
  const nameOf = (run) => (run.label === run.name ? run.name : `${run.label} [${run.name}]`);
  const released = (name) => (run) => (run.released[name] ? thin(run.released.x, run.released[name]) : { x: [], y: [] });
  function thin(x, y) {
    if (!y.includes(null)) return { x, y };
    const keep = y.map((v, i) => i).filter((i) => y[i] !== null);
    return { x: keep.map((i) => x[i]), y: keep.map((i) => y[i]) };
  }

  function numbersOf(series, title) {
    const shown = series.filter((one) => !one.hidden() && !one.edge);
    if (shown.length > TABLE_RUNS) {
      const rows = shown.map((one) => [one.label, one.y[0], Math.min(...one.y), Math.max(...one.y), one.y.at(-1), one.x.at(-1)]);
      return el("div", { class: "scroll tall", tabindex: "0" }, table(["curve", "first", "lowest", "highest", "last", "last round"]
        .map((name, i) => ({ name, number: i > 0 })), rows));
    }
    if (!shown.length) return el("p", { class: "quiet" }, "All curves are hidden.");
    const joint = joined(shown);
    const rows = joint[0].map((x, i) => [x, ...shown.map((_, k) => joint[k + 1][i])]);
    return el("div", { class: "scroll tall", tabindex: "0" },
      table([{ name: "round" }, ...shown.map((one) => ({ name: shown.length > 1 ? one.label : title, number: true }))], rows));
  }

  function curves() {
    const names = [...new Set(shownRuns().flatMap((run) => Object.keys(run.metrics)))];
    if (!names.includes(state.metric)) state.metric = names[0] || null;
    const target = (runs) => [...new Set(runs.map((run) => run.target).filter((t) => t !== null))];
    const grid = el("div", { class: "grid" },
      curve("chart-metric", "metric", (run) => run.metrics[state.metric] || { x: [], y: [] }, { points: true, nothing: "not measured yet",
        words: () => ({ title: state.metric || "metric", note: measuredOn() }) }),
      curve("chart-clip", "clip (logarithmic)", released("clip"), { log: true, nothing: "no clip: updates were not clipped, or there is no round yet",
        more: (runs, known) => runs.filter((run) => run.released.unprivate_quantile).map((run) => ({
          ...known.get(run.label), ...released("unprivate_quantile")(run), label: `${nameOf(run)}, true quantile (unprivate)`,
          dash: [2, 4], width: 1, hidden: () => state.hidden.has(run.label) })),
        words: (runs) => ({ note: runs.some((run) => run.released.unprivate_quantile) ? "Dotted: the true quantile of the update norms, unprivate." : "" }) }),
      curve("chart-within", "fraction of updates within the clip, noisy", released("fraction_within"), { dots: true,
        range: (u, low, high) => [Math.min(0, low), Math.max(1, high)],
        nothing: "not released: a clip that does not adapt needs no count",
        levels: (runs, known) => runs.filter((run) => run.target !== null && !state.hidden.has(run.label))
          .map((run) => ({ value: run.target, color: runs.length > 1 ? known.get(run.label).color : axisLook().stroke })),
        words: (runs) => ({ note: target(runs).length ? `Dashed: the target, ${list(target(runs).map((t) => short(t)), 5)}.` : "" }) }),
      curve("chart-epsilon", "epsilon so far", released("epsilon"), { range: (u, low, high) => [0, high * 1.05 || 1],
        nothing: "no epsilon: not private, not on record, or nothing released yet", words: (runs) => ({ note: deltas(runs) }) }));
    return [el("h2", { id: "curves" }, "Curves"), toolbar(names), legend(), grid,
      el("p", { class: "quiet on-screen" }, "Drag over a chart to zoom, double-click to see all; with the keyboard, the arrow keys read values."),
      onePer(data.runs).length < data.runs.length ? el("p", { class: "quiet" }, "Of runs that differ by seed alone a line is the mean, and the band goes from the lowest to the highest.") : null,
      data.runs.some((run) => run.rounds > data.points) ? el("p", { class: "quiet" },
        `Of runs of more than ${data.points} rounds, each curve shows ${data.points} evenly spaced rounds and its lowest and highest; the run's own files have all that were recorded.`) : null];
  }
  const deltas = (runs) => {
    const found = [...new Set(runs.filter((run) => run.epsilon !== null && run.delta_text !== null).map((run) => run.delta_text))];
    return found.length ? `At delta ${list(found, 3)}.` : "";
  };
  function measuredOn() {
    const found = [...new Set(shownRuns().map((run) => new Map(run.about).get("measured_on")).filter(Boolean))];
    return found.length === 1 ? `Measured on ${found[0]}.` : "";
  }

  function toolbar(names) {
    const tasks = [...new Set(data.runs.map((run) => run.task))];
    const choose = (label, options, value, onchange) => el("label", null, `${label} `,
      el("select", { onchange: (event) => onchange(event.target.value) },
        options.map((option) => el("option", { value: option, selected: option === value }, option || "(none)"))));
    return el("div", { class: "toolbar" },
      tasks.length > 1 ? choose("Task", tasks, state.task, (task) => { state.task = task; render("curves"); }) : null,
      names.length > 1 ? choose("Metric", names, state.metric, (name) => { state.metric = name; charts.find((c) => c.key === "chart-metric").draw(); }) : null);
  }

  function legend() {
    const known = [...groups().values()];
    if (known.length < 2) return null;
    const runsOf = (label) => shownRuns().filter((run) => run.label === label).length;
    const set = (labels, show) => { labels.forEach((l) => (show ? state.hidden.delete(l) : state.hidden.add(l))); charts.forEach((c) => c.show()); };
    const buttons = known.map((entry) => {
      const several = runsOf(entry.label);
      const button = toggle(entry, !state.hidden.has(entry.label), (show) => set([entry.label], show), several > 1 ? count(several, "run") : null);
      if (several > 1) button.append(el("span", { class: "quiet" }, `× ${several}`));
      button.entry = entry;
      return button;
    });
    const all = (show) => {
      const some = buttons.filter((b) => !b.hidden);
      some.forEach((b) => b.setAttribute("aria-pressed", show));
      set(some.map((b) => b.entry.label), show);
    };
    const long = known.length > MANY;
    const filter = (event) => buttons.forEach((b) => (b.hidden = !b.entry.label.toLowerCase().includes(event.target.value.toLowerCase())));
    return el("div", { role: "group", "aria-label": "Legend: which runs are drawn" },
      known.length > 3 ? el("div", { class: "toolbar" },
        long ? el("label", null, "Find in the legend ", el("input", { type: "search", oninput: filter })) : null,
        el("button", { type: "button", onclick: () => all(true) }, "Show all"), el("button", { type: "button", onclick: () => all(false) }, "Hide all")) : null,
      el("div", { class: long ? "legend long" : "legend" }, buttons));
  }

  // Figures of the paper ---------------------------------------------------------------------------------------
  function figures() {
    if (!data.figures.length) return [];
    const made = data.figures.filter((figure) => figure.lines.length), plain = data.figures.filter((figure) => !figure.lines.length);
    const tasks = new Set(data.figures.map((figure) => figure.task));
    const title = (figure) => (tasks.size > 1 && figure.task ? `${figure.task}: ${figure.title}` : figure.title);
    return [el("h2", { id: "figures" }, "Fixed against adaptive: the paper's figures"), findings(),
      el("div", { class: "grid" }, made.map((figure, i) => figureChart(`figure-${i}`, figure, title(figure)))),
      plain.map((figure, i) => folded(`table-${i}`, title(figure), () => csvTable(figure)))].flat();
  }
  function findings() {
    const found = data.findings || [], words = (lines) => el("ul", null, lines.map((line) => el("li", null, line)));
    if (!found.length) return null;
    return el("div", null, words(found.filter((one) => one.verdict).map((one) => `${one.title}: ${one.verdict}.`)),
      folded("findings", "Everything found, in words", () => el("div", null, found.flatMap((one) => [el("h3", null, one.title), words(one.lines)]))));
  }
  function figureChart(key, figure, title) {
    const hidden = new Set();
    let kept = null;
    const box = chart(key, () => {
      const places = figure.ticks.map((_, i) => i);
      const series = figure.lines.map((line, i) => {
        const points = places.map((x) => line.points.find((p) => p.x === x)), of = (name) => points.map((p) => (p && p[name] !== null ? p[name] : null));
        return { label: line.label, ...lookOf(figure.looks[i]), hidden: () => hidden.has(line.label), x: places, y: of("value"), points: true, marked: true,
          lone: line.points.some((p) => p.look !== null), looks: of("look").map((which) => (which === null ? null : lookOf(which))),
          low: of("low"), high: of("high"), notes: of("note") };
      });
      const ends = figure.lines.flatMap((line) => line.points.flatMap((p) => [p.value, p.low, p.high])).filter((v) => v !== null);
      const [low, high] = [Math.min(...ends), Math.max(...ends)], pad = (high - low) * 0.08 || Math.abs(high) * 0.05 || 1;
      const interval = figure.lines.some((line) => line.points.some((p) => p.low !== null));
      const [below, scaled] = figure.x_label.split("; "); // the whole is too long for a narrow chart
      return { title, x_label: below, ticks: figure.ticks, series, ends: series.length > 1 && series.every((one) => one.label.length < 17), range: () => [low - pad, high + pad],
        note: [figure.metric === "value" ? "" : `The metric is ${figure.metric}${figure.lower_is_better ? ", lower is better" : ""}.`, !interval ? "" : figure.name === "fig7" ? "Bars: 95% interval of the mean over seeds, on the test users." : "Bars: the interval in the table.",
          figure.name === "fig3" ? "Dashed: no clipping." : "", scaled ? `z is for 100 users a round; ${scaled}.` : ""].filter(Boolean).join(" "),
        legend: figure.lines.length > 1 ? el("div", { class: "legend", role: "group", "aria-label": `Legend of ${title}` }, series.map((one) =>
          toggle(one, !hidden.has(one.label), (show) => { if (show) hidden.delete(one.label); else hidden.add(one.label); kept.show(); }))) : null,
        levels: () => figure.lines.flatMap((line) => line.points.filter((p) => p.look === "plain").map((p) => ({ value: p.value, color: axisLook().stroke }))),
        numbers: () => (figure.columns.length ? csvTable(figure) : pointsTable(figure)) };
    });
    kept = charts.at(-1);
    return box;
  }
  const pointsTable = (figure) => el("div", { class: "scroll", tabindex: "0" }, table([{ name: figure.x_label },
    ...figure.lines.map((line) => ({ name: line.label, number: true }))], figure.ticks.map((tick, i) => [tick, ...figure.lines.map((line) => {
    const point = line.points.find((p) => p.x === i);
    return point ? `${short(point.value)}${point.note ? ` (${point.note})` : ""}` : "–";
  })])));
  function csvTable(figure) {
    const cut = figure.rows_in_file > figure.rows.length;
    return el("div", { class: "scroll tall", tabindex: "0" },
      cut ? el("p", { class: "quiet" }, `The first ${figure.rows.length} of ${figure.rows_in_file} rows.`) : null,
      table(figure.columns.map((name) => ({ name })), figure.rows));
  }

  // Words and tables -------------------------------------------------------------------------------------------
  function failures() {
    if (!data.failures.length) return null;
    const named = (entry) => (data.runs.length > 1 ? ` (${entry.runs.length > 8 ? count(entry.runs.length, "run") : list(entry.runs)})` : "");
    return el("section", { class: "caution", id: "failures", "aria-labelledby": "failures-title" },
      el("h2", { id: "failures-title" }, data.runs.length > 1 ? "Some trainings did not go well" : "This training did not go well"),
      el("ul", null, data.failures.map((entry) => el("li", null, entry.text, named(entry)))));
  }
  function banner() {
    if (!data.warnings.length) return null;
    const n = data.runs.length;
    const which = n === 1 ? "Not private" : `Not private: ${data.unprivate_runs === n ? "all" : data.unprivate_runs} of ${count(n, "run")}`;
    return el("section", { class: "banner", id: "not-private", "aria-labelledby": "not-private-title" }, el("h2", { id: "not-private-title" }, which),
      el("ul", null, data.warnings.map((entry) => el("li", null, entry.text, n > 1 ? ` (${entry.runs.length > 8 ? count(entry.runs.length, "run") : list(entry.runs)})` : ""))));
  }
  function caution() {
    if (!data.cautions.length) return null;
    const items = data.cautions.map((entry) => el("li", null, entry.text, data.runs.length > 1 && entry.runs.length ? ` (${entry.runs.length > 8 ? count(entry.runs.length, "run") : list(entry.runs)})` : ""));
    return el("section", { class: "caution", "aria-label": "To know" }, el("ul", null, items));
  }
  function tiles() {
    if (data.runs.length !== 1) return null;
    const [run] = data.runs;
    const tile = (name, value, below, bad) => el("div", { class: "tile" }, el("span", { class: "quiet" }, name), el("b", { class: bad ? "bad" : null }, value), el("span", { class: "quiet" }, below || ""));
    return el("div", { class: "tiles" },
      Object.entries(run.final).slice(0, 3).map(([name, value]) => tile(name, short(value), [evaluatedAt(run, name), measuredOn().replace(/,.*/, "."), bestAndLast(run, name)].filter(Boolean).join(" "))),
      tile("epsilon", run.epsilon === null ? (!run.rounds ? "–" : run.on_record ? "infinite" : "none") : run.private ? run.epsilon_text : el("s", null, run.epsilon_text), run.epsilon === null ? (!run.rounds ? "nothing released yet" : run.on_record ? "not private" : "no guarantee is on record") : run.private ? `at delta ${run.delta_text}` : `not private: ${run.reasons[0]}`, run.epsilon === null ? run.rounds > 0 : !run.private),
      tile("rounds", run.planned ? `${run.rounds} of ${run.planned}` : run.rounds, stateWords(run.state)),
      tile("clip", run.clip_end === null ? "–" : short(run.clip_end), run.clip_kind === "none" ? "updates are not clipped" : run.clip_kind));
  }
  const stateWords = (word) => ({ finished: "finished", budget: "stopped by its budget", early: "stopped early, as the metric got no better", interrupted: "unfinished: interrupted, can be resumed",
    diverged: "diverged", "not ended": "unfinished: running, or broken off" })[word] || word;
  function bestAndLast(run, name) {
    const ends = run.best_and_last;
    if (!ends || ends.metric !== name || ends.best_rounds === ends.last_rounds) return "";
    return `Best ${short(ends.best)} after ${count(ends.best_rounds, "round")}, last ${short(ends.last)} after ${ends.last_rounds}.`;
  }
  // When the last value of a metric was measured, where that is not the end of a run that was done.
  function evaluatedAt(run, name) {
    const at = (run.metrics[name] || { x: [] }).x.at(-1), unfinished = ["interrupted", "not ended"].includes(run.state);
    if (!at || (!unfinished && at === run.rounds)) return "";
    return `${unfinished ? "Unfinished: last" : "Last"} evaluated after ${at} of ${count(unfinished && run.planned ? run.planned : run.rounds, "round")}.`;
  }

  // A row for each configuration: what its seeds have in common, and the mean of their numbers.
  function configurations(runs) {
    const by = new Map();
    runs.forEach((run) => by.set(`${run.task}\n${run.label}`, [...(by.get(`${run.task}\n${run.label}`) || []), run]));
    const middle = (members, of) => { const found = members.map(of).filter((v) => typeof v === "number"); return found.length ? mean(found) : null; };
    const means = (members, part) => Object.fromEntries(Object.keys(members[0][part]).map((name) => [name, middle(members, (run) => run[part][name])]));
    return [...by.values()].map((members) => (members.length === 1 ? members[0] : { ...members[0], name: members[0].label, seeds: members.length,
      final: means(members, "final"), best: means(members, "best"), clip_end: middle(members, (run) => run.clip_end), rounds: middle(members, (run) => run.rounds),
      state: new Set(members.map((run) => run.state)).size === 1 ? members[0].state : "mixed" }));
  }
  const better = (name) => (a, b) => (a ?? null) === null ? 1 : (b ?? null) === null ? -1 : data.runs.some((run) => run.lower.includes(name)) ? a - b : b - a;
  function runsTable() {
    if (data.runs.length < 2) return [];
    const known = groups(), tasks = new Set(data.runs.map((run) => run.task)), grouped = configurations(data.runs);
    const seeds = grouped.length < data.runs.length, rows = seeds && !state.each ? grouped : [...data.runs];
    const own = data.runs.map((run) => Object.keys(run.final)), firsts = new Set(own.flatMap((names) => names.slice(0, 1)));
    const names = [...new Set([...firsts, ...own.flat()])].slice(0, Math.max(4, firsts.size)); // the metric of each task comes first
    const columns = [
      { name: "run", get: (run) => run.name, show: (run) => el("span", null, known.has(run.label) ? chip(known.get(run.label)) : null, " ", run.name) },
      seeds && !state.each ? { name: "seeds", number: true, get: (run) => run.seeds || 1 } : null,
      tasks.size > 1 ? { name: "task", get: (run) => run.task } : null,
      data.runs.some((run) => run.differs) && (!seeds || state.each) ? { name: "differs in", get: (run) => run.differs } : null,
      ...names.flatMap((name, i) => [i < firsts.size ? { name: `best ${name}`, number: true, get: (run) => run.best[name] ?? null } : null,
        { name: i < firsts.size ? `last ${name}` : name, number: true, get: (run) => run.final[name] ?? null }]),
      { name: "epsilon", number: true, get: (run) => run.epsilon, show: (run) => (run.epsilon === null ? el("span", { class: "bad" }, "none") : run.private ? run.epsilon_text : el("span", { class: "bad", title: run.reasons.join("; ") }, el("s", null, run.epsilon_text), " not private")) },
      { name: "clip", get: (run) => run.clip_kind },
      { name: "noise z", number: true, get: (run) => run.noise },
      { name: "last clip", number: true, get: (run) => run.clip_end },
      { name: "rounds", number: true, get: (run) => run.rounds },
      { name: "state", get: (run) => stateWords(run.state) },
    ].filter(Boolean);
    const main = (run) => Object.keys(run.final)[0], best = new Map();
    const some = rows.some((run) => run.private), all = rows.every((run) => run.private);
    rows.filter((run) => run.private || !some).forEach((run) => { const name = main(run), first = best.get(run.task); if (name && (!first || better(name)(run.best[name], first.best[name]) < 0)) best.set(run.task, run); });
    const order = (a, b) => (a === null ? 1 : b === null ? -1 : typeof a === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true }));
    if (state.sort) {
      const { get } = columns.find((c) => c.name === state.sort.name) || columns[0];
      rows.sort((a, b) => (get(a) === null || get(b) === null ? order(get(a), get(b)) : order(get(a), get(b)) * state.sort.way));
    } else rows.sort((a, b) => order(a.task, b.task) || better(main(a))(a.best[main(a)], b.best[main(a)])); // the best first
    const head = columns.map((c) => {
      const sorted = state.sort && state.sort.name === c.name ? state.sort.way : 0;
      return el("th", { scope: "col", class: c.number ? "number" : null, "aria-sort": sorted ? (sorted > 0 ? "ascending" : "descending") : null },
        el("button", { type: "button", id: `sort-${c.name}`, onclick: () => { state.sort = { name: c.name, way: sorted > 0 ? -1 : 1 }; sortAgain(); } }, c.name, sorted ? (sorted > 0 ? " ▲" : " ▼") : ""));
    });
    const body = rows.map((run) => el("tr", { class: best.get(run.task) === run ? "best" : null }, columns.map((c) => el("td", { class: c.number ? "number" : null }, c.show ? c.show(run) : short(c.get(run))))));
    const each = seeds ? el("button", { type: "button", id: "each-seed", "aria-pressed": state.each, class: "on-screen", onclick: () => { state.each = !state.each; sortAgain(); } }, state.each ? "Seeds together" : "Each run by itself") : null;
    const told = el("p", { class: "quiet" }, seeds && !state.each ? "A row is a configuration, its numbers the means over its seeds. " : "",
      `Sorted by ${state.sort ? state.sort.name : "the metric"}. Bold: the best${some && !all ? " of those that are private" : ""}.`);
    return [el("h2", { id: "runs" }, seeds ? `${data.runs.length} runs of ${grouped.length} configurations` : `${data.runs.length} runs`),
      el("div", { id: "runs-part" }, told, each, el("div", { class: "scroll tall", id: "runs-table", tabindex: "0", role: "region", "aria-labelledby": "runs" },
        el("table", null, el("thead", null, el("tr", null, head)), el("tbody", null, body))))];
  }
  function sortAgain() {
    const focus = document.activeElement && document.activeElement.id;
    document.getElementById("runs-part").replaceWith(runsTable()[1]);
    const again = focus && document.getElementById(focus);
    if (again) again.focus();
  }

  function statements() {
    const one = (entry, i) => el("div", { class: entry.private ? "statement" : "statement not-private" },
      data.runs.length === 1 ? null : el("p", { class: "quiet" }, entry.runs.length === data.runs.length ? `All ${entry.runs.length} runs` : entry.runs.length > MANY ? count(entry.runs.length, "run") : list(entry.runs)), el("blockquote", null, entry.void.length ? el("s", null, entry.words) : entry.words),
      entry.void.length ? el("p", { class: "bad" }, `This does not hold: ${entry.void.join("; ")}.`) : null,
      folded(`statement-${i}`, "What this rests on", () => pairs(basis(entry))));
    const made = data.statements.map(one);
    return [el("h2", { id: "privacy" }, "What is promised"), ...made.slice(0, 6),
      made.length > 6 ? el("details", { id: "more-statements" }, el("summary", null, `${made.length - 6} more statements`), made.slice(6)) : null];
  }
  const basis = (entry) => entry.basis.map(([name, value]) => [name, name === "epsilon" && entry.void.length ? el("s", null, value) : value]);
  function settings() {
    const single = data.runs.length === 1;
    const details = data.runs.map((run) => folded(`run-${run.name}`, single ? "Data, and what followed from the settings" : nameOf(run), () => el("div", null,
      pairs([["path", run.path], ...run.about]), run.settings.length ? el("p", null, "Settings of its own") : null, pairs(run.settings),
      run.resolved.length ? el("p", null, "What followed") : null, pairs(run.resolved), pairs(run.circumstances)), single));
    return [el("h2", { id: "settings" }, "Settings, data, machine"), differences(),
      data.shared_settings.length ? folded("shared-settings", single ? "Settings" : "Settings that all runs share", () => el("div", { class: "scroll" }, pairs(data.shared_settings)), single) : null,
      data.shared_circumstances.length ? folded("shared-circumstances", "Machine and versions", () => pairs(data.shared_circumstances), true) : null,
      details.length > 12 ? el("details", { id: "each-run" }, el("summary", null, `Each of the ${details.length} runs`), details) : details];
  }

  function differences() {
    const each = configurations(data.runs), of = each.map((run) => new Map(run.settings));
    const names = [...new Set(of.flatMap((settings) => [...settings.keys()]))].filter((name) => name !== "seed");
    if (each.length < 2 || each.length > MANY || !names.length) return null;
    return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Settings that differ" },
      table([{ name: "differs in" }, ...each.map((run) => ({ name: run.label }))], names.map((name) => [name, ...of.map((settings) => settings.get(name) || "–")])));
  }
  function use() {
    if (!data.use.length) return [];
    return [el("h2", { id: "use" }, "Use this model"), copied(data.use.join("\n"))];
  }
  // Text to copy, with a button that does.
  function copied(text) {
    const button = el("button", { type: "button", class: "on-screen", onclick: () => {
      getSelection().selectAllChildren(code);
      document.execCommand("copy"); // also where a file is opened from disk
      button.textContent = "Copied";
    } }, "Copy");
    const code = el("code", null, text);
    return el("div", { class: "copied" }, el("pre", null, code), button);
  }

  // The page ---------------------------------------------------------------------------------------------------
  function header() {
    return el("header", null, el("h1", null, data.title), el("p", { class: "quiet" }, `${data.scale ? `${data.scale}. ` : ""}Report made ${data.made}.`), copied(data.command),
      poll ? el("p", { id: "live", role: "status" }, liveWords()) : null);
  }
  let contact = "";
  function liveWords() {
    if (contact) return contact;
    const [run] = data.runs;
    const done = run.planned ? `${run.rounds} of ${run.planned} rounds` : count(run.rounds, "round");
    if (["finished", "budget", "early"].includes(run.state)) return `The run has ended after ${done}.`;
    if (!run.rounds) return "Waiting for the first round.";
    return run.state === "interrupted" ? `Interrupted after ${done}; followed in case it is resumed.` : `Following: ${done}.`;
  }

  function render(focus) {
    const open = [...main.querySelectorAll("details")].map((node) => [node.id, node.open]);
    const active = document.activeElement && document.activeElement.id;
    charts.forEach((c) => c.u && c.u.destroy());
    charts = [];
    const tasks = [...new Set(data.runs.map((run) => run.task))];
    if (tasks.length > 1 && !tasks.includes(state.task)) state.task = tasks[0];
    if (tasks.length < 2) state.task = null;
    const known = data.runs.length ? curves() : [];
    main.replaceChildren(...[header(), failures(), banner(), tiles(), caution(), known, data.runs.length ? statements() : null, runsTable(), figures(), use(),
      data.runs.length ? settings() : null].flat(2).filter(Boolean));
    open.forEach(([id, was]) => { const node = id && document.getElementById(id); if (node && node.open !== was) node.open = was; });
    charts.forEach((c) => c.draw());
    const again = focus === "curves" ? main.querySelector(".toolbar select") : active && document.getElementById(active);
    if (again) again.focus({ preventScroll: true });
  }
  const redraw = () => charts.forEach((c) => c.draw());
  function recolour() {
    const known = groups();
    redraw();
    main.querySelectorAll(".legend button").forEach((b) => { if (b.entry && known.has(b.entry.label)) b.querySelector(".chip").replaceWith(chip(known.get(b.entry.label))); });
    if (document.getElementById("runs-table")) sortAgain();
  }
  dark.addEventListener("change", recolour);
  // On paper nothing can be opened: of a few runs all is shown but the numbers behind the charts.
  let opened = [];
  addEventListener("beforeprint", () => {
    state.printing = true;
    opened = data.runs.length > 8 ? [] : [...main.querySelectorAll("details:not([open])")].filter((node) => !node.id.endsWith("-numbers"));
    opened.forEach((node) => { node.open = true; if (node.refill) node.refill(); });
    recolour();
  });
  addEventListener("afterprint", () => { state.printing = false; opened.forEach((node) => (node.open = false)); recolour(); });
  let width = 0;
  new ResizeObserver(() => { if (main.clientWidth !== width && !state.printing) { width = main.clientWidth; charts.forEach((c) => c.resize()); } }).observe(main);

  let seen = null;
  async function follow() {
    try {
      const answer = await fetch("data.json", { headers: seen ? { "If-None-Match": seen } : {}, cache: "no-store" });
      if (answer.status === 200) {
        seen = answer.headers.get("ETag");
        data = await answer.json();
        contact = "";
        render();
      } else if (answer.status === 304) {
        if (contact) { contact = ""; render(); }
      } else throw new Error(String(answer.status));
    } catch {
      contact = "The server has ended: this is the last it sent.";
      document.getElementById("live").textContent = contact;
    }
    setTimeout(follow, poll * 1000);
  }
  render();
  performance.measure("drawn"); // from the start of loading on
  document.documentElement.dataset.ready = "true";
  if (poll) setTimeout(follow, poll * 1000);
})();
