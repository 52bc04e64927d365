"""The checks that a capture's segments hold, followed as they are committed."""

from collections.abc import Iterator

from storage.catalog import Catalog
from storage.checks import ATTRIBUTE, ChecksSummary, read_check, summarize
from storage.sample import Check
from storage.segment import Segment


class CheckLog:
    """The checks in the states segments of one folder, followed as they are committed."""

    def __init__(self) -> None:
        self._catalog: Catalog | None = None
        self._read = 0
        self._checks: dict[tuple[str, str], Check] = {}
        self._summary: ChecksSummary | None = None

    def follow(self, catalog: Catalog | None) -> ChecksSummary | None:
        """What all checks come to, those of segments that the catalog has seen since included.

        None while no sample was checked. A sample that is stored twice counts once, so it does
        not matter which segments a compaction has hidden.
        """
        if catalog is not self._catalog:
            self._catalog, self._read, self._checks, self._summary = catalog, 0, {}, None
        if catalog is None:
            return None
        for segment in catalog.segments[self._read :]:
            found = list(read_checks(segment))
            self._checks.update(((id_hex, digest), check) for id_hex, digest, check in found)
            if found:
                self._summary = None
        self._read = len(catalog.segments)
        if self._summary is None and self._checks:
            self._summary = summarize((id_hex, check) for (id_hex, _), check in self._checks.items())
        return self._summary


def read_checks(segment: Segment) -> Iterator[tuple[str, str, Check]]:
    """Id, digest (hex) and check of each sample of this segment that was checked.

    What cannot be read is passed over: a check is no part of its sample.
    """
    for content in segment.attributes.get(ATTRIBUTE, ()):
        try:
            yield str(content["id"]), str(content["digest"]), read_check(content)
        except (KeyError, TypeError, ValueError):
            continue
