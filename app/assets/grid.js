// The grid of KV blocks: every physical block a cell, in physical order, drawn on one canvas.
// States differ by shape as well as by colour: free is an outline, shared carries a corner dot, "yours" (a block that
// another chat of the same user wrote) a hole.
(() => {
  const FREE = 0, CACHED = 1, ACTIVE = 2, SHARED = 3; // as app/kv_hub.py numbers them
  const FLASH_MS = 400;
  const calm = matchMedia("(prefers-reduced-motion: reduce)");

  window.pageturn.Grid = class {
    constructor(canvas) {
      Object.assign(this, { canvas, n: 0, blockSize: 0, perCell: 1, columns: 1, pitch: 7, owner: 0, own: new Set(), dirty: new Set(), all: true, frame: 0 });
      this.state = new Uint8Array(0);
      this.slot = new Uint16Array(0);
      this.flashes = new Map(); // cell -> end of its flash, in performance.now() time
    }
    set owner(slot) { if (slot !== this._owner) { this._owner = slot; this.redraw(); } }
    get owner() { return this._owner; }
    set own(slots) { this._own = slots; this.redraw(); } // of all of this user's chats
    load(n, blockSize, data) {
      const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
      const resized = n !== this.n;
      this.n = n;
      this.blockSize = blockSize;
      this.state = new Uint8Array(n);
      this.slot = new Uint16Array(n);
      for (let i = 0; i < n; i++) {
        this.state[i] = bytes[3 * i];
        this.slot[i] = bytes[3 * i + 1] | (bytes[3 * i + 2] << 8);
      }
      if (resized) this.layout();
      this.redraw();
    }
    change(indices, values) {
      const until = performance.now() + FLASH_MS;
      indices.forEach((id, i) => {
        const state = values[i] & 0xff, slot = values[i] >> 8, before = this.state[id];
        // allocation, hit, eviction; a block that is only released does not flash
        if (!calm.matches && state >= ACTIVE && (before < ACTIVE || state > before || slot !== this.slot[id]))
          this.flashes.set(Math.floor(id / this.perCell), until);
        this.state[id] = state;
        this.slot[id] = slot;
        this.dirty.add(Math.floor(id / this.perCell));
      });
      if (indices.length) this.schedule();
    }
    totals(owner) {
      const totals = { mine: 0, yours: 0, shared: 0, others: 0, cached: 0, free: 0 };
      for (let i = 0; i < this.n; i++) totals[this.kind(i, owner)]++;
      return totals;
    }
    kind(i, owner) {
      switch (this.state[i]) {
        case FREE: return "free";
        case CACHED: return "cached";
        case SHARED: return "shared";
        default: return owner && this.slot[i] === owner ? "mine" : this._own.has(this.slot[i]) ? "yours" : "others";
      }
    }
    layout() {
      const width = this.canvas.parentElement.clientWidth;
      if (!width || !this.n) return;
      this.perCell = 1;
      for (this.pitch of [7, 5, 4]) {
        this.columns = Math.floor(width / this.pitch);
        if (Math.ceil(this.n / this.columns) * this.pitch <= 300) break;
      }
      while (Math.ceil(this.n / this.perCell / this.columns) * this.pitch > 340) this.perCell *= 2;
      const rows = Math.ceil(Math.ceil(this.n / this.perCell) / this.columns);
      const scale = (this.scale = window.devicePixelRatio || 1);
      this.canvas.width = this.columns * this.pitch * scale;
      this.canvas.height = rows * this.pitch * scale;
      this.canvas.style.width = `${this.columns * this.pitch}px`;
      this.canvas.style.height = `${rows * this.pitch}px`;
    }
    theme() {
      const style = getComputedStyle(this.canvas);
      this.colours = Object.fromEntries(["mine", "yours", "shared", "others", "cached", "own-cached", "free", "flash"].map((k) => [k, style.getPropertyValue(`--pt-${k}`).trim()]));
      this.layout();
      this.redraw();
    }
    redraw() { this.all = true; this.schedule(); }
    schedule() { if (!this.frame) this.frame = requestAnimationFrame((now) => { this.frame = 0; this.draw(now); }); }
    draw(now) {
      if (!this.colours) return this.theme();
      const context = this.canvas.getContext("2d");
      context.setTransform(this.scale ?? 1, 0, 0, this.scale ?? 1, 0, 0);
      const cells = Math.ceil(this.n / this.perCell);
      if (this.all) {
        context.clearRect(0, 0, this.canvas.width, this.canvas.height);
        for (let cell = 0; cell < cells; cell++) this.drawCell(context, cell, now);
      } else {
        for (const cell of new Set([...this.dirty, ...this.flashes.keys()])) this.drawCell(context, cell, now);
      }
      this.all = false;
      this.dirty.clear();
      for (const [cell, until] of this.flashes) if (until <= now) { this.flashes.delete(cell); this.dirty.add(cell); }
      if (this.flashes.size || this.dirty.size) this.schedule();
    }
    // A cell of several blocks shows the liveliest of them.
    drawCell(context, cell, now) {
      let best = cell * this.perCell;
      for (let i = best + 1; i < Math.min(this.n, (cell + 1) * this.perCell); i++) if (this.state[i] > this.state[best]) best = i;
      const kind = this.kind(best, this.owner), side = this.pitch - 1;
      const x = (cell % this.columns) * this.pitch, y = Math.floor(cell / this.columns) * this.pitch;
      context.clearRect(x, y, this.pitch, this.pitch);
      if (kind === "free") {
        context.strokeStyle = this.colours.free;
        context.lineWidth = 1;
        context.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
      } else {
        const own = kind === "cached" && this.owner && this.slot[best] === this.owner;
        context.fillStyle = this.colours[own ? "own-cached" : kind];
        context.fillRect(x, y, side, side);
        if (kind === "yours") {
          const hole = side > 3 ? 2 : 1, inset = (side - hole) >> 1;
          context.clearRect(x + inset, y + inset, hole, hole);
        }
        if (kind === "shared") {
          context.fillStyle = this.colours.flash;
          context.fillRect(x + side - 2, y, 2, 2);
        }
      }
      const left = (this.flashes.get(cell) ?? 0) - now;
      if (left > 0) {
        context.globalAlpha = Math.min(1, left / FLASH_MS);
        context.fillStyle = this.colours.flash;
        context.fillRect(x, y, side, side);
        context.globalAlpha = 1;
      }
    }
    blockAt(x, y) {
      const column = Math.floor(x / this.pitch), cell = Math.floor(y / this.pitch) * this.columns + column;
      const id = cell * this.perCell;
      return column >= 0 && column < this.columns && id >= 0 && id < this.n ? id : -1;
    }
  };
})();
