"""A process that commits to a store until it is killed, saying what is acknowledged.

    python store_writer.py <store> <spool> <node> <first seed>

Every batch has prompts of its own and some that other writers commit too. A line
`responses <id>…` or `states <id>…` on stdout comes only after the commit has returned.
"""

import sys
from pathlib import Path

from store_making import make_prompts, make_response, make_states

from storage.sample import Prompt
from storage.spool import Spool
from storage.store import Store

BATCH = 6
SHARED = 2
"""Of a batch, so many prompts that every writer has."""
BATCHES = 60


def all_prompts(seeds: list[int]) -> list[Prompt]:
    """Every prompt that writers with these seeds commit."""
    prompts = make_prompts(SHARED * BATCHES, seed=0)
    for seed in seeds:
        prompts += make_prompts((BATCH - SHARED) * BATCHES, seed=seed)
    return list({prompt.id: prompt for prompt in prompts}.values())


def say(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


def main() -> None:
    path, spool_folder, node, first = sys.argv[1:]
    store, spool = Store.open(Path(path)), Spool(Path(spool_folder), node, 1 << 40)
    shared = make_prompts(SHARED * BATCHES, seed=0)
    own = make_prompts((BATCH - SHARED) * BATCHES, seed=int(first))
    say("ready")
    for number in range(BATCHES):
        prompts = [
            *shared[number * SHARED : (number + 1) * SHARED],
            *own[number * (BATCH - SHARED) : (number + 1) * (BATCH - SHARED)],
        ]
        responses = [make_response(prompt, int(first)) for prompt in prompts]
        store.commit_responses(responses)
        say("responses", *[response.id.hex() for response in responses])
        # States of the response that is visible, as a lane would be told to capture.
        visible = [store.response(prompt.id) for prompt in prompts]
        done = store.commit_states([make_states(response, spool) for response in visible], spool)
        say("states", *[states.id.hex() for states in (*done.stored, *done.duplicate)])
        for states in done.stored:
            spool.delete(states.spool)


if __name__ == "__main__":
    main()
