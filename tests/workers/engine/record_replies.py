"""Records what a real SGLang answers to `cases.py`, into `recorded/sglang.json`; run by hand.

    python tests/workers/engine/record_replies.py http://127.0.0.1:30000

The server runs the engine's tiny model (`python -m workers.engine --print-model-dir`) on CPU with
`--context-length 2048 --enable-return-hidden-states --chunked-prefill-size -1`. Folders, times,
addresses and keys are left out of what is kept. With `aux` after the address, of a server that also has
`--enable-return-aux-hidden-states --speculative-algorithm EAGLE3`, only what differs is recorded, into
`recorded/sglang_aux.json`.
"""

import json
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES, Case, generate, long

RECORDED = Path(__file__).parent / "recorded"
AUX_CASES = ("states of a generation", "states of a capture", "server info")
KEPT_INFO = (
    *("model_path", "tokenizer_path", "served_model_name", "api_key", "admin_api_key", "host", "port"),
    *(
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "context_length",
        "max_req_input_len",
        "max_total_num_tokens",
    ),
    *(
        "max_running_requests",
        "chunked_prefill_size",
        "disable_radix_cache",
        "speculative_algorithm",
        "status",
    ),
    *("enable_return_hidden_states", "return_hidden_states_mode", "enable_return_aux_hidden_states"),
    *("return_aux_hidden_state_layer_ids", "version", "trust_remote_code", "skip_tokenizer_init", "tp_size"),
    *("dp_size", "pp_size", "disable_overlap_schedule", "disable_cuda_graph", "random_seed"),
    *(
        "aux_hidden_state_capture",
        "attn_cp_size",
        "device",
        "max_queued_requests",
        "load_format",
        "revision",
        "page_size",
        "max_prefill_tokens",
    ),
)
TIMES = ("e2e_latency", "queue_time", "first_token_latency", "decode_throughput")


def send(url: str, case: Case) -> dict[str, Any]:
    """Status, content type and body of the answer."""
    request = urllib.request.Request(
        url + case.path, case.content, {"Content-Type": "application/json"}, method=case.method
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            status, headers, body = reply.status, reply.headers, reply.read()
    except urllib.error.HTTPError as error:
        status, headers, body = error.code, error.headers, error.read()
    try:
        content = json.loads(body)
    except ValueError:
        content = body.decode()
    return {"status": status, "type": headers.get_content_type(), "body": scrubbed(content)}


def scrubbed(content: Any) -> Any:
    """The answer without what is of this machine or this minute."""
    if isinstance(content, list):
        return [scrubbed(item) for item in content]
    if not isinstance(content, dict):
        return content
    if "max_req_input_len" in content:
        content = {key: content[key] for key in KEPT_INFO if key in content}
    kept = {}
    for key, value in content.items():
        if key in ("model_path", "tokenizer_path", "served_model_name", "root", "created", "id", "revision"):
            kept[key] = f"<{type(value).__name__}>"
        elif key in TIMES or (key.endswith(("_ts", "_time", "_latency")) and isinstance(value, float)):
            kept[key] = "<float>"
        elif key == "message" and isinstance(value, str):
            kept[key] = value.split("\n\n")[0]  # what follows names a file of the server's
        else:
            kept[key] = scrubbed(value)
    return kept


def duplicate(url: str) -> dict[str, Any]:
    """The answer to a request whose `rid` is still in flight."""
    answers: list[dict[str, Any]] = []
    first = generate("first", long(64), top={"rid": "f" * 32}, max_new_tokens=800)
    second = generate("second", long(64), top={"rid": "f" * 32}, max_new_tokens=1)
    thread = threading.Thread(target=lambda: answers.append(send(url, first)))
    thread.start()
    while thread.is_alive() and all(answer["status"] == 200 for answer in answers):
        answers.append(send(url, second))
    thread.join()
    return next(answer for answer in answers if answer["status"] != 200)


def main() -> None:
    """Ask everything and keep the answers."""
    url, aux = sys.argv[1].rstrip("/"), "aux" in sys.argv[2:]
    answers = {case.name: send(url, case) for case in CASES if not aux or case.name in AUX_CASES}
    if not aux:
        answers["duplicate rid"] = duplicate(url)
    lines = (f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in answers.items())
    RECORDED.mkdir(exist_ok=True)
    out = RECORDED / ("sglang_aux.json" if aux else "sglang.json")
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
