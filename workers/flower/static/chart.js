// One line chart in SVG: axes, legend with the latest values, a cursor for mouse and keys, and a table.
// Knows nothing of what it shows. Colours are the style sheet's: `--tp-1` … `--tp-6`.
"use strict";

class Chart {
    // `unit` follows each value; `format` makes words of a number; `top` fixes the scale's end.
    constructor(parent, {title, says, unit, format, top}) {
        Object.assign(this, {title, unit: unit || "", format, top, lines: [], times: [], at: null});
        this.figure = Chart.html("figure", "tp-card tp-chart", parent);
        const head = Chart.html("figcaption", "tp-chart-head", this.figure);
        Chart.html("span", "tp-chart-title", head).textContent = title;
        Chart.html("span", "tp-sub", head).textContent = says;
        this.legend = Chart.html("ul", "tp-legend", this.figure);
        this.plot = Chart.html("div", "tp-plot", this.figure);
        this.svg = Chart.svg("svg", {class: "tp-svg", tabindex: 0, role: "img"}, this.plot);
        this.tip = Chart.html("div", "tp-tip", this.plot);
        this.tip.hidden = true;
        this.spoken = Chart.html("p", "visually-hidden", this.figure);
        this.spoken.setAttribute("aria-live", "polite");
        this.details = Chart.html("details", "tp-details", this.figure);
        Chart.html("summary", "", this.details).textContent = "As a table";
        this.table = Chart.html("div", "tp-scroll", this.details);
        this.details.addEventListener("toggle", () => this.fillTable());
        this.svg.addEventListener("pointermove", (event) => this.point(event));
        this.svg.addEventListener("pointerleave", () => this.moveTo(null));
        this.svg.addEventListener("blur", () => this.moveTo(null));
        this.svg.addEventListener("keydown", (event) => this.key(event));
        new ResizeObserver(() => this.draw()).observe(this.plot);
    }

    // `lines`: {name, values, colour 1…6, dashed, area, legend}; values as long as `times`, null for a gap.
    // `over`: the last values are not those of now, so the legend has none.
    show({times, from, to, over}, lines) {
        Object.assign(this, {times, from, to, over, lines});
        if (this.at !== null && this.at >= times.length) this.at = null;
        this.draw();
        this.fillLegend();
        if (this.details.open) this.fillTable();
    }

    draw() {
        const width = this.plot.clientWidth, height = 180;
        if (!width) return;
        const box = {left: 46, right: width - 10, top: 8, bottom: height - 22};
        const values = this.lines.flatMap((line) => line.values).filter((value) => value !== null);
        const peak = this.top || Math.max(0, ...values);
        const step = this.top ? this.top / 4 : Chart.nice(peak / 4);
        const top = this.top || Math.max(step * Math.ceil(peak / step - 1e-9), step);
        this.x = (time) => box.left + (box.right - box.left) * (time - this.from) / Math.max(1, this.to - this.from);
        this.y = (value) => box.bottom - (box.bottom - box.top) * value / top;
        this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
        this.svg.setAttribute("height", height);
        this.svg.setAttribute("aria-label", this.summary());
        this.svg.replaceChildren();
        for (let value = 0; value <= top + step / 2; value += step) {
            const y = Math.round(this.y(value)) + 0.5;
            Chart.svg("line", {x1: box.left, x2: box.right, y1: y, y2: y, class: "tp-grid"}, this.svg);
            Chart.svg("text", {x: box.left - 6, y: y + 4, class: "tp-tick", "text-anchor": "end"}, this.svg)
                .textContent = this.format(value);
        }
        for (const [time, label] of Chart.ticks(this.from, this.to, width)) {
            const x = this.x(time);
            if (x < box.left + 12 || x > box.right - 12) continue;
            Chart.svg("text", {x, y: height - 5, class: "tp-tick", "text-anchor": "middle"}, this.svg)
                .textContent = label;
        }
        for (const line of this.lines) this.drawLine(line);
        this.cursor = Chart.svg("g", {}, this.svg);
        if (!values.length) {
            Chart.svg("text", {x: (box.left + box.right) / 2, y: height / 2, class: "tp-tick", "text-anchor": "middle"},
                this.svg).textContent = "Nothing to show yet";
        }
        this.moveTo(this.at);
    }

    drawLine({values, colour, dashed, area}) {
        let stretch = [];
        const flush = () => {
            if (!stretch.length) return;
            const path = "M" + stretch.map(([x, y]) => x.toFixed(1) + " " + y.toFixed(1)).join("L");
            if (area && stretch.length > 1) {
                const base = this.y(0);
                Chart.svg("path", {d: `${path}L${stretch.at(-1)[0].toFixed(1)} ${base}L${stretch[0][0].toFixed(1)} ${base}Z`,
                    class: `tp-area tp-c${colour}`}, this.svg);
            }
            const one = stretch.length === 1 ? "h0.1" : "";
            Chart.svg("path", {d: path + one, class: `tp-line tp-c${colour}` + (dashed ? " tp-dashed" : "")}, this.svg);
            stretch = [];
        };
        values.forEach((value, at) => {
            if (value === null) flush();
            else stretch.push([this.x(this.times[at]), this.y(value)]);
        });
        flush();
    }

    fillLegend() {
        const items = this.lines.filter((line) => line.legend !== false).map((line) => {
            const item = Chart.html("li", "");
            Chart.html("span", `tp-swatch tp-c${line.colour}`, item).setAttribute("aria-hidden", "true");
            Chart.html("span", "", item).textContent = line.name;
            if (!this.over) Chart.html("strong", "", item).textContent = this.now(line);
            return item;
        });
        this.legend.replaceChildren(...items);
    }

    fillTable() {
        if (!this.details.open) return;
        const table = Chart.html("table", "table table-sm mb-0");
        const head = Chart.html("tr", "", Chart.html("thead", "", table));
        for (const name of ["Time", ...this.lines.map((line) => line.name)]) {
            const cell = Chart.html("th", "", head);
            cell.scope = "col";
            cell.textContent = name;
        }
        const body = Chart.html("tbody", "", table);
        const every = Math.max(1, Math.ceil(this.times.length / 30));
        for (let at = this.times.length - 1; at >= 0; at -= every) {
            const row = Chart.html("tr", "", body);
            const time = Chart.html("th", "", row);
            time.scope = "row";
            time.textContent = Words.clock(this.times[at], true);
            for (const line of this.lines) Chart.html("td", "", row).textContent = this.say(line.values[at]);
        }
        this.table.replaceChildren(table);
    }

    say(value) {
        return value === null || value === undefined ? Words.NONE : this.format(value) + this.unit;
    }

    summary() {
        const parts = this.lines.filter((line) => line.legend !== false)
            .map((line) => this.over ? line.name : `${line.name} ${this.now(line)}`);
        return `${this.title}: ${parts.join(", ") || "nothing to show yet"}. Arrow keys read the values.`;
    }

    now(line) {
        return line.latest || this.say(Chart.latest(line.values));
    }

    point(event) {
        const x = event.clientX - this.svg.getBoundingClientRect().left;
        let best = null;
        this.times.forEach((time, at) => {
            if (best === null || Math.abs(this.x(time) - x) < Math.abs(this.x(this.times[best]) - x)) best = at;
        });
        this.moveTo(best);
    }

    key(event) {
        const last = this.times.length - 1, now = this.at === null ? last + 1 : this.at;
        const to = {ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last, Escape: null}[event.key];
        if (to === undefined || last < 0) return;
        event.preventDefault();
        this.moveTo(to === null ? null : Math.min(last, Math.max(0, to)));
        this.spoken.textContent = this.tip.hidden ? "" : this.tip.textContent;
    }

    moveTo(at) {
        this.at = at;
        this.cursor?.replaceChildren();
        this.tip.hidden = at === null || !this.times.length;
        if (this.tip.hidden || !this.cursor) return;
        const x = this.x(this.times[at]);
        Chart.svg("line", {x1: x, x2: x, y1: 8, y2: 158, class: "tp-cursor"}, this.cursor);
        this.tip.replaceChildren();
        Chart.html("div", "tp-tip-time", this.tip).textContent = Words.clock(this.times[at], true) + " ";
        for (const line of this.lines) {
            if (line.values[at] === null) continue;
            Chart.svg("circle", {cx: x, cy: this.y(line.values[at]), r: 3, class: `tp-dot tp-c${line.colour}`}, this.cursor);
            const row = Chart.html("div", "", this.tip);
            Chart.html("span", `tp-swatch tp-c${line.colour}`, row);
            row.append(`${line.name} ${this.say(line.values[at])} `);
        }
        const room = this.plot.clientWidth - this.tip.offsetWidth - 4;
        this.tip.style.left = Math.max(0, Math.min(room, x + (x > room - 16 ? -this.tip.offsetWidth - 12 : 12))) + "px";
    }

    static latest(values) {
        return values.findLast((value) => value !== null) ?? null;
    }

    // 1, 2 or 5 times a power of ten, not below what is given.
    static nice(step) {
        if (!(step > 0)) return 1;
        const power = 10 ** Math.floor(Math.log10(step));
        return power * [1, 2, 5, 10].find((factor) => factor * power >= step - 1e-12);
    }

    // Moments on round local times, some 90 px apart, with their labels.
    static ticks(from, to, width) {
        const steps = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000];
        const step = steps.find((one) => (to - from) / one <= width / 90) || 864000;
        const shift = new Date(1000 * from).getTimezoneOffset() * 60;
        const found = [];
        for (let time = Math.ceil((from - shift) / step) * step + shift; time <= to; time += step) {
            found.push([time, step >= 43200 ? Words.day(time) : Words.clock(time, step < 60)]);
        }
        return found;
    }

    static html(name, classes, parent) {
        const element = document.createElement(name);
        if (classes) element.className = classes;
        parent?.append(element);
        return element;
    }

    static svg(name, attributes, parent) {
        const element = document.createElementNS("http://www.w3.org/2000/svg", name);
        for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
        parent?.append(element);
        return element;
    }
}
