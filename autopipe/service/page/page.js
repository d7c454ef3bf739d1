"use strict";

const find = (id) => document.getElementById(id);
const REFRESH_MS = 1000;
let key = sessionStorage.getItem("autopipe-key") || "";
let model = "";
let running = null; // the prompt box's request

function headers() {
  const all = { "Content-Type": "application/json" };
  if (key) all.Authorization = "Bearer " + key;
  return all;
}

const number = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));
const percent = (value) => (value === null || value === undefined ? "–" : Math.round(100 * value) + "%");
const gain = (value) => (value === null || value === undefined ? "unknown" : (value >= 0 ? "+" : "") + percent(value));

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text; // never HTML: names and reasons are just text
  if (className) made.className = className;
  return made;
}

function meter(label, value) {
  const row = element("div", undefined, "meter");
  row.append(element("span", label));
  const bar = element("progress");
  bar.max = 1;
  bar.value = value || 0;
  bar.setAttribute("aria-label", label);
  row.append(bar, element("span", percent(value)));
  return row;
}

function stageCard(stage) {
  const card = element("li", undefined, stage.up ? "" : "down");
  card.dataset.stage = stage.name;
  card.append(element("b", stage.name));
  card.append(element("div", stage.role === "target" ? "target" : "drafter, window " + stage.window));
  if (!stage.up) card.append(element("div", "not running", "error"));
  if (stage.role !== "target") {
    card.append(meter("fill", stage.fill), meter("acceptance", stage.acceptance_rate));
  }
  if (stage.busy_share !== null) card.append(meter("busy", stage.busy_share));
  return card;
}

function eventText(event) {
  const when = new Date(event.time * 1000).toLocaleTimeString();
  if (event.kind === "plan") return `${when} plan: ${event.old} → ${event.new || "failed"} (${event.source}: ${event.reason})`;
  if (event.kind === "worker") return `${when} stage ${event.stage} ${event.what}`;
  if (event.kind === "service") return `${when} ${event.state}`;
  return `${when} ${event.kind}: ${event.reason || ""}`;
}

function show(status) {
  model = status.model;
  find("model").textContent = status.model + (status.sharing ? ", requests " + status.sharing : "");
  find("state").textContent = status.state;
  find("state").className = "badge " + status.state;
  const plain = status.plain_tokens_per_s;
  find("speed").textContent = number(status.tokens_per_s, 1);
  find("plain").textContent = number(plain, 1);
  find("ratio").textContent = status.tokens_per_s && plain ? number(status.tokens_per_s / plain, 2) + "×" : "–";
  find("requests").textContent = status.load.running + " / " + status.load.waiting;
  find("energy").textContent = number(status.energy_j_per_token, 2);
  find("stages").replaceChildren(...status.stages.map(stageCard));
  const plan = status.plan;
  find("plan").textContent = plan.description || "–";
  find("why").textContent = plan.reason
    ? `${plan.pinned ? "pinned; " : ""}policy ${plan.policy}; ${plan.source}: ${plan.reason}; ` +
      `gain predicted ${gain(plan.predicted_gain)}, observed ${gain(plan.observed_gain)}`
    : "";
  find("pin").disabled = plan.pinned;
  find("release").disabled = !plan.pinned;
  find("events").replaceChildren(...status.events.slice().reverse().map((event) => element("li", eventText(event))));
}

async function refresh() {
  try {
    const response = await fetch("/v1/autopipe/status", { headers: headers() });
    find("key-form").hidden = response.status !== 401;
    if (response.ok) show(await response.json());
    else find("state").textContent = response.status === 401 ? "API key needed" : "error " + response.status;
  } catch (error) {
    find("state").textContent = "unreachable";
    find("state").className = "badge dead";
  }
}

async function changePlan(body) {
  find("plan-error").textContent = "";
  const response = await fetch("/v1/autopipe/plan", { method: "PUT", headers: headers(), body: JSON.stringify(body) });
  if (!response.ok) find("plan-error").textContent = (await response.json()).error.message;
  await refresh();
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const parts = buffer.split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(data);
    }
  }
}

async function request(prompt, signal) {
  const common = { model, stream: true, max_tokens: 256, stream_options: { include_usage: true } };
  const send = (path, body) =>
    fetch(path, { method: "POST", headers: headers(), signal, body: JSON.stringify({ ...common, ...body }) });
  const chat = await send("/v1/chat/completions", { messages: [{ role: "user", content: prompt }] });
  if (chat.status !== 400) return chat;
  return send("/v1/completions", { prompt }); // a model without a chat template
}

async function ask(prompt) {
  const answer = find("answer");
  answer.textContent = "";
  running = new AbortController();
  find("send").disabled = true;
  find("stop").disabled = false;
  try {
    const response = await request(prompt, running.signal);
    if (!response.ok) throw new Error((await response.json()).error.message);
    let firstMs = null;
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      const text = choice ? (choice.delta ? choice.delta.content : choice.text) || "" : "";
      if (text) {
        firstMs = firstMs === null ? performance.now() : firstMs;
        answer.append(text);
      }
      if (chunk.usage && firstMs !== null) {
        const seconds = (performance.now() - firstMs) / 1000;
        const speed = seconds > 0 ? number((chunk.usage.completion_tokens - 1) / seconds, 1) : "–";
        find("ask-speed").textContent = `${chunk.usage.completion_tokens} tokens, ${speed} tokens/s`;
      }
    }
  } catch (error) {
    answer.append(error.name === "AbortError" ? " (stopped)" : "Error: " + error.message);
  } finally {
    running = null;
    find("send").disabled = false;
    find("stop").disabled = true;
  }
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) ask(find("prompt").value);
});
find("stop").addEventListener("click", () => running && running.abort());
find("pin").addEventListener("click", () => changePlan({ pinned: true }));
find("release").addEventListener("click", () => changePlan({ pinned: false }));
find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = find("key").value;
  sessionStorage.setItem("autopipe-key", key);
  refresh();
});
refresh();
setInterval(refresh, REFRESH_MS);
