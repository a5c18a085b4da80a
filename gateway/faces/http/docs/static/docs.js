// Draws the endpoints of openapi.json: what each is for, its fields, and how to ask with curl.

const MOST_ANSWERS = 8;

const byId = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** A schema where it is, or where it points to: within the body's own definitions, or the API's. */
function resolved(schema, roots) {
  for (let hops = 0; schema.$ref && hops < MOST_ANSWERS; hops += 1) {
    const path = schema.$ref.replace(/^#\//, "").split("/");
    const found = roots.map((root) => path.reduce((at, key) => at?.[key], root)).find(Boolean);
    if (!found) return {};
    schema = found;
  }
  return schema;
}

/** A type in a few words. */
function typeOf(given, roots) {
  const schema = resolved(given, roots);
  const several = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (several) return [...new Set(several.map((each) => typeOf(each, roots)))].filter((name) => name !== "null").join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.type === "array") return `list of ${typeOf(schema.items ?? {}, roots)}`;
  if (schema.properties) return `object of ${Object.keys(schema.properties).join(", ")}`;
  return schema.type ?? "any";
}

function bounds({ minimum, maximum, exclusiveMinimum, exclusiveMaximum }) {
  const said = [];
  if (minimum !== undefined) said.push(`at least ${minimum}`);
  if (exclusiveMinimum !== undefined) said.push(`above ${exclusiveMinimum}`);
  if (maximum !== undefined) said.push(`at most ${maximum}`);
  if (exclusiveMaximum !== undefined) said.push(`below ${exclusiveMaximum}`);
  return said.join(", ");
}

function fieldRow(name, given, required, roots) {
  const schema = resolved(given, roots);
  const preset = given.default ?? schema.default;
  const absent = required ? "required" : preset === undefined || preset === null ? "" : JSON.stringify(preset);
  return element("tr", {},
    element("th", { scope: "row" }, element("code", { textContent: name })),
    element("td", { textContent: typeOf(given, roots) }),
    element("td", { textContent: absent }),
    element("td", { textContent: [given.description ?? schema.description, bounds(schema)].filter(Boolean).join("; ") }));
}

function fieldTable(schema, roots, label) {
  const body = resolved(schema, roots);
  const rows = Object.entries(body.properties ?? {}).map(([name, each]) =>
    fieldRow(name, each, (body.required ?? []).includes(name), roots));
  if (!rows.length) return [];
  const heads = ["Field", "Type", "Left out", "Notes"].map((textContent) => element("th", { scope: "col", textContent }));
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows));
  const place = element("div", { className: "scroll", tabIndex: 0 }, table);
  place.setAttribute("role", "region");
  place.setAttribute("aria-label", label);
  return [place];
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function curl(method, path, example) {
  const url = new URL(`.${path}`, document.baseURI).href;
  if (method === "GET") return `curl ${quoted(url)}`;
  const body = example ? ` \\\n  -H 'content-type: application/json' \\\n  -d ${quoted(JSON.stringify(example))}` : "";
  return `curl ${method === "POST" && example ? "" : `-X ${method} `}${quoted(url)}${body}`;
}

function section(path, method, told, api) {
  const id = `${method}${path.replaceAll(/[^a-z0-9]+/gi, "-")}`;
  const name = `${method.toUpperCase()} ${path}`;
  const content = told.requestBody?.content?.["application/json"];
  const schema = content?.schema ?? {};
  const made = element("section", {},
    element("h2", { id }, element("span", { className: "method", textContent: method.toUpperCase() }), ` ${path}`),
    element("p", { textContent: told.summary ? `${told.summary}.` : "" }),
    ...fieldTable(schema, [schema, api], `Fields of ${name}`),
    element("pre", { tabIndex: 0 }, element("code", { textContent: curl(method.toUpperCase(), path, content?.example) })));
  made.setAttribute("aria-labelledby", id);
  made.lastElementChild.setAttribute("aria-label", `${name} with curl`);
  byId("contents").append(element("li", {}, element("a", { href: `#${id}`, textContent: name })));
  return made;
}

try {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  const api = await response.json();
  byId("version").textContent = api.info.version;
  byId("base").textContent = new URL("./v1", document.baseURI).href;
  const drawn = Object.entries(api.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, told]) => section(path, method, told, api)));
  byId("main").replaceChildren(...drawn);
  if (location.hash) byId(location.hash.slice(1))?.scrollIntoView();
} catch (error) {
  byId("state").textContent = `openapi.json could not be read: ${error.message}. Reload to try again.`;
}
