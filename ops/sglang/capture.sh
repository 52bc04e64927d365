#!/usr/bin/env bash
# A capture server with Eyas's plugin:  MODEL=org/name EYAS_SPOOL_DIR=/dev/shm/eyas capture.sh [more SGLang arguments]
# Gives EAGLE-3's three layers and the final state (`--capture eagle3`), as files in the spool.
# Once: `pip install --no-deps eyas` in SGLang's environment.
set -euo pipefail

# The plugin writes where this machine's sink reads: the same three as in the workers' environment.
export EYAS_NODE="${EYAS_NODE:-$(hostname)}"
export EYAS_SPOOL_DIR="${EYAS_SPOOL_DIR:?the spool of the sink on this machine}"
export EYAS_SPOOL_MAX_GB="${EYAS_SPOOL_MAX_GB:-64}"

flags=(
  --model-path "${MODEL:?a hub id or a folder, the same as in \`producer enqueue --model\`}"
  --host 0.0.0.0
  --port "${PORT:-30000}"
  --tp-size "${GPUS:-1}"
  # No pipeline, no context parallelism: no one process there sees all layers or all rows.
  --pp-size 1
  # States of every token. With the plugin loaded they go to the spool, not into the reply.
  --enable-return-hidden-states
  # The layers beside the final state. EAGLE3 only names which: no draft is loaded and nothing speculates.
  # SGLang's default is hs[2], hs[n//2], hs[n-3], EAGLE-3's own. Do not give ids where it is meant: models
  # read them differently, and a list that is one layer off looks like any other.
  --enable-return-aux-hidden-states
  --speculative-algorithm EAGLE3
  # A batch's rows may be overwritten by the next one before they are copied; the plugin refuses to start
  # without these two.
  --disable-overlap-schedule
  --disable-cuda-graph
  # Tokens found in a cache have no states, so every request has a prefix cache of its own: keeping one
  # costs memory and finds nothing.
  --disable-radix-cache
  # A state computed from a quantized cache is that of another model.
  --kv-cache-dtype bfloat16
  # Lower than for generating: a prefill of a long sequence needs room beside it, four rows of the hidden
  # size for each token of a batch among it.
  --mem-fraction-static "${MEM_FRACTION:-0.80}"
  # Bounds that room; the plugin puts the chunks together again.
  --chunked-prefill-size 8192
  --enable-metrics
)
exec python -m sglang.launch_server "${flags[@]}" "$@"
