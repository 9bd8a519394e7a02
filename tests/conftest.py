"""What holds for every test: a busy machine changes no result.

One thread a process, because tests share the cores with each other, and products as small as
theirs wait for a second thread longer than they take. No deadlines for drawn examples.
"""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")
