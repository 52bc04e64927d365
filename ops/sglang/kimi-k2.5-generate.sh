#!/usr/bin/env bash
# Kimi-K2.5 (INT4) on one node of 8 GPUs, generating:  MODEL=moonshotai/Kimi-K2.5 kimi-k2.5-generate.sh
# Seen on such a node: 930-1 350 tok/s, 159 K tokens of KV cache, 134-150 requests in flight.
set -euo pipefail
export MODEL="${MODEL:-moonshotai/Kimi-K2.5}" GPUS=8 MEM_FRACTION=0.88

flags=(
  # Tokenizer and model code come with the checkpoint; `producer enqueue` wants the flag too.
  --trust-remote-code
  # `auto` may be fp8 here. fp8_e4m3 gave 1 300-1 450 tok/s and was ruled out: it degrades the model noticeably.
  --kv-cache-dtype bf16
  # Keeps prefixes of retracted and repeated prompts in host memory. The size is of each of the 8 processes:
  # 384 GB of the node.
  --enable-hierarchical-cache
  --hicache-size 48
  # 159 K tokens are 870 for each of 150 + 32 requests, and a sample has 2 400: memory is the limit, not the
  # lanes. When retractions climb (sglang:num_retracted_reqs), raise this before lowering the lanes' limits.
  --schedule-conservativeness 1.0
)
exec "$(dirname "$0")/generate.sh" "${flags[@]}" "$@"
