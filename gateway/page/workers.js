// The workers of the service, live: reads /status while the page is seen.

import { at, make } from "./elements.js";

const EVERY_MS = 2000;
let timer = 0;

// `get` answers a path with a Response, or throws where there is no service.
export function watchWorkers(get) {
  const next = async () => {
    clearTimeout(timer);
    if (document.hidden) return;
    await readStatus(get);
    clearTimeout(timer);
    timer = setTimeout(next, EVERY_MS);
  };
  document.addEventListener("visibilitychange", next);
  return next();
}

// What /status says, shown; null where it says nothing to us.
export async function readStatus(get) {
  let answer;
  try { answer = await get("status"); } catch { showService("down", "no answer"); return null; }
  const status = answer.ok ? await answer.json().catch(() => null) : null;
  at("workers").hidden = !status?.workers;
  if (status?.workers) showWorkers(status);
  else showService("", "");
  return status;
}

function showWorkers({ workers, trouble }) {
  const alive = workers.filter((worker) => worker.alive);
  const count = `${alive.length === workers.length ? "" : `${alive.length} of `}${workers.length} worker${workers.length === 1 ? "" : "s"}`;
  showService(!alive.length ? "down" : trouble || alive.length < workers.length ? "some" : "up", count);
  const places = {};
  at("workers-list").replaceChildren(...workers.map((worker) => {
    const number = places[worker.role] = (places[worker.role] ?? -1) + 1;
    return showWorker(worker, `${worker.model ? `${worker.model} ` : ""}${worker.role}-${number}`);
  }));
  at("trouble").textContent = trouble ?? "";
}

function showWorker(worker, name) {
  const pages = worker.used_pages + worker.free_pages, used = pages ? worker.used_pages / pages : 0;
  const state = worker.alive ? `${worker.running} running, KV ${Math.round(100 * used)}%` : "down";
  const meter = make("meter", { max: 1, value: used, high: 0.85, title: `${worker.used_pages} of ${pages} KV pages in use` });
  meter.setAttribute("aria-label", `KV memory of ${name}`);
  const facts = [worker.address, worker.transport === "none" ? "" : `reads KV by ${worker.transport}`, worker.trouble];
  return make("li", { className: worker.alive ? "up" : "down", title: facts.filter(Boolean).join("\n") },
    make("span", { className: "name" }, name), make("span", { className: "state" }, state), meter,
    ...(worker.trouble ? [make("span", { className: "trouble" }, worker.trouble)] : []));
}

function showService(state, text) {
  at("service").className = state;
  at("service").textContent = text;
}
