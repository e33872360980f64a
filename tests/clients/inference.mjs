// Runs with @huggingface/inference: its calls against a server. Prints one JSON object.
import { InferenceClient } from "@huggingface/inference";

const [url, text, other] = process.argv.slice(2);
const client = (route) => new InferenceClient().endpoint(url + route);

async function nameOfError(call) {
  try {
    await call();
  } catch (error) {
    return error.constructor.name;
  }
}

const found = {
  featureExtraction: await client("/embed").featureExtraction({ inputs: text }),
  sentenceSimilarity: await client("/similarity").sentenceSimilarity({
    inputs: { source_sentence: text, sentences: [text, other] },
  }),
  fillMask: await client("/fill-mask").fillMask({ inputs: "the [MASK]" }),
  questionAnswering: await client("/qa").questionAnswering({
    inputs: { question: "who?", context: text },
  }),
  byAddress: await client("").featureExtraction({ inputs: text }),
  error: await nameOfError(() => client("/fill-mask").fillMask({ inputs: "no mask" })),
};
console.log(JSON.stringify(found));
