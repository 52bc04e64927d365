"""Fixtures of the suite on a real SGLang: one environment, one server at a time, one machine, one tally.

Servers take half a minute to start: files and tests are in an order in which few are started, and each
test asks for the one it needs.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.sglang.comparison import Reference, Tally, running_reference
from tests.sglang.environment.build import Environment, find_or_build
from tests.sglang.environment.install import install
from tests.sglang.environment.server import RealServer, running_sglang
from tests.sglang.flavours import Flavour
from tests.sglang.jobs import Office
from tests.system.machine import machine_in

HERE = Path(__file__).parent
TALLY = pytest.StashKey[Tally]()
TIMEOUT_S = 400
"""Of a test: most of it is for a start of a server on a machine that does other things too."""


SERVERS = pytest.StashKey["Servers"]()


class Servers:
    """The one server that runs; asking for another flavour ends it."""

    def __init__(self, environment: Environment, folder: Path) -> None:
        self._environment, self._folder = environment, folder
        self._running: tuple[Flavour, RealServer] | None = None
        self._stack = ExitStack()
        self._started = 0

    def get(self, flavour: Flavour) -> RealServer:
        """A running server of this flavour."""
        if self._running is not None and not self._running[1].alive:
            print("this SGLang ended by itself:", self._running[1].last_words(), sep="\n")  # noqa: T201
            self.stop()
        if self._running is None or self._running[0] != flavour:
            self.stop()
            self._started += 1
            log = self._folder / f"{self._started}-{flavour.name}.log"
            server = running_sglang(
                self._environment, *flavour.flags, log=log, environ=flavour.environ, recipe=flavour.recipe
            )
            self._running = flavour, self._stack.enter_context(server)
        return self._running[1]

    def stop(self) -> None:
        """End the one that runs."""
        self._running = None
        self._stack.close()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TALLY] = Tally()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("sglang") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests in folders below start servers of their own, which would wait for ours to end."""
    if item.path.parent != HERE and SERVERS in item.config.stash:
        item.config.stash[SERVERS].stop()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = list(config.stash[TALLY].lines())
    if lines:
        terminalreporter.section("stored rows against transformers")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def tally(request: pytest.FixtureRequest) -> Tally:
    """Where comparisons are written down."""
    return request.config.stash[TALLY]


@pytest.fixture(scope="session")
def environment() -> Environment:
    """SGLang's Python and the model; built by `make test-sglang` before the tests."""
    return find_or_build()


@pytest.fixture(scope="session")
def servers(
    environment: Environment, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Servers]:
    """Where a test gets its server."""
    it = pytestconfig.stash[SERVERS] = Servers(environment, tmp_path_factory.mktemp("servers"))
    try:
        yield it
    finally:
        it.stop()


@pytest.fixture(scope="session")
def reference(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """transformers, in SGLang's Python."""
    with running_reference(environment, tmp_path_factory.mktemp("reference")) as it:
        yield it


@pytest.fixture(scope="session")
def plugin_environ(
    environment: Environment, office: Office, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, str]:
    """For a server that shall load this tree's plugin, installed for it, and write to the machine's spool."""
    return {**install(environment, tmp_path_factory.mktemp("plugin")), **office.of_plugin}


@pytest.fixture(scope="session")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    """A machine that is up: Redis, lanes and a sink, no engine."""
    with machine_in(tmp_path_factory.mktemp("machine")) as machine:
        machine.environment |= {"EYAS_NODE": "here", "EYAS_SPOOL_DIR": str(machine.folder / "spool")}
        up = machine.up("--no-flower")
        assert up.returncode == 0, up.stderr
        yield Office(machine)
        machine.producer("down")
