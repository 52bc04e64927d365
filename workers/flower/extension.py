"""Gives Flower its Throughput page and metrics before it starts. The one place that knows Flower's inside.

Flower has no plugins. What is used: `flower.urls.handlers` and `.settings`, which its command
reads after the app was loaded; Tornado's options, whose defaults it reads then too; and its
navigation bar, a template into which one entry is put as it is loaded.
"""

import hashlib
from pathlib import Path
from typing import Any

from tornado.options import options
from tornado.template import Loader, Template
from tornado.web import url

from workers.flower.settings import DEFAULTS

HERE = Path(__file__).parent
TEMPLATES, STATIC = HERE / "templates", HERE / "static"
NAVIGATION = "navbar.html"
FIRST_ENTRY = '<ul class="app-nav navbar-nav">'
"""Where the entries of Flower's navigation begin; the tests say when a new Flower has it otherwise."""
ENTRY = """
        <li class="nav-item">
          <a class="nav-link{% if active_tab == 'throughput' %} active{% end %}"
            href="{{ reverse_url('throughput') }}"
            {% if active_tab == 'throughput' %}aria-current="page"{% end %}>Throughput</a>
        </li>"""


class Templates(Loader):
    """Flower's templates, ours beside them, and the navigation with one entry more."""

    def _create_template(self, name: str) -> Template:
        own = TEMPLATES / name
        path = own if own.is_file() else Path(self.root) / name
        source = path.read_text(encoding="utf-8")
        if name == NAVIGATION:
            source = source.replace(FIRST_ENTRY, FIRST_ENTRY + ENTRY, 1)
        return Template(source, name=name, loader=self)


def extend(redis_url: str) -> None:
    """Let the Flower that is about to start have the page, the metrics and our defaults."""
    import flower.options  # noqa: F401 - defines the options
    from flower import urls

    from workers.flower.looking import Looker
    from workers.flower.pages import Data, FlowersMetrics, Metrics, OwnFiles, Page, Past

    for name, value in DEFAULTS.items():
        setattr(options, name, value)
    looker = {"looker": Looker(redis_url)}
    ours: list[Any] = [
        url(r"/throughput", Page, {"version": version()}, name="throughput"),
        url(r"/throughput/data", Data, looker, name="throughput-data"),
        url(r"/throughput/history", Past, looker, name="throughput-history"),
        url(r"/throughput/static/(.*)", OwnFiles, {"path": str(STATIC)}, name="throughput-static"),
        url(r"/throughput/metrics", Metrics, looker, name="throughput-metrics"),
        url(r"/metrics", FlowersMetrics),
    ]
    # Before Flower's own, the last of which answers every path with 404.
    urls.handlers[:0] = ours
    urls.settings["template_loader"] = Templates(urls.settings["template_path"])


def version() -> str:
    """Changes with our files, so that a browser asks for them anew."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(STATIC.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()
