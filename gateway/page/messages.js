// How a message looks: text, images, reasoning and tool calls folded, and where an answer's time went.

import { imagesOf, textOf } from "./chats.js";
import { copyButton, make } from "./elements.js";
import { render } from "./markdown.js";

const PHASES = ["queue", "prefill", "transfer", "decode"];

// An article of `message`. `actions`: label |-> what a click does.
export function showMessage(message, actions) {
  const article = make("article", { className: message.role });
  article.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
  const images = make("div", { className: "images" }, ...imagesOf(message.content).map((url) => showImage(url, "image of the message")));
  article.append(images, make("div", { className: "text" }));
  if (message.role === "user") article.querySelector(".text").textContent = textOf(message.content);
  const buttons = Object.entries(actions).map(([label, act]) => button(label, act));
  article.append(make("div", { className: "actions" }, ...buttons, copyButton(() => textOf(message.content))));
  return article;
}

function button(label, act) {
  const made = make("button", { type: "button", className: "small", textContent: label });
  made.addEventListener("click", act);
  return made;
}

export function showImage(url, text) { return make("img", { alt: text, src: url }); }

// What there is of an answer so far. The reasoning is unfolded until the answer begins.
export function fillAnswer(article, { content, reasoning }, isRunning) {
  const text = article.querySelector(".text");
  if (reasoning) {
    const details = article.querySelector(".reasoning") ?? addReasoning(article, isRunning);
    details.lastChild.textContent = reasoning;
    if (content && !text.childElementCount) details.open = false;
  }
  render(text, content);
  article.classList.toggle("running", isRunning);
}

function addReasoning(article, isOpen) {
  const details = make("details", { className: "reasoning", open: isOpen }, make("summary", {}, "Reasoning"), make("div"));
  article.querySelector(".text").before(details);
  return details;
}

// The tool calls of an answer, with their results. `give`: takes a call's id and a result; null where none is awaited.
export function showCalls(article, calls, results, give) {
  article.querySelectorAll(".call").forEach((old) => old.remove());
  article.querySelector(".text").after(...calls.map((call) => {
    const { name } = call.function, result = results[call.id];
    const details = make("details", { className: "call", open: result === undefined && give !== null },
      make("summary", {}, `Tool call: ${name}`), make("pre", { tabIndex: 0 }, pretty(call.function.arguments)));
    if (result !== undefined) details.append(make("div", { className: "quiet" }, "Result"), make("pre", { tabIndex: 0 }, pretty(result)));
    else if (give) details.append(askResult(name, (given) => give(call.id, given)));
    return details;
  }));
}

function askResult(name, give) {
  const field = make("textarea", { rows: 2, placeholder: "What the tool returns" });
  field.setAttribute("aria-label", `Result of ${name}`);
  return make("div", { className: "result" }, field, button("Send result", () => give(field.value)));
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

// figures: tokens, timing (of the service), first_s and spent_s (of this page).
export function showFigures(article, { tokens, timing, first_s: first, spent_s: spent }) {
  const shown = make("div", { className: "timing" });
  if (timing) shown.append(...showPhases(timing));
  const seconds = timing?.decode_seconds || spent, rate = tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : 0;
  shown.append(make("span", {}, `${tokens} tokens, first after ${spoken(first)}${rate ? `, then ${rate.toFixed(0)} a second` : ""}`));
  article.append(shown);
  return shown;
}

function showPhases(timing) {
  const seconds = { queue: timing.queue_seconds, prefill: timing.prefill_seconds, transfer: timing.transfer_seconds,
    decode: timing.first_step_seconds + timing.decode_seconds };
  const bar = make("div", { className: "bar" }), key = make("div", { className: "key" });
  for (const phase of PHASES) {
    const label = `${phase} ${spoken(seconds[phase])}`, part = make("i", { className: phase, title: label });
    part.style.flexGrow = Math.max(seconds[phase] * 1e6, 1); // sums below 1 would not fill the bar
    bar.append(part);
    key.append(make("span", {}, make("i", { className: phase }), label));
  }
  if (timing.draft_tokens) key.append(make("span", {}, `drafted ${timing.draft_tokens}, right ${timing.accepted_tokens}`));
  if (timing.transport) key.append(make("span", {}, `${timing.transfer_bytes.toLocaleString()} bytes by ${timing.transport}`));
  return [bar, key];
}

function spoken(seconds) { return seconds < 1 ? `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`; }
