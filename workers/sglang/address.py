"""A server's address in its one spelling. Nothing is asked of the server, nor of a name server."""

import re

from storage.errors import UsageError


def server_url(text: str) -> str:
    """The address in its one spelling: `http://host:port`, no slash at the end.

    Raises `UsageError` for what is not an address.
    """
    url = text.strip().rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    if not re.fullmatch(r"https?://[^\s/@?#]+(/[^\s?#]*)?", url):
        raise UsageError(
            f"`{text}` is not a server's address",
            code="server.address",
            hint="like `http://host:30000`; a key goes into EYAS_SERVER_API_KEY",
        )
    return url
