// The page of the API: draws /openapi.json. Schemas unfold as they are opened, so that one that holds itself has no end to draw.

const PREFIX = "#/components/schemas/";
const ORDER = ["post", "get", "head"];
let schemas = {};

const resolve = (schema) => (schema.$ref ? schemas[keyOf(schema)] || {} : schema);
const keyOf = (schema) => schema.$ref.slice(PREFIX.length);
const nameOf = (key) => key.split("__").pop(); // one that several modules have is written with its module
const choices = (schema) => schema.anyOf || schema.oneOf || schema.allOf || [];

// What a value may be, in words.
function kind(schema) {
  if (schema.$ref) return nameOf(keyOf(schema));
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (choices(schema).length) return [...new Set(choices(schema).map(kind))].join(" | ");
  if (schema.type === "array") return `list of ${schema.items ? kind(schema.items) : "anything"}`;
  if (schema.type === "object" && schema.additionalProperties && schema.additionalProperties !== true) {
    return `object of ${kind(schema.additionalProperties)}`;
  }
  return Array.isArray(schema.type) ? schema.type.join(" | ") : schema.type || "anything";
}

const LIMITS = [["minimum", "≥"], ["exclusiveMinimum", ">"], ["maximum", "≤"], ["exclusiveMaximum", "<"]];
LIMITS.push(["minLength", "length ≥"], ["maxLength", "length ≤"], ["minItems", "items ≥"], ["maxItems", "items ≤"]);

function limits(schema) {
  const own = LIMITS.filter(([key]) => key in schema).map(([key, sign]) => `${sign} ${schema[key]}`);
  return [...own, ...choices(schema).flatMap((one) => (one.$ref ? [] : limits(one)))];
}

// Named schemas within a schema, each once.
function inside(schema) {
  if (schema.$ref) return [keyOf(schema)];
  const parts = [...choices(schema), schema.items, schema.additionalProperties].filter((one) => one && typeof one === "object");
  return [...new Set(parts.flatMap(inside))];
}

function unfolding(title, fill) {
  const made = element("details", {}, element("summary", {}, title));
  made.addEventListener("toggle", () => {
    if (made.open && made.childElementCount === 1) made.append(...fill());
  });
  return made;
}

function fieldRow(name, schema, required) {
  const about = [schema.description || "", limits(schema).join(", "), "default" in schema ? `default ${JSON.stringify(schema.default)}` : ""];
  const cell = element("td", { class: "text wrap" }, about.filter(Boolean).join(" · "));
  for (const one of inside(schema)) cell.append(unfolding(nameOf(one), () => [fields(schemas[one] || {})]));
  const label = element("td", { class: "text" }, element("code", {}, name));
  if (required) label.append(" ", element("span", { class: "warn" }, "required"));
  return element("tr", {}, label, element("td", { class: "text wrap" }, element("code", {}, kind(schema))), cell);
}

function fields(schema) {
  const entries = Object.entries(schema.properties || {});
  const about = schema.description ? [element("p", { class: "dim" }, schema.description)] : [];
  if (!entries.length) return element("div", {}, ...about, element("p", {}, element("code", {}, kind(schema))));
  const head = element("tr", {}, ...["field", "type", "about"].map((one) => element("th", { class: "text" }, one)));
  const rows = entries.map(([name, one]) => fieldRow(name, one, (schema.required || []).includes(name)));
  const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
  return element("div", {}, ...about, element("div", { class: "scroll" }, table));
}

// One JSON body that has each required field.
function example(schema, depth = 0) {
  const one = resolve(schema);
  if ("const" in one) return one.const;
  if (one.enum) return one.enum[0];
  if (choices(one).length) return example(choices(one)[0], depth);
  if (one.type === "array") return one.items && depth < 4 ? [example(one.items, depth + 1)] : [];
  if (one.properties && depth < 4) {
    return Object.fromEntries((one.required || []).map((name) => [name, example(one.properties[name] || {}, depth + 1)]));
  }
  return { string: "…", integer: 1, number: 1, boolean: true, object: {} }[one.type] ?? "…";
}

function command(path, method, body) {
  const data = body ? ` \\\n  -H 'content-type: application/json' -d '${JSON.stringify(example(body)).replaceAll("'", "'\\''")}'` : "";
  const how = method === "post" && !body ? " -X POST" : method === "head" ? " -I" : "";
  return `curl${how} ${location.origin}${path} \\\n  -H "authorization: Bearer $TANDEM_API_KEY"${data}`;
}

function operation(path, method, described) {
  const body = described.requestBody && described.requestBody.content["application/json"].schema;
  const kinds = Object.keys((described.responses["200"] || {}).content || {});
  const title = element("span", {}, element("span", { class: `method ${method === "post" ? "good" : "dim"}` }, method.toUpperCase()), element("code", {}, path));
  return unfolding(title, () => [
    ...(body ? [fields(resolve(body))] : []),
    ...(kinds.length ? [element("p", { class: "dim" }, `Answers ${kinds.join(" or ")}.`)] : []),
    element("pre", {}, command(path, method, body)),
  ]);
}

async function load() {
  try {
    const described = await (await ask("/openapi.json")).json();
    keys.fine();
    byId("banner").hidden = true;
    schemas = described.components.schemas;
    byId("about").textContent = `${described.info.title} ${described.info.version}`;
    const apart = ([path]) => (path.startsWith("/v1/") ? 0 : 1);
    const shown = Object.entries(described.paths).sort((a, b) => apart(a) - apart(b)).map(([path, operations]) => {
      const methods = ORDER.filter((one) => one in operations && !(one === "head" && "get" in operations));
      return element("div", { class: "panel" }, ...methods.map((one) => operation(path, one, operations[one])));
    });
    byId("main").replaceChildren(...shown);
  } catch (error) {
    if (error.status === 401) return keys.need(error.message);
    byId("banner").textContent = explain(error);
    byId("banner").hidden = false;
  }
}

const keys = keyForm(load);
load();
