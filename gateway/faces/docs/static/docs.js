// Renders the endpoints of openapi.json: purpose, fields, and a curl example.

const MAX_REFERENCES = 8; // followed from one schema to the next
const HEADERS = ["Field", "Type", "Default", "Notes"];

const byId = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const created = Object.assign(document.createElement(tag), properties);
  created.append(...children);
  return created;
}

/** The schema that a reference points to, in the body's own definitions or the API's. */
function resolve(schema, roots) {
  for (let hops = 0; schema.$ref && hops < MAX_REFERENCES; hops += 1) {
    const path = schema.$ref.replace(/^#\//, "").split("/");
    const found = roots.map((root) => path.reduce((at, key) => at?.[key], root)).find(Boolean);
    if (!found) return {};
    schema = found;
  }
  return schema;
}

/** A short name of a type. */
function describeType(given, roots) {
  const schema = resolve(given, roots);
  const options = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (options) return [...new Set(options.map((each) => describeType(each, roots)))].filter((name) => name !== "null").join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.type === "array") return `list of ${describeType(schema.items ?? {}, roots)}`;
  if (schema.properties) return `object of ${Object.keys(schema.properties).join(", ")}`;
  return schema.type ?? "any";
}

function describeRange({ minimum, maximum, exclusiveMinimum, exclusiveMaximum }) {
  const parts = [];
  if (minimum !== undefined) parts.push(`at least ${minimum}`);
  if (exclusiveMinimum !== undefined) parts.push(`above ${exclusiveMinimum}`);
  if (maximum !== undefined) parts.push(`at most ${maximum}`);
  if (exclusiveMaximum !== undefined) parts.push(`below ${exclusiveMaximum}`);
  return parts.join(", ");
}

function fieldRow(name, given, required, roots) {
  const schema = resolve(given, roots);
  const fallback = given.default ?? schema.default;
  const shown = required ? "required" : fallback === undefined || fallback === null ? "" : JSON.stringify(fallback);
  return element("tr", {},
    element("th", { scope: "row" }, element("code", { textContent: name })),
    element("td", { textContent: describeType(given, roots) }),
    element("td", { textContent: shown }),
    element("td", { textContent: [given.description ?? schema.description, describeRange(schema)].filter(Boolean).join("; ").replaceAll("`", "") }));
}

function fieldTable(schema, roots, label) {
  const body = resolve(schema, roots);
  const rows = Object.entries(body.properties ?? {}).map(([name, each]) =>
    fieldRow(name, each, (body.required ?? []).includes(name), roots));
  if (!rows.length) return [];
  const heads = HEADERS.map((textContent) => element("th", { scope: "col", textContent }));
  const columns = element("colgroup", {}, ...HEADERS.map(() => element("col")));
  const table = element("table", {}, columns, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows));
  const place = element("div", { className: "scroll", tabIndex: 0 }, table);
  place.setAttribute("role", "region");
  place.setAttribute("aria-label", label);
  return [place];
}

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function curl(method, path, example) {
  const url = new URL(`.${path}`, document.baseURI).href;
  if (method === "GET") return `curl ${quote(url)}`;
  const body = example ? ` \\\n  -H 'content-type: application/json' \\\n  -d ${quote(JSON.stringify(example))}` : "";
  return `curl ${method === "POST" && example ? "" : `-X ${method} `}${quote(url)}${body}`;
}

function renderEndpoint(path, method, operation, api) {
  const id = `${method}${path.replaceAll(/[^a-z0-9]+/gi, "-")}`;
  const name = `${method.toUpperCase()} ${path}`;
  const content = operation.requestBody?.content?.["application/json"];
  const schema = content?.schema ?? {};
  const section = element("section", {},
    element("h2", { id }, element("span", { className: "method", textContent: method.toUpperCase() }), ` ${path}`),
    element("p", { textContent: operation.summary ? `${operation.summary}.` : "" }),
    ...fieldTable(schema, [schema, api], `Fields of ${name}`),
    element("pre", { tabIndex: 0 }, element("code", { textContent: curl(method.toUpperCase(), path, content?.example) })));
  section.setAttribute("aria-labelledby", id);
  section.lastElementChild.setAttribute("aria-label", `${name} with curl`);
  byId("contents").append(element("li", {}, element("a", { href: `#${id}`, textContent: name })));
  return section;
}

try {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  const api = await response.json();
  byId("version").textContent = api.info.version;
  byId("base").textContent = new URL("./v1", document.baseURI).href;
  const sections = Object.entries(api.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => renderEndpoint(path, method, operation, api)));
  byId("main").replaceChildren(...sections);
  if (location.hash) byId(location.hash.slice(1))?.scrollIntoView();
} catch (error) {
  byId("state").textContent = `openapi.json could not be loaded: ${error.message}. Reload the page to try again.`;
}
