"""A wall clock that can be moved from outside: Python imports this before anything else of the process.

`EYAS_TEST_CLOCK` names a file with the seconds by which the clock is off. Monotonic clocks and the kernel's
file times stay right, as when somebody sets a machine's clock. (libfaketime cannot do it: under it
`time.sleep` fails with EINVAL, since Python sleeps until a moment of the monotonic clock.)
"""

import os
import time
from contextlib import suppress
from pathlib import Path

LOOK_S = 0.1

if "EYAS_TEST_CLOCK" in os.environ:
    _right, _file = time.time, Path(os.environ["EYAS_TEST_CLOCK"])
    _off, _looked = 0.0, 0.0

    def _wall_clock() -> float:
        global _off, _looked
        now = time.monotonic()
        if now - _looked > LOOK_S:
            _looked = now
            with suppress(OSError, ValueError):  # being written: the last value holds
                _off = float(_file.read_text())
        return _right() + _off

    time.time = _wall_clock
