"""Records what a real SGLang answers to `cases.py`, into `recorded/sglang.json`; run by hand.

    python tests/workers/engine/record_replies.py http://127.0.0.1:30000

The server runs the engine's tiny model (`python -m workers.engine --print-model-dir`) on CPU with
`--context-length 2048 --enable-return-hidden-states --chunked-prefill-size -1`. Folders, times,
addresses and keys are left out of what is kept.
"""

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES, Case, generate, long

OUT = Path(__file__).parent / "recorded" / "sglang.json"
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
    *("device", "max_queued_requests", "load_format", "revision", "page_size", "max_prefill_tokens"),
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
    first = generate("first", long(64), top={"rid": "f" * 32}, max_new_tokens=300)
    thread = threading.Thread(target=send, args=(url, first))
    thread.start()
    time.sleep(0.3)  # the first runs for over a second
    answer = send(url, generate("second", long(64), top={"rid": "f" * 32}, max_new_tokens=1))
    thread.join()
    return answer


def main() -> None:
    """Ask everything and keep the answers."""
    url = sys.argv[1].rstrip("/")
    answers = {case.name: send(url, case) for case in CASES}
    answers["duplicate rid"] = duplicate(url)
    OUT.parent.mkdir(exist_ok=True)
    lines = (f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in answers.items())
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
