"""The key space of Eyas in Redis: every key, its type and who writes it.

    eyas:run              string  JSON {id, fingerprint, output_dir, spec, finished}: claimed by
                                  `enqueue`, rewritten by the feeder
    eyas:settings         string  JSON `runs.RunView`: by the feeder and `enqueue`; lanes poll it
    eyas:feeder           string  who feeds: SET NX PX 15000, renewed every 5 s
    eyas:window           hash    id (16 bytes) + stage (1 byte) → dataset: published, not stored yet
    eyas:slots:<lane>     hash    "<url> <process>" → grant record, see `slots.py`
    eyas:alone            hash    "<url> <claim>" → who is to be alone there, see `alone.py`
    eyas:marks            hash    order key → deaths of servers it was in flight at, see `marks.py`
    eyas:process:<name>   string  JSON `processes.ProcessSnapshot`, 15 s to live: by the process
    eyas:facts            hash    facts id → JSON: by whoever asked the server; the sink stores them
    eyas:first_facts      hash    "<run> <url>" → JSON of the server as the run began with it, see
                                  `lane/first_facts.py`: by `enqueue`, and lanes where there is none
    eyas:board            string  JSON: the feeder's snapshot for `status` and `watch`
    eyas:tally            string  JSON `tally.Tally`: what all processes did since the run began, by
                                  the feeder
    eyas:history:<step>   stream  JSON `history.Sample` each <step> seconds, bounded: by the feeder
    eyas:wake             list    one element while the feeder is to look at once, see `wake.py`
    eyas:dropped:…        list    results of a node that is gone, for a moment, see `reconcile.py`
    eyas:garbage          list    bodies that were no message of ours, newest first, bounded

Celery's own keys lie beside them: one list a queue (`short`, `long`, `capture`, `sink`,
`sink.<node>`), `unacked`, `unacked_index`, `unacked_mutex`, `_kombu.*`. Nothing here may be
trusted against the store: Redis is a queue and a scoreboard.
"""

RUN = "eyas:run"
SETTINGS = "eyas:settings"
FEEDER = "eyas:feeder"
WINDOW = "eyas:window"
FACTS = "eyas:facts"
FIRST_FACTS = "eyas:first_facts"
BOARD = "eyas:board"
TALLY = "eyas:tally"
WAKE = "eyas:wake"
GARBAGE = "eyas:garbage"
ALONE = "eyas:alone"
MARKS = "eyas:marks"
UNACKED = "unacked"
UNACKED_INDEX = "unacked_index"

PROCESS_PREFIX = "eyas:process:"

STAGE_BYTES = {"generate": b"g", "capture": b"c"}
"""Stage → its byte in a field of `WINDOW`."""


def slots_key(lane: str) -> str:
    """The hash of one lane's grants."""
    return f"eyas:slots:{lane}"


def process_key(name: str) -> str:
    """A process's snapshot."""
    return PROCESS_PREFIX + name


def history_key(step_s: int) -> str:
    """The samples of a run, one each so many seconds."""
    return f"eyas:history:{step_s}"


def dropped_key(node: str, moment: int) -> str:
    """Where the results of a node that is gone lie while they are dropped."""
    return f"eyas:dropped:{node}:{moment}"


def window_field(prompt_id: bytes, stage: str) -> bytes:
    """The field of `WINDOW` for one order."""
    return prompt_id + STAGE_BYTES[stage]
