"""One thread for every process of the tests: tests share the cores with each other.

Products as small as theirs wait for a second thread longer than they take.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# How long an example takes depends on the machine: it is not what the tests are about.
settings.register_profile("without-deadline", deadline=None)
settings.load_profile("without-deadline")
