// Vercel's AI SDK: prints the answers of the server at argv[2] as JSON.
const { generateText, generateObject, streamText, stepCountIs, tool } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { z } = require("zod");

const tools = {
  calculate: tool({
    description: "The value of an expression.",
    inputSchema: z.object({ expression: z.string() }),
    execute: async ({ expression }) => ({ "37 + 45": "82", "90 - 12": "78" })[expression],
  }),
  get_weather: tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => (city === "Oslo" ? "snowy, 3 degrees" : "sunny, 21 degrees"),
  }),
};

async function main() {
  const provider = createOpenAICompatible({
    name: "foretoken",
    baseURL: `${process.argv[2]}/v1`,
    apiKey: "none",
    supportsStructuredOutputs: true,
  });
  const common = { model: provider("demo"), temperature: 0, maxRetries: 0 };
  const answer = await generateText({ ...common, prompt: "Reverse: red blue green" });
  let streamed = "";
  for await (const piece of streamText({ ...common, prompt: "Reverse: red blue green" }).textStream) {
    streamed += piece;
  }
  const schema = z.object({ fruit: z.string(), number: z.number().int() });
  const prompt = "JSON: fruit plum, number 7";
  const { object } = await generateObject({ ...common, schema, prompt });
  const messages = [];
  const answers = [];
  const calls = [];
  for (const question of ["What is 37 + 45?", "What is the weather in Oslo?", "What is 90 - 12?"]) {
    messages.push({ role: "user", content: question });
    const run = await generateText({ ...common, messages, tools, stopWhen: stepCountIs(3) });
    answers.push(run.text);
    calls.push(...run.steps.flatMap((step) => step.toolCalls.map((call) => call.toolName)));
    messages.push(...run.response.messages);
  }
  console.log(JSON.stringify({ answer: answer.text, streamed, object, answers, calls }));
}

main();
