"""What the engine says of itself at `/server_info`, `/model_info` and `/v1/models`, in SGLang's fields.

Only fields that some client reads. Like the real one, `/server_info` holds the API key in clear.
"""

import time
from datetime import UTC, datetime
from typing import Any

from workers.engine.model_config import ModelConfig
from workers.engine.settings import RESERVED_TOKENS, Settings

SGLANG_VERSION = "0.5.23"
"""The release whose contract this is."""


def server_info(settings: Settings, config: ModelConfig) -> dict[str, Any]:
    """`/server_info`."""
    info: dict[str, Any] = {
        "model_path": str(settings.model_path),
        "tokenizer_path": str(settings.model_path),
        "served_model_name": settings.served_name,
        "api_key": settings.api_key,
        "admin_api_key": None,
        "launch_command": f"python -m workers.engine --api-key {settings.api_key}",
        "host": settings.host,
        "port": settings.port,
        "device": "cpu",
        "load_format": "dummy" if settings.hashed else "auto",
        "revision": None,
        "trust_remote_code": False,
        "skip_tokenizer_init": False,
        "dtype": "bfloat16",
        "quantization": None,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "context_length": settings.context_length,
        "max_req_input_len": settings.context_length - RESERVED_TOKENS,
        "max_total_num_tokens": settings.context_length * settings.slots,
        "max_running_requests": settings.slots,
        "max_queued_requests": settings.max_queued,
        "max_prefill_tokens": 16384,
        "chunked_prefill_size": -1,
        "page_size": 1,
        "random_seed": 0,
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "speculative_algorithm": None,
        "enable_return_hidden_states": settings.states != "off",
        "return_hidden_states_mode": None if settings.states == "off" else "full",
        "enable_return_aux_hidden_states": settings.aux,
        "aux_hidden_state_capture": "eagle3" if settings.aux else None,
        "return_aux_hidden_state_layer_ids": None,
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "attn_cp_size": 1,
        "weight_version": settings.weight_version,
        "version": SGLANG_VERSION,
        "status": "ready",
        "startup_time": 0.0,
        "internal_states": [],
        "eyas_engine": True,
    }
    if settings.states == "spool":
        info["eyas"] = {
            "plugin": 1,
            "node": settings.node,
            "hs_indices": {
                "eagle3": [*config.aux_layers, config.num_layers],
                "aux": list(config.aux_layers),
                "final": [config.num_layers],
            },
            "hidden_size": config.hidden_size,
            "num_layers": config.num_layers,
            "norm": "post",
            "kv_dtype": settings.kv_cache_dtype,
            "vocab_size": config.vocab_size,
        }
    return info


def model_info(settings: Settings, config: ModelConfig) -> dict[str, Any]:
    """`/model_info`."""
    return {
        "model_path": str(settings.model_path),
        "served_model_name": settings.served_name,
        "tokenizer_path": str(settings.model_path),
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": settings.weight_version,
        "load_format": "dummy" if settings.hashed else "auto",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": config.model_type,
        "architectures": [config.architecture],
    }


def models(settings: Settings) -> dict[str, Any]:
    """`/v1/models`."""
    model = {
        "id": settings.served_name,
        "object": "model",
        "created": int(settings.started),
        "owned_by": "sglang",
        "root": settings.served_name,
        "parent": None,
        "max_model_len": settings.context_length,
    }
    return {"object": "list", "data": [model]}


def loads(settings: Settings, *, running: list[int], waiting: int) -> dict[str, Any]:
    """`/v1/loads`: one rank, with `running` requests of so many prompt tokens and `waiting` others."""
    room = settings.context_length * settings.slots
    load = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": len(running),
        "num_waiting_reqs": waiting,
        "num_used_tokens": sum(running),
        "num_total_tokens": sum(running),
        "max_total_num_tokens": room,
        "max_running_requests": settings.slots,
        "token_usage": sum(running) / room,
        "cache_hit_rate": 0.0,
    }
    now = datetime.now(UTC).isoformat()
    return {"timestamp": now, "version": SGLANG_VERSION, "loads": [load]}
