"""Hidden states by transformers, in SGLang's Python: `transformers_rows.py MODEL IDS.json ROWS.npz`.

The same weights in float32, each sequence alone: `hidden_states` of every layer, [T, n + 1, H].
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
rows = {}
with torch.no_grad():
    for number, ids in enumerate(json.loads(Path(sys.argv[2]).read_text())):
        states = model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        rows[str(number)] = torch.stack([layer[0] for layer in states], dim=1).numpy()
np.savez(sys.argv[3], **rows)
