"""One thread for every process of the tests: tests share the cores with each other.

Products as small as theirs wait for a second thread longer than they take.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
