// A listbox of any number of rows, of which only those in view exist. `draw(index)` returns the content of a row,
// `open(index, byPointer)` is called for the row that is chosen. Arrows, Page, Home and End move, as in any listbox.

class RowList {
  constructor(host, rowHeight, draw, open) {
    Object.assign(this, { host, rowHeight, draw, open, size: 0, active: -1, rows: new Map() });
    this.sheet = el("div", { class: "sheet", role: "presentation" });
    host.replaceChildren(this.sheet);
    host.addEventListener("scroll", () => this.paint());
    host.addEventListener("keydown", (event) => this.key(event));
    host.addEventListener("click", (event) => {
      const row = event.target.closest("[data-row]");
      if (row) this.choose(Number(row.dataset.row), true);
    });
    new ResizeObserver(() => this.paint()).observe(host);
  }

  show(size, active) {
    this.size = size;
    this.active = active;
    this.sheet.style.height = `${size * this.rowHeight}px`;
    this.rows.clear();
    this.sheet.replaceChildren();
    if (active < 0) this.host.scrollTop = 0;
    else this.reveal();
    this.paint();
  }

  paint() {
    const first = Math.max(0, Math.floor(this.host.scrollTop / this.rowHeight) - 4);
    const end = Math.min(this.size, first + Math.ceil(this.host.clientHeight / this.rowHeight) + 9);
    // A row that stays is kept: one that is replaced while a button is down on it would get no click.
    for (const [index, row] of this.rows) {
      if (index < first || index >= end) { row.remove(); this.rows.delete(index); }
    }
    for (let index = first; index < end; index++) {
      if (!this.rows.has(index)) this.add(index);
      this.rows.get(index).setAttribute("aria-selected", String(index === this.active));
    }
    if (this.active >= first && this.active < end) this.host.setAttribute("aria-activedescendant", `row-${this.active}`);
    else this.host.removeAttribute("aria-activedescendant");
  }

  add(index) {
    const row = el("div", { role: "option", id: `row-${index}`, "data-row": index, "aria-setsize": this.size,
      "aria-posinset": index + 1, class: "row" }, ...this.draw(index));
    row.style.top = `${index * this.rowHeight}px`;
    this.rows.set(index, row);
    this.sheet.append(row);
  }

  reveal() {
    const top = this.active * this.rowHeight, bottom = top + this.rowHeight;
    if (top < this.host.scrollTop) this.host.scrollTop = top;
    else if (bottom > this.host.scrollTop + this.host.clientHeight) this.host.scrollTop = bottom - this.host.clientHeight;
  }

  choose(index, byPointer) {
    if (!this.size) return;
    this.active = Math.max(0, Math.min(this.size - 1, index));
    this.reveal();
    this.paint();
    this.open(this.active, byPointer);
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.host.clientHeight / this.rowHeight) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -this.size, End: this.size + 1 };
    if (event.key === "Enter") this.choose(Math.max(0, this.active), true);
    else if (event.key in moves) this.choose(this.active < 0 && event.key !== "End" ? 0 : this.active + moves[event.key], false);
    else return;
    event.preventDefault();
  }
}
