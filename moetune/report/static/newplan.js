// The page New plan: sliders beside their numbers, and an answer that follows every change.
// Without it the form is sent as a whole.

const form = document.querySelector("#new-plan");
const region = document.querySelector("#draft");
const state = form.querySelector(".state");
const DEBOUNCE_MS = 120;
const FRONT_MS = 400;
const PASTED = "pasted";

// Sliders: positions of a list of values; the number beside them is what is sent.

const pairs = [...form.querySelectorAll("input[type=range]")].map((range) => ({
  range,
  number: form.querySelector(`#${range.dataset.for}`),
  values: range.dataset.values.split(","),
}));

const sizeOf = (text) => {
  const match = /^\s*([\d.]+)\s*([a-z]*)\s*$/i.exec(text);
  if (!match) return NaN;
  const unit = match[2].toLowerCase();
  const factor = { "": 1, k: 1024, m: 2 ** 20, gib: 1, gb: 0.931, g: 0.931, mib: 1 / 1024, tib: 1024 };
  return Number(match[1]) * (factor[unit] ?? 1);
};

const place = ({ range, number, values }) => {
  const wanted = number.value.trim();
  const empty = values.indexOf("");
  if (!wanted && empty >= 0) range.value = empty;
  else {
    const size = sizeOf(wanted);
    let at = 0;
    values.forEach((value, index) => {
      if (value !== "" && sizeOf(value) <= size) at = index;
    });
    range.value = at;
  }
  range.setAttribute("aria-valuetext", wanted || range.dataset.empty || "default");
};

for (const pair of pairs) {
  pair.range.hidden = false;
  place(pair);
  pair.range.addEventListener("input", () => {
    pair.number.value = pair.values[pair.range.value];
    pair.range.setAttribute("aria-valuetext", pair.number.value || pair.range.dataset.empty || "default");
    slid();
  });
  pair.number.addEventListener("input", () => place(pair));
}

// What is copied.

const copy = async (text, button) => {
  const said = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select it and copy";
  }
  setTimeout(() => { button.textContent = said; }, 1500);
};

const startButtons = () => {
  for (const button of region.querySelectorAll("[data-copies], [data-shares]")) button.hidden = false;
};

region.addEventListener("click", ({ target }) => {
  if (target.dataset.copies) copy(document.getElementById(target.dataset.copies).textContent, target);
  if (target.hasAttribute("data-shares")) copy(location.href, target);
});

// The answer.

let timer = 0;
let asking = null;
let isBehind = false;

const fields = () => {
  const found = new URLSearchParams();
  for (const [name, value] of new FormData(form)) {
    if (value.trim()) found.append(name, value);
  }
  const isPasted = found.get("kind") === "model" && found.get("decoder") === PASTED;
  if (!isPasted) found.delete("config_text");
  const text = found.get("config_text");
  // A longer one is refused, however it goes on.
  if (text) found.set("config_text", text.slice(0, Number(form.elements.config_text.dataset.most) + 1));
  return found;
};

// What had the focus, and which details were open, in the answer that goes away.
const held = () => ({
  focus: region.contains(document.activeElement) ? keyOf(document.activeElement) : null,
  open: new Map([...region.querySelectorAll("details[data-keep]")].map((one) => [one.dataset.keep, one.open])),
  y: scrollY,
});

const keyOf = (one) => {
  if (one.id) return `#${CSS.escape(one.id)}`;
  if (one.dataset.copies) return `[data-copies="${CSS.escape(one.dataset.copies)}"]`;
  if (one.tagName === "SUMMARY") return `[data-keep="${one.parentElement.dataset.keep}"] > summary`;
  if (one.name) return `[name="${CSS.escape(one.name)}"]`;
  return null;
};

const show = (html) => {
  const before = held();
  region.style.setProperty("min-height", `${region.offsetHeight}px`);
  region.innerHTML = html;
  region.dispatchEvent(new Event("moetune-tables", { bubbles: true }));
  startButtons();
  for (const [name, open] of before.open) {
    const one = region.querySelector(`[data-keep="${name}"]`);
    if (one) one.open = open;
  }
  if (before.focus) region.querySelector(before.focus)?.focus({ preventScroll: true });
  region.style.removeProperty("min-height");
  scrollTo({ top: before.y, behavior: "instant" });
  const answer = region.querySelector("[data-answer]");
  state.textContent = answer?.dataset.summary ?? "";
  if (answer?.dataset.address) history.replaceState(null, "", answer.dataset.address);
};

const send = (path, query, signal) => {
  const options = { signal, headers: { Accept: "text/html" } };
  return query.has("config_text")
    ? fetch(path, { ...options, method: "POST", body: query })
    : fetch(`${path}?${query}`, options);
};

// The front of a model, when nothing has changed for a while after its answer.
const addFront = async (mine) => {
  const place = region.querySelector("[data-front]");
  if (!place) return;
  place.setAttribute("aria-busy", "true");
  try {
    await new Promise((done) => setTimeout(done, FRONT_MS));
    if (asking !== mine) return;
    const answer = await send("/new/front", fields(), mine.signal);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const found = page.querySelector("#front");
    if (asking !== mine || !found) return;
    const y = scrollY;
    place.replaceWith(found);
    found.dispatchEvent(new Event("moetune-tables", { bubbles: true }));
    scrollTo({ top: y, behavior: "instant" });
  } catch (error) {
    if (error.name !== "AbortError") state.textContent = "The service does not answer: change something to try again.";
  } finally {
    place.removeAttribute("aria-busy");
  }
};

// A request that the service refuses before it answers: a page, of which the problem is shown.
const problemOf = (text) =>
  new DOMParser().parseFromString(text, "text/html").querySelector(".problem").outerHTML;

const ask = async () => {
  clearTimeout(timer);
  isBehind = false;
  asking?.abort();
  const mine = (asking = new AbortController());
  region.setAttribute("aria-busy", "true");
  try {
    const query = fields();
    const answer = await send("/new/answer", query, mine.signal);
    const isPage = (answer.headers.get("content-type") ?? "").startsWith("text/html");
    if (answer.redirected) location.reload(); // the session has ended
    else if (isPage) {
      const text = await answer.text();
      show(text.includes("data-answer") ? text : problemOf(text));
      addFront(mine);
    }
    else state.textContent = (await answer.json()).detail;
  } catch (error) {
    if (error.name === "AbortError") return;
    state.textContent = "The service does not answer: change something to try again.";
  } finally {
    if (asking === mine) {
      region.removeAttribute("aria-busy");
      if (isBehind) ask();
    }
  }
};

const later = () => {
  clearTimeout(timer);
  timer = setTimeout(ask, DEBOUNCE_MS);
};

// A layer's answer comes while its sliders move: one question at a time, and then the newest. A
// model's takes longer, and waits until they rest.
const slid = () => {
  if (form.elements.kind.value === "model") later();
  else if (region.hasAttribute("aria-busy")) isBehind = true;
  else ask();
};

form.addEventListener("input", ({ target }) => {
  if (target.type === "range") return; // its own listener has set the number
  if (target.id === "config_text" && target.value.trim()) form.elements.decoder.value = PASTED;
  later();
});
form.addEventListener("submit", (event) => {
  if (event.submitter?.hasAttribute("formaction") && event.submitter.form === form &&
      event.submitter.getAttribute("formaction") !== "/new") return; // a download
  event.preventDefault();
  ask();
});
startButtons();
addFront((asking = new AbortController()));
