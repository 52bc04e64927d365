"""Redis away: restarted, killed, standing still, its clients dropped, its data lost."""

import shutil
import signal
from collections.abc import Callable, Iterator

from redis import RedisError

from tests.faults.fault import Fault, Stage
from tests.faults.killing import STOPS_S

OUTAGES_S = (12.0, 60.0)
PUBLISHING_WITHIN_S = 20.0


def all_faults() -> Iterator[Fault]:
    for seconds in OUTAGES_S:
        yield Fault(kind=f"Redis down {seconds:.0f} s", victim="", run=down(seconds))
        yield Fault(kind=f"Redis standing {seconds:.0f} s", victim="", run=standing(seconds), weight=0.5)
    yield Fault(kind="Redis down as results are published", victim="", run=down_as_results_come)
    yield Fault(kind="Redis restarted", victim="", run=restart)
    yield Fault(kind="all clients dropped", victim="", run=drop_clients, weight=2)
    yield Fault(kind="Redis emptied", victim="", run=flush)
    yield Fault(kind="Redis back without its data", victim="", run=lose_data)


def down(seconds: float) -> Callable[[Stage], None]:
    """Killed and gone for so long: connections are refused."""

    def run(stage: Stage) -> None:
        stage.cluster.supervisor.hold("redis")
        stage.last(seconds)
        stage.cluster.supervisor.release("redis")

    return run


def standing(seconds: float) -> Callable[[Stage], None]:
    """Connections are accepted and nothing is answered."""

    def run(stage: Stage) -> None:
        redis = stage.cluster["redis"]
        redis.send(signal.SIGSTOP)
        stage.last(seconds)
        redis.send(signal.SIGCONT)

    return run


def down_as_results_come(stage: Stage) -> None:
    """Killed at a moment at which a result waits, and gone for 12 s while calls end."""
    for _ in range(int(PUBLISHING_WITHIN_S / 0.01)):
        if waiting_results(stage) or stage.over.wait(0.01):
            break
    down(OUTAGES_S[0])(stage)


def waiting_results(stage: Stage) -> int:
    try:
        queues = ("sink", *(f"sink.{node.name}" for node in stage.cluster.nodes))
        return sum(stage.cluster.client.llen(queue) for queue in queues)
    except (RedisError, OSError):
        return 0


def restart(stage: Stage) -> None:
    """SIGTERM, and started again at once, with its data."""
    stage.cluster.supervisor.hold("redis", signal.SIGTERM)
    stage.cluster.supervisor.release("redis")


def drop_clients(stage: Stage) -> None:
    """Every connection of a worker cut at once."""
    try:
        for sort in ("normal", "pubsub"):
            stage.cluster.client.execute_command("CLIENT", "KILL", "TYPE", sort, "SKIPME", "yes")
    except (RedisError, OSError):
        return


def flush(stage: Stage) -> None:
    """All data gone while it runs."""
    try:
        stage.cluster.client.flushall()
    except (RedisError, OSError):
        return


def lose_data(stage: Stage) -> None:
    """Killed, and back with an empty folder."""
    cluster = stage.cluster
    cluster.supervisor.hold("redis")
    shutil.rmtree(cluster.redis_folder)
    cluster.redis_folder.mkdir()
    stage.last(STOPS_S[0])
    cluster.supervisor.release("redis")
