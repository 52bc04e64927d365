"""The command `storage`: says what a store holds, checks it, compacts it. The work is done in
`info.py`, `verify.py` and `compact.py`, which are imported only when their command runs.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from storage.cli_errors import run_command
from storage.errors import UsageError
from storage.progress import Progress
from storage.run import DEFAULT_OUTPUT_DIR

if TYPE_CHECKING:
    from storage.compact import CompactReport
    from storage.info import Info
    from storage.verify import Report

_SHOWN = 20
"""Problems that are printed one by one; `--json` has them all."""

LEAST_KEPT_HOURS = 0.1
"""Least time that replaced segments are kept: longer than any listing takes, see `replaced.py`."""

_COMPACT_EXAMPLES = """\b
Examples:
  storage compact eyas-data
  storage compact eyas-data --keep-hours 0.1   # later: free the room of what was replaced
  storage compact eyas-data --json | jq .folders
"""

_FOLDER = click.Path(path_type=Path)


def _store(command: Callable[..., Any]) -> Callable[..., Any]:
    """The store's folder, as an argument or as `producer` takes it."""
    option = click.option(
        "--output-dir",
        type=_FOLDER,
        envvar="EYAS_OUTPUT_DIR",
        metavar="DIR",
        help="The same as PATH.  [env var: EYAS_OUTPUT_DIR]",
    )
    return click.argument("path", required=False, type=_FOLDER)(option(command))


_json = click.option(
    "--json",
    "as_json",
    is_flag=True,
    envvar="EYAS_JSON",
    help="Print JSON.  [env var: EYAS_JSON; default: off]",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """Look into the store that a run writes. PATH is its folder, else EYAS_OUTPUT_DIR, else `eyas-data`."""


@group.command("info")
@_store
@_json
def info_command(path: Path | None, output_dir: Path | None, as_json: bool) -> None:
    """Say what the store holds: run, datasets, counts, tokens, bytes."""
    folder = _folder(path, output_dir)
    with Progress("reading"):
        from storage.info import info

        found = info(folder)
    click.echo(json.dumps(found.to_json(), indent=2) if as_json else _info_text(found))


@group.command("verify")
@_store
@_json
@click.option(
    "--threads",
    type=click.IntRange(1, 64),
    envvar="EYAS_THREADS",
    help="Segments read at once.  [env var: EYAS_THREADS; default: one a core]",
)
def verify_command(path: Path | None, output_dir: Path | None, as_json: bool, threads: int | None) -> int:
    """Read every byte and compare the outcomes with what the run wants.

    Ends with 0 when all is well and complete, with 1 when something is wrong or missing. A dead
    letter is an outcome: it leaves nothing missing, and is counted in the last line.
    """
    folder = _folder(path, output_dir)
    with Progress("verifying") as progress:
        from storage.verify import verify

        report = verify(folder, progress, threads)
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else _verify_text(report))
    return 0 if report.ok else 1


@group.command("compact", epilog=_COMPACT_EXAMPLES)
@_store
@_json
@click.option(
    "--keep-hours",
    type=click.FloatRange(min=LEAST_KEPT_HOURS),
    default=24.0,
    envvar="EYAS_KEEP_HOURS",
    help="How long segments that were merged into others are kept for those who read them without "
    f"looking again, at least {LEAST_KEPT_HOURS}.  [env var: EYAS_KEEP_HOURS; default: 24]",
)
def compact_command(path: Path | None, output_dir: Path | None, as_json: bool, keep_hours: float) -> int:
    """Merge small segments into few big ones, while others read and write.

    Drops states that are stored twice and failures that were made good. Deletes what an earlier
    compaction has replaced. May be stopped at any moment and run again.

    Ends with 0 when all was compacted, with 1 when a damaged segment had to be left as it is.
    """
    folder = _folder(path, output_dir)
    with Progress("compacting") as progress:
        from storage.compact import compact

        report = compact(folder, progress, kept_s=keep_hours * 3600)
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else _compact_text(report))
    return 1 if any(one.left for one in report.folders) else 0


def main() -> None:
    """Run the command line and leave with its exit status."""
    sys.exit(run_command(group, "storage"))


def _folder(path: Path | None, output_dir: Path | None) -> Path:
    """The argument, which is nearer than a variable that may have set the option; else `producer`'s default.

    Raises `UsageError` when nothing is named and no run lies where it would by default.
    """
    folder = path or output_dir or Path(DEFAULT_OUTPUT_DIR)
    if path is None and output_dir is None and not (folder / "run.json").exists():
        command = click.get_current_context().info_name
        raise UsageError(
            f"which store? none is named, and there is no `{folder}` here",
            code="path.missing",
            hint=f"give its folder, `storage {command} PATH`, or set EYAS_OUTPUT_DIR",
        )
    return folder


def _info_text(found: "Info") -> str:
    columns = "{:<20} {:>9} {:>9} {:>9} {:>6} {:>13} {:>6}"
    rows = [("dataset", "prompts", "responses", "stored", "dead", "tokens", "cut")] + [
        (d.name, d.prompts, d.responses, d.stored, d.dead, d.sample_tokens, f"{d.truncated:.1%}")
        for d in found.datasets
    ]
    return "\n".join(
        [
            f"store     {found.path}",
            f"run       {found.run}",
            f"model     {found.model}",
            f"states    {found.states}, capture {found.capture or 'none'}",
            "",
            *(columns.format(*row) for row in rows),
            *(
                f"{dataset.name}: {count} rows dropped: {reason}"
                for dataset in found.datasets
                for reason, count in sorted(dataset.dropped.items())
            ),
            "",
            *(
                f"{kind:<10} {found.segments[kind]:>6} segments {size_text(size):>10}"
                for kind, size in found.bytes.items()
            ),
            *(
                [
                    f"{'replaced':<10} {found.replaced_segments:>6} segments "
                    f"{size_text(found.replaced_bytes):>10}, merged into others, deleted a day later"
                ]
                if found.replaced_segments
                else []
            ),
            *(_checks_text(found) if found.checks else ()),
        ]
    )


def _checks_text(found: "Info") -> list[str]:
    lines = [""]
    for capture, checks in found.checks.items():
        lines.append(f"checks of {capture}: {checks}")
        lines += [f"  not checked: {reason}" for reason in checks.skipped]
        lines += [f"  alarm {alarm}" for alarm in checks.alarms]
    return lines


def _verify_text(report: "Report") -> str:
    counts = ", ".join(f"{count} {kind}" for kind, count in report.samples.items())
    shown = report.problems[:_SHOWN]
    count = len(report.problems)
    faults = [f"{count} problem{'s' if count > 1 else ''}"] if count else []
    faults += [] if report.complete else ["not complete"]
    return "\n".join(
        [
            f"run {report.run}: {report.segments} segments, {size_text(report.bytes)}, {counts}",
            *(
                f"{dataset.name}: {dataset.wanted} wanted, {dataset.done} done, {dataset.failed} dead, "
                f"{dataset.missing} missing{'' if dataset.read else ', not read to the end'}"
                for dataset in report.datasets
            ),
            *(f"note: {note}" for note in report.notes),
            *(f"problem {p.code}: {f'{p.segment} {p.id}'.strip()}: {p.message}" for p in shown),
            *([f"and {count - _SHOWN} more: see `--json`"] if count > _SHOWN else []),
            _verdict(report, faults),
        ]
    )


def _verdict(report: "Report", faults: list[str]) -> str:
    """The last line; dead letters are outcomes, so they change no exit status, and are never hidden."""
    failed, wanted = (sum(getattr(d, name) for d in report.datasets) for name in ("failed", "wanted"))
    verdict = "all ok" if report.ok else ", ".join(faults)
    if not failed:
        return verdict
    how = "`producer status --failed` says why"
    if failed == wanted:
        return f"{verdict}, but nothing to train on: all {wanted} wanted are dead letters; {how}"
    return f"{verdict}; {failed} of {wanted} wanted are dead letters: {how}"


def _compact_text(report: "CompactReport") -> str:
    lines = []
    for one in report.folders:
        sizes = f"{size_text(one.bytes_before)} → {size_text(one.bytes_after)}"
        lines.append(
            f"{one.folder:<20} {one.segments_before:>6} → {one.segments_after} segments, {sizes}"
            + (f", {one.merged} merged" if one.merged else "")
            + (f", {one.repeated_states} states stored twice dropped" if one.repeated_states else "")
            + (f", {one.made_good} failures made good dropped" if one.made_good else "")
        )
        lines += [f"left as it is: {why}" for why in one.left]
    if report.deleted_segments:
        lines.append(
            f"deleted {report.deleted_segments} replaced segments, {size_text(report.deleted_bytes)}"
        )
    if report.waiting_segments:
        lines.append(
            f"{report.waiting_segments} replaced segments, {size_text(report.waiting_bytes)}, are kept for "
            "who reads them; the next compaction or a sink deletes them when their time is over"
        )
    if not any(one.merged for one in report.folders):
        lines.append("nothing to merge")
    return "\n".join(lines)


def size_text(size_bytes: int) -> str:
    """`1.5 GB`, `320 kB`: powers of ten, as disks are sold."""
    size, unit = float(size_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{size:.3g} {unit}"


if __name__ == "__main__":
    main()
