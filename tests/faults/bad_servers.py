"""Servers that die, hang, refuse, are slow, spoil their replies, or come back as another."""

from collections.abc import Callable, Iterator, Sequence

from tests.faults.cluster import Cluster, until
from tests.faults.fault import Fault, Stage
from tests.faults.proxy import Mode, Proxy
from tests.faults.spoiling import ALL
from workers.board.processes import ServerState

SPOILT_S = 8.0


def all_faults(cluster: Cluster) -> Iterator[Fault]:
    for number, proxy in enumerate(cluster.proxies):
        back = takes_calls(proxy.url)
        one = f"engine{number + 1}"
        yield Fault(kind="server dead", victim=one, run=dead(number), is_back=back)
        yield Fault(kind="server another", victim=one, run=another(number), is_back=back, weight=0.5)
        yield Fault(kind="server hanging", victim=one, run=behaving(number, "hang"), is_back=back)
        yield Fault(kind="server 503", victim=one, run=behaving(number, "unavailable"), is_back=back)
        yield Fault(kind="server slow", victim=one, run=behaving(number, "slow"), is_back=back)
    yield Fault(kind="all servers gone", victim="", run=all_gone)
    yield Fault(kind="all servers hanging", victim="", run=all_hang, weight=0.5)
    yield Fault(kind="connections to servers cut", victim="", run=cut)
    for way in ALL:
        yield Fault(kind=f"reply spoiled: {way}", victim="", run=spoiling((way,)), weight=0.5)
    yield Fault(kind="replies spoiled in every way", victim="", run=spoiling(ALL))


def dead(number: int, seconds: float | None = None) -> Callable[[Stage], None]:
    """Killed, and down for a while."""

    def run(stage: Stage) -> None:
        name = stage.cluster.engines[number]
        stage.cluster.supervisor.hold(name)
        stage.last(stage.dice.choice((2.0, 10.0, 30.0)) if seconds is None else seconds)
        stage.cluster.supervisor.release(name)
        listens(stage.cluster, number)

    return run


def another(number: int, seconds: float = 15.0) -> Callable[[Stage], None]:
    """Back under the same address with another model, and later with its own."""

    def run(stage: Stage) -> None:
        cluster, name = stage.cluster, stage.cluster.engines[number]
        own = cluster[name].command
        cluster.supervisor.hold(name)
        cluster[name].command = [*own, "--served-model-name", "another", "--context-length", "64"]
        cluster.supervisor.release(name)
        stage.last(seconds)
        cluster.supervisor.hold(name)
        cluster[name].command = own
        cluster.supervisor.release(name)
        listens(cluster, number)

    return run


def behaving(number: int, mode: Mode, seconds: float | None = None) -> Callable[[Stage], None]:
    """One server behaves so for a while; connections that hang are broken at the end."""

    def run(stage: Stage) -> None:
        lasts = stage.dice.choice((5.0, 20.0, 45.0)) if seconds is None else seconds
        misbehave([stage.cluster.proxies[number]], mode, stage, lasts)

    return run


def all_gone(stage: Stage) -> None:
    """Nothing listens at any address."""
    for proxy in stage.cluster.proxies:
        proxy.refuse()
    stage.last(stage.dice.choice((5.0, 25.0)))
    for proxy in stage.cluster.proxies:
        proxy.accept()


def all_hang(stage: Stage) -> None:
    """Long enough to be found out: a look every 30 s, three strikes."""
    misbehave(stage.cluster.proxies, "hang", stage, 130.0)


def misbehave(proxies: Sequence[Proxy], mode: Mode, stage: Stage, seconds: float) -> None:
    for proxy in proxies:
        proxy.mode = mode
    stage.last(seconds)
    for proxy in proxies:
        proxy.mode = "pass"
        if mode == "hang":
            proxy.drop()


def cut(stage: Stage) -> None:
    """Every call's connection broken while the servers live."""
    for proxy in stage.cluster.proxies:
        proxy.drop()


def spoiling(ways: Sequence[str], seconds: float = SPOILT_S) -> Callable[[Stage], None]:
    """Half of all replies spoiled for a while, those for one order never a third time."""

    def run(stage: Stage) -> None:
        for proxy in stage.cluster.proxies:
            proxy.spoils = tuple(ways)
        stage.last(seconds)
        for proxy in stage.cluster.proxies:
            proxy.spoils = ()

    return run


def listens(cluster: Cluster, number: int) -> None:
    """Until the server's process, restarted by hand, is listening: the end of its outage."""
    process = cluster[cluster.engines[number]]
    pid = process.pid
    until(
        lambda: process.pid != pid or process.text().count("engine listening") > process.restarts,
        f"{process.name} listens",
    )


def takes_calls(url: str) -> Callable[[Stage], bool]:
    """Whether some lane has calls in flight there."""

    def is_back(stage: Stage) -> bool:
        seen = stage.cluster.glance()
        servers = [s for p in (seen.processes if seen else ()) for s in p.servers]
        return any(s.url == url and s.state is ServerState.UP and s.in_flight for s in servers)

    return is_back
