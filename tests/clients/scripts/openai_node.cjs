// OpenAI's own client for node: prints the answers of the server at argv[2] as JSON.
const OpenAI = require("openai").default;

const ask = [{ role: "user", content: "Reverse: red blue green" }];
const greedy = { model: "demo", temperature: 0 };

async function refused(call) {
  try {
    await call();
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, code: error.code };
  }
  return {};
}

async function main() {
  const baseURL = `${process.argv[2]}/v1`;
  const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
  const chat = client.chat.completions;
  const answer = await chat.create({ messages: ask, ...greedy });
  let chunks = "";
  let usage = null;
  const options = { include_usage: true };
  for await (const chunk of await chat.create({
    messages: ask, stream: true, stream_options: options, ...greedy,
  })) {
    chunks += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  const streamed = await chat.stream({ messages: ask, ...greedy }).finalContent();
  const text = await client.completions.create({
    prompt: "Emoji: cat moon\n", max_tokens: 20, ...greedy,
  });
  const together = await Promise.all([...Array(8).keys()].map(async (n) => {
    const messages = [{ role: "user", content: `Count from ${n} to ${n + 5}.` }];
    return (await chat.create({ messages, ...greedy })).choices[0].message.content;
  }));
  const models = [];
  for await (const model of client.models.list()) models.push(model.id);
  const long = [{ role: "user", content: "red ".repeat(3000) }];
  console.log(JSON.stringify({
    models,
    answer: answer.choices[0].message.content,
    reason: answer.choices[0].finish_reason,
    usage: answer.usage,
    chunks,
    last_usage: usage,
    streamed,
    text: text.choices[0].text,
    together,
    unknown: await refused(() => chat.create({ messages: ask, ...greedy, model: "nobody" })),
    overflow: await refused(() => chat.create({ messages: long, ...greedy })),
  }));
}

main();
