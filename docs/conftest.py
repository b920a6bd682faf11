"""Which pages are run where: Keras takes its framework from the environment, once a process."""

import os

collect_ignore = [] if "KERAS_BACKEND" in os.environ else ["keras.md"]
