"""Numbers as a person reads them: `1.2 M`, `12 min`, `3 h 05 min`."""


def count(number: int) -> str:
    """A number with thin groups: `7 000`."""
    return f"{number:,}".replace(",", " ")


def big(number: float) -> str:
    """A number to three digits: `812`, `92.1 M`."""
    for unit in ("", " K", " M", " G"):
        if abs(number) < 999.5 or unit == " G":
            return f"{number:.0f}{unit}" if not unit or abs(number) >= 99.95 else f"{number:.1f}{unit}"
        number /= 1000
    raise AssertionError


def size(number: float) -> str:
    """Bytes, decimal: `1.5 GB`, `320 kB`."""
    value = big(number).replace("K", "k")
    return f"{value}B" if " " in value else f"{value} B"


def duration(seconds: float) -> str:
    """A span of time in its two largest units at most: `45 s`, `12 min`, `17 h 05 min`, `2 d 3 h`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes = round(whole / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(round(whole / 3600), 24)
    return f"{days} d {hours} h"
