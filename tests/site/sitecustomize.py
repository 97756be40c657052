"""Run at the start of every Python that the tests start: its garbage collector looks less often.

Importing torch and Lightning makes some hundred thousand objects that stay. To look through them again and again while
they are made, and once more when the process ends, takes two fifths of what a rank costs that trains little.
"""

import atexit
import gc

gc.set_threshold(100_000, 50, 1000)
atexit.register(gc.freeze)
