"use strict";
// The timeline of one or two programs. The head lists the contents; the data holds all arrays, gzipped. Spans and
// instructions are columns, so that hundreds of thousands of them take a few megabytes and are fast to walk.
(async () => {
  const $ = id => document.getElementById(id);
  const head = JSON.parse($("head").textContent);
  const packed = Uint8Array.from(atob($("data").textContent.trim()), c => c.charCodeAt(0));
  const unzipped = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(unzipped).arrayBuffer();
  const types = { f64: Float64Array, i32: Int32Array, i16: Int16Array, u8: Uint8Array, u16: Uint16Array };
  const array = ([at, n, t]) => new types[t](buffer, at, n);

  // kinds of spans, in the order of their numbers in the data.
  const kinds = [
    ["forward", "forward"], ["backward", "backward"], ["other", "optimizer and other"], ["d2h", "copy to host"],
    ["h2d", "copy to device"], ["collective", "collective"], ["message", "message"], ["bubble", "bubble"],
    ["exposed", "exposed transfer"], ["collwait", "waiting for collective"], ["weights", "deferred weight gradients"],
  ];
  const BUBBLE = 7, EXPOSED = 8, HIDDEN = 255;
  const uses = head.programs[0].uses; // of memory
  const phases = ["init", "forward", "backward", "optimizer", "eval", "weights"];
  const taskLetters = { 1: "F", 2: "B", 5: "W" }; // by phase, as in plans
  const taskKinds = { 1: 0, 2: 1, 5: 10 };

  // rows
  const labelWidth = 160, axisHeight = 24, streamHeight = 15, memoryHeight = 44, titleHeight = 22, gap = 6, foot = 6;
  const rows = [], seen = new Set(), used = new Set(), scales = {}; // one scale for all arenas of a kind
  let makespan = 0, spanCount = 0;
  const addRow = (row, least) => { row.least = least; rows.push(row); };
  const ranks = [];
  for (const p of head.programs) {
    makespan = Math.max(makespan, p.makespan);
    for (const c of p.codes) for (const k of ["op", "stream", "kind", "phase", "sub", "layer", "micro", "stage", "line", "pass", "result"]) c[k] = array(c[k]);
    p.path = { rank: array(p.path.rank), pc: array(p.path.pc), begin: array(p.path.begin), end: array(p.path.end) };
    for (const r of p.ranks) {
      r.program = p; r.rows = {}; ranks.push(r);
      for (const m of r.memory) {
        const s = scales[m.arena] ||= { most: 1, capacity: 0 };
        s.most = Math.max(s.most, m.placed); s.capacity = Math.max(s.capacity, m.capacity);
      }
    }
  }
  // A memory row reaches up to the capacity, unless less than a third of it would be filled. Figures have the same rule.
  for (const s of Object.values(scales)) { s.limit = s.most >= s.capacity / 3; s.top = s.limit ? Math.max(s.most, s.capacity) : s.most; }
  const shown = p => p.ranks.map(r => r.rank).join();
  if (head.programs.every(p => shown(p) === shown(head.programs[0]))) ranks.sort((a, b) => a.rank - b.rank); // stable: the same rank of both, one below the other
  for (const r of ranks) {
    const p = r.program;
    r.code = p.codes[r.code];
    r.begin = array(r.begin); r.end = array(r.end);
    for (const k of ["of", "at", "pc", "rank"]) r.cause[k] = array(r.cause[k]);
    const title = (head.programs.length > 1 ? p.name + ": " : "") + `rank ${r.rank}, stage ${r.stage}`;
    addRow({ title, note: r.count > 1 ? `and ${r.count - 1} more with the same instructions at the same times` : "" }, titleHeight);
    const lists = p.streams.map(() => []);
    for (let pc = 0; pc < r.begin.length; pc++) if (r.code.kind[pc] !== HIDDEN && r.end[pc] > r.begin[pc]) { lists[r.code.stream[pc]].push(pc); seen.add(r.code.kind[pc]); }
    const tasks = tasksOf(r, lists[0]);
    if (tasks.length) addRow({ rank: r, label: "tasks", tasks }, streamHeight);
    lists.forEach((list, s) => {
      if (!list.length) return;
      spanCount += list.length;
      addRow(r.rows[s] = { rank: r, label: p.streams[s], list: Int32Array.from(list) }, streamHeight);
    });
    for (const m of r.memory) {
      const levels = levelsOf(p, m);
      if (levels.peak > 0) addRow({ rank: r, label: m.arena + " memory", memory: m, ...levels }, memoryHeight);
    }
  }
  // levelsOf turns the changes of an arena into levels: from each time on, the bytes of each use, and their sum.
  function levelsOf(p, m) {
    const at = array(m.at), use = array(m.use), changed = array(m.bytes);
    let n = 0, sum = 0, peak = 0;
    for (let i = 0; i < at.length; i++) if (!i || at[i] !== at[i - 1]) n++;
    const times = new Float64Array(n), bytes = new Float64Array(n), now = new Float64Array(p.uses.length), stack = [];
    n = -1;
    for (let i = 0; i < at.length; i++) {
      if (!i || at[i] !== at[i - 1]) { times[++n] = at[i]; for (const s of stack) s.bytes[n] = now[s.use]; }
      const u = use[i];
      let s = stack.find(s => s.use === u);
      if (!s) { stack.push(s = { use: u, bytes: new Float64Array(times.length) }); used.add(u); }
      sum += changed[i] - now[u];
      now[u] = s.bytes[n] = changed[i]; bytes[n] = sum;
      if (i + 1 === at.length || at[i + 1] !== at[i]) peak = Math.max(peak, sum);
    }
    return { at: times, bytes, stack: stack.sort((a, b) => a.use - b.use), peak };
  }
  // tasksOf finds the runs of one task on a compute stream, as a plan lists them.
  function tasksOf(r, list) {
    const c = r.code, out = [];
    let last = null;
    for (const pc of list) {
      if (!taskLetters[c.phase[pc]] || c.sub[pc] < 0) { last = null; continue; }
      if (!last || c.phase[pc] !== c.phase[last.pc] || c.sub[pc] !== c.sub[last.pc] || c.micro[pc] !== c.micro[last.pc] || c.stage[pc] !== c.stage[last.pc]) {
        if (idle(c.kind[pc])) continue; // a task starts at its first kernel
        last = { pc, begin: r.begin[pc], end: r.end[pc], sums: new Float64Array(kinds.length) };
        out.push(last);
      }
      last.sums[c.kind[pc]] += r.end[pc] - r.begin[pc];
      last.end = r.end[pc];
    }
    return out;
  }
  function idle(kind) { return kind >= BUBBLE && kind < 10; }
  // layout divides the available height among the rows: rows of spans grow to twice the height that they need, and
  // memory takes the rest. What remains without memory goes to the rows of spans.
  let contentHeight = 0;
  function layout() {
    let fixed = 4, spans = 0, memory = 0, top = 4;
    rows.forEach((row, i) => { if (row.title) fixed += row.least + (i ? gap : 0); else if (row.memory) memory += row.least; else spans += row.least; });
    const free = height - axisHeight - fixed - foot;
    let wide = Math.max(1, free / (spans + memory));
    if (memory) wide = Math.min(2, wide);
    const tall = memory ? Math.max(1, (free - wide * spans) / memory) : 1;
    rows.forEach((row, i) => {
      if (row.title && i) top += gap;
      row.y = top;
      row.height = row.title ? row.least : Math.floor(row.least * (row.memory ? tall : wide));
      top += row.height;
    });
    contentHeight = top + foot;
    canvas.dataset.rows = contentHeight + " " + (height - axisHeight);
  }

  // view
  const canvas = $("view"), g = canvas.getContext("2d");
  let from = 0, to = makespan || 1, scroll = 0, width = 0, height = 0, selected = null, range = null, pointer = null, colours = {}, queued = false;
  const queue = () => { if (!queued) { queued = true; requestAnimationFrame(() => { queued = false; draw(); }); } };
  const plot = () => width - labelWidth;
  const x = t => labelWidth + (t - from) / (to - from) * plot();
  const timeAt = px => from + (px - labelWidth) / plot() * (to - from);
  function look() {
    const style = getComputedStyle(document.documentElement);
    for (const n of ["back", "panel", "text", "soft", "line", "grid", "mark", "limit", ...kinds.map(k => k[0]), ...uses.map(u => u[0])]) colours[n] = style.getPropertyValue("--" + n).trim();
    $("legend").innerHTML = "";
    const entry = (colour, text, hatched) => {
      const e = document.createElement("span"), i = document.createElement("i");
      i.style.background = colour;
      if (hatched) i.style.backgroundImage = "repeating-linear-gradient(135deg, transparent 0 2px, " + colours.back + " 2px 4px)";
      e.append(i, text);
      $("legend").append(e);
      return i;
    };
    kinds.forEach(([name, text], k) => { if (seen.has(k)) entry(colours[name], text, k === BUBBLE || k === EXPOSED); });
    if (used.size) {
      const more = document.createElement("span"), b = document.createElement("b");
      more.className = "more"; b.append("memory");
      $("legend").append(more, b);
    }
    uses.forEach(([name, text], u) => { if (used.has(u)) entry(colours[name], text); });
    if (Object.values(scales).some(s => s.limit)) { const i = entry(colours.limit, "capacity"); i.style.height = "2px"; i.style.verticalAlign = "3px"; }
    inks = kinds.map(([name]) => ink(colours[name]));
    shades = kinds.map(([name]) => shade(colours[name]));
    hatches = kinds.map(([name], k) => k === BUBBLE || k === EXPOSED ? hatch(colours[name]) : colours[name]);
    queue();
  }
  let hatches = [], inks = [], shades = [];
  const channels = colour => [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16));
  // ink returns black or white, whichever contrasts more with a colour.
  function ink(colour) {
    const [r, g, b] = channels(colour).map(c => (c / 255) ** 2.2);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#111" : "#fff";
  }
  // shade mixes a colour with the background, for every second task.
  function shade(colour) {
    const back = channels(colours.back);
    return "#" + channels(colour).map((c, i) => Math.round(0.7 * c + 0.3 * back[i]).toString(16).padStart(2, "0")).join("");
  }
  function hatch(colour) {
    const c = document.createElement("canvas"), d = c.getContext("2d");
    c.width = c.height = 6;
    d.strokeStyle = colour; d.lineWidth = 2;
    d.beginPath(); d.moveTo(-1, 7); d.lineTo(7, -1); d.moveTo(-1, 1); d.lineTo(1, -1); d.moveTo(5, 7); d.lineTo(7, 5); d.stroke();
    return g.createPattern(c, "repeat");
  }
  const units = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]];
  function duration(t) {
    const [u, n] = units.find(([u]) => Math.abs(t) >= u) || units[3];
    return (t / u).toPrecision(4).replace(/\.?0+$/, "") + " " + n;
  }
  // moment formats a time with enough digits to tell it from others at a given distance, in the unit that suits the latest.
  function moment(t, apart, latest = t) {
    const [u, n] = units.find(([u]) => Math.abs(latest) >= u) || units[3];
    return (t / u).toFixed(Math.max(0, Math.min(12, Math.ceil(-Math.log10(Math.max(apart, 1e-12) / u) - 1e-9)))) + " " + n;
  }
  const period = (a, b) => `${duration(b - a)}, from ${moment(a, (b - a) / 1000, b)} to ${moment(b, (b - a) / 1000)}`;
  function bytesText(n) {
    let u = 0;
    while (n >= 1024 && u < 4) { n /= 1024; u++; }
    return n.toPrecision(3) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][u];
  }
  // firstVisible returns the first span of a list that ends after a time.
  function firstVisible(row, t = from) {
    let a = 0, b = row.list.length;
    while (a < b) { const m = (a + b) >> 1; if (row.rank.end[row.list[m]] < t) a = m + 1; else b = m; }
    return a;
  }
  function draw() {
    const scale = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) { canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale); }
    g.setTransform(scale, 0, 0, scale, 0, 0);
    g.fillStyle = colours.back; g.fillRect(0, 0, width, height);
    g.font = "11px system-ui, sans-serif"; g.textBaseline = "middle";
    const [grid, step] = ticks();
    g.fillStyle = colours.grid;
    for (const t of grid) g.fillRect(Math.round(x(t)), axisHeight, 1, height);
    g.save(); g.beginPath(); g.rect(0, axisHeight, width, height - axisHeight); g.clip();
    for (const row of rows) {
      const y = row.y - scroll + axisHeight;
      if (y + row.height < axisHeight || y > height) continue;
      if (row.title) drawTitle(row, y); else if (row.list) drawSpans(row, y); else if (row.tasks) drawTasks(row, y); else drawMemory(row, y);
    }
    if (pathShown) drawPath();
    if (range) drawRange();
    g.restore();
    const page = height - axisHeight, whole = contentHeight;
    if (whole > page + 0.5) { g.fillStyle = colours.soft; g.globalAlpha = 0.5; g.fillRect(width - 5, axisHeight + page * scroll / whole, 4, page * page / whole); g.globalAlpha = 1; }
    g.fillStyle = colours.panel; g.fillRect(0, 0, width, axisHeight);
    g.fillStyle = colours.soft; g.textAlign = "center";
    for (const t of grid) { const text = moment(t, step, Math.max(Math.abs(to), step)), half = g.measureText(text).width / 2; g.fillText(text, Math.min(x(t), width - half - 3), axisHeight / 2); }
    g.textAlign = "left";
  }
  function ticks() {
    const rough = (to - from) / Math.max(2, plot() / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= rough * 0.999), out = [];
    for (let t = Math.ceil(from / step) * step; t <= to; t += step) out.push(t);
    return [out, step];
  }
  function drawTitle(row, y) {
    g.fillStyle = colours.text; g.font = "600 12px system-ui, sans-serif"; g.fillText(row.title, 8, y + row.height / 2 + 2);
    const w = g.measureText(row.title).width;
    g.font = "11px system-ui, sans-serif"; g.fillStyle = colours.soft; g.fillText(row.note, 18 + w, y + row.height / 2 + 2);
  }
  function drawSpans(row, y) {
    g.fillStyle = colours.soft; g.fillText(row.label, 20, y + row.height / 2);
    g.save(); g.beginPath(); g.rect(labelWidth, y, plot(), row.height); g.clip();
    const first = firstVisible(row), end = Math.min(row.list.length, firstVisible(row, to) + 1);
    if (end - first > plot()) drawDense(row, y, first, end); else drawEach(row, y, first, end);
    g.restore();
  }
  // drawTasks alternates the lightness of neighbours, and names tasks that are wide enough.
  function drawTasks(row, y) {
    g.fillStyle = colours.soft; g.fillText(row.label, 20, y + row.height / 2);
    g.save(); g.beginPath(); g.rect(labelWidth, y, plot(), row.height); g.clip();
    g.font = "10px system-ui, sans-serif";
    for (const t of row.tasks) {
      if (t.end < from || t.begin > to) continue;
      const b = Math.max(x(t.begin), labelWidth - 2), w = Math.max(0.6, Math.min(x(t.end), width + 2) - b - (x(t.end) - x(t.begin) > 4 ? 0.7 : 0));
      const c = row.rank.code, kind = taskKinds[c.phase[t.pc]], many = manyOf(row.rank), light = (many.micro && !many.sub ? c.micro : c.sub)[t.pc] % 2;
      const look = light ? shades[kind] : colours[kinds[kind][0]];
      g.fillStyle = look; g.fillRect(b, y, w, row.height - 2);
      if (selected && selected.task === t) { g.strokeStyle = colours.mark; g.lineWidth = 2; g.strokeRect(b, y + 1, Math.max(w, 3), row.height - 4); }
      const text = taskLabel(row.rank, t.pc);
      if (g.measureText(text).width < w - 4) { g.fillStyle = ink(look); g.fillText(text, Math.max(b, labelWidth) + 2, y + row.height / 2 - 1); }
    }
    g.restore();
  }
  // drawPath dims all but the critical path, and joins its segments from row to row.
  function drawPath() {
    g.globalAlpha = 0.72; g.fillStyle = colours.back; g.fillRect(labelWidth, axisHeight, plot(), height); g.globalAlpha = 1;
    for (const p of head.programs) {
      const { rank, pc, begin, end } = p.path;
      let a = 0, b = begin.length;
      while (a < b) { const m = (a + b) >> 1; if (end[m] < from) a = m + 1; else b = m; }
      let lastY = -1, lastX = -1, lastRank = -1, lastJoin = -9;
      for (let i = a; i < begin.length && begin[i] <= to; i++) {
        if (rank[i] < 0) { lastY = -1; continue; }
        const r = p.ranks[rank[i]], row = r.rows[r.code.stream[pc[i]]];
        if (!row) continue;
        const y = row.y - scroll + axisHeight, px = Math.max(x(begin[i]), labelWidth - 2), e = Math.min(x(end[i]), width + 2);
        const between = rank[i] !== lastRank; // rank changes are always drawn
        if (lastY >= 0 && lastY !== y && px >= labelWidth && (between || px > lastJoin + 6)) {
          g.fillStyle = between ? colours.mark : colours.soft; g.fillRect(px - 0.5, Math.min(lastY, y) + row.height / 2, 1, Math.abs(lastY - y));
          lastJoin = px;
        }
        lastRank = rank[i];
        if (e - lastX > 0.5 || lastY !== y) { g.fillStyle = colours[kinds[r.code.kind[pc[i]]][0]]; g.fillRect(px, y, Math.max(e - px, 0.6), row.height - 2); lastX = e; }
        lastY = y;
      }
    }
  }
  function drawRange() {
    const a = x(range.a), b = x(range.b);
    g.globalAlpha = 0.12; g.fillStyle = colours.mark; g.fillRect(a, axisHeight, b - a, height); g.globalAlpha = 1;
    g.fillRect(a, axisHeight, 1, height); g.fillRect(b, axisHeight, 1, height);
  }
  function drawEach(row, y, first, last) {
    const { rank, list } = row, { begin, end, code } = rank;
    for (let i = first; i < last; i++) {
      const pc = list[i], b = Math.max(x(begin[pc]), labelWidth - 2), e = Math.min(x(end[pc]), width + 2);
      g.fillStyle = hatches[code.kind[pc]];
      g.fillRect(b, y, Math.max(e - b, 0.6), row.height - 2);
    }
    drawWords(row, y);
  }
  // drawDense draws for each pixel the kind that takes most of it, with a height that shows how busy the stream is there.
  const share = new Float64Array(kinds.length);
  function drawDense(row, y, first, last) {
    const { rank, list } = row, { begin, end, code } = rank, h = row.height - 2;
    let column = labelWidth, runFrom = labelWidth, runKind = -1, runLevel = 0;
    const flush = at => {
      if (runKind >= 0 && at > runFrom) { g.fillStyle = hatches[runKind]; g.fillRect(runFrom, y + h * (1 - runLevel / 4), at - runFrom, h * runLevel / 4); }
      runFrom = at;
    };
    const close = () => {
      let most = -1, largest = 0, busy = 0;
      for (let k = 0; k < share.length; k++) { busy += share[k]; if (share[k] > largest) { most = k; largest = share[k]; } share[k] = 0; }
      const level = most < 0 ? 0 : Math.max(1, Math.round(Math.min(1, busy) * 4));
      if (most !== runKind || level !== runLevel) { flush(column); runKind = most; runLevel = level; }
      column++;
    };
    for (let i = first; i < last; i++) {
      const pc = list[i], k = code.kind[pc];
      let b = Math.max(x(begin[pc]), labelWidth);
      const e = Math.min(x(end[pc]), width);
      while (column + 1 <= b) close();
      while (b < e) {
        const upTo = Math.min(e, column + 1);
        share[k] += upTo - b;
        b = upTo;
        if (b < e) close();
      }
    }
    close();
    flush(column);
  }
  // drawWords separates spans, and names those that are wide enough, with or without subsequence and layer.
  function drawWords(row, y) {
    const { rank, list } = row, { begin, end } = rank;
    g.font = "10px system-ui, sans-serif";
    let shown = 0;
    for (let i = firstVisible(row); i < list.length && shown < 400; i++) {
      const pc = list[i], b = x(begin[pc]);
      if (b > width) break;
      const w = x(end[pc]) - b;
      const hit = selected && selected.rank === rank && selected.pc === pc;
      if (hit) { g.strokeStyle = colours.mark; g.lineWidth = 2; g.strokeRect(b, y + 1, Math.max(w, 3), row.height - 4); }
      if (w < 4) continue;
      shown++;
      g.fillStyle = colours.back; g.fillRect(b, y, 0.7, row.height - 2);
      const at = Math.max(b, labelWidth), room = Math.min(b + w, width) - at - 5;
      if (room < 20 || rank.code.kind[pc] >= BUBBLE) continue;
      const text = [name(rank, pc), rank.program.ops[rank.code.op[pc]]].find(t => g.measureText(t).width < room);
      if (text) { g.fillStyle = inks[rank.code.kind[pc]]; g.fillText(text, at + 3, y + row.height / 2 - 1); }
    }
    g.font = "11px system-ui, sans-serif";
  }
  // drawMemory stacks the uses of memory. Each pixel shows the moment with the most bytes in use during it.
  function drawMemory(row, y) {
    const { at, bytes, stack, memory } = row, h = row.height - 6, base = y + row.height - 3, s = scales[memory.arena], scale = h / s.top;
    g.fillStyle = colours.soft; g.fillText(row.label, 20, y + row.height / 2 - 6); g.fillText(`${bytesText(memory.placed)} of ${bytesText(memory.capacity)}`, 28, y + row.height / 2 + 7);
    g.save(); g.beginPath(); g.rect(labelWidth, y, plot(), row.height); g.clip();
    const end = Math.min(width, x(row.rank.program.makespan)), first = levelAt(row, from);
    const runs = []; // pixel from which a level is shown, and the level
    let i = first, column = Math.max(labelWidth, x(at[first])), highest = first;
    for (i++; i < at.length && x(at[i]) < end; i++) {
      const px = Math.floor(Math.max(labelWidth, x(at[i])));
      if (px > column) { runs.push(column, highest); column = px; highest = i; } else if (bytes[i] > bytes[highest]) highest = i;
      if (i + 1 >= at.length || x(at[i + 1]) >= px + 1) { runs.push(column, highest); column = px + 1; highest = i; }
    }
    runs.push(column, highest, end, -1);
    const sums = new Float64Array(runs.length / 2);
    for (let k = 0; k + 1 < sums.length; k++) sums[k] = bytes[runs[2 * k + 1]];
    for (let u = stack.length - 1; u >= 0; u--) { // each covers a part of the ones before it
      g.fillStyle = colours[uses[stack[u].use][0]]; g.beginPath(); g.moveTo(runs[0], base);
      for (let k = 0; k + 1 < sums.length; k++) {
        const top = base - sums[k] * scale;
        g.lineTo(runs[2 * k], top); g.lineTo(runs[2 * k + 2], top);
        sums[k] -= stack[u].bytes[runs[2 * k + 1]];
      }
      g.lineTo(end, base); g.closePath(); g.fill();
    }
    if (s.limit) { g.fillStyle = colours.limit; g.fillRect(labelWidth, Math.round(base - memory.capacity * scale), plot(), 1); }
    g.restore();
  }
  // levelAt returns the memory level at a time.
  function levelAt(row, t) {
    let a = 0, b = row.at.length;
    while (a < b) { const m = (a + b) >> 1; if (row.at[m] <= t) a = m + 1; else b = m; }
    return Math.max(0, a - 1);
  }

  // words
  function name(r, pc) {
    const c = r.code;
    return r.program.ops[c.op[pc]] + (c.sub[pc] >= 0 ? " s" + c.sub[pc] : "") + (c.layer[pc] >= 0 ? " l" + c.layer[pc] : "");
  }
  // taskName writes a task as plans do: forward of microbatch 0, subsequence 3, on virtual stage 1 is F0.3@1.
  function taskName(r, pc) {
    const c = r.code, letter = taskLetters[c.phase[pc]];
    return letter && c.sub[pc] >= 0 ? `${letter}${Math.max(0, c.micro[pc])}.${c.sub[pc]}@${c.stage[pc]}` : "";
  }
  // manyOf finds the properties in which the tasks of a rank differ.
  function manyOf(r) {
    const c = r.code, task = i => taskLetters[c.phase[i]] && c.sub[i] >= 0;
    return c.many ||= { micro: c.micro.some((m, i) => task(i) && m > 0), sub: c.sub.some((s, i) => task(i) && s > 0), stage: c.stage.some((s, i) => task(i) && s !== r.stage) };
  }
  function taskLabel(r, pc) {
    const c = r.code, many = manyOf(r);
    const which = [many.micro && c.micro[pc], (many.sub || !many.micro) && c.sub[pc]].filter(n => n !== false);
    return taskLetters[c.phase[pc]] + which.join(".") + (many.stage ? "@" + c.stage[pc] : "");
  }
  const sharesOf = (sums, whole) => kinds.map(([, text], k) => sums[k] > whole * 5e-4 ? `${text} ${(100 * sums[k] / whole).toFixed(1)}%` : "").filter(s => s).join(", ");
  function describeTask(r, t) {
    const c = r.code;
    return `${taskName(r, t.pc)}   ${period(t.begin, t.end)}\n` +
      `${phases[c.phase[t.pc]]} of microbatch ${Math.max(0, c.micro[t.pc])}, subsequence ${c.sub[t.pc]} on stage ${c.stage[t.pc]}, by rank ${r.rank}\n` +
      `of its time: ${sharesOf(t.sums, t.end - t.begin)}`;
  }
  function describePeak(row) {
    const m = row.memory, part = m.parts.map(([name, n]) => `${name} ${bytesText(n)}`).join(", ");
    return `\nat the peak, in ${m.when}: ${part}\nthe largest: ` + m.largest.map(([name, of, n]) => `${name} (${of}) ${bytesText(n)}`).join(", ");
  }
  function describeMemory(row, t) {
    const m = row.memory, i = levelAt(row, t), n = t < row.at[0] || t > row.rank.program.makespan ? 0 : row.bytes[i];
    const parts = n ? row.stack.filter(s => s.bytes[i] > 0).map(s => `${uses[s.use][1]} ${bytesText(s.bytes[i])}`) : [];
    return `rank ${row.rank.rank}, ${row.label} at ${moment(t, (to - from) / plot())}: ${bytesText(n)} in use, at most ${bytesText(row.peak)}\n` +
      (parts.length ? parts.join(", ") + "\n" : "") + `highest placed byte: ${bytesText(m.placed)} of ${bytesText(m.capacity)}`;
  }
  // causeOf returns the last dependency of an instruction: the listed one, or its predecessor on the stream.
  function causeOf(r, pc) {
    const { of, at, pc: to, rank } = r.cause;
    let a = 0, b = of.length;
    while (a < b) { const m = (a + b) >> 1; if (of[m] < pc) a = m + 1; else b = m; }
    if (of[a] === pc) return at[a] < 0 ? null : { o: r.program.ranks[at[a]], pc: to[a], rank: rank[a] };
    const list = r.rows[r.code.stream[pc]].list, i = list.indexOf(pc);
    return i > 0 && r.program.ops[r.code.op[pc]] !== "wait" ? { o: r, pc: list[i - 1], rank: r.rank } : null;
  }
  // describeCause describes the last dependency of an instruction; for a wait, the work before its event.
  function describeCause(r, pc) {
    const cause = causeOf(r, pc);
    if (!cause) return "";
    const { o, pc: to, rank } = cause;
    return `\n${r.program.ops[r.code.op[pc]] === "wait" ? "waits for" : "begins after"} rank ${rank}${rank !== o.rank ? ` (as rank ${o.rank} here)` : ""}, ${r.program.streams[o.code.stream[to]]}, ` +
      `pc ${to}: ${name(o, to)}${taskName(o, to) ? ", task " + taskName(o, to) : ""}, ${period(o.begin[to], o.end[to])}`;
  }
  function describePath() {
    return head.programs.map(p => {
      const sums = new Map();
      for (const { work, stage, seconds } of p.sums) {
        const s = sums.get(work) || { all: 0, stages: [] };
        s.all += seconds; if (stage >= 0) s.stages.push(`stage ${stage} ${duration(seconds)}`);
        sums.set(work, s);
      }
      const lines = [...sums].sort((a, b) => b[1].all - a[1].all).map(([work, s]) => `${work} ${duration(s.all)} (${(100 * s.all / p.makespan).toFixed(1)}%): ${s.stages.join(", ")}`);
      return `critical path of ${head.programs.length > 1 ? p.name : "the step"}, ${duration(p.makespan)}: each part waits for the one before it\n` + lines.join("\n");
    }).join("\n");
  }
  // describeRange sums the work of the compute streams in a range of time.
  function describeRange() {
    const whole = range.b - range.a, lines = [`${period(range.a, range.b)}; shares of it, on the compute streams:`];
    for (const row of rows) {
      if (!row.list || row.label !== "compute") continue;
      const r = row.rank, sums = new Float64Array(kinds.length);
      for (let i = firstVisible(row, range.a); i < row.list.length && r.begin[row.list[i]] < range.b; i++)
        sums[r.code.kind[row.list[i]]] += Math.min(r.end[row.list[i]], range.b) - Math.max(r.begin[row.list[i]], range.a);
      lines.push(`${head.programs.length > 1 ? r.program.name + ", " : ""}rank ${r.rank}: ${sharesOf(sums, whole)}`);
    }
    return lines.join("\n");
  }
  function describe(r, pc) {
    const c = r.code, p = r.program, kind = kinds[c.kind[pc]];
    const where = [phases[c.phase[pc]]];
    if (c.micro[pc] >= 0) where.push("microbatch " + c.micro[pc]);
    if (c.sub[pc] >= 0) where.push("subsequence " + c.sub[pc]);
    if (c.layer[pc] >= 0) where.push("layer " + c.layer[pc]);
    const result = c.result[pc] >= 0 ? "\nwrites " + p.results[c.result[pc]] : "";
    const task = taskName(r, pc);
    return `${name(r, pc)}   ${period(r.begin[pc], r.end[pc])}${kind ? "   (" + kind[1] + ")" : ""}\n` +
      `rank ${r.rank}, ${p.streams[c.stream[pc]]}, pc ${pc}; ${where.join(", ")}${task ? ", task " + task : ""}${result}\n` +
      `${p.passes[c.pass[pc]] || ""}: ${p.lines[c.line[pc]] || ""}` + describeCause(r, pc);
  }
  function spanAt(px, py) {
    const row = rows.find(r => !r.title && py >= r.y - scroll + axisHeight && py < r.y - scroll + axisHeight + r.height);
    if (!row || px < labelWidth) return null;
    const t = timeAt(px), near = 2 / plot() * (to - from);
    if (row.memory) return { rank: row.rank, row, says: describeMemory(row, t) };
    if (row.tasks) {
      const task = row.tasks.find(k => k.begin <= t && t < k.end);
      return task ? { rank: row.rank, row, task, says: describeTask(row.rank, task) } : null;
    }
    for (let i = firstVisible(row); i < row.list.length; i++) {
      const pc = row.list[i];
      if (row.rank.begin[pc] > t + near) break;
      if (row.rank.end[pc] >= t - near && (row.rank.end[pc] >= t || row.rank.begin[pc] >= t - near)) return { rank: row.rank, pc, row, says: describe(row.rank, pc) };
    }
    return null;
  }
  const help = $("detail").textContent;
  function select(s) {
    selected = s; range = null;
    $("detail").textContent = (s ? s.says : pathShown ? describePath() : help) + (s && s.row.memory ? describePeak(s.row) : "");
    if (s && s.pc !== undefined && causeOf(s.rank, s.pc)) {
      const b = document.createElement("button");
      b.textContent = "go there (c)"; b.id = "cause"; b.onclick = follow;
      $("detail").append(" ", b);
    }
    fillTable();
    queue();
  }
  // follow selects the dependency of the selected instruction; back returns.
  const trail = [];
  function follow() {
    const cause = selected && selected.pc !== undefined && causeOf(selected.rank, selected.pc);
    if (!cause) return;
    const { o, pc } = cause;
    trail.push(selected);
    reveal({ rank: o, pc, row: o.rows[o.code.stream[pc]] });
  }
  const back = () => { const s = trail.pop(); if (s) reveal(s); };
  let pathShown = false, tableShown = false;
  function togglePath() { pathShown = !pathShown; $("path").ariaPressed = pathShown; select(null); }
  function toggleTable() { tableShown = !tableShown; $("table").ariaPressed = tableShown; $("sums").style.display = tableShown ? "block" : "none"; fillTable(); }
  // fillTable sums the time of each opcode on each stream over all shown ranks, in the range or the whole step.
  function fillTable() {
    if (!tableShown) return;
    const [a, b] = range ? [range.a, range.b] : [0, makespan];
    $("sums").innerHTML = "";
    for (const p of head.programs) {
      const sums = new Map();
      for (const r of p.ranks) for (const s in r.rows) {
        const row = r.rows[s];
        for (let i = firstVisible(row, a); i < row.list.length && r.begin[row.list[i]] < b; i++) {
          const pc = row.list[i], key = row.label + " " + p.ops[r.code.op[pc]];
          const x = sums.get(key) || { n: 0, t: 0 };
          x.n++; x.t += Math.min(r.end[pc], b) - Math.max(r.begin[pc], a);
          sums.set(key, x);
        }
      }
      const table = document.createElement("table"), add = (tag, cells) => { const tr = document.createElement("tr"); cells.forEach(c => tr.append(cell(tag, c))); table.append(tr); };
      add("th", ["stream", "opcode", "times", "time", "of the ranks' time"]);
      for (const [key, x] of [...sums].sort((u, v) => v[1].t - u[1].t)) add("td", [...key.split(" "), String(x.n), duration(x.t), (100 * x.t / ((b - a) * p.ranks.length)).toFixed(1) + "%"]);
      $("sums").append(cell("div", `${head.programs.length > 1 ? p.name + ": " : ""}${p.ranks.length} ranks, ${range ? period(a, b) : "the whole step"}`), table);
    }
  }

  // moving
  function show(a, b) {
    const least = makespan * 1e-9, whole = makespan * 1.02;
    let w = Math.min(Math.max(b - a, least), whole);
    a = Math.min(Math.max(a, -0.01 * makespan), whole - w);
    from = a; to = a + w;
    canvas.dataset.shown = from + " " + to;
    hideTip();
    queue();
  }
  const zoom = (factor, t = (from + to) / 2) => show(t - (t - from) * factor, t + (to - t) * factor);
  const pan = share => show(from + (to - from) * share, to + (to - from) * share);
  const here = () => pointer === null ? undefined : timeAt(pointer); // keys zoom around the pointer, as in other timelines
  function frame(s) { // zooms to a span, a task, or everything
    if (!s || !s.task && s.pc === undefined) { show(0, makespan * 1.01); scrollTo(0); return; }
    const [b, e] = s.task ? [s.task.begin, s.task.end] : [s.rank.begin[s.pc], s.rank.end[s.pc]];
    show(b - (e - b) * 0.1, e + (e - b) * 0.1);
  }
  function scrollTo(y) { scroll = Math.max(0, Math.min(y, contentHeight - height + axisHeight)); hideTip(); queue(); }
  function hideTip() { $("tip").style.display = "none"; }
  canvas.addEventListener("wheel", e => {
    e.preventDefault();
    const fits = contentHeight <= height - axisHeight; // nothing to scroll
    if (e.ctrlKey || e.metaKey || fits && !e.shiftKey && !e.deltaX) zoom(Math.exp(e.deltaY * 0.003), timeAt(e.offsetX));
    else if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) pan((e.deltaX || e.deltaY) / plot());
    else scrollTo(scroll + e.deltaY);
  }, { passive: false });
  let drag = null;
  canvas.addEventListener("pointerdown", e => { hideTip(); drag = { measure: e.shiftKey, x: e.offsetX, y: e.offsetY, from, to, scroll, moved: false }; canvas.setPointerCapture(e.pointerId); canvas.focus(); });
  canvas.addEventListener("pointermove", e => {
    const tip = $("tip");
    if (drag) {
      const dx = e.offsetX - drag.x, dy = e.offsetY - drag.y;
      if (Math.abs(dx) + Math.abs(dy) > 3) drag.moved = true;
      if (drag.moved && drag.measure) {
        const [a, b] = [drag.x, e.offsetX].sort((p, q) => p - q).map(px => Math.min(makespan, Math.max(0, timeAt(px))));
        if (b > a) { range = { a, b }; selected = null; $("detail").textContent = describeRange(); fillTable(); queue(); }
      } else if (drag.moved) { const d = dx / plot() * (drag.to - drag.from); show(drag.from - d, drag.to - d); scrollTo(drag.scroll - dy); }
      return;
    }
    if (e.pointerType === "touch") return; // a finger does not hover: a tap selects
    pointer = e.offsetX > labelWidth ? e.offsetX : null;
    const s = spanAt(e.offsetX, e.offsetY);
    tip.style.display = s ? "block" : "none";
    if (s) { tip.textContent = s.says; tip.style.left = Math.min(e.offsetX + 14, Math.max(0, width - tip.offsetWidth - 8)) + "px"; tip.style.top = Math.min(e.offsetY + 16, Math.max(0, height - tip.offsetHeight - 8)) + "px"; }
  });
  canvas.addEventListener("pointerup", e => { if (drag && !drag.moved) select(spanAt(e.offsetX, e.offsetY)); drag = null; });
  canvas.addEventListener("pointercancel", () => { drag = null; hideTip(); });
  canvas.addEventListener("pointerleave", () => { pointer = null; hideTip(); });
  addEventListener("blur", hideTip);
  canvas.addEventListener("dblclick", e => { const s = spanAt(e.offsetX, e.offsetY); if (s) frame(s); });

  // search: every word must occur in the instruction's name, buffer, stream, phase or spec line.
  let hits = [], hit = -1;
  function find(text) {
    hits = []; hit = -1;
    const words = text.toLowerCase().split(/\s+/).filter(w => w);
    const seen = new Map();
    if (words.length) for (const row of rows) {
      if (!row.list) continue;
      for (const pc of row.list) {
        const r = row.rank, c = r.code, p = r.program;
        if (!seen.has(c)) seen.set(c, new Map());
        const memo = seen.get(c);
        let found = memo.get(pc);
        if (found === undefined) {
          const all = (name(r, pc) + " " + taskName(r, pc) + " " + p.streams[c.stream[pc]] + " " + phases[c.phase[pc]] + " pc=" + pc + " " + (c.result[pc] >= 0 ? p.results[c.result[pc]] : "") + " " + (p.lines[c.line[pc]] || "")).toLowerCase();
          const tokens = all.split(/\s+/);
          found = words.every(w => /^[sl]\d+$/.test(w) ? tokens.includes(w) : all.includes(w));
          memo.set(pc, found);
        }
        if (found) hits.push({ rank: r, pc, row });
      }
    }
    go(1);
  }
  function go(step) {
    if (!hits.length) { $("hits").textContent = $("search").value ? "nothing" : ""; select(null); return; }
    hit = (hit + step + hits.length) % hits.length;
    $("hits").textContent = `${hit + 1} of ${hits.length}`;
    reveal(hits[hit]);
  }
  function reveal(s) {
    const b = s.rank.begin[s.pc], e = s.rank.end[s.pc], w = Math.max((e - b) * 12, makespan * 1e-6);
    show((b + e - w) / 2, (b + e + w) / 2);
    if (s.row.y < scroll || s.row.y + s.row.height > scroll + height - axisHeight) scrollTo(s.row.y - height / 3);
    select({ ...s, says: describe(s.rank, s.pc) });
  }
  let typing = 0;
  $("search").addEventListener("input", e => { clearTimeout(typing); typing = setTimeout(() => find(e.target.value), 150); });
  $("search").addEventListener("keydown", e => { if (e.key === "Enter") go(e.shiftKey ? -1 : 1); if (e.key === "Escape") canvas.focus(); e.stopPropagation(); });
  const keys = {
    w: () => zoom(0.7, here()), s: () => zoom(1 / 0.7, here()), a: () => pan(-0.15), d: () => pan(0.15), "+": () => zoom(0.7, here()), "-": () => zoom(1 / 0.7, here()),
    0: () => frame(null), f: () => frame(selected), Escape: () => { hideTip(); select(null); }, n: () => go(1), p: () => go(-1),
    c: follow, b: back, x: togglePath, t: toggleTable,
    ArrowLeft: () => pan(-0.1), ArrowRight: () => pan(0.1), ArrowUp: () => scrollTo(scroll - 60), ArrowDown: () => scrollTo(scroll + 60),
  };
  addEventListener("keydown", e => {
    if (e.key === "/") { e.preventDefault(); $("search").focus(); return; }
    if (keys[e.key] && !e.ctrlKey && !e.metaKey && document.activeElement !== $("search")) { e.preventDefault(); keys[e.key](); }
  });
  $("in").onclick = () => zoom(0.7); $("out").onclick = () => zoom(1 / 0.7); $("help").onclick = () => select(null); $("fit").onclick = keys[0];
  $("path").onclick = togglePath; $("table").onclick = toggleTable;
  $("theme").onclick = () => { setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); };
  function setTheme(t) { document.documentElement.dataset.theme = t; look(); }

  // the table of figures
  const cell = (tag, content) => { const e = document.createElement(tag); e.append(content); return e; };
  const line = (tag, cells) => { const tr = document.createElement("tr"); cells.forEach(c => tr.append(cell(tag, c))); $("summary").append(tr); };
  const first = head.programs[0];
  line("th", ["", "", "step", "tokens/s per GPU", "MFU", "bubble", "exposed transfer", "busiest", "machine"]);
  const badge = (p) => { const e = cell("span", p.measured ? "measured" : "simulated"); e.className = "badge " + e.textContent; return e; };
  for (const p of head.programs) line("td", [head.programs.length > 1 ? p.name : "", badge(p), duration(p.makespan) + (p !== first ? ` (${(p.makespan / first.makespan).toFixed(3)} x)` : ""), p.tgs >= 1000 ? Math.round(p.tgs).toString() : p.tgs.toPrecision(4), (100 * p.mfu).toFixed(1) + "%", (100 * p.bubble).toFixed(1) + "%", p.exposed ? duration(p.exposed) : "0 s", p.critical, p.machine]);

  // A link may select what is shown: #find=attention&theme=dark&from=0.1&to=0.2&path=1&table=1
  const wish = new URLSearchParams(location.hash.slice(1));
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  const resize = () => { const b = canvas.parentElement.getBoundingClientRect(); width = b.width; height = b.height; layout(); scrollTo(scroll); };
  new ResizeObserver(() => { resize(); draw(); }).observe(canvas.parentElement); // before the browser paints: nothing flickers
  resize();
  setTheme(wish.get("theme") || (dark.matches ? "dark" : "light"));
  show(0, makespan * 1.01);
  if (wish.get("from")) show(Number(wish.get("from")), Number(wish.get("to")));
  if (wish.get("path")) togglePath();
  if (wish.get("table")) toggleTable();
  if (wish.get("find")) { $("search").value = wish.get("find"); find(wish.get("find")); }
  resize(); // after the legend has its height
  const began = performance.now();
  draw();
  g.getImageData(0, 0, 1, 1); // waits until drawing is done
  document.body.dataset.spans = spanCount;
  document.body.dataset.drawMs = (performance.now() - began).toFixed(1);
})();
