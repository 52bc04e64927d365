"""The servers of a run as the command line finds them: their addresses, who answers, who is unfit.

Facts only: no server is sent a prompt. What a server's facts mean for the run is judged in
`workers/sglang/suitability.py`.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from producer.options import DEFAULT_SERVER_URL
from storage.errors import UnavailableError
from storage.run import RunSpec
from storage.settings import RunSettings
from workers.config import read_state
from workers.sglang.facts import ServerFacts, fetch_facts
from workers.sglang.suitability import check_suitable, needs_of


def addresses(
    said: Mapping[str, Any], before: RunSettings | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Generating and capturing servers: those named, else those of the run before, else this machine's
    embedded engine, else SGLang's own port.

    The generating servers capture too where no others are named. Raises `UsageError` for what is
    no address.
    """
    from workers.sglang.address import server_url

    named, captures = tuple(said.get("server_url", ())), tuple(said.get("capture_server_url", ()))
    urls = named or (before.server_urls if before else ())
    urls = urls or (read_state().get("engine_url") or DEFAULT_SERVER_URL,)
    if not captures:
        follow = before is None or before.capture_urls == before.server_urls
        captures = urls if before is None or follow else before.capture_urls
    # one server named twice is one server with one limit
    return tuple(dict.fromkeys(map(server_url, urls))), tuple(dict.fromkeys(map(server_url, captures)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """The servers that answered just now."""

    generating: Mapping[str, ServerFacts]
    """URL → facts."""
    capturing: Mapping[str, ServerFacts]
    away: Mapping[str, str]
    """URL → why it gave no answer."""

    @property
    def any(self) -> ServerFacts | None:
        """One that answered: a generating one before a capturing one."""
        return next(iter([*self.generating.values(), *self.capturing.values()]), None)

    @property
    def for_states(self) -> ServerFacts | None:
        """One that will give the states."""
        return next(iter([*self.capturing.values(), *self.generating.values()]), None)


def ask_servers(urls: Sequence[str], capture_urls: Sequence[str], api_key: str | None) -> Servers:
    """The facts of all that answer, asked at once.

    Raises `UnsuitableError` for one that answers and is no SGLang server, or refuses the key.
    """
    every = list(dict.fromkeys([*urls, *capture_urls]))
    answers: dict[str, ServerFacts] = {}
    away: dict[str, str] = {}

    def ask(url: str) -> ServerFacts | UnavailableError:
        try:
            return fetch_facts(url, api_key)
        except UnavailableError as error:
            return error

    with ThreadPoolExecutor(max_workers=min(32, len(every))) as pool:
        for url, answer in zip(every, pool.map(ask, every), strict=True):
            if isinstance(answer, ServerFacts):
                answers[url] = answer
            else:
                away[url] = answer.message
    return Servers(
        generating={url: answers[url] for url in urls if url in answers},
        capturing={url: answers[url] for url in capture_urls if url in answers},
        away=away,
    )


def require_one(servers: Servers) -> ServerFacts:
    """One server that answered. Raises `UnavailableError` when none did."""
    if servers.any is None:
        raise UnavailableError(
            "; ".join(servers.away.values()),
            code="server.away",
            hint="start SGLang, or name it with `--server-url`; without a GPU: `producer up --engine`",
        )
    return servers.any


def check_servers(servers: Servers, spec: RunSpec, settings: RunSettings) -> None:
    """Raises `UnsuitableError` for the first server that cannot be used for the run."""
    for url, facts in servers.generating.items():
        check_suitable(facts, needs_of(spec, settings, captures=url in settings.capture_urls), url)
    for url, facts in servers.capturing.items():
        check_suitable(facts, needs_of(spec, settings, captures=True), url)
