"""Whether what was shown of a job that has ended is what its store holds."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

import storage
from tests.browser.job import SAMPLES, Job

Sums = dict[tuple[str, frozenset[tuple[str, str]]], float]


def check_agreement(job: Job, early: str, late: str) -> None:
    """`early` and `late` are scrapes: before the end and after it."""
    sums = sums_of(late)
    for key, value in sums_of(early).items():
        assert sums[key] >= value, key
    samples = storage.open(job.folder / "eyas-data")
    assert len(samples) == sum(SAMPLES.values())
    made = [samples.sample(at) for at in range(len(samples))]
    wasted = sum(value for (name, _), value in sums.items() if name == "eyas_wasted_calls_total")
    if not wasted:  # a call made twice counts twice
        output = sum(len(one.tokens) - one.prompt_length for one in made if one.finish != "given")
        assert tokens(sums, "output") == output
        prompt = sum(one.prompt_length for one in made if one.finish != "given")
        assert tokens(sums, "prompt") == prompt
        assert tokens(sums, "captured") == sum(one.states.shape[0] for one in made)
    status = job.status()
    assert sum(one["tokens"] for one in status["datasets"]) == sum(len(one.tokens) for one in made)
    # Measured each few seconds.
    job.until(lambda status: status["stored_bytes"] == segment_bytes(job.folder / "eyas-data"))


def segment_bytes(store: Path) -> int:
    """All files of all segments."""
    return sum(
        path.stat().st_size
        for path in store.rglob("*")
        if path.is_file() and any(part.startswith("s-") for part in path.relative_to(store).parts)
    )


def sums_of(text: str) -> Sums:
    """The counters of a scrape."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def tokens(sums: Sums, kind: str) -> float:
    """Tokens of one kind over all lanes."""
    return sum(
        value
        for (name, labels), value in sums.items()
        if name == "eyas_tokens_total" and ("kind", kind) in labels
    )
