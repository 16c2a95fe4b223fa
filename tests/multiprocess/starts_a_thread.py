"""Starts a thread when it is imported, as some packages do."""

import threading
import time

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
