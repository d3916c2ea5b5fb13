// The chat page: sends the conversation to /v1/chat/completions and shows tokens as they arrive.
// Knows the public REST API only. All text from the service is put in as text, never as HTML.
// Conversations and settings stay in this browser until they are deleted; the key stays in this tab.

import { deleteChat, listChats, loadChat, saveChat } from "./chats.js";
import { at, make, showError } from "./elements.js";
import { fillAnswer, showCalls, showFigures, showMessage } from "./messages.js";
import { fill, keepDraft, readContent, restoreDraft, wirePrompt } from "./prompt.js";
import { call, events, get } from "./service.js";
import { readStatus, watchWorkers } from "./workers.js";

const KEPT = ["models", "temperature", "max-tokens", "speculation", "system", "tools"]; // settings
let chat = { id: sessionStorage.getItem("open") ?? newId(), messages: [] }; // messages: as the API takes them, and more
let models = []; // as the service lists them
let running = null; // AbortController of the answer that is being written
let editing = null; // place of the message that the next one replaces
let isLeaving = false; // the page is being left: what its end cuts off is not taken back

wire();
wirePrompt();
restore();
findModel();
showExamples();
watchWorkers(get);

function wire() {
  at("key").value = sessionStorage.getItem("key") ?? "";
  at("key").addEventListener("change", () => { sessionStorage.setItem("key", at("key").value); findModel(); readStatus(get); });
  at("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  at("stop").addEventListener("click", () => running?.abort());
  at("new").addEventListener("click", () => open(newId()));
  at("cancel").addEventListener("click", () => edit(null));
  at("models").addEventListener("change", showModel);
  at("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); at("form").requestSubmit(); }
    if (event.key === "ArrowUp" && !at("prompt").value) edit(chat.messages.findLastIndex(({ role }) => role === "user"));
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !event.isComposing) escape(); });
  at("menu").addEventListener("click", () => openSide(!document.body.classList.contains("side")));
  at("talk").addEventListener("click", (event) => { if (event.target !== at("menu")) openSide(false); });
  at("chat").addEventListener("click", () => { at("settings").open = false; });
  addEventListener("pagehide", () => { isLeaving = true; keepDraft(); });
  addEventListener("pageshow", ({ persisted }) => {
    isLeaving = false;
    if (persisted) sessionStorage.removeItem("draft"); // it is still in the field
  });
  addEventListener("storage", listAll); // another tab has changed something
  const kept = readSettings();
  for (const id of KEPT) {
    at(id).value = kept[id] ?? at(id).value;
    at(id).addEventListener("change", () => {
      localStorage.setItem("settings", JSON.stringify(Object.fromEntries(KEPT.map((one) => [one, at(one).value]))));
    });
  }
}

// Another page of this origin may have kept something else by this name.
function readSettings() {
  try { return JSON.parse(localStorage.getItem("settings")) ?? {}; }
  catch { return {}; }
}

function escape() {
  if (running) running.abort();
  else if (editing !== null) edit(null);
  else { at("settings").open = false; openSide(false); at("prompt").focus(); }
}

function openSide(isOpen) {
  document.body.classList.toggle("side", isOpen);
  at("menu").setAttribute("aria-expanded", isOpen);
}

// -- models ----------------------------------------------------------------------------------------------------------

async function findModel() {
  try {
    models = (await (await call("v1/models")).json()).data;
    const kept = readSettings().models;
    at("models").replaceChildren(...models.map(({ id }) => make("option", { selected: id === kept }, id)));
    at("models-label").hidden = models.length < 2;
    showModel();
    showError("");
  } catch (error) { showError(error.message); }
}

function model() { return models.find(({ id }) => id === at("models").value); }

function showModel() {
  at("attach").hidden = !model()?.input_modalities?.includes("image");
  at("model").textContent = model()?.id ?? "";
}

async function showExamples() {
  const answer = await call("page/examples.json").catch(() => null);
  for (const text of (await answer?.json()) ?? []) {
    const button = make("button", { type: "button", textContent: text });
    button.addEventListener("click", () => { at("prompt").value = text; send(); });
    at("examples").append(button);
  }
}

// -- conversations ---------------------------------------------------------------------------------------------------

function newId() { return `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`; }

// Another conversation, or a new one. An answer that is being written ends, and stays in its own.
function open(id) {
  if (id === chat.id && running) return;
  running?.abort();
  chat = { id, messages: [] };
  editing = null;
  at("editing").hidden = true;
  showError("");
  restore();
  openSide(false);
  at("prompt").focus();
}

// A question whose answer was cut off by a reload goes back to where it was entered.
function restore() {
  chat.messages = loadChat(chat.id);
  sessionStorage.setItem("open", chat.id);
  restoreDraft();
  if (chat.messages.at(-1)?.role === "user") fill(chat.messages.pop().content);
  showAll();
}

function save(mine) {
  if (mine.isDeleted || isLeaving) return;
  if (!mine.messages.length) deleteChat(mine.id);
  else if (!saveChat(mine.id, mine.messages)) showError("This browser keeps no more: delete conversations to keep this one.");
  listAll();
}

function listAll() {
  at("chats").replaceChildren(...listChats().map(({ id, title }) => {
    const button = make("button", { type: "button", className: "chat", title }, title);
    const remove = make("button", { type: "button", className: "delete", textContent: "×" });
    remove.setAttribute("aria-label", `Delete ${title}`);
    if (id === chat.id) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => open(id));
    remove.addEventListener("click", () => { if (confirm(`Delete “${title}”?`)) forget(id); });
    return make("li", {}, button, remove);
  }));
}

function forget(id) {
  deleteChat(id);
  if (id === chat.id) { chat.isDeleted = true; open(newId()); } else listAll();
}

// -- messages --------------------------------------------------------------------------------------------------------

function showAll() {
  for (const child of [...at("chat").children]) if (child.id !== "hint") child.remove();
  chat.messages.forEach((message, place) => { if (message.role !== "tool") add(message, place); });
  at("hint").hidden = chat.messages.length > 0;
  listAll();
  toEnd();
}

function add(message, place) {
  const actions = message.role === "user" ? { Edit: () => edit(place) } : { Retry: () => retry(place) };
  const article = showMessage(message, actions);
  for (const image of article.querySelectorAll("img")) image.addEventListener("load", toEnd); // before, it has no height
  if (message.role === "assistant") {
    fillAnswer(article, message, false);
    showCalls(article, message.tool_calls ?? [], resultsAfter(place), place + resultsCount(place) + 1 === chat.messages.length ? give : null);
    if (message.figures) showFigures(article, message.figures);
  }
  at("chat").append(article);
  return article;
}

function resultsCount(place) {
  const rest = chat.messages.slice(place + 1), end = rest.findIndex(({ role }) => role !== "tool");
  return end < 0 ? rest.length : end;
}

function resultsAfter(place) {
  const results = chat.messages.slice(place + 1, place + 1 + resultsCount(place));
  return Object.fromEntries(results.map((one) => [one.tool_call_id, one.content]));
}

// A tool's result; with the last one the answer goes on.
function give(id, content) {
  if (running) return;
  const before = chat.messages, asked = before.findLast(({ role }) => role === "assistant").tool_calls;
  chat.messages = [...before, { role: "tool", tool_call_id: id, content }];
  const given = resultsAfter(before.findLastIndex(({ role }) => role === "assistant"));
  showAll();
  if (asked.every((one) => one.id in given)) answer(before);
  else save(chat);
}

function edit(place) {
  if (running || (place !== null && place < 0)) return;
  editing = place;
  at("editing").hidden = place === null;
  fill(place === null ? "" : chat.messages[place].content);
  at("prompt").focus();
}

function retry(place) {
  if (running) return;
  const before = chat.messages;
  chat.messages = before.slice(0, place);
  showAll();
  answer(before);
}

function send() {
  const content = readContent();
  if (!content || running) return;
  at("settings").open = false;
  const before = chat.messages, place = editing ?? before.length;
  chat.messages = [...before.slice(0, place), { role: "user", content }];
  edit(null);
  showAll();
  answer(before);
}

// -- answers ---------------------------------------------------------------------------------------------------------

// Writes the answer to the conversation. Where there is none, the conversation is again what it was `before`.
async function answer(before) {
  running = new AbortController();
  at("send").hidden = true; at("stop").hidden = false;
  at("chat").setAttribute("aria-busy", "true");
  showError("");
  const mine = chat, message = { role: "assistant", content: "" }, article = add(message, mine.messages.length);
  const times = { sent: performance.now() };
  fillAnswer(article, message, true);
  toEnd();
  save(mine);
  try {
    if (!model()) await findModel();
    const response = await call("v1/chat/completions", body(), running.signal);
    for await (const chunk of events(response.body)) if (take(chunk, message, times)) draw(article, message);
  } catch (error) {
    const why = error.message.replace(/^messages\[\d+\]\.content\[(\d+)\]\.image_url\.url/, (_, place) => `Image ${+place + 1}`);
    if (error.name !== "AbortError" && mine === chat) showError(why);
    delete message.tool_calls; // they may lack their end
  } finally {
    running = null;
    at("send").hidden = false; at("stop").hidden = true;
    at("chat").setAttribute("aria-busy", "false");
  }
  const { content, reasoning, tool_calls: calls } = message;
  if (content || reasoning || calls) {
    message.figures = figure(times);
    mine.messages.push(message);
  } else takeBack(mine, before);
  save(mine);
  if (mine !== chat) return;
  if (mine.messages.at(-1) !== message) { showAll(); return; }
  const wasAtEnd = isAtEnd();
  fillAnswer(article, message, false);
  showCalls(article, calls ?? [], {}, give);
  const shown = showFigures(article, message.figures);
  if (wasAtEnd) toEnd();
  if (!calls) at("prompt").focus();
  if (times.timing && !times.timing.transport) explainNoHandOff(shown);
}

function takeBack(mine, before) {
  const asked = mine.messages.at(-1), place = mine.messages.length - 1;
  mine.messages = before;
  if (mine !== chat || asked.role !== "user" || before.includes(asked)) return;
  fill(asked.content, true);
  if (place < before.length) { editing = place; at("editing").hidden = false; }
}

function body() {
  const system = at("system").value.trim();
  const isCut = (one, place) => isEmpty(one) || (one.role === "user" && isEmpty(chat.messages[place + 1]));
  const messages = chat.messages.filter((one, place) => !isCut(one, place))
    .map(({ reasoning, figures, ...message }) => message);
  const asked = { model: model()?.id ?? "", messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true, stream_options: { include_usage: true }, include_timing: true };
  for (const [name, id] of [["temperature", "temperature"], ["max_tokens", "max-tokens"]])
    if (at(id).value !== "") asked[name] = Number(at(id).value);
  if (at("speculation").value) asked.speculation = at("speculation").value;
  if (at("tools").value.trim()) {
    try { asked.tools = JSON.parse(at("tools").value); }
    catch (error) { throw new Error(`Tools in the settings are no JSON: ${error.message}`); }
  }
  return asked;
}

// An answer that was stopped while it reasoned: the model gets neither it nor its question.
function isEmpty(message) { return message?.role === "assistant" && !message.content && !message.tool_calls; }

// True where the chunk had something to show.
function take(chunk, message, times) {
  times.usage = chunk.usage ?? times.usage;
  const choice = chunk.choices?.[0];
  times.timing = choice?.timing ?? times.timing;
  const { reasoning_content: reasoning, content, tool_calls: calls } = choice?.delta ?? {};
  if (!reasoning && !content && !calls) return false;
  times.last = performance.now();
  times.first ??= times.last;
  if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
  message.content += content ?? "";
  for (const part of calls ?? []) {
    const whole = (message.tool_calls ??= [])[part.index] ??= { id: part.id, type: "function", function: { name: "", arguments: "" } };
    whole.function.name += part.function?.name ?? "";
    whole.function.arguments += part.function?.arguments ?? "";
  }
  return true;
}

// Once a frame, however many tokens came.
function draw(article, message) {
  if (article.isDrawn) return;
  article.isDrawn = true;
  requestAnimationFrame(() => {
    article.isDrawn = false;
    if (!article.isConnected || message.figures) return; // another conversation is shown, or it is complete
    const wasAtEnd = isAtEnd();
    fillAnswer(article, message, true);
    showCalls(article, (message.tool_calls ?? []).filter(Boolean), {}, null);
    if (wasAtEnd) toEnd();
  });
}

function figure({ usage, timing, sent, first, last }) {
  return { tokens: usage?.completion_tokens ?? 0, timing, first_s: (first - sent) / 1000, spent_s: (last - first) / 1000 };
}

// Nothing was transferred: the service says if that is so for all prompts, and why.
async function explainNoHandOff(shown) {
  const reason = (await readStatus(get))?.no_hand_off;
  if (!reason) return;
  shown.append(make("br"), make("span", {}, `No hand-off: ${reason}.`));
  toEnd();
}

function isAtEnd() { return at("chat").scrollHeight - at("chat").scrollTop - at("chat").clientHeight < 80; }
function toEnd() { at("chat").scrollTop = at("chat").scrollHeight; }
