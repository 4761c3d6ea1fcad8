"use strict";
// What both pages share: elements made of text alone, and calls with the key of this tab.
// Nothing is ever parsed as HTML, so names of models, hosts and islands stay text.

const KEY = "tandem-key";
const CALL_MS = 10000;
const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

class Unreachable extends Error {}

// The answer to GET. Refused for a status of an error, with what the gateway says of it. Unreachable where none comes.
async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const call = fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(CALL_MS) });
  const response = await call.catch(() => {
    throw new Unreachable(`no answer within ${CALL_MS / 1000} s`);
  });
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw new Refused(response.status, (body.error && body.error.message) || body.reason || `status ${response.status}`);
  }
  return response;
}

// What a reader is told of an error, if it is not that a key is needed. A fault of the page shows on the console, too.
function explain(error) {
  if (error instanceof Refused) return error.message;
  if (error instanceof Unreachable) return "The gateway does not answer";
  console.error(error);
  return `This page has failed: ${error.message}`;
}

// Shows the field for the key when it is needed. again: called once there is one.
function keyForm(again) {
  const form = byId("key");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, byId("secret").value.trim());
    byId("secret").value = "";
    form.hidden = true;
    again();
  });
  byId("forget").addEventListener("click", () => {
    sessionStorage.removeItem(KEY);
    location.reload();
  });
  return {
    need(message) {
      const wrong = sessionStorage.getItem(KEY) !== null;
      sessionStorage.removeItem(KEY);
      byId("why").textContent = wrong ? "The gateway does not accept this key." : `The gateway asks for a key: ${message}.`;
      form.hidden = false;
      byId("forget").hidden = true;
    },
    fine() {
      form.hidden = true;
      byId("forget").hidden = sessionStorage.getItem(KEY) === null;
    },
  };
}
