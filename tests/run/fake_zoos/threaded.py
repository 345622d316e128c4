"""A zoo that starts a thread while it is imported."""

import threading
import time

from parity.rows.family import Family, Zoo


def _warm():
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


ZOO = Zoo("threaded", "json", "pip install threaded", (Family("threaded", "fine", "detect", min, max),), _warm, str)
