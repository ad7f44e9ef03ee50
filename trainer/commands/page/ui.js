"use strict";
const form = document.getElementById("choices"), lost = document.getElementById("lost");
const runs = new Set(new URLSearchParams(location.search).getAll("run"));
const fields = [...form.elements].filter(field => field.name && field.name !== "asked" && !["--to", "--format"].includes(field.name));

/* The server sends elements with ids. What is inside takes the place of what was there. */
function show(html) {
  for (const fresh of new DOMParser().parseFromString(html, "text/html").body.children) {
    const old = document.getElementById(fresh.id);
    if (old) fill(old, fresh);
  }
}

function fill(old, fresh) {
  const before = [...old.childNodes], after = [...fresh.childNodes];
  after.forEach((node, place) => { if (place < before.length) become(before[place], node); else old.append(node); });
  for (const node of before.slice(after.length)) node.remove();
}

/* Change only what differs, so that focus, what is typed, opened, scrolled or selected stays. */
function become(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  const same = [old, fresh].map(node => `${node.nodeName} ${node.id} ${node.dataset?.do}`);
  if (same[0] !== same[1] || !old.attributes) return old.replaceWith(fresh);
  for (const { name } of [...old.attributes]) if (name !== "open" && !fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (name !== "open") old.setAttribute(name, value);
  if ("checked" in old) old.checked = fresh.checked;
  fill(old, fresh);
}

async function ask(path, options) {
  try {
    const answer = await fetch(path, options);
    const text = await answer.text();  // which may be aborted or interrupted, too
    lost.hidden = answer.status !== 403;  // which a new server answers, whose key is another
    return { text, ok: answer.ok, status: answer.status, headers: answer.headers };
  } catch (error) {
    if (error.name !== "AbortError") lost.hidden = false;
  }
}

function post(path, more, signal) {
  const body = JSON.stringify({ ...Object.fromEntries(new FormData(form)), runs: [...runs], ...more });
  return ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body, signal });
}

async function act(name, into, given, signal) {
  const answer = await post("do/" + name, { into, ...given }, signal);
  if (answer?.ok) show(answer.text);
  else if (answer) document.getElementById(into).textContent = answer.text;
}

/* What a button sends: what it was given, and what is typed beside it. */
function given(button) {
  const typed = button.closest("details")?.querySelector("textarea");
  return { ...JSON.parse(button.dataset.given || "{}"), ...(typed && { completion: typed.value }) };
}

let asked = 0;
async function commands() {
  const mine = ++asked, buttons = [...form.querySelectorAll("[data-do]")];
  const answer = await post("commands", { rows: buttons.map(button => [button.dataset.do, given(button)]) });
  if (mine !== asked || !answer?.ok) return;  // a later call, for other choices, has overtaken this one
  JSON.parse(answer.text).forEach((text, place) => buttons[place].nextElementSibling?.replaceChildren(text));  // or the button is gone
}

/* What is chosen stands in the address, so that a reload has it, and another page has its own. */
function keep() {
  const query = new URLSearchParams(fields.filter(field => field.value).map(field => [field.name, field.value]));
  for (const run of runs) query.append("run", run);
  history.replaceState(null, "", "?" + query + location.hash);
}

let waiting, planning;
function changed() {
  keep();
  later(commands, plan);
}

function later(...calls) {
  clearTimeout(waiting);
  waiting = setTimeout(() => calls.forEach(call => call()), 500);
}

function plan() {
  planning?.abort();
  planning = new AbortController();
  act("plan", "plan", {}, planning.signal);
}

const quoted = word => /^[\w.,:=\/@%+-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`;

/* Put words of a command line into the fields that stand for them. Other settings take the place of earlier ones with
   the same key under "More settings"; without a value, they only remove these. */
function take(words) {
  const { more } = form.elements;
  for (let place = 0; place < words.length; place++) {
    const [key, ...value] = words[place].startsWith("--") ? [words[place], words[++place]] : words[place].split("=");
    const field = form.querySelector(`[name="${CSS.escape(key)}"]`);
    if (field) {
      field.value = value.join("=");
    } else {
      const typed = more.value.match(/(?:'[^']*'|"[^"]*"|[^\s'"]|['"].*$)+/g) ?? [];
      const others = typed.filter(word => !word.replace(/^['"]/, "").startsWith(`${key}=`));
      more.value = [...others, ...(value.join("=") ? [quoted(words[place])] : [])].join(" ");
    }
  }
  changed();
}

let seen = "", next, looks = 0;
async function look() {
  clearTimeout(next);
  const mine = ++looks;
  const query = new URLSearchParams([...runs].map(run => ["run", run]));
  const answer = await ask("live?" + query, { headers: { "If-None-Match": seen } });
  if (mine !== looks) return;  // a later look, perhaps for other runs, has overtaken this one
  if (answer?.status === 200) {
    seen = answer.headers.get("ETag");
    show(answer.text);
    const [one, none] = ["one", "none"].map(id => document.getElementById(id));
    const known = document.querySelectorAll("[data-pick]:checked:not([data-unborn])").length === 1;
    if (one.hidden === known) commands();
    [one.hidden, none.hidden] = [!known, known];
  }
  const seconds = Number(answer?.headers.get("X-Seconds") ?? 0);  // that the server has computed
  next = setTimeout(look, document.hidden ? 10000 : Math.min(30000, Math.max(4000, 300000 * seconds)));
}

form.addEventListener("submit", event => event.preventDefault());
form.addEventListener("input", event => { if (fields.includes(event.target)) changed(); else later(commands); });
form.addEventListener("change", event => {
  const { files, dataset, checked } = event.target;
  if (files?.[0]) {
    send(files[0]);
    event.target.value = "";  // so that the same file, corrected, can be chosen again
  }
  if (!dataset.pick) return;
  if (checked) runs.add(dataset.pick); else runs.delete(dataset.pick);
  keep();
  look();
  commands();
});
form.addEventListener("click", async event => {
  const button = event.target.closest("button");
  if (!button || button.ariaBusy) return;
  const data = button.dataset;
  if ("copy" in data) {
    await navigator.clipboard.writeText(button.previousElementSibling.textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);  // the command beside it changes
  } else if (data.take) {
    take(JSON.parse(data.take));
  } else if (data.do) {
    button.ariaBusy = "true";  // and not disabled, which would take the focus away
    await act(data.do, data.into, given(button));
    button.ariaBusy = null;
    const started = document.querySelector(`#${data.into} [data-run]`);
    if (started) { runs.clear(); runs.add(started.dataset.run); }
    keep();
    look();
    commands();
  }
});

async function send(file) {
  const sent = document.getElementById("sent");
  sent.textContent = `Sending ${file.name} ...`;
  const answer = await ask("upload?name=" + encodeURIComponent(file.name), { method: "PUT", body: file });
  sent.textContent = "";
  if (!answer) return;
  show(answer.text);
  const taken = sent.querySelector("[data-take]");
  if (!taken) return;
  const words = JSON.parse(taken.dataset.take), known = words.includes(`task.path=${form.elements["task.path"].value}`);
  take(known ? words.slice(0, 2) : words);  // a table that is sent again, corrected, keeps its columns
  act("look", "sheet");
}

/* The whole page takes a file: a browser opens one that is dropped beside the place for it, and leaves the page. */
for (const kind of ["dragover", "dragleave", "drop"]) document.addEventListener(kind, event => {
  event.preventDefault();
  document.querySelector(".drop").classList.toggle("over", kind === "dragover");
  if (kind === "drop" && event.dataTransfer.files[0]) send(event.dataTransfer.files[0]);
});

const kept = new URLSearchParams(location.search);  // after a reload all that is not empty, so a preset
if (![...form.elements["--preset"].options].some(({ value }) => value === kept.get("--preset"))) kept.delete("--preset");
const first = { ...(kept.has("--preset") ? {} : JSON.parse(form.dataset.first)), ...Object.fromEntries(kept) };
for (const field of fields) if (field.name in first) field.value = first[field.name];
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
keep();
if (runs.size) commands(); else changed();  // a page that is opened to watch a run plans none
look();
