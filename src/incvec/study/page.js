"use strict";
(() => {
  const DATA = JSON.parse(document.getElementById("charts").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const ink = (color) => `var(--c-${color.slice(1)}, ${color})`;
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const shown = (value, signed) => ((signed && value > 0 ? "+" : "") + value.toFixed(2)).replace("-", "−");

  function make(parent, tag, attributes = {}, text) {
    const node = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return parent.appendChild(node);
  }

  function button(parent, text, label, act) {
    const node = parent.appendChild(document.createElement("button"));
    node.type = "button";
    node.textContent = text;
    node.setAttribute("aria-label", label);
    node.addEventListener("click", act);
    return node;
  }

  // Downloads ------------------------------------------------------------------------------------------------

  function download(name, content) {
    const link = document.createElement("a");
    link.download = name;
    link.href = typeof content === "string" && content.startsWith("data:") ? content : URL.createObjectURL(new Blob([content]));
    link.click();
    if (link.href.startsWith("blob:")) setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  // Text that a spreadsheet would run as a formula is quoted.
  function csvCell(value) {
    let text = value === null || value === undefined ? "" : String(value);
    if (typeof value === "string" && /^[=+@\t\r-]/.test(text) && !/^[+-]?[\d.]/.test(text)) text = "'" + text;
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }

  const csv = (rows) => rows.map((row) => row.map(csvCell).join(",")).join("\n") + "\n";

  function chartRows(c) {
    if (c.kind === "bars") return [["run", c.x_label, "deviation", "seeds", "paper"], ...c.bars.map((b) => [b.label, b.value, b.error, b.seeds, b.paper])];
    const name = (k) => c.names[k] ?? k + 1;
    if (c.kind === "heat") return [[c.y_label, c.x_label, "percent"], ...c.matrix.flatMap((row, t) => row.map((value, i) => [name(t), name(i), value]))];
    if (c.kind === "plane") return [[c.x_label, c.y_label, "loss"], ...c.values.flatMap((row, j) => row.map((value, i) => [c.x[i], c.y[j], value]))];
    const head = ["run", c.x_label, ...(c.other_x_label ? [c.other_x_label] : []), c.y_label, "deviation", "seeds"];
    const lines = [...c.lines, ...c.levels.map((level) => ({ ...level, x: level.x.map(() => "") }))];
    return [head, ...lines.flatMap((l) => l.x.map((x, k) => [
      l.label, c.x_names[x] ?? x, ...(c.other_x_label ? [l.other_x[k]] : []), l.y[k], l.errors ? l.errors[k] : null, l.seeds,
    ]))];
  }

  // A picture of a plot as it is on the screen, with its title and legend.
  function picture(plot) {
    const c = plot.chart, whole = document.createElementNS(SVG, "svg"), shift = 34;
    const drawn = plot.svg.cloneNode(true), from = [plot.svg, ...plot.svg.querySelectorAll("*")], to = [drawn, ...drawn.querySelectorAll("*")];
    from.forEach((node, k) => {
      const style = getComputedStyle(node);
      for (const key of ["fill", "stroke", "font-size", "font-family", "opacity", "fill-opacity"]) to[k].style[key] = style[key];
      to[k].removeAttribute("class");
    });
    const page = getComputedStyle(document.documentElement), value = (name) => page.getPropertyValue(name).trim();
    const font = getComputedStyle(document.body).fontFamily;
    drawn.setAttribute("y", shift);
    drawn.setAttribute("width", plot.width);
    const entries = c.kind === "lines" ? [...c.lines, ...c.levels].filter((l) => !plot.hidden.has(l.label)) : c.kind === "plane" ? c.marks : [];
    const height = shift + plot.height + 20 * entries.length + 8;
    make(whole, "rect", { width: plot.width, height, style: `fill:${value("--card")}` });
    const title = make(whole, "text", { x: 10, y: 22, style: `fill:${value("--ink")};font:600 14px ${font}` }, c.title);
    whole.appendChild(drawn);
    entries.forEach((entry, k) => {
      const y = shift + plot.height + 20 * k + 10, color = value(`--c-${entry.style.color.slice(1)}`);
      if (c.kind === "lines") make(whole, "line", { x1: 12, x2: 44, y1: y, y2: y, style: `stroke:${color};stroke-width:2` });
      make(whole, "path", { d: shape(entry.style.marker, 4.5), transform: `translate(28,${y})`, style: `fill:${color};stroke:${color}` });
      make(whole, "text", { x: 54, y: y + 4, style: `fill:${value("--ink")};font:13px ${font}` }, entry.text ? `${entry.label}: ${entry.text}` : entry.label);
    });
    whole.setAttribute("xmlns", SVG);
    whole.setAttribute("width", plot.width);
    whole.setAttribute("height", height);
    plot.holder.appendChild(whole);
    plot.fit(title, plot.width - 20, c.title);
    whole.remove();
    const image = new Image(), scale = 2;
    image.addEventListener("load", () => {
      const canvas = document.createElement("canvas");
      canvas.width = plot.width * scale;
      canvas.height = height * scale;
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      download(`${c.slug}.png`, canvas.toDataURL("image/png"));
    });
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(new XMLSerializer().serializeToString(whole));
  }

  // Matplotlib's markers as paths around the origin.
  function shape(letter, r) {
    const ring = (n, turn, radius = () => r) =>
      "M" + Array.from({ length: n }, (_, k) => {
        const angle = turn + (2 * Math.PI * k) / n;
        return `${(radius(k) * Math.sin(angle)).toFixed(2)},${(-radius(k) * Math.cos(angle)).toFixed(2)}`;
      }).join("L") + "Z";
    const cross = (turn) => {
      const a = r * 0.38, b = r * 1.05;
      const points = [[-a, -b], [a, -b], [a, -a], [b, -a], [b, a], [a, a], [a, b], [-a, b], [-a, a], [-b, a], [-b, -a], [-a, -a]];
      return "M" + points.map(([x, y]) => [x * Math.cos(turn) - y * Math.sin(turn), x * Math.sin(turn) + y * Math.cos(turn)])
        .map((p) => p.map((v) => v.toFixed(2)).join(",")).join("L") + "Z";
    };
    switch (letter) {
      case "s": return ring(4, Math.PI / 4, () => r * 1.2);
      case "D": return ring(4, 0, () => r * 1.2);
      case "d": return `M0,${-r * 1.3}L${r * 0.8},0L0,${r * 1.3}L${-r * 0.8},0Z`;
      case "^": return ring(3, 0, () => r * 1.2);
      case "v": return ring(3, Math.PI, () => r * 1.2);
      case "<": return ring(3, -Math.PI / 2, () => r * 1.2);
      case ">": return ring(3, Math.PI / 2, () => r * 1.2);
      case "p": return ring(5, 0, () => r * 1.1);
      case "h": return ring(6, 0, () => r * 1.1);
      case "H": return ring(6, Math.PI / 6, () => r * 1.1);
      case "8": return ring(8, Math.PI / 8, () => r * 1.1);
      case "P": return cross(0);
      case "X": return cross(Math.PI / 4);
      case "*": return ring(10, 0, (k) => (k % 2 ? r * 0.62 : r * 1.6));
      default: return `M${-r},0A${r},${r} 0 1 0 ${r},0A${r},${r} 0 1 0 ${-r},0Z`;
    }
  }

  function marker(parent, style, x, y, r = 4.5) {
    return make(parent, "path", {
      d: shape(style.marker, r), transform: `translate(${x.toFixed(2)},${y.toFixed(2)})`, "stroke-width": 1.6,
      style: `stroke:${ink(style.color)};fill:${style.hollow ? "var(--card)" : ink(style.color)}`,
    });
  }

  function ticks(low, high, count) {
    const rough = (high - low) / Math.max(count, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough * 0.999);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(+(k * step).toPrecision(12));
    return found;
  }

  function blend(share) {
    const stops = DATA.stops, place = clamp(share, 0, 1) * (stops.length - 1), low = Math.min(Math.floor(place), stops.length - 2);
    const part = (hex, k) => parseInt(hex.slice(1 + 2 * k, 3 + 2 * k), 16);
    const mixed = [0, 1, 2].map((k) => Math.round(part(stops[low], k) + (place - low) * (part(stops[low + 1], k) - part(stops[low], k))));
    const [r, g, b] = mixed.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    // The luminance at which black and white have the same contrast.
    return { fill: `rgb(${mixed})`, ink: 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff" };
  }

  class Plot {
    constructor(figure, chart) {
      this.chart = chart;
      this.hidden = new Set();
      this.current = -1;
      this.holder = figure.querySelector(".plot");
      this.svg = make(this.holder, "svg", { role: "img", tabindex: 0, "aria-label": chart.title });
      this.tip = this.holder.appendChild(document.createElement("div"));
      this.tip.className = "tip";
      this.tip.hidden = true;
      this.tip.setAttribute("role", "status");
      this.full = this.extent();
      this.view = { ...this.full };
      const tools = figure.querySelector(".tools");
      button(tools, "+", "zoom in", () => this.scale(0.7));
      button(tools, "−", "zoom out", () => this.scale(1 / 0.7));
      button(tools, "reset", "show all", () => this.set(this.full));
      if (chart.other_x_label) {
        const other = button(tools, "", "", () => { this.turn(); name(); });
        const name = () => { other.textContent = `x: ${chart.other_x_label.split(" (")[0]}`; other.setAttribute("aria-label", `show ${chart.other_x_label} on the axis`); };
        name();
      }
      button(tools, "CSV", "download the numbers as CSV", () => download(`${chart.slug}.csv`, csv(chartRows(chart))));
      button(tools, "PNG", "download the picture as PNG", () => picture(this));
      if (chart.commands.length) button(tools, "command", "download the commands of these runs", () => download(`${chart.slug}-commands.txt`, chart.commands.join("\n") + "\n"));
      if (chart.kind === "lines") this.legend(figure.querySelector(".legend"), [...chart.lines, ...chart.levels]);
      if (chart.kind === "plane") this.legend(figure.querySelector(".legend"), chart.marks);
      this.listen();
      new ResizeObserver(() => { if (Math.abs(this.holder.clientWidth - this.width) > 1) this.draw(); }).observe(this.holder);
      this.draw();
    }

    // The other axis in place of this one.
    turn() {
      const c = this.chart;
      for (const line of c.lines) [line.x, line.other_x] = [line.other_x, line.x];
      [c.x_label, c.other_x_label] = [c.other_x_label, c.x_label];
      this.full = this.extent();
      this.set(this.full);
    }

    extent() {
      const c = this.chart;
      if (c.kind === "plane") {
        const half = (values) => Math.abs(values.at(-1) - values[0]) / Math.max(1, values.length - 1) / 2;
        const ends = (values) => [Math.min(...values) - half(values), Math.max(...values) + half(values)];
        const [[x0, x1], [y0, y1]] = [ends(c.x), ends(c.y)];
        return { x0, x1, y0, y1 };
      }
      if (c.kind === "heat") return { x0: 0.5, x1: c.matrix.length + 0.5, y0: c.matrix.length + 0.5, y1: 0.5 };
      if (c.kind === "bars") {
        const values = c.bars.flatMap((b) => [b.value - (b.error || 0), b.value + (b.error || 0), b.paper ?? b.value]);
        const low = Math.min(0, ...values), high = Math.max(0, ...values), room = 0.06 * (high - low || 1);
        return { x0: low < 0 ? low - room : 0, x1: high > 0 ? high + room : 0, y0: c.bars.length, y1: 0 };
      }
      const xs = c.lines.flatMap((l) => l.x.map((x) => this.along(x)));
      const ys = c.lines.flatMap((l) => l.y.flatMap((y, k) => [y - (l.errors ? l.errors[k] : 0), y + (l.errors ? l.errors[k] : 0)]));
      ys.push(...c.levels.map((level) => level.y.at(-1)));
      const dx = (Math.max(...xs) - Math.min(...xs) || 1) * 0.04, dy = (Math.max(...ys) - Math.min(...ys) || 1) * 0.08;
      return { x0: Math.min(...xs) - dx, x1: Math.max(...xs) + dx, y0: Math.min(...ys) - dy, y1: Math.max(...ys) + dy };
    }

    along(x) { return this.chart.log ? Math.log10(x) : x; }
    px(x) { const v = this.view; return this.left + ((x - v.x0) / (v.x1 - v.x0)) * (this.right - this.left); }
    py(y) { const v = this.view; return this.bottom - ((y - v.y0) / (v.y1 - v.y0)) * (this.bottom - this.top); }
    ix(p) { const v = this.view; return v.x0 + ((p - this.left) / (this.right - this.left)) * (v.x1 - v.x0); }
    iy(p) { const v = this.view; return v.y0 + ((this.bottom - p) / (this.bottom - this.top)) * (v.y1 - v.y0); }

    set(view) { this.view = { ...view }; this.leave(); this.draw(); }

    scale(factor) {
      const f = this.full, v = this.view;
      const zoomed = (a, b, low, high) => {
        const middle = (a + b) / 2, half = ((b - a) / 2) * factor;
        return Math.abs(half) * 2 >= Math.abs(high - low) ? [low, high] : [middle - half, middle + half];
      };
      const [x0, x1] = zoomed(v.x0, v.x1, f.x0, f.x1);
      const [y0, y1] = this.chart.kind === "bars" ? [f.y0, f.y1] : zoomed(v.y0, v.y1, f.y0, f.y1);
      this.set({ x0, x1, y0, y1 });
    }

    draw() {
      const c = this.chart;
      this.width = this.holder.clientWidth || 320;
      this.narrow = this.width < 480;
      this.svg.replaceChildren();
      this.points = [];
      if (c.kind === "heat") this.height = Math.min(this.width, 460) + (this.tall() ? 60 : 0);
      else if (c.kind === "plane") this.height = clamp((this.width - 70) * (this.full.y1 - this.full.y0) / (this.full.x1 - this.full.x0), 180, 460) + 52;
      else if (c.kind === "bars") this.height = c.bars.length * (this.narrow ? 44 : 30) + 52;
      else this.height = clamp(this.width * 0.62, 230, 360);
      const names = c.kind === "bars" && !this.narrow ? clamp(Math.max(...c.bars.map((b) => b.label.length)) * 8 + 20, 60, this.width * 0.45) : 0;
      // Space for the longest number beside the marks.
      const numbers = c.kind === "bars" ? c.bars.map((b) => shown(b.value, c.signed)) : c.kind === "heat" ? (this.tall() ? c.names.map((name) => this.short(name)) : ["25"]) : ticks(this.view.y0, this.view.y1, 5).map(String);
      const room = (c.kind === "heat" ? 7 : 8) * Math.max(...numbers.map((text) => text.length));
      this.left = c.kind === "bars" ? (this.narrow ? 6 : names) : 30 + room;
      this.right = this.width - (c.kind === "bars" ? 14 + room : 12);
      this.top = 8;
      this.bottom = this.height - (this.tall() ? 30 + 7 * Math.max(...numbers.map((text) => text.length)) : 44);
      this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
      this.svg.setAttribute("height", this.height);
      const id = `clip-${c.slug}`;
      make(make(make(this.svg, "defs"), "clipPath", { id }), "rect", {
        x: this.left - (c.kind === "lines" ? 0 : 1), y: this.top - 4, width: this.right - this.left + 2, height: this.bottom - this.top + 8,
      });
      this[c.kind](id);
      this.near = make(this.svg, "circle", { class: "near", r: 9, visibility: "hidden" });
    }

    lines(id) {
      const c = this.chart, v = this.view;
      const marks = this.axisX();
      for (const y of ticks(v.y0, v.y1, 5)) {
        make(this.svg, "line", { class: "grid", x1: this.left, x2: this.right, y1: this.py(y), y2: this.py(y) });
        make(this.svg, "text", { x: this.left - 6, y: this.py(y) + 4, "text-anchor": "end" }, this.number(y));
      }
      make(this.svg, "text", { class: "title", x: 12, y: (this.top + this.bottom) / 2, transform: `rotate(-90 12 ${(this.top + this.bottom) / 2})`, "text-anchor": "middle" }, c.y_label);
      for (const [x, text] of marks) make(this.svg, "text", { x: this.px(x), y: this.bottom + 16, "text-anchor": "middle" }, text);
      make(this.svg, "line", { class: "axis", x1: this.left, x2: this.right, y1: this.bottom, y2: this.bottom });
      make(this.svg, "text", { class: "title", x: (this.left + this.right) / 2, y: this.height - 8, "text-anchor": "middle" }, c.x_label);
      const inside = make(this.svg, "g", { "clip-path": `url(#${id})` });
      const metric = c.x_label === "tasks learned" ? "LA" : c.y_label.split(",")[0];
      for (const level of c.levels) {
        if (this.hidden.has(level.label)) continue;
        const y = this.py(level.y.at(-1));
        make(inside, "line", { x1: this.left, x2: this.right, y1: y, y2: y, "stroke-width": 1.5, "stroke-dasharray": "9 3 2 3", style: `stroke:${ink(level.style.color)}` });
        this.points.push({ x: this.right - 8, y, name: level.label, text: `${metric} ${shown(level.y.at(-1))}${c.unit}${this.deviation(level, level.y.length - 1)}` });
      }
      for (const line of c.lines) {
        if (this.hidden.has(line.label)) continue;
        const spots = line.x.map((x, k) => [this.px(this.along(x)), this.py(line.y[k])]);
        if (line.errors) {
          const up = line.x.map((x, k) => `${this.px(this.along(x))},${this.py(line.y[k] + line.errors[k])}`);
          const down = line.x.map((x, k) => `${this.px(this.along(x))},${this.py(line.y[k] - line.errors[k])}`).reverse();
          make(inside, "path", { d: `M${[...up, ...down].join("L")}Z`, style: `fill:${ink(line.style.color)};opacity:0.16` });
        }
        make(inside, "path", {
          d: "M" + spots.map((s) => s.join(",")).join("L"), fill: "none", "stroke-width": 2, "stroke-linejoin": "round",
          "stroke-dasharray": line.style.dashes.map((d) => d * 2).join(" "), style: `stroke:${ink(line.style.color)}`,
        });
        spots.forEach(([x, y], k) => {
          if (!c.dense || k === spots.length - 1) marker(inside, line.style, x, y);
          const where = c.x_names[line.x[k]] ?? (c.x_label === "tasks learned" ? `after task ${line.x[k]}` : `${c.x_label.split(" (")[0]} ${+line.x[k].toPrecision(4)}`);
          const value = c.unit ? shown(line.y[k]) : String(+line.y[k].toPrecision(4)).replace("-", "−");
          this.points.push({ x, y, name: line.label, text: `${where}: ${value}${c.unit}${this.deviation(line, k)}` });
        });
      }
    }

    deviation(line, k) { return line.errors ? ` ± ${line.errors[k].toFixed(2)} (${line.seeds} seeds)` : ""; }

    number(value) { return String(value).replace("-", "−"); }

    // Whether the rows and columns of a matrix have names, which need space.
    tall() { return this.chart.kind === "heat" && this.chart.names.some((name) => name.length > 2); }
    short(name) { const most = this.narrow ? 9 : 14; return name.length > most ? name.slice(0, most - 1) + "…" : name; }

    axisX() {
      const c = this.chart, v = this.view, widest = Math.max(0, ...c.x_names.map((name) => name.length)) * 8;
      const room = Math.max(2, Math.floor((this.right - this.left) / Math.max(48, widest)));
      const given = [...new Set(c.lines.flatMap((l) => l.x))].sort((a, b) => a - b).filter((x) => this.along(x) >= v.x0 && this.along(x) <= v.x1);
      const every = Math.ceil(given.length / room);
      if (given.length && !c.dense) return given.filter((_, k) => k % every === 0).map((x) => [this.along(x), c.x_names[x] ?? String(x)]);
      return c.log ? [] : ticks(v.x0, v.x1, room).map((x) => [x, String(x)]);
    }

    bars(id) {
      const c = this.chart, v = this.view, each = (this.bottom - this.top) / c.bars.length, zero = this.px(clamp(0, v.x0, v.x1));
      for (const x of ticks(v.x0, v.x1, Math.max(2, Math.floor((this.right - this.left) / 70)))) {
        make(this.svg, "line", { class: "grid", x1: this.px(x), x2: this.px(x), y1: this.top, y2: this.bottom });
        make(this.svg, "text", { x: this.px(x), y: this.bottom + 16, "text-anchor": "middle" }, String(x).replace("-", "−"));
      }
      make(this.svg, "text", { class: "title", x: (this.left + this.right) / 2, y: this.height - 8, "text-anchor": "middle" }, c.x_label);
      const inside = make(this.svg, "g", { "clip-path": `url(#${id})` });
      c.bars.forEach((bar, k) => {
        const y = this.top + k * each, thick = this.narrow ? 16 : Math.min(20, each - 10), mid = this.narrow ? y + each - thick / 2 - 5 : y + each / 2;
        const end = this.px(bar.value), start = this.px(0);
        make(inside, "rect", {
          x: Math.min(start, end), y: mid - thick / 2, width: Math.abs(end - start), height: thick, rx: 2, "stroke-width": 1.5,
          style: `fill:${ink(bar.style.color)};fill-opacity:${bar.style.hollow ? 0.4 : 0.9};stroke:${ink(bar.style.color)}`,
        });
        if (bar.error !== null) {
          const a = this.px(bar.value - bar.error), b = this.px(bar.value + bar.error);
          make(inside, "path", { class: "whisker", d: `M${a},${mid}H${b}M${a},${mid - 4}v8M${b},${mid - 4}v8` });
        }
        if (bar.paper !== null) make(inside, "path", { d: shape("D", 5), transform: `translate(${this.px(bar.paper)},${mid})`, style: "fill:var(--ground);stroke:var(--ink)", "stroke-width": 1.5 });
        const name = make(this.svg, "text", { class: "name", x: this.narrow ? this.left : this.left - 8, y: this.narrow ? y + 14 : mid + 4, "text-anchor": this.narrow ? "start" : "end" }, bar.label);
        this.fit(name, (this.narrow ? this.width : this.left) - 12, bar.label);
        make(this.svg, "text", { class: "name", x: this.right + 6, y: mid + 4 }, shown(bar.value, c.signed));
        const seeds = bar.error === null ? "one seed" : `± ${bar.error.toFixed(2)}, ${bar.seeds} seeds`;
        const theirs = bar.paper === null ? "" : `; paper ${shown(bar.paper, c.signed)}`;
        this.points.push({
          x: clamp(end, this.left, this.right), y: mid, name: bar.label, text: `${shown(bar.value, c.signed)} ${c.unit} (${seeds})${theirs}`,
          box: [0, y, this.width, y + each],
        });
      });
      if (v.x0 <= 0 && v.x1 >= 0) make(this.svg, "line", { class: "axis", x1: zero, x2: zero, y1: this.top, y2: this.bottom });
    }

    heat(id) {
      const c = this.chart, n = c.matrix.length, wide = this.px(1) - this.px(0), high = this.py(1) - this.py(0);
      const inside = make(this.svg, "g", { "clip-path": `url(#${id})` });
      c.matrix.forEach((row, t) => row.forEach((value, i) => {
        const x = this.px(i + 0.5), y = this.py(t + 0.5), h = Math.abs(high), { fill, ink: on } = blend((value - c.low) / (c.high - c.low || 1));
        make(inside, "rect", { x: x + 0.5, y: y + 0.5, width: Math.max(wide - 1, 0.5), height: Math.max(h - 1, 0.5), rx: 2, style: `fill:${fill}` });
        if (wide > 33 && h > 15) make(inside, "text", { x: x + wide / 2, y: y + h / 2 + 4, "text-anchor": "middle", style: `fill:${on}` }, value.toFixed(1));
        const where = c.cell_text.replace("{row}", () => c.names[t] ?? t + 1).replace("{column}", () => c.names[i] ?? i + 1);
        this.points.push({ x: x + wide / 2, y: y + h / 2, name: c.label, text: `${where}: ${shown(value)} %`, box: [x, y, x + wide, y + h] });
      }));
      const every = Math.ceil(n / Math.max(1, Math.floor((this.right - this.left) / 22)));
      for (let k = 1; k <= n; k++) {
        if ((k - 1) % every) continue;
        const name = c.names.length ? this.short(c.names[k - 1]) : k, x = this.px(k), y = this.bottom + 8;
        const place = this.tall() ? { x: x + 4, y, transform: `rotate(-90 ${x + 4} ${y})`, "text-anchor": "end" } : { x, y: y + 10, "text-anchor": "middle" };
        if (x > this.left && x < this.right) make(this.svg, "text", place, name);
        if (this.py(k) > this.top && this.py(k) < this.bottom) make(this.svg, "text", { x: this.left - 8, y: this.py(k) + 4, "text-anchor": "end" }, name);
      }
      this.titles();
    }

    titles() {
      const c = this.chart, middle = (this.top + this.bottom) / 2;
      make(this.svg, "text", { class: "title", x: (this.left + this.right) / 2, y: this.height - 6, "text-anchor": "middle" }, c.x_label);
      make(this.svg, "text", { class: "title", x: 12, y: middle, transform: `rotate(-90 12 ${middle})`, "text-anchor": "middle" }, c.y_label);
    }

    plane(id) {
      const c = this.chart, logs = c.values.map((row) => row.map((value) => Math.log10(Math.max(value, 1e-6))));
      const sorted = logs.flat().sort((a, b) => a - b), low = sorted[0], high = sorted[Math.floor(0.97 * (sorted.length - 1))];
      const inside = make(this.svg, "g", { "clip-path": `url(#${id})` });
      const step = (values, k) => (values[Math.min(k + 1, values.length - 1)] - values[Math.max(k - 1, 0)]) / (k > 0 && k < values.length - 1 ? 2 : 1);
      const cells = make(inside, "g", { "shape-rendering": "crispEdges" });
      logs.forEach((row, j) => row.forEach((value, i) => {
        const w = step(c.x, i) / 2, h = step(c.y, j) / 2, x = this.px(c.x[i] - w), y = this.py(c.y[j] + h);
        const wide = this.px(c.x[i] + w) - x, high_ = this.py(c.y[j] - h) - y;
        make(cells, "rect", { x, y, width: wide + 0.6, height: high_ + 0.6, style: `fill:${blend((value - low) / (high - low || 1)).fill}` });
        this.points.push({ x: x + wide / 2, y: y + high_ / 2, name: `${this.number(+c.x[i].toPrecision(3))}, ${this.number(+c.y[j].toPrecision(3))}`, text: `loss ${shown(c.values[j][i])}`, box: [x, y, x + wide, y + high_] });
      }));
      for (const mark of c.marks) {
        if (this.hidden.has(mark.label)) continue;
        const x = this.px(mark.x), y = this.py(mark.y);
        marker(inside, { ...mark.style, hollow: false }, x, y, 6).style.stroke = "#fff";
        this.points.unshift({ x, y, name: mark.label, text: mark.text, box: [x - 9, y - 9, x + 9, y + 9] });
      }
      for (const x of ticks(this.view.x0, this.view.x1, Math.max(2, Math.floor((this.right - this.left) / 60)))) make(this.svg, "text", { x: this.px(x), y: this.bottom + 18, "text-anchor": "middle" }, this.number(x));
      for (const y of ticks(this.view.y0, this.view.y1, 5)) make(this.svg, "text", { x: this.left - 6, y: this.py(y) + 4, "text-anchor": "end" }, this.number(y));
      this.titles();
    }

    // Shorten a name that does not fit; the tooltip shows all of it.
    fit(node, room, text) {
      for (let n = text.length; n > 4 && node.getComputedTextLength() > room; n--) node.textContent = text.slice(0, n - 1) + "…";
    }

    legend(list, all) {
      for (const line of all) {
        const button = list.appendChild(document.createElement("button"));
        button.type = "button";
        button.setAttribute("aria-pressed", "true");
        const sample = make(button, "svg", { width: 34, height: 16, "aria-hidden": "true" });
        const plane = this.chart.kind === "plane", level = !plane && this.chart.levels.includes(line);
        if (!plane) make(sample, "line", { x1: 1, x2: 33, y1: 8, y2: 8, "stroke-width": 2, "stroke-dasharray": level ? "9 3 2 3" : line.style.dashes.map((d) => d * 2).join(" "), style: `stroke:${ink(line.style.color)}` });
        if (!level) marker(sample, line.style, 17, 8);
        button.append(plane ? `${line.label}: ${line.text}` : line.label);
        button.addEventListener("click", () => {
          const off = !this.hidden.delete(line.label);
          if (off) this.hidden.add(line.label);
          button.setAttribute("aria-pressed", String(!off));
          this.leave();
          this.draw();
        });
      }
    }

    place(event) {
      const box = this.svg.getBoundingClientRect();
      return [((event.clientX - box.left) / box.width) * this.width, ((event.clientY - box.top) / box.height) * this.height];
    }

    nearest(x, y) {
      let best = -1, reach = 36;
      this.points.forEach((point, k) => { // marks come before the cells below them
        const inBox = point.box && x >= point.box[0] && x <= point.box[2] && y >= point.box[1] && y <= point.box[3];
        const apart = inBox ? 0 : point.box ? Infinity : Math.hypot(point.x - x, point.y - y);
        if (best >= 0 && reach === 0) return;
        const visible = point.y > this.top - 6 && point.y < this.bottom + 6 && point.x > this.left - 6 && point.x < this.right + 6;
        if (visible && apart < reach) [best, reach] = [k, apart];
      });
      return best;
    }

    show(k) {
      if (k < 0) return this.leave();
      this.current = k;
      const point = this.points[k], half = this.holder.clientWidth / 2;
      // Marks that coincide are shown together.
      const here = point.box ? [point] : this.points.filter((other) => Math.hypot(other.x - point.x, other.y - point.y) < 4);
      this.tip.replaceChildren();
      for (const each of here) {
        this.tip.appendChild(document.createElement("b")).textContent = each.name;
        this.tip.append(each.text);
      }
      this.tip.hidden = false;
      const left = point.x > half ? point.x - this.tip.offsetWidth - 12 : point.x + 12;
      this.tip.style.left = `${clamp(left, 0, Math.max(0, this.width - this.tip.offsetWidth))}px`;
      this.tip.style.top = `${clamp(point.y - this.tip.offsetHeight - 8, 0, this.height)}px`;
      this.near.setAttribute("cx", point.x);
      this.near.setAttribute("cy", point.y);
      this.near.setAttribute("visibility", this.chart.kind === "lines" ? "visible" : "hidden");
    }

    leave() { this.current = -1; this.tip.hidden = true; if (this.near) this.near.setAttribute("visibility", "hidden"); }

    listen() {
      let from = null, box = null;
      this.svg.addEventListener("pointermove", (event) => {
        const [x, y] = this.place(event);
        if (!from) return this.show(this.nearest(x, y));
        const tall = this.chart.kind === "bars";
        const a = clamp(Math.min(from[0], x), this.left, this.right), b = clamp(Math.max(from[0], x), this.left, this.right);
        const c = tall ? this.top : clamp(Math.min(from[1], y), this.top, this.bottom), d = tall ? this.bottom : clamp(Math.max(from[1], y), this.top, this.bottom);
        box = box || make(this.svg, "rect", { class: "select" });
        for (const [key, value] of Object.entries({ x: a, y: c, width: b - a, height: d - c })) box.setAttribute(key, value);
        this.leave();
      });
      this.svg.addEventListener("pointerdown", (event) => {
        const at = this.place(event);
        if (event.pointerType === "touch") return this.show(this.nearest(...at));
        if (event.button === 0) { from = at; this.svg.setPointerCapture(event.pointerId); }
      });
      this.svg.addEventListener("pointerup", (event) => {
        if (from && box) {
          const get = (key) => +box.getAttribute(key), [a, c, w, h] = ["x", "y", "width", "height"].map(get);
          if (w > 8 && h > 8) {
            const x0 = this.ix(a), x1 = this.ix(a + w);
            const [y0, y1] = this.chart.kind === "bars" ? [this.view.y0, this.view.y1] : [this.iy(c + h), this.iy(c)];
            this.view = { x0, x1, y0, y1 };
          }
          this.draw();
        }
        from = box = null;
      });
      this.svg.addEventListener("pointerleave", () => { if (!from) this.leave(); });
      this.svg.addEventListener("dblclick", () => this.set(this.full));
      this.svg.addEventListener("wheel", (event) => {
        if (!event.ctrlKey) return;
        event.preventDefault();
        this.scale(event.deltaY > 0 ? 1.15 : 1 / 1.15);
      }, { passive: false });
      this.svg.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (step && this.points.length) { event.preventDefault(); this.show((this.current + step + this.points.length) % this.points.length); }
        else if (event.key === "Escape") this.leave();
      });
      this.svg.addEventListener("blur", () => this.leave());
    }
  }

  function sortable(table) {
    const heads = [...table.tHead.rows].at(-1).cells, body = table.tBodies[0];
    [...heads].forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const rise = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", rise > 0 ? "ascending" : "descending");
      const key = (row) => {
        const cell = row.cells[column], value = cell.dataset.value;
        return value === undefined ? (head.classList.contains("number") ? null : cell.textContent) : Number(value);
      };
      const rows = [...body.rows].map((row) => [key(row), row]);
      rows.sort(([a], [b]) => {
        if (a === null || b === null) return (a === null) - (b === null); // rows without a number stay last
        return rise * (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
      });
      body.append(...rows.map(([, row]) => row));
    }));
  }

  function themeSwitch() {
    const root = document.documentElement, button = document.getElementById("theme"), dark = matchMedia("(prefers-color-scheme: dark)");
    const store = (value) => { try { localStorage.setItem("incvec-theme", value); } catch { /* not available to a page opened from a file */ } };
    try { const saved = localStorage.getItem("incvec-theme"); if (saved) root.dataset.theme = saved; } catch { /* as above */ }
    const current = () => root.dataset.theme || (dark.matches ? "dark" : "light");
    const label = () => { button.querySelector("span").textContent = current() === "dark" ? "light" : "dark"; };
    button.addEventListener("click", () => { root.dataset.theme = current() === "dark" ? "light" : "dark"; store(root.dataset.theme); label(); });
    dark.addEventListener("change", label);
    label();
  }

  themeSwitch();
  document.querySelectorAll("table").forEach(sortable);
  document.querySelectorAll(".table").forEach((holder) => button(holder.querySelector(".tools"), "CSV", "download the table as CSV", () => {
    const rows = [...holder.querySelectorAll("tr")].map((row) => [...row.cells].map((cell) => cell.textContent.replaceAll("−", "-")));
    download(`${holder.id}.csv`, csv(rows));
  }));
  document.querySelectorAll(".filter input").forEach((box) => {
    const holder = box.closest(".table");
    const update = () => holder.classList.toggle("hide", !box.checked);
    box.addEventListener("change", update);
    update();
  });
  for (const chart of DATA.charts) new Plot(document.getElementById(chart.slug), chart);
  document.documentElement.dataset.ready = "true";
})();
