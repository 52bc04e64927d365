#!/usr/bin/env bash
# Kimi-K2.5 (INT4) on one node of 8 GPUs, capturing:  EYAS_SPOOL_DIR=/dev/shm/eyas kimi-k2.5-capture.sh
# 57 344 bytes a token (4 states of 7 168): 64 GB of spool are 1.1 M tokens, so keep it on tmpfs or NVMe.
set -euo pipefail
export MODEL="${MODEL:-moonshotai/Kimi-K2.5}" GPUS=8

flags=(
  --trust-remote-code
  --kv-cache-dtype bf16
  # The layers are hs[2], hs[30] and hs[58] of 61. They could be given as ids `1 29 57`, which this model
  # raises by one because the first is 1; any other list is taken as it stands.
)
exec "$(dirname "$0")/capture.sh" "${flags[@]}" "$@"
