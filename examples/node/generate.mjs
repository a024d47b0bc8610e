// Streams one answer with the bare stubs: node generate.mjs 'The capital of France is'
import { existsSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const protos = join(dirname(fileURLToPath(import.meta.url)), "../../protos");
const definition = loader.loadSync("edged/v1/inference.proto", { includeDirs: [protos], enums: String, longs: String });
const { Inference } = grpc.loadPackageDefinition(definition).edged.v1;

// Where the daemon listens by default, in the order in which it chooses.
const sockets = [
  "/run/edged/edged.sock",
  join(process.env.XDG_RUNTIME_DIR ?? "/nonexistent", "edged.sock"),
  `/tmp/edged-${process.getuid()}/edged.sock`,
];
const address = process.env.EDGED_ADDRESS ?? `unix://${sockets.find(existsSync) ?? sockets[0]}`;
const client = new Inference(address, grpc.credentials.createInsecure());
const deadline = new Date(Date.now() + 60_000); // the daemon stops the work when it passes
const call = client.Generate(
  { text: process.argv[2] ?? "The capital of France is", stops: { maxTokens: 32 } },
  { deadline },
);
call.on("data", ({ chunk, finished }) => {
  process.stdout.write(chunk?.text ?? finished?.text ?? "");
  if (finished) console.log(`\n[${finished.reason}, ${finished.usage.generatedTokens} tokens]`);
});
call.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
