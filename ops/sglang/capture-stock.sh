#!/usr/bin/env bash
# A capture server without the plugin:  MODEL=org/name capture-stock.sh [more SGLang arguments]
# Gives the final state (`--capture final`) as numbers in JSON, several times slower than the plugin. With
# `--enable-return-aux-hidden-states --speculative-algorithm EAGLE3` it gives the three layers in place of
# it (`--capture aux`). Both in one run need the plugin: capture.sh.
set -euo pipefail

flags=(
  --model-path "${MODEL:?a hub id or a folder, the same as in \`producer enqueue --model\`}"
  --host 0.0.0.0
  --port "${PORT:-30000}"
  --tp-size "${GPUS:-1}"
  --pp-size 1
  --enable-return-hidden-states
  # Only the last chunk of a prefill has its rows in a stock reply, and which requests are chunked depends
  # on the load. Eyas refuses the server without this.
  --chunked-prefill-size -1
  # Tokens found in a cache have no states.
  --disable-radix-cache
  --kv-cache-dtype bfloat16
  # Whole prefills need room beside the cache.
  --mem-fraction-static "${MEM_FRACTION:-0.75}"
  --enable-metrics
)
exec python -m sglang.launch_server "${flags[@]}" "$@"
