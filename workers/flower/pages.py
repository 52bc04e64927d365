"""The addresses that Flower gains: the page, what it shows, and metrics for Prometheus.

Each derives from Flower's own handler, so its login covers it. What is shown is made in
`snapshot.py`, `series.py` and `metrics.py`; Redis is asked by `looking.py`, never on this thread.
"""

import json
from typing import Any

from flower.views import BaseHandler, monitor
from prometheus_client import CONTENT_TYPE_LATEST
from tornado.web import HTTPError, StaticFileHandler, authenticated

from workers.flower.looking import Looker

SPANS_S = {"15 min": 900, "1 h": 3600, "6 h": 21_600, "24 h": 86_400, "run": 0}
"""Spans a person may choose; 0 is the whole run."""


class Page(BaseHandler):  # type: ignore[misc]
    """The page itself: empty until its script has asked for what it shows."""

    def initialize(self, version: str) -> None:
        """`version` of the files it loads."""
        self._version = version

    @authenticated
    def get(self) -> None:
        """The page."""
        self.render("throughput.html", spans=SPANS_S, version=self._version)


class _Asked(BaseHandler):  # type: ignore[misc]
    """What needs a look at Redis."""

    def initialize(self, looker: Looker) -> None:
        """`looker` is shared by all who ask."""
        self.looker = looker

    def send(self, content: Any) -> None:
        """Answer with JSON that nobody keeps."""
        self.set_header("Content-Type", "application/json")
        self.set_header("Cache-Control", "no-store")
        self.finish(json.dumps(content, separators=(",", ":")))


class Data(_Asked):
    """What the page shows of this moment."""

    @authenticated
    async def get(self) -> None:
        """JSON of `snapshot.snapshot`."""
        self.send(await self.looker.now())


class Past(_Asked):
    """What the page's charts show."""

    @authenticated
    async def get(self) -> None:
        """JSON of `series.series` over the last `span` seconds."""
        try:
            span_s = float(self.get_argument("span", "900"))
        except ValueError:
            raise HTTPError(400, "`span` is no number of seconds") from None
        if not 0 <= span_s <= 1e9:
            raise HTTPError(400, "`span` is no number of seconds")
        self.send(await self.looker.past(span_s))


class Metrics(_Asked):
    """For Prometheus; Flower's own stay at `/metrics`."""

    @authenticated
    async def get(self) -> None:
        """The text that Prometheus scrapes."""
        self.set_header("Content-Type", CONTENT_TYPE_LATEST)
        self.finish(await self.looker.metrics())


class FlowersMetrics(monitor.Metrics):  # type: ignore[misc]
    """Flower's own metrics, which it would show to whoever asks."""

    @authenticated
    async def get(self) -> None:
        """The text that Prometheus scrapes."""
        await super().get()


class OwnFiles(StaticFileHandler):
    """Our script and style; open, as Flower's own are."""

    def set_extra_headers(self, path: str) -> None:
        """An old file beside a new page would break it."""
        self.set_header("Cache-Control", "no-cache")
        self.set_header("X-Content-Type-Options", "nosniff")
