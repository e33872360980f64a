// Runs with released clients for Node: their first calls against a server. Prints one JSON object.
import { createCohere } from "@ai-sdk/cohere";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { CohereEmbeddings, CohereRerank } from "@langchain/cohere";
import { Mistral } from "@mistralai/mistralai";
import { embed, embedMany, rerank } from "ai";
import { CohereClient, CohereClientV2 } from "cohere-ai";
import { Ollama } from "ollama";
import OpenAI from "openai";

const [url, model, sent] = process.argv.slice(2);
const texts = JSON.parse(sent);
const [query] = texts;
const v1 = `${url}/v1`;
const openai = new OpenAI({ apiKey: "none", baseURL: v1, maxRetries: 0 });
const ai = createOpenAICompatible({ name: "cloze", baseURL: v1 }).embeddingModel(model);
const aiCohere = createCohere({ apiKey: "none", baseURL: `${url}/v2` });
const cohere = new CohereClient({ token: "none", environment: url });
const cohere2 = new CohereClientV2({ token: "none", environment: url });
const client = new CohereClient({ token: "none", environment: url });
const ollama = new Ollama({ host: url });
const mistral = new Mistral({ apiKey: "none", serverURL: url });
const langchain = new CohereEmbeddings({ client, model });

const rows = ({ data }) => data.map((row) => row.embedding);
const float = { model, input: texts, encoding_format: "float" };
const v2Embed = { model, texts, inputType: "search_document", embeddingTypes: ["float"] };
const ranks = ({ results }) => results.map((row) => [row.index, row.relevanceScore]);
const ranked = { model, query, documents: texts };
const unknown = { model: "nobody", input: query, texts: [query], inputType: "search_query" };

const calls = {
  vectors: {
    openai: async () => rows(await openai.embeddings.create({ model, input: texts })),
    "openai float": async () => rows(await openai.embeddings.create(float)),
    "openai single": async () => rows(await openai.embeddings.create({ model, input: query })),
    "ai many": async () => (await embedMany({ model: ai, values: texts })).embeddings,
    "ai single": async () => [(await embed({ model: ai, value: query })).embedding],
    "ai cohere": async () =>
      (await embedMany({ model: aiCohere.embeddingModel(model), values: texts })).embeddings,
    cohere: async () => (await cohere.embed({ model, texts })).embeddings,
    "cohere 2": async () => (await cohere2.embed(v2Embed)).embeddings.float,
    ollama: async () => (await ollama.embed({ model, input: texts })).embeddings,
    "ollama single": async () => (await ollama.embed({ model, input: query })).embeddings,
    "ollama older": async () => [(await ollama.embeddings({ model, prompt: query })).embedding],
    mistral: async () => rows(await mistral.embeddings.create({ model, inputs: texts })),
    "langchain documents": () => langchain.embedDocuments(texts),
    "langchain query": async () => [await langchain.embedQuery(query)],
  },
  ranks: {
    cohere: async () => ranks(await cohere.rerank(ranked)),
    "cohere 2": async () => ranks(await cohere2.rerank(ranked)),
    ai: async () =>
      (await rerank({ ...ranked, model: aiCohere.rerankingModel(model) })).ranking.map((row) => [
        row.originalIndex,
        row.score,
      ]),
    langchain: async () =>
      (await new CohereRerank({ client, model, topN: texts.length }).rerank(texts, query)).map(
        (row) => [row.index, row.relevanceScore],
      ),
  },
  models: {
    openai: async () => (await openai.models.list()).data.map((row) => row.id),
    "openai one": async () => [(await openai.models.retrieve(model)).id],
    ollama: async () => (await ollama.list()).models.map((row) => row.name),
    "ollama running": async () => (await ollama.ps()).models.map((row) => row.name),
    mistral: async () => (await mistral.models.list()).data.map((row) => row.id),
  },
  errors: {
    openai: () => openai.embeddings.create(unknown),
    cohere: () => cohere.embed(unknown),
    "cohere 2": () => cohere2.embed({ ...unknown, embeddingTypes: ["float"] }),
    ollama: () => ollama.embed(unknown),
    "openai route": () => openai.chat.completions.create({ model, messages: [] }),
  },
  others: {
    "ollama preload": async () => (await ollama.embed({ model, input: "" })).embeddings,
    "ollama version": () => ollama.version(),
    "ollama show": async () => (await ollama.show({ model })).capabilities,
  },
};

const found = {};
for (const [kind, named] of Object.entries(calls)) {
  found[kind] = {};
  for (const [name, call] of Object.entries(named)) {
    try {
      found[kind][name] = await call();
    } catch (error) {
      found[kind][name] = `${error.constructor.name} ${error.message}`;
    }
  }
}
console.log(JSON.stringify(found));
