"""What to say to a name that is none: the nearest that is, else all of them. Knows no errors."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "there are") -> str:
    """`did you mean …?`, or `there are: …` where none of the known names is near.

    Case alone never keeps a name from being the nearest.
    """
    names = list(known)
    by_case = [one for one in names if one.casefold() == name.casefold()]
    near = by_case or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean `{near[0]}`?" if near else f"{otherwise}: {', '.join(names) or 'none'}"
