import os

# Waiting OpenMP threads spin, and with several ranks on few cores they starve the ones that work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from spurline.testing.pytest_plugin import ranks

__all__ = ["ranks"]
