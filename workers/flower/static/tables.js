// Tables that are filled anew each second: only cells that changed are touched, so that what a person
// has selected stays selected. Narrow screens show each row as a block with the columns' names.
"use strict";

const Tables = {
    // `rows`: lists of cells; a cell is text, or {text or lines, sub, bar 0…1, state, code}. `empty` is said when there is none.
    fill(id, rows, empty) {
        const table = document.getElementById(id), body = table.tBodies[0];
        const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
        if (!rows.length) {
            const row = Tables.row(body, 0, 1);
            row.cells[0].colSpan = names.length;
            Tables.cell(row.cells[0], {text: empty, className: "tp-none"}, "");
        }
        rows.forEach((cells, at) => {
            const row = Tables.row(body, at, names.length);
            cells.forEach((cell, column) => Tables.cell(row.cells[column], cell, names[column]));
        });
        while (body.rows.length > Math.max(1, rows.length)) body.deleteRow(-1);
    },

    row(body, at, columns) {
        let row = body.rows[at];
        if (row && row.cells.length !== columns) {
            row.remove();
            row = null;
        }
        if (!row) {
            row = body.insertRow(at);
            for (let column = 0; column < columns; column++) row.insertCell();
        }
        return row;
    },

    cell(element, cell, name) {
        const content = typeof cell === "object" ? cell : {text: cell};
        const key = JSON.stringify(content);
        if (element.dataset.key === key) return;
        element.dataset.key = key;
        element.dataset.name = name;
        element.className = content.className || "";
        element.replaceChildren();
        const box = Chart.html("div", "tp-cell", element);
        if (content.lines) {
            for (const line of content.lines) Chart.html("div", "", box).textContent = line;
        } else if (content.state) {
            Chart.html("span", `tp-state tp-state-${content.state}`, box).textContent = content.text;
        } else {
            Chart.html(content.code ? "code" : "span", "", box).textContent = content.text;
        }
        if (content.bar !== undefined && content.bar !== null) {
            const bar = Chart.html("div", "tp-bar", box);
            bar.setAttribute("aria-hidden", "true");
            Chart.html("div", content.alarm ? "tp-bar-alarm" : "", bar).style.width = 100 * Math.min(1, content.bar) + "%";
        }
        if (content.sub) Chart.html("div", "tp-sub", box).textContent = content.sub;
    }
};
