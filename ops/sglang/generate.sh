#!/usr/bin/env bash
# A generating server for a model that fits one node:  MODEL=org/name generate.sh [more SGLang arguments]
# Generates as fast as SGLang can; it gives no hidden states. For those see capture.sh.
set -euo pipefail

flags=(
  --model-path "${MODEL:?a hub id or a folder, the same as in \`producer enqueue --model\`}"
  --host 0.0.0.0
  --port "${PORT:-30000}"
  # One copy of the model over so many GPUs. Where it fits on fewer, --dp-size 2 with half of them is
  # faster; Eyas counts one address as one server, so raise --short-concurrency with it.
  --tp-size "${GPUS:-1}"
  # `auto` becomes fp8 when the checkpoint's quantization config says so, and /server_info goes on saying
  # `auto`. fp8 responses are visibly worse. Eyas refuses a quantized cache without --allow-quantized-kv.
  --kv-cache-dtype bfloat16
  # Weights and KV cache of all GPU memory. The KV cache is what limits requests in flight: raise it until
  # the log shows out of memory at the longest prefill, and stay a step below.
  --mem-fraction-static "${MEM_FRACTION:-0.88}"
  # Retractions and KV use, which a run should be watched by, are to be had only so.
  --enable-metrics
  # Left as they are on purpose: radix cache (prompts share system texts), chunked prefill, overlap schedule,
  # CUDA graphs. Speculative decoding may be added: it changes speed, not responses.
  # Left out on purpose: --enable-return-hidden-states. With it every batch computes and copies states,
  # whether its requests ask or not.
)
exec python -m sglang.launch_server "${flags[@]}" "$@"
