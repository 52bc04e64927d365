"""`python -m workers.engine`: the process's edge, where the number of BLAS threads is set.

Before NumPy is imported: one thread gives the same sums every time, and many small products are no
faster with more.
"""

import os
import sys

for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"
os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")  # the cache reserves far more than it touches

from storage.cli_errors import run_command  # noqa: E402
from workers.engine.command import command  # noqa: E402

sys.exit(run_command(command, "python -m workers.engine"))
