"use strict";
const form = document.getElementById("choices"), lost = document.getElementById("lost");
const runs = new Set(new URLSearchParams(location.search).getAll("run"));
const fields = [...form.elements].filter(field => field.name && field.name !== "asked" && !["--to", "--format"].includes(field.name));

/* The server sends elements with ids. Each takes the place of the one before; what was open stays open. */
function show(html) {
  const opened = one => one.querySelector("summary").textContent;
  for (const fresh of [...new DOMParser().parseFromString(html, "text/html").body.children]) {
    const old = document.getElementById(fresh.id), focus = document.activeElement.id;
    if (!old) continue;
    const before = new Map([...old.querySelectorAll("details")].map(one => [opened(one), one.open]));
    for (const one of fresh.querySelectorAll("details")) one.open = before.get(opened(one)) ?? one.open;
    old.replaceWith(fresh);
    if (focus) document.getElementById(focus)?.focus();
    const started = fresh.querySelector("[data-run]");
    if (started) { runs.clear(); runs.add(started.dataset.run); }
  }
}

async function ask(path, options) {
  try {
    const answer = await fetch(path, options);
    lost.hidden = true;
    return answer;
  } catch (error) {
    if (error.name !== "AbortError") lost.hidden = false;
  }
}

async function act(name, into, given = {}, signal = undefined) {
  const body = JSON.stringify({ ...Object.fromEntries(new FormData(form)), runs: [...runs], into, ...given });
  const answer = await ask("do/" + name, { method: "POST", headers: { "Content-Type": "application/json" }, body, signal });
  if (answer) show(await answer.text());
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
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    planning?.abort();
    planning = new AbortController();
    act("start", "start", {}, planning.signal);
    act("plan", "plan", {}, planning.signal);
  }, 500);
}

/* Put words of a command line into the fields that stand for them. */
function take(words) {
  for (let place = 0; place < words.length; place++) {
    const [key, ...value] = words[place].startsWith("--") ? [words[place], words[++place]] : words[place].split("=");
    const field = form.querySelector(`[name="${CSS.escape(key)}"]`);
    if (field) field.value = value.join("=");
    else form.elements.more.value = [...form.elements.more.value.split(" ").filter(word => word && !word.startsWith(key + "=")), words[place]].join(" ");
  }
  changed();
}

let seen = "", next;
async function look() {
  clearTimeout(next);
  const query = new URLSearchParams([...runs].map(run => ["run", run]));
  const answer = await ask("live?" + query, { headers: { "If-None-Match": seen } });
  if (answer?.status === 200) {
    seen = answer.headers.get("ETag");
    show(await answer.text());
    document.getElementById("one").hidden = runs.size !== 1;
    document.getElementById("none").hidden = runs.size === 1;
  }
  const seconds = Number(answer?.headers.get("X-Seconds") ?? 0);  // that the server has computed
  next = setTimeout(look, document.hidden ? 10000 : Math.max(4000, 100000 * seconds));
}

form.addEventListener("submit", event => event.preventDefault());
form.addEventListener("input", event => { if (fields.includes(event.target)) changed(); });
form.addEventListener("change", event => {
  const { files, dataset, checked } = event.target;
  if (files?.[0]) send(files[0]);
  if (!dataset.pick) return;
  if (checked) runs.add(dataset.pick); else runs.delete(dataset.pick);
  keep();
  look();
});
form.addEventListener("click", async event => {
  const button = event.target.closest("button");
  if (!button) return;
  const data = button.dataset;
  if ("copy" in data) {
    await navigator.clipboard.writeText(button.previousElementSibling.textContent);
    button.textContent = "Copied";
  } else if (data.take) {
    take(JSON.parse(data.take));
  } else if (data.do) {
    button.disabled = true;
    const own = button.closest("details")?.querySelector("textarea");
    await act(data.do, data.into, { ...JSON.parse(data.given || "{}"), ...(own && { completion: own.value }) });
    button.disabled = false;
    keep();
    look();
  }
});

async function send(file) {
  const answer = await ask("upload?name=" + encodeURIComponent(file.name), { method: "PUT", body: file });
  if (!answer) return;
  show(await answer.text());
  const words = document.getElementById("sent").dataset.take;
  if (words) {
    take(JSON.parse(words));
    act("look", "sheet");
  }
}

const drop = document.querySelector(".drop");
for (const kind of ["dragover", "dragleave", "drop"]) drop.addEventListener(kind, event => {
  event.preventDefault();
  drop.classList.toggle("over", kind === "dragover");
  if (kind === "drop" && event.dataTransfer.files[0]) send(event.dataTransfer.files[0]);
});

const first = { ...JSON.parse(form.dataset.first), ...Object.fromEntries(new URLSearchParams(location.search)) };
for (const field of fields) if (field.name in first) field.value = first[field.name];
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
changed();
look();
