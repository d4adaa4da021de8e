// Adding a model: from Hugging Face or an address, from a file of this computer, from LocalAI's YAML, from a gallery.
// Everything is found and checked first (`dry_run`), so a person sees the files, the size and the licence before a download.

import { post, send } from "../client.js";
import { h } from "../dom.js";
import { changed, list } from "../live.js";
import { upload } from "../upload.js";
import * as words from "../words.js";
import { accepted, open, say } from "./layers.js";
import { bar, note } from "./marks.js";

const KINDS = [
  ["source", "Hugging Face or an address"],
  ["file", "A file of this computer"],
  ["yaml", "LocalAI's YAML"],
];

export function addModel({ entry } = {}) {
  const form = {
    kind: entry ? "gallery" : "source",
    name: entry ? entry.name : "",
    source: "",
    backend: "",
    yaml: "",
    file: null,
    load: true,
  };
  let plan = null;
  let problem = "";
  let busy = "";
  let sent = null; // {phase, done, total}
  const stopping = new AbortController();

  async function ask(isForReal) {
    problem = "";
    busy = isForReal ? "Adding…" : "Looking…";
    changed(true);
    try {
      return await request(isForReal);
    } catch (error) {
      if (error.name !== "AbortError") problem = error.message;
      return null;
    } finally {
      busy = "";
      sent = null;
      changed(true);
    }
  }

  async function request(isForReal) {
    if (form.kind === "gallery")
      return post(isForReal ? "/models/apply" : "/models/plan", {
        id: entry.gallery ? `${entry.gallery.name}@${entry.name}` : entry.name,
        ...(form.name !== entry.name ? { name: form.name } : {}),
      });
    if (form.kind === "yaml") {
      const answer = await send("POST", "/models/import", form.yaml, {
        headers: { "content-type": "application/yaml" },
      });
      return answer.json();
    }
    const body = {
      name: form.name.trim(),
      load: isForReal && form.load,
      dry_run: !isForReal,
      ...(form.backend.trim() ? { backend: form.backend.trim() } : {}),
    };
    if (form.kind === "file") {
      const sha256 = await upload(
        form.file,
        (phase, done) => {
          sent = { phase, done, total: form.file.size };
          changed();
        },
        stopping.signal,
      );
      return post("/api/models", {
        ...body,
        files: [{ name: form.file.name, uri: `upload:${sha256}`, sha256, size_bytes: form.file.size }],
      });
    }
    return post("/api/models", { ...body, sources: form.source.split(/\s+/).filter(Boolean) });
  }

  async function finish(close) {
    const made = await ask(true);
    if (!made) return;
    close();
    list(["models"]);
    if (form.kind === "yaml") say(`Added ${words.names(made.models.map((one) => one.name))}.`, { link: "#/models" });
    else if (made.jobID || made.uuid)
      accepted({ jobID: made.jobID || made.uuid }, `${form.name} is added and is being loaded.`);
    else say(`${form.name} is added.`, { link: `#/models/${encodeURIComponent(form.name)}` });
  }

  const input = (label, name, more = {}) =>
    h(
      "label",
      { class: "field" },
      label,
      h("input", {
        class: "mono",
        spellcheck: "false",
        autocomplete: "off",
        value: form[name],
        oninput: (event) => {
          form[name] = event.target.value;
          plan = null;
          changed(true);
        },
        ...more,
      }),
    );
  const isReady = () =>
    form.kind === "yaml"
      ? form.yaml.trim()
      : form.kind === "gallery"
        ? true
        : form.name.trim() && (form.kind === "file" ? form.file : form.source.trim());

  open(entry ? `Add ${entry.name}` : "Add a model", (close) => [
    !entry &&
      h(
        "div",
        { class: "tabs", role: "tablist" },
        KINDS.map(([kind, label]) =>
          h(
            "button",
            {
              key: kind,
              role: "tab",
              "aria-selected": form.kind === kind ? "true" : "false",
              onclick: () => {
                form.kind = kind;
                plan = null;
                problem = "";
                changed(true);
              },
            },
            label,
          ),
        ),
      ),
    form.kind === "source" &&
      input("Where it comes from", "source", { placeholder: "hf:ORG/REPO", "aria-describedby": "sources" }),
    form.kind === "source" &&
      h(
        "p",
        { id: "sources", class: "muted" },
        ["hf:ORG/REPO", "https://…/model.gguf", "ollama://llama3.2", "http://HOST:PORT"].map((one, at) => [
          at > 0 && ", ",
          h("code", null, one),
        ]),
        " (a server that runs elsewhere)",
      ),
    form.kind === "file" &&
      h(
        "label",
        { class: "field" },
        "File (GGUF)",
        h("input", {
          type: "file",
          accept: ".gguf,.bin,.safetensors",
          onchange: (event) => {
            form.file = event.target.files[0] || null;
            if (form.file && !form.name) form.name = form.file.name.replace(/\.[a-z]+$/i, "").toLowerCase();
            plan = null;
            changed(true);
          },
        }),
      ),
    form.kind === "yaml" &&
      h(
        "label",
        { class: "field" },
        "One or more documents",
        h("textarea", {
          class: "mono",
          rows: 12,
          spellcheck: "false",
          value: form.yaml,
          oninput: (event) => {
            form.yaml = event.target.value;
            changed(true);
          },
        }),
      ),
    form.kind !== "yaml" && input("Name", "name", { placeholder: "the name that applications ask for" }),
    ["source", "file"].includes(form.kind) &&
      h(
        "details",
        null,
        h("summary", { class: "muted" }, "More"),
        input("Backend (left out: chosen by the files)", "backend", { placeholder: "llama-cpp" }),
      ),
    ["source", "file"].includes(form.kind) &&
      h(
        "label",
        null,
        h("input", {
          type: "checkbox",
          checked: form.load,
          onchange: (event) => {
            form.load = event.target.checked;
          },
        }),
        " load it at once",
      ),
    sent &&
      h(
        "div",
        { class: "total" },
        h("span", { class: "muted" }, sent.phase === "reading" ? "Reading the file" : "Uploading"),
        bar((100 * sent.done) / sent.total, { label: sent.phase }),
        h("span", { class: "amount" }, words.bytesOf(sent.done, sent.total)),
      ),
    problem && h("p", { class: "note bad", role: "alert" }, problem),
    plan && found(plan),
    h(
      "div",
      { class: "buttons" },
      ["source", "gallery"].includes(form.kind) && !plan
        ? h(
            "button",
            {
              class: "main",
              disabled: !isReady() || Boolean(busy),
              onclick: async () => {
                plan = await ask(false);
                changed(true);
              },
            },
            busy || "Show what it would add",
          )
        : h(
            "button",
            { class: "main", disabled: !isReady() || Boolean(busy), onclick: () => finish(close) },
            busy || (form.kind === "yaml" ? "Import" : `Add ${form.name}`),
          ),
      h(
        "button",
        {
          onclick: () => {
            stopping.abort();
            close();
          },
        },
        "Cancel",
      ),
    ),
  ]);
}

function found(plan) {
  return h(
    "section",
    { class: "found" },
    h(
      "dl",
      { class: "pairs" },
      h("dt", null, "Size"),
      h("dd", null, words.bytes(plan.size_bytes || null)),
      h("dt", null, "Licence"),
      h("dd", null, plan.license || "unknown: look at its source before you use it"),
      plan.backend && [h("dt", null, "Backend"), h("dd", null, plan.backend)],
      (plan.files || []).length > 0 && [
        h("dt", null, "Files"),
        h(
          "dd",
          null,
          words.names(
            plan.files.map((file) => file.name),
            5,
          ),
        ),
      ],
    ),
    (plan.remarks || []).map((text) => h("p", { key: text, class: "muted" }, text)),
    (plan.warnings || []).map((text) => h("div", { key: text }, note(text, "warn"))),
  );
}
