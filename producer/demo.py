"""`producer demo`: the whole job on this machine, from bundled prompts to a verified store.

It types the commands a person would (`up --engine`, `enqueue`, `watch`, `storage verify`) with a Redis,
a state folder and settings of its own, so that nothing else on the machine is touched, and takes all of
it down again. Only the store stays, what went wrong in it too; after an interruption not even that.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click

from producer.machine.bring_up import bring_up, import_path
from producer.machine.processes import identity
from producer.machine.services import Request
from producer.machine.take_down import take_down
from producer.machine.up_state import StateFolder, UpState
from producer.talk import say
from producer.watch import follow
from producer.words import duration
from storage.errors import EyasError, UsageError
from workers.broker.queues import Lane
from workers.config import Config

MAX_SAMPLES = 40
"""Of each bundled dataset: all steps are seen, and an idle laptop is done in half a minute."""
SPOOL_BYTES = 4_000_000_000

READ_IT = """\
    import storage
    samples = storage.open({path!r})
    sample = samples.sample(0)
    print(len(samples), sample.tokens.shape, sample.states.shape)"""


@click.command("demo")
@click.option(
    "--output-dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    metavar="DIR",
    help="Where the store shall be.  [default: a new temporary folder]",
)
@click.option(
    "--max-samples",
    "samples",
    type=click.IntRange(min=1),
    default=MAX_SAMPLES,
    show_default=True,
    metavar="N",
    help="Of each bundled dataset, the first N prompts.",
)
def command(folder: Path | None, samples: int) -> int:
    """Run the whole job on this machine with a tiny model and verify the store.

    Needs no GPU and no Redis. Settings, variables and a run of yours are left alone.
    """
    began = time.monotonic()
    if folder is not None:
        _check_free(folder)
    say("demo: bundled prompts → Celery lanes → embedded engine → sink → Zarr store, all on this machine")
    output = folder.absolute() if folder else None
    with _interruptible(), _store_folder(output) as store, _state_folder() as state_folder:
        state = _bring_up(state_folder, store)
        environment = _environment(state, state_folder)
        _run(["-m", "producer.cli", *_enqueue(state, store, samples)], environment, state_folder)
        assert state.redis_url is not None
        status = follow(state.redis_url, store)
        say("verifying what is stored")
        _run(["-m", "storage.cli", "verify", str(store)], environment, state_folder)
        if status:
            raise EyasError("some samples failed", code="demo.failed", hint=f"storage info {store}")
    say(f"done in {duration(time.monotonic() - began)}; everything is stopped again, the store stays")
    click.echo(f"the store is {store}\nread it with\n\n{READ_IT.format(path=str(store))}")
    return 0


def _check_free(folder: Path) -> None:
    """Raises `UsageError` when the folder holds a run, before anything is started for one of ours."""
    if (folder / "run.json").exists():
        raise UsageError(
            f"`{folder}` holds a run already",
            code="demo.folder",
            hint="name another with `--output-dir`, or leave it out for a new one",
        )


def _bring_up(folder: StateFolder, store: Path) -> UpState:
    spool = folder.path / "spool"
    config = Config(
        redis_url="",
        output_dir=store,
        node="demo",
        spool_dir=spool,
        spool_max_bytes=SPOOL_BYTES,
        server_api_key=None,
    )
    request = Request(
        redis_url=None,
        output_dir=store,
        spool_dir=spool,
        owns_spool=True,
        node=config.node,
        capacity=dict.fromkeys((lane.value for lane in Lane), 32),
        flower=False,
        flower_port=0,
        flower_login=False,
        engine=True,
        engine_port=0,
        engine_pace_ms=(0.0, 0.0),
        owner=identity(os.getpid()),
    )
    return bring_up(request, config, folder, _without_settings(os.environ))


def _enqueue(state: UpState, store: Path, samples: int) -> list[str]:
    assert state.engine_url is not None
    return [
        *("enqueue", "--server-url", state.engine_url, "--output-dir", str(store)),
        # following is ours to do: Ctrl-C ends the demo, and does not detach from it
        "--no-watch",
        *("--max-samples", str(samples), "--short-max-tokens", "256", "--long-max-tokens", "256"),
    ]


def _environment(state: UpState, folder: StateFolder) -> dict[str, str]:
    assert state.redis_url is not None
    environ = _without_settings(os.environ)
    return environ | {
        "PYTHONPATH": import_path(environ),
        "PYTHONUNBUFFERED": "1",
        "EYAS_STATE_DIR": str(folder.path),
        "EYAS_REDIS_URL": state.redis_url,
    }


def _without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what is said there for other runs."""
    return {
        name: value for name, value in environ.items() if not name.startswith("EYAS_") or name == "EYAS_DEBUG"
    }


def _run(arguments: list[str], environment: Mapping[str, str], folder: StateFolder) -> None:
    """One of our own commands, its output ours. Raises `EyasError` unless it ends with 0."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        cwd=folder.path,  # where no settings file of the caller's lies
        stdin=subprocess.DEVNULL,
    )
    try:
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if status:
        raise EyasError(f"`{' '.join(arguments[1:3])}` ended with status {status}", code="demo.failed")


@contextmanager
def _state_folder() -> Iterator[StateFolder]:
    """A folder for what `up` keeps; when the block is left everything is down and the folder gone."""
    folder = StateFolder(Path(tempfile.mkdtemp(prefix="eyas-demo-state-")))
    try:
        yield folder
    except EyasError as error:
        kept = Path(tempfile.mkdtemp(prefix="eyas-demo-logs-"))
        shutil.copytree(folder.logs, kept, dirs_exist_ok=True)
        error.hint = f"less {kept}/*.log"
        raise
    finally:
        # A second Ctrl-C is at once: the supervisor takes the rest down when we, its owner, are gone.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        say("stopping everything")
        take_down(folder)
        shutil.rmtree(folder.path, ignore_errors=True)


@contextmanager
def _store_folder(wanted: Path | None) -> Iterator[Path]:
    """The store's folder. One that this call made goes again when it was interrupted, or holds nothing yet;
    what went wrong later is looked for in it.
    """
    store = wanted or Path(tempfile.mkdtemp(prefix="eyas-demo-"))
    made = wanted is None or not wanted.exists()
    try:
        yield store
    except BaseException as error:
        if made and (isinstance(error, KeyboardInterrupt) or not (store / "run.json").exists()):
            shutil.rmtree(store, ignore_errors=True)
        elif made:
            say(f"the store is kept for a look: {store}")
        raise


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM takes everything down as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    interrupts = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupts)
