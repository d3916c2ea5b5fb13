// What is being written: the text and images of the next message. A reload keeps them.

import { imagesOf, textOf } from "./chats.js";
import { at, make, showError } from "./elements.js";
import { showImage } from "./messages.js";

let attached = []; // images, as data URIs

export function wirePrompt() {
  at("prompt").addEventListener("input", fitPrompt);
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
}

// As the API takes it; empty without a text.
export function readContent() {
  const text = at("prompt").value.trim(), images = attached.map((url) => ({ type: "image_url", image_url: { url } }));
  return text && images.length ? [...images, { type: "text", text }] : text;
}

// Puts a message there to be sent again. `isBack`: it was just sent; what has been entered since stays.
export function fill(content, isBack = false) {
  at("prompt").value = (isBack && at("prompt").value) || textOf(content);
  attached = [...imagesOf(content), ...(isBack ? attached : [])];
  showAttached();
  fitPrompt();
}

function fitPrompt() {
  at("prompt").style.height = "auto";
  at("prompt").style.height = `${at("prompt").scrollHeight + 2}px`;
}

export function keepDraft() {
  try { sessionStorage.setItem("draft", JSON.stringify([at("prompt").value, attached])); }
  catch { sessionStorage.removeItem("draft"); } // more images than a browser keeps
}

export function restoreDraft() {
  try { [at("prompt").value, attached] = JSON.parse(sessionStorage.getItem("draft") ?? '["", []]'); }
  catch { [at("prompt").value, attached] = ["", []]; } // another page's
  sessionStorage.removeItem("draft");
  showAttached();
  fitPrompt();
}

async function attach(files) {
  if (!files.length) return;
  if (at("attach").hidden) { showError(`${at("model").textContent || "The model"} takes no images.`); return; }
  showError("");
  for (const file of files) {
    if (!at("images").accept.split(",").includes(file.type)) showError(`${file.name} is no PNG, JPEG, WebP or GIF.`);
    else await readFile(file).then((url) => attached.push(url), () => showError(`${file.name} cannot be read.`));
  }
  showAttached();
}

function showAttached() {
  at("attached").replaceChildren(...attached.map((url, place) => {
    const button = make("button", { type: "button", title: `Remove image ${place + 1}` }, showImage(url, `Remove image ${place + 1}`));
    button.addEventListener("click", () => { attached.splice(place, 1); showAttached(); });
    return button;
  }));
}

function readFile(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result); // a data URI
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
