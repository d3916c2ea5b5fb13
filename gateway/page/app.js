// The chat page: sends the conversation to /v1/chat/completions and shows tokens as they arrive.
// Knows the public REST API only. All text from the service is put in as text, never as HTML.
// The key and the conversation stay in this tab's session storage: a reload keeps them, closing the tab does not.

const PHASES = ["queue", "prefill", "transfer", "decode"];
const at = (id) => document.getElementById(id);
let messages = JSON.parse(sessionStorage.getItem("messages") ?? "[]"); // the conversation, as the API takes it
let model = "";
let running = null; // AbortController of the answer that is being written
let attached = []; // images of the next message, as data URIs

at("key").value = sessionStorage.getItem("key") ?? "";
at("key").addEventListener("change", () => { sessionStorage.setItem("key", at("key").value); findModel(); });
at("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("stop").addEventListener("click", () => running?.abort());
at("new").addEventListener("click", startAnew);
at("settings").addEventListener("toggle", toEnd);
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); at("form").requestSubmit(); }
});
at("attach").addEventListener("click", () => at("images").click());
at("images").addEventListener("change", () => { attach([...at("images").files]); at("images").value = ""; });
at("prompt").addEventListener("paste", (event) => {
  const { files, types } = event.clipboardData; // cells of a table come as text and as a picture
  if (files.length && !types.includes("text/plain")) { event.preventDefault(); attach([...files]); }
});
for (const name of ["dragover", "drop"]) document.addEventListener(name, (event) => {
  if (!event.dataTransfer.types.includes("Files")) return;
  event.preventDefault(); // otherwise the browser leaves the page for the file
  attach([...event.dataTransfer.files]); // none before the drop
});
restore();
findModel();
showExamples();

async function findModel() {
  try {
    const answer = await call("v1/models");
    const card = (await answer.json()).data[0];
    model = card.id;
    at("attach").hidden = !card.input_modalities?.includes("image");
    at("model").textContent = model;
    showError("");
  } catch (error) { showError(error.message); }
}

async function showExamples() {
  const answer = await call("page/examples.json").catch(() => null);
  for (const text of (await answer?.json()) ?? []) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.addEventListener("click", () => { at("prompt").value = text; send(); });
    at("examples").append(button);
  }
}

async function attach(files) {
  if (!files.length) return;
  if (at("attach").hidden) { showError(`${model || "The model"} takes no images.`); return; }
  showError("");
  for (const file of files) {
    if (!at("images").accept.split(",").includes(file.type)) showError(`${file.name} is no PNG, JPEG, WebP or GIF.`);
    else await readFile(file).then((url) => attached.push(url), () => showError(`${file.name} cannot be read.`));
  }
  showAttached();
}

function showAttached() {
  at("attached").replaceChildren(...attached.map((url, place) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = `Remove image ${place + 1}`;
    button.append(showImage(url, button.title));
    button.addEventListener("click", () => { attached.splice(place, 1); showAttached(); });
    return button;
  }));
}

function showImage(url, text) {
  const image = document.createElement("img");
  image.alt = text;
  image.src = url;
  return image;
}

async function send() {
  const text = at("prompt").value.trim();
  if (!text || running) return;
  running = new AbortController();
  const images = attached.map((url) => ({ type: "image_url", image_url: { url } }));
  const content = images.length ? [...images, { type: "text", text }] : text;
  attached = [];
  showAttached();
  at("send").hidden = true; at("stop").hidden = false;
  at("prompt").value = "";
  at("hint").hidden = true;
  showError("");
  const mine = messages; // "New chat" puts another in its place
  const question = show("user", content), article = show("assistant");
  mine.push({ role: "user", content });
  save();
  if (!model) await findModel();
  const answer = { text: "", reasoning: null, usage: null, timing: null, sent: performance.now(), first: null, last: null };
  try {
    const response = await call("v1/chat/completions", body(), running.signal);
    for await (const chunk of events(response.body)) take(chunk, answer, article);
  } catch (error) {
    const why = error.message.replace(/^messages\[\d+\]\.content\[(\d+)\]\.image_url\.url/, (_, place) => `Image ${+place + 1}`);
    if (error.name !== "AbortError" && mine === messages) showError(why);
  } finally {
    running = null;
    at("send").hidden = false; at("stop").hidden = true;
  }
  if (mine !== messages) return;
  if (answer.text) mine.push({ role: "assistant", content: answer.text });
  else takeBack(question, article, answer);
  save();
  if (answer.first !== null) showTiming(answer);
  at("prompt").focus();
}

// There is no answer: prompt and images go back to where they were entered, to be sent again.
function takeBack(question, article, answer) {
  const { content } = messages.pop();
  at("prompt").value ||= textOf(content);
  attached.unshift(...imagesOf(content));
  showAttached();
  if (!answer.reasoning) { question.remove(); article.remove(); }
}

function save() {
  try { sessionStorage.setItem("messages", JSON.stringify(messages)); }
  catch { sessionStorage.removeItem("messages"); } // more images than a browser keeps: a reload begins anew
}

function readFile(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result); // a data URI
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function textOf(content) { return typeof content === "string" ? content : content.at(-1).text; }
function imagesOf(content) { return typeof content === "string" ? [] : content.slice(0, -1).map((part) => part.image_url.url); }

// After a reload. A question whose answer was cut off by it goes back to where it was entered.
function restore() {
  if (messages.at(-1)?.role === "user") {
    const { content } = messages.pop();
    at("prompt").value = textOf(content);
    attached = imagesOf(content);
    showAttached();
  }
  for (const { role, content } of messages) show(role, content);
  at("hint").hidden = messages.length > 0;
}

function body() {
  const system = at("system").value.trim();
  const asked = { model, messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true, stream_options: { include_usage: true }, include_timing: true };
  for (const [name, id] of [["temperature", "temperature"], ["max_tokens", "max-tokens"]])
    if (at(id).value !== "") asked[name] = Number(at(id).value);
  if (at("speculation").value) asked.speculation = at("speculation").value;
  return asked;
}

async function call(path, body, signal) {
  const headers = { "content-type": "application/json" };
  if (at("key").value) headers.authorization = `Bearer ${at("key").value}`;
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  let response;
  try { response = await fetch(path, { ...options, headers, signal }); }
  catch (error) { throw error.name === "AbortError" ? error : new Error("The service cannot be reached."); }
  if (response.ok) return response;
  if (response.status === 401) {
    at("settings").open = true;
    throw new Error("The service asks for an API key: enter one in the settings.");
  }
  const answer = await response.json().catch(() => null);
  throw new Error(answer?.error?.message ?? `The service answered ${response.status}.`);
}

// Server-sent events: yields each one's JSON; an error event is thrown.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection ended before the answer did.");
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

function take(chunk, answer, article) {
  answer.usage = chunk.usage ?? answer.usage;
  const choice = chunk.choices?.[0];
  answer.timing = choice?.timing ?? answer.timing;
  const { reasoning_content: reasoning, content: text } = choice?.delta ?? {};
  if (!reasoning && !text) return;
  answer.last = performance.now();
  answer.first ??= answer.last;
  const chat = at("chat"), isAtEnd = chat.scrollHeight - chat.scrollTop - chat.clientHeight < 80;
  if (reasoning) append(answer.reasoning ??= addReasoning(article), reasoning);
  if (text) {
    if (answer.reasoning && !answer.text) answer.reasoning.open = false; // the answer begins
    answer.text += text;
    append(article, text);
  }
  if (isAtEnd) toEnd();
}

function append(parent, text) {
  const part = document.createElement("span");
  part.className = "piece";
  part.textContent = text;
  parent.append(part);
}

function addReasoning(article) {
  const details = document.createElement("details"), summary = document.createElement("summary");
  summary.textContent = "Reasoning";
  details.open = true;
  details.append(summary);
  article.append(details);
  return details;
}

function showTiming({ usage, timing, sent, first, last }) {
  const shown = document.createElement("div");
  shown.className = "timing";
  if (timing) {
    const seconds = { queue: timing.queue_seconds, prefill: timing.prefill_seconds, transfer: timing.transfer_seconds,
      decode: timing.first_step_seconds + timing.decode_seconds };
    const bar = document.createElement("div"), key = document.createElement("div");
    bar.className = "bar"; key.className = "key";
    for (const phase of PHASES) {
      const part = document.createElement("i"), name = document.createElement("span"), swatch = document.createElement("i");
      part.className = swatch.className = phase;
      part.style.flexGrow = Math.max(seconds[phase] * 1e6, 1); // sums below 1 would not fill the bar
      part.title = `${phase} ${spoken(seconds[phase])}`;
      bar.append(part);
      name.append(swatch, `${phase} ${spoken(seconds[phase])}`);
      key.append(name);
    }
    if (timing.draft_tokens) key.append(remark(`drafted ${timing.draft_tokens}, right ${timing.accepted_tokens}`));
    if (timing.transport) key.append(remark(`${timing.transfer_bytes.toLocaleString()} bytes by ${timing.transport}`));
    else explainNoHandOff(shown);
    shown.append(bar, key);
  }
  const count = usage?.completion_tokens ?? 0, spent = timing?.decode_seconds || (last - first) / 1000;
  const rate = count > 1 && spent > 0 ? (count - 1) / spent : 0;
  shown.append(remark(`${count} tokens, first after ${spoken((first - sent) / 1000)}${rate ? `, then ${rate.toFixed(0)} a second` : ""}`));
  at("chat").append(shown);
  toEnd();
}

// Nothing was transferred: the service says if that is so for all prompts, and why.
async function explainNoHandOff(shown) {
  const answer = await call("status").catch(() => null);
  const reason = (await answer?.json())?.no_hand_off;
  if (!reason) return;
  shown.append(document.createElement("br"), remark(`No hand-off: ${reason}.`));
  toEnd();
}

function remark(text) { const span = document.createElement("span"); span.textContent = text; return span; }
function spoken(seconds) { return seconds < 1 ? `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`; }
function toEnd() { at("chat").scrollTop = at("chat").scrollHeight; }
function showError(message) { at("error").textContent = message; at("error").hidden = !message; }

function show(role, content = "") {
  const article = document.createElement("article");
  article.className = role;
  const images = document.createElement("div");
  images.className = "images";
  for (const url of imagesOf(content)) {
    const image = showImage(url, "image of the message");
    image.addEventListener("load", toEnd); // before, it has no height
    images.append(image);
  }
  article.append(images, textOf(content));
  at("chat").append(article);
  toEnd();
  return article;
}

function startAnew() {
  running?.abort();
  messages = [];
  attached = [];
  showAttached();
  save();
  showError("");
  for (const child of [...at("chat").children]) if (child.id !== "hint") child.remove();
  at("hint").hidden = false;
  at("prompt").focus();
}
