"""Prompt files made for these tests: short questions, each its own."""

import json
from pathlib import Path


def write_prompts(path: Path, count: int) -> Path:
    lines = [
        json.dumps({"prompt": f"What is {n} plus {n * 7 % 13}? Explain step {n}."}) for n in range(count)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
