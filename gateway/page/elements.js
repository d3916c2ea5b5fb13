// Builds elements. Strings become text nodes, never HTML.

export const at = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function showError(message) { at("error").textContent = message; at("error").hidden = !message; }

// A button that puts `text()` on the clipboard and says so.
export function copyButton(text) {
  const button = make("button", { type: "button", className: "small", textContent: "Copy" });
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

async function copy(text) {
  try { await navigator.clipboard.writeText(text); return true; } // there is none for http:// but on localhost
  catch {
    const field = make("textarea", { value: text, className: "unseen" });
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}
