// The page by which people watch a server. Everything it shows came from files and peers that may be
// hostile, so text enters the document as text only: there is no innerHTML in here.

const POLL_MS = 1000;
const BATCH = 200; // rows added to a list at a time; a list may have 100,000

const $ = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Text ---------------------------------------------------------------------------------------------

// What has no shape of its own (controls, reversed writing, lone surrogates) is shown as an escape.
const shapeless = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/gu;
const shown = (text) =>
  text.replace(shapeless, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);

// A long name may be broken behind its dots.
const breakable = (name) =>
  shown(name).split(/(?<=\.)/).flatMap((part, at) => (at ? [make("wbr"), part] : [part]));

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

function size(bytes) {
  let value = bytes;
  let unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return unit === 0 ? `${bytes} B` : `${Number(value.toPrecision(3))} ${UNITS[unit]}`;
}

const count = (number) => number.toLocaleString("en-US");
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

function figure(number) {
  if (number === null) return "–";
  if (Number.isInteger(number) && Math.abs(number) < 1e15) return count(number);
  return String(Number(number.toPrecision(6)));
}

function duration(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const shape = (sizes) => `[${sizes.join(", ")}]`;

// Asking the server --------------------------------------------------------------------------------

class Unauthorised extends Error {}

const TOKEN = "weighlock-token";
let token = readToken();

function readToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(TOKEN, given);
    // Out of the address bar, the history and the next screenshot.
    history.replaceState(null, "", location.pathname + location.search);
  }
  return given || sessionStorage.getItem(TOKEN) || "";
}

async function ask(path, options = {}) {
  const reply = await fetch(`api/${path}`, {
    ...options,
    headers: { Authorization: `Bearer ${token}` },
    cache: "no-store",
    credentials: "omit",
  });
  if (reply.status === 401) throw new Unauthorised();
  const facts = await reply.json().catch(() => ({}));
  return { status: reply.status, facts };
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// The list of shares -------------------------------------------------------------------------------

let chosen = null; // number of the share that is looked at

function titleOf(share) {
  if (share.title) return shown(share.title);
  return `${share.kind === "inbox" ? "Inbox" : "Share"} ${share.number}`;
}

function summaryOf(share) {
  const receivers = share.receivers;
  const inbox = share.kind === "inbox";
  const parts = [inbox ? "takes what is pushed" : `${plural(share.tensors, "tensor")}, ${size(share.bytes)}`];
  if (receivers.started) parts.push(`${count(receivers.started)} ${inbox ? "sending" : "receiving"}`);
  if (receivers.landed) parts.push(`${count(receivers.landed)} landed`);
  if (share.ended) parts.push(share.ended);
  return parts.join(" · ");
}

// Keeps one element for each key: what is focused, open or selected stays so from poll to poll.
function reconcile(list, items, keyOf, create, update) {
  const old = new Map([...list.children].map((element) => [element.dataset.key, element]));
  items.forEach((item, index) => {
    const key = String(keyOf(item));
    let element = old.get(key);
    old.delete(key);
    if (!element) {
      element = create(item);
      element.dataset.key = key;
    }
    update(element, item);
    if (list.children[index] !== element) list.insertBefore(element, list.children[index] || null);
  });
  for (const element of old.values()) element.remove();
}

function showShares({ live, shares }) {
  reconcile(
    $("shares"),
    shares,
    (share) => share.number,
    (share) =>
      make(
        "li",
        {},
        make(
          "button",
          { type: "button", onclick: () => choose(share.number, true) },
          make("span", { class: "label" }),
          make("span", { class: "sub" }),
        ),
      ),
    (element, share) => {
      element.className = share.ended ? "ended" : "";
      setText(element.querySelector(".label"), titleOf(share));
      setText(element.querySelector(".sub"), summaryOf(share));
      element.firstChild.setAttribute("aria-current", String(share.number === chosen));
    },
  );
  $("no-shares").hidden = shares.length > 0;
  const listed = shares.filter((share) => !share.ended).length;
  $("more-shares").hidden = listed >= live;
  setText($("more-shares"), `The newest ${count(listed)} of ${count(live)} are listed.`);
  if (chosen === null && shares.length) choose(shares[0].number, false);
}

function choose(number, byHand) {
  if (number === chosen) return;
  chosen = number;
  for (const element of $("shares").children) {
    element.firstChild.setAttribute("aria-current", String(element.dataset.key === String(number)));
  }
  $("receivers").replaceChildren();
  $("ticket").hidden = true;
  setText($("copied"), "");
  $("search").value = "";
  listing = new Listing(number);
  listing.load();
  refreshReceivers(number).then(() => {
    if (byHand && number === chosen) $("detail").focus();
  }, () => {});
}

// Receivers ----------------------------------------------------------------------------------------

async function refreshReceivers(number) {
  const { status, facts } = await ask(`shares/${number}/receivers`);
  if (number !== chosen) return;
  if (status !== 200) {
    $("detail").hidden = true; // ended so long ago that nobody remembers
    chosen = null;
    return;
  }
  showShare(facts);
}

function showShare({ share, in_all: inAll, receivers }) {
  $("detail").hidden = false;
  setText($("share-title"), titleOf(share));
  const inbox = share.kind === "inbox";
  const parts = inbox
    ? ["takes what is pushed"]
    : [plural(share.tensors, "tensor"), `${size(share.bytes)} (${count(share.bytes)} bytes)`];
  setText($("receivers-title"), inbox ? "Senders" : "Receivers");
  $("tensors").hidden = inbox;
  if (share.ended) parts.push(`ended: ${share.ended}`);
  else if (share.remaining_s !== null) parts.push(`${duration(share.remaining_s)} left`);
  setText($("share-facts"), parts.join(" · "));
  $("copy").hidden = inbox || Boolean(share.ended);
  $("no-receivers").hidden = receivers.length > 0;
  $("more-receivers").hidden = receivers.length >= inAll;
  setText($("more-receivers"), `and ${count(inAll - receivers.length)} more`);
  reconcile($("receivers"), receivers, (one) => one.name, createReceiver, updateReceiver);
}

function createReceiver(one) {
  return make(
    "li",
    {},
    make("span", { class: "name" }, shown(one.name)),
    make("span", { class: "state" }),
    make("progress", { "aria-label": `How far ${shown(one.name)} is` }),
    make("span", { class: "number bytes" }),
    make("span", { class: "number rate" }),
    make("span", { class: "cause" }),
  );
}

function updateReceiver(element, one) {
  const part = (name) => element.querySelector(name);
  const landed = one.state === "landed";
  const total = one.of || 0;
  const done = Math.min(one.bytes, total);
  setText(part(".state"), one.state);
  part(".state").dataset.state = one.state;
  const bar = part("progress");
  bar.max = Math.max(total, 1);
  bar.value = landed ? bar.max : done;
  bar.dataset.state = one.state;
  const percent = total ? ` · ${Math.floor((100 * done) / total)} %` : "";
  const waiting = one.state === "waiting";
  setText(part(".bytes"), waiting ? "" : landed ? size(one.bytes) : size(one.bytes) + percent);
  setText(part(".rate"), waiting ? "" : landed ? `in ${duration(one.seconds)}` : `${size(Math.round(one.rate))}/s`);
  setText(part(".cause"), one.cause ? shown(one.cause) : "");
}

async function copyTicket() {
  const number = chosen;
  const { status, facts } = await ask(`shares/${number}/ticket`, { method: "POST" });
  if (number !== chosen) return;
  if (status !== 200) {
    setText($("copied"), "This share is over.");
    return;
  }
  try {
    await navigator.clipboard.writeText(facts.url);
    setText($("copied"), "Copied. Who has this URL can read the weights.");
  } catch {
    // Browsers lend the clipboard to this machine and to https only.
    $("ticket").value = facts.url;
    $("ticket").hidden = false;
    $("ticket").select();
    setText($("copied"), "Copy it from here. Who has this URL can read the weights.");
  }
}

// Tensors ------------------------------------------------------------------------------------------

const natural = new Intl.Collator("en", { numeric: true });
let listing = null;

// A tensor is {name, dtype, shape, bytes, alias}. Groups of names form a tree that is built as
// tensors arrive and shown as far as somebody opens it.
class Group {
  constructor() {
    this.groups = new Map();
    this.tensors = [];
    this.count = 0;
    this.bytes = 0;
  }

  add(tensor) {
    const parts = tensor.name.split(".");
    let group = this;
    for (let at = 0; ; at += 1) {
      group.count += 1;
      group.bytes += tensor.bytes;
      // Names of thousands of dots are somebody's joke: the rest is one leaf.
      if (at === parts.length - 1 || at === 40) break;
      let next = group.groups.get(parts[at]);
      if (!next) group.groups.set(parts[at], (next = new Group()));
      group = next;
    }
    group.tensors.push(tensor);
  }

  // Entries to show: [label, group or tensor], with chains of only children as one label.
  entries(prefix) {
    const found = this.tensors.map((tensor) => [tensor.name.slice(prefix.length), tensor, ""]);
    for (let [label, group] of this.groups) {
      while (group.tensors.length === 0 && group.groups.size === 1) {
        const [[part, next]] = group.groups;
        label += `.${part}`;
        group = next;
      }
      if (group.count === 1) found.push([`${label}.${group.tensors[0].name.slice(prefix.length + label.length + 1)}`, group.tensors[0], ""]);
      else found.push([label, group, `${prefix}${label}.`]);
    }
    return found.sort((a, b) => natural.compare(a[0], b[0]));
  }
}

class Listing {
  constructor(number) {
    this.number = number;
    this.tensors = [];
    this.root = new Group();
    this.totals = new Map();
    this.of = null;
    this.error = "";
  }

  async load() {
    this.show();
    try {
      do {
        const { status, facts } = await ask(`shares/${this.number}/tensors?offset=${this.tensors.length}`);
        if (listing !== this) return;
        if (status !== 200) {
          this.error = "The list of tensors is gone with the share.";
          break;
        }
        this.of = facts.of;
        if (facts.rows.length === 0) break;
        for (const row of facts.rows) this.add(row);
        this.showTotals();
      } while (this.tensors.length < this.of);
    } catch (error) {
      if (listing !== this) return;
      if (error instanceof Unauthorised) return showGate("wrong");
      this.error = "The server did not answer.";
    }
    this.show();
  }

  add([name, dtype, sizes, bytes, alias]) {
    const text = `${name} ${dtype} ${shape(sizes)}`.toLowerCase();
    const tensor = { name, dtype, shape: sizes, bytes, alias, text };
    this.tensors.push(tensor);
    this.root.add(tensor);
    const total = this.totals.get(dtype) || { tensors: 0, elements: 0, bytes: 0 };
    total.tensors += 1;
    if (!alias) {
      total.elements += sizes.reduce((product, size) => product * size, 1);
      total.bytes += bytes;
    }
    this.totals.set(dtype, total);
  }

  showTotals() {
    const totals = [...this.totals].sort((a, b) => b[1].bytes - a[1].bytes);
    $("mix").replaceChildren(
      ...totals.map(([, total]) => {
        const bar = make("span");
        bar.style.flexGrow = String(Math.max(total.bytes, 1));
        return bar;
      }),
    );
    $("totals").replaceChildren(
      ...totals.map(([dtype, total]) =>
        make(
          "li",
          {},
          make("b", {}, dtype),
          ` ${plural(total.tensors, "tensor")} · ${plural(total.elements, "element")} · ${size(total.bytes)}`,
        ),
      ),
    );
  }

  show() {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const tree = $("tree");
    if (this.error) {
      tree.replaceChildren(make("p", { class: "empty failed" }, this.error));
      return;
    }
    if (this.of === null || this.tensors.length < this.of) {
      if (this.of === null) {
        $("mix").replaceChildren();
        $("totals").replaceChildren();
      }
      tree.replaceChildren(make("p", { class: "empty" }, "Reading the list of tensors …"));
      return;
    }
    if (words.length === 0) {
      setText($("found"), "");
      const list = make("ul");
      const entries = this.root.entries("");
      fill(list, entries, (entry) => this.entry(entry));
      // One group holds everything but a few: the way into it is no choice.
      const groups = list.querySelectorAll(".group > .row");
      if (groups.length === 1) groups[0].click();
      tree.replaceChildren(this.tensors.length ? list : make("p", { class: "empty" }, "It holds no tensor."));
      return;
    }
    const matches = this.tensors.filter((tensor) => words.every((word) => tensor.text.includes(word)));
    const bytes = matches.reduce((sum, tensor) => sum + tensor.bytes, 0);
    setText($("found"), `${plural(matches.length, "tensor")} found, ${size(bytes)}`);
    const list = make("ul");
    fill(list, matches, (tensor) => this.leaf(tensor.name, tensor));
    tree.replaceChildren(matches.length ? list : make("p", { class: "empty" }, "No tensor is called like that."));
  }

  entry([label, what, prefix]) {
    return what instanceof Group ? this.branch(label, what, prefix) : this.leaf(label, what);
  }

  branch(label, group, prefix) {
    const item = make("li", { class: "group" });
    const row = make(
      "button",
      { class: "row", type: "button", "aria-expanded": "false" },
      make("span", { class: "name" }, ...breakable(label)),
      make("span", { class: "dtype" }),
      make("span", { class: "shape" }, plural(group.count, "tensor")),
      make("span", { class: "number" }, size(group.bytes)),
    );
    onToggle(row, item, () => {
      const list = make("ul");
      fill(list, group.entries(prefix), (entry) => this.entry(entry));
      return list;
    });
    item.append(row);
    return item;
  }

  leaf(label, tensor) {
    const item = make("li");
    const row = make(
      "button",
      { class: "row", type: "button", "aria-expanded": "false", title: shown(tensor.name) },
      make("span", { class: "name" }, ...breakable(label)),
      make("span", { class: "dtype" }, tensor.dtype),
      make("span", { class: "shape" }, tensor.alias ? "tied" : shape(tensor.shape)),
      make("span", { class: "number" }, tensor.alias ? "–" : size(tensor.bytes)),
    );
    onToggle(row, item, () => panelOf(this.number, tensor));
    item.append(row);
    return item;
  }
}

// What belongs to a row is made when it is opened and forgotten when it is closed.
function onToggle(row, item, content) {
  row.addEventListener("click", () => {
    const open = row.getAttribute("aria-expanded") !== "true";
    row.setAttribute("aria-expanded", String(open));
    if (open) item.append(content());
    else item.lastChild.remove();
  });
}

function fill(list, entries, create, from = 0) {
  const some = entries.slice(from, from + BATCH);
  list.append(...some.map(create));
  const left = entries.length - from - some.length;
  if (left <= 0) return;
  const more = make("button", { class: "more", type: "button" }, `Show ${count(Math.min(left, BATCH))} more of ${count(left)}`);
  const item = make("li", {}, more);
  more.addEventListener("click", () => {
    item.remove();
    const next = list.children.length;
    fill(list, entries, create, from + BATCH);
    list.children[next].querySelector("button").focus();
  });
  list.append(item);
}

// Statistics ---------------------------------------------------------------------------------------

function panelOf(number, tensor) {
  const note = make("p", { class: "note wide", role: "status" }, "Reading …");
  const panel = make("div", { class: "panel" }, note);
  lookAt(number, tensor, panel, note);
  return panel;
}

async function lookAt(number, tensor, panel, note) {
  const path = `shares/${number}/statistics?name=${encodeURIComponent(tensor.name)}`;
  // Whoever closes the panel stops the work: nobody asks any more.
  for (let first = true; first || panel.isConnected; first = false) {
    let answer;
    try {
      answer = await ask(path);
    } catch (error) {
      if (error instanceof Unauthorised) return showGate("wrong");
      return fail(note, "The server did not answer. Close this row and open it again.");
    }
    const { status, facts } = answer;
    if (status === 200) return showStatistics(panel, tensor, facts.statistics);
    if (status === 202) {
      setText(note, `Reading … ${Math.floor((100 * facts.done) / facts.of)} % of ${size(facts.of)}`);
    } else if (status === 503) {
      setText(note, "Waiting: another tensor is being read …");
      await pause(POLL_MS);
    } else {
      const why = facts.reason ? `the share is over: ${facts.reason}` : facts.error || `status ${status}`;
      return fail(note, `No statistics: ${shown(why)}.`);
    }
  }
}

function fail(note, text) {
  note.classList.add("failed");
  setText(note, text);
}

function showStatistics(panel, tensor, found) {
  const facts = make("dl");
  const add = (name, value, odd = false) =>
    facts.append(make("dt", {}, name), make("dd", odd ? { class: "odd" } : {}, value));
  add("shape", shape(tensor.shape));
  add("elements", count(found.count));
  add("min", figure(found.min));
  add("max", figure(found.max));
  add("mean", figure(found.mean));
  add("std", figure(found.std));
  add("zeros", count(found.zeros));
  add("NaN", count(found.nan), found.nan > 0);
  add("Inf", count(found.inf), found.inf > 0);
  const picture = make("div", { class: "picture" });
  if (found.bins.length) picture.append(...histogram(tensor, found));
  else picture.append(make("p", { class: "empty" }, "There is no finite element to draw."));
  panel.replaceChildren(picture, facts);
  if (tensor.alias) panel.prepend(make("p", { class: "note wide" }, `The same tensor as ${shown(tensor.alias)}`));
}

const SVG = "http://www.w3.org/2000/svg";

function histogram(tensor, found) {
  const svg = document.createElementNS(SVG, "svg");
  const last = found.start + found.width * found.bins.length;
  svg.setAttribute("viewBox", `0 0 ${found.bins.length * 10} 100`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  const most = Math.max(...found.bins);
  svg.setAttribute(
    "aria-label",
    `Histogram of ${found.of} from ${figure(found.start)} to ${figure(last)}: ` +
      `${found.bins.length} bins, the fullest holds ${count(most)} elements`,
  );
  const bars = found.bins.map((number, at) => {
    const bar = document.createElementNS(SVG, "rect");
    bar.setAttribute("x", String(at * 10 + 0.5));
    bar.setAttribute("width", "9");
    const title = document.createElementNS(SVG, "title");
    const low = found.start + found.width * at;
    title.textContent = `${figure(low)} to ${figure(low + found.width)}: ${count(number)}`;
    bar.append(title);
    svg.append(bar);
    return bar;
  });
  const draw = (logarithmic) => {
    const level = (n) => (logarithmic ? Math.log1p(n) / Math.log1p(most) : n / most);
    bars.forEach((bar, at) => {
      // What is there is seen, however little it is.
      const height = found.bins[at] ? Math.max(100 * level(found.bins[at]), 0.8) : 0;
      bar.setAttribute("y", String(100 - height));
      bar.setAttribute("height", String(height));
    });
  };
  draw(false);
  const box = make("input", { type: "checkbox" });
  box.addEventListener("change", () => draw(box.checked));
  const axis = make("div", { class: "axis" }, make("span", {}, figure(found.start)), make("span", {}, found.of), make("span", {}, figure(last)));
  return [make("label", { class: "scale" }, box, "logarithmic counts"), svg, axis];
}

// The page as a whole ------------------------------------------------------------------------------

function showStatus(state, text) {
  $("status").dataset.state = state;
  setText($("status"), text);
}

function showGate(state = "") {
  token = "";
  sessionStorage.removeItem(TOKEN);
  const wasOpen = !$("gate").hidden;
  $("main").hidden = true;
  $("gate").hidden = false;
  $("gate").className = state;
  if (state) setText($("gate-reason"), "That is not the token of this server. A new one is printed when it starts.");
  showStatus("waiting", "locked");
  if (!wasOpen) $("token").focus();
}

let wake = () => {};

async function run() {
  for (let failures = 0; ; ) {
    if (!token) {
      if ($("gate").hidden) showGate();
    } else if (document.visibilityState === "visible") {
      try {
        const { status, facts } = await ask("shares");
        if (status !== 200) throw new Error(`status ${status}`);
        failures = 0;
        $("gate").hidden = true;
        $("main").hidden = false;
        showStatus("live", "live");
        showShares(facts);
        if (chosen !== null) await refreshReceivers(chosen);
      } catch (error) {
        if (error instanceof Unauthorised) showGate("wrong");
        else {
          failures += 1;
          showStatus("lost", "no answer, trying again");
        }
      }
    }
    await Promise.race([
      pause(POLL_MS * Math.min(1 + failures, 10)),
      new Promise((resolve) => (wake = resolve)),
    ]);
  }
}

$("host").textContent = location.host;
$("gate").addEventListener("submit", (event) => {
  event.preventDefault();
  // The whole URL will do as well; what no header can carry is no token.
  token = $("token").value.replace(/^.*#token=/, "").replace(/[^\x21-\x7e]/g, "");
  $("token").value = "";
  sessionStorage.setItem(TOKEN, token);
  wake();
});
$("copy").addEventListener("click", () => copyTicket().catch(() => showStatus("lost", "no answer, trying again")));
let typing;
$("search").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => listing && listing.show(), 80);
});
document.addEventListener("visibilitychange", () => wake());
window.addEventListener("hashchange", () => {
  token = readToken();
  wake();
});
run();
