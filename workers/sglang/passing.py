"""How states reach a sink from a server with the plugin: a shared folder, the server's own sink, or HTTP.

A lane process keeps one `Passing` and tells it what it finds out. The copying is in `fetching.py`.

The rule, first that holds:

    FOLDER  the server writes into this process's spool: nothing is copied
    SINK    a sink of the server's node lives: it reads the file where it lies, and commits from there
    HTTP    else: fetched into this process's spool, and committed by the sink of this node

So a GPU node with a sink sends its states once, to the store, however many lanes elsewhere ask for them;
and one without (a container that has only SGLang) needs nothing but the plugin.
"""

from enum import StrEnum

from storage.spool import FETCHED


class Way(StrEnum):
    """How the states of one call pass."""

    FOLDER = "folder"
    SINK = "sink"
    HTTP = "http"


class Passing:
    """What one lane process knows of others' spools; safe from any thread."""

    def __init__(self) -> None:
        self.sinks: frozenset[str] = frozenset()
        """Nodes with a living sink; replaced whole."""
        self._apart: frozenset[str] = frozenset()
        """Addresses of servers of this node that write to another folder, as two containers do."""

    def way(self, url: str, node: str, own: str) -> Way:
        """How states pass that the server at this address writes to the spool of `node`."""
        if node == own:
            return Way.HTTP if url in self._apart else Way.FOLDER
        return Way.SINK if node in self.sinks else Way.HTTP

    def found(self, url: str, *, apart: bool) -> None:
        """Whether the server writes to another folder than this process's, though of one node."""
        self._apart = self._apart | {url} if apart else self._apart - {url}


def name_there(name: str, way: Way) -> str:
    """What a file is called in the server's spool."""
    return name + FETCHED if way is Way.HTTP else name
