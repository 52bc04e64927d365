"""How one engine is run, as its command line said."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

RESERVED_TOKENS = 6
"""A request's ids must be fewer than the context less these: SGLang's own reserve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one engine is run."""

    model_path: Path
    """Folder of the model and its tokenizer."""
    served_name: str
    host: str
    port: int
    states: Literal["spool", "json", "off"]
    aux: bool
    """Whether JSON states are those of the auxiliary layers instead of the final one."""
    context_length: int
    slots: int
    """Requests that run at once."""
    max_queued: int | None
    """Requests that may wait beside them; None for any number."""
    mean_tokens: float
    """Mean length of a response; 0 leaves its end to the model."""
    pace_ttft_s: float
    """Least time to the first token."""
    pace_tpot_s: float
    """Least time a further token."""
    api_key: str | None
    node: str
    hashed: bool
    """Whether a hash answers instead of the model."""
    weight_version: str = "default"
    kv_cache_dtype: str = "bfloat16"
    """Said in `/server_info`, and of no effect: a test can make a server that no run should use."""
    started: float = field(default_factory=time.time)
