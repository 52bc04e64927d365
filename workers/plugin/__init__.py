"""What runs inside SGLang: takes hidden states where they arise and puts them into the spool.

`pip install --no-deps eyas` into SGLang's environment is the whole installation. Nothing here may
import more than NumPy, torch, SGLang, `storage.spool` and `workers.config`. A server captures when
started with

    --enable-return-hidden-states --disable-overlap-schedule --disable-cuda-graph
    --enable-return-aux-hidden-states --speculative-algorithm EAGLE3
        [--return-aux-hidden-state-layer-ids …]

The second line gives the auxiliary layers, without any draft; left out, the final state alone is
given and `/server_info` says so. Chunked prefill, mixed batches, retractions and a radix cache may
stay on. `EYAS_NODE`, `EYAS_SPOOL_DIR` and `EYAS_SPOOL_MAX_GB` are the workers' on that machine; where
there are none, lanes of other machines fetch the files from `/eyas/spool/`. Without the first flag the
plugin does nothing.
"""
