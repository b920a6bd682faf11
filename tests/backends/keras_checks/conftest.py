"""What Keras, and the frameworks below it, warn of when they are used as documented."""

import os

import pytest

# Only where a framework was chosen: pytest would import them all to look for doctests.
SCRIPTS = ["check_*.py", "distribution_*.py"]
collect_ignore_glob = [] if "KERAS_BACKEND" in os.environ else SCRIPTS

NOT_OURS = (
    # Keras's variables lack an argument that numpy 2 asks for.
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning",
)


def pytest_collection_modifyitems(items):
    for item in items:
        for line in NOT_OURS:
            item.add_marker(pytest.mark.filterwarnings(line))
